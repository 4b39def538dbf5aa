"""4-bit weights: packing, and GEMMs against float64, interpreted without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from holdfast.lm.kernels.int4 import Int4Weight, dequantize, half_for, pack
from holdfast.lm.kernels.linear.int4_linear import int4_dequantized, int4_launch_for, int4_skinny_gemm
from holdfast.lm.kernels.linear.skinny_gemm import MAX_ROWS

Draw = Callable[[int, int, int, str], tuple[Int4Weight, torch.Tensor]]


def draw(outputs: int, inputs: int, group: int, device: str) -> tuple[Int4Weight, torch.Tensor]:
    """A 4-bit weight, and its numbers in float32."""
    generator = torch.Generator().manual_seed(outputs + inputs + group)
    numbers = torch.randint(16, (outputs, inputs), generator=generator).to(torch.uint8)
    zero = torch.randint(16, (outputs, inputs // group), generator=generator).to(torch.uint8)
    scale = (torch.rand(outputs, inputs // group, generator=generator) * 0.02 + 0.01).half()
    half = half_for(inputs, group)
    assert half is not None
    plain = dequantize(numbers, scale, zero, group)
    weight = pack(*(each.to(device) for each in (numbers, scale, zero)), group, half)
    return weight, plain.to(device)


def draw_added(outputs: int, inputs: int, group: int, device: str) -> tuple[Int4Weight, torch.Tensor]:
    """A 4-bit weight with a number added to each group, as in GGUF's Q4_K, and its numbers in float32."""
    weight, plain = draw(outputs, inputs, group, device)
    generator = torch.Generator().manual_seed(outputs)
    added = torch.rand(outputs, inputs // group, generator=generator).mul_(-0.3).to(device)
    plain = plain.view(outputs, -1, group) + added[:, :, None]
    return replace(weight, added=added), plain.view(outputs, inputs)


@pytest.mark.parametrize(("inputs", "group"), [(64, 32), (256, 128), (384, 384)])
def test_an_added_number_is_part_of_every_weight_of_its_group(inputs: int, group: int, device: str) -> None:
    weight, plain = draw_added(21, inputs, group, device)
    assert weight.nbytes == 21 * (inputs // 2 + inputs // group * 7)
    for found in (weight.dequantized(torch.float32), int4_dequantized(weight, torch.float32)):
        torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize(("inputs", "group"), [(256, 32), (512, 128), (512, 512)])
def test_products_with_an_added_number_are_exact(rows: int, inputs: int, group: int, device: str) -> None:
    weight, plain = draw_added(50, inputs, group, device)
    x = torch.randn(rows, inputs, device=device)
    launch = int4_launch_for(x, weight, cut=True)
    assert launch is not None
    out = torch.full((launch.parts, rows, 50), torch.nan, device=device)
    int4_skinny_gemm(x, weight, None, out, launch)
    torch.testing.assert_close(out.double().sum(0), x.double() @ plain.double().t(), rtol=1e-5, atol=2e-5)
    launch = int4_launch_for(x, weight)
    assert launch is not None
    gated = torch.full((1, rows, 25), torch.nan, device=device)
    int4_skinny_gemm(x, weight, None, gated, launch, gated=True)
    gate, up = (x.double() @ plain.double().t()).chunk(2, dim=1)
    torch.testing.assert_close(gated[0].double(), torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("inputs", "group"), [(128, 32), (256, 64), (64, 32), (256, 128), (384, 384)])
def test_packing_keeps_every_number(inputs: int, group: int, device: str) -> None:
    weight, plain = draw(21, inputs, group, device)
    assert weight.shape == plain.shape and weight.data.nbytes == plain.numel() // 2
    assert torch.equal(weight.dequantized(torch.float32), plain)
    assert torch.equal(int4_dequantized(weight, torch.float32), plain)


def test_rows_that_cannot_be_cut_into_chunks_are_not_packed() -> None:
    assert [half_for(*sizes) for sizes in ((256, 128), (192, 64), (192, 32), (96, 32), (128, 16))] == [
        64, 32, 32, None, None
    ]  # fmt: skip


@pytest.mark.each_pair
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize(("inputs", "group"), [(256, 32), (512, 64), (512, 128), (512, 512)])
def test_parts_add_up_to_the_product(rows: int, inputs: int, group: int, dtype: torch.dtype, device: str) -> None:
    weight, plain = draw(50, inputs, group, device)
    x = torch.randn(rows, inputs, device=device).to(dtype)
    launch = int4_launch_for(x, weight, cut=True)
    assert launch is not None
    out = torch.full((launch.parts, rows, 50), torch.nan, device=device)
    int4_skinny_gemm(x, weight, None, out, launch)
    torch.testing.assert_close(out.double().sum(0), x.double() @ plain.double().t(), rtol=1e-5, atol=1e-5)


def test_the_gate_and_a_bias_are_part_of_the_product(device: str) -> None:
    weight, plain = draw(72, 256, 64, device)
    x, bias = torch.randn(3, 256, device=device), torch.randn(72, device=device)
    launch = int4_launch_for(x, weight)
    assert launch is not None and launch.parts == 1
    out = torch.full((1, 3, 36), torch.nan, device=device)
    int4_skinny_gemm(x, weight, bias, out, launch, gated=True)
    gate, up = (x.double() @ plain.double().t() + bias.double()).chunk(2, dim=1)
    torch.testing.assert_close(out[0].double(), torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-5)


def test_many_tokens_go_to_the_library(device: str) -> None:
    weight, _ = draw(16, 256, 64, device)
    assert int4_launch_for(torch.randn(MAX_ROWS + 1, 256, device=device), weight) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize("drawn", [draw, draw_added])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(6144, 4096, 128), (4096, 14336, 64), (1000, 1024, 32)])
def test_compiled_launches_stay_within_the_precision_of_the_type(
    dtype: torch.dtype, rows: int, outputs: int, inputs: int, group: int, drawn: Draw
) -> None:
    weight, plain = drawn(outputs, inputs, group, "cuda")
    x = torch.randn(rows, inputs, device="cuda", dtype=dtype)
    launch = int4_launch_for(x, weight, cut=True)
    assert launch is not None
    out = torch.full((launch.parts, rows, outputs), torch.nan, device="cuda")
    int4_skinny_gemm(x, weight, None, out, launch)
    expected = x.double() @ plain.double().t()
    assert (out.double().sum(0) - expected).norm() / expected.norm() < 1e-4
    found, own = int4_dequantized(weight, dtype), weight.dequantized(dtype)
    # A GPU multiplies and adds in one operation, which rounds once.
    assert torch.equal(found, own) if weight.added is None else torch.allclose(found, own, rtol=2**-7, atol=1e-6)
