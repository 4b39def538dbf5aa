"""The engine process's tie to its parent: the socket between them, and dying with it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import zmq

from holdfast.engine.messages import MESSAGE_LIMIT, FromEngine, ToEngine, decode_to_engine, encode

FAILED = 3
"""Exit status of an engine process that sent a Failure first."""
LINGER_MS = 2000
"""Time that the last message has to leave."""

PR_SET_PDEATHSIG = 1


class Parent:
    """The client, seen from the engine process. For one thread."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        limit_socket(self._socket)
        self._socket.connect(address)

    def send(self, message: FromEngine) -> None:
        """Hand a message over; never waits for the client to read it."""
        self._socket.send(encode(message))

    def receive(self) -> ToEngine:
        """Wait for the next message. Raises ValueError for one that cannot be read."""
        return decode_to_engine(self._socket.recv())

    def waiting(self) -> Iterator[ToEngine]:
        """The messages that have arrived, without waiting for more."""
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield decode_to_engine(data)

    def close(self) -> None:
        """Let the last messages leave, then let go."""
        self._socket.close(LINGER_MS)
        self._context.term()


def limit_socket(socket: zmq.Socket[Any]) -> None:
    """Bound the size of a message, not their number: neither end may ever wait for the other in a send."""
    socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_LIMIT)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)


def die_with_parent(parent: int) -> None:
    """End this process when its parent ends, however that ends; and leave Ctrl-C to the parent.

    The parent keeps the other end of our standard input open, so end of file says that it is gone. On Linux the kernel
    tells it too, even to a process that hangs in a device call.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_await_end_of_input, name="holdfast-parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)


def _await_end_of_input() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(1)
