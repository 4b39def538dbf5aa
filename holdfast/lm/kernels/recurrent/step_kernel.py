"""The Triton kernel of recurrences for few tokens per segment, bound by reading and writing the states."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def step_kernel(
    query, key, value, log_decay, rate, skip, state, work, out,
    query_stride, query_stride_head, key_stride, key_stride_head, value_stride, value_stride_head,
    decay_stride, rate_stride, state_stride, state_stride_head, state_stride_key, state_stride_value,
    out_stride, out_stride_head, scale, eps,
    GROUP_SIZE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, DELTA: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """The tokens of one segment of `WorkLists.few`, for one head. Program (part of the value, head, record).

    The part of the state, [BLOCK_K, BLOCK_V], is read once, stays in registers for all tokens, and is written once,
    unless the segment verifies a draft.
    With DELTA, the recurrence is `Recurrence.gated_delta`, and `rate` is beta. Otherwise it is
    `Recurrence.selective_scan`: c, b and x are query, key and value, log_decay is the paper's A, and `rate` is dt.
    """
    head = tl.program_id(1).to(tl.int64)
    record = work + tl.program_id(2) * 4
    first = tl.load(record).to(tl.int64)
    count = tl.load(record + 1)
    if count == 0:
        return
    dim = tl.arange(0, BLOCK_K)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key, in_value = dim < KEY_DIM, column < VALUE_DIM
    held = in_key[:, None] & in_value[None, :]
    slot = tl.load(record + 2).to(tl.int64)
    moves = slot >= 0
    slot = tl.where(moves, slot, -1 - slot)
    state += slot * state_stride + head * state_stride_head
    state_at = state + dim[:, None] * state_stride_key + column[None, :] * state_stride_value
    sums = tl.load(state_at, mask=held, other=0.0)

    query_at = query + first * query_stride + head // GROUP_SIZE * query_stride_head + dim
    key_at = key + first * key_stride + head // GROUP_SIZE * key_stride_head + dim
    value_at = value + first * value_stride + head * value_stride_head + column
    rate_at = rate + first * rate_stride + head
    decay_at = log_decay + first * decay_stride + head
    out_at = out + first * out_stride + head * out_stride_head + column
    for _ in range(count):
        q = tl.load(query_at, mask=in_key, other=0.0).to(tl.float32)
        k = tl.load(key_at, mask=in_key, other=0.0).to(tl.float32)
        v = tl.load(value_at, mask=in_value, other=0.0).to(tl.float32)
        r = tl.load(rate_at).to(tl.float32)
        decay = tl.load(decay_at).to(tl.float32)
        if NORMALIZE:
            q *= tl.rsqrt(tl.sum(q * q, 0) + eps)
            k *= tl.rsqrt(tl.sum(k * k, 0) + eps)
        if DELTA:
            sums *= tl.exp(decay)
            written = r * (v - tl.sum(sums * k[:, None], 0))
        else:
            sums *= tl.exp(r * decay)
            written = r * v
        sums += k[:, None] * written[None, :]
        found = scale * tl.sum(sums * q[:, None], 0)
        if skip is not None:
            found += tl.load(skip + head).to(tl.float32) * v
        tl.store(out_at, found.to(out.dtype.element_ty), mask=in_value)
        query_at += query_stride
        key_at += key_stride
        value_at += value_stride
        rate_at += rate_stride
        decay_at += decay_stride
        out_at += out_stride
    # Several threads may hold the same element, and all must read it before one writes it.
    tl.debug_barrier()
    tl.store(state_at, sums, mask=held & moves)
