"""GEMMs with a `PackedWeight`: a skinny GEMM for few tokens, and dequantizing a weight for the library's GEMM.

Both round each number once, to the dtype of the activations, as a dequantized weight is. NVFP4's numbers need no
rounding in bfloat16: their rows' factors are applied to the sums.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.lm.kernels.launch import dependent_launch_options, launch_dependents, wait_for_previous
from holdfast.lm.kernels.linear.packed_tile import packed_constants, packed_tile
from holdfast.lm.kernels.linear.skinny_gemm import MAX_PARTS, MAX_ROWS, PROGRAMS, SkinnyLaunch
from holdfast.lm.kernels.packed import PackedWeight

BLOCK_N, BLOCK_K, NUM_WARPS, NUM_STAGES = 64, 128, 4, 4
"""Launch settings of the skinny GEMM. Not tuned yet."""
BLOCKS_OF_A_PART = 4
"""Smallest number of iterations of a part, when inputs are cut into parts."""
DEQUANTIZED_ROWS, DEQUANTIZED_INPUTS = 16, 128
"""Rows and inputs that one program dequantizes."""


def packed_launch_for(x: torch.Tensor, weight: PackedWeight, *, cut: bool = False) -> SkinnyLaunch | None:
    """The launch of `packed_skinny_gemm` for x [T, K]; None for many tokens.

    With `cut`, partial sums cost nothing extra.
    """
    rows, inputs = x.shape
    if not 0 < rows <= MAX_ROWS or x.stride(1) != 1:
        return None
    parts = 1
    if cut:
        wanted = round(2 * PROGRAMS / -(-weight.shape[0] // BLOCK_N))
        parts = max(1, min(MAX_PARTS, wanted, inputs // (BLOCKS_OF_A_PART * BLOCK_K)))
    return SkinnyLaunch(BLOCK_N, BLOCK_K, NUM_WARPS, NUM_STAGES, parts)


def packed_skinny_gemm(
    x: torch.Tensor,
    weight: PackedWeight,
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
    packed_skinny_kernel[(triton.cdiv(outputs, launch.block_n), launch.parts)](
        x, weight.data, weight.factors, weight.extra, weight.unit, bias, out,
        rows, outputs, inputs, launch.part_length(inputs), x.stride(0), out.stride(0), out.stride(1),
        GATED=gated, **packed_constants(weight), BLOCK_M=max(16, triton.next_power_of_2(rows)),
        **launch.options(inputs), **dependent_launch_options(x.device),
    )  # fmt: skip


def packed_dequantized(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] in `dtype`, rounded once."""
    outputs, inputs = weight.shape
    out = torch.empty(outputs, inputs, dtype=dtype, device=weight.data.device)
    packed_dequantize_kernel[(triton.cdiv(outputs, DEQUANTIZED_ROWS), triton.cdiv(inputs, DEQUANTIZED_INPUTS))](
        weight.data, weight.factors, weight.extra, weight.unit, out, outputs, inputs, **packed_constants(weight),
        BLOCK_N=DEQUANTIZED_ROWS, BLOCK_K=DEQUANTIZED_INPUTS, EVEN=inputs % DEQUANTIZED_INPUTS == 0, num_warps=4,
        **dependent_launch_options(out.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])  # rows only masks: one kernel for all counts of a BLOCK_M
def packed_skinny_kernel(
    x, weight, scale, extra, unit, bias, out, rows, outputs, inputs, part_length, x_stride, out_stride_part, out_stride,
    GATED: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """x [rows, inputs] times a packed weight transposed, for a few rows. Program (BLOCK_N outputs, part).

    A part is `part_length` of the inputs, with its own result in `out` [parts, rows, outputs]. With GATED, the weight
    has 2 * outputs rows, first gate and then up, and the result is silu(gate) * up. With `unit`, each row of the result
    is multiplied by its row's unit.
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
    for first in tl.range(begin, tl.minimum(inputs, begin + part_length), BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)
        values = tl.load(x + token[None, :] * x_stride + k[:, None], mask=held & (k < inputs)[:, None], other=0.0)
        tile = packed_tile(
            weight, scale, extra, row, first, inputs, FORM, GROUP, SCALE_ROWS, BLOCK_N, BLOCK_K, EVEN
        )  # fmt: skip
        acc = tl.dot(tile.to(values.dtype), values, acc, input_precision="ieee")
        if GATED:
            tile = packed_tile(
                weight, scale, extra, outputs + row, first, inputs, FORM, GROUP, SCALE_ROWS, BLOCK_N, BLOCK_K, EVEN
            )  # fmt: skip
            up = tl.dot(tile.to(values.dtype), values, up, input_precision="ieee")
    if unit is not None:
        acc *= tl.load(unit + row)[:, None]
        if GATED:
            up *= tl.load(unit + outputs + row)[:, None]
    if bias is not None:
        acc += tl.load(bias + row).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + outputs + row).to(tl.float32)[:, None]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    place = out + tl.program_id(1).to(tl.int64) * out_stride_part + token[None, :] * out_stride + n[:, None]
    tl.store(place, acc.to(out.dtype.element_ty), mask=(n < outputs)[:, None] & held)


@triton.jit
def packed_dequantize_kernel(
    weight, scale, extra, unit, out, outputs, inputs,
    FORM: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write a packed weight [outputs, inputs] in the dtype of `out`. Program (BLOCK_N rows, BLOCK_K inputs)."""
    launch_dependents(DEPENDENT)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, outputs - 1)
    first = tl.program_id(1) * BLOCK_K
    k = first + tl.arange(0, BLOCK_K)
    tile = packed_tile(
        weight, scale, extra, row, first, inputs, FORM, GROUP, SCALE_ROWS, BLOCK_N, BLOCK_K, EVEN
    )  # fmt: skip
    if unit is not None:
        tile *= tl.load(unit + row)[:, None]
    wait_for_previous(DEPENDENT)
    place = out + row.to(tl.int64)[:, None] * inputs + k[None, :]
    tl.store(place, tile.to(out.dtype.element_ty), mask=(n < outputs)[:, None] & (k < inputs)[None, :])
