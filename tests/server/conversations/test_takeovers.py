"""Two servers over one store, whose engines outlive them: when one ends, the other goes on with its responses."""

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
from sqlalchemy import update

from holdfast.server.conversations import service
from holdfast.server.conversations.database import Database, recipes

ANSWER = "".join(WORDS)
ASKED = {"model": "tiny", "input": "hello", "background": True}


@pytest.fixture
def writer() -> FakeClient:
    """The engine of the server that ends. It waits after the first word."""
    return FakeClient(hold=asyncio.Event(), adopts=True)


@pytest.fixture
def other() -> FakeClient:
    return FakeClient(adopts=True)


@pytest.fixture
async def two(
    writer: FakeClient, other: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    for name, seconds in (("RENEW_SECONDS", 0.02), ("POLL_SECONDS", 0.01), ("SWEEP_SECONDS", 0.02)):
        monkeypatch.setattr(service, name, seconds)
    async with AsyncExitStack() as held:
        clients = []
        for number, engine in enumerate((writer, other)):
            fields = {"store": str(tmp_path / "s.sqlite"), "files": str(tmp_path / f"files {number}")}
            server = await held.enter_async_context(listening(engine, **fields))
            clients.append(await held.enter_async_context(httpx.AsyncClient(base_url=server.url, timeout=60)))
        yield clients[0], clients[1]


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def ended(api: httpx.AsyncClient, id: str) -> dict[str, Any]:
    """Wait for the end of a response."""
    while True:
        found: dict[str, Any] = (await api.get(f"/v1/responses/{id}")).json()
        if found["status"] not in ("queued", "in_progress"):
            return found
        await asyncio.sleep(0.01)


async def test_a_background_response_is_finished_by_another_server(two: Any, writer: FakeClient) -> None:
    here, there = two
    id = (await here.post("/v1/responses", json=ASKED)).json()["id"]
    await until(lambda: writer.asked)
    writer.die("the server was killed")
    found = await ended(there, id)
    assert (found["status"], found["output"][0]["content"][0]["text"]) == ("completed", ANSWER)
    text = (await there.get(f"/v1/responses/{id}?stream=true")).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert {event["item_id"] for event in events if "item_id" in event} == {found["output"][0]["id"]}


async def test_a_reader_at_the_other_server_gets_the_events_as_they_are_written_there(
    two: Any, writer: FakeClient
) -> None:
    here, there = two
    id = (await here.post("/v1/responses", json=ASKED)).json()["id"]
    await until(lambda: writer.asked)
    reading = asyncio.create_task(there.get(f"/v1/responses/{id}?stream=true&starting_after=1"))
    await asyncio.sleep(0.1)
    writer.die("the server was killed")
    events = [json.loads(line[6:]) for line in (await reading).text.splitlines() if line.startswith("data: {")]
    assert [event["sequence_number"] for event in events] == [*range(2, len(events) + 2)]
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == ANSWER


async def test_a_branch_has_its_first_context_although_its_conversation_has_changed(
    two: Any, writer: FakeClient, other: FakeClient
) -> None:
    here, there = two
    conversation = (await here.post("/v1/conversations", json={})).json()["id"]
    branch = ASKED | {"conversation": {"id": conversation, "branch": True}}
    id = (await here.post("/v1/responses", json=branch)).json()["id"]
    await until(lambda: writer.asked)
    edit = {"items": [{"role": "user", "content": "later"}]}
    assert (await here.post(f"/v1/conversations/{conversation}/items", json=edit)).status_code == 200
    writer.die("the server was killed")
    assert (await ended(there, id))["status"] == "completed"
    assert list(other.asked[0].prompt) == list(writer.asked[0].prompt)


async def test_a_draw_has_the_same_seed_at_both_servers(two: Any, writer: FakeClient, other: FakeClient) -> None:
    here, there = two
    id = (await here.post("/v1/responses", json={**ASKED, "temperature": 1.0})).json()["id"]
    await until(lambda: writer.asked)
    writer.die("the server was killed")
    await ended(there, id)
    assert writer.asked[0].params == other.asked[0].params and other.asked[0].params.seed is not None
    assert (writer.asked[0].request_id, other.asked[0].request_id) == (id, id)


async def test_a_response_that_was_cancelled_before_its_server_ended_is_not_finished(
    two: Any, writer: FakeClient, other: FakeClient
) -> None:
    other.hold = asyncio.Event()
    here, there = two
    id = (await here.post("/v1/responses", json=ASKED)).json()["id"]
    await until(lambda: writer.asked)
    writer.die("the server was killed")
    assert (await there.post(f"/v1/responses/{id}/cancel")).json()["status"] == "cancelled"


async def test_a_recipe_that_cannot_be_read_is_left_alone_and_others_are_not(
    two: Any, writer: FakeClient, tmp_path: Path
) -> None:
    here, there = two
    spoiled, whole = [(await here.post("/v1/responses", json=ASKED)).json()["id"] for _ in range(2)]
    await until(lambda: len(writer.asked) == 2)
    with Database(str(tmp_path / "s.sqlite")).write() as db:
        db.execute(update(recipes).where(recipes.c.response == spoiled).values(recipe=b"\xc1"))
    writer.die("the server was killed")
    assert (await ended(there, whole))["status"] == "completed"
    assert (await there.get(f"/v1/responses/{spoiled}")).json()["status"] in ("queued", "in_progress")
