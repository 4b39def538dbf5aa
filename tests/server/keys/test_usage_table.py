"""The usage of keys in SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.server.conversations.database import Database, migrate
from holdfast.server.keys.usage_table import DAY, HOUR, KEPT_COUNTS, KEPT_MINUTES, MINUTE, Slot, UsageTable, Used
from holdfast.server.schema import SCHEMA

NOON = 1_000 * DAY + 12 * HOUR


@pytest.fixture(params=["sqlite", "postgresql"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[UsageTable]:
    where = str(tmp_path / "s.sqlite") if request.param == "sqlite" else request.getfixturevalue("postgresql_schema")
    with closing(Database(where)) as database:
        with database.write() as db:
            migrate(db, SCHEMA)
        yield UsageTable(database)


def slot(minute: int, key: str = "acme", model: str = "tiny", kind: str = "completions", month: str = "m") -> Slot:
    return Slot(kind, key, model, minute, month)


def test_usage_of_several_writes_adds_up_in_minutes_hours_and_days(table: UsageTable) -> None:
    for minute in (NOON, NOON, NOON + 60, NOON + HOUR, NOON + 12 * HOUR):
        table.write("s", {slot(minute): Used(1, 10, 4, 2)}, {}, NOON, "m")
    found = table.buckets("completions", MINUTE, NOON, NOON + HOUR)
    assert [(each.start, each.used) for each in found] == [(NOON, Used(2, 20, 8, 4)), (NOON + 60, Used(1, 10, 4, 2))]
    found = table.buckets("completions", HOUR, NOON, NOON + DAY)
    assert [(each.start - NOON, each.used.requests) for each in found] == [(0, 3), (HOUR, 1), (12 * HOUR, 1)]
    found = table.buckets("completions", DAY, NOON - 12 * HOUR, NOON + DAY)
    assert [(each.start - NOON, each.used.requests) for each in found] == [(-12 * HOUR, 4), (12 * HOUR, 1)]


def test_keys_models_and_kinds_are_apart(table: UsageTable) -> None:
    places = [slot(NOON), slot(NOON, key="b"), slot(NOON, model="m"), slot(NOON, kind="embeddings")]
    table.write("s", {place: Used(number, number) for number, place in enumerate(places, 1)}, {}, NOON, "m")
    found = table.buckets("completions", DAY, 0, 2 * NOON)
    assert {(each.key, each.model, each.used.requests) for each in found} == {
        ("acme", "tiny", 1), ("b", "tiny", 2), ("acme", "m", 3),
    }  # fmt: skip
    assert [each.used.prompt for each in table.buckets("embeddings", DAY, 0, 2 * NOON)] == [4]


def test_a_month_sums_prompts_and_answers_of_all_models(table: UsageTable) -> None:
    used = {slot(NOON): Used(1, 10, 9, 2), slot(NOON, model="x"): Used(1, 100), slot(NOON, month="next"): Used(1, 7)}
    table.write("s", used, {}, NOON, "m")
    assert table.write("s", {slot(NOON): Used(1, 1, 0, 1)}, {}, NOON, "m").spent == {"acme": 114}
    assert table.exchange("s", "next").spent == {"acme": 7}


def test_a_server_learns_the_latest_totals_of_others_only(table: UsageTable) -> None:
    table.write("one", {}, {"acme": (1, 10), "b": (2, 20)}, NOON, "m")
    table.write("one", {}, {"acme": (3, 5)}, NOON, "m")
    found = table.write("two", {}, {"acme": (9, 9)}, NOON, "m")
    assert found.others == {("acme", "one"): (3, 5), ("b", "one"): (2, 20)}
    assert table.exchange("one", "m").others == {("acme", "two"): (9, 9)}


def test_old_minutes_and_ended_servers_are_dropped_and_days_stay(table: UsageTable) -> None:
    table.write("one", {slot(NOON): Used(1, 10)}, {"acme": (1, 1)}, NOON, "m")
    later = NOON + KEPT_MINUTES + MINUTE
    assert table.write("two", {}, {"acme": (1, 1)}, NOON + KEPT_COUNTS, "m").others != {}
    assert table.write("two", {}, {"acme": (2, 2)}, later, "m").others == {}
    assert table.buckets("completions", MINUTE, 0, later) == []
    assert [each.used.prompt for each in table.buckets("completions", DAY, 0, later)] == [10]
