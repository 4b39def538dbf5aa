"""Engine processes that tests fork from a template, which has imported PyTorch and the engine. They start at once.

`Forking` stands in for the module `subprocess` where an engine or a rank is started. The template does what the new
process would do: it takes over the descriptors, the environment and the arguments, and calls the same `main`.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, NoReturn, Self, cast

PROGRAMS = ("holdfast.engine.process.serve", "holdfast.engine.ranks.work")
"""Modules with a `main` that takes the parent's process id, and then the other arguments."""
PRELOADED = ("torch", "holdfast.engine.process.build", "holdfast.engine.ranks.paged")
ORDER_BYTES, MOST_FILES = 1 << 17, 64
"""Most bytes of an order, which is one packet, and most descriptors with it."""
START_SECONDS = 120.0
"""Most seconds until a process is forked. The first one waits for the template's imports."""
HIGH = 512
"""Descriptors from here on are free in a new process."""


class Forked:
    """A forked process, with what engines use of `subprocess.Popen`."""

    def __init__(self, pid: int, ended: Future[int], stdin: IO[bytes]) -> None:
        self.pid, self.stdin, self._ended = pid, stdin, ended

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        try:
            return self._ended.result(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0) from None

    def kill(self) -> None:
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError):  # the report of its end is on the way
                os.kill(self.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stdin.close()
        self.wait()


class Forking:
    """The module `subprocess`, whose `Popen` forks engines and ranks. Other processes start as usual."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._template: list[Template] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, command: Sequence[str], **options: Any) -> Any:
        """Start a process. The arguments are those that `holdfast.engine` gives to `subprocess.Popen`."""
        is_known = [*command[:3]] == [sys.executable, "-P", "-m"] and command[3] in PROGRAMS
        if not is_known or sys.platform != "linux":  # others have no descriptors of processes
            return subprocess.Popen(command, **options)
        assert options.pop("stdin") == subprocess.PIPE and options.pop("stdout") == 2
        with self._lock:
            if not self._template:
                self._template.append(Template())
            return self._template[0].fork(command[3], command[5:], **options)

    def close(self) -> None:
        """End the template, and with it all that was forked."""
        for template in self._template:
            template.close()


class Template:
    """The process from which others are forked."""

    def __init__(self) -> None:
        from holdfast.engine.spawn import child_environment

        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = child_environment()
        root = str(Path(__file__).parents[1])
        environment["PYTHONPATH"] = os.pathsep.join((root, environment.get("PYTHONPATH", "")))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.forked", str(other.fileno())],
            pass_fds=[other.fileno()],
            env=environment,
            cwd=root,
            start_new_session=True,
        )
        other.close()
        self._ordered: list[Future[tuple[int, Future[int]]]] = []
        """For each process that was ordered and not forked yet, in this order: its id and its exit status."""
        self._running: dict[int, Future[int]] = {}
        """The exit status of each process that runs, by its id."""
        self._reader = threading.Thread(target=self._read, name="forked", daemon=True)
        self._reader.start()

    def fork(
        self,
        program: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        *,
        start_new_session: bool = False,
    ) -> Forked:
        """Start a process. For one thread at a time."""
        theirs, ours = os.pipe()
        order = {
            "program": program,
            "arguments": arguments,
            "environment": dict(env),
            "directory": str(Path.cwd()),
            "descriptors": [0, 1, 2, *pass_fds],
            "session": start_new_session,
        }
        forked: Future[tuple[int, Future[int]]] = Future()
        self._ordered.append(forked)
        socket.send_fds(self._socket, [json.dumps(order).encode()], [theirs, 2, 2, *pass_fds])
        os.close(theirs)
        return Forked(*forked.result(START_SECONDS), os.fdopen(ours, "wb"))

    def close(self) -> None:
        """End this process. What was forked ends with it."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()
        self._reader.join()
        self._socket.close()

    def _read(self) -> None:
        """Take the template's messages: a process was forked, or has ended."""
        while data := self._socket.recv(ORDER_BYTES):
            pid, status = json.loads(data)
            if status is None:
                self._running[pid] = Future()
                self._ordered.pop(0).set_result((pid, self._running[pid]))
            else:
                self._running.pop(pid).set_result(status)
        for ended in self._running.values():
            ended.set_result(-signal.SIGKILL)  # by the kernel, as their parent has ended
        for forked in self._ordered:
            forked.set_exception(RuntimeError("the process from which engines are forked has ended, and said why"))


def serve(connection: socket.socket) -> NoReturn:
    """Fork a process for each order, and report its end, until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    for name in (*PRELOADED, *PROGRAMS):
        importlib.import_module(name)
    gc.freeze()
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    running: dict[int, int] = {}  # process ids by their descriptors
    while True:
        for ready, _ in poll.poll():
            if ready in running:
                poll.unregister(ready)
                pid = running.pop(ready)
                os.close(ready)
                report(connection, pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                continue
            order, files, _, _ = socket.recv_fds(connection, ORDER_BYTES, MOST_FILES)
            if not order:
                os._exit(0)
            pid = os.fork()
            if not pid:
                for other in (connection.fileno(), *running):
                    os.close(other)
                become(json.loads(order), files)
            for file in files:
                os.close(file)
            report(connection, pid, None)
            running[os.pidfd_open(pid)] = pid
            poll.register([*running][-1], select.POLLIN)


def report(connection: socket.socket, pid: int, status: int | None) -> None:
    """Tell the test's process that a process was forked, or how it has ended."""
    try:
        connection.send(json.dumps((pid, status)).encode())
    except OSError:  # nobody listens: all ends
        os._exit(0)


def become(order: Mapping[str, Any], files: Sequence[int]) -> NoReturn:
    """Be the process that was ordered. `files` are its descriptors, in the order's order."""
    try:
        if order["session"]:
            os.setsid()
        high = [fcntl.fcntl(file, fcntl.F_DUPFD, HIGH) for file in files]
        for file in files:
            os.close(file)
        for file, wanted in zip(high, order["descriptors"], strict=True):
            os.dup2(file, wanted)
            os.close(file)
        os.chdir(order["directory"])
        os.environ.clear()
        os.environ.update(order["environment"])
        first = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
        sys.path[:] = [*first, *(each for each in sys.path if each not in first)]
        sys.argv[1:] = order["arguments"]
        gc.enable()
        module = importlib.import_module(order["program"])
        module.end_process(module.main(os.getppid(), *order["arguments"]))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(cast("str", sys.argv[1]))))
