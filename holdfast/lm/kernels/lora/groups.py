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
    """The tokens that have an adapter, those of one adapter together."""

    order: Numbers
    """Indices of the tokens."""
    slots: Numbers
    """The slot of each group, ascending."""
    starts: Numbers
    """Where each group starts in `order`, and at last where the last one ends."""


def groups_of(slots: Numbers) -> Groups:
    """Group tokens by their slot; -1 is none. Tokens of one slot keep their order."""
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    first = int(np.searchsorted(ordered, 0))
    order, ordered = order[first:], ordered[first:]
    changes = np.flatnonzero(np.diff(ordered, prepend=-1))
    return Groups(order, ordered[changes], np.append(changes, len(order)))


def tile_size(tokens: int) -> int:
    """Tokens of a tile in a step of this many tokens."""
    return SMALL_TILE if tokens <= FEW_TOKENS else LARGE_TILE


def most_tiles(tokens: int, slots: int) -> int:
    """Most tiles of any step of up to this many tokens with this many slots: each group may end with a part of one."""
    few = min(tokens, FEW_TOKENS)
    return max(min(few, few // SMALL_TILE + slots), min(tokens, tokens // LARGE_TILE + slots))


def tiles_of(groups: Groups, size: int) -> Numbers:
    """Cut groups into tiles of up to `size` tokens of one slot: [3, tiles] slots, starts in the order, counts."""
    lengths = np.diff(groups.starts)
    tiles = -(-lengths // size)
    group = np.repeat(np.arange(len(lengths)), tiles)
    within = np.arange(len(group)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    start = groups.starts[group] + within * size
    return np.stack((groups.slots[group], start, np.minimum(size, groups.starts[group + 1] - start)))
