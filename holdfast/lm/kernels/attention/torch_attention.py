"""Paged multi-token attention in plain PyTorch: similar segments in groups, gathered and attended by batched SDPA."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from holdfast.lm.kernels.attention.protocol import Attention, Segments
from holdfast.lm.kernels.cache.kv_cache import write_slots
from holdfast.lm.kernels.fp8 import FP8

# Largest number of query rows in a tile (tokens times heads that share a KV head). Tiles bound the score mask and skip
# most keys above the causal diagonal, at the cost of gathering the context once per tile.
TILE_ROWS = 512
# Keys are gathered for as many segments at a time as fit in the L2 cache, where SDPA then reads them.
GATHER_BYTES = 1 << 20
# On a GPU each group is a few launches, so groups are as large as their masks allow: a few hundred MB.
GPU_TILE_ROWS = 2048
GPU_GATHER_BYTES = 1 << 26

# A mask of at most this many scores is kept for all layers of a step; each layer makes a larger one again.
KEPT_MASK = 1 << 20

Ints = npt.NDArray[np.int64]
Positions = TypeVar("Positions", Ints, torch.Tensor)


@dataclass(frozen=True)
class Group:
    """Tiles of similar shape, padded to one shape: B tiles of N queries over L keys."""

    query_tokens: torch.Tensor  # [B * N] tokens of the batch; padding repeats a tile's last token
    query_positions: torch.Tensor  # [B, N]
    key_positions: torch.Tensor  # [B, L] positions that may be attended; padding continues past the tile's last one
    key_slots: torch.Tensor  # [B * L] places of these positions in the cache; padding repeats the tile's last one
    real_queries: torch.Tensor | None  # the indices among B * N that are not padding; None: all
    masked: bool  # whether some query must not see some key
    kept_mask: torch.Tensor | None  # from TorchAttention._mask; None if not masked, or too large to keep


@dataclass
class TileMetadata:
    """The tiles of one step, [C] each. The first layer that needs groups makes them; later layers reuse them."""

    first_token: Ints  # in the packed batch
    queries: Ints
    stop: Ints  # position after the tile's last query
    row: Ints
    groups: dict[Seen, list[Group]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seen:
    """Which positions before its own a query sees: the last ones of a window, those of its chunk, or all."""

    window: int | None = None
    """Number of positions of a window or a chunk. None: all are seen."""
    chunked: bool = False

    def first(self, position: Positions) -> Positions:
        """The first position that is seen from `position`."""
        if self.window is None:
            return position * 0
        return position // self.window * self.window if self.chunked else position - self.window + 1


class TorchAttention(Attention[TileMetadata]):
    """`Attention` for float32, bfloat16 and float16 on any device, without a Python loop over tokens.

    This is the backend of a CPU, and its sizes are chosen for one. On a GPU it needs no compiler and no other package,
    but it copies each context out of the cache first: correct, not fast, and not captured in graphs.

    A decode is bound by reading its context. Keys and values of several sequences of similar context are gathered
    through the block table, at memory speed, into a buffer that stays in the CPU's cache. Grouped-query heads become
    the rows of one small matrix product. Long segments are cut into tiles, which are segments of the same row.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        in_whole_steps: bool = False,
    ) -> None:
        self.device = device
        self.in_whole_steps = in_whole_steps
        """Whether a model may compute steps as a whole, attention included, where something does that faster."""
        self.num_kv_heads = num_kv_heads
        self.group_size = num_heads // num_kv_heads
        self.head_dim = head_dim
        self.block_size = block_size

    def make_metadata(self, segments: Segments) -> TileMetadata:
        most = TILE_ROWS if self.device.type == "cpu" else GPU_TILE_ROWS
        tile = max(1, most // self.group_size)
        lengths, stops = segments.query_length.astype(np.int64), segments.context_stop.astype(np.int64)
        if len(lengths) and lengths.min() >= 1 and lengths.max() <= tile:  # each segment is a tile, as in decoding
            firsts, rows = segments.query_start[:-1].astype(np.int64), segments.row.astype(np.int64)
            return TileMetadata(first_token=firsts, queries=lengths, stop=stops, row=rows)
        tiles = -(-lengths // tile)
        segment = np.repeat(np.arange(len(lengths)), tiles)
        offset = (np.arange(len(segment)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tile
        queries = np.minimum(tile, lengths[segment] - offset)
        start = stops - lengths
        return TileMetadata(
            first_token=segments.query_start[:-1].astype(np.int64)[segment] + offset,
            queries=queries,
            stop=start[segment] + offset + queries,
            row=segments.row.astype(np.int64)[segment],
        )

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        write_slots(key, value, key_cache, value_cache, slot_mapping)

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        metadata: TileMetadata,
        *,
        scale: float,
        window: int | None = None,
        chunked: bool = False,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if window is not None and window >= metadata.stop.max(initial=0):
            window = None  # hides nothing, so layers with and without a window share their groups
        seen = Seen(window, chunked and window is not None)
        if seen not in metadata.groups:
            metadata.groups[seen] = list(self._groups(metadata, block_tables, seen, query.dtype))
        groups = metadata.groups[seen]
        heads, size, dim = self.num_kv_heads, self.group_size, self.head_dim
        keys, values = key_cache.view(-1, heads * dim), value_cache.view(-1, heads * dim)
        room = max((len(group.key_slots) for group in groups), default=0)
        key_buffer, value_buffer = keys.new_empty(room, heads * dim), values.new_empty(room, heads * dim)
        out = torch.empty_like(query)
        for group in groups:
            b, n = group.query_positions.shape
            k, v = key_buffer[: len(group.key_slots)], value_buffer[: len(group.key_slots)]
            torch.index_select(keys, 0, group.key_slots, out=k)
            torch.index_select(values, 0, group.key_slots, out=v)
            k, v = from_cache_dtype(k, query.dtype), from_cache_dtype(v, query.dtype)
            mask = group.kept_mask
            if group.masked and mask is None:
                mask = self._mask(group, seen, query.dtype)
            q = query.index_select(0, group.query_tokens).view(b, n, heads, size, dim).transpose(1, 2)
            attended = grouped_attention(
                q.reshape(b, heads, n * size, dim),
                k.view(b, -1, heads, dim).transpose(1, 2),
                v.view(b, -1, heads, dim).transpose(1, 2),
                mask,
                scale=scale,
                softcap=softcap,
                sinks=None if sinks is None else sinks.view(heads, 1, size).expand(heads, n, size).reshape(heads, -1),
            )
            attended = attended.view(b, heads, n, size, dim).transpose(1, 2).reshape(b * n, heads * size, dim)
            if group.real_queries is None:
                out.index_copy_(0, group.query_tokens, attended)
            else:
                real = group.real_queries
                out.index_copy_(0, group.query_tokens[real], attended[real])
        return out

    def _mask(self, group: Group, seen: Seen, dtype: torch.dtype) -> torch.Tensor:
        """The mask [B, 1, N * G, L] to add to scores: -inf where a query row must not see a key, else 0."""
        keys, queries = group.key_positions[:, None, None, :], group.query_positions[:, :, None, None]
        hidden = keys > queries
        if seen.window is not None:
            hidden |= keys < seen.first(queries)
        b, n, _, length = hidden.shape
        mask = torch.zeros(b, n, self.group_size, length, dtype=dtype, device=self.device)
        return mask.masked_fill_(hidden, -torch.inf).view(b, 1, -1, length)

    def _groups(
        self, metadata: TileMetadata, block_tables: torch.Tensor, seen: Seen, dtype: torch.dtype
    ) -> Iterator[Group]:
        """Cut the tiles, sorted by shape, into groups that fit the gather buffer and need little padding."""
        stop, queries = metadata.stop, metadata.queries
        first = np.maximum(0, seen.first(stop - queries))
        keys = stop - first
        row_bytes = self.num_kv_heads * self.head_dim * dtype.itemsize
        most_bytes = GATHER_BYTES if self.device.type == "cpu" else GPU_GATHER_BYTES
        group: list[int] = []
        longest = real = 0  # longest context of the group; its scores without padding
        for tile in np.lexsort((keys, queries)).tolist():
            n, length = int(queries[tile]), int(keys[tile])
            size = (len(group) + 1) * max(longest, length)
            if group and (size * row_bytes > most_bytes or size * n > 2 * (real + n * length)):
                yield self._group(metadata, np.array(group), first, block_tables, seen, dtype)
                group, longest, real = [], 0, 0
            group.append(tile)
            longest = max(longest, length)
            real += n * length
        if group:
            yield self._group(metadata, np.array(group), first, block_tables, seen, dtype)

    def _group(
        self,
        metadata: TileMetadata,
        tiles: Ints,
        first: Ints,
        block_tables: torch.Tensor,
        seen: Seen,
        dtype: torch.dtype,
    ) -> Group:
        stop, queries = metadata.stop[tiles, None], metadata.queries[tiles, None]
        first = first[tiles, None]
        query = np.arange(queries.max())[None, :]
        key = first + np.arange((stop - first).max())[None, :]
        clamped = np.minimum(query, queries - 1)
        real = query < queries
        position = self._on_device(np.minimum(key, stop - 1))
        blocks = block_tables[self._on_device(metadata.row[tiles, None]), position // self.block_size]
        group = Group(
            query_tokens=self._on_device((metadata.first_token[tiles, None] + clamped).reshape(-1)),
            query_positions=self._on_device(stop - queries + clamped),
            key_positions=self._on_device(key),
            key_slots=(blocks.long() * self.block_size + position % self.block_size).view(-1),
            real_queries=None if real.all() else self._on_device(np.flatnonzero(real)),
            masked=bool(queries.max() > 1 or (stop - first).min() < key.shape[1]),
            kept_mask=None,
        )
        if group.masked and group.query_positions.numel() * self.group_size * key.shape[1] <= KEPT_MASK:
            group = replace(group, kept_mask=self._mask(group, seen, dtype))
        return group

    def _on_device(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def from_cache_dtype(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of a cache, converted exactly from FP8 to the dtype of attention. An FP8 NaN becomes an arbitrary number.

    PyTorch's own conversion takes ten times as long. FP8 bits, shifted to the places of sign, exponent and fraction in
    float16, give the number divided by 2^8, because the exponents' biases differ by 8.
    """
    if numbers.dtype != FP8:
        return numbers
    bits = numbers.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    return bits.view(torch.float16).to(torch.float32).mul_(256).to(dtype)


def grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of rows [B, H, M, D] over keys and values [B, H, L, D]; mask [B, 1, M, L] is added, sinks [H, M]."""
    if softcap is None and sinks is None:
        return functional.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.float()[None, :, :, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[-2]]
    return (weights @ value.float()).to(query.dtype)
