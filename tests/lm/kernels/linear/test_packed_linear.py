"""GEMMs with packed weights of each form against float64: interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from holdfast.lm.kernels.linear.fused_layers import FusedLayerOps
from holdfast.lm.kernels.linear.packed_linear import packed_dequantized, packed_launch_for, packed_skinny_gemm
from holdfast.lm.kernels.linear.skinny_gemm import MAX_ROWS
from holdfast.lm.kernels.packed import Form
from tests.lm.kernels.linear.test_layers import drawn, oracle, shape_of
from tests.lm.kernels.packed_weights import draw_packed
from tests.lm.kernels.test_fp8 import half_a_layer

SIZES = {Form.FP8: 192, Form.INT8: 160, Form.INT6: 256, Form.INT4: 96, Form.FP4: 208}
"""A number of inputs of each form that fills no last block."""


@pytest.mark.parametrize("form", Form)
def test_dequantizing_on_the_device_gives_the_same_numbers(form: Form, device: str) -> None:
    for inputs in (SIZES[form], 512):
        weight, plain = draw_packed(form, 21, inputs, device=device)
        torch.testing.assert_close(packed_dequantized(weight, torch.float32).double(), plain, rtol=1e-6, atol=1e-8)
        assert torch.equal(packed_dequantized(weight, torch.float16), weight.dequantized(torch.float16))


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("form", Form)
def test_parts_add_up_to_the_product(form: Form, rows: int, device: str) -> None:
    for inputs in (SIZES[form], 1024):
        weight, plain = draw_packed(form, 50, inputs, device=device)
        x = torch.randn(rows, inputs, device=device)
        launch = packed_launch_for(x, weight, cut=True)
        assert launch is not None and (launch.parts > 1 or inputs < 1024)
        out = torch.full((launch.parts, rows, 50), torch.nan, device=device)
        packed_skinny_gemm(x, weight, None, out, launch)
        torch.testing.assert_close(out.double().sum(0), x.double() @ plain.t(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", Form)
def test_the_gate_and_a_bias_are_part_of_the_product(form: Form, device: str) -> None:
    weight, plain = draw_packed(form, 72, SIZES[form], device=device)
    x, bias = torch.randn(3, SIZES[form], device=device), torch.randn(72, device=device)
    launch = packed_launch_for(x, weight)
    assert launch is not None and launch.parts == 1
    out = torch.full((1, 3, 36), torch.nan, device=device)
    packed_skinny_gemm(x, weight, bias, out, launch, gated=True)
    gate, up = (x.double() @ plain.t() + bias.double()).chunk(2, dim=1)
    torch.testing.assert_close(out[0].double(), functional.silu(gate) * up, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inputs", [48, 192])
def test_a_group_may_be_a_whole_row_of_any_length(inputs: int, device: str) -> None:
    weight, plain = draw_packed(Form.INT4, 20, inputs, device=device, group=inputs)
    x = torch.randn(2, inputs, device=device)
    launch = packed_launch_for(x, weight)
    assert launch is not None
    out = torch.empty(1, 2, 20, device=device)
    packed_skinny_gemm(x, weight, None, out, launch)
    torch.testing.assert_close(out[0].double(), x.double() @ plain.t(), rtol=1e-4, atol=1e-5)


def test_nvfp4_needs_no_rounding_in_sixteen_bits(device: str) -> None:
    weight, plain = draw_packed(Form.FP4, 32, 128, device=device)
    x = torch.eye(8, 128, device=device, dtype=torch.float16)
    launch = packed_launch_for(x, weight)
    assert launch is not None
    out = torch.empty(1, 8, 32, device=device)
    packed_skinny_gemm(x, weight, None, out, launch)
    torch.testing.assert_close(out[0].double().t(), plain[:, :8], rtol=2e-7, atol=0)


def test_many_tokens_go_to_the_library(device: str) -> None:
    weight, _ = draw_packed(Form.INT8, 16, 256, device=device)
    assert packed_launch_for(torch.randn(MAX_ROWS + 1, 256, device=device), weight) is None


@pytest.mark.parametrize("tokens", [1, 6, 70])
@pytest.mark.parametrize("form", [Form.INT8, Form.INT6, Form.FP4])
def test_gemms_of_a_layer_equal_float64(form: Form, tokens: int, device: str) -> None:
    hidden, inner, dtype = 256, 512, torch.float16
    shape = shape_of(device, dtype)
    sizes = [(hidden, hidden), (2 * inner, hidden), (hidden, inner), (96, hidden)]
    drawn_weights = [draw_packed(form, *size, device=device) for size in sizes]
    stream, x = (drawn(tokens, hidden, device=device, dtype=dtype) for _ in range(2))
    norm, nothing = drawn(hidden, device=device, dtype=dtype), [None] * 4
    expected_stream = stream.double()
    plain = [each for _, each in drawn_weights]
    expected = half_a_layer(oracle(shape), expected_stream, x.double(), plain, nothing, norm.double())
    found = half_a_layer(FusedLayerOps(shape), stream, x, [each for each, _ in drawn_weights], nothing, norm)
    assert found.dtype == dtype
    for ours, right in ((found, expected), (stream, expected_stream)):
        assert (ours.double() - right).norm() / right.norm() < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 8, 40, 64, 130])
@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (1000, 1024)])
def test_compiled_launches_stay_within_the_precision_of_the_type(
    form: Form, tokens: int, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    weight, plain = draw_packed(form, outputs, inputs, device="cuda")
    x = torch.randn(tokens, inputs, device="cuda", dtype=dtype)
    found = FusedLayerOps(shape_of("cuda", dtype)).linear(x, weight)
    expected = x.double() @ plain.t()
    assert (found.double() - expected).norm() / expected.norm() < 6e-3
