"""Grammars of calls: every answer that follows a grammar is read as valid calls of the requested tools."""

from __future__ import annotations

import json
import re
from functools import cache
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from holdfast.core.types import Grammar, SamplingParams
from holdfast.engine.client.text import Text, TextStream
from holdfast.lm.grammar.compiler import GrammarCompiler
from holdfast.server.formats.custom import custom_tool
from holdfast.server.formats.parts import Arguments, CallBegin, Input, Reasoning, Said
from holdfast.server.formats.registry import AnswerFormat, Reading
from holdfast.server.formats.toolset import Tool, Toolset

END = "<|stop|>"
STRICT = Tool(
    "get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "unit"],
    },
    strict=True,
)
DEEP = Tool(
    "book-it",
    parameters={
        "type": "object",
        "properties": {"who": {"$ref": "#/$defs/name"}, "when": {"type": "array", "items": {"type": "boolean"}}},
        "required": ["who"],
        "$defs": {"name": {"type": "string", "pattern": "^[A-Z]{1,3}$"}},
    },
    strict=True,
)
LOOSE = Tool("now")
TOOLS = (STRICT, DEEP, LOOSE)
SPECIAL = {
    "hermes": ("<tool_call>", "</tool_call>", "<think>", "</think>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>", "<think>", "</think>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    "openai": ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>"),
}


@cache
def text_of(tags: tuple[str, ...], special: bool = True) -> Text:
    """Return a byte-level vocabulary with some pieces and with these tags as tokens. Its template knows tools."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.add_tokens([AddedToken(tag, special=special) for tag in tags])
    return Text(tokenizer, f"{{{{ tools }}}} {' '.join(tags)}")


@cache
def compiler_of(text: Text) -> GrammarCompiler:
    """The compiler of a vocabulary. Each has a process of its own, in which it tests grammars."""
    return GrammarCompiler(
        text._tokenizer.to_str, -(-text._tokenizer.get_vocab_size() // 64) * 64, [text.token_id(END)]
    )


class Model:
    """A model that draws each token from those that a grammar allows."""

    def __init__(self, text: Text, seed: int) -> None:
        self.text = text
        self.end = text.token_id(END)
        self.compiler = compiler_of(text)
        self.rng = Random(seed)

    def answer(self, grammar: Grammar, most: int = 1500) -> list[int] | None:
        """Return the tokens of an answer; None for one that does not end."""
        (matcher, _), tokens = self.compiler.begin(grammar), list[int]()
        mask = np.zeros(self.compiler.words, np.int32)
        while len(tokens) < most:
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if self.end in allowed and (len(allowed) == 1 or self.rng.random() < 0.2):
                return tokens
            allowed = allowed[allowed != self.end]
            # Tags and the ends of strings come more often than in a fair draw, so that answers are short.
            ends = [token for token in allowed if token >= 256 or chr(token) in '"<]}']
            drawn = ends if ends and self.rng.random() < 0.3 else allowed
            tokens.append(int(drawn[self.rng.randrange(len(drawn))]))
            assert matcher.consume_token(tokens[-1]), self.text.decode(tokens, skip_special_tokens=False)
        return None


def read(reading: Reading, text: Text, tokens: list[int]) -> tuple[list[tuple[str, str]], str, str]:
    """Return the calls of an answer, its text, and its reasoning."""
    calls: list[tuple[str, str]] = []
    said, thought = "", ""
    for part in reading.reader().push(TextStream(text, shown=reading.shown).push(tokens, last=True), last=True):
        match part:
            case CallBegin(name):
                calls.append((name, ""))
            case Arguments(more):
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
            case Said(more):
                said += more
            case Reasoning(more):
                thought += more
    return calls, said, thought


@pytest.mark.each_pair("llama3_json-special-auto-False")
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("mode", ["required", "auto"])
@pytest.mark.parametrize("tokens", ["special", "added", "text"])
@pytest.mark.parametrize("name", list(SPECIAL))
def test_every_answer_that_follows_the_grammar_is_read_as_valid_calls(
    name: str, tokens: str, mode: Any, parallel: bool
) -> None:
    text = text_of(SPECIAL[name] if tokens != "text" else (), special=tokens == "special")
    model = Model(text, seed=len(name))
    toolset = Toolset(TOOLS, mode, parallel)
    reading = Reading(AnswerFormat.find(text, name, "none" if tokens == "text" else None), toolset, {})
    schemas: dict[str, Any] = {tool.name: dict(tool.schema) for tool in TOOLS}
    ended = 0
    for opened in (False, True):
        reading.opened = opened and reading.format.reasoning is not None
        grammar = reading.constrained(SamplingParams(max_tokens=9)).grammar
        assert grammar is not None
        for _ in range(4):
            answer = model.answer(grammar)
            if answer is None:
                continue
            ended += 1
            calls, _, _ = read(reading, text, answer)
            assert calls or mode == "auto"
            assert parallel or len(calls) <= 1
            for called, arguments in calls:
                jsonschema.validate(json.loads(arguments), schemas[called])
    assert ended >= 3
    text.close()


@pytest.mark.each_pair
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("tokens", ["special", "text"])
@pytest.mark.parametrize("name", list(SPECIAL))
def test_the_input_of_every_call_follows_the_grammar_of_its_tool(name: str, tokens: str, parallel: bool) -> None:
    text = text_of(SPECIAL[name] if tokens == "special" else ())
    model = Model(text, seed=len(name))
    lines = custom_tool(
        "lines", lark='start: (WORD ";")~1..2 "\\n"\nWORD: /"[^";]{0,2}"/ | /[a-z\\t]{1,3}/\n%ignore /[ \\n]/'
    )
    toolset = Toolset((lines, custom_tool("digits", pattern="[0-9]{2}\\n"), LOOSE), "required", parallel)
    reading = Reading(AnswerFormat.find(text, name, "none" if tokens == "text" else None), toolset, {})
    grammar = reading.constrained(SamplingParams(max_tokens=9)).grammar
    assert grammar is not None
    inputs: dict[str, list[str]] = {"lines": [], "digits": [], "now": []}
    for _ in range(24):
        if (answer := model.answer(grammar)) is None:
            continue
        called = ""
        for part in reading.reader().push(TextStream(text, shown=reading.shown).push(answer, last=True), last=True):
            if isinstance(part, CallBegin):
                called = part.name
                inputs[called].append("")
            elif isinstance(part, Input):
                inputs[called][-1] += part.text
    assert len(inputs["lines"]) > 1
    line = r'(("[^";]{0,2}"|[a-z\t]{1,3})[ \n]*;[ \n]*){1,2}\n[ \n]*'
    assert [each for each in inputs["lines"] if not re.fullmatch(line, each)] == []
    assert [each for each in inputs["digits"] if not re.fullmatch(r"[0-9]{2}\n", each)] == []
    text.close()


@pytest.mark.parametrize("name", list(SPECIAL))
def test_a_required_call_of_a_function_without_parameters_has_no_arguments(name: str) -> None:
    text = text_of(SPECIAL[name])
    model = Model(text, seed=len(name))
    tools = (
        LOOSE,
        Tool("then", parameters={"type": "object", "properties": {}}),
        Tool("any", parameters={"type": "object"}),
    )
    found: dict[str, set[str]] = {tool.name: set() for tool in tools}
    for tool in tools:
        reading = Reading(AnswerFormat.find(text, name), Toolset((tool,), "required", False), {})
        grammar = reading.constrained(SamplingParams(max_tokens=9)).grammar
        assert grammar is not None
        for _ in range(8):
            if (answer := model.answer(grammar)) is not None:
                found[tool.name] |= {arguments for _, arguments in read(reading, text, answer)[0]}
    assert [json.loads(arguments) for arguments in found["now"] | found["then"]] == [{}]
    if name != "qwen3_coder":  # Without named properties its XML has none.
        assert found["any"] - {"{}"}
    text.close()


def test_a_named_function_is_the_only_one_that_can_be_called() -> None:
    text = text_of(SPECIAL["hermes"])
    model = Model(text, seed=3)
    reading = Reading(AnswerFormat.find(text), Toolset(TOOLS, "required", False, frozenset(["now"])), {})
    grammar = reading.constrained(SamplingParams(max_tokens=9)).grammar
    assert grammar is not None
    for _ in range(5):
        answer = model.answer(grammar)
        assert answer is None or [name for name, _ in read(reading, text, answer)[0]] == ["now"]
    text.close()


@pytest.mark.each_value
@pytest.mark.parametrize(
    "asked",
    [
        Grammar("json", '{"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 2}'),
        Grammar("regex", r"\[[0-9]{1,2}(/|\n)?\]"),
        Grammar("lark", 'start: "[" NUMBER "]"\nNUMBER: /[0-9]{1,2}/'),
        Grammar("lark", '%llguidance {}\nstart: TEXT call\nTEXT: /\\[[0-9]/\ncall: answer\nanswer: "]"\n%ignore /x/'),
    ],
)
@pytest.mark.parametrize("with_tools", [False, True])
def test_a_clients_grammar_applies_after_the_reasoning(asked: Grammar, with_tools: bool) -> None:
    text = text_of(SPECIAL["hermes"])
    model = Model(text, seed=5)
    reading = Reading(AnswerFormat.find(text), Toolset((LOOSE,)) if with_tools else None, {})
    reading.opened = True
    grammar = reading.constrained(SamplingParams(max_tokens=9, grammar=asked)).grammar
    assert grammar is not None
    answers = [found for _ in range(8) if (found := model.answer(grammar)) is not None]
    seen = [read(reading, text, answer) for answer in answers]
    assert any(thought for _, _, thought in seen)
    assert all(said.startswith("[") and said.rstrip().endswith("]") for calls, said, _ in seen if not calls)
    assert with_tools or not any(calls for calls, _, _ in seen)
    text.close()
