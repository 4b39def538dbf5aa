"""The parsers of tool calls and reasoning give the same parts however the text is split."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from holdfast.server.formats.harmony import HarmonyMessages
from holdfast.server.formats.llama import LlamaCalls
from holdfast.server.formats.mistral import MistralCalls
from holdfast.server.formats.parts import Arguments, CallBegin, Parser, Part, Reasoning, Said, joined
from holdfast.server.formats.reader import AnswerReader, ReasoningTags
from holdfast.server.formats.tagged import TaggedCalls

THINK = ReasoningTags("<think>", "</think>")
SCHEMAS: dict[str, Any] = {
    "f": {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "n": {"type": "integer"},
            "b": {"type": ["boolean", "null"]},
            "o": {"type": "object"},
            "e": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    }
}


def tagged() -> Parser:
    return TaggedCalls(SCHEMAS, bare=True)


def llama() -> Parser:
    return LlamaCalls(["f", "g"])


def harmony() -> Parser:
    return HarmonyMessages(["f", "g"])


THOUGHT, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
TO_F = "<|channel|>commentary to=functions.f"
NEXT = "<|end|><|start|>assistant"
WEATHER = '{"name": "f", "arguments": {"city": "Paris \\"}{", "n": [1, {"a": 2}]}}'
ARGUED = '{"city": "Paris \\"}{", "n": [1, {"a": 2}]}'
CALL = [CallBegin("f"), Arguments(ARGUED)]
CASES: list[tuple[Callable[[], Parser], str, list[Part]]] = [
    (Parser, " plain \n", [Said(" plain \n")]),
    # Hermes, Qwen
    (tagged, "Hello.", [Said("Hello.")]),
    (tagged, f"<tool_call>\n{WEATHER}\n</tool_call>", CALL),
    (tagged, f"<tool_call>{WEATHER}</tool_call>", CALL),
    (tagged, f"Let me see.\n\n<tool_call>\n{WEATHER}\n</tool_call>\n", [Said("Let me see."), *CALL]),
    (tagged, f"<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{WEATHER}\n</tool_call>", [*CALL, *CALL]),
    (tagged, f"<tool_call>\n{WEATHER}\n{WEATHER}\n</tool_call>", [*CALL, *CALL]),
    (tagged, f"<tool_call>\n{WEATHER}\n</tool_call>\nDone. ", [*CALL, Said("Done. ")]),
    (tagged, f"<tool_call>\n{WEATHER}", CALL),
    (tagged, f"<tool_call>\n{WEATHER}\n</to", CALL),
    (tagged, f"<tool_call>\n{WEATHER}\n</b", [*CALL, Said("</b")]),
    (tagged, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [CallBegin("f"), Arguments('{"a": 1}')]),
    (tagged, '<tool_call>{"name": "f"}</tool_call>', [CallBegin("f"), Arguments("{}")]),
    (tagged, '<tool_call>{"name": "f", "arguments": null}</tool_call>', [CallBegin("f"), Arguments("{}")]),
    (tagged, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', [CallBegin("f"), Arguments('{"a": 1}')]),
    (tagged, '<tool_call>{"id": 7, "name": "f", "arguments": {}}', [CallBegin("f"), Arguments("{}")]),
    (tagged, '<tool_call>{"name": "f", "arguments": {"a": "cut', [CallBegin("f"), Arguments('{"a": "cut')]),
    (tagged, '<tool_call>\n{"name": 3}', [Said('<tool_call>\n{"name": 3}')]),
    (tagged, '<tool_call>\n{"na me": "f"}', [Said('<tool_call>\n{"na me": "f"}')]),
    (tagged, "The tag <tool_call> is", [Said("The tag <tool_call> is")]),
    (tagged, "a < b <tool", [Said("a < b <tool")]),
    (tagged, "{} <tool_call>\n{ not json }", [Said("{} <tool_call>\n{ not json }")]),
    # Qwen3-Coder
    (
        tagged,
        'I look.\n<tool_call>\n<function=f>\n<parameter=s>\na "b"\n\nc < d\n</parameter>\n<parameter=n>\n7\n'
        "</parameter>\n</function>\n</tool_call>",
        [Said("I look."), CallBegin("f"), Arguments('{"s": "a \\"b\\"\\n\\nc < d", "n": 7}')],
    ),
    (tagged, "<function=g>\n</function>", [CallBegin("g"), Arguments("{}")]),
    (
        tagged,
        '<tool_call><function=f><parameter=b>True</parameter><parameter=o>{"x": [1]}</parameter>'
        "<parameter=e>null</parameter><parameter=e>no</parameter><parameter=n>many</parameter></function></tool_call>",
        [CallBegin("f"), Arguments('{"b": true, "o": {"x": [1]}, "e": null, "e": "no", "n": "many"}')],
    ),
    (tagged, "<function=f>\n<parameter=s>\ncut", [CallBegin("f"), Arguments('{"s": "cut')]),
    (tagged, "<function=\n>", [Said("<function=\n>")]),
    # Llama 3
    (llama, '{"name": "f", "parameters": {"a": 1}}', [CallBegin("f"), Arguments('{"a": 1}')]),
    (llama, '<|python_tag|>{"name": "h", "parameters": {}}', [CallBegin("h"), Arguments("{}")]),
    (
        llama,
        ' {"type": "function", "name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        [CallBegin("f"), Arguments('{"a": 1}'), CallBegin("g"), Arguments("{}")],
    ),
    (llama, '{"name": "Bob", "age": 3}', [Said('{"name": "Bob", "age": 3}')]),
    (llama, '\n{"a": [1, 2]} ', [Said('\n{"a": [1, 2]} ')]),
    (llama, 'So: {"name": "f"}', [Said('So: {"name": "f"}')]),
    (llama, "  ", [Said("  ")]),
    (llama, "{", [Said("{")]),
    (llama, "<|python_tag|>print(1)", [Said("print(1)")]),
    # Mistral
    (
        MistralCalls,
        f'[TOOL_CALLS] [{WEATHER}, {{"name": "g", "arguments": {{}}}}]',
        [*CALL, CallBegin("g"), Arguments("{}")],
    ),
    (MistralCalls, f"Now: [TOOL_CALLS][{WEATHER}]", [Said("Now:"), *CALL]),
    (
        MistralCalls,
        f"[TOOL_CALLS]f[ARGS]{ARGUED}[TOOL_CALLS]g[CALL_ID]a1b2c3d4e[ARGS]{{}}",
        [*CALL, CallBegin("g"), Arguments("{}")],
    ),
    (MistralCalls, f"[TOOL_CALLS]f{ARGUED}", CALL),
    (MistralCalls, "[TOOL_CALLS]sorry, no", [Said("sorry, no")]),
    (MistralCalls, "[1, 2] [TOOL", [Said("[1, 2] [TOOL")]),
    (MistralCalls, "[TOOL_CALLS]f", [Said("f")]),
    # GPT-OSS
    (harmony, f"{THOUGHT}Hm.{NEXT}{FINAL}Yes. <|return|>", [Reasoning("Hm."), Said("Yes. ")]),
    (harmony, f"{THOUGHT}Hm.{NEXT}{TO_F} <|constrain|>json<|message|>{ARGUED}<|call|>", [Reasoning("Hm."), *CALL]),
    (harmony, f"{TO_F} json<|message|>{ARGUED}", CALL),
    (harmony, f"{TO_F}<|message|><|call|>", [CallBegin("f"), Arguments("{}")]),
    (harmony, f" to=functions.f<|channel|>commentary json<|message|>{ARGUED}<|call|>", CALL),
    (harmony, f"<|channel|>commentary to=f<|message|>{ARGUED}<|call|>", CALL),
    (
        harmony,
        f"<|channel|>commentary<|message|>Let me see.{NEXT}{TO_F}<|message|>{ARGUED}",
        [Said("Let me see."), *CALL],
    ),
    (harmony, "<|channel|>analysis to=python<|message|>1 + 1<|call|>", [Reasoning("1 + 1")]),
    (harmony, f"{THOUGHT}One.{NEXT}{THOUGHT}Two.{NEXT}{FINAL}Yes.", [Reasoning("One.\nTwo."), Said("Yes.")]),
    (harmony, f"{THOUGHT}Hm, cut <|en", [Reasoning("Hm, cut <|en")]),
    (harmony, f"{THOUGHT}Hm.{NEXT}<|channel|>fin", [Reasoning("Hm.")]),
    (harmony, f"{FINAL}Yes <b> <|x|>.<|end|>", [Said("Yes <b> <|x|>.")]),
    (harmony, " No channels. ", [Said(" No channels. ")]),
]
REASONING: list[tuple[bool, str, list[Part]]] = [
    (False, "<think>\nHm,  so.\n</think>\n\nYes. ", [Reasoning("Hm,  so."), Said("Yes. ")]),
    (False, " \n<think> a < b </thin </think>c", [Reasoning("a < b </thin"), Said("c")]),
    (False, "No <think>thoughts</think>", [Said("No <think>thoughts</think>")]),
    (False, "\n<thi", [Said("\n<thi")]),
    (False, "<think>\n\n</think>\n\nYes.", [Said("Yes.")]),
    (True, "Hm.\n</think>\n\nYes.", [Reasoning("Hm."), Said("Yes.")]),
    (True, "\n<think>\nHm.</think>Yes.", [Reasoning("Hm."), Said("Yes.")]),
    (True, "Hm, a </", [Reasoning("Hm, a")]),
    (True, "Hm, a <", [Reasoning("Hm, a <")]),
    (True, "Hm.\n</thin", [Reasoning("Hm.")]),
    (True, "Hm.\n</think>\n\n", [Reasoning("Hm.")]),
    (False, f"<think>\nA call.\n</think>\n\n<tool_call>\n{WEATHER}\n</tool_call>", [Reasoning("A call."), *CALL]),
    (False, f"<think>Not <tool_call>{WEATHER}</think>", [Reasoning(f"Not <tool_call>{WEATHER}")]),
]


def pieces(text: str, rng: Random) -> list[str]:
    """Return a text in pieces of random sizes."""
    most = rng.choice((1, 2, 3, 8, 40))
    found, at = [], 0
    while at < len(text):
        size = rng.randint(1, most)
        found.append(text[at : at + size])
        at += size
    return found


@pytest.mark.parametrize(("make", "text", "parts"), CASES)
def test_a_text_gives_the_same_calls_however_it_is_split(
    make: Callable[[], Parser], text: str, parts: list[Part]
) -> None:
    assert joined(make().push(text, last=True)) == parts
    rng = Random(text)
    for split in ([*text], *(pieces(text, rng) for _ in range(30))):
        parser = make()
        found = [part for piece in split for part in parser.push(piece)] + parser.push("", last=True)
        assert joined(found) == parts


@pytest.mark.parametrize(("opened", "text", "parts"), REASONING)
def test_reasoning_is_separated_however_the_text_is_split(opened: bool, text: str, parts: list[Part]) -> None:
    assert joined(AnswerReader(tagged(), THINK, opened=opened).push(text, last=True)) == parts
    rng = Random(text)
    for split in ([*text], *(pieces(text, rng) for _ in range(30))):
        reader = AnswerReader(tagged(), THINK, opened=opened)
        found = [part for piece in split for part in reader.push(piece)] + reader.push("", last=True)
        assert joined(found) == parts


@pytest.mark.parametrize("make", [Parser, tagged, llama, MistralCalls, harmony])
def test_any_mixture_of_tags_reads_the_same_however_it_is_split(make: Callable[[], Parser]) -> None:
    words = ["<tool_call>", "</tool_call>", "<function=", "f>", "<parameter=s>", "<parameter=n>", "</parameter>"]
    words += ["</function>", "\n", " ", "{", "}", "[", "]", '"name"', '"arguments"', ":", ",", '"f"', '"', "\\", "x"]
    words += ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", ";", "<think>", "</think>", WEATHER, "1", "<"]
    words += ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "analysis", "final", "to=functions.f"]
    rng = Random(str(make))
    for _ in range(400):
        text = "".join(rng.choices(words, k=rng.randint(1, 14)))
        opened = rng.random() < 0.3
        whole = joined(AnswerReader(make(), THINK, opened=opened).push(text, last=True))
        for split in ([*text], pieces(text, rng)):
            reader = AnswerReader(make(), THINK, opened=opened)
            found = [part for piece in split for part in reader.push(piece)] + reader.push("", last=True)
            assert joined(found) == whole, (text, split)


def test_nothing_but_a_possible_tag_is_held_back() -> None:
    reader = AnswerReader(tagged(), THINK)
    assert reader.push("<th") == []
    assert reader.push("ink>One") == [Reasoning("One")]
    assert reader.push(" two</th") == [Reasoning(" two")]
    assert reader.push("ree") == [Reasoning("</three")]
    assert reader.push("</think>") == []
    assert reader.push("Yes <") == [Said("Yes")]
    assert reader.push("b> no") == [Said(" <b> no")]
    assert reader.push('<tool_call>{"name": "f", "arg') == [CallBegin("f")]
    assert reader.push('uments": {"ci') == [Arguments('{"ci')]
    assert reader.push('ty": "Pa') == [Arguments('ty": "Pa')]


def test_a_string_in_xml_is_streamed() -> None:
    parser = tagged()
    parser.push("<function=f>\n<parameter=s>\n")
    assert parser.push('one "') == [Arguments('one \\"')]
    assert parser.push("two\n") == [Arguments("two")]
    assert parser.push("three") == [Arguments("\\nthree")]


def test_a_name_that_nests_too_deeply_is_text() -> None:
    text = f'<tool_call>{{"name": {"[" * 100_000}{"]" * 100_000}, "arguments": {{}}}}</tool_call>'
    (said,) = joined(AnswerReader(tagged()).push(text, last=True))
    assert isinstance(said, Said) and said.text.startswith('<tool_call>{"name": [[[')


def test_only_the_first_call_counts_without_parallel_calls() -> None:
    reader = AnswerReader(tagged(), one_call=True)
    text = f"<tool_call>{WEATHER}</tool_call><tool_call>{WEATHER}</tool_call>Done"
    assert joined(reader.push(text, last=True)) == [*CALL, Said("Done")]


def test_the_arguments_of_every_whole_call_are_json_however_the_text_is_split() -> None:
    rng, calls = Random(4), 0
    for make, text, _ in CASES:
        if "cut" in text:
            continue
        reader = AnswerReader(make())
        found = [part for piece in pieces(text, rng) for part in reader.push(piece)] + reader.push("", last=True)
        given: list[str] = []
        for part in found:
            if isinstance(part, CallBegin):
                given.append("")
            elif isinstance(part, Arguments):
                given[-1] += part.text
        assert all(isinstance(json.loads(arguments), dict) for arguments in given), (text, given)
        calls += len(given)
    assert calls > 10


@pytest.mark.parametrize(
    ("prompt", "assumed", "opened"),
    [("<assistant>", False, False), ("<assistant><think>\n", False, True), ("<think>\n\n</think>\n\n", False, False),
     ("<assistant>", True, True), ("<think>\n\n</think>\n\n", True, False)],
)  # fmt: skip
def test_the_end_of_the_prompt_decides_whether_the_answer_begins_with_reasoning(
    prompt: str, assumed: bool, opened: bool
) -> None:
    assert ReasoningTags("<think>", "</think>", assumed).opened_by(prompt) == opened
