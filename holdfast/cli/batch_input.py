"""Batches that a user types: ["Prompt 1", "Prompt 2"] [32, 64]. Pure. Errors name the column."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from json import JSONDecodeError, JSONDecoder
from typing import TypeVar

T = TypeVar("T")

DEFAULT_LENGTH = 128
"""Maximum number of tokens of an answer if no length is given."""
MOST_PROMPTS = 50_000
"""Maximum number of items in a typed list. It is also the API's limit for lines of a batch."""
NUMBER = re.compile(r"(-?[0-9]+)([.eE\w]?)")
SHAPE = '["Prompt 1", "Prompt 2"] [32, 64]'


class InputError(ValueError):
    """The typed text is not a valid batch. The message gives the column and the reason."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt, with the maximum number of tokens of its answer."""

    prompt: str
    length: int


def parse_batch(text: str, longest: int, begin: int = 0) -> list[Asked]:
    """Parse the prompts in `text` from index `begin`. Each gets a length, at most `longest`. Raises InputError.

    The second list has one length for each prompt, or one for all. If it is missing, each length is DEFAULT_LENGTH, or
    `longest` if that is less. Columns are counted from 1.
    """
    scan = _Scanner(text, begin)
    prompts = scan.prompts()
    lengths = scan.lengths(longest)
    if lengths is None:
        lengths = [min(DEFAULT_LENGTH, longest)]
    if len(lengths) not in (1, len(prompts)):
        either = f"{len(prompts)}, 1 or none" if len(prompts) > 1 else "1 or none"
        raise InputError(f"{counted(len(prompts), 'prompt')} and {counted(len(lengths), 'length')}: give {either}")
    if len(lengths) == 1:
        lengths *= len(prompts)
    return [Asked(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]


class _Scanner:
    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at

    def prompts(self) -> list[str]:
        if not self._next("["):
            raise self._error(f"a batch is a list of prompts, as in {SHAPE}")
        return self._items(self._prompt, "prompt")

    def lengths(self, longest: int) -> list[int] | None:
        """Parse the second list; None if there is none. Nothing may follow it."""
        found: list[int] | None = None
        if self._next("["):
            found = self._items(lambda: self._length(longest), "length")
        if not self._ended():
            what = "after the lengths" if found is not None else "after the prompts, but a list of lengths"
            raise self._error(f"nothing may follow {what}")
        return found

    def _items(self, item: Callable[[], T], name: str) -> list[T]:
        """Parse the items up to the closing bracket."""
        if self._next("]"):
            raise InputError(f"column {self.at}: the list has no {name}")
        found: list[T] = []
        while True:
            if self._ended():
                raise self._error(f"a {name} or ] is missing")
            found.append(item())
            if len(found) > MOST_PROMPTS:
                raise InputError(f"the list has more than {MOST_PROMPTS} {name}s; give the rest as another batch")
            if self._next("]"):
                return found
            if not self._next(","):
                raise self._error(f"a comma or ] is missing after this {name}")
            if self._here() == "]":
                raise self._error(f"a {name} is missing after the comma")

    def _prompt(self) -> str:
        if self._here() != '"':
            raise self._error('a prompt must be in double quotes, like "this"')
        begin = self.at
        try:
            prompt, self.at = JSONDecoder().raw_decode(self.text, begin)
        except JSONDecodeError as error:
            if error.msg.startswith("Unterminated"):
                raise self._error("the quotes of this prompt are not closed") from None
            self.at = error.pos
            raise self._error(f"{error.msg[:1].lower()}{error.msg[1:].rstrip(' at')} in a prompt") from None
        if not prompt.strip():
            raise InputError(f"column {begin + 1}: the prompt is empty")
        return str(prompt)

    def _length(self, longest: int) -> int:
        self._ended()
        begin = self.at
        found = NUMBER.match(self.text, begin)
        if found is None or (found[2] or len(found[1]) > 9):
            raise self._error(f"a length must be a whole number between 1 and {longest}")
        self.at = found.end()
        if not 1 <= (length := int(found[1])) <= longest:
            raise InputError(f"length {length} at column {begin + 1}: it must be between 1 and {longest}")
        return length

    def _here(self) -> str:
        """Skip spaces, and return the next character; an empty string at the end."""
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        return self.text[self.at : self.at + 1]

    def _ended(self) -> bool:
        return not self._here()

    def _next(self, expected: str) -> bool:
        """Skip a character if it comes next. Returns whether it did."""
        if self._here() != expected:
            return False
        self.at += 1
        return True

    def _error(self, reason: str) -> InputError:
        return InputError(f"column {self.at + 1}: {reason}")


def counted(number: int, name: str) -> str:
    """Return a number with its noun: "1 prompt", "2 prompts"."""
    return f"{number} {name}{'' if number == 1 else 's'}"
