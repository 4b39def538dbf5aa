"""FP8 weights and activations, and GEMMs with them, against float64: interpreted without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from holdfast.lm.kernels.fp8 import LARGEST, Fp8Weight, quantize
from holdfast.lm.kernels.linear import layer_ops_for
from holdfast.lm.kernels.linear.fp8_linear import LOWER, Fp8Rows, fp8_launch_for, fp8_skinny_gemm, quantize_rows
from holdfast.lm.kernels.linear.fused_layers import FusedLayerOps
from holdfast.lm.kernels.linear.layers import LayerOps
from holdfast.lm.kernels.linear.skinny_gemm import MAX_ROWS, SkinnyLaunch, skinny_gemm
from tests.lm.kernels.linear.test_layers import drawn, oracle, shape_of

HALF_STEP = 2.0**-4
"""The largest relative error of rounding to 3 bits of fraction."""
LEAST_STEP = 2.0**-9
"""The distance between two numbers next to zero."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def weight_of(outputs: int, inputs: int, device: str, dtype: torch.dtype = torch.float32) -> Fp8Weight:
    """A weight whose rows differ by up to 100 times: one scale for all would lose most of them."""
    spread = torch.logspace(-1, 1, outputs, device=device)[torch.randperm(outputs, device=device)]
    return quantize((drawn(outputs, inputs, device=device, spread=inputs**-0.5) * spread[:, None]).to(dtype))


def exact(weight: Fp8Weight) -> torch.Tensor:
    return weight.data.double() * weight.scale.double()[:, None]


def exact_rows(rows: Fp8Rows) -> torch.Tensor:
    """The activations [T, K] that `rows` stands for."""
    numbers = rows.data.double()
    return (numbers[0] + numbers[1:].sum(0) / LOWER) * rows.scale.double()[:, None]


def rounding(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The largest error of rounding to the nearest FP8 number."""
    return torch.maximum(numbers.abs() * HALF_STEP, scale * LEAST_STEP / 2) * (1 + 1e-4)


def bound_of_sums(device: str, rows: int) -> float:
    """The allowed error of a GEMM. The tensor cores that multiply several rows keep few bits of their sums."""
    return 5e-3 if device == "cuda" and rows > 1 else 1e-4


def assert_near(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """Assert that every column is within `bound`, relative to its own size, because outputs differ in size."""
    error = (found.double() - expected).norm(dim=0) / expected.norm(dim=0)
    assert error.max() < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs", [1, 50, 1030])
def test_quantize_rounds_each_row_to_the_nearest_fp8_number(outputs: int, dtype: torch.dtype, device: str) -> None:
    weight = (drawn(outputs, 96, device=device) * torch.logspace(-2, 2, outputs, device=device)[:, None]).to(dtype)
    found = quantize(weight)
    off = (exact(found) - weight.double()).abs()
    assert (off <= rounding(weight.double(), found.scale.double()[:, None])).all()
    assert torch.equal(found.data.float().abs().amax(1), torch.full((outputs,), LARGEST, device=device))
    assert found.nbytes == outputs * (96 + 4)


def test_rows_of_zeros_stay_zeros(device: str) -> None:
    weight = quantize(torch.zeros(2, 8, device=device))
    assert not exact(weight).any() and weight.scale.isfinite().all()
    rows = quantize_rows(torch.zeros(2, 8, device=device))
    assert not exact_rows(rows).any() and rows.scale.isfinite().all()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("width", [16, 100, 4096])
def test_quantize_rows_rounds_each_token_to_the_nearest_fp8_number(width: int, gated: bool, device: str) -> None:
    x = drawn(5, 2 * width if gated else width, device=device) * torch.logspace(-2, 1, 5, device=device)[:, None]
    found = quantize_rows(x, gated=gated)
    gate, up = x.double().chunk(2, dim=1)
    expected = functional.silu(gate) * up if gated else x.double()
    bound = rounding(expected, found.scale.double()[:, None])
    assert ((exact_rows(found) - expected).abs() <= bound).all()
    torch.testing.assert_close(found.scale.double() * LARGEST, expected.abs().amax(1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("width", [16, 4096])
def test_two_fp8_numbers_hold_a_bfloat16_number(width: int, device: str) -> None:
    x = (drawn(5, width, device=device) * torch.logspace(-2, 1, 5, device=device)[:, None]).bfloat16().float()
    found = exact_rows(quantize_rows(x, halves=2))
    lost = (found - x).abs().amax(1) / x.abs().amax(1)
    assert (lost < 2.0 ** (-22 if device == "cuda" else -21)).all()


def multiply(x: torch.Tensor, weight: Fp8Weight, bias: Any, out: torch.Tensor, launch: Any, **fused: bool) -> None:
    """Multiply x, whose numbers have no more bits than bfloat16, by the weight, by the kernel for this many rows."""
    if len(x) == 1:
        skinny_gemm(x, weight, bias, out, launch, **fused)
    else:
        fp8_skinny_gemm(quantize_rows(x, halves=2), weight, bias, out, launch, **fused)


@pytest.mark.each_pair
@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 64), (50, 208), (16, 33)])
@pytest.mark.parametrize("parts", [1, 3])
def test_parts_add_up_to_the_product(outputs: int, inputs: int, rows: int, parts: int, device: str) -> None:
    weight, x = weight_of(outputs, inputs, device), drawn(rows, inputs, device=device).bfloat16().float()
    out = torch.full((parts, rows, outputs), torch.nan, device=device)
    multiply(x, weight, None, out, SkinnyLaunch(64, 32, 4, 2, parts))
    assert_near(out.double().sum(0), x.double() @ exact(weight).t(), bound_of_sums(device, rows))


@pytest.mark.parametrize("rows", [1, 3])
def test_the_scale_is_applied_before_bias_and_gate(rows: int, device: str) -> None:
    weight, x = weight_of(40, 96, device), drawn(rows, 96, device=device).bfloat16().float()
    bias = torch.linspace(-1, 1, 40, device=device)
    product = x.double() @ exact(weight).t() + bias.double()
    launch = SkinnyLaunch(64, 32, 4, 2)
    out = torch.full((1, rows, 40), torch.nan, device=device)
    multiply(x, weight, bias, out, launch)
    assert_near(out[0], product, bound_of_sums(device, rows))
    out = torch.full((1, rows, 20), torch.nan, device=device)
    multiply(x, weight, bias, out, launch, gated=True)
    gate, up = product.chunk(2, dim=1)
    assert_near(out[0], functional.silu(gate) * up, bound_of_sums(device, rows))


def test_the_scale_is_applied_before_the_residual(device: str) -> None:
    weight, x, out = (weight_of(40, 96, device), *(drawn(1, size, device=device) for size in (96, 40)))
    expected = out.double() + x.double() @ exact(weight).t()
    skinny_gemm(x, weight, None, out[None], SkinnyLaunch(16, 32, 4, 2), added=True)
    assert_near(out, expected, 1e-4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter's
def test_a_non_finite_number_makes_only_its_own_row_nan(bad: float, device: str) -> None:
    weight, x = weight_of(20, 64, device), drawn(3, 64, device=device).bfloat16().float()
    x[0, 7] = bad
    out = torch.empty(1, 3, 20, device=device)
    fp8_skinny_gemm(quantize_rows(x, halves=2), weight, None, out, SkinnyLaunch(64, 32, 4, 2))
    assert out[0, 0].isnan().all()
    assert_near(out[0, 1:], x[1:].double() @ exact(weight).t(), bound_of_sums(device, len(x)))


def test_a_one_token_gemm_computes_the_norm_of_its_input(device: str) -> None:
    weight, x, norm = weight_of(40, 96, device), drawn(1, 96, device=device, spread=9), drawn(96, device=device)
    out = torch.full((1, 1, 40), torch.nan, device=device)
    skinny_gemm(x, weight, None, out, SkinnyLaunch(16, 32, 4, 2), norm=norm, eps=1e-5)
    normed = functional.rms_norm(x.double(), (96,), norm.double(), 1e-5)
    assert_near(out[0], normed @ exact(weight).t(), 1e-4)


def test_float32_many_rows_and_short_rows_get_no_skinny_launch(device: str) -> None:
    weight, x = weight_of(64, 512, device), drawn(MAX_ROWS + 1, 512, device=device, dtype=torch.float16)
    assert fp8_launch_for(x[:1], weight) is not None
    assert fp8_launch_for(x[:MAX_ROWS], weight) is not None
    assert fp8_launch_for(x, weight) is None
    assert fp8_launch_for(x[:0], weight) is None
    assert fp8_launch_for(x[:1].float(), weight) is None
    assert fp8_launch_for(x[:1, :16], weight_of(64, 16, device)) is None


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (4096, 14336), (28672, 4096), (64, 512)])
def test_inputs_are_cut_only_when_partial_sums_are_allowed(outputs: int, inputs: int, rows: int) -> None:
    x = torch.empty(rows, inputs, dtype=torch.bfloat16, device="meta")
    weight = Fp8Weight(torch.empty(outputs, inputs, device="meta"), torch.empty(outputs, device="meta"))
    whole, cut = fp8_launch_for(x, weight), fp8_launch_for(x, weight, cut=True)
    assert whole is not None and cut is not None
    assert whole.parts == 1
    assert cut.parts == 1 or inputs // cut.parts >= 4 * cut.block_k


def half_a_layer(ops: LayerOps, stream: Any, x: Any, weights: list[Any], biases: list[Any], norm: Any) -> Any:
    """The GEMMs of a layer after attention, and the first of the next layer."""
    normed = ops.add_linear_norm(stream, x, weights[0], biases[0], norm)
    inner = ops.gated_linear(normed, weights[1], biases[1])
    return ops.linear(ops.add_linear_norm(stream, inner, weights[2], biases[2], norm), weights[3], biases[3])


@pytest.mark.each_pair
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("tokens", "hidden", "inner", "dtype", "bound"),
    [
        (1, 256, 320, torch.float16, 4e-3),
        (6, 256, 320, torch.float16, 4e-3),
        (70, 256, 320, torch.float16, 0.1),  # activations in FP8 as well
        (70, 100, 90, torch.float16, 4e-3),  # no tiles of 16
        (70, 64, 90, torch.float16, 0.1),  # none of the second product
        (5, 64, 80, torch.float32, 1e-5),
        (70, 64, 80, torch.float32, 1e-5),
    ],
)
def test_fp8_gemms_of_a_layer_equal_float64(
    tokens: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    bound: float,
    with_bias: bool,
    activation: str,
    device: str,
) -> None:
    shape = shape_of(device, dtype, activation=activation)
    sizes = [(hidden, hidden), (2 * inner, hidden), (hidden, inner), (48, hidden)]
    weights = [quantize(drawn(*size, device=device, spread=size[1] ** -0.5)) for size in sizes]
    biases = [drawn(size[0], device=device, dtype=dtype) if with_bias else None for size in sizes]
    stream, x = (drawn(tokens, hidden, device=device, dtype=dtype) for _ in range(2))
    norm = drawn(hidden, device=device, dtype=dtype)
    expected_stream = stream.double()
    expected = half_a_layer(
        oracle(shape),
        expected_stream,
        x.double(),
        [exact(weight) for weight in weights],
        [None if bias is None else bias.double() for bias in biases],
        norm.double(),
    )
    found = half_a_layer(FusedLayerOps(shape), stream, x, weights, biases, norm)
    assert found.dtype == dtype
    for ours, right in ((found, expected), (stream, expected_stream)):
        assert (ours.double() - right).norm() / right.norm() < bound


def test_pytorch_dequantizes_fp8_weights_on_use() -> None:
    shape = shape_of("cpu")
    weight, x = weight_of(40, 96, "cpu"), drawn(3, 96, device="cpu")
    assert_near(LayerOps(shape).linear(x, weight), x.double() @ exact(weight).t(), 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 31, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (1000, 1040), (28672, 4096)])
@pytest.mark.parametrize("gated", [False, True])
def test_compiled_launches_stay_within_the_precision_of_the_type(
    rows: int, outputs: int, inputs: int, gated: bool
) -> None:
    weight, x = weight_of(outputs, inputs, "cuda"), drawn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    launch = fp8_launch_for(x, weight, cut=not gated)
    assert launch is not None
    width = outputs // 2 if gated else outputs
    dtype = torch.bfloat16 if gated else torch.float32
    out = torch.full((launch.parts, rows, width), torch.nan, device="cuda", dtype=dtype)
    multiply(x, weight, None, out, launch, gated=gated)
    expected = x.double() @ exact(weight).t()
    if gated:
        gate, up = expected.chunk(2, dim=1)
        expected = functional.silu(gate) * up
    error = (out.double().sum(0) - expected).norm() / expected.norm()
    assert error < (5e-3 if gated else 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "bound"), [(1, 1e-2), (8, 1e-2), (64, 1e-2), (65, 0.08), (300, 0.08)])
def test_captured_fp8_gemms_of_a_layer_equal_float64(tokens: int, bound: float, dtype: torch.dtype) -> None:
    hidden, inner = 1024, 3072
    shape = shape_of("cuda", dtype)
    sizes = [(hidden, hidden), (2 * inner, hidden), (hidden, inner), (1536, hidden)]
    weights = [quantize(drawn(*size, device="cuda", spread=size[1] ** -0.5)) for size in sizes]
    start, x = (drawn(tokens, hidden, device="cuda", dtype=dtype) for _ in range(2))
    norm, stream, nothing = drawn(hidden, device="cuda", dtype=dtype), start.clone(), [None] * 4
    ops = layer_ops_for(shape)
    half_a_layer(ops, stream, x, weights, nothing, norm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = half_a_layer(ops, stream, x, weights, nothing, norm)
    stream.copy_(start)
    graph.replay()
    expected_stream = start.double()
    expected = half_a_layer(
        oracle(shape), expected_stream, x.double(), [exact(weight) for weight in weights], nothing, norm.double()
    )
    for ours, right in ((found, expected), (stream, expected_stream)):
        assert (ours.double() - right).norm() / right.norm() < bound
    first = found.clone()
    stream.copy_(start)
    graph.replay()
    assert torch.equal(found, first)  # no sum depends on the order in which programs end
