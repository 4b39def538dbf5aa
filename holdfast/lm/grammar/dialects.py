"""Other ways to write a grammar, turned into `Grammar`: JSON schemas with a layout, choices, GBNF, structural tags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import StructTag

from holdfast.core.types import Grammar
from holdfast.lm.grammar.gbnf import any_to_lark

Schema = Mapping[str, Any] | bool

ONE_LINE: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is laid out unless a schema's `x-guidance` says otherwise: on one line, as Python's json.dumps does."""

VALUES = {"const", "default", "enum", "examples", "x-guidance"}
"""Keywords of a schema that hold values, not schemas."""
SCHEMAS = {"properties", "patternProperties", "$defs", "definitions"}
"""Keywords of a schema that hold schemas by name."""

COMPACT: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
"""No whitespace between the parts of JSON."""


def schema_grammar(schema: Schema, *, lenient: bool = False, layout: Mapping[str, Any] | None = None) -> Grammar:
    """JSON that a schema describes.

    `lenient` ignores keywords that llguidance does not know, instead of refusing the schema. `layout` has options of
    llguidance's compiler; by default JSON is on one line. Options of the schema's own `x-guidance` take precedence.
    """
    return Grammar("json", json.dumps(laid_out(schema, lenient=lenient, layout=layout), ensure_ascii=False))


def laid_out(schema: Schema, *, lenient: bool = False, layout: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A schema with its layout in `x-guidance`, as `schema_grammar` says. It can follow %json in a Lark grammar."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    own = schema.get("x-guidance")
    options = dict(ONE_LINE if layout is None else layout) | ({"lenient": True} if lenient else {})
    return {**schema, "x-guidance": options | (dict(own) if isinstance(own, Mapping) else {})}


def closed(schema: Any) -> Any:
    """A schema in which every object that lists properties has no others, unless its schema says which."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    inner: dict[str, Any] = {}
    for name, value in schema.items():
        if name in SCHEMAS and isinstance(value, Mapping):
            inner[name] = {key: closed(each) for key, each in value.items()}
        else:
            inner[name] = value if name in VALUES else closed(value)
    if isinstance(schema.get("properties"), Mapping) and not schema.keys() & {
        "additionalProperties",
        "patternProperties",
    }:
        inner["additionalProperties"] = False
    return inner


def spaced(pattern: str) -> dict[str, Any]:
    """The layout of JSON with text of this pattern, a regular expression, between its parts."""
    return COMPACT | {"whitespace_flexible": True, "whitespace_pattern": pattern}


def choice_grammar(texts: Sequence[str]) -> Grammar:
    """One of these texts."""
    return Grammar("lark", "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))


def regex_lexeme(expression: str) -> str:
    """A regular expression as Lark writes it, between slashes."""
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", expression, flags=re.DOTALL)
    return "/(" + escaped.replace("\n", r"\n") + ")/"


def context_free_grammar(text: str) -> Grammar:
    """A grammar in llguidance's Lark, or in llama.cpp's GBNF. Raises ValueError for GBNF that cannot be read."""
    try:
        return Grammar("lark", any_to_lark(text))
    except ValueError as error:
        raise ValueError(f"the grammar cannot be read: {error}") from None


def tags_grammar(structures: Sequence[tuple[str, Schema, str]], triggers: Sequence[str]) -> Grammar:
    """Free text in which what follows a trigger is one of the structures: its begin, JSON by its schema, and its end.

    Raises ValueError for a begin that no trigger begins.
    """
    tags = []
    for begin, schema, end in structures:
        trigger = next((each for each in triggers if each and begin.startswith(each)), None)
        if trigger is None:
            raise ValueError(f"no trigger begins {begin[:64]!r}; give one that does")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=laid_out(schema), end=end))
    return Grammar("lark", StructTag.to_grammar(tags, assume_special=False))
