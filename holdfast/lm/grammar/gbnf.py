"""llama.cpp's GBNF as Lark. Pure, and linear in the length of the text, whatever it holds.

llguidance has a converter of its own. It takes time by the square of the number of lines, or of rules.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict, deque
from typing import NamedTuple

MOST_CHARACTERS = 1 << 16
"""Most characters of a grammar in GBNF. Converting this many takes 0.1 s, in Python."""
MOST_GROUPS = 64
"""Most parentheses that are open at a time."""

_LARK = re.compile(r"^[^\S\n]*(?:%llguidance\b|start\s*+:)", re.MULTILINE)
_TOKEN = re.compile(
    r"""
    (?P<space> (?:[ \t]|\#[^\r\n]*+)++)
    | (?P<line> [\r\n])
    | (?P<define> ::=)
    | (?P<name> [\w-]++)
    | (?P<text> "(?:[^"\\]|\\.)*+")
    | (?P<set> \[(?:[^\]\\]|\\.)*+\])
    | (?P<times> [*+?] | \{\s*+\d{1,9}+\s*+(?:,\s*+(?:\d{1,9}+\s*+)?)?\})
    | (?P<mark> [|().])
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "[": "[", "]": "]"}


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


class _Name(str):
    """The name of a rule that is mentioned, among pieces of Lark."""

    __slots__ = ()


Pieces = list[str]
"""Lark, in which names of rules are still GBNF's."""


class _Group:
    """The elements between two parentheses, or after `::=`, as far as they are read."""

    def __init__(self) -> None:
        self.alternatives: list[list[Pieces]] = [[]]
        """Sequences of elements, the last of them incomplete."""
        self.open = False
        """Whether the last element may be followed by how often it comes."""

    def add(self, element: Pieces) -> None:
        self.alternatives[-1].append(element)
        self.open = True

    def repeat(self, times: str) -> None:
        """Let the last element come this often."""
        element = self.alternatives[-1][-1]
        self.alternatives[-1][-1] = ["(", *element, ")", times] if len(element) > 1 else [*element, times]
        self.open = False

    def pieces(self) -> Pieces:
        """All alternatives."""
        found: Pieces = []
        for number, sequence in enumerate(self.alternatives):
            if number:
                found.append(" | ")
            for at, element in enumerate(sequence):
                if at:
                    found.append(" ")
                found += element
            if not sequence:
                found.append('""')
        return found


def any_to_lark(text: str) -> str:
    """A grammar in Lark, which it may be already, and else is GBNF. Raises ValueError, with the place of a mistake."""
    return text if _LARK.search(text) else gbnf_to_lark(text)


def gbnf_to_lark(text: str) -> str:
    """A grammar of llama.cpp in Lark. Raises ValueError, with the limit or the place of a mistake."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"GBNF of {len(text)} characters; at most {MOST_CHARACTERS} are taken, and more of Lark")
    rules = _rules(text)
    if "root" not in rules:
        raise ValueError("no rule is named root")
    for pieces in rules.values():
        for piece in pieces:
            if isinstance(piece, _Name) and piece not in rules:
                raise ValueError(f"rule {piece[:64]!r} is mentioned and not defined")
    terminals = _terminals(rules)
    names: dict[str, str] = {"root": "start"}
    taken = {"start"}
    for rule in rules:
        if rule == "root":
            continue
        name = re.sub(r"([a-z])([A-Z])", r"\1_\2", rule.replace("-", "_")).lower()
        names[rule] = name = name.upper() if rule in terminals else name
        if name in taken:
            raise ValueError(f"rule {rule[:64]!r} is named as another in Lark, {name[:64]}")
        taken.add(name)
    lines = ["%llguidance {}", ""]
    for rule, pieces in rules.items():
        body = "".join([names[piece] if isinstance(piece, _Name) else piece for piece in pieces])
        lines.append(f"{names[rule]}: {body}")
    return "\n".join(lines) + "\n"


def _rules(text: str) -> dict[str, Pieces]:
    """All rules by their names. The last one of a name counts."""
    rules: dict[str, Pieces] = {}
    tokens, at = _tokens(text), 0
    while True:
        at = _after_lines(tokens, at)
        if tokens[at].kind == "end":
            return rules
        name, define = tokens[at], tokens[at + 1]
        if name.kind != "name":
            raise _mistake(text, name, "the name of a rule is expected")
        if define.kind != "define":
            raise _mistake(text, define, "::= is expected")
        rules[name.text], at = _body(text, tokens, _after_lines(tokens, at + 2))


def _body(text: str, tokens: list[_Token], at: int) -> tuple[Pieces, int]:
    """The pieces after `::=`, and the index of the token that follows them."""
    groups = [_Group()]
    while True:
        token, group = tokens[at], groups[-1]
        at += 1
        match token.kind, token.text:
            case "line", _ if len(groups) > 1:
                pass
            case (("line" | "end"), _) if len(groups) == 1:
                return group.pieces(), at - (token.kind == "end")
            case "mark", "|":
                group.alternatives.append([])
                group.open = False
                at = _after_lines(tokens, at)
            case "mark", "(":
                groups.append(_Group())
                if len(groups) > MOST_GROUPS + 1:
                    raise _mistake(text, token, f"at most {MOST_GROUPS} parentheses may be open")
            case "mark", ")" if len(groups) > 1:
                groups.pop()
                groups[-1].add(_parenthesized(group.pieces()))
            case "mark", ".":
                group.add(["/./"])
            case "name", name:
                group.add([_Name(name)])
            case "text", literal:
                group.add([json.dumps(_unescaped(literal[1:-1], text, token), ensure_ascii=False)])
            case "set", characters:
                group.add([f"/{_character_set(characters, text, token)}/"])
            case "times", times if group.open:
                group.repeat(re.sub(r"\s", "", times))
            case _:
                raise _mistake(text, token, "part of a rule is expected")


def _parenthesized(pieces: Pieces) -> Pieces:
    return pieces if len(pieces) == 1 else ["(", *pieces, ")"]


def _terminals(rules: dict[str, Pieces]) -> set[str]:
    """The rules that Lark can have as terminals: they mention nothing, or terminals alone. Kahn's algorithm."""
    mentioned = {rule: {piece for piece in pieces if isinstance(piece, _Name)} for rule, pieces in rules.items()}
    users = defaultdict[str, list[str]](list)
    for rule, names in mentioned.items():
        for name in names:
            users[name].append(rule)
    left = {rule: len(names) for rule, names in mentioned.items() if rule != "root"}
    ready = deque(rule for rule, count in left.items() if not count)
    found = set[str]()
    while ready:
        found.add(rule := ready.popleft())
        for user in users[rule]:
            if user in left:
                left[user] -= 1
                if not left[user]:
                    ready.append(user)
    return found


def _tokens(text: str) -> list[_Token]:
    """All tokens but spaces and comments, with one at the end."""
    found, at = list[_Token](), 0
    while at < len(text):
        if (match := _TOKEN.match(text, at)) is None or match.lastgroup is None:
            raise _mistake(text, _Token("", text[at], at), "part of a rule is expected")
        if match.lastgroup != "space":
            found.append(_Token(match.lastgroup, match[0], at))
        at = match.end()
    end = _Token("end", "", len(text))
    return [*found, end, end]


def _after_lines(tokens: list[_Token], at: int) -> int:
    while tokens[at].kind == "line":
        at += 1
    return at


def _unescaped(characters: str, text: str, token: _Token) -> str:
    """The characters that a literal stands for."""

    def character(found: re.Match[str]) -> str:
        code = found[0][1:]
        if len(code) > 1:
            if (number := int(code[1:], 16)) <= 0x10FFFF and not 0xD800 <= number < 0xE000:
                return chr(number)
        elif code in _LETTERS:
            return _LETTERS[code]
        raise _mistake(text, token, f"\\{code[:9]} is no character; an escape of one is expected")

    return _ESCAPE.sub(character, characters)


def _character_set(characters: str, text: str, token: _Token) -> str:
    """A set of characters as a regular expression, in which `[`, `&`, `~` and `/` are nothing special."""
    inner, found, at = characters[1:-1], ["["], 0
    if inner.startswith("^"):
        found.append("^")
        at = 1
    if at == len(inner):
        raise _mistake(text, token, "a set with characters is expected")
    for part in re.finditer(_ESCAPE.pattern + "|.", inner[at:], re.DOTALL):
        character = _unescaped(part[0], text, token)
        plain = len(part[0]) == 1 and (character.isalnum() or character == "-")
        found.append(character if plain or character == " " else f"\\U{ord(character):08X}")
    return "".join(found) + "]"


def _mistake(text: str, token: _Token, expected: str) -> ValueError:
    line, before = text.count("\n", 0, token.at) + 1, text[max(0, token.at - 20) : token.at]
    return ValueError(f"line {line}, after {before!r}: {expected}, not {token.text[:20]!r}")
