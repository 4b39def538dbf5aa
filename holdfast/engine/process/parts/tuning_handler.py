"""TuningHandler: takes, changes and ends tuning jobs while an engine serves, and reports on them to their owner.

Files are read in a thread of its own, and states are written in one of the trainer's; the loop waits for neither. A job
ends here in this order: the scheduler has it off the device, the trainer has stored all of it, its adapter is read and
served, and its owner gets the report.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from holdfast.engine import messages
from holdfast.engine.process.handler import Handler
from holdfast.engine.process.parts.adapters import AdapterHandler
from holdfast.lm.parts.adapters.options import check_adapter_name
from holdfast.lm.parts.tuning.messages import (
    ChangeJob,
    JobAction,
    JobChanged,
    JobEnded,
    JobEvent,
    JobInfo,
    JobProgress,
    JobRefused,
    JobStart,
    JobStarted,
    JobStatus,
    JobStep,
    StartJob,
)
from holdfast.lm.parts.tuning.options import DEFAULT_BOUND
from holdfast.lm.parts.tuning.tuner import Tuner
from holdfast.lm.parts.tuning.values import JobClosed, JobOpened
from holdfast.lm.types.news import PartNews
from holdfast.training.data import EXAMPLES_FILE, VALIDATION_FILE, Examples, digest_of
from holdfast.training.jobs import Hyperparameters, TrainingJob, auto_batch_size, auto_epochs
from holdfast.training.state import JOB_FILE, read_job, write_job
from holdfast.training.done import JobFailure, StepReport
from holdfast.training.trainer import Trainer

log = logging.getLogger("holdfast.engine")

LEAST_MICRO_BATCH = 512
"""Fewest tokens of a micro-batch that the engine chooses. It is no smaller for the sake of time."""
REASON_CHARACTERS = 500
CHECK_SECONDS = 0.02
"""Seconds between two checks of all jobs while steps follow each other. One that has ended or has stored a step is
checked at once."""


@dataclass(frozen=True, slots=True)
class TuningRules:
    """The settings of the engine's configuration for jobs."""

    base_model: str
    """Name of the base model in checkpoints."""
    base_digest: str
    micro_batch: int | None
    """Tokens of a micro-batch; None: chosen for each job."""
    target: float | None
    """Most seconds between tokens; None: no target."""
    bound: float
    """Bound of the deferral rule, in seconds; used where there is no target.

    A request waits for one iteration in any case, so a bound of 0 or infinity makes none longer than DEFAULT_BOUND.
    """
    max_rank: int
    """Largest rank of the adapters that are served."""
    takes_dora: bool
    """Whether DoRA adapters are served."""
    modules: tuple[str, ...]
    """The modules that a job changes if it names none (`AdaptedModules.tunable`)."""
    dora_modules: tuple[str, ...]
    """Likewise for a job that makes a DoRA."""
    threads: int
    """CPU threads, which affect the last bits of results; 0 on a GPU."""


@dataclass(eq=False)
class _Open:
    """A job that is open in the trainer."""

    start: JobStart
    checkpoint: str
    """The directory of the newest adapter; empty if there is none."""
    reported: str = ""
    """The status that its owner knows."""
    failure: str = ""
    """Why it cannot go on."""
    cancelled: bool = False
    left: bool = False
    off_device: bool = False
    reading: list[Future[Any]] = field(default_factory=list)
    """The read of a complete job's adapter; empty before."""

    def leave(self, *, cancelled: bool) -> None:
        """The owner gives the job up, for good if it is `cancelled`."""
        self.cancelled |= cancelled
        self.left = True

    def fail(self, reason: str) -> None:
        """Note that the job cannot go on."""
        self.failure = reason

    def leave_device(self) -> None:
        """Note that the scheduler has the job off the device."""
        self.off_device = True

    def stored(self, checkpoint: Path | None) -> None:
        """Note that a step is stored, with this newest adapter if it was written."""
        self.checkpoint = str(checkpoint or self.checkpoint)

    def report(self, status: str) -> None:
        """Note that the owner is about to know of this status."""
        self.reported = status


class Notice:
    """Lets another thread say that there is something to find."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called, in that thread, for each notice."""
        self._wake, self.given = wake, False

    def __call__(self) -> None:
        self.given = True
        self._wake()

    def give(self) -> None:
        """Give notice to the loop's own thread."""
        self.given = True

    def clear(self) -> None:
        """Take the notice: the loop checks for news now."""
        self.given = False


def nobody(news: PartNews) -> None:
    """Do nothing: there is no other rank."""


class TuningHandler(Handler):
    """Takes, changes and ends tuning jobs."""

    receives = (StartJob, ChangeJob)

    def __init__(
        self,
        tuner: Tuner,
        trainer: Trainer,
        adapters: AdapterHandler,
        rules: TuningRules,
        notice: Notice,
        announce: Callable[[PartNews], None] = nobody,
    ) -> None:
        """The trainer was made to call `notice` when it is done with a state. `announce` lets other ranks know."""
        self._announce = announce
        self._tuner, self._trainer, self._adapters, self._rules = tuner, trainer, adapters, rules
        self._notice = notice
        self._reader = ThreadPoolExecutor(1, "holdfast-read-job")
        self._reading: deque[tuple[int, JobStart, Future[Any]]] = deque()
        """Jobs in the order in which they were asked for: number, job, and what the trainer has prepared."""
        self._open: dict[str, _Open] = {}
        self._answers: deque[messages.FromEngine] = deque()
        self._steps: list[tuple[str, int]] = []
        """The running job and its step when `between_steps` was last called; empty if none ran."""
        self._checked_at = 0.0
        """Time when all jobs were last checked."""

    @property
    def ready(self) -> bool:
        return (
            bool(self._answers or self._tuner.ended or self._tuner.refused)
            or self._trainer.has_reports
            or any(
                self._visible(job, known, self._trainer.settled(job)) != known.reported
                for job, known in self._open.items()
                if not known.off_device
            )
        )

    @property
    def busy(self) -> bool:
        return bool(self._reading) or any(
            known.off_device or not self._trainer.settled(job) for job, known in self._open.items()
        )

    def between_steps(self) -> bool:
        """Whether an optimizer step has ended since this was asked last."""
        running = [job for job in self._open if self._status(job) == "running"]
        steps = [(job, self._tuner.step_of(job)[0]) for job in running[:1]]
        before, self._steps = self._steps, steps
        return steps != before

    def receive(self, message: StartJob | ChangeJob) -> None:
        if isinstance(message, StartJob):
            self.start(message.number, message.job)
        else:
            self.change(message.number, message.job, message.action)

    def start(self, number: int, job: JobStart) -> None:
        """Begin to read a job; `answers` reports the result."""
        reading = self._reader.submit(self._prepare, job)
        self._reading.append((number, job, reading))
        reading.add_done_callback(lambda _: self._notice())

    def change(self, number: int, job: str, action: JobAction) -> None:
        """Pause, resume, cancel or leave a job; `answers` reports the result."""
        if job not in self._open:
            self._answers.append(JobRefused(number, f"there is no open job {job}", True))
            return
        known = self._open[job]
        if not known.off_device:
            if action in ("cancel", "leave"):
                known.leave(cancelled=action == "cancel")
                self._tuner.remove(job)
            elif self._status(job) != "ending":
                (self._tuner.pause if action == "pause" else self._tuner.resume)(job)
        self._notice.give()
        self._answers.append(JobChanged(number))

    def answers(self) -> Iterator[messages.FromEngine]:
        """Results and events of jobs since the last call."""
        while self._answers:
            yield self._answers.popleft()
        while self._reading and self._reading[0][2].done():
            number, job, reading = self._reading.popleft()
            yield self._take(number, job, reading)
        now = time.monotonic()
        urgent = self._tuner.ended or self._tuner.refused or self._trainer.has_reports or self._notice.given
        if self._open and (urgent or now >= self._checked_at + CHECK_SECONDS):
            self._notice.clear()
            self._checked_at = now
            if events := self._events():
                yield JobProgress(events)

    def close(self) -> None:
        """Store all jobs on the disk."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._trainer.shut_down()

    # Taking a job

    def _prepare(self, start: JobStart) -> Any:
        """Read a job's files, and write its job.json if it is new. In the reader's thread. Raises ValueError."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", start.id):
            raise ValueError(f"the job's id is {start.id[:128]!r}; it must have 1 to 128 letters, digits, or . _ -")
        check_adapter_name(start.name)
        if start.name == self._rules.base_model:
            raise ValueError(f"the name {start.name} is taken: it is the model's")
        directory = Path(start.directory)
        try:
            if not (directory / JOB_FILE).exists():
                write_job(directory, self._new_job(start, directory))
            job = read_job(directory)
            if (job.id, job.data_digest, job.validation_digest) != (
                start.id,
                start.data_digest,
                start.validation_digest,
            ):
                raise ValueError(f"the directory of job {start.id} is that of job {job.id}, or of other examples")
            if job.hyperparameters.rank > self._rules.max_rank:
                rank = job.hyperparameters.rank
                raise ValueError(
                    f"rank is {rank}; max_adapter_rank is {self._rules.max_rank}, so it could not be served"
                )
            if job.hyperparameters.dora and not self._rules.takes_dora:
                raise ValueError(
                    "the job makes a DoRA, and the engine's slots have no room for what a DoRA scales; start it with "
                    "dora"
                )
            return self._trainer.prepare(directory)
        except OSError as error:
            raise ValueError(f"a file of job {start.id} cannot be read or written: {error.strerror}") from None

    def _new_job(self, start: JobStart, directory: Path) -> TrainingJob:
        """The job in its final form, with the choices left to the engine. Raises ValueError, OSError."""
        for name, digest in ((EXAMPLES_FILE, start.data_digest), (VALIDATION_FILE, start.validation_digest)):
            if digest and digest_of(directory / name) != digest:
                raise ValueError(f"{name} of job {start.id} is not the file of its digest")
        lengths = Examples(directory / EXAMPLES_FILE).lengths.tolist()
        longest = max(lengths)
        if start.validation_digest:
            longest = max(longest, int(Examples(directory / VALIDATION_FILE).lengths.max()))
        batch_size = min(start.batch_size or auto_batch_size(len(lengths)), max(1, len(lengths)))
        given = Hyperparameters(
            epochs=start.epochs or auto_epochs(len(lengths), batch_size),
            batch_size=batch_size,
            learning_rate=start.learning_rate,
            rank=start.rank,
            alpha=2.0 * start.rank if start.alpha is None else start.alpha,
            modules=start.modules or (self._rules.dora_modules if start.dora else self._rules.modules),
            dora=start.dora,
            micro_batch=start.micro_batch or self._rules.micro_batch or 1,
            seed=start.seed,
        )
        if not (start.micro_batch or self._rules.micro_batch):
            given = self._sized(given, longest, most=sum(sorted(lengths)[-batch_size:]))
        return TrainingJob(
            id=start.id,
            hyperparameters=given,
            base_model=self._rules.base_model,
            base_digest=self._rules.base_digest,
            data_digest=start.data_digest,
            validation_digest=start.validation_digest,
            threads=self._rules.threads,
        )

    def _sized(self, given: Hyperparameters, longest: int, *, most: int) -> Hyperparameters:
        """The hyperparameters with the micro-batch that suits the target or the bound, and the memory that may be lent.

        `longest` is the number of tokens of the longest example; no step has more than `most`.
        """
        tuner, rules = self._tuner, self._rules
        bound = rules.bound if 0 < rules.bound < inf else DEFAULT_BOUND
        tokens = tuner.cost.auto_micro_batch(rules.target, longest)

        def in_time() -> bool:
            if rules.target is not None:
                return tuner.largest_unit(tokens) <= tuner.max_unit_seconds
            return tokens < 2 * LEAST_MICRO_BATCH or tuner.cost.iteration((tokens,)) <= bound

        def in_memory() -> bool:
            return self._trainer.blocks_for(given, min(tokens, most)) <= tuner.max_blocks

        while tokens // 2 >= longest and not (in_time() and in_memory()):
            tokens //= 2
        return replace(given, micro_batch=tokens)

    def _take(self, number: int, start: JobStart, reading: Future[Any]) -> messages.FromEngine:
        """Open a job that was read."""
        job = start.id
        try:
            steps = self._trainer.add(reading.result())
        except ValueError as refusal:
            return JobRefused(number, str(refusal)[:REASON_CHARACTERS])
        records = self._trainer.records(job)
        self._announce(JobOpened(job, str(Path(start.directory).absolute()), len(records)))
        try:
            self._tuner.add(
                job,
                steps,
                lambda tokens, keep: self._trainer.blocks(job, tokens, keep=keep),
                step=len(records),
                tenant=start.tenant,
                keeps_up=lambda: self._trainer.keeps_up(job),
            )
        except ValueError as refusal:
            self._trainer.close(job)
            self._announce(JobClosed(job))
            return JobRefused(number, str(refusal)[:REASON_CHARACTERS])
        if start.paused and len(records) < steps.count:
            self._tuner.pause(job)
        chosen, checkpoint = steps.job.hyperparameters, self._trainer.newest_checkpoint(job)
        self._open[job] = _Open(start, checkpoint)
        self._notice.give()
        validations = [record.validation for record in records if record.validation is not None]
        return JobStarted(number, JobInfo(
            id=job, step=len(records), steps=steps.count, examples=len(steps.lengths),
            trained_tokens=sum(record.tokens for record in records),
            loss=records[-1].loss if records else None,
            validation=validations[-1] if validations else None,
            checkpoint=checkpoint,
            epochs=chosen.epochs, batch_size=chosen.batch_size, learning_rate=chosen.learning_rate, rank=chosen.rank,
            alpha=chosen.alpha, modules=chosen.modules, dora=chosen.dora, micro_batch=chosen.micro_batch,
            untold=tuple(
                JobStep(job, number, steps.count, record.tokens, record.loss, record.validation)
                for number, record in enumerate(records[start.known :], start=start.known + 1)
            ),
        ))  # fmt: skip

    # Following jobs

    def _status(self, job: str) -> str:
        try:
            return self._tuner.status(job)
        except KeyError:
            return "ending"

    def _events(self) -> list[JobEvent]:
        """Events since the last call, in order."""
        events: list[JobEvent] = []
        while self._tuner.ended:
            self._open[self._tuner.ended.popleft()].leave_device()
        # A settled job has reported all its steps before this looks for reports.
        settled = {job for job in self._open if self._trainer.settled(job)}
        leaving = {job for job in settled if self._open[job].off_device}
        for report in self._trainer.reports():
            known = self._open[report.job]
            if isinstance(report, JobFailure):
                known.fail(report.reason)
                self._tuner.remove(report.job)
                continue
            events += self._reported(known, "running")
            events.append(_step_event(report))
            known.stored(report.checkpoint)
        while self._tuner.refused:
            job, reason = self._tuner.refused.popleft()
            if job in self._open:
                self._open[job].fail(reason)
                self._tuner.remove(job)
        while self._tuner.ended:  # one that failed and was not on the device
            self._open[self._tuner.ended.popleft()].leave_device()
        for job in [*self._open]:
            known = self._open[job]
            if not known.off_device:
                events += self._reported(known, self._visible(job, known, job in settled))
            elif job in leaving:
                events += self._end(job, known)
        return events

    def _visible(self, job: str, known: _Open, settled: bool) -> str:
        """The status that a job's owner should know of. `settled`: all of it is stored, and all steps are reported."""
        status = self._status(job)
        if status == "paused" and (self._trainer.is_resident(job) or not settled):
            return known.reported  # it leaves the device, or its state is on the way to the disk
        return known.reported if status == "ending" else status

    def _reported(self, known: _Open, status: str) -> list[JobEvent]:
        """The event of a status, if it is a new one."""
        if status == known.reported or status not in ("queued", "running", "paused"):
            return []
        known.report(status)
        return [JobStatus(known.start.id, status)]  # type: ignore[arg-type]

    def _end(self, job: str, known: _Open) -> list[JobEvent]:
        """End a job that is off the device and stored; a complete one only once its adapter is served."""
        if known.cancelled and not known.failure:
            self._forget(job, self._trainer.discard)
            return [JobEnded(job, "cancelled")]
        if known.failure:
            self._forget(job, self._trainer.close)
            return [JobEnded(job, "failed", " ".join(known.failure.split())[:REASON_CHARACTERS])]
        if known.left and self._trainer.next_slice(job)[0] < self._trainer.steps(job).count:
            self._forget(job, self._trainer.close)
            return [JobEnded(job, "left")]
        if not known.reading:
            known.reading.append(self._reader.submit(self._adapters.read, known.start.name, known.checkpoint))
            known.reading[0].add_done_callback(lambda _: self._notice())
        if not known.reading[0].done():
            return []
        try:
            read = known.reading[0].result()
        except ValueError as error:
            self._forget(job, self._trainer.close)
            return [JobEnded(job, "failed", f"the adapter cannot be served: {error}", checkpoint=known.checkpoint)]
        self._forget(job, self._trainer.close)
        info = self._adapters.register(read)
        return [JobEnded(job, "succeeded", adapter=info, checkpoint=known.checkpoint)]

    def _forget(self, job: str, how: Callable[[str], None]) -> None:
        how(job)
        self._announce(JobClosed(job))
        del self._open[job]


def _step_event(report: StepReport) -> JobStep:
    record, checkpoint = report.record, str(report.checkpoint or "")
    return JobStep(
        report.job, report.step + 1, report.steps, record.tokens, record.loss, record.validation, checkpoint
    )  # fmt: skip
