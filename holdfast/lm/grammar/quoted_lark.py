"""Lark grammars of texts, rewritten for the same texts inside a JSON string. Pure, in time linear in what it writes.

Rules keep their form. Each terminal, literal, range or expression in them becomes a rule of its own, which `cuts`
writes. A rule of ignored text follows each of these rules, because none is ignored within a terminal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from holdfast.lm.grammar.cuts import Node, any_of, check_length, cut, in_order, repeated
from holdfast.lm.grammar.quoted_regex import counts, read_literal, read_range, read_regex

COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "_EXP": "[eE][+-]?[0-9]+",
    "FLOAT": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+",
    "NUMBER": r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_FLOAT": r"[+-]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "C_COMMENT": r"/\*[^*]*\*+(?:[^/*][^*]*\*+)*/",
    "SQL_COMMENT": r"--[^\n]*",
}
"""Terminals of `%import common`, as llguidance has them (Lark, grammars/common.lark)."""
CLOSING = {")": "(", "]": "[", "}": "{"}
KEPT = 64
"""Number of rewritten grammars that are kept for further requests."""
MOST_CHAIN = 50
"""Most terminals of which each is part of the next."""
MOST_OPEN = 20
"""Most brackets that are open at a time. llguidance takes 30."""

_TOKEN = re.compile(
    r"""
    (?P<space> [ \t]++ | //[^\n]*+ | \#[^\n]*+)
    | (?P<line> \r?\n)
    | (?P<text> "(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2})|[^"\\\x00-\x1f\x7f])*+" i?)
    | (?P<regex> /(?:\\.|[^/\\])++/ [imslux]*+)
    | (?P<name> !?[_?]?[a-z][_a-z0-9-]*+ | _?[A-Z][_A-Z0-9-]*+)
    | (?P<number> [+-]?[0-9]++)
    | (?P<statement> %[a-z]++)
    | (?P<special> <[^<>\s]++> | @[a-zA-Z0-9_-]++ | ::)
    | (?P<mark> -> | \.\. | [:,.(){}\[\]~|&=+*?])
    """,
    re.VERBOSE,
)


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


@lru_cache(KEPT)
def quoted_lark(text: str) -> str:
    """Return a grammar of the same texts inside a JSON string, without its quotes, for llguidance's `%lark`.

    Raises ValueError, with the line, for what cannot be read or is not supported.
    """
    return _Rewriting(_tokens(text)).grammar()


class _Rewriting:
    """A grammar that is being rewritten."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._rules: dict[str, list[_Token]] = {}
        """The tokens of each rule, by its name."""
        self._terminals: dict[str, list[_Token]] = {}
        self._ignored: list[list[_Token]] = []
        for line in _lines(tokens):
            self._read(line)
        if "start" not in self._rules:
            raise ValueError("no rule is named start")
        self._prefix = "x"
        while any(name.startswith(self._prefix) for name in self._rules):
            self._prefix += "x"
        self._nodes: dict[str, Node] = {}
        """The terminals that are read."""
        self._reading: list[str] = []
        """Terminals that are being read, each because the one before mentions it."""
        self._read_tokens: dict[tuple[str, str], Node] = {}
        """The literals and expressions that are read, by kind and text."""
        self._names: dict[str, str] = {}
        """Names of the rules for expressions, by the expressions."""
        self._written: dict[str, str] = {}
        self._length = 0

    def grammar(self) -> str:
        if self._ignored:
            names = [self._rule_of(self._expression(tokens)) for tokens in self._ignored]
            self._write(f"{self._prefix}i", f"({' | '.join(names)})*")
        for name, tokens in self._rules.items():
            self._write(name, self._rule(tokens))
        return "".join(f"{name}: {body}\n" for name, body in self._written.items())

    def _read(self, line: list[_Token]) -> None:
        """Read a definition or a statement."""
        first, *rest = line
        if first.kind == "statement":
            self._read_statement(first, rest)
            return
        if first.kind != "name":
            raise _mistake(first, "a rule, a terminal or a statement must begin")
        name = first.text.lstrip("!?")
        following = rest[0] if rest else _Token("line", "", first.line)
        what = {".": "a priority", "{": "a template", "::": "a parameter", "[": "an attribute"}.get(following.text)
        if what is not None:
            raise _unsupported(first, f"{what} of {name[:40]}")
        if following.text != ":":
            raise _mistake(following, ": is expected")
        self._define(self._rules if name.lower() == name else self._terminals, first, name, rest[1:])

    def _define(self, where: dict[str, list[_Token]], token: _Token, name: str, tokens: list[_Token]) -> None:
        if name in where:
            raise ValueError(f"line {token.line}: {name[:40]} is defined twice")
        where[name] = tokens

    def _read_statement(self, statement: _Token, rest: list[_Token]) -> None:
        match statement.text, [token.text for token in rest]:
            case "%ignore", [_, *_]:
                self._ignored.append(rest)
            case "%import", ["common", ".", _]:
                self._import(rest[2], rest[2].text)
            case "%import", ["common", ".", _, "->", name]:
                self._import(rest[2], name)
            case "%import", ["common", "(", *names, ")"] if all(text == "," for text in names[1::2]):
                for token in rest[2:-1:2]:
                    self._import(token, token.text)
            case "%llguidance", ["{", "}"]:
                pass
            case name, texts:
                raise _unsupported(statement, f"{name} {''.join(texts)}"[:60].rstrip())

    def _import(self, token: _Token, name: str) -> None:
        if (expression := COMMON.get(token.text)) is None:
            raise _unsupported(token, f"%import common.{token.text[:40]}")
        self._define(
            self._terminals, token, name, [_Token("regex", "/" + expression.replace("/", r"\/") + "/", token.line)]
        )

    def _rule(self, tokens: list[_Token]) -> str:
        """Rewrite the body of a rule."""
        written, open = list[str](), list[_Token]()
        at = 0
        while at < len(tokens):
            token, following = tokens[at], tokens[at + 1] if at + 1 < len(tokens) else None
            at += 1
            if token.kind in ("text", "regex") or (token.kind == "name" and token.text not in self._rules):
                node, at = self._value(tokens, at - 1)
                name = self._rule_of(node)
                written.append(f"({name} {self._prefix}i)" if self._ignored else name)
            elif token.kind == "name":
                used = tokens[at : at + 2]
                if len(used) == 2 and used[0].text == "{" and used[1].kind == "name":
                    raise _unsupported(token, "a template")
                written.append(token.text)
            elif token.text in ("&", "~") and (following is None or following.kind != "number"):
                raise _unsupported(token, f"{token.text}, which combines expressions,")
            elif token.kind in ("statement", "special"):
                raise _unsupported(token, token.text[:40])
            elif token.text == "->":  # The name of an alternative says nothing about its text.
                at += following is not None
            else:
                _bracket(token, open)
                written.append(token.text)
        if open:
            raise ValueError(f"line {open[-1].line}: {open[-1].text} is not closed")
        return " ".join(written)

    def _rule_of(self, node: Node) -> str:
        """Return the name of the rule for an expression."""
        name = self._names.get(node.text)
        if name is None:
            name = self._names[node.text] = f"{self._prefix}{len(self._names)}"
            for rule, body in cut(node, name).items():
                self._write(rule, body)
        return name

    def _write(self, name: str, body: str) -> None:
        self._length += len(name) + len(body) + 3
        check_length(self._length)
        self._written[name] = body

    def _expression(self, tokens: list[_Token]) -> Node:
        """Read an expression of terminals."""
        node, at = self._choice(tokens, 0, 0)
        if at < len(tokens):
            raise _mistake(tokens[at], "part of a terminal is expected")
        return node

    def _choice(self, tokens: list[_Token], at: int, depth: int) -> tuple[Node, int]:
        """Read alternatives up to a closing bracket, and return the index of it."""
        if depth > MOST_OPEN:
            raise ValueError(f"line {tokens[at - 1].line}: at most {MOST_OPEN} brackets may be open")
        choices: list[list[Node]] = [[]]
        while at < len(tokens) and (token := tokens[at]).text not in CLOSING:
            if token.text == "|":
                choices.append([])
                at += 1
            elif token.text in ("(", "["):
                node, at = self._choice(tokens, at + 1, depth + 1)
                if at == len(tokens) or CLOSING[tokens[at].text] != token.text:
                    raise ValueError(f"line {token.line}: {token.text} is not closed")
                node, at = _repeated(node if token.text == "(" else repeated(node, 0, 1), tokens, at + 1)
                choices[-1].append(node)
            elif token.text == "->":
                at += 2
            else:
                node, at = self._value(tokens, at)
                node, at = _repeated(node, tokens, at)
                choices[-1].append(node)
        return any_of([in_order(choice) for choice in choices]), at

    def _value(self, tokens: Sequence[_Token], at: int) -> tuple[Node, int]:
        """Read a text, a range, an expression or the name of a terminal, and return the index after it."""
        token, at = tokens[at], at + 1
        if token.kind == "name":
            return self._terminal(token), at
        if token.kind not in ("regex", "text"):
            raise _unsupported(token, token.text[:40])
        if [each.text for each in tokens[at : at + 1]] != [".."]:
            node = self._read_tokens.get(token[:2])
            if node is None:
                node = self._read_tokens[token[:2]] = _at(token, lambda: _expression_of(token))
            return node, at
        last = tokens[at + 1] if at + 1 < len(tokens) else tokens[at]
        if {token.kind, last.kind} != {"text"} or (len(first := _literal(token)), len(end := _literal(last))) != (1, 1):
            raise _mistake(last, "one character is expected on each side of ..")
        return _at(token, lambda: read_range(first, end)), at + 2

    def _terminal(self, token: _Token) -> Node:
        """Read a terminal by its name."""
        name = token.text
        if (node := self._nodes.get(name)) is not None:
            return node
        if name not in self._terminals:
            raise ValueError(f"line {token.line}: {name[:40]} is not defined, or it is a rule within a terminal")
        if name in self._reading:
            raise ValueError(f"line {token.line}: the terminal {name[:40]} is part of itself; only a rule may be")
        if len(self._reading) >= MOST_CHAIN:
            raise ValueError(f"line {token.line}: a chain of over {MOST_CHAIN} terminals, each in the next")
        self._reading.append(name)
        self._nodes[name] = node = self._expression(self._terminals[name])
        self._reading.pop()
        return node


def _expression_of(token: _Token) -> Node:
    """Return the expression of a literal, or of one between slashes."""
    if token.kind == "text":
        return read_literal(_literal(token), insensitive=token.text.endswith("i"))
    inner, _, flags = token.text[1:].rpartition("/")
    return read_regex(inner, flags)


def _repeated(node: Node, tokens: list[_Token], at: int) -> tuple[Node, int]:
    """Return an expression with the repetition that follows it, and the index after that."""
    texts, found = [token.text for token in tokens[at : at + 5]], ""
    match texts:
        case ["*" | "+" | "?" as sign, *_]:
            found, size = sign, 1
        case ["~", least, "..", most, *_]:
            found, size = f"{{{least},{most}}}", 4
        case ["~", count, *_]:
            found, size = f"{{{count}}}", 2
        case ["{", *_] if "}" in texts:
            size = texts.index("}") + 1
            found = "".join(texts[:size])
        case _:
            return node, at
    if found not in "*+?" and not re.fullmatch(r"\{(?:[0-9]{1,9}(?:,[0-9]{0,9})?|,[0-9]{1,9})\}", found):
        raise _mistake(tokens[at], "a repetition such as {2,3} is expected")
    return _at(tokens[at], lambda: repeated(node, *counts(found))), at + size


def _bracket(token: _Token, open: list[_Token]) -> None:
    """Note a bracket that opens or closes. Raises ValueError for one that closes nothing."""
    if token.text in CLOSING.values():
        open.append(token)
        if len(open) > MOST_OPEN:
            raise ValueError(f"line {token.line}: at most {MOST_OPEN} brackets may be open")
    elif token.text in CLOSING and (not open or open.pop().text != CLOSING[token.text]):
        raise ValueError(f"line {token.line}: {token.text} closes nothing")


def _lines(tokens: list[_Token]) -> list[list[_Token]]:
    """Return the tokens of each definition and statement. A line that begins with | goes on with the one before."""
    lines: list[list[_Token]] = [[]]
    for token, following in pairwise(tokens):
        if token.kind != "line":
            lines[-1].append(token)
        elif following.text != "|" and following.kind != "line":
            lines.append([])
    return [line for line in lines if line]


def _literal(token: _Token) -> str:
    """Return the text that a literal stands for."""
    found = str(
        json.loads(re.sub(r"(\\.)", lambda each: r"\u00" if each[0] == r"\x" else each[0], token.text.rstrip("i")))
    )
    if not found.isascii() and any("\ud800" <= character <= "\udfff" for character in found):
        raise ValueError(f"{token.text[:40]} has half of a surrogate pair")
    return found


def _tokens(text: str) -> list[_Token]:
    """Return all tokens but spaces and comments, with the end of a line at the end."""
    found, at, line = list[_Token](), 0, 1
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise ValueError(f"line {line}: {text[at : at + 20]!r} cannot be read")
        if match.lastgroup != "space":
            found.append(_Token(match.lastgroup, match[0], line))
        line += match[0].count("\n")
        at = match.end()
    return [*found, _Token("line", "", line)]


def _at(token: _Token, read: Callable[[], Node]) -> Node:
    """Return what `read` returns. Adds the line to its ValueError."""
    try:
        return read()
    except ValueError as error:
        raise ValueError(f"line {token.line}: {error}") from None


def _mistake(token: _Token, expected: str) -> ValueError:
    found = "the end of the line" if token.kind == "line" else repr(token.text[:20])
    return ValueError(f"line {token.line}: {expected}, not {found}")


def _unsupported(token: _Token, what: str) -> ValueError:
    return ValueError(f"line {token.line}: {what} is not supported in the grammar of a call's input")
