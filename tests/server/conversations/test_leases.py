"""Two servers over one store: each of them reports the state of a background response, and can end it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import WORDS, FakeClient
from serving import listening
from sqlalchemy import update

from holdfast.server.config import ServerConfig
from holdfast.server.conversations import leases as leases_module
from holdfast.server.conversations import service
from holdfast.server.conversations.database import Database, leases
from holdfast.server.conversations.leases import LEASE_SECONDS, Leases, conversation_key
from holdfast.server.conversations.store import Store
from holdfast.server.conversations.values import Bounds, Conflict, Context, ConversationBusy, Turn
from holdfast.server.run import open_store

ANSWER = "".join(WORDS)
ASKED = {"model": "tiny", "input": "hello", "background": True}
Two = tuple[httpx.AsyncClient, httpx.AsyncClient]


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


@pytest.fixture
def writer() -> FakeClient:
    """The engine of the server that writes. It waits after the first word."""
    return FakeClient(hold=asyncio.Event())


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "s.sqlite") if request.param == "sqlite" else request.getfixturevalue("postgresql_schema")


@pytest.fixture
async def two(writer: FakeClient, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Two]:
    """The server that writes, and another one over the same store."""
    monkeypatch.setattr(service, "RENEW_SECONDS", 0.02)
    monkeypatch.setattr(service, "POLL_SECONDS", 0.01)
    async with AsyncExitStack() as held:
        clients = []
        for number, engine in enumerate((writer, FakeClient())):
            fields = {"store": where, "files": str(tmp_path / f"files {number}"), "api_key": ("one", "two")}
            server = await held.enter_async_context(listening(engine, **fields))
            headers = {"authorization": "Bearer one"}
            clients.append(
                await held.enter_async_context(httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60))
            )
        yield clients[0], clients[1]


async def begun(api: httpx.AsyncClient, writer: FakeClient, **more: Any) -> str:
    """Return the id of a background response whose first word has come."""
    id: str = (await api.post("/v1/responses", json={**ASKED, **more})).json()["id"]
    await until(lambda: writer.asked)
    while (await api.get(f"/v1/responses/{id}")).json()["status"] == "queued":
        await asyncio.sleep(0.002)
    return id


def events(text: str) -> list[tuple[str, int]]:
    """Return the type and the sequence number of each event."""
    found = [httpx.Response(200, text=line[6:]).json() for line in text.splitlines() if line.startswith("data: {")]
    return [(each["type"], each["sequence_number"]) for each in found]


async def test_another_server_reports_that_a_response_runs_and_then_its_answer(two: Two, writer: FakeClient) -> None:
    here, there = two
    id = await begun(here, writer)
    while (running := (await there.get(f"/v1/responses/{id}")).json())["status"] == "queued":
        await asyncio.sleep(0.002)
    assert running == (await here.get(f"/v1/responses/{id}")).json() and running["status"] == "in_progress"
    refused = await there.post("/v1/responses", json={"model": "tiny", "input": "on", "previous_response_id": id})
    assert refused.status_code == 400 and "failed" not in refused.text
    writer.hold.set()  # type: ignore[union-attr]
    while (found := (await there.get(f"/v1/responses/{id}")).json())["status"] in ("queued", "in_progress"):
        pass
    assert (found["status"], found["output"][0]["content"][0]["text"]) == ("completed", ANSWER)
    while (own := (await here.get(f"/v1/responses/{id}")).json())["status"] == "in_progress":
        await asyncio.sleep(0.002)  # Its own server waits until the disk has the answer.
    assert found == own


async def test_a_stream_at_another_server_has_each_event_once_and_ends_with_the_response(
    two: Two, writer: FakeClient
) -> None:
    here, there = two
    id = await begun(here, writer)
    whole, later = (
        asyncio.create_task(there.get(f"/v1/responses/{id}", params={"stream": "true", **more}, timeout=60))
        for more in ({}, {"starting_after": "1"})
    )
    async with there.stream("GET", f"/v1/responses/{id}", params={"stream": "true"}) as begun_stream:
        assert await anext(begun_stream.aiter_lines()) == "event: response.created"  # while it still runs
    writer.hold.set()  # type: ignore[union-attr]
    replayed = events((await whole).text)
    assert [number for _, number in replayed] == list(range(len(replayed)))
    assert [replayed[0][0], replayed[1][0], replayed[-1][0]] == [
        "response.created",
        "response.queued",
        "response.completed",
    ]
    assert events((await later).text) == replayed[2:]


async def test_another_server_cancels_a_response(two: Two, writer: FakeClient) -> None:
    here, there = two
    id = await begun(here, writer)
    cancelled = (await there.post(f"/v1/responses/{id}/cancel", timeout=60)).json()
    assert (cancelled["status"], writer.asked[0].ended) == ("cancelled", "aborted")
    for api in two:
        assert (await api.get(f"/v1/responses/{id}")).json()["status"] == "cancelled"


async def test_another_server_deletes_a_response_and_its_work_ends(two: Two, writer: FakeClient) -> None:
    here, there = two
    id = await begun(here, writer)
    assert (await there.delete(f"/v1/responses/{id}")).status_code == 200
    await until(lambda: writer.asked[0].ended == "aborted")
    for api in two:
        while (await api.get(f"/v1/responses/{id}")).status_code != 404:
            pass


async def test_another_key_neither_sees_nor_ends_a_response(two: Two, writer: FakeClient) -> None:
    here, there = two
    id = await begun(here, writer)
    other = {"authorization": "Bearer two"}
    for method, path in (("GET", ""), ("GET", "?stream=true"), ("POST", "/cancel"), ("DELETE", "")):
        assert (await there.request(method, f"/v1/responses/{id}{path}", headers=other)).status_code == 404
    assert (await there.get(f"/v1/responses/{id}")).json()["status"] != "failed"
    assert writer.asked[0].ended == "running"


async def test_a_tree_at_another_server_has_the_turn_running(two: Two, writer: FakeClient) -> None:
    here, there = two
    conversation = (await here.post("/v1/conversations", json={})).json()["id"]
    await begun(here, writer, conversation=conversation)
    (turn,) = (await there.get(f"/v1/conversations/{conversation}/turns")).json()["turns"]
    assert (turn["running"], turn["status"] in ("queued", "in_progress")) == (True, True)


async def test_a_server_that_lives_renews_its_leases(two: Two, writer: FakeClient, where: str) -> None:
    id = await begun(two[0], writer)
    database = Database(where)
    other = Leases(database, lambda: 2 * LEASE_SECONDS)
    with database.write() as db:
        db.execute(update(leases).values(seen=0.0))
    await until(lambda: other.elsewhere(id))
    database.close()


@pytest.fixture
def left(tmp_path: Path) -> tuple[ServerConfig, str]:
    """Return the configuration of a server that was killed while it wrote a response of a conversation, and its id."""
    config = ServerConfig(store=str(tmp_path / "s.sqlite"), files=str(tmp_path / "files"))
    store = open_store(config)
    store.conversations.create("", "conv_a", {}, [])
    response = {
        "id": "resp_a", "object": "response", "status": "in_progress", "background": True, "output": [],
        "created_at": 1, "model": "tiny", "metadata": {}, "usage": None, "error": None,
    }  # fmt: skip
    store.turns.commit(Turn(response=response, tenant="", input=[], context=Context(), conversation="conv_a"))
    store.close()
    return config, "resp_a"


async def test_a_killed_servers_response_is_failed_once_its_lease_has_lapsed(
    http: Callable[..., httpx.AsyncClient], left: tuple[ServerConfig, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, id = left
    monkeypatch.setattr(service, "POLL_SECONDS", 0.01)
    async with http(store=config.store, files=config.files) as api:

        async def states() -> tuple[str, str, bool, bool]:
            found = (await api.get(f"/v1/responses/{id}")).json()
            (turn,) = (await api.get("/v1/conversations/conv_a/turns")).json()["turns"]
            on = await api.post("/v1/responses", json={"model": "tiny", "input": "x", "previous_response_id": id})
            return found["status"], turn["status"], turn["running"], "is failed" in on.text

        assert await states() == ("in_progress", "in_progress", True, False)
        waiting = asyncio.create_task(api.post(f"/v1/responses/{id}/cancel"))
        await asyncio.sleep(0)
        monkeypatch.setattr(leases_module, "LEASE_SECONDS", -1.0)
        assert await states() == ("failed", "failed", False, True)
        assert (await waiting).json()["status"] == "failed"
        streamed = events((await api.get(f"/v1/responses/{id}?stream=true")).text)
        assert streamed[-1][0] == "response.failed"


def test_leases_of_servers_that_ended_long_ago_are_deleted(tmp_path: Path) -> None:
    now = 1000.0
    store = Store.open(str(tmp_path / "s.sqlite"), Bounds(seconds=1e6, threads=1000, bytes=1 << 30), lambda: now)
    with store.database.write() as db:
        store.leases.begin(db, "resp_a")
    now += leases_module.KEPT_SECONDS + 1
    with store.database.write() as db:
        store.leases.begin(db, "resp_b")
    assert store.leases.renew(["resp_b"]) == set()
    with store.database.read() as db:
        assert [row.response for row in db.execute(leases.select())] == ["resp_b"]
    store.close()


@pytest.fixture
def stores(where: str) -> Iterator[list[Store]]:
    """Two servers' stores in one database, with a clock that stands still."""
    bounds = Bounds(seconds=1e6, threads=1000, bytes=1 << 30)
    opened = [Store.open(where, bounds, lambda: 1000.0) for _ in range(2)]
    yield opened
    for store in opened:
        store.close()


def test_a_conversation_is_locked_for_other_servers_until_it_is_unlocked_or_its_server_ends(
    stores: list[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (store.leases for store in stores)
    key = conversation_key("a", "conv")
    first.lock(key)
    with pytest.raises(ConversationBusy, match="try again"):
        second.lock(key)
    second.lock(conversation_key("b", "conv"))
    second.unlock(key)  # Only the server that holds it can give it up.
    with pytest.raises(ConversationBusy):
        second.lock(key)
    first.unlock(key)
    second.lock(key)
    assert second.renew([key]) == set()
    monkeypatch.setattr(first, "_now", lambda: 1000.0 + LEASE_SECONDS + 1)
    first.lock(key)
    assert second.renew([key]) == {key}


async def test_a_turn_or_edit_at_another_server_is_refused_at_once_during_a_turn(two: Two, writer: FakeClient) -> None:
    first, second = two
    conversation = (await first.post("/v1/conversations", json={})).json()["id"]
    body = {"model": "tiny", "input": "hello", "conversation": conversation}
    path = f"/v1/conversations/{conversation}"
    items = {"items": [{"role": "user", "content": "hi"}]}
    running = asyncio.create_task(first.post("/v1/responses", json=body))
    await until(lambda: writer.asked)
    for server in (first, second):
        for refused in (
            await server.post("/v1/responses", json=body),
            await server.post(f"{path}/items", json=items),
            await server.delete(path),
        ):
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conversation_busy")
    assert not running.done()
    assert writer.hold is not None
    writer.hold.set()
    assert (await running).json()["status"] == "completed"
    answers = [await second.post("/v1/responses", json=body), await second.post(f"{path}/items", json=items)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert len((await first.get(f"{path}/items")).json()["data"]) == 5


def test_a_turn_that_lost_its_lease_is_refused_with_the_same_code(stores: list[Store]) -> None:
    first, second = stores
    first.conversations.create("a", "conv", {}, [])
    context = first.conversations.context("a", "conv")
    for store, name in ((second, "one"), (first, "two")):
        response = {"id": name, "status": "completed", "output": []}
        turn = Turn(response=response, tenant="a", input=[], context=context, conversation="conv")
        if store is second:
            store.turns.commit(turn)
            continue
        with pytest.raises(ConversationBusy) as refused:
            store.turns.commit(turn)
        assert refused.value.code == "conversation_busy"


class Pair:
    """The leases of two servers over one database, with a clock that the test moves."""

    def __init__(self, where: str) -> None:
        self.now = 1000.0
        self.store = Store.open(where, Bounds(seconds=1e9, threads=9, bytes=1e9), lambda: self.now)
        self.one, self.two = (Leases(self.store.database, lambda: self.now) for _ in range(2))

    def begin(self, response: str, recipe: bytes = b"recipe") -> None:
        with self.store.database.write() as db:
            self.one.begin(db, response, recipe)


@pytest.fixture
def pair(where: str) -> Iterator[Pair]:
    made = Pair(where)
    yield made
    made.store.close()


def test_a_response_of_an_ended_server_is_taken_over_by_one_server_alone(pair: Pair) -> None:
    pair.begin("a")
    assert pair.two.left() == [] and not pair.two.take_over("a"), "its server runs"
    pair.now += LEASE_SECONDS + 1
    assert pair.two.left() == [("a", b"recipe")]
    third = Leases(pair.store.database, lambda: pair.now)
    assert (pair.two.take_over("a"), third.take_over("a")) == (True, False)
    assert third.left() == [] and pair.one.renew(["a"]) == {"a"}, "its first server must stop it"
    with pytest.raises(Conflict, match="has taken over"), pair.store.database.write() as db:
        pair.one.end_own(db, "a")
    with pair.store.database.write() as db:
        pair.two.end_own(db, "a")
    pair.now += LEASE_SECONDS + 1
    assert pair.two.left() == [] and not pair.two.elsewhere("a")


def test_leases_of_a_server_that_has_ended_are_free_at_once_and_those_of_others_are_not(pair: Pair) -> None:
    pair.begin("a")
    key = conversation_key("ada", "conv_1")
    pair.one.lock(key)
    with pytest.raises(ConversationBusy):
        pair.two.lock(key)
    pair.two.release("nobody")
    assert pair.two.left() == []
    pair.two.release(pair.one.server)
    assert pair.two.left() == [("a", b"recipe")]
    pair.two.lock(key)
    assert pair.one.renew(["a"]) == set(), "it renews its lease if it runs after all"
    assert pair.two.left() == []


def test_a_server_leaves_a_response_to_another_one(pair: Pair) -> None:
    pair.begin("a")
    pair.two.leave("a")
    assert pair.two.left() == [], "only its own server can leave it"
    pair.one.leave("a")
    assert pair.two.left() == [("a", b"recipe")]
    assert pair.one.renew(["a"]) == {"a"}, "a renewal that was under way does not take it again"
    assert pair.two.left() == [("a", b"recipe")]


def test_a_former_server_loses_a_conversation_before_its_lease_ends(pair: Pair) -> None:
    key = conversation_key("ada", "conv_1")
    pair.one.lock(key)
    with pytest.raises(ConversationBusy):
        pair.two.lock(key, "nobody")
    pair.two.lock(key, pair.one.server)


def test_a_response_with_a_recipe_counts_as_running_after_the_end_of_its_server(pair: Pair) -> None:
    pair.begin("a")
    pair.begin("plain", b"")
    pair.now += LEASE_SECONDS + 1
    assert (pair.two.elsewhere("a"), pair.two.elsewhere("plain")) == (True, False)
    pair.now += leases_module.KEPT_SECONDS
    pair.two.renew(["other"])
    assert not pair.two.elsewhere("a"), "nobody has taken it over for long"


def test_a_cancelled_response_stays_cancelled_when_another_server_takes_it_over(pair: Pair) -> None:
    pair.begin("a")
    pair.two.cancel("a")
    pair.now += LEASE_SECONDS + 1
    assert pair.two.take_over("a") and pair.two.renew(["a"]) == {"a"}
