"""Records of streams in progress: who may take them, and when they end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.server.conversations.leases import LEASE_SECONDS
from holdfast.server.conversations.store import Store
from holdfast.server.conversations.stream_records import KEPT_SECONDS, ResponseInProgress, StreamRecord
from holdfast.server.conversations.values import Bounds

RECORD = StreamRecord("resp_1", "one", b"recipe", None)


class Time:
    """A clock that moves when its test says."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture(params=["sqlite", "postgresql"])
def stores(request: pytest.FixtureRequest, tmp_path: Path, time: Time) -> Iterator[list[Store]]:
    """Three servers over one database."""
    where = str(tmp_path / "s.sqlite") if request.param == "sqlite" else request.getfixturevalue("postgresql_schema")
    bounds = Bounds(seconds=1e9, threads=10, bytes=1 << 30)
    opened = [Store.open(where, bounds, time) for _ in range(3)]
    yield opened
    for store in opened:
        store.close()


def test_only_one_server_takes_the_record_of_an_ended_one(stores: list[Store], time: Time) -> None:
    writer, first, second = stores
    writer.streams.begin(RECORD)
    with pytest.raises(ResponseInProgress):
        first.streams.take("one", "resp_1")
    time.seconds += LEASE_SECONDS + 1
    assert first.streams.find("one", "resp_1") == RECORD
    assert first.streams.take("one", "resp_1")
    with pytest.raises(ResponseInProgress):
        second.streams.take("one", "resp_1")
    assert first.streams.take("one", "resp_1"), "it may take its own again"


def test_a_server_that_renews_its_lease_keeps_its_records(stores: list[Store], time: Time) -> None:
    writer, other, _ = stores
    writer.streams.begin(RECORD)
    for _ in range(5):
        time.seconds += LEASE_SECONDS - 1
        assert writer.leases.renew([writer.leases.server]) == set()
    with pytest.raises(ResponseInProgress):
        other.streams.take("one", "resp_1")


def test_a_later_record_renews_the_lease_itself(stores: list[Store], time: Time) -> None:
    writer, other, _ = stores
    writer.streams.begin(RECORD)
    time.seconds += 10 * LEASE_SECONDS
    writer.streams.begin(RECORD._replace(response="resp_2"))
    with pytest.raises(ResponseInProgress):
        other.streams.take("one", "resp_2")


def test_a_released_server_loses_its_records_and_a_reported_end_counts_at_once(stores: list[Store]) -> None:
    writer, first, second = stores
    for number in (1, 2):
        writer.streams.begin(RECORD._replace(response=f"resp_{number}"))
    assert first.streams.take("one", "resp_2", ended=True)
    first.leases.release(writer.leases.server)
    assert second.streams.take("one", "resp_1")


def test_a_record_belongs_to_its_tenant(stores: list[Store], time: Time) -> None:
    writer, other, _ = stores
    writer.streams.begin(RECORD)
    time.seconds += LEASE_SECONDS + 1
    assert other.streams.find("two", "resp_1") is None and not other.streams.take("two", "resp_1")
    assert not other.streams.take("one", "resp_2")


def test_a_response_is_recorded_once(stores: list[Store]) -> None:
    writer, other, _ = stores
    writer.streams.begin(RECORD)
    for store in (writer, other):
        with pytest.raises(ResponseInProgress):
            store.streams.begin(RECORD._replace(recipe=b"another"))
    assert other.streams.find("one", "resp_1") == RECORD


def test_a_server_drops_its_own_records_only(stores: list[Store]) -> None:
    writer, other, _ = stores
    writer.streams.begin(RECORD)
    other.streams.drop("resp_1")
    assert writer.streams.find("one", "resp_1") == RECORD
    writer.streams.drop("resp_1")
    assert writer.streams.find("one", "resp_1") is None


def test_records_of_servers_that_ended_long_ago_are_removed_and_others_stay(stores: list[Store], time: Time) -> None:
    ended, runs, sweeps = stores
    ended.streams.begin(RECORD)
    runs.streams.begin(RECORD._replace(response="resp_2"))
    for seconds in (KEPT_SECONDS - 1, 2):
        time.seconds += seconds
        runs.leases.renew([runs.leases.server])
        before = sweeps.streams.find("one", "resp_1")
        sweeps.streams.drop_old()
        assert before == RECORD
    assert sweeps.streams.find("one", "resp_1") is None
    assert sweeps.streams.find("one", "resp_2") is not None


def test_a_record_that_its_server_leaves_is_taken_by_another_at_once(stores: list[Store]) -> None:
    writer, other, third = stores
    writer.streams.begin(RECORD)
    other.streams.leave("resp_1")
    with pytest.raises(ResponseInProgress):
        other.streams.take("one", "resp_1")
    writer.streams.leave("resp_1")
    third.streams.drop_old()
    assert other.streams.take("one", "resp_1")
    with pytest.raises(ResponseInProgress):
        third.streams.take("one", "resp_1")


def test_a_record_that_was_left_is_removed_after_a_while(stores: list[Store], time: Time) -> None:
    writer, other, _ = stores
    writer.streams.begin(RECORD)
    writer.streams.leave("resp_1")
    time.seconds += KEPT_SECONDS - 1
    other.streams.drop_old()
    assert other.streams.find("one", "resp_1") == RECORD
    time.seconds += 2
    other.streams.drop_old()
    assert other.streams.find("one", "resp_1") is None
