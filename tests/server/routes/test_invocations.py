"""POST /invocations answers each body as the route that it is for, with that route's errors, limits and metrics."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fake_engine import FakeClient

from holdfast.server import protocol
from holdfast.server.routes import http as routes

Http = Callable[..., httpx.AsyncClient]
INVOCATIONS = "/invocations"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "seed": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 40_000}]}),
        ("/v1/completions", {"prompt": "hello", "seed": 1}),
        ("/v1/embeddings", {"input": ["north"]}),
        ("/rerank", {"query": "north", "documents": ["south"]}),
        ("/score", {"text_1": "north", "text_2": "south"}),
        ("/score", {"queries": "north", "documents": ["south"]}),
        ("/v1/chat/completions", {**CHAT, "unknown": 1}),
        ("/v1/chat/completions", {**CHAT, "model": "other"}),
        ("/v1/completions", {"prompt": "hello", "max_tokens": -1}),
    ],
)
async def test_an_invocation_is_answered_as_on_the_route_of_its_body(http: Http, path: str, body: Any) -> None:
    def lasting(reply: httpx.Response) -> tuple[int, Any]:
        return reply.status_code, {name: value for name, value in reply.json().items() if name not in ("id", "created")}

    async with http() as api:
        assert lasting(await api.post(INVOCATIONS, json=body)) == lasting(await api.post(path, json=body))


@pytest.mark.parametrize("text", ["a name", "x" * 40_000])
async def test_the_json_of_an_invocation_is_read_once(http: Http, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    decoded: list[int] = []

    def counted(body: bytes, what: str, param: str | None = None) -> None:
        decoded.append(len(body))

    monkeypatch.setattr(protocol, "check_items", counted)
    body = json.dumps({"prompt": "hello", "max_tokens": 1, "user": text}).encode()
    async with http() as api:
        reply = await api.post(INVOCATIONS, content=body, headers={"content-type": "application/json"})
    assert (reply.status_code, decoded) == (200, [len(body)])


@pytest.mark.parametrize(("text", "aside"), [("a name", False), ("x" * 40_000, True)])
async def test_a_large_invocation_is_converted_in_a_thread(
    http: Http, monkeypatch: pytest.MonkeyPatch, text: str, aside: bool
) -> None:
    threads: list[int] = []

    def noted(fields: Any, shape: Any) -> Any:
        threads.append(threading.get_ident())
        return protocol.typed(fields, shape)

    monkeypatch.setattr(routes, "typed", noted)
    async with http() as api:
        reply = await api.post(INVOCATIONS, json={"prompt": "hello", "max_tokens": 1, "user": text})
    assert reply.status_code == 200 and len(threads) == 1
    assert (threads[0] != threading.get_ident()) == aside


async def test_headers_of_an_invocation_give_fields_that_its_body_lacks(http: Http) -> None:
    async with http() as api:
        refused = await api.post(INVOCATIONS, json=CHAT, headers={"x-holdfast-ttft-ms": "0"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "ttft_ms"


async def test_an_invocation_is_streamed_and_may_be_compressed(http: Http) -> None:
    body = gzip.compress(json.dumps({**CHAT, "stream": True}).encode())
    async with http() as api:
        streamed = await api.post(INVOCATIONS, content=body, headers={"content-encoding": "gzip"})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    first, *_, last = streamed.text.removesuffix("\n\n").split("\n\n")
    assert '"chat.completion.chunk"' in first and last == "data: [DONE]"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"inputs": "hello"}, "missing_required_parameter"),
        ({}, "missing_required_parameter"),
        ([], "invalid_json"),
        ("x" * 20_000, "invalid_json"),
    ],
)
async def test_a_body_for_no_route_is_refused_with_the_fields_that_would_say(http: Http, body: Any, code: str) -> None:
    async with http() as api:
        refused = await api.post(INVOCATIONS, json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, code)
    assert code == "invalid_json" or all(name in error["message"] for name in ("messages", "prompt", "input", "text_1"))


async def test_an_invocation_counts_in_the_metrics_of_its_route(http: Http, client: FakeClient) -> None:
    async with http() as api:
        await api.post(INVOCATIONS, json=CHAT)
        await api.post(INVOCATIONS, json={**CHAT, "temperature": 9})
        shown = (await api.get("/metrics")).text
    counted = [line for line in shown.splitlines() if line.startswith("holdfast_requests_total{")]
    assert sorted(line.partition("} ")[2] for line in counted if "/v1/chat/completions" in line) == ["1.0", "1.0"]
    assert not any(INVOCATIONS in line for line in counted)
    assert len(client.asked) == 1


async def test_an_invocation_needs_a_key_and_its_body_has_the_same_limit(http: Http, client: FakeClient) -> None:
    async with http(api_key=("sesame",), max_body_mb=0.01) as api:
        assert (await api.post(INVOCATIONS, json=CHAT)).status_code == 401
        key = {"authorization": "Bearer sesame"}
        large = {"messages": [{"role": "user", "content": "x" * 20_000}]}
        assert (await api.post(INVOCATIONS, json=large, headers=key)).status_code == 413
        assert (await api.post(INVOCATIONS, json=CHAT, headers=key)).status_code == 200
    assert len(client.asked) == 1
