"""The fused kernels of a layer against the PyTorch operations in float64: on a GPU, or interpreted without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from holdfast.lm.kernels.fp8 import FP8
from holdfast.lm.kernels.linear import fused_layers, layer_ops_for, layers
from holdfast.lm.kernels.linear.fused_layers import FusedLayerOps
from holdfast.lm.kernels.linear.layers import LayerOps, LayerShape
from holdfast.lm.kernels.lora.protocol import Finish

EPS = 1e-5
PRECISION = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(PRECISION)


def shape_of(device: str, dtype: torch.dtype = torch.float32, **differences: Any) -> LayerShape:
    sizes = dict(num_heads=4, num_kv_heads=2, head_dim=16, eps=EPS, activation="silu", amplitude=1.0) | differences
    half = sizes["head_dim"] // 2
    frequencies = 1 / 10000 ** (torch.arange(half, device=device) / half)
    return LayerShape(dtype=dtype, inverse_frequencies=frequencies.float(), **sizes)


def drawn(*size: int, device: str, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> torch.Tensor:
    return (torch.randn(size, device=device) * spread).to(dtype)


def doubled(*tensors: torch.Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.double() for tensor in tensors]


def oracle(shape: LayerShape) -> LayerOps:
    """The PyTorch operations in float64. Only the angles are float32."""
    return LayerOps(replace(shape, dtype=torch.float64))


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that results are within a few roundings of the dtype, relative to the largest value."""
    error = (found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    assert error < PRECISION[found.dtype]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "rank", "rotated", "block_size"), [(4, 24, 8, 5), (20, 16, 16, 1), (1, 40, 12, 16)])
@pytest.mark.parametrize("amplitude", [1.0, 1.3])
def test_latents_are_normed_rotated_and_written_as_in_float64(
    heads: int, rank: int, rotated: int, block_size: int, amplitude: float, dtype: torch.dtype, device: str
) -> None:
    tokens, blocks, eps = 11, 24, 1e-3
    shape = shape_of(device, dtype, num_heads=heads, num_kv_heads=1, head_dim=rotated, amplitude=amplitude)
    query = drawn(tokens, heads, rank + rotated, device=device, dtype=dtype)
    projected = drawn(tokens, 7 + rank + rotated, device=device, dtype=dtype)
    norm = drawn(rank, device=device, dtype=dtype)
    positions = torch.randint(0, 100_000, (tokens,), device=device)
    slots = torch.randperm(blocks * block_size, device=device)[:tokens]
    memory = torch.full((3, blocks, block_size, 1, rank + rotated), torch.nan, device=device, dtype=dtype)
    cache = memory[1]
    exact, exact_query = cache.double(), query.double()
    reference, ops = oracle(shape), FusedLayerOps(shape)
    latents = projected.double()[:, 7:]
    reference.rotate_and_write_latent(
        exact_query, latents, reference.rotation(positions), norm.double(), eps, exact, slots
    )
    slots[3] = -1  # padding
    ops.rotate_and_write_latent(query, projected[:, 7:], ops.rotation(positions), norm, eps, cache, slots)
    assert_near(query, exact_query)
    written = ~cache.isnan()
    assert int((~memory.isnan()).sum()) == int(written.sum()) == (tokens - 1) * (rank + rotated)
    assert_near(cache[written], exact[written])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_with_its_own_eps_reads_a_part_of_each_row(dtype: torch.dtype, device: str) -> None:
    shape, rows, weight = shape_of(device, dtype), drawn(5, 90, device=device, dtype=dtype), drawn(60, device=device)
    rows *= 0.01  # so that eps counts
    found = FusedLayerOps(shape).norm_with(rows[:, 30:], weight.to(dtype), 1e-3)
    assert_near(found, oracle(shape).norm_with(rows.double()[:, 30:], weight.to(dtype).double(), 1e-3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (7, 100), (3, 4096)])
def test_norm_equals_float64_and_keeps_its_input(tokens: int, width: int, dtype: torch.dtype, device: str) -> None:
    shape = shape_of(device, dtype)
    stream, weight = (
        drawn(tokens, width, device=device, dtype=dtype, spread=3),
        drawn(width, device=device, dtype=dtype),
    )
    before = stream.clone()
    found = FusedLayerOps(shape).norm(stream, weight)
    assert found.dtype == dtype
    assert_near(found, oracle(shape).norm(*doubled(stream, weight)))
    assert torch.equal(stream, before)


@pytest.mark.each_pair
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("tokens", "dtype"), [(1, torch.float16), (5, torch.float16), (9, torch.float16)])
@pytest.mark.parametrize(("width", "inputs"), [(64, 128), (72, 4096), (40, 2600)])
def test_the_stream_is_added_to_in_place_and_normed(
    width: int, inputs: int, tokens: int, dtype: torch.dtype, with_bias: bool, device: str
) -> None:
    shape = shape_of(device, dtype)
    stream, x = drawn(tokens, width, device=device, dtype=dtype), drawn(tokens, inputs, device=device, dtype=dtype)
    weight = drawn(width, inputs, device=device, dtype=dtype, spread=inputs**-0.5)
    bias = drawn(width, device=device, dtype=dtype) if with_bias else None
    norm = drawn(width, device=device, dtype=dtype)
    exact, *given = doubled(stream, x, weight, bias, norm)
    expected = oracle(shape).add_linear_norm(exact, *given)
    ops = FusedLayerOps(shape)
    found = ops.computed(ops.add_linear_norm(stream, x, weight, bias, norm))
    assert_near(stream, exact)
    assert_near(found, expected)


@pytest.mark.parametrize("tokens", [1, 6])
def test_float32_is_added_and_normed_exactly(tokens: int, device: str) -> None:
    shape = shape_of(device)
    stream, x, weight, bias, norm = (
        drawn(*size, device=device) for size in ((tokens, 64), (tokens, 128), (64, 128), (64,), (64,))
    )
    exact, *given = doubled(stream, x, weight, bias, norm)
    expected = oracle(shape).add_linear_norm(exact, *given)
    assert_near(FusedLayerOps(shape).add_linear_norm(stream, x, weight, bias, norm), expected)
    assert_near(stream, exact)


def test_zero_tokens_give_empty_results(device: str) -> None:
    ops = FusedLayerOps(shape_of(device))
    stream, x = torch.empty(0, 64, device=device), torch.empty(0, 128, device=device)
    weight, norm = torch.empty(64, 128, device=device), torch.empty(64, device=device)
    assert ops.add_linear_norm(stream, x, weight, None, norm).shape == (0, 64)
    assert ops.gated_linear(stream, weight.t().contiguous()).shape == (0, 64)


@pytest.mark.each_pair
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize(("tokens", "inputs", "width", "dtype"), [
    (3, 64, 100, torch.float32),
    (1, 256, 100, torch.float16),
    (4, 300, 72, torch.float16),
    (9, 256, 1100, torch.float16),
])  # fmt: skip
@pytest.mark.parametrize("with_bias", [False, True])
def test_gated_linear_equals_float64(
    tokens: int, inputs: int, width: int, dtype: torch.dtype, with_bias: bool, activation: str, device: str
) -> None:
    shape = shape_of(device, dtype, activation=activation)
    x = drawn(tokens, inputs, device=device, dtype=dtype)
    weight = drawn(2 * width, inputs, device=device, dtype=dtype, spread=inputs**-0.5)
    bias = drawn(2 * width, device=device, dtype=dtype) if with_bias else None
    found = FusedLayerOps(shape).gated_linear(x, weight, bias)
    assert found.dtype == dtype
    assert_near(found, oracle(shape).gated_linear(*doubled(x, weight, bias)))


@pytest.mark.whole_product
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", [LayerOps, FusedLayerOps])
def test_the_gate_includes_adapters(kind: type[LayerOps], together: bool, activation: str, device: str) -> None:
    shape = shape_of(device, activation=activation)
    gate_up, added = drawn(5, 80, device=device), drawn(5, 80, device=device)
    expected = oracle(shape).gate(*doubled(gate_up + added))
    silu = oracle(shape_of(device))  # the 1 added to its result shows which operation computed it
    finish = Finish(lambda out: out.add_(added), (lambda before: silu.gate(before + added) + 1) if together else None)
    found = kind(shape).gate(gate_up, finish)
    if together and activation == "silu" and kind is FusedLayerOps:
        found = found - 1
    assert_near(found, expected)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "amplitude"),
    [(4, 2, 16, 16, 1.0), (4, 2, 16, 1, 1.25), (6, 2, 40, 5, 1.0), (1, 1, 64, 16, 1.0), (14, 2, 128, 16, 1.0)],
)
@pytest.mark.parametrize("with_norm", [False, True])
def test_rotation_and_cache_write_equal_float64(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    amplitude: float,
    with_norm: bool,
    dtype: torch.dtype,
    device: str,
) -> None:
    tokens, blocks = 11, 24
    shape = shape_of(device, dtype, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, amplitude=amplitude)
    qkv = drawn(tokens, (heads + 2 * kv_heads) * head_dim, device=device, dtype=dtype)
    norms = [drawn(head_dim, device=device, dtype=dtype) if with_norm else None for _ in range(2)]
    positions = torch.randint(0, 100_000, (tokens,), device=device)
    slots = torch.randperm(blocks * block_size, device=device)[:tokens]

    # A layer's caches are views of one tensor, and hold anything before they are written.
    data = torch.full((2, blocks, block_size, kv_heads, head_dim), torch.nan, device=device, dtype=dtype)
    exact = data.double()
    ops, reference = FusedLayerOps(shape), oracle(shape)
    expected = reference.rotate_and_write(
        *doubled(qkv), reference.rotation(positions), *doubled(*norms), (exact[0], exact[1]), slots
    )
    found = ops.rotate_and_write(qkv, ops.rotation(positions), *norms, (data[0], data[1]), slots)
    assert found.shape == (tokens, heads, head_dim)
    assert_near(found, expected)
    written = ~exact.isnan()
    assert torch.equal(~data.isnan(), written)
    assert_near(data[written], exact[written])


@pytest.mark.parametrize("kv_heads", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_may_have_a_norm_without_weights_and_queries_may_be_alone(
    kv_heads: int, dtype: torch.dtype, device: str
) -> None:
    tokens, heads, head_dim = 5, 3, 24
    shape = shape_of(device, dtype, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, unit_v_norm=True)
    qkv = drawn(tokens, (heads + 2 * kv_heads) * head_dim, device=device, dtype=dtype, spread=3)
    norm, positions = drawn(head_dim, device=device, dtype=dtype), torch.arange(tokens, device=device)
    data = torch.full((2, 4, 2, max(1, kv_heads), head_dim), torch.nan, device=device, dtype=dtype)
    exact, ops, reference = data.double(), FusedLayerOps(shape), oracle(shape)
    found = ops.rotate_and_write(qkv, ops.rotation(positions), norm, norm, (data[0], data[1]), positions)
    doubles = doubled(qkv), doubled(norm)
    expected = reference.rotate_and_write(
        *doubles[0], reference.rotation(positions), *doubles[1] * 2, (exact[0], exact[1]), positions
    )
    assert_near(found, expected)
    written = ~exact.isnan()
    assert torch.equal(~data.isnan(), written) and bool(written.any()) == (kv_heads > 0)
    if kv_heads:
        assert_near(data[written], exact[written])
        values = data[1].flatten(0, 1)[:tokens]
        raw = qkv[:, -kv_heads * head_dim :].double().view_as(values)
        assert_near(values, raw / (raw.square().mean(-1, keepdim=True) + shape.eps).sqrt())


def test_an_fp8_cache_holds_the_rounded_keys_and_values(device: str) -> None:
    ops = FusedLayerOps(shape_of(device))
    qkv = drawn(7, 128, device=device, spread=3)
    positions, slots = torch.arange(7, device=device), torch.arange(7, device=device)
    exact = torch.zeros(2, 4, 2, 2, 16, device=device)
    found = exact.to(FP8)
    for data in (exact, found):
        ops.rotate_and_write(qkv, ops.rotation(positions), None, None, (data[0], data[1]), slots)
    assert torch.equal(found.float(), exact.to(FP8).float())
    assert found.float().abs().max() > 4


def test_padding_is_not_written(device: str) -> None:
    ops = FusedLayerOps(shape_of(device))
    qkv, positions = drawn(3, 128, device=device), torch.arange(3, device=device)
    data = torch.full((2, 4, 2, 2, 16), torch.nan, device=device)
    slots = torch.tensor([-1, 5, -1], device=device)
    ops.rotate_and_write(qkv, ops.rotation(positions), None, None, (data[0], data[1]), slots)
    slot_is_written = (~data.isnan()).flatten(3).all(-1).flatten(1)
    assert slot_is_written.tolist() == [[slot == 5 for slot in range(8)]] * 2
    assert int((~data.isnan()).sum()) == 2 * 32


@pytest.mark.parametrize("tokens", [1, 4, 7, 128, 129])
def test_products_with_packed_weights_equal_float64(tokens: int) -> None:
    ops = oracle(shape_of("cpu"))
    weight = drawn(512, 2056, device="cpu", spread=0.05).t()  # stored by inputs, as the decoder does
    bias, x = drawn(2056, device="cpu"), drawn(tokens, 1024, device="cpu")[:, ::2]
    assert ops.pack([weight, drawn(8, 8, device="cpu")]) == weight.nbytes  # small ones are not worth it
    expected = x.double() @ weight.double().t()
    torch.testing.assert_close(ops.linear(x, weight).double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(ops.linear(x, weight, bias).double(), expected + bias, rtol=1e-5, atol=1e-4)


def test_weights_beyond_the_limit_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "MOST_PACKED", (8 << 20) - 1)
    weight = drawn(1024, 1024, device="cpu")
    assert oracle(shape_of("cpu")).pack([weight]) == weight.nbytes
    assert oracle(shape_of("cpu")).pack([weight, weight.clone()]) == 0


def test_layer_ops_for_chooses_pytorch_on_a_cpu() -> None:
    assert type(layer_ops_for(shape_of("cpu"))) is LayerOps


@pytest.mark.gpu
def test_layer_ops_for_chooses_fused_kernels_on_cuda() -> None:
    assert type(layer_ops_for(shape_of("cuda"))) is FusedLayerOps


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 300])
def test_a_captured_layer_equals_float64(dtype: torch.dtype, tokens: int) -> None:
    hidden, inner, heads, kv_heads, head_dim = 1024, 3072, 16, 8, 128
    shape = shape_of("cuda", dtype, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    sizes = [
        (tokens, hidden),
        ((heads + 2 * kv_heads) * head_dim, hidden),
        (hidden, heads * head_dim),
        (2 * inner, hidden),
        (hidden, inner),
    ]
    stream, qkv, o, gate_up, down = (
        drawn(*size, device="cuda", dtype=dtype, spread=1.0 if size[0] == tokens else size[1] ** -0.5) for size in sizes
    )
    ones, head_ones = torch.ones(hidden, device="cuda", dtype=dtype), torch.ones(head_dim, device="cuda", dtype=dtype)
    data = torch.zeros(2, 20, 16, kv_heads, head_dim, device="cuda", dtype=dtype)
    positions, slots = torch.arange(tokens, device="cuda"), torch.arange(tokens, device="cuda")
    start = stream.clone()

    def layer(ops: LayerOps, stream: torch.Tensor, data: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        """A layer whose attention returns its queries, and the first product of the next layer."""
        qkv, o, gate_up, down, ones, head_ones = weights
        projected = ops.linear(ops.norm(stream, ones), qkv)
        caches = (data[0], data[1])
        query = ops.rotate_and_write(projected, ops.rotation(positions), head_ones, head_ones, caches, slots)
        normed = ops.add_linear_norm(stream, query.flatten(1), o, None, ones)
        normed = ops.add_linear_norm(stream, ops.gated_linear(normed, gate_up), down, None, ones)
        return ops.linear(normed, qkv)

    weights = (qkv, o, gate_up, down, ones, head_ones)
    ops = layer_ops_for(shape)
    layer(ops, stream, data, *weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer(ops, stream, data, *weights)
    stream.copy_(start)
    data.zero_()
    graph.replay()
    exact_stream, exact_data = doubled(start, torch.zeros_like(data))
    expected = layer(oracle(shape), exact_stream, exact_data, *doubled(*weights))
    for ours, exact in ((found, expected), (stream, exact_stream), (data, exact_data)):
        error = (ours.double() - exact).norm() / exact.norm()
        assert error < (1e-5 if dtype == torch.float32 else 1e-2)
    first = found.clone()
    stream.copy_(start)
    graph.replay()
    assert torch.equal(found, first)  # no sum depends on the order in which programs end


@pytest.mark.each_value
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("tokens", "hidden", "inputs", "width"), [(1, 256, 256, 100), (1, 2600, 256, 72), (2, 256, 256, 100)]
)
def test_one_token_gemms_norm_the_stream_they_read(
    tokens: int, hidden: int, inputs: int, width: int, with_bias: bool, device: str
) -> None:
    shape = shape_of(device, torch.float16)
    ops, exact_ops = FusedLayerOps(shape), oracle(shape)
    stream, x = (drawn(tokens, size, device=device, dtype=torch.float16, spread=2) for size in (hidden, inputs))
    square, after = (
        drawn(*size, device=device, dtype=torch.float16, spread=size[1] ** -0.5)
        for size in ((hidden, inputs), (2 * width, hidden))
    )
    norm = drawn(hidden, device=device, dtype=torch.float16)
    bias = drawn(2 * width, device=device, dtype=torch.float16) if with_bias else None
    exact, exact_x, exact_square, exact_after, exact_norm, exact_bias = doubled(stream, x, square, after, norm, bias)
    expected = exact_ops.add_linear_norm(exact, exact_x, exact_square, None, exact_norm)
    found = ops.add_linear_norm(stream, x, square, None, norm)
    assert_near(ops.linear(found, after, bias), exact_ops.linear(expected, exact_after, exact_bias))
    assert_near(ops.gated_linear(found, after, bias), exact_ops.gated_linear(expected, exact_after, exact_bias))


@pytest.mark.parametrize("biased", [False, True])
def test_gemms_in_pieces_equal_the_gemm_of_all_tokens(
    biased: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_layers, "PIECES", {7: (4, 3)})
    shape = shape_of(device)
    stream, x, square, norm, gate_up = (
        drawn(*size, device=device) for size in ((7, 64), (7, 48), (64, 48), (64,), (80, 64))
    )
    bias, wide_bias = (drawn(size, device=device) if biased else None for size in (64, 80))
    ops, exact_ops = FusedLayerOps(shape), oracle(shape)
    assert ops.launch(x, square) is None, "the library's products are meant"
    exact, exact_x, exact_square, exact_bias, exact_norm, exact_gate_up, exact_wide = doubled(
        stream, x, square, bias, norm, gate_up, wide_bias
    )
    expected = exact_ops.add_linear_norm(exact, exact_x, exact_square, exact_bias, exact_norm)
    found = ops.add_linear_norm(stream, x, square, bias, norm)
    assert_near(stream, exact)
    assert_near(found, expected)
    assert_near(
        ops.gated_linear(found, gate_up, wide_bias), exact_ops.gated_linear(expected, exact_gate_up, exact_wide)
    )
