"""The engine process as the client sees it: started, spoken to, watched, ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import zmq
import zmq.asyncio

from holdfast.engine.messages import FromEngine, Shutdown, ToEngine, decode_from_engine, encode
from holdfast.engine.parent import FAILED, limit_socket

GRACE_SECONDS = 5.0
"""Time to end after Shutdown, before the process is killed; and for a Failure to arrive after its sender's end."""


class Child:
    """One engine process and the socket to it. For one event loop."""

    def __init__(self, on_end: Callable[[str], None]) -> None:
        """Start the process; `on_end` is told, once and in words, when it ends in whatever way. Raises OSError."""
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._directory = Path(tempfile.mkdtemp(prefix="holdfast-"))  # mode 0700
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self.ended = asyncio.Event()
        """Set when the process is no more."""
        try:
            limit_socket(self._socket)
            address = f"ipc://{self._directory}/engine"
            self._socket.bind(address)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "holdfast.engine", address, str(os.getpid())],
                stdin=subprocess.PIPE,  # its end of file tells the engine that we are gone
                stdout=2,  # what libraries print is no output of the program
                env=_environment(),
                start_new_session=True,  # the terminal's Ctrl-C is ours to answer
            )
        except BaseException:
            self._let_go()
            raise
        threading.Thread(target=self._watch, name="holdfast-watch", daemon=True).start()

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Hand a message over; never waits. The engine must have said hello, and what is sent after its end is lost."""
        self._socket.send(encode(message))

    async def receive(self) -> FromEngine:
        """Wait for the next message. Raises ValueError for one that cannot be read."""
        return decode_from_engine(await self._socket.recv())

    def hide(self) -> None:
        """Take the socket's name off the file system, once the engine is connected: nobody else can be, and whatever
        kills both processes leaves nothing behind."""
        shutil.rmtree(self._directory, ignore_errors=True)

    async def close(self, *, at_once: bool = False) -> None:
        """End the process, in order unless `at_once`, and let go of the socket."""
        try:
            if not at_once and not self.ended.is_set():
                self.send(Shutdown())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.ended.wait(), GRACE_SECONDS)
        finally:
            self.kill()
            self._let_go()
        await self.ended.wait()

    def kill(self) -> None:
        """End the process at once. May be called again."""
        self._process.kill()

    def _let_go(self) -> None:
        self.hide()
        self._socket.close(linger=0)
        self._context.term()

    def _watch(self) -> None:
        """A thread of its own waits for the end: that works in every event loop, in whichever thread it runs."""
        status = self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._note_end, status)

    def _note_end(self, status: int) -> None:
        self.ended.set()
        if status == FAILED:  # its reason is on the way, or was read before
            self._loop.call_later(GRACE_SECONDS, self._on_end, "the engine process failed and gave no reason")
        else:
            self._on_end(f"the engine process {_in_words(status)}")


def _in_words(status: int) -> str:
    if status < 0:
        name = signal.Signals(-status).name
        hint = "; the system may be out of memory" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    return f"ended with exit status {status}"


def _environment() -> dict[str, str]:
    """Ours, in which the engine finds the same `holdfast`: a checkout that is not installed is named to it."""
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parents[2])
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    return environment
