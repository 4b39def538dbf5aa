"""How Triton kernels store keys and values in a cache of whatever type, and what they compute with beside them."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.lm.kernels.fp8_rounding import nearest
from holdfast.lm.kernels.linear import fp8

LARGEST = tl.constexpr(fp8.LARGEST)


@triton.jit
def stored(numbers, to: tl.constexpr):
    """Numbers in a cache's type `to`; in FP8 the nearest, ties to even, and at most LARGEST."""
    if to == tl.float8e4nv:
        numbers = nearest(tl.clamp(numbers.to(tl.float32), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL))
    return numbers.to(to)


@triton.jit
def computed_with(query, cached: tl.constexpr):
    """A query of whatever type for products with keys of type `cached`, which are brought to its type.

    Beside FP8, bfloat16 becomes float16: one instruction brings a pair of FP8 there, several to bfloat16, and it is the
    more exact of the two for weights and for queries of any size that occurs (at most 65,504).
    """
    if cached == tl.float8e4nv and query.dtype == tl.bfloat16:
        return query.to(tl.float16)
    else:
        return query


@triton.jit
def factor(values, to: tl.constexpr, natural):
    """Cached values [keys, D] in type `to`, for a product of small matrices; `natural` is any number not below 0.

    FP8 is multiplied by a one that the compiler, when it chooses layouts, does not know. So it converts first and then
    brings the numbers to their places, and there is an instruction that transposes float16 on the way (ldmatrix);
    bytes it would gather one by one, with a third more instructions in all.
    """
    if values.dtype == tl.float8e4nv:
        return values.to(to) * tl.where(natural >= 0, 1.0, 0.0).to(to)
    else:
        return values.to(to)
