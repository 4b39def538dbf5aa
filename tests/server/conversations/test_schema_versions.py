"""Servers one version apart on one store: each reads and writes what it knows, and migrations only add."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import Connection, text
from version_before import unpack

from holdfast.server.conversations.database import MEMORY, STEPS, Database, MigrationStep, migrate
from holdfast.server.conversations.store import Store
from holdfast.server.conversations.values import Bounds, StoreError, Turn
from holdfast.server.jobs.tables import create_indexes
from holdfast.server.schema import SCHEMA

AMPLE = Bounds(seconds=1e12, threads=1000, bytes=1 << 30)
ALL_STEPS = (*STEPS, *SCHEMA)
OLD_SERVER = """\
import json, sys
import holdfast
from holdfast.server.conversations.store import Store
from holdfast.server.conversations.values import Bounds, Turn
from holdfast.server.jobs.tables import create_indexes
from holdfast.server.schema import SCHEMA

def item(text, role="user"):
    return {"id": f"msg_{text}", "type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

where, name = sys.argv[1:]
store = Store.open(where, Bounds(seconds=1e12, threads=1000, bytes=1 << 30), lambda: 1000.0, SCHEMA, [create_indexes])
if name == "begin":
    store.conversations.create("a", "conv", {"title": "ships"}, [])
context = store.conversations.context("a", "conv")
output = [item(name.upper(), "assistant")]
store.turns.commit(
    Turn(
        response={"id": name, "status": "completed", "output": output}, tenant="a", input=[item(name)], context=context,
        tokens=[*context.tokens, len(name)], characters=7, digest=b"digest", conversation="conv",
    )
)
found, _ = store.conversations.items("a", "conv", limit=100, newest_first=False)
texts = [each["content"][0]["text"] for each in found]
searched, _, _ = store.listing.search("a", "begin", limit=10)
print(json.dumps({"code": holdfast.__file__, "texts": texts, "found": len(searched)}))
store.close()
"""


def item(text: str, role: str = "user") -> dict[str, Any]:
    return {"id": f"msg_{text}", "type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def opened(where: str | Path, *more: MigrationStep) -> Store:
    """A server's store, or that of a later version with `more` steps."""
    return Store.open(str(where), AMPLE, lambda: 1000.0, (*SCHEMA, *more), [create_indexes])


def say(store: Store, name: str) -> list[str]:
    """Add a turn to the conversation. Returns the texts of all its items."""
    context = store.conversations.context("a", "conv")
    store.turns.commit(
        Turn(
            response={"id": name, "status": "completed", "output": [item(name.upper(), "assistant")]},
            tenant="a", input=[item(name)], context=context, tokens=[*context.tokens, len(name)], characters=7,
            digest=b"digest", conversation="conv",
        )
    )  # fmt: skip
    found, _ = store.conversations.items("a", "conv", limit=100, newest_first=False)
    return [each["content"][0]["text"] for each in found]


def next_step(db: Connection) -> None:
    """A step as the next version may have it: a column, an index and a table."""
    db.execute(text("ALTER TABLE turns ADD COLUMN mood VARCHAR(16)"))
    db.execute(text("ALTER TABLE conversations ADD COLUMN pins INTEGER NOT NULL DEFAULT 0"))
    db.execute(text("CREATE INDEX turns_by_mood ON turns (mood)"))
    db.execute(text("CREATE TABLE pins (conversation VARCHAR(64) PRIMARY KEY, place INTEGER NOT NULL)"))


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "store.sqlite")
    return str(request.getfixturevalue("postgresql_schema"))


class TestOneVersionNewer:
    """A store that the next version has migrated."""

    def test_this_version_and_the_next_one_take_turns_in_one_conversation(self, where: str) -> None:
        old = opened(where)
        old.conversations.create("a", "conv", {"title": "ships"}, [])
        assert say(old, "one") == ["one", "ONE"]
        new = opened(where, next_step)  # while the old server runs
        say(old, "two")
        assert say(new, "three")[-2:] == ["three", "THREE"]
        old.close()
        again = opened(where)  # an old server that starts on the new schema
        assert say(again, "four") == ["one", "ONE", "two", "TWO", "three", "THREE", "four", "FOUR"]
        assert [each["id"] for each in again.listing.search("a", "ships", limit=5)[0]] == ["conv"]
        again.conversations.update("a", "conv", {"title": "boats"})
        assert new.conversations.get("a", "conv")["metadata"] == {"title": "boats"}
        again.conversations.delete("a", "conv")
        new.close()
        again.close()

    def test_an_older_server_applies_no_step_and_says_so(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        opened(tmp_path / "store.sqlite", next_step).close()
        store = opened(tmp_path / "store.sqlite")
        with store.database.read() as db:
            assert db.execute(text("SELECT max(version) FROM versions")).scalar_one() == len(ALL_STEPS) + 1
        store.close()
        assert f"has version {len(ALL_STEPS) + 1} and this Holdfast knows {len(ALL_STEPS)}" in caplog.text

    def test_a_schema_two_versions_newer_is_refused_with_both_numbers(self, tmp_path: Path) -> None:
        opened(tmp_path / "store.sqlite", next_step, lambda db: None).close()
        known = len(ALL_STEPS)
        with pytest.raises(StoreError, match=rf"version {known + 2} and this Holdfast knows up to {known}, and works"):
            opened(tmp_path / "store.sqlite")


def shape(db: Connection) -> dict[str, dict[str, Any]]:
    """By table: its columns, each with type and whether an insert may leave it out, and its keys."""
    inspector = sqlalchemy.inspect(db)
    return {
        table: {
            "columns": {
                each["name"]: (str(each["type"]), bool(each["nullable"] or each["default"] is not None))
                for each in inspector.get_columns(table)
            },
            "keys": sorted(
                [str(inspector.get_pk_constraint(table)["constrained_columns"])]
                + [str(each["column_names"]) for each in inspector.get_unique_constraints(table)]
                + [str(each["column_names"]) for each in inspector.get_indexes(table) if each["unique"]]
            ),
        }
        for table in inspector.get_table_names()
    }


def broken_by(step: MigrationStep, db: Connection) -> list[str]:
    """The faults of a step for a server that does not know it."""
    before = shape(db)
    step(db)
    after = shape(db)
    found = [f"the table {table} is gone" for table in before.keys() - after.keys()]
    for table in before.keys() & after.keys():
        old, new = before[table]["columns"], after[table]["columns"]
        found += [f"{table}.{name} was removed or changed" for name in old if new.get(name) != old[name]]
        found += [f"{table}.{name} must be given" for name in new.keys() - old.keys() if not new[name][1]]
        if before[table]["keys"] != after[table]["keys"]:
            found.append(f"{table} has other keys")
    return found


@pytest.fixture
def migrated() -> Iterator[Callable[[int], Connection]]:
    """Gives a database after the first steps, within a transaction."""
    database = Database(MEMORY)
    with database.write() as db:

        def apply(count: int) -> Connection:
            for step in ALL_STEPS[:count]:
                step(db)
            return db

        yield apply
    database.close()


@pytest.mark.parametrize("number", range(len(ALL_STEPS)))
def test_each_migration_step_only_adds(migrated: Callable[[int], Connection], number: int) -> None:
    assert broken_by(ALL_STEPS[number], migrated(number)) == []


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("DROP TABLE items", "the table items is gone"),
        ("ALTER TABLE turns DROP COLUMN characters", "turns.characters was removed or changed"),
        ("ALTER TABLE turns ADD COLUMN mood INTEGER NOT NULL DEFAULT 0", None),
        ("ALTER TABLE turns ADD COLUMN mood INTEGER", None),
        ("CREATE UNIQUE INDEX one_head ON conversations (head)", "conversations has other keys"),
        ("CREATE INDEX heads ON conversations (head)", None),
        (
            "CREATE TABLE lines (x INTEGER NOT NULL); DROP TABLE conversations; "
            "ALTER TABLE lines RENAME TO conversations",
            "conversations.x must be given",
        ),
    ],
)
def test_a_step_that_an_older_server_cannot_work_with_is_found(
    migrated: Callable[[int], Connection], change: str, found: str | None
) -> None:
    def step(db: Connection) -> None:
        for each in change.split("; "):
            db.execute(text(each))

    broken = broken_by(step, migrated(len(ALL_STEPS)))
    assert found in broken if found else broken == []


def test_a_store_as_the_version_before_wrote_it_is_opened_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with sqlite3.connect(path) as db:
        db.executescript((Path(__file__).parent / "schema-7.sql").read_text())
    db.close()
    store = opened(path)
    assert say(store, "three") == ["one", "ONE", "two", "TWO", "three", "THREE"]
    assert store.conversations.get("a", "conv")["metadata"] == {"title": "ships"}
    store.close()


@pytest.fixture(scope="module")
def version_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of the version before."""
    return unpack(tmp_path_factory.mktemp("before"))


def test_the_code_of_the_version_before_works_on_the_store_of_this_one_and_the_reverse(
    version_before: Path, tmp_path: Path
) -> None:
    path = tmp_path / "store.sqlite"

    def old(name: str) -> Any:
        environment = {**os.environ, "PYTHONPATH": str(version_before)}
        command = [sys.executable, "-P", "-c", OLD_SERVER, str(path), name]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert told["code"].startswith(str(version_before))
        return told

    assert old("begin")["texts"] == ["begin", "BEGIN"]
    new = opened(path)
    assert say(new, "new") == ["begin", "BEGIN", "new", "NEW"]
    told = old("again")  # while the new server runs
    assert (told["texts"][2:], told["found"]) == (["new", "NEW", "again", "AGAIN"], 1)
    assert say(new, "last")[-4:] == ["again", "AGAIN", "last", "LAST"]
    new.close()


def test_an_old_and_a_new_server_that_start_at_once_agree_on_the_schema(tmp_path: Path) -> None:
    database = Database(str(tmp_path / "store.sqlite"))
    for more in ((*SCHEMA, next_step), SCHEMA, (*SCHEMA, next_step)):
        with database.write() as db:
            migrate(db, more)
    with database.read() as db:
        assert db.execute(text("SELECT count(*) FROM versions")).scalar_one() == len(ALL_STEPS) + 1
    database.close()
