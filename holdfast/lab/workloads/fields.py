"""Reads files of workloads: their text, and the fields of their JSON objects, with errors that name the place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.files.regular import read_text

CHARACTERS_PER_TOKEN = 4
"""Number of characters per token, to estimate the length of a text without a tokenizer."""
MAX_TOKENS = 1 << 24
"""Largest number of tokens that a field may name."""
MAX_SECONDS = 1e9
"""Longest time that a field may name, in seconds."""

CountTokens = Callable[[str], int]
"""Function that returns the length of a text in tokens."""


def estimate_tokens(text: str) -> int:
    """Length of a text in tokens, by its characters."""
    return -(-len(text) // CHARACTERS_PER_TOKEN)


def read_workload(path: str | Path) -> str:
    """The text of a workload's file. Raises ValueError, naming the file."""
    try:
        return read_text(path)
    except OSError as error:
        raise ValueError(f"workload {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"workload {path} is not text: {error}") from None


class Fields:
    """The fields of one JSON object in a workload's file. Every error is a ValueError that names place and value."""

    def __init__(self, where: str, value: Any, kind: str) -> None:
        """`where` names the place of `value` in its file. `kind` says what it must be: a line of a trace, a turn."""
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}: it is {shown(value)}; it must be {kind}, a JSON object")
        self.where = where
        self._kind = kind
        self._values = value

    @classmethod
    def parse(cls, where: str, text: str, kind: str) -> Fields:
        """Read one JSON object."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: it is not JSON ({error}); it must be {kind}") from None
        return cls(where, value, kind)

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def get(self, name: str) -> Any:
        """The value of a field. It must be there."""
        if name not in self:
            raise ValueError(f"{self.where}: {name} is missing; it must be {self._kind}")
        return self._values[name]

    def number(self, name: str, *, least: float = 0.0, most: float, default: float | None = None) -> float:
        """A number from `least` to `most`; `default` if the field is not there."""
        if default is not None and name not in self:
            return default
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self.wrong(name, f"a number from {least:g} to {most:g}")
        return float(value)

    def seconds(self, name: str) -> float:
        """A time that the field gives in milliseconds; 0 if the field is not there."""
        return self.number(name, most=MAX_SECONDS * 1e3, default=0.0) / 1e3

    def count(self, name: str, *, least: int = 1, default: int | None = None) -> int:
        """A whole number of at least `least` and at most MAX_TOKENS; `default` if the field is not there."""
        value = self.number(name, least=least, most=MAX_TOKENS, default=default)
        if value != int(value):
            raise self.wrong(name, "a whole number")
        return int(value)

    def text(self, name: str) -> str:
        """A text that is not empty."""
        value = self.get(name)
        if not isinstance(value, str) or not value:
            raise self.wrong(name, "a text that is not empty")
        return value

    def objects(self, name: str, kind: str) -> Iterator[Fields]:
        """The objects of a list that is not empty."""
        value = self.get(name)
        if not isinstance(value, list) or not value:
            raise self.wrong(name, f"a list with at least one {kind}")
        for number, each in enumerate(value):
            yield Fields(f"{self.where}, {name}[{number}]", each, f"a {kind}")

    def one_of(self, *names: str) -> str:
        """Which of these fields is there. There must be exactly one."""
        found = [name for name in names if name in self]
        if len(found) != 1:
            raise ValueError(
                f"{self.where}: it has {' and '.join(found) or 'no input'}; it must have exactly one of "
                f"{', '.join(names)}"
            )
        return found[0]

    def wrong(self, name: str, must: str) -> ValueError:
        """The error for a field that must be something else."""
        return ValueError(f"{self.where}: {name} is {shown(self._values.get(name))}; it must be {must}")


def shown(value: Any) -> str:
    """A value as an error shows it, cut after 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def length_of(content: Any, count_tokens: CountTokens) -> int:
    """Tokens of a message's content: a text, or a list of parts of which the texts count. Anything else has none."""
    if isinstance(content, str):
        return count_tokens(content)
    if isinstance(content, list):
        return sum(length_of(part.get("text"), count_tokens) for part in content if isinstance(part, Mapping))
    return 0
