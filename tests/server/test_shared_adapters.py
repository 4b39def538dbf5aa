"""SharedAdapters: two servers over one store. An adapter that one has loaded is served by the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeClient, engine_info
from serving import listening

from holdfast.core.types import AdapterInfo
from holdfast.engine.client.client import AdapterError

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PIRATE = {"lora_name": "pirate", "lora_path": "pirate"}
Two = tuple[httpx.AsyncClient, httpx.AsyncClient]


@pytest.fixture
def engines() -> tuple[FakeClient, FakeClient]:
    info = engine_info(adapter_slots=2)
    return FakeClient(info=info, adopts=True), FakeClient(info=info, adopts=True)


@pytest.fixture
async def two(engines: tuple[FakeClient, FakeClient], tmp_path: Path, look_often: None) -> AsyncIterator[Two]:
    (tmp_path / "root" / "pirate").mkdir(parents=True)
    async with AsyncExitStack() as held:
        clients = []
        for number, engine in enumerate(engines):
            fields = {"store": str(tmp_path / "s.sqlite"), "files": str(tmp_path / f"files {number}")}
            fields |= {"adapter_root": str(tmp_path / "root")}
            server = await held.enter_async_context(listening(engine, **fields, api_key=("one", "two")))
            headers = {"authorization": "Bearer one"}
            clients.append(await held.enter_async_context(httpx.AsyncClient(base_url=server.url, headers=headers)))
        yield clients[0], clients[1]


async def served(api: httpx.AsyncClient, key: str = "one") -> bool:
    body = {"model": "pirate", "messages": [{"role": "user", "content": "hello"}]}
    reply = await api.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert reply.status_code in (200, 404), reply.text
    return reply.status_code == 200


async def test_all_servers_serve_an_adapter_once_its_load_is_answered(two: Two) -> None:
    here, there = two
    assert not await served(there)
    assert (await here.post(LOAD, json=PIRATE)).status_code == 200
    assert await served(here) and await served(there)
    assert not await served(there, key="two"), "it belongs to the key that loaded it, at each server"
    assert (await there.post(UNLOAD, json={"lora_name": "pirate"})).status_code == 200
    assert not await served(here) and not await served(there)


async def test_another_load_under_the_same_name_replaces_the_adapter_everywhere(
    two: Two, engines: tuple[FakeClient, FakeClient]
) -> None:
    for body in (PIRATE, {**PIRATE, "load_inplace": True}):
        assert (await two[0].post(LOAD, json=body)).status_code == 200
    assert [replaces for _, _, replaces in engines[1].loaded] == [False, True]
    await asyncio.sleep(0.1)  # for several looks at the store
    assert len(engines[0].loaded) == len(engines[1].loaded) == 2, "nothing is loaded again"


async def test_an_adapter_that_cannot_be_loaded_elsewhere_is_tried_once(
    two: Two, engines: tuple[FakeClient, FakeClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    async def load(name: str, path: str, *, replace: bool = False) -> AdapterInfo:
        tried.append(name)
        raise AdapterError("there is no such directory")

    monkeypatch.setattr(engines[1], "load_adapter", load)
    assert (await two[0].post(LOAD, json=PIRATE)).status_code == 200
    while not tried:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    assert tried == ["pirate"] and await served(two[0]) and not await served(two[1])


async def test_a_server_with_an_engine_of_its_own_shares_no_adapter(
    engines: tuple[FakeClient, FakeClient], two: Two
) -> None:
    engines[0].adopts = False
    assert (await two[0].post(LOAD, json=PIRATE)).status_code == 200
    assert await served(two[0]) and not await served(two[1])
