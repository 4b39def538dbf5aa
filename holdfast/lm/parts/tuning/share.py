"""TuningShare: how much of the device's time training may take while a batch has work."""

from __future__ import annotations

from itertools import chain

from holdfast.core.types import BATCH_CLASS
from holdfast.lm.parts.tuning.options import TuningOptions
from holdfast.lm.parts.tuning.planner import TuningPart
from holdfast.lm.scheduler.builder import StepBuilder

WINDOW_SECONDS = 30.0
"""Seconds of a batch's work whose share training may save up while it cannot run, and then take at once."""


class TuningShare:
    """Bounds the time of training by a share of the time in which a batch has work: runs, waits, or is swapping in.

    Chats have a target that says how slow they may be. A batch has none: each second of training is one that it loses.
    So training takes what chats leave of the target, but of a batch's time only this share. Training earns the share
    while the batch has work and there is a job, and pays the measured time of each slice. It may begin a slice while it
    owes nothing, so one slice may be longer than what was earned; then the next one waits.
    """

    def __init__(self, part: TuningPart, share: float = TuningOptions.tuning_share) -> None:
        """`share` from 0 (no training while a batch has work) to 1 (no bound); else ValueError."""
        if not 0 <= share <= 1:
            raise ValueError(f"tuning_share is {share}; it must be at least 0 and at most 1")
        self.share = share
        self._part = part
        self._earned = 0.0
        """Seconds that training has earned and not paid; below 0 after a slice that was longer."""
        self._has_batch = False
        """Whether a batch had work when the last step was planned."""
        self._has_job = False
        """Whether there was a job to run then."""
        self._planned_at = self._trained = 0.0
        """When the last step was planned, and the measured seconds of training until then."""

    def observe(self, step: StepBuilder) -> None:
        """Take note of the time since the last step. To be called once a step, before anything else of this class."""
        trained = self._part.seconds
        if self._has_batch:
            earned = self._earned + self.share * (step.now - self._planned_at) * self._has_job
            self._earned = min(self.share * WINDOW_SECONDS, earned) - (trained - self._trained)
        entries = chain(reversed(step.running), step.swapping_in, step.waiting)
        self._has_batch = any(entry.sequence.request.priority >= BATCH_CLASS for entry in entries)
        self._has_job = self._part.tuner.runs
        self._planned_at, self._trained = step.now, trained

    @property
    def bound(self) -> bool:
        """Whether training is bound by the share: a batch has work."""
        return self._has_batch and self.share < 1

    @property
    def allows(self) -> bool:
        """Whether a slice may begin in this step. Slices in flight count as paid."""
        return not self.bound or self._earned > self._part.tuner.expected_seconds
