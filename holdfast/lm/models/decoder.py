"""The native decoder: one transformer over packed tokens. A spec describes how an architecture differs from Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, Protocol

import torch
from torch.nn import functional

from holdfast.lm.kernels.cache.kv_cache import KVShape
from holdfast.lm.kernels.collectives.protocol import Group
from holdfast.lm.kernels.fp8 import Fp8Weight, Weight, quantize, row_maxima
from holdfast.lm.kernels.int4 import Int4Weight, side_by_side
from holdfast.lm.kernels.linear import layer_ops_for
from holdfast.lm.kernels.linear.experts.experts import Experts
from holdfast.lm.kernels.linear.layers import Change, LayerOps, LayerShape, Normed
from holdfast.lm.kernels.lora.protocol import Lora, LoraStack, StepAdapters
from holdfast.lm.kernels.mxfp4 import Mxfp4Matrices
from holdfast.lm.kernels.packed import PackedWeight
from holdfast.lm.models.attention_mixer import (
    AttentionMixer,
    AttentionWeights,
    GatedAttentionMixer,
    ParallelMixer,
    TemperedAttentionMixer,
    adapted,
)
from holdfast.lm.models.base import ModelSpec, StepInput
from holdfast.lm.models.decoder_spec import QUANTIZED_FIELDS, DecoderSpec, elements_of
from holdfast.lm.models.experts import read_experts
from holdfast.lm.models.latent import LATENT_FIELDS, LatentMixer, LatentWeights
from holdfast.lm.models.mixer import Mixer, RecurrentWeights
from holdfast.lm.models.mlp_mixer import MlpMixer
from holdfast.lm.models.projection import Projection
from holdfast.lm.models.rope import Rope
from holdfast.lm.models.shard import Piece, Shard, pieces_of_layer, vocabulary_piece


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The tensors of one layer, or this device's part of them. A tensor that the architecture lacks is None.

    In a recurrent layer, and in one that is an MLP alone, `qkv` is the projection that its mixer begins with, and `o`
    the one that adds the mixer's result to the stream. With latent attention they have the shapes of
    `LatentSpec.shapes`.
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

Norms = tuple[torch.Tensor, torch.Tensor | None]
"""The norm of the stream after a projection, and the norm of the projection itself."""


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


class Decoder:
    """A `Model` of the architectures in `families.NATIVE`, or one device's shard of it, run on packed tokens."""

    def __init__(
        self,
        decoder: DecoderSpec,
        source: WeightSource,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        fp8: bool = False,
        shard: Shard | None = None,
        group: Group | None = None,
    ) -> None:
        """Fill the weights from `source`. With `fp8`, quantize those of QUANTIZED_FIELDS as each one is loaded.

        `shard` is the part that this device holds; by default it holds the whole model. `group` is the devices that
        share its layers, if there are several; they load at the same time.
        """
        names = decoder.names
        shard = shard or Shard(layers=range(decoder.num_layers))
        self._source, self._device, self._dtype = source, device, dtype
        self._bytes = 0
        self._no_norm = self._empty(0)
        """The empty weight that stands for a missing norm."""
        self._tables = (names.embedding, names.positions, *decoder.token_tables)
        """Names of the tensors that are read row by row."""
        self._orders = row_orders(decoder)
        """For each ending of a tensor's name, the order in which each head's rows are read."""
        self.decoder = decoder
        """The spec of the whole decoder, of which this may be a shard."""
        self.shard, self.group = shard, group
        own = shard.own(decoder)
        tokens = vocabulary_piece(decoder, shard)
        self.embedding = self._fused((names.embedding,), (tokens,)) if shard.first else self._none
        quantized = QUANTIZED_FIELDS if fp8 else ()
        # All weights that are quantized pass through one buffer. A buffer for each would fragment memory when it is
        # freed.
        sizes = (
            elements_of(tuple(piece.shape for piece in pieces))
            for index in shard.layers
            for field, (_, pieces, _) in self._fields(index).items()
            if field in quantized
        )
        self._unquantized = self._empty(max(sizes, default=0))
        self.layers = tuple(self._layer(index, quantized) for index in shard.layers)
        del self._unquantized
        self.norm = self._final_norm()
        narrow = bool(decoder.embedding_width)
        hidden, width = decoder.hidden_size, decoder.embedding_size
        self.project_in = self._whole(names.project_in, hidden, width) if narrow and shard.first else None
        self.project_out = self._whole(names.project_out, width, hidden) if narrow and shard.last else None
        rows = decoder.position_rows if shard.first else 0
        self.positions = self._whole(names.positions, rows, hidden) if rows else None
        self.tensors = {name: self._whole(name, *shape) for name, shape in decoder.tensors.items()}
        """The tensors of `DecoderSpec.tensors`, by name."""
        self.token_tables = {
            name: self._fused((name,), (Piece(shape, (shard.vocabulary(shape[0]), range(shape[1]))),))
            for name, shape in decoder.token_tables.items()
        }
        """This device's rows of `DecoderSpec.token_tables`, by name."""
        self._embedding_scale = torch.tensor(decoder.embedding_scale, dtype=dtype).item() * decoder.stream_scale
        self.lm_head = self._lm_head(tokens)
        biased = decoder.head_bias and shard.last
        self.lm_head_bias = (
            self._fused((names.head_bias,), (Piece(tokens.whole[:1], tokens.own[:1]),)) if biased else None
        )
        del self._source
        self._first_token = tokens.own[0].start
        # A window at least as long as the longest sequence hides nothing.
        windows = tuple(
            None if window is None or window >= max_model_len else window
            for window in own.windows or (None,) * own.num_layers
        )
        self._max_model_len = max_model_len
        self._ops, self._local_ops = self._layer_ops(own)
        self._mixers = self._make_mixers(own, windows)
        if device.type == "cpu":
            weights = (weight for layer in self.layers for weight in (layer.qkv, layer.gate_up))
            self._bytes += self._ops.pack((*weights, self.lm_head))
        self.spec = ModelSpec(
            architecture=decoder.architecture,
            num_layers=sum(own.cached),
            num_heads=own.num_heads,
            num_kv_heads=own.num_kv_heads,
            head_dim=own.head_dim,
            vocab_size=decoder.vocab_size,
            own_vocab_size=len(tokens.own[0]),
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            dtype=dtype,
            device=device,
            weight_bytes=self._bytes,
            stream_width=0 if shard.first and shard.last else decoder.hidden_size,
            first=shard.first,
            last=shard.last,
            latent_rank=0 if decoder.latent is None else decoder.latent.rank,
            recurrent_layers=sum(own.recurrent),
            state=() if own.recurrence is None else own.recurrence.state(dtype),
            recurrence=own.recurrence,
            reading_layers=sum(each.kv_source is not None for each in own.layer_specs),
            shapes=tuple(
                KVShape(each.num_kv_heads, each.head_dim, each.head_dim)
                for each in own.layer_specs
                if each.kv_source is None
            ),
        )

    def _make_mixers(self, own: DecoderSpec, windows: Sequence[int | None]) -> tuple[Mixer, ...]:
        """The mixer of each layer of this device's part of the decoder, for its window."""
        spec, mixers, states, caches = self.decoder, list[Mixer](), 0, 0
        local = own.other_layers
        kind = GatedAttentionMixer if spec.attention_gate else AttentionMixer
        for index, layer in enumerate(self.layers):
            recurrent = None
            if own.recurrence is not None and own.recurrent[index]:
                given = RecurrentWeights(
                    inputs=layer.qkv, bias=layer.qkv_bias, index=index, tail=layer.mixer_tail, tensors=layer.recurrent
                )
                recurrent = own.recurrence.mixer(given, states, self.group)
                states += 1
            if not own.cached[index]:
                mixers.append(recurrent or MlpMixer(layer.qkv, layer.qkv_bias, index))
                continue
            if spec.latent is not None:
                projected = LatentWeights(qkv=layer.qkv, bias=layer.qkv_bias, tensors=layer.latent)
                heads = len(self.shard.part(spec.num_heads))
                mixers.append(LatentMixer(projected, spec.latent, heads=heads, scale=spec.scale, cache=index))
                continue
            weights = AttentionWeights(
                qkv=layer.qkv, bias=layer.qkv_bias, q_norm=layer.q_norm, k_norm=layer.k_norm, sinks=layer.sinks
            )
            make: Callable[..., AttentionMixer] = kind
            if spec.temperature is not None and local[index]:
                make = partial(TemperedAttentionMixer, temperature=spec.temperature)
            rotation, window = int(local[index]), windows[index]
            mixer = make(weights, spec, index=index, cache=caches, window=window, rotation=rotation)
            caches += 1
            if recurrent is not None and spec.parallel_factors is not None:
                mixers.append(
                    ParallelMixer(Projection(layer.qkv, None, index), mixer, recurrent, spec.parallel_factors)
                )
            else:
                mixers.append(mixer)
        return tuple(mixers)

    @property
    def _none(self) -> torch.Tensor:
        """An empty tensor [0, hidden]: the embedding or the LM head of a stage that has none."""
        return self._empty(0, self.decoder.hidden_size)

    def _final_norm(self) -> torch.Tensor:
        """The weight of the norm before the LM head."""
        if not self.decoder.final_norm:
            return self._no_norm
        parts = (self.decoder.names.norm, self.decoder.names.norm_bias)[: 1 + self.decoder.layer_norm]
        return self._norm(parts, (Piece.all_of(self.decoder.hidden_size),) * len(parts))

    def _lm_head(self, tokens: Piece) -> Weight:
        """The LM head of this device's tokens. It is the embedding itself if the two are tied and both are here.

        On a CPU a tied head that the checkpoint holds packed is read a second time: it is the largest weight of a small
        model, and a step reads all of it.
        """
        decoder, names = self.decoder, self.decoder.names
        if not self.shard.last:
            return self._none
        name = names.embedding if decoder.tied else names.lm_head
        shared = decoder.tied and self.shard.first
        packed = self._packed((name,), (tokens,)) if self._device.type == "cpu" or not shared else None
        if packed is not None:
            return packed
        return self.embedding if shared else self._fused((name,), (tokens,))

    def _layer_ops(self, own: DecoderSpec) -> tuple[LayerOps, LayerOps]:
        """The operations of layers with the spec's `rope`, and of those with its `other_rope`."""
        ops, local = self._ops_of(own, own.rope), own.other_rope
        return ops, ops if local is None else self._ops_of(own, local)

    def _ops_of(self, own: DecoderSpec, rope: Rope) -> LayerOps:
        """The operations of layers with this rotation. `own` is the spec of this device's part."""
        shape = LayerShape(
            num_heads=own.num_heads,
            num_kv_heads=own.num_kv_heads if own.kv_source is None else 0,
            head_dim=own.head_dim,
            eps=own.rms_eps,
            activation=own.activation,
            dtype=self._dtype,
            inverse_frequencies=rope.inverse_frequencies(own.rotated_dim, self._max_model_len).to(self._device),
            amplitude=rope.amplitude,
            layer_norm=own.layer_norm,
            gated=own.gated,
            qk_norm_whole=own.qk_norm_whole,
            qk_layer_norm=own.qk_layer_norm,
            kv_copies=self.shard.copies(self.decoder.num_kv_heads),
            unit_v_norm=own.unit_v_norm,
            # A step may begin an odd number of sums if each layer has one. On the first stage, that of the embeddings
            # separates steps.
            sums_in_parts=self.shard.first or not own.mlps,
        )
        return layer_ops_for(shape, self.group)

    def _layer(self, index: int, quantized: tuple[str, ...]) -> LayerWeights:
        weights = dict[str, Any](input_norm=self._no_norm, post_norm=self._no_norm)
        weights |= {"gate_up": self._none, "down": self._none.t()}
        if self.decoder.experts is not None and self.decoder.experts.sparse[index]:
            experts = read_experts(
                self.decoder, index, self.shard, self._source, device=self._device, dtype=self._dtype
            )
            weights["experts"] = experts
            self._bytes += experts.nbytes
        if self.decoder.unit_qk_norm and not self.decoder.other_layers[index]:
            weights |= dict.fromkeys(("q_norm", "k_norm"), self._empty(self.decoder.head_dim).fill_(1.0))
        for name, fused in self._fields(index).items():
            if name.endswith("_norm"):
                weights[name] = self._norm(*fused[:2])
            elif name in PRECISE_FIELDS:
                weights[name] = self._precise(*fused[:2])
            elif name == "mixer_in":
                weights |= self._mixer_in(fused, fp8=name in quantized)
            elif name in quantized:
                weights[PLACES.get(name, name)] = self._quantized(*fused)
            else:
                packed = self._packed(*fused) if name in QUANTIZED_FIELDS else None
                whole = self._fused(*fused, by_rows=name in ROW_FIELDS) if packed is None else packed
                weights[PLACES.get(name, name)] = whole
        if isinstance(weights["gate_up"], Fp8Weight) and isinstance(weights["down"], torch.Tensor):
            # Activations between the two layers are FP8 only if both layers take FP8.
            weights["gate_up"] = weights["gate_up"].dequantized(self._dtype)
        weights["recurrent"] = {name: weights.pop(name) for name in RECURRENT_FIELDS if name in weights}
        weights["more"] = {name: weights.pop(name) for name in self.decoder.of_layer(index).layer_tensors}
        weights["latent"] = {name: weights.pop(name) for name in LATENT_FIELDS if name in weights}
        return LayerWeights(**weights)

    def _fields(self, index: int) -> dict[str, Fused]:
        """For each field that a layer reads from the checkpoint, its parts. Experts are not among them.

        Where attention and a recurrence are side by side, their projections are one weight.
        """
        family, found = self.decoder.of_layer(index).names, dict[str, Fused]()
        for name, named in pieces_of_layer(self.decoder, self.shard, index).items():
            names = tuple(family.layer.format(index) + part for part, _ in named)
            found[name] = names, tuple(piece for _, piece in named), 0
        if self.decoder.parallel_factors is not None:
            for one, other, dim in (("qkv", "mixer_in", 0), ("o", "mixer_out", 1)):
                (names, pieces, _), (more, others, _) = found[one], found.pop(other)
                found[one] = names + more, pieces + others, dim
        return found

    def _mixer_in(self, fused: Fused, *, fp8: bool) -> dict[str, Weight]:
        """The first projection of a recurrent layer, in two weights if its last parts are not quantized."""
        assert self.decoder.recurrence is not None
        names, pieces, _ = fused
        whole, precise = None if fp8 else self._packed(*fused), self.decoder.recurrence.precise
        if whole is not None:
            return {"qkv": whole}
        count = len(names) - precise
        first = names[:count], pieces[:count]
        packed = self._quantized(*first) if fp8 else self._packed(*first) if precise else None
        if packed is None:
            return {"qkv": self._fused(*fused)}
        return {"qkv": packed} | ({"mixer_tail": self._fused(names[count:], pieces[count:])} if precise else {})

    def _norm(self, names: tuple[str, ...], pieces: tuple[Piece, ...]) -> torch.Tensor:
        """The weight of a norm: its factors, and after them the bias of a layer norm.

        With an offset, which the bias lacks, it stays in float32: 1 + w keeps fewer digits of w than w does.
        """
        if not self.decoder.norm_offset:
            return self._fused(names, pieces)
        whole = self._precise(names, pieces)
        whole[: pieces[0].shape[0]] += self.decoder.norm_offset
        return whole

    def _precise(self, names: tuple[str, ...], pieces: tuple[Piece, ...]) -> torch.Tensor:
        """A small tensor with the rows of all parts, in float32, or in the dtype of the weights if that is wider."""
        rows = [piece.shape[0] for piece in pieces]
        shape = (sum(rows), *pieces[0].shape[1:])
        whole = torch.empty(shape, device=self._device, dtype=torch.promote_types(self._dtype, torch.float32))
        self._fill(names, pieces, torch.split(whole, rows))
        self._bytes += whole.nbytes
        return whole

    def _whole(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor that every device holds whole."""
        return self._fused((name,), (Piece.all_of(*shape),))

    def _fused(
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
        self._bytes += whole.nbytes
        return whole

    def _packed(self, names: tuple[str, ...], pieces: tuple[Piece, ...], dim: int = 0) -> Weight | None:
        """A weight that the checkpoint holds in a kernel's format, with all parts along a dimension.

        None for other weights, and for parts along dimension 1 that are not of one 4-bit format.
        """
        weight = self._packed_rows(names, pieces) if dim == 0 else self._packed_columns(names, pieces)
        self._bytes += 0 if weight is None else weight.nbytes
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
        """`_packed` of parts one below the other."""
        return self._ordered(self._source.packed(names, pieces, self._device, self._dtype), names, pieces)

    def _packed_columns(self, names: tuple[str, ...], pieces: tuple[Piece, ...]) -> Weight | None:
        """`_packed` of parts side by side."""
        parts = zip(names, pieces, strict=True)
        found = [self._source.packed((name,), (piece,), self._device, self._dtype) for name, piece in parts]
        return side_by_side([each for each in found if isinstance(each, Int4Weight)], len(found))

    def _quantized(self, names: tuple[str, ...], pieces: tuple[Piece, ...], dim: int = 0) -> Fp8Weight:
        """One FP8 weight with all parts along a dimension.

        Each scale covers a whole row, even if devices share its columns.
        """
        sizes, shape = joined(pieces, dim)
        whole = self._unquantized[: prod(shape)].view(shape)
        self._fill(names, pieces, torch.split(whole, sizes, dim))
        maxima = row_maxima(whole)
        if self.group is not None and pieces[0].shape[1] < pieces[0].whole[1]:
            maxima = self.group.gather(maxima).amax(0)
        weight = quantize(whole, maxima)
        self._bytes += weight.nbytes
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
        return torch.empty(shape, device=self._device, dtype=self._dtype)

    def forward(self, step: StepInput) -> torch.Tensor:
        rows = self.body(step)
        return self.head(rows, step.adapters) if self.shard.last else rows[0]

    def hidden(self, step: StepInput) -> torch.Tensor:
        """The final norm's output [R, hidden]; in a stage before the last, the stream [T, hidden]."""
        rows = self.body(step)
        return self._ops.computed(self._last(rows, step.adapters)) if self.shard.last else rows[0]

    def logits(self, hidden: Normed) -> torch.Tensor:
        """Logits [R, own_vocab_size] of rows of `hidden`."""
        if self.project_out is not None:
            hidden = self._ops.linear(hidden, self.project_out)
        logits = self._ops.linear(hidden, self.lm_head, self.lm_head_bias)
        if (cap := self.decoder.logit_softcap) is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits if self.decoder.logit_divisor == 1.0 else logits.div_(self.decoder.logit_divisor)

    def body(self, step: StepInput) -> tuple[torch.Tensor, ...]:
        """The residual stream and the output of the last layer's mixer, [R, ...]. The head needs only these rows.

        The residual stream is one tensor that every layer adds to in place. A stage before the last returns the stream
        of all tokens, [T, hidden], and nothing else.
        """
        ops = self._ops
        rotations = [ops.rotation(step.positions)]
        if self._local_ops is not ops:
            rotations.append(self._local_ops.rotation(step.positions))
        stream = self.embedded(step.ids, step.positions) if step.stream is None else step.stream
        normed = ops.norm(stream, self.layers[0].input_norm)
        adapters = step.adapters
        for index, mixer in enumerate(self._mixers):
            attended = mixer.mix(ops, normed, step, rotations)
            if index < len(self.layers) - 1 or not self.shard.last:
                normed = self._finish(index, stream, attended, adapters)
        if not self.shard.last:
            ops.computed(normed)  # this completes the stream
            return (stream,)
        if step.sample_at is None:
            return stream, attended
        return stream.index_select(0, step.sample_at), attended.index_select(0, step.sample_at)

    def head(self, rows: tuple[torch.Tensor, ...], adapters: StepAdapters | None = None) -> torch.Tensor:
        """Logits [R, own_vocab_size]: computes the rest of the last layer, and the LM head."""
        return self.logits(self._last(rows, adapters))

    def _last(self, rows: tuple[torch.Tensor, ...], adapters: StepAdapters | None) -> Normed:
        """The final norm's output [R, hidden] from the result of `body`."""
        stream, attended = rows
        return self._finish(len(self.layers) - 1, stream, attended, adapters, sampled=True)

    def embedded(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The stream [T, hidden] of token ids [T] at these positions [T], as it enters the first layer."""
        stream = self._ops.embed(ids, self.embedding, self._first_token)
        if self._embedding_scale != 1.0:
            stream *= self._embedding_scale
        if self.project_in is not None:
            stream = self._ops.linear(stream, self.project_in)
        if self.positions is not None:
            stream += functional.embedding(positions + self.decoder.position_offset, self.positions)
        return stream

    def _finish(
        self,
        index: int,
        stream: torch.Tensor,
        attended: torch.Tensor,
        adapters: StepAdapters | None,
        *,
        sampled: bool = False,
    ) -> Normed:
        """Add the rest of a layer after its mixer to the stream, and return the stream normed for the next layer.

        The stream has the rows of all tokens, or only of the `sampled` ones.
        """
        ops, layer, spec = self._ops, self.layers[index], self.decoder
        # A stage before the last does not read the normed stream after its last layer, so the choice of norm is free.
        following = self.norm if index == len(self.layers) - 1 else self.layers[index + 1].input_norm
        if layer.end_norm is not None:
            following = layer.end_norm
        if adapters is not None:
            return self._finish_adapted(index, stream, attended, following, adapters, sampled=sampled)
        if spec.mlps:
            return ops.add_linear_norm(stream, attended, layer.o, layer.o_bias, following)
        if spec.parallel:
            normed = ops.norm(stream, layer.post_norm if len(layer.post_norm) else layer.input_norm)
            inner = ops.gated_linear(normed, layer.gate_up, layer.gate_up_bias)
            attention, mlp = (attended, layer.o, layer.o_bias), (inner, layer.down, layer.down_bias)
            return ops.add_linears_norm(stream, attention, mlp, following)
        normed = ops.add_linear_norm(
            stream, attended, layer.o, layer.o_bias, layer.post_norm, out_norm=layer.attention_out_norm
        )
        if layer.experts is not None:
            if layer.gate_up.shape[0]:
                normed = self._add_shared(stream, ops.computed(normed), layer)
            return ops.add_experts_norm(stream, normed, layer.experts, following)
        if spec.norms_stream:
            normed = stream.copy_(normed)
        inner = self._gated(normed, layer)
        normed = ops.add_linear_norm(stream, inner, layer.down, layer.down_bias, following, out_norm=layer.mlp_out_norm)
        return stream.copy_(normed) if spec.norms_stream else normed

    def _gated(self, normed: Normed, layer: LayerWeights) -> torch.Tensor:
        """The input [T, intermediate] of the MLP's last projection."""
        inner: torch.Tensor
        if self.decoder.mlp_factors == (1.0, 1.0):
            inner = self._ops.gated_linear(normed, layer.gate_up, layer.gate_up_bias)
            return inner
        return self._activated(self._ops.linear(normed, layer.gate_up, layer.gate_up_bias))

    def _activated(self, together: torch.Tensor) -> torch.Tensor:
        """The input [T, intermediate] of the MLP's last projection, from its first one, which may be overwritten."""
        of_gate, of_product = self.decoder.mlp_factors
        together[:, : together.shape[1] // 2] *= of_gate
        inner = self._ops.gate(together)
        return inner.mul_(of_product)

    def _add_shared(self, stream: torch.Tensor, normed: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """Add the shared expert's output for `normed` to the stream in place. Returns `normed`."""
        if layer.shared_gate is None:
            inner = self._ops.gated_linear(normed, layer.gate_up)
        else:  # its gate scales plain numbers, which the result of `gated_linear` may not be
            inner = self._ops.gate(self._ops.linear(normed, layer.gate_up))
            self._scale_shared(inner, normed, layer.shared_gate)
        self._ops.add_linear_norm(stream, inner, layer.down, None, self._no_norm)
        return normed

    @staticmethod
    def _scale_shared(inner: torch.Tensor, normed: torch.Tensor, gate: torch.Tensor) -> None:
        """Multiply what a shared expert's last projection reads, [T, inner], by its gate for `normed`, in place."""
        inner *= (normed @ gate.t()).sigmoid()

    def _gated_adapted(
        self, normed: torch.Tensor, layer: LayerWeights, stack: LoraStack, adapters: StepAdapters, lora: Lora
    ) -> torch.Tensor:
        """`_gated` with adapters."""
        plain = self.decoder.mlp_factors == (1.0, 1.0)
        if plain and not adapters.scaled:
            finish = lora.begin(normed, stack)
            return self._ops.gate(self._ops.linear(normed, layer.gate_up, layer.gate_up_bias), finish)
        together = adapted(self._ops, normed, layer.gate_up, layer.gate_up_bias, stack, adapters, lora)
        return self._ops.gate(together) if plain else self._activated(together)

    def _finish_adapted(
        self,
        index: int,
        stream: torch.Tensor,
        attended: torch.Tensor,
        following: torch.Tensor,
        adapters: StepAdapters,
        *,
        sampled: bool,
    ) -> Normed:
        """`_finish` with adapters; `following` is the norm after the layer."""
        ops, layer, stacks = self._ops, self.layers[index], adapters.layers[index]
        lora = adapters.rows if sampled else adapters.tokens
        if self.decoder.parallel:
            assert stacks.gate_up is not None and stacks.down is not None
            normed = ops.norm(stream, layer.post_norm if len(layer.post_norm) else layer.input_norm)
            inner = ops.gate(adapted(ops, normed, layer.gate_up, layer.gate_up_bias, stacks.gate_up, adapters, lora))
            halves = ((attended, layer.o, layer.o_bias), stacks.o), ((inner, layer.down, layer.down_bias), stacks.down)
            changes = [self._change(x, stack, adapters, lora) for (x, *_), stack in halves]
            return ops.add_linears_norm(stream, halves[0][0], halves[1][0], following, changes)

        def add(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, stack: LoraStack, norms: Norms) -> Normed:
            norm, out_norm = norms
            read = x[:, : stack.inputs]  # attention's part, where a recurrence is next to it
            if out_norm is not None or adapters.scaled:
                change = self._change(read, stack, adapters, lora)
                return ops.add_linear_norm(stream, x, weight, bias, norm, out_norm=out_norm, change=change)
            if self.group is not None:
                return ops.add_adapted_norm(stream, x, weight, bias, norm, lora.begin(read, stack))
            # A projection that writes to the stream has its adapters write to the stream too.
            first = partial(lora.begin(read, stack, stream).add, stream)
            return ops.add_linear_norm(stream, x, weight, bias, norm, first)

        if self.decoder.mlps:
            return add(attended, layer.o, layer.o_bias, stacks.o, (following, None))
        normed = add(attended, layer.o, layer.o_bias, stacks.o, (layer.post_norm, layer.attention_out_norm))
        if layer.experts is not None and stacks.gate_up is None:
            return ops.add_experts_norm(stream, normed, layer.experts, following)
        assert stacks.gate_up is not None and stacks.down is not None
        normed = ops.computed(normed)
        if layer.experts is not None:
            inner = self._gated_adapted(normed, layer, stacks.gate_up, adapters, lora)
            if layer.shared_gate is not None:
                self._scale_shared(inner, normed, layer.shared_gate)
            add(inner, layer.down, None, stacks.down, (self._no_norm, None))
            return ops.add_experts_norm(stream, normed, layer.experts, following)
        if self.decoder.norms_stream:
            normed = stream.copy_(normed)
        inner = self._gated_adapted(normed, layer, stacks.gate_up, adapters, lora)
        normed = add(inner, layer.down, layer.down_bias, stacks.down, (following, layer.mlp_out_norm))
        return stream.copy_(ops.computed(normed)) if self.decoder.norms_stream else normed

    def _change(self, x: torch.Tensor, stack: LoraStack, adapters: StepAdapters, lora: Lora) -> Change:
        """A function that applies adapters to a projection of x before its bias, for `LayerOps.add_linear_norm`."""

        def change(projected: torch.Tensor) -> None:
            lora.add(projected, x, stack)
            if adapters.scaled:
                lora.scale(projected, stack)

        return change


def joined(pieces: Sequence[Piece], dim: int) -> tuple[list[int], tuple[int, ...]]:
    """The sizes of pieces along a dimension, and the shape of a tensor that holds them one after the other."""
    sizes, first = [piece.shape[dim] for piece in pieces], pieces[0].shape
    return sizes, (*first[:dim], sum(sizes), *first[dim + 1 :])


def in_heads(rows: int, order: torch.Tensor) -> torch.Tensor:
    """The order [rows] int64 of rows in which each head's rows have this order."""
    return (torch.arange(0, rows, len(order))[:, None] + order).flatten()
