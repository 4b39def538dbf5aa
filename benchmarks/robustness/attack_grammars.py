"""Grammars that attack: requests for structured output that crash, stall or fill a server without limits. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Fields = Mapping[str, Any]
"""Fields of a request that ask for structured output."""


def chain(links: int, levels: int = 1) -> dict[str, Any]:
    """A schema whose definitions each hold the next one, so many levels deep."""

    def link(at: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"$ref": f"#/$defs/d{at + 1}"}
        for _ in range(levels):
            schema = {"items": schema}
        return schema

    definitions = {f"d{at}": link(at) for at in range(links)} | {f"d{links}": {}}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def form(schema: dict[str, Any]) -> Fields:
    """A schema as `response_format`."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def lark(text: str) -> Fields:
    """A grammar as `structured_outputs`."""
    return {"structured_outputs": {"grammar": text}}


RULES = 4000
WIDE = {
    "type": "object",
    "properties": {f"name{at}": {"type": "string", "description": "d" * 60} for at in range(2000)},
}
AMBIGUOUS = (
    'start: a\na: a a | a a a | a a a a | "a" | b | c\nb: a b | b a | "a" | a a a | b a b | c a\n'
    'c: a b a | b b a | "a" | c c | c a b'
)
GRAMMARS: dict[str, tuple[Fields, int, tuple[str, ...]]] = {
    "a chain of 1,000 $refs": (form(chain(1000)), 4, ("400",)),
    "$refs that overflow a stack": (form(chain(490, 20)), 4, ("400",)),
    "a chain of 4,000 rules": (
        lark("start: r0\n" + "".join(f"r{at}: r{at + 1}\n" for at in range(RULES)) + f'r{RULES}: "a"\n'), 4, ("400",)
    ),
    "an ambiguous grammar": (lark(AMBIGUOUS), 4, ("400",)),
    "240 KB of line breaks in GBNF": (lark("\n" * 240_000 + 'root ::= "a"'), 8, ("400",)),
    "60 KB of rules in GBNF": (
        lark("root ::= r0\n" + "".join(f"r{at} ::= r{at + 1}\n" for at in range(3000)) + 'r3000 ::= "a"\n'), 8, ("400",)
    ),
    "a regular expression of 250 KB": ({"structured_outputs": {"regex": "(foo|bar){3}x" * 19_000}}, 2, ("200", "400")),
    "64 choices by a schema of 200 KB": ({**form(WIDE), "n": 64}, 1, ("200", "400")),
}  # fmt: skip
"""By name: what is asked for, on how many connections, and what may be answered."""
