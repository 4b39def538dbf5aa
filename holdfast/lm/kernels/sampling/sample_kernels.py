"""The Triton kernels that choose tokens: the best of a row or of a part of it, and random draws without a sort."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048
"""Number of tokens that a program reads at a time when it draws."""

PIECE = 4096
"""Number of logits that one program compares to find the best. It is small enough that one row fills the device."""

ZERO_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Low bits that are always 0 once a logit of this dtype is a float32."""


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The token with the largest logit in each row of logits [B, V], as [B] int64; the lowest id among equals.

    A row with NaN gives an arbitrary token.
    """
    return _best(logits)[1]


def best_drawn(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    any_random: bool,
    first: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`best_tokens` on CUDA: each row's largest score [B] float32, and its token [B] int64."""
    return _best(logits, temperature, seed, position, any_random=any_random, first=first)


def _best(
    logits: torch.Tensor,
    temperature: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
    *,
    any_random: bool = False,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of `best_drawn`.

    A first kernel compares the tokens of each piece of a row, a second one the pieces.
    """
    rows, vocab = logits.shape
    pieces = triton.cdiv(vocab, PIECE)
    best = torch.empty(rows, pieces, dtype=torch.float32, device=logits.device)
    token = torch.empty(rows, pieces, dtype=torch.int32, device=logits.device)
    score = torch.empty(rows, dtype=torch.float32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        best_of_piece_kernel[(rows, pieces)](
            logits,
            temperature,
            seed,
            position,
            best,
            token,
            vocab,
            first,
            logits.stride(0),
            ANY_RANDOM=any_random,
            BLOCK=PIECE,
            num_warps=4,
        )
        block = triton.next_power_of_2(pieces)
        best_of_row_kernel[(rows,)](best, token, score, out, pieces, first, BLOCK=block, num_warps=1)
    return score, out


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
    """Compute `sample` on CUDA for a batch in which at least one row has a temperature above 0.

    The logits are float32, float16 or bfloat16.
    """
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
    """The Gumbel noise of `sample` for token ids, from the two halves of the row's key."""
    bits = _mix32(token.to(tl.uint32) ^ low) + high
    bits = _mix32(bits)
    uniform = tl.minimum(((bits & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.99999994)
    rest = 1.0 - uniform
    # log(1 - u), exact also where u is small: the rounding error of 1 - u is divided out.
    tail = tl.where(rest == 1.0, uniform, tl.log(rest) * (uniform / (rest - 1.0)))
    return -tl.log(tl.abs(tail))


@triton.jit
def _row_key(seed, position, row):
    """The two halves of a row's key, each [1] uint32."""
    one = row + tl.arange(0, 1)
    key = _mix64(_mix64(tl.load(seed + one).to(tl.uint64)) + tl.load(position + one).to(tl.uint64))
    return (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit(do_not_specialize=["first"])
def best_of_piece_kernel(
    logits, temperature, seed, position, best, token, vocab, first, stride,
    ANY_RANDOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest score of a piece, and the lowest place in the row that has it. Program (row, piece).

    The row begins with the token `first`. Without ANY_RANDOM, a score is the logit.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    if ANY_RANDOM:
        heat = tl.load(temperature + row)
        if heat > 0.0:
            low, high = _row_key(seed, position, row)
            score = score / heat + _gumbel(first + at, low, high)
    top, place = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    piece = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best + piece, top)
    tl.store(token + piece, tl.minimum(tl.program_id(1) * BLOCK + place, vocab - 1))


@triton.jit(do_not_specialize=["first"])
def best_of_row_kernel(best, token, score, out, pieces, first, BLOCK: tl.constexpr):
    """The score and the token of the row's best piece, the first among equals. Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    value = tl.load(best + row * pieces + at, mask=at < pieces, other=float("-inf"))
    piece = tl.minimum(tl.argmax(value, 0), pieces - 1)
    tl.store(score + row, tl.load(best + row * pieces + piece))
    tl.store(out + row, first + tl.load(token + row * pieces + piece).to(tl.int64))


@triton.jit
def _load(logits, token, vocab):
    """Logits as float32, with -0 as 0, and -inf past the end."""
    value = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return tl.where(value == 0.0, 0.0, value)


@triton.jit
def _key(value, ZERO_BITS: tl.constexpr):
    """An int32 that sorts in the order of the float32 `value`."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> ZERO_BITS


@triton.jit
def _kth_key(logits, vocab, wanted, ZERO_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key that at least `wanted` tokens reach. Each pass over the row tries three keys."""
    low = tl.full([], -0x7FFFFFFF, tl.int64) >> ZERO_BITS  # all tokens reach this key
    high = tl.full([], 0x7FFFFFFF, tl.int64) >> ZERO_BITS  # too few tokens reach this key, unless the row holds NaN
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
def _argmax(logits, vocab, BLOCK: tl.constexpr):
    """The token with the largest logit, the lowest id among equals."""
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
    """The token with the highest noisy score among those that rank before (bound_key, bound_at)."""
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
    """Count and total weight of the tokens that rank before (bound_key, bound_at), and the weight of all tokens."""
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
    logits, temperature, top_k, top_p, seed, position, out, vocab, row_stride,
    ANY_FILTERED: tl.constexpr, ZERO_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw one token. Program (row).

    Top-k and top-p keep the first ranks of a row. The kernel draws from more tokens than these. If the drawn token is
    among those kept, the draw from them alone would have given it too. If not, the next draw is from the tokens that
    rank before it. Random draws fall on likely tokens, so this takes 1 / top_p draws on average. The k-th logit of
    top-k is found first.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    heat = tl.load(temperature + row)
    if heat <= 0.0:
        tl.store(out + row, _argmax(logits, vocab, BLOCK).to(tl.int64))
    else:
        low, high = _row_key(seed, position, row)
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
        if ANY_FILTERED:  # noqa: SIM102 - a constant when the kernel is compiled
            if (most < vocab) | (share < 1.0):
                top = tl.load(logits + _argmax(logits, vocab, BLOCK)).to(tl.float32)
                reach = tl.full([], float("inf"), tl.float32)
                if share < 1.0:
                    # The weight of the tokens that top-k keeps: all logits above its last one, and as many of those
                    # equal to it as k leaves.
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
