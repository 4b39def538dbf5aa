"""Structural tags, as XGrammar and vLLM have them, turned into Lark. Pure.

A structural tag is a tree of formats, each a piece of the answer: a text, JSON by a schema, free text, a tag around
another format, and so on (XGrammar, "Structural Tag Usage"). llguidance cannot take back a character of
free text, so free text ends where the text that follows it first occurs, and both are one lazy lexeme.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.core.types import Grammar
from holdfast.lm.grammar.dialects import context_free_grammar, laid_out, regex_lexeme

MOST_ELEMENTS = 1024
"""Maximum number of elements, tags, texts or repetitions of one format."""
MOST_CHARACTERS = 100_000
"""Largest `max_chars` of free text."""

Format = Mapping[str, Any]


@dataclass(frozen=True)
class Fixed:
    """A text: the terminal of one or several texts."""

    terminal: str


@dataclass(frozen=True)
class Token:
    """A token of the tokenizer, such as `<[5]>`, which no text can contain."""

    expression: str


@dataclass(frozen=True)
class Written:
    """A piece that ends by itself, as an expression."""

    expression: str


@dataclass(frozen=True)
class Free:
    """Free text, as a terminal."""

    terminal: str
    path: str


@dataclass(frozen=True)
class OneOf:
    """One of several sequences of pieces, each of which may be empty."""

    choices: tuple[tuple[Piece, ...], ...]


@dataclass(frozen=True)
class Calls:
    """Free text in which each trigger is followed by one of its bodies."""

    free: Free
    bodies: tuple[tuple[str, str], ...]
    """Pairs of a trigger's terminal and the expression of what follows it."""
    first: str
    """Expression of a first call without text before it; empty if none is needed."""
    once: bool
    """Whether nothing follows the first call."""


Piece = Fixed | Token | Written | Free | OneOf | Calls


def structural_grammar(wanted: Any, path: str) -> Grammar:
    """The grammar of a structural tag's `format`.

    Raises ValueError, which names the faulty format by its path below `path`.
    """
    writer = _Writer()
    start = writer.joined(writer.read(wanted, path), last=True)
    rules = "".join(f"{name}: {rule}\n" for name, rule in writer.rules.items())
    return Grammar("lark", f"%llguidance {{}}\nstart: {start}\n{rules}TEXT: /(.|\\n)*/\n")


class _Writer:
    """The rules of a grammar while it is written."""

    def __init__(self) -> None:
        self.rules: dict[str, str] = {}
        self._terminals: dict[str, str] = {}
        """Names of terminals by their definition."""
        self._readers: dict[str, Callable[[Format, str], tuple[Piece, ...]]] = {
            "const_string": self._const,
            "json_schema": self._json,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "token": self._token,
            "sequence": self._sequence,
            "or": self._or,
            "optional": self._optional,
            "star": self._repeated,
            "plus": self._repeated,
            "repeat": self._repeated,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "dispatch": self._dispatch,
            "tags_with_separator": self._separated,
        }

    def read(self, wanted: Any, path: str) -> tuple[Piece, ...]:
        """The pieces of a format. Raises ValueError."""
        kind = wanted.get("type") if isinstance(wanted, Mapping) else None
        reader = self._readers.get(kind) if isinstance(kind, str) else None
        if reader is None:
            given = json.dumps(kind)[:40] if kind is not None else "missing"
            raise ValueError(f"{path}.type is {given}; supported: {', '.join(self._readers)}")
        return reader(wanted, path)

    def joined(self, pieces: Sequence[Piece], *, last: bool) -> str:
        """The expression of pieces in order; `last`: the answer ends with them. Raises ValueError."""
        found: list[str] = []
        rest = list(pieces)
        while rest:
            piece = rest.pop(0)
            after = rest[0] if rest and isinstance(rest[0], Fixed | Token) else None
            ends = last and not rest
            match piece:
                case Fixed(expression) | Token(expression) | Written(expression):
                    found.append(expression)
                    continue
                case Free():
                    found.append(self._free(piece, after, ends=ends))
                case OneOf(choices):
                    tail = () if after is None else (after,)
                    found.append(self._one_of([self.joined((*each, *tail), last=ends) for each in choices]))
                case Calls():
                    found.append(self._calls(piece, after, ends=ends))
            if after is not None:
                rest.pop(0)  # It is written with the piece before it.
        return " ".join(each for each in found if each) or '""'

    def _free(self, piece: Free, after: Fixed | Token | None, *, ends: bool) -> str:
        """Free text and what follows it. Raises ValueError if that is neither fixed nor the end of the answer."""
        match after:
            case Fixed(terminal):
                return self._rule(f"{piece.terminal} {terminal}", lazy=True)
            case Token(expression):
                return self._rule(f"{piece.terminal} {expression}")
        if not ends:
            raise ValueError(f"{piece.path} is free text, which a text, a tag, a token or the answer's end must follow")
        return piece.terminal

    @staticmethod
    def _one_of(choices: Sequence[str]) -> str:
        some = [each for each in choices if each != '""']
        whole = f"({' | '.join(some)})" if some else '""'
        return f"{whole}?" if some and len(some) < len(choices) else whole

    def _calls(self, piece: Calls, after: Fixed | Token | None, *, ends: bool) -> str:
        calls = [
            self._rule(f"{self._rule(f'{piece.free.terminal} {trigger}', lazy=True)} {body}")
            for trigger, body in piece.bodies
        ]
        call, tail = f"({' | '.join(calls)})", "" if after is None else f" {self._of(after)}"
        if piece.once and piece.first:
            return f"{piece.first}{tail}"
        free = self._free(piece.free, after, ends=ends)
        if piece.once:
            return f"({call}{tail} | {free})"
        return f"{piece.first} {call}* {free}".strip()

    @staticmethod
    def _of(piece: Fixed | Token) -> str:
        return piece.terminal if isinstance(piece, Fixed) else piece.expression

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"r{len(self.rules)}"
        self.rules[f"{name}[lazy]" if lazy else name] = body
        return name

    def _terminal(self, body: str) -> str:
        """The name of a terminal, which is defined once."""
        if body not in self._terminals:
            self._terminals[body] = f"T{len(self.rules)}"
            self.rules[self._terminals[body]] = body
        return self._terminals[body]

    def _fixed(self, *texts: str) -> tuple[Piece, ...]:
        """The piece that is one of these texts; none if the only text is empty."""
        if texts == ("",):
            return ()
        return (Fixed(self._terminal(" | ".join(json.dumps(text, ensure_ascii=False) for text in texts))),)

    def _free_text(self, wanted: Format, path: str, most: int | None = None) -> Free:
        """Free text without the texts in `excludes`, of at most `most` characters."""
        excluded = _texts(wanted, "excludes", path, least=0)
        body = "TEXT" if most is None else f"/(.|\\n){{0,{most}}}/"
        if excluded:
            some = "|".join("".join(f"\\x{{{ord(letter):x}}}" for letter in text) for text in excluded)
            body = f"{body} & ~/(.|\\n)*({some})(.|\\n)*/"
        return Free(body if body == "TEXT" else self._terminal(body), path)

    def _const(self, wanted: Format, path: str) -> tuple[Piece, ...]:
        _taken(wanted, ("value",), path)
        return self._fixed(_text(wanted, "value", path))

    def _json(self, wanted: Format, path: str) -> tuple[Piece, ...]:
        _taken(wanted, ("json_schema",), path, style="json", any_order=False)
        schema = wanted.get("json_schema")
        if not isinstance(schema, Mapping | bool):
            raise ValueError(f"{path}.json_schema must be a JSON schema")
        return (Written(self._rule(f"%json {json.dumps(laid_out(schema), ensure_ascii=False)}")),)

    def _regex(self, wanted: Format, path: str) -> tuple[Piece, ...]:
        _taken(wanted, ("pattern",), path)
        pattern = _text(wanted, "pattern", path)
        return (Written(self._rule(regex_lexeme(pattern))),) if pattern else ()

    def _grammar(self, wanted: Format, path: str) -> tuple[Piece, ...]:
        _taken(wanted, ("grammar",), path)
        # Within braces, so that its names and what it ignores are its own.
        return (Written(self._rule(f"%lark {{\n{context_free_grammar(_text(wanted, 'grammar', path)).text}\n}}")),)

    def _any_text(self, wanted: Format, path: str) -> tuple[Piece, ...]:
        _taken(wanted, ("excludes", "max_chars"), path)
        most = wanted.get("max_chars")
        if most is not None and not (type(most) is int and 0 <= most <= MOST_CHARACTERS):
            raise ValueError(f"{path}.max_chars must be an integer between 0 and {MOST_CHARACTERS}")
        return (self._free_text(wanted, path, most),)

    def _token(self, wanted: Format, path: str) -> tuple[Piece, ...]:
        _taken(wanted, ("token",), path)
        token = wanted.get("token")
        if type(token) is int and token >= 0:
            return (Token(f"<[{token}]>"),)
        if isinstance(token, str) and re.fullmatch(r"<[^<>\s\[\]]+>", token):
            return (Token(token),)
        raise ValueError(f"{path}.token must be the id of a token, or the name of a special token such as <|end|>")

    def _sequence(self, wanted: Format, path: str) -> tuple[Piece, ...]:
        _taken(wanted, ("elements",), path)
        return tuple(piece for each in self._elements(wanted, "elements", path) for piece in each)

    def _or(self, wanted: Format, path: str) -> tuple[Piece, ...]:
        _taken(wanted, ("elements",), path)
        return (OneOf(tuple(self._elements(wanted, "elements", path))),)

    def _optional(self, wanted: Format, path: str) -> tuple[Piece, ...]:
        _taken(wanted, ("content",), path)
        return (OneOf(((), self.read(wanted.get("content"), f"{path}.content"))),)

    def _repeated(self, wanted: Format, path: str) -> tuple[Piece, ...]:
        """star, plus and repeat."""
        kind = wanted["type"]
        _taken(wanted, ("content", "min", "max") if kind == "repeat" else ("content",), path)
        least, most = {"star": (0, -1), "plus": (1, -1)}.get(kind, (wanted.get("min"), wanted.get("max")))
        if not (type(least) is int and 0 <= least <= MOST_ELEMENTS):
            raise ValueError(f"{path}.min must be an integer between 0 and {MOST_ELEMENTS}")
        if not (type(most) is int and (most == -1 or least <= most <= MOST_ELEMENTS)):
            raise ValueError(f"{path}.max must be -1, which is no limit, or an integer from {least} to {MOST_ELEMENTS}")
        inner = self.joined(self.read(wanted.get("content"), f"{path}.content"), last=False)
        return (Written(f"({inner}){{{least},{'' if most < 0 else most}}}"),) if most else ()

    def _tag(self, wanted: Format, path: str) -> tuple[Piece, ...]:
        return (*self._begin(wanted, path), *self._inside(wanted, path))

    def _begin(self, wanted: Format, path: str) -> tuple[Piece, ...]:
        begin = wanted.get("begin")
        if isinstance(begin, Mapping):
            return self._token(begin, f"{path}.begin")
        return self._fixed(_text(wanted, "begin", path))

    def _inside(self, wanted: Format, path: str) -> tuple[Piece, ...]:
        """The pieces of a tag after its begin."""
        _taken(wanted, ("begin", "content", "end"), path)
        end = wanted.get("end")
        if isinstance(end, Mapping):
            ends = self._token(end, f"{path}.end")
        else:
            ends = self._fixed(*([end] if isinstance(end, str) else _texts(wanted, "end", path)))
        return (*self.read(wanted.get("content"), f"{path}.content"), *ends)

    def _tags(self, wanted: Format, path: str) -> list[tuple[Format, str]]:
        tags = _listed(wanted, "tags", path)
        for at, tag in enumerate(tags):
            if not isinstance(tag, Mapping) or tag.get("type", "tag") != "tag":
                raise ValueError(f"{path}.tags[{at}] must be a tag")
        return [(tag, f"{path}.tags[{at}]") for at, tag in enumerate(tags)]

    def _triggered(self, wanted: Format, path: str) -> tuple[Piece, ...]:
        _taken(wanted, ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"), path)
        triggers = _texts(wanted, "triggers", path)
        needed = _flag(wanted, "at_least_one", path)
        bodies: dict[str, list[str]] = {}
        whole: list[str] = []
        for tag, place in self._tags(wanted, path):
            begin = _text(tag, "begin", place)
            trigger = next((each for each in triggers if each and begin.startswith(each)), None)
            if trigger is None:
                raise ValueError(f"no trigger of {path} begins {begin[:64]!r}; give one that does")
            inside = self._inside(tag, place)
            bodies.setdefault(trigger, []).append(
                self.joined((*self._fixed(begin.removeprefix(trigger)), *inside), last=False)
            )
            if needed:
                whole.append(self.joined((*self._fixed(begin), *inside), last=False))
        first = self._rule(" | ".join(whole)) if needed else ""
        pairs = tuple((self._terminal(json.dumps(each, ensure_ascii=False)), f"({' | '.join(some)})")
                      for each, some in bodies.items())  # fmt: skip
        once = _flag(wanted, "stop_after_first", path)
        return (Calls(self._free_text(wanted, path), pairs, first, once),)

    def _dispatch(self, wanted: Format, path: str) -> tuple[Piece, ...]:
        _taken(wanted, ("rules", "loop", "excludes"), path)
        pairs = []
        for at, rule in enumerate(_listed(wanted, "rules", path)):
            place = f"{path}.rules[{at}]"
            if not isinstance(rule, list) or len(rule) != 2 or not isinstance(rule[0], str) or not rule[0]:
                raise ValueError(f"{place} must be a pair of a text and a format")
            pattern = self._terminal(json.dumps(rule[0], ensure_ascii=False))
            pairs.append((pattern, f"({self.joined(self.read(rule[1], f'{place}[1]'), last=False)})"))
        once = not _flag(wanted, "loop", path, default=True)
        return (Calls(self._free_text(wanted, path), tuple(pairs), "", once),)

    def _separated(self, wanted: Format, path: str) -> tuple[Piece, ...]:
        _taken(wanted, ("tags", "separator", "at_least_one", "stop_after_first"), path)
        separator = self.joined(self._fixed(_text(wanted, "separator", path)), last=False)
        tag = self._rule(" | ".join(self.joined(self._tag(*each), last=False) for each in self._tags(wanted, path)))
        one = tag if _flag(wanted, "stop_after_first", path) else f"{tag} ({separator} {tag})*"
        return (Written(one if _flag(wanted, "at_least_one", path) else f"({one})?"),)

    def _elements(self, wanted: Format, name: str, path: str) -> list[tuple[Piece, ...]]:
        return [self.read(each, f"{path}.{name}[{at}]") for at, each in enumerate(_listed(wanted, name, path))]


def _taken(wanted: Format, names: Sequence[str], path: str, **neutral: Any) -> None:
    """Raises ValueError for a field that is not in `names`; those of `neutral` may have the value given there."""
    for name, value in wanted.items():
        if name in neutral and value != neutral[name] and value is not None:
            raise ValueError(f"{path}.{name} may only be {json.dumps(neutral[name])}")
        if name not in names and name not in neutral and name != "type" and value not in (None, []):
            raise ValueError(f"{path}.{name[:64]} is unknown or not supported; leave it out")


def _text(wanted: Format, name: str, path: str) -> str:
    value = wanted.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{path}.{name} must be a text")
    return value


def _listed(wanted: Format, name: str, path: str, least: int = 1) -> list[Any]:
    value = wanted.get(name)
    if value is None and not least:
        return []
    if not isinstance(value, list) or not least <= len(value) <= MOST_ELEMENTS:
        raise ValueError(f"{path}.{name} must be a list of {least} to {MOST_ELEMENTS} entries")
    return value


def _texts(wanted: Format, name: str, path: str, least: int = 1) -> list[str]:
    values = _listed(wanted, name, path, least)
    if not all(isinstance(each, str) and each for each in values):
        raise ValueError(f"{path}.{name} must be a list of texts that are not empty")
    return values


def _flag(wanted: Format, name: str, path: str, *, default: bool = False) -> bool:
    value = wanted.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{path}.{name} must be true or false")
    return value
