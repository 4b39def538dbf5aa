"""The first half of an MLP that stands in the place of a mixer: the layers of Nemotron-H that are an MLP alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from holdfast.lm.kernels.fp8 import Weight
from holdfast.lm.kernels.linear.layers import LayerOps, Normed, Rotation
from holdfast.lm.models.base import StepInput
from holdfast.lm.models.mixer import Mixer


class MlpMixer(Mixer):
    """relu² of a projection (So et al., 2021, Primer, §4). It reads no other token, and keeps nothing."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None) -> None:
        """`weight` is [intermediate, hidden]."""
        self._weight, self._bias = weight, bias

    def mix(self, ops: LayerOps, normed: Normed, step: StepInput, rotations: Sequence[Rotation]) -> torch.Tensor:
        return functional.relu(ops.linear(normed, self._weight, self._bias)).square()
