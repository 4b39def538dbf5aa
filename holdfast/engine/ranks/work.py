"""A rank's process, started by `Ranks`: do rank 0's commands, run its plans, and report their results."""

from __future__ import annotations

import gc
import itertools
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NoReturn

from holdfast.engine.link import FAILED, die_with_parent, end_process, exit_at_end_of_input, one_line
from holdfast.engine.logs import log_as_parent
from holdfast.engine.ranks import messages
from holdfast.engine.ranks.mailbox import Mailbox
from holdfast.engine.ranks.part_results import split
from holdfast.engine.ranks.ranks import BEAT_SECONDS, BEATS, HOST_BLOCKS, HOST_READY, STEPS, Board, Seat
from holdfast.lm.types import SharedBytes

if TYPE_CHECKING:
    from holdfast.lm.execution.host_memory import HostMemory  # it imports PyTorch
    from holdfast.lm.execution.paged_device import PagedDevice
    from holdfast.lm.grammar.compiler import GrammarCompiler
    from holdfast.lm.types import PartResult, StepResult

GRAMMAR_THREADS = 4
"""Number of grammars that this rank compiles at a time: as many as rank 0 announces at a time."""
IDLE_SECONDS = 60.0
"""How long to wait for a command at a time."""


def main(parent_pid: int, seat: str) -> int:
    """Do a rank's work until rank 0 ends it. Returns the exit status."""
    die_with_parent(parent_pid)
    log_as_parent()
    exit_at_end_of_input()
    rank = Rank(Seat.from_json(seat))
    try:
        rank.work()
    except Exception as error:
        rank.fail(error)
    return 0


class Rank:
    """A rank in its own process."""

    def __init__(self, seat: Seat) -> None:
        """Take its seat, and begin to show that it runs."""
        self._seat = seat
        self._commands = Mailbox.open(seat.commands).reader(seat.rank - 1)
        self._answers = Mailbox.open(seat.answers)
        self._answering = threading.Lock()
        self._board = Board(seat.ranks, seat.board)
        self._submitted: queue.Queue[bool] = queue.Queue()
        """For each step in flight, whether it has segments."""
        self._hosts: list[HostMemory] = []
        """This rank's part of the host tier, once it is allocated."""
        self._grammars: list[GrammarCompiler] = []
        """The compiler of this rank's grammars; empty if it does not draw by them."""
        self._compiling = ThreadPoolExecutor(GRAMMAR_THREADS, "holdfast-grammar")
        threading.Thread(target=self._beat, name="holdfast-beat", daemon=True).start()

    def work(self) -> None:
        """Load this rank's part of the model, then obey commands. Raises the error of a command."""
        start = self._next()
        assert isinstance(start, messages.StartRank), f"the first command was {start}"
        gc.disable()  # it would look at all modules again and again while they are imported
        from holdfast.engine.ranks.paged import make_rank, weights_of  # it imports PyTorch
        from holdfast.lm.parts.grammars.device import GrammarDevice

        device = make_rank(start.config, self._seat.rank, start.meeting, host=self._seat.host).device
        self._grammars = [part.compiler for part in device.parts if isinstance(part, GrammarDevice)]
        weights = weights_of(device) if start.config.lower_tiers else ""
        spec = device.model.spec
        self._answer(messages.Loaded(device.block_bytes, weights, spec.state_bytes, spec.arithmetic))
        self._obey(device, reports=start.config.pp > 1 and start.config.layout.shard_of(self._seat.rank) == 0)

    def fail(self, error: BaseException) -> NoReturn:
        """Report why this rank cannot go on, and end the process, whatever its other threads wait for."""
        if os.environ.get("HOLDFAST_DEBUG"):
            traceback.print_exception(error)
        reason = one_line(error) if isinstance(error, Exception) else type(error).__name__
        self._answer(messages.Failed(reason, time.monotonic()))
        sys.stderr.flush()
        os._exit(FAILED)

    def _obey(self, device: PagedDevice, *, reports: bool) -> None:
        """Obey commands until the end. `reports`: whether rank 0 needs to know of every step."""
        plans = messages.PlanReader()
        while True:
            match self._next():
                case messages.Plan() as plan:
                    device.executor.submit(plans.read(plan))
                    self._submitted.put(bool(plan.rows))
                case messages.Compile():
                    device.compile()
                    self._answer(messages.Done())
                case messages.Measure(block_bytes, state_bytes):
                    measured = device.measure(SharedBytes(block_bytes, state_bytes))
                    self._answer(messages.Measured(measured))
                case messages.Allocate(num_blocks, num_host_blocks, snapshots, host_snapshots):
                    device.allocate(measured.with_blocks(num_blocks, num_host_blocks, snapshots, host_snapshots))
                    self._begin_steps(device, reports=reports)
                    self._answer(messages.Done())
                case messages.TimeLinks():
                    self._submitted.join()
                    device.time_links()
                    self._answer(messages.Done())
                case messages.BeginHost():
                    for host in self._hosts:
                        host.begin()
                case messages.Prepare():
                    self._submitted.join()
                    self._answer(messages.Done(device.executor.prepare()))
                case messages.Announce(news):
                    for each in messages.read_parts(news):
                        device.learn(each)
                case messages.CompileGrammar(grammar):
                    for compiler in self._grammars:  # rank 0 refuses what cannot be compiled
                        self._compiling.submit(compiler.prepare, grammar)
                case messages.End():
                    return
                case other:
                    raise RuntimeError(f"the rank was sent {type(other).__name__}")

    def _begin_steps(self, device: PagedDevice, *, reports: bool) -> None:
        """Get ready for plans: what exists now lives as long as the process, so no collection need scan it."""
        gc.collect()
        gc.freeze()
        gc.enable()
        self._hosts += [] if device.host is None else [device.host]
        self._show_host()
        threading.Thread(target=self._collect, args=(device, reports), name="holdfast-collect", daemon=True).start()

    def _collect(self, device: PagedDevice, reports: bool) -> None:
        """Collect the steps, in order, in a thread, and report their results."""
        try:
            steps, board, rank = 0, self._board, self._seat.rank
            device.in_thread()
            while True:
                has_segments = self._submitted.get()
                result = device.executor.collect()
                steps += 1
                board.set(rank, STEPS, steps)
                if result.copied.times:
                    self._answer(messages.Copied(result.copied.times))
                parts = split(result.parts) if result.parts else {}
                if each := parts.get(True):
                    self._answer(messages.Reported(result.step, messages.write_parts(each)))
                if reports and has_segments:
                    self._answer(stepped(result, parts.get(False, ())))
                self._submitted.task_done()
        except BaseException as error:
            self.fail(error)

    def _beat(self) -> None:
        """Show that this process runs, from a thread."""
        for beat in itertools.count(1):
            self._board.set(self._seat.rank, BEATS, beat)
            self._show_host()
            time.sleep(BEAT_SECONDS)

    def _show_host(self) -> None:
        """Show how many blocks of the host tier can be used."""
        for host in self._hosts:
            self._board.set(self._seat.rank, HOST_BLOCKS, host.blocks)
            self._board.set(self._seat.rank, HOST_READY, host.ready)

    def _next(self) -> messages.Command:
        """Wait for the next command."""
        while (data := self._commands.receive(IDLE_SECONDS)) is None:
            pass
        return messages.decode_command(data)

    def _answer(self, answer: messages.Answer) -> None:
        with self._answering:
            self._answers.send(messages.encode(answer))


def stepped(result: StepResult, parts: Sequence[PartResult]) -> messages.Stepped:
    """The report of a step with segments, with the results of `parts` that this rank alone gives."""
    return messages.Stepped(result.tokens, result.seconds, result.logprobs, messages.write_parts(parts), result.counts)


if __name__ == "__main__":
    end_process(main(int(sys.argv[1]), sys.argv[2]))
