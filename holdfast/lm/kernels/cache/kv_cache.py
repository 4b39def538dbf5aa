"""The KV cache: keys and values of all layers in blocks, in the model's dtype or in FP8; and copies of blocks.

Layers may differ in heads. Layers of equal shape make a group, and a group is one tensor. A model whose layers are all
alike has one group.

FP8 is e4m3 without scales. Numbers from 2^-6 to 448 are rounded to 3 bits of fraction, smaller ones to multiples of
2^-9, and larger ones become 448. From 2^-6 on, the error is 2.3% on average and at most 5.9%, at every size, so a scale
would gain nothing there. Models whose keys or values are mostly outside that range would lose accuracy; only the
built-in model has been checked. Without scales a block consists only of its numbers, so blocks are copied, shared,
dropped and recomputed as for any dtype. The bytes of a position depend only on that position, not on how its sequence
was cut into segments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from holdfast.lm.kernels.fp8 import FP8, LARGEST

LONG_RUN = 8
"""Smallest average length of runs, in blocks, for a CPU to copy run by run. A run is adjacent in source and target."""


class KVShape(NamedTuple):
    """The sizes that one layer keeps of a token."""

    heads: int
    """Number of KV heads."""
    key_size: int
    """Numbers in a key of one head."""
    value_size: int
    """Numbers in a value of one head: as many as in a key; or 0, if the layer reads its values from its keys."""

    @property
    def planes(self) -> int:
        """Number of tensors that a layer has: one of keys, and one of values unless these are read from the keys.

        Raises ValueError for values of another size than keys.
        """
        if self.value_size not in (0, self.key_size):
            raise ValueError(
                f"values have {self.value_size} numbers a head and keys {self.key_size}; a layer's cache takes "
                "equally many, or 0"
            )
        return 2 if self.value_size else 1


class LayerPlace(NamedTuple):
    """The place of one layer in a cache."""

    group: int
    number: int
    """The layer's number within its group."""


class KVCache:
    """Keys and values in one tensor [layers, planes, num_blocks, block_size, Hkv, D] for each group of equal layers.

    The planes are keys and values, or keys alone (`KVShape.planes`). A new cache is not cleared, because the kernels
    never read a slot before it is written.
    """

    def __init__(self, *groups: torch.Tensor, places: Sequence[LayerPlace] | None = None) -> None:
        """`places` are those of the model's layers, by default in the order of the only group.

        The layers of a group are in the order of the model's layers.
        """
        self.groups = groups
        self.places = tuple(places or (LayerPlace(0, index) for index in range(len(groups[0]))))

    @classmethod
    def allocate(cls, *, layers: int, num_kv_heads: int, head_dim: int, **options: Any) -> KVCache:
        """Allocate a cache whose layers all have these heads. `options` are those of `allocate_layers`."""
        return cls.allocate_layers((KVShape(num_kv_heads, head_dim, head_dim),) * layers, **options)

    @classmethod
    def allocate_layers(
        cls,
        shapes: Sequence[KVShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        by_block: bool = False,
        within: torch.Tensor | None = None,
        make: Callable[[int], torch.Tensor] | None = None,
    ) -> KVCache:
        """Allocate this many blocks for layers of these shapes, at least one.

        With `by_block` each block is contiguous, group after group; else each layer's keys and values are. With
        `by_block`, the blocks may lie `within` existing memory, uint8 of exactly their size. Without, `make` may give
        the memory of each group, uint8 of this many bytes.
        """
        members: dict[KVShape, int] = {}
        places = []
        for shape in shapes:
            index = members.get(shape, 0)
            members[shape] = index + 1
            places.append(LayerPlace([*members].index(shape), index))
        tails = [(count, shape.planes, block_size, shape.heads, shape.key_size) for shape, count in members.items()]
        if not by_block:
            whole = [(count, planes, num_blocks, *tail) for count, planes, *tail in tails]
            if make is None:
                groups = [torch.empty(shape, dtype=dtype, device=device) for shape in whole]
            else:
                groups = [make(math.prod(shape) * dtype.itemsize).view(dtype).view(shape) for shape in whole]
            return cls(*groups, places=places)
        sizes = [math.prod(tail) * dtype.itemsize for tail in tails]
        if within is None:
            within = torch.empty(num_blocks * sum(sizes), dtype=torch.uint8, device=device)
        parts = torch.split(within.view(num_blocks, sum(sizes)), sizes, dim=1)
        views = [part.view(dtype).view(num_blocks, *tail) for part, tail in zip(parts, tails, strict=True)]
        return cls(*(view.permute(1, 2, 0, 3, 4, 5) for view in views), places=places)

    @property
    def data(self) -> torch.Tensor:
        """The tensor of a cache whose layers are all alike. Raises ValueError if they differ."""
        if len(self.groups) > 1:
            raise ValueError(f"the layers of this cache have {len(self.groups)} shapes; read each of its groups")
        return self.groups[0]

    @property
    def num_blocks(self) -> int:
        return self.groups[0].shape[2]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: those of all layers."""
        return sum(group[:, :, :1].nbytes for group in self.groups) if self.num_blocks else 0

    @property
    def device(self) -> torch.device:
        return self.groups[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.groups[0].dtype

    @property
    def block_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of a block in each group: [layers, planes, block_size, Hkv, D]."""
        return tuple((*group.shape[:2], *group.shape[3:]) for group in self.groups)

    @property
    def memory(self) -> torch.Tensor:
        """The bytes of all blocks, one after the other: uint8 [num_blocks * block_bytes].

        Raises ValueError if a block is not in one piece.
        """
        flat = torch.empty(0, dtype=torch.uint8).set_(self.groups[0].untyped_storage())
        pieces = [group for group in self.groups if self.num_blocks and not group[:, :, 0].is_contiguous()]
        if pieces or len(flat) != self.num_blocks * self.block_bytes:
            raise ValueError("the cache has its blocks in pieces")
        return flat

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The key cache and the value cache of a layer, [num_blocks, block_size, Hkv, D], as views.

        They are the same tensor if the layer reads its values from its keys.
        """
        place = self.places[index]
        planes = self.groups[place.group][place.number]
        return planes[0], planes[-1]

    def part(self, layers: slice) -> list[torch.Tensor]:
        """The tensors of these layers, one for each group that has any of them."""
        if len(self.groups) == 1:
            return [self.groups[0][layers]]
        members: dict[int, list[int]] = {}
        for place in self.places[layers]:
            members.setdefault(place.group, []).append(place.number)
        return [self.groups[group][of[0] : of[-1] + 1] for group, of in sorted(members.items())]


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
    for of, into in zip(source.part(layers), target.part(layers), strict=True):
        read, written = _indexable(of), _indexable(into)
        if read.device != written.device:
            # Imported here because a CPU installation has no Triton.
            from holdfast.lm.kernels.cache.copy_kernel import copy_runs

            copy_runs(read, source_blocks, written, target_blocks)
        else:
            _copy_group(read, source_blocks, written, target_blocks, apart=source is not target)


def _copy_group(
    read: torch.Tensor, source_blocks: torch.Tensor, written: torch.Tensor, target_blocks: torch.Tensor, *, apart: bool
) -> None:
    """Copy blocks of one group's layers on one device. `apart` says whether the two are of different caches."""
    if apart and (runs := _long_runs(source_blocks, target_blocks)):
        for first, place, count in runs:  # takes a third of the time of the copy by index
            written[:, :, place : place + count].copy_(read[:, :, first : first + count])
    else:
        dtype = _widest(read, written)
        halves = zip(_rows(written, dtype), _rows(read, dtype), strict=True)
        for into, of in halves:  # faster than one copy of all dimensions
            into.index_copy_(0, target_blocks, of.index_select(0, source_blocks))


def _rows(data: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """The keys and the values of each layer of a group, each [num_blocks, n] of this dtype, which may be wider."""
    return [half for layer in data.flatten(3).view(dtype) for half in layer]


def _widest(*groups: torch.Tensor) -> torch.dtype:
    """The dtype of these groups; or int64, which is faster to copy, if all of them can be viewed as that."""
    # If layers differ, a group may begin anywhere in a block.
    places = [(math.prod(group.shape[3:]), group.stride(2), group.storage_offset()) for group in groups]
    whole = all(place * groups[0].element_size() % 8 == 0 for place in chain(*places))
    return torch.int64 if whole else groups[0].dtype


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
