"""The interfaces of mixers: what lets a token of a decoder layer read the tokens before it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import torch

from holdfast.lm.kernels.collectives.protocol import Group
from holdfast.lm.kernels.fp8 import Weight
from holdfast.lm.kernels.linear.layers import LayerOps, Normed, Rotation
from holdfast.lm.kernels.recurrent.protocol import Recurrence
from holdfast.lm.models.base import LayerState, RecurrentStep, Shape, StateTensor, StepInput
from holdfast.lm.models.projection import Projection, SplitProjection


class Mixer(ABC):
    """The first half of one layer, up to the projection that adds its result to the stream."""

    @abstractmethod
    def mix(self, ops: LayerOps, normed: Normed, step: StepInput, rotations: Sequence[Rotation]) -> torch.Tensor:
        """The input [T, width] of that projection, from the normed stream. Writes the layer's cache or states.

        `ops` are the decoder's. `rotations` are those of the step's positions, by kind of layer.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentWeights:
    """The weights of a recurrent layer's mixer, except its last projection."""

    inputs: Weight  # [rows, hidden]: the first projection, without the rows of `tail`
    bias: torch.Tensor | None  # [rows]
    index: int
    """The layer's number among those of the device."""
    tail: torch.Tensor | None = None  # [last rows, hidden]
    """The last rows of the first projection, where they are plain numbers and the others are quantized."""
    tensors: Mapping[str, torch.Tensor]
    """The other tensors, by their fields in `RecurrentSpec.shapes`."""


def projection_of(weights: RecurrentWeights) -> Projection:
    """The first projection of a recurrent layer with these weights."""
    if weights.tail is None:
        return Projection(weights.inputs, weights.bias, weights.index)
    return SplitProjection(weights.inputs, weights.bias, weights.index, weights.tail)


class RecurrentInput(Protocol):
    """The part of a batch that a recurrence reads besides its projection: `StepInput`, or that of training."""

    @property
    def recurrent(self) -> RecurrentStep | None:
        """The states, and where they are read."""


class RecurrentMixer(Mixer):
    """The mixer of a recurrent layer: a projection, and then the recurrence."""

    def __init__(self, weights: RecurrentWeights, state: int) -> None:
        """`state` is the layer's number among those with a state."""
        self._projection, self._state = projection_of(weights), state

    def mix(self, ops: LayerOps, normed: Normed, step: StepInput, rotations: Sequence[Rotation]) -> torch.Tensor:
        return self.recur(self._projection.of(ops, normed, step), step)

    @abstractmethod
    def recur(self, projected: torch.Tensor, step: RecurrentInput) -> torch.Tensor:
        """The result [T, width] of the recurrence, from the first projection [T, rows].

        Writes the layer's state, and keeps the inputs of drafted tokens.
        """


class Units(NamedTuple):
    """The heads, groups or channels of recurrent layers, of which each device that shares the layers has its part."""

    name: str
    """The name that errors give them, in the plural."""
    number: int
    width: int = 1
    """Numbers of each unit: rows of a weight, or columns of `mixer_out`."""
    copied: bool = False
    """Whether several devices hold the same unit where there are more devices than units."""


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec(ABC):
    """The recurrent layers of a decoder, or of a device's part of it. All of them are of one kind and of one size."""

    layers: tuple[bool, ...]
    """For each layer, whether it is recurrent."""

    @property
    def precise(self) -> int:
        """Number of the last parts of `mixer_in` that may stay plain numbers where the others are quantized."""
        return 0

    @abstractmethod
    def shapes(self, hidden: int) -> dict[str, tuple[Shape, ...]]:
        """For each field that such a layer has in place of attention's, the shapes of its parts.

        `mixer_in` is the first projection, from `hidden` numbers, and `mixer_out` the one that adds to the stream.
        """

    @abstractmethod
    def state(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """The tensors that a layer keeps of a sequence. `dtype` is that of the activations."""

    @abstractmethod
    def kept(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """The inputs that a layer keeps of a drafted token. `dtype` is that of the activations.

        `RecurrentMixer.recur` gives them to `RecurrentStep.keep`. They are few numbers compared with a state.
        """

    @abstractmethod
    def replay(
        self, recurrence: Recurrence[Any], states: LayerState, inputs: Sequence[torch.Tensor], metadata: Any
    ) -> None:
        """Move states on by kept inputs (`RecurrentLayers.replay`)."""

    @abstractmethod
    def split(self) -> dict[str, tuple[tuple[Units, ...], ...]]:
        """For each field that devices share, the units that make up the rows of each part, in order.

        For `mixer_out`, they make up its columns. Every device has the other fields whole.
        """

    @abstractmethod
    def own(self, tp: int) -> Self:
        """The layers as one of `tp` devices has them that share each of them. All devices have equal sizes."""

    @abstractmethod
    def mixer(self, weights: RecurrentWeights, state: int, group: Group | None = None) -> RecurrentMixer:
        """The mixer of a layer with these weights. `state` is its number among the recurrent layers of the device.

        `group` is the devices that share the layer, if there are several. The spec and the weights are then those of
        one device.
        """
