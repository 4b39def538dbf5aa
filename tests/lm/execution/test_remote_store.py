"""The remote tier over a Redis service in this process: blocks that engines share, and a service that fails."""

import socket
import socketserver
import threading
import time

import pytest

from holdfast.core.types import Identity
from holdfast.lm.execution.remote_store import RemoteStore, shown
from holdfast.lm.memory.digests import block_digests
from holdfast.lm.tiers import TierBlock

fakeredis = pytest.importorskip("fakeredis")
SIZE = 5000
IDENTITY = {"weights": "1"}


@pytest.fixture(scope="module")
def url():
    server = fakeredis.TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"redis://127.0.0.1:{server.server_address[1]}/0"
    server.shutdown()
    server.server_close()


def blocks(*numbers):
    return [TierBlock(bytes([number]) * 32, number) for number in numbers]


def data(*numbers):
    """Blocks as two ranks keep them, each with numbers of its own."""
    return [
        (memoryview(bytearray([number]) * 9), memoryview(bytearray([99 - number]) * (SIZE - 9))) for number in numbers
    ]


def test_engines_share_the_blocks_that_one_writes(url):
    one, other = (RemoteStore(url, SIZE, IDENTITY) for _ in range(2))
    assert one.write(blocks(1, 2), data(1, 2)) == ["done", "done"]
    assert other.probe(blocks(1, 3)) == ["done", "missing"]
    targets = data(0, 0, 0)
    assert other.read(blocks(2, 3, 1), targets) == ["done", "missing", "done"]
    assert targets[0] == data(2)[0] and targets[2] == data(1)[0]
    one.close()
    other.close()


def test_a_model_of_other_weights_finds_nothing(url):
    one, other = RemoteStore(url, SIZE, IDENTITY), RemoteStore(url, SIZE, {"weights": "2"})
    one.write(blocks(5), data(5))
    assert other.probe(blocks(5)) == ["missing"]
    one.close()
    other.close()


def test_an_engine_of_another_block_size_finds_nothing(url):
    one, other = RemoteStore(url, SIZE, IDENTITY), RemoteStore(url, SIZE * 2, IDENTITY)
    assert one.write(blocks(6), data(6)) == ["done"]
    assert (one.probe(blocks(6)), other.probe(blocks(6))) == (["done"], ["missing"])
    one.close()
    other.close()


def test_the_order_of_an_identity_s_fields_does_not_matter(url):
    one, other = (RemoteStore(url, SIZE, dict(told)) for told in ([("a", "1"), ("z", "2")], [("z", "2"), ("a", "1")]))
    one.write(blocks(4), data(4))
    assert other.probe(blocks(4)) == ["done"]
    one.close()
    other.close()


def test_a_tenant_finds_nothing_of_another_one(url):
    store, prompt = RemoteStore(url, SIZE, IDENTITY), range(16)
    own, others = (block_digests(Identity(tenant=tenant).root(), prompt, 16)[0] for tenant in ("a", "b"))
    store.write([TierBlock(own, 0)], data(9))
    assert store.probe([TierBlock(own, 0), TierBlock(others, 0)]) == ["done", "missing"]
    store.close()


def test_a_changed_value_is_corrupt(url):
    import redis

    store = RemoteStore(url, SIZE, IDENTITY)
    store.write(blocks(7), data(7))
    with redis.Redis.from_url(url) as client:
        (name,) = [key for key in client.keys("holdfast:*") if key.endswith(bytes([7]) * 32)]
        value = bytearray(client.get(name))
        value[-1] ^= 1
        client.set(name, bytes(value))
    assert store.read(blocks(7), data(0)) == ["corrupt"]
    store.close()


def test_blocks_have_a_lifetime_which_their_use_renews(url):
    import redis

    store = RemoteStore(url, SIZE, IDENTITY, lifetime=1000)
    store.write(blocks(8), data(8))
    with redis.Redis.from_url(url) as client:
        (name,) = [key for key in client.keys("holdfast:*") if key.endswith(bytes([8]) * 32)]
        assert 990 < client.ttl(name) <= 1000
        client.expire(name, 10)
        store.read(blocks(8), data(0))
        assert client.ttl(name) > 990
    store.close()


def test_a_service_that_is_not_there_is_an_outcome_and_takes_no_time():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = RemoteStore(f"redis://127.0.0.1:{port}/0", SIZE, IDENTITY)
    began = time.monotonic()
    assert store.probe(blocks(1)) == store.write(blocks(1), data(1)) == store.read(blocks(1), data(1)) == ["failed"]
    assert time.monotonic() - began < 20
    store.close()


@pytest.mark.parametrize("answer", [b"*many\r\n", b":1x\r\n", b"*1\r\n" * 9999 + b":1\r\n", b",x\r\n", b"_\r\n"])
def test_an_answer_that_is_not_redis_s_is_an_outcome(answer):
    class Other(socketserver.BaseRequestHandler):
        def handle(self):
            while self.request.recv(1 << 16):
                self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store = RemoteStore(f"redis://127.0.0.1:{server.server_address[1]}/0", SIZE, IDENTITY)
        outcomes = [store.check(), *store.write(blocks(1), data(1))]
        store.close()
        server.shutdown()
    assert outcomes == ["failed", "failed"] and store.trouble


def test_a_check_says_whether_the_service_takes_writes_and_why_not(url, monkeypatch):
    import redis

    store = RemoteStore(url, SIZE, {"weights": "checked"})
    assert [store.check(), store.check()] == ["missing", "done"], "the first check leaves a mark"
    said = redis.ReadOnlyError("You can't write against a read only replica.")
    monkeypatch.setattr(redis.client.Pipeline, "execute", lambda *_, **__: [1, said])
    assert store.check() == "failed" and "read only" in store.trouble
    monkeypatch.undo()
    assert store.check() == "done"
    store.close()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = RemoteStore(f"redis://:secret@127.0.0.1:{port}/0", SIZE, IDENTITY)
    assert store.check() == "failed" and "refused" in store.trouble and "secret" not in store.trouble + store.where
    store.close()


def test_another_url_is_refused_without_its_password():
    with pytest.raises(ValueError, match="no URL of a Redis service") as error:
        RemoteStore("http://user:secret@host/", SIZE, IDENTITY)
    assert "secret" not in str(error.value)
    assert shown("redis://user:secret@host:1/2") == "redis://host:1/2"
