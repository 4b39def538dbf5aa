"""Rounding to FP8 in Triton kernels: the conversion of Triton's interpreter does not round, or loses the carry."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nearest(numbers):
    """float32 rounded to the three bits behind the first that FP8 has, ties to even; of any size."""
    bits = numbers.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
