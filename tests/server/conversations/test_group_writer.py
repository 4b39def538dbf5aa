"""The writing thread: works that wait together share a transaction, and each keeps its own outcome."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import OperationalError
from storing import AMPLE, item, turn

from holdfast.server.conversations import group_writer
from holdfast.server.conversations import store as module
from holdfast.server.conversations.group_writer import GroupWriter
from holdfast.server.conversations.store import AsyncStore, Store
from holdfast.server.conversations.values import NotFound
from holdfast.server.conversations.write_lock import FileLock
from holdfast.server.protocol import ApiError


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No group ends because the machine is slow."""
    monkeypatch.setattr(group_writer, "GROUP_SECONDS", 60.0)


@pytest.fixture(params=["sqlite", "postgresql", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    kind = request.param
    where = request.getfixturevalue("postgresql_schema") if kind == "postgresql" else str(tmp_path / "store.sqlite")
    store = Store.open("memory" if kind == "memory" else where, AMPLE, lambda: 1000.0)
    yield store
    store.close()


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(str(tmp_path / "store.sqlite"), AMPLE, lambda: 1000.0)
    yield store
    store.close()


class Together:
    """A writer whose thread waits, so that all works given meanwhile wait together."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.writer = GroupWriter(store.database)
        self.commits: list[bool] = []
        self._go = threading.Event()
        self._futures: list[Future[Any]] = []

    def __enter__(self) -> Together:
        waits = threading.Event()
        self.writer.submit(lambda: (waits.set(), self._go.wait()))
        waits.wait()
        event.listen(self.store.database.engine, "commit", self._committed)
        return self

    def _committed(self, db: Any) -> None:
        if db.get_execution_options().get("holdfast_write"):
            self.commits.append(True)

    def add(self, work: Callable[[], Any]) -> Future[Any]:
        future = self.writer.write(work)
        self._futures.append(future)
        return future

    def create(self, name: str) -> Future[Any]:
        return self.add(lambda: self.store.conversations.create("a", name, {}, [item("needle")]))

    def __exit__(self, *error: object) -> None:
        self._go.set()
        for future in self._futures:
            with suppress(BaseException):
                future.exception(timeout=200)
        self.writer.shutdown()
        event.remove(self.store.database.engine, "commit", self._committed)


def names(store: Store) -> set[str]:
    with store.database.read() as db:
        return {*db.execute(text("SELECT id FROM conversations")).scalars()}


def test_works_that_wait_together_are_committed_at_once(store: Store) -> None:
    with Together(store) as together:
        futures = [together.create(f"c{number}") for number in range(10)]
    assert [future.result()["id"] for future in futures] == [f"c{number}" for number in range(10)]
    assert together.commits == [True]
    assert names(store) == {f"c{number}" for number in range(10)}


def test_a_refused_work_takes_back_only_its_own_changes(store: Store) -> None:
    def half() -> None:
        with store.database.write() as db:
            db.execute(text("DELETE FROM conversations"))
            raise NotFound("conversation", "half")

    with Together(store) as together:
        first, refused, last = together.create("first"), together.add(half), together.create("last")
    assert first.result() and last.result() and isinstance(refused.exception(), NotFound)
    assert names(store) == {"first", "last"} and together.commits == [True]


def test_a_work_reads_what_the_works_before_it_wrote(store: Store) -> None:
    def goes_on() -> None:
        context = store.conversations.context("a", "c")
        store.turns.commit(turn("one", context, conversation="c"))

    with Together(store) as together:
        together.create("c")
        done = together.add(goes_on)
    assert done.exception() is None
    assert len(store.conversations.context("a", "c").items) == 3


def test_after_a_failure_of_the_database_each_work_runs_alone(store: Store) -> None:
    runs = list[int]()

    def fails_once() -> None:
        runs.append(1)
        store.conversations.create("a", f"fails{len(runs)}", {}, [])
        if len(runs) == 1:
            raise OperationalError("INSERT", {}, Exception("the disk is broken for a moment"))

    with Together(store) as together:
        futures = [together.create("first"), together.add(fails_once), together.create("last")]
    assert [future.exception() for future in futures] == [None, None, None]
    assert names(store) == {"first", "fails2", "last"} and len(together.commits) == 3


def test_a_work_that_always_fails_does_not_harm_the_others(store: Store) -> None:
    def fails() -> None:
        with store.database.write() as db:
            db.execute(text("INSERT INTO no_table VALUES (1)"))

    with Together(store) as together:
        first, failed, last = together.create("first"), together.add(fails), together.create("last")
    assert first.result() and last.result() and "no_table" in str(failed.exception())
    assert names(store) == {"first", "last"}


def test_a_work_outside_any_transaction_runs_between_two(on_disk: Store) -> None:
    with Together(on_disk) as together:
        together.create("before")
        moved = together.writer.submit(on_disk.database.move_log)
        together.create("after")
    assert moved.result() > 0 and len(together.commits) == 2


def test_a_group_takes_no_more_works_than_its_limit(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_writer, "MOST_WORKS", 4)
    with Together(store) as together:
        for number in range(10):
            together.create(f"c{number}")
    assert len(together.commits) == 3 and len(names(store)) == 10


def test_a_group_ends_after_its_time(on_disk: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_writer, "GROUP_SECONDS", 0.0)
    with Together(on_disk) as together:
        for number in range(3):
            together.create(f"c{number}")
    assert len(together.commits) == 3, "each group has one work at least"


def test_a_group_is_flushed_once_if_one_of_its_works_must_last(on_disk: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    flushes, flush = list[int](), os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda file: (flushes.append(file), flush(file)))
    with Together(on_disk) as together:
        for number in range(3):
            together.add(lambda number=number: on_disk.leases.lock(f"key{number}"))
    assert together.commits == [True] and not flushes
    with Together(on_disk) as together:
        together.add(lambda: on_disk.leases.unlock("key1"))
        together.create("c")
        together.create("d")
    assert together.commits == [True] and len(flushes) == 1


def test_an_answer_waits_for_the_flush(on_disk: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    began, go = threading.Event(), threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda file: (began.set(), go.wait()))
    writer = GroupWriter(on_disk.database)
    future = writer.write(lambda: on_disk.turns.commit(turn("one")))
    began.wait()
    assert not future.done()
    go.set()
    assert future.result(timeout=200) is None
    writer.shutdown()


def test_after_a_failed_flush_the_log_is_moved_into_the_file(
    on_disk: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(file: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", broken)
    with Together(on_disk) as together:
        kept = together.create("kept")
    assert kept.result()["id"] == "kept"
    copy = shutil.copy(tmp_path / "store.sqlite", tmp_path / "without-log.sqlite")
    with closing(sqlite3.connect(copy)) as db:
        assert db.execute("SELECT id FROM conversations").fetchall() == [("kept",)]


def no_connection() -> None:
    raise OperationalError("", None, sqlite3.OperationalError("unable to open database file"))


def test_a_full_disk_without_connections_fails_one_work_and_the_next_one_runs(
    on_disk: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL

    def work() -> None:
        raise OperationalError("", None, full)

    with monkeypatch.context() as patch, Together(on_disk) as together:
        patch.setattr(on_disk.database.engine, "raw_connection", no_connection)
        refused, kept = together.add(work), together.create("kept")
    assert "disk is full" in str(refused.exception())
    assert kept.result()["id"] == "kept"


async def test_requests_whose_flush_failed_are_not_run_again(
    on_disk: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = list[int]()

    def work(store: Store) -> None:
        runs.append(1)
        store.conversations.create("a", f"c{len(runs)}", {}, [])

    def broken(file: int) -> None:
        raise OSError(5, "Input/output error")

    server, other = AsyncStore(on_disk), FileLock(tmp_path / "store.sqlite")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", broken)
        patch.setattr(on_disk.database.engine, "raw_connection", no_connection)
        with other.held():
            both = asyncio.gather(server.run(work), server.run(work), return_exceptions=True)
            await asyncio.sleep(0.1)
        refused = await both
    assert [(error.status, "may be stored or not" in str(error)) for error in refused] == [(503, True)] * 2
    assert runs == [1, 1] and not server.up
    await server.run(lambda store: store.conversations.create("a", "d", {}, []))
    assert server.up
    server.close()


async def test_a_write_that_waits_too_long_for_other_processes_is_not_stored(
    on_disk: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.1)
    server, other = AsyncStore(on_disk), FileLock(tmp_path / "store.sqlite")
    with other.held():
        for name in ("one", "two"):
            with pytest.raises(ApiError, match="nothing of this request was stored") as refused:
                await server.run(lambda store, name=name: store.turns.commit(turn(name)))
            assert refused.value.status == 503
    monkeypatch.setattr(module, "WAIT_SECONDS", 30.0)
    await server.run(lambda store: store.turns.commit(turn("three")))
    with on_disk.database.read() as db:
        assert {*db.execute(text("SELECT id FROM turns")).scalars()} == {"three"}
    server.close()


async def test_a_write_is_completed_although_its_caller_left(on_disk: Store, tmp_path: Path) -> None:
    server, other = AsyncStore(on_disk), FileLock(tmp_path / "store.sqlite")
    with other.held():
        task = asyncio.create_task(server.run(lambda store: store.turns.commit(turn("one"))))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await server.run(lambda store: None)
    assert (await server.read(lambda store: store.turns.context("a", "one"))).parent == "one"
    server.close()


def test_works_that_wait_at_the_end_still_run_and_later_ones_are_refused(on_disk: Store) -> None:
    with Together(on_disk) as together:
        together.create("last")
    assert names(on_disk) == {"last"}
    with pytest.raises(RuntimeError, match="shut down"):
        together.writer.write(lambda: None)
    with pytest.raises(RuntimeError, match="shut down"):
        together.writer.submit(lambda: None)
