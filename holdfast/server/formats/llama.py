"""Llama 3's calls: JSON objects, which are the whole answer or follow `<|python_tag|>`.

{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {"city": "Paris"}}
"""

from __future__ import annotations

from collections.abc import Collection

from holdfast.server.formats.objects import ObjectParser

TAG = "<|python_tag|>"


class LlamaCalls(ObjectParser):
    """Reads calls of Llama 3.

    Without the tag, JSON counts as a call only if it names a known tool.
    """

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self.state = self._start

    def _start(self) -> bool:
        at = len(self.rest) - len(self.rest.lstrip())
        if at == len(self.rest):
            if not self.last:
                return False
        elif self.rest[at] == "{":
            self._expect(self.rest[:at], self._names)
            self.rest = self.rest[at:]
            return True
        self.state = self.outside
        return True

    def outside(self) -> bool:
        if self.until((TAG,)) is None:
            return False
        self.state = self._tagged
        return True

    def _tagged(self) -> bool:
        if not self.skip_blanks():
            return False
        if self.rest[0] == "{":
            self._expect("", None)
        else:
            self.state = self.outside
        return True

    def _expect(self, opening: str, names: Collection[str] | None) -> None:
        self.begin_object(opening, names)
        self.state = self._read

    def _read(self) -> bool:
        return self.read_object(self._after)

    def _after(self) -> bool:
        """Read what follows a call: another call, or text."""
        if not self.skip_blanks():
            return False
        if self.rest[0] in ";,":
            self.rest = self.rest[1:]
            return True
        self.state = self.outside
        if self.rest[0] == "{":
            self._expect("", self._names)
        return True
