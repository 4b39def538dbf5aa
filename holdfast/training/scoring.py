"""The arithmetic of a call's loss, over the positions of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from holdfast.lm.kernels.training.losses import (
    Cispo,
    CrossEntropy,
    Dro,
    Gspo,
    ImportanceSampling,
    PositionLoss,
    Ppo,
)
from holdfast.training.losses import CLIPS, MASK, POLICY, Loss

KINDS: Mapping[str, tuple[type[PositionLoss], tuple[str, ...]]] = {
    "cross_entropy": (CrossEntropy, ("weights",)),
    "importance_sampling": (ImportanceSampling, POLICY),
    "ppo": (Ppo, (*POLICY, *CLIPS)),
    "cispo": (Cispo, (*POLICY, *CLIPS)),
    "dro": (Dro, (*POLICY, "beta")),
    "gspo": (Gspo, (*POLICY, *CLIPS, MASK)),
}
"""For each loss, its arithmetic, and the names of the numbers that this takes for each position, in order."""


def position_loss(loss: Loss, arrays: Mapping[str, torch.Tensor], like: torch.Tensor) -> PositionLoss:
    """The loss of T positions from its arrays, float32 in the shape of `like`, [T] or [T, K], on its device.

    An array that is absent has the value of the loss's setting everywhere, and weights are 1.
    """
    kind, names = KINDS[loss.name]

    def numbers(name: str) -> torch.Tensor:
        if name in arrays:
            return arrays[name]
        value = loss.setting(name) if name in loss.kind.settings else 1.0
        return torch.full(like.shape, value, dtype=torch.float32, device=like.device)

    return kind(*map(numbers, names))
