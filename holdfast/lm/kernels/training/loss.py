"""The loss of rows whose logits lie on several devices, and its gradient."""

from __future__ import annotations

import torch

from holdfast.lm.kernels.collectives.protocol import Group
from holdfast.lm.kernels.training.losses import PositionLoss
from holdfast.lm.kernels.training.ops import wide


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

    Each row takes two numbers of each device: the logarithm of its sum of exponentials, and its target's logit if it
    has it. All devices get the same losses and log probabilities.
    """
    scores, count = wide(logits), len(logits)
    place = targets - first
    absent = (place < 0) | (place >= scores.shape[1])
    place = place.masked_fill(absent, 0)[:, None]
    chosen = scores.gather(1, place)[:, 0].masked_fill_(absent, 0.0)
    own = torch.cat((torch.logsumexp(scores, dim=-1), chosen)).float()
    everyones = group.gather(own).view(group.size, 2, count)
    log_sums = torch.logsumexp(everyones[:, 0], dim=0)
    logprobs = everyones[:, 1].sum(0) - log_sums
    losses, factors = loss.of(logprobs)
    if backward:
        back = torch.exp(scores - log_sums[:, None])
        back.scatter_add_(1, place, (absent.to(back.dtype) - 1.0)[:, None])
        logits.copy_(back.mul_(factors[:, None]))
    return losses, logprobs
