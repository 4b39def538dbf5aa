"""Rows of the list of conversations: equal to what the other tables say, whoever changes those."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.json import encode
from served import eventually
from sqlalchemy import select, text, update
from storing import AMPLE, item, turn
from test_query_plans import queries
from test_store import grow

from holdfast.server.conversations import list_rows, upkeep
from holdfast.server.conversations.database import conversations, threads
from holdfast.server.conversations.list_rows import BEGINNING, beginning_of, listed, previews
from holdfast.server.conversations.store import Store

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
OLD_INSERT = "INSERT INTO items (conversation, position, id, item) VALUES (:conversation, :position, :id, :item)"
KINDS = "create", "create", "create", "empty", "turn", "turn", "title", "edit", "delete", "drop", "response", "old"


@pytest.fixture
def clock() -> list[float]:
    """The time of the store, in its only element."""
    return [1000.0]


@pytest.fixture(params=["sqlite", "postgresql"])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, clock: list[float]
) -> Iterator[Store]:
    where = str(tmp_path_factory.mktemp("store") / "store.sqlite")
    if request.param == "postgresql":
        where = str(request.getfixturevalue("postgresql_schema"))
    store = Store.open(where, AMPLE, lambda: clock[0])
    yield store
    store.close()


def check(store: Store) -> dict[str, bytes | None]:
    """Compare all rows with the tables that they follow. Returns the preview of each conversation."""
    joined = select(
        threads.c.tenant, threads.c.active, conversations.c.id, threads.c.id, conversations.c.created,
        conversations.c.metadata,
    ).join(conversations, conversations.c.thread == threads.c.id)  # fmt: skip
    with store.database.read() as db:
        rows = db.execute(select(listed)).all()
        assert sorted(tuple(row)[:-1] for row in rows) == sorted(map(tuple, db.execute(joined).all()))
        read = previews(db, [row.conversation for row in rows])
    for row in rows:
        assert row.preview in (None, read.get(row.conversation, "").encode())
    return {row.conversation: row.preview for row in rows}


def old_server_says(store: Store, conversation: str, position: int, said: str) -> None:
    """Store an item as a server does that knows no rows of the list."""
    with store.database.write() as db:
        db.execute(update(conversations).where(conversations.c.id == conversation).values(head=None))
        db.execute(
            text(OLD_INSERT),
            {"conversation": conversation, "position": position, "id": f"msg_{said}", "item": encode(item(said))},
        )


@pytest.mark.parametrize("seed", range(3))
def test_rows_follow_every_change_of_a_store(store: Store, clock: list[float], seed: int) -> None:
    draw, there, most = random.Random(seed), list[str](), 0
    for number in range(60):
        clock[0] += draw.choice((0.0, 1.5))
        kind = draw.choice(KINDS)
        name = draw.choice(there) if there else ""
        if kind in ("create", "empty"):
            there.append(f"c{number}")
            text_of = [{"type": "input_text", "text": f"{number}\0é"}]
            said = [item(f"{number}") | {"content": text_of}, item("x")] if kind == "create" else []
            store.conversations.create(draw.choice("ab"), there[-1], {"t": f"{number}"}, said)
        elif kind == "response":
            grow(store, f"r{number}", tenant="a")
        elif name:
            with store.database.read() as db:
                tenant = db.execute(select(conversations.c.tenant).where(conversations.c.id == name)).scalar_one()
            there.remove(name)
            match kind:
                case "turn":
                    context = store.conversations.context(tenant, name)
                    store.turns.commit(turn(f"t{number}", context, conversation=name, tenant=tenant))
                case "title":
                    store.conversations.update(tenant, name, {"t": f"changed {number}"})
                case "edit":
                    first, _ = store.conversations.items(tenant, name, limit=1, newest_first=False)
                    for each in first:
                        store.conversations.delete_item(tenant, name, each["id"])
                case "delete":
                    store.conversations.delete(tenant, name)
                case "drop":
                    store.tree.drop(tenant, name)
                case "old":
                    said, _ = store.conversations.items(tenant, name, limit=9, newest_first=False)
                    if not said:
                        old_server_says(store, name, 0, f"old{number}")
            if kind not in ("delete", "drop"):
                there.append(name)
        assert {*check(store)} == {*there}
        most = max(most, len(there))
    assert most > 3


def test_a_page_shows_what_an_old_server_wrote_and_what_was_edited(store: Store, clock: list[float]) -> None:
    def shown() -> list[str]:
        page, _ = store.listing.page("a", limit=9)
        return [entry["preview"] for entry in page]

    store.conversations.create("a", "conv", {}, [])
    assert shown() == [""] and check(store) == {"conv": b""}
    old_server_says(store, "conv", 0, "old")
    assert shown() == ["old"] and check(store) == {"conv": None}
    store.conversations.add_items("a", "conv", [item("new")])
    assert shown() == ["old"] and check(store) == {"conv": b"old"}
    store.conversations.delete_item("a", "conv", "msg_old")
    assert shown() == ["new"]
    clock[0] += 1
    store.turns.commit(turn("one", store.conversations.context("a", "conv"), conversation="conv"))
    assert shown() == ["new"] and set(check(store)) == {"conv"}


def test_a_page_and_its_cursor_read_no_items(store: Store, clock: list[float]) -> None:
    for number in range(9):
        clock[0] += 1
        store.conversations.create("a", f"c{number}", {"t": "x"}, [item(f"said {number}"), item("x")])
    page: list[Any] = []
    asked = queries(store, lambda store: page.extend(store.listing.page("a", limit=3, after="c6")[0]))
    assert [(entry["id"], entry["preview"]) for entry in page] == [(f"c{n}", f"said {n}") for n in (5, 4, 3)]
    assert [entry["active_at"] for entry in page] == [1006, 1005, 1004] and page[0]["metadata"] == {"t": "x"}
    assert [statement for statement, _ in asked if "FROM items" in statement] == []


def test_an_older_store_gets_its_rows_in_pieces_and_lists_all_meanwhile(
    store: Store, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(list_rows, "PIECE", 2)
    for number in range(7):
        clock[0] += 1
        store.conversations.create("a", f"c{number}", {"t": "x"}, [item(f"said {number}")])
    before, _ = store.listing.page("a", limit=99)
    with store.database.write() as db:
        db.execute(text("DELETE FROM listed"))
        db.execute(text("UPDATE upkeep SET cursor = '', done = FALSE WHERE task = 'list'"))
    pieces = 0
    while True:
        page, _ = store.listing.page("a", limit=99)
        assert [(each["id"], each["preview"]) for each in page if each["id"] in {e["id"] for e in before}] == [
            (each["id"], each["preview"]) for each in before
        ]
        if not upkeep.piece(store.database):
            break
        pieces += 1
        if pieces == 2:
            store.conversations.create("a", "b_new", {}, [item("new")])  # It comes before the cursor.
            store.conversations.create("a", "d_new", {}, [item("new")])  # It comes after the cursor.
    assert pieces == 5
    assert all(preview is not None for preview in check(store).values())
    assert {entry["id"] for entry in store.listing.page("a", limit=99)[0]} == {
        *(f"c{n}" for n in range(7)),
        "b_new",
        "d_new",
    }


def test_a_title_that_changes_during_another_servers_turn_reaches_the_row(postgresql_schema: str) -> None:
    clock = [1000.0]
    store = Store.open(postgresql_schema, AMPLE, lambda: clock[0])
    store.conversations.create("a", "conv", {"t": "old"}, [])
    change = threading.Thread(target=lambda: store.conversations.update("a", "conv", {"t": "new"}))
    with store.database.write() as db:
        clock[0] = 2000.0
        store.space.grown(db, "conv", "a", 1)
        change.start()

        def waits() -> bool:
            with store.database.engine.connect() as other:
                return bool(other.execute(text("SELECT count(*) FROM pg_locks WHERE NOT granted")).scalar_one())

        eventually(waits)
    change.join()
    check(store)
    (entry,), _ = store.listing.page("a", limit=9)
    assert (entry["metadata"], entry["active_at"]) == ({"t": "new"}, 2000)
    store.close()


@given(text=TEXT, shift=st.integers(0, 40), role=st.sampled_from(["user", "system", "assistant"]))
def test_the_beginning_of_a_large_item_is_the_beginning_of_its_text_wherever_it_is_cut(
    text: str, shift: int, role: str
) -> None:
    whole = "x" * (BEGINNING - 120 + shift) + text + '🎈\n"é' * 900
    item = encode({"id": "msg", "type": "message", "role": role, "content": [{"type": "input_text", "text": whole}]})
    said = beginning_of(item[:BEGINNING])
    assert (said.role == "system") == (role == "system")
    (part,) = said.content
    assert whole.startswith(part.text) and len(part.text) > BEGINNING - 400


@given(text=TEXT)
def test_a_small_item_is_read_whole_with_its_calls_and_results(text: str) -> None:
    message = {"role": "user", "content": [{"type": "input_text", "text": part} for part in (text, "end")]}
    assert beginning_of(encode(message)).text() == f"{text}\nend"
    assert beginning_of(encode({"type": "function_call", "name": "f", "arguments": '{"a": 1}'})).text() == '{"a": 1}'
    assert beginning_of(encode({"type": "function_call_output", "output": "done"})).text() == "done"


def test_a_large_item_without_text_has_an_emptybeginning_of() -> None:
    item = encode({"role": "user", "content": [{"type": "input_image", "data": "x" * (2 * BEGINNING)}]})
    assert beginning_of(item[:BEGINNING]).text() == ""
