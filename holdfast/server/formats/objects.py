"""Calls as JSON objects, read piece by piece as the model writes them: the name first, then the arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

from holdfast.server.formats.parts import Parser

NAMES = ("name",)
ARGUMENTS = ("arguments", "parameters")


class ValueScanner:
    """Finds the end of a JSON value. Does not check what is inside its brackets."""

    def __init__(self) -> None:
        self.kind = ""
        """First character of the value; empty before the value begins."""
        self._depth = 0
        self._quoted = self._escaped = False

    def scan(self, text: str, at: int) -> tuple[int, bool]:
        """Read on from position `at`. Returns the position after the value, and whether the value is complete.

        A number or a word is complete only when another character follows it, which may be in a later text.
        """
        if not self.kind and at < len(text):
            self.kind = text[at]
        while at < len(text):
            character = text[at]
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._quoted = False
                    if not self._depth:
                        return at + 1, True
            elif character == '"':
                if not self._depth and self.kind != '"':
                    return at, True
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                if not self._depth:
                    return at, True
                self._depth -= 1
                if not self._depth:
                    return at + 1, True
            elif not self._depth and (character in ",:" or character.isspace()):
                return at, True
            at += 1
        return at, False


class CallObject:
    """Reads one `{"name": …, "arguments": {…}}` for a parser. Keys may come in any order, also unknown ones."""

    def __init__(self, parser: Parser, known: Collection[str] | None = None) -> None:
        """If `known` is given, an object with a name that is not in it is not a call."""
        self.begun = self.done = self.failed = False
        self.raw = ""
        """Text read before the call began. It belongs to the answer if no call follows."""
        self._parser = parser
        self._known = known
        self._place = "open"
        self._key = ""
        self._value = ""
        self._scanner = ValueScanner()
        self._early = ""
        """Arguments that came before the name."""
        self._argued = False

    def read(self) -> bool:
        """Read from the parser's `rest`. Returns whether the object has ended or failed."""
        parser, at = self._parser, 0
        text = parser.rest
        while at < len(text) and not (self.done or self.failed):
            at = self._step(text, at)
        if not self.begun:
            self.raw += text[:at]
        parser.rest = text[at:]
        return self.done or self.failed

    def _step(self, text: str, at: int) -> int:
        character = text[at]
        if self._place == "value" and (self._scanner.kind or not character.isspace()):
            return self._read_value(text, at)
        if self._place == "in key":
            return self._read_key(text, at)
        if character.isspace():
            return at + 1
        if self._place == "open" and character == "{":
            self._place = "first"
        elif self._place in ("first", "key") and character == '"':
            self._place, self._scanner = "in key", ValueScanner()
            return self._read_key(text, at)
        elif self._place == "colon" and character == ":":
            self._place, self._scanner, self._value = "value", ValueScanner(), ""
        elif self._place == "next" and character == ",":
            self._place = "key"
        elif self._place in ("next", "first") and character == "}":
            return self._end(at)
        else:
            self.failed = True
            return at
        return at + 1

    def _read_key(self, text: str, at: int) -> int:
        end, complete = self._scanner.scan(text, at)
        self._value += text[at:end]
        if complete:
            try:
                self._key = json.loads(self._value)
            except ValueError:
                self.failed = True
            self._place, self._value = "colon", ""
        return end

    def _read_value(self, text: str, at: int) -> int:
        end, complete = self._scanner.scan(text, at)
        argues = self._key in ARGUMENTS and self._scanner.kind in "{["
        if argues and self.begun:
            self._argued = True
            self._parser.argue(text[at:end])
        elif argues:
            self._early += text[at:end]
        else:
            self._value += text[at:end]
        if complete:
            self._place = "next"
            self._take_value()
        return end

    def _take_value(self) -> None:
        if self._key not in (*NAMES, *ARGUMENTS) or not self._value:
            self._value = ""
            return
        try:
            value = json.loads(self._value)
        except (ValueError, RecursionError):
            self.failed = True
            return
        self._value = ""
        if self._key in ARGUMENTS:
            # Some models write the object as a string.
            if isinstance(value, str) and value.strip():
                self._argue(value)
        elif isinstance(value, str) and value and (self._known is None or value in self._known) and not self.begun:
            self.begun = True
            self._parser.begin(value)
            self._argue(self._early)
        else:
            self.failed = True

    def _argue(self, text: str) -> None:
        if not self.begun:
            self._early += text
        elif text:
            self._argued = True
            self._parser.argue(text)

    def _end(self, at: int) -> int:
        if not self.begun:
            self.failed = True
            return at
        if not self._argued:
            self._parser.argue("{}")
        self.done = True
        return at + 1


class ObjectParser(Parser):
    """Base class of parsers whose calls are JSON objects."""

    def __init__(self) -> None:
        super().__init__()
        self.object = CallObject(self)
        """Object that is being read."""
        self.opening = ""
        """Text before the object. It belongs to the answer if the object is not a call."""

    def begin_object(self, opening: str = "", known: Collection[str] | None = None) -> None:
        """Begin to read an object, after the text `opening`. `known` are the names that make it a call."""
        self.opening, self.object = opening, CallObject(self, known)

    def read_object(self, after: Callable[[], bool]) -> bool:
        """Read more of the object. The next state is `after` if it is a call, otherwise `outside`."""
        ended = self.object.read()
        if not ended and not (self.last and not self.object.begun):
            return False
        if self.object.begun:
            self.state = after
        else:
            self.speak(self.opening + self.object.raw)
            self.state = self.outside
        return ended
