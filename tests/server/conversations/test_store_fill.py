"""A filled store holds what the API stores for the same conversations."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.json import decode
from postgresql_server import empty_schema
from sqlalchemy import Row, select, text

from benchmarks.robustness import store_fill
from benchmarks.robustness.store_fill import LARGE, RARE, TOKENS, Writer, fill, name, tenant_of
from holdfast.server.conversations import counters, upkeep
from holdfast.server.conversations.database import conversations, items, threads, turns
from holdfast.server.conversations.list_rows import listed
from holdfast.server.conversations.search_index import indexed, tenants
from holdfast.server.conversations.store import Store
from holdfast.server.conversations.values import Bounds, Turn

COUNT, OTHERS = 207, 40
"""Number of conversations, and of tenants besides the large one: each has two or three."""


def opened(where: str, now: list[float] | None = None) -> Store:
    return Store.open(where, Bounds(seconds=1e12, threads=1 << 30, bytes=1 << 40), lambda: now[0] if now else 2e9)


def write_again(filled: Store, other: Store, now: list[float]) -> None:
    """Write the conversations of a filled store into another one, as the API does."""
    with filled.database.read() as db:
        active = {row.id: row.active for row in db.execute(select(threads))}
        said: dict[str, list[Any]] = {}
        for row in db.execute(select(items).order_by(items.c.position)):
            said.setdefault(row.conversation, []).append(decode(row.item))
    with other.database.shared():
        for number in range(COUNT):
            id, tenant = name(number), tenant_of(number)
            now[0], two = active[id], said[id]
            title = {"title": f"number {number}"}
            if number % 10:
                other.conversations.create(tenant, id, title, two)
                continue
            other.conversations.create(tenant, id, title, [])
            response = {
                "id": f"resp_{number}",
                "status": "completed",
                "created_at": 0,
                "metadata": {},
                "output": two[1:],
            }
            context = other.conversations.context(tenant, id)
            other.turns.commit(
                Turn(
                    response=response, tenant=tenant, input=two[:1], context=context, conversation=id,
                    tokens=[1] * TOKENS,
                )
            )  # fmt: skip


def rows(store: Store) -> dict[str, Any]:
    """All rows of a store that conversations make, by table."""
    while upkeep.tidy(store.database):
        pass
    with store.database.read() as db:
        found: dict[str, Any] = {
            table.name: sorted(map(tuple, db.execute(select(table)).all()))
            for table in (threads, conversations, items, listed, indexed, tenants)
        }
        found["turns"] = sorted(tuple(row) for row in db.execute(select(turns)))
        found["counters"] = counters.held(db)
        assert counters.sums(db) == counters.recount(db) and counters.complete(db)
        found["upkeep"] = sorted(map(tuple, db.execute(select(counters.upkeep)).all()))
        if db.dialect.name == "postgresql":
            found["words"] = sorted(map(tuple, db.execute(text("SELECT number, words::text FROM search_text"))))
            found["indexes"] = schema(
                db.execute(text("SELECT tablename, indexdef FROM pg_indexes WHERE schemaname = current_schema()")).all()
            )
            enabled = "SELECT tgname, tgenabled FROM pg_trigger JOIN pg_class ON tgrelid = pg_class.oid "
            enabled += "WHERE NOT tgisinternal AND relnamespace = current_schema()::regnamespace ORDER BY 1"
            found["triggers"] = [tuple(row) for row in db.execute(text(enabled))]
        else:
            found["schema"] = sorted(
                map(
                    tuple,
                    db.execute(text("SELECT type, name, tbl_name, sql FROM sqlite_schema")),
                )
            )
            found["sequences"] = sorted(
                map(tuple, db.execute(text("SELECT name, seq FROM sqlite_sequence WHERE name != 'search_pending'")))
            )
    return found


def words(where: str) -> list[tuple[str, int]]:
    """All words of the index of a SQLite file, each with its document, after a check of the file."""
    with closing(sqlite3.connect(where)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        db.execute("CREATE VIRTUAL TABLE temp.words USING fts5vocab(main, search_text, 'instance')")
        return sorted(db.execute("SELECT term, doc FROM words"))


def schema(indexes: Sequence[Row[Any]]) -> list[tuple[str, str]]:
    """Indexes without the name of their schema."""
    return sorted(
        (row.tablename, row.indexdef.replace(f"{row.indexdef.split(' ON ')[1].split('.')[0]}.", "")) for row in indexes
    )


@pytest.fixture(params=["sqlite", "postgresql"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """The places of two stores."""
    if request.param == "sqlite":
        yield str(tmp_path / "filled.sqlite"), str(tmp_path / "written.sqlite")
        return
    server = request.getfixturevalue("postgresql")
    with empty_schema(server) as one, empty_schema(server) as other:
        yield one, other


def test_a_filled_store_equals_one_that_was_written_through_the_api(
    places: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_fill, "OTHERS", OTHERS)
    filled_at, written_at = places
    fill(filled_at, COUNT, Writer(random.Random(0), 8), opened)
    now = [0.0]
    filled, written = opened(filled_at), opened(written_at, now)
    write_again(filled, written, now)
    expected, found = rows(written), rows(filled)
    for table, content in expected.items():
        assert found[table] == content, table
    assert len(found["turns"]) == 21 and len(found["items"]) == 2 * COUNT
    for tenant, wanted in ((LARGE, RARE), ("tenant7", "number"), (LARGE, "the"), (LARGE, "number 12")):
        pages = [
            [entry["id"] for entry in store.listing.search(tenant, wanted, limit=50)[0]] for store in (filled, written)
        ]
        assert pages[0] == pages[1] and pages[0]
    if "://" not in filled_at:
        filled_words, written_words = words(filled_at), words(written_at)
        assert filled_words == written_words and len(filled_words) > 10 * COUNT
    for store in (filled, written):
        store.conversations.create(LARGE, "after", {"title": "after"}, [])
        assert [entry["id"] for entry in store.listing.search(LARGE, "after", limit=5)[0]] == ["after"]
        store.close()


def test_a_store_with_another_number_of_conversations_is_refused_and_a_full_one_left(tmp_path: Path) -> None:
    where, writer = str(tmp_path / "store.sqlite"), Writer(random.Random(0), 8)
    assert fill(where, 3, writer, opened) > 0 and fill(where, 3, writer, opened) == 0
    with pytest.raises(ValueError, match=r"the store has 3 conversations, and 4 are wanted; begin with an empty one"):
        fill(where, 4, writer, opened)
    assert sorted(each.name for each in tmp_path.iterdir() if "filling" in each.name) == []
