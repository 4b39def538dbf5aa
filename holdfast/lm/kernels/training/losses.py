"""Losses over positions: each takes the log probability of every target, and gives a loss and a factor per position.

Let l be the log probability of a position's target. Then d l / d logits = onehot - softmax, so the gradient of a loss
L(l) with respect to the logits is g (softmax - onehot) with one number per position, g = - dL/dl: the factor.

The ratio r = exp(l - q) compares l with q, the log probability when the target was sampled; A is the advantage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import torch


@dataclass(frozen=True, eq=False)
class PositionLoss(ABC):
    """A loss, with what it reads for each of its positions: every field of a subclass is a tensor [T] float32."""

    passes: ClassVar[int] = 1
    """How often the head computes each position. In a pass before the last one, it only finds log probabilities."""

    @abstractmethod
    def of(self, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss and the factor of each position, [T] each, from log probabilities [T] of targets.

        The results have the dtype of `logprobs`.
        """

    def after(self, logprobs: torch.Tensor, starts: torch.Tensor) -> PositionLoss:
        """The loss of the last pass, from the log probabilities [T] that the pass before has found.

        `starts` are the index of each sequence's first position, and T, [S + 1] int32, on the same device.
        """
        return self

    def part(self, rows: slice) -> Self:
        """Return the loss of some of the positions alone."""
        return replace(self, **{each.name: getattr(self, each.name)[rows] for each in fields(self)})


@dataclass(frozen=True, eq=False)
class CrossEntropy(PositionLoss):
    """L = -w l. A weight may be negative."""

    weights: torch.Tensor

    def of(self, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self.weights.to(logprobs.dtype)
        return -logprobs * weights, weights


@dataclass(frozen=True, eq=False)
class PolicyLoss(PositionLoss):
    """A loss of policy gradients. Positions with advantage 0 count for nothing, whatever their ratio is."""

    sampled: torch.Tensor
    """q"""
    advantages: torch.Tensor

    def ratio(self, logprobs: torch.Tensor) -> torch.Tensor:
        """r; 1 where the advantage is 0, so that an infinite ratio there is no NaN."""
        return (logprobs - self.sampled).masked_fill_(self.advantages == 0, 0.0).exp_()


@dataclass(frozen=True, eq=False)
class ImportanceSampling(PolicyLoss):
    """L = -r A."""

    def of(self, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gained = self.ratio(logprobs) * self.advantages
        return -gained, gained


@dataclass(frozen=True, eq=False)
class ClippedLoss(PolicyLoss):
    """A loss of policy gradients in which a ratio counts as at least `low` and at most `high`."""

    low: torch.Tensor
    high: torch.Tensor


@dataclass(frozen=True, eq=False)
class Ppo(ClippedLoss):
    """L = -min(r A, clip(r) A) (Schulman et al., 2017, §3). Where the clipped one is smaller, it has no gradient."""

    def of(self, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ratio = self.ratio(logprobs)
        free, clipped = ratio * self.advantages, ratio.clamp(self.low, self.high) * self.advantages
        return -torch.minimum(free, clipped), free.masked_fill(free > clipped, 0.0)


@dataclass(frozen=True, eq=False)
class Cispo(ClippedLoss):
    """L = -clip(r) l A, in which the clipped ratio is a constant (MiniMax, 2025, §3.1)."""

    def of(self, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        factors = self.ratio(logprobs).clamp(self.low, self.high) * self.advantages
        return -factors * logprobs, factors


@dataclass(frozen=True, eq=False)
class Dro(PolicyLoss):
    """L = -(l A - beta / 2 (l - q)^2) (Richemond et al., 2024, §3). Positions with advantage 0 have the penalty too."""

    beta: torch.Tensor

    def of(self, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        apart = logprobs - self.sampled
        pulled = self.beta * apart
        return 0.5 * pulled * apart - logprobs * self.advantages, self.advantages - pulled


@dataclass(frozen=True, eq=False)
class Gspo(ClippedLoss):
    """Ppo with one ratio s for a whole sequence, the GSPO-token of Zheng et al. (2025, §4.3): s is a constant.

    s is the geometric mean of the ratios of those positions whose mask is not 0. It must be known before the first
    factor, so the head computes each position twice.
    """

    passes = 2
    mask: torch.Tensor

    def after(self, logprobs: torch.Tensor, starts: torch.Tensor) -> PositionLoss:
        counts = (self.mask != 0).to(logprobs.dtype)
        apart = (logprobs - self.sampled).masked_fill(self.mask == 0, 0.0)
        sizes = starts.diff().long()
        # A sum in the order of the positions: its bits are equal at every run, which those of a scatter are not.
        # Without a check of the sizes, for which the host would wait.
        sums, marked = (torch.segment_reduce(each, "sum", lengths=sizes, unsafe=True) for each in (apart, counts))
        ratios = (sums / marked.clamp(min=1)).exp()
        whole = torch.repeat_interleave(ratios, sizes, output_size=len(logprobs))
        return SequenceRatio(whole, self.advantages, self.low, self.high)

    def of(self, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros: the first pass computes no loss."""
        return torch.zeros_like(logprobs), torch.zeros_like(logprobs)


@dataclass(frozen=True, eq=False)
class SequenceRatio(PositionLoss):
    """The last pass of `Gspo`: L = -min(s A, clip(s) A), and d s / d l = s for the position's own l."""

    ratio: torch.Tensor
    """s of the position's sequence."""
    advantages: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor

    def of(self, logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        free, clipped = self.ratio * self.advantages, self.ratio.clamp(self.low, self.high) * self.advantages
        return -torch.minimum(free, clipped), free.masked_fill(free > clipped, 0.0)
