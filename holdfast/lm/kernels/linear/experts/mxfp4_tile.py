"""Reads a tile of MXFP4 weights, which become numbers in registers."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mxfp4_tile(
    data, scale, row, first, inputs, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """The numbers [BLOCK_N, BLOCK_K] float32 of rows `row` [BLOCK_N], from input `first` on; 0 after the last input.

    For the layout of `data` and `scale`, see `Mxfp4Matrices`. With EVEN, no tile ends after the last input.
    """
    block = first // 32 + tl.arange(0, BLOCK_K // 32)
    blocks = inputs // 32
    at = row.to(tl.int64)[:, None] * blocks + block[None, :]
    byte_at = data + at[:, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    if EVEN:
        pairs, exponent = tl.load(byte_at), tl.load(scale + at)
    else:
        inside = (block < blocks)[None, :]
        pairs = tl.load(byte_at, mask=inside[:, :, None], other=0)
        exponent = tl.load(scale + at, mask=inside, other=0)
    # The bits of a power of two are its exponent.
    factor = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)[:, :, None]
    numbers = tl.join(_number(pairs & 15) * factor, _number(pairs >> 4) * factor)
    return tl.reshape(numbers, (BLOCK_N, BLOCK_K))


@triton.jit
def packed_dot(
    data, scale, row, first, inputs, x, acc, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """`acc` [BLOCK_N, M] float32 plus the products of a tile's numbers (see `mxfp4_tile`) and x [BLOCK_K, M], bfloat16.

    The compiler turns packed numbers into bfloat16 with few instructions, after their tile is in shared memory.
    """
    block = first // 32 + tl.arange(0, BLOCK_K // 32)
    byte = first // 2 + tl.arange(0, BLOCK_K // 2)
    long = row.to(tl.int64)[:, None]
    byte_at = data + long * (inputs // 2) + byte[None, :]
    scale_at = scale + long * (inputs // 32) + block[None, :]
    if EVEN:
        codes, exponent = tl.load(byte_at), tl.load(scale_at)
    else:
        codes = tl.load(byte_at, mask=(byte < inputs // 2)[None, :], other=0)
        exponent = tl.load(scale_at, mask=(block < inputs // 32)[None, :], other=0)
    return tl.dot_scaled(codes, exponent, "e2m1", x, None, "bf16", acc, fast_math=True)


@triton.jit
def _number(code):
    """The number of a 4-bit code (`mxfp4.NUMBERS`) in float32, made of bits: 0x3F000000 are those of 0.5."""
    code = code.to(tl.int32)
    size = code & 7
    bits = tl.where(size > 1, (size << 22) + 0x3F000000, size * 0x3F000000)
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)
