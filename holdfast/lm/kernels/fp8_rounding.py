"""Rounding to FP8 in Triton kernels: the conversion of Triton's interpreter does not round, or loses the carry."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

LEAST_NORMAL = tl.constexpr(2.0**-6)
"""From here on numbers have 3 bits of fraction; below, they are multiples of 2^-9."""
UNIT = tl.constexpr(1.5 * 2.0**14)
"""A float32 of this size is a multiple of 2^-9."""


@triton.jit
def nearest(numbers):
    """float32 rounded to numbers that FP8 has, ties to even: the conversion is exact then. Too large ones stay so."""
    bits = numbers.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(numbers) < LEAST_NORMAL, (numbers + UNIT) - UNIT, normal)
