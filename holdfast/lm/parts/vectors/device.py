"""Embeddings on a device: the hidden states of sampled rows whose requests ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.lm.execution.batch import StagedStep
from holdfast.lm.execution.part import Allocated, DevicePart, HiddenWork, PartExecutor
from holdfast.lm.kernels.upload import upload
from holdfast.lm.parts.vectors.values import VectorResult


@dataclass(frozen=True, slots=True)
class FoundVectors:
    """The hidden states of some of one step's sampled rows."""

    rows: Sequence[int]
    """Indices of those rows among the sampled ones."""
    num_sampled: int
    """Number of sampled rows of the step."""
    hidden: torch.Tensor  # [E, hidden] float32

    def on_host(self) -> FoundVectors:
        hidden = self.hidden
        if hidden.device.type == "cuda":
            hidden = torch.empty(hidden.shape, pin_memory=True).copy_(hidden, non_blocking=True)
        return FoundVectors(self.rows, self.num_sampled, hidden)

    def result(self) -> VectorResult:
        found = dict(zip(self.rows, self.hidden.numpy(), strict=True))
        return VectorResult(tuple(found[row].tobytes() if row in found else b"" for row in range(self.num_sampled)))


class VectorExecutor(PartExecutor):
    """Gives the hidden states of the rows `StagedStep.embeds`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def hidden(self, staged: StagedStep) -> Sequence[HiddenWork]:
        embeds = staged.embeds
        if not embeds:
            return ()

        def work(hidden: torch.Tensor, rows: torch.Tensor) -> FoundVectors:
            vectors = rows.index_select(0, upload(embeds, self._device)).float()
            return FoundVectors(embeds, staged.num_sampled, vectors)

        return (work,)


class VectorDevice(DevicePart):
    """Embeddings of a model on a device."""

    def executor(self, allocated: Allocated) -> VectorExecutor:
        return VectorExecutor(allocated.memory.batch.device)
