"""Packed weights stand for the numbers that were packed."""

from __future__ import annotations

import pytest
import torch

from holdfast.lm.kernels.packed import ROWS_AT_A_TIME, Form, packed_sixes, unpacked
from tests.lm.kernels.packed_weights import draw_packed

BITS = {Form.FP8: 8 + 32 / 64, Form.INT8: 8.5, Form.INT6: 6.5625, Form.INT4: 6.0, Form.FP4: 4.5}


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("rows", [5, ROWS_AT_A_TIME + 3])
def test_a_weight_dequantizes_to_its_numbers(form: Form, rows: int) -> None:
    weight, plain = draw_packed(form, rows, 512)
    assert weight.shape == plain.shape
    torch.testing.assert_close(weight.dequantized(torch.float64), plain, rtol=1e-12, atol=0)
    torch.testing.assert_close(weight.dequantized(torch.float32).double(), plain, rtol=1e-6, atol=1e-8)
    assert weight.nbytes == rows * (512 * BITS[form] / 8 + (4 if form is Form.FP4 else 0))


@pytest.mark.parametrize("form", Form)
def test_each_expert_has_its_own_numbers(form: Form) -> None:
    weight, plain = draw_packed(form, 3, 8, 256)
    assert weight.shape == (3, 8, 256)
    for expert in range(3):
        torch.testing.assert_close(weight.matrix(expert, torch.float64), plain[expert], rtol=1e-12, atol=0)
    torch.testing.assert_close(weight.dequantized(torch.float64), plain, rtol=1e-12, atol=0)


def test_rows_of_a_block_share_their_scales() -> None:
    weight, plain = draw_packed(Form.FP8, 2, 96, 128, rows=32)
    assert weight.scale.shape == (2, 3, 2)
    torch.testing.assert_close(weight.matrix(1, torch.float64), plain[1], rtol=1e-12, atol=0)
    many, plain = draw_packed(Form.FP8, 2, 1536, 64, rows=96)
    torch.testing.assert_close(many.dequantized(torch.float64), plain, rtol=1e-12, atol=0)


def test_six_bits_take_three_quarters_of_a_byte_each() -> None:
    numbers = torch.arange(64, dtype=torch.uint8).repeat(3, 4)
    data = packed_sixes(numbers)
    assert data.shape == (3, 192)
    assert torch.equal(unpacked(data, Form.INT6).int(), numbers.int() - 32)


def test_a_product_is_that_of_the_dequantized_weight() -> None:
    weight, plain = draw_packed(Form.FP4, 24, 64)
    x, bias = torch.randn(3, 64), torch.randn(24)
    torch.testing.assert_close(weight.linear(x, bias).double(), x.double() @ plain.t() + bias, rtol=1e-5, atol=1e-5)
