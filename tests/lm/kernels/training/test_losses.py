"""Losses over positions against autograd over their definitions, and at the places where a formula may break."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.lm.kernels.linear.layers import LayerOps
from holdfast.lm.kernels.training.loss import shared_loss_backward
from holdfast.lm.kernels.training.losses import Cispo, CrossEntropy, Dro, Gspo, ImportanceSampling, PositionLoss, Ppo
from holdfast.lm.kernels.training.ops import TrainingOps
from tests.lm.kernels.linear.test_layers import shape_of
from tests.losses import DEFINED, LOSSES, drawn_loss

VOCABULARY = 23


class Columns:
    """A group of devices of which each has the same number of columns; `gather` sees the numbers of all of them."""

    def __init__(self, own: list[torch.Tensor]) -> None:
        self.size, self._own = len(own), own

    def gather(self, numbers: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._own)


def drawn_logits(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(count, VOCABULARY, generator=generator, dtype=torch.float64)
    return logits, torch.randint(VOCABULARY, (count,), generator=generator)


def wanted_of(name: str, loss: PositionLoss, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The sum of a loss, the gradient of logits by autograd, and the log probabilities."""
    logits = logits.clone().requires_grad_()
    logprobs = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    total = DEFINED[name](logprobs, loss)
    return total.detach(), torch.autograd.grad(total, logits)[0], logprobs.detach()


@given(st.sampled_from([*LOSSES]), st.integers(1, 12), st.integers(0, 1000))
def test_gradients_are_those_of_autograd(name: str, count: int, seed: int) -> None:
    logits, targets = drawn_logits(count, seed)
    loss = drawn_loss(name, count, seed=seed)
    total, gradient, wanted = wanted_of(name, loss, logits, targets)
    losses, logprobs = TrainingOps(LayerOps(shape_of("cpu", torch.float64))).loss_backward(logits, targets, loss)
    torch.testing.assert_close(losses.sum(), total)
    torch.testing.assert_close(logprobs, wanted)
    torch.testing.assert_close(logits, gradient)


@given(st.integers(1, 5), st.integers(1, 12), st.integers(0, 1000))
def test_gradients_of_several_targets_for_a_row_are_those_of_autograd(width: int, count: int, seed: int) -> None:
    logits, _ = drawn_logits(count, seed)
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(5, (count, width), generator=generator)  # some of a row are equal
    weights = torch.randn(count, width, generator=generator)
    given = logits.clone().requires_grad_()
    logprobs = torch.log_softmax(given, -1).gather(1, targets)
    total = -(logprobs * weights).sum()
    (gradient,) = torch.autograd.grad(total, given)
    ops, parts = TrainingOps(LayerOps(shape_of("cpu", torch.float64))), logits.float().split([3, 20], dim=1)
    losses, found = ops.loss_backward(logits, targets, CrossEntropy(weights))
    torch.testing.assert_close(losses.sum(), total.detach())
    torch.testing.assert_close(found, logprobs.detach())
    torch.testing.assert_close(logits, gradient)
    own = []
    for first, part in zip((0, 3), parts, strict=True):
        inside = (targets >= first) & (targets < first + part.shape[1])
        chosen = torch.where(inside, part.gather(1, (targets - first).clamp(0, part.shape[1] - 1)), 0.0)
        own.append(torch.cat((torch.logsumexp(part, -1), chosen.t().reshape(-1))))
    for first, part, back in zip((0, 3), parts, gradient.split([3, 20], dim=1), strict=True):
        mine = part.clone()
        _, theirs = shared_loss_backward(mine, targets, CrossEntropy(weights), first, Columns(own))  # type: ignore[arg-type]
        torch.testing.assert_close(theirs.double(), logprobs.detach(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mine.double(), back, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("cuts", [(4,), (1, 9), (2, 3, 8)])
def test_chunks_of_positions_give_the_whole(name: str, cuts: tuple[int, ...]) -> None:
    logits, targets = drawn_logits(10)
    loss = drawn_loss(name, 10)
    ops = TrainingOps(LayerOps(shape_of("cpu", torch.float64)))
    whole = logits.clone()
    losses, logprobs = ops.loss_backward(whole, targets, loss)
    for first, stop in zip((0, *cuts), (*cuts, 10), strict=True):
        rows = slice(first, stop)
        own, theirs = ops.loss_backward(logits[rows], targets[rows], loss.part(rows))
        assert torch.equal(own, losses[rows]) and torch.equal(theirs, logprobs[rows])
    assert torch.equal(logits, whole)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("backward", [True, False])
def test_devices_with_a_part_of_the_logits_give_the_loss_of_all(name: str, backward: bool) -> None:
    logits, targets = drawn_logits(7)
    loss = drawn_loss(name, 7)
    total, gradient, wanted = wanted_of(name, loss, logits, targets)
    parts = logits.float().split([8, 8, 7], dim=1)
    own = []
    for first, part in zip((0, 8, 16), parts, strict=True):
        inside = (targets >= first) & (targets < first + part.shape[1])
        chosen = torch.where(inside, part.gather(1, (targets - first).clamp(0, part.shape[1] - 1)[:, None])[:, 0], 0.0)
        own.append(torch.cat((torch.logsumexp(part, -1), chosen)))
    group = Columns(own)
    for first, part, back in zip((0, 8, 16), parts, gradient.split([8, 8, 7], dim=1), strict=True):
        mine = part.clone()
        losses, logprobs = shared_loss_backward(mine, targets, loss, first, group, backward=backward)  # type: ignore[arg-type]
        torch.testing.assert_close(losses.sum().double(), total, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logprobs.double(), wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mine.double(), back if backward else part.double(), atol=1e-5, rtol=1e-5)


def test_a_loss_alone_leaves_the_logits() -> None:
    logits, targets = drawn_logits(4)
    before = logits.clone()
    TrainingOps(LayerOps(shape_of("cpu", torch.float64))).loss_backward(
        logits, targets, drawn_loss("ppo", 4), backward=False
    )
    assert torch.equal(logits, before)


@pytest.mark.parametrize("kind", [ImportanceSampling, Ppo, Cispo])
def test_a_position_without_advantage_counts_for_nothing_even_if_its_ratio_is_infinite(
    kind: type[PositionLoss],
) -> None:
    numbers = [torch.tensor([-1e4, -2.0]), torch.tensor([0.0, 1.0])]
    if kind is not ImportanceSampling:
        numbers += [torch.tensor([0.0, 0.0]), torch.tensor([4.0, 4.0])]
    losses, factors = kind(*numbers).of(torch.tensor([-1.0, -2.0]))
    assert losses[0] == factors[0] == 0.0 and factors[1] == 1.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "wanted", "factor"),
    [
        (1.1, 2.0, -2.2, 2.2),
        (1.5, 2.0, -2.4, 0.0),  # better than before: clipped, and pushed no further
        (1.5, -2.0, 3.0, -3.0),  # worse than before: not clipped
        (0.5, 2.0, -1.0, 1.0),
        (0.5, -2.0, 1.6, 0.0),
    ],
)
def test_ppo_stops_only_where_the_objective_would_gain_by_more(
    ratio: float, advantage: float, wanted: float, factor: float
) -> None:
    sampled = torch.tensor([-2.0])
    loss = Ppo(sampled, torch.tensor([advantage]), torch.tensor([0.8]), torch.tensor([1.2]))
    losses, factors = loss.of(sampled + torch.log(torch.tensor([ratio])))
    torch.testing.assert_close(losses, torch.tensor([wanted]))
    torch.testing.assert_close(factors, torch.tensor([factor]))


def test_cispo_bounds_the_coefficient_and_keeps_the_gradient() -> None:
    sampled = torch.tensor([-9.0, -1.0])
    loss = Cispo(sampled, torch.tensor([1.0, -1.0]), torch.zeros(2), torch.full((2,), 4.0))
    losses, factors = loss.of(torch.tensor([-1.0, -1.0]))
    torch.testing.assert_close(factors, torch.tensor([4.0, -1.0]))
    torch.testing.assert_close(losses, torch.tensor([4.0, -1.0]))


def test_dro_pulls_back_to_where_the_tokens_were_sampled() -> None:
    loss = Dro(torch.tensor([-2.0]), torch.tensor([1.0]), torch.tensor([0.5]))
    losses, factors = loss.of(torch.tensor([-1.0]))
    assert losses.item() == pytest.approx(1.0 + 0.25) and factors.item() == pytest.approx(0.5)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 1000))
def test_gspo_gives_every_token_its_sequence_s_ratio(lengths: list[int], seed: int) -> None:
    count = sum(lengths)
    logits, targets = drawn_logits(count, seed)
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(count, generator=generator) < 0.5).float()
    mask[torch.tensor(lengths).cumsum(0) - 1] = 1.0  # every sequence has a position that counts
    given_ = drawn_loss("ppo", count, seed=seed)
    assert isinstance(given_, Ppo)
    loss = Gspo(given_.sampled, given_.advantages, given_.low, given_.high, mask)
    wide = logits.clone().requires_grad_()
    logprobs = torch.log_softmax(wide, -1).gather(1, targets[:, None])[:, 0]
    total = DEFINED["gspo"](logprobs, loss, tuple(lengths))
    last = loss.after(logprobs.detach(), torch.tensor([0, *accumulate(lengths)], dtype=torch.int32))
    losses, _ = TrainingOps(LayerOps(shape_of("cpu", torch.float64))).loss_backward(logits, targets, last)
    torch.testing.assert_close(losses.sum(), total.detach())
    torch.testing.assert_close(logits, torch.autograd.grad(total, wide)[0])
