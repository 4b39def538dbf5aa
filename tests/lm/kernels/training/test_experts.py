"""The backward pass of experts whose weights are packed."""

from __future__ import annotations

import pytest
import torch

from holdfast.lm.kernels.linear.experts.experts import ExpertRule, apply_experts
from holdfast.lm.kernels.training.experts import experts_backward
from tests.lm.kernels.linear.experts.test_experts import draw, packed


@pytest.mark.parametrize(
    "rule", [ExpertRule(top_k=2), ExpertRule(top_k=4, clamp=(1.7, 0.5)), ExpertRule(top_k=2, gated=False)]
)
def test_the_gradient_of_packed_experts_is_that_of_their_numbers(rule: ExpertRule) -> None:
    experts, plain = packed(draw(rule, 6, 64, 32, "cpu", biased=True))
    x, back = torch.randn(9, 64), torch.randn(9, 64)
    with torch.no_grad():
        found = experts_backward(back, x, experts)
    read = x.clone().requires_grad_()
    apply_experts(read, plain).backward(back)
    torch.testing.assert_close(found, read.grad, rtol=1e-4, atol=1e-5)
