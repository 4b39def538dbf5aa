"""EngineProcess: the engine's process before there is a connection to it. Cheap to import, so that it starts early."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NamedTuple, Protocol, Self, cast

from holdfast.core.config import KEY_VARIABLE, OPERATOR_VARIABLE

BUILD, APPS = "holdfast.engine.process.build", "holdfast.engine.process.apps"
"""Modules that build the engine of a language model, and of an application."""


WAIT_POLICY = "OMP_WAIT_POLICY"
"""The environment variable that says how OpenMP's threads wait for each other."""
BOUNDED_WAITS = {"GOMP_SPINCOUNT": "3000", "KMP_BLOCKTIME": "1"}
"""Environment variables for GNU's OpenMP (turns of a loop, about 0.1 ms) and for Intel's and LLVM's (milliseconds).

A thread that waits for others in a product spins this long, and then sleeps. By default it spins for 10 ms or more, on
a core that another program's thread may have taken from the very thread that it waits for.
"""


class Link(NamedTuple):
    """The address of the client's socket, and the keys to it, for an engine process. No keys on one machine."""

    address: str
    client_key: str = ""
    """The client's public CURVE key. All keys are in Z85. Empty on the same machine, where the socket is a file."""
    public_key: str = ""
    """The engine's own pair of keys (public and secret), or empty."""
    secret_key: str = ""


class Remote(NamedTuple):
    """An engine process on another host, before there is a connection to it."""

    place: str
    """The host, in words."""
    reach: str
    """Our IP address by which the engine's host reaches us."""
    key: str
    """The engine's public key. Nobody else can connect to the client's socket."""


class Process(Protocol):
    """An engine process whose client has yet to connect to it, or waits for its end."""

    began: float
    """Time at which its start began, on our monotonic clock."""
    remote: Remote | None
    """The process on another host; None if it runs on this machine."""

    @property
    def pid(self) -> int:
        """The process id, on its host."""

    def connect(self, link: Link) -> None:
        """Send the process the address of its client's socket. Lost if the process has ended."""

    def wait(self) -> int:
        """Wait, in a thread, until the process has ended. Returns its exit status, negative for a signal's number."""

    def kill(self) -> None:
        """Kill the process. May be called more than once."""


class EngineProcess:
    """A process on this machine that loads PyTorch at once, and waits for the address of its client's socket.

    It ends with us, however we end. As a context manager it ends no later than the block.
    """

    remote: Remote | None = None

    def __init__(
        self, device: str = "auto:0", builder: str = BUILD, *, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start the process, from the thread that lives longest. `device` is the config's `first_device`.

        `builder` is the module that it loads together with PyTorch. `environment` is added to ours. Raises
        OSError.
        """
        self.began = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "holdfast.engine.process.serve", str(os.getpid()), device, builder],
            stdin=subprocess.PIPE,  # end of file shows the engine that we are gone
            stdout=2,  # text that libraries print is not output of the program
            env=child_environment() | dict(environment or {}),
            start_new_session=True,  # the terminal's Ctrl-C must reach only us
        )
        self._input = cast("IO[bytes]", self._process.stdin)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def connect(self, link: Link) -> None:
        """Send the process the address of its client's socket. Lost if the process has ended."""
        with contextlib.suppress(OSError):
            self._input.write(f"{' '.join(link)}\n".encode())
            self._input.flush()

    def wait(self) -> int:
        """Wait until the process has ended. Returns its exit status."""
        status = self._process.wait()
        with contextlib.suppress(OSError):  # an address that was never read
            self._input.close()
        return status

    def kill(self) -> None:
        """Kill the process. May be called more than once."""
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self.wait()


def child_environment() -> dict[str, str]:
    """Our environment without API keys, for a child process.

    PYTHONPATH is extended so that the engine imports this same `holdfast` from a checkout. The waits of OpenMP's
    threads are bounded, unless our environment says how they wait.
    """
    environment = dict(os.environ)
    if not environment.keys() & {WAIT_POLICY, *BOUNDED_WAITS}:
        environment |= BOUNDED_WAITS
    for variable in (KEY_VARIABLE, OPERATOR_VARIABLE):
        environment.pop(variable, None)
    root = str(Path(__file__).resolve().parents[2])
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    return environment
