"""Custom tools: the input of a call, read from the arguments that the model writes."""

from __future__ import annotations

import json

import pytest

from holdfast.server.formats.custom import InputReader, custom_tool, input_arguments
from holdfast.server.formats.parts import CallBegin, Input, Said
from holdfast.server.formats.reader import AnswerReader
from holdfast.server.formats.tagged import TaggedCalls

TEXTS = ["", "print('hi')", 'a "quoted"\n\tline', "back\\slash \\u0041 \\", "é 日本 😀😀", "}{][\x01", '"}']


def read(pieces: list[str]) -> str:
    reader = InputReader()
    return "".join([*map(reader.push, pieces), reader.end()])


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("ascii", [True, False])
def test_an_input_is_the_same_however_its_arguments_are_split(text: str, ascii: bool) -> None:
    arguments = json.dumps(input_arguments(text), ensure_ascii=ascii)
    for size in (1, 2, 3, 5, 7, len(arguments)):
        assert read([arguments[at : at + size] for at in range(0, len(arguments), size)]) == text


def test_an_input_comes_as_it_is_written() -> None:
    reader = InputReader()
    pieces = ['{"inp', 'ut": "ab', "c\\", "n\\ud83d", "\\ude00d", '"', "}"]
    assert [reader.push(piece) for piece in pieces] == ["", "ab", "c", "\n", "😀d", "", ""]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"code": "a = 1"}', "a = 1"),
        ('"a = 1"', "a = 1"),
        ('{"code": "a", "more": "b"}', '{"code": "a", "more": "b"}'),
        ('{"input": 3}', '{"input": 3}'),
        ("a = 1", "a = 1"),
        ("", ""),
    ],
)
def test_arguments_of_another_form_are_the_input(arguments: str, text: str) -> None:
    assert read([arguments]) == text


@pytest.mark.parametrize("arguments", ['{"input": "a\\ud83d b"}', '"a\\ud83d b"'])
def test_half_of_a_pair_is_replaced(arguments: str) -> None:
    assert read([*arguments]) == read([arguments]) == "a? b"


def test_a_cut_input_has_no_half_of_an_escape() -> None:
    assert read(['{"input": "ab\\u00']) == "ab"


def test_an_answer_has_the_inputs_of_custom_tools_and_the_arguments_of_functions() -> None:
    reader = AnswerReader(TaggedCalls({}), custom={"run"})
    text = (
        'Well.<tool_call>{"name": "run", "arguments": {"input": "a\\nb"}}</tool_call>'
        '<tool_call>{"name": "run", "arguments": {"code": "c"}}</tool_call>'
        '<tool_call>{"name": "add", "arguments": {"input": "d"}}</tool_call>'
    )
    parts = reader.push(text, last=True)
    assert parts[:4] == [Said("Well."), CallBegin("run", True), Input("a\nb"), CallBegin("run", True)]
    assert parts[4:6] == [Input("c"), CallBegin("add")]
    assert "".join(part.text for part in parts[6:] if not isinstance(part, CallBegin)) == '{"input": "d"}'


def test_a_pattern_holds_for_the_whole_input() -> None:
    tool = custom_tool("run", pattern="a|b")
    assert tool.schema["properties"]["input"]["pattern"] == "^(?:a|b)$"
    assert tool.strict and not custom_tool("run").strict
