"""Processes that tests fork from a template, which has imported PyTorch, the engine and the server. They start at once.

`Forking` stands in for the module `subprocess` where an engine, a rank or the `holdfast` command is started. The
template does what the new process would do: it takes over the descriptors, the environment and the arguments, and
calls the same `main`. A forked `holdfast serve` forks its first engine in turn, so that this is its own child, as an
engine forks its ranks.
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
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NoReturn, Self, cast

ENGINE, RANK = PROGRAMS = ("holdfast.engine.process.serve", "holdfast.engine.ranks.work")
"""Modules with a `main` that takes the parent's process id, and then the other arguments."""
COMMAND = "holdfast.cli"
"""The module that runs as the `holdfast` command."""
PRELOADED = ("torch", "holdfast.engine.process.build", "holdfast.engine.ranks.paged", "holdfast.cli.command")
LOADED_BY_COMMANDS = ("holdfast.cli.serve",)
"""What commands import once they run. It comes last, as an engine needs none of it."""
ORDER_BYTES, MOST_FILES = 1 << 17, 64
"""Most bytes of an order, which is one packet, and most descriptors with it."""
START_SECONDS = 120.0
"""Most seconds until a process is forked. The first one waits for the template's imports."""
CONSTANTS = "HOLDFAST_TEST_CONSTANTS"
"""Variable with other values for constants of modules, as JSON by their full names, in a forked `holdfast` command."""
LOADING = "holdfast-load"
"""The name of the engine's thread that loads modules."""
HIGH = 512
"""Descriptors from here on are free in a new process."""


class Forked:
    """A forked process, with what engines and tests use of `subprocess.Popen`."""

    def __init__(
        self,
        pid: int,
        ended: Future[int],
        stdin: IO[bytes] | None = None,
        stdout: IO[str] | None = None,
        stderr: IO[str] | None = None,
    ) -> None:
        self.pid, self._ended = pid, ended
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr

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

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return what is left of standard output and of standard error, once the process has ended."""
        assert self.stdout is not None and self.stderr is not None
        with ThreadPoolExecutor(1) as reader:
            errors = reader.submit(self.stderr.read)
            output = self.stdout.read()
        self.wait(timeout)
        return output, errors.result()

    def send_signal(self, number: int) -> None:
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError):  # the report of its end is on the way
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                file.close()
        self.wait()


class Forking:
    """The module `subprocess`, whose `Popen` forks engines, ranks and commands. Other processes start as usual."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._template: list[Template] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, command: Sequence[str], **options: Any) -> Any:
        """Start a process. The arguments are those that `holdfast.engine` and `served` give to `subprocess.Popen`."""
        is_command = [*command[:3]] == [sys.executable, "-m", COMMAND]
        is_forked = (is_command or is_program(command)) and sys.platform == "linux"
        if not is_forked:  # other systems have no descriptors of processes
            return subprocess.Popen(command, **options)
        with self._lock:
            if not self._template:
                self._template.append(Template())
            template = self._template[0]
            if not is_command:
                assert options.pop("stdin") == subprocess.PIPE and options.pop("stdout") == 2
                return template.fork_program(command[3], command[5:], **options)
            assert options.pop("stdout") == options.pop("stderr") == subprocess.PIPE and options.pop("text")
            return template.fork_command(command[3:], **options)

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

    def fork_program(
        self,
        program: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        *,
        start_new_session: bool = False,
    ) -> Forked:
        """Start an engine or a rank. For one thread at a time."""
        theirs, ours = os.pipe()
        try:
            order = order_of(program, arguments, env, Path.cwd(), pass_fds, session=start_new_session)
            return Forked(*self._fork(order, [theirs, 2, 2, *pass_fds]), os.fdopen(ours, "wb"))
        finally:
            os.close(theirs)

    def fork_command(self, arguments: Sequence[str], env: Mapping[str, str], cwd: Path) -> Forked:
        """Start the `holdfast` command, whose output is read. For one thread at a time."""
        output, errors = os.pipe(), os.pipe()
        try:
            made = self._fork(order_of(COMMAND, arguments, env, cwd), [0, output[1], errors[1]])
        finally:
            os.close(output[1])
            os.close(errors[1])
        return Forked(*made, None, os.fdopen(output[0]), os.fdopen(errors[0]))

    def _fork(self, order: Mapping[str, Any], files: Sequence[int]) -> tuple[int, Future[int]]:
        """Start a process with these descriptors. Returns its id, and its exit status as it will be."""
        forked: Future[tuple[int, Future[int]]] = Future()
        self._ordered.append(forked)
        socket.send_fds(self._socket, [json.dumps(order).encode()], files)
        return forked.result(START_SECONDS)

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


def is_program(command: Sequence[str]) -> bool:
    """Whether this starts an engine or a rank."""
    return [*command[:3]] == [sys.executable, "-P", "-m"] and command[3] in PROGRAMS


def order_of(
    program: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    directory: Path,
    pass_fds: Sequence[int] = (),
    *,
    session: bool = False,
) -> dict[str, Any]:
    """What a new process needs to know. The descriptors after the first three keep their numbers."""
    return {
        "program": program,
        "arguments": [*arguments],
        "environment": dict(environment),
        "directory": str(directory),
        "descriptors": [0, 1, 2, *pass_fds],
        "session": session,
    }


def serve(connection: socket.socket) -> NoReturn:
    """Fork a process for each order, and report its end, until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    for name in (*PRELOADED, *PROGRAMS, *LOADED_BY_COMMANDS):
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
        is_command = order["program"] == COMMAND
        local = [order["directory"]] * is_command  # as `-m` does it without `-P`
        first = [*local, *(each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each)]
        sys.path[:] = [*first, *(each for each in PATH if each not in first)]
        sys.argv[1:] = order["arguments"]
        if os.environ.get("PYTHONWARNINGS") == "default":
            warnings.resetwarnings()
        gc.enable()
        run_command() if is_command else run_program(order["program"], order["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def run_program(program: str, arguments: Sequence[str]) -> NoReturn:
    """Be an engine, whose ranks are forked, or a rank."""
    module = importlib.import_module(program)
    if program == ENGINE:
        from holdfast.engine.ranks import ranks

        ranks.subprocess = ForkingItself()  # type: ignore[assignment]
    module.end_process(module.main(os.getppid(), *arguments))


def run_command() -> NoReturn:
    """Be the `holdfast` command. Its first engine is forked."""
    from holdfast import cli
    from holdfast.engine import link, spawn

    link.die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    spawn.subprocess = ForkingItself()  # type: ignore[assignment]
    for path, value in json.loads(os.environ.pop(CONSTANTS, "{}")).items():
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), f"there is no {path}"
        setattr(sys.modules[module], name, value)
    try:
        status = cli.main()
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else 1
    link.end_process(status)


class ForkingItself:
    """The module `subprocess` of a forked process. Its `Popen` forks an engine if no other thread runs, or a rank.

    A lock that another thread holds would stay locked in the new process. Threads of an engine that starts ranks wait
    for messages, except the one that loads modules: it ends first.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, command: Sequence[str], **options: Any) -> Any:
        is_rank = is_program(command) and command[3] == RANK
        if not is_rank and (not is_program(command) or len([*Path("/proc/self/task").iterdir()]) > 1):
            return subprocess.Popen(command, **options)
        for thread in threading.enumerate():
            if thread.name == LOADING:
                thread.join()
        assert options.pop("stdin") == subprocess.PIPE and options.pop("stdout") == 2
        session, passed = options.pop("start_new_session", False), options.pop("pass_fds", ())
        order = order_of(command[3], command[5:], options.pop("env"), Path.cwd(), passed, session=session)
        assert not options
        theirs, ours = os.pipe()
        pid = os.fork()
        if not pid:
            for file in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
                if file > 2 and file != theirs and file not in passed:
                    with contextlib.suppress(OSError):  # that of the directory, which is closed by now
                        os.close(file)
            become(order, [theirs, os.dup(2), os.dup(2), *passed])
        os.close(theirs)
        return Child(pid, os.fdopen(ours, "wb"))


class Child:
    """A process that this one has forked, with what `EngineProcess` and `Ranks` use of `subprocess.Popen`."""

    def __init__(self, pid: int, stdin: IO[bytes]) -> None:
        self.pid, self.stdin = pid, stdin
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._look(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        if timeout is None:
            return self._look(0)
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            time.sleep(0.002)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # a thread has just waited for its end
                os.kill(self.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stdin.close()
        self.wait()

    def _look(self, flags: int) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, flags)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode


PATH = [*sys.path]
"""The template's path of modules."""

if __name__ == "__main__":
    serve(socket.socket(fileno=int(cast("str", sys.argv[1]))))
