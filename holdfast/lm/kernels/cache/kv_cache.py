"""The KV cache tensor: keys and values of all layers in blocks, in the model's dtype or in FP8; and copies of blocks.

FP8 is e4m3 without scales. Numbers from 2^-6 to 448 are rounded to 3 bits of fraction, smaller ones to multiples of
2^-9, and larger ones become 448. From 2^-6 on, the error is 2.3% on average and at most 5.9%, at every size, so a scale
would gain nothing there. Models whose keys or values are mostly outside that range would lose accuracy; only the
built-in model has been checked. Without scales a block consists only of its numbers, so blocks are copied, shared,
dropped and recomputed as for any dtype. The bytes of a position depend only on that position, not on how its sequence
was cut into segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from holdfast.lm.kernels.fp8 import FP8, LARGEST

LONG_RUN = 8
"""Smallest average length of runs, in blocks, for a CPU to copy run by run. A run is adjacent in source and target."""


@dataclass(frozen=True)
class KVCache:
    """Keys and values in one tensor [layers, 2, num_blocks, block_size, Hkv, D].

    A new cache is not cleared, because the kernels never read a slot before it is written.
    """

    data: torch.Tensor

    @classmethod
    def allocate(
        cls,
        *,
        layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        by_block: bool = False,
        within: torch.Tensor | None = None,
    ) -> KVCache:
        """Allocate this many blocks. With `by_block` each block is contiguous; else each layer's keys and values are.

        With `by_block`, the blocks may lie `within` existing memory, uint8 of exactly their size.
        """
        tail = (block_size, num_kv_heads, head_dim)
        if by_block:
            shape = (num_blocks, layers, 2, *tail)
            data = torch.empty(shape, dtype=dtype, device=device) if within is None else within.view(dtype).view(shape)
            return cls(data.permute(1, 2, 0, 3, 4, 5))
        return cls(torch.empty(layers, 2, num_blocks, *tail, dtype=dtype, device=device))

    @property
    def num_blocks(self) -> int:
        return self.data.shape[2]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The key cache and the value cache of a layer, [num_blocks, block_size, Hkv, D], as views."""
        key, value = self.data[index]
        return key, value


def write_slots(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`Attention.write` in PyTorch, without padding: every slot must be valid."""
    for new, cache in ((key, key_cache), (value, value_cache)):
        slots = cache.view(-1, *new.shape[1:])
        if cache.dtype == FP8:
            new = new.clamp(-LARGEST, LARGEST).to(FP8)
        _indexable(slots).index_copy_(0, slot_mapping, _indexable(new))


def _indexable(numbers: torch.Tensor) -> torch.Tensor:
    """The tensor in a dtype that PyTorch can index: FP8 is viewed as bytes."""
    return numbers.view(torch.uint8) if numbers.dtype == FP8 else numbers


def copy_blocks(
    source: KVCache,
    source_blocks: torch.Tensor,
    target: KVCache,
    target_blocks: torch.Tensor,
    layers: slice = slice(None),
) -> None:
    """Copy the blocks `source_blocks` [n] of one cache to `target_blocks` [n] of the same or another cache.

    Both index tensors are int64. Between a GPU and the host, they are on the GPU, the host's cache is pinned, and the
    copy runs on the GPU's current stream. Otherwise all sources are read before any target is written, so the two may
    overlap within one cache.
    """
    read, written = _indexable(source.data[layers]), _indexable(target.data[layers])
    if read.device != written.device:
        # Imported here because a CPU installation has no Triton.
        from holdfast.lm.kernels.cache.copy_kernel import copy_runs

        copy_runs(read, source_blocks, written, target_blocks)
    elif source is not target and (runs := _long_runs(source_blocks, target_blocks)):
        for first, place, count in runs:  # takes a third of the time of the copy by index
            written[:, :, place : place + count].copy_(read[:, :, first : first + count])
    else:
        for into, of in zip(_rows(written), _rows(read), strict=True):  # faster than one copy of all dimensions
            into.index_copy_(0, target_blocks, of.index_select(0, source_blocks))


def _rows(data: torch.Tensor) -> list[torch.Tensor]:
    """The keys and the values of each layer of a cache, each [num_blocks, n] with n as small as the dtype allows."""
    rows = data.flatten(3)
    if rows.shape[3] * rows.element_size() % 8 == 0:
        rows = rows.view(torch.int64)
    return [half for layer in rows for half in layer]


def _long_runs(sources: torch.Tensor, targets: torch.Tensor) -> list[tuple[int, int, int]]:
    """The runs in which sources and targets are both adjacent: first source, first target, count.

    The list is empty if most runs are short.
    """
    ends = torch.nonzero((sources.diff() != 1) | (targets.diff() != 1)).flatten() + 1
    if (len(ends) + 1) * LONG_RUN > len(sources):
        return []
    starts, stops = [0, *ends.tolist()], [*ends.tolist(), len(sources)]
    firsts, places = sources[starts].tolist(), targets[starts].tolist()
    counts = [stop - start for start, stop in zip(starts, stops, strict=True)]
    return [*zip(firsts, places, counts, strict=True)]
