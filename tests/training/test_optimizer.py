"""AdamW over pieces against PyTorch's own."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.training.losses import Adam
from holdfast.training.optimizer import adamw_step

SIZES = 40, 7


class Pieces:
    """Parameters in pieces with their moments, updated by both."""

    def __init__(self, generator: torch.Generator) -> None:
        self.params = [torch.randn(size, generator=generator) for size in SIZES]
        self.means, self.variances = ([torch.zeros_like(piece) for piece in self.params] for _ in range(2))
        self.reference = [piece.clone().requires_grad_() for piece in self.params]
        self.optimizer = torch.optim.AdamW(self.reference)

    def step(self, grads: list[torch.Tensor], number: int, adam: Adam) -> float:
        """One update of both; the norm that ours returns."""
        for own, piece in zip(self.reference, grads, strict=True):
            own.grad = piece.clone()
        if adam.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(self.reference, adam.grad_clip_norm)
        self.optimizer.param_groups[0].update(
            lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
        )
        self.optimizer.step()
        return float(adamw_step(self.params, grads, self.means, self.variances, number=number, adam=adam))

    def assert_equal(self) -> None:
        for ours, own in zip(self.params, self.reference, strict=True):
            torch.testing.assert_close(ours, own.detach(), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("most", [0.0, 1.0])
@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_updates_are_those_of_torch_s_adamw(spread: float, most: float, weight_decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    pieces = Pieces(generator)
    adam = Adam(weight_decay=weight_decay, grad_clip_norm=most)
    for number in range(1, 12):
        grads = [torch.randn(size, generator=generator) * spread for size in SIZES]
        wanted = float(torch.linalg.vector_norm(torch.cat(grads)))
        norm = pieces.step(grads, number, replace(adam, learning_rate=0.01 * number))
        assert norm == pytest.approx(wanted)
        pieces.assert_equal()


@settings(max_examples=30)
@given(st.randoms(use_true_random=False))
def test_every_update_may_have_other_parameters(chance: random.Random) -> None:
    generator = torch.Generator().manual_seed(chance.randrange(1000))
    pieces = Pieces(generator)
    for number in range(1, 6):
        adam = Adam(
            learning_rate=chance.choice([0.0, 1e-4, 0.1]),
            beta1=chance.choice([0.0, 0.9]),
            beta2=chance.choice([0.5, 0.95, 0.999]),
            eps=chance.choice([1e-12, 1e-8, 1e-2]),
            weight_decay=chance.choice([0.0, 0.3]),
            grad_clip_norm=chance.choice([0.0, 0.5, 100.0]),
        )
        pieces.step([torch.randn(size, generator=generator) for size in SIZES], number, adam)
        pieces.assert_equal()


def test_a_parameter_whose_gradients_are_all_zero_stays() -> None:
    """An adapter's A has no gradient at first, because B is zero."""
    pieces = Pieces(torch.Generator().manual_seed(0))
    before = [piece.clone() for piece in pieces.params]
    pieces.step([torch.zeros(size) for size in SIZES], 1, Adam(eps=1e-30))
    for piece, old in zip(pieces.params, before, strict=True):
        assert torch.equal(piece, old)
