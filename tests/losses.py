"""The losses over positions: drawn at random, and defined once more for autograd, as Tinker's documentation does."""

from __future__ import annotations

from collections.abc import Callable

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

LOSSES: dict[str, type[PositionLoss]] = {
    "cross_entropy": CrossEntropy,
    "importance_sampling": ImportanceSampling,
    "ppo": Ppo,
    "cispo": Cispo,
    "dro": Dro,
}
"""The losses of one pass."""


def drawn_loss(
    name: str, count: int, *, seed: int = 0, device: str = "cpu", around: torch.Tensor | float = -3.0
) -> PositionLoss:
    """A loss over `count` positions, sampled with log probabilities near `around`.

    Some advantages are 0, and some are negative.
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn() -> torch.Tensor:
        return torch.randn(count, generator=generator)

    advantages = (drawn() * 2).round() / 2
    low, high = torch.full((count,), 0.8), 1.0 + drawn().abs()
    arrays = {
        "cross_entropy": (drawn(),),
        "importance_sampling": (around + drawn(), advantages),
        "ppo": (around + drawn(), advantages, low, high),
        "cispo": (around + drawn(), advantages, low, high),
        "dro": (around + drawn(), advantages, torch.full((count,), 0.3)),
    }[name]
    return LOSSES[name](*(array.to(device) for array in arrays))


def cross_entropy(logprobs: torch.Tensor, loss: CrossEntropy) -> torch.Tensor:
    return -(logprobs * loss.weights).sum()


def importance_sampling(logprobs: torch.Tensor, loss: ImportanceSampling) -> torch.Tensor:
    return -(torch.exp(logprobs - loss.sampled) * loss.advantages).sum()


def ppo(logprobs: torch.Tensor, loss: Ppo) -> torch.Tensor:
    ratio = torch.exp(logprobs - loss.sampled)
    clipped = torch.clamp(ratio, loss.low, loss.high)
    return -torch.min(ratio * loss.advantages, clipped * loss.advantages).sum()


def cispo(logprobs: torch.Tensor, loss: Cispo) -> torch.Tensor:
    ratio = torch.exp(logprobs - loss.sampled)
    return -(torch.clamp(ratio, loss.low, loss.high).detach() * logprobs * loss.advantages).sum()


def dro(logprobs: torch.Tensor, loss: Dro) -> torch.Tensor:
    penalty = (logprobs - loss.sampled) ** 2
    return -(logprobs * loss.advantages - 0.5 * loss.beta * penalty).sum()


def gspo(logprobs: torch.Tensor, loss: Gspo, lengths: tuple[int, ...]) -> torch.Tensor:
    total = logprobs.new_zeros(())
    arrays = logprobs, loss.sampled, loss.advantages, loss.low, loss.high, loss.mask
    for own, sampled, advantages, low, high, mask in zip(*(each.split(lengths) for each in arrays), strict=True):
        log_ratio = (own.detach() - sampled)[mask != 0].mean()
        ratio = torch.exp(log_ratio + own - own.detach())
        total = total - torch.min(ratio * advantages, torch.clamp(ratio, low, high) * advantages).sum()
    return total


DEFINED: dict[str, Callable[..., torch.Tensor]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}
"""For each loss, its sum over positions, for autograd. That of a loss in two passes takes the lengths of sequences."""
