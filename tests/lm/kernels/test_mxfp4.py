"""MXFP4 numbers against the definition of the format."""

from __future__ import annotations

import pytest
import torch

from holdfast.lm.kernels.mxfp4 import BLOCK, Mxfp4Matrices, dequantize


def defined(code: int) -> float:
    """The number of a code of E2M1: a sign, two bits of exponent with bias 1, and one of fraction."""
    sign, exponent, fraction = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return float(sign * (fraction * 0.5 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + fraction * 0.5)))


@pytest.mark.parametrize("scale", [1, 100, 127, 140, 251])
def test_every_byte_stands_for_the_two_numbers_of_its_codes(scale: int) -> None:
    data = torch.arange(256, dtype=torch.uint8)
    found = dequantize(data, torch.full((512 // BLOCK,), scale, dtype=torch.uint8))
    numbers = [defined(code) * 2.0 ** (scale - 127) for byte in range(256) for code in (byte & 15, byte >> 4)]
    assert found.tolist() == numbers


def test_each_block_of_inputs_has_its_own_scale() -> None:
    generator = torch.Generator().manual_seed(3)
    data = torch.randint(256, (2, 3, 48), generator=generator).byte()
    scale = torch.randint(118, 130, (2, 3, 3), generator=generator).byte()
    weights = Mxfp4Matrices(data, scale)
    assert weights.shape == (2, 3, 96) and weights.nbytes == data.numel() + scale.numel()
    matrix = weights.matrix(1, torch.float64)
    for row in range(3):
        for column in range(96):
            code = int(data[1, row, column // 2]) >> 4 * (column % 2) & 15
            assert matrix[row, column] == defined(code) * 2.0 ** (int(scale[1, row, column // 32]) - 127)


def test_numbers_are_exact_in_bfloat16() -> None:
    data, scale = torch.arange(256, dtype=torch.uint8).view(1, 1, -1), torch.full((1, 1, 16), 90, dtype=torch.uint8)
    weights = Mxfp4Matrices(data, scale)
    assert torch.equal(weights.matrix(0, torch.bfloat16).float(), weights.matrix(0, torch.float32))
