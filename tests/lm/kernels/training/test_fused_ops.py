"""The Triton kernels of training against PyTorch in float64: interpreted without a GPU, compiled with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from holdfast.lm.kernels.linear.layers import LayerOps, LayerShape
from holdfast.lm.kernels.training import ops
from holdfast.lm.kernels.training.fused_ops import FusedTrainingOps
from holdfast.lm.kernels.training.losses import CrossEntropy
from holdfast.lm.kernels.training.ops import TrainingOps, product_in_float32
from tests.lm.kernels.linear.test_layers import DTYPES, EPS, assert_near, drawn, shape_of
from tests.lm.kernels.linear.test_shards import Half
from tests.losses import LOSSES, drawn_loss


def both(shape: LayerShape) -> tuple[TrainingOps, TrainingOps]:
    """The kernels, and the PyTorch operations in float64."""
    return FusedTrainingOps(LayerOps(shape)), TrainingOps(LayerOps(replace(shape, dtype=torch.float64)))


def rotation_of(shape: LayerShape, tokens: int, device: str) -> tuple[Any, Any]:
    """Angles in the layout of the kernels, and in that of PyTorch."""
    angles = torch.arange(tokens, device=device)[:, None] * 3.0 * shape.inverse_frequencies
    cosine, sine = angles.cos(), angles.sin()
    whole = [torch.cat(pair, -1)[:, None].double() for pair in ((cosine, cosine), (-sine, sine))]
    return (cosine, sine), tuple(whole)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gate_and_its_gradients_equal_float64(dtype: torch.dtype, activation: str, device: str) -> None:
    fused, exact = both(shape_of(device, dtype, activation=activation))
    gate, up, back = (drawn(3, 1500, device=device, dtype=dtype) for _ in range(3))
    doubles = [tensor.double() for tensor in (gate, up, back)]
    assert_near(fused.gate(gate, up), exact.gate(*doubles[:2]))
    for found, expected in zip(fused.gate_backward(gate, up, back), exact.gate_backward(*doubles), strict=True):
        assert_near(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (5, 100)])
def test_norm_s_gradient_is_added(tokens: int, width: int, dtype: torch.dtype, device: str) -> None:
    fused, exact = both(shape_of(device, dtype))
    gradient, back, x = (drawn(tokens, width, device=device, dtype=dtype) for _ in range(3))
    weight = drawn(width, device=device, dtype=dtype)
    expected = gradient.double()
    exact.add_norm_backward(expected, back.double(), x.double(), weight.double())
    fused.add_norm_backward(gradient, back, x, weight)
    assert_near(gradient, expected)


def test_gradients_of_a_layer_norm_of_each_head_equal_autograd_s(device: str) -> None:
    heads, kv_heads, dim, tokens = 3, 1, 20, 5
    shape = shape_of(device, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, qk_layer_norm=True)
    shape.inverse_frequencies[:] = 0  # only the norm is left
    query, key, value = (drawn(tokens, n, dim, device=device) for n in (heads, kv_heads, kv_heads))
    qkv, norms = drawn(tokens, 5 * dim, device=device), [drawn(n * dim, device=device) for n in (heads, kv_heads)]
    given = qkv.double().view(tokens, -1, dim).requires_grad_()
    factors = torch.cat(norms).double().view(-1, dim)
    normed = functional.layer_norm(given[:, :4], (dim,), eps=EPS) * factors
    back = torch.cat((query, key, value), 1).double()
    (expected,) = torch.autograd.grad(torch.cat((normed, given[:, 4:]), 1), given, back)
    halves, whole = rotation_of(shape, tokens, device)
    fused, exact = both(shape)
    assert_near(fused.rotate_backward(query, key, value, qkv, halves, *norms), expected.flatten(1))
    doubles = [each.double() for each in (query, key, value, qkv)]
    in_float64 = exact.rotate_backward(*doubles, whole, *(norm.double() for norm in norms))
    torch.testing.assert_close(in_float64, expected.flatten(1))


@pytest.mark.each_pair
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("sizes", [(4, 2, 16), (3, 1, 20), (40, 8, 32)])
def test_rotation_s_gradient_equals_float64(
    sizes: tuple[int, int, int], normed: bool, dtype: torch.dtype, device: str
) -> None:
    heads, kv_heads, dim = sizes
    shape = shape_of(device, dtype, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim)
    fused, exact = both(shape)
    tokens = 3
    query, key, value = (drawn(tokens, n, dim, device=device, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    qkv = drawn(tokens, (heads + 2 * kv_heads) * dim, device=device, dtype=dtype)
    norms = [drawn(dim, device=device, dtype=dtype) if normed else None for _ in range(2)]
    halves, whole = rotation_of(shape, tokens, device)
    found = fused.rotate_backward(query, key, value, qkv, halves, *norms)
    doubles = [None if norm is None else norm.double() for norm in norms]
    expected = exact.rotate_backward(query.double(), key.double(), value.double(), qkv.double(), whole, *doubles)
    assert_near(found, expected)


@pytest.mark.each_pair
@pytest.mark.parametrize("kind", [TrainingOps, FusedTrainingOps])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("tokens", [1, 5])
def test_gradients_of_norms_over_the_heads_of_two_devices_add_up_to_those_of_one(
    tokens: int, kv_heads: int, kind: type[TrainingOps], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one KV head both devices hold it, each with a part of its gradient."""
    monkeypatch.setattr(ops, "SUMMED_TOGETHER", 4)
    heads, dim, dtype = 4, 16, torch.float32
    sizes = dict(num_heads=heads, head_dim=dim, qk_norm_whole=True)
    # Columns of queries, of keys and of values; of both devices' copies, where both hold the KV head.
    widths = (heads * dim, 2 * dim, 2 * dim)
    back, qkv = (drawn(tokens, sum(widths), device=device, dtype=dtype).split(widths, 1) for _ in range(2))
    q_norm, k_norm = (drawn(width, device=device, dtype=dtype) for width in widths[:2])
    if kv_heads == 1:
        qkv = (qkv[0], *(part[:, :dim].repeat(1, 2) for part in qkv[1:]))
        k_norm = k_norm[:dim].repeat(2)

    def joined(parts: tuple[torch.Tensor, ...], *, summed: bool) -> torch.Tensor:
        """Parts of both devices as those of one: of copies the first, or their sum."""
        if kv_heads == 2:
            return torch.cat(parts, 1).double()
        copies = [part.double().chunk(2, 1) for part in parts[1:]]
        return torch.cat((parts[0].double(), *(a + b if summed else a for a, b in copies)), 1)

    given = joined(qkv, summed=False).requires_grad_()
    query, key, value = given.split((heads * dim, kv_heads * dim, kv_heads * dim), 1)
    normed = [
        functional.rms_norm(x, x.shape[1:], weight[: x.shape[1]].double(), EPS)
        for x, weight in ((query, q_norm), (key, k_norm))
    ]
    (expected,) = torch.autograd.grad(torch.cat((*normed, value), 1), given, joined(back, summed=True))
    shape = shape_of(device, dtype, num_kv_heads=1, **{**sizes, "num_heads": 2}, kv_copies=2 // kv_heads)
    own = [tuple(part.chunk(2, 1)[rank] for part in (*back, *qkv)) for rank in range(2)]
    gave: list[Any] = [0.0, 0.0]
    gradients = []
    for turn in range(4):  # the first two record what each device adds to the sums
        rank = turn % 2
        group = Half(gave[1 - rank] if turn > 1 else 0.0, device)
        gradient, x = torch.cat(own[rank][:3], 1), torch.cat(own[rank][3:], 1)
        norms = [norm.chunk(2)[rank].contiguous() for norm in (q_norm, k_norm)]
        kind(LayerOps(shape, group)).whole_norms_backward(gradient, x, *norms)
        if turn < 2:
            gave[rank] = group.gives
        else:
            gradients.append(gradient.split((2 * dim, dim, dim), 1))
    found = tuple(torch.cat(parts, 1) for parts in zip(*gradients, strict=True))
    assert_near(joined(found, summed=True).float(), expected)


@pytest.mark.each_pair
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [37, 9000])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_its_gradient_equal_float64(name: str, vocabulary: int, dtype: torch.dtype, device: str) -> None:
    fused, exact = both(shape_of(device, dtype))
    logits = drawn(4, vocabulary, device=device, dtype=dtype, spread=4)
    targets = torch.tensor([0, vocabulary - 1, 5, 5], device=device)
    around = torch.log_softmax(logits.float(), -1)[torch.arange(4), targets]
    loss = drawn_loss(name, 4, device=device, around=around.cpu())
    expected, before = logits.double(), logits.clone()
    wanted = exact.loss_backward(expected, targets, loss)
    for found in (fused.loss_backward(logits, targets, loss, backward=False), None):
        assert found is None or torch.equal(logits, before)
        for one, other in zip(found or fused.loss_backward(logits, targets, loss), wanted, strict=True):
            torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=2e-5)
    assert_near(logits, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [37, 9000])
def test_the_loss_of_several_targets_equals_float64(vocabulary: int, dtype: torch.dtype, device: str) -> None:
    fused, exact = both(shape_of(device, dtype))
    logits = drawn(3, vocabulary, device=device, dtype=dtype, spread=4)
    targets = torch.tensor([[0, vocabulary - 1, 5], [7, 7, 7], [5, 0, 5]], device=device)
    loss = CrossEntropy(torch.tensor([[1.0, -0.5, 0.25], [0.5, 0.5, 0.0], [0.0, 0.0, 0.0]], device=device))
    expected = logits.double()
    wanted = exact.loss_backward(expected, targets, loss)
    for one, other in zip(fused.loss_backward(logits, targets, loss), wanted, strict=True):
        torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=2e-5)
    assert_near(logits, expected)
    assert not logits[2].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_position_without_weight_has_no_gradient(dtype: torch.dtype, device: str) -> None:
    fused, _ = both(shape_of(device, dtype))
    logits = drawn(3, 37, device=device, dtype=dtype, spread=4)
    fused.loss_backward(
        logits, torch.tensor([0, 1, 2], device=device), CrossEntropy(torch.tensor([1.0, 0.0, -0.5], device=device))
    )
    assert not logits[1].any() and logits[0].any() and logits[2].any()


def test_a_product_in_float32_is_not_rounded_to_its_factors_dtype(device: str) -> None:
    left, right = drawn(5, 300, device=device, dtype=torch.bfloat16), drawn(300, 4, device=device, dtype=torch.bfloat16)
    out = torch.empty(5, 4, device=device)
    product_in_float32(left, right, out, 2.0)
    torch.testing.assert_close(out.double(), 2.0 * left.double() @ right.double(), atol=1e-4, rtol=1e-4)
