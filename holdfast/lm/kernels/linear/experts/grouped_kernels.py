"""Experts for more tokens: pairs of a token and an expert are sorted by expert, and each expert's rows form tiles.

No count ever reaches the host. A launch has room for the largest possible number of tiles, and unused programs end at
once.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.lm.kernels.launch import launch_dependents, wait_for_previous
from holdfast.lm.kernels.linear.experts.gate import comparable, gated_product, mixer_share, ranked, squared_relu
from holdfast.lm.kernels.linear.experts.mxfp4_tile import mxfp4_tile, packed_dot
from holdfast.lm.kernels.linear.packed_tile import packed_tile


@triton.jit(do_not_specialize=["tokens"])
def route_kernel(
    logits, bias, correction, chosen, shares, divisors, counts, pairs, ends, tile_ends, tokens, experts, jitter, factor,
    PARTS: tl.constexpr, TOP_K: tl.constexpr, NORMALIZED: tl.constexpr, MIXED: tl.constexpr, SCALED: tl.constexpr,
    SHARED: tl.constexpr, RANKED: tl.constexpr, SIGMOID: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    BEST: tl.constexpr, SINGLE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Choose experts by the sum of logits [PARTS, T, experts]: shares [T, TOP_K] and their divisors [T].

    Program (BLOCK_T tokens). A SINGLE program also sorts, as `sort_kernel` does. Otherwise each program writes the
    experts to chosen [T, TOP_K], and its number of pairs for each expert to its row of counts [programs, experts].
    Shares with MIXED are those of SparseMixer, with SCALED or SIGMOID sigmoids. With RANKED, experts are chosen by the
    numbers of `ranked`. Shares are multiplied by `factor`, which is in the divisors. With SHARED, one more expert has
    the last rank of every token; it has no logit, and a place in all other arrays.
    """
    launch_dependents(DEPENDENT)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    valid = token < tokens
    e = tl.arange(0, BLOCK_E)
    held = valid[:, None] & (e < experts)[None, :]
    wait_for_previous(DEPENDENT)
    score = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for part in tl.static_range(PARTS):
        row = (part * tokens + token) * experts
        score += tl.load(logits + row[:, None] + e[None, :], mask=held, other=0.0)
    if bias is not None:
        score += tl.load(bias + e, mask=e < experts, other=0.0).to(tl.float32)[None, :]
    score = tl.where((e < experts)[None, :], comparable(score), float("-inf"))
    top = tl.max(score, 1)
    left = score
    if RANKED:
        left = ranked(score, correction, e[None, :], experts, SIGMOID, GROUPS, KEPT, BEST, 1)
    divisor = tl.zeros([BLOCK_T], tl.float32)
    if MIXED or SCALED or (SIGMOID and not NORMALIZED):
        divisor += 1.0
    elif not NORMALIZED:
        divisor = tl.sum(tl.exp(score - top[:, None]), 1)
    ranks = tl.full([BLOCK_T, BLOCK_E], -1, tl.int32)
    for rank in tl.static_range(TOP_K):
        best, expert = tl.max(left, 1, return_indices=True)
        if SHARED and rank == TOP_K - 1:
            expert = tl.zeros([BLOCK_T], tl.int32) + experts
        taken = e[None, :] == expert[:, None]
        left = tl.where(taken, float("-inf"), left)
        if RANKED:
            best = tl.sum(tl.where(taken, score, 0.0), 1)
        ranks = tl.where(taken & valid[:, None], rank, ranks)
        share = tl.exp(best - top)
        if SHARED and rank == TOP_K - 1:
            share = divisor  # by which it is divided
        elif MIXED:
            share = mixer_share(left, best[:, None], jitter, 1)
        elif SCALED or SIGMOID:
            share = 1.0 / (1.0 + tl.exp(-best))
        if NORMALIZED:
            divisor += share
        tl.store(shares + token * TOP_K + rank, share, mask=valid)
        if not SINGLE:
            tl.store(chosen + token * TOP_K + rank, expert, mask=valid)
    tl.store(divisors + token, divisor / factor, mask=valid)
    count = tl.sum((ranks >= 0).to(tl.int32), 0)
    every = experts + SHARED
    if SINGLE:
        end = tl.cumsum(count, 0)
        _write_sorted(pairs, ranks, token, end - count, TOP_K)
        _write_ends(ends, tile_ends, count, end, e, every, BLOCK_M)
    else:
        tl.store(counts + tl.program_id(0) * every + e, count, mask=e < every)


@triton.jit
def _write_sorted(pairs, ranks, token, first, TOP_K: tl.constexpr):
    """Write pairs to their places. `first` [experts] is the place of each expert's first pair of these tokens.

    `ranks` [tokens, experts] is the rank of each expert among a token's experts, or -1.
    """
    hot = (ranks >= 0).to(tl.int32)
    place = first[None, :] + tl.cumsum(hot, 0) - hot
    tl.store(pairs + place, token[:, None] * TOP_K + ranks, mask=ranks >= 0)


@triton.jit
def _write_ends(ends, tile_ends, count, end, e, experts, BLOCK_M: tl.constexpr):
    tl.store(ends + e, end, mask=e < experts)
    tl.store(tile_ends + e, tl.cumsum((count + BLOCK_M - 1) // BLOCK_M, 0), mask=e < experts)


@triton.jit(do_not_specialize=["tokens"])
def sort_kernel(
    chosen, counts, pairs, ends, tile_ends, tokens, experts,
    TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Sort pairs by expert, and within an expert by token: pairs [T * TOP_K]. Program (BLOCK_T tokens).

    `ends` [experts] is the end of each expert's pairs, and `tile_ends` [experts] the end of its tiles of BLOCK_M pairs.
    The programs are those of `route_kernel`.
    """
    launch_dependents(DEPENDENT)
    own = tl.program_id(0)
    token = own * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    wait_for_previous(DEPENDENT)
    ranks = tl.full([BLOCK_T, BLOCK_E], -1, tl.int32)
    for rank in tl.static_range(TOP_K):
        expert = tl.load(chosen + token * TOP_K + rank, mask=token < tokens, other=-1)
        ranks = tl.where(e[None, :] == expert[:, None], rank, ranks)
    total = tl.zeros([BLOCK_E], tl.int32)
    before = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, tl.num_programs(0), 32):
        program = first + tl.arange(0, 32)
        held = (program < tl.num_programs(0))[:, None] & (e < experts)[None, :]
        count = tl.load(counts + program[:, None] * experts + e[None, :], mask=held, other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where((program < own)[:, None], count, 0), 0)
    end = tl.cumsum(total, 0)
    if own == 0:
        _write_ends(ends, tile_ends, total, end, e, experts, BLOCK_M)
    _write_sorted(pairs, ranks, token, end - total + before, TOP_K)


@triton.jit(do_not_specialize=["tokens"])
def grouped_kernel(
    x, weight, scale, extra, unit, bias, out, pairs, ends, tile_ends, shares, divisors, tokens, experts, outputs,
    inputs, x_stride, out_stride, alpha, limit,
    TOP_K: tl.constexpr, FIRST: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, CLAMPED: tl.constexpr,
    GELU: tl.constexpr, HALVED: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A product of each pair with its expert. Program (BLOCK_M pairs of one expert and BLOCK_N outputs, outputs first).

    The FIRST product reads x [T, inputs], and writes out [T * TOP_K, outputs] in the order of `pairs`. With GATED, its
    weight is [experts, 2 outputs, inputs], and out is gated. Without GATED, its weight is [experts, outputs, inputs],
    and out is that of `squared_relu`. The second product reads x in the order of `pairs`. Its weight is [experts,
    outputs, inputs], and out [TOP_K, T, outputs] is by rank and token, times the pair's share. With SCALED, the share
    multiplies the first product's x instead. With HALVED, an expert's last tile is computed as half a tile if its pairs
    fit. With a FORM, weights are a `PackedWeight`; else with a `scale`, MXFP4. Both are rounded to the type of x.
    """
    launch_dependents(DEPENDENT)
    blocks = tl.cdiv(outputs, BLOCK_N)
    tile = tl.program_id(0) // blocks
    first_output = tl.program_id(0) % blocks * BLOCK_N
    e = tl.arange(0, BLOCK_E)
    wait_for_previous(DEPENDENT)
    tile_end = tl.load(tile_ends + e, mask=e < experts, other=2147483647)
    expert = tl.sum((tile_end <= tile).to(tl.int32), 0)
    if expert >= experts:
        return
    tiles_before = tl.max(tl.where(tile_end <= tile, tile_end, 0), 0)
    stop = tl.load(ends + expert)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0) + (tile - tiles_before) * BLOCK_M
    if HALVED:  # noqa: SIM102
        if stop - start <= BLOCK_M // 2:
            _tile(
                x, weight, scale, extra, unit, bias, out, pairs, shares, divisors, tokens, outputs, inputs, x_stride,
                out_stride, alpha, limit, first_output, expert, start, stop,
                TOP_K, FIRST, GATED, SCALED, CLAMPED, GELU, FORM, GROUP, SCALE_ROWS, BLOCK_M // 2, BLOCK_N, BLOCK_K,
                EVEN, STAGES,
            )  # fmt: skip
            return
    _tile(
        x, weight, scale, extra, unit, bias, out, pairs, shares, divisors, tokens, outputs, inputs, x_stride,
        out_stride, alpha, limit, first_output, expert, start, stop,
        TOP_K, FIRST, GATED, SCALED, CLAMPED, GELU, FORM, GROUP, SCALE_ROWS, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, STAGES,
    )  # fmt: skip


@triton.jit
def _tile(
    x, weight, scale, extra, unit, bias, out, pairs, shares, divisors, tokens, outputs, inputs, x_stride, out_stride,
    alpha, limit, first_output, expert, start, stop,
    TOP_K: tl.constexpr, FIRST: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, CLAMPED: tl.constexpr,
    GELU: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The products of up to BLOCK_M pairs in [start, stop) with BLOCK_N outputs of their expert."""
    n = first_output + tl.arange(0, BLOCK_N)
    # Rows and pairs after the last one read it again, which costs nothing and needs no mask.
    row = tl.minimum(n, outputs - 1)
    place = start + tl.arange(0, BLOCK_M)
    pair = tl.load(pairs + tl.minimum(place, stop - 1))
    source = pair // TOP_K if FIRST else tl.minimum(place, stop - 1)
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
        else:
            values = tl.load(x_at + k[:, None], mask=inside[:, None], other=0.0)
        # With more pairs the conversion is a small share, and its own code leaves more registers.
        if FORM == 0 and scale is not None and values.dtype == tl.bfloat16 and BLOCK_M <= 32:
            acc = packed_dot(weight, scale, first_row + row, first, inputs, values, acc, BLOCK_N, BLOCK_K, EVEN)
            if GATED:
                own = first_row + outputs + row
                up = packed_dot(weight, scale, own, first, inputs, values, up, BLOCK_N, BLOCK_K, EVEN)
        else:
            if FORM > 0:
                numbers = packed_tile(
                    weight, scale, extra, first_row + row, first, inputs,
                    FORM, GROUP, SCALE_ROWS, BLOCK_N, BLOCK_K, EVEN,
                )  # fmt: skip
                tile_a = numbers.to(values.dtype)
            elif scale is not None:
                numbers = mxfp4_tile(weight, scale, first_row + row, first, inputs, BLOCK_N, BLOCK_K, EVEN)
                tile_a = numbers.to(values.dtype)
            elif EVEN:
                tile_a = tl.load(weight_at + k[None, :])
            else:
                tile_a = tl.load(weight_at + k[None, :], mask=inside[None, :], other=0.0)
            acc = tl.dot(tile_a, values, acc, input_precision="ieee")
            if GATED:
                if FORM > 0:
                    numbers = packed_tile(
                        weight, scale, extra, first_row + outputs + row, first, inputs,
                        FORM, GROUP, SCALE_ROWS, BLOCK_N, BLOCK_K, EVEN,
                    )  # fmt: skip
                    tile_b = numbers.to(values.dtype)
                elif scale is not None:
                    own = first_row + outputs + row
                    tile_b = mxfp4_tile(weight, scale, own, first, inputs, BLOCK_N, BLOCK_K, EVEN).to(values.dtype)
                elif EVEN:
                    tile_b = tl.load(weight_at + outputs * inputs + k[None, :])
                else:
                    tile_b = tl.load(weight_at + outputs * inputs + k[None, :], mask=inside[None, :], other=0.0)
                up = tl.dot(tile_b, values, up, input_precision="ieee")
    if unit is not None:
        acc *= tl.load(unit + first_row + row)[:, None]
        if GATED:
            up *= tl.load(unit + first_row + outputs + row)[:, None]
    if FIRST and SCALED:
        share = tl.load(shares + pair)[None, :]
        acc *= share
        if GATED:
            up *= share
    if bias is not None:
        acc += tl.load(bias + first_row + row).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + first_row + outputs + row).to(tl.float32)[:, None]
    if FIRST:
        if GATED:
            acc = gated_product(acc, up, alpha, limit, CLAMPED, GELU)
        else:
            acc = squared_relu(acc)
        target = place.to(tl.int64)
    else:
        if not SCALED:
            acc *= (tl.load(shares + pair) / tl.load(divisors + pair // TOP_K))[None, :]
        target = (pair % TOP_K).to(tl.int64) * tokens + pair // TOP_K
    written = (n < outputs)[:, None] & (place < stop)[None, :]
    tl.store(out + target[None, :] * out_stride + n[:, None], acc.to(out.dtype.element_ty), mask=written)
