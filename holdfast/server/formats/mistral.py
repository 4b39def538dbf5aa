"""Mistral's calls after `[TOOL_CALLS]`: a JSON list, or, in later models, the name and arguments of each call.

[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]
[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[CALL_ID]a1b2c3d4e[ARGS]{}
"""

from __future__ import annotations

import re

from holdfast.server.formats.objects import ObjectParser, ValueScanner

TAG, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NAME = re.compile(r"[\w.:-]+", re.ASCII)


class MistralCalls(ObjectParser):
    """Reads both forms of calls."""

    def __init__(self) -> None:
        super().__init__()
        self._scanner = ValueScanner()

    def outside(self) -> bool:
        if self.until((TAG,)) is None:
            return False
        self.state = self._tagged
        return True

    def _tagged(self) -> bool:
        if not self.skip_blanks():
            return False
        if self.rest[0] == "[":
            self.rest = self.rest[1:]
            self.state = self._item
        elif self.rest[0] == "{":
            self.state = self._item
        else:
            self.state = self._name
        return True

    def _item(self) -> bool:
        if not self.skip_blanks():
            return False
        self.begin_object()
        self.state = self._json if self.rest[0] == "{" else self.outside
        return True

    def _json(self) -> bool:
        return self.read_object(self._after_item)

    def _after_item(self) -> bool:
        if not self.skip_blanks():
            return False
        if self.rest[0] == ",":
            self.rest = self.rest[1:]
            self.state = self._item
        else:
            self.rest = self.rest.removeprefix("]")
            self.state = self.outside
        return True

    def _name(self) -> bool:
        """Read a name, and the id that may follow before the arguments."""
        found = NAME.match(self.rest)
        end = found.end() if found else 0
        if found and end == len(self.rest):
            if self.last:
                self.say(end)
            return False
        between = self.rest[end:].lstrip()
        if found and between.startswith(ID):
            start = between.find(ARGS)
            if start < 0 and not self.last:
                return False
            between = between[start:]
        between = between.removeprefix(ARGS).lstrip()
        if found and between.startswith("{"):
            self.begin(found[0])
            self.rest = between
            self._scanner = ValueScanner()
            self.state = self._arguments
        elif self.last or not found or not any(tag.startswith(between) for tag in (ID, ARGS)):
            self.state = self.outside
        else:
            return False
        return True

    def _arguments(self) -> bool:
        end, complete = self._scanner.scan(self.rest, 0)
        self.argue(self.rest[:end])
        self.rest = self.rest[end:]
        if complete:
            self.state = self.outside
        return complete
