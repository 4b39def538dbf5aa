"""Plans of the queries of each route: every one reads a range of an index, and no table whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from postgresql_server import empty_schema
from sqlalchemy import event, text
from storing import AMPLE, item, turn
from test_store import grow

from holdfast.server.conversations import prepared
from holdfast.server.conversations.store import Store

BOUNDED = (
    "counters",
    "upkeep",
    "leases",
    "search_pending",
    "chain",
    "CONSTANT",
    "search_text VIRTUAL",
    "found",
    "(subquery",
)
"""Tables that stay small, results of other steps, and FTS5, which has plans of its own."""
IN_ORDER = "threads USING INDEX ix_threads_active"
"""Step of SQLite that reads an index from its beginning. The query needs its first rows only."""
ROUTES: dict[str, Callable[[Store], Any]] = {
    "list": lambda store: store.listing.page("a", limit=5),
    "cursor of a list": lambda store: store.listing.page("a", limit=5, after="c7"),
    "search": lambda store: store.listing.search("a", "needle", limit=5),
    "search by two words": lambda store: store.listing.search("a", "needle c7", limit=5),
    "cursor of a search": lambda store: store.listing.search("a", "needle", limit=5, after="c7"),
    "get": lambda store: store.conversations.get("a", "c7"),
    "items": lambda store: store.conversations.items("a", "c7", limit=5, newest_first=True),
    "cursor of items": lambda store: store.conversations.items("a", "c7", limit=5, newest_first=False, after="msg_x"),
    "tree": lambda store: store.tree.turns("a", "c7"),
    "response": lambda store: store.turns.response("a", "two"),
    "create": lambda store: store.conversations.create("a", "new", {"t": "title"}, [item("new")]),
    "update": lambda store: store.conversations.update("a", "c7", {"t": "other"}),
    "add items": lambda store: store.conversations.add_items("a", "c7", [item("more")]),
    "delete an item": lambda store: store.conversations.delete_item("a", "c7", "msg_x"),
    "turn": lambda store: store.turns.commit(turn("asked", store.conversations.context("a", "c7"), conversation="c7")),
    "turn after a turn": lambda store: grow(store, "three", "four"),
    "delete": lambda store: store.conversations.delete("a", "c8"),
    "delete with responses": lambda store: store.tree.drop("a", "c9"),
    "delete a response": lambda store: store.turns.delete("a", "two"),
}
"""Calls of each route. None needs what another deletes."""


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store of some conversations and turns."""
    with ExitStack() as ended:
        where = str(tmp_path_factory.mktemp("store") / "store.sqlite")
        if request.param == "postgresql":
            where = ended.enter_context(empty_schema(request.getfixturevalue("postgresql")))
        store = Store.open(where, AMPLE, lambda: 1000.0)
        for number in range(20):
            store.conversations.create("a", f"c{number}", {"t": f"c{number}"}, [item("needle"), item("x")])
        grow(store, "one", "two")
        yield store
        store.close()


def queries(store: Store, route: Callable[[Store], Any]) -> list[tuple[str, Any]]:
    """Call a route. Return its statements that read or change rows, with their parameters."""
    asked: list[tuple[str, Any]] = []

    def note(statement: str, parameters: Any, many: bool) -> None:
        if statement.lstrip().upper().startswith(("SELECT", "UPDATE", "DELETE", "WITH")):
            asked.append((statement, parameters[0] if many else parameters))

    def run(db: Any, method: str, statement: str, *given: Any, run: Callable[..., Any] = prepared.executed) -> Any:
        note(statement, given[0] if given else (), method == "executemany")
        return run(db, method, statement, *given)

    @event.listens_for(store.database.engine, "before_cursor_execute")
    def executed(db: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        note(statement, parameters, many)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prepared, "executed", run)
            route(store)
    finally:
        event.remove(store.database.engine, "before_cursor_execute", executed)
    return asked


def explained(store: Store, statement: str, parameters: Any, *, small: bool = False) -> list[str]:
    """Return the steps of a statement's plan.

    PostgreSQL reads a `small` table whole although it has an index, so that is forbidden then if there is another way.
    """
    sqlite = store.database.engine.dialect.name == "sqlite"
    connection = store.database.engine.raw_connection()
    try:
        cursor = connection.cursor()
        if small and not sqlite:
            cursor.execute("SET enable_seqscan TO off")
        cursor.execute(f"EXPLAIN {'QUERY PLAN ' if sqlite else ''}{statement}", parameters)
        return [str(row[-1]).strip() for row in cursor.fetchall()]
    finally:
        connection.invalidate()


def scans(store: Store, statement: str, parameters: Any) -> list[str]:
    """Return the steps of a statement's plan that read a table whole."""
    mark = "SCAN " if store.database.engine.dialect.name == "sqlite" else "Seq Scan on "
    steps = explained(store, statement, parameters, small=True)
    found = [step.partition(mark)[2] for step in steps if mark in step]
    first = IN_ORDER if "LIMIT" in statement else "no table"
    return [table for table in found if not table.startswith((*BOUNDED, first))]


@pytest.mark.whole_product
@pytest.mark.parametrize("route", ROUTES)
def test_a_route_reads_no_table_whole(store: Store, route: str) -> None:
    asked = queries(store, ROUTES[route])
    assert asked
    assert {statement: found for statement, given in asked if (found := scans(store, statement, given))} == {}


def test_a_query_without_an_index_is_found_by_these_tests(store: Store) -> None:
    assert scans(store, "SELECT id FROM turns WHERE status = 'completed'", ())


def test_postgresql_passes_no_other_tenants_threads_before_those_of_an_idle_one(postgresql_schema: str) -> None:
    store = Store.open(postgresql_schema, AMPLE, lambda: 1000.0)
    with store.database.write() as db:
        for tenant, first in (("idle", 1), ("busy", 4001)):
            numbers = f"generate_series({first}, {first + 3999}) AS n"
            db.execute(text(f"INSERT INTO threads SELECT 'c' || n, '{tenant}', n, 1 FROM {numbers}"))
            made = f"SELECT 'c' || n, 'c' || n, '{tenant}', 1, '{{}}', NULL FROM {numbers}"
            db.execute(text(f"INSERT INTO conversations {made}"))
    with store.database.engine.connect() as db:
        db.execute(text("ANALYZE"))
        db.commit()
    for route in (
        partial(store.listing.page, "idle", limit=5),
        partial(store.listing.page, "idle", limit=5, after="c9"),
    ):
        *_, listed = [query for query in queries(store, lambda store, route=route: route()) if "LIMIT" in query[0]]
        plan = "\n".join(explained(store, *listed))
        assert "listed_pkey" in plan and "Seq Scan" not in plan and "ix_threads_active" not in plan
    with store.database.write() as db:
        db.execute(text("UPDATE upkeep SET done = FALSE WHERE task = 'list'"))
    asked = queries(store, lambda store: store.listing.page("idle", limit=5, after="c9"))
    *_, older = [query for query in asked if "LIMIT" in query[0]]
    plan = "\n".join(explained(store, *older))
    assert "threads_by_tenant" in plan and "ix_threads_active" not in plan
    store.close()
