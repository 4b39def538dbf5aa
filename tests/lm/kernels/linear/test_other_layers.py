"""The operations of layers unlike Llama's, fused and in PyTorch, against float64: their norms, gates and rotations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from holdfast.lm.kernels.linear.experts.experts import ExpertRule, Experts, apply_experts
from holdfast.lm.kernels.linear.fused_layers import FusedLayerOps
from holdfast.lm.kernels.linear.layers import LayerOps
from tests.lm.kernels.linear.test_layers import EPS, assert_near, doubled, drawn, shape_of


def layer_normed(x: torch.Tensor, factors: torch.Tensor, dim: int = 16) -> torch.Tensor:
    """The layer norm of each head, with factors of its own."""
    heads = functional.layer_norm(x.double().unflatten(1, (-1, dim)), (dim,), eps=EPS)
    return (heads * factors.double().view(-1, dim)).flatten(1)


KINDS = pytest.mark.parametrize("kind", [LayerOps, FusedLayerOps])
TOKENS = pytest.mark.parametrize("tokens", [1, 6])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x.double(), weight.shape, weight.double(), EPS)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_layer_norm_has_its_bias_after_its_factors(kind: type[LayerOps], dtype: torch.dtype, device: str) -> None:
    stream, weight = drawn(5, 72, device=device, dtype=dtype, spread=3), drawn(144, device=device, dtype=dtype)
    found = kind(shape_of(device, dtype, layer_norm=True)).norm(stream, weight)
    factor, bias = weight.double().chunk(2)
    assert_near(found, functional.layer_norm(stream.double(), (72,), factor, bias, EPS))


@KINDS
def test_a_norm_more_precise_than_the_stream_keeps_the_streams_dtype(kind: type[LayerOps], device: str) -> None:
    stream, weight = drawn(5, 72, device=device, dtype=torch.float16), 1 + drawn(72, device=device, spread=1e-4)
    found = kind(shape_of(device, torch.float16)).norm(stream, weight)
    assert found.dtype == torch.float16
    assert_near(found, rms(stream, weight))
    weight = torch.cat((weight, drawn(72, device=device)))
    found = kind(shape_of(device, torch.float16, layer_norm=True)).norm(stream, weight)
    assert found.dtype == torch.float16
    assert_near(found, functional.layer_norm(stream.double(), (72,), *weight.double().chunk(2), EPS))


@pytest.mark.each_pair
@KINDS
@TOKENS
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("norms", ["out", "both", "layer", "none"])
def test_a_projection_is_normed_before_it_is_added_or_not(
    kind: type[LayerOps], tokens: int, with_bias: bool, norms: str, device: str
) -> None:
    dtype = torch.float16
    ops = kind(shape_of(device, dtype, layer_norm=norms == "layer"))
    stream, x = drawn(tokens, 64, device=device, dtype=dtype), drawn(tokens, 128, device=device, dtype=dtype)
    weight = drawn(64, 128, device=device, dtype=dtype, spread=128**-0.5)
    bias = drawn(64, device=device, dtype=dtype) if with_bias else None
    sizes = {"out": 0, "both": 64, "layer": 128, "none": 0}
    norm, out_norm = drawn(sizes[norms], device=device, dtype=dtype), None
    added = functional.linear(*doubled(x, weight, bias))
    if norms in ("out", "both"):
        out_norm = drawn(64, device=device, dtype=dtype)
        added = rms(added, out_norm)
    exact = stream.double() + added
    expected = exact
    if norms == "both":
        expected = rms(exact, norm)
    elif norms == "layer":
        expected = functional.layer_norm(exact, (64,), *norm.double().chunk(2), EPS)
    found = ops.computed(ops.add_linear_norm(stream, x, weight, bias, norm, out_norm=out_norm))
    assert_near(stream, exact)
    assert_near(found, expected)


@KINDS
@TOKENS
def test_two_projections_are_added_side_by_side(kind: type[LayerOps], tokens: int, device: str) -> None:
    dtype = torch.float16
    ops = kind(shape_of(device, dtype, layer_norm=True))
    stream, norm = drawn(tokens, 64, device=device, dtype=dtype), drawn(128, device=device, dtype=dtype)
    one, other = (
        (
            drawn(tokens, width, device=device, dtype=dtype),
            drawn(64, width, device=device, dtype=dtype, spread=width**-0.5),
            bias,
        )
        for width, bias in ((64, None), (256, drawn(64, device=device, dtype=dtype)))
    )
    exact = stream.double() + sum(functional.linear(*doubled(*each)) for each in (one, other))
    found = ops.add_linears_norm(stream, one, other, norm)
    assert_near(stream, exact)
    assert_near(found, functional.layer_norm(exact, (64,), *norm.double().chunk(2), EPS))


@KINDS
@TOKENS
@pytest.mark.parametrize("activation", ["relu", "relu2", "gelu_new", "silu"])
def test_an_mlp_without_a_gate_is_the_activation_alone(
    kind: type[LayerOps], tokens: int, activation: str, device: str
) -> None:
    dtype = torch.float16
    ops = kind(shape_of(device, dtype, activation=activation, gated=False))
    x = drawn(tokens, 64, device=device, dtype=dtype)
    weight, bias = drawn(96, 64, device=device, dtype=dtype, spread=0.125), drawn(96, device=device, dtype=dtype)
    act: Any = {
        "relu": functional.relu,
        "relu2": lambda x: functional.relu(x) ** 2,
        "silu": functional.silu,
        "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    }[activation]
    assert_near(ops.gated_linear(x, weight, bias), act(functional.linear(*doubled(x, weight, bias))))


@pytest.mark.each_pair
@KINDS
@pytest.mark.parametrize("rotated", [0, 6, 8])
@pytest.mark.parametrize("norm", ["none", "whole", "layer"])
def test_pairs_of_frequency_zero_stay_and_norms_may_be_over_all_heads_or_each_head_s_own(
    kind: type[LayerOps], rotated: int, norm: str, device: str
) -> None:
    heads, kv_heads, dim, tokens = 4, 2, 16, 5
    shape = shape_of(device, amplitude=1.25, qk_norm_whole=norm == "whole", qk_layer_norm=norm == "layer")
    shape.inverse_frequencies[rotated:] = 0
    qkv, positions = drawn(tokens, 128, device=device), torch.arange(7, 7 + tokens, device=device)
    norms = [drawn(count * dim, device=device) if norm != "none" else None for count in (heads, kv_heads)]
    query, key, value = torch.split(qkv.double(), [heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    if norms[0] is not None and norms[1] is not None:
        normed = rms if norm == "whole" else layer_normed
        query, key = normed(query, norms[0]), normed(key, norms[1])
    angles = positions[:, None, None].double() * shape.inverse_frequencies.double()
    factor = torch.where(shape.inverse_frequencies == 0, 1.0, 1.25).double()
    cosine, sine = angles.cos() * factor, angles.sin() * factor

    def turned(x: torch.Tensor) -> torch.Tensor:
        a, b = x.view(tokens, -1, dim).chunk(2, dim=-1)
        return torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1)

    caches = torch.zeros(2, 1, 8, kv_heads, dim, device=device)
    ops, slots = kind(shape), torch.arange(tokens, device=device)
    found = ops.rotate_and_write(qkv, ops.rotation(positions), *norms, (caches[0], caches[1]), slots)
    assert_near(found, turned(query))
    assert_near(caches[0, 0, :tokens], turned(key))
    assert torch.equal(caches[1, 0, :tokens].double(), value.view(tokens, kv_heads, dim))


@KINDS
@TOKENS
def test_experts_are_added_before_a_layer_norm(kind: type[LayerOps], tokens: int, device: str) -> None:
    dtype = torch.float16
    experts = Experts(
        rule=ExpertRule(top_k=2, normalized=False, jitter=0.1),
        router=drawn(5, 64, device=device, dtype=dtype),
        gate_up=drawn(5, 64, 64, device=device, dtype=dtype, spread=0.125),
        down=drawn(5, 64, 32, device=device, dtype=dtype, spread=0.2),
    )
    stream, norm = drawn(tokens, 64, device=device, dtype=dtype), drawn(128, device=device, dtype=dtype)
    x = drawn(tokens, 64, device=device, dtype=dtype)
    router, gate_up, down = doubled(experts.router, experts.gate_up, experts.down)
    wide = replace(experts, router=router, gate_up=gate_up, down=down)
    exact = stream.double() + apply_experts(x.double(), wide)
    found = kind(shape_of(device, dtype, layer_norm=True)).add_experts_norm(stream, x, experts, norm)
    assert_near(stream, exact)
    assert_near(found, functional.layer_norm(exact, (64,), *norm.double().chunk(2), EPS))
