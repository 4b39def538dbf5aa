"""TuningPart: the planner's side of tuning: a slice of training in a plan, and the blocks lent to training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from holdfast.lm.parts.tuning.slabs import Slabs
from holdfast.lm.parts.tuning.tuner import Tuner
from holdfast.lm.parts.tuning.values import TrainingPlan, TrainingReport
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.part import Part, PartQueues, PartStep
from holdfast.lm.types import BlockMove, PartPlan, StepPlan, StepResult


class TuningPart(Part):
    """The jobs of training, and the memory that they have.

    A policy says when there is a slice. It calls `lend` before the verbs of the step, and `train` after them
    (`deferral.Deferred`, `slices.TrainingSlices`).
    """

    name = "tuning"

    def __init__(self, tuner: Tuner) -> None:
        self.tuner = tuner
        """The jobs, and which of them runs next."""
        self._slabs: Slabs
        self._moves: tuple[BlockMove, ...] = ()
        """The block moves of the plan under construction."""
        self._tokens, self._seconds, self._deferred = 0, 0.0, 0.0

    def attach(self, queues: PartQueues) -> None:
        """Lend blocks of this memory. Raises ValueError where state is not paged."""
        if not queues.pool.can_lend:
            raise ValueError("training needs a paged cache")
        self._slabs = Slabs(queues.pool, self.tuner, queues.headroom)

    def lend(self, step: PartStep) -> None:
        """Bring the memory of training closer to its needs. To be called before all verbs of the step.

        When a sequence needs memory of training, it is taken back without this call too.
        """
        assert not step.begun
        self._moves, writes = self._slabs.lend(step.resident, busy=step.busy, now=step.now)
        step.write(writes)

    def train(self, seconds: float = inf, *, at_least_one: bool = False) -> bool:
        """Plan a slice of training that is predicted to take at most `seconds`. To be called after all other verbs.

        `inf` plans the rest of a micro-batch. With `at_least_one`, one unit may take longer. Returns whether a slice
        was added: none is if training already has one in this plan, to give up memory.
        """
        return self._slabs.train(seconds, at_least_one=at_least_one)

    @property
    def seconds_in_flight(self) -> float:
        return self.tuner.expected_seconds

    def defer(self, seconds: float) -> None:
        """Count time for which a request has waited because training goes first."""
        self._deferred += seconds

    @property
    def seconds(self) -> float:
        """Measured seconds of all slices so far."""
        return self._seconds

    def make_room(self, blocks: int, now: float) -> bool:
        return self._slabs.yield_for(blocks, now)

    def begin(self, step: PartStep) -> None:
        self._moves = ()
        self._slabs.begin()

    def finish(self, step: PartStep) -> PartPlan | None:
        """The slice of the plan, and the memory of training, if there is either."""
        slice_, lent = self._slabs.slice, self._slabs.lent
        if slice_ or self._moves:
            step.keep()
        return TrainingPlan(slice_, lent, self._moves) if slice_ or lent or self._moves else None

    @property
    def wants_step(self) -> bool:
        """Whether training waits for blocks that are being copied."""
        return self._slabs.waits

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> Iterable[Entry]:
        """Learn from a slice that was computed. Raises RuntimeError where only one of plan and result has a slice."""
        slice_, report = plan.part(TrainingPlan).slice, result.part(TrainingReport)
        if bool(slice_) != bool(report):
            raise RuntimeError(f"step {plan.step} has slice {slice_ or None}; got {report or None}")
        if report:
            self.tuner.observe(report)
            self._tokens += report.tokens
            self._seconds += report.seconds
            self._slabs.settle()
        return ()

    @property
    def has_work(self) -> bool:
        return self.tuner.has_work

    def stats(self) -> Mapping[str, float]:
        return {
            "blocks_training": self._slabs.lent,
            "training_tokens": self._tokens,
            "training_seconds": self._seconds,
            "deferred_seconds": self._deferred,
        }
