"""AdamW (Loshchilov and Hutter, 2019) over flat vectors in pieces, with clipped gradients, and its learning rate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim.adamw import adamw

from holdfast.training.losses import Adam

Pieces = Sequence[torch.Tensor]
"""A vector in pieces, in a fixed order. Sums over it are taken piece by piece."""


def adamw_step(
    params: Pieces,
    grads: Pieces,
    means: Pieces,
    variances: Pieces,
    *,
    number: int,
    adam: Adam,
    norm: torch.Tensor | None = None,
) -> torch.Tensor:
    """One update, in place, of params and of the running means of gradients and of their squares; float32.

    `number` counts updates from 1. Gradients are first scaled in place, so that the norm of all is at most that of
    `adam`. `norm` is that of all gradients, if there are others than `grads`. Returns the norm before the scaling, with
    no dimensions, on the device.
    """
    if norm is None:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm([*grads])))
    steps = torch.full((len(params),), number - 1.0, device=norm.device)
    # Gradients are scaled in the same pass. PyTorch's option for loss scaling does the same arithmetic as clipping.
    adamw(
        [*params], [*grads], [*means], [*variances], [], [*steps],
        fused=True, grad_scale=torch.clamp((norm + 1e-6) / adam.max_norm, min=1.0),
        lr=adam.learning_rate, beta1=adam.beta1, beta2=adam.beta2, eps=adam.eps, weight_decay=adam.weight_decay,
        amsgrad=False, maximize=False,
    )  # fmt: skip
    return norm


def learning_rate(step: int, *, steps: int, peak: float, warmup: float) -> float:
    """The rate of a step, from 0 to steps - 1: a linear warm-up, then linear decay to zero.

    `warmup` is the share of all steps until `peak` is reached.

    No step has rate 0: the first has a part of the peak, and the last one step's part of the decay.
    """
    rising = round(steps * warmup)
    if step < rising:
        return peak * ((step + 1) / rising)
    return peak * ((steps - step) / (steps - rising))
