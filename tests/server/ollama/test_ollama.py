"""Ollama's API over a fake client: lines, whole answers, calls, options and refusals."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from fake_engine import FakeClient, FakeText

from holdfast.engine.client.pooling import Pooling
from holdfast.engine.client.stream import Delta

Http = Callable[..., httpx.AsyncClient]
CHAT, GENERATE = "/api/chat", "/api/generate"
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in response.text.splitlines()]


async def test_a_chat_is_a_stream_of_lines_unless_the_client_wants_it_whole(http: Http) -> None:
    async with http() as api:
        *pieces, last = lines_of(await api.post(CHAT, json=HELLO))
        whole = (await api.post(CHAT, json={**HELLO, "stream": False})).json()
    assert [piece["message"]["content"] for piece in pieces] == ["Ahoy", ", ", "sailor", "!"]
    assert {piece["done"] for piece in pieces} == {False} and last["done"] is True
    assert whole["message"] == {"role": "assistant", "content": "Ahoy, sailor!"}
    for end in (last, whole):
        assert (end["model"], end["done_reason"], end["eval_count"]) == ("tiny", "stop", 4)
        assert end["prompt_eval_count"] == len("<user>hello")
        assert (end["prompt_eval_duration"], end["eval_duration"]) == (500_000_000, 1_000_000_000)
        assert end["total_duration"] > 0 and end["created_at"].endswith("Z")


async def test_a_prompt_gives_a_response_through_the_template_or_raw(http: Http, client: FakeClient) -> None:
    asked = {"model": "tiny:latest", "prompt": "hello", "system": "be brief", "stream": False}
    async with http() as api:
        assert (await api.post(GENERATE, json=asked)).json()["response"] == "Ahoy, sailor!"
        assert "".join(map(chr, client.asked[-1].prompt)) == "<system>be brief<user>hello"
        raw = await api.post(GENERATE, json={"prompt": "hello", "raw": True, "options": {"num_predict": 2}})
        *pieces, last = lines_of(raw)
    assert "".join(map(chr, client.asked[-1].prompt)) == "hello"
    assert "".join(piece["response"] for piece in pieces) == "Ahoy, " and last["done_reason"] == "length"


async def test_options_reach_the_engine(http: Http, client: FakeClient) -> None:
    options = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.8, "min_p": 0.1, "seed": 3, "stop": ["x"], "num_predict": 2,
        "repeat_penalty": 1.5, "presence_penalty": 0.25, "frequency_penalty": 0.75, "num_ctx": 512,
    }  # fmt: skip
    async with http() as api:
        response = await api.post(CHAT, json={**HELLO, "options": options, "keep_alive": "5m", "format": "json"})
        assert lines_of(response)[-1]["done_reason"] == "length"
        await api.post(CHAT, json={**HELLO, "options": {"num_predict": -1, "seed": -7}})
    params = client.asked[0].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (0.5, 7, 0.8, 0.1, 3)
    assert (params.stop, params.max_tokens, params.repetition_penalty) == (("x",), 2, 1.5)
    assert (params.presence_penalty, params.frequency_penalty) == (0.25, 0.75)
    assert params.grammar is not None
    assert client.asked[1].params.max_tokens > 100 and client.asked[1].params.grammar is None
    assert client.asked[1].params.seed == (1 << 63) - 7


async def test_calls_are_whole_and_their_results_find_them(http: Http, client: FakeClient) -> None:
    client.text = FakeText(template="{{ tools }}<tool_call>")
    client.words = ("<tool_call>", '{"name": "now", ', '"arguments": {"zone": "utc"}}', "</tool_call>")
    called = {"function": {"name": "now", "arguments": {"zone": "utc"}}}
    async with http() as api:
        *pieces, _ = lines_of(await api.post(CHAT, json={**HELLO, "tools": [TOOL]}))
        assert [call for piece in pieces for call in piece["message"].get("tool_calls", ())] == [called]
        whole = (await api.post(CHAT, json={**HELLO, "tools": [TOOL], "stream": False})).json()
        assert whole["message"]["tool_calls"] == [called]
        history = [
            *HELLO["messages"],
            {"role": "assistant", "content": "", "tool_calls": [called]},
            {"role": "tool", "tool_name": "now", "content": "noon"},
        ]
        await api.post(CHAT, json={"messages": history, "tools": [TOOL]})
    assert "[now {'zone': 'utc'} call_0]<tool>noon" in "".join(map(chr, client.asked[-1].prompt))


async def test_arguments_that_nest_too_deeply_are_empty(http: Http, client: FakeClient) -> None:
    client.text = FakeText(template="{{ tools }}<tool_call>")
    nested = "[" * 100_000 + "]" * 100_000
    client.words = ("<tool_call>", '{"name": "now", "arguments": {"zone": ', nested, "}}", "</tool_call>")
    async with http() as api:
        *pieces, last = lines_of(await api.post(CHAT, json={**HELLO, "tools": [TOOL]}))
    calls = [call for piece in pieces for call in piece["message"].get("tool_calls", ())]
    assert calls == [{"function": {"name": "now", "arguments": {}}}] and last["done"]


async def test_log_probabilities_are_told_when_asked(http: Http) -> None:
    async with http() as api:
        asked = {**HELLO, "logprobs": True, "top_logprobs": 2, "stream": False}
        told = (await api.post(CHAT, json=asked)).json()["logprobs"]
    assert [each["token"] for each in told] == ["Ahoy", ", ", "sailor", "!"] and len(told[0]["top_logprobs"]) == 2


async def test_a_request_without_a_prompt_says_that_the_model_is_loaded(http: Http, client: FakeClient) -> None:
    async with http() as api:
        for path in (CHAT, GENERATE):
            assert (await api.post(path, json={"model": "tiny"})).json()["done_reason"] == "load"
            assert (await api.post(path, json={"model": "other"})).status_code == 404
    assert client.asked == []


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (CHAT, {**HELLO, "options": {"temperature": 3}}, "options.temperature"),
        (CHAT, {**HELLO, "options": {"mirostat": 2}}, "options.mirostat"),
        (CHAT, {**HELLO, "options": {"colour": 2}}, "options.colour"),
        (CHAT, {**HELLO, "format": 5}, "format"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, "messages[0].images"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages[0].tool_calls"),
        (GENERATE, {"prompt": "a", "suffix": "b"}, "suffix"),
        (GENERATE, {"prompt": "a", "context": [1]}, "context"),
    ],
)
async def test_a_bad_value_is_refused_in_ollamas_form(http: Http, path: str, body: Any, named: str) -> None:
    async with http() as api:
        response = await api.post(path, json=body)
    assert response.status_code == 400 and list(response.json()) == ["error"]
    assert named in response.json()["error"]


async def test_models_are_listed_shown_and_running(http: Http) -> None:
    async with http() as api:
        (listed,) = (await api.get("/api/tags")).json()["models"]
        (running,) = (await api.get("/api/ps")).json()["models"]
        shown = (await api.post("/api/show", json={"model": "tiny:latest"})).json()
        assert (await api.post("/api/show", json={"model": "other"})).status_code == 404
        assert (await api.get("/api/version")).json()["version"]
    assert (listed["name"], listed["size"], listed["digest"]) == ("tiny", 1 << 20, "0123")
    assert running["context_length"] == 200 and running["expires_at"].startswith("9999")
    assert shown["capabilities"] == ["completion"] and shown["model_info"]["context_length"] == 200


class Embedder(FakeClient):
    """Gives each prompt a vector of its length."""

    async def stream(self, prompt: Any, params: Any, **more: Any) -> AsyncGenerator[Delta, None]:
        vector = np.array([3.0, 4.0 * len(prompt)], np.float32).tobytes()
        async for delta in super().stream(prompt, params, **more):
            yield replace(delta, vector=vector)


@pytest.mark.parametrize("client", [Embedder(pooling=Pooling(normalize=False))])
async def test_vectors_come_in_both_forms(http: Http) -> None:
    async with http() as api:
        several = (await api.post("/api/embed", json={"model": "tiny:latest", "input": ["a", "bcd"]})).json()
        short = (await api.post("/api/embed", json={"input": "a", "dimensions": 1, "keep_alive": "5m"})).json()
        older = (await api.post("/api/embeddings", json={"prompt": "a", "options": {"num_ctx": 9}})).json()
        long = (await api.post("/api/embed", json={"input": "x" * 300})).json()
        refused = await api.post("/api/embed", json={"input": "x" * 300, "truncate": False})
    assert several["embeddings"] == [pytest.approx([0.6, 0.8]), pytest.approx([3 / 153**0.5, 12 / 153**0.5])]
    assert (several["model"], several["prompt_eval_count"]) == ("tiny:latest", 4) and several["total_duration"] > 0
    assert short["embeddings"] == [[1.0]] and older == {"embedding": [3.0, 4.0]}
    assert long["prompt_eval_count"] == 199
    assert refused.status_code == 400 and "maximum context length" in refused.json()["error"]


async def test_a_path_that_is_not_there_and_a_model_without_vectors_are_refused_in_ollamas_form(http: Http) -> None:
    async with http() as api:
        missing = await api.post("/api/pull", json={"model": "x"})
        none = await api.post("/api/embed", json={"input": "a"})
    assert missing.status_code == 404 and "there is no /api/pull" in missing.json()["error"]
    assert none.status_code == 400 and "not made for embeddings" in none.json()["error"]
