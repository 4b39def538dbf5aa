"""Paged attention on a GPU with the same bits for a query whatever else a step computes."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.lm.kernels.attention.paged import PagedAttention, launched
from holdfast.lm.kernels.attention.segment_kernels import LOG2_E, capped, first_seen, weigh
from holdfast.lm.kernels.attention.tiles import DeviceTiles, DeviceTilesBuilder

TILE_ROWS = 64
"""Rows of every tile, or the number of heads that share a KV head if that is more. A tensor core may add up a tile of
another height in another order."""
PART_KEYS = 1024
"""Keys of a part of the context. Parts begin at multiples of it. Each is added up by itself, then all in order."""
MOST_PARTIALS = 256
"""Most partial results of a step's tiles of one kind, which bounds their memory. Tiles beyond stay whole."""


@triton.jit
def begin_joined(sinks, head, real):
    """The top score and the sum of weights, [M] each, of rows that have joined no part: -inf and 0, or the sink's."""
    top = tl.full(real.shape, float("-inf"), tl.float32)
    if sinks is not None:
        top = tl.load(sinks + head, mask=real, other=float("-inf")).to(tl.float32) * LOG2_E
    return top, tl.where(top == float("-inf"), 0.0, 1.0)


@triton.jit
def join(acc, top, total, result, log):
    """Join the next part of a context, `result` [M, D] with the logarithm of its sum [M], to the parts before it.

    Both kernels join by this, and the fused operations are explicit, so that compilers choose none in one of them only.
    """
    new_top = tl.maximum(top, log)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    fade, share = tl.exp2(top - base), tl.exp2(log - base)
    acc = tl.fma(acc, tl.broadcast_to(fade[:, None], acc.shape), result * share[:, None])
    return acc, new_top, tl.fma(total, fade, share)


@triton.jit
def attend_parts_kernel(
    query, key_cache, value_cache, tables, work, sinks, out, partial_out, partial_log,
    query_stride_token, query_stride_head, key_stride_block, key_stride_slot, key_stride_head,
    value_stride_block, value_stride_slot, value_stride_head, out_stride_token, out_stride_head, table_stride,
    scale, softcap, window,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PART: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Compute one record of `tiles.TileList.work` for one KV head. Program (record, KV head).

    The record has some parts of PART keys. If its tile is whole, the parts are joined here. Else each is a partial
    result, and `join_parts_kernel` joins them. Keys that a row does not see leave its numbers as they are, so a row's
    bits do not depend on the other rows of its tile. There is one loop over keys: a second one, without masks for keys
    that all rows see, might be compiled to other operations.
    """
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
    inner = dim < HEAD_DIM
    held = real[:, None] & inner[None, :]
    position = start + token
    batch_token = (first_token + token).to(tl.int64)
    query_at = query + (batch_token * query_stride_token + head * query_stride_head)[:, None] + dim[None, :]
    tile = tl.load(query_at, mask=held, other=0.0)

    key_cache += kv_head.to(tl.int64) * key_stride_head
    value_cache += kv_head.to(tl.int64) * value_stride_head
    earliest = 0  # the first position that some row sees
    if HAS_WINDOW:
        earliest = tl.maximum(first_seen(start + first_row // GROUP_SIZE, window, CHUNKED), 0)

    joined = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    joined_top, joined_total = begin_joined(sinks, head, real)
    for part in range(first_key // PART, tl.cdiv(stop_key, PART)):
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        begin = tl.maximum(part * PART, earliest // BLOCK_N * BLOCK_N)
        for first in range(begin, tl.minimum((part + 1) * PART, stop_key), BLOCK_N):
            key_position = first + tl.arange(0, BLOCK_N)
            inside = (key_position >= earliest) & (key_position < stop_key)
            block = tl.load(table + key_position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            offset = key_position % BLOCK_SIZE
            key_at = key_cache + (block * key_stride_block + offset * key_stride_slot)[None, :] + dim[:, None]
            value_at = value_cache + (block * value_stride_block + offset * value_stride_slot)[:, None] + dim[None, :]
            key = tl.load(key_at, mask=inside[None, :] & inner[:, None], other=0.0)
            value = tl.load(value_at, mask=inside[:, None] & inner[None, :], other=0.0)
            scores, unit = capped(tl.dot(tile, key, input_precision="ieee"), scale, softcap, HAS_SOFTCAP)
            seen = (key_position[None, :] <= position[:, None]) & inside[None, :]
            if HAS_WINDOW:
                seen = seen & (key_position[None, :] >= first_seen(position, window, CHUNKED)[:, None])
            weights, top, total, fade = weigh(tl.where(seen, scores, float("-inf")), unit, top, total)
            acc = tl.dot(weights.to(tile.dtype), value, acc * fade[:, None], input_precision="ieee")
        # A row that sees no key of this part has no sum. The logarithm of its share stays -inf.
        total = tl.where(total == 0.0, 1.0, total)
        result, log = acc / total[:, None], top + tl.log2(total)
        joined, joined_top, joined_total = join(joined, joined_top, joined_total, result, log)
        if partial > 0:
            number = partial - 1 + part - first_key // PART
            place = (number.to(tl.int64) * tl.num_programs(1) + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.store(partial_out + place[:, None] * HEAD_DIM + dim[None, :], result, mask=held)
            tl.store(partial_log + place, log, mask=real)
    if partial == 0:
        out_at = out + (batch_token * out_stride_token + head * out_stride_head)[:, None] + dim[None, :]
        joined_total = tl.where(joined_total == 0.0, 1.0, joined_total)  # a row that is not real
        tl.store(out_at, (joined / joined_total[:, None]).to(out.dtype.element_ty), mask=held)


@triton.jit
def join_parts_kernel(
    merges, sinks, partial_out, partial_log, out, out_stride_token, out_stride_head,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Join the partial results of rows, one after the other. Program (merge record, first row, KV head).

    The programs of a record share the rows of its tile.
    """
    record = merges + tl.program_id(0) * 8
    kv_head = tl.program_id(2)
    first_token = tl.load(record)
    rows = tl.load(record + 1)
    first_row = tl.load(record + 2)
    first_partial = tl.load(record + 3)
    count = tl.load(record + 4)
    dim = tl.arange(0, BLOCK_D)
    for row_in_tile in range(tl.program_id(1), tl.minimum(rows - first_row, BLOCK_M), tl.num_programs(1)):
        row = first_row + row_in_tile + tl.zeros([1], tl.int32)
        head = kv_head * GROUP_SIZE + row % GROUP_SIZE
        top, total = begin_joined(sinks, head, row < rows)
        acc = tl.zeros([1, BLOCK_D], tl.float32)
        for part in range(count):
            place = ((first_partial + part).to(tl.int64) * tl.num_programs(2) + kv_head) * BLOCK_M + row - first_row
            log = tl.load(partial_log + place)
            result = tl.load(partial_out + place[:, None] * HEAD_DIM + dim[None, :], mask=(dim < HEAD_DIM)[None, :])
            acc, top, total = join(acc, top, total, result, log)
        token = (first_token + row // GROUP_SIZE).to(tl.int64)
        out_at = out + (token * out_stride_token + head * out_stride_head)[:, None] + dim[None, :]
        tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=(dim < HEAD_DIM)[None, :])


class InvariantAttention(PagedAttention):
    """`PagedAttention` whose sums over a context have one order, for decodes and for prompts.

    Where a tile is cut, and into how many pieces, depends on the batch, but moves only work between programs: the parts
    of a context, and the order in which they are joined, are the same.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        num_processors: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        part_keys: int = PART_KEYS,
    ) -> None:
        """`part_keys` are the keys of a part, a multiple of 64. They decide the bits."""
        super().__init__(
            device=device,
            num_processors=num_processors,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
        )
        self._part_keys = part_keys
        rows = max(TILE_ROWS, triton.next_power_of_2(self.group_size))
        self.tiles = DeviceTilesBuilder(
            device=device,
            num_processors=num_processors,
            num_kv_heads=num_kv_heads,
            group_size=self.group_size,
            narrow_m=rows,
            wide_m=rows,
            partial_keys=part_keys,
            most_partials=MOST_PARTIALS,
        )

    def _attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        out: torch.Tensor,
        tiles: DeviceTiles,
        partials: tuple[torch.Tensor, torch.Tensor],
        *,
        scale: float,
        window: int | None,
        chunked: bool,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> None:
        """Launch the tiles of one kind, then join the parts of those that were cut over the context."""
        tensors = (query, key_cache, value_cache, block_tables, tiles.work, sinks, out, *partials)
        sizes = dict(GROUP_SIZE=self.group_size, HEAD_DIM=self.head_dim, BLOCK_M=tiles.block_m, BLOCK_D=self.block_d)
        # These are the same for all steps. Float32 runs without tensor cores, and large heads take more registers.
        large, exact = self.block_d > 128, query.element_size() > 2
        attend_parts_kernel[(len(tiles.work), self.num_kv_heads)](
            *launched(*tensors, scale=scale, window=window, softcap=softcap),
            **sizes,
            BLOCK_SIZE=self.block_size,
            BLOCK_N=32 if large or exact else 64,
            PART=self._part_keys,
            HAS_SOFTCAP=softcap is not None,
            HAS_WINDOW=window is not None,
            CHUNKED=chunked,
            num_warps=8 if self.block_d > 64 or exact else 4,
            num_stages=1 if exact else 3,
        )
        if len(tiles.merges):
            join_parts_kernel[(len(tiles.merges), tiles.merge_programs, self.num_kv_heads)](
                tiles.merges, sinks, *partials, out, *out.stride()[:2], **sizes, num_warps=1
            )
