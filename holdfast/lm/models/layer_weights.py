"""The weights of a native decoder's layers, and how they are read: fused, quantized, in the order of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch

from holdfast.lm.kernels.collectives.protocol import Group
from holdfast.lm.kernels.fp8 import Fp8Weight, Weight, quantize, row_maxima
from holdfast.lm.kernels.int4 import Int4Weight, side_by_side
from holdfast.lm.kernels.large_pages import empty_in_large_pages
from holdfast.lm.kernels.linear.experts.experts import Experts
from holdfast.lm.kernels.mxfp4 import Mxfp4Matrices
from holdfast.lm.kernels.packed import PackedWeight
from holdfast.lm.models.decoder_spec import QUANTIZED_FIELDS, DecoderSpec, elements_of
from holdfast.lm.models.experts import read_experts
from holdfast.lm.models.latent import LATENT_FIELDS
from holdfast.lm.models.shard import Piece, Shard, pieces_of_layer


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The tensors of one layer, or this device's part of them. A tensor that the architecture lacks is None.

    In a recurrent layer, and in one that is an MLP alone, `qkv` is the projection that its mixer begins with, and `o`
    the one that adds the mixer's result to the stream. In one that is experts alone both are empty. With latent
    attention they have the shapes of `LatentSpec.shapes`.
    """

    input_norm: torch.Tensor  # [hidden]; of a layer norm [2 hidden], biases last; [0] if there is none
    qkv: Weight  # [(H + 2 Hkv) D, hidden]; with output gates (`AttentionWeights.qkv`) more rows
    o: Weight  # [hidden, H D]
    post_norm: torch.Tensor  # like input_norm: the norm of the stream that the MLP reads
    gate_up: Weight  # [2 intermediate, hidden]; without a gate [intermediate, hidden]
    down: Weight  # [hidden, intermediate]
    attention_out_norm: torch.Tensor | None = None  # [hidden]: norm of what attention adds to the stream
    mlp_out_norm: torch.Tensor | None = None  # [hidden]: norm of what the MLP adds to the stream
    end_norm: torch.Tensor | None = None  # like input_norm: the norm of the stream at the end of the layer
    q_norm: torch.Tensor | None = None  # [D]; over whole heads together, or for each head, [H D]
    k_norm: torch.Tensor | None = None  # [D]; [Hkv D]
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None  # [H]
    experts: Experts | None = None
    """The layer's experts, which replace the MLP. The MLP's weights are empty then, unless there is a shared expert."""
    shared_gate: torch.Tensor | None = None  # [1, hidden]: the gate of the shared expert, which is the MLP
    mixer_tail: torch.Tensor | None = None  # [last rows, hidden]: `RecurrentWeights.tail`
    recurrent: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The tensors of a recurrent layer's mixer between the two projections (`RecurrentWeights.tensors`)."""
    more: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The tensors of `DecoderSpec.layer_tensors`, by field."""
    latent: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The tensors of latent attention between the two projections (`LatentWeights.tensors`)."""

    @property
    def multiplied(self) -> tuple[Weight, ...]:
        """The weights of the products that `LayerOps` computes, without the experts' own."""
        router = None if self.experts is None else self.experts.router
        found = (self.qkv, self.mixer_tail, self.o, self.gate_up, self.down, self.shared_gate, router)
        return tuple(each for each in found if each is not None)

    def rows(self, field: str, columns: slice) -> torch.Tensor:
        """The rows of a linear field that give these outputs, as plain numbers."""
        weight: Weight = getattr(self, field)
        plain = weight if isinstance(weight, torch.Tensor) else weight.dequantized(torch.float32)
        if field == "qkv" and self.mixer_tail is not None:
            plain = torch.cat((plain, self.mixer_tail.to(plain.dtype)))
        return plain[columns]


PLACES = {
    "mixer_in": "qkv",
    "mixer_in_bias": "qkv_bias",
    "mixer_out": "o",
    "mixer_out_bias": "o_bias",
    "mlp_in": "qkv",
    "mlp_in_bias": "qkv_bias",
    "mlp_out": "o",
    "mlp_out_bias": "o_bias",
    "shared_gate_up": "gate_up",
    "shared_down": "down",
}
"""The fields of LayerWeights for which a checkpoint's tensors of some layers have fields of their own."""

PRECISE_FIELDS = ("decay", "time_bias", "skip")
"""The fields that stay in float32."""

ROW_FIELDS = ("latent_up",)
"""The fields whose rows are read in groups, so that their layout is by rows on any device."""

RECURRENT_FIELDS = ("conv", "conv_bias", "gain", *PRECISE_FIELDS)
"""The fields of `LayerWeights.recurrent`."""

Fused = tuple[tuple[str, ...], tuple[Piece, ...], int]
"""The names of the parts of a weight, their pieces, and the dimension along which they are joined."""


def row_orders(spec: DecoderSpec) -> dict[str, torch.Tensor]:
    """For each ending of a tensor's name, the order of each head's rows that makes `Rope.pairs` of those rotated.

    Empty if the stored order is that order.
    """
    pairs, fields = spec.rope.pairs(spec.rotated_dim), spec.names.fields
    if pairs is None:
        return {}
    if spec.latent is None:
        gates = int(spec.attention_gate)
        names = (*fields["qkv"][gates : gates + 2], *fields.get("qkv_bias", ())[:2], *fields.get("q_norm", ()))
        return dict.fromkeys((*names, *fields.get("k_norm", ())), pairs)
    orders, queries = spec.latent.order(pairs), fields["query_up" if spec.latent.query_rank else "qkv"][0]
    of_latent = (fields[name][1] for name in ("qkv", "qkv_bias") if name in fields)
    return {queries: orders["query"]} | dict.fromkeys(of_latent, orders["latent"])


class WeightSource(Protocol):
    """The source of a model's weights: a checkpoint, or a random generator."""

    def fill(self, name: str, piece: Piece, into: torch.Tensor) -> None:
        """Write a piece of the tensor `name` into `into`. Raises UnsupportedCheckpoint if it cannot."""

    def packed(
        self, names: tuple[str, ...], pieces: tuple[Piece, ...], device: torch.device, dtype: torch.dtype
    ) -> Weight | None:
        """A quantized weight with the rows of all these tensors, in a kernel's format for activations of `dtype`.

        None if no kernel reads the stored format. `fill` then gives plain numbers.
        """
        return None

    def packed_experts(self, name: str, piece: Piece, device: torch.device, dtype: torch.dtype) -> Mxfp4Matrices | None:
        """A piece of a tensor [E, inputs, outputs] of all experts, with outputs as rows, in a kernel's format.

        None if no kernel reads the stored format. `fill` then gives plain numbers.
        """
        return None

    def packed_matrices(
        self, names: Sequence[tuple[str, ...]], pieces: tuple[Piece, ...], device: torch.device
    ) -> PackedWeight | None:
        """The weights of experts, each with the rows of its tensors in `names`, in a kernel's format.

        `pieces` are those of one expert's tensors. None if no kernel reads the stored format.
        """
        return None


def as_read(weight: Weight) -> Weight:
    """The form in which a weight was read."""
    return weight


class WeightReader:
    """Reads the weights of one device's part of a decoder from their source, each once.

    Weights may be fused from several tensors, quantized, or kept in the format of the checkpoint.
    """

    def __init__(
        self,
        decoder: DecoderSpec,
        shard: Shard,
        source: WeightSource,
        *,
        device: torch.device,
        dtype: torch.dtype,
        group: Group | None,
        form: Callable[[Weight], Weight] = as_read,
    ) -> None:
        """`group` is the devices that share the layers, if there are several; they read at the same time.

        `form` gives each quantized weight the form in which it stays.
        """
        names = decoder.names
        self._decoder, self._shard, self._group = decoder, shard, group
        self._source, self._device, self._dtype, self._form = source, device, dtype, form
        self.nbytes = 0
        """Bytes of all weights read so far."""
        self.no_norm = self._empty(0)
        """The empty weight that stands for a missing norm."""
        self._tables = (names.embedding, names.positions, *decoder.token_tables)
        """Names of the tensors that are read row by row."""
        self._orders = row_orders(decoder)
        """For each ending of a tensor's name, the order in which each head's rows are read."""
        self._unquantized = self.no_norm
        """The buffer through which all weights pass that are quantized."""

    @property
    def none(self) -> torch.Tensor:
        """An empty tensor [0, hidden]: the embedding or the LM head of a stage that has none."""
        return self._empty(0, self._decoder.hidden_size)

    def layers(self, *, fp8: bool) -> tuple[LayerWeights, ...]:
        """The weights of the device's layers. With `fp8`, those of QUANTIZED_FIELDS are quantized as they are read."""
        quantized = QUANTIZED_FIELDS if fp8 else ()
        sizes = (
            elements_of(tuple(piece.shape for piece in pieces))
            for index in self._shard.layers
            for field, (_, pieces, _) in self._fields(index).items()
            if field in quantized
        )
        # A buffer for each weight would fragment memory when it is freed.
        self._unquantized = self._empty(max(sizes, default=0))
        layers = tuple(self._layer(index, quantized) for index in self._shard.layers)
        self._unquantized = self.no_norm
        return layers

    def _layer(self, index: int, quantized: tuple[str, ...]) -> LayerWeights:
        weights = dict[str, Any](input_norm=self.no_norm, post_norm=self.no_norm)
        weights |= {"qkv": self.none, "o": self.none.t(), "gate_up": self.none, "down": self.none.t()}
        if self._decoder.experts is not None and self._decoder.experts.sparse[index]:
            experts = read_experts(
                self._decoder, index, self._shard, self._source, device=self._device, dtype=self._dtype
            )
            weights["experts"] = experts
            self.nbytes += experts.nbytes
        if self._decoder.unit_qk_norm and not self._decoder.other_layers[index]:
            weights |= dict.fromkeys(("q_norm", "k_norm"), self._empty(self._decoder.head_dim).fill_(1.0))
        for name, fused in self._fields(index).items():
            if name.endswith("_norm"):
                weights[name] = self.norm(*fused[:2])
            elif name in PRECISE_FIELDS:
                weights[name] = self._precise(*fused[:2])
            elif name == "mixer_in":
                weights |= self._mixer_in(fused, fp8=name in quantized)
            elif name in quantized:
                weights[PLACES.get(name, name)] = self._quantized(*fused)
            else:
                packed = self.packed(*fused) if name in QUANTIZED_FIELDS else None
                whole = self.fused(*fused, by_rows=name in ROW_FIELDS) if packed is None else packed
                weights[PLACES.get(name, name)] = whole
        if isinstance(weights["gate_up"], Fp8Weight) and isinstance(weights["down"], torch.Tensor):
            # Activations between the two layers are FP8 only if both layers take FP8.
            weights["gate_up"] = weights["gate_up"].dequantized(self._dtype)
        weights["recurrent"] = {name: weights.pop(name) for name in RECURRENT_FIELDS if name in weights}
        weights["more"] = {name: weights.pop(name) for name in self._decoder.of_layer(index).layer_tensors}
        weights["latent"] = {name: weights.pop(name) for name in LATENT_FIELDS if name in weights}
        return LayerWeights(**weights)

    def _fields(self, index: int) -> dict[str, Fused]:
        """For each field that a layer reads from the checkpoint, its parts. Experts are not among them.

        Where attention and a recurrence are side by side, their projections are one weight.
        """
        family, found = self._decoder.of_layer(index).names, dict[str, Fused]()
        for name, named in pieces_of_layer(self._decoder, self._shard, index).items():
            names = tuple(family.layer.format(index) + part for part, _ in named)
            found[name] = names, tuple(piece for _, piece in named), 0
        if self._decoder.parallel_factors is not None:
            for one, other, dim in (("qkv", "mixer_in", 0), ("o", "mixer_out", 1)):
                (names, pieces, _), (more, others, _) = found[one], found.pop(other)
                found[one] = names + more, pieces + others, dim
        return found

    def _mixer_in(self, fused: Fused, *, fp8: bool) -> dict[str, Weight]:
        """The first projection of a recurrent layer, in two weights if its last parts are not quantized."""
        assert self._decoder.recurrence is not None
        names, pieces, _ = fused
        whole, precise = None if fp8 else self.packed(*fused), self._decoder.recurrence.precise
        if whole is not None:
            return {"qkv": whole}
        count = len(names) - precise
        first = names[:count], pieces[:count]
        packed = self._quantized(*first) if fp8 else self.packed(*first) if precise else None
        if packed is None:
            return {"qkv": self.fused(*fused)}
        return {"qkv": packed} | ({"mixer_tail": self.fused(names[count:], pieces[count:])} if precise else {})

    def norm(self, names: tuple[str, ...], pieces: tuple[Piece, ...]) -> torch.Tensor:
        """The weight of a norm: its factors, and after them the bias of a layer norm.

        With an offset, which the bias lacks, it stays in float32: 1 + w keeps fewer digits of w than w does.
        """
        if not self._decoder.norm_offset:
            return self.fused(names, pieces)
        whole = self._precise(names, pieces)
        whole[: pieces[0].shape[0]] += self._decoder.norm_offset
        return whole

    def _precise(self, names: tuple[str, ...], pieces: tuple[Piece, ...]) -> torch.Tensor:
        """A small tensor with the rows of all parts, in float32, or in the dtype of the weights if that is wider."""
        rows = [piece.shape[0] for piece in pieces]
        shape = (sum(rows), *pieces[0].shape[1:])
        whole = torch.empty(shape, device=self._device, dtype=torch.promote_types(self._dtype, torch.float32))
        self._fill(names, pieces, torch.split(whole, rows))
        self.nbytes += whole.nbytes
        return whole

    def whole(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor that every device holds whole."""
        return self.fused((name,), (Piece.all_of(*shape),))

    def fused(
        self, names: tuple[str, ...], pieces: tuple[Piece, ...], dim: int = 0, *, by_rows: bool = False
    ) -> torch.Tensor:
        """One tensor with all parts, one after the other along a dimension.

        With `by_rows`, its layout is by rows on any device.
        """
        sizes, shape = joined(pieces, dim)
        by_rows |= self._device.type != "cpu" or names[0] in self._tables
        if len(shape) == 2 and not by_rows:
            # The layout is by inputs: MKL then computes products of few tokens up to twice as fast.
            whole = self._empty(*shape[::-1]).t()
        else:
            whole = self._empty(*shape)
        self._fill(names, pieces, torch.split(whole, sizes, dim))
        self.nbytes += whole.nbytes
        return whole

    def packed(self, names: tuple[str, ...], pieces: tuple[Piece, ...], dim: int = 0) -> Weight | None:
        """A weight that the checkpoint holds in a kernel's format, with all parts along a dimension.

        None for other weights, and for parts along dimension 1 that are not of one 4-bit format.
        """
        weight = self._packed_rows(names, pieces) if dim == 0 else self._packed_columns(names, pieces)
        if weight is None:
            return None
        weight = self._form(weight)
        self.nbytes += weight.nbytes
        return weight

    def _order(self, name: str) -> torch.Tensor | None:
        """The order in which each head's rows of a tensor are read; None: as they are stored."""
        return next((order for ending, order in self._orders.items() if name.endswith(ending)), None)

    def _ordered(self, weight: Weight | None, names: tuple[str, ...], pieces: tuple[Piece, ...]) -> Weight | None:
        """A packed weight whose rows are in the order of `_fill`; None if its format fixes their order."""
        wanted = [self._order(name) for name in names]
        if all(order is None for order in wanted):
            return weight
        if not isinstance(weight, Fp8Weight | Int4Weight):
            return None
        orders, at = list[torch.Tensor](), 0
        for own, piece in zip(wanted, pieces, strict=True):
            rows = piece.shape[0]
            order = torch.arange(rows) if own is None else in_heads(rows, own)
            orders, at = [*orders, at + order], at + rows
        return weight.ordered(torch.cat(orders).to(weight.data.device))

    def _packed_rows(self, names: tuple[str, ...], pieces: tuple[Piece, ...]) -> Weight | None:
        """`packed` of parts one below the other."""
        return self._ordered(self._source.packed(names, pieces, self._device, self._dtype), names, pieces)

    def _packed_columns(self, names: tuple[str, ...], pieces: tuple[Piece, ...]) -> Weight | None:
        """`packed` of parts side by side."""
        parts = zip(names, pieces, strict=True)
        found = [self._source.packed((name,), (piece,), self._device, self._dtype) for name, piece in parts]
        return side_by_side([each for each in found if isinstance(each, Int4Weight)], len(found))

    def _quantized(self, names: tuple[str, ...], pieces: tuple[Piece, ...], dim: int = 0) -> Weight:
        """One FP8 weight with all parts along a dimension.

        Each scale covers a whole row, even if devices share its columns.
        """
        sizes, shape = joined(pieces, dim)
        whole = self._unquantized[: prod(shape)].view(shape)
        self._fill(names, pieces, torch.split(whole, sizes, dim))
        maxima = row_maxima(whole)
        if self._group is not None and pieces[0].shape[1] < pieces[0].whole[1]:
            maxima = self._group.gather(maxima).amax(0)
        weight = self._form(quantize(whole, maxima))
        self.nbytes += weight.nbytes
        return weight

    def _fill(self, names: tuple[str, ...], pieces: tuple[Piece, ...], parts: Sequence[torch.Tensor]) -> None:
        for name, piece, part in zip(names, pieces, parts, strict=True):
            if not len(part):  # another device's head
                continue
            self._source.fill(name, piece, part)
            order = self._order(name)
            if order is not None:
                part.copy_(part[in_heads(len(part), order).to(part.device)])

    def _empty(self, *shape: int) -> torch.Tensor:
        if self._device.type == "cpu":
            return empty_in_large_pages(*shape, dtype=self._dtype)
        return torch.empty(shape, device=self._device, dtype=self._dtype)


def joined(pieces: Sequence[Piece], dim: int) -> tuple[list[int], tuple[int, ...]]:
    """The sizes of pieces along a dimension, and the shape of a tensor that holds them one after the other."""
    sizes, first = [piece.shape[dim] for piece in pieces], pieces[0].shape
    return sizes, (*first[:dim], sum(sizes), *first[dim + 1 :])


def in_heads(rows: int, order: torch.Tensor) -> torch.Tensor:
    """The order [rows] int64 of rows in which each head's rows have this order."""
    return (torch.arange(0, rows, len(order))[:, None] + order).flatten()
