"""Calls to a Redis service that answers slowly, without end, or with a value that nobody asked for."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from holdfast.lm.execution import remote_store
from holdfast.lm.execution.remote_store import RemoteStore
from holdfast.lm.tiers import TierBlock

pytest.importorskip("redis")
SIZE = 5000
BLOCK = [TierBlock(bytes(32), 0)]
DRIPS = 3000
"""Number of bytes that a dripping service sends, one each 10 ms: 30 s in all."""


@contextmanager
def store_at(answer: Callable[[Any, bytes], None]) -> Iterator[RemoteStore]:
    """A store at a service that answers each message with `answer(socket, message)`."""

    class Service(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while message := self.request.recv(1 << 16):
                try:
                    answer(self.request, message)
                except OSError:  # the client has left
                    return

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Service) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store = RemoteStore(f"redis://127.0.0.1:{server.server_address[1]}/0", SIZE, {"weights": "1"})
        yield store
        store.close()
        server.shutdown()


def greeting(message: bytes) -> bytes:
    """The answer to a message that opens a connection; empty for any other."""
    return b"%1\r\n+proto\r\n:3\r\n" if b"HELLO" in message else b"+OK\r\n" * message.count(b"CLIENT")


def read(store: RemoteStore) -> list[str]:
    return [*store.read(BLOCK, [(memoryview(bytearray(SIZE)),)])]


@pytest.mark.parametrize("greets", [True, False])
def test_a_service_that_drips_bytes_holds_a_call_no_longer_than_one_that_is_silent(
    monkeypatch: pytest.MonkeyPatch, greets: bool
) -> None:
    monkeypatch.setattr(remote_store, "ANSWER_SECONDS", 0.5)

    def drip(to: Any, message: bytes) -> None:
        if greets and greeting(message):
            to.sendall(greeting(message))
            return
        for _ in range(DRIPS):
            to.sendall(b"+")
            time.sleep(0.01)

    with store_at(drip) as store:
        began = time.monotonic()
        assert read(store) == ["failed"] and "imeout" in store.trouble
        assert time.monotonic() - began < 20


def test_a_value_is_refused_by_the_size_that_the_service_announces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_store, "ANSWER_SECONDS", 15.0)

    def announce(to: Any, message: bytes) -> None:
        to.sendall(greeting(message) or b"$99999999999\r\n")

    with store_at(announce) as store:
        assert read(store) == ["failed"]
        assert "a value of 99999999999 bytes, and the largest has 1053588" in store.trouble


def test_an_answer_without_end_is_cut_off_at_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = [0]

    def flood(to: Any, message: bytes) -> None:
        while sent[0] < 64 << 20:
            to.sendall(b"+" * (1 << 16))
            sent[0] += 1 << 16

    with store_at(flood) as store:
        assert read(store) == ["failed"] and "larger than all that was asked for" in store.trouble
        assert sent[0] < 64 << 20


def test_one_receive_ends_with_its_call() -> None:
    from holdfast.lm.execution.redis_client import CallLimits, LimitedSocket

    limits, (own, peer) = CallLimits(0.05), socket.socketpair()
    with own, peer:
        own.settimeout(30.0)
        began = time.monotonic()
        with limits.of_call(0), pytest.raises(TimeoutError):
            LimitedSocket(own, limits).recv(1)
        assert time.monotonic() - began < 20 and own.gettimeout() == 30.0


def test_a_call_with_large_values_has_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.lm.execution.redis_client import SLOWEST, SPARE_BYTES, CallLimits

    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    limits = CallLimits(2.0)
    with limits.of_call(3 * SLOWEST):
        assert (limits.until, limits.room) == (105.0, SPARE_BYTES + 3 * SLOWEST)
        other: list[float] = []
        thread = threading.Thread(target=lambda: other.append(limits.until))
        thread.start()
        thread.join()
        assert other == [float("inf")], "the call is this thread's"
    assert limits.until == limits.room == float("inf")
