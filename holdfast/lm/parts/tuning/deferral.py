"""Deferred continuous batching (FineInfer §2.4): a request waits for training as long as its bound allows."""

from __future__ import annotations

from itertools import chain

from holdfast.core.types import BATCH_CLASS
from holdfast.lm.parts.tuning.options import DEFAULT_BOUND, TuningOptions
from holdfast.lm.parts.tuning.planner import TuningPart
from holdfast.lm.parts.tuning.share import TuningShare
from holdfast.lm.scheduler.builder import Policy, PolicyExtension, StepBuilder
from holdfast.lm.types import StepPlan, StepResult

SMOOTHING = 0.1
"""Weight of the latest step in the mean time of a step."""


class Deferred(PolicyExtension):
    """FineInfer's deferral rule, which wraps a policy of inference.

    A waiting request starts iff waited + drain + T_ft > bound. T_ft is the upper estimate of one iteration of training
    (`Tuner.iteration_seconds`). An iteration begins when nothing runs, so first the running sequences have to end:
    `drain` is the time until then, at their longest. A request that has to start before an iteration could end would
    wait for nothing, so it starts at once. While nothing runs, whole iterations run. While a stream runs, none begins,
    and only the vectors of a job that has to leave are copied to the host. While only a batch runs, iterations take the
    `share` of the time. A bound of 0 is inference first, and infinity is training to its end. If no job can run,
    nothing is deferred.

    Nobody waits longer than max(bound, T_ft) and one step of inference, as far as rows and memory have room.
    """

    def __init__(
        self,
        inner: Policy,
        part: TuningPart,
        bound: float = DEFAULT_BOUND,
        *,
        share: float = TuningOptions.tuning_share,
    ) -> None:
        """`bound` in seconds, from 0 to infinity; `share` as in `TuningShare`; else ValueError."""
        if not bound >= 0:
            raise ValueError(f"deferral_bound is {bound}; it must be at least 0")
        super().__init__(inner)
        self.part, self.bound = part, bound
        self.share = TuningShare(part, share)
        self._step_seconds = 0.0
        """Mean time of a step of inference lately; 0 before one was measured."""
        self._applied: tuple[float, float, float] | None = None
        """When the rule was last applied, the latest arrival that started then, and the drain; None without a job."""

    def plan(self, step: StepBuilder) -> None:
        tuner = self.part.tuner
        if tuner.in_flight and not step.running:
            return  # a request that starts now would run after the iteration, so it would wait longer
        self.share.observe(step)
        self._count(step)
        self.part.lend(step)
        if tuner.runs:
            drain = self._drain(step)
            latest = step.now + drain + tuner.iteration_seconds() - self.bound
            self._applied = step.now, latest, drain
            step.due = lambda entry: entry.sequence.scheduled_at is not None or entry.sequence.request.arrival < latest
        self.inner.plan(step)
        if step.due is not None:
            step.admit(beyond_budget=True)  # the rule lets it start even if this step's budget is full
        if tuner.leaves or not (step.running or step.swapping_in or step.in_flight):
            self.part.train()
        elif self.share.bound and self.share.allows:
            self._train_beside_batch(step)

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        super().observe(plan, result)
        if plan.num_tokens and result.seconds:
            weight = SMOOTHING if self._step_seconds else 1.0
            self._step_seconds += weight * (result.seconds - self._step_seconds)

    def _drain(self, step: StepBuilder) -> float:
        """Predicted seconds until the last running sequence ends, if none ends before its longest length."""
        lacking = (entry.limit - entry.sequence.length for entry in step.resident)
        return max(0, max(lacking, default=0)) * self._step_seconds

    def _train_beside_batch(self, step: StepBuilder) -> None:
        """Plan an iteration in a step of a batch, unless a stream's request runs, is swapping in or waits."""
        entries = chain(step.running, step.swapping_in, step.waiting)
        streams = any(entry.sequence.request.priority < BATCH_CLASS for entry in entries)
        if not (streams or self.part.tuner.in_flight):
            self.part.train()

    def _count(self, step: StepBuilder) -> None:
        """Count how long each request has waited by the rule since it was last applied."""
        if self._applied is None:
            return
        since, latest, drain = self._applied
        self._applied = None
        for entry in step.waiting:
            sequence = entry.sequence
            if sequence.scheduled_at is None and sequence.request.arrival >= latest:
                until = min(step.now, sequence.request.arrival + (since + drain - latest))  # it was due then
                self.part.defer(max(0.0, until - max(since, sequence.request.arrival)))
