"""Short convolutions between two gates: the recurrent layers of LFM2."""

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
class ConvolutionSpec(RecurrentSpec):
    """Recurrent layers whose state is the last inputs of a convolution (Liquid AI, 2025, LFM2 Technical Report, §2)."""

    channels: int
    """Channels of the convolution: as many as the stream has, or a device's part of them."""
    width: int
    """Number of tokens that the convolution reads, its own included."""
    bias: bool = False
    """Whether projections and convolution have biases."""

    def shapes(self, hidden: int) -> dict[str, tuple[Shape, ...]]:
        """`mixer_in` has the gates before the convolution, those after it, and its inputs, in this order."""
        shapes: dict[str, tuple[Shape, ...]] = {
            "mixer_in": ((3 * self.channels, hidden),),
            "conv": ((self.channels, self.width),),
            "mixer_out": ((hidden, self.channels),),
        }
        if self.bias:
            shapes |= {"mixer_in_bias": ((3 * self.channels,),), "mixer_out_bias": ((hidden,),)}
            shapes["conv_bias"] = ((self.channels,),)
        return shapes

    def state(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        return (StateTensor((self.channels, self.width - 1), dtype),)

    def kept(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """The input of the convolution."""
        return (StateTensor((self.channels,), dtype),)

    def replay(
        self, recurrence: Recurrence[Any], states: LayerState, inputs: Sequence[torch.Tensor], metadata: Any
    ) -> None:
        (state,), (gated,) = states, inputs
        recurrence.shift(gated, state, metadata)

    def split(self) -> dict[str, tuple[tuple[Units, ...], ...]]:
        one = Units("channels of convolutions", self.channels)
        inputs, alone = ((one, one, one),), ((one,),)
        return {
            "mixer_in": inputs,
            "mixer_in_bias": inputs,
            "conv": alone,
            "conv_bias": alone,
            "mixer_out": alone,
        }

    def own(self, tp: int) -> Self:
        return replace(self, channels=self.channels // tp)

    def mixer(self, weights: RecurrentWeights, state: int, group: Group | None = None) -> RecurrentMixer:
        return ConvolutionMixer(weights, state)


class ConvolutionMixer(RecurrentMixer):
    """A causal convolution of gated inputs, whose results are gated again."""

    def __init__(self, weights: RecurrentWeights, state: int) -> None:
        super().__init__(weights, state)
        self._conv, self._conv_bias = weights.tensors["conv"].contiguous(), weights.tensors.get("conv_bias")

    def recur(self, projected: torch.Tensor, step: RecurrentInput) -> torch.Tensor:
        recurrent = step.recurrent
        assert recurrent is not None
        (state,) = recurrent.states[self._state]
        before, after, x = projected.chunk(3, dim=-1)
        gated = before * x
        recurrent.keep(self._state, gated)
        convolved = recurrent.recurrence.convolve(
            gated, self._conv, self._conv_bias, state, recurrent.metadata, activation=None
        )
        return after * convolved
