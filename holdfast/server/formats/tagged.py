"""Calls between `<tool_call>` and `</tool_call>`: JSON objects (Hermes, Qwen, the built-in model) or XML (Qwen3-Coder).

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>

<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from holdfast.server.formats.objects import ObjectParser
from holdfast.server.formats.parts import held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
WORDS = {"true": True, "false": False, "null": None, "none": None}
"""Values that are also accepted in Python's spelling."""


class TaggedCalls(ObjectParser):
    """Reads JSON calls and XML calls. The model may write either."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], *, bare: bool = False) -> None:
        """`schemas` holds the schema of each tool's arguments by name. XML needs it, because it marks no strings.

        With `bare`, a function may also come without the outer tag.
        """
        super().__init__()
        self._tags = (OPEN, FUNCTION) if bare else (OPEN,)
        self._schemas = schemas
        self._properties: Mapping[str, Any] = {}
        self._count = 0
        """Number of arguments of the current function so far."""
        self._value = ""

    def outside(self) -> bool:
        match self.until(self._tags):
            case None:
                return False
            case "<function=":
                self.state = self._function
            case _:
                self.state = self._inside
        return True

    def _inside(self) -> bool:
        begun = self.rest.lstrip()
        if not begun:
            return False
        opening = OPEN + self.rest[: len(self.rest) - len(begun)]
        if begun[0] == "{":
            self.rest = begun
            self.begin_object(opening)
            self.state = self._json
        elif begun.startswith(FUNCTION):
            self.rest = begun[len(FUNCTION) :]
            self.state = self._function
        elif FUNCTION.startswith(begun) and not self.last:
            return False
        else:
            self.rest = begun
            self._no_call(opening)
        return True

    def _no_call(self, text: str) -> None:
        """Add text to the answer that looked like the beginning of a call."""
        self.speak(text)
        self.state = self.outside

    def _json(self) -> bool:
        return self.read_object(self._after)

    def _after(self) -> bool:
        """Read the text after a call: the closing tag, or another call within the tag."""
        if not self.skip_blanks():
            return False
        if self.rest.startswith(CLOSE):
            self.rest = self.rest[len(CLOSE) :]
            self.state = self.outside
        elif self.rest[0] == "{":
            self.state = self._inside  # Some models write several objects within one tag.
        elif CLOSE.startswith(self.rest):
            if self.last:  # The answer was cut within the tag.
                self.rest = ""
            return False
        else:
            self.state = self.outside
        return True

    def _function(self) -> bool:
        name, found, rest = self.rest.partition(">")
        if not found or "\n" in name or not name.strip():
            if "\n" not in name and not found and not self.last:
                return False
            self._no_call(FUNCTION)
            return True
        self.rest = rest
        name = name.strip().strip("\"'")
        self._properties = properties_of(self._schemas.get(name, {}))
        self._count = 0
        self.begin(name)
        self.state = self._parameters
        return True

    def _parameters(self) -> bool:
        if not self.skip_blanks():
            return False
        if self.rest.startswith(PARAMETER):
            name, found, rest = self.rest[len(PARAMETER) :].partition(">")
            if not found:
                return False
            self.rest = rest
            name = name.strip().strip("\"'")
            self.argue(f"{', ' if self._count else '{'}{json.dumps(name, ensure_ascii=False)}: ")
            self._count += 1
            self._value = ""
            kinds = kinds_of(self._properties.get(name, {}))
            self.state = self._break if kinds == {"string"} else self._other
        elif self.rest.startswith((FUNCTION_END, CLOSE)):
            self.rest = self.rest.removeprefix(FUNCTION_END)
            self.argue("}" if self._count else "{}")
            self.state = self._after
        elif any(self.awaits(tag) for tag in (PARAMETER, FUNCTION_END, CLOSE)):
            return False
        else:
            self.rest = self.rest[1:]
        return True

    def _break(self) -> bool:
        """Skip the line break before a string."""
        if not self.rest:
            return False
        self.argue('"')
        self.rest = self.rest.removeprefix("\n")
        self.state = self._string
        return True

    def _string(self) -> bool:
        at = self.rest.find(PARAMETER_END)
        if at < 0:
            size = len(self.rest) - held_back(self.rest, (f"\n{PARAMETER_END}", PARAMETER_END))
            self.argue(escaped(self.rest[:size]))
            self.rest = self.rest[size:]
            return False
        self.argue(escaped(self.rest[:at].removesuffix("\n")) + '"')
        self.rest = self.rest[at + len(PARAMETER_END) :]
        self.state = self._parameters
        return True

    def _other(self) -> bool:
        """Read a value that may not be a string. It is converted when it is complete."""
        at = self.rest.find(PARAMETER_END)
        if at < 0:
            return False
        value = self.rest[:at].removeprefix("\n").removesuffix("\n")
        self.argue(converted(value))
        self.rest = self.rest[at + len(PARAMETER_END) :]
        self.state = self._parameters
        return True


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the properties that a schema defines."""
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def kinds_of(schema: Any) -> set[str]:
    """Return the JSON types that a property may have; string if its schema names none."""
    if not isinstance(schema, Mapping):
        return {"string"}
    if isinstance(given := schema.get("type"), str):
        return {given}
    if isinstance(given, list):
        return {str(each) for each in given}
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list) and values:
        return {"string" if isinstance(value, str) else "other" for value in values}
    for way in ("anyOf", "oneOf"):
        if isinstance(several := schema.get(way), list):
            return set().union(*(kinds_of(each) for each in several))
    return {"other"} if {"$ref", "allOf", "properties", "items"} & schema.keys() else {"string"}


def converted(value: str) -> str:
    """Convert a value to JSON text. JSON stays as it is, constants are converted, and other text becomes a string."""
    if (word := value.strip().lower()) in WORDS:
        return json.dumps(WORDS[word])
    try:
        json.loads(value)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    return value.strip()


def escaped(text: str) -> str:
    """Escape text for the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
