"""Ranks: the processes of an engine other than rank 0. Rank 0 starts and commands them, and sees them fail."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from math import inf
from pathlib import Path
from typing import NamedTuple, TypeVar

from holdfast.engine.link import FAILED, STALE_SECONDS, in_words
from holdfast.engine.ranks import messages
from holdfast.engine.ranks.mailbox import LINE, WORD, Bell, Mailbox, Reader, SharedWords, Ticket, nameless_memory
from holdfast.engine.spawn import child_environment
from holdfast.lm.config import EngineConfig

BEAT_SECONDS = 0.045
"""How often a rank shows that it runs, and how often rank 0 checks."""
STOPPED_BEATS = 20
"""Number of silent checks in a row after which a stopped process counts as hung.

Checks are counted, not timed: if all processes are stopped together and go on, no time has passed.
"""
SILENT_BEATS = 220
"""Number of silent checks for a process that runs: it may be in a call that keeps Python's lock."""
SILENT_STARTING = 2400
"""Number of silent checks while ranks start. Reading a checkpoint from a slow disk may take long."""
STEP_SECONDS = 120.0
"""The longest that rank 0 waits for the end of a step. Ranks that wait for each other forever still beat."""
PART_SECONDS = 600.0
"""The longest that rank 0 waits for a step with long work of a part (`PartPlan.is_long`): a slice of training."""
CAUSE_SECONDS = 0.5
"""After a failure, how long to wait for an earlier one: the others fail because the first did."""
GRACE_SECONDS = 2.0
"""Time for ranks to end by themselves."""

MEETING = "holdfast-ranks-"
"""The beginning of the names of directories where ranks meet."""

BOARD_WORDS = LINE // WORD
BEATS, STEPS, HOST_READY, HOST_BLOCKS = range(4)
"""A rank's words on the board: beats so far, steps done, and blocks of the host tier that are ready, and will be."""

Result = TypeVar("Result")

OfStep = messages.Stepped | messages.Reported | messages.Copied
"""A rank's report of a step."""


class RankFailure(RuntimeError):
    """A rank has failed; the message names it, and gives the known facts."""


class Seat(NamedTuple):
    """The arguments with which the process of a rank is started: inherited file descriptors."""

    rank: int
    commands: Ticket
    answers: Ticket
    board: int
    host: int
    """Memory for the rank's part of the host tier, which rank 0 can map as well."""
    ranks: int

    @property
    def descriptors(self) -> list[int]:
        """All file descriptors that the process must inherit."""
        return [*self.commands.descriptors, *self.answers.descriptors, self.board, self.host]

    def to_json(self) -> str:
        """The seat as one argument of a command line."""
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> Seat:
        """The seat that `to_json` wrote."""
        rank, commands, answers, *rest = json.loads(text)
        first, second = (
            Ticket(memory, tuple(Bell(*bell) for bell in bells), capacity)
            for memory, bells, capacity in (commands, answers)
        )
        return cls(rank, first, second, *rest)


class Board:
    """A few numbers of each rank, which all processes see. Each rank writes its own numbers."""

    def __init__(self, ranks: int, inherited: int | None = None) -> None:
        self._memory = SharedWords(ranks * BOARD_WORDS, inherited)
        self.descriptor = self._memory.descriptor

    def get(self, rank: int, word: int) -> int:
        """A number of a rank."""
        return self._memory.words[rank * BOARD_WORDS + word]

    def set(self, rank: int, word: int, value: int) -> None:
        """Change a number of a rank. The caller must be that rank."""
        self._memory.words[rank * BOARD_WORDS + word] = value

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


class _Rank(NamedTuple):
    """One process, with the channels on which it answers."""

    number: int
    process: subprocess.Popen[bytes]
    answers: Mailbox
    reader: Reader
    host: int

    @property
    def name(self) -> str:
        return f"rank {self.number} (process {self.process.pid})"


class Ranks:
    """The processes of ranks 1 and up. For one thread, except `check` and `failure`.

    They get every command in one order, through one mailbox. Rank 0's own part of a command runs in a thread of its
    own, so that a rank that fails ends the wait for the others. Once a rank has failed, all are killed, and every call
    raises RankFailure.
    """

    def __init__(self, config: EngineConfig, on_failure: Callable[[str], None] = lambda reason: None) -> None:
        """Start the processes, from the thread that lives longest. Raises OSError.

        `on_failure` is called once, in another thread, with the reason of the failure.
        """
        self.layout = config.layout
        self.failure = ""
        """Description of the first failure; empty while nothing has failed."""
        self._on_failure = on_failure
        self._steady = False
        """Whether steps run. Then no rank should be silent for long; while ranks start, they may be."""
        others = range(1, self.layout.ranks)
        self._closing = threading.Event()
        self._incoming = threading.Lock()
        self._answers: dict[int, messages.Answer] = {}
        """Each rank's answer to the last command."""
        self._steps: deque[tuple[int, OfStep]] = deque()
        """The ranks' reports of steps, with the numbers of the ranks."""
        self._reported: list[tuple[float, str]] = []
        """Times and reasons of failures that ranks have reported themselves."""
        self._own = ThreadPoolExecutor(1, "holdfast-rank-0")
        remove_stale_meetings()
        self._meeting = tempfile.TemporaryDirectory(prefix=MEETING)  # mode 0700
        self._bell = Bell.new()
        self._commands = Mailbox(tuple(Bell.new() for _ in others))
        self._board = Board(self.layout.ranks)
        self._ranks: list[_Rank] = []
        self._watching = threading.Thread(target=self._watch, name="holdfast-watch-ranks", daemon=True)
        try:
            for number in others:
                self._ranks.append(self._start(number))
        except BaseException:
            self.close(at_once=True)
            raise
        self._watching.start()

    @property
    def meeting(self) -> str:
        """A directory of this start alone, where each rank leaves the address at which it can be reached."""
        return self._meeting.name

    def met(self) -> None:
        """Remove the directory: all ranks reach each other. Then nothing is left when all are killed."""
        self._meeting.cleanup()

    def begin_steps(self) -> None:
        """All ranks have started: from now on, none should be silent for long."""
        self._steady = True

    @property
    def pids(self) -> list[int]:
        """The process ids of ranks 1 and up."""
        return [rank.process.pid for rank in self._ranks]

    @property
    def hosts(self) -> list[int]:
        """By rank, from 1 up: the file descriptor of the memory in which it may lay its part of the host tier."""
        return [rank.host for rank in self._ranks]

    def send(self, command: messages.Command) -> None:
        """Send all ranks a command. Raises RankFailure."""
        self.check()
        self._commands.send(messages.encode(command), self.check)

    def together(
        self, command: messages.Command, work: Callable[[], Result]
    ) -> tuple[Result, Sequence[messages.Answer]]:
        """Send a command and do rank 0's own part of it. Returns its result, and the answers of the others by rank.

        Raises RankFailure, and the error of `work` unless another rank has failed before.
        """
        self._answers.clear()
        self.send(command)
        own = self.do(work)
        while True:
            self._receive()
            if len(self._answers) == len(self._ranks):
                return own, [self._answers[number] for number in sorted(self._answers)]
            self.wait(1.0)

    def do(self, work: Callable[[], Result]) -> Result:
        """Do a part of rank 0 that may wait for the others. Raises as `together` does."""
        self.check()
        running = self._own.submit(work)
        while not wait_for([running], BEAT_SECONDS).done:
            self.check()
        try:
            return running.result()
        except BaseException as error:
            raise self.cause(error) from error.__cause__

    def cause(self, error: BaseException) -> BaseException:
        """The error to raise if rank 0 has failed with `error`: that one, or another rank's failure that caused it.

        The other ranks, which may wait for rank 0, are killed.
        """
        deadline = time.monotonic() + CAUSE_SECONDS
        while not self.failure and time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS)
        if self.failure:
            return RankFailure(self.failure)
        self._fail(f"rank 0: {error}")
        return error

    def of_steps(self) -> list[tuple[int, OfStep]]:
        """Other ranks' reports of steps since the last call, with the numbers of the ranks. Raises RankFailure."""
        self.check()
        self._receive()
        return [self._steps.popleft() for _ in range(len(self._steps))]

    def wait(self, seconds: float) -> None:
        """Wait until another rank sends something, at most this long. Raises RankFailure."""
        self._bell.sleep(seconds)
        self.check()

    def least(self, word: int) -> int:
        """The smallest value of one of the other ranks' numbers on the board."""
        return min(self._board.get(rank.number, word) for rank in self._ranks)

    def check(self) -> None:
        """Raise RankFailure if a rank has failed."""
        if self.failure:
            raise RankFailure(self.failure)

    def give_up(self, step: int, seconds: float) -> None:
        """Raise RankFailure because a step has not ended after this time."""
        least = self.least(STEPS)
        behind = [rank.name for rank in self._ranks if self._board.get(rank.number, STEPS) == least]
        self._fail(f"step {step} has not ended after {seconds:g} s; the fewest steps have ended on {behind[0]}")
        self.check()

    def close(self, *, at_once: bool = False) -> None:
        """End all ranks: by themselves within GRACE_SECONDS, unless `at_once`; then they are killed.

        May be called more than once.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        if self._watching.ident:  # it was started
            self._watching.join()
        failed = at_once or bool(self.failure)
        if not failed:
            deadline = time.monotonic() + GRACE_SECONDS
            with contextlib.suppress(TimeoutError):
                self._commands.send(messages.encode(messages.End()), partial(_raise_after, deadline))
            for rank in self._ranks:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.process.wait(max(0.0, deadline - time.monotonic()))
        self._bury()
        self._own.shutdown(wait=not failed, cancel_futures=True)
        self._meeting.cleanup()
        for mailbox in (self._commands, *(rank.answers for rank in self._ranks)):
            mailbox.close()
        self._board.close()
        for rank in self._ranks:
            os.close(rank.host)
        for bell in (self._bell, *self._commands.bells):
            bell.close()

    def _start(self, number: int) -> _Rank:
        """Start the process of a rank. Raises OSError."""
        answers = Mailbox((self._bell,))
        host = nameless_memory()
        seat = Seat(number, self._commands.ticket, answers.ticket, self._board.descriptor, host, self.layout.ranks)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "holdfast.engine.ranks.work", str(os.getpid()), seat.to_json()],
            stdin=subprocess.PIPE,  # end of file shows the rank that we are gone
            stdout=2,
            pass_fds=seat.descriptors,
            env=child_environment(),
        )
        return _Rank(number, process, answers, answers.reader(), host)

    def _receive(self) -> None:
        """Sort the messages that have arrived."""
        with self._incoming:
            for rank in self._ranks:
                while (data := rank.reader.poll()) is not None:
                    match messages.decode_answer(data):
                        case messages.Failed(reason, at):
                            self._reported.append((at, f"rank {rank.number}: {reason}"))
                        case (messages.Stepped() | messages.Reported() | messages.Copied()) as said:
                            self._steps.append((rank.number, said))
                        case answer:
                            self._answers[rank.number] = answer

    def _watch(self) -> None:
        """Look for failures, in a thread, until one is found or all are closed."""
        beats = {rank.number: 0 for rank in self._ranks}
        silent = dict.fromkeys(beats, 0)
        last_look = time.monotonic()
        while not self._closing.wait(BEAT_SECONDS) and not self.failure:
            looked, last_look = last_look, time.monotonic()
            self._receive()  # before looking who has ended: whoever reports that is another one
            for rank in self._ranks:
                beat = self._board.get(rank.number, BEATS)
                silent[rank.number] = silent[rank.number] + 1 if beat == beats[rank.number] else 0
                beats[rank.number] = beat
            reason = self._reason(silent, looked)
            if reason and not self.failure and not self._closing.is_set():
                self._fail(reason)

    def _reason(self, silent: Mapping[int, int], looked: float) -> str:
        """Description of the first failure; empty if there is none. All processes that have ended ran at `looked`."""
        ended = [(rank, status) for rank in self._ranks if (status := rank.process.poll()) is not None]
        self._receive()
        at, report = min(self._reported, default=(inf, ""))
        for rank, status in ended:
            if status != FAILED and at >= looked:  # what others report then may have come of it
                return f"{rank.name} {in_words(status)}"
        if report:
            return report
        if ended:
            return f"{ended[0][0].name} failed and gave no reason"
        for rank in self._ranks:
            beats = silent[rank.number]
            stopped = beats >= STOPPED_BEATS and is_stopped(rank.process.pid)
            if stopped or beats >= (SILENT_BEATS if self._steady else SILENT_STARTING):
                why = ": it is stopped" if stopped else ""
                return f"{rank.name} has not answered for {beats * BEAT_SECONDS:.0f} s{why}"
        return ""

    def _fail(self, reason: str) -> None:
        """Kill all ranks, and let every call raise RankFailure from now on."""
        self.failure = self.failure or reason
        for rank in self._ranks:
            rank.process.kill()
        self._bell.ring()
        self._on_failure(self.failure)

    def _bury(self) -> None:
        """Kill the processes that still run, and wait until all have ended."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            with rank.process:  # closes its input, and waits for its end
                pass


class NoRanks:
    """Stands in for `Ranks` in an engine of one process."""

    pids: Sequence[int] = ()

    def check(self) -> None:
        """No other rank can fail."""

    def close(self, *, at_once: bool = False) -> None:
        """There is nothing to end."""


AnyRanks = Ranks | NoRanks
NO_RANKS = NoRanks()


def start_ranks(config: EngineConfig, on_failure: Callable[[str], None] = lambda reason: None) -> AnyRanks:
    """The processes of a configuration's other ranks, as `Ranks` starts them, if it has any."""
    return Ranks(config, on_failure) if config.layout.ranks > 1 else NO_RANKS


def remove_stale_meetings() -> None:
    """Remove the directories of starts that were killed before their ranks had met."""
    for left in Path(tempfile.gettempdir()).glob(f"{MEETING}*"):
        with contextlib.suppress(OSError):  # another user's, or removed by another start
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(left)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or a debugger. False where the system does not report it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] in ("T", "t")


def _raise_after(deadline: float) -> None:
    """Raise TimeoutError once the deadline has passed."""
    if time.monotonic() > deadline:
        raise TimeoutError
