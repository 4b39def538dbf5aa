"""Deferred continuous batching (FineInfer §2.4): a request waits for training as long as its bound allows."""

from __future__ import annotations

from holdfast.lm.parts.tuning.options import DEFAULT_BOUND
from holdfast.lm.parts.tuning.planner import TuningPart
from holdfast.lm.scheduler.builder import Policy, StepBuilder
from holdfast.lm.types import StepPlan, StepResult


class Deferred(Policy):
    """FineInfer's deferral rule, which wraps a policy of inference.

    A waiting request starts iff waited + T_ft > bound. T_ft is the upper estimate of one iteration of training
    (`Tuner.iteration_seconds`). While nothing runs, whole iterations run. While anything runs, none begins, and only
    the vectors of a job that has to leave are copied to the host. A bound of 0 is inference first, and infinity is
    training to its end. If no job can run, nothing is deferred.

    Nobody waits longer than max(bound, T_ft) and one step of inference, as far as rows and memory have room.
    """

    def __init__(self, inner: Policy, part: TuningPart, bound: float = DEFAULT_BOUND) -> None:
        """`bound` in seconds, from 0 to infinity; else ValueError."""
        if not bound >= 0:
            raise ValueError(f"deferral_bound is {bound}; it must be at least 0")
        self.inner, self.part, self.bound = inner, part, bound
        self._applied: tuple[float, float] | None = None
        """When the rule was last applied, and the latest arrival that started then; None while there is no job."""

    def plan(self, step: StepBuilder) -> None:
        tuner = self.part.tuner
        if tuner.in_flight and not step.running:
            return  # a request that starts now would run after the iteration, so it would wait longer
        self._count(step)
        self.part.lend(step)
        if tuner.runs:
            latest = step.now + tuner.iteration_seconds() - self.bound
            self._applied = step.now, latest
            step.due = lambda entry: entry.sequence.scheduled_at is not None or entry.sequence.request.arrival < latest
        self.inner.plan(step)
        if step.due is not None:
            step.admit(beyond_budget=True)  # the rule lets it start even if this step's budget is full
        if tuner.leaves or not (step.running or step.swapping_in or step.in_flight):
            self.part.train()

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        self.inner.observe(plan, result)

    def _count(self, step: StepBuilder) -> None:
        """Count how long each request has waited by the rule since it was last applied."""
        if self._applied is None:
            return
        since, latest = self._applied
        self._applied = None
        for entry in step.waiting:
            sequence = entry.sequence
            if sequence.scheduled_at is None and sequence.request.arrival >= latest:
                until = min(step.now, sequence.request.arrival + (since - latest))  # it was due then
                self.part.defer(max(0.0, until - max(since, sequence.request.arrival)))
