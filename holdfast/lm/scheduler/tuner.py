"""Tuner: the queue of tuning jobs, and where each of them stands. It knows sizes and times, never data.

engine                          scheduler                              trainer (holdfast.training)
  │ add(job, steps, blocks)       │                                      │ open(directory) -> steps
  │ pause, resume, remove         │ next_slice(seconds, lent)            │
  │                               │  └─ StepPlan.training ───────────────▶ launch(slice, lent)
  │ ◀── ended ── observe(result) ─┤ ◀─ StepResult.training ──────────────┘
  ▼
close or discard (trainer)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Literal, Protocol

from holdfast.core.training_cost import TrainingCost
from holdfast.lm.types import TrainingResult, TrainingSlice

JobStatus = Literal["queued", "running", "paused", "ending"]


class WorkUnit(Protocol):
    """The least work that a slice can hold (`holdfast.training.jobs.Unit`)."""

    @property
    def kind(self) -> str:
        """One of `core.training_cost.UnitKind`."""
        ...

    @property
    def number(self) -> int:
        """Of the layer, for half a layer."""
        ...


class WorkBatch(Protocol):
    """A micro-batch (`holdfast.training.jobs.MicroBatch`)."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each of its examples."""
        ...

    @property
    def units(self) -> Sequence[WorkUnit]: ...

    @property
    def validation(self) -> bool:
        """It has no backward."""
        ...


class JobOutline(Protocol):
    """The steps of a job as sizes (`holdfast.training.jobs.JobSteps`)."""

    @property
    def count(self) -> int:
        """Optimizer steps of the whole job."""
        ...

    def micro_batches(self, step: int) -> Sequence[WorkBatch]:
        """Those of a step, in order. The same at every call."""
        ...


BlocksOf = Callable[[int, bool], int]
"""Blocks at the end of the cache that a resident job takes with a micro-batch of so many tokens (0: none is open), and
whether activations are kept. `lambda tokens, keep: trainer.blocks(job, tokens, keep=keep)`."""


class Tuner:
    """Decides which job's work comes next. One job is resident at a time; the others wait in order of arrival.

    Jobs of several tenants take turns: after a step, if a turn of TURN_SECONDS is over and another tenant's job waits.

    All methods are called in the scheduler's thread, between its calls.
    """

    def __init__(self, cost: TrainingCost, *, max_blocks: int, max_unit_seconds: float = inf) -> None:
        """`max_blocks` is the most blocks of the cache that are lent to training.

        A job is refused if one of its units is predicted to take longer than `max_unit_seconds`.
        """
        self.cost, self.max_blocks, self.max_unit_seconds = cost, max_blocks, max_unit_seconds
        self.ended: deque[str] = deque()
        """Jobs that are complete, or were removed, and that are off the device: no slice of theirs is planned or in
        flight, and the copies of their vectors come before whatever uses their blocks next. They are not known any
        more. Whoever reads them takes them out, and may close or discard them."""

    # What the engine calls

    def add(self, job: str, steps: JobOutline, blocks: BlocksOf, *, step: int = 0, tenant: str = "") -> None:
        """Queue a job, from its optimizer step `step` on, its first micro-batch.

        Raises ValueError with both numbers if the id is taken, if it has too few steps, if `max_blocks` do not hold its
        vectors and its largest micro-batch without kept activations, or if a unit takes longer than `max_unit_seconds`.
        """
        raise NotImplementedError

    def pause(self, job: str) -> None:
        """Plan nothing more of a job. Its vectors go to the host with the next plan that has room for the copy.

        `status` is then "paused". Raises KeyError for a job that is not known. A paused job may be paused again.
        """
        raise NotImplementedError

    def resume(self, job: str) -> None:
        """Let a paused job wait for its turn again, where it stood; the micro-batch under way begins again."""
        raise NotImplementedError

    def remove(self, job: str) -> None:
        """Plan nothing more of a job, and forget it once it is off the device; `ended` says when. Ignores others."""
        raise NotImplementedError

    def status(self, job: str) -> JobStatus:
        """queued: waits for its turn; running: it is the one whose turn it is; paused: by `pause`; ending: complete, or
        removed, and not yet in `ended`. Raises KeyError for a job that is not known."""
        raise NotImplementedError

    def step_of(self, job: str) -> tuple[int, int]:
        """The optimizer step of a job that is planned next, and how many it has. Raises KeyError."""
        raise NotImplementedError

    # What the scheduler asks

    @property
    def has_work(self) -> bool:
        """Whether a job can run, or has to leave the device. Then the loop goes on without a request."""
        raise NotImplementedError

    @property
    def in_flight(self) -> int:
        """Slices that are planned and whose result is not known."""
        raise NotImplementedError

    def iteration_seconds(self) -> float:
        """T_ft of FineInfer §2.4: an upper estimate of the time of the next iteration, which is one micro-batch.

        The predicted time times the correction by measured ones. 0 if no job can run.
        """
        raise NotImplementedError

    def next_slice(self, seconds: float, lent: int) -> TrainingSlice | None:
        """The next work that is predicted to take at most `seconds` in `lent` blocks. It counts as planned.

        `inf` for a whole micro-batch. None if there is none.
        """
        raise NotImplementedError

    def observe(self, result: TrainingResult) -> None:
        """Learn how long a slice took. Results come in the order of the slices."""
        raise NotImplementedError
