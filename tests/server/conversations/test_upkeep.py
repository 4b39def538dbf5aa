"""Upkeep of a SQLite store: words reach the index, pages reach the file, and no turn waits for either."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import event, func, select, text
from storing import AMPLE, item, turn
from test_store import grow

from holdfast.server.conversations import database, search_index, upkeep
from holdfast.server.conversations.database import Database
from holdfast.server.conversations.leases import conversation_key
from holdfast.server.conversations.search_index import conversation_places, index_of, pending, tenant_places
from holdfast.server.conversations.store import STORE_UNAVAILABLE, AsyncStore, Store
from holdfast.server.protocol import ApiError

WORDS = ("ant", "anthem", "bee", "beetle", "cat")


@pytest.fixture
def where(tmp_path: Path) -> str:
    return str(tmp_path / "store.sqlite")


@pytest.fixture
def store(where: str) -> Iterator[Store]:
    store = Store.open(where, AMPLE, lambda: 1000.0)
    yield store
    store.close()


def waiting(store: Store) -> int:
    """Return the number of changes that the index does not know."""
    with store.database.read() as db:
        return int(db.execute(select(func.count()).select_from(pending)).scalar_one())


def found(store: Store, word: str) -> set[str]:
    entries, _, more = store.listing.search("a", word, limit=100)
    assert not more
    return {entry["id"] for entry in entries}


@pytest.mark.parametrize("seed", range(4))
def test_a_search_finds_the_same_wherever_upkeep_is(store: Store, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(search_index, "APPLIED", 3)
    draw, said = random.Random(seed), dict[str, set[str]]()
    for number in range(60):
        match draw.choice(("create", "title", "delete", "upkeep", "upkeep")):
            case "create":
                said[f"c{number}"] = {draw.choice(WORDS), "none"}
                store.conversations.create("a", f"c{number}", {"t": "none"}, [item(min(said[f"c{number}"] - {"none"}))])
                store.conversations.create("b", f"theirs{number}", {}, [item("ant")])
            case "title" if said:
                name, title = draw.choice(sorted(said)), draw.choice(WORDS)
                (own,) = store.conversations.context("a", name).items
                store.conversations.update("a", name, {"t": title})
                said[name] = {own["content"][0]["text"], title}
            case "delete" if said:
                name = draw.choice(sorted(said))
                store.conversations.delete("a", name)
                del said[name]
            case "upkeep":
                upkeep.tidy(store.database)
        for wanted in ("ant", "bee", "beetle", "ca"):
            expected = {name for name, words in said.items() if any(word.startswith(wanted) for word in words)}
            assert found(store, wanted) == expected
    while upkeep.tidy(store.database):
        pass
    assert waiting(store) == 0 and found(store, "ant") == {
        name for name, words in said.items() if words & {"ant", "anthem"}
    }
    with store.database.write() as db:
        db.execute(text("INSERT INTO search_text (search_text) VALUES ('integrity-check')"))


def test_a_page_of_matches_is_full_although_newer_ones_are_removed_and_added(store: Store) -> None:
    for number in range(4):
        store.conversations.create("a", f"c{number}", {}, [item("needle")])
    while upkeep.tidy(store.database):
        pass
    for name in ("c3", "c2"):
        store.conversations.delete("a", name)
    store.conversations.create("a", "new", {}, [item("needle")])
    with store.database.read() as db:
        newest = index_of(db).newest(db, ["needle"], tenant_places(db, "a"), 2)
        places = [conversation_places(db, name) for name in ("new", "c1")]
    assert list(newest) == [place.first + 1 for place in places if place]
    assert found(store, "needle") == {"new", "c0", "c1"}


def test_turns_apply_changes_themselves_when_very_many_wait(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_index, "MOST_PENDING", 20)
    monkeypatch.setattr(search_index, "APPLIED", 8)
    most = 0
    for number in range(60):
        store.conversations.create("a", f"c{number}", {"t": "title"}, [item(f"needle{number}")])
        most = max(most, waiting(store))
    assert 16 <= most <= 24
    assert len(found(store, "needle")) == 60


def test_merging_ends_and_leaves_few_segments(store: Store) -> None:
    for number in range(40):
        store.conversations.create("a", f"c{number}", {}, [item(f"needle{number}")])
        upkeep.tidy(store.database)

    def segments() -> int:
        with store.database.read() as db:
            return int(db.execute(text("SELECT count(DISTINCT segid) FROM search_text_idx")).scalar_one())

    many, pieces = segments(), 0
    while upkeep.tidy(store.database):
        pieces += 1
        assert pieces < 1000
    assert many > 20 and segments() < 8
    assert len(found(store, "needle")) == 40


async def test_a_running_server_brings_words_into_the_index_and_the_log_into_the_file(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "TIDY_SECONDS", 0.01)
    monkeypatch.setattr(upkeep, "MOVE_SECONDS", 0.02)
    own, other = Store.open(where, AMPLE, lambda: 1000.0), Store.open(where, AMPLE, lambda: 1000.0)
    moves, move = list[int](), own.database.move_log

    def moved() -> int:
        moves.append(move())
        return moves[-1]

    monkeypatch.setattr(own.database, "move_log", moved)
    server, said = AsyncStore(own), item("x" * 40_000)
    for number in range(30):
        await server.run(lambda store, name=f"c{number}": store.conversations.create("a", name, {}, [said]))
        before = len(moves)
        while waiting(other) or len(moves) == before:
            await asyncio.sleep(0.005)
    size = Path(f"{where}-wal").stat().st_size
    server.close()
    assert size < 30 * 40_000 / 2, "the log begins anew, so it holds the last writes only"
    other.close()


def test_work_that_the_last_server_left_is_done_after_a_start(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(where, AMPLE, lambda: 1000.0)
    store.conversations.create("a", "c", {}, [item("needle")])
    store.close()
    again = Store.open(where, AMPLE, lambda: 1000.0)
    assert waiting(again)
    server, applied = AsyncStore(again), 1
    while applied:
        applied = waiting(again)
    assert found(again, "needle") == {"c"}
    server.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_only_locks_and_renewals_do_not_wait_for_the_disk(
    request: pytest.FixtureRequest, where: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = where if kind == "sqlite" else request.getfixturevalue("postgresql_schema")
    store, commits = Store.open(where, AMPLE, lambda: 1000.0), list[bool]()

    @event.listens_for(store.database.engine, "commit")
    def committed(db: object) -> None:
        if kind == "postgresql":
            cursor = db.connection.dbapi_connection.cursor()  # type: ignore[attr-defined]
            cursor.execute("SHOW synchronous_commit")
            commits.append(cursor.fetchone()[0] == "on")
        elif db.get_execution_options().get("holdfast_write"):  # type: ignore[attr-defined]
            commits.append(False)

    def flushed(file: int, flush: Callable[[int], None] = os.fdatasync) -> None:
        assert str(Path(f"/proc/self/fd/{file}").readlink()) == f"{where}-wal"
        flush(file)
        commits[-1] = True

    monkeypatch.setattr(os, "fdatasync", flushed)
    grow(store, "one")
    assert commits and commits[-1] is True
    commits.clear()
    key = conversation_key("a", "conv")
    store.leases.lock(key)
    store.leases.renew([key])
    store.leases.unlock(key)
    assert commits == [False, False, False]
    commits.clear()
    store.turns.commit(turn("two"))
    assert commits == [True], "the next turn lasts again, on the same connection"
    store.close()


def test_a_turn_moves_a_very_long_log_itself(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "LOG_PAGES", 50)
    store = Store.open(where, AMPLE, lambda: 1000.0)
    for number in range(60):
        store.conversations.create("a", f"c{number}", {}, [item("x" * 9000)])
    assert Path(f"{where}-wal").stat().st_size < 60 * 9000
    store.close()


def test_a_log_that_cannot_be_moved_is_an_error_that_upkeep_survives(where: str) -> None:
    store = Store.open(where, AMPLE, lambda: 1000.0)
    store.close()
    Path(where).unlink()
    Path(where).mkdir()
    with pytest.raises(database.FAILURES, match="log cannot be moved into the file: unable to open"):
        store.database.move_log()


async def test_a_store_that_was_moved_away_is_not_made_anew_and_works_again_once_it_is_back(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("TIDY_SECONDS", "MOVE_SECONDS", "FAILED_SECONDS"):
        monkeypatch.setattr(upkeep, name, 0.01)
    away, files = tmp_path / "away", tmp_path / "store.sqlite"
    away.mkdir()
    own = Store.open(where, AMPLE, lambda: 1000.0)
    server = AsyncStore(own)
    await server.run(lambda store: store.conversations.create("a", "before", {}, [item("ant")]))
    while waiting(own):
        await asyncio.sleep(0.005)
    for path in tmp_path.glob("store.sqlite*"):
        path.rename(away / path.name)
    # Everybody needs a new connection now. One that was made before a file had moved would still reach it.
    own.database.engine.dispose()
    for call in (server.run, server.read):
        with pytest.raises(ApiError) as refused:
            await call(lambda store: store.conversations.context("a", "before"))
        assert (refused.value.status, refused.value.code) == (503, STORE_UNAVAILABLE)
    while "upkeep of the conversation store failed: unable to open" not in caplog.text:
        await asyncio.sleep(0.005)
    assert not files.exists(), "an empty store must not take its place"
    for path in away.iterdir():
        path.rename(tmp_path / path.name)
    await server.run(lambda store: store.conversations.create("a", "after", {}, [item("anthem")]))
    while waiting(own):
        await asyncio.sleep(0.005)
    assert len((await server.read(lambda store: store.listing.search("a", "ant", limit=9)))[0]) == 2
    assert server.up
    server.close()


async def test_turns_last_without_the_file_of_the_log_and_upkeep_goes_on(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "TIDY_SECONDS", 0.01)
    own = Store.open(where, AMPLE, lambda: 1000.0)
    server = AsyncStore(own)
    await server.run(lambda store: store.conversations.create("a", "before", {}, [item("ant")]))
    Path(f"{where}-wal").unlink()
    await server.run(lambda store: store.conversations.create("a", "after", {}, [item("anthem")]))
    with closing(sqlite3.connect(f"file:{where}?immutable=1", uri=True)) as file:  # It reads no log.
        assert file.execute("SELECT count(*) FROM conversations").fetchone() == (2,)
    while waiting(own):
        await asyncio.sleep(0.005)
    assert found(own, "ant") == {"before", "after"}
    server.close()


def test_a_store_in_memory_has_no_log_to_move() -> None:
    memory = Database("memory")
    assert memory.move_log() == 0
    memory.close()
