"""Llama 3's calls: JSON objects, which are the whole answer or follow `<|python_tag|>`.

{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {"city": "Paris"}}
"""

from __future__ import annotations

from collections.abc import Collection

from holdfast.server.formats.objects import CallObject
from holdfast.server.formats.parts import Parser

TAG = "<|python_tag|>"


class LlamaCalls(Parser):
    """Reads calls of Llama 3.

    Without the tag, JSON counts as a call only if it names a known tool.
    """

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._object = CallObject(self)
        self._opening = ""
        """Text before the object. It belongs to the answer if the object is not a call."""
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
        self._opening, self._object = opening, CallObject(self, names)
        self.state = self._read

    def _read(self) -> bool:
        ended = self._object.read()
        if not ended and not (self.last and not self._object.begun):
            return False
        if self._object.begun:
            self.state = self._after
        else:
            self.speak(self._opening + self._object.raw)
            self.state = self.outside
        return ended

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
