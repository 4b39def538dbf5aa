"""The client's side of the engine process: starts it, talks to it, watches it, ends it."""

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
"""Time to end after Shutdown before the process is killed, and for a Failure to arrive after its sender has ended."""


class Child:
    """One engine process and the socket to it. For one event loop."""

    def __init__(self, on_end: Callable[[str], None]) -> None:
        """Start the process. `on_end` is called once, with the reason, when it ends in any way. Raises OSError."""
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._directory = Path(tempfile.mkdtemp(prefix="holdfast-"))  # mode 0700
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self.ended = asyncio.Event()
        """Set when the process has ended."""
        try:
            limit_socket(self._socket)
            address = f"ipc://{self._directory}/engine"
            self._socket.bind(address)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "holdfast.engine", address, str(os.getpid())],
                stdin=subprocess.PIPE,  # end of file tells the engine that we are gone
                stdout=2,  # what libraries print is not output of the program
                env=_environment(),
                start_new_session=True,  # the terminal's Ctrl-C must reach only us
            )
        except BaseException:
            self._release()
            raise
        threading.Thread(target=self._watch, name="holdfast-watch", daemon=True).start()

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Send a message without waiting. Valid after the engine's Hello; lost if the engine has ended."""
        self._socket.send(encode(message))

    async def receive(self) -> FromEngine:
        """Wait for the next message. Raises ValueError for an invalid one."""
        return decode_from_engine(await self._socket.recv())

    def hide(self) -> None:
        """Remove the socket's file once the engine is connected.

        No other process can connect then, and nothing is left behind when both processes are killed.
        """
        shutil.rmtree(self._directory, ignore_errors=True)

    async def close(self, *, at_once: bool = False) -> None:
        """End the process, by Shutdown unless `at_once`, and close the socket."""
        try:
            if not at_once and not self.ended.is_set():
                self.send(Shutdown())
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
        self.hide()
        self._socket.close(linger=0)
        self._context.term()

    def _watch(self) -> None:
        """Wait for the process to end, in a thread of its own: this works with every event loop, in any thread."""
        status = self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits
            self._loop.call_soon_threadsafe(self._note_end, status)

    def _note_end(self, status: int) -> None:
        self.ended.set()
        if status == FAILED:  # its Failure is on the way, or was read before
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
    """Our environment, with PYTHONPATH extended so that the engine imports this same `holdfast` from a checkout."""
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parents[2])
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    return environment
