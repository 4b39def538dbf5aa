"""Tuning on a device: blocks that move to make room for training, and slices that follow the segments of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from holdfast.lm.execution.part import Allocated, DevicePart, Launched, PartExecutor
from holdfast.lm.kernels.cache.kv_cache import KVCache, copy_blocks
from holdfast.lm.parts.tuning.values import TrainingPlan, TrainingSlice
from holdfast.lm.types import StepPlan


class Training(Protocol):
    """Computes slices of training: `holdfast.training.trainer.Trainer`."""

    def launch(self, slice_: TrainingSlice, lent: int) -> Launched:
        """Compute a slice, of which all tensors lie in the cache's last `lent` blocks, after what was launched before.

        Called in the thread that runs the steps. Raises ValueError for a slice that does not follow those before it.
        """
        ...


Trains = TypeVar("Trains", bound=Training)


class TuningExecutor(PartExecutor, Generic[Trains]):
    """Moves blocks before the segments of a plan, and launches its slice of training after them."""

    plans = (TrainingPlan,)

    def __init__(self, cache: KVCache, training: Trains) -> None:
        """`training` computes the slices in the last blocks of the cache."""
        self.training, self._cache = training, cache

    def before(self, plan: StepPlan) -> None:
        if moves := plan.part(TrainingPlan).moves:
            on_gpu = self._cache.device.type == "cuda"
            numbers = torch.tensor(moves, dtype=torch.int64, pin_memory=on_gpu)
            pairs = numbers.to(self._cache.device, non_blocking=True).t().contiguous()
            copy_blocks(self._cache, pairs[0], self._cache, pairs[1])

    def after(self, plan: StepPlan) -> Sequence[Launched]:
        training = plan.part(TrainingPlan)
        return (self.training.launch(training.slice, training.lent),) if training.slice else ()


class TuningDevice(DevicePart, Generic[Trains]):
    """Training on a device, whose tensors lie in blocks of the cache."""

    def __init__(self, make_training: Callable[[Allocated], Trains], workspace_bytes: Callable[[], int]) -> None:
        """`make_training` is called when the cache is allocated.

        `workspace_bytes` measures what the units of training take besides it.
        """
        self.make_training, self._workspace_bytes = make_training, workspace_bytes

    @property
    def sends_back(self) -> bool:
        return True

    def workspace_bytes(self) -> int:
        return self._workspace_bytes()

    def executor(self, allocated: Allocated) -> TuningExecutor[Trains]:
        return TuningExecutor(allocated.memory.cache, self.make_training(allocated))
