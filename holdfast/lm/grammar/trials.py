"""Trials: test whether grammars are safe to compile here, in a process that may crash."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from holdfast.core.types import Grammar
from holdfast.lm.grammar.sources import GrammarError
from holdfast.lm.grammar.trial import (
    COMPILE_STACK,
    Fork,
    Passed,
    Reap,
    Try,
    Vocabulary,
    decode_number,
    decode_verdict,
    encode,
    receive,
    send,
    too_large,
)

ANSWER_SECONDS = 60.0
"""Most wall-clock time of one test, for a machine that gives it no processor time."""
KNOWN = 4096
"""Verdicts that are kept, each in about 200 bytes."""
IDLE = 4
"""Children that are kept for further grammars."""
ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "LANG", "LC_ALL", "TMPDIR")
"""Environment variables that the test process gets."""
START = "import sys; sys.path[:] = sys.argv[1:]; from holdfast.lm.grammar.trial import main; main()"


class TrialsFailed(Exception):
    """There was no verdict, for a reason that is not the grammar's."""


class Trials:
    """Tests grammars for one vocabulary, in children of one test process, which starts with the first of them.

    Safe to use from several threads, each of which has a child to itself meanwhile.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], seconds: float) -> None:
        """`vocabulary` reads the data that the test process needs. A test may take `seconds` of processor time."""
        self._vocabulary, self._seconds = vocabulary, seconds
        self._keeping, self._starting = threading.Lock(), threading.Lock()
        self._verdicts: OrderedDict[bytes, Passed | str] = OrderedDict()
        """Verdicts by digest: a grammar that passed, or why it is refused."""
        self._idle: list[_Child] = []
        self._process: _Process | None = None
        self._closed = False

    def begin(self, vocabulary: Vocabulary) -> None:
        """Start the test process, which gets ready meanwhile. Raises OSError."""
        with self._starting:
            if self._process is None and not self._closed:
                self._process = _Process(encode(vocabulary))

    def test(self, grammar: Grammar) -> int:
        """The bytes that a compiled grammar takes. Raises GrammarError for one that must not be compiled here."""
        digest = hashlib.sha256(f"{grammar.kind} {grammar.text}".encode(errors="surrogatepass")).digest()
        with self._keeping:
            if (known := self._verdicts.get(digest)) is not None:
                self._verdicts.move_to_end(digest)
        if known is None:
            known = self._tested(grammar)
            with self._keeping:
                self._verdicts[digest] = known
                while len(self._verdicts) > KNOWN:
                    self._verdicts.popitem(last=False)
        if isinstance(known, str):
            raise GrammarError(known)
        return known.size

    def close(self) -> None:
        """End all tests. Later ones are refused."""
        self._closed = True
        if (process := self._process) is not None:
            process.end()

    def _tested(self, grammar: Grammar) -> Passed | str:
        """The verdict of a test, or why the grammar is refused. Raises GrammarError where there is none."""
        try:
            message = encode(Try(grammar.kind, grammar.text))
        except UnicodeEncodeError:
            raise GrammarError(f"the {grammar.kind} grammar holds an unpaired surrogate") from None
        try:
            child = self._child()
            try:
                verdict = decode_verdict(child.ask(message))
            except (OSError, ValueError, EOFError) as error:
                status = child.process.reap(child)
                return self._why(grammar, status, error)
        except (OSError, ValueError, EOFError, TrialsFailed) as error:
            raise GrammarError(f"the {grammar.kind} grammar could not be tested: {error}") from None
        with self._keeping:
            keep = not verdict.spent and len(self._idle) < IDLE
            if keep:
                self._idle.append(child)
        if not keep:
            with contextlib.suppress(OSError, ValueError, EOFError):
                child.process.reap(child)
        return verdict if isinstance(verdict, Passed) else verdict.reason

    def _child(self) -> _Child:
        """A child for one test. Raises OSError, ValueError, EOFError or TrialsFailed where none can be had."""
        with self._keeping:
            idle = self._idle.pop() if self._idle else None
        if idle is not None and idle.process is self._process and idle.process.runs and idle.waits:
            return idle
        with self._starting:
            return self._started().fork(self._seconds)

    def _started(self) -> _Process:
        """The test process, which is begun again if it has ended. The caller has the lock."""
        if self._closed:
            raise TrialsFailed("the engine ends")
        if self._process is None or not self._process.runs:
            self._process = _Process(encode(self._vocabulary()))
        return self._process

    def _why(self, grammar: Grammar, status: int, error: Exception) -> str:
        """Why a child ended in a test. Raises TrialsFailed if the grammar did not cause it."""
        if self._closed:
            raise TrialsFailed("the engine ends")
        seconds = f"{self._seconds:g} s"
        match -status:
            case signal.SIGPROF:
                return f"the {grammar.kind} grammar took over {seconds} to compile; at most {seconds} may be taken"
            case signal.SIGSEGV | signal.SIGBUS:
                return (
                    f"the {grammar.kind} grammar nests too deeply: compiling it takes over {COMPILE_STACK >> 20} MiB "
                    f"of stack"
                )
            case signal.SIGABRT:  # allocating has failed in llguidance
                return too_large(grammar)
        raise TrialsFailed(f"its process gave no answer (status {status}): {error}")


class _Child(NamedTuple):
    """A child of the test process."""

    process: _Process
    pid: int
    connection: socket.socket

    @property
    def waits(self) -> bool:
        """Whether the child still waits for a grammar, and was not killed from outside."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        return not poll.poll(0)

    def ask(self, message: bytes) -> bytes:
        """The child's answer. Raises OSError, ValueError or EOFError if there is none."""
        send(self.connection, message)
        if (answer := receive(self.connection)) is None:
            raise EOFError("it has ended")
        return answer[0]


class _Process:
    """The test process. It ends when this object is collected, and with us, however we end."""

    def __init__(self, vocabulary: bytes) -> None:
        """Raises OSError."""
        self._orders, theirs = socket.socketpair()
        self._orders.settimeout(ANSWER_SECONDS)
        self._ordering = threading.Lock()
        environment = {name: value for name in ENVIRONMENT if (value := os.environ.get(name)) is not None}
        # Pass our search path on: PYTHONPATH may name the folders of some packages.
        path = [str(Path(__file__).parents[3]), *(place for place in sys.path if Path(place).is_absolute())]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, *path],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=environment | {"MALLOC_ARENA_MAX": "1"},  # each arena takes 64 MiB of address space
                start_new_session=True,  # the terminal's Ctrl-C must reach only us
            )
        self._connections = {self._orders}
        self._finalizer = weakref.finalize(self, _end, self._process, self._connections)
        try:
            send(self._orders, vocabulary)
        except OSError:
            self.end()
            raise

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def fork(self, seconds: float) -> _Child:
        """A new child. Raises OSError, ValueError or EOFError."""
        number, file = self._order(encode(Fork(seconds)))
        if file is None:
            raise EOFError("the test process of grammars cannot fork")
        self._connections.add(connection := socket.socket(fileno=file))
        connection.settimeout(ANSWER_SECONDS)
        return _Child(self, number, connection)

    def reap(self, child: _Child) -> int:
        """End a child and return how it ended. Raises OSError, ValueError or EOFError."""
        child.connection.close()
        self._connections.discard(child.connection)
        return self._order(encode(Reap(child.pid)))[0]

    def _order(self, order: bytes) -> tuple[int, int | None]:
        """The number, and perhaps the open file, that answer an order. Ends the process if there is none."""
        with self._ordering:
            try:
                send(self._orders, order)
                if (answer := receive(self._orders)) is None:
                    raise EOFError("the test process of grammars has ended")
                return decode_number(answer[0]), answer[1]
            except BaseException:  # a late answer would be taken for the next one
                self.end()
                raise

    def end(self) -> None:
        """Kill the process, and its children with it."""
        self._finalizer()


def _end(process: subprocess.Popen[bytes], connections: set[socket.socket]) -> None:
    process.kill()
    process.wait()
    for connection in list(connections):
        connection.close()
