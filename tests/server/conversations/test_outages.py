"""The store is away for a while, because PostgreSQL is stopped or the disk is full: answers wait for it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import WORDS, FakeClient
from postgresql_server import PostgresqlServer, postgresql_server
from serving import listening

from holdfast.server.conversations import writing
from holdfast.server.conversations.database import POSTGRESQL_TIMES, Database

ANSWER = "".join(WORDS)
ASKED: dict[str, Any] = {"model": "tiny", "input": "hello"}
AWAY_SECONDS = 3.0


@pytest.fixture
def database() -> Iterator[PostgresqlServer]:
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    with postgresql_server() as server:
        yield server


@pytest.fixture
def engine() -> FakeClient:
    """It waits after the first word."""
    return FakeClient(hold=asyncio.Event(), adopts=True)


@pytest.fixture
async def api(engine: FakeClient, database: PostgresqlServer, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        listening(engine, store=database.url, files=str(tmp_path / "files")) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as api,
    ):
        yield api


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


async def holding(engine: FakeClient, count: int) -> None:
    """Wait until `count` requests have had their first word."""
    while sum(asked.given > 0 for asked in engine.asked) < count:
        await asyncio.sleep(0.005)


async def test_postgresql_that_is_away_for_seconds_costs_no_answer_and_the_server_needs_no_restart(
    api: httpx.AsyncClient, engine: FakeClient, database: PostgresqlServer
) -> None:
    assert engine.hold is not None
    conversation = (await api.post("/v1/conversations", json={})).json()["id"]
    body = {**ASKED, "conversation": conversation}
    streamed = asyncio.create_task(api.post("/v1/responses", json={**body, "stream": True}))
    background = (await api.post("/v1/responses", json={**ASKED, "background": True})).json()["id"]
    await holding(engine, 2)
    await asyncio.to_thread(database.stop)
    stopped = time.monotonic()
    engine.hold.set()  # Both answers end now.
    refused = await api.post("/v1/responses", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) in (
        (503, "store_unavailable"), (409, "conversation_busy"),
    )  # fmt: skip
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    assert (await api.post("/v1/chat/completions", json=chat)).status_code == 200, "it needs no store"
    continued = await api.post("/v1/responses", json={**ASKED, "previous_response_id": "resp_none"})
    unknown = await api.get("/v1/responses/resp_none")
    for reply in (continued, unknown):
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "store_unavailable")
    assert unknown.headers["retry-after"] == "5"
    assert (await api.get("/health")).json()["status"] == "store fails"
    assert not streamed.done()
    await asyncio.sleep(AWAY_SECONDS - (time.monotonic() - stopped))
    await asyncio.to_thread(database.start)

    events = events_of((await streamed).text)
    assert events[-1]["type"] == "response.completed"
    while (found := (await api.get(f"/v1/responses/{background}")).json())["status"] != "completed":
        await asyncio.sleep(0.05)
    assert found["output"][0]["content"][0]["text"] == ANSWER
    items = (await api.get(f"/v1/conversations/{conversation}/items?order=asc")).json()["data"]
    assert [item["role"] for item in items] == ["user", "assistant"]
    assert (await api.get("/health")).json()["status"] == "ok"
    assert (await api.post("/v1/responses", json=body)).status_code == 200


async def test_an_answer_fails_once_the_store_was_away_for_too_long(
    api: httpx.AsyncClient, engine: FakeClient, database: PostgresqlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.hold is not None
    monkeypatch.setattr(writing, "COMMIT_SECONDS", 0.6)
    waiting = asyncio.create_task(api.post("/v1/responses", json=ASKED))
    await holding(engine, 1)
    await asyncio.to_thread(database.stop)
    engine.hold.set()
    reply = await waiting
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "store_unavailable")
    await asyncio.to_thread(database.start)


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 3 MB in memory."""
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], capture_output=True)
        if mounted.returncode:
            pytest.skip(f"no file system can be mounted: {mounted.stderr.decode().strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def fill(path: Path) -> None:
    """Use all that is free on the disk of a file."""
    with path.open("wb") as file, pytest.raises(OSError, match="No space"):
        while True:
            os.write(file.fileno(), b"\0" * 4096)


async def test_a_full_disk_delays_an_answer_until_there_is_room(small_disk: Path, engine: FakeClient) -> None:
    assert engine.hold is not None
    filler = small_disk / "filler"
    async with (
        listening(engine, store=str(small_disk / "s.sqlite"), files=str(small_disk / "files")) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as api,
    ):
        first = (await api.post("/v1/conversations", json={})).json()["id"]
        waiting = asyncio.create_task(api.post("/v1/responses", json={**ASKED, "conversation": first}))
        await holding(engine, 1)
        await asyncio.to_thread(fill, filler)
        refused = await api.post("/v1/conversations", json={"metadata": {"text": "x" * 512}})
        # The write-ahead log may have room for a few more writes.
        for _ in range(200):
            if refused.status_code != 200:
                break
            refused = await api.post("/v1/conversations", json={"metadata": {"text": "x" * 512}})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
        assert (await api.get(f"/v1/conversations/{first}")).status_code == 200, "it can be read"
        engine.hold.set()
        await asyncio.sleep(1.0)
        assert not waiting.done()
        filler.unlink()
        assert (await waiting).status_code == 200
        items = (await api.get(f"/v1/conversations/{first}/items?order=asc")).json()["data"]
        assert [item["role"] for item in items] == ["user", "assistant"]
        assert (await api.get("/health")).json()["status"] == "ok"


def test_a_connection_to_postgresql_ends_when_its_host_vanishes_unless_the_url_says_otherwise() -> None:
    default = Database("postgresql://user@host/name").engine.url.query
    assert {name: default[name] for name in POSTGRESQL_TIMES} == POSTGRESQL_TIMES
    given = Database("postgresql://user@host/name?connect_timeout=60").engine.url.query
    assert given["connect_timeout"] == "60" and given["tcp_user_timeout"] == POSTGRESQL_TIMES["tcp_user_timeout"]
