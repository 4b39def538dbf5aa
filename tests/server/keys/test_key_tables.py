"""The table of keys in SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.server.conversations.database import Database, migrate
from holdfast.server.keys.tables import KeyTable
from holdfast.server.keys.values import Key, Limits
from holdfast.server.schema import SCHEMA


class Clock:
    """Seconds since 1970, set by the test."""

    time = 1000.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["sqlite", "postgresql"])
def table(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[KeyTable]:
    where = str(tmp_path / "s.sqlite") if request.param == "sqlite" else request.getfixturevalue("postgresql_schema")
    with closing(Database(where)) as database:
        with database.write() as db:
            migrate(db, SCHEMA)
        yield KeyTable(database, clock)


def key(name: str = "acme", **fields: object) -> Key:
    return Key(**{"name": name, "tenant": "t", "scopes": ("use",), "created": 1.0, **fields})  # type: ignore[arg-type]


def valid(table: KeyTable, digest: str, now: float) -> bool:
    """Whether a secret is accepted at a time."""
    snapshot = table.snapshot()
    assert snapshot is not None
    return snapshot.secrets[digest].valid(now)


def test_a_key_is_read_as_it_was_added(table: KeyTable) -> None:
    added = key(scopes=("use", "operator"), expires=5000.5, limits=Limits(streams=3, budget_tokens=1 << 40))
    table.add(added, "one")
    assert table.all() == [added]
    snapshot = table.snapshot()
    assert snapshot is not None
    assert snapshot.secrets["one"].key == added


def test_the_version_changes_with_each_change_and_only_then(table: KeyTable) -> None:
    first = table.snapshot()
    assert first is not None and first.secrets == {}
    assert table.snapshot(first.version) is None
    seen = {first.version}
    for change in (
        lambda: table.add(key(), "one"),
        lambda: table.rotate("acme", "two", 0.0),
        lambda: table.limit("acme", {"streams": 2}),
        lambda: table.revoke("acme"),
    ):
        change()
        snapshot = table.snapshot()
        assert snapshot is not None and snapshot.version not in seen
        assert table.snapshot(snapshot.version) is None
        seen.add(snapshot.version)


def test_rotation_ends_the_earlier_secret_after_the_overlap(table: KeyTable, clock: Clock) -> None:
    table.add(key(), "one")
    table.rotate("acme", "two", 100.0)
    assert valid(table, "one", 1099.0) and not valid(table, "one", 1100.0)
    assert valid(table, "two", 1e9)


def test_a_second_rotation_does_not_prolong_the_first_secret(table: KeyTable, clock: Clock) -> None:
    table.add(key(), "one")
    table.rotate("acme", "two", 100.0)
    table.rotate("acme", "three", 5000.0)
    assert not valid(table, "one", 1100.0)
    assert valid(table, "two", 5999.0) and not valid(table, "two", 6000.0)


def test_revoking_ends_all_secrets_of_a_key_and_no_other(table: KeyTable) -> None:
    table.add(key(), "one")
    table.rotate("acme", "two", 1e6)
    table.add(key("other"), "three")
    table.revoke("acme")
    assert not valid(table, "one", 1000.0) and not valid(table, "two", 1000.0)
    assert valid(table, "three", 1000.0)


def test_limits_that_are_not_changed_stay(table: KeyTable) -> None:
    table.add(key(limits=Limits(streams=3, tokens_per_minute=10)), "one")
    changed = table.limit("acme", {"streams": None, "requests_per_minute": 7})
    assert changed.limits == Limits(tokens_per_minute=10, requests_per_minute=7)
    assert table.all()[0].limits == changed.limits


def test_a_name_is_given_once_even_after_its_key_was_revoked(table: KeyTable) -> None:
    table.add(key(), "one")
    with pytest.raises(ValueError, match="acme exists"):
        table.add(key(), "two")
    table.revoke("acme")
    with pytest.raises(ValueError, match="not given again"):
        table.add(key(), "two")
    with pytest.raises(ValueError, match="is revoked"):
        table.rotate("acme", "three", 0.0)


def test_a_secret_belongs_to_one_key(table: KeyTable) -> None:
    table.add(key(), "one")
    with pytest.raises(ValueError, match="already that of the key acme"):
        table.add(key("other"), "one")
    assert [each.name for each in table.all()] == ["acme"]


def test_an_expired_key_is_rotated_only_with_a_later_end(table: KeyTable, clock: Clock) -> None:
    table.add(key(expires=900.0), "one")
    with pytest.raises(ValueError, match="--expires"):
        table.rotate("acme", "two", 0.0)
    assert table.rotate("acme", "two", 0.0, 2000.0).expires == 2000.0
    assert valid(table, "two", 1999.0) and not valid(table, "two", 2000.0)


def test_an_unknown_name_is_refused(table: KeyTable) -> None:
    for change in (lambda: table.revoke("no"), lambda: table.rotate("no", "x", 0.0), lambda: table.limit("no", {})):
        with pytest.raises(ValueError, match="no key named no"):
            change()
