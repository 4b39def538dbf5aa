from __future__ import annotations

from pathlib import Path

import pytest
from fastapi import FastAPI

from holdfast.server.config import ServerConfig
from holdfast.server.conversations.database import MEMORY
from holdfast.server.conversations.store import Store
from holdfast.server.run import open_store


def contents(store: Store) -> dict[str, list[tuple[object, ...]]]:
    """The definitions of all tables, indexes and triggers, and the rows of all tables."""
    with store.database.read() as db:
        made = db.exec_driver_sql("SELECT type, name, sql FROM sqlite_master ORDER BY type, name").fetchall()
        names = [name for kind, name, _ in made if kind == "table" and name != "search_text"]  # that cannot be scanned
        rows = {name: db.exec_driver_sql(f"SELECT * FROM {name}").fetchall() for name in names}
    store.close()
    return {"": [tuple(each) for each in made]} | {name: [tuple(row) for row in found] for name, found in rows.items()}


def test_stores_in_memory_begin_as_a_store_in_a_file_and_share_nothing(tmp_path: Path) -> None:
    created = contents(open_store(ServerConfig(store=str(tmp_path / "store.sqlite"))))
    first = open_store(ServerConfig(store=MEMORY))
    with first.database.write() as db:
        db.exec_driver_sql("DELETE FROM versions")
    first.close()
    assert contents(open_store(ServerConfig(store=MEMORY))) == created
    assert created["versions"]


def test_a_route_that_cannot_be_made_fails_when_it_is_asked_for() -> None:
    app = FastAPI()

    @app.get("/there/{name}", response_model=int, status_code=204)
    def there(name: str) -> None: ...

    with pytest.raises(AssertionError, match="must not have a response body"):
        app.openapi()


def test_a_route_has_what_fastapi_gives_it_and_nothing_else() -> None:
    app = FastAPI()

    @app.post("/there/{name}", status_code=201, summary="It is there.")
    def there(name: str) -> None: ...

    route = app.routes[-1]
    assert (route.name, route.status_code, route.summary) == ("there", 201, "It is there.")  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        route.colour  # type: ignore[attr-defined]  # noqa: B018
