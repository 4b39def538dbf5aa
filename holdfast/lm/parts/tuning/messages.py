"""Messages about tuning jobs, and the values in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from holdfast.core.types import AdapterInfo
from holdfast.lm.parts.message import Message

JobAction = Literal["pause", "resume", "cancel", "leave"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStart:
    """A tuning job as its owner asks for it. JobInfo has the values that the engine chose."""

    id: str
    """Letters, digits, and . _ -; at most 128. A job that continues keeps its id."""
    directory: str
    """Directory of this job alone. It holds examples.bin, and validation.bin if there is a `validation_digest`."""
    name: str
    """Name under which the finished adapter is served, at once. It must be free at the start and at the end."""
    tenant: str = ""
    """The owner. Jobs of several tenants take turns. The caller decides who may name the adapter."""
    data_digest: str
    """SHA-256 of examples.bin in hexadecimal, as `write_examples` returns it."""
    validation_digest: str = ""
    epochs: int | None = None
    """Number of epochs. None, here and below: chosen by the number of examples (`auto_epochs`, `auto_batch_size`)."""
    batch_size: int | None = None
    """Number of examples in an optimizer step."""
    learning_rate: float = 2e-4
    rank: int = 16
    alpha: float | None = None
    """Scale of the adapter. None: twice the rank."""
    modules: tuple[str, ...] = ()
    """Layers to adapt, out of q, k, v, o, gate, up, down. Empty: all of them."""
    dora: bool = False
    """Whether the adapter is a DoRA."""
    micro_batch: int | None = None
    """Most tokens that are computed at once. None: the engine's configuration applies."""
    seed: int = 0
    paused: bool = False
    """Begin paused: nothing runs before `resume`."""
    known: int = 0
    """Number of finished steps whose events the owner has received."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """A job as the engine has accepted it."""

    id: str
    step: int
    """Optimizer steps done, and stored, before it was started here."""
    steps: int
    """Number of optimizer steps in the whole job."""
    examples: int
    trained_tokens: int
    """Number of tokens trained in the finished steps."""
    loss: float | None
    """Loss of the last finished step; None before the first."""
    validation: float | None
    """Loss of the last validation; None before the first."""
    checkpoint: str
    """Directory of the adapter after the last complete epoch, in PEFT's format; empty if there is none."""
    epochs: int
    batch_size: int
    learning_rate: float
    rank: int
    alpha: float
    modules: tuple[str, ...]
    dora: bool
    micro_batch: int
    untold: tuple[JobStep, ...] = ()
    """Steps done after those that the owner knows, in order. None of them names a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrivenStart:
    """A driven job as its owner asks for it: a job whose work comes as calls. DrivenInfo has the engine's choices."""

    id: str
    """Letters, digits, and . _ -; at most 128. A job that continues keeps its id."""
    directory: str
    """Directory of this job alone. Its owner writes each call to a file there (`holdfast.training.calls`)."""
    tenant: str = ""
    """The owner. Jobs of several tenants take turns."""
    rank: int = 16
    alpha: float | None = None
    """Scale of the adapter. None: twice the rank."""
    modules: tuple[str, ...] = ()
    """Layers to adapt, out of q, k, v, o, gate, up, down. Empty: all of those that `attention` and `mlp` name."""
    attention: bool = True
    mlp: bool = True
    seed: int = 0
    micro_batch: int | None = None
    """Most tokens that are computed at once. None: the engine chooses. A longer datum is computed by itself, up to
    DrivenInfo.micro_batch."""
    known: int = 0
    """Number of calls whose results the owner has. The job reports no call before them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrivenInfo:
    """A driven job as the engine has accepted it."""

    id: str
    calls: int
    """Number of calls that the stored state includes. The engine computes later ones again from their files."""
    updates: int
    """Number of updates of the parameters that the stored state includes."""
    rank: int
    alpha: float
    modules: tuple[str, ...]
    micro_batch: int
    """Most tokens of a datum."""


class JobStep(msgspec.Struct, array_like=True, frozen=True, tag="step"):
    """An optimizer step is done and stored: a killed engine does not compute it again."""

    job: str
    step: int
    """Number of steps done including this one: 1 to `steps`, each once and in order."""
    steps: int
    """Number of optimizer steps in the whole job."""
    tokens: int
    """Number of tokens that this step trained on."""
    loss: float
    """Mean over the step's weighted tokens, before its update."""
    validation: float | None = None
    """Mean over the validation examples, after the update, at each epoch's end and every 100 steps; else None."""
    checkpoint: str = ""
    """The directory of the adapter after this step, if it ended an epoch; else empty."""


class JobStatus(msgspec.Struct, array_like=True, frozen=True, tag="status"):
    """The job has a new status. The first comes after the start."""

    job: str
    status: Literal["queued", "running", "paused"]
    """queued: another job's turn; running: its steps are computed when there is time; paused: by request."""


class JobEnded(msgspec.Struct, array_like=True, frozen=True, tag="ended"):
    """The last event of a job. Its directory belongs to the caller again."""

    job: str
    outcome: Literal["succeeded", "failed", "cancelled", "left"]
    """left: its state is on the disk, and it continues when it is started again."""
    reason: str = ""
    """The reason why it failed, in one line; empty if it did not."""
    adapter: AdapterInfo | None = None
    """The adapter, if the job succeeded: requests may name it from now on."""
    checkpoint: str = ""
    """The adapter's directory, if the job succeeded."""


JobEvent = JobStep | JobStatus | JobEnded


class CallDone(msgspec.Struct, array_like=True, frozen=True, tag="call-done"):
    """A call of a driven job is done, and its result is in its file. After an update, the state is stored as well."""

    job: str
    number: int
    seconds: float = 0.0
    """Seconds from the call's first slice until its result was stored; 0 for one that an earlier engine has done."""


class CallFailed(msgspec.Struct, array_like=True, frozen=True, tag="call-failed"):
    """A call of a driven job was refused before it began. It has changed nothing, and the job goes on after it."""

    job: str
    number: int
    reason: str


DrivenEvent = CallDone | CallFailed | JobEnded


class StartJob(Message, tag="start-job"):
    """To the engine: take this tuning job; the answer is JobStarted or JobRefused."""

    number: int
    job: JobStart


class ChangeJob(Message, tag="change-job"):
    """To the engine: pause, resume, cancel or leave this open job; the answer is JobChanged or JobRefused."""

    number: int
    job: str
    action: JobAction


class JobStarted(Message, tag="job-started"):
    """From the engine: the job is accepted. Its events follow."""

    number: int
    info: JobInfo


class JobChanged(Message, tag="job-changed"):
    """From the engine: it has received the change. Events report the effect."""

    number: int


class JobRefused(Message, tag="job-refused"):
    """From the engine: a job that it does not accept or change, with the reason. The reason names no directory."""

    number: int
    reason: str
    missing: bool = False
    """Whether there is no open job of this id."""


class JobProgress(Message, tag="job-progress"):
    """From the engine: events of jobs, in order."""

    events: list[JobEvent]


class StartDriven(Message, tag="start-driven"):
    """To the engine: take this driven job; the answer is DrivenStarted or JobRefused."""

    number: int
    job: DrivenStart


class RunCall(Message, tag="run-call"):
    """To the engine: the call of this number is on the disk, and all before it; the answer is JobChanged or JobRefused.

    The engine may have the call already.
    """

    number: int
    job: str
    call: int


class DrivenStarted(Message, tag="driven-started"):
    """From the engine: the driven job is accepted. Its events follow."""

    number: int
    info: DrivenInfo


class DrivenProgress(Message, tag="driven-progress"):
    """From the engine: events of driven jobs, in order."""

    events: list[DrivenEvent]


ToEngine = StartJob | ChangeJob | StartDriven | RunCall
FromEngine = JobStarted | JobChanged | JobRefused | JobProgress | DrivenStarted | DrivenProgress
