"""Recurrences of training against a loop over tokens in float64, whose gradients autograd computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from holdfast.lm.kernels.recurrent.protocol import NORM_EPS
from holdfast.lm.kernels.training import recurrence
from holdfast.lm.kernels.training.recurrence import TrainingRecurrence
from tests.lm.kernels.recurrent_oracle import segments_of

BACKEND = TrainingRecurrence(torch.device("cpu"))
BATCHES = ([1], [64], [65, 1, 7], [3, 130, 64, 17, 200], [5, 5])
NO_SLOTS = torch.empty(0)
Tensors = Sequence[torch.Tensor]


def drawn(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def by_token(
    inputs: Tensors, lengths: Sequence[int], step: Callable[..., tuple[Any, torch.Tensor]], state: torch.Tensor
) -> torch.Tensor:
    """The results of `step`, which gets the state and a token's inputs, token by token from this state."""
    rows = []
    for sequence in zip(*(torch.split(each, [*lengths]) for each in inputs), strict=True):
        held = state
        for token in zip(*sequence, strict=True):
            held, row = step(held, *token)
            rows.append(row)
    return torch.stack(rows)


def compare(
    inputs: Tensors, found: Callable[[Tensors], torch.Tensor], expected: Callable[[Tensors], torch.Tensor]
) -> None:
    """Compare results, and gradients of all inputs for one gradient of the results."""
    gradients = []
    for dtype, function in ((torch.float32, found), (torch.float64, expected)):
        leaves = [each.to(dtype).requires_grad_() for each in inputs]
        out = function(leaves)
        torch.manual_seed(1)
        back = torch.randn(out.shape, dtype=torch.float64).to(dtype)
        gradients.append([out.detach().double(), *(g.double() for g in torch.autograd.grad(out, leaves, back))])
    for one, other in zip(*gradients, strict=True):
        assert float((one - other).abs().max()) <= 1e-4 * float(other.abs().max()) + 1e-5


def delta_inputs(total: int, groups: int = 2, heads: int = 6, key: int = 5, value: int = 3) -> list[torch.Tensor]:
    query, keys, values, decay, beta = drawn(
        (total, groups, key), (total, groups, key), (total, heads, value), (total, heads), (total, heads)
    )
    return [query, keys, values, -decay.abs(), beta.sigmoid()]


def delta(inputs: Tensors, lengths: Sequence[int], normalize: bool = True) -> torch.Tensor:
    metadata = BACKEND.make_metadata(segments_of(lengths))
    return BACKEND.gated_delta(*inputs, NO_SLOTS, metadata, scale=0.7, normalize=normalize)


def delta_step(normalize: bool) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def step(state: torch.Tensor, q: Any, k: Any, v: Any, decay: Any, beta: Any) -> tuple[Any, torch.Tensor]:
        if normalize:
            q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + NORM_EPS) for each in (q, k))
        q, k = (each.repeat_interleave(len(v) // len(each), 0) for each in (q, k))
        state = state * decay.exp()[:, None, None]
        held = torch.einsum("hk,hkv->hv", k, state)
        state = state + torch.einsum("hk,hv->hkv", k, beta[:, None] * (v - held))
        return state, 0.7 * torch.einsum("hk,hkv->hv", q, state)

    return step


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("lengths", BATCHES, ids=str)
def test_the_gated_delta_rule_has_the_gradients_of_a_loop_over_tokens(lengths: list[int], normalize: bool) -> None:
    inputs = delta_inputs(sum(lengths))
    inputs[1] = inputs[1] * (1.0 if normalize else 0.3)
    state = torch.zeros(6, 5, 3, dtype=torch.float64)
    compare(
        inputs,
        lambda given: delta(given, lengths, normalize),
        lambda given: by_token(given, lengths, delta_step(normalize), state),
    )


def scan(inputs: Tensors, lengths: Sequence[int]) -> torch.Tensor:
    x, dt, decay, b, c, skip = inputs
    return BACKEND.selective_scan(x, dt, decay, b, c, skip, NO_SLOTS, BACKEND.make_metadata(segments_of(lengths)))


@pytest.mark.parametrize("lengths", BATCHES, ids=str)
def test_a_selective_scan_has_the_gradients_of_a_loop_over_tokens(lengths: list[int]) -> None:
    total, heads, dim, groups, size = sum(lengths), 3, 4, 1, 5
    x, dt, decay, b, c, skip = drawn(
        (total, heads, dim), (total, heads), (heads,), (total, groups, size), (total, groups, size), (heads,)
    )

    def expected(given: Tensors) -> torch.Tensor:
        x, dt, decay, b, c, skip = given

        def step(state: torch.Tensor, x: Any, dt: Any, b: Any, c: Any) -> tuple[Any, torch.Tensor]:
            b, c = (each.repeat_interleave(heads // groups, 0) for each in (b, c))
            added = torch.einsum("hp,hn->hpn", dt[:, None] * x, b)
            state = state * (dt * decay).exp()[:, None, None] + added
            return state, torch.einsum("hpn,hn->hp", state, c) + skip[:, None] * x

        return by_token((x, dt, b, c), lengths, step, torch.zeros(heads, dim, size, dtype=torch.float64))

    compare((x, dt.abs(), -decay.abs(), b, c, skip), lambda given: scan(given, lengths), expected)


@pytest.mark.each_pair
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("lengths", BATCHES, ids=str)
def test_a_convolution_has_the_gradients_of_pytorch_s(lengths: list[int], width: int, activation: Any) -> None:
    x, weight, bias = drawn((sum(lengths), 5), (5, width), (5,))

    def found(given: Tensors) -> torch.Tensor:
        metadata = BACKEND.make_metadata(segments_of(lengths))
        return BACKEND.convolve(given[0], given[1], given[2], NO_SLOTS, metadata, activation=activation)

    def expected(given: Tensors) -> torch.Tensor:
        x, weight, bias = given
        rows = [
            torch.nn.functional.conv1d(
                torch.nn.functional.pad(part.t(), (width - 1, 0))[None], weight[:, None], bias, groups=5
            )[0].t()
            for part in torch.split(x, lengths)
        ]
        out = torch.cat(rows)
        return torch.nn.functional.silu(out) if activation else out

    compare((x, weight, bias), found, expected)


def test_pieces_of_heads_give_the_same_results_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [70, 9, 130]
    inputs = [each.requires_grad_() for each in delta_inputs(sum(lengths), groups=3)]
    whole = delta(inputs, lengths)
    expected = torch.autograd.grad(whole.square().sum(), inputs)
    monkeypatch.setattr(recurrence, "PIECE_BYTES", 1)
    calls = []
    monkeypatch.setattr(recurrence, "checkpoint", lambda *a, **k: calls.append(1) or CHECKPOINT(*a, **k))
    pieces = delta(inputs, lengths)
    torch.testing.assert_close(pieces, whole)
    torch.testing.assert_close(torch.autograd.grad(pieces.square().sum(), inputs), expected)
    assert len(calls) == 3


CHECKPOINT = recurrence.checkpoint


@pytest.mark.parametrize("decay", [-1e6, -torch.inf])
def test_strong_decays_leave_finite_gradients(decay: float) -> None:
    inputs = delta_inputs(130)
    inputs[3][::7] = decay
    inputs = [each.requires_grad_() for each in inputs]
    found = delta(inputs, [130])
    gradients = torch.autograd.grad(found.sum(), [*inputs[:3], inputs[4]])
    assert torch.isfinite(found).all() and all(torch.isfinite(each).all() for each in gradients)


def test_long_equal_keys_without_decay_stay_finite() -> None:
    inputs = delta_inputs(4096, groups=1, heads=1)
    inputs[1][:], inputs[3][:], inputs[4][:] = inputs[1][0], 0.0, 1.0
    inputs = [each.requires_grad_() for each in inputs]
    found = delta(inputs, [4096])
    assert torch.isfinite(found).all()
    assert all(torch.isfinite(each).all() for each in torch.autograd.grad(found.sum(), inputs))
