"""Processes that tests fork from a template, which has imported PyTorch, the engine and the server. They start at once.

`Forking` stands in for the module `subprocess` where an engine, a rank or the `holdfast` command is started. The
template does what the new process would do: it takes over the descriptors, the environment and the arguments, and
calls the same `main`. Engines and API processes of a forked command are forked, too, and are its own children, as
ranks are an engine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NoReturn, Self, cast

ENGINE, RANK = PROGRAMS = ("holdfast.engine.process.serve", "holdfast.engine.ranks.work")
"""Modules with a `main` that takes the parent's process id, and then the other arguments."""
COMMAND = "holdfast.cli"
"""The module that runs as the `holdfast` command."""
API_PROCESS = "holdfast.server.worker"
"""The module that runs as one of several API processes."""
PRELOADED = ("torch", "holdfast.engine.process.build", "holdfast.engine.ranks.paged", "holdfast.cli.command")
LOADED_BY_COMMANDS = ("holdfast.cli.serve", "holdfast.server.app", API_PROCESS, "uvloop")
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
NURSERY = "nursery"
"""The name by which the kernel shows the process that forks a command's engines and API processes."""
NAMES = {ENGINE: "engine", API_PROCESS: "api"}
"""The names by which the kernel shows the processes that are forked there, by their modules."""
ORPHANED = b"orphaned"
"""Message of a nursery: the process that it forked has lost its parent, and so has got the command as its parent."""
PR_SET_CHILD_SUBREAPER = 36


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
            if is_command:
                return template.fork_command(command[3:], **options)
            assert options.pop("stdin") == subprocess.PIPE and options.pop("stdout") == 2
            return template.fork_program(command[3], command[5:], **options)

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

    def fork_command(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        cwd: Path | None = None,
        *,
        stdin: int | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        text: bool = True,
        start_new_session: bool = False,
    ) -> Forked:
        """Start the `holdfast` command. A pipe is for its output or errors, and is read as text.

        For one thread at a time.
        """
        assert text and stdin in (None, subprocess.DEVNULL)
        with contextlib.ExitStack() as ours:

            def given(file: int | IO[Any] | None, own: int) -> int:
                """The process's descriptor, in place of our `own` one."""
                if file is None:
                    return own
                if file == subprocess.DEVNULL:
                    file = os.open(os.devnull, os.O_RDWR)
                    ours.callback(os.close, file)
                return file if isinstance(file, int) else file.fileno()

            pipes = [os.pipe() if file == subprocess.PIPE else None for file in (stdout, stderr)]
            for pipe in filter(None, pipes):
                ours.callback(os.close, pipe[1])
            output, errors = (
                pipe[1] if pipe else given(file, own)
                for pipe, file, own in zip(pipes, (stdout, stderr), (1, 2), strict=True)
            )
            order = order_of(COMMAND, arguments, env, cwd or Path.cwd(), session=start_new_session)
            made = self._fork(order, [given(stdin, 0), output, errors])
        return Forked(*made, None, *(os.fdopen(pipe[0]) if pipe else None for pipe in pipes))

    def _fork(self, order: Mapping[str, Any], files: Sequence[int]) -> tuple[int, Future[int]]:
        """Start a process with these descriptors. Returns its id, and its exit status as it will be."""
        forked: Future[tuple[int, Future[int]]] = Future()
        self._ordered.append(forked)
        socket.send_fds(self._socket, [json.dumps(order).encode()], files)
        pid, ended = forked.result(START_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # it has ended
            while (
                order["session"] and not ended.done() and os.getsid(pid) != pid
            ):  # only then is its group to be killed
                time.sleep(0.0005)
        return pid, ended

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
    from tests import quick_apps  # it imports the server

    quick_apps.make_routes_when_asked()
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
        if is_command:
            run_command()
        elif order["program"] == API_PROCESS:
            run_api_process()
        else:
            run_program(order["program"], order["arguments"])
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


def run_api_process() -> NoReturn:
    """Be one of several API processes. Its metrics are in a directory that they share."""
    from prometheus_client import values

    from holdfast.engine import link
    from holdfast.server import worker

    values.ValueClass = values.get_value_class()  # chosen by the environment, which the template lacked
    link.end_process(worker.main())


def run_command() -> NoReturn:
    """Be the `holdfast` command, whose engines and API processes are forked."""
    from holdfast import cli
    from holdfast.engine import link, spawn
    from holdfast.server import supervisor

    link.die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for path, value in json.loads(os.environ.pop(CONSTANTS, "{}")).items():
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), f"there is no {path}"
        setattr(sys.modules[module], name, value)
    spawn.subprocess = nursery = Nursery()  # type: ignore[assignment]
    supervisor.asyncio = ForkingAsyncio(nursery)  # type: ignore[assignment]
    try:
        status = cli.main()
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else 1
    link.end_process(status)


class ForkingItself:
    """The module `subprocess` of a forked engine. Its `Popen` forks a rank.

    A lock that another thread holds would stay locked in the new process. Threads of an engine that starts ranks wait
    for messages, except the one that loads modules: it ends first.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, command: Sequence[str], **options: Any) -> Any:
        if not (is_program(command) and command[3] == RANK):
            return subprocess.Popen(command, **options)
        for thread in threading.enumerate():
            if thread.name == LOADING:
                thread.join()
        return child_of(command, options, self._fork)

    def _fork(self, order: Mapping[str, Any], files: Sequence[int]) -> int:
        pid = os.fork()
        if not pid:
            for file in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
                if file > 2 and file not in files:
                    with contextlib.suppress(OSError):  # that of the directory, which is closed by now
                        os.close(file)
            become(order, [file if file > 2 else os.dup(file) for file in files])
        return pid


class Nursery:
    """The module `subprocess` of a forked command. Its `Popen` forks engines, whatever threads the command has by then.

    A process of one thread, which is forked before the command has others, forks them and lets them become orphans. The
    kernel gives an orphan to the nearest ancestor that asks for them, so engines become the command's own children.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        owner = os.getpid()
        if not os.fork():
            self._socket.close()
            tend(theirs, owner)
        theirs.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, command: Sequence[str], **options: Any) -> Any:
        if not is_program(command):
            return subprocess.Popen(command, **options)
        return child_of(command, options, self.fork)

    def fork(self, order: Mapping[str, Any], files: Sequence[int]) -> int:
        """Fork a child of this process, with these descriptors. Returns its process id."""
        with self._lock:
            take_orphans(True)
            try:
                socket.send_fds(self._socket, [json.dumps(order).encode()], files)
                pid = int(self._socket.recv(ORDER_BYTES))
                assert self._socket.recv(ORDER_BYTES) == ORPHANED
            finally:
                take_orphans(False)
        return pid


class ForkingAsyncio:
    """The module `asyncio` of a forked command's supervisor. It forks API processes.

    The first one is a new interpreter, as all of a user's are.
    """

    def __init__(self, nursery: Nursery) -> None:
        self._nursery, self._forks = nursery, False

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def create_subprocess_exec(
        self,
        *command: str,
        stdin: int,
        stdout: int,
        pass_fds: Sequence[int],
        env: Mapping[str, str],
        start_new_session: bool,
    ) -> AwaitedChild | asyncio.subprocess.Process:
        """Start an API process whose standard input and output are pipes."""
        assert command == (sys.executable, "-P", "-m", API_PROCESS) and stdin == stdout == subprocess.PIPE
        if not self._forks:
            self._forks = True
            return await asyncio.create_subprocess_exec(
                *command, stdin=stdin, stdout=stdout, pass_fds=pass_fds, env=env, start_new_session=start_new_session
            )
        order = order_of(API_PROCESS, (), env, Path.cwd(), pass_fds, session=start_new_session)
        (their_input, our_input), (our_output, their_output) = os.pipe(), os.pipe()
        try:
            pid = self._nursery.fork(order, [their_input, their_output, 2, *pass_fds])
        finally:
            os.close(their_input)
            os.close(their_output)
        loop, output = asyncio.get_running_loop(), asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), os.fdopen(our_output, "rb"))
        transport, protocol = await loop.connect_write_pipe(
            lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), os.fdopen(our_input, "wb")
        )
        return AwaitedChild(pid, asyncio.StreamWriter(transport, protocol, None, loop), output)


class AwaitedChild:
    """A forked child of this process, with what the supervisor uses of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int, stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._descriptor = os.pidfd_open(pid)
        self._status = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._descriptor, self._end)

    def send_signal(self, number: int) -> None:
        if self._status.done():
            raise ProcessLookupError
        os.kill(self.pid, number)

    async def wait(self) -> int:
        return int(await asyncio.shield(self._status))

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.stdin.close()
        self._status.set_result(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))


def tend(connection: socket.socket, owner: int) -> NoReturn:
    """Be the nursery of the process `owner`, until that ends: fork an orphan for each order, and report its id."""
    from holdfast.engine import link

    try:
        link.die_with_parent(owner)
        name_this_process(NURSERY)
        own = os.open(os.devnull, os.O_RDWR)
        for file in range(3):  # else a pipe of the command's output would stay open after it
            os.dup2(own, file)
        while True:
            order, files, _, _ = socket.recv_fds(connection, ORDER_BYTES, MOST_FILES)
            if not order:
                os._exit(0)
            between = os.fork()
            if not between:
                if pid := os.fork():
                    connection.send(str(pid).encode())
                    os._exit(0)
                connection.close()
                os.close(own)
                ordered = json.loads(order)
                name_this_process(NAMES[ordered["program"]])
                while os.getppid() != owner:
                    time.sleep(0.0005)
                become(ordered, files)
            os.waitpid(between, 0)
            connection.send(ORPHANED)
            for file in files:
                os.close(file)
    finally:
        os._exit(1)


def name_this_process(name: str) -> None:
    """Let the kernel show this process by a name, which its children inherit."""
    Path("/proc/self/comm").write_text(name)


def take_orphans(wanted: bool) -> None:
    """Ask the kernel to make this process the parent of its descendants whose parent has ended, or no longer."""
    assert ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0) == 0


def child_of(
    command: Sequence[str], options: dict[str, Any], fork: Callable[[Mapping[str, Any], Sequence[int]], int]
) -> Child:
    """A child of this process that `fork` makes, from an order and its descriptors, as `subprocess.Popen` would."""
    assert options.pop("stdin") == subprocess.PIPE and options.pop("stdout") == 2
    session, passed = options.pop("start_new_session", False), options.pop("pass_fds", ())
    order = order_of(command[3], command[5:], options.pop("env"), Path.cwd(), passed, session=session)
    assert not options
    theirs, ours = os.pipe()
    try:
        return Child(fork(order, [theirs, 2, 2, *passed]), os.fdopen(ours, "wb"))
    finally:
        os.close(theirs)


class Child:
    """A forked child of this process, with what `EngineProcess` and `Ranks` use of `subprocess.Popen`."""

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
