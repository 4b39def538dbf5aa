"""Grammars of answers that call tools, in llguidance's dialect of Lark: reasoning, tags, and arguments by schema.

Tags that are tokens are written by id, because llguidance treats added tokens as special, and free text cannot contain
them. A tag that is ordinary text ends free text where it first occurs, by a lazy lexeme (llguidance, docs/syntax.md,
"Tool calling").
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.core.types import Grammar
from holdfast.lm.grammar.dialects import laid_out, regex_lexeme
from holdfast.lm.grammar.quoted_lark import quoted_lark
from holdfast.server.formats.custom import INPUT
from holdfast.server.formats.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, NAMESPACE, START
from holdfast.server.formats.tagged import CLOSE, FUNCTION, FUNCTION_END, OPEN, PARAMETER, PARAMETER_END
from holdfast.server.formats.toolset import Tool, Toolset

MOST_CALLS = 32
"""Maximum number of calls that a grammar allows in one answer."""
PLAIN = {"type", "description", "title", "default", "examples", "enum"}
"""Keywords that a string's schema may have if the call is written in XML, where strings have no quotes."""
PLAIN_OBJECT = {"type", "properties", "required", "additionalProperties", "description", "title", "$schema"}
"""Keywords that a schema of arguments may have if each argument is written separately."""

TokenOf = Callable[[str], int | None]
"""Function that returns the token id of a tag; None if the tag is ordinary text."""


class GrammarText:
    """A grammar under construction, as rules by name."""

    def __init__(self, token: TokenOf) -> None:
        self.token = token
        self.rules: dict[str, str] = {}

    def written(self, start: str) -> str:
        """Return the whole grammar as text."""
        rules = "".join(f"{name}: {rule}\n" for name, rule in self.rules.items())
        return f"%llguidance {{}}\nstart: {start}\n{rules}TEXT: /(.|\\n)*/\nBLANKS: /[ \\n]+/\n"

    def tag(self, tag: str) -> str:
        """Return the expression for a tag."""
        id = self.token(tag)
        return literal(tag) if id is None else f"<[{id}]>"

    def up_to(self, name: str, tag: str) -> str:
        """Add a rule for any text up to and including the tag. Returns the rule's name."""
        if self.token(tag) is None:
            self.rules[f"{name}[lazy]"] = f"TEXT {literal(tag)}"
        else:
            self.rules[name] = f"TEXT {self.tag(tag)}"
        return name

    def schema(self, name: str, schema: Mapping[str, Any], *, lenient: bool = False) -> str:
        """Add a rule for JSON that follows a schema. Returns the rule's name.

        `lenient` ignores keywords that llguidance does not know.
        """
        self.rules[name] = f"%json {json.dumps(laid_out(schema, lenient=lenient), ensure_ascii=False)}"
        return name

    def arguments(self, at: int, tool: Tool) -> str:
        """Add a rule for the arguments of a tool, which is number `at`. Returns the rule's name."""
        name = f"arguments_{at}"
        if not tool.grammar:
            return self.schema(name, arguments_schema(tool), lenient=not tool.strict)
        begin, end = json.dumps({INPUT: "|"}).split("|")
        self.rules[name] = f"{literal(begin)} %lark {{\n{quoted_lark(tool.grammar)}}} {literal(end)}"
        return name

    def answer(self, given: Grammar) -> str:
        """Add the client's grammar of the whole answer. Returns the name of its rule."""
        if given.kind == "json":
            self.rules["answer"] = f"%json {given.text}"
            return "answer"
        if given.kind == "regex":
            self.rules["ANSWER"] = regex_lexeme(given.text)
            return "ANSWER"
        # Within braces, so that its names and what it ignores are its own.
        self.rules["answer"] = f"%lark {{\n{given.text}\n}}"
        return "answer"

    def reasoning(self, open: str, close: str, opened: bool) -> str:
        """Return the expression for reasoning before the answer. `opened`: the prompt ends with the opening tag."""
        thought = self.up_to("thought", close)
        return f"{thought} BLANKS? " if opened else f"({self.tag(open)} {thought} BLANKS?)? "


def literal(text: str) -> str:
    """Return a text as a string literal of the grammar; an empty string for an empty text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments: an object, without further properties unless the tool allows them."""
    schema = dict(tool.schema)
    schema.setdefault("type", "object")
    if "properties" in schema and not {"patternProperties", "allOf", "anyOf", "oneOf", "$ref"} & schema.keys():
        schema.setdefault("additionalProperties", False)
    return schema


def named(grammar: GrammarText, at: int, tool: Tool, key: str = "arguments") -> str:
    """Return the expression for a call as a JSON object."""
    arguments = grammar.arguments(at, tool)
    before = f'{{"name": {json.dumps(tool.name)}, "{key}": '
    return f"{literal(before)} {arguments} {literal('}')}"


def any_of(grammar: GrammarText, name: str, rules: Sequence[str]) -> str:
    """Add a rule for any one of several rules. Returns the new rule's name."""
    grammar.rules[name] = " | ".join(rules)
    return name


def several(call: str, between: str, toolset: Toolset) -> str:
    """Return the expression for one call, or for several calls if the toolset allows them."""
    if not toolset.parallel:
        return call
    return f"{call} ({between} {call}){{0,{MOST_CALLS - 1}}}"


def tagged(grammar: GrammarText, toolset: Toolset, write: Callable[[GrammarText, int, Tool], str]) -> str:
    """Return the expression for calls between tags. Text may surround them, unless the model must call."""
    calls = [f'"\\n"? {write(grammar, at, tool)} "\\n"?' for at, tool in enumerate(toolset.callable)]
    call = f"{any_of(grammar, 'call', calls)} {grammar.tag(CLOSE)}"
    if toolset.mode == "required":
        return several(f"{grammar.tag(OPEN)} {call}", '"\\n"?', toolset)
    return f"({grammar.up_to('begin', OPEN)} {call}){{0,{MOST_CALLS if toolset.parallel else 1}}} TEXT"


def hermes(grammar: GrammarText, toolset: Toolset) -> str:
    """Return the expression for calls of Hermes, Qwen and the built-in model."""
    return tagged(grammar, toolset, named)


def qwen_coder(grammar: GrammarText, toolset: Toolset) -> str:
    """Return the expression for calls of Qwen3-Coder.

    A call is JSON if XML cannot express its schema.
    """
    if toolset.mode == "required":
        return tagged(grammar, toolset, xml_or_json)
    # A function may also come without the outer tag. Its arguments must then follow the schema, too.
    body = tagged(grammar, toolset, xml_or_json).removesuffix("TEXT")
    bare = [
        f"{literal(function.removeprefix(FUNCTION))} {rest}"
        for at, tool in enumerate(toolset.callable)
        if (parts := xml(grammar, at, tool)) is not None
        for function, rest in [parts]
    ]
    if not bare:
        return f"{body} TEXT"
    begin = grammar.up_to("bare", FUNCTION)
    return f"{body} ({begin} {any_of(grammar, 'function', bare)})? TEXT"


def xml_or_json(grammar: GrammarText, at: int, tool: Tool) -> str:
    """Return the expression for a call: XML if its schema is simple enough, else JSON."""
    parts = xml(grammar, at, tool)
    return named(grammar, at, tool) if parts is None else f"{literal(parts[0])} {parts[1]}"


def xml(grammar: GrammarText, at: int, tool: Tool) -> tuple[str, str] | None:
    """Return the opening of a call in XML, and its remainder; None if XML cannot express the schema."""
    schema = arguments_schema(tool)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not schema.keys() <= PLAIN_OBJECT or schema["type"] != "object" or not {*required} <= properties.keys():
        return None
    if tool.grammar:  # It is written for JSON.
        return None
    rules = []
    for number, (name, given) in enumerate(properties.items()):
        value = _xml_value(grammar, f"value_{at}_{number}", given)
        if value is None or not re.fullmatch(r"[\w.-]+", name):
            return None
        rule = f"{literal(f'{PARAMETER}{name}>')} {literal(chr(10))} {value} {literal(chr(10))}"
        rules.append(rule if name in required else f"({rule})?")
    rest = f"{literal(chr(10))} {' '.join(rules)} {literal(FUNCTION_END)}"
    return f"{FUNCTION}{tool.name}>", rest


def _xml_value(grammar: GrammarText, name: str, schema: Any) -> str | None:
    """Return the expression for one argument, up to the end of its tag; None if XML cannot express its schema."""
    if not isinstance(schema, Mapping) or not isinstance(kind := schema.get("type"), str):
        return None
    if kind != "string":
        return f"{grammar.schema(name, schema)} {literal(chr(10) + PARAMETER_END)}"
    if not schema.keys() <= PLAIN:
        return None
    if "enum" not in schema:
        return grammar.up_to(name, PARAMETER_END)
    values = schema["enum"]
    if not values or not all(isinstance(value, str) and re.fullmatch(r"[^\n<]+", value) for value in values):
        return None
    grammar.rules[name] = " | ".join(map(literal, values))
    return f"{name} {literal(chr(10) + PARAMETER_END)}"


def llama(tag: str) -> Callable[[GrammarText, Toolset], str]:
    """Return the writer for calls of Llama 3: JSON objects, which are the whole answer or follow `tag`."""

    def write(grammar: GrammarText, toolset: Toolset) -> str:
        calls = [named(grammar, at, tool, "parameters") for at, tool in enumerate(toolset.callable)]
        whole = several(any_of(grammar, "call", calls), literal("; "), toolset)
        if toolset.mode == "required":
            return whole
        grammar.rules["calls"] = whole
        # An answer that begins with a brace is a call.
        grammar.rules["SAID"] = "/[ \\n]*[^ \\n{](.|\\n)*/"
        if grammar.token(tag) is None:
            return "(calls | SAID)?"
        return f"(calls | SAID? ({grammar.tag(tag)} calls)?)"

    return write


def mistral(tag: str, arguments: str) -> Callable[[GrammarText, Toolset], str]:
    """Return the writer for calls of Mistral.

    The calls are a list after `tag`. If the model has the tag `arguments`, each call instead consists of its name, this
    tag and its arguments.
    """

    def write(grammar: GrammarText, toolset: Toolset) -> str:
        if grammar.token(arguments) is None:
            calls = [named(grammar, at, tool) for at, tool in enumerate(toolset.callable)]
            call = any_of(grammar, "call", calls)
            whole = f"{literal('[')} {several(call, literal(', '), toolset)} {literal(']')}"
        else:
            calls = [
                f"{literal(tool.name)} {grammar.tag(arguments)} {grammar.arguments(at, tool)}"
                for at, tool in enumerate(toolset.callable)
            ]
            whole = several(any_of(grammar, "call", calls), grammar.tag(tag), toolset)
        if toolset.mode == "required":
            return f"{grammar.tag(tag)} {whole}"
        return f"({grammar.up_to('begin', tag)} {whole} | TEXT)"

    return write


def harmony(grammar: GrammarText, toolset: Toolset) -> str:
    """Return the expression for calls of GPT-OSS. Each call ends its answer.

    Unless the model must call, it may answer in the final channel instead.
    """
    calls = []
    for at, tool in enumerate(toolset.callable):
        arguments = grammar.arguments(at, tool)
        to = literal(f"commentary to={NAMESPACE}{tool.name} ")
        calls.append(f"{to} {grammar.tag(CONSTRAIN)} {literal('json')} {grammar.tag(MESSAGE)} {arguments}")
    call = f"{grammar.tag(CHANNEL)} {any_of(grammar, 'call', calls)} {grammar.tag(CALL)}?"
    if toolset.mode == "required":
        return call
    preamble = f"{grammar.tag(CHANNEL)} {literal('commentary')} {grammar.tag(MESSAGE)} {grammar.up_to('preamble', END)}"
    return f"({preamble} {next_message(grammar)})? ({call} | {final(grammar, 'TEXT')})"


def next_message(grammar: GrammarText) -> str:
    """Return the expression for the beginning of another message of the model."""
    return f"{grammar.tag(START)} {literal('assistant')}"


def final(grammar: GrammarText, answer: str) -> str:
    """Return the expression for an answer in the final channel of GPT-OSS."""
    return f"{grammar.tag(CHANNEL)} {literal('final')} {grammar.tag(MESSAGE)} {answer}"


def after_analysis(grammar: GrammarText, body: str) -> str:
    """Return the expression for `body` after optional reasoning of GPT-OSS."""
    thought = f"{grammar.tag(CHANNEL)} {literal('analysis')} {grammar.tag(MESSAGE)} {grammar.up_to('thought', END)}"
    return f"({thought} {next_message(grammar)})? {body}"
