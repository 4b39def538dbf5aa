"""The loss of rows whose logits lie on several devices, and its gradient."""

from __future__ import annotations

import torch

from holdfast.lm.kernels.collectives.protocol import Group
from holdfast.lm.kernels.training.losses import PositionLoss
from holdfast.lm.kernels.training.ops import scaled, wide


def shared_loss_backward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    loss: PositionLoss,
    first: int,
    group: Group,
    *,
    backward: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`TrainingOps.loss_backward` where each device has columns of the logits [C, V_own], from token `first` on.

    Each row takes from each device the logarithm of its sum of exponentials, and the logits of those of its targets
    that it has. All devices get the same losses and log probabilities.
    """
    scores, count = wide(logits), len(logits)
    place = targets.view(count, -1) - first  # [C, K]
    absent = (place < 0) | (place >= scores.shape[1])
    place = place.masked_fill(absent, 0)
    chosen = scores.gather(1, place).masked_fill_(absent, 0.0)
    own = torch.cat((torch.logsumexp(scores, dim=-1), chosen.t().reshape(-1))).float()
    everyones = group.gather(own).view(group.size, -1, count)
    log_sums = torch.logsumexp(everyones[:, 0], dim=0)
    logprobs = (everyones[:, 1:].sum(0) - log_sums).t().reshape(targets.shape)
    losses, factors = loss.of(logprobs)
    if backward:
        back = torch.exp(scores - log_sums[:, None])

        def add(back: torch.Tensor, k: int, numbers: torch.Tensor) -> None:
            back.scatter_add_(1, place[:, k, None], numbers.to(back.dtype).masked_fill(absent[:, k, None], 0.0))

        logits.copy_(scaled(back, factors, add))
    return losses, logprobs
