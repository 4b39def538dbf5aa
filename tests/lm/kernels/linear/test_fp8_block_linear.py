"""FP8 weights with a scale for each block, and GEMMs with them, against float64: interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch

from holdfast.lm.kernels.fp8 import FP8, LARGEST, Fp8BlockWeight
from holdfast.lm.kernels.linear.fp8_block_linear import (
    Fp8Groups,
    TiledLaunch,
    block_launch_for,
    fp8_block_gemm,
    quantize_groups,
)
from holdfast.lm.kernels.linear.fp8_linear import fp8_skinny_gemm, quantize_rows
from holdfast.lm.kernels.linear.fused_layers import FusedLayerOps
from holdfast.lm.kernels.linear.skinny_gemm import MAX_ROWS, SkinnyLaunch, skinny_gemm
from tests.lm.kernels.linear.test_layers import drawn, oracle, shape_of
from tests.lm.kernels.test_fp8 import assert_near, bound_of_sums, half_a_layer, rounding

SMALL = TiledLaunch(16, 32, 4, 2, 2)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def weight_of(outputs: int, inputs: int, rows: int, group: int, device: str) -> Fp8BlockWeight:
    """A weight whose blocks differ by up to 100 times: a wrong block's scale would show."""
    data = drawn(outputs, inputs, device=device, spread=inputs**-0.5 * 100).clamp(-LARGEST, LARGEST).to(FP8)
    blocks = outputs // rows, inputs // group
    scale = torch.logspace(-3, -1, blocks[0] * blocks[1], device=device)
    return Fp8BlockWeight(data, scale[torch.randperm(len(scale), device=device)].view(blocks), rows, group)


def exact(weight: Fp8BlockWeight) -> torch.Tensor:
    spread = weight.scale.double().repeat_interleave(weight.rows, 0).repeat_interleave(weight.group, 1)
    return weight.data.double() * spread


def exact_groups(x: Fp8Groups) -> torch.Tensor:
    return x.data.double() * x.scale.double().t().repeat_interleave(x.group, 1)


@pytest.mark.parametrize(("outputs", "rows"), [(96, 32), (1152, 128), (30, 1)])
def test_dequantizing_takes_each_block_s_own_scale(outputs: int, rows: int, device: str) -> None:
    weight = weight_of(outputs, 192, rows, 64, device)
    assert torch.equal(weight.dequantized(torch.float64), exact(weight))
    assert weight.nbytes == outputs * 192 + outputs // rows * 3 * 4
    x = drawn(3, 192, device=device)
    assert_near(weight.linear(x, None), x.double() @ exact(weight).t(), 1e-4)


@pytest.mark.parametrize(("width", "group"), [(128, 128), (384, 128), (1216, 64), (32, 32)])
def test_each_group_of_a_token_is_rounded_to_the_nearest_fp8_numbers(width: int, group: int, device: str) -> None:
    x = drawn(5, width, device=device).view(5, -1, group) * torch.logspace(-2, 1, 5 * width // group).view(5, -1, 1)
    x = x.view(5, width).to(device)
    x[3] = 0
    found = quantize_groups(x, group)
    scale = found.scale.double().t().repeat_interleave(group, 1)
    assert ((exact_groups(found) - x.double()).abs() <= rounding(x.double(), scale)).all()
    largest = x.double().view(5, -1, group).abs().amax(2)
    torch.testing.assert_close(found.scale.double().t()[:3] * LARGEST, largest[:3], rtol=1e-5, atol=0)
    assert found.scale.isfinite().all() and not exact_groups(found)[3].any()


@pytest.mark.parametrize(("tokens", "outputs", "rows"), [(37, 96, 32), (5, 100, 4), (16, 40, 40), (70, 33, 1)])
@pytest.mark.parametrize("group", [32, 64])
def test_tiles_add_up_the_groups_with_both_scales(
    tokens: int, outputs: int, rows: int, group: int, device: str
) -> None:
    weight, x = weight_of(outputs, 192, rows, group, device), drawn(tokens, 192, device=device)
    bias = torch.linspace(-1, 1, outputs, device=device)
    x = x * torch.logspace(-1, 1, tokens, device=device)[:, None]
    groups = quantize_groups(x, group)
    product = exact_groups(groups) @ exact(weight).t()
    for own in (None, bias):
        found = fp8_block_gemm(groups, weight, own, torch.float32, SMALL)
        assert found.shape == (tokens, outputs)
        assert_near(found, product if own is None else product + own.double(), bound_of_sums(device, tokens))


@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter's
def test_a_non_finite_number_makes_only_its_own_token_nan(device: str) -> None:
    weight, x = weight_of(32, 128, 32, 64, device), drawn(20, 128, device=device)
    x[4, 70] = torch.inf
    found = fp8_block_gemm(quantize_groups(x, 64), weight, None, torch.float32, SMALL)
    assert found[4].isnan().all() and found[torch.arange(20) != 4].isfinite().all()


@pytest.mark.each_pair
@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize(("outputs", "scale_rows", "inputs", "group"), [(64, 32, 256, 64), (50, 2, 192, 64)])
@pytest.mark.parametrize("parts", [1, 3])
def test_few_tokens_keep_their_bits(
    outputs: int, scale_rows: int, inputs: int, group: int, rows: int, parts: int, device: str
) -> None:
    weight = weight_of(outputs, inputs, scale_rows, group, device)
    x = drawn(rows, inputs, device=device).bfloat16().float()
    out = torch.full((parts, rows, outputs), torch.nan, device=device)
    if rows == 1:
        skinny_gemm(x, weight, None, out, SkinnyLaunch(16, 128, 4, 2, parts))
    else:
        fp8_skinny_gemm(quantize_rows(x, halves=2), weight, None, out, SkinnyLaunch(64, group, 4, 2, parts))
    assert_near(out.double().sum(0), x.double() @ exact(weight).t(), bound_of_sums(device, rows))


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("tokens", [1, 9, 64])
def test_a_skinny_launch_takes_whole_blocks(tokens: int, cut: bool, device: str) -> None:
    weight = weight_of(256, 1024, 128, 128, device)
    x = torch.empty(tokens, 1024, dtype=torch.bfloat16, device=device)
    launch = block_launch_for(x, weight, cut=cut)
    assert launch is not None and launch.part_length(1024) % 128 == 0
    assert launch.block_k % 128 == 0 if tokens == 1 else launch.block_k == 128
    assert cut or launch.parts == 1
    many = torch.empty(MAX_ROWS + 1, 1024, dtype=torch.bfloat16, device=device)
    assert block_launch_for(many, weight) is None


@pytest.mark.each_value
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("tokens", "dtype", "bound"),
    [
        (1, torch.float16, 4e-3),
        (6, torch.float16, 4e-3),
        (70, torch.float16, 0.1),  # activations in FP8 as well
        (70, torch.float32, 1e-5),
    ],
)
def test_gemms_of_a_layer_in_blocks_equal_float64(
    tokens: int, dtype: torch.dtype, bound: float, with_bias: bool, device: str
) -> None:
    hidden, inner = 256, 384
    shape = shape_of(device, dtype)
    sizes = [(hidden, hidden), (2 * inner, hidden), (hidden, inner), (96, hidden)]
    weights = [weight_of(*size, 32, 128, device) for size in sizes]
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


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 8, 31, 64, 65, 300, 2048, 2049])
@pytest.mark.parametrize(
    ("outputs", "inputs", "rows", "group"),
    [(6144, 4096, 128, 128), (4096, 12288, 128, 128), (576, 7168, 64, 128), (1000, 1536, 8, 64)],
)
def test_compiled_launches_stay_within_the_precision_of_the_type(
    tokens: int, outputs: int, inputs: int, rows: int, group: int
) -> None:
    weight = weight_of(outputs, inputs, rows, group, "cuda")
    x = drawn(tokens, inputs, device="cuda", dtype=torch.bfloat16)
    found = FusedLayerOps(shape_of("cuda", torch.bfloat16)).linear(x, weight)
    expected = x.double() @ exact(weight).t()
    error = (found.double() - expected).norm() / expected.norm()
    assert error < (5e-3 if tokens <= MAX_ROWS else 0.05)
    if tokens > MAX_ROWS:
        groups = quantize_groups(x, group)
        product = exact_groups(groups) @ exact(weight).t()
        assert (found.double() - product).norm() / product.norm() < 5e-3
