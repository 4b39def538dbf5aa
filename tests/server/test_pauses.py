"""Pauses in requests: kinds, durations, fields, headers, notes to the engine, and announced turns."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fake_engine import FakeClient, engine_info

from holdfast.core.pause import MAX_KIND, Pause
from holdfast.server.pauses import cache_ttl, keep_seconds, kind_after

Http = Callable[..., httpx.AsyncClient]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": name}} for name in ("find", "buy")]


def call(name: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'


def test_the_kind_names_all_called_tools_once_in_order_and_a_person_without_calls() -> None:
    assert kind_after([]) == "person"
    assert kind_after(["find"]) == "tool:find"
    assert kind_after(["find", "buy", "find"]) == "tool:buy+find"


def test_a_kind_is_bounded_and_printable_whatever_a_tool_is_called() -> None:
    for name in ("x" * 500, "a:b\n\u202e", "naïve"):
        Pause(kind_after([name]))
    assert kind_after(["a:b\n"]) == "tool:a_b_" and len(kind_after(["x" * 500])) == MAX_KIND


@pytest.mark.parametrize(
    ("wish", "seconds"),
    [
        (None, None), ("30s", 30.0), ("1500ms", 1.5), ("5m", 300.0), ("1.5h", 5400.0), ("24h", 86_400.0),
        (1_000_060.0, 60.0), (1_000_000.0, 0.0), (999_990.0, 0.0),
    ],
)  # fmt: skip
def test_state_is_kept_until_a_time_or_for_a_duration(wish: float | str | None, seconds: float | None) -> None:
    assert keep_seconds(wish, 1_000_000.0) == seconds


@pytest.mark.parametrize("wish", [0.0, 999_000.0, 1_100_000.0, 1e18, "25h", "5", "5d", "-5m", "soon", ""])
def test_a_time_in_the_past_or_beyond_a_day_is_refused_with_the_value_and_the_limit(wish: float | str) -> None:
    with pytest.raises(ValueError, match=r"keep_until is .*86400") as caught:
        keep_seconds(wish, 1_000_000.0)
    assert (f"{wish:.15g}" if isinstance(wish, float) else repr(wish)) in str(caught.value)


def test_the_longest_life_of_all_marks_counts_and_an_unknown_one_is_refused() -> None:
    marks = [{"text": "a"}, {"cache_control": {"type": "ephemeral"}}, {"cache_control": {"ttl": "1h"}}]
    assert cache_ttl(marks[:1]) is None and cache_ttl(marks[:2]) == "5m" and cache_ttl(marks) == "1h"
    with pytest.raises(ValueError, match="'2h'; it must be one of 5m, 1h"):
        cache_ttl([{"cache_control": {"ttl": "2h"}}])


async def test_an_answer_to_a_person_is_noted_with_the_clients_wishes(http: Http, client: FakeClient) -> None:
    async with http() as api:
        await api.post(CHAT, json={**HELLO, "expected_pause_ms": 2500, "keep_until": "5m"})
    ((name, pause),) = client.noted
    assert name == client.asked[0].request_id
    assert (pause.kind, pause.expected, pause.superseded) == ("person", 2.5, False)
    assert pause.keep_until == pytest.approx(time.monotonic() + 300, abs=5)


async def test_nothing_is_noted_of_an_answer_that_is_cut_off(http: Http, client: FakeClient) -> None:
    client.poison = "hello"
    async with http() as api:
        assert (await api.post(CHAT, json=HELLO)).status_code == 503
    assert client.noted == []


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_tools_are_the_kind_of_the_pause(http: Http, client: FakeClient, stream: bool) -> None:
    client.info = engine_info(max_model_len=4000)
    client.words = ("So ", call("find")[:20], call("find")[20:], call("buy"))
    async with http() as api:
        await api.post(CHAT, json={**HELLO, "tools": TOOLS, "stream": stream})
        await api.post(CHAT, json={**HELLO, "stream": stream})
        response = {
            "model": "tiny",
            "input": "hello",
            "tools": [{"type": "function", **tool["function"]} for tool in TOOLS],
        }
        await api.post(RESPONSES, json={**response, "stream": stream})
        message = {**HELLO, "max_tokens": 150, "tools": [tool["function"] for tool in TOOLS]}
        await api.post(MESSAGES, json={**message, "stream": stream})
    kinds = [pause.kind for _, pause in client.noted]
    assert kinds == ["tool:buy+find", "person", "tool:buy+find", "tool:buy+find"]


async def test_further_choices_are_branches(http: Http, client: FakeClient) -> None:
    async with http() as api:
        await api.post(CHAT, json={**HELLO, "n": 3})
    assert sorted(pause.kind for _, pause in client.noted) == ["branch", "branch", "person"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [({"prompt_cache_retention": "24h"}, 86_400), ({"prompt_cache_retention": "in_memory"}, None),
     ({"prompt_cache_retention": "24h", "keep_until": "1m"}, 60), ({"prompt_cache_options": {"ttl": "12h"}}, 43_200),
     ({"prompt_cache_options": {"ttl": "30m"}, "prompt_cache_retention": "in_memory"}, 1800),
     ({"prompt_cache_options": {"ttl": "30m"}, "keep_until": "1m"}, 60), ({"prompt_cache_options": {}}, None)],
)  # fmt: skip
@pytest.mark.parametrize("route", [CHAT, RESPONSES])
async def test_openais_retention_counts_as_a_time_to_keep(
    http: Http, client: FakeClient, route: str, given: dict[str, Any], kept: float | None
) -> None:
    body = HELLO if route == CHAT else {"model": "tiny", "input": "hello"}
    async with http() as api:
        assert (await api.post(route, json={**body, **given})).status_code == 200
    ((_, pause),) = client.noted
    assert pause.keep_until == (None if kept is None else pytest.approx(time.monotonic() + kept, abs=5))


async def test_anthropics_marks_count_as_a_time_to_keep(http: Http, client: FakeClient) -> None:
    content = [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    body = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": content}]}
    async with http() as api:
        assert (await api.post(MESSAGES, json=body)).status_code == 200
        refused = await api.post(MESSAGES, json={**body, "cache_control": {"type": "ephemeral", "ttl": "9h"}})
    ((_, pause),) = client.noted
    assert pause.keep_until == pytest.approx(time.monotonic() + 3600, abs=5)
    assert refused.status_code == 400 and "'9h'; it must be one of 5m, 1h" in refused.json()["error"]["message"]


async def test_headers_give_what_the_body_leaves_out(http: Http, client: FakeClient) -> None:
    headers = {"X-Holdfast-Expected-Pause-Ms": "1500", "x-holdfast-keep-until": "30s"}
    async with http(headers=headers) as api:
        await api.post(CHAT, json=HELLO)
        await api.post(MESSAGES, json={**HELLO, "max_tokens": 9, "expected_pause_ms": 10})
        assert (await api.post("/v1/embeddings", json={"input": "a"})).status_code != 200  # it has no such field
    assert [pause.expected for _, pause in client.noted] == [1.5, 0.01]
    assert client.noted[0][1].keep_until == pytest.approx(time.monotonic() + 30, abs=5)


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"expected_pause_ms": -1}, "expected_pause_ms", ">= 0"),
        ({"expected_pause_ms": 86_400_001}, "expected_pause_ms", "<= 86400000"),
        ({"expected_pause_ms": 1e18}, "expected_pause_ms", "<= 86400000"),
        ({"expected_pause_ms": "soon"}, "expected_pause_ms", "float"),
        ({"keep_until": 12}, "keep_until", "keep_until is 12"),
        ({"keep_until": 10**18}, "keep_until", "keep_until is 1e+18"),
        ({"keep_until": "forever"}, "keep_until", "'forever'"),
        ({"prompt_cache_retention": "1y"}, "prompt_cache_retention", '"1y"; it must be one of in_memory'),
        ({"superseded": ["a"] * 17}, "superseded", "16"),
    ],
)
@pytest.mark.parametrize("route", [CHAT, RESPONSES])
async def test_wrong_wishes_are_refused_with_the_value_and_the_limit(
    http: Http, client: FakeClient, route: str, given: dict[str, Any], param: str, message: str
) -> None:
    body = HELLO if route == CHAT else {"model": "tiny", "input": "hello"}
    async with http() as api:
        response = await api.post(route, json={**body, **given})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param) and message in error["message"]
    assert not client.asked


@pytest.mark.parametrize("header", [("expected_pause_ms", "-5"), ("keep_until", "tomorrow")])
async def test_a_wrong_header_is_refused_as_its_field(http: Http, header: tuple[str, str]) -> None:
    field, value = header
    async with http(headers={f"x-holdfast-{field.replace('_', '-')}": value}) as api:
        response = await api.post(CHAT, json=HELLO)
    assert response.status_code == 400 and response.json()["error"]["param"] == field


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_an_answer_may_replace_earlier_ones_of_the_same_key_alone(
    http: Http, client: FakeClient, path: str
) -> None:
    body = {**HELLO, "max_tokens": 9}
    async with http(api_key=("one", "two")) as api:
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        first = (await api.post(path, json=body, headers=one)).json()["id"]
        await api.post(path, json={**body, "superseded": [first, "chatcmpl-unknown"]}, headers=two)
        assert not any(pause.superseded for _, pause in client.noted)
        await api.post(path, json={**body, "superseded": [first, "chatcmpl-unknown"]}, headers=one)
    replaced = [(name, pause.kind) for name, pause in client.noted if pause.superseded]
    assert replaced == [(client.asked[0].request_id, "person")]


async def test_another_response_after_the_same_turn_replaces_the_first_unless_it_was_continued(
    http: Http, client: FakeClient
) -> None:
    async with http() as api:

        async def respond(previous: str | None) -> str:
            body = {"model": "tiny", "input": "hello", "previous_response_id": previous}
            return str((await api.post(RESPONSES, json=body)).json()["id"])

        root = await respond(None)
        first = await respond(root)
        assert not any(pause.superseded for _, pause in client.noted)
        second = await respond(root)
        replaced = [name for name, pause in client.noted if pause.superseded]
        assert replaced == [client.asked[1].request_id]
        await respond(second)
        await respond(root)
        assert [name for name, pause in client.noted if pause.superseded] == replaced, "the second went on"
    assert first != second


async def test_a_turn_of_a_conversation_that_is_replaced_is_superseded(http: Http, client: FakeClient) -> None:
    async with http() as api:
        conversation = (await api.post("/v1/conversations", json={})).json()["id"]
        body = {"model": "tiny", "input": "hello", "conversation": conversation}
        await api.post(RESPONSES, json=body)
        turn = (await api.post(RESPONSES, json=body)).json()["id"]
        await api.post(f"/v1/conversations/{conversation}/head", json={"before": turn})
        await api.post(RESPONSES, json=body)
    assert [name for name, pause in client.noted if pause.superseded] == [client.asked[1].request_id]


async def test_a_turn_is_announced_with_the_conversations_tokens(http: Http, client: FakeClient) -> None:
    async with http() as api:
        conversation = (await api.post("/v1/conversations", json={})).json()["id"]
        await api.post(RESPONSES, json={"model": "tiny", "input": "hello", "conversation": conversation})
        answer = await api.post(f"/v1/conversations/{conversation}/warm", json={})
        await api.post(f"/v1/conversations/{conversation}/warm", json={"cache_salt": "s"})
        missing = await api.post("/v1/conversations/conv_0/warm")
        wrong = await api.post(f"/v1/conversations/{conversation}/warm", json={"model": "other"})
    (tokens, tenant, adapter, salt), salted = client.warmed
    prompt = client.asked[0].prompt
    assert tokens[: len(prompt)] == prompt and (adapter, salt) == ("", "") and tenant == client.asked[0].tenant
    assert salted == (tokens, tenant, "", "s")
    assert answer.json() == {"id": conversation, "object": "conversation.warmed", "tokens": len(tokens)}
    assert (missing.status_code, wrong.status_code) == (404, 404)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1e999", "1e999"])
@pytest.mark.parametrize("field", ["expected_pause_ms", "keep_until"])
async def test_numbers_that_json_lacks_are_refused(http: Http, field: str, number: str) -> None:
    body = json.dumps({**HELLO, field: 0}).replace(": 0}", f": {number}}}")
    async with http() as api:
        response = await api.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
