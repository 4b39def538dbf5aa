"""A process that has loaded PyTorch and the engine, and forks the processes of ranks and engines that tests start.

Loading takes each of them about two seconds, and more than their work in most tests. A forked process runs the same
module as the program that the test asks for, and is a child of the test's process as well.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import inspect
import json
import os
import runpy
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from holdfast.engine.spawn import child_environment

PROGRAMS = ("holdfast.engine.ranks.work", "holdfast.engine.process.serve")
"""Modules that are forked. Any other command is started as always."""
LOADED = ("torch", "holdfast.engine.process.build", "holdfast.engine.ranks.paged", "holdfast.engine.ranks.tuning")
"""Modules that the server loads."""
PR_SET_CHILD_SUBREAPER = 36
HIGH = 600
"""File descriptors from here on are the server's own, and those of tests are lower."""
MESSAGE_BYTES, MOST_DESCRIPTORS = 1 << 17, 64


class Start(NamedTuple):
    """A process to fork, but for its file descriptors."""

    arguments: Sequence[str]
    """The module, and what follows it in the command."""
    environment: dict[str, str]
    directory: str
    targets: Sequence[int]
    """By descriptor that comes with the message: its number in the process."""
    parent: int
    new_session: bool


class ForkServer:
    """The server's process, seen from the tests' one. It starts at the first fork, which waits until it has loaded."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def _start(self) -> subprocess.Popen[bytes]:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=child_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )

    def fork(self, start: Start, descriptors: Sequence[int]) -> int:
        """Fork a process with these file descriptors. Returns its process id."""
        self._process = self._process or self._start()
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans become our children
        try:
            socket.send_fds(self._socket, [json.dumps(start).encode()], descriptors)
            pid = self._socket.recv(MESSAGE_BYTES)
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0)
        if not pid:
            raise RuntimeError(f"the fork server ended with status {self._process.wait()}")
        return int(pid)

    def close(self) -> None:
        """End it, if it has started. What it has forked runs on."""
        if self._process:
            self._socket.close()
            self._process.wait()


@contextmanager
def forking(server: ForkServer) -> Iterator[None]:
    """Meanwhile, `subprocess.Popen` has the server fork the processes of PROGRAMS."""
    execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    signature = inspect.signature(execute)

    def fork_or_execute(self: Any, *args: Any) -> None:
        given = signature.bind(self, *args).arguments
        command = given["args"]
        if isinstance(command, str) or [*command[:3]] != [sys.executable, "-P", "-m"] or command[3] not in PROGRAMS:
            execute(self, *args)
            return
        start = Start(
            command[3:],
            dict(os.environ if given["env"] is None else given["env"]),
            str(given["cwd"] or Path.cwd()),
            [0, 1, 2, *given["pass_fds"]],
            os.getpid(),
            given["start_new_session"],
        )
        streams = (given["p2cread"], given["c2pwrite"], given["errwrite"])
        inherited = [ours if theirs == -1 else theirs for ours, theirs in enumerate(streams)]
        self.pid = server.fork(start, [*inherited, *given["pass_fds"]])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))

    subprocess.Popen._execute_child = fork_or_execute  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


def serve(number: int) -> None:
    """Fork what is asked for until the tests' process closes its socket."""
    for name in LOADED:
        __import__(name)
    for name in PROGRAMS:  # each process runs its own as the main module
        sys.modules.pop(name, None)
    gc.collect()
    gc.freeze()
    requests = socket.socket(fileno=fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, HIGH))
    os.close(number)
    while True:
        data, descriptors, *_ = socket.recv_fds(requests, MESSAGE_BYTES, MOST_DESCRIPTORS)
        if not data:
            return
        fork_orphan(requests, Start(*json.loads(data)), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def fork_orphan(requests: socket.socket, start: Start, descriptors: Sequence[int]) -> None:
    """Fork a process whose parent has ended, so that it becomes a child of the tests' process. Answers its id."""
    read, write = os.pipe()
    if between := os.fork():
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            pid = pipe.read()
        os.waitpid(between, 0)
        requests.send(pid)
        return
    between = os.getpid()
    if os.fork():
        os._exit(0)
    if start.new_session:  # before the tests know of the process, as when it starts an interpreter
        os.setsid()
    os.write(write, str(os.getpid()).encode())
    os.close(write)
    become(start, descriptors, between)


def become(start: Start, descriptors: Sequence[int], between: int) -> NoReturn:
    """Run the program of `start` in this process once its parent, `between`, has ended, and end this process."""
    while os.getppid() == between:
        os.sched_yield()
    high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, HIGH) for each in descriptors]
    os.closerange(0, HIGH)
    for source, target in zip(high, start.targets, strict=True):
        os.dup2(source, target)
    os.closerange(HIGH, HIGH + 2 * len(high) + 8)
    os.chdir(start.directory)
    os.environ.clear()
    os.environ.update(start.environment)
    sys.argv = [*start.arguments]
    module = start.arguments[0]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    os._exit(0)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's, of forks of several threads: there is one
    serve(int(sys.argv[1]))
