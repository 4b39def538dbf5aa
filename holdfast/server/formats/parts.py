"""The parts of an answer, and the parser that finds them in text that arrives in pieces.

A parser is pure. The joined parts do not depend on how the text is split into pieces. A parser holds text back only if
it may turn out to be a tag, or if it is blanks that a tag would make meaningless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Said(NamedTuple):
    """More text of the answer."""

    text: str


class Reasoning(NamedTuple):
    """More reasoning before the answer."""

    text: str


class CallBegin(NamedTuple):
    """Beginning of a tool call."""

    name: str


class Arguments(NamedTuple):
    """More arguments of the last call, as JSON text."""

    text: str


Part = Said | Reasoning | CallBegin | Arguments


def joined(parts: Iterable[Part]) -> list[Part]:
    """Merge adjacent parts of the same kind."""
    whole: list[Part] = []
    for part in parts:
        if isinstance(part, CallBegin) or not whole or type(whole[-1]) is not type(part):
            whole.append(part)
        else:
            whole[-1] = whole[-1]._replace(text=whole[-1].text + part.text)
    return whole


def held_back(text: str, tags: Sequence[str]) -> int:
    """Return the number of characters at the end of a text that may begin one of the tags."""
    longest = 0
    for tag in tags:
        for size in range(min(len(tag) - 1, len(text)), longest, -1):
            if text.endswith(tag[:size]):
                longest = size
                break
    return longest


class Parser:
    """A parser with a state: a method that reads from `rest` and returns whether the next state can continue.

    It starts in `outside`, where a subclass looks for the beginning of a call, and returns there. Blanks around calls
    are dropped.
    """

    def __init__(self) -> None:
        self.state: Callable[[], bool] = self.outside
        self.rest = ""
        """Received text that is not read yet."""
        self.last = False
        """Whether `rest` is all that will come."""
        self._parts: list[Part] = []
        self._trim = False
        """Whether the next blanks are dropped."""
        self._blanks = ""
        """Blanks at the end of the text so far."""
        self.thinking = False
        """Whether the next text is reasoning. Only formats whose reasoning can come after other parts set this."""

    def push(self, text: str, last: bool = False) -> list[Part]:
        """Add text. Returns the parts that are certain. With `last`, returns all that is left."""
        self.rest += text
        self.last = last
        while self.state():
            pass
        if last and not self._trim:
            self._parts.append(Said(self._blanks))
            self._blanks = ""
        parts, self._parts = self._parts, []
        return [part for part in joined(parts) if isinstance(part, CallBegin) or part.text]

    def trim(self) -> None:
        """Drop the blanks at the beginning of the next text."""
        self._trim = True

    def outside(self) -> bool:
        """Read text outside of calls. By default, this is all text."""
        return self.say(len(self.rest))

    def say(self, count: int) -> bool:
        """Read `count` characters as text. Returns False."""
        self.speak(self.rest[:count])
        self.rest = self.rest[count:]
        return False

    def speak(self, text: str) -> None:
        """Add text to the parts. Blanks at its end wait for the next text."""
        text = self._blanks + text
        if self._trim:
            text = text.lstrip()
        said = text.rstrip()
        self._blanks = text[len(said) :]
        if said:
            self._trim = False
            self._parts.append(Said(said))

    def begin(self, name: str) -> None:
        """Add the beginning of a call. The blanks around it are dropped."""
        self._blanks = ""
        self._trim = True
        self._parts.append(CallBegin(name))

    def argue(self, text: str) -> None:
        """Add more of a call's arguments."""
        self._parts.append(Arguments(text))

    def think(self, text: str) -> None:
        """Add more reasoning."""
        self._parts.append(Reasoning(text))

    def until(self, tags: Sequence[str]) -> str | None:
        """Say the text before the first of the tags, and read that tag. Returns None while no tag is complete."""
        found = [(at, tag) for tag in tags if (at := self.rest.find(tag)) >= 0]
        if not found:
            self.say(len(self.rest) - (0 if self.last else held_back(self.rest, tags)))
            return None
        at, tag = min(found)
        self.say(at)
        self.rest = self.rest[len(tag) :]
        return tag

    def skip_blanks(self) -> bool:
        """Read blanks. Returns whether something follows them already."""
        self.rest = self.rest.lstrip()
        return bool(self.rest)

    def awaits(self, tag: str) -> bool:
        """Whether `rest` may still become the tag but is not complete."""
        return not self.last and len(self.rest) < len(tag) and tag.startswith(self.rest)
