"""Linear layers for a few tokens, bound by the weights' way from memory: when Triton's kernel runs, and how."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from holdfast.lm.kernels.dependent_launch import chaining
from holdfast.lm.kernels.linear.fp8 import Fp8Weight, Weight
from holdfast.lm.kernels.linear.fused_kernels import thin_linear_kernel

MAX_ROWS = 64
"""Tokens up to which the kernel streams weights faster than cuBLAS; beyond them, products become worth their tiles."""

LEAST_ROW_BYTES = 512
"""A row of weights shorter than this does not fill the loop."""


@dataclass(frozen=True)
class ThinLaunch:
    """How one product is launched."""

    block_n: int
    """Rows of weights that a program takes."""
    block_k: int
    """Inputs that it takes at a time."""
    num_warps: int
    num_stages: int
    parts: int = 1
    """Pieces the inputs are cut into; their sums are added later, in order."""

    def grid(self, weight_rows: int) -> tuple[int, int]:
        """Programs by rows of weights and by parts."""
        return -(-weight_rows // self.block_n), self.parts

    def part_length(self, inputs: int) -> int:
        """Inputs of a part: whole blocks."""
        blocks = -(-inputs // self.block_k)
        return -(-blocks // self.parts) * self.block_k

    def options(self, inputs: int) -> dict[str, int]:
        """What the kernel is compiled for."""
        return dict(
            BLOCK_N=self.block_n,
            BLOCK_K=self.block_k,
            EVEN=inputs % self.block_k == 0,
            STAGES=self.num_stages,
            num_warps=self.num_warps,
        )


ONE_TOKEN = ThinLaunch(block_n=16, block_k=256, num_warps=4, num_stages=4)
ONE_TOKEN_DEEP = ThinLaunch(block_n=8, block_k=512, num_warps=4, num_stages=3)
ONE_TOKEN_SHORT = ThinLaunch(block_n=4, block_k=1024, num_warps=4, num_stages=3)
FEW_TOKENS = ThinLaunch(block_n=64, block_k=128, num_warps=4, num_stages=4)
FEW_TOKENS_DEEP = ThinLaunch(block_n=64, block_k=128, num_warps=4, num_stages=6)
MORE_TOKENS = ThinLaunch(block_n=128, block_k=128, num_warps=8, num_stages=4)
MORE_TOKENS_CUT = ThinLaunch(block_n=128, block_k=64, num_warps=4, num_stages=6)

FEW = 32
"""Tokens up to which tiles of 64 rows of weights are best."""

MANY_OUTPUTS = 16_384
"""From here on there are programs enough to fill the device without cutting, or more than one to a processor."""

PROGRAMS = 128
"""Where a product may be cut over its inputs, it is cut until there are about so many programs."""
PART_INPUTS = 4096
"""And until no program has more than so many inputs to read, for the processors to end together."""
MAX_PARTS = 8


def launch_for(x: torch.Tensor, weight: torch.Tensor, *, cut: bool = False) -> ThinLaunch | None:
    """The launch for x [T, K] and weight [N, K]; None where the library's product is better, or the only exact one.

    `cut` says that the caller adds up partial sums at no cost of its own. Tuned on an H200 (benchmarks/gemv_gpu.py).
    """
    rows, inputs = x.shape
    fits = 0 < rows <= MAX_ROWS and weight.stride(1) == 1 and x.stride(1) == 1
    if not fits or x.element_size() != 2 or inputs * x.element_size() < LEAST_ROW_BYTES:
        return None
    outputs = weight.shape[0]
    if rows == 1:
        if cut and inputs <= PART_INPUTS:
            return ONE_TOKEN_SHORT
        return ONE_TOKEN_DEEP if cut or outputs >= MANY_OUTPUTS else ONE_TOKEN
    if not cut and rows > FEW:
        return MORE_TOKENS if outputs >= MANY_OUTPUTS else None
    if not cut:
        return FEW_TOKENS if outputs >= MANY_OUTPUTS else FEW_TOKENS_DEEP
    own = FEW_TOKENS_DEEP if rows <= FEW else MORE_TOKENS_CUT
    programs = -(-outputs // own.block_n)
    wanted = max(round(PROGRAMS / programs), -(-inputs // PART_INPUTS))
    return replace(own, parts=max(1, min(MAX_PARTS, wanted, inputs // (4 * own.block_k))))


def thin_linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    launch: ThinLaunch,
    *,
    gated: bool = False,
    added: bool = False,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Put x [T, K] times weight [N, K] transposed, plus bias, into out [parts, T, N] of any float type.

    With parts above 1 each holds the sum over its piece of the inputs, and bias must be None. `gated`: weight and
    bias have 2 N rows, gate over up, and out is silu(gate) * up. `added`: the result is added to out, in one part.
    With `norm` [K], for one token in one part, x is replaced by its RMS norm (with eps) times norm, not rounded. An
    FP8 weight is for one token, too; `fp8_linear` has more.
    """
    data, scale = (weight.data, weight.scale) if isinstance(weight, Fp8Weight) else (weight, None)
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    thin_linear_kernel[launch.grid(weight.shape[0])](
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
        BLOCK_M=1 if rows == 1 else max(16, triton.next_power_of_2(rows)),
        **launch.options(inputs),
        **chaining(x.device),
    )
