"""Groups and tiles: which tokens have which adapter, as the kernels read it. On the host, in NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

FEW_TOKENS = 512
"""Up to this many tokens a tile has SMALL_TILE tokens, the least that tensor cores take, otherwise LARGE_TILE."""
SMALL_TILE, LARGE_TILE = 16, 64


@dataclass(frozen=True, slots=True)
class Groups:
    """The tokens of a step by their adapter, those of one adapter together."""

    order: Numbers
    """Indices of the tokens. Those without an adapter come last."""
    slots: Numbers
    """The slot of each group, ascending."""
    starts: Numbers
    """Where each group starts in `order`, and at last where the tokens without an adapter do."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The groups of a step, cut into tiles of up to `tile_size` tokens of one slot.

    In a step with large tiles, the tokens without an adapter have tiles as well, the last ones. Their slot is -1.
    """

    order: Numbers
    """Indices of the tokens; those of a tile lie together."""
    slot: Numbers
    start: Numbers
    """Where each tile starts in `order`."""
    count: Numbers
    """Tokens of each tile."""
    used: Numbers
    """Two numbers: the tiles of adapters, and all tiles."""


def groups_of(slots: Numbers) -> Groups:
    """Group tokens by their slot; -1 is none. Tokens of one slot keep their order."""
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    first = int(np.searchsorted(ordered, 0))
    ordered = ordered[first:]
    changes = np.flatnonzero(np.diff(ordered, prepend=-1))
    return Groups(np.roll(order, -first), ordered[changes], np.append(changes, len(ordered)))


def tile_size(tokens: int) -> int:
    """Tokens of a tile in a step of this many tokens."""
    return SMALL_TILE if tokens <= FEW_TOKENS else LARGE_TILE


def most_tiles(tokens: int, slots: int) -> int:
    """Most tiles of any step of up to this many tokens with this many slots: each group may end with a part of one."""
    few = min(tokens, FEW_TOKENS)
    small = min(few, few // SMALL_TILE + slots)
    return small if tokens <= FEW_TOKENS else max(small, min(tokens, tokens // LARGE_TILE + slots + 1))


def tiles_of(groups: Groups, tokens: int) -> Tiles:
    """The tiles of a step that is padded to so many tokens. Padding has no adapter."""
    size = tile_size(tokens)
    order, slots, starts = groups.order, groups.slots, groups.starts
    if size == LARGE_TILE:
        order = np.append(order, np.arange(len(order), tokens))
        slots, starts = np.append(slots, -1), np.append(starts, tokens)
    lengths = np.diff(starts)
    tiles = -(-lengths // size)
    group = np.repeat(np.arange(len(lengths)), tiles)
    within = np.arange(len(group)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    start = starts[group] + within * size
    slot = slots[group]
    used = np.array([np.count_nonzero(slot >= 0), len(slot)])
    return Tiles(order, slot, start, np.minimum(size, starts[group + 1] - start), used)
