"""Custom tools, whose input is any text. A model calls one like a function with a single argument, the input.

So each format of calls can write them. A regular expression for the input is a pattern of the argument's schema. A
grammar is rewritten for text within JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any

from holdfast.lm.grammar.quoted_lark import quoted_lark
from holdfast.server.formats.toolset import Tool

INPUT = "input"
"""Name of the only argument."""
BEGIN = re.compile(r'\s*\{\s*"' + INPUT + r'"\s*:\s*"')
HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
ESCAPES = rf"{HIGH}\\u[0-9a-fA-F]{{4}}|{HIGH}(?=[^\\]|\\[^u])|\\u(?![dD][89abAB])[0-9a-fA-F]{{4}}|\\[^u]"
STRING = re.compile(rf'(?:[^"\\]|{ESCAPES})*', re.DOTALL)
"""The inside of a JSON string, up to its end or to an escape that is incomplete. A surrogate pair is one escape."""


def custom_tool(name: str, description: str = "", pattern: str | None = None, lark: str | None = None) -> Tool:
    """Return a custom tool. The whole input matches `pattern`, a regular expression, or follows `lark`, a grammar.

    If both are None, it is any text. Raises ValueError for a grammar that is not supported within JSON.
    """
    if lark is not None:
        quoted_lark(lark)
    field = {"type": "string"}
    if pattern is not None:
        field["pattern"] = f"^(?:{pattern})$"
    if lark is not None:
        field["description"] = f"Text that follows this grammar in Lark:\n{lark}"
    schema = {"type": "object", "properties": {INPUT: field}, "required": [INPUT], "additionalProperties": False}
    return Tool(name, description, schema, strict=bool(pattern is not None or lark), custom=True, grammar=lark or "")


def input_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a past call."""
    return {INPUT: text}


class InputReader:
    """Reads the input out of one call's arguments, which are JSON that arrives in pieces."""

    def __init__(self) -> None:
        self._rest = ""
        """Text that is not decoded yet."""
        self._begun = self._ended = False

    def push(self, text: str) -> str:
        """Add a piece of the arguments. Returns the next part of the input."""
        if self._ended:
            return ""
        self._rest += text
        if not self._begun:
            found = BEGIN.match(self._rest)
            if found is None:
                return ""
            self._rest, self._begun = self._rest[found.end() :], True
        body = STRING.match(self._rest)
        assert body is not None
        whole, self._rest = body[0], self._rest[body.end() :]
        self._ended = self._rest.startswith('"')
        return _decoded(whole)

    def end(self) -> str:
        """Return the rest of the input. It is all of the arguments if the model wrote them in another form."""
        if self._begun:
            return ""
        try:
            given = json.loads(self._rest)
        except (ValueError, RecursionError):
            return self._rest
        if isinstance(given, dict) and len(given) == 1:
            (given,) = given.values()  # Some models give the argument another name.
        return whole_characters(given) if isinstance(given, str) else self._rest


def _decoded(text: str) -> str:
    """Decode the inside of a JSON string. An invalid escape stays as it is."""
    try:
        found = json.loads(f'"{text}"', strict=False)
    except ValueError:
        return text
    return whole_characters(str(found))


def whole_characters(text: str) -> str:
    """Replace halves of surrogate pairs, which a model can write as escapes and which no JSON can be sent with."""
    return text.encode(errors="replace").decode()
