"""TuningClient: tuning jobs of an engine, as the API process sees them: start, drive, change, and their events.

A job lives in its own directory, which the caller makes. The caller puts `examples.bin` there, and `validation.bin` if
there is one (`write_examples`). The engine adds job.json, the job's states and its checkpoints. To continue a job after
an engine has ended, start it again over the same directory: job.json then decides, and the job continues after its last
stored step. A caller that wants the job in the next engine must remember its directory; engines do not look for jobs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Generic, Protocol, TypeVar, cast

from holdfast.core.types import AdapterInfo
from holdfast.engine import messages
from holdfast.engine.client.connection import EngineDead, Questions
from holdfast.lm.parts.tuning.messages import (
    CallDone,
    CallFailed,
    ChangeJob,
    DrivenEvent,
    DrivenInfo,
    DrivenProgress,
    DrivenStart,
    DrivenStarted,
    FromEngine,
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
    ToEngine,
)
from holdfast.training.calls import (
    CALLS,
    RESULTS,
    Call,
    CallData,
    CallResult,
    Datum,
    Limits,
    call_path,
    read_call,
    read_result,
    result_path,
    write_call,
)
from holdfast.training.data import EXAMPLES_FILE, VALIDATION_FILE, digest_of, write_examples
from holdfast.training.jobs import (
    ALL_MODULES,
    VALIDATION_EXAMPLES,
    Hyperparameters,
    auto_batch_size,
    auto_epochs,
    short_module,
)
from holdfast.training.losses import MOST_TARGETS, Adam, Loss

__all__ = [
    "ALL_MODULES",
    "CALLS",
    "EXAMPLES_FILE",
    "MOST_TARGETS",
    "RESULTS",
    "VALIDATION_EXAMPLES",
    "VALIDATION_FILE",
    "Adam",
    "Call",
    "CallData",
    "CallDone",
    "CallFailed",
    "CallResult",
    "Datum",
    "DrivenEvent",
    "DrivenInfo",
    "DrivenRun",
    "DrivenStart",
    "Hyperparameters",
    "JobAction",
    "JobEnded",
    "JobEvent",
    "JobInfo",
    "JobStart",
    "JobStatus",
    "JobStep",
    "Limits",
    "Loss",
    "TuningClient",
    "TuningError",
    "TuningRun",
    "auto_batch_size",
    "auto_epochs",
    "call_path",
    "digest_of",
    "read_call",
    "read_result",
    "result_path",
    "short_module",
    "write_call",
    "write_examples",
]


class TuningError(ValueError):
    """A job that could not be started or changed. The message has the reason; it names no directory."""

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing
        """Whether there is no open job of this id."""


class Changes(Protocol):
    """Changes open jobs: `TuningClient`, or that of several engines."""

    async def change(self, job: str, action: JobAction) -> None: ...

    async def call(self, job: str, number: int) -> None: ...


Event = TypeVar("Event", bound="JobEvent | DrivenEvent")
Info = TypeVar("Info", bound="JobInfo | DrivenInfo")


class OpenRun(Generic[Info, Event]):
    """One open job. Its events wait here until they are read, so leaving early does not stop it; `change` does."""

    def __init__(self, client: Changes, info: Info) -> None:
        """Not for callers, who use `TuningClient.start` or `TuningClient.drive`."""
        self.info = info
        """Sizes of the job, and its progress when it was started here."""
        self._client = client
        self._events: deque[Event] = deque()
        self._changed = asyncio.Event()
        self._dead = ""

    @property
    def id(self) -> str:
        return self.info.id

    async def events(self) -> AsyncGenerator[Event, None]:
        """The events of the job, in order, from its start here: for one reader. JobEnded is the last.

        An event is reported after its result was stored. It is reported once, unless the engine is killed in between.
        Raises EngineDead when the engine ends before the job.
        """
        while True:
            while self._events:
                event = self._events.popleft()
                yield event
                if isinstance(event, JobEnded):
                    return
            if self._dead:
                raise EngineDead(self._dead)
            self._changed.clear()
            await self._changed.wait()

    async def pause(self) -> None:
        """Stop planning the job until `resume`. JobStatus "paused" follows when its state is on the disk."""
        await self._client.change(self.id, "pause")

    async def resume(self) -> None:
        """Continue a job that `pause` stopped."""
        await self._client.change(self.id, "resume")

    async def cancel(self) -> None:
        """End the job and delete its states; its checkpoints stay. JobEnded "cancelled" follows."""
        await self._client.change(self.id, "cancel")

    async def leave(self) -> None:
        """Store the job on the disk and close it, so that it can be started again.

        JobEnded "left" follows, or its real end.
        """
        await self._client.change(self.id, "leave")

    def take(self, event: Event) -> None:
        """Add an event."""
        self._events.append(event)
        self._changed.set()

    def fail(self, reason: str) -> None:
        """End the run with the reason why the engine ended."""
        self._dead = reason
        self._changed.set()


class TuningRun(OpenRun[JobInfo, JobEvent]):
    """An open job over files. Its JobStep events are those of the steps after `info.step`."""


class DrivenRun(OpenRun[DrivenInfo, DrivenEvent]):
    """An open driven job: its owner writes calls to files (`write_call`), and says so here.

    The engine takes calls that are on the disk already, from `info.calls` on, by itself. A call for which the owner did
    not say that it has the result is reported once more, as CallDone or CallFailed.
    """

    async def call(self, number: int) -> None:
        """Let the engine compute a call, whose file is on the disk, as are those of all calls before it.

        Returns when the engine has received it. CallDone follows, or CallFailed for data that it refuses. Raises
        TuningError for a gap before the call and for a job that is not open, and EngineDead.
        """
        await self._client.call(self.id, number)


class TuningClient:
    """The jobs of one engine: `EngineClient.tuning`. For one event loop."""

    def __init__(
        self,
        send: Callable[[messages.ToEngine], None],
        adapters: dict[str, AdapterInfo],
        check_alive: Callable[[], None],
        *,
        drives: bool = True,
    ) -> None:
        """`adapters` are those that requests may name. `check_alive` raises EngineDead for an engine that has ended.

        `drives`: whether the engine's version knows driven jobs.
        """
        self._adapters, self._questions, self._drives = adapters, Questions(send, check_alive), drives
        self._runs: dict[str, TuningRun | DrivenRun] = {}
        self._starting: dict[str, str] = {}
        """Jobs that are open, or about to be: the name that each reserves, by id. A driven job reserves none."""
        self._started: dict[str, TuningRun | DrivenRun] = {}
        """Runs that `start` and `drive` have not returned yet. A short one may have ended by then."""

    @property
    def runs(self) -> dict[str, TuningRun | DrivenRun]:
        """The open jobs, by id."""
        return dict(self._runs)

    @property
    def names(self) -> set[str]:
        """The adapter names that jobs reserve, open or about to be."""
        return {name for name in self._starting.values() if name}

    async def start(self, job: JobStart) -> TuningRun:
        """Begin a job, or continue one whose directory has a job.json. Returns when the engine has accepted it.

        The engine reads the directory's files and checks their digests, so this may take seconds. The job then waits
        for its turn. Cancelling this wait does not stop the job.

        Raises TuningError for a job that cannot be run (an unknown or damaged file, another base model, an example that
        is too long, an id or a name that is taken, too little memory lent to tuning, an engine without tuning) and
        EngineDead.
        """
        self._check_new(job.id)
        if job.name in self._adapters or job.name in self.names:
            raise TuningError(f"the name {job.name} is taken")
        run = await self._open(job.id, job.name, lambda number: StartJob(number, job))
        return cast(TuningRun, run)

    async def drive(self, job: DrivenStart) -> DrivenRun:
        """Begin a driven job, or continue one whose directory has a job.json. Returns when the engine has accepted it.

        Raises TuningError for a job that cannot be run (another base model, an id that is taken, too little memory lent
        to tuning, a damaged call, an engine without tuning or of an older version) and EngineDead.
        """
        if not self._drives:
            raise TuningError("this engine has an older version, which knows no driven jobs; upgrade it")
        self._check_new(job.id)
        run = await self._open(job.id, "", lambda number: StartDriven(number, job))
        return cast(DrivenRun, run)

    async def change(self, job: str, action: JobAction) -> None:
        """Pause, resume, cancel or leave an open job.

        Returns when the engine has received it; events report the effect.

        Pausing a paused job, and so on, is no error. Raises TuningError, with `missing` for a job that is not open (it
        may have ended just now), and EngineDead.
        """
        if job not in self._runs:
            raise TuningError(f"there is no open job {job}", missing=True)
        await asyncio.shield(self._questions.ask(lambda number: ChangeJob(number, job, action)))

    async def call(self, job: str, number: int) -> None:
        """Let an open driven job take a call. See `DrivenRun.call`."""
        if job not in self._runs:
            raise TuningError(f"there is no open job {job}", missing=True)
        await asyncio.shield(self._questions.ask(lambda question: RunCall(question, job, number)))

    def _check_new(self, job: str) -> None:
        if job in self._starting:
            raise TuningError(f"job {job} is open already")

    async def _open(self, job: str, name: str, message: Callable[[int], ToEngine]) -> TuningRun | DrivenRun:
        """Open a job. It is opened even if the wait is cancelled."""
        return await asyncio.shield(asyncio.ensure_future(self._ask_to_open(job, name, message)))

    async def _ask_to_open(self, job: str, name: str, message: Callable[[int], ToEngine]) -> TuningRun | DrivenRun:
        self._starting[job] = name
        try:
            await asyncio.shield(self._questions.ask(message))
        except BaseException:
            self._starting.pop(job, None)
            raise
        return self._started.pop(job)

    def take(self, message: FromEngine) -> None:
        """Handle a message about jobs."""
        match message:
            case JobStarted(number, info):
                self._runs[info.id] = self._started[info.id] = TuningRun(self, info)
                self._questions.answer(number, info)
            case DrivenStarted(number, driven):
                self._runs[driven.id] = self._started[driven.id] = DrivenRun(self, driven)
                self._questions.answer(number, driven)
            case JobChanged(number):
                self._questions.answer(number, None)
            case JobRefused(number, reason, missing):
                self._questions.refuse(number, TuningError(reason, missing=missing))
            case JobProgress(events) | DrivenProgress(events):
                for event in events:
                    self._deliver(event)

    def fail(self, reason: str) -> None:
        """End all runs, because the engine has ended. The jobs keep their last stored state."""
        for run in self._runs.values():
            run.fail(reason)
        self._runs.clear()
        self._starting.clear()
        self._questions.fail(EngineDead(reason))

    def _deliver(self, event: JobEvent | DrivenEvent) -> None:
        if event.job not in self._runs:
            return
        run = self._runs[event.job]
        if isinstance(event, JobEnded):
            del self._runs[event.job], self._starting[event.job]
            if event.adapter is not None:
                self._adapters[event.adapter.name] = event.adapter
        run.take(event)  # type: ignore[arg-type]  # the engine reports events of the job's own kind
