"""A model of GPT-OSS's kind is detected, prompted and constrained to a format."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tokenizers_made import byte_level

from holdfast.core.types import Grammar, SamplingParams
from holdfast.engine.client.text import Text
from holdfast.server.formats.harmony import TAGS
from holdfast.server.formats.parts import Reasoning, Said
from holdfast.server.formats.registry import AnswerFormat, Reading
from holdfast.server.formats.toolset import Tool, Toolset

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.thinking }}|{{ m.reasoning_content }}]{% endfor %}"
    "{% if tools %}{{ tools[0].function.name }}{% endif %}<|start|>assistant"
)


@pytest.fixture(scope="module")
def text() -> Iterator[Text]:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(list(TAGS))
    text = Text(tokenizer, TEMPLATE)
    yield text
    text.close()


def test_the_vocabulary_selects_the_format_and_answers_are_read_without_tools_too(text: Text) -> None:
    format = AnswerFormat.find(text)
    assert format.calls.name == "openai" and format.reasoning is None
    reading = Reading(format, None, {})
    assert not reading.plain
    assert reading.shown == {text.token_id(tag) for tag in TAGS}
    reader = reading.reader()
    assert reader.push("<|channel|>analysis<|message|>Hm") == [Reasoning("Hm")]
    assert reader.thinking
    assert reader.push("<|end|><|start|>assistant<|channel|>final<|message|>Yes") == [Said("Yes")]
    assert not reader.thinking


def test_completions_are_returned_unparsed(text: Text) -> None:
    reading = Reading(AnswerFormat.find(text).unread, None, {})
    assert reading.plain and not reading.shown


def test_the_template_gets_reasoning_of_an_open_turn_under_its_own_name(text: Text) -> None:
    reading = Reading(AnswerFormat.find(text), Toolset((Tool("f"),)), {})
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    said = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ]
    prompt = reading.render(text, said)
    assert prompt == "[user|a||][assistant||hm|][tool|1||]f<|start|>assistant"


def test_a_format_of_the_answer_applies_to_the_final_channel(text: Text) -> None:
    params = SamplingParams(grammar=Grammar("regex", "yes|no"))
    grammar = Reading(AnswerFormat.find(text), None, {}).constrained(params).grammar
    assert grammar is not None and grammar.kind == "lark"
    channel = text.token_id("<|channel|>")
    assert f'<[{channel}]> "final" <[{text.token_id("<|message|>")}]> ANSWER' in grammar.text
    assert f'<[{channel}]> "analysis"' in grammar.text
