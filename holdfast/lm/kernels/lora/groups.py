"""Groups and tiles: which tokens have which adapter, in the form that kernels read. On the host, in NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

FEW_TOKENS = 512
"""Largest number of tokens in a step whose tiles have SMALL_TILE tokens, the fewest that tensor cores process.

In larger steps a tile has LARGE_TILE tokens.
"""
SMALL_TILE, LARGE_TILE = 16, 64


@dataclass(frozen=True, slots=True)
class Groups:
    """The tokens of a step, grouped by adapter."""

    order: Numbers
    """Indices of the tokens, grouped by adapter. Tokens without an adapter come last."""
    slots: Numbers
    """The slot of each group, ascending."""
    starts: Numbers
    """The start of each group in `order`; the last number is the start of the tokens without an adapter."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The groups of a step, cut into tiles of up to `tile_size` tokens of one slot.

    In a step with large tiles, the tokens without an adapter have tiles as well, the last ones. Their slot is -1.
    """

    order: Numbers
    """Indices of the tokens. The tokens of a tile are adjacent."""
    slot: Numbers
    start: Numbers
    """The start of each tile in `order`."""
    count: Numbers
    """Number of tokens in each tile."""
    used: Numbers
    """Two numbers: the number of tiles with an adapter, and the number of all tiles."""


def groups_of(slots: Numbers) -> Groups:
    """Group tokens by slot; -1 stands for no adapter. Tokens of one slot keep their order."""
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    first = int(np.searchsorted(ordered, 0))
    ordered = ordered[first:]
    changes = np.flatnonzero(np.diff(ordered, prepend=-1))
    return Groups(np.roll(order, -first), ordered[changes], np.append(changes, len(ordered)))


def tile_size(tokens: int, *, fixed: bool = False) -> int:
    """Number of tokens in a tile, for a step of `tokens` tokens. `fixed`: it is the same in every step."""
    return SMALL_TILE if fixed or tokens <= FEW_TOKENS else LARGE_TILE


def most_tiles(tokens: int, slots: int, *, fixed: bool = False) -> int:
    """Largest number of tiles in any step with at most this many tokens and slots. `fixed` is that of `tile_size`.

    Each group may end with a partial tile.
    """
    if fixed:
        return min(tokens, tokens // SMALL_TILE + slots)
    few = min(tokens, FEW_TOKENS)
    small = min(few, few // SMALL_TILE + slots)
    return small if tokens <= FEW_TOKENS else max(small, min(tokens, tokens // LARGE_TILE + slots + 1))


def tiles_of(groups: Groups, tokens: int, *, fixed: bool = False) -> Tiles:
    """The tiles of a step that is padded to `tokens` tokens. Padding has no adapter. `fixed` is that of `tile_size`."""
    size = tile_size(tokens, fixed=fixed)
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
