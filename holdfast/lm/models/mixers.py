"""The mixers of decoder layers: what lets a token read the tokens before it, by attention or by a recurrence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from holdfast.lm.kernels.fp8 import Weight
from holdfast.lm.kernels.linear.layers import LayerOps, Normed, Rotation
from holdfast.lm.kernels.lora.protocol import Lora, LoraStack, StepAdapters
from holdfast.lm.models.base import StateTensor, StepInput
from holdfast.lm.models.decoder_spec import DecoderSpec, DeltaSpec


class Mixer(ABC):
    """The first half of one layer, up to the projection that adds its result to the stream."""

    @abstractmethod
    def mix(self, ops: LayerOps, normed: Normed, step: StepInput, rotations: Sequence[Rotation]) -> torch.Tensor:
        """The input [T, width] of that projection, from the normed stream. Writes the layer's cache or states.

        `ops` are the decoder's. `rotations` are those of the step's positions, by kind of layer.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """The weights of a layer's attention. A tensor that the architecture lacks is None."""

    qkv: Weight  # [(H + 2 Hkv) D, hidden]; with output gates [(2 H + 2 Hkv) D, hidden], gates last
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
        self._scale, self._softcap = spec.scale, spec.softcap

    def mix(self, ops: LayerOps, normed: Normed, step: StepInput, rotations: Sequence[Rotation]) -> torch.Tensor:
        return self._attended(ops, self._projected(ops, normed, step), step, rotations)

    def _projected(self, ops: LayerOps, normed: Normed, step: StepInput) -> torch.Tensor:
        """The product with `AttentionWeights.qkv`, and what adapters change of it."""
        weights, adapters = self._weights, step.adapters
        if adapters is None:
            return ops.linear(normed, weights.qkv, weights.bias)
        stack = adapters.layers[self._index].qkv
        return adapted(ops, ops.computed(normed), weights.qkv, weights.bias, stack, adapters, adapters.tokens)

    def _attended(
        self, ops: LayerOps, qkv: torch.Tensor, step: StepInput, rotations: Sequence[Rotation]
    ) -> torch.Tensor:
        """The result [T, H D] of attention, whose keys and values are written to the cache first."""
        weights, cache = self._weights, self._cache
        query = ops.rotate_and_write(
            qkv, rotations[self._rotation], weights.q_norm, weights.k_norm, step.caches[cache], step.slot_mapping
        )
        return step.attend(
            cache, query, scale=self._scale, window=self._window, softcap=self._softcap, sinks=weights.sinks
        ).flatten(1)


class GatedAttentionMixer(AttentionMixer):
    """Attention whose heads have output gates (Qiu et al., 2025, Gated Attention for Large Language Models, §2)."""

    def mix(self, ops: LayerOps, normed: Normed, step: StepInput, rotations: Sequence[Rotation]) -> torch.Tensor:
        shape, projected = ops.shape, self._projected(ops, normed, step)
        gates = shape.num_heads * shape.head_dim
        qkv, gate = projected[:, :-gates], projected[:, -gates:]
        return self._attended(ops, qkv, step, rotations).mul_(gate.sigmoid())


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaWeights:
    """The weights of a gated delta net, except its last projection."""

    inputs: Weight  # [2 Hk Dk + 2 Hv Dv + 2 Hv, hidden]: queries, keys, values, output gates, update rates, time steps
    conv: torch.Tensor  # [2 Hk Dk + Hv Dv, W]
    decay: torch.Tensor  # [Hv] float32: the rate of decay per time step, below 0
    bias: torch.Tensor  # [Hv] float32: the bias of time steps
    gain: torch.Tensor  # [Dv]: the weight of the norm of each head's result


class DeltaMixer(Mixer):
    """A gated delta net (Yang et al., 2024, Gated Delta Networks, §3.3), as Qwen3-Next and Qwen3.5 have it."""

    def __init__(self, weights: DeltaWeights, delta: DeltaSpec, *, state: int, eps: float) -> None:
        """`state` is the layer's number among those with a state. `eps` is added under the root of the norm."""
        self._weights, self._delta, self._state, self._eps = weights, delta, state, eps

    def mix(self, ops: LayerOps, normed: Normed, step: StepInput, rotations: Sequence[Rotation]) -> torch.Tensor:
        weights, delta, recurrent = self._weights, self._delta, step.recurrent
        assert recurrent is not None
        conv_state, state = recurrent.states[self._state]
        recurrence, metadata = recurrent.recurrence, recurrent.metadata
        heads, dim = delta.value_heads, delta.value_dim
        projected = ops.linear(normed, weights.inputs)
        mixed, gate, rate, time = torch.split(projected, [delta.channels, delta.values, heads, heads], dim=-1)
        mixed = recurrence.convolve(mixed, weights.conv, None, conv_state, metadata, activation="silu")
        query, key, value = torch.split(mixed, [delta.keys, delta.keys, delta.values], dim=-1)
        found = recurrence.gated_delta(
            query.view(len(query), delta.key_heads, delta.key_dim),
            key.view(len(key), delta.key_heads, delta.key_dim),
            value.view(len(value), heads, dim),
            functional.softplus(time.float() + weights.bias) * weights.decay,
            rate.sigmoid(),
            state,
            metadata,
            scale=delta.key_dim**-0.5,
            normalize=True,
        )
        found = functional.rms_norm(found.float(), (dim,), None, self._eps).to(weights.gain.dtype) * weights.gain
        return (found.flatten(1) * functional.silu(gate.float())).to(projected.dtype)


def delta_state(delta: DeltaSpec, dtype: torch.dtype) -> tuple[StateTensor, ...]:
    """The state of one layer: the last inputs of its convolution, in the activations' dtype, and the recurrent state.

    These are the states that `Recurrence.convolve` and `Recurrence.gated_delta` take.
    """
    inputs = StateTensor((delta.channels, delta.width - 1), dtype)
    return inputs, StateTensor((delta.value_heads, delta.key_dim, delta.value_dim), torch.float32)


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
    finish = lora.begin(x, stack)
    out = ops.linear(x, weight, None if adapters.scaled else bias)
    finish.add(out)
    if adapters.scaled:  # gains do not scale the bias
        lora.scale(out, stack)
        if bias is not None:
            out += bias
    return out
