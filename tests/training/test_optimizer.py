"""AdamW over pieces against PyTorch's own."""

from __future__ import annotations

import pytest
import torch

from holdfast.training.optimizer import adamw_step


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_updates_are_those_of_torch_s_adamw_with_a_clipped_norm(spread: float, weight_decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(size, generator=generator) for size in (40, 7)]
    reference = [piece.clone().requires_grad_() for piece in start]
    optimizer = torch.optim.AdamW(reference, lr=1.0, weight_decay=weight_decay)
    params, means, variances = ([p.clone() for p in start], *([torch.zeros_like(p) for p in start] for _ in range(2)))
    for number in range(1, 12):
        grads = [torch.randn(piece.shape, generator=generator) * spread for piece in start]
        for own, piece in zip(reference, grads, strict=True):
            own.grad = piece.clone()
        torch.nn.utils.clip_grad_norm_(reference, 1.0)
        optimizer.param_groups[0]["lr"] = rate = 0.01 * number
        optimizer.step()
        adamw_step(
            params, grads, means, variances,
            number=number, learning_rate=rate, max_norm=1.0, weight_decay=weight_decay,
        )  # fmt: skip
        for ours, own in zip(params, reference, strict=True):
            torch.testing.assert_close(ours, own.detach(), atol=2e-6, rtol=2e-6)
