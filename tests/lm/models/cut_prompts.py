"""Logits of a prompt that is computed in one step or in several, by a decoder on a CPU with layers of any size."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from holdfast.lm.kernels.attention.backends import attention_of_layers
from holdfast.lm.kernels.attention.protocol import Segments
from holdfast.lm.kernels.cache.kv_cache import KVCache
from holdfast.lm.models.base import StepInput
from holdfast.lm.models.decoder import Decoder


def logits_of(model: Decoder, ids: torch.Tensor, *cuts: int) -> torch.Tensor:
    """The logits [T, V] of token ids [T], computed in one step, or in several that begin at these cuts."""
    spec, count = model.spec, len(ids)
    cache = KVCache.allocate_layers(spec.kv_shapes, num_blocks=1, block_size=count, dtype=spec.dtype, device="cpu")
    sizes = dict(num_heads=spec.num_heads, latent_rank=spec.latent_rank, block_size=count)
    attention = attention_of_layers("cpu", spec.kv_shapes, **sizes)
    found = []
    for start, stop in pairwise((0, *cuts, count)):
        segments = Segments(*(np.array(numbers, np.int32) for numbers in ([0, stop - start], [stop], [0])))
        positions = torch.arange(start, stop)
        step = StepInput(
            ids[start:stop],
            positions,
            None,
            positions,
            torch.zeros(1, 1, dtype=torch.int32),
            [cache.layer(layer) for layer in range(spec.num_layers)],
            attention,
            attention.make_metadata(segments),
        )
        with torch.inference_mode():
            found.append(model.forward(step))
    return torch.cat(found)
