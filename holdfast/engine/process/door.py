"""Door: the address at which clients attach to an engine, a socket with a bounded queue for each of them."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from holdfast.engine import messages
from holdfast.engine.address import endpoint, is_local
from holdfast.engine.curve import OneKey, beat
from holdfast.engine.link import LINGER_MS

QUEUE_LIMIT = 4096
"""Most messages that wait for one client, here and again at the client. Beyond it the client is dropped."""


class Door:
    """A listening socket. Each connection has a key, under which its messages come and go. For one thread."""

    def __init__(self, address: str, key: str = "", limit: int = QUEUE_LIMIT) -> None:
        """Listen at an address, as `engine.address` reads it. `key` is the secret key for TCP.

        Raises ValueError for an address that is none, and OSError if it cannot be used, or is another engine's.
        """
        self._url, self._path = endpoint(address), Path(address) if is_local(address) else None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard = contextlib.ExitStack()
        self.socket = self._context.socket(zmq.ROUTER)
        """The socket, to wait for messages."""
        self.closings: zmq.Socket[bytes] = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        """The socket of reports that connections have closed, to wait for them."""
        try:
            self._limit(limit)
            if self._path is None:
                self._lock(key)
                self._bind(address)
            else:
                self._bind_file(self._path)
        except BaseException:
            self._path = None  # It is not ours.
            self.close()
            raise

    def waiting(self) -> Iterator[tuple[bytes, bytes]]:
        """The messages that have arrived, each with the key of its connection. Does not wait for more."""
        with contextlib.suppress(zmq.Again):
            while True:
                key, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
                yield key, b"".join(frames)

    def send(self, key: bytes, data: bytes) -> str:
        """Send a message without waiting. Returns the reason why the client does not get it; empty if it is queued."""
        try:
            self.socket.send_multipart([key, data], zmq.NOBLOCK)
        except zmq.Again:
            return "it does not read: its queue of messages is full"
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return "its connection is closed"
        return ""

    def take_closings(self) -> int:
        """Number of connections that have closed since the last call. `send` finds out which, a moment later."""
        closed = 0
        with contextlib.suppress(zmq.Again):
            while True:
                self.closings.recv_multipart(zmq.NOBLOCK)
                closed += 1
        return closed

    def close(self) -> None:
        """Let the last messages leave, close the socket, and remove its file."""
        self.socket.disable_monitor()
        self.closings.close(linger=0)
        self.socket.close(LINGER_MS)
        self._guard.close()
        self._context.term()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _limit(self, limit: int) -> None:
        self.socket.setsockopt(zmq.MAXMSGSIZE, messages.MESSAGE_LIMIT)
        self.socket.setsockopt(zmq.SNDHWM, limit)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # A send to a client that has left fails.

    def _lock(self, key: str) -> None:
        """Accept only peers with this secret key, and notice those that are lost."""
        guard = ThreadAuthenticator(self._context)
        guard.start()  # Before the socket listens: libzmq accepts everybody without an authenticator.
        self._guard.callback(guard.stop)
        guard.configure_curve_callback(credentials_provider=OneKey(zmq.curve_public(key.encode()).decode()))
        self.socket.setsockopt(zmq.CURVE_SERVER, 1)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, key.encode())
        self.socket.setsockopt(zmq.IPV6, int("[" in self._url))
        beat(self.socket)

    def _bind_file(self, path: Path) -> None:
        """Listen at a path, in place of an engine that has ended there. Only this user can connect."""
        clear(path)
        before = os.umask(0o177)
        try:
            self._bind(str(path))
        finally:
            os.umask(before)

    def _bind(self, address: str) -> None:
        try:
            self.socket.bind(self._url)
        except zmq.ZMQError as error:
            reason = os.strerror(error.errno) if error.errno is not None else str(error)
            raise OSError(f"cannot listen at {address}: {reason}; choose another --listen") from None


def clear(path: Path) -> None:
    """Remove the socket of an engine that has ended. Raises OSError for a file, and for a socket of a living one."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(f"cannot listen at {path}: it is a file; choose another --listen")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise OSError(f"cannot listen at {path}: another engine does; choose another --listen")
