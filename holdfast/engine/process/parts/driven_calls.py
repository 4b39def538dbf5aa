"""CallQueue: the calls of a driven job on their way from their files to the trainer and the tuner, in order."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from holdfast.lm.parts.tuning.tuner import Tuner
from holdfast.lm.parts.tuning.values import CallTaken
from holdfast.lm.types.news import PartNews
from holdfast.training.call_files import calls_from, refuse_call
from holdfast.training.calls import result_path
from holdfast.training.sources import PreparedCall
from holdfast.training.trainer import Trainer

AHEAD = 8
"""Most calls that are read and not done. Their data is in the host's memory."""

Then = Callable[[], None]
"""Takes the result of another thread, in the loop's thread."""
Submit = Callable[[Callable[[], Then]], "Future[Then]"]


class CallQueue:
    """Reads one call at a time, in another thread. A call that cannot run is refused alone, and noted on the disk.

    A call that loads a state is read further only once all calls before it are done: one of them may save that state.
    """

    def __init__(
        self,
        job: str,
        directory: Path,
        submit: Submit,
        tuner: Tuner,
        trainer: Trainer,
        announce: Callable[[PartNews], None],
        *,
        first: int,
        stop: int,
        known: int,
    ) -> None:
        """Calls from `first` to before `stop` are on the disk. The owner has the results of the first `known` calls.

        `submit` runs a function in the thread that reads. `announce` lets other ranks know of a call.
        """
        self._job, self._directory, self._submit = job, directory, submit
        self._tuner, self._trainer, self._announce = tuner, trainer, announce
        self._next, self.stop, self._known = first, stop, known
        self._work: list[Future[Then]] = []
        """The work of the other thread; at most one."""
        self._waiting: list[PreparedCall] = []
        """The call that waits for the calls before it; at most one."""

    @property
    def busy(self) -> bool:
        """Whether the other thread works."""
        return bool(self._work)

    def run(self, number: int) -> str:
        """Note that a call is on the disk, with all before it. Returns the reason if one of them is not; else empty."""
        if number > self.stop:
            self.stop = calls_from(self._directory, self.stop)
        if number > self.stop:
            return f"call {number} of job {self._job} is not the next one, which is {self.stop}"
        self.stop = max(self.stop, number + 1)
        return ""

    def advance(self) -> None:
        """Take what was read, and begin to read the next call."""
        while not self._work or self._work[0].done():
            if self._work:
                self._work.pop().result()()
            elif not self._begin():
                return

    def _begin(self) -> bool:
        """Begin to read, if anything can be read now. Returns whether it did."""
        if self._waiting:
            if not self._is_quiet():
                return False
            self._start(lambda: self._load(self._waiting.pop()))
            return True
        done, _, _ = self._trainer.next_slice(self._job)
        if not self._next < min(self.stop, done + AHEAD):
            return False
        number, self._next = self._next, self._next + 1
        self._start(lambda: self._read(number))
        return True

    def _is_quiet(self) -> bool:
        """Whether all calls before the waiting one are done and stored."""
        done, _, _ = self._trainer.next_slice(self._job)
        return done == self._waiting[0].call.number and self._trainer.settled(self._job)

    def _start(self, work: Callable[[], Then]) -> None:
        self._work.append(self._submit(work))

    # In the other thread

    def _read(self, number: int) -> Then:
        try:
            prepared = self._trainer.prepare_call(self._job, number)
        except ValueError as refusal:
            return self._mark(number, str(refusal))
        if prepared.loads:
            return lambda: self._waiting.append(prepared)
        return lambda: self._take(prepared)

    def _load(self, prepared: PreparedCall) -> Then:
        try:
            loaded = self._trainer.prepare_load(self._job, prepared)
        except ValueError as refusal:
            return self._mark(prepared.call.number, str(refusal))
        return lambda: self._take(loaded)

    def _mark(self, number: int, reason: str) -> Then:
        refuse_call(self._directory, number, reason)
        return lambda: self._refuse(number, reason)

    # In the loop's thread

    def _take(self, prepared: PreparedCall) -> None:
        """Let the job compute a call, unless it does not fit. One that was computed before an engine ended fits."""
        number = prepared.call.number
        is_new = number >= self._known and not result_path(self._directory, number).exists()
        if is_new and (reason := self._tuner.refusal(self._job, prepared.batches)):
            self._start(lambda: self._mark(number, reason))
            return
        self._announce(CallTaken(self._job, number))
        self._trainer.add_call(self._job, prepared)
        self._tuner.grow(self._job)

    def _refuse(self, number: int, reason: str) -> None:
        self._announce(CallTaken(self._job, number, reason))
        self._trainer.refuse_call(self._job, number, reason)
        self._tuner.grow(self._job)
