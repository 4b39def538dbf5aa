"""TallyDevice: the tally's work on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.lm.execution.part import Allocated, DevicePart, Launched, PartExecutor
from holdfast.lm.types import StepPlan
from tests.tally.values import TallyPlan, TallyResult


@dataclass(frozen=True)
class Counted:
    """A count on the device."""

    positions: torch.Tensor

    def result(self) -> TallyResult:
        return TallyResult(int(self.positions))


class TallyExecutor(PartExecutor):
    """Counts the positions of a step once its segments have run."""

    plans = (TallyPlan,)

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def after(self, plan: StepPlan) -> Sequence[Launched]:
        lengths = plan.part(TallyPlan).lengths
        return (Counted(torch.tensor(lengths, device=self._device).sum()),) if lengths else ()


class TallyDevice(DevicePart):
    """The tally on a device."""

    def executor(self, allocated: Allocated) -> TallyExecutor:
        return TallyExecutor(allocated.memory.batch.device)
