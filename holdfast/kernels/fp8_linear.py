"""Products with FP8 weights on CUDA: how they are streamed for a few tokens, and FP8 tensor cores for more."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch.nn import functional
from torch.nn.functional import ScalingType

from holdfast.kernels.chain import chaining, follow, release
from holdfast.kernels.fp8 import FP8, LARGEST, Fp8Weight
from holdfast.kernels.thin_linear import (
    FEW,
    LEAST_ROW_BYTES,
    MANY_OUTPUTS,
    MAX_PARTS,
    MAX_ROWS,
    PART_INPUTS,
    PROGRAMS,
    ThinLaunch,
)

TILE = 16
"""Inputs and outputs of a product on FP8 tensor cores are multiples of this."""

ONE_TOKEN = ThinLaunch(block_n=16, block_k=512, num_warps=8, num_stages=4)
ONE_TOKEN_DEEP = ThinLaunch(block_n=8, block_k=1024, num_warps=4, num_stages=3)
ONE_TOKEN_SHORT = ThinLaunch(block_n=4, block_k=1024, num_warps=4, num_stages=3)
FEW_TOKENS = ThinLaunch(block_n=64, block_k=128, num_warps=4, num_stages=6)
MORE_TOKENS = ThinLaunch(block_n=128, block_k=128, num_warps=8, num_stages=4)


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Activations [T, K] as `data` times `scale`, token by token."""

    data: torch.Tensor  # [T, K] float8_e4m3fn
    scale: torch.Tensor  # [T] float32

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The activations that the numbers stand for."""
        return (self.data.float() * self.scale[:, None]).to(dtype)


def fp8_launch_for(x: torch.Tensor, weight: Fp8Weight, *, cut: bool = False) -> ThinLaunch | None:
    """How `thin_linear` runs x [T, K] times an FP8 weight [N, K]; None where it is not the better way.

    `cut` says that the caller adds up partial sums at no cost of its own. Tuned on an H200 (benchmarks/gemv_gpu.py).
    """
    rows, inputs = x.shape
    fits = 0 < rows <= MAX_ROWS and x.stride(1) == 1
    if not fits or x.element_size() != 2 or inputs * x.element_size() < LEAST_ROW_BYTES:
        return None
    outputs = weight.shape[0]
    if rows == 1:
        if cut and inputs <= PART_INPUTS:
            return ONE_TOKEN_SHORT
        return ONE_TOKEN_DEEP if cut or outputs >= MANY_OUTPUTS else ONE_TOKEN
    own = FEW_TOKENS if rows <= FEW else MORE_TOKENS
    if not cut:
        return own
    programs = -(-outputs // own.block_n)
    wanted = max(round(PROGRAMS / programs), -(-inputs // PART_INPUTS))
    return replace(own, parts=max(1, min(MAX_PARTS, wanted, inputs // (4 * own.block_k))))


def has_tiles(x: torch.Tensor, weight: Fp8Weight) -> bool:
    """Whether FP8 tensor cores take a product: of many tokens, in tiles, of activations that are rounded anyway."""
    outputs, inputs = weight.shape
    return len(x) > MAX_ROWS and x.element_size() == 2 and outputs % TILE == 0 and inputs % TILE == 0


def quantize_rows(x: torch.Tensor, *, gated: bool = False) -> Fp8Rows:
    """x [T, K] in FP8, where each token's largest number becomes LARGEST. `gated`: silu(gate) * up of x [T, 2 K]."""
    tokens, width = x.shape[0], x.shape[1] // (2 if gated else 1)
    data = torch.empty(tokens, width, dtype=FP8, device=x.device)
    scale = torch.empty(tokens, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    quantize_rows_kernel[(tokens,)](
        x,
        data,
        scale,
        width,
        x.stride(0),
        GATED=gated,
        LARGEST=LARGEST,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
        **chaining(x.device),
    )
    return Fp8Rows(data, scale)


def tiled_product(x: Fp8Rows, weight: Fp8Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias, as [T, N] of `dtype`; both multiplied as FP8.

    PyTorch's product, scaled by tokens and outputs, summed fast and rounded to bfloat16, which is all that it offers.
    """
    out = functional.scaled_mm(
        x.data,
        weight.data.t(),
        x.scale[:, None],
        ScalingType.RowWise,
        weight.scale[None, :],
        ScalingType.RowWise,
        output_dtype=torch.bfloat16,
        use_fast_accum=True,
    ).to(dtype)
    return out if bias is None else out.add_(bias)


@triton.jit
def quantize_rows_kernel(
    x,
    data,
    scale,
    width,
    x_stride,
    GATED: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """FP8 numbers of one token, and the scale that they share: program (token)."""
    release(CHAINED)
    follow(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    held = at < width
    value = tl.load(x + token * x_stride + at, mask=held, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x + token * x_stride + width + at, mask=held, other=0.0).to(tl.float32)
        value = value / (1.0 + tl.exp(-value)) * up
    # A token of zeros has no scale of its own; the least normal number keeps the quotients finite.
    factor = tl.maximum(tl.max(tl.abs(value), 0) / LARGEST, 1.1754944e-38)
    rounded = tl.clamp(value / factor, -LARGEST, LARGEST)
    tl.store(data + token * width + at, rounded.to(data.dtype.element_ty), mask=held)
    tl.store(scale + token, factor)
