"""EngineProcess: the engine's process before there is a connection to it. Cheap to import, so that it begins early."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Self

from holdfast.core.config import KEY_VARIABLE, OPERATOR_VARIABLE

BUILD, APPS = "holdfast.engine.build", "holdfast.engine.apps"
"""What builds the engine of a language model, and that of an application."""


class EngineProcess:
    """A process that loads PyTorch at once, and waits for the address of its client's socket.

    It ends with us, in whatever way we end. As a context manager it ends no later than the block.
    """

    def __init__(self, device: str = "auto", builder: str = BUILD) -> None:
        """Start the process, from the thread that lives longest. `device` is the config's. Raises OSError.

        `builder` is the module that it loads beside PyTorch.
        """
        self.began = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "holdfast.engine.serve", str(os.getpid()), device, builder],
            stdin=subprocess.PIPE,  # end of file tells the engine that we are gone
            stdout=2,  # what libraries print is not output of the program
            env=child_environment(),
            start_new_session=True,  # the terminal's Ctrl-C must reach only us
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def connect(self, address: str) -> None:
        """Tell the process where its client's socket is. Lost if the process has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{address}\n".encode())
            self._process.stdin.flush()

    def wait(self) -> int:
        """Wait until the process has ended. Returns its exit status."""
        status = self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # an address that was never read
            self._process.stdin.close()
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

    PYTHONPATH is extended so that the engine imports this same `holdfast` from a checkout.
    """
    environment = dict(os.environ)
    for variable in (KEY_VARIABLE, OPERATOR_VARIABLE):
        environment.pop(variable, None)
    root = str(Path(__file__).resolve().parents[2])
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    return environment
