"""The Triton kernel that draws tokens: one program a row, no sort."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048
"""Tokens of the vocabulary that a program reads at a time."""

ZERO_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Low bits of a logit that are 0 once it is a float32."""


def sample_rows(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    any_filtered: bool,
) -> torch.Tensor:
    """`sampling.sample` on CUDA where some row has a temperature, for float32, float16 and bfloat16."""
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        sample_kernel[(len(logits),)](
            logits,
            temperature,
            top_k,
            top_p,
            seed,
            position,
            out,
            logits.shape[1],
            logits.stride(0),
            ANY_FILTERED=any_filtered,
            ZERO_BITS=ZERO_BITS[logits.dtype],
            BLOCK=BLOCK,
            num_warps=8,
        )
    return out


@triton.jit
def _mix32(bits):
    """MurmurHash3's finalizer on uint32."""
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def _mix64(bits):
    """SplitMix64's step on uint64."""
    bits = bits + 0x9E3779B97F4A7C15
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def _gumbel(token, low, high):
    """The noise of `sampling.sample` for token ids, from the halves of the row's key."""
    bits = _mix32(token.to(tl.uint32) ^ low) + high
    bits = _mix32(bits)
    uniform = tl.minimum(((bits & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.99999994)
    rest = 1.0 - uniform
    # log(1 - u) to the last bits where u is small: the error of 1 - u, divided out.
    tail = tl.where(rest == 1.0, uniform, tl.log(rest) * (uniform / (rest - 1.0)))
    return -tl.log(tl.abs(tail))


@triton.jit
def _load(logits, token, vocab):
    """Logits as float32, with one zero; -inf past the end."""
    value = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return tl.where(value == 0.0, 0.0, value)


@triton.jit
def _key(value, ZERO_BITS: tl.constexpr):
    """An int32 that orders as the float32 does."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> ZERO_BITS


@triton.jit
def _kth_key(logits, vocab, wanted, ZERO_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key that at least `wanted` tokens reach, by a search that tries three keys a pass."""
    low = tl.full([], -0x7FFFFFFF, tl.int64) >> ZERO_BITS  # reached by all
    high = tl.full([], 0x7FFFFFFF, tl.int64) >> ZERO_BITS  # by too few, but for a row of NaN
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        first = low + step
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
        reach_first = tl.zeros([BLOCK], tl.int32)
        reach_second = tl.zeros([BLOCK], tl.int32)
        reach_third = tl.zeros([BLOCK], tl.int32)
        for begin in range(0, vocab, BLOCK):
            token = begin + tl.arange(0, BLOCK)
            key = _key(_load(logits, token, vocab), ZERO_BITS)
            inside = token < vocab
            reach_first += (inside & (key >= first.to(tl.int32))).to(tl.int32)
            reach_second += (inside & (key >= second.to(tl.int32))).to(tl.int32)
            reach_third += (inside & (key >= third.to(tl.int32))).to(tl.int32)
        if tl.sum(reach_third) >= wanted:
            low = third
        elif tl.sum(reach_second) >= wanted:
            low, high = second, third
        elif tl.sum(reach_first) >= wanted:
            low, high = first, second
        else:
            high = first
    return low.to(tl.int32)


@triton.jit
def _likeliest(logits, vocab, BLOCK: tl.constexpr):
    """The lowest of the likeliest tokens."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_at = tl.arange(0, BLOCK)
    for begin in range(0, vocab, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        value = _load(logits, token, vocab)
        better = value > best
        best = tl.where(better, value, best)
        best_at = tl.where(better, token, best_at)
    return tl.min(tl.where(best == tl.max(best, 0), best_at, vocab - 1), 0)


@triton.jit
def _draw(logits, vocab, heat, low, high, bound_key, bound_at, ZERO_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The token of the highest noisy score among those that rank before (bound_key, bound_at)."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_at = tl.arange(0, BLOCK)
    for begin in range(0, vocab, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        value = _load(logits, token, vocab)
        key = _key(value, ZERO_BITS)
        score = value / heat + _gumbel(token, low, high)
        better = (score > best) & ((key > bound_key) | ((key == bound_key) & (token < bound_at)))
        best = tl.where(better, score, best)
        best_at = tl.where(better, token, best_at)
    return tl.min(tl.where(best == tl.max(best, 0), best_at, vocab - 1), 0)


@triton.jit
def _before(logits, vocab, heat, top, bound_key, bound_at, ZERO_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens rank before (bound_key, bound_at), what they weigh, and what all weigh."""
    count = tl.zeros([BLOCK], tl.int32)
    weight = tl.zeros([BLOCK], tl.float32)
    whole = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, vocab, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        value = _load(logits, token, vocab)
        key = _key(value, ZERO_BITS)
        share = tl.exp((value - top) / heat)
        before = (token < vocab) & ((key > bound_key) | ((key == bound_key) & (token < bound_at)))
        count += before.to(tl.int32)
        weight += tl.where(before, share, 0.0)
        whole += share
    return tl.sum(count, 0), tl.sum(weight, 0), tl.sum(whole, 0)


@triton.jit
def sample_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    seed,
    position,
    out,
    vocab,
    row_stride,
    ANY_FILTERED: tl.constexpr,
    ZERO_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draw one token. Program (row).

    What top-k and top-p keep of a row are the tokens of the first ranks. So a draw among more than these that falls on
    a token of theirs is the draw among these; one that falls behind them shows how much less to draw among, and is
    repeated. Random draws fall on likely tokens: it takes 1 / top_p draws on average, and top-k is searched for first.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    heat = tl.load(temperature + row)
    if heat <= 0.0:
        tl.store(out + row, _likeliest(logits, vocab, BLOCK).to(tl.int64))
    else:
        one = row + tl.arange(0, 1)
        row_key = _mix64(_mix64(tl.load(seed + one).to(tl.uint64)) + tl.load(position + one).to(tl.uint64))
        low = (row_key & 0xFFFFFFFF).to(tl.uint32)
        high = (row_key >> 32).to(tl.uint32)
        bound_key = tl.full([], -0x80000000, tl.int32)
        bound_at = vocab
        if ANY_FILTERED:
            most = tl.load(top_k + row).to(tl.int32)
            share = tl.load(top_p + row)
            if (most > 0) & (most < vocab):
                bound_key = _kth_key(logits, vocab, most, ZERO_BITS, BLOCK)
            else:
                most = vocab
        drawn = _draw(logits, vocab, heat, low, high, bound_key, bound_at, ZERO_BITS, BLOCK)
        if ANY_FILTERED:  # noqa: SIM102  known when the kernel is compiled
            if (most < vocab) | (share < 1.0):
                top = tl.load(logits + _likeliest(logits, vocab, BLOCK)).to(tl.float32)
                reach = tl.full([], float("inf"), tl.float32)
                if share < 1.0:
                    # All that top-k keeps: those above its last logit, and as many as remain of those equal to it.
                    above, kept, whole = _before(logits, vocab, heat, top, bound_key, 0, ZERO_BITS, BLOCK)
                    if most < vocab:
                        bits = bound_key << ZERO_BITS
                        last = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
                        whole = kept + (most - above) * tl.exp((last - top) / heat)
                    reach = share * whole
                searching = drawn >= 0
                while searching:
                    drawn_key = _key(_load(logits, drawn, vocab), ZERO_BITS)
                    count, weight, _ = _before(logits, vocab, heat, top, drawn_key, drawn, ZERO_BITS, BLOCK)
                    searching = (count > 0) & ((count >= most) | (weight >= reach))
                    if searching:
                        drawn = _draw(logits, vocab, heat, low, high, drawn_key, drawn, ZERO_BITS, BLOCK)
        tl.store(out + row, drawn.to(tl.int64))
