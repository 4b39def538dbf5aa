"""Skinny GEMM: linear layers for a few tokens, bound by reading weights.

The kernel, its launches, and when it is used.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from holdfast.lm.kernels.fp8 import Fp8BlockWeight, Fp8Weight
from holdfast.lm.kernels.launch import dependent_launch_options, launch_dependents, wait_for_previous

MAX_ROWS = 64
"""Largest number of tokens for which the kernel reads weights faster than cuBLAS. For more, a tiled GEMM is better."""
MAX_GATED_ROWS = 128
"""Largest number of tokens for which it is faster with a gate. After cuBLAS, another kernel computes the gate."""

LEAST_ROW_BYTES = 512
"""Smallest row of weights in bytes. A shorter row does not fill the pipeline of the loop."""


@dataclass(frozen=True)
class SkinnyLaunch:
    """Launch settings of one skinny GEMM."""

    block_n: int
    """Number of rows of weights per program."""
    block_k: int
    """Number of inputs per iteration of a program."""
    num_warps: int
    num_stages: int
    parts: int = 1
    """Number of pieces that the inputs are cut into (split-K). Their sums are added later, in order."""

    def grid(self, weight_rows: int) -> tuple[int, int]:
        """The numbers of programs along the rows of weights, and along the parts."""
        return -(-weight_rows // self.block_n), self.parts

    def part_length(self, inputs: int) -> int:
        """Number of inputs of one part, a multiple of block_k."""
        blocks = -(-inputs // self.block_k)
        return -(-blocks // self.parts) * self.block_k

    def options(self, inputs: int) -> dict[str, int]:
        """The constants that the kernel is compiled for, for this number of inputs."""
        return dict(
            BLOCK_N=self.block_n,
            BLOCK_K=self.block_k,
            EVEN=inputs % self.block_k == 0,
            STAGES=self.num_stages,
            num_warps=self.num_warps,
        )


ONE_TOKEN = SkinnyLaunch(block_n=16, block_k=256, num_warps=4, num_stages=4)
ONE_TOKEN_SMALL = SkinnyLaunch(block_n=16, block_k=256, num_warps=4, num_stages=6)
ONE_TOKEN_DEEP = SkinnyLaunch(block_n=8, block_k=512, num_warps=4, num_stages=3)
ONE_TOKEN_SHORT = SkinnyLaunch(block_n=4, block_k=1024, num_warps=4, num_stages=3)
FEW_TOKENS = SkinnyLaunch(block_n=64, block_k=128, num_warps=4, num_stages=4)
FEW_TOKENS_DEEP = SkinnyLaunch(block_n=64, block_k=128, num_warps=4, num_stages=6)
MORE_TOKENS = SkinnyLaunch(block_n=128, block_k=128, num_warps=8, num_stages=4)
MORE_TOKENS_CUT = SkinnyLaunch(block_n=128, block_k=64, num_warps=4, num_stages=6)
MANY_TOKENS_GATED = SkinnyLaunch(block_n=256, block_k=64, num_warps=8, num_stages=4)

FEW = 32
"""Largest number of tokens for which 64 rows of weights per program are best."""

MANY_OUTPUTS = 16_384
"""Smallest number of outputs with enough programs to fill the device without cutting the inputs."""

ONE_TOKEN_OUTPUTS = 12_288
"""Smallest such number of outputs for one token."""
ONE_TOKEN_OUTPUTS_CUT = 8192
"""Smallest such number of outputs for one token, if the inputs may be cut."""
SMALL_OUTPUTS, SMALL_INPUTS = 4096, 2048
"""Largest sizes for which a GEMM of one token is better with more stages.

Devices that share a layer have such GEMMs.
"""

PROGRAMS = 128
"""Number of programs up to which a GEMM is cut over its inputs, if it may be cut."""
PART_INPUTS = 4096
"""Largest number of inputs that one program reads. Longer inputs are cut, so that all processors finish together."""
MAX_PARTS = 8
"""Largest number of pieces that inputs are cut into."""


def launch_for(x: torch.Tensor, weight: torch.Tensor, *, cut: bool = False, gated: bool = False) -> SkinnyLaunch | None:
    """The launch for x [T, K] and weight [N, K]; None if the library's GEMM is faster, or the only exact one.

    With `cut`, the caller adds partial sums at no extra cost. With `gated`, the caller gates the result. Tuned on an
    H200 (benchmarks/kernels/gemv_gpu.py).
    """
    rows, inputs = x.shape
    most = MAX_GATED_ROWS if gated and weight.shape[0] >= MANY_OUTPUTS else MAX_ROWS
    fits = 0 < rows <= most and weight.stride(1) == 1 and x.stride(1) == 1
    if not fits or x.element_size() != 2 or inputs * x.element_size() < LEAST_ROW_BYTES:
        return None
    outputs = weight.shape[0]
    if rows == 1:
        return _for_one_token(outputs, inputs, cut=cut)
    if rows > MAX_ROWS:
        return MANY_TOKENS_GATED
    if not cut and rows > FEW:
        return MORE_TOKENS if outputs >= MANY_OUTPUTS else None
    if not cut:
        return FEW_TOKENS if outputs >= MANY_OUTPUTS else FEW_TOKENS_DEEP
    own = FEW_TOKENS_DEEP if rows <= FEW else MORE_TOKENS_CUT
    programs = -(-outputs // own.block_n)
    wanted = max(round(PROGRAMS / programs), -(-inputs // PART_INPUTS))
    return replace(own, parts=max(1, min(MAX_PARTS, wanted, inputs // (4 * own.block_k))))


def _for_one_token(outputs: int, inputs: int, *, cut: bool) -> SkinnyLaunch:
    if not cut:
        if outputs <= SMALL_OUTPUTS:
            return ONE_TOKEN_SMALL
        return ONE_TOKEN_DEEP if outputs >= ONE_TOKEN_OUTPUTS else ONE_TOKEN
    if outputs >= ONE_TOKEN_OUTPUTS_CUT:
        return ONE_TOKEN
    if inputs <= SMALL_INPUTS:
        return ONE_TOKEN_SMALL
    return ONE_TOKEN_SHORT if inputs <= PART_INPUTS else ONE_TOKEN_DEEP


def skinny_gemm(
    x: torch.Tensor,
    weight: torch.Tensor | Fp8Weight | Fp8BlockWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    launch: SkinnyLaunch,
    *,
    gated: bool = False,
    added: bool = False,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    fixed: bool = False,
) -> None:
    """Write x [T, K] times weight [N, K] transposed, plus bias, to out [parts, T, N] of any float dtype.

    With several parts, each holds the sum over its piece of the inputs, and bias must be None. With `gated`, weight and
    bias have 2 N rows, first gate and then up, and out is silu(gate) * up. With `added`, the result is added to out,
    which has one part. With `norm` [K], for one token in one part, x is replaced by its RMS norm (with eps) times norm,
    without rounding. An FP8 weight also takes only one token; for more, see `fp8_linear.fp8_skinny_gemm`. `fixed`: a
    row's bits do not depend on the number of rows, so one token is computed as several are, and gate and up are rounded
    to out's dtype first, as they are where another kernel multiplies them.
    """
    data, scale = (weight, None) if isinstance(weight, torch.Tensor) else (weight.data, weight.scale)
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    skinny_gemm_kernel[launch.grid(weight.shape[0])](
        x,
        norm,
        data,
        scale,
        bias,
        out,
        rows,
        outputs,
        inputs,
        launch.part_length(inputs),
        x.stride(0),
        data.stride(0),
        out.stride(0),
        out.stride(1),
        eps,
        GATED=gated,
        ADDED=added,
        ROUNDED=fixed,
        BLOCK_M=1 if rows == 1 and not fixed else max(16, triton.next_power_of_2(rows)),
        **block_constants(weight),
        **launch.options(inputs),
        **dependent_launch_options(x.device),
    )


@triton.jit
def block_scaled(
    tile, scale, row, first, inputs,
    SCALE_ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The numbers [BLOCK_N, BLOCK_K] float32 of an FP8 tile that begins at input `first`, with the scales of blocks."""
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    block = first // GROUP + tl.arange(0, GROUPS)
    at = (row // SCALE_ROWS)[:, None] * (inputs // GROUP) + block[None, :]
    factor = tl.load(scale + at, mask=(block < inputs // GROUP)[None, :], other=0.0)
    numbers = tl.reshape(tile.to(tl.float32), (BLOCK_N, GROUPS, GROUP)) * factor[:, :, None]
    return tl.reshape(numbers, (BLOCK_N, BLOCK_K))


def block_constants(weight: torch.Tensor | Fp8Weight | Fp8BlockWeight) -> dict[str, int]:
    """The constants of a kernel for a weight that may have a scale for each block: its sizes, or 0 without blocks."""
    if isinstance(weight, Fp8BlockWeight):
        return dict(SCALE_ROWS=weight.rows, GROUP=weight.group)
    return dict(SCALE_ROWS=1, GROUP=0)


@triton.jit(do_not_specialize=["rows"])  # rows only masks: one kernel for all counts of a BLOCK_M
def skinny_gemm_kernel(
    x, norm, weight, scale, bias, out, rows, outputs, inputs, part_length,
    x_stride, weight_stride, out_stride_part, out_stride, eps,
    GATED: tl.constexpr, ADDED: tl.constexpr, ROUNDED: tl.constexpr, BLOCK_M: tl.constexpr, SCALE_ROWS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """x [rows, inputs] times weight transposed, for a few rows. Program (BLOCK_N rows of weight, part).

    A part is `part_length` of the inputs, with its own result in `out` [parts, rows, outputs]. With GATED, the weight
    has 2 * outputs rows, first gate and then up; a program takes rows of both in turns, and the result is silu(gate) *
    up, with ROUNDED both in the dtype of `out`. With ADDED, the result is added to `out`. With a `norm`, for one token
    in one part, x is replaced by its RMS norm times `norm`. The scale of the RMS norm is a factor of the result, known
    once all of x is read. With a `scale` [rows of weight], for one token, the weight is FP8, and each row of the result
    is multiplied by its scale. With a GROUP, `scale` [rows of weight / SCALE_ROWS, inputs / GROUP] is that of blocks.
    """
    if BLOCK_M > 1:
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
    begin = tl.program_id(1) * part_length
    wait_for_previous(DEPENDENT)
    if BLOCK_M == 1:
        # One token: sums stay separate by column until the end, so that the loop only multiplies and adds.
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        squares = tl.zeros([BLOCK_K], tl.float32)
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in tl.range(begin, tl.minimum(inputs, begin + part_length), BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)
        inside = k < inputs
        if EVEN:
            tile = tl.load(weight_at + k[None, :])
        else:
            tile = tl.load(weight_at + k[None, :], mask=inside[None, :], other=0.0)
        if BLOCK_M == 1:
            values = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
            if norm is not None:
                squares += values * values
                values *= tl.load(norm + k, mask=inside, other=0.0).to(tl.float32)
            if GROUP > 0:
                acc += (
                    block_scaled(tile, scale, row, first, inputs, SCALE_ROWS, GROUP, BLOCK_N, BLOCK_K) * values[None, :]
                )
            else:
                acc += tile.to(tl.float32) * values[None, :]
        else:
            held = (token < rows)[None, :] & inside[:, None]
            values = tl.load(x + token[None, :] * x_stride + k[:, None], mask=held, other=0.0)
            acc = tl.dot(tile, values, acc, input_precision="ieee")
    if BLOCK_M == 1:
        # Many small programs share a processor. If the next kernel could start at once, its programs would crowd onto
        # the processors that become free first.
        launch_dependents(DEPENDENT)
        result = tl.sum(acc, 1)[:, None]
        if norm is not None:
            result *= tl.rsqrt(tl.sum(squares, 0) / inputs + eps)
    else:
        result = acc
    if scale is not None and GROUP == 0:
        result *= tl.load(scale + row)[:, None]
    if bias is not None:
        result += tl.load(bias + row).to(tl.float32)[:, None]
    if GATED:
        if ROUNDED:
            result = result.to(out.dtype.element_ty).to(tl.float32)
        gate, up = tl.split(tl.permute(tl.reshape(result, (TAKEN, 2, BLOCK_M)), (0, 2, 1)))
        result = gate / (1.0 + tl.exp(-gate)) * up
    n = tl.program_id(0) * TAKEN + tl.arange(0, TAKEN)
    place = out + tl.program_id(1).to(tl.int64) * out_stride_part + token[None, :] * out_stride + n[:, None]
    written = (n < outputs)[:, None] & (token < rows)[None, :]
    if ADDED:
        result += tl.load(place, mask=written, other=0.0).to(tl.float32)
        # Several threads may hold the same element, and all must read it before one writes it.
        tl.debug_barrier()
    tl.store(place, result.to(out.dtype.element_ty), mask=written)
