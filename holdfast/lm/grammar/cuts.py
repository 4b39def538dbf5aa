r"""Expressions of text inside a JSON string, cut where llguidance's lexer would otherwise read too far. Pure.

The lexer takes the longest match and looks one byte ahead. An escape has two bytes or more. So after text that may be
whole, the lexer cannot know whether the next escape continues it: in `/.*/ "\n"` it would read the backslash as part of
`.*`, and then fail. Therefore an expression with escapes becomes a rule whose terminals contain one only at their
beginning. Each terminal ends before the next backslash, and the parser decides what that begins.

The rule is the left-linear grammar of an automaton whose states are the places of escapes (Glushkov, 1961). All text
between two of them is one step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, groupby, product

MOST_TEXT = 1 << 17
"""Most characters of a grammar, or of an expression, as it is written for JSON. One of the original may become 60."""
MOST_ESCAPES = 32
"""Most places of escapes in an expression that is cut. Each round of a bounded repetition has its own."""


class TooManyEscapes(ValueError):
    """An expression has too many places of escapes to be cut."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The texts of an expression between its escapes, which have numbers. Each text is an expression, too."""

    plain: str | None
    """Texts without escapes; None if there are none."""
    before: Mapping[int, str] = field(default_factory=dict)
    """Texts before each escape that may come first."""
    after: Mapping[int, str] = field(default_factory=dict)
    """Texts after each escape that may come last."""
    between: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """Texts from one escape to the next."""
    escapes: Mapping[int, str] = field(default_factory=dict)
    """The escapes themselves."""

    def __post_init__(self) -> None:
        texts = chain(self.before.values(), self.after.values(), self.between.values())
        check_length(sum(map(len, texts), len(self.plain or "")))


@dataclass(frozen=True, slots=True)
class Node:
    """Part of an expression."""

    text: str
    """The part as one expression, which a repetition may follow."""
    plain: bool
    """Whether the part matches a text without escapes."""
    escaped: bool
    """Whether the part matches a text with escapes."""
    longer: bool
    """Whether an escape may continue a text with escapes that is whole. If in doubt, it is true."""

    @property
    def safe(self) -> bool:
        """Whether the lexer can read the part as one terminal."""
        return not (self.longer or (self.plain and self.escaped))

    def parts(self, numbers: Iterator[int]) -> Parts:
        """Return the texts between escapes. `numbers` numbers the escapes. Raises ValueError for too many."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        check_length(len(self.text))


@dataclass(frozen=True, slots=True)
class _Leaf(Node):
    """Plain text, or an escape, or either."""

    without: str | None
    escape: str | None

    def parts(self, numbers: Iterator[int]) -> Parts:
        if self.escape is None:
            return Parts(self.without)
        if (number := next(numbers)) >= MOST_ESCAPES:
            raise TooManyEscapes(
                f"an expression has over {MOST_ESCAPES} places of characters that JSON escapes, and one of them may "
                "follow its end; repeat with * or + instead of a number, or end it with another character"
            )
        return Parts(self.without, {number: ""}, {number: ""}, {}, {number: self.escape})


@dataclass(frozen=True, slots=True)
class _Sequence(Node):
    nodes: tuple[Node, ...]

    def parts(self, numbers: Iterator[int]) -> Parts:
        found = Parts("")
        for node in self.nodes:
            found = _followed(found, node.parts(numbers))
        return found


@dataclass(frozen=True, slots=True)
class _Choice(Node):
    nodes: tuple[Node, ...]

    def parts(self, numbers: Iterator[int]) -> Parts:
        found = Parts(None)
        for node in self.nodes:
            found = _either(found, node.parts(numbers))
        return found


@dataclass(frozen=True, slots=True)
class _Repeated(Node):
    node: Node
    least: int
    most: int | None

    def parts(self, numbers: Iterator[int]) -> Parts:
        found = Parts("")
        if self.most is None:
            for _ in range(self.least):
                found = _followed(found, self.node.parts(numbers))
            return _followed(found, _starred(self.node.parts(numbers)))
        for _ in range(self.most - self.least):
            found = _either(Parts(""), _followed(self.node.parts(numbers), found))
        for _ in range(self.least):
            found = _followed(self.node.parts(numbers), found)
        return found


def check_length(length: int) -> None:
    """Raises ValueError for too many characters of an expression, or of a grammar."""
    if length > MOST_TEXT:
        raise ValueError(f"the grammar has over {MOST_TEXT} characters when it is written for JSON; make it shorter")


def leaf(plain: str | None, escape: str | None = None) -> Node:
    """Return an expression of plain text, or of an escape, or of either. A repetition may follow the expressions."""
    if escape is None:
        assert plain is not None
        return _Leaf(plain, True, False, False, plain, None)
    text = f"(?:{escape})" if plain is None else f"(?:{plain}|{escape})"
    return _Leaf(text, plain is not None, True, False, plain, escape)


def in_order(nodes: Sequence[Node]) -> Node:
    """Return the expression of several parts, one after another."""
    if len(nodes) == 1:
        return nodes[0]
    text = "".join(node.text for node in nodes)
    plain, escaped, longer = True, False, False
    for node in nodes:
        longer = node.longer or (node.plain and (longer or (escaped and node.escaped)))
        plain, escaped = plain and node.plain, escaped or node.escaped
    if not escaped:
        return leaf(text)
    merged = list[Node]()
    for with_escapes, run in groupby(nodes, lambda node: node.escaped):
        found = list(run)
        merged += found if with_escapes else [leaf("".join(node.text for node in found))]
    return _Sequence(f"(?:{text})", plain, escaped, longer, tuple(merged))


def any_of(nodes: Sequence[Node]) -> Node:
    """Return the expression of any one of several."""
    if len(nodes) == 1:
        return nodes[0]
    text = f"(?:{'|'.join(node.text for node in nodes)})"
    if not any(node.escaped for node in nodes):
        return leaf(text)
    return _Choice(text, any(node.plain for node in nodes), True, any(node.longer for node in nodes), tuple(nodes))


def repeated(node: Node, least: int, most: int | None) -> Node:
    """Return the expression of a repetition, `least` to `most` times; None: without a limit."""
    counts = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    if counts is None:
        counts = f"{{{least}}}" if most == least else f"{{{least},{'' if most is None else most}}}"
    text = f"(?:{node.text}){counts}"
    if not node.escaped:
        return leaf(text)
    return _Repeated(text, node.plain or not least, True, node.longer or most != 1, node, least, most)


def cut(node: Node, name: str) -> dict[str, str]:
    """Return rules of Lark for an expression, by name. The first one is `name`, and the others begin with it.

    Raises ValueError for an expression with too many places of escapes.
    """
    if not node.escaped:
        return {name: _terminal(node.text)}
    try:
        parts = node.parts(count())
    except TooManyEscapes:
        if not node.safe:
            raise
        # The lexer reads it as a whole unless another terminal may end where one of its escapes begins.
        return {name: _terminal(node.text)}
    reached = {following for _, following in parts.between}
    at_once = {number for number, text in parts.before.items() if not text and number not in reached}
    places = {number: "" if number in at_once else f"{name}_{number} " for number in parts.escapes}
    rules = {name: [] if parts.plain is None else [_terminal(parts.plain)]}
    rules |= {place.rstrip(): [] for place in places.values() if place}
    for number, text in parts.before.items():
        if number not in at_once:
            rules[places[number].rstrip()].append(_terminal(text))
    for (number, following), text in parts.between.items():
        rules[places[following].rstrip()].append(f"{places[number]}{_terminal(parts.escapes[number] + text)}")
    for number, text in parts.after.items():
        rules[name].append(f"{places[number]}{_terminal(parts.escapes[number] + text)}")
    return {rule: " | ".join(choices) for rule, choices in rules.items() if choices}


def _terminal(text: str) -> str:
    return f"/{text}/" if text else '""'


def _followed(first: Parts, then: Parts) -> Parts:
    """Return the parts of one expression after another."""
    plain = None if first.plain is None or then.plain is None else first.plain + then.plain
    before, after = dict(first.before), dict(then.after)
    if first.plain is not None:
        before |= {number: first.plain + text for number, text in then.before.items()}
    if then.plain is not None:
        after |= {number: text + then.plain for number, text in first.after.items()}
    between = {**first.between, **then.between}
    for (number, text), (following, rest) in product(first.after.items(), then.before.items()):
        between[number, following] = text + rest
    return Parts(plain, before, after, between, {**first.escapes, **then.escapes})


def _either(one: Parts, other: Parts) -> Parts:
    """Return the parts of either expression. Their escapes have different numbers."""
    texts = [text for text in (one.plain, other.plain) if text is not None]
    plain = None if not texts else texts[0] if len(texts) == 1 else f"(?:{'|'.join(texts)})"
    return Parts(
        plain,
        {**one.before, **other.before},
        {**one.after, **other.after},
        {**one.between, **other.between},
        {**one.escapes, **other.escapes},
    )


def _starred(parts: Parts) -> Parts:
    """Return the parts of an expression that is repeated any number of times."""
    rounds = f"(?:{parts.plain})*" if parts.plain else ""
    between = dict(parts.between)
    for (number, text), (following, rest) in product(parts.after.items(), parts.before.items()):
        found, more = between.get((number, following)), text + rounds + rest
        between[number, following] = more if found is None else f"(?:{found}|{more})"
    before = {number: rounds + text for number, text in parts.before.items()}
    after = {number: text + rounds for number, text in parts.after.items()}
    return Parts(rounds, before, after, between, parts.escapes)
