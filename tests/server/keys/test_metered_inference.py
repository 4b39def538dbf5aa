"""Limits of keys on the Open Inference Protocol, at a server of a language model and an application."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import httpx
import pytest
from fake_app import FakeApp, asked, called
from fake_engine import FakeClient
from stored_keys import Stored, bearer

from holdfast.server.app import create_app
from holdfast.server.config import ServerConfig
from holdfast.server.inference.protobufs import SERVICE
from holdfast.server.keys.values import Limits
from holdfast.server.run import open_store

INFER, VERSIONED = "/v2/models/sums/infer", "/v2/models/sums/versions/1/infer"
CHAT = "/v1/chat/completions"
HELLO: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def app() -> FakeApp:
    return FakeApp()


@pytest.fixture
def server(app: FakeApp, store: str) -> Iterator[Callable[[], Any]]:
    """Returns one server, which starts with the first call, after the keys."""
    config = ServerConfig(store=store)

    @cache
    def made() -> Any:
        return create_app(FakeClient(), config, open_store(config), [app])  # type: ignore[arg-type,list-item]

    yield made
    made().state.jobs[0].files.close()
    made().state.responses.store.close()


@pytest.fixture
def api(server: Callable[[], Any]) -> Callable[[str], httpx.AsyncClient]:
    """Makes clients of the server, each with a key."""

    def client(key: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(server(), raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=bearer(key))

    return client


async def test_inferences_count_for_the_requests_per_minute_of_their_key(
    keys: Stored, api: Callable[[str], httpx.AsyncClient], app: FakeApp
) -> None:
    keys.add("acme", "k", limits=Limits(requests_per_minute=3))
    keys.add("other", "o")
    async with api("k") as acme, api("o") as other:
        first = await acme.post(INFER, json=asked())
        assert (first.status_code, first.headers["x-ratelimit-remaining-requests"]) == (200, "2")
        assert (await acme.post(VERSIONED, json=asked())).status_code == 200
        assert (await acme.post(CHAT, json=HELLO)).status_code == 200
        for path in (INFER, VERSIONED):
            refused = await acme.post(path, json=asked())
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 18
            assert list(refused.json()) == ["error"] and "requests per min: limit 3" in refused.json()["error"]
        assert (await acme.get("/v2/models/sums")).status_code == 200
        assert (await other.post(INFER, json=asked())).status_code == 200
    assert len(app.asked) == 3


async def test_inferences_over_grpc_count_for_the_same_limits(
    keys: Stored, api: Callable[[str], httpx.AsyncClient], server: Callable[[], Any], app: FakeApp
) -> None:
    keys.add("acme", "k", limits=Limits(requests_per_minute=2))
    keys.add("reader", "r", "adapters")
    calls = httpx.ASGITransport(server().state.calls.entry)
    path, body = f"{SERVICE}/ModelInfer", called().SerializeToString()
    async with (
        api("k") as acme,
        httpx.AsyncClient(transport=calls, base_url="http://localhost", headers=bearer("k")) as grpc,
    ):
        first = await grpc.post(path, content=body)
        assert (first.status_code, first.headers["x-ratelimit-remaining-requests"]) == (200, "1")
        assert (await acme.post(INFER, json=asked())).status_code == 200
        refused = await grpc.post(path, content=body)
        assert refused.status_code == 429 and "requests per min: limit 2" in refused.json()["error"]["message"]
        assert (await grpc.post(f"{SERVICE}/ServerMetadata")).status_code == 200
        unscoped = await grpc.post(path, content=body, headers=bearer("r"))
        assert unscoped.status_code == 403 and "it needs the scope use" in unscoped.json()["error"]["message"]
    assert len(app.asked) == 2


async def test_inferences_in_progress_are_limited_and_free_their_place(
    keys: Stored, api: Callable[[str], httpx.AsyncClient], app: FakeApp
) -> None:
    keys.add("acme", "k", limits=Limits(streams=1))
    app.hold = asyncio.Event()
    async with api("k") as acme:
        running = asyncio.create_task(acme.post(INFER, json=asked()))
        while not app.asked:
            await asyncio.sleep(0.001)
        refused = await acme.post(INFER, json=asked())
        assert refused.status_code == 429 and "1 requests in progress" in refused.json()["error"]
        app.hold.set()
        assert (await running).status_code == 200
        assert (await acme.post(INFER, json={"inputs": []})).status_code == 400
        assert (await acme.post(INFER, json=asked())).status_code == 200


async def test_a_spent_budget_of_tokens_holds_up_no_inference(
    keys: Stored, api: Callable[[str], httpx.AsyncClient]
) -> None:
    keys.add("acme", "k", limits=Limits(budget_tokens=1, tokens_per_minute=1))
    async with api("k") as acme:
        assert (await acme.post(CHAT, json=HELLO)).status_code == 200
        assert (await acme.post(CHAT, json=HELLO)).json()["error"]["code"] == "insufficient_quota"
        assert (await acme.post(INFER, json=asked())).status_code == 200
