"""The engine process from both sides: Child for its client, Parent for the process itself, a socket between them."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import zmq
import zmq.asyncio

from holdfast.engine import messages
from holdfast.engine.curve import LOST, Doorkeeper, connect, leave
from holdfast.engine.spawn import Link, Process
from holdfast.lm.parts.message import Message

GRACE_SECONDS = 5.0
"""Seconds from Shutdown until the process is killed, and for a Failure to arrive after its sender has ended.
"""
FAILED = 3
"""Exit status of an engine process that has sent a Failure."""
LINGER_MS = 2000
"""Milliseconds for the last message to leave."""

STALE_SECONDS = 3600.0
"""Age in seconds from which a directory belongs to no start: processes find each other within seconds."""

LINK_LIMIT = 4096
"""Most bytes of the line with the socket's address and keys."""

PR_SET_PDEATHSIG = 1


class Child:
    """One engine process and the socket to it. For one event loop."""

    def __init__(self, on_end: Callable[[str], None], process: Process) -> None:
        """Connect to a new process. `on_end` is called once, with the reason, when it ends in any way. Raises OSError.

        If this fails, the process is killed.
        """
        self._loop, self._on_end, self._process = asyncio.get_running_loop(), on_end, process
        self._lost = False
        self.ended = asyncio.Event()
        """Set when the process has ended."""
        try:
            self._context = zmq.asyncio.Context()
            self._socket = self._context.socket(zmq.DEALER)
            try:
                limit_socket(self._socket)
                self._door = self._open_door()
            except BaseException:
                self._socket.close(linger=0)
                self._context.term()
                raise
        except BaseException:
            process.kill()
            process.wait()
            raise
        process.connect(self._door.link)
        threading.Thread(target=self._watch, name="holdfast-watch", daemon=True).start()

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    def send(self, message: messages.ToEngine) -> None:
        """Send a message without waiting. Valid after the engine's Hello; lost if the engine has ended."""
        sent = asyncio.ensure_future(self._socket.send(messages.encode(message)))
        if self._door.is_watched and not sent.done() and not self._lost:
            self._lost = True
            self._on_end(f"the connection to the engine process{self._door.where} was lost")
            self._process.kill()

    async def receive(self) -> messages.FromEngine:
        """Wait for the next message. Raises ValueError for an invalid one."""
        while True:
            try:
                return messages.decode_from_engine(await self._socket.recv())
            except zmq.Again:  # the peer left between the poll and the read; `send` notices if that was the engine
                pass

    def hide(self) -> None:
        """Remove the socket's file once the engine is connected.

        No other process can connect then, and no file is left when both processes are killed.
        """
        self._door.hide()

    async def close(self, *, at_once: bool = False) -> None:
        """End the process, by Shutdown unless `at_once`, and close the socket."""
        try:
            if not at_once and not self.ended.is_set():
                self.send(messages.Shutdown())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.ended.wait(), GRACE_SECONDS)
        finally:
            self.kill()
            self._release()
        await self.ended.wait()

    def kill(self) -> None:
        """Kill the process. May be called more than once."""
        self._process.kill()

    def _release(self) -> None:
        self._door.close()
        self._socket.close(linger=0)
        self._context.term()

    def _open_door(self) -> LocalDoor | Doorkeeper:
        """Listen for the engine, where it runs. Raises OSError."""
        remote = self._process.remote
        return LocalDoor(self._socket) if remote is None else Doorkeeper(self._context, self._socket, remote)

    def _watch(self) -> None:
        """Wait for the process to end, in a separate thread: this works with every event loop, in any thread."""
        status = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits
            self._loop.call_soon_threadsafe(self._note_end, status)

    def _note_end(self, status: int) -> None:
        self.ended.set()
        if status == FAILED:  # its Failure is on the way, or was read before
            self._loop.call_later(GRACE_SECONDS, self._on_end, "the engine process failed and gave no reason")
        else:
            self._on_end(f"the engine process{self._door.where} {in_words(status)}")


class LocalDoor:
    """Listens for one engine on this host, at a socket whose file only this user can reach."""

    where = ""
    """The engine's host in words that can follow "process"."""
    is_watched = False
    """Whether a message that waits means that the engine is lost."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        """Bind the socket. Raises OSError."""
        remove_stale_sockets()
        self._directory = Path(tempfile.mkdtemp(prefix="holdfast-"))  # mode 0700
        self.link = Link(f"ipc://{self._directory}/engine")
        """The address that the engine needs to connect."""
        try:
            socket.bind(self.link.address)
        except BaseException:
            self.hide()
            raise

    def hide(self) -> None:
        """Remove the socket's file: no other process can connect."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        """Leave, and delete the socket's directory. May be called more than once."""
        self.hide()


def remove_stale_sockets() -> None:
    """Remove the socket directories of starts that were killed before their engine was connected."""
    for left in Path(tempfile.gettempdir()).glob("holdfast-*/engine"):
        with contextlib.suppress(OSError):  # another user's, or removed by another start
            if left.is_socket() and time.time() - left.parent.stat().st_mtime > STALE_SECONDS:
                left.unlink()
                left.parent.rmdir()


def in_words(status: int) -> str:
    """How a process ended, as a clause: `was killed by SIGSEGV`."""
    if status < 0:
        name = signal.Signals(-status).name
        hint = "; the system may be out of memory" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    if status == LOST:
        return "was lost: its host or the network to it has failed"
    return f"ended with exit status {status}"


class Parent:
    """The engine process's connection to its client. For one thread."""

    def __init__(self, link: Link) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        limit_socket(self._socket)
        self._watched = bool(link.client_key)
        if self._watched:
            connect(self._socket, link)
        else:
            self._socket.connect(link.address)
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)

    def send(self, message: Message) -> None:
        """Send a message without waiting for the client to read it."""
        self._socket.send(messages.encode(message))

    def watch(self, socket: zmq.Socket[bytes]) -> None:
        """Let messages at another socket of this thread end `poll` and `wait`, too."""
        self._poller.register(socket, zmq.POLLIN)

    def poll(self, seconds: float) -> bool:
        """Whether a message arrives within `seconds`. A call of `wake` in another thread counts, as for `wait`."""
        return bool(self._poller.poll(int(seconds * 1000)))

    def wait(self, seconds: float | None = None) -> None:
        """Wait at most `seconds` for a message, or a call of `wake` in another thread, even one since the last wait."""
        self._poller.poll(None if seconds is None else int(1000 * seconds))
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 1 << 16)

    def wake(self) -> None:
        """End a wait. May be called in any thread, unlike the other methods."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so the wait ends anyway
            os.write(self._wake, b".")

    def receive(self) -> list[messages.ToEngine]:
        """Wait for the next message; empty if another thread calls `wake` first. Raises ValueError if it is invalid."""
        self.wait()
        return [*itertools.islice(self.waiting(), 1)]

    def waiting(self) -> Iterator[messages.ToEngine]:
        """The messages that have arrived. Does not wait for more."""
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield messages.decode_to_engine(data)

    def close(self) -> None:
        """Let the last messages leave, then close the socket. No other thread may call `wake` after this."""
        if self._watched:
            leave(self._socket)
        self._socket.close(LINGER_MS)
        self._context.term()
        os.close(self._woken)
        os.close(self._wake)


def limit_socket(socket: zmq.Socket[Any]) -> None:
    """Bound the size of a message but not the number of messages: a send must never block."""
    socket.setsockopt(zmq.MAXMSGSIZE, messages.MESSAGE_LIMIT)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, even if it hangs in a device call; leave Ctrl-C to it.

    Only Linux does so; `exit_at_end_of_input` works everywhere.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the prctl call
        os._exit(1)


def await_link() -> Link:
    """The address and keys of the parent's socket, from the first line of standard input.

    Ends this process without one.
    """
    line = b""
    while not line.endswith(b"\n"):
        got = os.read(0, LINK_LIMIT)
        if not got:
            os._exit(1)
        line += got
    return Link(*line.decode().rstrip("\n").split(" "))


def exit_at_end_of_input() -> None:
    """End this process, from a thread, when the parent has ended and so closed our standard input."""
    threading.Thread(target=_await_end_of_input, name="holdfast-parent", daemon=True).start()


def end_process(status: int) -> NoReturn:
    """End this process: run its exit handlers, and leave its memory to the system.

    The interpreter is not finalised, because Triton's bindings would report all objects still alive as leaks.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it now
            stream.flush()
    os._exit(status)


def _await_end_of_input() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(1)


def one_line(error: Exception) -> str:
    """An error as one line of Unicode. Names the error's class unless its message is written for people."""
    # A damaged file may have given it half of a surrogate pair, which no message and no terminal takes.
    text = " ".join(str(error).split()).encode(errors="backslashreplace").decode()
    own = type(error).__module__.startswith("holdfast.")
    expected = own or isinstance(error, (ValueError, MemoryError, OSError))
    return text if expected and text else f"{type(error).__name__}: {text}" if text else type(error).__name__
