"""The tiles of one step: which query rows of which segment meet which keys. Vectorised numpy on the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.lm.kernels.attention.protocol import Segments

FIELDS = 8  # int32 numbers in a record of work or of merges

PARTS = (2, 3, 4, 5, 6, 8, 10, 12, 16)  # numbers of pieces that the longest tile may be cut into
FIXED_STEPS = 2.5  # fixed time of a piece, in units of the time of one split unit of keys
SPLIT_STEPS = 4.5  # the same for a piece whose result must be merged
GAIN = 0.97  # a finer cut must end within this share of the time before

STREAMS = 2  # programs per processor that together read at the full rate of memory
MERGE_KEYS = 120  # time of a merge, in keys that one program reads in that time

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
        """The most rows of a merged tile."""
        return int(np.minimum(self.merges[:, 1] - self.merges[:, 2], self.block_m).max(initial=0))


def tile_list(
    segments: Segments,
    chosen: npt.NDArray[np.bool_],
    *,
    group_size: int,
    block_m: int,
    split_for: Callable[[Records], int],
) -> TileList:
    """Tiles of the chosen [S] segments, cut over the context into pieces.

    `split_for` takes the number of keys of each tile and returns the most keys of a piece.
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
    tile = np.repeat(np.arange(len(splits)), splits)
    first_key = _count_within(splits) * split
    stop_key = np.minimum(first_key + split, keys[tile])
    in_parts = splits > 1
    partial = np.where(in_parts[tile], np.cumsum(in_parts[tile]), 0)

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
    merges[:, 4] = splits[in_parts]
    merges[:, 3] = np.cumsum(merges[:, 4]) - merges[:, 4]
    return TileList(block_m, work, merges)


def split_to_stream(keys: Records, *, heads: int, processors: int, spare: int, unit: int) -> int:
    """Keys per piece for the earliest end when `processors` are bound by reading the keys of all `heads`.

    The result is a multiple of `unit`, and cutting adds at most `spare` pieces. Split a tile only if one program would
    take longer, merging included, than reading all keys in parallel. Then no piece is longer than that, because one
    program alone reads far slower than all together.
    """
    longest, total = int(keys.max(initial=1)), int(keys.sum(dtype=np.int64))
    steady = total * heads / (STREAMS * processors)
    split = longest
    if longest > steady + MERGE_KEYS:
        at_most = max(steady, total / spare if spare else longest)
        split = -(-longest // math.ceil(longest / (math.ceil(at_most / unit) * unit)))
    return -(-split // unit) * unit


def split_evenly(keys: Records, *, heads: int, processors: int, spare: int, unit: int) -> int:
    """Keys per piece for the earliest end when `processors` share the pieces of all `heads`, bound by arithmetic.

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
    """When the last processor ends. Work is dealt as kernels do: longest first, every second round backwards."""
    items = np.repeat(np.sort(lengths)[::-1], heads)
    rounds = np.zeros((-(-len(items) // processors), processors))
    rounds.reshape(-1)[: len(items)] = items
    rounds[1::2] = rounds[1::2, ::-1]
    return float(rounds.sum(0).max(initial=0.0))


def _count_within(sizes: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """0, 1, … size - 1 for each size, concatenated."""
    stops = np.cumsum(sizes)
    return (np.arange(int(sizes.sum())) - np.repeat(stops - sizes, sizes)).astype(np.int32)
