"""GEMMs with FP8 weights that have a scale for each block, on FP8 tensor cores.

Up to 64 tokens the kernels of `skinny_gemm` and `fp8_linear` read the weights, and activations keep their bits. With
more tokens, each token's activations are rounded to FP8 with one scale for a group of inputs, as DeepSeek-V3 computes
(arXiv 2412.19437, §3.3.2). Products of a group are added to the sum in float32, after both scales.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from holdfast.lm.kernels.fp8 import FP8, LARGEST, Fp8BlockWeight
from holdfast.lm.kernels.fp8_conversion import round_to_fp8
from holdfast.lm.kernels.launch import dependent_launch_options, launch_dependents, wait_for_previous
from holdfast.lm.kernels.linear.fp8_linear import fp8_launch_for
from holdfast.lm.kernels.linear.skinny_gemm import MAX_ROWS, SkinnyLaunch

MOST_STAGES = 6
"""Largest number of stages of a skinny GEMM whose iterations take one block of inputs."""
QUANTIZED_AT_A_TIME = 1024
"""Number of activations that one program rounds."""


@dataclass(frozen=True, slots=True)
class TiledLaunch:
    """Launch settings of the GEMM for many tokens. An iteration takes one group of inputs."""

    block_m: int
    """Number of tokens of a tile."""
    block_n: int
    """Number of outputs of a tile."""
    num_warps: int
    num_stages: int
    tall: int
    """Number of tiles of tokens that are computed next to each other, so that they find the same weights in L2."""


TILED = ((512, TiledLaunch(64, 128, 4, 4, 8)), (1 << 30, TiledLaunch(128, 128, 8, 4, 16)))
"""The launch of the GEMM, by the largest number of tokens. Not tuned yet."""


@dataclass(frozen=True, slots=True)
class Fp8Groups:
    """Activations [T, K] in FP8, with a scale for each token and group of inputs."""

    data: torch.Tensor  # [T, K] float8_e4m3fn
    scale: torch.Tensor  # [K / group, T] float32
    group: int


def block_launch_for(x: torch.Tensor, weight: Fp8BlockWeight, *, cut: bool = False) -> SkinnyLaunch | None:
    """`fp8_launch_for` a weight in blocks. For several tokens, an iteration takes one block of inputs."""
    launch = fp8_launch_for(x, weight, cut=cut)
    if launch is None or len(x) == 1:
        return launch
    stages = min(MOST_STAGES, launch.num_stages * max(1, launch.block_k // weight.group))
    return replace(launch, block_k=weight.group, num_stages=stages)


def takes_groups(x: torch.Tensor) -> bool:
    """Whether `fp8_block_gemm` computes the products of x [T, K]: many tokens, of 16 bits."""
    return len(x) > MAX_ROWS and x.element_size() == 2


def quantize_groups(x: torch.Tensor, group: int) -> Fp8Groups:
    """Round x [T, K] to FP8. The largest magnitude of each token's group becomes LARGEST."""
    tokens, width = x.shape
    data = torch.empty(tokens, width, dtype=FP8, device=x.device)
    scale = torch.empty(width // group, tokens, dtype=torch.float32, device=x.device)
    groups = min(max(1, QUANTIZED_AT_A_TIME // group), triton.next_power_of_2(width // group))
    quantize_groups_kernel[(tokens, triton.cdiv(width // group, groups))](
        x, data, scale, tokens, width // group, x.stride(0),
        LARGEST=LARGEST, GROUPS=groups, GROUP=group, num_warps=4, **dependent_launch_options(x.device),
    )  # fmt: skip
    return Fp8Groups(data, scale, group)


def fp8_block_gemm(
    x: Fp8Groups,
    weight: Fp8BlockWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    launch: TiledLaunch | None = None,
) -> torch.Tensor:
    """Return x [T, K] times the transpose of weight [N, K], plus bias, as [T, N] of `dtype`.

    x has the weight's groups.
    """
    (tokens, inputs), outputs = x.data.shape, weight.shape[0]
    launch = launch or next(each for most, each in TILED if tokens <= most)
    out = torch.empty(tokens, outputs, dtype=dtype, device=x.data.device)
    tiles = triton.cdiv(tokens, launch.block_m) * triton.cdiv(outputs, launch.block_n)
    fp8_block_gemm_kernel[(tiles,)](
        x.data, x.scale, weight.data, weight.scale, bias, out, tokens, outputs, inputs,
        SCALE_ROWS=weight.rows, GROUP=weight.group, BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, TALL=launch.tall,
        STAGES=launch.num_stages, num_warps=launch.num_warps, **dependent_launch_options(out.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens"])
def quantize_groups_kernel(
    x, data, scale, tokens, groups, x_stride,
    LARGEST: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Round groups of one token's numbers. Program (token, GROUPS groups).

    A group's scale is NaN if any of its numbers is not finite.
    """
    launch_dependents(DEPENDENT)
    wait_for_previous(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    held = group < groups
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = tl.load(x + token * x_stride + at, mask=held[:, None], other=0.0).to(tl.float32)
    poison = tl.sum(value * 0.0, 1)
    # For a group of zeros the scale is the smallest normal number, which keeps the quotients finite.
    factor = tl.maximum(tl.max(tl.abs(value), 1) / LARGEST, 1.1754944e-38)
    rounded = round_to_fp8(tl.clamp(value / factor[:, None], -LARGEST, LARGEST))
    tl.store(data + token * groups * GROUP + at, rounded.to(data.dtype.element_ty), mask=held[:, None])
    tl.store(scale + group.to(tl.int64) * tokens + token, factor + poison, mask=held)


@triton.jit(do_not_specialize=["tokens"])
def fp8_block_gemm_kernel(
    x, x_scale, weight, scale, bias, out, tokens, outputs, inputs,
    SCALE_ROWS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TALL: tl.constexpr,
    STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """x [tokens, inputs] times weight [outputs, inputs] transposed. Program (tile of BLOCK_M tokens, BLOCK_N outputs).

    x_scale is [inputs / GROUP, tokens], and scale [outputs / SCALE_ROWS, inputs / GROUP]. Tiles go along TALL tiles of
    tokens first, then along the outputs.
    """
    launch_dependents(DEPENDENT)
    down, across = tl.cdiv(tokens, BLOCK_M), tl.cdiv(outputs, BLOCK_N)
    tile = tl.program_id(0)
    first = tile // (TALL * across) * TALL
    height = tl.minimum(down - first, TALL)
    within = tile % (TALL * across)
    place = (first + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    # Tokens and outputs after the last one read it again, which costs nothing and needs no mask.
    token, row = tl.minimum(place, tokens - 1), tl.minimum(n, outputs - 1)
    k = tl.arange(0, GROUP)
    x_at = x + token.to(tl.int64)[:, None] * inputs + k[None, :]
    weight_at = weight + row.to(tl.int64)[None, :] * inputs + k[:, None]
    scale_at = scale + row // SCALE_ROWS * (inputs // GROUP)
    wait_for_previous(DEPENDENT)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in tl.range(0, inputs // GROUP, num_stages=STAGES):
        values = tl.load(x_at + group * GROUP)
        numbers = tl.load(weight_at + group * GROUP)
        factor = tl.load(x_scale + group * tokens + token)
        acc += tl.dot(values, numbers) * factor[:, None] * tl.load(scale_at + group)[None, :]
    if bias is not None:
        acc += tl.load(bias + row).to(tl.float32)[None, :]
    written = (place < tokens)[:, None] & (n < outputs)[None, :]
    target = out + place.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=written)
