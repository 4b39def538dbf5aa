"""GEMMs with FP8 weights on FP8 tensor cores, and the launch of `skinny_gemm` with FP8 weights for one token.

For a few tokens, converting weights to bf16 would cost more than it saves: a processor has time for seven instructions
per weight. So the activations are converted to FP8 instead. Up to 64 tokens, each activation is the sum of two FP8
numbers, which together hold all bits of a bf16 number. With more tokens arithmetic is the limit, and each activation is
one FP8 number.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch.nn import functional
from torch.nn.functional import ScalingType

from holdfast.lm.kernels.fp8 import FP8, LARGEST, Fp8BlockWeight, Fp8Weight
from holdfast.lm.kernels.fp8_conversion import round_to_fp8
from holdfast.lm.kernels.launch import dependent_launch_options, launch_dependents, wait_for_previous
from holdfast.lm.kernels.linear.skinny_gemm import (
    FEW,
    LEAST_ROW_BYTES,
    MANY_OUTPUTS,
    MAX_PARTS,
    MAX_ROWS,
    PROGRAMS,
    SkinnyLaunch,
    block_constants,
)

TILE = 16
"""Inputs and outputs of a GEMM on FP8 tensor cores must be multiples of this."""

LOWER = 16.0
"""The factor on the second number of an activation, which is at most a 16th of the first."""

ONE_TOKEN = SkinnyLaunch(block_n=8, block_k=512, num_warps=2, num_stages=4)
ONE_TOKEN_WIDE = SkinnyLaunch(block_n=16, block_k=256, num_warps=4, num_stages=6)
FEW_TOKENS = SkinnyLaunch(block_n=64, block_k=256, num_warps=4, num_stages=3)
FEW_TOKENS_WIDE = SkinnyLaunch(block_n=128, block_k=128, num_warps=8, num_stages=4)
MORE_TOKENS_CUT = SkinnyLaunch(block_n=64, block_k=128, num_warps=4, num_stages=6)
MORE_TOKENS_WIDE = SkinnyLaunch(block_n=128, block_k=128, num_warps=8, num_stages=3)

FEW_PROGRAMS = 256
"""Number of programs up to which a GEMM of at most FEW tokens is cut over its inputs, if it may be cut."""


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Activations [T, K]: each token is `scale` times data[0], or times data[0] + data[1] / LOWER."""

    data: torch.Tensor  # [1 or 2, T, K] float8_e4m3fn
    scale: torch.Tensor  # [T] float32

    def __getitem__(self, tokens: slice) -> Fp8Rows:
        return Fp8Rows(self.data[:, tokens], self.scale[tokens])


def fp8_launch_for(x: torch.Tensor, weight: Fp8Weight | Fp8BlockWeight, *, cut: bool = False) -> SkinnyLaunch | None:
    """The launch of `skinny_gemm` (one token) or `fp8_skinny_gemm` for x [T, K] and an FP8 weight [N, K].

    None if neither computes it. With `cut`, the caller adds partial sums at no extra cost. Tuned on an H200
    (benchmarks/kernels/gemv_gpu.py).
    """
    rows, inputs = x.shape
    fits = 0 < rows <= MAX_ROWS and x.stride(1) == 1
    if not fits or x.element_size() != 2 or inputs * x.element_size() < LEAST_ROW_BYTES:
        return None
    outputs = weight.shape[0]
    wide = outputs >= MANY_OUTPUTS
    if rows == 1:
        return ONE_TOKEN_WIDE if wide and not cut else ONE_TOKEN
    if not cut:
        return (FEW_TOKENS_WIDE if rows <= FEW else MORE_TOKENS_WIDE) if wide else FEW_TOKENS
    own, most = (FEW_TOKENS, FEW_PROGRAMS) if rows <= FEW else (MORE_TOKENS_CUT, PROGRAMS)
    wanted = round(most / -(-outputs // own.block_n))
    return replace(own, parts=max(1, min(MAX_PARTS, wanted, inputs // (4 * own.block_k))))


def has_tiles(x: torch.Tensor, weight: Fp8Weight) -> bool:
    """Whether `fp8_gemm` can compute this product: many tokens, 16-bit activations, sizes in multiples of TILE."""
    outputs, inputs = weight.shape
    return len(x) > MAX_ROWS and x.element_size() == 2 and outputs % TILE == 0 and inputs % TILE == 0


def quantize_rows(x: torch.Tensor, *, halves: int = 1, gated: bool = False) -> Fp8Rows:
    """Quantize x [T, K] to `halves` FP8 numbers each. With one, each token's largest magnitude becomes LARGEST.

    With two, the scale is a power of two, and each number holds 4 of the 8 bits of a bf16 number. Only bits below
    2**-22 of the token's largest magnitude are lost. With `gated`, silu(gate) * up of x [T, 2 K] is quantized.
    """
    tokens, width = x.shape[0], x.shape[1] // (2 if gated else 1)
    data = torch.empty(halves, tokens, width, dtype=FP8, device=x.device)
    scale = torch.empty(tokens, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    quantize_rows_kernel[(tokens,)](
        x,
        data,
        scale,
        width,
        x.stride(0),
        HALVES=halves,
        GATED=gated,
        LARGEST=LARGEST,
        LOWER=LOWER,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
        **dependent_launch_options(x.device),
    )
    return Fp8Rows(data, scale)


def fp8_gemm(x: Fp8Rows, weight: Fp8Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return x [T, K] times the transpose of weight [N, K], plus bias, as [T, N] of `dtype`.

    x stores one FP8 number for each activation. The product is computed by PyTorch's `scaled_mm`, with a scale for each
    token and for each output. `scaled_mm` only offers fast accumulation, with a result rounded to bfloat16.
    """
    out = functional.scaled_mm(
        x.data[0],
        weight.data.t(),
        x.scale[:, None],
        ScalingType.RowWise,
        weight.scale[None, :],
        ScalingType.RowWise,
        output_dtype=torch.bfloat16,
        use_fast_accum=True,
    ).to(dtype)
    return out if bias is None else out.add_(bias)


def fp8_skinny_gemm(
    x: Fp8Rows,
    weight: Fp8Weight | Fp8BlockWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    launch: SkinnyLaunch,
    *,
    gated: bool = False,
) -> None:
    """Write x [T, K] (two numbers each) times weight [N, K] transposed, plus bias, to out [parts, T, N].

    With several parts, each holds the sum over its piece of the inputs, and bias must be None. With `gated`, weight and
    bias have 2 N rows, first gate and then up, and out is silu(gate) * up. For a weight in blocks, an iteration of the
    launch takes one block of inputs.
    """
    _, rows, inputs = x.data.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    fp8_skinny_gemm_kernel[launch.grid(weight.shape[0])](
        x.data,
        x.scale,
        weight.data,
        weight.scale,
        bias,
        out,
        rows,
        outputs,
        inputs,
        launch.part_length(inputs),
        x.data.stride(0),
        x.data.stride(1),
        weight.data.stride(0),
        out.stride(0),
        out.stride(1),
        GATED=gated,
        LOWER=LOWER,
        BLOCK_M=max(16, triton.next_power_of_2(rows)),
        **block_constants(weight),
        **launch.options(inputs),
        **dependent_launch_options(out.device),
    )


@triton.jit
def quantize_rows_kernel(
    x, data, scale, width, x_stride,
    HALVES: tl.constexpr, GATED: tl.constexpr, LARGEST: tl.constexpr, LOWER: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Quantize one token to FP8 with one scale, which is NaN if any number is not finite. Program (token)."""
    launch_dependents(DEPENDENT)
    wait_for_previous(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    held = at < width
    value = tl.load(x + token * x_stride + at, mask=held, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x + token * x_stride + width + at, mask=held, other=0.0).to(tl.float32)
        value = value / (1.0 + tl.exp(-value)) * up
    # For a token of zeros the scale is the smallest normal number, which keeps the quotients finite.
    poison = tl.sum(value * 0.0, 0)
    factor = tl.maximum(tl.max(tl.abs(value), 0) / LARGEST, 1.1754944e-38)
    if HALVES == 2:
        factor = ((factor.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    value = value / factor
    first = round_to_fp8(value).to(data.dtype.element_ty)
    tl.store(data + token * width + at, first, mask=held)
    if HALVES == 2:
        rest = round_to_fp8((value - first.to(tl.float32)) * LOWER)
        place = data + (tl.num_programs(0) + token) * width + at
        tl.store(place, rest.to(data.dtype.element_ty), mask=held)
    tl.store(scale + token, factor + poison)


@triton.jit(do_not_specialize=["rows"])  # rows only masks: one kernel for all counts of a BLOCK_M
def fp8_skinny_gemm_kernel(
    x, x_scale, weight, scale, bias, out, rows, outputs, inputs, part_length,
    x_stride_half, x_stride, weight_stride, out_stride_part, out_stride,
    GATED: tl.constexpr, LOWER: tl.constexpr, BLOCK_M: tl.constexpr, SCALE_ROWS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """x [rows, inputs], two numbers each, times weight transposed. Program (BLOCK_N rows of weight, part).

    For parts and GATED, see `skinny_gemm_kernel`. FP8 tensor cores keep few bits of a sum, so the sums are added in
    float32 after each block of inputs. This does not matter for the lower numbers. With a GROUP, which is BLOCK_K,
    `scale` [rows of weight / SCALE_ROWS, inputs / GROUP] is that of blocks.
    """
    launch_dependents(DEPENDENT)
    token = tl.arange(0, BLOCK_M)
    TAKEN: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # outputs of this program
    item = tl.arange(0, BLOCK_N)
    # Programs after the last output read its row again, which costs nothing and needs no mask.
    if GATED:
        row = tl.minimum(tl.program_id(0) * TAKEN + item // 2, outputs - 1) + item % 2 * outputs
    else:
        row = tl.minimum(tl.program_id(0) * TAKEN + item, outputs - 1)
    weight_at = weight + row.to(tl.int64)[:, None] * weight_stride
    x_at = x + token[None, :] * x_stride
    begin = tl.program_id(1) * part_length
    wait_for_previous(DEPENDENT)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    lower = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in tl.range(begin, tl.minimum(inputs, begin + part_length), BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)
        inside = k < inputs
        held = (token < rows)[None, :] & inside[:, None]
        if EVEN:
            tile = tl.load(weight_at + k[None, :])
        else:
            tile = tl.load(weight_at + k[None, :], mask=inside[None, :], other=0.0)
        high_x = tl.load(x_at + k[:, None], mask=held, other=0.0)
        lower_x = tl.load(x_at + x_stride_half + k[:, None], mask=held, other=0.0)
        if GROUP > 0:
            factor = tl.load(scale + row // SCALE_ROWS * (inputs // GROUP) + first // GROUP)[:, None]
            acc += tl.dot(tile, high_x) * factor
            lower += tl.dot(tile, lower_x) * factor
        else:
            acc = tl.dot(tile, high_x, acc, max_num_imprecise_acc=BLOCK_K)
            lower = tl.dot(tile, lower_x, lower)
    result = acc + lower / LOWER
    if GROUP == 0:
        result *= tl.load(scale + row)[:, None]
    result *= tl.load(x_scale + token, mask=token < rows, other=0.0)[None, :]
    if bias is not None:
        result += tl.load(bias + row).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(result, (TAKEN, 2, BLOCK_M)), (0, 2, 1)))
        result = gate / (1.0 + tl.exp(-gate)) * up
    n = tl.program_id(0) * TAKEN + tl.arange(0, TAKEN)
    place = out + tl.program_id(1).to(tl.int64) * out_stride_part + token[None, :] * out_stride + n[:, None]
    written = (n < outputs)[:, None] & (token < rows)[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=written)
