"""The Triton kernels of recurrences for long segments, in chunks of tokens.

`prepare_kernel` computes all chunks in parallel, up to what depends on the state before them. `scan_kernel` goes
through the chunks of a segment with the state in registers, and does as little as it can, because each chunk waits for
the one before it. It leaves the state before each chunk. From these `output_kernel` computes all outputs in parallel.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

LEAST_LOG_DECAY = tl.constexpr(-1000.0)
"""Float32's exp is 0 here already. Lower numbers are raised to this one, so that sums of them stay accurate."""


@triton.jit
def unit_lower_inverse(below, SIZE: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of the identity plus `below` [SIZE, SIZE], which has numbers below the diagonal only.

    The inverse of each pair of blocks on the diagonal is made from those of the two, for blocks of 1, 2, 4, …
    numbers. No power of `below` is formed: with similar keys it would be huge. Up to 16 numbers, only the blocks on the
    diagonal are multiplied.
    """
    BLOCKS: tl.constexpr = SIZE // 16
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    apart = tl.where(row > column, row ^ column, 0)
    same_block = tl.reshape(tl.where(row // 16 == column // 16, below, 0.0), (BLOCKS, 16, BLOCKS, 16))
    blocks = tl.sum(same_block, 2)
    inner_row, inner_column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    inner_apart = tl.where(inner_row > inner_column, inner_row ^ inner_column, 0)
    found = tl.where(inner_row == inner_column, 1.0, tl.where(inner_apart == 1, -blocks, 0.0))
    for level in tl.static_range(1, 4):
        link = tl.where((inner_apart >> level) == 1, blocks, 0.0)
        found -= tl.dot(found, tl.dot(link, found, input_precision=PRECISION), input_precision=PRECISION)
    wide = tl.reshape(tl.broadcast_to(found[:, :, None, :], (BLOCKS, 16, BLOCKS, 16)), (SIZE, SIZE))
    inverse = tl.where(row // 16 == column // 16, wide, 0.0)
    for level in tl.static_range(4, LEVELS):
        link = tl.where((apart >> level) == 1, below, 0.0)
        linked = tl.dot(link, inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, linked, input_precision=PRECISION)
    return inverse


@triton.jit
def decays_between(sums, row):
    """The decay [C, C] from each token (second axis) to each later one or itself. It is 0 to earlier ones."""
    apart = (sums[:, None] - sums[None, :]).to(tl.float32)
    return tl.exp(tl.where(row[:, None] >= row[None, :], apart, float("-inf")))


@triton.jit
def inverse_norm(vectors, eps):
    """One over the root of each vector's sum of squares plus eps, [C] of [C, D]."""
    wide = vectors.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + eps)


@triton.jit
def prepare_kernel(
    query, key, value, log_decay, rate, chunks, weights, read, target, query_factor, write_factor, total_factor,
    query_stride, query_stride_head, key_stride, key_stride_head, value_stride, value_stride_head,
    decay_stride, rate_stride, scale, eps,
    HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, DELTA: tl.constexpr,
    NORMALIZE: tl.constexpr, PRECISION: tl.constexpr, INVERSE_PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of `WorkLists.chunks` for one head. Program (head, chunk). Arguments are `step_kernel`'s, and:

    weights [T, H, CHUNK]: how much each token reads of what the chunk's tokens write.
    query_factor [T, H]: factor on what the query reads of the state before the chunk.
    write_factor [T, H]: factor on what the token adds to the state after the chunk.
    total_factor [chunks, H]: decay of the state over the chunk.
    With DELTA, a token writes its row of `target` [T, H, VALUE_DIM] less what its row of `read` [T, H, KEY_DIM] reads
    of the state before the chunk (U and W of Yang et al., 2024, Gated Delta Networks, §3.3). Otherwise it writes its
    value.
    """
    record = chunks + tl.program_id(1) * 4
    length = tl.load(record + 1)
    if length == 0:
        return
    head = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, CHUNK)
    before = tl.load(record + 3)
    real = before + row < length
    token = tl.load(record).to(tl.int64) + before + row
    r = tl.load(rate + token * rate_stride + head, mask=real, other=0.0).to(tl.float32)
    decay = tl.load(log_decay + token * decay_stride + head, mask=real, other=0.0).to(tl.float32)
    if not DELTA:
        decay *= r
    # Sums are in float64, because a small difference of two large sums counts.
    sums = tl.cumsum(tl.maximum(decay, LEAST_LOG_DECAY).to(tl.float64), 0)
    total = tl.min(sums, 0)
    since = tl.exp(sums.to(tl.float32))
    until = tl.exp((total - sums).to(tl.float32))

    dim = tl.arange(0, BLOCK_K)
    held = real[:, None] & (dim < KEY_DIM)[None, :]
    key_head = head // GROUP_SIZE
    place = token * HEADS + head
    k = tl.load(key + (token * key_stride + key_head * key_stride_head)[:, None] + dim[None, :], mask=held, other=0.0)
    k_factor = tl.full([CHUNK], 1.0, tl.float32)
    if NORMALIZE:
        k_factor *= inverse_norm(k, eps)
    written = k_factor
    if not DELTA:
        written *= r

    query_at = query + (token * query_stride + key_head * query_stride_head)[:, None] + dim[None, :]
    q = tl.load(query_at, mask=held, other=0.0)
    q_factor = tl.full([CHUNK], scale, tl.float32)
    if NORMALIZE:
        q_factor *= inverse_norm(q, eps)
    found = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    found *= decays_between(sums, row) * q_factor[:, None] * written[None, :]
    tl.store(weights + place[:, None] * CHUNK + row[None, :], found.to(weights.dtype.element_ty), mask=real[:, None])
    tl.store(query_factor + place, since * q_factor, mask=real)
    tl.store(write_factor + place, until * written, mask=real)
    tl.store(total_factor + tl.program_id(1).to(tl.int64) * HEADS + head, tl.exp(total.to(tl.float32)))
    if DELTA:
        same = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        same *= decays_between(sums, row) * (r * k_factor)[:, None] * k_factor[None, :]
        below = tl.where(row[:, None] > row[None, :], same, 0.0)
        inverse = unit_lower_inverse(below, CHUNK, LEVELS, INVERSE_PRECISION) * r[None, :]
        found = tl.dot((inverse * (since * k_factor)[None, :]).to(k.dtype), k, input_precision=PRECISION)
        tl.store(read + place[:, None] * KEY_DIM + dim[None, :], found.to(read.dtype.element_ty), mask=held)
        for part in range(0, (VALUE_DIM + BLOCK_V - 1) // BLOCK_V):
            column = part * BLOCK_V + tl.arange(0, BLOCK_V)
            held_value = real[:, None] & (column < VALUE_DIM)[None, :]
            value_at = value + (token * value_stride + head * value_stride_head)[:, None] + column[None, :]
            v = tl.load(value_at, mask=held_value, other=0.0)
            wanted = tl.dot(inverse.to(k.dtype), v, input_precision=PRECISION)
            target_at = target + place[:, None] * VALUE_DIM + column[None, :]
            tl.store(target_at, wanted.to(target.dtype.element_ty), mask=held_value)


@triton.jit
def scan_kernel(
    key, value, state, segments, read, target, write_factor, total_factor, states, out,
    key_stride, key_stride_head, value_stride, value_stride_head,
    state_stride, state_stride_head, state_stride_key, state_stride_value, out_stride, out_stride_head,
    HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, DELTA: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One segment of `WorkLists.many` for one head. Program (part of the value, head, record).

    Arguments are `step_kernel`'s and `prepare_kernel`'s, and states [chunks, H, KEY_DIM, VALUE_DIM]: the state before
    each chunk. With DELTA, `out` has what each token writes.
    """
    head = tl.program_id(1).to(tl.int64)
    record = segments + tl.program_id(2) * 4
    length = tl.load(record + 1)
    if length == 0:
        return
    first = tl.load(record).to(tl.int64)
    chunk = tl.load(record + 3).to(tl.int64)
    row = tl.arange(0, CHUNK)
    dim = tl.arange(0, BLOCK_K)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key, in_value = dim < KEY_DIM, column < VALUE_DIM
    slot = tl.load(record + 2).to(tl.int64)
    moves = slot >= 0
    slot = tl.where(moves, slot, -1 - slot)
    state += slot * state_stride + head * state_stride_head
    state_at = state + dim[:, None] * state_stride_key + column[None, :] * state_stride_value
    held = in_key[:, None] & in_value[None, :]
    sums = tl.load(state_at, mask=held, other=0.0)

    key += head // GROUP_SIZE * key_stride_head
    value += head * value_stride_head
    out += head * out_stride_head
    kept_at = states + ((chunk * HEADS + head) * KEY_DIM + dim[:, None]) * VALUE_DIM + column[None, :]
    for before in tl.range(0, length, CHUNK, num_stages=STAGES):
        real = before + row < length
        token = first + before + row
        place = token * HEADS + head
        held_key = real[:, None] & in_key[None, :]
        held_value = real[:, None] & in_value[None, :]
        k = tl.load(key + token[:, None] * key_stride + dim[None, :], mask=held_key, other=0.0)
        total = tl.load(total_factor + (chunk + before // CHUNK) * HEADS + head)
        of_write = tl.load(write_factor + place, mask=real, other=0.0)
        narrow = sums.to(k.dtype)
        tl.store(kept_at, narrow.to(states.dtype.element_ty), mask=held)
        kept_at += HEADS * KEY_DIM * VALUE_DIM
        if DELTA:
            w = tl.load(read + place[:, None] * KEY_DIM + dim[None, :], mask=held_key, other=0.0)
            u = tl.load(target + place[:, None] * VALUE_DIM + column[None, :], mask=held_value, other=0.0)
            added = u.to(tl.float32) - tl.dot(w, narrow, input_precision=PRECISION)
            out_at = out + token[:, None] * out_stride + column[None, :]
            tl.store(out_at, added.to(out.dtype.element_ty), mask=held_value)
        else:
            value_at = value + token[:, None] * value_stride + column[None, :]
            added = tl.load(value_at, mask=held_value, other=0.0).to(tl.float32)
        kept = (added * of_write[:, None]).to(k.dtype)
        sums = tl.dot(tl.trans(k), kept, sums * total, input_precision=PRECISION)
    # Several threads may hold the same element, and all must read it before one writes it.
    tl.debug_barrier()
    tl.store(state_at, sums, mask=held & moves)


@triton.jit
def output_kernel(
    query, value, skip, chunks, weights, query_factor, states, out,
    query_stride, query_stride_head, value_stride, value_stride_head, out_stride, out_stride_head,
    HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, DELTA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The outputs of one chunk of `WorkLists.chunks` for one head. Program (part of the value, head, chunk).

    Arguments are those of the other kernels. With DELTA, `out` has what each token writes, and gets the outputs.
    """
    record = chunks + tl.program_id(2) * 4
    length = tl.load(record + 1)
    if length == 0:
        return
    head = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, CHUNK)
    dim = tl.arange(0, BLOCK_K)
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    before = tl.load(record + 3)
    real = before + row < length
    token = tl.load(record).to(tl.int64) + before + row
    place = token * HEADS + head
    in_key, in_value = dim < KEY_DIM, column < VALUE_DIM
    held_value = real[:, None] & in_value[None, :]
    query += head // GROUP_SIZE * query_stride_head
    q = tl.load(query + token[:, None] * query_stride + dim[None, :], mask=real[:, None] & in_key[None, :], other=0.0)
    state_at = states + ((tl.program_id(2).to(tl.int64) * HEADS + head) * KEY_DIM + dim[:, None]) * VALUE_DIM
    kept = tl.load(state_at + column[None, :], mask=in_key[:, None] & in_value[None, :], other=0.0)
    weight = tl.load(weights + place[:, None] * CHUNK + row[None, :], mask=real[:, None], other=0.0)
    of_query = tl.load(query_factor + place, mask=real, other=0.0)
    out_at = out + head * out_stride_head + token[:, None] * out_stride + column[None, :]
    if DELTA:
        added = tl.load(out_at, mask=held_value, other=0.0)
    else:
        value_at = value + head * value_stride_head + token[:, None] * value_stride + column[None, :]
        added = tl.load(value_at, mask=held_value, other=0.0)
    found = tl.dot(q, kept, input_precision=PRECISION) * of_query[:, None]
    found = tl.dot(weight, added.to(q.dtype), found, input_precision=PRECISION)
    if skip is not None:
        found += tl.load(skip + head).to(tl.float32) * added.to(tl.float32)
    # Several threads may hold the same element, and all must read it before one writes it.
    tl.debug_barrier()
    tl.store(out_at, found.to(out.dtype.element_ty), mask=held_value)
