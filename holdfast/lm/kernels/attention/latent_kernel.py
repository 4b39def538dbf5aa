"""The Triton kernel of latent attention: many query heads read the same keys, whose first part is also the value."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.lm.kernels.attention.segment_kernels import begin_rows, capped, put_rows, weigh


@triton.jit
def latent_kernel(
    query, cache, tables, work, out, partial_out, partial_log,
    query_stride_token, query_stride_head, stride_block, stride_slot, out_stride_token, out_stride_head, table_stride,
    scale,
    GROUP_SIZE: tl.constexpr, RANK: tl.constexpr, ROTATED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute one record of `tiles.TileList.work` for GROUP_SIZE query heads. Program (group of heads, record).

    A key is RANK + ROTATED numbers, a latent and a rotated key. A block of keys is read once, for scores and for the
    weighted sum of latents. Programs that run together read the same slots.
    """
    group = tl.program_id(0)
    record = work + tl.program_id(1) * 8
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
    of_latent = tl.arange(0, BLOCK_R)
    of_rotated = tl.arange(0, BLOCK_P)
    token = row // GROUP_SIZE
    head = group * GROUP_SIZE + row % GROUP_SIZE
    real = row < rows
    position = start + token
    batch_token = (first_token + token).to(tl.int64)
    query_at = query + (batch_token * query_stride_token + head * query_stride_head)[:, None]
    plain = tl.load(query_at + of_latent[None, :], mask=real[:, None] & (of_latent < RANK)[None, :], other=0.0)
    turned_at = query_at + RANK + of_rotated[None, :]
    turned = tl.load(turned_at, mask=real[:, None] & (of_rotated < ROTATED)[None, :], other=0.0)

    top, total = begin_rows(None, head, row, rows, first_key, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for first in tl.range(first_key, stop_key, BLOCK_N, num_stages=STAGES):
        key_position = first + tl.arange(0, BLOCK_N)
        inside = key_position < stop_key
        block = tl.load(table + key_position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        key_at = cache + (block * stride_block + key_position % BLOCK_SIZE * stride_slot)[:, None]
        latent = tl.load(key_at + of_latent[None, :], mask=inside[:, None] & (of_latent < RANK)[None, :], other=0.0)
        rotated_at = key_at + RANK + of_rotated[None, :]
        rotated = tl.load(rotated_at, mask=inside[:, None] & (of_rotated < ROTATED)[None, :], other=0.0)
        scores = tl.dot(plain, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(turned, tl.trans(rotated), scores, input_precision="ieee")
        scores, unit = capped(scores, scale, 0.0, False)
        scores = tl.where((key_position[None, :] <= position[:, None]) & inside[None, :], scores, float("-inf"))
        weights, top, total, fade = weigh(scores, unit, top, total)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * fade[:, None], input_precision="ieee")

    put_rows(
        acc, top, total, partial, group, batch_token, head, real,
        out, partial_out, partial_log, out_stride_token, out_stride_head,
        RANK, BLOCK_M, BLOCK_R, 0,
    )  # fmt: skip


@triton.jit
def write_latent_kernel(
    key, cache, slot_mapping, key_stride, stride_block, stride_slot,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one token's key [WIDTH] to its slot; a negative slot is padding and is skipped. Program (token)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        at = tl.arange(0, BLOCK)
        numbers = tl.load(key + token * key_stride + at, mask=at < WIDTH)
        place = cache + (slot // BLOCK_SIZE).to(tl.int64) * stride_block + slot % BLOCK_SIZE * stride_slot
        tl.store(place + at, numbers, mask=at < WIDTH)
