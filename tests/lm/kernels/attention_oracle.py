"""Brute-force attention in float64, and random batches for testing the backends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from holdfast.lm.kernels.attention.protocol import Segments


@dataclass(frozen=True)
class Batch:
    """One step's attention: the arguments of `write` and `attend`, and the whole context for the oracle."""

    segments: Segments
    query: torch.Tensor  # [T, Hq, D]
    key: torch.Tensor  # [T, Hkv, D] of the step's own tokens
    value: torch.Tensor
    key_cache: torch.Tensor  # earlier positions are in place; every slot that was never written holds NaN
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    contexts: dict[int, tuple[torch.Tensor, torch.Tensor]]  # row -> keys, values [length, Hkv, D], this step's included


def make_batch(
    segments: list[tuple[int, int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Batch:
    """A batch of (row, start, stop) segments over blocks that lie in random order in the second layer of a cache.

    With a `cache_dtype`, the step's own keys and values are still of `dtype`. The oracle gets them as they are stored.
    """
    random = np.random.default_rng(seed)
    noise = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=noise).to(dtype)

    lengths = {row: max(stop for other, _, stop in segments if other == row) for row, _, _ in segments}
    needed = {row: -(-length // block_size) for row, length in lengths.items()}
    num_blocks = sum(needed.values()) + 3
    free = random.permutation(num_blocks).tolist()
    tables = torch.full((max(lengths) + 2, max(needed.values()) + 2), num_blocks + 10**6, dtype=torch.int32)
    cache_dtype = cache_dtype or dtype
    cache = torch.full((3, 2, num_blocks, block_size, kv_heads, head_dim), torch.nan).to(cache_dtype)
    key_cache, value_cache = cache[1]
    contexts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    exact: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    slots: dict[int, torch.Tensor] = {}
    for row, length in lengths.items():
        blocks = torch.tensor([free.pop() for _ in range(needed[row])])
        tables[row, : len(blocks)] = blocks.int()
        position = torch.arange(length)
        slots[row] = blocks[position // block_size] * block_size + position % block_size
        exact[row] = normal(length, kv_heads, head_dim), normal(length, kv_heads, head_dim)
        contexts[row] = tuple(numbers.to(cache_dtype).to(dtype) for numbers in exact[row])
        written = torch.ones(length, dtype=torch.bool)
        for other, start, stop in segments:
            if other == row:
                written[start:stop] = False
        for place, context in zip((key_cache, value_cache), contexts[row], strict=True):
            place.view(-1, kv_heads, head_dim)[slots[row][written]] = context[written].to(cache_dtype)
    starts = np.cumsum([0] + [stop - start for _, start, stop in segments])
    cache = cache.to(device)
    return Batch(
        segments=Segments(
            query_start=starts.astype(np.int32),
            context_stop=np.array([stop for _, _, stop in segments], np.int32),
            row=np.array([row for row, _, _ in segments], np.int32),
        ),
        query=normal(int(starts[-1]), heads, head_dim).to(device),
        key=torch.cat([exact[row][0][start:stop] for row, start, stop in segments]).to(device),
        value=torch.cat([exact[row][1][start:stop] for row, start, stop in segments]).to(device),
        key_cache=cache[1, 0],
        value_cache=cache[1, 1],
        block_tables=tables.to(device),
        slot_mapping=torch.cat([slots[row][start:stop] for row, start, stop in segments]).to(device),
        contexts=contexts,
    )


def oracle(
    batch: Batch,
    *,
    scale: float,
    window: int | None = None,
    chunked: bool = False,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention [T, Hq, D] in float64, one query head and one segment at a time."""
    query = batch.query.double().cpu()
    out = torch.empty_like(query)
    heads, kv_heads = query.shape[1], batch.key.shape[1]
    segments = batch.segments
    for begin, end, stop, row in zip(
        segments.query_start[:-1], segments.query_start[1:], segments.context_stop, segments.row, strict=True
    ):
        keys, values = (context[:stop].double() for context in batch.contexts[int(row)])
        position = torch.arange(stop - (end - begin), stop)[:, None]
        other = torch.arange(stop)[None, :]
        hidden = other > position
        if window is not None:
            hidden |= other < position // window * window if chunked else other <= position - window
        for head in range(heads):
            mate = head // (heads // kv_heads)
            scores = query[begin:end, head] @ keys[:, mate].T * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].double().cpu().expand(len(scores), 1)], dim=1)
            weights = scores.softmax(-1)[:, : int(stop)]
            out[begin:end, head] = weights @ values[:, mate]
    return out
