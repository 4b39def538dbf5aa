"""The application within another server: where its routes are, who is an operator, its health and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from fake_engine import FakeClient

from holdfast.cluster.config import ClusterConfig
from holdfast.engine.client.connection import EngineDead
from holdfast.lm.config import EngineConfig
from holdfast.server import mounted
from holdfast.server.config import ServerConfig
from holdfast.server.mounted import Mounted
from holdfast.server.run import Engines

HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
async def served(client: FakeClient, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mounted]:
    async def start(*given: object, **options: object) -> Engines:
        return Engines(client)  # type: ignore[arg-type]

    monkeypatch.setattr(mounted, "start", start)
    served = Mounted(EngineConfig(), ServerConfig(store="memory"), ClusterConfig())
    await served.start()
    yield served
    await served.close()


def http(served: Mounted, root_path: str = "") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(served, root_path=root_path, client=("127.0.0.1", 1))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def test_routes_begin_after_the_path_at_which_the_application_is_mounted(served: Mounted) -> None:
    async with http(served, "/llm") as api:
        assert (await api.get("/llm/health")).json()["status"] == "ok"
        assert (await api.post("/llm/v1/chat/completions", json=HELLO)).status_code == 200
        assert (await api.get("/llm")).json()["name"] == "Holdfast"
    async with http(served) as api:
        assert (await api.post("/v1/chat/completions", json=HELLO)).status_code == 200


async def test_a_program_on_the_other_servers_machine_is_no_operator_without_a_key(served: Mounted) -> None:
    async with http(served) as api:
        refused = await api.get("/v1/engine/events")
    assert refused.status_code == 403 and "--operator-key" in refused.json()["error"]["message"]


async def test_the_application_is_unwell_once_its_engine_has_died(served: Mounted, client: FakeClient) -> None:
    await served.check_health()
    client.die("the engine was killed")
    with pytest.raises(EngineDead, match="the engine was killed"):
        await served.check_health()


async def test_after_the_end_engines_are_left_and_requests_are_refused(served: Mounted, client: FakeClient) -> None:
    async with http(served) as api:
        answers = [(await api.post("/v1/responses", json={"model": "tiny", "input": "hello"})).status_code]
        await asyncio.gather(served.close(), served.close())
        answers.append((await api.post("/v1/responses", json={"model": "tiny", "input": "hello"})).status_code)
    assert answers == [200, 503]
    assert client.dead.is_set()


async def test_an_application_that_never_started_may_be_closed() -> None:
    await Mounted(EngineConfig(), ServerConfig(), ClusterConfig()).close()
