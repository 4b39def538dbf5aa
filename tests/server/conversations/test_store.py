"""The store alone: atomic turns, bounds, migrations and tenants, also in PostgreSQL if it is installed."""

from __future__ import annotations

import asyncio
import math
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
import storing
from prometheus_client import generate_latest
from sqlalchemy import text
from storing import AMPLE, item, turn

from holdfast.server.config import ServerConfig
from holdfast.server.conversations import conversation_store, database, turn_store, values
from holdfast.server.conversations.database import MEMORY, STEPS, Database, default_bytes, migrate
from holdfast.server.conversations.store import AsyncStore, Store, StoreError
from holdfast.server.conversations.values import Bounds, Conflict, Context, NotFound, ThreadTooLarge
from holdfast.server.jobs.tables import STEPS as JOB_STEPS
from holdfast.server.metrics import Metrics
from holdfast.server.protocol import ApiError
from holdfast.server.replies import encode
from holdfast.server.run import open_store


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def opened(clock: Clock) -> Iterator[Callable[..., Store]]:
    """Opens stores, and closes them at the end."""
    stores: list[Store] = []

    def open(where: str | Path = MEMORY, **bounds: Any) -> Store:
        stores.append(Store.open(str(where), Bounds(**{**vars(AMPLE), **bounds}), clock))
        return stores[-1]

    yield open
    for store in stores:
        store.close()


@pytest.fixture(params=["sqlite", "sqlite, nothing cached", "postgresql"])
def store(
    request: pytest.FixtureRequest, opened: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    """A store in a file, and in PostgreSQL in a schema of its own."""
    if "cached" in request.param:
        monkeypatch.setattr(turn_store, "CACHED_TURNS", 0)
    if "sqlite" in request.param:
        yield opened(tmp_path / "store.sqlite")
        return
    yield opened(request.getfixturevalue("postgresql_schema"))


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_a_page_of_items_cannot_continue_after_an_item_of_another_conversation(store: Store, tenant: str) -> None:
    store.conversations.create("a", "mine", {}, [item("1"), item("2")])
    store.conversations.create(tenant, "other", {}, [item("0"), item("theirs"), item("2")])
    for newest_first in (False, True):
        page = {"limit": 10, "newest_first": newest_first}
        with pytest.raises(NotFound, match="msg_theirs"):
            store.conversations.items("a", "mine", **page, after="msg_theirs")
        found, more = store.conversations.items("a", "mine", **page, after="msg_2")
        assert ([each["id"] for each in found], more) == (["msg_1"] if newest_first else [], False)


def test_conversations_active_at_the_same_time_are_listed_once_each_page_by_page(store: Store, clock: Clock) -> None:
    ids, created = [], list[str]()
    for now, names in ((1000.0, "dbfac"), (1001.0, "ge"), (1002.0, "ih")):
        clock.now = now
        created = [*(f"conv_{name}" for name in reversed(names)), *created]
        for name in names:
            store.conversations.create("a", f"conv_{name}", {"title": "x"}, [])
        ids = [f"conv_{name}" for name in sorted(names)] + ids
        store.conversations.create("b", f"other_{now}", {"title": "x"}, [])
    for limit in (1, 2, 3, 10):
        listed, searched, after, more = list[str](), list[str](), None, True
        while more:
            page, more = store.listing.page("a", limit=limit, after=after)
            listed += [each["id"] for each in page]
            after = listed[-1]
        after, more = None, True
        while more:
            found, after, more = store.listing.search("a", "x", limit=limit, after=after)
            searched += [each["id"] for each in found]
        assert listed == ids and searched == created


def test_a_server_that_starts_on_an_empty_postgresql_waits_for_another_one_that_does(
    opened: Callable[..., Store], postgresql_schema: str, clock: Clock
) -> None:
    first = Database(postgresql_schema)
    waiting = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    with ThreadPoolExecutor(1) as thread:
        with first.write() as db:
            migrate(db, JOB_STEPS)
            second = thread.submit(Store.open, postgresql_schema, AMPLE, clock, JOB_STEPS)
            with first.engine.connect() as other:
                while not other.execute(waiting).scalar_one():
                    assert not second.done(), second.result()
                    other.rollback()
        store = second.result(60)
    with store.database.read() as db:
        assert (
            db.execute(text("SELECT count(*), max(version) FROM versions")).one() == (len(STEPS) + len(JOB_STEPS),) * 2
        )
    store.close()
    first.close()


def test_servers_that_start_at_once_on_an_empty_file_all_open_it(tmp_path: Path, clock: Clock) -> None:
    together = threading.Barrier(4)

    def start(_: int) -> None:
        together.wait()
        Store.open(str(tmp_path / "store.sqlite"), AMPLE, clock, JOB_STEPS).close()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(start, range(4)))


def said(context: Context) -> list[str]:
    return [each["content"][0]["text"] for each in context.items]


def grow(store: Store, *names: str, tenant: str = "a") -> Context:
    """Store turns that follow one another. Returns the context of the last one."""
    context = Context()
    for name in names:
        store.turns.commit(turn(name, context, tenant=tenant))
        context = store.turns.context(tenant, name)
    return context


def kept(store: Store, response: str, tenant: str = "a") -> bool:
    """Whether a response is found."""
    try:
        return bool(store.turns.response(tenant, response))
    except NotFound:
        return False


def test_a_context_holds_all_earlier_items_and_tokens(store: Store) -> None:
    last = grow(store, "a", "bb", "ccc")
    assert said(last) == ["a", "A", "bb", "BB", "ccc", "CCC"]
    assert (list(last.tokens), last.characters, last.digest) == ([1, 2, 3], 7, b"digest")
    middle = store.turns.context("a", "bb")
    assert list(middle.tokens) == [1, 2] and said(middle) == ["a", "A", "bb", "BB"]


def test_branches_share_the_items_of_their_parent(store: Store) -> None:
    parent = grow(store, "a")
    for name in ("left", "right"):
        store.turns.commit(turn(name, parent))
        child = store.turns.context("a", name)
        assert said(child) == ["a", "A", name, name.upper()]
        assert child.thread == parent.thread


def test_a_turn_stores_tokens_that_differ_from_its_parents(store: Store) -> None:
    parent = grow(store, "a", "bb")
    store.turns.commit(turn("c", parent, tokens=[1, 9, 9, 9]))
    store.turns.commit(turn("short", parent, tokens=[1]))
    for name, tokens in (("c", [1, 9, 9, 9]), ("short", [1]), ("bb", [1, 2])):
        assert list(store.turns.context("a", name).tokens) == tokens


def test_nothing_is_found_by_another_tenant(store: Store) -> None:
    grow(store, "mine")
    store.conversations.create("a", "conv", {}, [item("x")])
    for kind, id, look in (
        ("response", "mine", lambda: store.turns.context("b", "mine")),
        ("response", "mine", lambda: store.turns.response("b", "mine")),
        ("response", "mine", lambda: store.turns.input("b", "mine")),
        ("response", "mine", lambda: store.turns.delete("b", "mine")),
        ("conversation", "conv", lambda: store.conversations.get("b", "conv")),
        ("conversation", "conv", lambda: store.conversations.update("b", "conv", {"k": "v"})),
        ("conversation", "conv", lambda: store.conversations.context("b", "conv")),
        ("conversation", "conv", lambda: store.conversations.items("b", "conv", limit=9, newest_first=False)),
        ("item", "msg_x", lambda: store.conversations.item("b", "conv", "msg_x")),
        ("conversation", "conv", lambda: store.conversations.add_items("b", "conv", [item("y")])),
        ("item", "msg_x", lambda: store.conversations.delete_item("b", "conv", "msg_x")),
        ("conversation", "conv", lambda: store.conversations.delete("b", "conv")),
    ):
        with pytest.raises(NotFound) as missing:
            look()
        assert (missing.value.kind, missing.value.id) == (kind, id)
    assert said(store.turns.context("a", "mine")) == ["mine", "MINE"]
    assert said(store.conversations.context("a", "conv")) == ["x"]
    assert store.conversations.get("a", "conv")["metadata"] == {}


def test_an_id_with_a_nul_is_not_found(store: Store) -> None:
    grow(store, "a")
    store.conversations.create("a", "conv", {}, [item("x")])
    for look in (
        lambda: store.turns.context("a", "a\0"),
        lambda: store.conversations.get("a", "conv\0"),
        lambda: store.conversations.item("a", "conv", "msg_x\0"),
        lambda: store.conversations.items("a", "conv", limit=9, newest_first=False, after="msg_x\0"),
    ):
        with pytest.raises(NotFound):
            look()


def test_only_a_turn_at_the_head_advances_a_conversation(store: Store) -> None:
    store.conversations.create("a", "conv", {"k": "v"}, [item("first")])
    start = store.conversations.context("a", "conv")
    store.turns.commit(turn("one", start, conversation="conv"))
    with pytest.raises(Conflict, match="went on"):
        store.turns.commit(turn("late", start, conversation="conv"))
    assert said(store.conversations.context("a", "conv")) == ["first", "one", "ONE"]
    listed, has_more = store.conversations.items("a", "conv", limit=9, newest_first=False)
    assert [each["id"] for each in listed] == ["msg_first", "msg_one", "msg_ONE"] and not has_more
    assert not kept(store, "late")


def test_a_conversation_that_was_edited_while_a_turn_was_written_keeps_the_edit(store: Store) -> None:
    store.conversations.create("a", "conv", {}, [item("first")])
    for change in (
        lambda: store.conversations.add_items("a", "conv", [item("by hand")]),
        lambda: store.conversations.delete_item("a", "conv", "msg_first"),
    ):
        start = store.conversations.context("a", "conv")
        change()
        with pytest.raises(Conflict, match="edited"):
            store.turns.commit(turn("late", start, conversation="conv"))
    assert said(store.conversations.context("a", "conv")) == ["by hand"]


def test_a_failed_turn_leaves_its_conversation_unchanged(store: Store) -> None:
    store.conversations.create("a", "conv", {}, [])
    start = store.conversations.context("a", "conv")
    store.turns.commit(turn("job", start, conversation="conv", status="queued"))
    store.turns.commit(turn("job", start, conversation="conv", status="cancelled"), begun=True)
    assert store.conversations.context("a", "conv") == start
    assert store.turns.response("a", "job")[0]["status"] == "cancelled"


def test_a_deleted_turn_is_kept_only_while_others_build_on_it(store: Store, clock: Clock) -> None:
    grow(store, "a", "bb", "ccc")
    store.turns.delete("a", "bb")
    store.turns.delete("a", "a")
    assert not kept(store, "a") and not kept(store, "bb")
    assert said(store.turns.context("a", "ccc")) == ["a", "A", "bb", "BB", "ccc", "CCC"]
    store.turns.delete("a", "ccc")
    with store.database.read() as db:  # Deleting the last one removed all of them.
        for table in (database.turns, database.threads):
            assert db.execute(sqlalchemy.select(table)).all() == []


@pytest.mark.parametrize("order", [1, -1])
def test_the_work_of_deleting_a_thread_is_linear_in_its_turns(
    opened: Callable[..., Store], tmp_path: Path, order: int
) -> None:
    def work(length: int) -> int:
        """Return the hundreds of instructions of SQLite's machine to delete this number of turns."""
        store, counted = opened(tmp_path / f"{length}.sqlite"), [0]
        names = [f"turn{number}" for number in range(length)]
        grow(store, *names)

        def count() -> None:
            counted[0] += 1

        @sqlalchemy.event.listens_for(store.database.engine, "checkout")
        def watch(connection: Any, record: Any, proxy: Any) -> None:
            connection.set_progress_handler(count, 100)

        for name in names[::order]:
            store.turns.delete("a", name)
        with store.database.read() as db:
            assert not db.execute(sqlalchemy.select(database.threads)).all()
        return counted[0]

    assert work(240) < 2.5 * 4 * work(60)  # Quadratic work would be 16 times as much.


def test_a_threads_size_is_that_of_its_contents(store: Store) -> None:
    def size() -> int:
        with store.database.read() as db:
            return db.execute(sqlalchemy.select(database.threads.c.bytes)).scalar_one()

    grow(store, "a", "bb")
    both = size()
    store.turns.commit(turn("job", store.turns.context("a", "bb"), status="queued"))
    queued = size()
    store.turns.commit(turn("job", store.turns.context("a", "bb"), status="queued"), begun=True)
    assert size() == queued > both
    store.turns.delete("a", "job")
    assert size() == both
    store.turns.commit(turn("ccc", store.turns.context("a", "bb")))
    store.turns.commit(turn("dddd", store.turns.context("a", "ccc")))
    for name in ("ccc", "dddd"):  # Both go together: the second one waited for the first.
        store.turns.delete("a", name)
    assert size() == both
    store.turns.delete("a", "a")  # The next turn builds on it.
    assert size() == both
    store.turns.delete("a", "bb")
    store.conversations.create("a", "conv", {}, [item("x")])
    before = size()
    store.conversations.add_items("a", "conv", [item("y")])
    store.conversations.delete_item("a", "conv", "msg_y")
    assert size() == before


def test_a_turn_whose_parent_was_deleted_meanwhile_is_not_stored(store: Store) -> None:
    parent = grow(store, "a")
    store.turns.delete("a", "a")
    with pytest.raises(Conflict, match="previous response"):
        store.turns.commit(turn("b", parent))
    store.turns.commit(turn("job", status="queued"))
    store.turns.delete("a", "job")
    with pytest.raises(Conflict, match="was deleted while"):
        store.turns.commit(turn("job"), begun=True)
    assert not kept(store, "job")


class TestBounds:
    """Whole threads are dropped, the longest idle first."""

    def test_threads_beyond_the_age_are_dropped(self, opened: Callable[..., Store], clock: Clock) -> None:
        store = opened(seconds=100)
        grow(store, "old")
        clock.now += 60
        grow(store, "young")
        clock.now += 60
        assert not kept(store, "old")  # At once, and not only after the next clean-up.
        assert kept(store, "young")
        grow(store, "new")
        with store.database.read() as db:
            assert set(db.execute(sqlalchemy.select(database.turns.c.id)).scalars()) == {"young", "new"}

    def test_a_conversation_beyond_the_age_is_not_found_by_any_call(
        self, opened: Callable[..., Store], clock: Clock
    ) -> None:
        store = opened(seconds=100)
        store.conversations.create("a", "conv", {}, [item("x")])
        calls: list[Callable[[], Any]] = [
            lambda: store.conversations.get("a", "conv"),
            lambda: store.conversations.context("a", "conv"),
            lambda: store.conversations.items("a", "conv", limit=9, newest_first=False),
            lambda: store.conversations.item("a", "conv", "msg_x"),
        ]
        clock.now += 100
        assert all(call() for call in calls)
        clock.now += 1
        calls += [
            lambda: store.conversations.update("a", "conv", {"k": "v"}),
            lambda: store.conversations.add_items("a", "conv", [item("y")]),
            lambda: store.conversations.delete_item("a", "conv", "msg_x"),
            lambda: store.conversations.delete("a", "conv"),
        ]
        for call in calls:
            with pytest.raises(NotFound):
                call()

    def test_beyond_the_count_the_longest_idle_threads_are_dropped(
        self, opened: Callable[..., Store], clock: Clock
    ) -> None:
        store = opened(threads=2)
        first = grow(store, "first")
        clock.now += 1
        grow(store, "second")
        clock.now += 1
        store.turns.commit(turn("on", first))  # Now the second thread is idle for longest.
        clock.now += 1
        grow(store, "third")
        assert not kept(store, "second")
        assert said(store.turns.context("a", "on")) == ["first", "FIRST", "on", "ON"]

    def test_beyond_the_size_the_longest_idle_threads_are_dropped(
        self, opened: Callable[..., Store], clock: Clock
    ) -> None:
        store = opened(bytes=80_000)
        for number in range(20):
            clock.now += 1
            store.turns.commit(turn(f"turn{number}", tokens=[0] * 2000))
        left = [number for number in range(20) if kept(store, f"turn{number}")]
        assert left == list(range(20 - len(left), 20))
        assert 5 <= len(left) <= 10

    def test_the_tenant_that_has_most_loses_its_threads_first(self, opened: Callable[..., Store], clock: Clock) -> None:
        for bounds, size in (({"threads": 6}, 10), ({"bytes": 80_000}, 2000)):
            store = opened(**bounds)
            for number in range(2):
                store.turns.commit(turn(f"mine{number}", tenant="small", tokens=[0] * size))
            for number in range(40):
                clock.now += 1
                store.turns.commit(turn(f"theirs{number}", tenant="large", tokens=[0] * size))
            assert kept(store, "mine0", "small") and kept(store, "mine1", "small")
            left = [number for number in range(40) if kept(store, f"theirs{number}", "large")]
            assert left == list(range(40 - len(left), 40)) and len(left) >= 3
            clock.now += 1
            store.turns.commit(turn("mine2", tenant="small", tokens=[0] * size))
            assert kept(store, "mine0", "small") and not kept(store, f"theirs{left[0]}", "large")

    def test_a_thread_is_removed_once_it_is_too_old(self, opened: Callable[..., Store], clock: Clock) -> None:
        store = opened(seconds=100)
        for name, pause in (("old", 50), ("younger", 60), ("new", 50), ("newest", 0)):
            store.turns.commit(turn(name))
            clock.now += pause
        with store.database.read() as db:
            assert {*db.execute(text("SELECT id FROM threads")).scalars()} == {"new", "newest"}

    def test_a_thread_beyond_its_share_of_the_store_is_refused(self, opened: Callable[..., Store]) -> None:
        store = opened(bytes=80_000)
        with pytest.raises(ThreadTooLarge, match="more than 10000 bytes"):
            store.turns.commit(turn("large", tokens=[0] * 3000))
        assert not kept(store, "large")

    def test_a_turn_that_makes_a_thread_too_large_is_refused_and_leaves_its_size(
        self, opened: Callable[..., Store]
    ) -> None:
        store = opened(bytes=80_000)
        store.turns.commit(turn("first", tokens=[0] * 1500))

        def size() -> int:
            with store.database.read() as db:
                return int(db.execute(text("SELECT bytes FROM threads")).scalar_one())

        before, after = size(), store.turns.context("a", "first")
        with pytest.raises(ThreadTooLarge, match="more than 10000 bytes"):
            store.turns.commit(turn("second", after, tokens=[1] * 1500))
        assert not kept(store, "second") and size() == before


class TestCrashes:
    """A killed process leaves only whole turns."""

    PROGRAM = """
import os, sys, sqlalchemy
sys.path[:0] = {path!r}
from storing import AMPLE, turn
from holdfast.server.conversations import prepared
from holdfast.server.conversations.store import Store
store, run = Store.open({where!r}, AMPLE), prepared.executed
store.conversations.create("a", "conv", dict(), [])
store.turns.commit(turn("one", store.conversations.context("a", "conv"), conversation="conv"))

def hang(*args):
    print("now", flush=True)
    sys.stdin.read()

def executed(db, method, statement, *given):
    if {moment!r} == "before the statement" and "INSERT INTO turns" in statement:
        hang()
    result = run(db, method, statement, *given)
    if {moment!r} == "after the statement" and "INSERT INTO turns" in statement:
        hang()
    return result

prepared.executed = executed
if {moment!r} == "at the commit":
    sqlalchemy.event.listen(store.database.engine, "commit", hang)
store.turns.commit(turn("two", store.conversations.context("a", "conv"), conversation="conv"))
"""

    @pytest.mark.parametrize("moment", ["before the statement", "after the statement", "at the commit"])
    def test_a_process_killed_during_a_commit_leaves_the_last_turn_whole(
        self, tmp_path: Path, opened: Callable[..., Store], moment: str
    ) -> None:
        where = str(tmp_path / "store.sqlite")
        paths = [str(Path(storing.__file__).parent), *sys.path]
        program = self.PROGRAM.format(path=paths, where=where, moment=moment)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:  # type: ignore[call-overload]
            assert process.stdout.readline() == b"now\n"
            process.send_signal(signal.SIGKILL)
        store = opened(where)
        context = store.conversations.context("a", "conv")
        assert said(context) == ["one", "ONE"]
        assert not kept(store, "two")
        listed, _ = store.conversations.items("a", "conv", limit=9, newest_first=False)
        assert len(listed) == 2
        store.turns.commit(turn("two", context, conversation="conv"))
        assert said(store.conversations.context("a", "conv")) == ["one", "ONE", "two", "TWO"]


class TestOpening:
    """Old schemas are migrated. Unknown ones and other files are refused."""

    def test_a_reopened_store_has_its_turns_and_only_its_owner_can_read_the_file(
        self, opened: Callable[..., Store], tmp_path: Path
    ) -> None:
        path = tmp_path / "deep" / "store.sqlite"
        store = opened(path)
        grow(store, "a", "bb")
        assert said(opened(path).turns.context("a", "bb")) == ["a", "A", "bb", "BB"]
        assert path.stat().st_mode & 0o077 == 0
        by_url = tmp_path / "by-url.sqlite"
        grow(opened(f"sqlite:///{by_url}"), "a")
        assert [file.stat().st_mode & 0o077 for file in tmp_path.glob("by-url.sqlite*")] == [0] * 5

    def test_a_check_finds_a_damaged_file(self, opened: Callable[..., Store], tmp_path: Path) -> None:
        path = damaged(tmp_path)
        with pytest.raises((ValueError, sqlalchemy.exc.SQLAlchemyError), match=r"damaged|malformed"):
            Database(str(path)).check()
        opened(tmp_path / "whole.sqlite").database.check()

    def test_an_older_schema_is_migrated(self, opened: Callable[..., Store], tmp_path: Path) -> None:
        path = tmp_path / "store.sqlite"
        grow(opened(path), "a")
        make_older(path, "DROP TABLE conversations", "DROP TABLE items", "DELETE FROM versions WHERE version > 1")
        store = opened(path)
        assert said(store.turns.context("a", "a")) == ["a", "A"]
        store.conversations.create("a", "conv", {}, [])
        assert store.conversations.get("a", "conv")["id"] == "conv"

    def test_a_failing_migration_changes_nothing(
        self, opened: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def breaks(db: sqlalchemy.Connection) -> None:
            db.execute(sqlalchemy.text("DROP TABLE turns"))
            raise ValueError("broken")

        path = tmp_path / "store.sqlite"
        grow(opened(path), "a")
        with monkeypatch.context() as patch:
            patch.setattr(database, "STEPS", (*database.STEPS, breaks))
            with pytest.raises(StoreError, match="broken"):
                opened(path)
        assert said(opened(path).turns.context("a", "a")) == ["a", "A"]

    def test_a_newer_schema_is_refused(self, opened: Callable[..., Store], tmp_path: Path) -> None:
        path = tmp_path / "store.sqlite"
        opened(path)
        with sqlite3.connect(path) as db:
            db.execute("INSERT INTO versions VALUES (99)")
        db.close()
        with pytest.raises(StoreError, match=r"version 99.*use a newer Holdfast"):
            opened(path)

    @pytest.mark.parametrize(
        ("where", "reason"),
        [
            ("/proc/nowhere/store.sqlite", "cannot be opened"),
            ("mysql://host/database", "mysql is not supported"),
            ("nonsense://", "cannot be opened"),
        ],
    )
    def test_an_invalid_store_location_is_refused(self, where: str, reason: str) -> None:
        with pytest.raises(StoreError, match=reason):
            Store.open(where, AMPLE)

    def test_a_file_that_is_not_a_database_is_refused_and_left_unchanged(self, tmp_path: Path) -> None:
        path = tmp_path / "letter.txt"
        path.write_text("Dear Ada, " * 1000)
        with pytest.raises(StoreError, match="not a database"):
            Store.open(str(path), AMPLE)
        assert path.read_text() == "Dear Ada, " * 1000


def test_the_context_cache_is_bounded_and_drops_the_least_recent(
    opened: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_store, "CACHED_TOKENS", 10)
    store = opened()
    for name in ("a", "b", "c"):
        store.turns.commit(turn(name, tokens=[1] * 4))
    assert list(store.turns.cache.contexts) == ["b", "c"]
    assert list(store.turns.context("a", "a").tokens) == [1] * 4  # This reads it again.
    assert list(store.turns.cache.contexts) == ["c", "a"]


def test_the_context_cache_is_bounded_by_the_bytes_of_the_messages(
    opened: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_store, "CACHED_BYTES", 3000)
    store = opened()
    for name in ("a" * 500, "b" * 500, "c" * 500):  # said twice, and once more in the item's id
        store.turns.commit(turn(name, tokens=[]))
    assert [name[0] for name in store.turns.cache.contexts] == ["c"]
    store.turns.context("a", "a" * 500)  # This reads it again.
    assert [name[0] for name in store.turns.cache.contexts] == ["a"]
    store.turns.delete("a", "a" * 500)
    store.turns.commit(turn("d" * 500, tokens=[]))
    assert [name[0] for name in store.turns.cache.contexts] == ["d"], "what was removed counts no more"


class TestMessagesBeforeATurn:
    """The messages before a turn are read as a whole, so they have a limit, whatever the store may keep."""

    def test_a_context_above_the_limit_of_bytes_is_refused(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        names = [f"{number:0>60}" for number in range(4)]
        grow(store, *names)
        size = store.turns.context("a", names[-1]).size
        assert size >= 8 * 2 * 60, "each text stands in an id, too"
        monkeypatch.setattr(values, "MOST_CONTEXT", size + 50)
        assert len(store.turns.context("a", names[-1]).items) == 8
        monkeypatch.setattr(values, "MOST_CONTEXT", size - 50)
        with pytest.raises(ThreadTooLarge, match=f"at most {size - 50} are read for one turn"):
            store.turns.context("a", names[-1])
        assert len(store.turns.context("a", names[-2]).items) == 6, "a shorter branch still is"

    def test_parameters_that_a_response_repeats_do_not_count_towards_the_limit(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(values, "MOST_CONTEXT", 2000)
        first = turn("a")
        store.turns.commit(replace(first, response={**first.response, "tools": ["x" * 5000]}))
        assert said(store.turns.context("a", "a")) == ["a", "A"]

    def test_a_conversation_of_client_items_above_the_limit_of_bytes_is_refused(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.conversations.create("a", "conv_1", {}, [item("x" * 50), item("y" * 50)])
        size = 2 * len(encode(item("x" * 50)))
        monkeypatch.setattr(values, "MOST_CONTEXT", size)
        assert len(store.conversations.context("a", "conv_1").items) == 2
        monkeypatch.setattr(values, "MOST_CONTEXT", size - 1)
        with pytest.raises(ThreadTooLarge, match=f"{size} bytes or more; at most {size - 1}"):
            store.conversations.context("a", "conv_1")


@pytest.mark.parametrize("newest_first", [True, False])
def test_a_page_of_large_items_ends_early_and_the_next_continues(
    store: Store, monkeypatch: pytest.MonkeyPatch, newest_first: bool
) -> None:
    given = [item(letter * (50 if letter == "d" else 10)) for letter in "abcdefg"]
    given[3]["content"] *= 20
    store.conversations.create("a", "conv_1", {}, given)
    monkeypatch.setattr(conversation_store, "PAGE_BYTES", 3 * len(encode(item("a" * 10))))
    pages, more, after = [], True, None
    while more:
        found, more = store.conversations.items("a", "conv_1", limit=5, newest_first=newest_first, after=after)
        pages.append("".join(each["id"][4] for each in found))
        after = found[-1]["id"]
    assert pages == (["gfe", "d", "cba"] if newest_first else ["abc", "d", "efg"])
    assert store.conversations.items("a", "conv_1", limit=5, newest_first=newest_first, after=after) == ([], False)


def test_a_context_that_is_cached_again_counts_once(
    opened: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_store, "CACHED_TOKENS", 10)
    store = opened()
    for name in ("a", "b"):
        store.turns.commit(turn(name, tokens=[1] * 4))
    for _ in range(3):
        store.turns.cache.add(store.turns.context("a", "a"))
    assert list(store.turns.cache.contexts) == ["b", "a"]


def damaged(folder: Path) -> Path:
    """A store of ten turns whose file is overwritten, except for its first pages, which hold the schema."""
    path = folder / "store.sqlite"
    store = Store.open(str(path), AMPLE)
    for number in range(10):
        store.turns.commit(turn(f"turn{number}", tokens=[1] * 20_000))
    store.close()
    spoil(path)
    return path


def make_older(path: Path, *more: str) -> None:
    """Remove from a file what the version before counters, the index of searches and rows of the list did not have."""
    with sqlite3.connect(path) as db:
        triggers = db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall()
        names = "counters", "upkeep", "search_tenants", "search_conversations", "search_text", "search_pending"
        names += ("listed",)
        for change in (*(f"DROP TRIGGER {name}" for (name,) in triggers), *(f"DROP TABLE {name}" for name in names)):
            db.execute(change)
        for change in more:
            db.execute(change)
    db.close()


def spoil(path: Path) -> None:
    """Overwrite the end of a file."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(64 * 4096)
        file.write(b"\xff" * (size - 64 * 4096))


async def test_a_file_damaged_in_service_is_a_503_and_reported_by_health_and_metrics(tmp_path: Path) -> None:
    metrics = Metrics()
    store = AsyncStore(Store.open(str(damaged(tmp_path)), Bounds(**{**vars(AMPLE), "seconds": 1e12})), metrics)
    assert store.up
    found = await asyncio.gather(
        *[store.read(lambda store, n=n: store.turns.context("a", f"turn{n}")) for n in range(10)],
        return_exceptions=True,
    )
    refused = [error for error in found if isinstance(error, ApiError)]
    assert refused and {(error.status, error.code) for error in refused} <= {
        (503, "store_unavailable"),
        (404, "response_not_found"),
    }
    assert any(error.status == 503 for error in refused)
    with pytest.raises(ApiError):
        await store.read(lambda store: store.turns.context("a", "turn9"))
    store.close()
    exposed = generate_latest(metrics.registry).decode()
    failed = float(exposed.split('holdfast_store_operations_total{outcome="failed"} ')[1].split()[0])
    assert failed == sum(error.status == 503 for error in refused) + 1
    assert not store.up and "holdfast_store_up 0.0" in exposed


async def test_a_read_does_not_wait_for_a_write_that_another_program_blocks(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    store = AsyncStore(open_store(ServerConfig(store=str(path))))
    await store.run(lambda store: store.turns.commit(turn("a")))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    write = asyncio.create_task(store.run(lambda store: store.turns.commit(turn("b"))))
    await asyncio.sleep(0)
    assert said(await store.read(lambda store: store.turns.context("a", "a"))) == ["a", "A"]
    assert not write.done()
    other.execute("ROLLBACK")
    other.close()
    await write
    store.close()


@pytest.mark.parametrize("background", [False, True])
def test_a_turn_that_was_committed_although_its_answer_was_lost_is_stored_once(store: Store, background: bool) -> None:
    """The server tries again, because it does not know that the database has committed the turn."""
    store.conversations.create("a", "conv", {}, [])
    if background:
        store.turns.commit(turn("a", status="in_progress", conversation="conv"))
    for _ in range(2):
        store.turns.commit(turn("a", conversation="conv"), begun=background)
    assert said(store.conversations.context("a", "conv")) == ["a", "A"]
    with pytest.raises(Conflict, match="another server has stored this response"):
        store.turns.commit(turn("a", status="incomplete", conversation="conv"))


async def test_a_failing_store_is_logged_once_and_so_is_its_return(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = AsyncStore(open_store(ServerConfig(store=str(tmp_path / "store.sqlite"))))

    def fails(reason: str) -> Callable[[Store], None]:
        def work(_: Store) -> None:
            raise OSError(reason)

        return work

    for reason in ("gone", "gone", "full", "full"):
        with pytest.raises(ApiError):
            await store.run(fails(reason))
    await store.run(lambda store: store.leases.renew([]))
    await store.run(lambda store: store.leases.renew([]))
    said = [record.getMessage() for record in caplog.records if "conversation store" in record.getMessage()]
    assert said == [
        "the conversation store failed: gone", "the conversation store failed: full",
        "the conversation store works again",
    ]  # fmt: skip
    store.close()


async def test_a_delete_works_while_the_log_cannot_grow(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    store = open_store(ServerConfig(store=str(path)))
    for number in range(5):
        store.turns.commit(turn(f"turn{number}", tokens=[1] * 50_000))
    log = path.with_name("store.sqlite-wal").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log, limits[1]))
    service = AsyncStore(store)
    try:
        with pytest.raises(sqlalchemy.exc.OperationalError):
            store.turns.delete("a", "turn0")
        await service.run(lambda store: store.turns.delete("a", "turn0"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not kept(store, "turn0") and kept(store, "turn1")
    service.close()


async def test_a_database_failure_is_a_503_that_names_no_database(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    store = AsyncStore(open_store(ServerConfig(store=str(path))))
    with sqlite3.connect(path) as other:
        other.execute("DROP TABLE conversations")
    with pytest.raises(ApiError) as refused:
        await store.run(lambda store: store.conversations.get("tenant", "conv_a"))
    assert (refused.value.status, refused.value.code) == (503, "store_unavailable")
    assert "sqlite" not in refused.value.message
    store.close()


def test_a_conversation_that_moves_between_its_branches_grows_by_no_byte(store: Store) -> None:
    def size() -> int:
        with store.database.read() as db:
            return db.execute(sqlalchemy.select(database.threads.c.bytes)).scalar_one()

    store.conversations.create("a", "conv", {}, [item("first")])
    store.turns.commit(turn("one", store.conversations.context("a", "conv"), conversation="conv"))
    store.turns.commit(turn("two", store.conversations.context("a", "conv"), conversation="conv"))
    whole = size()
    sizes = set()
    for _ in range(3):
        store.tree.move("a", "conv", "one", after=True)
        sizes.add(size())
        store.tree.move("a", "conv", "two", after=True)
        assert size() == whole
    assert len(sizes) == 1 and max(sizes) < whole
    store.tree.move("a", "conv", "one", after=False)
    assert said(store.conversations.context("a", "conv")) == ["first"] and size() < min(sizes)


def test_a_deep_page_of_a_list_costs_no_more_than_the_first(opened: Callable[..., Store], tmp_path: Path) -> None:
    clock, done = Clock(), [0]
    store = Store.open(str(tmp_path / "store.sqlite"), AMPLE, clock)
    for number in range(600):
        clock.now += number % 3  # Some are active at the same time.
        store.conversations.create("a", f"conv_{number:03}", {}, [])

    @sqlalchemy.event.listens_for(store.database.engine, "checkout")
    def watch(connection: Any, record: Any, proxy: Any) -> None:
        connection.set_progress_handler(lambda: done.__setitem__(0, done[0] + 1), 10)

    def steps(after: str | None) -> int:
        """Return the tens of instructions of SQLite's machine for a page."""
        done[0] = 0
        assert len(store.listing.page("a", limit=10, after=after)[0]) == 10
        return done[0]

    assert steps("conv_030") <= steps(None) + 40 and steps("conv_570") <= steps(None) + 40
    store.close()


def test_a_store_without_configured_bounds_is_bounded_by_its_disk_or_by_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda where: shutil._ntuple_diskusage(5000, 1, 1))
    assert default_bytes(str(tmp_path / "no" / "store.sqlite")) == 500
    assert default_bytes(f"sqlite:///{tmp_path}/store.sqlite") == 500
    assert default_bytes(MEMORY) == default_bytes("sqlite://") == 8 << 30
    assert default_bytes("postgresql://host/name") == math.inf


def test_no_conversation_is_dropped_by_number_unless_a_number_is_given(tmp_path: Path) -> None:
    for most, left in ((None, 5), (3, 3)):
        store = open_store(ServerConfig(store=str(tmp_path / f"{most}.sqlite"), store_conversations=most))
        for number in range(5):
            store.conversations.create("a", f"conv_{number}", {}, [])
        assert len(store.listing.page("a", limit=9)[0]) == left
        store.close()
