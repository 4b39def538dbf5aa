"""Skinny GEMM against float64: interpreted without a GPU, compiled with one."""

from __future__ import annotations

import pytest
import torch

from holdfast.lm.kernels.linear.skinny_gemm import (
    FEW,
    MANY_OUTPUTS,
    MANY_TOKENS_GATED,
    MAX_GATED_ROWS,
    MAX_ROWS,
    SkinnyLaunch,
    launch_for,
    skinny_gemm,
)


def draw(
    rows: int, outputs: int, inputs: int, device: str, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows * outputs + inputs)
    x = torch.randn(rows, inputs, device=device).to(dtype)
    return x, (torch.randn(outputs, inputs, device=device) * inputs**-0.5).to(dtype)


@pytest.mark.each_pair
@pytest.mark.parametrize("rows", [1, 2, 8, 17])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 64), (50, 200), (16, 33)])
@pytest.mark.parametrize("parts", [1, 3, 8])
def test_parts_add_up_to_the_product(outputs: int, inputs: int, rows: int, parts: int, device: str) -> None:
    x, weight = draw(rows, outputs, inputs, device)
    out = torch.full((parts, rows, outputs), torch.nan, device=device)
    skinny_gemm(x, weight, None, out, SkinnyLaunch(16, 32, 4, 2, parts))
    torch.testing.assert_close(out.double().sum(0), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
def test_strided_rows_and_a_bias(rows: int, device: str) -> None:
    x, weight = draw(rows, 20, 96, device)
    bias = torch.linspace(-1, 1, 20, device=device)
    wide = torch.zeros(rows, 40, device=device)
    skinny_gemm(
        torch.cat([x, x], 1)[:, :96], torch.cat([weight, weight], 1)[:, 96:], bias, wide[None, :, :20],
        SkinnyLaunch(16, 32, 4, 2),
    )  # fmt: skip
    expected = x.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(wide[:, :20].double(), expected, rtol=1e-5, atol=1e-5)
    assert not wide[:, 20:].any()


@pytest.mark.parametrize("rows", [1, 4])
def test_a_row_of_nan_stays_in_its_row(rows: int, device: str) -> None:
    x, weight = draw(rows + 1, 20, 64, device)
    x[0] = torch.nan
    out = torch.empty(1, rows + 1, 20, device=device)
    skinny_gemm(x, weight, None, out, SkinnyLaunch(16, 32, 4, 2))
    assert out[0, 0].isnan().all()
    torch.testing.assert_close(out[0, 1:], x[1:] @ weight.t())


def test_float32_many_rows_and_strided_layouts_go_to_the_library(device: str) -> None:
    x, weight = draw(MAX_ROWS + 1, 64, 512, device, torch.float16)
    assert launch_for(x[:FEW], weight) is not None
    assert launch_for(x[:MAX_ROWS], weight) is None
    assert launch_for(x[:MAX_ROWS], weight, cut=True) is not None
    assert launch_for(x, weight) is None
    assert launch_for(x[:0], weight) is None
    assert launch_for(x[:1].float(), weight.float()) is None
    assert launch_for(x[:2], weight.t().contiguous().t()) is None
    assert launch_for(x[:1, :16], weight[:, :16]) is None


def test_a_wide_gate_is_computed_as_its_product_is_written_for_more_rows_than_other_products() -> None:
    weight = torch.empty(MANY_OUTPUTS, 512, dtype=torch.bfloat16, device="meta")
    x = torch.empty(MAX_GATED_ROWS + 1, 512, dtype=torch.bfloat16, device="meta")
    for rows in (MAX_ROWS + 1, MAX_GATED_ROWS):
        assert launch_for(x[:rows], weight, gated=True) == MANY_TOKENS_GATED
        assert launch_for(x[:rows], weight) is None
        assert launch_for(x[:rows], weight[1:], gated=True) is None
    assert launch_for(x, weight, gated=True) is None
    assert launch_for(x[:MAX_ROWS], weight, gated=True) == launch_for(x[:MAX_ROWS], weight)


def test_many_rows_are_gated_as_they_are_written(device: str) -> None:
    x, weight = draw(MAX_ROWS + 9, 2 * 150, 80, device)
    out = torch.full((1, len(x), 150), torch.nan, device=device)
    skinny_gemm(x, weight, None, out, MANY_TOKENS_GATED, gated=True)
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=1)
    torch.testing.assert_close(out[0].double(), torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (4096, 14336), (128256, 4096), (64, 512)])
def test_inputs_are_cut_only_when_partial_sums_are_allowed(outputs: int, inputs: int, rows: int) -> None:
    x = torch.empty(rows, inputs, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta")
    whole, cut = launch_for(x, weight), launch_for(x, weight, cut=True)
    assert whole is not None and cut is not None
    assert whole.parts == 1
    assert cut.parts == 1 or inputs // cut.parts >= 4 * cut.block_k


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [72, 128])
def test_compiled_gates_of_many_rows_stay_within_the_precision_of_the_type(dtype: torch.dtype, rows: int) -> None:
    x, weight = draw(rows, 28_672, 4096, "cuda", dtype)
    launch = launch_for(x, weight, gated=True)
    assert launch == MANY_TOKENS_GATED
    out = torch.empty(1, rows, 14_336, device="cuda", dtype=dtype)
    skinny_gemm(x, weight, None, out, launch, gated=True)
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    assert (out[0].double() - expected).norm() / expected.norm() < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 8, 31])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (1000, 1030), (128256, 4096)])
@pytest.mark.parametrize("gated", [False, True])
def test_compiled_launches_stay_within_the_precision_of_the_type(
    dtype: torch.dtype, rows: int, outputs: int, inputs: int, gated: bool
) -> None:
    x, weight = draw(rows, outputs, inputs, "cuda", dtype)
    launch = launch_for(x, weight, cut=not gated, gated=gated)
    assert launch is not None
    width = outputs // 2 if gated else outputs
    out = torch.empty(launch.parts, rows, width, device="cuda", dtype=dtype if gated else torch.float32)
    skinny_gemm(x, weight, None, out, launch, gated=gated)
    expected = x.double() @ weight.double().t()
    if gated:
        gate, up = expected.chunk(2, dim=1)
        expected = torch.nn.functional.silu(gate) * up
    error = (out.double().sum(0) - expected).norm() / expected.norm()
    assert error < (5e-3 if gated else 1e-4)
