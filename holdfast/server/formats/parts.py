"""The parts of an answer, and the parser that finds them in text that arrives in pieces.

A parser is pure. However the text is split into pieces, the joined parts are the same. A parser holds text back only
if it may be the beginning of a tag, or if it is blanks that the next tag would make meaningless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Said(NamedTuple):
    """Text of the answer."""

    text: str


class Reasoning(NamedTuple):
    """Text of the reasoning before the answer."""

    text: str


class CallBegin(NamedTuple):
    """Beginning of a tool call."""

    name: str
    custom: bool = False
    """Whether the call's input is a text. `Input` parts follow, instead of `Arguments`."""


class Arguments(NamedTuple):
    """Part of the last call's arguments, as JSON text."""

    text: str


class Input(NamedTuple):
    """Part of the last call's input, which is a text."""

    text: str


Part = Said | Reasoning | CallBegin | Arguments | Input


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
    """A parser whose state is a method. The method reads from `rest`, and returns whether the next state can go on now.

    The first state is `outside`, where a subclass looks for the beginning of a call. After a call it returns there.
    Blanks around calls are dropped.
    """

    def __init__(self) -> None:
        self.state: Callable[[], bool] = self.outside
        self.rest = ""
        """Received text that is not parsed yet."""
        self.last = False
        """Whether no text follows `rest`."""
        self._parts: list[Part] = []
        self._trim = False
        """Whether to drop the blanks that come next."""
        self._blanks = ""
        """Blanks at the end of the text so far. They are kept back because a call may follow."""
        self.thinking = False
        """Whether the next text is reasoning. Set only by formats whose reasoning can follow other parts."""

    def push(self, text: str, last: bool = False) -> list[Part]:
        """Add text. Returns the parts that are certain; with `last`, all remaining parts."""
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
        """Read `count` characters as text. Returns False, because the state needs more input."""
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
        """Read the text up to the first tag, and the tag itself. Returns the tag; None while no tag is complete."""
        found = [(at, tag) for tag in tags if (at := self.rest.find(tag)) >= 0]
        if not found:
            self.say(len(self.rest) - (0 if self.last else held_back(self.rest, tags)))
            return None
        at, tag = min(found)
        self.say(at)
        self.rest = self.rest[len(tag) :]
        return tag

    def skip_blanks(self) -> bool:
        """Skip blanks. Returns whether any text follows them."""
        self.rest = self.rest.lstrip()
        return bool(self.rest)

    def awaits(self, tag: str) -> bool:
        """Whether `rest` is an incomplete beginning of the tag and more text may come."""
        return not self.last and len(self.rest) < len(tag) and tag.startswith(self.rest)
