"""StreamTable and Accounts: the limit of a key's requests in progress holds over all servers with one store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from holdfast.server.conversations.store import AsyncStore, Store
from holdfast.server.conversations.values import Bounds
from holdfast.server.keys.accounts import Accounts, KeyMetrics
from holdfast.server.keys.stream_table import SEEN_SECONDS, StreamTable
from holdfast.server.keys.usage_table import Used
from holdfast.server.keys.values import Key, Limits
from holdfast.server.protocol import ApiError
from holdfast.server.schema import SCHEMA


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    postgres = request.param == "postgresql"
    where = request.getfixturevalue("postgresql_schema") if postgres else str(tmp_path / "s.sqlite")
    opened = Store.open(where, Bounds(seconds=1e9, threads=9, bytes=1e9), more=SCHEMA)
    yield opened
    opened.close()


def test_all_servers_together_have_at_most_the_limit(store: Store) -> None:
    table = StreamTable(store.database)
    assert table.enter("a", "acme", 1, 3, 100.0) and table.enter("b", "acme", 2, 3, 100.0)
    assert not table.enter("a", "acme", 2, 3, 100.0)
    assert table.enter("a", "other", 3, 3, 100.0), "another key has its own limit"
    table.leave("b", "acme", 1, 101.0)
    assert table.enter("a", "acme", 2, 3, 101.0)
    table.leave("b", "acme", 0, 102.0)
    assert table.enter("a", "acme", 3, 3, 102.0)


def test_requests_of_a_server_count_until_it_has_not_renewed_them_for_long(store: Store) -> None:
    table = StreamTable(store.database)
    for server in ("ended", "alive"):
        assert table.enter(server, "acme", 1, 2, 100.0)
    table.renew("alive", 100.0 + SEEN_SECONDS)
    assert not table.enter("new", "acme", 1, 2, 100.0 + SEEN_SECONDS)
    assert table.enter("new", "acme", 1, 2, 100.5 + SEEN_SECONDS)
    assert not table.enter("new", "acme", 2, 2, 100.5 + SEEN_SECONDS)


def test_servers_that_ask_at_the_same_time_do_not_exceed_the_limit(store: Store) -> None:
    table, admitted = StreamTable(store.database), list[bool]()

    def ask(server: str) -> None:
        admitted.append(table.enter(server, "acme", 1, 3, 100.0))

    threads = [threading.Thread(target=ask, args=(str(number),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(admitted) == [False] * 5 + [True] * 3


async def test_a_key_is_refused_while_another_server_has_its_requests_and_nothing_is_charged(tmp_path: Path) -> None:
    key = Key(name="acme", tenant="acme", scopes=("use",), created=0.0, limits=Limits(streams=1, requests_per_minute=2))
    stores = [
        AsyncStore(Store.open(str(tmp_path / "s.sqlite"), Bounds(seconds=1e9, threads=9, bytes=1e9), more=SCHEMA))
        for _ in range(2)
    ]
    one, two = (Accounts(each, KeyMetrics(CollectorRegistry())) for each in stores)
    charge = await one.admit(key, 1)
    with pytest.raises(ApiError, match="1 requests in progress at all servers") as refused:
        await two.admit(key, 1)
    assert refused.value.status == 429 and two.headers(key)["x-ratelimit-remaining-requests"] == "2"
    one.settle(charge, "completions", "tiny", Used(1, 1, 0, 1))
    await asyncio.sleep(0)
    two.settle(await two.admit(key, 1), "completions", "tiny", Used(1, 1, 0, 1))
    for accounts, each in zip((one, two), stores, strict=True):
        await accounts.close()
        each.close()
