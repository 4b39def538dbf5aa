"""The prefill kernel for Hopper: paged attention of long segments, in Gluon, with specialised warps.

The design follows FlashAttention-3 (Shah et al., 2024, sections 3.1 and 3.2). One warp directs the copy engine, which
puts each block of keys and values where the tensor cores read it. Two warpgroups take turns at the tensor cores, so
that the softmax of one overlaps the products of the other. The grid is persistent, with one program per processor.

Gluon has no interpreter. The tests of `paged` run this kernel on a GPU, and `attend_kernel` in its place on a CPU.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

LOG2_E = 1.4426950408889634
BLOCK_M = 128  # rows of a tile: two warpgroups of 64
BLOCK_N = 128  # keys per step
PANEL = 64  # 16-bit elements of a swizzled row of shared memory, 128 bytes
STAGES = 2  # steps whose keys and values fit in shared memory
FIXED_BLOCK_N, FIXED_STAGES = 64, 4  # those of sums in a fixed order, which decodes have too
SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

# Triton renamed these after 3.6.
RENAMED = gl.constexpr(hasattr(tma, "async_load"))
load_box = tma.async_load if RENAMED else tma.async_copy_global_to_shared


@gluon.jit
def _item_of(turn):
    """The work item of this program in a turn. Every second turn runs backwards, to balance long and short items."""
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, place, programs - 1 - place)


@gluon.jit
def _read(
    work, tables, item, table_stride, window,
    NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Read a record of `tiles.TileList.work`; also return the first key to visit and the number of steps from there."""
    record = work + item // NUM_KV_HEADS * 8
    first_token = gl.load(record)
    rows = gl.load(record + 1)
    start = gl.load(record + 2)
    table = tables + gl.load(record + 3).to(gl.int64) * table_stride
    first_row = gl.load(record + 4)
    first_key = gl.load(record + 5)
    stop_key = gl.load(record + 6)
    partial = gl.load(record + 7)
    begin = first_key
    if HAS_WINDOW:
        skipped = start + first_row // GROUP_SIZE - window + 1 - first_key
        # A part of the context wholly before the window keeps its last step, whose keys are all masked.
        skipped = gl.minimum(gl.maximum(skipped, 0), stop_key - 1 - first_key)
        begin += skipped // BLOCK_N * BLOCK_N
    steps = gl.maximum(gl.cdiv(stop_key - begin, BLOCK_N), 1)
    return first_token, rows, start, table, first_row, first_key, stop_key, partial, begin, steps


@gluon.jit
def _load(
    key_map, value_map, keys, values, key_full, key_empty, value_full, value_empty,
    work, tables, items, table_stride, cache_rows, window,
    NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """The producer: one warp that copies the keys and values of each step into shared memory, block by block."""
    BOX: gl.constexpr = key_map.block_type.shape[0]
    PANEL: gl.constexpr = key_map.block_type.shape[1]
    BOXES: gl.constexpr = BLOCK_N // BOX
    PANELS: gl.constexpr = HEAD_DIM // PANEL
    done = 0
    for turn in range(gl.cdiv(items, gl.num_programs(0))):
        item = _item_of(turn)
        if item < items:
            _, rows, _, table, _, _, stop_key, _, begin, steps = _read(
                work, tables, item, table_stride, window, NUM_KV_HEADS, GROUP_SIZE, BLOCK_N, HAS_WINDOW
            )  # fmt: skip
            if rows > 0:
                column = item % NUM_KV_HEADS * HEAD_DIM
                for step in range(steps):
                    stage = done % STAGES
                    phase = (done // STAGES) & 1
                    first = begin + step * BLOCK_N
                    places = ()
                    for box in gl.static_range(BOXES):
                        key = first + box * BOX
                        block = gl.load(table + gl.minimum(key, stop_key - 1) // BLOCK_SIZE)
                        # A box past the last row of the cache is filled with zeros.
                        place = gl.where(key < stop_key, block * BLOCK_SIZE + key % BLOCK_SIZE, cache_rows)
                        places = places + (place,)  # noqa: RUF005 - Triton knows no star in a tuple
                    mbarrier.wait(key_empty.index(stage), phase ^ 1)
                    mbarrier.expect(key_full.index(stage), BLOCK_N * HEAD_DIM * 2)
                    for box in gl.static_range(BOXES):
                        for panel in gl.static_range(PANELS):
                            load_box(key_map, [places[box], column + panel * PANEL], key_full.index(stage),
                                     keys.index((stage * PANELS + panel) * BOXES + box))  # fmt: skip
                    mbarrier.wait(value_empty.index(stage), phase ^ 1)
                    mbarrier.expect(value_full.index(stage), BLOCK_N * HEAD_DIM * 2)
                    for box in gl.static_range(BOXES):
                        for panel in gl.static_range(PANELS):
                            load_box(value_map, [places[box], column + panel * PANEL], value_full.index(stage),
                                     values.index((stage * PANELS + panel) * BOXES + box))  # fmt: skip
                    done += 1


@gluon.jit
def _weigh(
    scores, top, total, position, first, scale, softcap, window,
    BLOCK_N: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_WINDOW: gl.constexpr, MASKED: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """One step of the online softmax: weights [M, N] of scores, the new top and total, and the factor on earlier sums.

    `scale` and `softcap` include log2(e) where the exponent needs it. Without MASKED, every row must see every key.
    """
    unit = scale
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1) is correct at both infinities
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
        # A row that has seen no key has no top. Any number will do, since all its weights are zero.
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(scores * unit - base[:, None])
    fade = gl.exp2(top - base)
    total = total * fade + gl.sum(weights, 1)
    return weights, new_top, total, fade


@gluon.jit
def _by_fours(numbers):
    """Numbers [M, N] as [M, 2, N / 4, 2], as in `invariant.by_fours`."""
    return gl.reshape(numbers, [numbers.shape[0], 2, numbers.shape[1] // 4, 2])


@gluon.jit
def _halved(numbers):
    """Sums [M, N / 2] of the numbers [M, N] that are half a row apart."""
    return gl.sum(gl.reshape(numbers, [numbers.shape[0], 2, numbers.shape[1] // 2]), 1)


@gluon.jit
def _weigh_apart(scores, top, totals, position, first, scale, BLOCK_N: gl.constexpr, MASKED: gl.constexpr,
                 LAYOUT: gl.constexpr):  # fmt: skip
    """One step of the online softmax by the operations of `invariant.weigh_apart`, which says what it returns."""
    unit = scale * 1.4426950408889634
    if MASKED:
        key = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        scores = gl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1) * unit)
    base = new_top
    if MASKED:
        base = gl.where(new_top == float("-inf"), 0.0, new_top)
    low, scores = gl.broadcast(-base[:, None], scores)
    weights = gl.exp2(gl.fma(scores, unit, low))
    fade = gl.exp2(top - base)
    added = gl.sum(gl.sum(_by_fours(weights), 3), 1)
    factors, _ = gl.broadcast(fade[:, None], weights)
    factors = gl.max(gl.max(_by_fours(factors), 3), 1)
    return weights, new_top, gl.fma(totals, factors, added), fade


@gluon.jit
def _step(
    acc, weights, top, total, position, first, done, turns,
    queries, keys, values, key_full, key_empty, value_full, value_empty, own_turn, other_turn,
    scale, softcap, window,
    WARPGROUP: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    HAS_WINDOW: gl.constexpr, PART: gl.constexpr, MASKED: gl.constexpr, LAYOUT: gl.constexpr,
    WEIGHTS: gl.constexpr, RESULT: gl.constexpr,
):  # fmt: skip
    """Compute the scores of step `done` together with the result of the previous step. The softmax overlaps both."""
    stage = done % STAGES
    phase = (done // STAGES) & 1
    old_stage = (done - 1) % STAGES
    old_phase = ((done - 1) // STAGES) & 1
    mbarrier.wait(key_full.index(stage), phase)
    mbarrier.wait(own_turn, (turns + 1 - WARPGROUP) & 1)
    zeros = gl.zeros([64, BLOCK_N], gl.float32, LAYOUT)
    scores = hopper.warpgroup_mma(queries, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(value_full.index(old_stage), old_phase)
    acc = hopper.warpgroup_mma(weights, values.index(old_stage), acc, is_async=True)
    mbarrier.arrive(other_turn)
    scores = hopper.warpgroup_mma_wait(1, [scores])
    mbarrier.arrive(key_empty.index(stage))
    if PART > 0:
        new_weights, top, total, fade = _weigh_apart(
            scores, top, total, position, first, scale, BLOCK_N, MASKED, LAYOUT
        )
    else:
        new_weights, top, total, fade = _weigh(
            scores, top, total, position, first, scale, softcap, window, BLOCK_N, HAS_SOFTCAP, HAS_WINDOW, MASKED,
            LAYOUT,
        )  # fmt: skip
    acc, weights = hopper.warpgroup_mma_wait(0, [acc, weights])
    mbarrier.arrive(value_empty.index(old_stage))
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, RESULT))[:, None]
    weights = gl.convert_layout(new_weights.to(weights.dtype), WEIGHTS)
    return acc, weights, top, total


@gluon.jit
def _attend_steps(
    top, total, position, begin, steps, stop_key, first_row, done, turns, start,
    queries, keys, values, value_boxes, key_full, key_empty, value_full, value_empty, own_turn, other_turn,
    scale, softcap, window,
    WARPGROUP: gl.constexpr, GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_WINDOW: gl.constexpr,
    PART: gl.constexpr, LAYOUT: gl.constexpr, WEIGHTS: gl.constexpr, RESULT: gl.constexpr,
):  # fmt: skip
    """The sums of weighted values [64, D], the tops and the totals of a warpgroup's rows after steps from `begin` on.

    `done` and `turns` are the numbers of steps, and of those that took turns, before these.
    """
    dtype: gl.constexpr = queries.dtype
    BOX: gl.constexpr = value_boxes.shape[1]
    PANEL: gl.constexpr = value_boxes.shape[2]
    BOXES: gl.constexpr = BLOCK_N // BOX
    PANELS: gl.constexpr = HEAD_DIM // PANEL
    BOX_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    acc = gl.zeros([64, HEAD_DIM], gl.float32, RESULT)
    # The first step has no previous step, so there is no result to compute with it.
    stage = done % STAGES
    mbarrier.wait(key_full.index(stage), (done // STAGES) & 1)
    zeros = gl.zeros([64, BLOCK_N], gl.float32, LAYOUT)
    scores = hopper.warpgroup_mma(queries, keys.index(stage).permute((1, 0)), zeros, use_acc=False,
                                  is_async=True)  # fmt: skip
    scores = hopper.warpgroup_mma_wait(0, [scores])
    mbarrier.arrive(key_empty.index(stage))
    if PART > 0:
        weights, top, total, _fade = _weigh_apart(scores, top, total, position, begin, scale, BLOCK_N, True, LAYOUT)
    else:
        weights, top, total, _fade = _weigh(
            scores, top, total, position, begin, scale, softcap, window, BLOCK_N, HAS_SOFTCAP, HAS_WINDOW, True, LAYOUT
        )
    weights = gl.convert_layout(weights.to(dtype), WEIGHTS)

    whole = gl.maximum((gl.minimum(stop_key, start + first_row // GROUP_SIZE + 1) - begin) // BLOCK_N, 1)
    if HAS_WINDOW:
        whole = 1
    whole = gl.minimum(whole, steps)
    for step in range(1, whole):
        acc, weights, top, total = _step(
            acc, weights, top, total, position, begin + step * BLOCK_N, done + step, turns + step - 1,
            queries, keys, values, key_full, key_empty, value_full, value_empty, own_turn, other_turn,
            scale, softcap, window, WARPGROUP, BLOCK_N, STAGES, HAS_SOFTCAP, HAS_WINDOW, PART, False,
            LAYOUT, WEIGHTS, RESULT,
        )  # fmt: skip
    for step in range(whole, steps):
        acc, weights, top, total = _step(
            acc, weights, top, total, position, begin + step * BLOCK_N, done + step, turns + step - 1,
            queries, keys, values, key_full, key_empty, value_full, value_empty, own_turn, other_turn,
            scale, softcap, window, WARPGROUP, BLOCK_N, STAGES, HAS_SOFTCAP, HAS_WINDOW, PART, True,
            LAYOUT, WEIGHTS, RESULT,
        )  # fmt: skip
    done += steps
    stage = (done - 1) % STAGES
    mbarrier.wait(value_full.index(stage), ((done - 1) // STAGES) & 1)
    slack = stop_key % BLOCK_SIZE
    if slack > 0:
        # Slots after the last key may never have been written. A weight of zero would keep their NaN.
        box = (stop_key - 1 - begin) % BLOCK_N // BOX
        last = (stop_key - 1) % BOX
        slot = gl.arange(0, BOX, layout=gl.SliceLayout(1, BOX_ROWS))
        for panel in gl.static_range(PANELS):
            place = value_boxes.index((stage * PANELS + panel) * BOXES + box)
            content = place.load(BOX_ROWS)
            place.store(gl.where((slot <= last)[:, None], content, gl.zeros_like(content)))
        hopper.fence_async_shared()
    acc = hopper.warpgroup_mma(weights, values.index(stage), acc, is_async=True)
    acc, weights = hopper.warpgroup_mma_wait(0, [acc, weights])
    mbarrier.arrive(value_empty.index(stage))
    return acc, top, total


@gluon.jit
def _store_partial(
    result, log, partial_out, partial_log, number, kv_head, first_row, rows,
    WARPGROUP: gl.constexpr, NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, LAYOUT: gl.constexpr,
    RESULT: gl.constexpr,
):  # fmt: skip
    """Store a warpgroup's result [64, D] and the logarithm of its sums [64] as those of a partial result."""
    tile = (number.to(gl.int64) * NUM_KV_HEADS + kv_head) * 128 + WARPGROUP * 64
    place = tile + gl.arange(0, 64, layout=gl.SliceLayout(1, RESULT))
    held = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, RESULT)) < rows
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, RESULT))
    gl.store(partial_out + place[:, None] * HEAD_DIM + column[None, :], result, mask=held[:, None])
    own = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    gl.store(partial_log + tile + own, log, mask=first_row + own < rows)


@gluon.jit
def _join(acc, top, total, result, log, RESULT: gl.constexpr):
    """Join the next part of a context to the parts before it, by the operations of `invariant.join`."""
    new_top = gl.maximum(top, log)
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    fade, share = gl.exp2(top - base), gl.exp2(log - base)
    factors, _ = gl.broadcast(gl.convert_layout(fade, gl.SliceLayout(1, RESULT))[:, None], acc)
    acc = gl.fma(acc, factors, result * gl.convert_layout(share, gl.SliceLayout(1, RESULT))[:, None])
    return acc, new_top, gl.fma(total, fade, share)


@gluon.jit
def _attend(
    shared, common,
    WARPGROUP: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """The consumer: a warpgroup of four warps that computes 64 rows of each tile."""
    query_buffers, keys, values, _key_boxes, value_boxes, key_full, key_empty, value_full, value_empty, turn_of = shared
    (
        query, out, partial_out, partial_log, sinks, work, tables, items, table_stride,
        query_stride_token, query_stride_head, out_stride_token, out_stride_head, scale, softcap, window,
    ) = common  # fmt: skip
    dtype: gl.constexpr = query.dtype.element_ty
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    # 16 bytes per thread, whole rows next to each other
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])

    queries = query_buffers.index(WARPGROUP)
    own_turn = turn_of.index(WARPGROUP)
    other_turn = turn_of.index(1 - WARPGROUP)
    done = 0
    turns = 0
    for turn in range(gl.cdiv(items, gl.num_programs(0))):
        item = _item_of(turn)
        if item < items:
            first_token, rows, start, _table, tile_row, first_key, stop_key, partial, begin, steps = _read(
                work, tables, item, table_stride, window, NUM_KV_HEADS, GROUP_SIZE, BLOCK_N, HAS_WINDOW
            )  # fmt: skip
            if rows > 0:
                kv_head = item % NUM_KV_HEADS
                first_row = tile_row + WARPGROUP * 64
                row = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
                head = kv_head * GROUP_SIZE + row % GROUP_SIZE
                token = (first_token + row // GROUP_SIZE).to(gl.int64)
                dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, WIDE))
                at = (token * query_stride_token + head * query_stride_head)[:, None] + dim[None, :]
                queries.store(gl.load(query + at, mask=(row < rows)[:, None], other=0.0))
                hopper.fence_async_shared()

                own_row = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
                position = start + own_row // GROUP_SIZE
                top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
                if HAS_SINKS:
                    # The sink counts once: in the first part of the context, or where parts are joined.
                    counted = own_row < gl.where((first_key == 0) | (PART > 0), rows, 0)
                    sink_at = sinks + kv_head * GROUP_SIZE + own_row % GROUP_SIZE
                    top = gl.load(sink_at, mask=counted, other=float("-inf")).to(gl.float32) * 1.4426950408889634
                total = gl.where(top == float("-inf"), 0.0, 1.0)
                if PART > 0:
                    acc = gl.zeros([64, HEAD_DIM], gl.float32, RESULT)
                    for part in range(gl.cdiv(stop_key - begin, PART)):
                        first = begin + part * PART
                        stop = gl.minimum(first + PART, stop_key)
                        part_steps = gl.cdiv(stop - first, BLOCK_N)
                        part_top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
                        zeros = gl.zeros([64, BLOCK_N], gl.float32, LAYOUT)
                        totals = gl.sum(gl.sum(_by_fours(zeros), 3), 1)
                        result, part_top, totals = _attend_steps(
                            part_top, totals, position, first, part_steps, stop, first_row, done, turns, start,
                            queries, keys, values, value_boxes, key_full, key_empty, value_full, value_empty, own_turn,
                            other_turn, scale, softcap, window, WARPGROUP, GROUP_SIZE, HEAD_DIM, BLOCK_SIZE, BLOCK_N,
                            STAGES, HAS_SOFTCAP, HAS_WINDOW, PART, LAYOUT, WEIGHTS, RESULT,
                        )  # fmt: skip
                        turns += part_steps - 1
                        done += part_steps
                        part_total = gl.reshape(_halved(_halved(_halved(_halved(totals)))), [64])
                        part_total = gl.convert_layout(part_total, gl.SliceLayout(1, LAYOUT))
                        part_total = gl.where(part_total == 0.0, 1.0, part_total)
                        share = gl.convert_layout(gl.div_rn(1.0, part_total), gl.SliceLayout(1, RESULT))
                        result = result * share[:, None]
                        log = part_top + gl.log2(part_total)
                        if partial > 0:
                            _store_partial(
                                result, log, partial_out, partial_log, partial - 1 + part, kv_head, first_row, rows,
                                WARPGROUP, NUM_KV_HEADS, HEAD_DIM, LAYOUT, RESULT,
                            )  # fmt: skip
                        else:
                            acc, top, total = _join(acc, top, total, result, log, RESULT)
                    factor = gl.div_rn(1.0, gl.where(total == 0.0, 1.0, total))
                else:
                    acc, top, total = _attend_steps(
                        top, total, position, begin, steps, stop_key, first_row, done, turns, start,
                        queries, keys, values, value_boxes, key_full, key_empty, value_full, value_empty, own_turn,
                        other_turn, scale, softcap, window, WARPGROUP, GROUP_SIZE, HEAD_DIM, BLOCK_SIZE, BLOCK_N,
                        STAGES, HAS_SOFTCAP, HAS_WINDOW, PART, LAYOUT, WEIGHTS, RESULT,
                    )  # fmt: skip
                    turns += steps - 1
                    done += steps
                    # If a part of the context is wholly outside a row's window, its total is 0 and its top stays -inf.
                    total = gl.where(total == 0.0, 1.0, total)
                    factor = 1.0 / total
                acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, RESULT))[:, None]
                if partial == 0:
                    at = (token * out_stride_token + head * out_stride_head)[:, None] + dim[None, :]
                    wide = gl.convert_layout(acc.to(dtype), WIDE)
                    gl.store(out + at, wide, mask=(row < rows)[:, None])
                elif PART == 0:
                    _store_partial(
                        acc, top + gl.log2(total), partial_out, partial_log, partial - 1, kv_head, first_row, rows,
                        WARPGROUP, NUM_KV_HEADS, HEAD_DIM, LAYOUT, RESULT,
                    )  # fmt: skip


@gluon.jit(do_not_specialize=["items", "table_stride", "cache_rows", "window"])
def prefill_kernel(
    key_map, value_map, query, tables, work, sinks, out, partial_out, partial_log,
    items, query_stride_token, query_stride_head, out_stride_token, out_stride_head, table_stride, cache_rows,
    scale, softcap, window,
    NUM_KV_HEADS: gl.constexpr, GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_WINDOW: gl.constexpr,
    HAS_SINKS: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Process work items (record, KV head) in turns on a persistent grid. key_map, value_map: [cache rows, Hkv D]."""
    dtype: gl.constexpr = key_map.dtype
    BOX: gl.constexpr = key_map.block_type.shape[0]
    PANEL: gl.constexpr = key_map.block_type.shape[1]
    BOXES: gl.constexpr = STAGES * (HEAD_DIM // PANEL) * (BLOCK_N // BOX)
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    key_boxes = gl.allocate_shared_memory(dtype, [BOXES, BOX, PANEL], key_map.layout)
    value_boxes = gl.allocate_shared_memory(dtype, [BOXES, BOX, PANEL], value_map.layout)
    queries = gl.allocate_shared_memory(dtype, [2, 64, HEAD_DIM], SWIZZLED)
    if RENAMED:
        keys = key_boxes.reinterpret(dtype, [STAGES, BLOCK_N, HEAD_DIM], SWIZZLED)
        values = value_boxes.reinterpret(dtype, [STAGES, BLOCK_N, HEAD_DIM], SWIZZLED)
    else:
        keys = key_boxes._reinterpret(dtype, [STAGES, BLOCK_N, HEAD_DIM], SWIZZLED)
        values = value_boxes._reinterpret(dtype, [STAGES, BLOCK_N, HEAD_DIM], SWIZZLED)
    key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    key_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn_of = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(key_full.index(stage), count=1)
        mbarrier.init(key_empty.index(stage), count=2)
        mbarrier.init(value_full.index(stage), count=1)
        mbarrier.init(value_empty.index(stage), count=2)
    mbarrier.init(turn_of.index(0), count=1)
    mbarrier.init(turn_of.index(1), count=1)

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
                HAS_SOFTCAP, HAS_WINDOW, HAS_SINKS, PART,
            )),
            (_attend, (
                shared, common, SECOND,
                NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM, BLOCK_SIZE, BLOCK_N, STAGES,
                HAS_SOFTCAP, HAS_WINDOW, HAS_SINKS, PART,
            )),
            (_load, (
                key_map, value_map, key_boxes, value_boxes, key_full, key_empty, value_full, value_empty,
                work, tables, items, table_stride, cache_rows, window,
                NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM, BLOCK_SIZE, BLOCK_N, STAGES, HAS_WINDOW,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def supports(device: torch.device, *, head_dim: int, block_size: int) -> bool:
    """Whether this kernel runs on the device with these sizes."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) == (9, 0)
        and head_dim in (64, 128)
        and block_size in (8, 16, 32, 64, 128, 256)
    )


def takes(query: torch.Tensor, key_cache: torch.Tensor) -> bool:
    """Whether the copy engine supports the dtype and layout of these tensors."""
    sixteen_bits = query.dtype in (torch.bfloat16, torch.float16)
    return sixteen_bits and key_cache.dtype == query.dtype and key_cache.is_contiguous()


def attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    work: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    partial_out: torch.Tensor,
    partial_log: torch.Tensor,
    *,
    num_processors: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    part_keys: int = 0,
) -> None:
    """Compute the tiles of `work` [W, 8], each of BLOCK_M rows; the other arguments are `Attention.attend`'s.

    `part_keys`: parts of this number of keys are joined in order, with the bits of `invariant.attend_parts_kernel`. It
    goes with neither a window nor a softcap. 0: a context has no parts.

    Partial results go to partial_out [P, Hkv, BLOCK_M, D] and partial_log [P, Hkv, BLOCK_M], as in `put_rows`.
    """
    num_blocks, block_size, num_kv_heads, head_dim = key_cache.shape
    block_n, stages = (FIXED_BLOCK_N, FIXED_STAGES) if part_keys else (BLOCK_N, STAGES)
    cache_rows, width = num_blocks * block_size, num_kv_heads * head_dim
    maps = [
        TensorDescriptor(cache, [cache_rows, width], [width, 1], [min(block_size, block_n), PANEL], SWIZZLED)
        for cache in (key_cache, value_cache)
    ]
    items = len(work) * num_kv_heads
    prefill_kernel[(min(items, num_processors),)](
        *maps,
        query,
        block_tables,
        work,
        partial_log if sinks is None else sinks,  # without sinks, any tensor serves as the argument
        out,
        partial_out,
        partial_log,
        items,
        *query.stride()[:2],
        *out.stride()[:2],
        block_tables.stride(0),
        cache_rows,
        scale if part_keys else LOG2_E * (scale if softcap is None else 2.0 * scale / softcap),
        LOG2_E * (softcap or 0.0),
        window or 0,
        NUM_KV_HEADS=num_kv_heads,
        GROUP_SIZE=query.shape[1] // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_N=block_n,
        STAGES=stages,
        HAS_SOFTCAP=softcap is not None,
        HAS_WINDOW=window is not None,
        HAS_SINKS=sinks is not None,
        PART=part_keys,
        num_warps=4,
        # Three warpgroups share 65,536 registers; the consumers then take registers from the producer.
        maxnreg=168,
    )
