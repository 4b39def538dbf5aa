"""Structural tags match the answers that XGrammar's documentation describes, and name what they refuse."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.lm.grammar.compiler import GrammarCompiler
from holdfast.lm.grammar.structural_tags import structural_grammar
from tests.lm.grammar.test_compiler import accepts

Format = dict[str, Any]
ANY: Format = {"type": "any_text"}
PROPERTIES = {"city": {"type": "string"}}
CITY: Format = {
    "type": "json_schema",
    "json_schema": {
        "type": "object", "properties": PROPERTIES, "required": ["city"], "additionalProperties": False
    },
}  # fmt: skip
PARIS = '{"city": "Paris"}'


def text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def in_order(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def one_of(*elements: Format) -> Format:
    return {"type": "or", "elements": list(elements)}


def tag(begin: Any, content: Format, end: Any) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def calls(**more: Any) -> Format:
    tags = [tag("<fn=weather>", CITY, "</fn>"), tag("<fn=time>", text("now"), "</fn>")]
    return {"type": "triggered_tags", "triggers": ["<fn="], "tags": tags, **more}


WEATHER = f"<fn=weather>{PARIS}</fn>"
TIME = "<fn=time>now</fn>"


@pytest.mark.parametrize(
    ("wanted", "right", "wrong"),
    [
        (text('a "b"\n</x>'), ['a "b"\n</x>'], ["", 'a "b"']),
        (text(""), [""], ["a"]),
        (CITY, [PARIS], ["{}", ""]),
        ({"type": "regex", "pattern": "[a-c]+/\\d"}, ["ab/1"], ["ab", "ab/"]),
        ({"type": "grammar", "grammar": 'root ::= "yes" | "no"'}, ["yes", "no"], ["maybe"]),
        ({"type": "grammar", "grammar": 'start: TEXT\nTEXT: "yes"'}, ["yes"], ["no"]),
        (ANY, ["", "anything <x>\n"], []),
        ({**ANY, "excludes": ["<fn", "a\nb"]}, ["", "<f", "a b"], ["x<fn", "a\nb"]),
        ({**ANY, "max_chars": 3}, ["", "éß\n"], ["four"]),
        ({**ANY, "max_chars": 3, "excludes": ["b"]}, ["", "aaa"], ["aaaa", "ab"]),
        (in_order(text("Answer: "), CITY), ["Answer: " + PARIS], [PARIS, "Answer: "]),
        (one_of(text("yes"), text("no")), ["yes", "no"], ["", "yesno"]),
        (in_order({"type": "optional", "content": text("so ")}, text("yes")), ["so yes", "yes"], ["so "]),
        ({"type": "optional", "content": text("so")}, ["so", ""], ["soso"]),
        ({"type": "star", "content": text("ab")}, ["", "ab", "abab"], ["aba"]),
        ({"type": "plus", "content": text("ab")}, ["ab", "abab"], [""]),
        ({"type": "repeat", "min": 1, "max": 2, "content": text("ab")}, ["ab", "abab"], ["", "ababab"]),
        ({"type": "repeat", "min": 2, "max": -1, "content": text("ab")}, ["abab", "ababab"], ["ab"]),
        ({"type": "repeat", "min": 0, "max": 0, "content": text("ab")}, [""], ["ab"]),
        (tag("<r>", CITY, "</r>"), [f"<r>{PARIS}</r>"], [f"<r>{PARIS}", PARIS]),
        (tag("<r>", text("x"), ["</r>", "</s>"]), ["<r>x</r>", "<r>x</s>"], ["<r>x</r></s>", "<r>x"]),
        (tag("<r>", ANY, ["</r>", "</s>"]), ["<r>a </ b</s>", "<r></r>"], ["<r>a", "<r>a</r>b"]),
        (in_order(tag("<think>", ANY, "</think>"), CITY), [f"<think>so\n</think>{PARIS}"], ["<think>so</think>"]),
        (in_order(ANY, text("."), CITY), [f"so.{PARIS}"], [f"so{PARIS}", "so."]),
        (in_order(ANY, text("end")), ["so, end", "end"], ["so", "end end"]),
        (tag("<r>", one_of(ANY, CITY), "</r>"), ["<r>hm</r>", f"<r>{PARIS}</r>"], ["<r>hm", "<r>a</r>b"]),
        (one_of(CITY, ANY), [PARIS, "hm"], []),
        (
            calls(), ["", "hello", f"so {WEATHER} and {TIME}.", WEATHER + TIME],
            ["<fn=other>", f"so <fn=weather>{PARIS}", "<fn=time>never</fn>"],
        ),
        (calls(at_least_one=True), [WEATHER, f"{TIME} so {WEATHER}."], ["", f"so {WEATHER}", "hello"]),
        (calls(stop_after_first=True), ["", "hello", f"so {WEATHER}"], [f"{WEATHER} so", WEATHER + TIME]),
        (calls(at_least_one=True, stop_after_first=True), [TIME], ["", f"so {TIME}", f"{TIME}."]),
        (calls(excludes=["bad"]), ["good", f"so {TIME}"], ["a bad one", f"bad {TIME}"]),
        (tag("<r>", calls(), "</r>"), ["<r></r>", f"<r>so {TIME} x</r>"], [f"<r>{TIME}", "<r>so</r> x", "<r><fn=</r>"]),
        (
            tag("<r>", calls(stop_after_first=True), "</r>"),
            ["<r>so</r>", f"<r>so {TIME}</r>"], [f"<r>{TIME} x</r>", f"<r>{TIME}"],
        ),
        (
            {"type": "dispatch", "rules": [["city=", CITY], ["now", text("!")]]},
            ["", "a", f"a city={PARIS} now!"], ["now", "city=x"],
        ),
        ({"type": "dispatch", "loop": False, "rules": [["now", text("!")]]}, ["a", "a now!"], ["now! a", "now"]),
        (
            {"type": "tags_with_separator", "separator": ",", "tags": calls()["tags"]},
            ["", TIME, f"{TIME},{WEATHER}"], [",", f"{TIME},", f"{TIME}{WEATHER}", "so"],
        ),
        (
            {"type": "tags_with_separator", "separator": "", "tags": calls()["tags"], "at_least_one": True},
            [TIME, TIME + TIME], ["", f"{TIME},"],
        ),
        (
            {"type": "tags_with_separator", "separator": ",", "tags": calls()["tags"], "stop_after_first": True},
            ["", TIME], [f"{TIME},{TIME}"],
        ),
    ],
)  # fmt: skip
def test_right_answers_match_and_wrong_ones_do_not(
    compiler: GrammarCompiler, wanted: Format, right: list[str], wrong: list[str]
) -> None:
    grammar = structural_grammar(wanted, "format")
    assert [answer for answer in right if not accepts(compiler, grammar, answer)] == []
    assert [answer for answer in wrong if accepts(compiler, grammar, answer)] == []


@pytest.mark.parametrize("token", [2, "<|system|>"])
def test_tags_may_begin_and_end_with_tokens(compiler: GrammarCompiler, token: int | str) -> None:
    given = {"type": "token", "token": token}
    grammar = structural_grammar(tag(given, ANY, {"type": "token", "token": 4}), "format")
    spelled = compiler.tokenizer().tokenize_str("so")
    for answer, whole in (([2, *spelled, 4], True), ([2, 4], True), ([2, *spelled], False), (spelled, False)):
        matcher, _ = compiler.begin(grammar)
        assert (matcher.try_consume_tokens(answer) == len(answer) and matcher.is_accepting()) == whole


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (None, "format.type is missing; supported: const_string, json_schema"),
        ({"type": "any_tokens"}, 'format.type is "any_tokens"; supported'),
        ({"type": ["tag"]}, r'format.type is \["tag"\]'),
        (in_order(text("a"), {"type": "xml"}), r'format.elements\[1\].type is "xml"'),
        (in_order(), "format.elements must be a list of 1 to 1024 entries"),
        (in_order(ANY, CITY), r"format.elements\[0\] is free text, which a text, a tag, a token or the answer's end"),
        ({"type": "star", "content": ANY}, "format.content is free text"),
        ({"type": "const_string", "value": 3}, "format.value must be a text"),
        ({**CITY, "style": "qwen_xml"}, 'format.style may only be "json"'),
        ({**CITY, "strict": True}, "format.strict is unknown or not supported"),
        ({"type": "json_schema"}, "format.json_schema must be a JSON schema"),
        ({**ANY, "max_tokens": 5}, "format.max_tokens is unknown or not supported"),
        ({**ANY, "max_chars": -1}, "format.max_chars must be an integer between 0 and 100000"),
        ({**ANY, "excludes": [""]}, "format.excludes must be a list of texts that are not empty"),
        ({"type": "repeat", "min": 3, "max": 2, "content": ANY}, "format.max must be -1.* from 3 to 1024"),
        ({"type": "repeat", "min": True, "max": 2, "content": ANY}, "format.min must be an integer"),
        (tag("<r>", ANY, None), "format.end must be a list of 1 to 1024 entries"),
        (tag({"type": "token", "token": "a b"}, ANY, ""), "format.begin.token must be the id of a token"),
        (calls(triggers=["<other"]), "no trigger of format begins '<fn=weather>'"),
        (calls(tags=[text("a")]), r"format.tags\[0\] must be a tag"),
        (calls(at_least_one="yes"), "format.at_least_one must be true or false"),
        ({"type": "dispatch", "rules": [["a"]]}, r"format.rules\[0\] must be a pair of a text and a format"),
    ],
)
def test_an_error_names_the_faulty_format_by_its_path(wanted: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        structural_grammar(wanted, "format")


def test_nested_choices_do_not_repeat_the_texts_after_them() -> None:
    wanted = text("a")
    for _ in range(12):
        wanted = in_order(one_of(wanted, text("b")), text("c" * 1000))
    assert len(structural_grammar(wanted, "format").text) < 5_000 + len(json.dumps("c" * 1000))
