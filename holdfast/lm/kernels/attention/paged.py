"""Paged multi-token attention on CUDA: the Triton kernels behind the `Attention` seam."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import triton

from holdfast.lm.kernels.attention import prefill_kernel
from holdfast.lm.kernels.attention.decode_kernel import decode_kernel
from holdfast.lm.kernels.attention.protocol import CapturableAttention, Segments
from holdfast.lm.kernels.attention.segment_kernels import attend_kernel, merge_kernel, write_kernel
from holdfast.lm.kernels.attention.tiles import FIELDS, TileList, split_evenly, split_to_stream, tile_list
from holdfast.lm.kernels.launch import SideStream, dependent_launch_options

# A cut of the context makes at most so many pieces for each processor, besides one a tile.
NARROW_WORK_PER_PROCESSOR = 4
WIDE_WORK_PER_PROCESSOR = 2
WIDE_SEGMENTS = 64  # what a reserved schedule has room for; each takes a tile that is not full
MERGE_PROGRAMS = 16  # for each merge of wide tiles in a reserved metadata, where most rows may be none
NARROW_SPLIT_UNIT = 64  # a piece is a multiple of so many keys
WIDE_SPLIT_UNIT = 128
FEW_TOKENS = 4  # up to so many, a program has its processor to itself


@dataclass(frozen=True)
class Launch:
    """How one height of tiles is launched."""

    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class DeviceTiles:
    """A TileList on the device."""

    block_m: int
    work: torch.Tensor  # [W, 8] int32
    merges: torch.Tensor  # [M, 8] int32
    partials: int
    merge_programs: int  # for each merge; they share its rows


class PagedAttention(CapturableAttention[tuple[DeviceTiles, ...]]):
    """`Attention` by Triton: tiles packed over grouped heads, split over the context when queries are few.

    A batch has two kinds of tiles, each its own launch: narrow ones for decodes, which are bound by reading keys, and
    wide ones for longer segments, bound by arithmetic; on Hopper `prefill_kernel` computes these, where it takes the
    tensors. Lists live in one device buffer and zero records do nothing, so that a captured launch of fixed capacity
    can serve any smaller batch.

    Besides float16 and bfloat16, float32 is computed exactly (no TF32). A negative slot in `write` is skipped.
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
        fp8_cache: bool = False,
    ) -> None:
        self.device = device
        self.num_kv_heads = num_kv_heads
        self.group_size = num_heads // num_kv_heads
        self.head_dim = head_dim
        self.block_d = max(16, triton.next_power_of_2(head_dim))
        self.block_size = block_size
        self.fp8_cache = fp8_cache
        self.narrow_m = max(16, triton.next_power_of_2(self.group_size))
        self.num_processors = num_processors
        # Its tensor cores take keys and values as the copy engine brings them; FP8 must become float16 on the way.
        self.on_hopper = not fp8_cache and prefill_kernel.supports(device, head_dim=head_dim, block_size=block_size)
        wide_m = prefill_kernel.BLOCK_M if self.on_hopper else 256 if self.block_d <= 128 else 128
        self.wide_m = max(wide_m, self.narrow_m)
        self.narrow_target = max(1, num_processors * NARROW_WORK_PER_PROCESSOR // num_kv_heads)
        self.wide_target = max(1, num_processors * WIDE_WORK_PER_PROCESSOR // num_kv_heads)
        self._branch = SideStream(device)
        self._split_narrow = partial(
            split_to_stream,
            heads=num_kv_heads,
            processors=num_processors,
            spare=self.narrow_target,
            unit=NARROW_SPLIT_UNIT,
        )
        self._split_wide = partial(
            split_evenly,
            heads=num_kv_heads,
            processors=num_processors,
            spare=self.wide_target,
            unit=WIDE_SPLIT_UNIT,
        )

    def make_metadata(self, segments: Segments) -> tuple[DeviceTiles, ...]:
        lists = [tiles for tiles in self._lists(segments) if len(tiles.work)]
        parts = [records for tiles in lists for records in (tiles.work, tiles.merges)]
        host = self._host_records(sum(map(len, parts)))
        np.concatenate(parts, out=host.numpy())
        pieces = torch.split(host.to(self.device, non_blocking=True), [len(records) for records in parts])
        return tuple(
            DeviceTiles(tiles.block_m, work, merges, tiles.partials, tiles.merged_rows)
            for tiles, work, merges in zip(lists, pieces[::2], pieces[1::2], strict=True)
        )

    def _lists(self, segments: Segments) -> tuple[TileList, TileList]:
        """Wide and narrow tiles of a batch."""
        narrow = segments.query_length * self.group_size <= self.narrow_m
        wide, few = (
            tile_list(segments, chosen, group_size=self.group_size, block_m=block_m, split_for=split_for)
            for chosen, block_m, split_for in (
                (~narrow, self.wide_m, self._split_wide),
                (narrow, self.narrow_m, self._split_narrow),
            )
        )
        return wide, few

    def _host_records(self, count: int) -> torch.Tensor:
        """Room for records that are about to be uploaded; PyTorch keeps pinned memory until the copy is done."""
        return torch.zeros((count, FIELDS), dtype=torch.int32, pin_memory=self.device.type == "cuda")

    def reserve(self, segments: int, tokens: int | None = None) -> tuple[DeviceTiles, ...]:
        kinds = [(self.narrow_m, segments, self.narrow_target, self.group_size)]
        if tokens is not None:
            shortest = self.narrow_m // self.group_size + 1  # tokens of a segment that is not narrow
            tiles = tokens * self.group_size // self.wide_m + min(WIDE_SEGMENTS, segments, tokens // shortest)
            kinds.insert(0, (self.wide_m, tiles, self.wide_target, MERGE_PROGRAMS))
        # A cut makes at most `target` pieces more than there are tiles, so no more tiles than that are cut.
        sizes = [size for _, tiles, target, _ in kinds for size in (tiles + target, min(tiles, target))]
        records = torch.zeros((sum(sizes), FIELDS), dtype=torch.int32, device=self.device)
        pieces = torch.split(records, sizes)
        return tuple(
            DeviceTiles(block_m, work, merges, target + len(merges), programs)
            for (block_m, _, target, programs), work, merges in zip(kinds, pieces[::2], pieces[1::2], strict=True)
        )

    def refill(self, metadata: tuple[DeviceTiles, ...], segments: Segments) -> bool:
        lists = self._lists(segments)
        if len(metadata) == 1 and len(lists[0].work) > 0:
            return False
        places = [place for tiles in metadata for place in (tiles.work, tiles.merges)]
        parts = [records for tiles in lists[-len(metadata) :] for records in (tiles.work, tiles.merges)]
        if any(len(records) > len(place) for records, place in zip(parts, places, strict=True)):
            return False
        host = self._host_records(sum(map(len, places)))
        into, at = host.numpy(), 0
        for records, place in zip(parts, places, strict=True):
            into[at : at + len(records)] = records
            at += len(place)
        # All lists lie in one tensor, made so by `reserve`: one copy.
        places[0].as_strided(host.shape, host.stride()).copy_(host, non_blocking=True)
        return True

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        write_kernel[(len(slot_mapping),)](
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            *key.stride()[:2],
            *value.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            NUM_KV_HEADS=self.num_kv_heads,
            HEAD_DIM=self.head_dim,
            BLOCK_SIZE=self.block_size,
            BLOCK=triton.next_power_of_2(self.num_kv_heads * self.head_dim),
        )

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        metadata: tuple[DeviceTiles, ...],
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = query.new_empty(query.shape)
        attend = partial(
            self._attend,
            query,
            key_cache,
            value_cache,
            block_tables,
            out,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        # Those of both kinds before either runs: memory given back would be taken again while a branch still uses it.
        kinds = [(tiles, self._partials(query, tiles)) for tiles in metadata]
        if len(kinds) == 2:
            wide, narrow = kinds
            with self._branch.fork():
                attend(*wide)
            attend(*narrow)
            self._branch.join()
        else:
            for kind in kinds:
                attend(*kind)
        return out

    def _partials(self, query: torch.Tensor, tiles: DeviceTiles) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for partial results [P, Hkv, M, D] and the logarithms of their sums [P, Hkv, M]."""
        places = (tiles.partials, self.num_kv_heads, tiles.block_m)
        log = query.new_empty(places, dtype=torch.float32)
        return query.new_empty((*places, self.head_dim), dtype=torch.float32), log

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
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> None:
        """Launch the tiles of one height, and the merge of those that are cut."""
        partial_out, partial_log = partials
        launch = self.launch(tiles.block_m, query.element_size(), len(query))
        few = len(query) <= FEW_TOKENS
        places_of_work = (len(tiles.work), self.num_kv_heads)
        arguments = (
            query,
            key_cache,
            value_cache,
            block_tables,
            tiles.work,
            sinks,
            out,
            partial_out,
            partial_log,
            *query.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            *out.stride()[:2],
            block_tables.stride(0),
            scale if softcap is None else scale / softcap,
            softcap or 0.0,
            window or 0,
        )
        constants = dict(
            GROUP_SIZE=self.group_size,
            HEAD_DIM=self.head_dim,
            BLOCK_SIZE=self.block_size,
            BLOCK_M=tiles.block_m,
            BLOCK_N=launch.block_n,
            BLOCK_D=self.block_d,
            HAS_SOFTCAP=softcap is not None,
            HAS_WINDOW=window is not None,
            num_warps=launch.num_warps,
        )
        # Within a window no wider than one of its steps that kernel is the slower one (benchmarks/attention_gpu.py).
        on_hopper = self.on_hopper and (window is None or window > prefill_kernel.BLOCK_N)
        if on_hopper and tiles.block_m == prefill_kernel.BLOCK_M and prefill_kernel.takes(query, key_cache):
            prefill_kernel.attend(
                query,
                key_cache,
                value_cache,
                block_tables,
                tiles.work,
                sinks,
                out,
                partial_out,
                partial_log,
                num_processors=self.num_processors,
                scale=scale,
                window=window,
                softcap=softcap,
            )
        elif tiles.block_m == self.narrow_m:
            decode_kernel[places_of_work[::-1]](
                *arguments, **constants, STAGES=launch.num_stages, **dependent_launch_options(query.device)
            )
        else:
            attend_kernel[places_of_work](*arguments, **constants, num_stages=launch.num_stages)
        if len(tiles.merges):
            merge_kernel[(len(tiles.merges), tiles.merge_programs, self.num_kv_heads)](
                tiles.merges,
                partial_out,
                partial_log,
                out,
                *out.stride()[:2],
                GROUP_SIZE=self.group_size,
                HEAD_DIM=self.head_dim,
                BLOCK_M=tiles.block_m,
                BLOCK_D=self.block_d,
                BLOCK_S=64 if few else 16,
                num_warps=4 if few else 1,
                **dependent_launch_options(query.device),
            )

    def launch(self, block_m: int, item_bytes: int, tokens: int) -> Launch:
        """Tuned on an H200 (benchmarks/attention_gpu.py); what grows with head_dim stays within shared memory."""
        wide = block_m > self.narrow_m
        # The fewer programs a processor has of decodes alone, the more each has on its way.
        share = tokens * self.num_kv_heads / self.num_processors
        block_n = 64 if wide or self.fp8_cache or share <= 4 else 32
        if self.block_d > 128:
            block_n //= 2
        if item_bytes > 2:  # float32 runs without tensor cores: exact, not fast
            return Launch(block_n=max(16, block_n // 2), num_warps=8, num_stages=1)
        num_stages = 3 if wide or self.fp8_cache or 2 < share <= 4 else 4
        return Launch(block_n=block_n, num_warps=8 if wide else 4, num_stages=num_stages)
