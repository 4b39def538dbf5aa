"""The experts of a layer on CUDA: the choice of kernels by the number of tokens, and their launches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from holdfast.lm.kernels.launch import dependent_launch_options
from holdfast.lm.kernels.linear.experts.experts import ExpertRule, Experts
from holdfast.lm.kernels.linear.experts.few_kernels import down_few_kernel, gate_few_kernel, router_kernel
from holdfast.lm.kernels.linear.experts.grouped_kernels import grouped_kernel, route_kernel, sort_kernel
from holdfast.lm.kernels.linear.packed_tile import packed_constants
from holdfast.lm.kernels.linear.skinny_gemm import MAX_PARTS, SkinnyLaunch, skinny_gemm
from holdfast.lm.kernels.mxfp4 import BLOCK, ExpertWeights, Mxfp4Matrices
from holdfast.lm.kernels.packed import PackedWeight

FEW_TOKENS = 4
"""Largest number of tokens for which each pair of a token and an expert reads the expert's weights separately."""

FEW_TOKENS_PACKED = 1
"""Largest such number of tokens for MXFP4 weights, which tensor cores compute with fewer instructions."""

SKINNY_TOKENS = 128
"""Largest number of 16-bit tokens for which a skinny GEMM computes the router's logits in parts."""

ONE_PROGRAM = 32
"""Largest number of tokens for which one program chooses experts and sorts pairs."""

ROUTED_AT_A_TIME = ((512, 16), (1 << 30, 32))
"""Number of tokens for which one program chooses experts, by the largest number of tokens in the step."""


@dataclass(frozen=True, slots=True)
class ExpertLaunch:
    """Launch settings of one product."""

    block_n: int
    """Number of rows of weights per program."""
    block_k: int
    """Largest number of inputs per iteration of a program."""
    num_warps: int
    num_stages: int

    def options(self, inputs: int, *, packed: bool = False) -> dict[str, int]:
        """The constants that a kernel is compiled for, for this number of inputs, of weights that may be MXFP4."""
        # Rows of MXFP4 are a quarter as long, so reading many inputs at a time matters more than a full last block.
        block_k = _covering(inputs, max(BLOCK, self.block_k)) if packed else _block(inputs, self.block_k)
        return dict(
            BLOCK_N=self.block_n,
            BLOCK_K=block_k,
            EVEN=inputs % block_k == 0,
            STAGES=self.num_stages,
            num_warps=self.num_warps,
        )


@dataclass(frozen=True, slots=True)
class GroupedLaunch:
    """Launch settings of the grouped products."""

    block_m: int
    """Number of pairs in a tile."""
    gate: ExpertLaunch
    """The launch of the first product. Its block_n counts outputs; each output reads two rows, of gate and of up.

    Without a gate, it reads one."""
    down: ExpertLaunch
    halved: bool = False
    """Whether an expert's last tile may be half a tile."""


ROUTER = ExpertLaunch(block_n=2, block_k=1024, num_warps=4, num_stages=2)
GATE_FEW = ExpertLaunch(block_n=16, block_k=256, num_warps=4, num_stages=4)
DOWN_FEW = ExpertLaunch(block_n=8, block_k=128, num_warps=4, num_stages=3)
ROUTER_PARTS = SkinnyLaunch(block_n=16, block_k=128, num_warps=4, num_stages=3)

GROUPED = (
    (10, GroupedLaunch(16, ExpertLaunch(64, 128, 4, 3), ExpertLaunch(128, 128, 8, 3))),
    (20, GroupedLaunch(32, ExpertLaunch(128, 64, 8, 4), ExpertLaunch(128, 128, 4, 3))),
    (48, GroupedLaunch(64, ExpertLaunch(128, 64, 8, 4), ExpertLaunch(128, 64, 8, 4))),
    (1 << 30, GroupedLaunch(128, ExpertLaunch(128, 64, 8, 4), ExpertLaunch(256, 64, 8, 3), halved=True)),
)
"""The launch of the grouped products, by the largest mean number of pairs per expert.

Tuned on an H200 (benchmarks/engine/experts_gpu.py --tune).
"""

FIXED = GroupedLaunch(32, ExpertLaunch(128, 64, 8, 3), ExpertLaunch(128, 64, 8, 3))
"""The launch of the grouped products where a token's bits must not depend on the step."""
FIXED_ROUTED_AT_A_TIME = 16
"""Number of tokens for which one program chooses experts there."""

GROUPED_PACKED = (
    (0.05, GroupedLaunch(16, ExpertLaunch(32, 128, 4, 5), ExpertLaunch(32, 256, 4, 3))),
    (10, GroupedLaunch(16, ExpertLaunch(128, 64, 4, 4), ExpertLaunch(128, 64, 4, 4))),
    (20, GroupedLaunch(32, ExpertLaunch(128, 64, 8, 4), ExpertLaunch(128, 64, 4, 4))),
    *GROUPED[2:],
)
"""The launch of the grouped products of MXFP4 weights, by the largest mean number of pairs per expert."""


def reads_by_pair(tokens: int, experts: Experts) -> bool:
    """Whether each pair of a token and an expert reads the expert's weights separately, in a step of `tokens`."""
    return tokens <= (FEW_TOKENS_PACKED if isinstance(experts.down, Mxfp4Matrices) else FEW_TOKENS)


def grouped_launch_for(tokens: int, experts: Experts) -> GroupedLaunch:
    """The launch for this number of tokens and form of weights."""
    mean = tokens * experts.rule.per_token / experts.down.shape[0]
    rule = GROUPED_PACKED if isinstance(experts.down, Mxfp4Matrices) else GROUPED
    return next(launch for most, launch in rule if mean <= most)


def experts_of_few(
    x: torch.Tensor,
    experts: Experts,
    out: torch.Tensor,
    *,
    added: bool,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    launches: tuple[ExpertLaunch, ExpertLaunch, ExpertLaunch] = (ROUTER, GATE_FEW, DOWN_FEW),
) -> None:
    """Compute the weighted sum of the outputs of each token's experts, and write it to out [T, hidden].

    With `added`, the sum is added to `out` instead. With `norm` [hidden], the router and the experts read the RMS norm
    of x [T, hidden] (with `eps`) times `norm`, without rounding, instead of x.
    """
    rule, device = experts.rule, x.device
    tokens, hidden = x.shape
    count, inner = len(experts.router), experts.down.shape[2]
    pairs = tokens * rule.per_token
    pdl = dependent_launch_options(device)
    router, gate, down = launches
    gate_up, down_weight = _stored(experts.gate_up), _stored(experts.down)
    logits, shares = (torch.empty(size, dtype=torch.float32, device=device) for size in (tokens * count, pairs))
    chosen = torch.empty(pairs, dtype=torch.int32, device=device)
    between = torch.empty(pairs, inner, dtype=torch.float32, device=device)
    router_kernel[(triton.cdiv(count, router.block_n), tokens)](
        x, norm, experts.router, experts.router_bias, logits, count, hidden, x.stride(0), eps,
        **router.options(hidden), **pdl,
    )  # fmt: skip
    gate_few_kernel[(triton.cdiv(inner, gate.block_n // (1 + rule.gated)), pairs)](
        logits, experts.correction, x, norm, *gate_up, experts.gate_up_bias, between, chosen, shares,
        count, inner, hidden, x.stride(0), eps, *_clamp(rule), rule.jitter or 0.0,
        **_shares(experts), GATED=rule.gated, CLAMPED=rule.clamp is not None, GELU=rule.activation != "silu",
        **_form(experts.gate_up),
        BLOCK_E=triton.next_power_of_2(count), **gate.options(hidden, packed=_is_packed(experts.gate_up)), **pdl,
    )  # fmt: skip
    block_r = triton.next_power_of_2(rule.per_token)
    options = down.options(inner, packed=_is_packed(experts.down))
    options["EVEN"] = options["EVEN"] and block_r == rule.per_token
    down_few_kernel[(triton.cdiv(hidden, down.block_n), tokens)](
        between, *down_weight, experts.down_bias, chosen, shares, out, inner, hidden, out.stride(0), rule.factor,
        TOP_K=rule.per_token, NORMALIZED=rule.normalized, ADDED=added, BLOCK_R=block_r,
        **_form(experts.down), **options, **pdl,
    )  # fmt: skip


def grouped_experts(x: torch.Tensor, experts: Experts, launch: GroupedLaunch | None = None) -> torch.Tensor:
    """The outputs of each token's experts times their shares, [per_token, T, hidden], of x [T, hidden]."""
    launch = launch or grouped_launch_for(len(x), experts)
    return _outputs(x, experts, sort_pairs(x, experts, launch.block_m), launch)


def fixed_experts(x: torch.Tensor, experts: Experts, logits: torch.Tensor) -> torch.Tensor:
    """`grouped_experts` with the same bits for a token in any step.

    `logits` [parts, T, E] float32 are those of the router without its bias, as parts to be added, whose bits do not
    depend on the step either. All launches have one size of tiles. A token's place in a tile decides nothing: each of
    its sums is a column of a product, or a row of its own.
    """
    if not len(x):
        return x.new_empty(experts.rule.per_token, *x.shape)
    sorting = _sorted_by(logits, experts, FIXED.block_m, single=False, block_t=FIXED_ROUTED_AT_A_TIME, num_warps=4)
    return _outputs(x, experts, sorting, FIXED)


def _outputs(x: torch.Tensor, experts: Experts, sorting: Sorting, launch: GroupedLaunch) -> torch.Tensor:
    """The outputs of sorted pairs, [per_token, T, hidden]."""
    between = grouped_gate(x, experts, sorting, launch)
    return grouped_down(between, experts, sorting, launch, x.new_empty(experts.rule.per_token, *x.shape))


@dataclass(frozen=True, slots=True)
class Sorting:
    """The pairs of a step, sorted by expert."""

    pairs: torch.Tensor  # [T per_token] int32: token * per_token + rank
    ends: torch.Tensor  # [E] int32: the end of each expert's pairs
    tile_ends: torch.Tensor  # [E] int32: the end of each expert's tiles
    shares: torch.Tensor  # [T, per_token] float32, not yet divided by `divisors`
    divisors: torch.Tensor  # [T] float32
    most_tiles: int
    """An upper bound on the number of tiles, for any choice of experts."""


def router_logits(x: torch.Tensor, experts: Experts) -> torch.Tensor:
    """The router's logits of x [T, hidden] without its bias, as parts to be added: [parts, T, E] float32."""
    count, tokens = len(experts.router), len(x)
    if tokens <= (SKINNY_TOKENS if x.element_size() == 2 else ONE_PROGRAM):
        parts = max(1, min(MAX_PARTS, x.shape[1] // (2 * ROUTER_PARTS.block_k)))
        out = torch.empty(parts, tokens, count, dtype=torch.float32, device=x.device)
        skinny_gemm(x, experts.router, None, out, replace(ROUTER_PARTS, parts=parts))
        return out
    if x.dtype == torch.float32:
        return torch.mm(x, experts.router.t())[None]
    return torch.mm(x, experts.router.t(), out_dtype=torch.float32)[None]


def sort_pairs(x: torch.Tensor, experts: Experts, block_m: int) -> Sorting:
    """Choose the experts of x [T, hidden], and sort the pairs into tiles of `block_m`."""
    tokens = len(x)
    single = tokens <= ONE_PROGRAM
    at_a_time = next(size for most, size in ROUTED_AT_A_TIME if tokens <= most)
    block_t = max(2, triton.next_power_of_2(tokens)) if single else at_a_time
    num_warps = 8 if block_t > 16 else 4
    return _sorted_by(router_logits(x, experts), experts, block_m, single=single, block_t=block_t, num_warps=num_warps)


def _sorted_by(
    logits: torch.Tensor, experts: Experts, block_m: int, *, single: bool, block_t: int, num_warps: int
) -> Sorting:
    """`sort_pairs` by logits [parts, T, E]. `block_t` is the number of tokens of a program; `single`: there is one."""
    rule, device, tokens = experts.rule, logits.device, logits.shape[1]
    count, pairs = experts.down.shape[0], tokens * rule.per_token
    programs = triton.cdiv(tokens, block_t)
    block_e = triton.next_power_of_2(count)
    pdl = dependent_launch_options(device)
    shares, divisors = (torch.empty(size, dtype=torch.float32, device=device) for size in (pairs, tokens))
    chosen, order, counts, ends, tile_ends = (
        torch.empty(size, dtype=torch.int32, device=device) for size in (pairs, pairs, programs * count, count, count)
    )
    route_kernel[(programs,)](
        logits, experts.router_bias, experts.correction, chosen, shares, divisors, counts, order, ends, tile_ends,
        tokens, count - rule.shared, rule.jitter or 0.0, rule.factor,
        PARTS=len(logits), **_shares(experts), SINGLE=single, BLOCK_T=block_t,
        BLOCK_E=block_e, BLOCK_M=block_m, num_warps=num_warps, **pdl,
    )  # fmt: skip
    if not single:
        sort_kernel[(programs,)](
            chosen, counts, order, ends, tile_ends, tokens, count,
            TOP_K=rule.per_token, BLOCK_T=block_t, BLOCK_E=block_e, BLOCK_M=block_m, num_warps=4, **pdl,
        )  # fmt: skip
    return Sorting(order, ends, tile_ends, shares, divisors, min(pairs, pairs // block_m + count))


def grouped_gate(x: torch.Tensor, experts: Experts, sorting: Sorting, launch: GroupedLaunch) -> torch.Tensor:
    """The input of the second product of each pair's expert: [T per_token, inner], in sorted order."""
    inner = experts.down.shape[2]
    out = x.new_empty(len(sorting.pairs), inner)
    _grouped(x, experts, sorting, launch, experts.gate_up, experts.gate_up_bias, out, first=True)
    return out


def grouped_down(
    x: torch.Tensor, experts: Experts, sorting: Sorting, launch: GroupedLaunch, out: torch.Tensor
) -> torch.Tensor:
    """The second product, times the pairs' shares, of x [T per_token, inner], sorted: out [per_token, T, hidden]."""
    _grouped(x, experts, sorting, launch, experts.down, experts.down_bias, out, first=False)
    return out


def _grouped(
    x: torch.Tensor,
    experts: Experts,
    sorting: Sorting,
    launch: GroupedLaunch,
    weights: ExpertWeights,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    first: bool,
) -> None:
    """One of the two products of each pair with its expert."""
    rule = experts.rule
    gated = first and rule.gated
    count, rows, inputs = weights.shape
    outputs = rows // 2 if gated else rows
    own = launch.gate if first else launch.down
    if x.element_size() > 2:  # float32 takes twice the shared memory
        own = replace(own, block_k=own.block_k // 2)
    grouped_kernel[(triton.cdiv(outputs, own.block_n) * sorting.most_tiles,)](
        x, *_stored(weights), bias, out, sorting.pairs, sorting.ends, sorting.tile_ends, sorting.shares,
        sorting.divisors, len(sorting.divisors), count, outputs, inputs, x.stride(0), out.stride(-2), *_clamp(rule),
        TOP_K=rule.per_token, FIRST=first, GATED=gated, SCALED=rule.scales_input, CLAMPED=rule.clamp is not None,
        GELU=rule.activation != "silu",
        BLOCK_E=triton.next_power_of_2(count), HALVED=launch.halved, BLOCK_M=launch.block_m,
        **_form(weights), **own.options(inputs, packed=_is_packed(weights)), **dependent_launch_options(x.device),
    )  # fmt: skip


def _stored(weights: ExpertWeights) -> tuple[torch.Tensor | None, ...]:
    """The tensors that a kernel reads: the numbers, their scales, and the two more that a `PackedWeight` may have."""
    if isinstance(weights, PackedWeight):
        return weights.data, weights.factors, weights.extra, weights.unit
    if isinstance(weights, Mxfp4Matrices):
        return weights.data, weights.scale, None, None
    return weights, None, None, None


def _form(weights: ExpertWeights) -> dict[str, int]:
    """The constants of kernels for the form of the weights."""
    if isinstance(weights, PackedWeight):
        return packed_constants(weights)
    return dict(FORM=0, GROUP=1, SCALE_ROWS=1)


def _is_packed(weights: ExpertWeights) -> bool:
    return not isinstance(weights, torch.Tensor)


def _shares(experts: Experts) -> dict[str, int]:
    """The constants of kernels that choose experts and compute their shares."""
    rule, groups = experts.rule, experts.rule.groups
    return dict(
        RANKED=rule.sigmoid or groups.count > 1 or experts.correction is not None,
        SIGMOID=rule.sigmoid,
        GROUPS=groups.count,
        KEPT=groups.kept,
        BEST=groups.best,
        TOP_K=rule.per_token,
        NORMALIZED=rule.normalized,
        MIXED=rule.jitter is not None,
        SCALED=rule.scales_input,
        SHARED=int(rule.shared),
    )


def _clamp(rule: ExpertRule) -> tuple[float, float]:
    return rule.clamp or (0.0, 0.0)


def _block(inputs: int, most: int) -> int:
    """The largest power of two up to `most` that divides the inputs, if it is at least 64.

    Otherwise `most`, or a smaller power of two that covers the inputs.
    """
    block = most
    while block > 64 and inputs % block:
        block //= 2
    if inputs % block == 0:
        return block
    return _covering(inputs, most)


def _covering(inputs: int, most: int) -> int:
    """`most`, or a smaller power of two that covers the inputs."""
    return min(most, int(triton.next_power_of_2(inputs)))
