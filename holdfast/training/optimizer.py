"""AdamW (Loshchilov and Hutter, 2019) over flat vectors in pieces, with the gradient's norm clipped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

BETAS = (0.9, 0.999)
EPS = 1e-8

Pieces = Sequence[torch.Tensor]
"""A vector in pieces, in a fixed order: sums over it are taken piece by piece."""

_foreach: Any = torch
"""PyTorch's operations over lists of tensors, which are not typed."""


def adamw_step(
    params: Pieces,
    grads: Pieces,
    means: Pieces,
    variances: Pieces,
    *,
    number: int,
    learning_rate: float,
    max_norm: float,
    weight_decay: float = 0.0,
) -> None:
    """One update, in place, of params and of the running means of gradients and of their squares; float32.

    `number` counts from 1. Gradients are scaled first, in place, so that the norm of all is at most `max_norm`.
    """
    params, grads, means, variances = ([*pieces] for pieces in (params, grads, means, variances))
    norm = torch.linalg.vector_norm(torch.stack(_foreach._foreach_norm(grads)))
    _foreach._foreach_mul_(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    if weight_decay:
        _foreach._foreach_mul_(params, 1.0 - learning_rate * weight_decay)
    first, second = BETAS
    _foreach._foreach_lerp_(means, grads, 1.0 - first)
    _foreach._foreach_mul_(variances, second)
    _foreach._foreach_addcmul_(variances, grads, grads, 1.0 - second)
    # The gradients are used up; their memory holds the denominators.
    _foreach._foreach_copy_(grads, variances)
    _foreach._foreach_sqrt_(grads)
    _foreach._foreach_div_(grads, math.sqrt(1.0 - second**number))
    _foreach._foreach_add_(grads, EPS)
    _foreach._foreach_addcdiv_(params, means, grads, -learning_rate / (1.0 - first**number))
