"""TuningHandler: takes, changes and ends tuning jobs while an engine serves, and reports on them to their owner.

Files are read in a thread of its own, and states are written in one of the trainer's; the loop waits for neither. A job
ends here in this order: the scheduler has it off the device, the trainer has stored all of it, its adapter is read and
served, and its owner gets the report.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, ClassVar

from holdfast.engine import messages
from holdfast.engine.link import one_line
from holdfast.engine.process.handler import Handler
from holdfast.engine.process.parts.adapters import AdapterHandler
from holdfast.engine.process.parts.driven_calls import CallQueue
from holdfast.lm.parts.adapters.options import check_adapter_name
from holdfast.lm.parts.tuning.messages import (
    CallDone,
    CallFailed,
    ChangeJob,
    DrivenEvent,
    DrivenInfo,
    DrivenProgress,
    DrivenStart,
    DrivenStarted,
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
    RunCall,
    StartDriven,
    StartJob,
)
from holdfast.lm.parts.tuning.options import DEFAULT_BOUND
from holdfast.lm.parts.tuning.tuner import JobOutline, Tuner
from holdfast.lm.parts.tuning.values import JobClosed, JobOpened
from holdfast.lm.types.news import PartNews
from holdfast.training.call_files import calls_from, refusal_of
from holdfast.training.data import EXAMPLES_FILE, VALIDATION_FILE, Examples, digest_of
from holdfast.training.done import CallReport, JobFailure, StepReport
from holdfast.training.jobs import Hyperparameters, TrainingJob, auto_batch_size, auto_epochs, modules_of
from holdfast.training.state import JOB_FILE, read_job, write_job
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
class OpenJob:
    """A job that is open in the trainer."""

    id: str
    reported: str = ""
    """The status that its owner knows."""
    failure: str = ""
    """Why it cannot go on."""
    cancelled: bool = False
    left: bool = False
    off_device: bool = False
    reading: list[Future[Any]] = field(default_factory=list)
    """The read of a complete job's adapter; empty before."""

    tells_status: ClassVar[bool]
    """Whether its owner gets to know of its status."""
    progress: ClassVar[type[JobProgress] | type[DrivenProgress]]
    """The message that has its events."""

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

    def report(self, status: str) -> None:
        """Note that the owner is about to know of this status."""
        self.reported = status

    @property
    def goes_on(self) -> bool:
        """Whether the job is to go on here."""
        return not (self.left or self.failure or self.off_device)

    @property
    def busy(self) -> bool:
        """Whether another thread works for the job."""
        return False

    def advance(self) -> list[Any]:
        """Go on with what other threads have done. Returns the events of it. Raises OSError."""
        return []


@dataclass(eq=False)
class OpenFiles(OpenJob):
    """A job over files."""

    name: str = ""
    """Name of its adapter."""
    checkpoint: str = ""
    """The directory of the newest adapter; empty if there is none."""

    tells_status = True
    progress = JobProgress

    def event(self, report: StepReport) -> JobStep:
        """The event of a step that is stored, with its adapter if that was written."""
        record, checkpoint = report.record, str(report.checkpoint or "")
        self.checkpoint = checkpoint or self.checkpoint
        return JobStep(
            report.job, report.step + 1, report.steps, record.tokens, record.loss, record.validation, checkpoint
        )  # fmt: skip


@dataclass(eq=False)
class OpenDriven(OpenJob):
    """A driven job."""

    calls: CallQueue = field(kw_only=True)
    untold: list[DrivenEvent] = field(kw_only=True)
    """Events of calls that an earlier engine has done, and that the owner does not know of."""

    tells_status = False
    progress = DrivenProgress

    @property
    def busy(self) -> bool:
        return self.calls.busy

    def advance(self) -> list[DrivenEvent]:
        self.calls.advance()
        untold, self.untold = self.untold, []
        return untold

    def event(self, report: CallReport) -> CallDone | CallFailed:
        """The event of a call that is done or refused."""
        if report.refusal:
            return CallFailed(report.job, report.number, report.refusal)
        return CallDone(report.job, report.number, report.seconds)


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

    receives = (StartJob, StartDriven, RunCall, ChangeJob)

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
        self._call_reader = ThreadPoolExecutor(1, "holdfast-read-call")
        """Reads calls of driven jobs, which do not wait for the large files of other jobs."""
        self._reading: deque[tuple[int, JobStart | DrivenStart, Future[Any]]] = deque()
        """Jobs in the order in which they were asked for: number, job, and what was prepared."""
        self._open: dict[str, Any] = {}
        """The open jobs, by id: `OpenFiles` and `OpenDriven`."""
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
            known.off_device or known.busy or not self._trainer.settled(job) for job, known in self._open.items()
        )

    def between_steps(self) -> bool:
        """Whether an optimizer step has ended since this was asked last."""
        running = [job for job in self._open if self._status(job) == "running"]
        steps = [(job, self._tuner.step_of(job)[0]) for job in running[:1]]
        before, self._steps = self._steps, steps
        return steps != before

    def receive(self, message: StartJob | StartDriven | RunCall | ChangeJob) -> None:
        match message:
            case StartJob(number, job):
                self.start(number, job)
            case StartDriven(number, driven):
                self._read(number, driven, self._prepare_driven)
            case RunCall(number, id, call):
                self._run_call(number, id, call)
            case ChangeJob(number, id, action):
                self.change(number, id, action)

    def start(self, number: int, job: JobStart) -> None:
        """Begin to read a job; `answers` reports the result."""
        self._read(number, job, self._prepare)

    def _read(self, number: int, start: Any, prepare: Callable[[Any], Any]) -> None:
        def work() -> Any:
            try:
                return prepare(start)
            except ValueError:
                raise
            except Exception as error:  # A damaged file of one job must not end the engine, at each start again.
                log.exception("holdfast: job %s cannot be read", start.id)
                raise ValueError(f"the files of job {start.id} cannot be read: {type(error).__name__}") from None

        reading = self._submit(work)
        self._reading.append((number, start, reading))

    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Let the reader's thread work, and look for the result when it is there."""
        return self._watched(self._reader.submit(work))

    def _submit_call(self, work: Callable[[], Any]) -> Future[Any]:
        """Likewise for the thread that reads calls."""
        return self._watched(self._call_reader.submit(work))

    def _watched(self, future: Future[Any]) -> Future[Any]:
        future.add_done_callback(lambda _: self._notice())
        return future

    def _run_call(self, number: int, job: str, call: int) -> None:
        """Let a driven job take a call that is on the disk; `answers` reports the result."""
        known = self._open.get(job)
        if not isinstance(known, OpenDriven) or not known.goes_on:
            self._answers.append(JobRefused(number, f"there is no open driven job {job}", True))
            return
        reason = known.calls.run(call)
        self._answers.append(JobRefused(number, reason) if reason else JobChanged(number))
        self._notice.give()

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
            take = self._take if isinstance(job, JobStart) else self._take_driven
            yield take(number, job, reading)  # type: ignore[arg-type]
        now = time.monotonic()
        urgent = self._tuner.ended or self._tuner.refused or self._trainer.has_reports or self._notice.given
        if self._open and (urgent or now >= self._checked_at + CHECK_SECONDS):
            self._notice.clear()
            self._checked_at = now
            for progress, events in self._events().items():
                yield progress(events)

    def close(self) -> None:
        """Store all jobs on the disk."""
        for reader in (self._reader, self._call_reader):
            reader.shutdown(wait=True, cancel_futures=True)
        self._trainer.shut_down()

    # Taking a job

    def _prepare(self, start: JobStart) -> Any:
        """Read a job's files, and write its job.json if it is new. In the reader's thread. Raises ValueError."""
        check_adapter_name(start.name)
        if start.name == self._rules.base_model:
            raise ValueError(f"the name {start.name} is taken: it is the model's")
        job = self._job_of(start, self._new_job)
        if (job.data_digest, job.validation_digest) != (start.data_digest, start.validation_digest):
            raise ValueError(f"the directory of job {start.id} is that of other examples")
        if job.hyperparameters.dora and not self._rules.takes_dora:
            raise ValueError(
                "the job makes a DoRA, and the engine's slots have no room for what a DoRA scales; start it with dora"
            )
        return self._prepared(start.id, Path(start.directory), 0)

    def _prepare_driven(self, start: DrivenStart) -> tuple[Any, int, list[DrivenEvent]]:
        """Likewise for a driven job.

        Also returns the number after its last call, and the events of stored calls that the owner does not know.
        """
        directory = Path(start.directory)
        job = self._job_of(start, self._new_driven)
        if not job.driven:
            raise ValueError(f"job {start.id} is a job over files")
        prepared = self._prepared(start.id, directory, start.known)
        untold: list[DrivenEvent] = []
        for number in range(start.known, prepared.step):
            reason = refusal_of(directory, number)
            untold.append(CallFailed(job.id, number, reason) if reason else CallDone(job.id, number))
        return prepared, calls_from(directory, prepared.step), untold

    def _job_of(self, start: Any, make: Callable[[Any, Path], TrainingJob]) -> TrainingJob:
        """The job of a directory, which is made from its start if it is new. Raises ValueError."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", start.id):
            raise ValueError(f"the job's id is {start.id[:128]!r}; it must have 1 to 128 letters, digits, or . _ -")
        directory = Path(start.directory)
        try:
            if not (directory / JOB_FILE).exists():
                write_job(directory, make(start, directory))
            job = read_job(directory)
        except OSError as error:
            raise ValueError(f"a file of job {start.id} cannot be read or written: {error.strerror}") from None
        if job.id != start.id:
            raise ValueError(f"the directory of job {start.id} is that of job {job.id}")
        rank = job.hyperparameters.rank
        if rank > self._rules.max_rank:
            raise ValueError(f"rank is {rank}; max_adapter_rank is {self._rules.max_rank}, so it could not be served")
        return job

    def _prepared(self, job: str, directory: Path, known: int) -> Any:
        """A job that the trainer has prepared. Raises ValueError."""
        try:
            return self._trainer.prepare(directory, known)
        except OSError as error:
            raise ValueError(f"a file of job {job} cannot be read or written: {error.strerror}") from None

    def _new_driven(self, start: DrivenStart, directory: Path) -> TrainingJob:
        """A driven job in its final form. Raises ValueError."""
        given = Hyperparameters(
            epochs=1,
            batch_size=1,
            rank=start.rank,
            alpha=_alpha_of(start),
            modules=start.modules or modules_of(self._rules.modules, attention=start.attention, mlp=start.mlp),
            micro_batch=start.micro_batch or self._rules.micro_batch or 1,
            seed=start.seed,
        )
        if not (start.micro_batch or self._rules.micro_batch):
            given = self._sized(given, LEAST_MICRO_BATCH, most=sys.maxsize)
        return self._final(start.id, given, driven=True)

    def _final(self, id: str, given: Hyperparameters, **digests: Any) -> TrainingJob:
        """A job over the base model that is served."""
        return TrainingJob(
            id=id,
            hyperparameters=given,
            base_model=self._rules.base_model,
            base_digest=self._rules.base_digest,
            threads=self._rules.threads,
            **digests,
        )

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
            alpha=_alpha_of(start),
            modules=start.modules or (self._rules.dora_modules if start.dora else self._rules.modules),
            dora=start.dora,
            micro_batch=start.micro_batch or self._rules.micro_batch or 1,
            seed=start.seed,
        )
        if not (start.micro_batch or self._rules.micro_batch):
            given = self._sized(given, longest, most=sum(sorted(lengths)[-batch_size:]))
        return self._final(
            start.id, given, data_digest=start.data_digest, validation_digest=start.validation_digest
        )  # fmt: skip

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
        """Open a job over files that was read."""
        job = start.id
        try:
            steps = self._trainer.add(reading.result())
            records = self._trainer.records(job)
            self._enter(start, steps, len(records))
        except ValueError as refusal:
            return JobRefused(number, one_line(refusal)[:REASON_CHARACTERS])
        if start.paused and len(records) < steps.count:
            self._tuner.pause(job)
        chosen, checkpoint = steps.job.hyperparameters, self._trainer.newest_checkpoint(job)
        self._open[job] = OpenFiles(job, name=start.name, checkpoint=checkpoint)
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

    def _take_driven(self, number: int, start: DrivenStart, reading: Future[Any]) -> messages.FromEngine:
        """Open a driven job that was read."""
        job = start.id
        try:
            prepared, stop, untold = reading.result()
            steps = self._trainer.add(prepared)
            done, updates = self._trainer.counts(job)
            self._enter(start, steps, done)
        except ValueError as refusal:
            return JobRefused(number, one_line(refusal)[:REASON_CHARACTERS])
        calls = CallQueue(
            job, Path(start.directory), self._submit_call, self._tuner, self._trainer, self._announce,
            first=done, stop=stop, known=start.known,
        )  # fmt: skip
        self._open[job] = OpenDriven(job, calls=calls, untold=untold)
        self._notice.give()
        chosen = steps.job.hyperparameters
        return DrivenStarted(number, DrivenInfo(
            id=job, calls=done, updates=updates, rank=chosen.rank, alpha=chosen.alpha, modules=chosen.modules,
            micro_batch=self._trainer.most_tokens(job),
        ))  # fmt: skip

    def _enter(self, start: JobStart | DrivenStart, steps: JobOutline, step: int) -> None:
        """Let the other ranks and the tuner know of a job that is open in the trainer.

        Raises ValueError for a job that the tuner refuses. It is then closed again.
        """
        job = start.id
        self._announce(JobOpened(job, str(Path(start.directory).absolute()), step))
        try:
            self._tuner.add(
                job,
                steps,
                lambda tokens, keep: self._trainer.blocks(job, tokens, keep=keep),
                step=step,
                tenant=start.tenant,
                keeps_up=lambda: self._trainer.keeps_up(job),
            )
        except ValueError:
            self._trainer.close(job)
            self._announce(JobClosed(job))
            raise

    # Following jobs

    def _status(self, job: str) -> str:
        try:
            return self._tuner.status(job)
        except KeyError:
            return "ending"

    def _events(self) -> dict[type[Any], list[Any]]:
        """Events since the last call, in order, by the message that has them."""
        events: dict[type[Any], list[Any]] = defaultdict(list)
        while self._tuner.ended:
            self._open[self._tuner.ended.popleft()].leave_device()
        # A settled job has reported all its steps before this looks for reports.
        settled = {job for job in self._open if self._trainer.settled(job)}
        leaving = {job for job in settled if self._open[job].off_device}
        for known in self._open.values():
            events[known.progress] += self._advanced(known)
        for report in self._trainer.reports():
            known = self._open[report.job]
            if isinstance(report, JobFailure):
                known.fail(report.reason)
                self._tuner.remove(report.job)
                continue
            events[known.progress] += [*self._reported(known, "running"), known.event(report)]
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
                events[known.progress] += self._reported(known, self._visible(job, known, job in settled))
            elif job in leaving:
                events[known.progress] += self._end(job, known)
        return {progress: found for progress, found in events.items() if found}

    def _advanced(self, known: OpenJob) -> list[Any]:
        """The events of what other threads have done for a job."""
        if not known.goes_on:
            return []
        try:
            return known.advance()
        except OSError as error:
            known.fail(f"a file of the job cannot be written: {error.strerror}")
            self._tuner.remove(known.id)
            return []

    def _visible(self, job: str, known: OpenJob, settled: bool) -> str:
        """The status that a job's owner should know of. `settled`: all of it is stored, and all steps are reported."""
        if not known.tells_status:
            return known.reported
        status = self._status(job)
        if status == "paused" and (self._trainer.is_resident(job) or not settled):
            return known.reported  # it leaves the device, or its state is on the way to the disk
        return known.reported if status == "ending" else status

    def _reported(self, known: OpenJob, status: str) -> list[JobEvent]:
        """The event of a status, if it is a new one that the owner gets to know."""
        if not known.tells_status or status == known.reported or status not in ("queued", "running", "paused"):
            return []
        known.report(status)
        return [JobStatus(known.id, status)]  # type: ignore[arg-type]

    def _end(self, job: str, known: Any) -> list[JobEvent]:
        """End a job that is off the device and stored; a complete one only once its adapter is served."""
        if known.cancelled and not known.failure:
            self._forget(job, self._trainer.discard)
            return [JobEnded(job, "cancelled")]
        if known.failure:
            self._forget(job, self._trainer.close)
            return [JobEnded(job, "failed", " ".join(known.failure.split())[:REASON_CHARACTERS])]
        if known.left and not self._trainer.is_complete(job):
            self._forget(job, self._trainer.close)
            return [JobEnded(job, "left")]
        if not known.reading:
            known.reading.append(self._submit(lambda: self._adapters.read(known.name, known.checkpoint)))
        if not known.reading[0].done():
            return []
        try:
            read = known.reading[0].result()
        except ValueError as error:
            self._forget(job, self._trainer.close)
            return [
                JobEnded(job, "failed", f"the adapter cannot be served: {one_line(error)}", checkpoint=known.checkpoint)
            ]
        self._forget(job, self._trainer.close)
        info = self._adapters.register(read)
        return [JobEnded(job, "succeeded", adapter=info, checkpoint=known.checkpoint)]

    def _forget(self, job: str, how: Callable[[str], None]) -> None:
        how(job)
        self._announce(JobClosed(job))
        del self._open[job]


def _alpha_of(start: JobStart | DrivenStart) -> float:
    """The scale of a job's adapter, which the engine chooses if its owner does not."""
    return 2.0 * start.rank if start.alpha is None else start.alpha
