"""The mixers of Nemotron-H's layers that are an MLP or experts alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from holdfast.lm.kernels.fp8 import Weight
from holdfast.lm.kernels.linear.layers import LayerOps, Normed, Rotation
from holdfast.lm.models.base import StepInput
from holdfast.lm.models.mixer import Mixer
from holdfast.lm.models.projection import Projection


class MlpMixer(Mixer):
    """relu² of a projection (So et al., 2021, Primer, §4). It reads no other token, and keeps nothing."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None, index: int) -> None:
        """`weight` is [intermediate, hidden]. `index` is the layer's number among those of the device."""
        self._projection = Projection(weight, bias, index)

    def mix(self, ops: LayerOps, normed: Normed, step: StepInput, rotations: Sequence[Rotation]) -> torch.Tensor:
        return functional.relu(self._projection.of(ops, normed, step)).square()


class NoMixer(Mixer):
    """The place of a mixer in a layer that is experts alone: its result is the normed stream, which they read."""

    def mix(self, ops: LayerOps, normed: Normed, step: StepInput, rotations: Sequence[Rotation]) -> torch.Tensor:
        return ops.computed(normed)
