r"""Regular expressions of texts, read for the same texts inside a JSON string. Pure and linear.

Each character is written in one way: `"`, `\` and control characters as Python's json.dumps escapes them, any other one
as it is. No character's form begins another's, so an expression reads a string just as the original reads the text. The
syntax is that of Rust's regex crate, which llguidance uses, without what it or JSON cannot have.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

from holdfast.lm.grammar.cuts import Node, any_of, in_order, leaf, repeated

MARKS = '"\\'
CONTROLS = "".join(map(chr, range(0x20)))
ESCAPED = frozenset(MARKS + CONTROLS)
"""Characters that JSON escapes."""
SHORT = {"\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
"""Control characters with a letter of their own. The others have four digits."""
RAW = r"\x00-\x1F\x22\x5C"
"""The escaped characters as items of a class."""
MOST_GROUPS = 100
"""Most groups of an expression that are open at a time."""

_SPACE = frozenset("\t\n\x0b\x0c\r")
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
_KINDS = {"d": frozenset[str](), "w": frozenset[str](), "s": _SPACE}
"""Escaped characters in the classes that an escape names."""
_NAMED = {
    **dict.fromkeys(("alnum", "alpha", "digit", "lower", "upper", "word", "xdigit"), frozenset[str]()),
    "ascii": ESCAPED,
    "blank": frozenset("\t"),
    "cntrl": frozenset(CONTROLS),
    **dict.fromkeys(("graph", "print", "punct"), frozenset(MARKS)),
    "space": _SPACE,
}
"""Escaped characters in each class of POSIX."""
_PLAIN = """
    L Lu Ll Lt Lm Lo M Mn Mc Me N Nd Nl No S Sm Sc Sk So Z Zs Zl Zp Pc Pd Ps Pe Pi Pf Cf Co Cn
    Latin Greek Cyrillic Han Hiragana Katakana Hangul Arabic Hebrew Thai
"""
"""Classes of Unicode without escaped characters."""
_CATEGORIES = {
    **dict.fromkeys(_PLAIN.split(), frozenset[str]()),
    **dict.fromkeys(("P", "Po"), frozenset(MARKS)),
    **dict.fromkeys(("C", "Cc"), frozenset(CONTROLS)),
    **dict.fromkeys(("Any", "ASCII"), ESCAPED),
}
"""Escaped characters in each class of Unicode."""

_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[xuU]\{([0-9a-fA-F]{1,8})\}")
_PROPERTY = re.compile(r"([pP])(?:([A-Z])|\{([A-Za-z_]{1,40})\})")
_POSIX = re.compile(r"\[:(\^?)([a-z]{1,10}):\]")
_GROUP = re.compile(r"\?(?:P?<[A-Za-z_][A-Za-z0-9_]{0,99}>|([imsu]{0,9})(?:-([imsu]{1,9}))?([:)]))")
_REPEAT = re.compile(r"[*+?]|\{[0-9]{1,9}(?:,[0-9]{0,9})?\}")


@dataclass(frozen=True, slots=True)
class _Flags:
    insensitive: bool = False
    dot_all: bool = False


@dataclass(frozen=True, slots=True)
class _Class:
    """A set of characters."""

    items: str
    """The items of Rust's class."""
    escaped: frozenset[str]
    """The set's characters that JSON escapes."""
    negated: bool = False
    """Whether the set has all characters but those of `items`."""


def read_regex(text: str, flags: str = "") -> Node:
    """Return an expression of Lark. `flags` are the letters after it: i, m, s and u.

    Raises ValueError, with a reason that names what is not supported.
    """
    for flag in flags:
        if flag not in "imsu":
            raise ValueError(f"the flag {flag} of an expression is not supported")
    return _Expression(text, _Flags("i" in flags, "s" in flags)).read()


def read_literal(text: str, *, insensitive: bool = False) -> Node:
    """Return an expression of one text."""
    return in_order([_character(character, _Flags(insensitive)) for character in text])


def read_range(first: str, last: str) -> Node:
    """Return an expression of one character of a range. Raises ValueError for an empty range."""
    if first > last:
        raise ValueError(f"the range {first!r} to {last!r} is empty")
    return _written(_of_range(first, last), _Flags())


class _Group:
    """A group of an expression that is open."""

    def __init__(self, flags: _Flags) -> None:
        self.flags = flags
        self.choices: list[list[Node]] = [[]]
        self.repeatable = False
        """Whether a repetition may follow."""

    def add(self, node: Node) -> None:
        self.choices[-1].append(node)
        self.repeatable = True

    def node(self) -> Node:
        return any_of([in_order(choice) for choice in self.choices])


class _Expression:
    """An expression that is being read, from its beginning to its end."""

    def __init__(self, text: str, flags: _Flags) -> None:
        self._text, self._at = text, 0
        self._groups = [_Group(flags)]

    def read(self) -> Node:
        while self._at < len(self._text):
            self._step(self._text[self._at])
        if len(self._groups) > 1:
            raise ValueError("a group of an expression is not closed")
        return self._groups[0].node()

    def _step(self, character: str) -> None:
        repeat, group = _REPEAT.match(self._text, self._at), self._groups[-1]
        self._at += 1
        if repeat is not None:
            self._repeat(repeat, group)
        elif character == "(":
            self._open(group)
        elif character == ")":
            if len(self._groups) == 1:
                raise ValueError("a group of an expression is closed and not open")
            self._groups.pop()
            self._groups[-1].add(group.node())
        elif character == "|":
            group.choices.append([])
            group.repeatable = False
        elif character in "^$":
            # A terminal matches from its beginning to its end, so these say nothing at the expression's own.
            if self._at != (1 if character == "^" else len(self._text)):
                raise ValueError(f"{character} within an expression is not supported: it always matches as a whole")
        elif character == "{":
            raise ValueError(r"{ must begin a repetition, such as {2,3}; write \{ for the character")
        else:
            group.add(self._atom(character, group.flags))

    def _atom(self, character: str, flags: _Flags) -> Node:
        if character == ".":
            return _written(_ANY if flags.dot_all else _LINE, flags)
        if character == "[":
            return _written(self._class(), flags)
        if character == "\\":
            found = self._escape()
            return _written(found, flags) if isinstance(found, _Class) else _character(found, flags)
        return _character(character, flags)

    def _repeat(self, found: re.Match[str], group: _Group) -> None:
        if not group.repeatable:
            raise ValueError(f"{found[0]} of an expression repeats nothing")
        self._at = found.end()
        if self._text[self._at : self._at + 1] in ("?", "+"):
            raise ValueError(f"{found[0]}{self._text[self._at]}, a lazy or possessive repetition, is not supported")
        choice = group.choices[-1]
        choice.append(repeated(choice.pop(), *counts(found[0])))
        group.repeatable = False

    def _open(self, group: _Group) -> None:
        """Read the beginning of a group, or flags for the rest of one."""
        flags = group.flags
        if self._text.startswith("?", self._at):
            found = _GROUP.match(self._text, self._at)
            if found is None:
                raise ValueError(
                    f"({self._text[self._at : self._at + 3]}… is not supported: no look-around, no comment"
                )
            self._at = found.end()
            on, off = found[1] or "", found[2] or ""
            flags = replace(
                flags,
                insensitive=(flags.insensitive or "i" in on) and "i" not in off,
                dot_all=(flags.dot_all or "s" in on) and "s" not in off,
            )
            if found[3] == ")":
                group.flags = flags
                group.repeatable = False
                return
        if len(self._groups) > MOST_GROUPS:
            raise ValueError(f"at most {MOST_GROUPS} groups of an expression may be open")
        self._groups.append(_Group(flags))

    def _escape(self) -> str | _Class:
        """Read the rest of an escape: the character that it stands for, or the class."""
        if self._at == len(self._text):
            raise ValueError("an expression ends within an escape")
        letter = self._text[self._at]
        if (found := _HEX.match(self._text, self._at)) is not None:
            self._at = found.end()
            number = int(found[found.lastindex or 0], 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                raise ValueError(f"\\{found[0]} is no character")
            return chr(number)
        if (found := _PROPERTY.match(self._text, self._at)) is not None:
            self._at = found.end()
            name = found[2] or found[3]
            if (members := _CATEGORIES.get(name)) is None:
                raise ValueError(f"\\{found[0]} is not supported; known are {', '.join(_CATEGORIES)}")
            return _named(f"\\{found[1]}{{{name}}}", ESCAPED - members if found[1] == "P" else members)
        self._at += 1
        if letter in _LETTERS:
            return _LETTERS[letter]
        if (members := _KINDS.get(letter.lower())) is not None:
            return _named(f"\\{letter}", members if letter.islower() else ESCAPED - members)
        if letter.isalnum() or letter in "<>" or ord(letter) > 0x7F:
            raise ValueError(f"\\{letter} of an expression is not supported")
        return letter

    def _class(self) -> _Class:
        """Read the rest of a class in brackets."""
        negated = self._text.startswith("^", self._at)
        self._at += negated
        items, escaped, first = list[str](), set[str](), True
        while True:
            rest = self._text[self._at : self._at + 2]
            if not rest:
                raise ValueError("a class of an expression is not closed")
            if rest[0] == "]" and not first:
                self._at += 1
                return _Class("".join(items), frozenset(ESCAPED - escaped if negated else escaped), negated)
            item = self._item(rest)
            items.append(item.items)
            escaped |= item.escaped
            first = False

    def _item(self, rest: str) -> _Class:
        """Read one item of a class: a character, a range, or another class. `rest` begins with it."""
        if (found := _POSIX.match(self._text, self._at)) is not None:
            self._at = found.end()
            if (members := _NAMED.get(found[2])) is None:
                raise ValueError(f"{found[0]} is not supported; known are {', '.join(_NAMED)}")
            return _named(found[0], ESCAPED - members if found[1] else members)
        if rest in ("&&", "--", "~~") or rest[0] == "[":
            raise ValueError(rf"{rest} within a class is not supported: no class within another; write \{rest[0]}")
        first = self._member()
        if isinstance(first, _Class) or not re.match(r"-[^\]]", self._text[self._at : self._at + 2]):
            return first if isinstance(first, _Class) else _of_range(first, first)
        self._at += 1
        last = self._member()
        if isinstance(last, _Class) or last < first:
            raise ValueError(f"the range from {first!r} in a class has no end, or one before it")
        return _of_range(first, last)

    def _member(self) -> str | _Class:
        character = self._text[self._at]
        self._at += 1
        return self._escape() if character == "\\" else character


def _named(name: str, escaped: frozenset[str]) -> _Class:
    """A class that has a name."""
    return _Class(f"[{name}--[{RAW}]]" if escaped else name, escaped)


def _of_range(first: str, last: str) -> _Class:
    """All characters of a range. Its items leave out those that JSON escapes."""
    items, begin = "", ord(first)
    for stop in (*map(ord, sorted(character for character in ESCAPED if first <= character <= last)), ord(last) + 1):
        if begin < stop:
            items += _item_of(begin) if begin + 1 == stop else f"{_item_of(begin)}-{_item_of(stop - 1)}"
        begin = stop + 1
    return _Class(items, frozenset(character for character in ESCAPED if first <= character <= last))


def _item_of(number: int) -> str:
    character = chr(number)
    return character if character.isalnum() or character == " " else f"\\x{{{number:X}}}"


_ANY = _Class("", ESCAPED, negated=True)
_LINE = _Class("", ESCAPED - {"\n"}, negated=True)


def counts(repetition: str) -> tuple[int, int | None]:
    """Return how often a repetition repeats at least and at most; None: without a limit. Raises ValueError."""
    if (known := {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(repetition)) is not None:
        return known
    least, comma, most = repetition.strip("{}").partition(",")
    found = int(least or 0), (int(most) if most else None) if comma else int(least)
    if found[1] is not None and not found[0] <= found[1]:
        raise ValueError(f"{repetition} repeats at least more often than at most")
    return found


def _written(found: _Class, flags: _Flags) -> Node:
    """Return the expression of one character of a set."""
    plain = f"[^{found.items}{RAW}]" if found.negated else f"[{found.items}]" if found.items else None
    if flags.insensitive and plain is not None:  # An escape's own letters are not of the text.
        plain = f"(?i:{plain})"
    escapes = _escapes(found.escaped) if found.escaped else None
    if plain is None and escapes is None:
        raise ValueError("a class of an expression matches nothing")
    return leaf(plain, escapes)


def _escapes(characters: frozenset[str]) -> str:
    """Return the expression of the escapes of some characters."""
    marks = "".join(rf"\{mark}" for mark in MARKS if mark in characters)
    short = marks + "".join(letter for character, letter in SHORT.items() if character in characters)
    pieces = [f"[{short}]"] if short else []
    for row in "01":
        codes = [f"{ord(each):02x}" for each in sorted(characters) if each < " " and each not in SHORT]
        if within := "".join(code[1] for code in codes if code[0] == row):
            pieces.append(f"u00{row}[{within}]")
    return rf"\\(?:{'|'.join(pieces)})"


def _character(character: str, flags: _Flags) -> Node:
    """Return the expression of one character."""
    if character in ESCAPED:
        return leaf(None, re.sub(r'([\\"])', r"\\\1", json.dumps(character)[1:-1]))
    if character.isalnum() or character == " ":
        return leaf(f"(?i:{character})" if flags.insensitive and character.isalpha() else character)
    return leaf(f"\\x{{{ord(character):X}}}")
