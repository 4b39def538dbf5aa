"""A client of a Redis service each of whose calls ends in time and receives no more than its answer may have.

redis-py counts its time limit anew for each receive, so a service that sends a byte now and then would hold a call for
ever; and it reads a value of any size that the service announces.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

import redis
from redis._parsers.socket import SocketBuffer
from redis.backoff import NoBackoff
from redis.exceptions import InvalidResponse
from redis.retry import Retry

SLOWEST = 32 << 20
"""Bytes per second at which values must at least come and go: they lengthen a call's time limit."""
SPARE_BYTES = 1 << 20
"""Bytes that an answer may have besides the values that it is asked for."""


class CallLimits(threading.local):
    """Limits of the call that a thread makes now; none between calls."""

    until: float = inf
    """Time on the monotonic clock by which the call must end."""
    room: float = inf
    """Number of bytes that the call may still receive."""

    def __init__(self, seconds: float) -> None:
        """`seconds` is the longest time of a call that moves no values."""
        self._seconds = seconds

    @contextmanager
    def of_call(self, value_bytes: int) -> Iterator[None]:
        """Limit the call inside the block. Its values have `value_bytes` bytes together."""
        self.until = time.monotonic() + self._seconds + value_bytes / SLOWEST
        self.room = SPARE_BYTES + value_bytes
        try:
            yield
        finally:
            del self.until, self.room


class LimitedSocket:
    """A connection's socket, whose receives and sends keep the limits of the call. It raises OSError beyond them."""

    def __init__(self, own: socket.socket, limits: CallLimits) -> None:
        self._own, self._limits = own, limits

    def recv(self, size: int) -> bytes:
        with self._in_time():
            data = self._own.recv(size)
        self._limits.room -= len(data)
        if self._limits.room < 0:
            raise OSError("the answer is larger than all that was asked for")
        return data

    def sendall(self, data: Any) -> None:
        with self._in_time():
            self._own.sendall(data)

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        """Shorten the socket's own time limit to the rest of the call's. Raises TimeoutError if there is none."""
        before, left = self._own.gettimeout(), self._limits.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the call has taken too long")
        if left < (inf if before is None else before):
            self._own.settimeout(left)
        try:
            yield
        finally:
            self._own.settimeout(before)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


class LimitedBuffer:
    """Bytes received from a socket. Refuses a value by its announced size."""

    def __init__(self, own: SocketBuffer, most: int) -> None:
        self._own, self._most = own, most

    def read(self, length: int, *rest: Any, **named: Any) -> bytes:
        if not 0 <= length <= self._most:
            raise InvalidResponse(f"the service announced a value of {length} bytes, and the largest has {self._most}")
        data: bytes = self._own.read(length, *rest, **named)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def limited_client(
    url: str, *, value_bytes: int, connect_seconds: float, answer_seconds: float
) -> tuple[redis.Redis, CallLimits]:
    """A client of the service at a URL, for values of about `value_bytes`, and the limits to make its calls in.

    `connect_seconds` is the longest time to connect, and `answer_seconds` the longest call without values. Raises
    ValueError for another URL.
    """
    limits = CallLimits(answer_seconds)

    def begin(connection: Any) -> None:
        connection._sock = LimitedSocket(connection._sock, limits)
        connection.on_connect()
        parser = connection._parser
        if isinstance(parser._buffer, SocketBuffer):  # with hiredis, `CallLimits.room` alone limits an answer
            parser._buffer = LimitedBuffer(parser._buffer, value_bytes + SPARE_BYTES)

    client = redis.Redis.from_url(
        url,
        socket_connect_timeout=connect_seconds,
        socket_timeout=answer_seconds,
        retry=Retry(NoBackoff(), 0),  # no retry here: `LowerTiers` avoids a service that has failed
        redis_connect_func=begin,
    )
    return client, limits
