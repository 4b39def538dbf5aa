"""The mixers of layers with attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.lm.kernels.fp8 import Weight
from holdfast.lm.kernels.linear.layers import LayerOps, Normed, Rotation
from holdfast.lm.kernels.lora.protocol import Lora, LoraStack, StepAdapters
from holdfast.lm.models.base import StepInput
from holdfast.lm.models.decoder_spec import DecoderSpec
from holdfast.lm.models.mixer import Mixer, RecurrentMixer
from holdfast.lm.models.projection import Projection, with_adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """The weights of a layer's attention. A tensor that the architecture lacks is None."""

    qkv: Weight  # [(H + 2 Hkv) D, hidden]; with output gates [(2 H + 2 Hkv) D, hidden], gates first
    bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    sinks: torch.Tensor | None


class AttentionMixer(Mixer):
    """Attention over the paged cache."""

    def __init__(
        self,
        weights: AttentionWeights,
        spec: DecoderSpec,
        *,
        index: int,
        cache: int,
        window: int | None,
        rotation: int,
    ) -> None:
        """`index` is the layer's number among those of the device, and `cache` is its number among those with a cache.

        `rotation` is the layer's kind of rotation.
        """
        self._weights = weights
        self._index, self._cache, self._window, self._rotation = index, cache, window, rotation
        self._scale, self._softcap, self._chunked = spec.scale, spec.softcap, spec.chunked

    def mix(self, ops: LayerOps, normed: Normed, step: StepInput, rotations: Sequence[Rotation]) -> torch.Tensor:
        return self.attend(ops, self._projected(ops, normed, step), step, rotations)

    def _projected(self, ops: LayerOps, normed: Normed, step: StepInput) -> torch.Tensor:
        """The product with `AttentionWeights.qkv`, and what adapters change of it."""
        weights, adapters = self._weights, step.adapters
        if adapters is None:
            return ops.linear(normed, weights.qkv, weights.bias)
        stack = adapters.layers[self._index].qkv
        assert stack is not None
        return adapted(ops, ops.computed(normed), weights.qkv, weights.bias, stack, adapters, adapters.tokens)

    def attend(self, ops: LayerOps, qkv: torch.Tensor, step: StepInput, rotations: Sequence[Rotation]) -> torch.Tensor:
        """The result [T, H D] of attention, whose keys and values are written to the cache first."""
        weights, cache = self._weights, self._cache
        query = ops.rotate_and_write(
            qkv, rotations[self._rotation], weights.q_norm, weights.k_norm, step.caches[cache], step.slot_mapping
        )
        return step.attend(
            cache,
            self._tempered(query, step.positions),
            scale=self._scale,
            window=self._window,
            chunked=self._chunked,
            softcap=self._softcap,
            sinks=weights.sinks,
        ).flatten(1)

    def _tempered(self, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The queries [T, H, D] at these positions [T] as they attend."""
        return query


class TemperedAttentionMixer(AttentionMixer):
    """Attention without rotation, whose queries grow with their position (`DecoderSpec.temperature`)."""

    def __init__(self, *arguments: Any, temperature: tuple[float, int], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._temperature = temperature

    def _tempered(self, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return query * temperatures(self._temperature, positions, query.dtype)


class GatedAttentionMixer(AttentionMixer):
    """Attention whose heads have output gates (Qiu et al., 2025, Gated Attention for Large Language Models, §2)."""

    def mix(self, ops: LayerOps, normed: Normed, step: StepInput, rotations: Sequence[Rotation]) -> torch.Tensor:
        shape, projected = ops.shape, self._projected(ops, normed, step)
        gates = shape.num_heads * shape.head_dim
        gate, qkv = projected[:, :gates], projected[:, gates:]
        return self.attend(ops, qkv, step, rotations).mul_(gate.sigmoid())


def temperatures(temperature: tuple[float, int], positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The factors [T, 1, 1] on queries at these positions [T] in layers without rotation.

    `temperature` is that of the spec.
    """
    growth, steps = temperature
    factors = 1.0 + growth * torch.log1p(torch.floor((positions.float() + 1.0) / steps))
    return factors.to(dtype)[:, None, None]


def adapted(
    ops: LayerOps,
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    stack: LoraStack,
    adapters: StepAdapters,
    lora: Lora,
) -> torch.Tensor:
    """x [T, K] times weight transposed, plus bias, with the adapters' changes: [T, N]."""
    return with_adapters(lambda added: ops.linear(x, weight, added), x, bias, stack, adapters, lora)


class ParallelMixer(Mixer):
    """Attention and a recurrence side by side, from one projection (Zuo et al., 2025, Falcon-H1, §2)."""

    def __init__(
        self,
        projection: Projection,
        attention: AttentionMixer,
        recurrence: RecurrentMixer,
        factors: tuple[float, float],
    ) -> None:
        """`projection` has the rows of attention's projection, then those of the recurrence's.

        `factors` are those on the results of both, which stand in the same order.
        """
        self._projection, self._attention, self._recurrence = projection, attention, recurrence
        self._factors = factors

    def mix(self, ops: LayerOps, normed: Normed, step: StepInput, rotations: Sequence[Rotation]) -> torch.Tensor:
        shape, projected = ops.shape, self._projection.of(ops, normed, step)
        rows = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        attended = self._attention.attend(ops, projected[:, :rows], step, rotations)
        found = self._recurrence.recur(projected[:, rows:], step)
        return torch.cat((attended * self._factors[0], found * self._factors[1]), dim=1)
