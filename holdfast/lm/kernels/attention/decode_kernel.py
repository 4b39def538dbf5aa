"""The Triton kernel of attention for few queries per segment, bound by reading keys and values."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.lm.kernels.attention.segment_kernels import begin_rows, capped, first_seen, put_rows, weigh
from holdfast.lm.kernels.fp8_conversion import query_for_keys, values_as
from holdfast.lm.kernels.launch import launch_dependents, wait_for_previous


@triton.jit
def decode_kernel(
    query, key_cache, value_cache, tables, work, sinks, out, partial_out, partial_log,
    query_stride_token, query_stride_head, key_stride_block, key_stride_slot, key_stride_head,
    value_stride_block, value_stride_slot, value_stride_head, out_stride_token, out_stride_head, table_stride,
    scale, softcap, window,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNKED: tl.constexpr, STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute one record of `tiles.TileList.work` for one KV head. Program (KV head, record).

    Programs that run together read the same slots, because the heads of a slot are adjacent. The kernel has one loop,
    and all its loads are masked. A second loop for the last keys would have to fill its pipeline again.
    """
    launch_dependents(DEPENDENT)
    kv_head = tl.program_id(0)
    record = work + tl.program_id(1) * 8
    first_token = tl.load(record)
    rows = tl.load(record + 1)
    if (rows == 0) & (tl.program_id(1) > 0):
        return  # without waiting, because programs of the first record wait for the whole kernel
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

    key_cache += kv_head.to(tl.int64) * key_stride_head
    value_cache += kv_head.to(tl.int64) * value_stride_head
    begin = first_key
    if HAS_WINDOW:
        begin = tl.maximum(first_key, first_seen(start + first_row // GROUP_SIZE, window, CHUNKED))
    last_key = tl.maximum(stop_key - 1, 0)
    # Each iteration looks up the blocks of the next one, so that its keys and values can be requested at once.
    block = tl.load(table + tl.minimum(begin + tl.arange(0, BLOCK_N), last_key) // BLOCK_SIZE)

    wait_for_previous(DEPENDENT)
    query_at = query + (batch_token * query_stride_token + head * query_stride_head)[:, None] + dim[None, :]
    tile = query_for_keys(tl.load(query_at, mask=held, other=0.0), key_cache.dtype.element_ty)
    top, total = begin_rows(sinks, head, row, rows, first_key, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in tl.range(begin, stop_key, BLOCK_N, num_stages=STAGES):
        key_position = first + tl.arange(0, BLOCK_N)
        inside = key_position < stop_key
        offset = key_position % BLOCK_SIZE
        key_at = key_cache + (block.to(tl.int64) * key_stride_block + offset * key_stride_slot)
        value_at = value_cache + (block.to(tl.int64) * value_stride_block + offset * value_stride_slot)
        block = tl.load(table + tl.minimum(key_position + BLOCK_N, last_key) // BLOCK_SIZE)
        if BLOCK_D == HEAD_DIM:
            key = tl.load(key_at[None, :] + dim[:, None], mask=inside[None, :], other=0.0)
            value = tl.load(value_at[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
        else:
            whole = dim < HEAD_DIM
            key = tl.load(key_at[None, :] + dim[:, None], mask=inside[None, :] & whole[:, None], other=0.0)
            value = tl.load(value_at[:, None] + dim[None, :], mask=inside[:, None] & whole[None, :], other=0.0)
        scores = tl.dot(tile, key.to(tile.dtype), input_precision="ieee")
        scores, unit = capped(scores, scale, softcap, HAS_SOFTCAP)
        seen = (key_position[None, :] <= position[:, None]) & inside[None, :]
        if HAS_WINDOW:
            seen = seen & (key_position[None, :] >= first_seen(position, window, CHUNKED)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        weights, top, total, fade = weigh(scores, unit, top, total)
        acc = tl.dot(
            weights.to(tile.dtype), values_as(value, tile.dtype, last_key), acc * fade[:, None], input_precision="ieee"
        )

    put_rows(
        acc, top, total, partial, kv_head, batch_token, head, real,
        out, partial_out, partial_log, out_stride_token, out_stride_head,
        HEAD_DIM, BLOCK_M, BLOCK_D, 0,
    )  # fmt: skip
