"""Steps that are done: what each adds to the job's ledger, what it writes, and what its owner gets to know."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import torch

from holdfast.training.call_files import refuse_call
from holdfast.training.calls import CallResult, read_result, write_result
from holdfast.training.state import CallCounts, StepRecord, StepRows

Host = Mapping[str, torch.Tensor]
"""The vectors of a job on the host, by name (`storage.STORED`)."""
L = TypeVar("L", StepRows, CallCounts)


@dataclass(frozen=True)
class StepReport:
    """An optimizer step whose result is stored: a killed engine does not compute it again."""

    job: str
    step: int
    """The number of the step, from 0."""
    steps: int
    """Number of steps in the whole job."""
    record: StepRecord
    checkpoint: Path | None
    """The directory of the adapter after this step, in PEFT's format; None if it was not written."""


@dataclass(frozen=True)
class CallReport:
    """A call of a driven job whose result is stored, or that was refused."""

    job: str
    number: int
    seconds: float
    """Seconds from the call's first slice until its result was stored."""
    refusal: str = ""
    """The reason why it was refused; empty if it is done."""


@dataclass(frozen=True)
class JobFailure:
    """A job that cannot continue. Its last stored step stays."""

    job: str
    reason: str


class Done(ABC, Generic[L]):
    """A step that is computed, or being computed on the device, and that no state holds yet.

    The methods are called once the device is done, in a thread that may write.
    """

    step: int
    """The number of the step."""
    replays: bool = False
    """Whether a file gives the step again with the same bits. Then its result waits for no state that holds it."""

    def store(self, host: Host) -> None:
        """Write what the step makes of the vectors. Raises OSError."""

    def write(self) -> None:
        """Write the step's result. Raises OSError, and ArithmeticError for one that is not finite."""

    def refuse(self, reason: str) -> None:
        """Note that the step has ruined the vectors, so that the job can continue without it."""

    @abstractmethod
    def then(self, ledger: L) -> L:
        """The ledger with this step. Raises ArithmeticError for a result that is not finite."""

    @abstractmethod
    def report(self, checkpoint: Path | None) -> StepReport | CallReport | None:
        """The report for the job's owner; None if there is none.

        `checkpoint` is the adapter that was written after the step; None if none was.
        """


@dataclass(eq=False)
class DoneStep(Done[StepRows]):
    """An optimizer step of a job over files."""

    job: str
    step: int
    steps: int
    tokens: int
    loss: torch.Tensor
    """The loss. It is on the host once the device is done."""
    validation: torch.Tensor | None

    @property
    def _record(self) -> StepRecord:
        return StepRecord(
            float(self.loss), None if self.validation is None else float(self.validation), self.tokens
        )  # fmt: skip

    def then(self, ledger: StepRows) -> StepRows:
        record = self._record
        if not math.isfinite(record.loss):
            raise ArithmeticError(f"the loss of step {self.step} is {record.loss}: lower the learning rate")
        return ledger.then(record)

    def report(self, checkpoint: Path | None) -> StepReport:
        return StepReport(self.job, self.step, self.steps, self._record, checkpoint)


@dataclass(eq=False)
class DoneCall(Done[CallCounts]):
    """A call of a driven job."""

    job: str
    directory: Path
    step: int
    """The number of the call."""
    updates: int
    """Number of updates of the parameters, this call included."""
    is_known: bool
    """Whether the owner has its result: it was computed again after a crash."""
    began: float
    """Monotonic time of its first slice."""
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Numbers by name, each on the host once the device is done."""
    logprobs: torch.Tensor | None = None  # [T] or [T, K] on the host, all data one after the other
    lengths: Sequence[int] = ()
    """Number of positions of each datum."""
    widths: tuple[int, ...] = ()
    """As those of `CallData`: without them all data have K targets."""
    save: Callable[[Host], None] | None = None
    """Writes what the call saves; None if it saves nothing."""
    failure: str = ""
    """The reason why it could not save; empty if it could."""
    replays: bool = False

    def store(self, host: Host) -> None:
        if self.save is None:
            return
        try:
            self.save(host)
        except OSError as error:
            self.failure = f"it cannot be saved: {error.strerror}"
            self.refuse(self.failure)

    def write(self) -> None:
        if self.failure or (self.is_known and self._is_written()):
            return
        parts = [] if self.logprobs is None else [*torch.split(self.logprobs.float(), [*self.lengths])]
        if self.widths:  # The probabilities of what fills up a datum's targets mean nothing.
            parts = [part[:, :width] for part, width in zip(parts, self.widths, strict=True)]
        metrics = {name: float(value) for name, value in self.metrics.items()}
        try:
            write_result(self.directory, CallResult(self.step, metrics, [part.numpy() for part in parts]))
        except ValueError as error:
            self.refuse(str(error))
            raise ArithmeticError(f"call {self.step}: {error}") from None

    def _is_written(self) -> bool:
        """Whether the result can be read. A host that lost power may have lost one that its owner knows."""
        try:
            read_result(self.directory, self.step)
        except (OSError, ValueError):
            return False
        return True

    def refuse(self, reason: str) -> None:
        refuse_call(self.directory, self.step, reason)

    def then(self, ledger: CallCounts) -> CallCounts:
        return CallCounts(self.step + 1, self.updates)

    def report(self, checkpoint: Path | None) -> CallReport | None:
        seconds = time.monotonic() - self.began
        return None if self.is_known else CallReport(self.job, self.step, seconds, self.failure)


@dataclass(eq=False)
class RefusedCall(Done[CallCounts]):
    """A call of a driven job that was refused. It changes nothing."""

    job: str
    step: int
    is_known: bool
    reason: str

    def then(self, ledger: CallCounts) -> CallCounts:
        return ledger

    def report(self, checkpoint: Path | None) -> CallReport | None:
        return None if self.is_known else CallReport(self.job, self.step, 0.0, self.reason)
