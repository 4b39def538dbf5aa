"""Paged attention on a GPU with the same bits for a query whatever else a step computes."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl

from holdfast.core.version import __version__
from holdfast.lm.kernels.attention import prefill_kernel
from holdfast.lm.kernels.attention.paged import PagedAttention, launched
from holdfast.lm.kernels.attention.protocol import Segments
from holdfast.lm.kernels.attention.segment_kernels import LOG2_E, capped, first_seen
from holdfast.lm.kernels.attention.tiles import DeviceTiles, DeviceTilesBuilder
from holdfast.lm.kernels.launch import dependent_launch_options, launch_dependents, shared_bytes, wait_for_previous

log = logging.getLogger("holdfast.engine")

TILE_ROWS = 64
"""Rows of a tile, or the number of heads that share a KV head if that is more, where all tiles have one height. A
tensor core may add up a tile of another height in another order."""
LOW_ROWS, TALL_ROWS = 16, 128
"""Rows of a tile of decodes, and of one of longer segments, on Hopper, where heights were seen to add up alike."""
LOW_WARPS, WARP_ROWS = 4, 16
"""Warps of a tile of less than TILE_ROWS rows, which share its keys, and rows of a warp of a higher tile."""
MANY_PROGRAMS, MANY_LAUNCH = 4, {"STAGES": 2, "maxnreg": 128}
"""Number of programs of low tiles for each processor above which they have these options, by which more run at once."""
MOST_STAGES = 3
"""Steps whose keys and values are in flight at once, if the shared memory has room for them."""
SPARE_BYTES = 1024
"""Shared memory of a program for other things than queries, keys and values."""
PART_KEYS = 1024
"""Keys of a part of the context. Parts begin at multiples of it. Each is added up by itself, then all in order."""
MOST_PARTIAL_ROWS = 256 * 64
"""Most rows of the partial results of a step's tiles of one kind, which bounds their memory. Tiles beyond stay
whole."""


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
def by_fours(numbers):
    """Numbers [M, N] as [M, 2, N / 4, 2]. One thread holds the fours, however a tensor core's result is laid out."""
    return tl.reshape(numbers, (numbers.shape[0], 2, numbers.shape[1] // 4, 2))


@triton.jit
def weigh_apart(scores, unit, top, totals):
    """One step: weights [M, N] of scores [M, N], the new top [M] and totals [M, N / 4], and the factor on earlier sums.

    A row's sum of weights is kept as N / 4 sums until its part ends. They and `sum_of_pairs` add two numbers at once,
    which has no order. So the bits do not depend on which threads hold the numbers, as the height of a tile decides.
    """
    new_top = tl.maximum(top, tl.max(scores, 1) * unit)
    # A row that has seen no key has no top. Any number will do, since all its weights are zero.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    low = tl.broadcast_to(-base[:, None], scores.shape)
    weights = tl.exp2(tl.fma(scores, tl.broadcast_to(unit, scores.shape), low))
    fade = tl.exp2(top - base)
    added = tl.sum(tl.sum(by_fours(weights), 3), 1)
    # The largest of equal factors is each of them. It is here in the layout of the sums, so nothing is moved.
    factors = tl.max(tl.max(by_fours(tl.broadcast_to(fade[:, None], scores.shape)), 3), 1)
    return weights, new_top, tl.fma(totals, factors, added), fade


@triton.jit
def halved(numbers):
    """Sums [M, N / 2] of the numbers [M, N] that are half a row apart."""
    return tl.sum(tl.reshape(numbers, (numbers.shape[0], 2, numbers.shape[1] // 2)), 1)


@triton.jit
def sum_of_pairs(numbers, COUNT: tl.constexpr):
    """The sums [M] of numbers [M, COUNT], of which there are 8 or 16, in an order that no layout changes."""
    tl.static_assert((COUNT == 8) | (COUNT == 16))
    if COUNT == 16:
        numbers = halved(numbers)
    return tl.reshape(halved(halved(halved(numbers))), (numbers.shape[0],))


@triton.jit
def attend_parts_kernel(
    query, key_cache, value_cache, tables, work, sinks, out, partial_out, partial_log,
    query_stride_token, query_stride_head, key_stride_block, key_stride_slot, key_stride_head,
    value_stride_block, value_stride_slot, value_stride_head, out_stride_token, out_stride_head, table_stride,
    scale, softcap, window,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PART: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, CHUNKED: tl.constexpr, STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute one record of `tiles.TileList.work` for one KV head. Program (KV head, record).

    The record has some parts of PART keys. If its tile is whole, the parts are joined here. Else each is a partial
    result, and `join_parts_kernel` joins them. Keys that a row does not see leave its numbers as they are, so a row's
    bits do not depend on the other rows of its tile. There is one loop over keys: a second one, without masks for keys
    that all rows see, might be compiled to other operations.
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
    earliest = 0  # the first position that some row sees
    if HAS_WINDOW:
        earliest = tl.maximum(first_seen(start + first_row // GROUP_SIZE, window, CHUNKED), 0)
    first_read = tl.maximum(first_key, earliest // BLOCK_N * BLOCK_N)
    seen_by_all = start + first_row // GROUP_SIZE + 1
    last_key = tl.maximum(stop_key - 1, 0)
    # Each step looks up the blocks of the next one, so that its keys and values can be requested at once.
    block = tl.load(table + tl.minimum(first_read + tl.arange(0, BLOCK_N), last_key) // BLOCK_SIZE)

    wait_for_previous(DEPENDENT)
    query_at = query + (batch_token * query_stride_token + head * query_stride_head)[:, None] + dim[None, :]
    tile = tl.load(query_at, mask=held, other=0.0)
    joined = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    joined_top, joined_total = begin_joined(sinks, head, real)
    # A part before the window leaves what was joined as it is. If it is a partial result, its logarithm is -inf.
    first_part = tl.where(partial > 0, first_key, first_read) // PART
    for part in range(first_part, tl.cdiv(stop_key, PART)):
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        totals = tl.zeros([BLOCK_M, BLOCK_N // 4], tl.float32)
        begin = tl.maximum(part * PART, first_read)
        for first in tl.range(begin, tl.minimum((part + 1) * PART, stop_key), BLOCK_N, num_stages=STAGES):
            key_position = first + tl.arange(0, BLOCK_N)
            inside = key_position < stop_key
            if HAS_WINDOW:
                inside = inside & (key_position >= earliest)
            offset = key_position % BLOCK_SIZE
            key_at = key_cache + (block.to(tl.int64) * key_stride_block + offset * key_stride_slot)
            value_at = value_cache + (block.to(tl.int64) * value_stride_block + offset * value_stride_slot)
            block = tl.load(table + tl.minimum(key_position + BLOCK_N, last_key) // BLOCK_SIZE)
            if BLOCK_D == HEAD_DIM:
                key = tl.load(key_at[None, :] + dim[:, None], mask=inside[None, :], other=0.0)
                value = tl.load(value_at[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
            else:
                inner = dim < HEAD_DIM
                key = tl.load(key_at[None, :] + dim[:, None], mask=inside[None, :] & inner[:, None], other=0.0)
                value = tl.load(value_at[:, None] + dim[None, :], mask=inside[:, None] & inner[None, :], other=0.0)
            scores, unit = capped(tl.dot(tile, key, input_precision="ieee"), scale, softcap, HAS_SOFTCAP)
            if HAS_WINDOW:
                seen = key_position[None, :] <= position[:, None]
                seen = seen & (key_position[None, :] >= first_seen(position, window, CHUNKED)[:, None])
                scores = tl.where(seen, scores, float("-inf"))
            elif first + BLOCK_N > seen_by_all:
                # No real row sees a key that is not inside.
                scores = tl.where(key_position[None, :] <= position[:, None], scores, float("-inf"))
            weights, top, totals, fade = weigh_apart(scores, unit, top, totals)
            acc = tl.dot(weights.to(tile.dtype), value, acc * fade[:, None], input_precision="ieee")
        total = sum_of_pairs(totals, BLOCK_N // 4)
        # A row that sees no key of this part has no sum. The logarithm of its share stays -inf.
        total = tl.where(total == 0.0, 1.0, total)
        result, log = acc * tl.div_rn(1.0, total)[:, None], top + tl.log2(total)
        if partial > 0:
            number = partial - 1 + part - first_key // PART
            place = (number.to(tl.int64) * tl.num_programs(0) + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.store(partial_out + place[:, None] * HEAD_DIM + dim[None, :], result, mask=held)
            tl.store(partial_log + place, log, mask=real)
        else:
            joined, joined_top, joined_total = join(joined, joined_top, joined_total, result, log)
    if partial == 0:
        out_at = out + (batch_token * out_stride_token + head * out_stride_head)[:, None] + dim[None, :]
        joined_total = tl.where(joined_total == 0.0, 1.0, joined_total)  # a row that is not real
        tl.store(out_at, (joined * tl.div_rn(1.0, joined_total)[:, None]).to(out.dtype.element_ty), mask=held)


@triton.jit
def join_parts_kernel(
    merges, sinks, partial_out, partial_log, out, out_stride_token, out_stride_head,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Join the partial results of rows, one after the other. Program (merge record, first row, KV head).

    The programs of a record share the rows of its tile.
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
        total = tl.div_rn(1.0, total)
        tl.store(out_at, (acc * total[:, None]).to(out.dtype.element_ty), mask=(dim < HEAD_DIM)[None, :])


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
        dtype: torch.dtype = torch.float32,
        part_keys: int = PART_KEYS,
    ) -> None:
        """`dtype` is that of queries, keys and values.

        `part_keys` are the keys of a part, a multiple of 64. They decide the bits.
        """
        super().__init__(
            device=device,
            num_processors=num_processors,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
        )
        self._part_keys, self._hopper = part_keys, _is_hopper(device)
        rows = max(TILE_ROWS, triton.next_power_of_2(self.group_size))
        # Float32 runs without tensor cores, and a large head's results take the registers of eight warps.
        fits = dtype.itemsize == 2 and self.block_d <= 128 and rows == TILE_ROWS
        self._warps_by_rows = fits and (self._hopper or device.type == "cpu")
        """Whether tiles have several heights, and warps by their rows."""
        self.specialised = False
        """Whether `prefill_kernel` computes tall tiles, for attention without a window or a cap."""
        low = max(LOW_ROWS, triton.next_power_of_2(self.group_size))
        for narrow_m in (low, rows) if self._warps_by_rows else ():
            self.tiles = self._builder(narrow_m, TALL_ROWS)
            if self._alike(dtype, f"tiles of {TALL_ROWS} rows"):
                self.specialised = self.on_hopper
                self.specialised = self.specialised and self._alike(dtype, "the kernel for prompts")
                return
        self.tiles = self._builder(rows, rows)

    def _alike(self, dtype: torch.dtype, name: str) -> bool:
        """Whether tall tiles, computed as `name` says, have the bits of low ones. If not, a warning says so.

        The kernels are compiled once for all processes.
        """
        if not self._hopper:  # the interpreter adds up all tiles alike
            return True
        device = self.tiles.device
        if device.type == "cuda":
            # Imported here because it takes a GPU's driver. It compiles kernels in several processes.
            from holdfast.lm.kernels.compilation import compile_once

            sizes = self.num_kv_heads * self.group_size, self.num_kv_heads, self.head_dim, self.block_size
            identity = dtype, *sizes, self._part_keys, self.tiles.narrow_m, self.specialised
            compile_once(partial(self._heights_alike, dtype), "attention heights", __version__, *identity)
        if self._heights_alike(dtype):
            return True
        log.warning("holdfast: attention has other bits by %s than by tiles of %d rows. So deterministic steps take "
                    "longer", name, self.tiles.narrow_m)  # fmt: skip
        return False

    def _builder(self, narrow_m: int, wide_m: int) -> DeviceTilesBuilder:
        return DeviceTilesBuilder(
            device=self.tiles.device,
            num_processors=self.num_processors,
            num_kv_heads=self.num_kv_heads,
            group_size=self.group_size,
            narrow_m=narrow_m,
            wide_m=wide_m,
            partial_keys=self._part_keys,
            most_partials=MOST_PARTIAL_ROWS // narrow_m,
        )

    @torch.inference_mode()
    def _heights_alike(self, dtype: torch.dtype) -> bool:
        """Whether random queries have the same bits in low tiles, as short segments, as in tall ones, as a long one."""
        device, keys = self.tiles.device, self._part_keys * 5 // 4 + 1
        tokens, generator = keys // 4, torch.Generator(device).manual_seed(0)
        cache = (-(-keys // self.block_size), self.block_size, self.num_kv_heads, self.head_dim)
        sizes = (tokens, self.num_kv_heads * self.group_size, self.head_dim), cache, cache
        query, key, value = (torch.randn(size, generator=generator, device=device).to(dtype) for size in sizes)
        table = torch.arange(cache[0], dtype=torch.int32, device=device)[None]

        def attended(length: int) -> torch.Tensor:
            starts = np.append(np.arange(0, tokens, length), tokens).astype(np.int32)
            rows = np.zeros(len(starts) - 1, np.int32)
            tiles = self.make_metadata(Segments(starts, starts[1:] + np.int32(keys - tokens), rows))
            return self.attend(query, key, value, table, tiles, scale=self.head_dim**-0.5)

        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return torch.equal(attended(self.tiles.narrow_m // self.group_size), attended(tokens))

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
        dependent = dependent_launch_options(query.device)
        specialised = self.specialised and not tiles.narrow and window is None and softcap is None
        if specialised and prefill_kernel.takes(query, key_cache):
            prefill_kernel.attend(
                *tensors,
                num_processors=self.num_processors,
                scale=scale,
                window=None,
                softcap=None,
                part_keys=self._part_keys,
            )
        else:
            attend_parts_kernel[(self.num_kv_heads, len(tiles.work))](
                *launched(*tensors, scale=scale, window=window, softcap=softcap),
                **sizes,
                BLOCK_SIZE=self.block_size,
                PART=self._part_keys,
                HAS_SOFTCAP=softcap is not None,
                HAS_WINDOW=window is not None,
                CHUNKED=chunked,
                **self.settings(tiles.block_m, len(query), exact=query.element_size() > 2),
                # Long segments have a stream of their own, whose first kernel waits for an event.
                **(dependent if tiles.narrow else dict.fromkeys(dependent, False)),
            )
        if len(tiles.merges):
            join_parts_kernel[(len(tiles.merges), tiles.merge_programs, self.num_kv_heads)](
                tiles.merges, sinks, *partials, out, *out.stride()[:2], **sizes, num_warps=1, **dependent
            )

    def settings(self, block_m: int, tokens: int, *, exact: bool) -> dict[str, int]:
        """Options of the kernel for tiles of this height in a step of `tokens`, which are float32 if `exact`.

        Only BLOCK_N decides bits. Tuned on an H200 (benchmarks/kernels/attention_gpu.py).
        """
        block_n = 32 if self.block_d > 128 or exact else 64
        stages = 1 if exact else self._stages(block_m, block_n)
        if not self._warps_by_rows:
            return dict(BLOCK_N=block_n, STAGES=stages, num_warps=8 if self.block_d > 64 or exact else 4)
        if block_m >= TILE_ROWS:
            return dict(BLOCK_N=block_n, STAGES=stages, num_warps=block_m // WARP_ROWS)
        many = tokens * self.num_kv_heads > MANY_PROGRAMS * self.num_processors
        return dict(BLOCK_N=block_n, STAGES=stages, num_warps=LOW_WARPS) | (MANY_LAUNCH if many else {})

    def _stages(self, block_m: int, block_n: int) -> int:
        """Stages of the loop over keys, for numbers of 16 bits. They do not change the bits."""
        shared, row_bytes = shared_bytes(self.tiles.device), 2 * self.block_d
        steps: int = (shared - block_m * row_bytes - SPARE_BYTES) // (2 * block_n * row_bytes)
        # Other tensor cores than Hopper's read registers, so the step that they compute is not in shared memory.
        return max(1, min(MOST_STAGES, steps if self._hopper else steps + 1))


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
