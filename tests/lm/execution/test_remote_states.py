"""Recurrent states in a Redis service: found by the block before them, whole or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from redis import Redis

from holdfast.lm.execution import remote_states
from holdfast.lm.execution.remote_states import RemoteStateStore
from holdfast.lm.tiers import Pieces, StateAbout, TierBlock

fakeredis = pytest.importorskip("fakeredis")
SIZE = 3000
IDENTITY = {"weights": "1"}


@pytest.fixture
def url() -> Iterator[str]:
    server = fakeredis.TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"redis://127.0.0.1:{server.server_address[1]}/0"
    server.shutdown()
    server.server_close()


def parent(number: int) -> bytes:
    return bytes([number]) * 32


def state(number: int, after: int) -> tuple[TierBlock, Pieces]:
    """A state with its description: the one with this number after a block."""
    about = StateAbout(40, parent(after) + b"key %d" % number, 1).packed()
    return TierBlock(bytes([number + 100]) * 32, 0), (
        memoryview(bytearray(about)),
        memoryview(bytearray([number]) * (SIZE - len(about))),
    )


def empty() -> Pieces:
    return (memoryview(bytearray(SIZE)),)


def test_a_state_is_found_by_the_block_before_it_and_read_by_another_engine(url: str) -> None:
    one, other = (RemoteStateStore(url, SIZE, IDENTITY) for _ in range(2))
    block, data = state(1, after=5)
    assert one.write([block], [data]) == ["done"]
    asked = [TierBlock(parent(number), number) for number in (4, 5)]
    assert other.find(asked) == (["missing", "done"], (b"key 1",))
    target = empty()
    assert other.read([block], [target]) == ["done"]
    assert b"".join(target) == b"".join(data)
    for store in (one, other):
        store.close()


def test_the_states_after_the_last_blocks_are_found_first(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_states, "MOST_FOUND", 2)
    store = RemoteStateStore(url, SIZE, IDENTITY)
    for number, after in ((1, 5), (2, 6), (3, 7)):
        block, data = state(number, after)
        store.write([block], [data])
    asked = [TierBlock(parent(number), number) for number in (5, 6, 7)]
    assert store.find(asked) == (["done"] * 3, (b"key 3", b"key 2"))
    store.close()


def test_a_list_keeps_the_states_that_were_written_last(url: str) -> None:
    store = RemoteStateStore(url, SIZE, IDENTITY)
    for number in range(remote_states.MOST_AFTER + 2):
        block, data = state(number, after=5)
        assert store.write([block], [data]) == ["done"]
    _, found = store.find([TierBlock(parent(5), 0)])
    assert found == tuple(b"key %d" % number for number in reversed(range(2, remote_states.MOST_AFTER + 2)))
    with Redis.from_url(url) as client:
        (name,) = (each for each in client.scan_iter() if b"after:" in each)
        assert client.zcard(name) == remote_states.MOST_AFTER
    store.close()


def test_lists_and_states_live_from_their_last_use_on(url: str) -> None:
    store = RemoteStateStore(url, SIZE, IDENTITY, lifetime=1000)
    block, data = state(1, after=5)
    store.write([block], [data])
    with Redis.from_url(url) as client:
        names = client.keys()
        assert len(names) == 2 and all(0 < client.ttl(name) <= 1000 for name in names)
        for name in names:
            client.expire(name, 5)
        store.read([block], [empty()])
        assert all(client.ttl(name) > 900 for name in names)
    store.close()


def test_a_list_that_is_no_list_is_a_failure_and_no_error(url: str) -> None:
    store = RemoteStateStore(url, SIZE, IDENTITY)
    block, data = state(1, after=5)
    store.write([block], [data])
    with Redis.from_url(url) as client:
        (name,) = (each for each in client.scan_iter() if b"after:" in each)
        client.set(name, b"other")
        assert store.find([TierBlock(parent(5), 0)]) == (["failed"], ())
        assert store.write([block], [data]) == ["failed"], "nobody would find it"
    store.close()


def test_a_state_of_another_layout_is_not_found(url: str) -> None:
    one, other = RemoteStateStore(url, SIZE, IDENTITY), RemoteStateStore(url, SIZE, {"weights": "2"})
    block, data = state(1, after=5)
    one.write([block], [data])
    assert other.find([TierBlock(parent(5), 0)]) == (["missing"], ())
    for store in (one, other):
        store.close()
