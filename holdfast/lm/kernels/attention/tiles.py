"""The tiles of one step: which query rows of which segment meet which keys. Made in vectorised NumPy, then uploaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from holdfast.lm.kernels.attention.protocol import Segments

FIELDS = 8  # int32 numbers in a record of work or of merges

PARTS = (2, 3, 4, 5, 6, 8, 10, 12, 16)  # numbers of pieces that the longest tile may be cut into
FIXED_STEPS = 2.5  # fixed time of a piece, in units of the time that one split unit of keys takes
SPLIT_STEPS = 4.5  # fixed time of a piece whose result must be merged, in the same units
GAIN = 0.97  # a finer cut must end within this share of the time before

STREAMS = 2  # programs per processor that together read at the full rate of memory
CROWD_STREAMS = 3  # the same in a crowd, whose programs keep less in flight, so that three share a processor
CROWD = 4  # tiles per processor of all heads above which `PagedAttention.launch` takes the programs of a crowd
MERGE_KEYS = 120  # time of a merge, as the number of keys that one program reads in that time

# Cutting contexts adds at most this many pieces per processor.
NARROW_WORK_PER_PROCESSOR = 4
WIDE_WORK_PER_PROCESSOR = 2
WIDE_SEGMENTS = 64  # segments that reserved metadata has room for; each may add a tile that is not full
MERGE_PROGRAMS = 16  # for each merge of wide tiles in reserved metadata, where most rows may be empty
NARROW_SPLIT_UNIT = 64  # keys; the length of a piece is a multiple of this
WIDE_SPLIT_UNIT = 128

Records = npt.NDArray[np.int32]

NO_RECORDS: Records = np.zeros((0, FIELDS), np.int32)


@dataclass(frozen=True)
class TileList:
    """Tiles of one height, cut over the context if there are too few to fill the device.

    The rows of a segment are its query tokens times the query heads that share a KV head, ordered by token. A tile is
    `block_m` rows against one KV head. A record of zeros does nothing, so a list may be padded to any capacity.

    work [W, 8]: first token of the segment in the batch, its rows, its start position, its row of the block tables,
    the tile's first row, first key, stop of keys, and 1 + the number of the partial result (0: the final result).
    merges [M, 8]: first token, rows, and the tile's first row as above; then its first partial result and their count.
    """

    block_m: int
    work: Records
    merges: Records

    @property
    def partials(self) -> int:
        """Number of partial results that the merges add up."""
        return int(self.merges[:, 4].sum())

    @property
    def merged_rows(self) -> int:
        """Largest number of rows in a merged tile."""
        return int(np.minimum(self.merges[:, 1] - self.merges[:, 2], self.block_m).max(initial=0))


def tile_list(
    segments: Segments,
    chosen: npt.NDArray[np.bool_],
    *,
    group_size: int,
    block_m: int,
    split_for: Callable[[Records], int],
    partial_keys: int | None = None,
    most_partials: int = 0,
) -> TileList:
    """Tiles of the chosen [S] segments, cut over the context into pieces.

    `split_for` takes the number of keys of each tile and returns the largest number of keys in a piece. A piece has one
    partial result, or one for each `partial_keys` keys, of which pieces have a multiple. All tiles have at most
    `most_partials` of these, so some tiles stay whole.
    """
    if not chosen.any():
        return TileList(block_m, NO_RECORDS, NO_RECORDS)
    start = segments.context_stop - segments.query_length
    rows = segments.query_length * group_size
    tiles = np.where(chosen, -(-rows // block_m), 0)
    segment = np.repeat(np.arange(len(tiles)), tiles)
    first_row = _count_within(tiles) * block_m
    last_token = (np.minimum(first_row + block_m, rows[segment]) - 1) // group_size
    keys = start[segment] + last_token + 1

    split = split_for(keys)
    splits = -(-keys // split)
    if partial_keys is not None:
        wanted = np.where(splits > 1, -(-keys // partial_keys), 0)
        splits = np.where(np.cumsum(wanted) <= most_partials, splits, 1)
    tile = np.repeat(np.arange(len(splits)), splits)
    first_key = _count_within(splits) * split
    stop_key = np.where(splits[tile] > 1, np.minimum(first_key + split, keys[tile]), keys[tile])
    in_parts = splits > 1
    counts = np.where(in_parts, -(-keys // (partial_keys or split)), 0)
    partial = np.where(in_parts[tile], 1 + (np.cumsum(counts) - counts)[tile] + first_key // (partial_keys or split), 0)

    work = np.zeros((len(tile), FIELDS), np.int32)
    of = segment[tile]
    work[:, 0], work[:, 1], work[:, 2] = segments.query_start[:-1][of], rows[of], start[of]
    work[:, 3], work[:, 4] = segments.row[of], first_row[tile]
    work[:, 5], work[:, 6], work[:, 7] = first_key, stop_key, partial
    # Longest first: the last pieces are short, so no processor waits for a long piece that started late.
    work = work[np.argsort(first_key - stop_key, kind="stable")]

    merges = np.zeros((int(in_parts.sum()), FIELDS), np.int32)
    of = segment[in_parts]
    merges[:, 0], merges[:, 1], merges[:, 2] = segments.query_start[:-1][of], rows[of], first_row[in_parts]
    merges[:, 4] = counts[in_parts]
    merges[:, 3] = np.cumsum(merges[:, 4]) - merges[:, 4]
    return TileList(block_m, work, merges)


def split_to_stream(
    keys: Records, *, heads: int, processors: int, spare: int, unit: int, crowd_streams: int = CROWD_STREAMS
) -> int:
    """Number of keys per piece for the earliest end, if `processors` are bound by reading the keys of all `heads`.

    The result is a multiple of `unit`, and cutting adds at most `spare` pieces. A tile is split only if one program
    would take longer, merging included, than reading all keys in parallel. No piece is longer than that, because one
    program alone reads far slower than all together. In a crowd, `crowd_streams` programs of a processor read at once.
    """
    longest, total = int(keys.max(initial=1)), int(keys.sum(dtype=np.int64))
    streams = crowd_streams if len(keys) * heads > CROWD * processors else STREAMS
    steady = total * heads / (streams * processors)
    split = longest
    if longest > steady + MERGE_KEYS:
        at_most = max(steady, total / spare if spare else longest)
        split = math.ceil(at_most / unit) * unit
        equal = -(
            -longest // math.ceil(longest / split)
        )  # the longest tile in equal pieces; shorter pieces may be too many
        equal = -(-equal // unit) * unit
        if int((-(-keys // equal)).sum()) <= len(keys) + spare:
            split = equal
    return -(-split // unit) * unit


def split_evenly(keys: Records, *, heads: int, processors: int, spare: int, unit: int) -> int:
    """Number of keys per piece for the earliest end, if `processors` share all `heads`' pieces, bound by arithmetic.

    The result is a multiple of `unit`, and cutting adds at most `spare` pieces. For example, 19 tiles of 8 heads on 132
    processors would leave most of them idle in a second round; with shorter pieces the second round is short.
    """
    steps = -(-keys // unit)
    longest = int(steps.max(initial=1))
    best, soonest = longest, _ends(steps + FIXED_STEPS, heads, processors)
    for parts in PARTS:
        split = -(-longest // parts)
        pieces = -(-steps // split)
        if split == best or int(pieces.sum()) > len(steps) + spare:
            continue
        lengths = np.minimum(np.repeat(steps, pieces) - _count_within(pieces) * split, split)
        ends = _ends(lengths + np.repeat(np.where(pieces > 1, SPLIT_STEPS, FIXED_STEPS), pieces), heads, processors)
        if ends < GAIN * soonest:
            best, soonest = split, ends
    return best * unit


def _ends(lengths: npt.NDArray[np.floating], heads: int, processors: int) -> float:
    """Time at which the last processor ends. Kernels deal out work longest first, every second round backwards."""
    items = np.repeat(np.sort(lengths)[::-1], heads)
    rounds = np.zeros((-(-len(items) // processors), processors))
    rounds.reshape(-1)[: len(items)] = items
    rounds[1::2] = rounds[1::2, ::-1]
    return float(rounds.sum(0).max(initial=0.0))


def _count_within(sizes: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """0, 1, … size - 1 for each size, concatenated."""
    stops = np.cumsum(sizes)
    return (np.arange(int(sizes.sum())) - np.repeat(stops - sizes, sizes)).astype(np.int32)


@dataclass(frozen=True)
class DeviceTiles:
    """A `TileList` on the device."""

    block_m: int
    work: torch.Tensor  # [W, 8] int32
    merges: torch.Tensor  # [M, 8] int32
    partials: int
    merge_programs: int  # for each merge; they share its rows
    narrow: bool  # whether segments have few query rows


class DeviceTilesBuilder:
    """Makes the tile lists of a step and uploads them in one copy.

    Segments with few query rows get narrow tiles, all others wide tiles. Tiles of either kind are cut over the context
    if there are too few to fill the device.
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
        partial_keys: int | None = None,
        most_partials: int = 0,
    ) -> None:
        """`narrow_m` and `wide_m` count the rows of a tile; `group_size` counts the query heads of a KV head.

        `partial_keys` is that of `tile_list`. `most_partials` is that of narrow tiles; that of wide ones takes as many
        rows.
        """
        self.partial_keys, self.most_partials = partial_keys, most_partials
        self.device, self.group_size = device, group_size
        self.narrow_m, self.wide_m = narrow_m, wide_m
        self.narrow_target = max(1, num_processors * NARROW_WORK_PER_PROCESSOR // num_kv_heads)
        self.wide_target = max(1, num_processors * WIDE_WORK_PER_PROCESSOR // num_kv_heads)
        stream = partial(split_to_stream, heads=num_kv_heads, processors=num_processors)
        evenly = partial(split_evenly, heads=num_kv_heads, processors=num_processors)
        # Kernels with partial results have one launch for all numbers of tiles.
        crowd = CROWD_STREAMS if partial_keys is None else STREAMS
        self.split_narrow = partial(
            stream, spare=self.narrow_target, unit=partial_keys or NARROW_SPLIT_UNIT, crowd_streams=crowd
        )
        self.split_wide = partial(evenly, spare=self.wide_target, unit=partial_keys or WIDE_SPLIT_UNIT)

    def build(self, segments: Segments) -> tuple[DeviceTiles, ...]:
        """The wide and the narrow tiles of a batch. A kind that the batch lacks is left out."""
        wide, narrow = self._lists(segments)
        lists = [tiles for tiles in (wide, narrow) if len(tiles.work)]
        parts = [records for tiles in lists for records in (tiles.work, tiles.merges)]
        host = self._host_records(sum(map(len, parts)))
        np.concatenate(parts, out=host.numpy())
        pieces = torch.split(host.to(self.device, non_blocking=True), [len(records) for records in parts])
        return tuple(
            DeviceTiles(tiles.block_m, work, merges, tiles.partials, tiles.merged_rows, tiles is narrow)
            for tiles, work, merges in zip(lists, pieces[::2], pieces[1::2], strict=True)
        )

    def reserve(self, segments: int, tokens: int | None) -> tuple[DeviceTiles, ...]:
        """Empty tile lists with the room of `CapturableAttention.reserve`. Without `tokens`, only narrow ones."""
        kinds = [(self.narrow_m, segments, self.narrow_target, self.group_size, True)]
        if tokens is not None:
            shortest = self.narrow_m // self.group_size + 1  # tokens of a segment that is not narrow
            tiles = tokens * self.group_size // self.wide_m + min(WIDE_SEGMENTS, segments, tokens // shortest)
            kinds.insert(0, (self.wide_m, tiles, self.wide_target, MERGE_PROGRAMS, False))
        # A cut makes at most `target` pieces more than there are tiles, so at most `target` tiles are cut.
        sizes = [size for _, tiles, target, *_ in kinds for size in (tiles + target, min(tiles, target))]
        records = torch.zeros((sum(sizes), FIELDS), dtype=torch.int32, device=self.device)
        pieces = torch.split(records, sizes)
        return tuple(
            DeviceTiles(block_m, work, merges, self._most_partials(block_m) or target + len(merges), programs, narrow)
            for (block_m, _, target, programs, narrow), work, merges in zip(
                kinds, pieces[::2], pieces[1::2], strict=True
            )
        )

    def refill(self, reserved: tuple[DeviceTiles, ...], segments: Segments) -> bool:
        """Write the tiles of a batch into reserved lists. Returns False and writes nothing if they have no room."""
        lists = self._lists(segments, all_narrow=len(reserved) == 1)
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

    def _lists(self, segments: Segments, *, all_narrow: bool = False) -> tuple[TileList, TileList]:
        """The wide and the narrow tiles of a batch. With `all_narrow`, long segments also have narrow tiles."""
        narrow = all_narrow | (segments.query_length * self.group_size <= self.narrow_m)

        def tiles(chosen: npt.NDArray[np.bool_], block_m: int, split_for: Callable[[Records], int]) -> TileList:
            return tile_list(
                segments,
                chosen,
                group_size=self.group_size,
                block_m=block_m,
                split_for=split_for,
                partial_keys=self.partial_keys,
                most_partials=self._most_partials(block_m),
            )

        return tiles(~narrow, self.wide_m, self.split_wide), tiles(narrow, self.narrow_m, self.split_narrow)

    def _most_partials(self, block_m: int) -> int:
        """Most partial results of tiles of this height. Both kinds may take as much memory."""
        return self.most_partials * self.narrow_m // block_m

    def _host_records(self, count: int) -> torch.Tensor:
        """Zeroed host memory for records to upload. PyTorch keeps pinned memory until the copy is complete."""
        return torch.zeros((count, FIELDS), dtype=torch.int32, pin_memory=self.device.type == "cuda")
