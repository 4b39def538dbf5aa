"""The index of searches, in SQLite and PostgreSQL: whose documents it reads, and what changes do to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import text
from storing import AMPLE, item, turn
from test_store import grow

from holdfast.server.conversations import search_index
from holdfast.server.conversations.search_index import Places, conversation_places, index_of, tenant_places
from holdfast.server.conversations.store import Store


@pytest.fixture(params=["sqlite", "sqlite, applied by turns", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An empty store. In SQLite, changes of the index wait for upkeep, or each turn applies them itself."""
    if request.param.endswith("turns"):
        monkeypatch.setattr(search_index, "MOST_PENDING", -1)
    sqlite = request.param.startswith("sqlite")
    where = str(tmp_path / "store.sqlite" if sqlite else request.getfixturevalue("postgresql_schema"))
    store = Store.open(where, AMPLE, lambda: 1000.0)
    yield store
    store.close()


def found(store: Store, wanted: str, tenant: str = "a") -> list[str]:
    """Return the ids of all conversations that a search finds, in its order."""
    ids, after, more = list[str](), None, True
    while more:
        page, after, more = store.listing.search(tenant, wanted, limit=2, after=after)
        ids += [each["id"] for each in page]
    return ids


def test_a_search_finds_each_conversation_once_the_newest_first(store: Store) -> None:
    for name in ("first", "second", "third"):
        store.conversations.create("a", name, {"title": "needle"}, [item("needle1"), item("hay"), item("needle2")])
        store.conversations.create("b", f"theirs {name}", {}, [item("needle")])
    store.conversations.add_items("a", "first", [item("needle3")])
    assert found(store, "needle") == ["third", "second", "first"]
    assert found(store, "needle3") == ["first"]
    assert found(store, "needle", "nobody") == []


@pytest.mark.parametrize("batch", [1, 2, 3, 64])
def test_a_search_finds_all_whatever_it_reads_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr("holdfast.server.conversations.listing.BATCH", batch)
    for number in range(7):
        texts = ["in a needle"] * (number % 3) + ["needle in a"] * (number % 2) + ["hay"]
        store.conversations.create("a", str(number), {}, [item(f"{text} {at}") for at, text in enumerate(texts)])
    assert found(store, "needle") == ["5", "4", "3", "2", "1"]


def test_every_change_of_a_conversation_is_found_at_once_and_what_is_gone_is_not(store: Store) -> None:
    store.conversations.create("a", "conv", {"title": "old"}, [item("first"), item("second")])
    store.conversations.update("a", "conv", {"title": "new"})
    store.turns.commit(turn("asked", store.conversations.context("a", "conv"), conversation="conv"))
    wanted = {"old": [], "new": ["conv"], "first": ["conv"], "asked": ["conv"]}
    assert {word: found(store, word) for word in wanted} == wanted
    store.tree.move("a", "conv", "asked", after=False)
    assert (found(store, "asked"), found(store, "second")) == ([], ["conv"])
    store.conversations.delete_item("a", "conv", "msg_first")
    assert (found(store, "first"), found(store, "second")) == ([], ["conv"])
    store.conversations.add_items("a", "conv", [item("again")])
    assert found(store, "again") == ["conv"]
    store.conversations.delete("a", "conv")
    assert found(store, "again") == found(store, "new") == []


@pytest.mark.parametrize("drop", ["delete", "delete with responses", "make room"])
def test_the_index_keeps_no_document_of_a_conversation_that_is_gone(store: Store, drop: str) -> None:
    store.conversations.create("a", "kept", {}, [item("needle")])
    store.conversations.create("a", "gone", {"title": "needle"}, [item("needle")])
    store.turns.commit(turn("needle too", store.conversations.context("a", "gone"), conversation="gone"))
    match drop:
        case "delete":
            store.conversations.delete("a", "gone")
        case "delete with responses":
            store.tree.drop("a", "gone")
        case _:
            with store.database.write() as db:
                store.space.remove(db, "gone")
    with store.database.read() as db:
        places = tenant_places(db, "a")
        assert len(index_of(db).newest(db, ["needle"], places, 9)) == 1
        assert conversation_places(db, "gone") is None
    assert found(store, "needle") == ["kept"]


def test_a_search_of_one_tenant_reads_no_documents_of_others(tmp_path: Path) -> None:
    def steps(others: int) -> int:
        """Return the tens of instructions of SQLite's machine for a search among this number of conversations."""
        store, done = Store.open(str(tmp_path / f"{others}.sqlite"), AMPLE, lambda: 1000.0), [0]
        for number in range(others):
            store.conversations.create(f"other {number % 3}", f"conv_{number}", {}, [item("needle")])
        store.conversations.create("mine", "mine", {}, [item("needle")])

        @sqlalchemy.event.listens_for(store.database.engine, "checkout")
        def watch(connection: Any, record: Any, proxy: Any) -> None:
            connection.set_progress_handler(lambda: done.__setitem__(0, done[0] + 1), 10)

        assert found(store, "needle", "mine") == ["mine"]
        store.close()
        return done[0]

    assert steps(400) <= steps(20) + 20


def test_documents_of_a_tenant_are_one_range(store: Store) -> None:
    for tenant, name in (("a", "x"), ("b", "y"), ("a", "z")):
        store.conversations.create(tenant, name, {}, [])
    with store.database.read() as db:
        a, b = tenant_places(db, "a"), tenant_places(db, "b")
        x, y, z = (conversation_places(db, name) for name in "xyz")
        assert tenant_places(db, "c") == Places(0, 0)
    assert x and y and z
    assert a.first <= x.first < x.end <= z.first < z.end <= a.end <= b.first <= y.first


def test_items_beyond_the_places_of_a_conversation_are_stored_and_not_indexed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_index, "PLACES", 2)
    store.conversations.create("a", "conv", {}, [item("inside"), item("beyond")])
    assert (found(store, "inside"), found(store, "beyond")) == (["conv"], [])
    with store.database.read() as db:
        assert list(index_of(db).newest(db, ["beyond"], tenant_places(db, "a"), 9)) == []
    assert len(store.conversations.context("a", "conv").items) == 2


def test_postgresql_finds_a_rare_word_past_its_newest_documents(
    postgresql_schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_index, "RECENT", 3)
    store = Store.open(postgresql_schema, AMPLE, lambda: 1000.0)
    for name in ("rare", "rare too"):
        store.conversations.create("a", name, {}, [item("needle")])
    for number in range(5):
        store.conversations.create("a", f"conv_{number}", {}, [item(f"hay{number}")])
    store.conversations.create("b", "theirs", {}, [item("needle")])
    assert found(store, "needle") == ["rare too", "rare"]
    with store.database.read() as db:
        assert db.execute(text("SELECT count(*) FROM search_text")).scalar_one() == 8
    grow(store, "free")
    store.close()
