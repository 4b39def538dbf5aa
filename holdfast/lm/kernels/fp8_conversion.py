"""Conversion to and from FP8 (e4m3) inside Triton kernels."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.lm.kernels import fp8

LARGEST = tl.constexpr(fp8.LARGEST)
LEAST_NORMAL = tl.constexpr(2.0**-6)
"""Smallest normal FP8 number. From it on, numbers have 3 bits of fraction; smaller ones are multiples of 2^-9."""
UNIT = tl.constexpr(1.5 * 2.0**14)
"""A number so large that every float32 near it is a multiple of 2^-9."""


@triton.jit
def round_to_fp8(numbers):
    """float32 numbers rounded to the nearest FP8 number, ties to even; still float32, and not clamped to LARGEST.

    Converting the result to FP8 is exact. Without this step, the conversion of Triton's interpreter does not round, or
    loses the carry.
    """
    bits = numbers.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(numbers) < LEAST_NORMAL, (numbers + UNIT) - UNIT, normal)


@triton.jit
def to_cache_dtype(numbers, to: tl.constexpr):
    """Numbers in a cache's dtype `to`. For FP8: rounded to the nearest, ties to even, and clamped to LARGEST."""
    if to == tl.float8e4nv:
        numbers = round_to_fp8(tl.clamp(numbers.to(tl.float32), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL))
    return numbers.to(to)


@triton.jit
def query_for_keys(query, cached: tl.constexpr):
    """The query in the dtype of its product with keys of dtype `cached`; the keys are converted to it.

    With FP8 keys, bfloat16 becomes float16. Converting a pair of FP8 numbers to float16 takes one instruction, and to
    bfloat16 several. For the softmax weights, and for queries up to 65,504, float16 is also the more exact of the two.
    """
    if cached == tl.float8e4nv and query.dtype == tl.bfloat16:
        return query.to(tl.float16)
    else:
        return query


@triton.jit
def values_as(values, to: tl.constexpr, natural):
    """Cached values [keys, D] in dtype `to`, for a product of small matrices; `natural` is any number from 0 on.

    FP8 values are multiplied by a 1 that the compiler cannot see through. It then converts before it rearranges the
    numbers, and float16 has an instruction that transposes on the way (ldmatrix). Otherwise it would gather single
    bytes, with a third more instructions in all.
    """
    if values.dtype == tl.float8e4nv:
        return values.to(to) * tl.where(natural >= 0, 1.0, 0.0).to(to)
    else:
        return values.to(to)
