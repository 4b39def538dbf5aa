"""Counters and upkeep: what each tenant holds, through every change and from older stores."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from storing import AMPLE, item, turn
from test_store import grow, make_older

from holdfast.server.conversations import counters, search_index, upkeep
from holdfast.server.conversations.counters import Held
from holdfast.server.conversations.store import AsyncStore, Store
from holdfast.server.conversations.values import Bounds


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The location of an empty store."""
    if request.param == "sqlite":
        return str(tmp_path / "store.sqlite")
    return str(request.getfixturevalue("postgresql_schema"))


@pytest.fixture
def opened() -> Iterator[Callable[..., Store]]:
    """Opens stores, and closes them at the end."""
    stores: list[Store] = []

    def open(where: str, **bounds: Any) -> Store:
        stores.append(Store.open(where, Bounds(**{**vars(AMPLE), **bounds}), lambda: 1000.0))
        return stores[-1]

    yield open
    for store in stores:
        store.close()


def held(store: Store) -> dict[str, Held]:
    with store.database.read() as db:
        found = counters.held(db)
        assert counters.sums(db) == counters.recount(db), "the counters equal the rows"
    return found


def make_older_anywhere(store: Store, where: str) -> None:
    """Remove the counters, the index and the rows of the list from a store."""
    if "://" not in where:
        make_older(Path(where))
        return
    with store.database.write() as db:
        for name in ("threads", "conversations", "items"):
            for event in ("insert", "delete", "update"):
                for kind in ("count", "list"):
                    db.execute(text(f"DROP FUNCTION IF EXISTS {kind}_{event}_{name} CASCADE"))
        db.execute(text("DROP TABLE listed, counters, upkeep, search_tenants, search_conversations, search_text"))


def test_counters_follow_every_change_of_a_store(where: str, opened: Callable[..., Store]) -> None:
    store = opened(where)
    assert held(store) == {}
    store.conversations.create("a", "conv", {"k": "v"}, [item("x"), item("y")])
    store.conversations.create("b", "other", {}, [item("z")])
    first = held(store)
    assert [each[:3] for each in (first["a"], first["b"])] == [(1, 1, 2), (1, 1, 1)]
    store.turns.commit(turn("one", store.conversations.context("a", "conv"), conversation="conv"))
    grow(store, "free", "more", tenant="b")
    grown = held(store)
    assert grown["a"][:3] == (1, 1, 4) and grown["a"].bytes > first["a"].bytes
    assert grown["b"][:3] == (2, 1, 1)
    store.conversations.delete_item("a", "conv", "msg_x")
    store.tree.move("a", "conv", "one", after=False)
    assert held(store)["a"].items == 2
    store.turns.delete("b", "more")
    store.turns.delete("b", "free")
    store.tree.drop("a", "conv")
    assert (held(store)["a"], held(store)["b"]) == (Held(0, 0, 0, 0), first["b"])


def test_an_older_server_keeps_the_counters_as_it_knows_only_the_older_tables(
    where: str, opened: Callable[..., Store]
) -> None:
    store = opened(where)
    store.conversations.create("a", "conv", {}, [])
    with store.database.write() as db:
        db.execute(text("INSERT INTO threads (id, tenant, active, bytes) VALUES ('old', 'a', 1, 70)"))
        db.execute(text("UPDATE threads SET bytes = bytes + 5, active = 2 WHERE id = 'old'"))
    assert held(store)["a"] == Held(2, 1, 0, 77)


@pytest.mark.parametrize("moment", [0, 1, 4, 5, 8, None])
def test_an_older_store_is_counted_and_indexed_in_pieces_while_it_changes(
    where: str, opened: Callable[..., Store], monkeypatch: pytest.MonkeyPatch, moment: int | None
) -> None:
    monkeypatch.setattr(counters, "PIECE", 2)
    monkeypatch.setattr(search_index, "PIECE", 2)
    store = opened(where)
    for number in range(5):
        store.conversations.create("ab"[number % 2], f"conv_{number}", {"title": f"number {number}"}, [item("needle")])
    make_older_anywhere(store, where)
    store = opened(where)

    def edit() -> None:
        """Change conversations at several places of the order in which the rows are counted."""
        for tenant, id in (("a", "conv_0"), ("a", "conv_4")):
            store.conversations.add_items(tenant, id, [item("thread")])
        store.conversations.create("a", "conv_22", {}, [item("needle")])
        store.tree.drop("b", "conv_1")

    pieces = 0
    while not store.listing.complete():
        if pieces == moment:
            edit()
        assert upkeep.piece(store.database)
        pieces += 1
    assert not upkeep.piece(store.database)
    if moment is None:
        edit()
    assert pieces > 8
    assert held(store)["a"][:3] == (4, 4, 6) and held(store)["b"][:3] == (1, 1, 1)

    def found(tenant: str, wanted: str) -> set[str]:
        return {each["id"] for each in store.listing.search(tenant, wanted, limit=100)[0]}

    assert found("a", "needle") == {"conv_0", "conv_2", "conv_22", "conv_4"}
    assert found("a", "thread") == {"conv_0", "conv_4"}
    assert found("b", "number") == {"conv_3"}


def test_two_servers_count_an_older_store_once(where: str, opened: Callable[..., Store]) -> None:
    store = opened(where)
    for number in range(30):
        store.conversations.create("a", f"conv_{number}", {}, [item("x")])
    make_older_anywhere(store, where)
    servers = [opened(where), opened(where)]

    def work(server: Store) -> None:
        while upkeep.piece(server.database):
            pass

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, servers))
    assert held(store)["a"][:3] == (30, 30, 30)


def test_dropped_threads_leave_the_counters_and_the_index(
    where: str, opened: Callable[..., Store], caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(where, threads=2)
    for number in range(4):
        store.conversations.create("a", f"conv_{number}", {}, [item(f"needle{number}")])
    assert held(store)["a"][:3] == (2, 2, 2)
    with store.database.read() as db:
        assert db.execute(text("SELECT count(*) FROM search_conversations")).scalar_one() == 2
    assert len(store.listing.search("a", "needle", limit=9)[0]) == 2
    (line,) = [each for each in caplog.messages if "dropped" in each]
    assert line.startswith("dropped 1 stored conversations: the longest idle, as the store is full")


async def test_a_running_server_brings_an_older_store_up_to_date(tmp_path: Path, opened: Callable[..., Store]) -> None:
    where = str(tmp_path / "store.sqlite")
    store = opened(where)
    store.conversations.create("a", "conv", {}, [item("needle")])
    make_older(Path(where))
    server = AsyncStore(Store.open(where, AMPLE, lambda: 1000.0))
    while not await server.read(lambda store: store.listing.complete()):
        await asyncio.sleep(0.01)
    (found,), _, _ = await server.read(lambda store: store.listing.search("a", "needle", limit=9))
    assert found["id"] == "conv"
    server.close()


def test_a_start_reads_no_table_whole(tmp_path: Path, opened: Callable[..., Store]) -> None:
    def steps(count: int) -> int:
        """Return the hundreds of instructions of SQLite's machine for a start with this number of conversations."""
        where, done = str(tmp_path / f"{count}.sqlite"), [0]
        store = opened(where)
        for number in range(count):
            store.conversations.create("a", f"conv_{number}", {}, [item("x")])
        store.close()
        connect = sqlite3.connect

        def watched(*args: Any, **kwargs: Any) -> sqlite3.Connection:
            connection = connect(*args, **kwargs)
            connection.set_progress_handler(lambda: done.__setitem__(0, done[0] + 1), 100)
            return connection

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sqlite3.dbapi2, "connect", watched)
            opened(where)
        assert done[0]
        return done[0]

    assert steps(400) <= 1.2 * steps(40) + 2
