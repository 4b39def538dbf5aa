"""Triton kernels of paged attention: long segments on any GPU, the merge of partial results, and the cache write.

`decode_kernel` uses their online softmax too.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.lm.kernels.fp8_conversion import query_for_keys, to_cache_dtype
from holdfast.lm.kernels.launch import launch_dependents, wait_for_previous

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def begin_rows(sinks, head, row, rows, first_key, BLOCK_M: tl.constexpr):
    """Return each row's maximum score (top) and sum of weights (total), both [M], before any key is read.

    They are -inf and 0 for a row without a sink. With `sinks`, a row has its head's sink if `first_key` is 0, so that
    the sink counts once: in the first part of the context. Its score is then top, and total is 1.
    """
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if sinks is not None:
        counted = row < tl.where(first_key == 0, rows, 0)
        top = tl.load(sinks + head, mask=counted, other=float("-inf")).to(tl.float32) * LOG2_E
    total = tl.where(top == float("-inf"), 0.0, 1.0)
    return top, total


@triton.jit
def capped(scores, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores [M, N] from query-key products, and the factor that turns them into exponents of 2.

    With a softcap, `scale` already includes 1 / softcap.
    """
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1) is correct at both infinities
        scores = 1.0 - 2.0 / (tl.exp2(scores * (scale * 2.0 * LOG2_E)) + 1.0)
        unit = softcap * LOG2_E
    else:
        unit = scale * LOG2_E
    return scores, unit


@triton.jit
def weigh(scores, unit, top, total):
    """One step: weights [M, N] of scores [M, N], the new top and total [M], and the factor on earlier sums [M]."""
    new_top = tl.maximum(top, tl.max(scores, 1) * unit)  # scaled here, to fuse with the subtraction
    # A row that has seen no key has no top. Any number will do, since all its weights are zero.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * unit - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(weights, 1)
    return weights, new_top, total, fade


@triton.jit
def put_rows(
    acc, top, total, partial, kv_head, batch_token, head, real,
    out, partial_out, partial_log, out_stride_token, out_stride_head,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, HEADS_AXIS: tl.constexpr,
):  # fmt: skip
    """Store the tile's result in `out`, or as partial result `partial` - 1 with the logarithm of its sum.

    HEADS_AXIS is the axis of the grid that counts the KV heads.
    """
    dim = tl.arange(0, BLOCK_D)
    held = real[:, None] & (dim < HEAD_DIM)[None, :]
    # If a part of the context is wholly outside a row's window, its total is 0 and its top stays -inf.
    total = tl.where(total == 0.0, 1.0, total)
    result = acc / total[:, None]
    if partial == 0:
        out_at = out + (batch_token * out_stride_token + head * out_stride_head)[:, None] + dim[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=held)
    else:
        place = ((partial - 1).to(tl.int64) * tl.num_programs(HEADS_AXIS) + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(partial_out + place[:, None] * HEAD_DIM + dim[None, :], result, mask=held)
        tl.store(partial_log + place, top + tl.log2(total), mask=real)


@triton.jit
def first_seen(position, window, CHUNKED: tl.constexpr):
    """The first position that a query sees: the start of its chunk, or of the window that ends with it."""
    if CHUNKED:
        first = position // window * window
    else:
        first = position - window + 1
    return first


@triton.jit
def _attend_keys(
    acc, top, total, query, key_cache, value_cache, table, position, begin, end,
    scale, softcap, window, key_strides, value_strides,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNKED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Continue the online softmax (acc [M, D], top and total [M]) of a tile's rows over the keys [begin, end).

    Without MASKED, every row must see every key, and the keys must fill whole blocks of BLOCK_N.
    """
    dim = tl.arange(0, BLOCK_D)
    for first in range(begin, end, BLOCK_N):
        key_position = first + tl.arange(0, BLOCK_N)
        if MASKED:
            block = tl.load(table + key_position // BLOCK_SIZE, mask=key_position < end, other=0).to(tl.int64)
        else:
            block = tl.load(table + key_position // BLOCK_SIZE).to(tl.int64)
        offset = key_position % BLOCK_SIZE
        key_at = key_cache + (block * key_strides[0] + offset * key_strides[1])[None, :] + dim[:, None]
        value_at = value_cache + (block * value_strides[0] + offset * value_strides[1])[:, None] + dim[None, :]
        if MASKED:
            inside = key_position < end
            key = tl.load(key_at, mask=inside[None, :] & (dim < HEAD_DIM)[:, None], other=0.0)
        elif BLOCK_D != HEAD_DIM:
            key = tl.load(key_at, mask=(dim < HEAD_DIM)[:, None], other=0.0)
        else:
            key = tl.load(key_at)
        scores = tl.dot(query, key.to(query.dtype), input_precision="ieee")
        scores, unit = capped(scores, scale, softcap, HAS_SOFTCAP)
        if MASKED:
            seen = (key_position[None, :] <= position[:, None]) & inside[None, :]
            if HAS_WINDOW:
                seen = seen & (key_position[None, :] >= first_seen(position, window, CHUNKED)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        weights, top, total, fade = weigh(scores, unit, top, total)
        if MASKED:
            value = tl.load(value_at, mask=inside[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        elif BLOCK_D != HEAD_DIM:
            value = tl.load(value_at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        else:
            value = tl.load(value_at)
        acc = tl.dot(weights.to(query.dtype), value.to(query.dtype), acc * fade[:, None], input_precision="ieee")
    return acc, top, total


@triton.jit
def attend_kernel(
    query, key_cache, value_cache, tables, work, sinks, out, partial_out, partial_log,
    query_stride_token, query_stride_head, key_stride_block, key_stride_slot, key_stride_head,
    value_stride_block, value_stride_slot, value_stride_head, out_stride_token, out_stride_head, table_stride,
    scale, softcap, window,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Compute one record of `tiles.TileList.work` for one KV head. Program (record, KV head)."""
    record = work + tl.program_id(0) * 8
    kv_head = tl.program_id(1)
    first_token = tl.load(record)
    rows = tl.load(record + 1)
    if rows == 0:
        return
    start = tl.load(record + 2)
    table = tables + tl.load(record + 3).to(tl.int64) * table_stride
    first_row = tl.load(record + 4)
    first_key = tl.load(record + 5)
    stop_key = tl.load(record + 6)
    partial = tl.load(record + 7)

    row = first_row + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    token = row // GROUP_SIZE
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    real = row < rows
    held = real[:, None] & (dim < HEAD_DIM)[None, :]
    position = start + token
    batch_token = (first_token + token).to(tl.int64)
    query_at = query + (batch_token * query_stride_token + head * query_stride_head)[:, None] + dim[None, :]
    tile = query_for_keys(tl.load(query_at, mask=held, other=0.0), key_cache.dtype.element_ty)

    top, total = begin_rows(sinks, head, row, rows, first_key, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    key_cache += kv_head.to(tl.int64) * key_stride_head
    value_cache += kv_head.to(tl.int64) * value_stride_head
    key_strides = (key_stride_block, key_stride_slot)
    value_strides = (value_stride_block, value_stride_slot)
    earliest = start + first_row // GROUP_SIZE  # position of the tile's first query
    begin = first_key
    if HAS_WINDOW:
        begin = tl.maximum(first_key, first_seen(earliest, window, CHUNKED))
    else:
        seen_by_all = tl.minimum(stop_key, earliest + 1) - first_key
        begin = first_key + tl.maximum(seen_by_all, 0) // BLOCK_N * BLOCK_N
        acc, top, total = _attend_keys(
            acc, top, total, tile, key_cache, value_cache, table, position, first_key, begin,
            scale, softcap, window, key_strides, value_strides,
            HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, HAS_SOFTCAP, HAS_WINDOW, CHUNKED, False,
        )  # fmt: skip
    acc, top, total = _attend_keys(
        acc, top, total, tile, key_cache, value_cache, table, position, begin, stop_key,
        scale, softcap, window, key_strides, value_strides,
        HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, HAS_SOFTCAP, HAS_WINDOW, CHUNKED, True,
    )  # fmt: skip
    put_rows(
        acc, top, total, partial, kv_head, batch_token, head, real,
        out, partial_out, partial_log, out_stride_token, out_stride_head,
        HEAD_DIM, BLOCK_M, BLOCK_D, 1,
    )  # fmt: skip


@triton.jit
def merge_kernel(
    merges, partial_out, partial_log, out, out_stride_token, out_stride_head,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Add the partial results of each row, weighted by their share of its softmax.

    Program (merge record, first row, KV head). The programs of a record share the rows of its tile.
    """
    launch_dependents(DEPENDENT)
    record = merges + tl.program_id(0) * 8
    kv_head = tl.program_id(2)
    first_token = tl.load(record)
    rows = tl.load(record + 1)
    first_row = tl.load(record + 2)
    first_partial = tl.load(record + 3)
    count = tl.load(record + 4)
    wait_for_previous(DEPENDENT)
    dim = tl.arange(0, BLOCK_D)
    for row_in_tile in range(tl.program_id(1), tl.minimum(rows - first_row, BLOCK_M), tl.num_programs(1)):
        row = first_row + row_in_tile
        top = tl.full([], float("-inf"), tl.float32)
        total = tl.zeros([], tl.float32)
        acc = tl.zeros([BLOCK_D], tl.float32)
        for begin in range(0, count, BLOCK_S):
            part = begin + tl.arange(0, BLOCK_S)
            place = ((first_partial + part).to(tl.int64) * tl.num_programs(2) + kv_head) * BLOCK_M + row_in_tile
            log = tl.load(partial_log + place, mask=part < count, other=float("-inf"))
            held = (part < count)[:, None] & (dim < HEAD_DIM)[None, :]
            value = tl.load(partial_out + place[:, None] * HEAD_DIM + dim[None, :], mask=held, other=0.0)
            new_top = tl.maximum(top, tl.max(log, 0))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(log - base)
            fade = tl.exp2(top - base)
            total = total * fade + tl.sum(weights, 0)
            acc = acc * fade + tl.sum(weights[:, None] * value, 0)
            top = new_top
        token = (first_token + row // GROUP_SIZE).to(tl.int64)
        head = kv_head * GROUP_SIZE + row % GROUP_SIZE
        out_at = out + token * out_stride_token + head * out_stride_head + dim
        tl.store(out_at, (acc / total).to(out.dtype.element_ty), mask=dim < HEAD_DIM)


@triton.jit
def write_kernel(
    key, value, key_cache, value_cache, slot_mapping,
    key_stride_token, key_stride_head, value_stride_token, value_stride_head,
    key_cache_stride_block, key_cache_stride_slot, key_cache_stride_head,
    value_cache_stride_block, value_cache_stride_slot, value_cache_stride_head,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one token's keys and values to its slot; a negative slot is padding and is skipped. Program (token)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        block = (slot // BLOCK_SIZE).to(tl.int64)
        offset = slot % BLOCK_SIZE
        item = tl.arange(0, BLOCK)
        held = item < NUM_KV_HEADS * HEAD_DIM
        head = item // HEAD_DIM
        dim = item % HEAD_DIM
        key_item = tl.load(key + token * key_stride_token + head * key_stride_head + dim, mask=held)
        value_item = tl.load(value + token * value_stride_token + head * value_stride_head + dim, mask=held)
        key_at = key_cache + block * key_cache_stride_block + offset * key_cache_stride_slot
        value_at = value_cache + block * value_cache_stride_block + offset * value_cache_stride_slot
        key_item = to_cache_dtype(key_item, key_cache.dtype.element_ty)
        value_item = to_cache_dtype(value_item, value_cache.dtype.element_ty)
        tl.store(key_at + head * key_cache_stride_head + dim, key_item, mask=held)
        tl.store(value_at + head * value_cache_stride_head + dim, value_item, mask=held)
