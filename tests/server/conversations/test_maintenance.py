"""Checks and backups of a store, also while a server writes to it."""

from __future__ import annotations

import shutil
import sqlite3
import threading
import time
from pathlib import Path

import pytest
from storing import AMPLE
from test_store import damaged, grow, said

from holdfast.server.conversations.maintenance import backup, check
from holdfast.server.conversations.store import Store
from holdfast.server.conversations.values import NotFound, StoreError


def filled(path: Path) -> Store:
    store = Store.open(str(path), AMPLE)
    store.conversations.create("a", "conv", {"title": "needle"}, [])
    grow(store, "one", "two")
    return store


def test_a_backup_holds_each_turn_that_was_stored_before_it_and_can_be_restored(tmp_path: Path) -> None:
    path, copy = tmp_path / "store.sqlite", tmp_path / "copy.sqlite"
    store, stop, written = filled(path), threading.Event(), list[str]()

    def write() -> None:
        while not stop.is_set():
            grow(store, f"late{len(written)}")
            written.append(f"late{len(written)}")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while len(written) < 3:
            time.sleep(0.001)
        before = len(written)
        size = backup(str(path), copy)
    finally:
        stop.set()
        writer.join()
        store.close()
    assert size == copy.stat().st_size and copy.stat().st_mode & 0o077 == 0
    assert sorted(each.name for each in tmp_path.glob("copy*")) == ["copy.sqlite"]
    check(str(copy))
    for file in tmp_path.glob("store.sqlite*"):
        file.unlink()
    shutil.copy(copy, path)
    restored = Store.open(str(path), AMPLE)
    assert said(restored.turns.context("a", "two")) == ["one", "ONE", "two", "TWO"]
    for name in written[:before]:
        assert said(restored.turns.context("a", name)) == [name, name.upper()]
    (found,), _, _ = restored.listing.search("a", "needle", limit=9)
    assert found["id"] == "conv"
    grow(restored, "next")
    restored.close()


def test_a_backup_replaces_no_file_and_leaves_none_when_it_fails(tmp_path: Path) -> None:
    path, copy = tmp_path / "store.sqlite", tmp_path / "copy.sqlite"
    filled(path).close()
    copy.write_text("earlier")
    with pytest.raises(StoreError, match=r"copy.sqlite exists; name a new file"):
        backup(str(path), copy)
    assert copy.read_text() == "earlier"
    with pytest.raises(StoreError, match="there is no conversation store"):
        backup(str(tmp_path / "absent.sqlite"), tmp_path / "new.sqlite")
    with pytest.raises(StoreError, match="cannot be copied"):
        backup(str(path), tmp_path / "no folder" / "new.sqlite")
    (tmp_path / "letter").write_text("Dear Ada, " * 1000)
    with pytest.raises(StoreError, match="not a database"):
        backup(str(tmp_path / "letter"), tmp_path / "new.sqlite")
    assert not list(tmp_path.glob("new.sqlite*"))


@pytest.mark.parametrize("action", ["check", "backup"])
@pytest.mark.parametrize("where", ["postgresql://ada:secret@host/name", "memory"])
def test_a_store_without_a_file_is_refused_by_name_and_without_its_password(
    tmp_path: Path, where: str, action: str
) -> None:
    with pytest.raises(StoreError, match="for PostgreSQL, use pg_") as refused:
        check(where) if action == "check" else backup(where, tmp_path / "copy")
    assert "secret" not in str(refused.value)


def test_a_check_counts_the_rows_and_finds_damage(tmp_path: Path) -> None:
    path = tmp_path / "whole.sqlite"
    store = filled(path)
    held = check(str(path))
    assert held[:3] == (2, 1, 0) and held.bytes > 0
    store.close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE counters SET items = items + 1")
    db.close()
    with pytest.raises(StoreError, match=r"counters say .* 1 items, .* and it has .* 0 items"):
        check(str(path))
    with pytest.raises(StoreError, match=r"not whole: .*(damaged|malformed)"):
        check(str(damaged(tmp_path)))


def test_a_backup_of_a_server_in_use_does_not_hold_up_its_turns(tmp_path: Path) -> None:
    store = filled(tmp_path / "store.sqlite")
    with store.database.write():  # A turn is being stored.
        backup(str(tmp_path / "store.sqlite"), tmp_path / "copy.sqlite")
    with pytest.raises(NotFound):
        store.turns.context("a", "absent")
    store.close()
