"""Other ways to write a grammar match the texts that they describe."""

from __future__ import annotations

import json

import pytest

from holdfast.core.types import Grammar
from holdfast.lm.grammar.compiler import GrammarCompiler, GrammarError
from holdfast.lm.grammar.dialects import (
    COMPACT,
    choice_grammar,
    closed,
    context_free_grammar,
    schema_grammar,
    spaced,
    tags_grammar,
)
from tests.lm.grammar.test_compiler import accepts

PAIR = {"type": "array", "items": {"type": "integer"}, "minItems": 2}
GBNF = """root ::= greeting " " name
greeting ::= "hello" | "bye"
name ::= [A-Z] [a-z]*"""


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (choice_grammar(['a "b"\n', "日本"]), ['a "b"\n', "日本"], ["a", ""]),
        (context_free_grammar(GBNF), ["hello Ada", "bye B"], ["hello ada", "Ada"]),
        (context_free_grammar('start: "x"+'), ["xxx"], ["", "y"]),
        (schema_grammar(PAIR), ["[1, 2]"], ["[1,2]", "[1]"]),
        (schema_grammar(PAIR, layout=COMPACT), ["[1,2]"], ["[1, 2]"]),
        (schema_grammar(PAIR, layout=spaced("[ ]{0,2}")), ["[1,  2 ]", "[1,2]"], ["[1,   2]"]),
        (schema_grammar({**PAIR, "x-guidance": {"item_separator": ";"}}), ["[1;2]"], ["[1, 2]"]),
        (schema_grammar(True), ['{"a": [1, null]}', "3"], ["{a}"]),
        (schema_grammar({**PAIR, "if": {}}, lenient=True), ["[1, 2]"], ["{}"]),
        (
            tags_grammar([("<fn=a>", {"type": "object"}, "</fn>"), ("<fn=b>", PAIR, "</fn>")], ["<fn"]),
            ["hello", "hello <fn=a>{}</fn> and <fn=b>[1, 2]</fn>."],
            ["<fn=c>{}</fn>", "<fn=b>{}</fn>", "<fn=a>{}"],
        ),
    ],
)
def test_right_answers_match_and_wrong_ones_do_not(
    compiler: GrammarCompiler, grammar: Grammar, right: list[str], wrong: list[str]
) -> None:
    assert [answer for answer in right if not accepts(compiler, grammar, answer)] == []
    assert [answer for answer in wrong if accepts(compiler, grammar, answer)] == []


def test_an_unknown_keyword_is_ignored_only_if_asked_for(compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match="Unimplemented keys"):
        compiler.prepare(schema_grammar({**PAIR, "uniqueItems": True}))
    compiler.prepare(schema_grammar({**PAIR, "uniqueItems": True}, lenient=True))


def test_a_closed_schema_has_no_other_properties_at_any_level_unless_it_says_which() -> None:
    inner = {"properties": {"enum": {"type": "object", "properties": {}}}}
    given = {
        "properties": {"a": inner, "const": True},
        "$defs": {"b": {"anyOf": [inner, {"type": "string", "enum": [{"properties": {}}]}]}},
        "items": {"properties": {}, "additionalProperties": {"properties": {}}},
        "not": {"properties": {}, "patternProperties": {"^x": {}}},
    }
    no_more = {"additionalProperties": False}
    closed_inner = {"properties": {"enum": {"type": "object", "properties": {}, **no_more}}, **no_more}
    assert closed(given) == {
        "properties": {"a": closed_inner, "const": True},
        "$defs": {"b": {"anyOf": [closed_inner, {"type": "string", "enum": [{"properties": {}}]}]}},
        "items": {"properties": {}, "additionalProperties": {"properties": {}, **no_more}},
        "not": {"properties": {}, "patternProperties": {"^x": {}}},
        **no_more,
    }


def test_a_schema_that_allows_nothing_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError):
        compiler.prepare(schema_grammar(False))


def test_a_structure_that_no_trigger_begins_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no trigger begins '<x>'"):
        tags_grammar([("<x>", {}, "</x>")], ["<fn"])


def test_gbnf_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match="grammar cannot be read"):
        context_free_grammar('root ::= "a')


def test_the_layout_is_part_of_the_schema() -> None:
    text = schema_grammar({"type": "object"}).text
    assert json.loads(text)["x-guidance"] == {
        "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "
    }  # fmt: skip
