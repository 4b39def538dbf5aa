"""Gemma 4's decoder: layers with heads of two sizes, layers that read earlier keys, embeddings for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from holdfast.lm.kernels.fp8 import Weight
from holdfast.lm.kernels.linear.experts.experts import Experts
from holdfast.lm.kernels.linear.layers import ACTIVATIONS, Change, LayerOps, Normed, Rotation
from holdfast.lm.kernels.lora.protocol import LayerStacks, Lora, StepAdapters
from holdfast.lm.models.attention_mixer import AttentionMixer, AttentionWeights, adapted
from holdfast.lm.models.base import StepInput
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.decoder_spec import DecoderSpec
from holdfast.lm.models.gemma4 import INPUT_NORM, INPUT_PROJECTION, INPUT_TABLE
from holdfast.lm.models.layer_weights import LayerWeights, WeightSource
from holdfast.lm.models.mixer import Mixer


class OwnHeadsMixer(AttentionMixer):
    """Attention of a layer whose heads are not those of all layers."""

    def __init__(self, *arguments: Any, heads: LayerOps, **options: Any) -> None:
        """`heads` are operations for the layer's heads, with the rotation of its kind."""
        super().__init__(*arguments, **options)
        self._heads = heads

    def attend(self, ops: LayerOps, qkv: torch.Tensor, step: StepInput, rotations: Sequence[Rotation]) -> torch.Tensor:
        return super().attend(self._heads, qkv, step, rotations)


class Changes:
    """The changes of adapters to the products of one layer after its mixer. This base class makes none."""

    def __init__(self, ops: LayerOps) -> None:
        self._ops = ops

    @staticmethod
    def of_layer(ops: LayerOps, index: int, adapters: StepAdapters | None, *, sampled: bool = False) -> Changes:
        """The changes of a layer. Its rows are all tokens of the step, or only the `sampled` ones."""
        if adapters is None:
            return Changes(ops)
        return AdaptedChanges(ops, adapters.layers[index], adapters, adapters.rows if sampled else adapters.tokens)

    def of(self, x: torch.Tensor, field: str) -> Change | None:
        """The change of the product of x with a layer's field, before its bias; None: there is none."""
        return None

    def gated(self, normed: torch.Tensor, gate_up: Weight) -> torch.Tensor:
        """The input of the MLP's last product."""
        inner: torch.Tensor = self._ops.gated_linear(normed, gate_up)
        return inner


class AdaptedChanges(Changes):
    """The changes of a step's adapters."""

    def __init__(self, ops: LayerOps, stacks: LayerStacks, adapters: StepAdapters, lora: Lora) -> None:
        """`stacks` are those of the layer, and `lora` has the layer's rows."""
        super().__init__(ops)
        self._stacks, self._adapters, self._lora = stacks, adapters, lora

    def of(self, x: torch.Tensor, field: str) -> Change | None:
        stack, lora, scaled = getattr(self._stacks, field), self._lora, self._adapters.scaled

        def change(projected: torch.Tensor) -> None:
            lora.add(projected, x, stack)
            if scaled:
                lora.scale(projected, stack)

        return change

    def gated(self, normed: torch.Tensor, gate_up: Weight) -> torch.Tensor:
        stack = self._stacks.gate_up
        assert stack is not None
        both = adapted(self._ops, self._ops.computed(normed), gate_up, None, stack, self._adapters, self._lora)
        return self._ops.gate(both)


class Gemma4Decoder(Decoder):
    """A `Decoder` whose layers have specs of their own (`DecoderSpec.layer_specs`)."""

    def _layer_ops(self, own: DecoderSpec) -> tuple[LayerOps, LayerOps]:
        """The operations of layers of full attention, and of those with a window."""
        full, local = self._kind(own, windowed=False), self._kind(own, windowed=True)
        return self._ops_of(full, full.rope), self._ops_of(local, local.rope)

    def _kind(self, own: DecoderSpec, *, windowed: bool) -> DecoderSpec:
        """The spec of the first layer with a window, or without one; of the first layer if there is none."""
        found = zip(own.windows, own.layer_specs, strict=True)
        return next((spec for window, spec in found if (window is not None) == windowed), own.layer_specs[0])

    def _make_mixers(self, own: DecoderSpec, windows: Sequence[int | None]) -> tuple[Mixer, ...]:
        caches: dict[int, int] = {}
        local = own.other_layers
        return tuple(self._mixer(index, windows[index], int(local[index]), caches) for index in range(len(self.layers)))

    def _mixer(self, index: int, window: int | None, rotation: int, caches: dict[int, int]) -> Mixer:
        """The mixer of a layer. `caches` has the number of the cache of each layer before it, and gets the layer's."""
        number, layer = self.shard.layers[index], self.layers[index]
        whole = self.decoder.of_layer(number)
        own = self.shard.own(whole)
        if whole.kv_source is None:
            caches[number] = len(caches)
        weights = AttentionWeights(
            qkv=layer.qkv,
            bias=layer.qkv_bias,
            q_norm=layer.q_norm,
            k_norm=layer.q_norm if layer.k_norm is None else layer.k_norm,  # without KV heads, it is not read
            sinks=None,
        )
        cache = caches[number if whole.kv_source is None else whole.kv_source]
        heads = self._ops_of(own, own.rope)
        return OwnHeadsMixer(weights, own, index=index, cache=cache, window=window, rotation=rotation, heads=heads)

    def _made(self, layer: LayerWeights) -> LayerWeights:
        return layer if layer.experts is None else replace(layer, experts=_folded(layer.experts, layer.more))

    def _body(self, step: StepInput) -> tuple[torch.Tensor, ...]:
        """The rows of the stream and of the last mixer's output; the last layer's embeddings, if there are any."""
        ops = self._ops
        rotations = [ops.rotation(step.positions), self._local_ops.rotation(step.positions)]
        stream = self.embedded(step.ids, step.positions) if step.stream is None else step.stream
        inputs = self._inputs(step.ids, stream)
        normed: Normed = ops.norm(stream, self.layers[0].input_norm)
        for index, mixer in enumerate(self._mixers):
            attended = mixer.mix(ops, normed, step, rotations)
            if index < len(self.layers) - 1 or not self.shard.last:
                changes = Changes.of_layer(ops, index, step.adapters)
                normed = self._ended(index, (stream, attended, *inputs[index]), changes)
        if not self.shard.last:
            return (stream,)
        rows = (stream, attended, *inputs[-1])
        return rows if step.sample_at is None else tuple(each.index_select(0, step.sample_at) for each in rows)

    def _last_together(self, rows: tuple[torch.Tensor, ...], adapters: StepAdapters | None) -> Normed:
        last = len(self.layers) - 1
        return self._ended(last, rows, Changes.of_layer(self._ops, last, adapters, sampled=True))

    def _inputs(self, ids: torch.Tensor, stream: torch.Tensor) -> Sequence[tuple[torch.Tensor, ...]]:
        """For each layer its embeddings [T, width] of the tokens, if layers have any.

        `stream` [T, hidden] is the stream as it enters the first layer.
        """
        if not self.token_tables:
            return ((),) * len(self.layers)
        table, norm = self.token_tables[INPUT_TABLE], self.tensors[INPUT_NORM]
        width, rows = len(norm), self.decoder.token_tables[INPUT_TABLE][0]
        scale = torch.tensor(width**0.5, dtype=table.dtype).item()
        own = self._ops.embed(ids, table, self.shard.vocabulary(rows).start) * scale
        read = self._ops.linear(stream, self.tensors[INPUT_PROJECTION]) * self.decoder.hidden_size**-0.5
        read = functional.rms_norm(read.view(len(ids), -1, width), (width,), norm, self.decoder.rms_eps)
        whole = (read + own.view_as(read)) * 2.0**-0.5
        return [(each.contiguous(),) for each in whole.unbind(1)]

    def _ended(self, index: int, rows: tuple[torch.Tensor, ...], changes: Changes) -> torch.Tensor:
        """Add the rest of a layer after its mixer to the stream, and return the stream normed for the next layer.

        `rows` are those of the stream, of the mixer's output, and of the layer's embeddings if there are any.
        """
        ops, layer, (stream, attended, *inputs) = self._ops, self.layers[index], rows
        normed = ops.add_linear_norm(
            stream,
            attended,
            layer.o,
            layer.o_bias,
            layer.post_norm,
            out_norm=layer.attention_out_norm,
            change=changes.of(attended, "o"),
        )
        inner = changes.gated(normed, layer.gate_up)
        down, change = layer.down, changes.of(inner, "down")
        if layer.experts is None:
            ops.add_linear_norm(stream, inner, down, None, self._no_norm, out_norm=layer.mlp_out_norm, change=change)
        else:
            zeros, more = torch.zeros_like, layer.more
            dense = ops.add_linear_norm(zeros(stream), inner, down, None, more["dense_out_norm"], change=change)
            read = functional.rms_norm(stream, stream.shape[1:], eps=self.decoder.rms_eps)
            mixed = ops.add_experts_norm(zeros(stream), read, layer.experts, more["experts_out_norm"])
            stream += ops.norm(ops.computed(dense) + ops.computed(mixed), self._given(layer.mlp_out_norm))
        for each in inputs:
            gate = ACTIVATIONS[self.decoder.activation](ops.linear(stream, layer.more["input_gate"]))
            added = ops.linear(gate * each, layer.more["input_up"])
            stream += ops.norm(added, layer.more["input_out_norm"])
        stream *= layer.more["layer_scale"]
        following = self.norm if index == len(self.layers) - 1 else self.layers[index + 1].input_norm
        return ops.norm(stream, following)

    def _given(self, norm: torch.Tensor | None) -> torch.Tensor:
        """A norm, or the empty weight that stands for a missing one."""
        return self._no_norm if norm is None else norm


def _folded(experts: Experts, more: Mapping[str, torch.Tensor]) -> Experts:
    """The experts with the factors of their router, of their input and of their outputs in their weights.

    Router and experts then both read the stream's norm without weights. Router: W diag(scale) / sqrt(hidden).
    """
    assert isinstance(experts.gate_up, torch.Tensor) and isinstance(experts.down, torch.Tensor)
    router = experts.router * (more["router_scale"] * experts.router.shape[1] ** -0.5)
    experts.gate_up.mul_(more["experts_norm"])
    experts.down.mul_(more["expert_scale"][:, None, None])
    return replace(experts, router=router)


def make_decoder(spec: DecoderSpec, source: WeightSource, **options: Any) -> Decoder:
    """The decoder of a spec. `options` are those of `Decoder`."""
    return (Gemma4Decoder if spec.layer_specs else Decoder)(spec, source, **options)
