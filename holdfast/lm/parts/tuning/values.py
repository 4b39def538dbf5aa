"""The values that tuning adds to a plan and to a result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from holdfast.lm.types.news import PartNews
from holdfast.lm.types.plan import BlockMove, PartPlan
from holdfast.lm.types.result import PartResult

TrainingAction = Literal["run", "release", "drop", "offload", "restore"]


class TrainingSlice(NamedTuple):
    """Work on one micro-batch of a job, computed after the plan's segments.

    A micro-batch is a list of units: half a layer, attention or MLP, forward or backward, or a chunk of the head; the
    last micro-batch of a step ends with the unit of the optimizer. The result does not depend on where slices are cut.

    - run: compute units [first, stop).
    - release: give up the activations that were kept. The backward computes them again.
    - drop: give up the micro-batch. It begins again at unit 0.
    - offload: move the job's vectors (parameters, gradients, moments) to the host.
    - restore: move them back.
    """

    job: str
    """Its id. Empty: there is no work (`NO_SLICE`)."""
    step: int
    """Number of the optimizer step, from 0."""
    micro_batch: int
    """Id of the job. Empty: there is no work (`NO_SLICE`)."""
    action: TrainingAction
    first: int = 0
    stop: int = 0
    keep: bool = True
    """Whether forward units keep the activations that backward needs; otherwise only the inputs of the halves."""

    def __bool__(self) -> bool:
        """Whether there is any work."""
        return self.job != ""


NO_SLICE = TrainingSlice("", 0, 0, "run")


@dataclass(frozen=True, slots=True)
class TrainingPlan(PartPlan):
    """The training work of a plan, and the memory that training has."""

    slice: TrainingSlice = NO_SLICE
    """Work computed after the segments. A plan may have a slice and no segments."""
    lent: int = 0
    """Number of the cache's last blocks that belong to training from this plan on."""
    moves: tuple[BlockMove, ...] = ()
    """Block moves, applied before everything else of the plan. Table writes name the new places."""

    @property
    def computes(self) -> bool:
        return bool(self.slice)

    @property
    def is_long(self) -> bool:
        return self.computes


@dataclass(frozen=True, slots=True)
class JobOpened(PartNews):
    """A job that plans may have slices of from now on."""

    job: str
    directory: str
    """Directory of its files, on the host of all ranks."""
    step: int
    """Number of steps that are done."""


@dataclass(frozen=True, slots=True)
class JobClosed(PartNews):
    """A job that no plan has slices of any more."""

    job: str


@dataclass(frozen=True, slots=True)
class CallTaken(PartNews):
    """The next call of a driven job. Plans may have slices of it from now on, unless it is refused."""

    job: str
    number: int
    refusal: str = ""
    """The reason why it is refused; empty if it is computed."""


@dataclass(frozen=True, slots=True)
class TrainingReport(PartResult):
    """The time and the results of one slice."""

    job: str = ""
    """The job's id. Empty: there was no slice."""
    step: int = 0
    micro_batch: int = 0
    action: TrainingAction = "run"
    first: int = 0
    stop: int = 0
    seconds: float = 0.0
    """Seconds that the device spent on it. `StepResult.seconds` does not include it."""
    tokens: int = 0
    """Tokens of the micro-batch, if the slice ended it."""
    loss: float | None = None
    """Mean loss over the step's tokens, if the slice ended the step."""
    launch_seconds: float = 0.0
    """Seconds that the host spent to launch it; 0 if launching does not overlap the device's work."""

    @property
    def of_each_rank(self) -> bool:
        return True

    def __bool__(self) -> bool:
        """Whether there was a slice."""
        return self.job != ""

    @property
    def seconds_apart(self) -> float:
        return self.seconds
