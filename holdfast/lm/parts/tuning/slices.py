"""Slices of training in steps with streams: each step is filled up to the target between tokens."""

from __future__ import annotations

from itertools import chain
from math import inf

from holdfast.core.cost import CostModel
from holdfast.core.types import BATCH_CLASS
from holdfast.lm.parts.tuning.options import TuningOptions
from holdfast.lm.parts.tuning.planner import TuningPart
from holdfast.lm.parts.tuning.share import TuningShare
from holdfast.lm.scheduler.builder import Policy, PolicyExtension, StepBuilder
from holdfast.lm.scheduler.correction import Correction
from holdfast.lm.types import StepPlan, StepResult

RESERVE = 0.08
"""Share of the target that is left over. The times of a step and of its slice err together, and tokens take time to
reach their stream.
"""
LAUNCH_SHARE = 0.75
"""Largest share of the target that the host spends on launching a slice. It needs the rest for the step."""
IDLE_SECONDS = 0.010
"""Most seconds of the slices in flight while nothing runs, unless a single unit is longer."""
BUSY_SECONDS = 1.0
"""Seconds without training after a stream's request had to wait, while most rows are taken."""
WATCHED = 8
"""While there is no training, one step in this many is measured, so that the price of a step is known to new jobs."""
PROGRESS_SECONDS = 2.0
"""Most seconds between two units if training may not stand still."""


class TrainingSlices(PolicyExtension):
    """Adds to each step of a policy as many units of training as are predicted to end within the target.

    Chat goes before batch and batch before training: a step has a slice only if no request of a stream's class waits or
    lacks a part of its prompt, and the slice gets the time that is left. While a batch has work, slices take the
    `share` of the time. Batch requests then leave a unit its room in the step, because together with streams they would
    fill each step up to the target. A step without streams has no target, and its slice gets all of it.

    While nothing runs, slices are half of IDLE_SECONDS long, and two are in flight: the host launches one while the
    device computes the other. So a new prompt waits for IDLE_SECONDS, or for one unit if that is longer.
    """

    def __init__(
        self,
        inner: Policy,
        part: TuningPart,
        cost: CostModel,
        target: float,
        *,
        progress: bool = False,
        stages: int = 1,
        share: float = TuningOptions.tuning_share,
    ) -> None:
        """`target` in seconds between tokens, above 0; `share` as in `TuningShare`; else ValueError.

        With several `stages`, as many steps run between two tokens of a stream, and each may have a slice.
        With `progress` a unit runs every PROGRESS_SECONDS, whatever waits and however full the steps are. In any case a
        job that has to leave waits no longer than that.
        """
        if not target > 0:
            raise ValueError(f"target is {target} s; it must be above 0")
        super().__init__(inner)
        self.part, self.target, self.progress = part, target, progress
        self._stages, self.share = stages, TuningShare(part, share)
        self._predictor = cost.predictor()
        self._corrections = {prompts: Correction(cost.deviation) for prompts in (False, True)}
        """Corrections of steps of decodes alone (False) and of steps with prompts (True)."""
        self._predicted: dict[int, tuple[bool, float]] = {}
        """For each step in flight with segments: whether it has prompts, and its predicted seconds."""
        self._waited_at = self._trained_at = -inf
        """Times when a stream's request was last seen to wait, and when a slice was last planned."""

    def plan(self, step: StepBuilder) -> None:
        tuner = self.part.tuner
        self.share.observe(step)
        self.part.lend(step)
        if self.share.bound and self.share.allows and not (self._waits(step) or self._lacks_prompt(step)):
            step.reserved = min(self.target, step.reserved + tuner.next_unit_seconds + RESERVE * self.target)
        self.inner.plan(step)
        if not tuner.has_work and step.number % WATCHED:
            return
        seconds, prompts = 0.0, step.num_tokens > len(step.spans)
        if step.num_tokens:
            seconds = self._predictor.segments(step.spans)
            self._predicted[step.number] = prompts, seconds
            seconds *= self._corrections[prompts].factor
        if not tuner.has_work:
            return
        idle = not step.num_tokens
        late = (self.progress or tuner.leaves) and step.now >= self._trained_at + PROGRESS_SECONDS
        if (self._must_yield(step) or not self.share.allows) and not late:
            return
        if idle and step.in_flight and step.running:  # the sequences that run wait for the result of their step
            return
        streams = any(entry.sequence.request.priority < BATCH_CLASS for entry in chain(step.running, step.swapping_in))
        left = self.target * (1 - RESERVE) - (seconds if streams else 0.0)
        room = self._idle_room if idle else left / self._stages
        if self.part.train(room, at_least_one=late or (idle and not (step.running or step.in_flight))):
            self._trained_at = step.now

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Correct the prediction of steps, and the price of training, by the steps' measured times."""
        super().observe(plan, result)
        if plan.step in self._predicted:
            prompts, seconds = self._predicted.pop(plan.step)
            if result.seconds and seconds:
                self._corrections[prompts].update(result.seconds / seconds)
                if not prompts:
                    self.part.tuner.observe_step(result.seconds / seconds)

    @property
    def _idle_room(self) -> float:
        """Most seconds of the next slice while nothing runs: half of what may be in flight, or what is left of it."""
        most = min(self.target, IDLE_SECONDS)
        return min(most / 2, most - self.part.tuner.expected_seconds)

    def _must_yield(self, step: StepBuilder) -> bool:
        """Whether a stream's request waits, or lacks a part of its prompt, or waited lately on a busy engine.

        The share bounds what training takes of an engine that a batch keeps busy.
        """
        if self._waits(step):
            self._waited_at = step.now
            return True
        if self._lacks_prompt(step):
            return True
        return not self.share.bound and step.mostly_busy and step.now < self._waited_at + BUSY_SECONDS

    def _waits(self, step: StepBuilder) -> bool:
        """Whether a stream's request waits."""
        return any(entry.sequence.request.priority < BATCH_CLASS for entry in step.waiting)

    def _lacks_prompt(self, step: StepBuilder) -> bool:
        """Whether a stream that runs lacks a part of its prompt."""
        return any(not entry.decoding and entry.sequence.request.priority < BATCH_CLASS for entry in step.running)
