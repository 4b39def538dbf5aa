"""The prefill kernel for Hopper: paged attention of long segments, written in Gluon with specialised warps."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BLOCK_M = 128  # rows of a tile: two warpgroups of 64
BLOCK_N = 128  # keys of a step
PANEL = 64  # elements of the 128 bytes that a swizzled row of shared memory holds
STAGES = 2

# Triton renamed it after 3.6.
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def _item_of(turn):
    """This program's work item of a turn: each second turn goes backwards, so that long and short ones add up."""
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, place, programs - 1 - place)


@gluon.jit
def _read(
    work, tables, item, items, table_stride, window,
    NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """A record of `tiles.TileList.work` (no rows behind the last one), the first key that counts, and the steps."""
    held = gl.minimum(item, items - 1)
    kv_head = held % NUM_KV_HEADS
    record = work + held // NUM_KV_HEADS * 8
    first_token = gl.load(record)
    rows = gl.where(item < items, gl.load(record + 1), 0)
    start = gl.load(record + 2)
    table = tables + gl.load(record + 3).to(gl.int64) * table_stride
    first_row = gl.load(record + 4)
    first_key = gl.load(record + 5)
    stop_key = gl.load(record + 6)
    partial = gl.load(record + 7)
    begin = first_key
    if HAS_WINDOW:
        skipped = start + first_row // GROUP_SIZE - window + 1 - first_key
        begin += gl.maximum(skipped, 0) // BLOCK_N * BLOCK_N
    steps = gl.maximum(gl.cdiv(stop_key - begin, BLOCK_N), 1)
    return kv_head, first_token, rows, start, table, first_row, first_key, stop_key, partial, begin, steps


@gluon.jit
def _places(table, first, stop_key, cache_rows, BOX: gl.constexpr, BOXES: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Where the boxes of a step begin, as rows of the cache."""
    places = ()
    for box in gl.static_range(BOXES):
        key = first + box * BOX
        block = gl.load(table + gl.minimum(key, stop_key - 1) // BLOCK_SIZE)
        # A box past the last row of the cache is filled with zeros.
        place = gl.where(key < stop_key, block * BLOCK_SIZE + key % BLOCK_SIZE, cache_rows)
        places = places + (place,)
    return places


@gluon.jit
def _copy(source, column, places, full, boxes, first_box, HEAD_DIM: gl.constexpr):
    """Have one step's keys or values copied; `full` completes when they are there."""
    BOX: gl.constexpr = source.block_type.shape[0]
    PANEL: gl.constexpr = source.block_type.shape[1]
    BOXES: gl.constexpr = len(places)
    mbarrier.expect(full, BOXES * BOX * HEAD_DIM * 2)
    for box in gl.static_range(BOXES):
        for panel in gl.static_range(HEAD_DIM // PANEL):
            load_box(source, [places[box], column + panel * PANEL], full, boxes.index(first_box + panel * BOXES + box))


@gluon.jit
def _load(
    key_map, value_map, keys, values, key_full, key_empty, value_full, value_empty,
    work, tables, items, table_stride, cache_rows, window,
    NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """The producer: one warp that has the keys and values of each step copied into shared memory, block by block."""
    BOX: gl.constexpr = key_map.block_type.shape[0]
    BOXES: gl.constexpr = BLOCK_N // BOX
    BOXES_PER_STAGE: gl.constexpr = keys.shape[0] // STAGES
    done = 0
    record = _read(work, tables, _item_of(0), items, table_stride, window, NUM_KV_HEADS, GROUP_SIZE, BLOCK_N, HAS_WINDOW)
    for turn in range(gl.cdiv(items, gl.num_programs(0))):
        kv_head, _, rows, _, table, _, _, stop_key, _, begin, steps = record
        record = _read(
            work, tables, _item_of(turn + 1), items, table_stride, window, NUM_KV_HEADS, GROUP_SIZE, BLOCK_N, HAS_WINDOW
        )
        if rows > 0:
            column = kv_head * HEAD_DIM
            places = _places(table, begin, stop_key, cache_rows, BOX, BOXES, BLOCK_SIZE)
            for step in range(steps):
                stage = done % STAGES
                phase = (done // STAGES) & 1
                mbarrier.wait(key_empty.index(stage), phase ^ 1)
                _copy(key_map, column, places, key_full.index(stage), keys, stage * BOXES_PER_STAGE, HEAD_DIM)
                # The next step's blocks are looked up while this one waits for room.
                following = _places(
                    table, begin + (step + 1) * BLOCK_N, stop_key, cache_rows, BOX, BOXES, BLOCK_SIZE
                )
                mbarrier.wait(value_empty.index(stage), phase ^ 1)
                _copy(value_map, column, places, value_full.index(stage), values, stage * BOXES_PER_STAGE, HEAD_DIM)
                places = following
                done += 1


@gluon.jit
def _weigh(scores, top, total, position, first, scale, softcap, window, BLOCK_N: gl.constexpr,
           HAS_SOFTCAP: gl.constexpr, HAS_WINDOW: gl.constexpr, MASKED: gl.constexpr, LAYOUT: gl.constexpr):
    """One step of the online softmax: weights [M, N] of scores [M, N], the new top and total, and the old ones' fade.

    `scale` and `softcap` hold log2(e) where the exponent needs it. Not MASKED promises that every row sees every key.
    """
    unit = scale
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1) is right at both infinities
        scores = 1.0 - 2.0 / (gl.exp2(scores * scale) + 1.0)
        unit = softcap
    if MASKED:
        key = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        seen = key[None, :] <= position[:, None]
        if HAS_WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        scores = gl.where(seen, scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1) * unit)
    base = new_top
    if MASKED:
        # A row that has seen no key yet has no top: any number will do, as all its weights are zero.
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(scores * unit - base[:, None])
    fade = gl.exp2(top - base)
    total = total * fade + gl.sum(weights, 1)
    return weights, new_top, total, fade


@gluon.jit
def _step(
    acc, weights, top, total, position, first, done, turns, both,
    queries, keys, values, key_full, key_empty, value_full, value_empty, own_turn, other_turn, gate,
    scale, softcap, window,
    WARPGROUP: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    HAS_WINDOW: gl.constexpr, MASKED: gl.constexpr, PING_PONG: gl.constexpr, FENCED: gl.constexpr, LAYOUT: gl.constexpr,
    WEIGHTS: gl.constexpr, RESULT: gl.constexpr,
):  # fmt: skip
    """The scores of step `done` and the result of the step before are computed side by side, under the softmax."""
    stage = done % STAGES
    phase = (done // STAGES) & 1
    old_stage = (done - 1) % STAGES
    old_phase = ((done - 1) // STAGES) & 1
    mbarrier.wait(key_full.index(stage), phase)
    if PING_PONG:
        mbarrier.wait(own_turn, (turns + 1 - WARPGROUP) & 1, pred=both)
    zeros = gl.zeros([64, BLOCK_N], gl.float32, LAYOUT)
    scores = hopper.warpgroup_mma(queries, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(value_full.index(old_stage), old_phase)
    acc = hopper.warpgroup_mma(weights, values.index(old_stage), acc, is_async=True)
    if PING_PONG:
        mbarrier.arrive(other_turn, pred=both)
    scores = hopper.warpgroup_mma_wait(1, [scores])
    mbarrier.arrive(key_empty.index(stage))
    new_weights, top, total, fade = _weigh(
        scores, top, total, position, first, scale, softcap, window, BLOCK_N, HAS_SOFTCAP, HAS_WINDOW, MASKED, LAYOUT
    )
    if FENCED:
        mbarrier.wait(gate, 1)
    acc, weights = hopper.warpgroup_mma_wait(0, [acc, weights])
    mbarrier.arrive(value_empty.index(old_stage))
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, RESULT))[:, None]
    weights = gl.convert_layout(new_weights.to(weights.dtype), WEIGHTS)
    return acc, weights, top, total


@gluon.jit
def _row_places(row, kv_head, first_token, stride_token, stride_head, GROUP_SIZE: gl.constexpr):
    """Where the rows of a tile begin in a tensor [T, Hq, D]."""
    token = (first_token + row // GROUP_SIZE).to(gl.int64)
    return token * stride_token + (kv_head * GROUP_SIZE + row % GROUP_SIZE) * stride_head


@gluon.jit
def _load_queries(query, record, stride_token, stride_head, WARPGROUP: gl.constexpr, GROUP_SIZE: gl.constexpr,
                  WIDE: gl.constexpr, dim):
    """This warpgroup's rows of a tile, [64, D]."""
    kv_head, first_token, rows, _, _, first_row, _, _, _, _, _ = record
    row = first_row + WARPGROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    at = _row_places(row, kv_head, first_token, stride_token, stride_head, GROUP_SIZE)
    return gl.load(query + at[:, None] + dim[None, :], mask=(row < rows)[:, None], other=0.0)


@gluon.jit
def _store(
    out, content, kv_head, first_token, rows, first_row, stride_token, stride_head,
    GROUP_SIZE: gl.constexpr, WIDE: gl.constexpr, dim,
):  # fmt: skip
    """Put the final results [64, D] of this warpgroup's rows in their place."""
    row = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    at = _row_places(row, kv_head, first_token, stride_token, stride_head, GROUP_SIZE)
    gl.store(out + at[:, None] + dim[None, :], content, mask=(row < rows)[:, None])


@gluon.jit
def _store_partial(
    partial_out, partial_log, result, log, rows, first_row, first_place,
    HEAD_DIM: gl.constexpr, LAYOUT: gl.constexpr, RESULT: gl.constexpr,
):  # fmt: skip
    """Put results [64, D] of a part of the context, and the logarithms of their sums [64], where the merge reads them."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, RESULT))
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, RESULT))
    at = partial_out + (first_place + row)[:, None] * HEAD_DIM + column[None, :]
    gl.store(at, result, mask=(first_row + row < rows)[:, None])
    log_row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    gl.store(partial_log + first_place + log_row, log, mask=first_row + log_row < rows)


@gluon.jit
def _attend(
    shared, common,
    WARPGROUP: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr, PING_PONG: gl.constexpr, FENCED: gl.constexpr,
):  # fmt: skip
    """A consumer: four warps that hold 64 rows of each tile."""
    query_buffers, keys, values, key_boxes, value_boxes, key_full, key_empty, value_full, value_empty, turn_of = shared
    (
        query, out, partial_out, partial_log, sinks, work, tables, items, table_stride,
        query_stride_token, query_stride_head, out_stride_token, out_stride_head, scale, softcap, window,
    ) = common  # fmt: skip
    dtype: gl.constexpr = query.dtype.element_ty
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    # 16 bytes a thread, whole rows side by side
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    BOX: gl.constexpr = value_boxes.shape[1]
    PANEL: gl.constexpr = value_boxes.shape[2]
    BOXES: gl.constexpr = BLOCK_N // BOX
    PANELS: gl.constexpr = HEAD_DIM // PANEL
    BOX_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])

    queries = query_buffers.index(WARPGROUP)
    own_turn = turn_of.index(WARPGROUP)
    other_turn = turn_of.index(1 - WARPGROUP)
    done = 0
    turns = 0
    gate = turn_of.index(2)
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, WIDE))
    record = _read(work, tables, _item_of(0), items, table_stride, window, NUM_KV_HEADS, GROUP_SIZE, BLOCK_N, HAS_WINDOW)
    tile = _load_queries(query, record, query_stride_token, query_stride_head, WARPGROUP, GROUP_SIZE, WIDE, dim)
    for turn in range(gl.cdiv(items, gl.num_programs(0))):
        kv_head, first_token, rows, start, _, tile_row, first_key, stop_key, partial, begin, steps = record
        record = _read(
            work, tables, _item_of(turn + 1), items, table_stride, window, NUM_KV_HEADS, GROUP_SIZE, BLOCK_N, HAS_WINDOW
        )
        first_row = tile_row + WARPGROUP * 64
        if first_row < rows:
            queries.store(tile)
            hopper.fence_async_shared()
            own_row = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
            position = start + own_row // GROUP_SIZE
            top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
            if HAS_SINKS:
                # The sink counts once, in the first part of the context.
                counted = own_row < gl.where(first_key == 0, rows, 0)
                sink_at = sinks + kv_head * GROUP_SIZE + own_row % GROUP_SIZE
                top = gl.load(sink_at, mask=counted, other=float("-inf")).to(gl.float32) * 1.4426950408889634
            total = gl.where(top == float("-inf"), 0.0, 1.0)
            acc = gl.zeros([64, HEAD_DIM], gl.float32, RESULT)
            # Turns are taken only where the other warpgroup has rows too.
            both = tile_row + 64 < rows

            # The first step has no result of a step before to compute beside it.
            stage = done % STAGES
            mbarrier.wait(key_full.index(stage), (done // STAGES) & 1)
            zeros = gl.zeros([64, BLOCK_N], gl.float32, LAYOUT)
            scores = hopper.warpgroup_mma(
                queries, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            scores = hopper.warpgroup_mma_wait(0, [scores])
            mbarrier.arrive(key_empty.index(stage))
            weights, top, total, fade = _weigh(
                scores, top, total, position, begin, scale, softcap, window, BLOCK_N, HAS_SOFTCAP, HAS_WINDOW, True,
                LAYOUT,
            )  # fmt: skip
            weights = gl.convert_layout(weights.to(dtype), WEIGHTS)

            whole = gl.maximum((gl.minimum(stop_key, start + first_row // GROUP_SIZE + 1) - begin) // BLOCK_N, 1)
            if HAS_WINDOW:
                whole = 1
            whole = gl.minimum(whole, steps)
            for step in range(1, whole):
                acc, weights, top, total = _step(
                    acc, weights, top, total, position, begin + step * BLOCK_N, done + step, turns + step - 1, both,
                    queries, keys, values, key_full, key_empty, value_full, value_empty, own_turn, other_turn, gate,
                    scale, softcap, window, WARPGROUP, BLOCK_N, STAGES, HAS_SOFTCAP, HAS_WINDOW, False, PING_PONG,
                    FENCED, LAYOUT, WEIGHTS, RESULT,
                )  # fmt: skip
            for step in range(whole, steps):
                acc, weights, top, total = _step(
                    acc, weights, top, total, position, begin + step * BLOCK_N, done + step, turns + step - 1, both,
                    queries, keys, values, key_full, key_empty, value_full, value_empty, own_turn, other_turn, gate,
                    scale, softcap, window, WARPGROUP, BLOCK_N, STAGES, HAS_SOFTCAP, HAS_WINDOW, True, PING_PONG,
                    FENCED, LAYOUT, WEIGHTS, RESULT,
                )  # fmt: skip
            turns += gl.where(both, steps - 1, 0)
            done += steps
            stage = (done - 1) % STAGES
            mbarrier.wait(value_full.index(stage), ((done - 1) // STAGES) & 1)
            slack = stop_key % BLOCK_SIZE
            if slack > 0:
                # Slots behind the last key may never have been written; a weight of zero does not undo a NaN.
                box = (stop_key - 1 - begin) % BLOCK_N // BOX
                last = (stop_key - 1) % BOX
                slot = gl.arange(0, BOX, layout=gl.SliceLayout(1, BOX_ROWS))
                for panel in gl.static_range(PANELS):
                    place = value_boxes.index((stage * PANELS + panel) * BOXES + box)
                    content = place.load(BOX_ROWS)
                    place.store(gl.where((slot <= last)[:, None], content, gl.zeros_like(content)))
                hopper.fence_async_shared()
            acc = hopper.warpgroup_mma(weights, values.index(stage), acc, is_async=True)
            # The next tile's queries are on their way while this one ends.
            tile = _load_queries(query, record, query_stride_token, query_stride_head, WARPGROUP, GROUP_SIZE, WIDE, dim)
            acc, weights = hopper.warpgroup_mma_wait(0, [acc, weights])
            mbarrier.arrive(value_empty.index(stage))

            # A part of the context that lies wholly outside a row's window leaves it empty: its top stays -inf.
            total = gl.where(total == 0.0, 1.0, total)
            result = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, RESULT))[:, None]
            if partial == 0:
                queries.store(result.to(dtype))
                _store(
                    out, queries.load(WIDE), kv_head, first_token, rows, first_row, out_stride_token, out_stride_head,
                    GROUP_SIZE, WIDE, dim,
                )  # fmt: skip
            else:
                first_place = ((partial - 1).to(gl.int64) * NUM_KV_HEADS + kv_head) * 128 + WARPGROUP * 64
                _store_partial(
                    partial_out, partial_log, result, top + gl.log2(total), rows, first_row, first_place, HEAD_DIM,
                    LAYOUT, RESULT,
                )  # fmt: skip
        else:
            if rows > 0:
                # The other warpgroup alone has rows: what is loaded for both is let go.
                for step in range(done, done + steps):
                    stage = step % STAGES
                    phase = (step // STAGES) & 1
                    mbarrier.wait(key_full.index(stage), phase)
                    mbarrier.arrive(key_empty.index(stage))
                    mbarrier.wait(value_full.index(stage), phase)
                    mbarrier.arrive(value_empty.index(stage))
                done += steps
            tile = _load_queries(query, record, query_stride_token, query_stride_head, WARPGROUP, GROUP_SIZE, WIDE, dim)


@gluon.jit(do_not_specialize=["items", "table_stride", "cache_rows", "window"])
def prefill_kernel(
    key_map, value_map, query, tables, work, sinks, out, partial_out, partial_log,
    items, query_stride_token, query_stride_head, out_stride_token, out_stride_head, table_stride, cache_rows,
    scale, softcap, window,
    NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_WINDOW: gl.constexpr,
    HAS_SINKS: gl.constexpr, PING_PONG: gl.constexpr, FENCED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = key_map.dtype
    BOX: gl.constexpr = key_map.block_type.shape[0]
    PANEL: gl.constexpr = key_map.block_type.shape[1]
    BOXES: gl.constexpr = STAGES * (HEAD_DIM // PANEL) * (BLOCK_N // BOX)
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    key_boxes = gl.allocate_shared_memory(dtype, [BOXES, BOX, PANEL], key_map.layout)
    value_boxes = gl.allocate_shared_memory(dtype, [BOXES, BOX, PANEL], value_map.layout)
    queries = gl.allocate_shared_memory(dtype, [2, 64, HEAD_DIM], SWIZZLED)
    keys = key_boxes._reinterpret(dtype, [STAGES, BLOCK_N, HEAD_DIM], SWIZZLED)
    values = value_boxes._reinterpret(dtype, [STAGES, BLOCK_N, HEAD_DIM], SWIZZLED)
    key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    key_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn_of = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(key_full.index(stage), count=1)
        mbarrier.init(key_empty.index(stage), count=2)
        mbarrier.init(value_full.index(stage), count=1)
        mbarrier.init(value_empty.index(stage), count=2)
    mbarrier.init(turn_of.index(0), count=1)
    mbarrier.init(turn_of.index(1), count=1)
    mbarrier.init(turn_of.index(2), count=1)

    shared = (queries, keys, values, key_boxes, value_boxes, key_full, key_empty, value_full, value_empty, turn_of)
    common = (
        query, out, partial_out, partial_log, sinks, work, tables, items, table_stride,
        query_stride_token, query_stride_head, out_stride_token, out_stride_head, scale, softcap, window,
    )  # fmt: skip
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_attend, (
                shared, common, FIRST,
                NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM, BLOCK_SIZE, BLOCK_N, STAGES,
                HAS_SOFTCAP, HAS_WINDOW, HAS_SINKS, PING_PONG, FENCED,
            )),
            (_attend, (
                shared, common, SECOND,
                NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM, BLOCK_SIZE, BLOCK_N, STAGES,
                HAS_SOFTCAP, HAS_WINDOW, HAS_SINKS, PING_PONG, FENCED,
            )),
            (_load, (
                key_map, value_map, key_boxes, value_boxes, key_full, key_empty, value_full, value_empty,
                work, tables, items, table_stride, cache_rows, window,
                NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM, BLOCK_SIZE, BLOCK_N, STAGES, HAS_WINDOW,
            )),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip


SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def supports(device: torch.device, *, head_dim: int, block_size: int) -> bool:
    """Whether a model of these heads can have its long segments attended here."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) == (9, 0)
        and head_dim in (64, 128)
        and block_size in (8, 16, 32, 64, 128, 256)
    )


def takes(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> bool:
    """Whether these tensors are of a type and a layout that the copy engine takes."""
    return query.dtype in (torch.bfloat16, torch.float16) and key_cache.is_contiguous() and value_cache.is_contiguous()


def attend(query, key_cache, value_cache, block_tables, work, sinks, out, partial_out, partial_log, *,
           num_processors, scale, window, softcap, ping_pong=True, fenced=True, registers=240, block_n=BLOCK_N, stages=STAGES):
    num_blocks, block_size, num_kv_heads, head_dim = key_cache.shape
    rows = num_blocks * block_size
    width = num_kv_heads * head_dim
    box = [min(block_size, block_n), PANEL]
    key_map = TensorDescriptor(key_cache, [rows, width], [width, 1], box, SWIZZLED)
    value_map = TensorDescriptor(value_cache, [rows, width], [width, 1], box, SWIZZLED)
    items = len(work) * num_kv_heads
    log2_e = 1.4426950408889634
    prefill_kernel[(min(items, num_processors),)](
        key_map, value_map, query, block_tables, work, partial_log if sinks is None else sinks, out,
        partial_out, partial_log, items, *query.stride()[:2], *out.stride()[:2], block_tables.stride(0), rows,
        scale * log2_e if softcap is None else 2 * scale * log2_e / softcap,
        (softcap or 0.0) * log2_e, window or 0,
        NUM_KV_HEADS=num_kv_heads, GROUP_SIZE=query.shape[1] // num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        BLOCK_N=block_n, STAGES=stages, HAS_SOFTCAP=softcap is not None, HAS_WINDOW=window is not None,
        HAS_SINKS=sinks is not None, PING_PONG=ping_pong, FENCED=fenced, REGISTERS=registers, num_warps=4, maxnreg=168,
    )
