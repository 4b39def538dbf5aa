"""Gated delta nets: the recurrent layers of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from holdfast.lm.kernels.collectives.protocol import Group
from holdfast.lm.kernels.recurrent.protocol import Recurrence
from holdfast.lm.models.base import LayerState, Shape, StateTensor
from holdfast.lm.models.mixer import RecurrentInput, RecurrentMixer, RecurrentSpec, RecurrentWeights, Units


@dataclass(frozen=True, kw_only=True)
class DeltaSpec(RecurrentSpec):
    """Recurrent layers that are gated delta nets (Yang et al., 2024, Gated Delta Networks, §3)."""

    key_heads: int
    value_heads: int
    """Number of value heads, a multiple of the number of key heads."""
    key_dim: int
    """Numbers of a query or key head."""
    value_dim: int
    """Numbers of a value head."""
    width: int
    """Number of tokens that the convolution over queries, keys and values reads, its own included."""
    eps: float
    """Number added under the root of the norm of each head's result."""

    @property
    def keys(self) -> int:
        """Numbers of all key heads together."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers of all value heads together."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: those of queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def precise(self) -> int:
        """Update rates and time steps, which published FP8 checkpoints leave in 16 bits."""
        return 2

    def shapes(self, hidden: int) -> dict[str, tuple[Shape, ...]]:
        """`mixer_in` has queries, keys, values, output gates, update rates and time steps, in this order."""
        rows = (self.keys, self.keys, self.values, self.values, self.value_heads, self.value_heads)
        return {
            "mixer_in": tuple((each, hidden) for each in rows),
            "conv": ((self.channels, self.width),),
            "decay": ((self.value_heads,),),
            "time_bias": ((self.value_heads,),),
            "gain": ((self.value_dim,),),
            "mixer_out": ((hidden, self.values),),
        }

    def state(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """The last inputs of the convolution, and the recurrent state, as `Recurrence.gated_delta` takes it."""
        inputs = StateTensor((self.channels, self.width - 1), dtype)
        return inputs, StateTensor((self.value_heads, self.key_dim, self.value_dim), torch.float32)

    def kept(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """The input of the convolution; keys and values after it; logarithms of decays; and update rates."""
        return (
            StateTensor((self.channels,), dtype),
            StateTensor((self.key_heads, self.key_dim), dtype),
            StateTensor((self.value_heads, self.value_dim), dtype),
            StateTensor((self.value_heads,), torch.float32),
            StateTensor((self.value_heads,), dtype),
        )

    def replay(
        self, recurrence: Recurrence[Any], states: LayerState, inputs: Sequence[torch.Tensor], metadata: Any
    ) -> None:
        conv_state, state = states
        mixed, key, value, log_decay, beta = inputs
        recurrence.shift(mixed, conv_state, metadata)
        # The state does not depend on queries, so any will do.
        recurrence.gated_delta(key, key, value, log_decay, beta, state, metadata, scale=1.0, normalize=True)

    def split(self) -> dict[str, tuple[tuple[Units, ...], ...]]:
        keys = Units("key heads of recurrent layers", self.key_heads, self.key_dim, copied=True)
        values = Units("value heads of recurrent layers", self.value_heads, self.value_dim)
        heads = values._replace(width=1)
        return {
            "mixer_in": ((keys,), (keys,), (values,), (values,), (heads,), (heads,)),
            "conv": ((keys, keys, values),),
            "decay": ((heads,),),
            "time_bias": ((heads,),),
            "mixer_out": ((values,),),
        }

    def own(self, tp: int) -> Self:
        return replace(self, key_heads=max(1, self.key_heads // tp), value_heads=self.value_heads // tp)

    def mixer(self, weights: RecurrentWeights, state: int, group: Group | None = None) -> RecurrentMixer:
        return DeltaMixer(weights, self, state)


class DeltaMixer(RecurrentMixer):
    """A gated delta net (Yang et al., 2024, Gated Delta Networks, §3.3), as Qwen3-Next and Qwen3.5 have it."""

    def __init__(self, weights: RecurrentWeights, delta: DeltaSpec, state: int) -> None:
        super().__init__(weights, state)
        self._delta, tensors = delta, weights.tensors
        self._conv, self._gain = tensors["conv"].contiguous(), tensors["gain"]
        self._decay, self._time_bias = tensors["decay"].exp().neg_(), tensors["time_bias"]

    def recur(self, projected: torch.Tensor, step: RecurrentInput) -> torch.Tensor:
        delta, recurrent = self._delta, step.recurrent
        assert recurrent is not None
        conv_state, state = recurrent.states[self._state]
        recurrence, metadata = recurrent.recurrence, recurrent.metadata
        heads, dim = delta.value_heads, delta.value_dim
        mixed, gate, rate, time = torch.split(projected, [delta.channels, delta.values, heads, heads], dim=-1)
        convolved = recurrence.convolve(mixed, self._conv, None, conv_state, metadata, activation="silu")
        query, key, value = torch.split(convolved, [delta.keys, delta.keys, delta.values], dim=-1)
        key = key.view(len(key), delta.key_heads, delta.key_dim)
        value = value.view(len(value), heads, dim)
        log_decay, beta = recurrence.gates(time, rate, self._time_bias, self._decay)
        recurrent.keep(self._state, mixed, key, value, log_decay, beta)
        found = recurrence.gated_delta(
            query.view(len(query), delta.key_heads, delta.key_dim),
            key,
            value,
            log_decay,
            beta,
            state,
            metadata,
            scale=delta.key_dim**-0.5,
            normalize=True,
        )
        return recurrence.gated_norm(found, gate, self._gain, delta.eps)
