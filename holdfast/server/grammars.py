"""Converts structured output parameters to grammars: OpenAI's `response_format` and vLLM's parameters. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from holdfast.core.types import MAX_GRAMMAR_LENGTH, Grammar
from holdfast.lm.grammar.dialects import (
    COMPACT,
    choice_grammar,
    closed,
    context_free_grammar,
    schema_grammar,
    spaced,
    tags_grammar,
)
from holdfast.lm.grammar.structural_tags import structural_grammar

MAX_CHOICES = 4096
MAX_STRUCTURES = 256

Text = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]
GivenSchema = Text | dict[str, Any] | bool
Choices = Annotated[list[Text], Meta(min_length=1, max_length=MAX_CHOICES)]

ANY_OBJECT = {"type": "object"}


class StructuredOutputs(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The `structured_outputs` parameter of vLLM: exactly one of the first six fields, and JSON's layout."""

    json: GivenSchema | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool = False
    structural_tag: Text | dict[str, Any] | None = None
    whitespace_pattern: Text | None = None
    """Regular expression for the whitespace between JSON tokens."""
    disable_any_whitespace: bool = False
    """Whether to allow no whitespace between JSON tokens. By default one space follows each comma and colon."""
    disable_additional_properties: bool = False
    """Whether an object whose schema lists properties may have no others, unless the schema says which."""
    disable_fallback: bool = False
    """Accepted without effect, because there is only one backend."""


class GrammarFault(ValueError):
    """An error in a request for structured output. `param` names the parameter."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def of_format(wanted: Mapping[str, Any], param: str) -> Grammar | None:
    """Return the grammar of a `response_format` or a `text.format`; None for plain text. Raises GrammarFault."""
    kind = wanted.get("type")
    if kind == "text":
        taken(wanted, ("type",), param)
        return None
    if kind == "json_object":
        taken(wanted, ("type",), param)
        return schema_grammar(ANY_OBJECT)
    if kind == "structural_tag":
        return of_tags(wanted, param)
    if kind != "json_schema":
        raise GrammarFault(
            f"{param}.type is {json.dumps(kind)[:40]}; supported: text, json_object, json_schema, structural_tag",
            f"{param}.type",
        )
    inner, path = wanted, param
    if not wanted.keys() & {"schema", "json_schema"}:
        missing = f"{param}.{'schema' if param == 'text.format' else 'json_schema'}"
        raise GrammarFault(f"{missing} is missing", missing)
    if "json_schema" in wanted:  # Chat completions nest the schema one level deeper than Responses.
        taken(wanted, ("type", "json_schema"), param)
        inner, path = wanted["json_schema"], f"{param}.json_schema"
        if not isinstance(inner, Mapping):
            raise GrammarFault(f"{path} must be an object with name and schema", path)
    taken(inner, ("type", "name", "description", "schema", "strict"), path)
    schema, strict = inner.get("schema"), inner.get("strict")
    if not isinstance(schema, dict | bool):
        raise GrammarFault(f"{path}.schema must be a JSON schema", f"{path}.schema")
    if not isinstance(strict, bool | None):
        raise GrammarFault(f"{path}.strict must be true or false", f"{path}.strict")
    return made(lambda: schema_grammar(schema, lenient=not strict), f"{path}.schema")


def of_structured_outputs(wanted: StructuredOutputs, param: str) -> Grammar:
    """Return the grammar of `structured_outputs`. Raises GrammarFault, also if not exactly one kind is given."""
    names = ("json", "regex", "choice", "grammar", "structural_tag")
    given = [name for name in names if getattr(wanted, name) is not None]
    given += ["json_object"] if wanted.json_object else []
    if len(given) != 1:
        what = f"has {' and '.join(given)}" if given else "is empty"
        raise GrammarFault(
            f"{param} {what}; give one of json, regex, choice, grammar, json_object, structural_tag", param
        )
    path = f"{param}.{given[0]}"
    layout: dict[str, Any] | None = COMPACT if wanted.disable_any_whitespace else None
    if wanted.whitespace_pattern is not None:
        layout = spaced(wanted.whitespace_pattern)
    if wanted.json is not None:
        return of_schema(wanted.json, path, layout, closes=wanted.disable_additional_properties)
    if wanted.regex is not None:
        return Grammar("regex", wanted.regex)
    if wanted.choice is not None:
        return of_choices(wanted.choice, path)
    if wanted.grammar is not None:
        return of_grammar(wanted.grammar, path)
    if wanted.structural_tag is not None:
        return of_tags(as_object(wanted.structural_tag, path), path)
    return schema_grammar(ANY_OBJECT, layout=layout)


def of_schema(
    schema: GivenSchema, param: str, layout: Mapping[str, Any] | None = None, *, closes: bool = False
) -> Grammar:
    """Return the grammar of JSON that follows a schema, given as an object or as text. Raises GrammarFault.

    With `closes`, objects have only the properties that their schemas list.
    """
    known = schema if isinstance(schema, bool) else as_object(schema, param)
    return made(lambda: schema_grammar(closed(known) if closes else known, layout=layout), param)


def of_choices(texts: list[str], param: str) -> Grammar:
    """Return the grammar of one of these texts. Raises GrammarFault."""
    return made(lambda: choice_grammar(texts), param)


def of_grammar(text: str, param: str) -> Grammar:
    """Return a grammar given in Lark or GBNF. Raises GrammarFault."""
    return made(lambda: context_free_grammar(text), param)


def of_tags(wanted: Mapping[str, Any], param: str) -> Grammar:
    """Return the grammar of a structural tag: a `format`, or `triggers`, and `structures` with begin, schema and end.

    Raises GrammarFault.
    """
    if wanted.get("format") is not None:
        taken(wanted, ("type", "format"), param)
        return made(lambda: structural_grammar(wanted["format"], f"{param}.format"), f"{param}.format")
    taken(wanted, ("type", "structures", "triggers"), param)
    structures, triggers = wanted.get("structures"), wanted.get("triggers")
    if not isinstance(structures, list) or not 0 < len(structures) <= MAX_STRUCTURES:
        raise GrammarFault(f"{param}.structures must be a list of 1 to {MAX_STRUCTURES} structures", param)
    if not isinstance(triggers, list) or not all(isinstance(each, str) for each in triggers):
        raise GrammarFault(f"{param}.triggers must be a list of texts", f"{param}.triggers")
    read = []
    for index, each in enumerate(structures):
        path = f"{param}.structures[{index}]"
        if not isinstance(each, dict) or not all(isinstance(each.get(name), str) for name in ("begin", "end")):
            raise GrammarFault(f"{path} must have begin, schema and end", path)
        taken(each, ("begin", "schema", "end"), path)
        read.append((each["begin"], as_object(each.get("schema"), f"{path}.schema"), each["end"]))
    return made(lambda: tags_grammar(read, triggers), param)


def as_object(given: Any, param: str) -> dict[str, Any]:
    """Return a JSON object that is given as an object or as text. Raises GrammarFault."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise GrammarFault(f"{param} is not JSON that can be read: {error}", param) from None
    if not isinstance(given, dict):
        raise GrammarFault(f"{param} must be a JSON object", param)
    return given


def taken(given: Mapping[str, Any], names: tuple[str, ...], param: str) -> None:
    """Raises GrammarFault for a field that is not in `names`."""
    for name, value in given.items():
        if name not in names and value is not None:
            raise GrammarFault(f"unknown parameter: {param}.{name[:64]}", f"{param}.{name[:64]}")


def made(make: Callable[[], Grammar], param: str) -> Grammar:
    """Return the result of `make`. Converts a ValueError to a GrammarFault."""
    try:
        return make()
    except RecursionError:
        raise GrammarFault(f"{param} nests too deeply", param) from None
    except ValueError as error:
        raise GrammarFault(str(error), param) from None
