"""The engine process's side of its parent: the socket between them, and ending when the parent ends."""

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
"""Exit status of an engine process that has sent a Failure."""
LINGER_MS = 2000
"""Time for the last message to leave."""

PR_SET_PDEATHSIG = 1


class Parent:
    """The engine process's connection to its client. For one thread."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        limit_socket(self._socket)
        self._socket.connect(address)

    def send(self, message: FromEngine) -> None:
        """Send a message without waiting for the client to read it."""
        self._socket.send(encode(message))

    def receive(self) -> ToEngine:
        """Wait for the next message. Raises ValueError for an invalid one."""
        return decode_to_engine(self._socket.recv())

    def waiting(self) -> Iterator[ToEngine]:
        """The messages that have arrived. Does not wait for more."""
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield decode_to_engine(data)

    def close(self) -> None:
        """Let the last messages leave, then close the socket."""
        self._socket.close(LINGER_MS)
        self._context.term()


def limit_socket(socket: zmq.Socket[Any]) -> None:
    """Bound the size of a message but not the number of messages: a send must never block."""
    socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_LIMIT)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)


def die_with_parent(parent: int) -> None:
    """End this process when its parent ends, in whatever way, and leave Ctrl-C to the parent.

    The parent holds the other end of our standard input open, so end of file means that it is gone. On Linux the kernel
    also kills this process then, even if it hangs in a device call.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_await_end_of_input, name="holdfast-parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before the prctl call
        os._exit(1)


def _await_end_of_input() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(1)
