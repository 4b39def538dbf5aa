"""Slices of training beside streams: each step is filled up to the target between tokens."""

from __future__ import annotations

from holdfast.core.cost import CostModel
from holdfast.lm.scheduler.builder import Policy, StepBuilder
from holdfast.lm.scheduler.tuner import Tuner
from holdfast.lm.types import StepPlan, StepResult


class TrainingSlices(Policy):
    """Adds to each step of a policy as many units of training as are predicted to end within the target.

    Chat goes before batch and batch before training: a step has a slice only if no request of a stream's class waits
    or lacks a part of its prompt, and the slice gets what is left. While nothing runs, a step holds a slice of at most
    IDLE_SECONDS, and nothing is planned past it, so that a prompt that comes waits for one slice only.
    """

    def __init__(self, inner: Policy, tuner: Tuner, cost: CostModel, target: float) -> None:
        """`target` in seconds between tokens, above 0; else ValueError."""
        if not target > 0:
            raise ValueError(f"target is {target} s; it must be above 0")
        self.inner, self.tuner, self.target = inner, tuner, target

    def plan(self, step: StepBuilder) -> None:
        raise NotImplementedError

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        self.inner.observe(plan, result)
