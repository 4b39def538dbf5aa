"""Turns templates into sentences, in the style of an assistant or of people who type.

A template holds alternatives, `(hi|hello|) there`, which nest, and fields, `{v}`. Alternatives are drawn first. Fields
of grammar are filled next. Then the sentence is made as rough as its typist would make it. Values such as names are
filled last, so that they stay letter for letter as they are.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random

_FIELD = re.compile(r"(\{\w+\})")


@dataclass(frozen=True, slots=True)
class _Alternatives:
    options: tuple[tuple["str | _Alternatives", ...], ...]


def _parse(text: str, at: int) -> tuple[_Alternatives, int]:
    options: list[tuple[str | _Alternatives, ...]] = []
    current: list[str | _Alternatives] = []
    start = at
    while at < len(text) and text[at] != ")":
        if text[at] == "(":
            current.append(text[start:at])
            inner, at = _parse(text, at + 1)
            current.append(inner)
            start = at = at + 1
        elif text[at] == "|":
            options.append((*current, text[start:at]))
            current = []
            start = at = at + 1
        else:
            at += 1
    options.append((*current, text[start:at]))
    return _Alternatives(tuple(options)), at


@cache
def _compiled(template: str) -> _Alternatives:
    tree, end = _parse(template, 0)
    if end != len(template):
        raise ValueError(f"unbalanced ')' at {end} in template {template!r}")
    return tree


def _draw(rng: Random, tree: _Alternatives, out: list[str]) -> None:
    options = tree.options
    for part in options[int(rng.random() * len(options))]:
        if isinstance(part, str):
            out.append(part)
        else:
            _draw(rng, part, out)


def expand(rng: Random, template: str | Sequence[str]) -> str:
    """One drawing of a template, or of one of several templates. Fields stay, and spaces are tidied."""
    if not isinstance(template, str):
        template = template[int(rng.random() * len(template))]
    out: list[str] = []
    _draw(rng, _compiled(template), out)
    text = "".join(out)
    while "  " in text:
        text = text.replace("  ", " ")
    return text.strip().replace(" ,", ",").replace(" .", ".").replace(" ?", "?").replace(" !", "!")


def fill(text: str, fields: dict[str, str]) -> str:
    """Fill the fields that are given, and leave the others."""
    if "{" not in text:
        return text
    return "".join(fields.get(part[1:-1], part) if part[:1] == "{" else part for part in _FIELD.split(text) if part)


def capital(text: str) -> str:
    """The text with a capital first letter. A text that starts with a value stays unchanged."""
    return text[:1].upper() + text[1:]


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence to type: a drawn text whose `values` are still fields, and its end mark."""

    text: str
    end: str = "."
    values: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Style:
    """How one person types."""

    lower: bool = False  # no capitals
    lower_values: bool = False  # not even in names
    no_stop: bool = False  # no mark at the end of the message
    no_apostrophe: bool = False
    typos: float = 0.0  # share of messages with one misspelt word

    @staticmethod
    def draw(rng: Random) -> "Style":
        lower = rng.random() < 0.4
        return Style(
            lower=lower,
            lower_values=lower and rng.random() < 0.6,
            no_stop=rng.random() < (0.6 if lower else 0.15),
            no_apostrophe=rng.random() < (0.4 if lower else 0.05),
            typos=rng.choice((0.0, 0.0, 0.02, 0.1)),
        )

    def value(self, text: str) -> str:
        """A value the way this person types it, which they later expect back."""
        return text.lower() if self.lower_values else text

    def write(self, rng: Random, sentences: Sequence[Sentence]) -> str:
        """The message that consists of these sentences."""
        typo = rng.random() < self.typos
        out = ""
        for index, sentence in enumerate(sentences):
            text = sentence.text if self.lower else capital(sentence.text)
            text = "".join(part if part[:1] == "{" else self._roughen(rng, part, typo) for part in _FIELD.split(text))
            text = fill(text, sentence.values)
            last = index == len(sentences) - 1
            end = sentence.end
            if end and self.no_stop:
                end = "" if last else rng.choice((end, end, ",", ""))
            out += text + (end if text[-1:] not in ".?!" else "") + ("" if last else " ")
        return out

    def _roughen(self, rng: Random, text: str, typo: bool) -> str:
        if self.no_apostrophe:
            text = text.replace("'", "")
        if typo:
            text = _misspell(rng, text)
        return text.lower() if self.lower else text


def _misspell(rng: Random, text: str) -> str:
    words = text.split(" ")
    long = [index for index, word in enumerate(words) if len(word) > 3 and word.isalpha()]
    if not long:
        return text
    index = rng.choice(long)
    word = words[index]
    at = rng.randrange(1, len(word) - 1)
    swap = rng.random() < 0.5
    words[index] = word[:at] + (word[at + 1] + word[at] + word[at + 2 :] if swap else word[at + 1 :])
    return " ".join(words)
