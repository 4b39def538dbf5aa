"""Fields that other servers of OpenAI's API take, over a fake client: ids, tokens, words, salts and prompts' ends."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fake_engine import FakeClient

from holdfast.core.types import MAX_ALLOWED, MAX_BAD_WORDS, MAX_LOGPROB_TOKEN_IDS, Grammar, ThinkingBudget
from holdfast.server.bad_words import word_tokens
from holdfast.server.protocol import MOST_MESSAGE, ApiError

Http = Callable[..., httpx.AsyncClient]

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TUNE = "/v1/fine_tuning/jobs"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
BEGUN: dict[str, Any] = {"messages": [*HELLO["messages"], {"role": "assistant", "content": "Ahoy, "}]}
BODIES = {
    CHAT: HELLO, TEXT: {"prompt": "hello"}, RESPONSES: {"input": "hello", "store": False},
    TUNE: {"model": "tiny", "training_file": "file-a"},
}  # fmt: skip


def events_of(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def prompt_of(client: FakeClient) -> str:
    """Return the text of the latest request's prompt."""
    return "".join(map(chr, client.asked[-1].prompt))


async def refused(http: Http, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the error of a request, which must be refused with status 400."""
    async with http() as api:
        response = await api.post(path, json={**BODIES[path], **body})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


async def test_the_final_message_stays_open_and_its_text_is_continued(http: Http, client: FakeClient) -> None:
    client.text.opening = "<assistant>"
    async with http() as api:
        for more in ({}, {"add_generation_prompt": False}):
            answer = await api.post(CHAT, json={**BEGUN, **more, "continue_final_message": True})
            assert answer.json()["choices"][0]["message"]["content"] == "Ahoy, sailor!"
            assert prompt_of(client) == "<user>hello<assistant>Ahoy, "
        await api.post(CHAT, json=BEGUN)
        assert prompt_of(client) == "<user>hello<assistant>Ahoy, <assistant>"
        await api.post(CHAT, json={**BEGUN, "add_generation_prompt": False})
        assert prompt_of(client) == "<user>hello<assistant>Ahoy, "


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**BEGUN, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": True}, "messages[0].role"),
        (
            {
                "continue_final_message": True,
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                    }
                ],
            },
            "messages[0].tool_calls",
        ),
    ],
)
async def test_a_final_message_that_cannot_be_continued_is_refused(http: Http, body: Any, param: str) -> None:
    assert (await refused(http, CHAT, body))["param"] == param


OPENED = [{"type": "text", "text": "Ahoy,"}, {"type": "text", "text": "you"}]


@pytest.mark.parametrize(
    ("last", "end", "opening"),
    [
        ({"role": "assistant", "content": OPENED}, {"continue_final_message": True}, "Ahoy,\nyou"),
        ({"role": "assistant", "content": OPENED}, {"add_generation_prompt": False}, "Ahoy,\nyou"),
        ({"role": "assistant", "content": "Ahoy"}, {}, "Ahoy"),
        ({"role": "assistant", "content": ""}, {}, ""),
        ({"role": "user", "content": "hello"}, {"add_generation_prompt": False}, ""),
    ],
)
async def test_an_echoed_chat_begins_with_the_last_message_if_that_is_the_assistants(
    http: Http, last: dict[str, Any], end: dict[str, Any], opening: str
) -> None:
    said = [*HELLO["messages"], last]
    body = {"messages": said, **end, "echo": True, "n": 2, "logprobs": True}
    async with http() as api:
        plain = (await api.post(CHAT, json={**body, "echo": False})).json()
        whole = (await api.post(CHAT, json=body)).json()
        streamed = await api.post(CHAT, json={**body, "stream": True, "return_token_ids": True})
    chunks = events_of(streamed)
    for own, choice in zip(plain["choices"], whole["choices"], strict=True):
        assert choice["message"]["content"] == opening + own["message"]["content"]
        assert choice["logprobs"] == own["logprobs"], "the echoed text has none, as in vLLM"
        mine = [each["choices"][0] for each in chunks if each["choices"][0]["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(each["delta"].get("content", "") for each in mine) == choice["message"]["content"]
        assert (mine[1]["delta"]["content"] == opening) == bool(opening)
    assert plain["usage"] == whole["usage"]


async def test_an_echoed_chat_is_stored_as_it_was_sent(http: Http) -> None:
    async with http() as api:
        asked = {**BEGUN, "model": "tiny", "echo": True, "store": True}
        whole = (await api.post(CHAT, json=asked)).json()
        await api.post(CHAT, json={**asked, "stream": True})
        kept = (await api.get(CHAT)).json()["data"]
    said = [each["choices"][0]["message"]["content"] for each in kept]
    assert said == [whole["choices"][0]["message"]["content"]] * 2 and said[0].startswith("Ahoy, Ahoy, ")


async def test_tokenize_ends_a_prompt_as_a_chat_does(http: Http) -> None:
    async with http() as api:
        asked = {**BEGUN, "continue_final_message": True, "add_generation_prompt": False}
        tokens = (await api.post("/tokenize", json=asked)).json()["tokens"]
        both = await api.post("/tokenize", json={**asked, "add_generation_prompt": True})
    assert "".join(map(chr, tokens)) == "<user>hello<assistant>Ahoy, "
    assert both.status_code == 400 and both.json()["error"]["param"] == "continue_final_message"


async def test_special_tokens_are_added_to_texts_and_on_request_to_chats(
    http: Http, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = client.text.encode

    def encode(text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        return [*([1] if add_special_tokens else []), *plain(text)]

    monkeypatch.setattr(client.text, "encode", encode)
    async with http() as api:
        for path, default in ((CHAT, False), (TEXT, True)):
            for given in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
                await api.post(path, json={**BODIES[path], **given})
                assert (client.asked[-1].prompt[0] == 1) is given.get("add_special_tokens", default)


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
async def test_sampling_fields_and_the_salt_reach_the_engine(http: Http, client: FakeClient, path: str) -> None:
    asked = {
        "bad_words": ["bad"], "allowed_token_ids": [5, 7], "include_stop_str_in_output": True, "stop": "x",
        "cache_salt": "mine",
    }  # fmt: skip
    async with http() as api:
        response = await api.post(path, json={**BODIES[path], **asked})
        assert response.status_code == 200, response.text
        await api.post(path, json=BODIES[path])
    first, second = client.asked
    assert first.params.bad_words == (tuple(map(ord, "bad")),)
    assert (first.params.allowed_token_ids, first.params.include_stop_str_in_output) == ((5, 7), True)
    assert (first.salt, second.salt) == ("mine", "")
    assert (second.params.bad_words, second.params.allowed_token_ids) == ((), ())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bad_words", [""]),
        ("bad_words", "word"),
        ("bad_words", ["x"] * (MAX_BAD_WORDS // 2 + 1)),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", list(range(MAX_ALLOWED + 1))),
        ("cache_salt", ""),
        ("thinking_token_budget", -2),
        ("thinking_token_budget", 1.5),
        ("thinking_token_budget", "9"),
        ("thinking_token_budget", True),
        ("thinking_token_budget", (1 << 24) + 1),
        ("include_stop_str_in_output", "yes"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
async def test_a_bad_value_is_refused_by_name(http: Http, path: str, field: str, value: Any) -> None:
    assert (await refused(http, path, {field: value}))["param"].startswith(field)


@pytest.mark.parametrize("value", [[], [-1], ["a"], 5, list(range(MAX_LOGPROB_TOKEN_IDS + 1))])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_named_tokens_are_from_1_to_128_ids(http: Http, path: str, value: Any) -> None:
    error = await refused(http, path, {"logprobs": True if path == CHAT else 1, "logprob_token_ids": value})
    assert error["param"].startswith("logprob_token_ids")


@pytest.mark.parametrize(("words", "name"), [([" "], "bad_words[0]"), (["a", "b" * 65], "bad_words[1]")])
async def test_a_word_without_tokens_or_with_too_many_is_refused(http: Http, words: list[str], name: str) -> None:
    error = await refused(http, CHAT, {"bad_words": words})
    assert error["param"] == name and name in error["message"]


class Spaced:
    """A tokenizer with tokens for words after a space, as those of byte-level models have."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return {"bad": [1], " bad": [2], "worse": [3, 4], " worse": [5], "apart": [6], " apart": [7, 6]}.get(
            text, [9] * len(text)
        )


def test_a_bad_word_is_banned_at_the_beginning_and_after_a_space() -> None:
    text: Any = Spaced()
    assert word_tokens(text, ["bad", "  bad"]) == ((1,), (2,))
    assert word_tokens(text, ["worse", "apart"]) == ((3, 4), (5,), (6,))
    with pytest.raises(ApiError, match=r"bad_words\[1\]"):
        word_tokens(text, ["bad", "\n "])


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_token_ids_of_prompts_and_choices_are_returned_whole_and_streamed(
    http: Http, client: FakeClient, path: str
) -> None:
    client.ends = True
    asked = {**BODIES[path], "n": 2, "return_token_ids": True}
    async with http() as api:
        whole = (await api.post(path, json=asked)).json()
        events = events_of(await api.post(path, json={**asked, "stream": True}))
        plain = (await api.post(path, json=BODIES[path])).text
    prompt = list(client.asked[-1].prompt)
    holder = whole if path == CHAT else whole["choices"][0]
    assert holder["prompt_token_ids"] == prompt
    assert [choice["token_ids"] for choice in whole["choices"]] == [[0, 1, 2, 3, 31]] * 2
    for index in range(2):
        own = [event for event in events if event["choices"][0]["index"] == index]
        assert [token for event in own for token in event["choices"][0].get("token_ids", [])] == [0, 1, 2, 3, 31]
        holders = own if path == CHAT else [event["choices"][0] for event in own]
        assert [each["prompt_token_ids"] for each in holders if "prompt_token_ids" in each] == [prompt]
        assert "prompt_token_ids" in holders[0]
    assert "token_ids" not in plain


async def test_each_of_several_prompts_has_its_own_token_ids(http: Http) -> None:
    asked = {"prompt": ["ab", "c"], "n": 2, "return_token_ids": True}
    async with http() as api:
        whole = (await api.post(TEXT, json=asked)).json()["choices"]
        streamed = events_of(await api.post(TEXT, json={**asked, "stream": True}))
    expected = {0: [97, 98], 1: [97, 98], 2: [99], 3: [99]}
    assert {choice["index"]: choice["prompt_token_ids"] for choice in whole} == expected
    choices = [event["choices"][0] for event in streamed]
    assert {each["index"]: each["prompt_token_ids"] for each in choices if "prompt_token_ids" in each} == expected


async def test_log_probabilities_name_tokens_by_their_ids_when_asked(http: Http) -> None:
    async with http() as api:
        chat = await api.post(
            CHAT, json={**HELLO, "logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True}
        )
        text = await api.post(TEXT, json={"prompt": "a", "logprobs": 2, "return_tokens_as_token_ids": True})
    first = chat.json()["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], bytes(first["bytes"])) == ("token_id:0", b"Ahoy")
    assert [each["token"] for each in first["top_logprobs"]] == [f"token_id:{ord('?')}", "token_id:0"]
    columns = text.json()["choices"][0]["logprobs"]
    assert columns["tokens"] == [f"token_id:{token}" for token in range(4)]
    assert set(columns["top_logprobs"][1]) == {f"token_id:{ord('?')}", "token_id:1"}
    assert columns["text_offset"] == [0, 4, 6, 12]


@pytest.mark.parametrize(("path", "prefix"), [(CHAT, "chatcmpl-"), (TEXT, "cmpl-")])
async def test_an_answer_has_the_requests_id_of_its_header_or_body(http: Http, path: str, prefix: str) -> None:
    async with http() as api:
        by_body = await api.post(path, json={**BODIES[path], "request_id": "mine-1"})
        by_header = await api.post(
            path, json={**BODIES[path], "request_id": "mine-1"}, headers={"x-request-id": "mine-2"}
        )
        streamed = await api.post(path, json={**BODIES[path], "request_id": "mine-3", "stream": True})
        random = await api.post(path, json=BODIES[path])
    assert (by_body.json()["id"], by_body.headers["x-request-id"]) == (f"{prefix}mine-1", "mine-1")
    assert (by_header.json()["id"], by_header.headers["x-request-id"]) == (f"{prefix}mine-2", "mine-2")
    assert {event["id"] for event in events_of(streamed)} == {f"{prefix}mine-3"}
    assert random.json()["id"] != by_body.json()["id"] and len(random.json()["id"]) == len(prefix) + 32


@pytest.mark.parametrize("id", ["", "a b", "é", "x" * 129])
async def test_an_id_that_is_empty_long_or_not_visible_ascii_is_refused(http: Http, id: str) -> None:
    assert (await refused(http, CHAT, {"request_id": id}))["param"] == "request_id"


async def test_the_fingerprint_changes_with_the_weights_and_with_nothing_else(http: Http, client: FakeClient) -> None:
    async def fingerprints(**config: Any) -> set[str]:
        async with http(**config) as api:
            whole = [(await api.post(path, json=BODIES[path])).json() for path in (CHAT, TEXT)]
            streamed = events_of(await api.post(CHAT, json={**HELLO, "stream": True}))
        return {each["system_fingerprint"] for each in (*whole, *streamed)}

    (first,) = await fingerprints()
    assert await fingerprints(port=9999) == {first}
    assert first.startswith("fp_") and len(first) == 15
    client.weights = "0124"
    (second,) = await fingerprints()
    assert second != first


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
async def test_a_negative_seed_is_a_seed_except_for_minus_one(http: Http, client: FakeClient, path: str) -> None:
    async with http() as api:
        for seed in (-7, -(1 << 63), -1):
            assert (await api.post(path, json={**BODIES[path], "seed": seed})).status_code == 200
    seeds = [asked.params.seed for asked in client.asked]
    assert seeds == [(1 << 63) - 7, 0, None]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_fields_of_other_servers_are_taken_with_the_values_that_change_nothing(http: Http, path: str) -> None:
    neutral = {
        "use_beam_search": False, "length_penalty": 1, "early_stopping": False, "detokenize": True,
        "spaces_between_special_tokens": True, "documents": [], "vllm_xargs": {},
        "prediction": {"type": "content", "content": "hello"},
        "separate_reasoning": True, "stream_reasoning": True, "no_stop_trim": False, "lora_path": None,
        "session_id": "a session", "stream_interval": 1, "watermarking": False, "return_prompt_text": False,
        "thinking_token_budget": -1, "truncation_side": None, "prompt_cache_options": {"mode": "implicit"},
    }  # fmt: skip
    async with http() as api:
        response = await api.post(path, json={**BODIES[path], **neutral})
        assert response.status_code == 200, response.text
    for name, value in (("use_beam_search", True), ("length_penalty", 0.5)):
        error = await refused(http, path, {name: value})
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")


REASONS = "<assistant><think>\n"
"""End of a prompt within reasoning."""


async def test_a_thinking_budget_limits_the_reasoning_of_each_choice(http: Http, client: FakeClient) -> None:
    client.text.tags = {"<think>": 90, "</think>": 91}
    asked = {**HELLO, "thinking_token_budget": 9, "n": 2, "seed": 5}
    async with http() as api:
        for opening, body in (
            ("", asked),
            (REASONS, asked),
            (f"{REASONS}</think>", asked),
            ("", {**asked, "response_format": {"type": "json_object"}}),
        ):
            client.text.opening = opening
            response = await api.post(CHAT, json=body)
            assert response.status_code == 200, response.text
        for body in ({"thinking_token_budget": -1}, {"thinking_token_budget": None}, {}):
            assert (await api.post(CHAT, json={**HELLO, **body})).status_code == 200
        assert (await api.post(RESPONSES, json={**BODIES[RESPONSES], "thinking_token_budget": 0})).status_code == 200
    limits = [each.params.thinking for each in client.asked]
    free = ThinkingBudget(9, 90, 91)
    opened = replace(free, opened=True)
    assert limits == [free] * 2 + [opened] * 2 + [free] * 4 + [None] * 3 + [ThinkingBudget(0, 90, 91)]
    assert [each.params.seed for each in client.asked][:4] == [5, 6] * 2
    assert all(each.params.grammar is not None for each in client.asked[6:8])


@pytest.mark.parametrize(("prompt", "opened"), [([1, 90, 7], True), ([90, 1, 91, 7], False), ([7, 91, 90], True)])
async def test_the_prompt_of_a_completion_may_end_within_reasoning(
    http: Http, client: FakeClient, prompt: list[int], opened: bool
) -> None:
    client.text.tags = {"<think>": 90, "</think>": 91}
    async with http() as api:
        response = await api.post(TEXT, json={"prompt": prompt, "thinking_token_budget": 3})
        assert response.status_code == 200, response.text
    assert client.asked[-1].params.thinking == ThinkingBudget(3, 90, 91, opened)


async def test_a_continued_message_may_end_within_reasoning(http: Http, client: FakeClient) -> None:
    client.text.tags = {"<think>": ord("("), "</think>": ord(")")}
    async with http() as api:
        for said in ("(Hm, ", "(Hm) So "):
            messages = [*HELLO["messages"], {"role": "assistant", "content": said}]
            body = {"messages": messages, "continue_final_message": True, "thinking_token_budget": 3}
            assert (await api.post(CHAT, json=body)).status_code == 200
        assert (await api.post(CHAT, json={**HELLO, "thinking_token_budget": 3})).status_code == 200
    limits = [each.params.thinking for each in client.asked]
    assert [limit is not None and limit.opened for limit in limits] == [True, False, False]


@pytest.mark.parametrize(
    ("parser", "tags", "reason"),
    [
        (None, (), "this model is served without reasoning tags"),
        ("none", ("<think>", "</think>"), "this model is served without reasoning tags"),
        ("openai_gptoss", ("<think>", "</think>"), "this model is served without reasoning tags"),
        ("qwen3", (), "this model's vocabulary has no token <think>"),
        ("mistral", ("[THINK]",), r"this model's vocabulary has no token \[/THINK\]"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_thinking_budget_needs_tags_that_are_tokens(
    http: Http, client: FakeClient, path: str, parser: str | None, tags: tuple[str, ...], reason: str
) -> None:
    client.text.tags = {tag: 90 + number for number, tag in enumerate(tags)}
    async with http(reasoning_parser=parser) as api:
        for more in ({}, {"stream": True}):
            response = await api.post(path, json={**BODIES[path], "thinking_token_budget": 9, **more})
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert (error["param"], error["code"]) == ("thinking_token_budget", "unsupported_parameter")
            assert re.match(f"thinking_token_budget is 9, and {reason}; leave it out", error["message"])
        for neutral in (-1, None):
            assert (await api.post(path, json={**BODIES[path], "thinking_token_budget": neutral})).status_code == 200


async def test_documents_reach_a_template_that_uses_them_and_are_refused_by_others(
    http: Http, client: FakeClient
) -> None:
    given = {"documents": [{"title": "Tides", "text": "The moon pulls."}]}
    assert "no documents" in (await refused(http, CHAT, given))["message"]
    assert (await refused(http, TEXT, given))["param"] == "documents"
    client.text.template = "{% for document in documents %}{{ document.text }}{% endfor %}{{ messages }}"
    async with http() as api:
        response = await api.post(CHAT, json={**HELLO, **given})
        assert response.status_code == 200, response.text
        assert (await api.post(CHAT, json=HELLO)).status_code == 200
    first, second = ("".join(map(chr, asked.prompt)) for asked in client.asked)
    assert first == f"<documents={given['documents']}>{second}"
    assert (await refused(http, CHAT, {"documents": [{"text": 5}]}))["param"].startswith("documents[0]")


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_mark_of_a_prefix_to_cache_changes_no_prompt(http: Http, client: FakeClient, path: str) -> None:
    name, kind = ("messages", "text") if path == CHAT else ("input", "input_text")
    part = {"type": kind, "text": "hello"}
    async with http() as api:
        for content in ([part], [{**part, "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}]):
            body = {**BODIES[path], name: [{"role": "user", "content": content}]}
            response = await api.post(path, json=body)
            assert response.status_code == 200, response.text
    assert client.asked[0].prompt == client.asked[1].prompt


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
async def test_sglangs_names_ask_for_grammars(http: Http, client: FakeClient, path: str) -> None:
    async with http() as api:
        for given in ({"regex": "a+"}, {"ebnf": 'root ::= "a"'}):
            response = await api.post(path, json={**BODIES[path], **given})
            assert response.status_code == 200, response.text
    regex, ebnf = (asked.params.grammar for asked in client.asked)
    assert regex == Grammar("regex", "a+")
    assert ebnf is not None and ebnf.kind == "lark"
    assert (await refused(http, path, {"ebnf": "root"}))["param"] == "ebnf"
    assert (await refused(http, path, {"regex": "a", "ebnf": 'root ::= "a"'}))["param"] == "regex"


@pytest.mark.parametrize(
    ("path", "name", "here"),
    [
        (RESPONSES, "max_tokens", "max_output_tokens"),
        (RESPONSES, "messages", "input"),
        (CHAT, "max_output_tokens", "max_completion_tokens"),
        (CHAT, "input", "messages"),
        (TEXT, "max_completion_tokens", "max_tokens"),
        (TEXT, "stop_sequences", "stop"),
    ],
)
async def test_a_field_of_another_api_is_refused_with_its_name_here(
    http: Http, path: str, name: str, here: str
) -> None:
    assert (await refused(http, path, {name: 5}))["message"] == f"unknown parameter: {name}; did you mean {here}?"


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"logit_bias": {"4": 1, "5": 101}}, "logit_bias.5", "`float` <= 100.0, got 101"),
        ({"logit_bias": {"4": 1, "5": "high"}}, "logit_bias.5", "got `str`"),
        ({"metadata": {"a": "b", "c": "x" * 513}}, "metadata.c", "length <= 512, got 513"),
        ({"metadata": {"a": "b", "c" * 65: "d"}}, "metadata", "names of length <= 64, got 65"),
        ({"metadata": {str(n): "a" for n in range(17)}}, "metadata", "length <= 16, got 17"),
    ],
)
async def test_a_wrong_value_within_an_object_is_named_with_its_limit(
    http: Http, body: Any, param: str, reason: str
) -> None:
    error = await refused(http, CHAT, body)
    assert error["param"] == param and reason in error["message"]


@pytest.mark.parametrize(
    "said",
    [
        {"content": None, "refusal": "I cannot."},
        {"content": "", "refusal": "I cannot."},
        {"content": [{"type": "refusal", "refusal": "I cannot."}]},
        {"content": "I cannot.", "refusal": None},
    ],
)
async def test_what_a_model_has_refused_is_part_of_the_prompt(http: Http, client: FakeClient, said: Any) -> None:
    talk = [*HELLO["messages"], {"role": "assistant", **said}, {"role": "user", "content": "please"}]
    async with http() as api:
        assert (await api.post(CHAT, json={"messages": talk})).status_code == 200
    assert "<assistant>I cannot.<user>please" in prompt_of(client)


async def test_a_refusal_is_an_input_of_responses_and_only_of_the_assistant(http: Http, client: FakeClient) -> None:
    part = {"type": "refusal", "refusal": "I cannot."}
    asked = [{"role": "assistant", "content": [part]}, {"role": "user", "content": "please"}]
    async with http() as api:
        assert (await api.post(RESPONSES, json={"input": asked, "store": False})).status_code == 200
    assert "<assistant>I cannot.<user>please" in prompt_of(client)
    for path, name in ((CHAT, "messages"), (RESPONSES, "input")):
        error = await refused(http, path, {name: [{"role": "user", "content": [part]}]})
        assert error["param"] == f"{name}[0].content[0].type"
    for message in ({"refusal": 5}, {"content": "Well, ", "refusal": "no"}):
        error = await refused(http, CHAT, {"messages": [{"role": "assistant", **message}]})
        assert error["param"] == "messages[0].refusal"


LONG = "x" * 400_000
TAGGED = {"type": "triggered_tags", "triggers": ["<f"], "tags": [{"begin": LONG, "content": {"type": "any_text"}}]}


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}],
         "tool_choice": {"type": "function", "function": {"name": LONG}}},
        {"structured_outputs": {"structural_tag": {"format": TAGGED}}},
        {"structured_outputs": {"structural_tag": {"structures": [{"begin": LONG, "schema": {}, "end": "."}],
                                                   "triggers": ["<f"]}}},
    ],
)  # fmt: skip
async def test_an_error_does_not_repeat_a_long_text(http: Http, body: dict[str, Any]) -> None:
    message = (await refused(http, CHAT, body))["message"]
    assert "xxxx" in message and len(message) < 300


def test_the_message_of_an_error_is_bounded() -> None:
    assert len(ApiError(LONG).body()["error"]["message"]) == MOST_MESSAGE


async def test_a_body_may_begin_with_a_byte_order_mark(http: Http) -> None:
    async with http() as api:
        body = b"\xef\xbb\xbf" + json.dumps(HELLO).encode()
        assert (await api.post(CHAT, content=body)).status_code == 200
        assert (await api.post(CHAT, content=b"\xef\xbb\xbf" + body)).status_code == 400


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, "/tokenize", "/v1/messages", "/api/chat", "/v1/conversations"])
async def test_a_body_may_be_compressed(http: Http, path: str) -> None:
    body = {
        **BODIES, "/tokenize": {"prompt": "hello"}, "/v1/messages": {**HELLO, "max_tokens": 5},
        "/api/chat": {**HELLO, "model": "tiny"}, "/v1/conversations": {"metadata": {"topic": "sails"}},
    }[path]  # fmt: skip
    plain = json.dumps(body).encode()
    async with http(max_body_mb=0.01) as api:
        for encoding, sent, status in (
            ("gzip", gzip.compress(plain), 200),
            ("deflate", zlib.compress(plain), 200),
            ("identity", plain, 200),
            ("br", plain, 415),
            ("gzip", plain, 400),
            ("gzip", gzip.compress(plain + b" " * 10_000), 413),
        ):
            answer = await api.post(path, content=sent, headers={"content-encoding": encoding})
            assert answer.status_code == status, (encoding, answer.text)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {"truncation": "maybe"}, "truncation is 'maybe'; it must be one of auto, disabled"),
        (RESPONSES, {"include": ["bogus"]}, "include[0] is 'bogus'; it must be one of "),
        (RESPONSES, {"text": {"verbosity": "no"}}, "text.verbosity is 'no'; it must be one of high, low, medium"),
        (TUNE, {"hyperparameters": {"n_epochs": "many"}}, ".n_epochs is 'many'; it must be auto or an integer"),
    ],
)
async def test_a_value_that_is_not_in_a_list_is_refused_with_the_list(
    http: Http, path: str, body: Any, message: str
) -> None:
    assert message in (await refused(http, path, body))["message"]


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("", "it is empty"),
        (" \n", "it is empty"),
        ('{"temperature": 1e999}', "Number out of range"),
        ("{", "truncated"),
        (r'{"model": "\ud83d', "truncated"),
        (r'{"model": "\ud83d\ude', "truncated"),
        (r'{"model": "\\ud800"', "truncated"),
        (r'{"model": "\ud800"}', r"\ud800 is half of a surrogate pair, and no character (byte 11)"),
        (r'{"model": "\uDBFF\n"}', r"\uDBFF is half of a surrogate pair, and no character (byte 11)"),
        (r'{"model": "\\\ud800ab"}', r"\ud800 is half of a surrogate pair, and no character (byte 13)"),
    ],
)
async def test_a_body_that_is_not_json_is_refused_with_its_fault_alone(http: Http, body: str, fault: str) -> None:
    async with http() as api:
        answer = await api.post(CHAT, content=body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith("the body is not JSON that can be read: ") and message.endswith(fault)
