"""Attention of layers of several shapes: each layer is left to the backend of its shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from holdfast.lm.kernels.attention.backends import attention_for, attention_of_layers
from holdfast.lm.kernels.attention.mixed_attention import MixedAttention, mixed
from holdfast.lm.kernels.attention.protocol import CapturableAttention, Segments
from holdfast.lm.kernels.attention.torch_attention import TorchAttention
from holdfast.lm.kernels.cache.kv_cache import KVCache, KVShape

SHAPES = (KVShape(2, 8, 8), KVShape(1, 16, 16), KVShape(2, 8, 8))
BATCH = Segments(
    query_start=np.array([0, 3, 4], np.int32),
    context_stop=np.array([3, 1], np.int32),
    row=np.array([0, 1], np.int32),
)


def test_layers_of_one_shape_need_no_mixture() -> None:
    assert isinstance(attention_of_layers("cpu", SHAPES[:1] * 3, num_heads=4, block_size=4), TorchAttention)


def test_each_layer_attends_with_its_own_heads() -> None:
    attention = attention_of_layers("cpu", SHAPES, num_heads=4, block_size=4)
    assert isinstance(attention, MixedAttention)
    cache = KVCache.allocate_layers(SHAPES, num_blocks=3, block_size=4, dtype=torch.float32, device="cpu")
    alone = KVCache.allocate_layers(SHAPES, num_blocks=3, block_size=4, dtype=torch.float32, device="cpu")
    metadata, slots = attention.make_metadata(BATCH), torch.tensor([4, 5, 6, 8])
    tables = torch.tensor([[1], [2]], dtype=torch.int32)
    for layer, shape in enumerate(SHAPES):
        query = torch.randn(4, 4, shape.key_size)
        key, value = torch.randn(2, 4, shape.heads, shape.key_size)
        own = attention_for("cpu", num_heads=4, num_kv_heads=shape.heads, head_dim=shape.key_size, block_size=4)
        found = []
        for backend, planes, given in ((attention, cache.layer(layer), metadata), (own, alone.layer(layer), None)):
            backend.write(key, value, *planes, slots)
            given = backend.make_metadata(BATCH) if given is None else given
            found.append(backend.attend(query, *planes, tables, given, scale=0.5, window=2, softcap=3.0))
        assert torch.equal(*found)


class Room(CapturableAttention[list[int]]):
    """A backend whose metadata is the number of segments, with room for `most`."""

    def __init__(self, most: int) -> None:
        self.most = most

    def make_metadata(self, segments: Segments) -> list[int]:
        return [len(segments.row)]

    def write(self, *arguments: Any) -> None:
        raise AssertionError("nothing is written")

    def attend(self, *arguments: Any, **options: Any) -> torch.Tensor:
        raise AssertionError("nothing attends")

    def reserve(self, segments: int, tokens: int | None = None) -> list[int]:
        return [0]

    def refill(self, metadata: list[int], segments: Segments) -> bool:
        if len(segments.row) > self.most:
            return False
        metadata[0] = len(segments.row)
        return True


@pytest.mark.parametrize(("rooms", "fits"), [((2, 2), True), ((2, 1), False), ((1, 2), False)])
def test_a_captured_batch_needs_room_in_every_backend(rooms: tuple[int, int], fits: bool) -> None:
    attention = mixed({shape: Room(most) for shape, most in zip(SHAPES[:2], rooms, strict=True)})
    assert isinstance(attention, CapturableAttention)
    metadata = attention.reserve(2)
    assert attention.refill(metadata, BATCH) == fits
    if fits:
        assert metadata == ([2], [2])


def test_a_mixture_with_a_backend_that_cannot_be_captured_is_not_captured() -> None:
    plain = attention_for("cpu", num_heads=2, num_kv_heads=1, head_dim=16, block_size=4)
    assert not isinstance(mixed({SHAPES[0]: Room(1), SHAPES[1]: plain}), CapturableAttention)
