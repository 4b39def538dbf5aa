"""A stream whose server and engine end together is computed again by another server, from its record in the store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import WORDS, FakeClient
from serving import listening
from sqlalchemy import func, select, update

from holdfast.server.conversations import leases as leases_module
from holdfast.server.conversations import service
from holdfast.server.conversations.database import Database, streams

ANSWER = "".join(WORDS)
ASKED = {"model": "tiny", "input": "hello", "stream": True}
Two = tuple[httpx.AsyncClient, httpx.AsyncClient]


@pytest.fixture
def writer() -> FakeClient:
    """The engine of the server that ends. It waits after the first word."""
    return FakeClient(hold=asyncio.Event(), adopts=True)


@pytest.fixture
def other() -> FakeClient:
    return FakeClient(adopts=True)


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "s.sqlite") if request.param == "sqlite" else request.getfixturevalue("postgresql_schema")


@pytest.fixture
async def two(
    writer: FakeClient, other: FakeClient, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Two]:
    for name, seconds in (("RENEW_SECONDS", 0.02), ("POLL_SECONDS", 0.01), ("SWEEP_SECONDS", 0.02)):
        monkeypatch.setattr(service, name, seconds)
    async with AsyncExitStack() as held:
        clients = []
        for number, engine in enumerate((writer, other)):
            fields = {"store": where, "files": str(tmp_path / f"files {number}"), "api_key": ("one", "two")}
            server = await held.enter_async_context(listening(engine, **fields))
            headers = {"authorization": "Bearer one"}
            clients.append(
                await held.enter_async_context(httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60))
            )
        yield clients[0], clients[1]


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def records(where: str) -> int:
    database = Database(where)
    try:
        with database.read() as db:
            return db.execute(select(func.count()).select_from(streams)).scalar_one()
    finally:
        database.close()


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


async def broken(api: httpx.AsyncClient, writer: FakeClient, **more: Any) -> list[dict[str, Any]]:
    """Begin a stream whose server and engine end after the first word. Returns the events before the end."""
    seen: list[dict[str, Any]] = []
    async with api.stream("POST", "/v1/responses", json={**ASKED, **more}) as reply:
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if event["type"] == "response.failed":
                break
            seen.append(event)
            if event["type"] == "response.output_text.delta":
                writer.die("it was killed")
    return seen


async def when_free(api: httpx.AsyncClient, path: str) -> httpx.Response:
    """Ask until no other server is known to write the response."""
    while (reply := await api.get(path)).status_code == 409:
        assert reply.json()["error"]["code"] == "response_in_progress" and reply.headers["retry-after"] == "1"
        await asyncio.sleep(0.01)
    assert reply.status_code in (200, 404), reply.text
    return reply


async def test_the_events_go_on_after_the_last_number_with_the_same_ids_and_the_response_is_stored(
    two: Two, writer: FakeClient, other: FakeClient, where: str
) -> None:
    here, there = two
    seen = await broken(here, writer, temperature=1.0)
    id, last = seen[0]["response"]["id"], seen[-1]["sequence_number"]
    assert text_of(seen) == WORDS[0] and records(where) == 1
    reply = await when_free(there, f"/v1/responses/{id}?stream=true&starting_after={last}")
    rest = events_of(reply.text)
    assert rest, (reply.status_code, reply.text)
    assert [event["sequence_number"] for event in rest] == [*range(last + 1, last + 1 + len(rest))]
    assert text_of(seen) + text_of(rest) == ANSWER and rest[-1]["type"] == "response.completed"
    assert len({event["item_id"] for event in (*seen, *rest) if "item_id" in event}) == 1
    assert (await there.get(f"/v1/responses/{id}")).json()["status"] == "completed"
    assert writer.asked[0].params == other.asked[0].params and other.asked[0].params.seed is not None
    assert records(where) == 0


async def test_a_stream_is_recorded_while_it_runs_and_not_once_its_client_has_left(
    two: Two, writer: FakeClient, where: str
) -> None:
    here, there = two
    async with here.stream("POST", "/v1/responses", json=ASKED) as reply:
        lines = (line async for line in reply.aiter_lines() if line.startswith("data: {"))
        id = json.loads((await anext(lines))[6:])["response"]["id"]
        assert records(where) == 1
        asked = await there.get(f"/v1/responses/{id}")
        assert (asked.status_code, asked.json()["error"]["code"]) == (409, "response_in_progress")
        assert (await here.get(f"/v1/responses/{id}")).status_code == 409, "its own server says the same"
        foreign = await there.get(f"/v1/responses/{id}", headers={"authorization": "Bearer two"})
        assert foreign.status_code == 404, "another tenant learns nothing"
    while records(where):
        await asyncio.sleep(0.005)
    assert (await there.get(f"/v1/responses/{id}")).status_code == 404


async def test_streams_that_are_not_stored_or_run_in_the_background_have_no_record(two: Two, where: str) -> None:
    _, there = two
    for more in ({"store": False}, {"background": True}):
        async with there.stream("POST", "/v1/responses", json={**ASKED, **more}) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    assert records(where) == 0
                    break


async def test_a_turn_of_a_conversation_is_computed_again_and_appended_once(two: Two, writer: FakeClient) -> None:
    here, there = two
    conversation = (await here.post("/v1/conversations", json={})).json()["id"]
    seen = await broken(here, writer, conversation=conversation)
    id = seen[0]["response"]["id"]
    assert text_of(events_of((await when_free(there, f"/v1/responses/{id}?stream=true")).text)) == ANSWER
    items = (await there.get(f"/v1/conversations/{conversation}/items?order=asc")).json()["data"]
    assert [item["role"] for item in items] == ["user", "assistant"]


async def test_a_turn_whose_conversation_has_gone_on_without_it_is_not_computed_again(
    two: Two, writer: FakeClient, where: str
) -> None:
    here, there = two
    conversation = (await here.post("/v1/conversations", json={})).json()["id"]
    seen = await broken(here, writer, conversation=conversation)
    body = {"model": "tiny", "input": "again", "conversation": conversation}
    while (reply := await there.post("/v1/responses", json=body)).status_code == 409:
        await asyncio.sleep(0.01)
    assert reply.status_code == 200
    id = seen[0]["response"]["id"]
    assert (await when_free(there, f"/v1/responses/{id}")).status_code == 404
    assert records(where) == 0


async def test_a_stream_whose_connection_is_cut_while_its_server_ends_can_go_on(two: Two, writer: FakeClient) -> None:
    """A server that ends waits a moment for its streams, and then cuts them as if their clients had left."""
    here, there = two
    async with here.stream("POST", "/v1/responses", json=ASKED) as reply:
        lines = (line async for line in reply.aiter_lines() if line.startswith("data: {"))
        id = json.loads((await anext(lines))[6:])["response"]["id"]
        writer.dead.set()
    found = await when_free(there, f"/v1/responses/{id}?stream=true")
    assert text_of(events_of(found.text)) == ANSWER


async def test_two_readers_get_one_computation(two: Two, writer: FakeClient, other: FakeClient) -> None:
    here, there = two
    id = (await broken(here, writer))[0]["response"]["id"]
    path = f"/v1/responses/{id}?stream=true"
    replies = await asyncio.gather(*(when_free(there, path) for _ in range(3)))
    assert {text_of(events_of(reply.text)) for reply in replies} == {ANSWER} and len(other.asked) == 1


async def test_a_record_that_cannot_be_read_reads_as_no_response(two: Two, writer: FakeClient, where: str) -> None:
    here, there = two
    id = (await broken(here, writer))[0]["response"]["id"]
    database = Database(where)
    with database.write() as db:
        db.execute(update(streams).values(recipe=b"\xc1"))
    database.close()
    assert (await when_free(there, f"/v1/responses/{id}")).status_code == 404


async def test_a_stream_of_a_server_that_ends_in_peace_can_go_on_at_once(
    two: Two, writer: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases_module, "LEASE_SECONDS", 3600.0)
    here, there = two
    id = (await broken(here, writer))[0]["response"]["id"]
    assert (await when_free(there, f"/v1/responses/{id}")).status_code == 200
