"""8-bit weights of PyTorch's CPU kernel: packing, and products against float64."""

from __future__ import annotations

import pytest
import torch

from holdfast.lm.kernels.int8_cpu import MOST_LOST, ROWS_AT_A_TIME, fits_int8, pack_rows

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [1, 37, ROWS_AT_A_TIME + 5])
def test_each_number_is_rounded_to_the_nearest_multiple_of_its_row_s_scale(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    plain = torch.randn(rows, 96, generator=generator) * torch.logspace(-2, 2, rows)[:, None]
    weight = pack_rows(plain)
    assert weight is not None and weight.shape == plain.shape and weight.nbytes == rows * 98
    # The scale itself is rounded to 8 bits, so the largest number may lie a little beyond 127 of it.
    bound = plain.abs().amax(1, keepdim=True) / 127 * (0.5 + 127 * 2**-8)
    off = (weight.dequantized(torch.float32) - plain).abs()
    assert (off <= bound).all() and float(off.norm() / plain.norm()) < MOST_LOST
    assert (off <= bound / 2).double().mean() > 0.95


@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_a_product_is_that_of_the_packed_numbers_within_bfloat16(tokens: int) -> None:
    weight = pack_rows(torch.randn(50, 128, generator=torch.Generator().manual_seed(1)))
    assert weight is not None
    x, bias = torch.randn(tokens, 256).bfloat16()[:, ::2], torch.randn(50).bfloat16()
    for own in (None, bias):
        found = weight.linear(x, own)
        wanted = x.double() @ weight.dequantized(torch.float64).t() + (0.0 if own is None else own.double())
        assert found.dtype == torch.bfloat16
        assert (found.double() - wanted).norm() / wanted.norm() < 2**-8


def test_a_weight_with_a_few_large_numbers_is_not_packed() -> None:
    plain = torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    assert pack_rows(plain) is not None
    plain[:, 3] *= 40
    assert pack_rows(plain) is None


def test_rows_of_zeros_stay_zeros() -> None:
    weight = pack_rows(torch.zeros(3, 32))
    assert weight is not None and not weight.dequantized(torch.float32).any()


def test_only_bfloat16_on_a_cpu_with_vectors_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    assert fits_int8(CPU, torch.bfloat16) and not fits_int8(CPU, torch.float32)
    assert not fits_int8(torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "DEFAULT")
    assert not fits_int8(CPU, torch.bfloat16)
