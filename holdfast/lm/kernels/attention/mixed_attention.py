"""Attention of a model whose layers differ in KV heads or head size: a backend for each shape of layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from holdfast.lm.kernels.attention.protocol import Attention, CapturableAttention, Segments
from holdfast.lm.kernels.cache.kv_cache import KVShape

MixedMetadata = tuple[Any, ...]
"""The metadata of each backend, in their order."""


class MixedAttention(Attention[MixedMetadata]):
    """`Attention` that leaves each layer to the backend of the layer's shape, which its cache shows."""

    def __init__(self, backends: Mapping[KVShape, Attention[Any]]) -> None:
        """`backends` are those of the model's shapes, which differ in KV heads or in the size of a key."""
        self._backends = tuple(backends.values())
        self._places = {(shape.heads, shape.key_size): place for place, shape in enumerate(backends)}

    def make_metadata(self, segments: Segments) -> MixedMetadata:
        return tuple(backend.make_metadata(segments) for backend in self._backends)

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        self._backends[self._place(key_cache)].write(key, value, key_cache, value_cache, slot_mapping)

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        metadata: MixedMetadata,
        **options: Any,
    ) -> torch.Tensor:
        place = self._place(key_cache)
        return self._backends[place].attend(query, key_cache, value_cache, block_tables, metadata[place], **options)

    def _place(self, key_cache: torch.Tensor) -> int:
        """The place of the backend for a layer with this cache [num_blocks, block_size, Hkv, D]."""
        return self._places[key_cache.shape[2], key_cache.shape[3]]


class CapturableMixedAttention(MixedAttention, CapturableAttention[MixedMetadata]):
    """`MixedAttention` of backends that CUDA graphs may capture."""

    def __init__(self, backends: Mapping[KVShape, CapturableAttention[Any]]) -> None:
        super().__init__(backends)
        self._capturable = tuple(backends.values())

    def reserve(self, segments: int, tokens: int | None = None) -> MixedMetadata:
        return tuple(backend.reserve(segments, tokens) for backend in self._capturable)

    def refill(self, metadata: MixedMetadata, segments: Segments) -> bool:
        # A backend with room may be written to though another has none. No graph reads that, as the step is not
        # replayed then.
        return all(backend.refill(own, segments) for backend, own in zip(self._capturable, metadata, strict=True))


def mixed(backends: Mapping[KVShape, Attention[Any]]) -> MixedAttention:
    """The attention of layers of these shapes. It can be captured if all of its backends can."""
    capturable = {shape: each for shape, each in backends.items() if isinstance(each, CapturableAttention)}
    return CapturableMixedAttention(capturable) if len(capturable) == len(backends) else MixedAttention(backends)
