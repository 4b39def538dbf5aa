"""GEMMs with 4-bit weights: a skinny GEMM for few tokens, and dequantizing a weight for the library's GEMM.

Steps of few tokens are bound by reading weights, and 4-bit weights have a quarter of the bytes. For each group of
inputs, the tile of integers (exact in any float type) is multiplied by the tokens on tensor cores, and the result by
the scales, so weights are not rounded. With more tokens, a pass that writes the weights in the dtype of the tokens
costs little.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.lm.kernels.int4 import Int4Weight
from holdfast.lm.kernels.launch import dependent_launch_options, launch_dependents, wait_for_previous
from holdfast.lm.kernels.linear.skinny_gemm import MAX_PARTS, MAX_ROWS, PROGRAMS, SkinnyLaunch

BLOCK_N, NUM_WARPS, NUM_STAGES = 64, 4, 6

CHUNKS_OF_A_PART = 4
"""Smallest number of chunks in a part, when inputs are cut into parts."""


def int4_launch_for(x: torch.Tensor, weight: Int4Weight, *, cut: bool = False) -> SkinnyLaunch | None:
    """The launch of `int4_skinny_gemm` for x [T, K]; None for many tokens.

    With `cut`, partial sums cost nothing extra.
    """
    rows, inputs = x.shape
    if not 0 < rows <= MAX_ROWS or x.stride(1) != 1:
        return None
    chunk, parts = 2 * weight.half, 1
    if cut:
        wanted = round(2 * PROGRAMS / -(-weight.shape[0] // BLOCK_N))
        parts = max(1, min(MAX_PARTS, wanted, inputs // (CHUNKS_OF_A_PART * chunk)))
    return SkinnyLaunch(BLOCK_N, chunk, NUM_WARPS, NUM_STAGES, parts)


def int4_skinny_gemm(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    launch: SkinnyLaunch,
    *,
    gated: bool = False,
) -> None:
    """Write x [T, K] times weight [N, K] transposed, plus bias, to out [parts, T, N] of any float dtype.

    With several parts, each holds the sum over its piece of the inputs, and bias must be None. With `gated`, weight and
    bias have 2 N rows, first gate and then up, and out is silu(gate) * up.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    block_n = launch.block_n
    int4_skinny_kernel[(triton.cdiv(outputs, block_n), launch.parts)](
        x, weight.data, weight.scale, weight.zero, weight.added, bias, out,
        rows, outputs, inputs, launch.part_length(inputs), x.stride(0), out.stride(0), out.stride(1),
        GATED=gated, GROUP=weight.group, HALF=weight.half, BLOCK_M=max(16, triton.next_power_of_2(rows)),
        BLOCK_N=block_n, STAGES=launch.num_stages, num_warps=launch.num_warps, **dependent_launch_options(x.device),
    )  # fmt: skip


def int4_dequantized(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] in `dtype`, rounded once."""
    outputs, inputs = weight.shape
    out = torch.empty(outputs, inputs, dtype=dtype, device=weight.data.device)
    dequantize_kernel[(triton.cdiv(outputs, 16), triton.cdiv(inputs, 2 * weight.half))](
        weight.data, weight.scale, weight.zero, weight.added, out, outputs, inputs,
        GROUP=weight.group, HALF=weight.half, BLOCK_N=16, num_warps=4, **dependent_launch_options(out.device),
    )  # fmt: skip
    return out


@triton.jit
def _exact(numbers, zero, DTYPE: tl.constexpr):
    """numbers - zero, both from 0 to 15, in a float type, without a conversion instruction.

    This works because 128 + n in bfloat16 has the bits of 0x4300 + n, and 1024 + n in float16 has those of 0x6400 + n.
    """
    if tl.bfloat16 == DTYPE:
        shifted = (numbers.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
        result = shifted - (zero.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    elif tl.float16 == DTYPE:
        shifted = (numbers.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
        result = shifted - (zero.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
    else:
        result = numbers.to(DTYPE) - zero.to(DTYPE)
    return result


@triton.jit
def _chunk(weight, scale, zero, added, row, first, low_x, high_x, inputs, GROUP: tl.constexpr, HALF: tl.constexpr):
    """The product [BLOCK_N, BLOCK_M] float32 of rows of the weight and the two halves of a chunk of x."""
    at = row.to(tl.int64) * (inputs // 2) + first // 2
    tile = tl.load(weight + at[:, None] + tl.arange(0, HALF)[None, :])
    group = row * (inputs // GROUP) + first // GROUP
    factor, offset = tl.load(scale + group).to(tl.float32), tl.load(zero + group)
    low = tl.dot(_exact(tile & 15, offset[:, None], low_x.dtype), low_x, input_precision="ieee")
    if GROUP >= 2 * HALF:
        low = tl.dot(_exact(tile >> 4, offset[:, None], low_x.dtype), high_x, low, input_precision="ieee")
        result = low * factor[:, None]
    else:
        high_factor, high_offset = tl.load(scale + group + 1).to(tl.float32), tl.load(zero + group + 1)
        high = tl.dot(_exact(tile >> 4, high_offset[:, None], low_x.dtype), high_x, input_precision="ieee")
        result = low * factor[:, None] + high * high_factor[:, None]
    if added is not None:
        high_group = row * (inputs // GROUP) + (first + HALF) // GROUP
        result += tl.load(added + group)[:, None] * tl.sum(low_x.to(tl.float32), 0)[None, :]
        result += tl.load(added + high_group)[:, None] * tl.sum(high_x.to(tl.float32), 0)[None, :]
    return result


@triton.jit(do_not_specialize=["rows"])  # rows only masks: one kernel for all counts of a BLOCK_M
def int4_skinny_kernel(
    x, weight, scale, zero, added, bias, out, rows, outputs, inputs, part_length, x_stride, out_stride_part, out_stride,
    GATED: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """x [rows, inputs] times a 4-bit weight transposed, for a few rows. Program (BLOCK_N outputs, part).

    A part is `part_length` of the inputs, with its own result in `out` [parts, rows, outputs]. With GATED, the weight
    has 2 * outputs rows, first gate and then up, and the result is silu(gate) * up.
    """
    launch_dependents(DEPENDENT)
    token = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows after the last one read it again, which costs nothing and needs no mask.
    row = tl.minimum(n, outputs - 1)
    held = (token < rows)[None, :]
    begin = tl.program_id(1) * part_length
    wait_for_previous(DEPENDENT)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in tl.range(begin, tl.minimum(inputs, begin + part_length), 2 * HALF, num_stages=STAGES):
        x_at = x + token[None, :] * x_stride + (first + tl.arange(0, HALF))[:, None]
        low_x = tl.load(x_at, mask=held, other=0.0)
        high_x = tl.load(x_at + HALF, mask=held, other=0.0)
        acc += _chunk(weight, scale, zero, added, row, first, low_x, high_x, inputs, GROUP, HALF)
        if GATED:
            up += _chunk(weight, scale, zero, added, outputs + row, first, low_x, high_x, inputs, GROUP, HALF)
    if bias is not None:
        acc += tl.load(bias + row).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + outputs + row).to(tl.float32)[:, None]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    place = out + tl.program_id(1).to(tl.int64) * out_stride_part + token[None, :] * out_stride + n[:, None]
    tl.store(place, acc.to(out.dtype.element_ty), mask=(n < outputs)[:, None] & held)


@triton.jit
def dequantize_kernel(
    weight, scale, zero, added, out, outputs, inputs,
    GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write a 4-bit weight [outputs, inputs] in the dtype of `out`. Program (BLOCK_N rows, chunk)."""
    launch_dependents(DEPENDENT)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    written = (n < outputs)[:, None]
    row = tl.minimum(n, outputs - 1).to(tl.int64)
    first = tl.program_id(1) * 2 * HALF
    at = tl.arange(0, HALF)[None, :]
    tile = tl.load(weight + (row * (inputs // 2) + first // 2)[:, None] + at).to(tl.int32)
    low = row * (inputs // GROUP) + first // GROUP
    high = row * (inputs // GROUP) + (first + HALF) // GROUP
    wait_for_previous(DEPENDENT)
    place = out + (row * inputs + first)[:, None] + at
    numbers = _plain(tile & 15, scale, zero, added, low)
    tl.store(place, numbers.to(out.dtype.element_ty), mask=written)
    numbers = _plain(tile >> 4, scale, zero, added, high)
    tl.store(place + HALF, numbers.to(out.dtype.element_ty), mask=written)


@triton.jit
def _plain(tile, scale, zero, added, group):
    """The weights [BLOCK_N, HALF] float32 of a tile of integers, whose rows have the groups `group` [BLOCK_N]."""
    numbers = (tile - tl.load(zero + group).to(tl.int32)[:, None]).to(tl.float32)
    result = numbers * tl.load(scale + group).to(tl.float32)[:, None]
    if added is not None:
        result += tl.load(added + group)[:, None]
    return result
