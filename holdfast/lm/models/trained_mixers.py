"""Mixers in training: the part of a layer between its two projections, forward and backward.

`Halves` computes the projections, to which adapters belong. Nothing here has weights of its own to train.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from holdfast.lm.kernels.linear.layers import Rotation
from holdfast.lm.kernels.recurrent.protocol import Recurrence
from holdfast.lm.kernels.training.attention import PackedAttention, Packing
from holdfast.lm.kernels.training.ops import TrainingOps, wide
from holdfast.lm.models.base import LayerState, RecurrentStep
from holdfast.lm.models.decoder_spec import DecoderSpec
from holdfast.lm.models.layer_weights import LayerWeights
from holdfast.lm.models.mixer import RecurrentMixer

Kept = dict[str, torch.Tensor]
"""The tensors that a half's backward needs besides its input, by name.

A forward writes into the tensors that are already there, and adds the others.
"""

KeptShapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of tensors to keep, by name."""


@dataclass(frozen=True)
class PackedTokens:
    """T tokens of whole sequences, packed one after the other, on the device."""

    ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    packing: Packing
    chunks: Packing
    """The packing where each chunk of a sequence is one of its own, for layers that see no earlier chunk."""
    temperatures: torch.Tensor | None  # [T, 1, 1]
    """The factors on queries of layers without rotation."""
    rotation: Rotation
    local_rotation: Rotation
    """The rotation of the spec's `other_layers`; mostly the same as `rotation`."""
    slots: torch.Tensor  # [T] int64: each token's own number
    recurrent: Any = None  # from `Recurrence.make_metadata`; None for a model without recurrent layers

    @property
    def count(self) -> int:
        return len(self.ids)


class TrainedMixer(ABC):
    """The mixer of one layer. Where several devices share the layer, it is this device's part."""

    @abstractmethod
    def kept_shapes(self, tokens: int) -> KeptShapes:
        """The tensors that `forward` keeps for this many tokens."""

    @abstractmethod
    def forward(self, projected: torch.Tensor, tokens: PackedTokens, kept: Kept) -> None:
        """Compute the mixer's result from the first projection [T, rows], and keep it."""

    @abstractmethod
    def result(self, projected: torch.Tensor, kept: Kept) -> torch.Tensor:
        """The input [T, width] of the last projection, after `forward`."""

    @abstractmethod
    def backward(
        self, gradient: torch.Tensor, projected: torch.Tensor, tokens: PackedTokens, kept: Kept
    ) -> torch.Tensor:
        """The gradient of the first projection [T, rows], from that of `result` [T, width]."""


class TrainedAttention(TrainedMixer):
    """Causal attention within each sequence."""

    def __init__(
        self,
        weights: LayerWeights,
        spec: DecoderSpec,
        ops: TrainingOps,
        attention: PackedAttention,
        *,
        window: int | None,
        local: bool,
    ) -> None:
        """`spec` is that of this device's part. `local`: the layer is one of the spec's `other_layers`."""
        self._weights, self._spec, self._ops, self._attention = weights, spec, ops, attention
        self._window, self._local = window, local

    def kept_shapes(self, tokens: int) -> KeptShapes:
        spec, dtype = self._spec, self._ops.shape.dtype
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        return {
            "attended": ((tokens, spec.num_heads, spec.head_dim), dtype),
            "log_sums": ((spec.num_heads, tokens), sums),
        }

    def forward(self, projected: torch.Tensor, tokens: PackedTokens, kept: Kept) -> None:
        out, log_sums = self._attention.forward(
            self._rotated(projected, tokens), *self._seen(tokens), self._weights.sinks
        )
        put(kept, "attended", out)
        put(kept, "log_sums", log_sums)

    def result(self, projected: torch.Tensor, kept: Kept) -> torch.Tensor:
        return kept["attended"].flatten(1)

    def backward(
        self, gradient: torch.Tensor, projected: torch.Tensor, tokens: PackedTokens, kept: Kept
    ) -> torch.Tensor:
        attended, weights = kept["attended"], self._weights
        query, key, value = self._attention.backward(
            gradient.view_as(attended),
            self._rotated(projected, tokens),
            attended,
            kept["log_sums"],
            *self._seen(tokens),
        )
        if tokens.temperatures is not None and self._local:
            query.mul_(tokens.temperatures)
        return self._ops.rotate_backward(
            query, key, value, projected, self._rotation(tokens), weights.q_norm, weights.k_norm
        )

    def _rotation(self, tokens: PackedTokens) -> Rotation:
        return tokens.local_rotation if self._local else tokens.rotation

    def _seen(self, tokens: PackedTokens) -> tuple[Packing, float, int | None]:
        """The packing, the scale and the window of the attention."""
        if self._window is not None and self._spec.chunked:
            return tokens.chunks, self._spec.scale, None
        return tokens.packing, self._spec.scale, self._window

    def _rotated(self, qkv: torch.Tensor, tokens: PackedTokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [T, H, D], keys and values [T, Hkv, D].

        Queries and keys are rotated, and normed if the model norms them.
        """
        # The operation writes to a cache. Here the cache has blocks of one token, and each token has its own block.
        spec, weights = self._spec, self._weights
        key, value = (qkv.new_empty(len(qkv), 1, spec.num_kv_heads, spec.head_dim) for _ in range(2))
        if spec.qk_norm_whole or spec.qk_layer_norm:
            # These norms write to what they read, and the backward needs that.
            qkv = qkv.clone()
        query = self._ops.layers.rotate_and_write(
            qkv, self._rotation(tokens), weights.q_norm, weights.k_norm, (key, value), tokens.slots
        )
        if tokens.temperatures is not None and self._local:
            query = query * tokens.temperatures
        return query, key[:, 0], value[:, 0]


class TrainedGatedAttention(TrainedAttention):
    """Attention whose heads have output gates, which stand before queries in the projection."""

    def forward(self, projected: torch.Tensor, tokens: PackedTokens, kept: Kept) -> None:
        super().forward(self._qkv(projected), tokens, kept)

    def result(self, projected: torch.Tensor, kept: Kept) -> torch.Tensor:
        return super().result(projected, kept) * self._gate(projected).sigmoid()

    def backward(
        self, gradient: torch.Tensor, projected: torch.Tensor, tokens: PackedTokens, kept: Kept
    ) -> torch.Tensor:
        opened = wide(self._gate(projected)).sigmoid()
        back = wide(gradient)
        of_gate = back * wide(super().result(projected, kept)) * opened * (1.0 - opened)
        of_qkv = super().backward((back * opened).to(gradient.dtype), self._qkv(projected), tokens, kept)
        return torch.cat((of_gate.to(gradient.dtype), of_qkv), dim=1)

    @property
    def _gates(self) -> int:
        """Number of gates: one for each number of each head."""
        return self._spec.num_heads * self._spec.head_dim

    def _gate(self, projected: torch.Tensor) -> torch.Tensor:
        return projected[:, : self._gates]

    def _qkv(self, projected: torch.Tensor) -> torch.Tensor:
        return projected[:, self._gates :].contiguous()


@dataclass(frozen=True)
class TrainingStep:
    """The input of a recurrent mixer in training (`mixer.RecurrentInput`)."""

    recurrent: RecurrentStep


class TrainedRecurrence(TrainedMixer):
    """A recurrence over each sequence from a state of zeros: the mixer that serves, over another `Recurrence`.

    Autograd computes the backward, from the first projection alone.
    """

    def __init__(
        self, mixer: RecurrentMixer, recurrence: Recurrence[Any], state: LayerState, width: int, dtype: torch.dtype
    ) -> None:
        """The mixer reads the states of layer 0. `state` are those, without any slot, as training reads none.

        The result is [T, width] in `dtype`.
        """
        self._mixer, self._width, self._dtype = mixer, width, dtype
        self._step = RecurrentStep(recurrence, None, (state,))

    def kept_shapes(self, tokens: int) -> KeptShapes:
        return {"recurred": ((tokens, self._width), self._dtype)}

    def forward(self, projected: torch.Tensor, tokens: PackedTokens, kept: Kept) -> None:
        put(kept, "recurred", self._recur(projected, tokens))

    def result(self, projected: torch.Tensor, kept: Kept) -> torch.Tensor:
        return kept["recurred"]

    def backward(
        self, gradient: torch.Tensor, projected: torch.Tensor, tokens: PackedTokens, kept: Kept
    ) -> torch.Tensor:
        return pulled_back(lambda x: self._recur(x, tokens), projected, gradient)

    def _recur(self, projected: torch.Tensor, tokens: PackedTokens) -> torch.Tensor:
        return self._mixer.recur(projected, TrainingStep(replace(self._step, metadata=tokens.recurrent)))


class TrainedParallel(TrainedMixer):
    """Attention and a recurrence side by side, from one projection, each result times a factor."""

    def __init__(
        self, attention: TrainedMixer, recurrence: TrainedMixer, rows: int, factors: tuple[float, float]
    ) -> None:
        """The first `rows` of the projection are attention's. The results stand in the same order."""
        self._attention, self._recurrence, self._rows, self._factors = attention, recurrence, rows, factors

    def kept_shapes(self, tokens: int) -> KeptShapes:
        return self._attention.kept_shapes(tokens) | self._recurrence.kept_shapes(tokens)

    def forward(self, projected: torch.Tensor, tokens: PackedTokens, kept: Kept) -> None:
        for mixer, part in zip((self._attention, self._recurrence), self._parts(projected), strict=True):
            mixer.forward(part, tokens, kept)

    def result(self, projected: torch.Tensor, kept: Kept) -> torch.Tensor:
        attended, found = self._attention.result(projected, kept), self._recurrence.result(projected, kept)
        return torch.cat((attended * self._factors[0], found * self._factors[1]), dim=1)

    def backward(
        self, gradient: torch.Tensor, projected: torch.Tensor, tokens: PackedTokens, kept: Kept
    ) -> torch.Tensor:
        of_attention, of_recurrence = self._parts(projected)
        width = self._attention.result(of_attention, kept).shape[1]
        backs = gradient[:, :width] * self._factors[0], gradient[:, width:] * self._factors[1]
        return torch.cat(
            (
                self._attention.backward(backs[0], of_attention, tokens, kept),
                self._recurrence.backward(backs[1], of_recurrence, tokens, kept),
            ),
            dim=1,
        )

    def _parts(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return projected[:, : self._rows].contiguous(), projected[:, self._rows :]


class TrainedMlp(TrainedMixer):
    """relu² in a layer that is an MLP alone."""

    def kept_shapes(self, tokens: int) -> KeptShapes:
        return {}

    def forward(self, projected: torch.Tensor, tokens: PackedTokens, kept: Kept) -> None:
        """Keep nothing: the result is a function of the first projection."""

    def result(self, projected: torch.Tensor, kept: Kept) -> torch.Tensor:
        return functional.relu(projected).square()

    def backward(
        self, gradient: torch.Tensor, projected: torch.Tensor, tokens: PackedTokens, kept: Kept
    ) -> torch.Tensor:
        return gradient * (2.0 * functional.relu(projected))


def pulled_back(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """The gradient of x from that of function(x), by autograd."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        found = function(leaf)
    (back,) = torch.autograd.grad(found, leaf, gradient)
    return back


def put(kept: Kept, name: str, value: torch.Tensor) -> None:
    """Write a value into the kept tensor of this name, or keep the value itself."""
    if name in kept:
        kept[name].copy_(value)
    else:
        kept[name] = value
