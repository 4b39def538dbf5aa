"""The parts of an answer, and the parser that finds them in text which arrives in pieces.

A parser is pure. The parts that it gives, joined, do not depend on how the text is split into pieces: it holds back
only what may turn out to be a tag, or blanks that a tag would make meaningless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Said(NamedTuple):
    """More of what the model says."""

    text: str


class Reasoning(NamedTuple):
    """More of what the model thinks before it answers."""

    text: str


class CallBegin(NamedTuple):
    """The model begins to call a tool."""

    name: str


class Arguments(NamedTuple):
    """More of the arguments of the call that began last, as JSON text."""

    text: str


Part = Said | Reasoning | CallBegin | Arguments


def joined(parts: Iterable[Part]) -> list[Part]:
    """The same parts, with neighbours of one kind as one."""
    whole: list[Part] = []
    for part in parts:
        if isinstance(part, CallBegin) or not whole or type(whole[-1]) is not type(part):
            whole.append(part)
        else:
            whole[-1] = whole[-1]._replace(text=whole[-1].text + part.text)
    return whole


def held_back(text: str, tags: Sequence[str]) -> int:
    """How many characters at the end of a text may begin one of the tags."""
    longest = 0
    for tag in tags:
        for size in range(min(len(tag) - 1, len(text)), longest, -1):
            if text.endswith(tag[:size]):
                longest = size
                break
    return longest


class Parser:
    """A parser in some state, which is a method that reads from `rest` and tells whether the next state can go on.

    It starts in `outside`, where a kind of parser looks for the beginning of a call, and returns there. Blanks around
    calls are dropped.
    """

    def __init__(self) -> None:
        self.state: Callable[[], bool] = self.outside
        self.rest = ""
        """Said that is not read yet."""
        self.last = False
        """Whether `rest` is all that will come."""
        self._parts: list[Part] = []
        self._trim = False
        """Whether blanks that come next are dropped."""
        self._blanks = ""
        """The blanks at the end of the text so far."""
        self.thinking = False
        """Whether what comes next is reasoning. Only formats whose reasoning is no part before all others say so."""

    def push(self, text: str, last: bool = False) -> list[Part]:
        """Add text. Returns the parts that are certain; with `last`, all that is left."""
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
        """Drop the blanks at the beginning of what comes next."""
        self._trim = True

    def outside(self) -> bool:
        """Read text that belongs to no call. By default all text."""
        return self.say(len(self.rest))

    def say(self, count: int) -> bool:
        """Read so many characters as text. Returns False."""
        self.speak(self.rest[:count])
        self.rest = self.rest[count:]
        return False

    def speak(self, text: str) -> None:
        """Give text that was read before. Blanks at its end wait for what follows."""
        text = self._blanks + text
        if self._trim:
            text = text.lstrip()
        said = text.rstrip()
        self._blanks = text[len(said) :]
        if said:
            self._trim = False
            self._parts.append(Said(said))

    def begin(self, name: str) -> None:
        """Give the beginning of a call. The blanks before it, and those after it, say nothing."""
        self._blanks = ""
        self._trim = True
        self._parts.append(CallBegin(name))

    def argue(self, text: str) -> None:
        """Give more of a call's arguments."""
        self._parts.append(Arguments(text))

    def think(self, text: str) -> None:
        """Give more reasoning."""
        self._parts.append(Reasoning(text))

    def until(self, tags: Sequence[str]) -> str | None:
        """Say the text before the first of the tags, and read that tag. None if it is not there yet, or never comes."""
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
        """Whether `rest` may still become the tag, but is not yet."""
        return not self.last and len(self.rest) < len(tag) and tag.startswith(self.rest)
