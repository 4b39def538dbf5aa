"""Experts for a few tokens, bound by reading weights: each pair of a token and an expert reads the expert's rows.

Programs of the next kernel may start once this kernel's programs have read their weights. If they could start at once,
they would crowd onto the processors that become free first.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.lm.kernels.launch import launch_dependents, wait_for_previous
from holdfast.lm.kernels.linear.experts.gate import comparable, gated_product, mixer_share, ranked, squared_relu
from holdfast.lm.kernels.linear.experts.mxfp4_tile import mxfp4_tile
from holdfast.lm.kernels.linear.packed_tile import packed_tile


@triton.jit
def _product(
    weight, scale, extra, unit, row, x, norm, inputs, eps,
    FORM: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The products [BLOCK_N] of rows `row` [BLOCK_N] of the weights and x [inputs], in float32.

    With a FORM, weights are a `PackedWeight`; else with a `scale`, MXFP4. With a `norm`, x is replaced by its RMS norm
    times `norm`. The next kernel is launched at the last read.
    """
    weight_at = weight + row[:, None] * inputs
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for first in tl.range(0, inputs, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)
        inside = k < inputs
        if FORM > 0:
            tile = packed_tile(
                weight, scale, extra, row, first, inputs, FORM, GROUP, SCALE_ROWS, BLOCK_N, BLOCK_K, EVEN
            )  # fmt: skip
        elif scale is not None:
            tile = mxfp4_tile(weight, scale, row, first, inputs, BLOCK_N, BLOCK_K, EVEN)
        elif EVEN:
            tile = tl.load(weight_at + k[None, :])
        else:
            tile = tl.load(weight_at + k[None, :], mask=inside[None, :], other=0.0)
        values = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
        if norm is not None:
            squares += values * values
            values *= tl.load(norm + k, mask=inside, other=0.0).to(tl.float32)
        acc += tile.to(tl.float32) * values[None, :]
    launch_dependents(DEPENDENT)
    result = tl.sum(acc, 1)
    if norm is not None:
        result *= tl.rsqrt(tl.sum(squares, 0) / inputs + eps)
    if unit is not None:
        result *= tl.load(unit + row)
    return result


@triton.jit
def router_kernel(
    x, norm, router, bias, logits, experts, inputs, x_stride, eps,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Router logits [T, experts] float32 of x [T, inputs]. Program (BLOCK_N experts, token).

    With a `norm`, x is replaced by its RMS norm times `norm`.
    """
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, experts - 1)
    wait_for_previous(DEPENDENT)
    x_at = x + token * x_stride
    result = _product(
        router, None, None, None, row, x_at, norm, inputs, eps, 0, 1, 1, BLOCK_N, BLOCK_K, EVEN, STAGES, DEPENDENT
    )  # fmt: skip
    if bias is not None:
        result += tl.load(bias + row).to(tl.float32)
    tl.store(logits + token * experts + n, result, mask=n < experts)


@triton.jit
def gate_few_kernel(
    logits, correction, x, norm, weight, scale, extra, unit, bias, inner_out, chosen, shares,
    experts, inner, inputs, x_stride, eps, alpha, limit, jitter,
    TOP_K: tl.constexpr, NORMALIZED: tl.constexpr, MIXED: tl.constexpr, SCALED: tl.constexpr,
    SHARED: tl.constexpr, RANKED: tl.constexpr, SIGMOID: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    BEST: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, GELU: tl.constexpr, FORM: tl.constexpr,
    GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The first product of a pair's expert, gated: [T * TOP_K, inner] float32. Program (BLOCK_N rows, pair).

    Pair t * TOP_K + r is token t with its expert of rank r, which each program finds itself from the logits. The first
    program of a pair writes the expert and its share. With NORMALIZED, the reader divides the shares by their sum. With
    MIXED the shares are those of SparseMixer, with SIGMOID sigmoids, with SCALED sigmoids that multiply x. With RANKED,
    experts are chosen by the numbers of `ranked`. With SHARED, a token's last pair is that of the shared expert, whose
    number is `experts`. Rows of gate and up are taken in turns. Without GATED, there is no gate, and the result is that
    of `squared_relu`. With a `norm`, x is replaced by its RMS norm times `norm`. For FORM and `scale`, see `_product`.
    """
    pair = tl.program_id(1).to(tl.int64)
    token = pair // TOP_K
    ROWS: tl.constexpr = 2 if GATED else 1
    TAKEN: tl.constexpr = BLOCK_N // ROWS
    item = tl.arange(0, BLOCK_N)
    e = tl.arange(0, BLOCK_E)
    wait_for_previous(DEPENDENT)
    score = comparable(tl.load(logits + token * experts + e, mask=e < experts, other=float("-inf")))
    top = tl.max(score, 0)
    left = score
    if RANKED:
        left = ranked(score, correction, e, experts, SIGMOID, GROUPS, KEPT, BEST, 0)
    best = top
    expert = tl.program_id(0) * 0
    for _ in range(pair % TOP_K + 1):
        best, expert = tl.max(left, 0, return_indices=True)
        left = tl.where(e == expert, float("-inf"), left)
    if RANKED:
        best = tl.sum(tl.where(e == expert, score, 0.0), 0)
    share = tl.exp(best - top)
    if MIXED:
        share = mixer_share(left, best, jitter, 0)
    elif SCALED or SIGMOID:
        share = 1.0 / (1.0 + tl.exp(-best))
    elif not NORMALIZED:
        share = share / tl.sum(tl.exp(score - top), 0)
    if SHARED:
        last = pair % TOP_K == TOP_K - 1
        expert = tl.where(last, experts, expert)
        share = tl.where(last, 1.0, share)
    if tl.program_id(0) == 0:
        tl.store(chosen + pair, expert)
        tl.store(shares + pair, 1.0 if SCALED else share)
    # Programs after the last output read its row again, which costs nothing and needs no mask.
    row = tl.minimum(tl.program_id(0) * TAKEN + item // ROWS, inner - 1) + item % ROWS * inner
    row = expert.to(tl.int64) * ROWS * inner + row
    x_at = x + token * x_stride
    result = _product(
        weight, scale, extra, unit, row, x_at, norm, inputs, eps,
        FORM, GROUP, SCALE_ROWS, BLOCK_N, BLOCK_K, EVEN, STAGES, DEPENDENT,
    )  # fmt: skip
    if SCALED:
        result *= share
    if bias is not None:
        result += tl.load(bias + row).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.reshape(result, (TAKEN, 2)))
        between = gated_product(gate, up, alpha, limit, CLAMPED, GELU)
    else:
        between = squared_relu(result)
    n = tl.program_id(0) * TAKEN + tl.arange(0, TAKEN)
    tl.store(inner_out + pair * inner + n, between, mask=n < inner)


@triton.jit
def down_few_kernel(
    inner_in, weight, scale, extra, unit, bias, chosen, shares, out, inner, outputs, out_stride, factor,
    TOP_K: tl.constexpr, NORMALIZED: tl.constexpr, ADDED: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The second product of all experts of a token, times their shares, summed: [T, outputs].

    Program (BLOCK_N outputs, token). The sum is taken in a fixed order. Shares are multiplied by `factor`. With ADDED,
    it is added to `out`. For FORM and `scale`, see `_product`.
    """
    token = tl.program_id(1).to(tl.int64)
    rank = tl.arange(0, BLOCK_R)
    held = rank < TOP_K
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, outputs - 1)
    wait_for_previous(DEPENDENT)
    expert = tl.load(chosen + token * TOP_K + rank, mask=held, other=0).to(tl.int64)
    share = tl.load(shares + token * TOP_K + rank, mask=held, other=0.0)
    if NORMALIZED:
        share = share / tl.sum(share, 0)
    share *= factor
    weight_row = expert[None, :] * outputs + row[:, None]
    weight_at = weight + weight_row[:, :, None] * inner
    ROWS: tl.constexpr = BLOCK_N * BLOCK_R
    inner_at = inner_in + (token * TOP_K + rank)[:, None] * inner
    acc = tl.zeros([BLOCK_N, BLOCK_R, BLOCK_K], tl.float32)
    for first in tl.range(0, inner, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)
        inside = held[:, None] & (k < inner)[None, :]
        if FORM > 0:
            rows = tl.reshape(weight_row, (ROWS,))
            tile = packed_tile(
                weight, scale, extra, rows, first, inner, FORM, GROUP, SCALE_ROWS, ROWS, BLOCK_K, EVEN
            )  # fmt: skip
            tile = tl.reshape(tile, (BLOCK_N, BLOCK_R, BLOCK_K))
        elif scale is not None:
            rows = tl.reshape(weight_row, (ROWS,))
            tile = mxfp4_tile(weight, scale, rows, first, inner, ROWS, BLOCK_K, EVEN)
            tile = tl.reshape(tile, (BLOCK_N, BLOCK_R, BLOCK_K))
        elif EVEN:
            tile = tl.load(weight_at + k[None, None, :])
        else:
            tile = tl.load(weight_at + k[None, None, :], mask=inside[None, :, :], other=0.0)
        values = tl.load(inner_at + k[None, :], mask=inside, other=0.0) * share[:, None]
        acc += tile.to(tl.float32) * values[None, :, :]
    launch_dependents(DEPENDENT)
    sums = tl.sum(acc, 2)
    if unit is not None:
        sums *= tl.load(unit + weight_row)
    result = tl.sum(sums, 1)
    if bias is not None:
        added = tl.load(bias + weight_row).to(tl.float32)
        result += tl.sum(added * share[None, :], 1)
    place = out + token * out_stride + n
    if ADDED:
        result += tl.load(place, mask=n < outputs, other=0.0).to(tl.float32)
        # Several threads may hold the same element, and all must read it before one writes it.
        tl.debug_barrier()
    tl.store(place, result.to(out.dtype.element_ty), mask=n < outputs)
