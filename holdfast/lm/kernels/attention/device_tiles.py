"""The metadata of `PagedAttention`: a step's tile lists, on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from holdfast.lm.kernels.attention.protocol import Segments
from holdfast.lm.kernels.attention.tiles import FIELDS, TileList, split_evenly, split_to_stream, tile_list

# Cutting contexts adds at most this many pieces per processor.
NARROW_WORK_PER_PROCESSOR = 4
WIDE_WORK_PER_PROCESSOR = 2
WIDE_SEGMENTS = 64  # segments that reserved metadata has room for; each may add a tile that is not full
MERGE_PROGRAMS = 16  # for each merge of wide tiles in reserved metadata, where most rows may be empty
NARROW_SPLIT_UNIT = 64  # keys; the length of a piece is a multiple of this
WIDE_SPLIT_UNIT = 128


@dataclass(frozen=True)
class DeviceTiles:
    """A TileList on the device."""

    block_m: int
    work: torch.Tensor  # [W, 8] int32
    merges: torch.Tensor  # [M, 8] int32
    partials: int
    merge_programs: int  # for each merge; they share its rows


class DeviceTilesBuilder:
    """Makes the tile lists of a step and uploads them in one copy.

    Segments with few query rows get narrow tiles, all others wide tiles. Either kind is cut over the context where its
    tiles are too few to fill the device.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        num_processors: int,
        num_kv_heads: int,
        group_size: int,
        narrow_m: int,
        wide_m: int,
    ) -> None:
        """`narrow_m` and `wide_m` are the rows of a tile, `group_size` the query heads of a KV head."""
        self.device, self.group_size = device, group_size
        self.narrow_m, self.wide_m = narrow_m, wide_m
        self.narrow_target = max(1, num_processors * NARROW_WORK_PER_PROCESSOR // num_kv_heads)
        self.wide_target = max(1, num_processors * WIDE_WORK_PER_PROCESSOR // num_kv_heads)
        stream = partial(split_to_stream, heads=num_kv_heads, processors=num_processors)
        evenly = partial(split_evenly, heads=num_kv_heads, processors=num_processors)
        self.split_narrow = partial(stream, spare=self.narrow_target, unit=NARROW_SPLIT_UNIT)
        self.split_wide = partial(evenly, spare=self.wide_target, unit=WIDE_SPLIT_UNIT)

    def build(self, segments: Segments) -> tuple[DeviceTiles, ...]:
        """The wide and the narrow tiles of a batch, leaving out a kind that it does not have."""
        lists = [tiles for tiles in self._lists(segments) if len(tiles.work)]
        parts = [records for tiles in lists for records in (tiles.work, tiles.merges)]
        host = self._host_records(sum(map(len, parts)))
        np.concatenate(parts, out=host.numpy())
        pieces = torch.split(host.to(self.device, non_blocking=True), [len(records) for records in parts])
        return tuple(
            DeviceTiles(tiles.block_m, work, merges, tiles.partials, tiles.merged_rows)
            for tiles, work, merges in zip(lists, pieces[::2], pieces[1::2], strict=True)
        )

    def reserve(self, segments: int, tokens: int | None) -> tuple[DeviceTiles, ...]:
        """Empty tile lists with the room of `CapturableAttention.reserve`; only narrow ones without `tokens`."""
        kinds = [(self.narrow_m, segments, self.narrow_target, self.group_size)]
        if tokens is not None:
            shortest = self.narrow_m // self.group_size + 1  # tokens of a segment that is not narrow
            tiles = tokens * self.group_size // self.wide_m + min(WIDE_SEGMENTS, segments, tokens // shortest)
            kinds.insert(0, (self.wide_m, tiles, self.wide_target, MERGE_PROGRAMS))
        # A cut makes at most `target` pieces more than there are tiles, so at most `target` tiles are cut.
        sizes = [size for _, tiles, target, _ in kinds for size in (tiles + target, min(tiles, target))]
        records = torch.zeros((sum(sizes), FIELDS), dtype=torch.int32, device=self.device)
        pieces = torch.split(records, sizes)
        return tuple(
            DeviceTiles(block_m, work, merges, target + len(merges), programs)
            for (block_m, _, target, programs), work, merges in zip(kinds, pieces[::2], pieces[1::2], strict=True)
        )

    def refill(self, reserved: tuple[DeviceTiles, ...], segments: Segments) -> bool:
        """Write the tiles of a batch into reserved lists. False if they have no room; nothing is written then."""
        lists = self._lists(segments)
        if len(reserved) == 1 and len(lists[0].work) > 0:
            return False
        places = [place for tiles in reserved for place in (tiles.work, tiles.merges)]
        parts = [records for tiles in lists[-len(reserved) :] for records in (tiles.work, tiles.merges)]
        if any(len(records) > len(place) for records, place in zip(parts, places, strict=True)):
            return False
        host = self._host_records(sum(map(len, places)))
        into, at = host.numpy(), 0
        for records, place in zip(parts, places, strict=True):
            into[at : at + len(records)] = records
            at += len(place)
        # `reserve` put all lists into one tensor, so one copy is enough.
        places[0].as_strided(host.shape, host.stride()).copy_(host, non_blocking=True)
        return True

    def _lists(self, segments: Segments) -> tuple[TileList, TileList]:
        """Wide and narrow tiles of a batch."""
        narrow = segments.query_length * self.group_size <= self.narrow_m
        wide, few = (
            tile_list(segments, chosen, group_size=self.group_size, block_m=block_m, split_for=split_for)
            for chosen, block_m, split_for in (
                (~narrow, self.wide_m, self.split_wide),
                (narrow, self.narrow_m, self.split_narrow),
            )
        )
        return wide, few

    def _host_records(self, count: int) -> torch.Tensor:
        """Zeroed host memory for records to upload. PyTorch keeps pinned memory until the copy is done."""
        return torch.zeros((count, FIELDS), dtype=torch.int32, pin_memory=self.device.type == "cuda")
