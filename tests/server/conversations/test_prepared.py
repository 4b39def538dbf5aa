"""Statements that go around SQLAlchemy: the same values, rows and errors as through it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import bindparam, insert, select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from holdfast.server.conversations.database import Database, threads
from holdfast.server.conversations.prepared import Prepared, parameters

ADD = Prepared(insert(threads).values(parameters(threads)))
FIND = Prepared(select(threads.c.bytes).where(threads.c.id == bindparam("id")))


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    where = str(tmp_path / "s.sqlite") if request.param == "sqlite" else request.getfixturevalue("postgresql_schema")
    database = Database(where)
    with database.write() as db:
        threads.create(db)
    yield database
    database.close()


def row(id: str, size: int = 1) -> dict[str, object]:
    return {"id": id, "tenant": "a", "active": 1.5, "bytes": size}


def test_a_value_is_the_first_one_of_the_first_row(database: Database) -> None:
    with database.write() as db:
        ADD.run(db, **row("one", 7))
        assert FIND.value(db, id="one") == 7 and FIND.value(db, id="two") is None
        assert db.execute(select(threads.c.active)).scalar_one() == 1.5


def test_the_first_row_has_the_names_of_the_columns(database: Database) -> None:
    query = Prepared(select(threads).where(threads.c.tenant == bindparam("tenant")).order_by(threads.c.bytes.desc()))
    with database.write() as db:
        ADD.run_many(db, [row("one", 7), row("two", 8)])
        found = query.first(db, tenant="a")
        assert (found.id, found.tenant, found.active, found.bytes) == ("two", "a", 1.5, 8)
        assert query.first(db, tenant="b") is None


def test_an_id_with_a_nul_is_converted_as_sqlalchemy_does(database: Database) -> None:
    with database.write() as db:
        ADD.run(db, **row("a\0b"))
        assert db.execute(select(threads.c.id)).scalar_one() == "a\ufffdb"


@pytest.mark.parametrize("count", [0, 1, 2])
def test_every_row_of_several_is_stored(database: Database, count: int) -> None:
    with database.write() as db:
        ADD.run_many(db, [row(f"c{number}") for number in range(count)])
        assert len(db.execute(select(threads.c.id)).all()) == count


def test_an_error_of_the_driver_is_one_of_sqlalchemy(database: Database) -> None:
    with pytest.raises(IntegrityError) as raised, database.write() as db:
        ADD.run(db, **row("one"))
        ADD.run(db, **row("one"))
    assert isinstance(raised.value, SQLAlchemyError) and "tenant" not in str(raised.value.params)
