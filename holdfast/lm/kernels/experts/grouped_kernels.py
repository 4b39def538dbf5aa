"""Experts for more tokens: pairs of a token and an expert are sorted by expert, and each expert's rows are tiles.

No count ever reaches the host: launches have room for the most tiles, and those that are not used end at once.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.lm.kernels.experts.gate import gated_product
from holdfast.lm.kernels.launch import launch_dependents, wait_for_previous


@triton.jit(do_not_specialize=["tokens"])
def route_kernel(
    x, router, bias, chosen, shares, divisors, counts, tokens, experts, inputs, x_stride,
    TOP_K: tl.constexpr, NORMALIZED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Choose experts: chosen and shares [T, TOP_K], divisors [T] of the shares. Program (BLOCK_T tokens).

    Each program writes how many pairs of its tokens each expert has to its row of counts [programs, experts].
    """
    launch_dependents(DEPENDENT)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    valid = token < tokens
    e = tl.arange(0, BLOCK_E)
    router_at = router + tl.minimum(e, experts - 1)[None, :] * inputs
    x_at = x + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * x_stride
    wait_for_previous(DEPENDENT)
    acc = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for first in tl.range(0, inputs, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)
        inside = k < inputs
        values = tl.load(x_at + k[None, :], mask=inside[None, :], other=0.0)
        tile = tl.load(router_at + k[:, None], mask=inside[:, None], other=0.0)
        acc = tl.dot(values, tile, acc, input_precision="ieee")
    if bias is not None:
        acc += tl.load(bias + e, mask=e < experts, other=0.0).to(tl.float32)[None, :]
    score = tl.where((e < experts)[None, :], acc, float("-inf"))
    top = tl.max(score, 1)
    divisor = tl.zeros([BLOCK_T], tl.float32)
    if not NORMALIZED:
        divisor = tl.sum(tl.exp(score - top[:, None]), 1)
    count = tl.zeros([BLOCK_E], tl.int32)
    for rank in tl.static_range(TOP_K):
        best, expert = tl.max(score, 1, return_indices=True)
        expert = tl.minimum(expert, experts - 1)  # whatever NaN leads to
        taken = e[None, :] == expert[:, None]
        score = tl.where(taken, float("-inf"), score)
        share = tl.exp(best - top)
        if NORMALIZED:
            divisor += share
        count += tl.sum((taken & valid[:, None]).to(tl.int32), 0)
        tl.store(chosen + token * TOP_K + rank, expert, mask=valid)
        tl.store(shares + token * TOP_K + rank, share, mask=valid)
    tl.store(divisors + token, divisor, mask=valid)
    tl.store(counts + tl.program_id(0) * experts + e, count, mask=e < experts)


@triton.jit(do_not_specialize=["tokens"])
def sort_kernel(
    chosen, counts, pairs, ends, tile_ends, tokens, experts,
    TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Sort pairs by expert, and within an expert by token: pairs [T * TOP_K]. Program (BLOCK_T tokens).

    `ends` [experts] is where each expert's pairs end, and `tile_ends` [experts] where its tiles of BLOCK_M pairs do.
    The programs are those of `route_kernel`.
    """
    launch_dependents(DEPENDENT)
    own = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    wait_for_previous(DEPENDENT)
    total = tl.zeros([BLOCK_E], tl.int32)
    before = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, tl.num_programs(0), 16):
        program = first + tl.arange(0, 16)
        held = (program < tl.num_programs(0))[:, None] & (e < experts)[None, :]
        count = tl.load(counts + program[:, None] * experts + e[None, :], mask=held, other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where((program < own)[:, None], count, 0), 0)
    end = tl.cumsum(total, 0)
    if own == 0:
        tl.store(ends + e, end, mask=e < experts)
        tl.store(tile_ends + e, tl.cumsum((total + BLOCK_M - 1) // BLOCK_M, 0), mask=e < experts)
    following = end - total + before  # where each expert's next pair goes
    for first in range(0, BLOCK_T * TOP_K, CHUNK):
        item = first + tl.arange(0, CHUNK)
        pair = own * BLOCK_T * TOP_K + item
        valid = (item < BLOCK_T * TOP_K) & (pair < tokens * TOP_K)
        expert = tl.load(chosen + pair, mask=valid, other=-1)
        hot = (expert[:, None] == e[None, :]).to(tl.int32)
        place = tl.sum(hot * (following[None, :] + tl.cumsum(hot, 0) - 1), 1)
        tl.store(pairs + place, pair, mask=valid)
        following += tl.sum(hot, 0)


@triton.jit(do_not_specialize=["tokens"])
def grouped_kernel(
    x, weight, bias, out, pairs, ends, tile_ends, shares, divisors, tokens, experts, outputs, inputs,
    x_stride, out_stride, alpha, limit,
    TOP_K: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A product of each pair with its expert. Program (BLOCK_M pairs of one expert and BLOCK_N outputs, these first).

    GATED: x is [T, inputs], weight [experts, 2 outputs, inputs], and out [T * TOP_K, outputs], gated, in the order of
    `pairs`. Else x is in this order, weight is [experts, outputs, inputs], and out [TOP_K, T, outputs] is by rank and
    token, times the pair's share.
    """
    launch_dependents(DEPENDENT)
    blocks = tl.cdiv(outputs, BLOCK_N)
    tile = tl.program_id(0) // blocks
    n = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the last one read it again. That costs nothing and needs no mask; nor do pairs past the last one.
    row = tl.minimum(n, outputs - 1)
    e = tl.arange(0, BLOCK_E)
    item = tl.arange(0, BLOCK_M)
    wait_for_previous(DEPENDENT)
    tile_end = tl.load(tile_ends + e, mask=e < experts, other=2147483647)
    expert = tl.sum((tile_end <= tile).to(tl.int32), 0)
    if expert >= experts:
        return
    tiles_before = tl.max(tl.where(tile_end <= tile, tile_end, 0), 0)
    stop = tl.load(ends + expert)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    place = start + (tile - tiles_before) * BLOCK_M + item
    pair = tl.load(pairs + tl.minimum(place, stop - 1))
    source = pair // TOP_K if GATED else tl.minimum(place, stop - 1)
    x_at = x + source.to(tl.int64)[None, :] * x_stride
    ROWS: tl.constexpr = 2 if GATED else 1
    first_row = expert.to(tl.int64) * ROWS * outputs
    weight_at = weight + (first_row + row)[:, None] * inputs
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = acc
    for first in tl.range(0, inputs, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)
        inside = k < inputs
        if EVEN:
            values = tl.load(x_at + k[:, None])
            tile_a = tl.load(weight_at + k[None, :])
        else:
            values = tl.load(x_at + k[:, None], mask=inside[:, None], other=0.0)
            tile_a = tl.load(weight_at + k[None, :], mask=inside[None, :], other=0.0)
        acc = tl.dot(tile_a, values, acc, input_precision="ieee")
        if GATED:
            if EVEN:
                tile_b = tl.load(weight_at + outputs * inputs + k[None, :])
            else:
                tile_b = tl.load(weight_at + outputs * inputs + k[None, :], mask=inside[None, :], other=0.0)
            up = tl.dot(tile_b, values, up, input_precision="ieee")
    if bias is not None:
        acc += tl.load(bias + first_row + row).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + first_row + outputs + row).to(tl.float32)[:, None]
    if GATED:
        acc = gated_product(acc, up, alpha, limit, CLAMPED)
        target = place.to(tl.int64)
    else:
        acc *= (tl.load(shares + pair) / tl.load(divisors + pair // TOP_K))[None, :]
        target = (pair % TOP_K).to(tl.int64) * tokens + pair // TOP_K
    written = (n < outputs)[:, None] & (place < stop)[None, :]
    tl.store(out + target[None, :] * out_stride + n[:, None], acc.to(out.dtype.element_ty), mask=written)
