"""Reads a tile of a `PackedWeight`, whose numbers become float32 in registers."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.lm.kernels.packed import COARSE, MIDDLE, Form, PackedWeight

FP8 = tl.constexpr(int(Form.FP8))
INT8 = tl.constexpr(int(Form.INT8))
INT6 = tl.constexpr(int(Form.INT6))
INT4 = tl.constexpr(int(Form.INT4))
FP4 = tl.constexpr(int(Form.FP4))
COARSE_INPUTS = tl.constexpr(COARSE)
ZERO_OF_SIX = tl.constexpr(MIDDLE)


def packed_constants(weight: PackedWeight) -> dict[str, int]:
    """The constants of a kernel that reads this weight. A group of a whole row counts as a power of two."""
    group = triton.next_power_of_2(weight.group) if weight.scale.shape[-1] == 1 else weight.group
    return dict(FORM=int(weight.form), GROUP=group, SCALE_ROWS=weight.rows)


@triton.jit
def packed_tile(
    data, scale, extra, row, first, inputs,
    FORM: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The numbers [BLOCK_N, BLOCK_K] float32 of rows `row` [BLOCK_N], from input `first` on, before the rows' units.

    `scale` is `PackedWeight.factors`, and `extra` its `extra`. With EVEN, no tile ends after the last input. Otherwise
    numbers after the last input are finite, and their inputs must be 0.
    """
    row = row.to(tl.int64)
    COUNT: tl.constexpr = BLOCK_K // GROUP if BLOCK_K > GROUP else 1
    numbers = _numbers(data, row, first, inputs, FORM, BLOCK_N, BLOCK_K, EVEN)
    groups = (inputs + GROUP - 1) // GROUP
    group = first // GROUP + tl.arange(0, COUNT)
    inside = (group < groups)[None, :]
    at = (row // SCALE_ROWS)[:, None] * groups + group[None, :]
    factor = _load(scale + at, inside, EVEN)
    factor = _of_e4m3(factor) if FORM == FP4 else factor.to(tl.float32)
    if FORM == INT6:
        coarse_at = extra + row[:, None] * (inputs // COARSE_INPUTS) + (group * GROUP // COARSE_INPUTS)[None, :]
        factor *= _load(coarse_at, inside, EVEN).to(tl.float32)
    numbers = tl.reshape(numbers, (BLOCK_N, COUNT, BLOCK_K // COUNT)) * factor[:, :, None]
    if FORM == INT4:
        numbers += _load(extra + at, inside, EVEN)[:, :, None]
    return tl.reshape(numbers, (BLOCK_N, BLOCK_K))


@triton.jit
def _numbers(
    data, row, first, inputs, FORM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """The numbers of a tile before their scales, [BLOCK_N, BLOCK_K] float32."""
    if FORM < INT6:  # FP8 and INT8
        numbers = _bytes(data, row, inputs, first, inputs, BLOCK_K, EVEN).to(tl.float32)
    elif FORM == INT6:
        pairs = _bytes(data, row, inputs // 4 * 3, first // 2, inputs // 2, BLOCK_K // 2, EVEN)
        fours = _bytes(data + inputs // 2, row, inputs // 4 * 3, first // 4, inputs // 4, BLOCK_K // 4, EVEN)
        upper = tl.join(tl.join(fours & 3, (fours >> 4) & 3), tl.join((fours >> 2) & 3, fours >> 6))
        upper = tl.reshape(upper, (BLOCK_N, BLOCK_K))
        lower = tl.reshape(tl.join(pairs & 15, pairs >> 4), (BLOCK_N, BLOCK_K))
        numbers = (lower | (upper << 4)).to(tl.float32) - ZERO_OF_SIX
    else:
        pairs = _bytes(data, row, inputs // 2, first // 2, inputs // 2, BLOCK_K // 2, EVEN)
        codes = tl.reshape(tl.join(pairs & 15, pairs >> 4), (BLOCK_N, BLOCK_K))
        numbers = codes.to(tl.float32) if FORM == INT4 else _of_e2m1(codes)
    return numbers


@triton.jit
def _bytes(data, row, stride, first, count, SIZE: tl.constexpr, EVEN: tl.constexpr):
    """Elements [rows, SIZE] of rows `stride` apart, from `first` on; 0 from `count` on."""
    at = first + tl.arange(0, SIZE)
    return _load(data + row[:, None] * stride + at[None, :], (at < count)[None, :], EVEN)


@triton.jit
def _load(at, inside, EVEN: tl.constexpr):
    return tl.load(at) if EVEN else tl.load(at, mask=inside, other=0.0)


@triton.jit
def _of_e2m1(codes):
    """The numbers of 4-bit codes (`mxfp4.NUMBERS`) in float32. The exponent of 0.5 is 0x3F000000."""
    size = (codes & 7).to(tl.int32)
    bits = tl.where(size > 1, (size << 22) + 0x3F000000, size * 0x3F000000)
    return (bits | ((codes & 8).to(tl.int32) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _of_e4m3(code):
    """The numbers of positive e4m3 codes in float32. The smallest eight are multiples of 2^-9."""
    code = code.to(tl.int32)
    normal = ((code << 20) + 0x3C000000).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)
