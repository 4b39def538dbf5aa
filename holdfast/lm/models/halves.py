"""The two halves of a decoder layer, mixer and MLP, with LoRA: forward and backward over the weights that serve.

The mixer is attention, a recurrence, or both (`trained_mixers`). A half is x' = x + f(norm(x)). Its forward writes x',
and stores the tensors that its backward needs: the `Kept` tensors. The backward turns the gradient of x' into that of x
in place and writes the gradients of the adapter's matrices; base weights have none. Kept tensors that were freed are
computed again by the same operations from the same x, so the results have the same bits.

Families differ in what they norm: x as above, what is added (x + norm(f(x))), or the sum (norm(x + f(x))). Where
attention and MLP of a layer are parallel, the MLP half adds f(norm(entered)) to x, with the layer's input `entered`.
Layers of some families are a mixer alone or an MLP alone; the MLP then takes the place of the mixer.

Where several devices share each layer, a device has its own rows of the weights that read the stream, and its own
columns of those that add to it (`shard.module_pieces`). The stream and its gradient are equal on all devices: forwards
add up what devices add to the stream, and backwards add up the gradients of what devices read (Megatron-LM, §3). The
gradients of an adapter are this device's part of a sum over devices. They lie in the whole matrices, and are zero where
the device has no part.

LoRA (Hu et al., 2021, §4.1): y = W x + s B (A x). With t = s Bᵀ dy: dB = s dy (A x)ᵀ, dA = t xᵀ, dx = Wᵀ dy + Aᵀ t.

DoRA (Liu et al., 2024, eq. 5): y = g z for each output, with z = W x + s B (A x) and g = m / ‖W + s B A‖. The norm is a
constant to the backward (§4.3), as in PEFT: dm = Σ dy z / ‖W + s B A‖ over tokens, and dz = g dy takes the place of dy
in LoRA's formulas. Nothing of it is kept: the norms and z are computed again where they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from holdfast.core.training_cost import HalfKind, LayerHalves
from holdfast.lm.kernels.attention.protocol import Segments
from holdfast.lm.kernels.collectives.protocol import in_rows
from holdfast.lm.kernels.fp8 import Weight
from holdfast.lm.kernels.linear import layer_ops_for
from holdfast.lm.kernels.linear.experts.experts import apply_experts
from holdfast.lm.kernels.linear.layers import ACTIVATIONS, LayerShape
from holdfast.lm.kernels.training import training_ops_for
from holdfast.lm.kernels.training.attention import Packing, packed_attention_for, sent
from holdfast.lm.kernels.training.experts import experts_backward
from holdfast.lm.kernels.training.loss import shared_loss_backward
from holdfast.lm.kernels.training.losses import PositionLoss
from holdfast.lm.kernels.training.ops import product_in_float32, wide
from holdfast.lm.kernels.training.recurrence import TrainingRecurrence
from holdfast.lm.models.adapted import AdaptedModules, adapted_modules
from holdfast.lm.models.adapters import INPUTS_SPLIT, row_squares
from holdfast.lm.models.attention_mixer import temperatures
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.decoder_spec import DecoderSpec
from holdfast.lm.models.layer_weights import LayerWeights
from holdfast.lm.models.mixer import RecurrentWeights
from holdfast.lm.models.rope import Rope
from holdfast.lm.models.shard import module_pieces
from holdfast.lm.models.trained_mixers import (
    Kept,
    KeptShapes,
    PackedTokens,
    TrainedAttention,
    TrainedGatedAttention,
    TrainedMixer,
    TrainedMlp,
    TrainedParallel,
    TrainedRecurrence,
    pulled_back,
)


def layer_halves(spec: DecoderSpec) -> tuple[LayerHalves, ...]:
    """The halves of each layer of a decoder, or of a device's part of it."""
    mixer: HalfKind = "recurrence" if spec.parallel_factors is None else "parallel"
    mixers: list[HalfKind] = [mixer if recurrent else "attention" for recurrent in spec.recurrent]
    if not spec.mlps:
        return tuple((mixer, "mlp") for mixer in mixers)
    return tuple(("mlp",) if alone else (mixer,) for mixer, alone in zip(mixers, spec.mlps, strict=True))


@dataclass(frozen=True)
class LoraGroup:
    """The adapter of the modules that share one input."""

    a: torch.Tensor  # [modules * rank, inputs], one below the other
    b: tuple[tuple[str, torch.Tensor], ...]
    """For each module, its name and B [outputs, rank]. A fused module may stand as its parts, which share its A."""
    magnitudes: tuple[torch.Tensor, ...] = ()
    """For each entry of `b`, the magnitudes [outputs] of a DoRA; empty for a LoRA."""

    def a_of(self, number: int, rank: int) -> torch.Tensor:
        """The rows of A that belong to entry `number` of B."""
        return self.of(number, self.a.t(), rank).t()

    def of(self, number: int, x: torch.Tensor, rank: int) -> torch.Tensor:
        """The columns of x [T, modules * rank] that belong to entry `number` of B."""
        parts = torch.split(x, rank, dim=-1)
        return parts[number] if len(parts) == len(self.b) else parts[0]


class Low(NamedTuple):
    """The change of a projection by a module of an adapter, or a part of one: s · small Bᵀ is added to some columns."""

    columns: slice
    small: torch.Tensor  # [T, rank]: x Aᵀ
    b: torch.Tensor  # [columns, rank]


LayerAdapter = Mapping[str, LoraGroup]
"""An adapter's matrices in one layer, or their gradients, by fused linear layer.

A fused layer that the adapter does not change has no entry.
"""


@dataclass(frozen=True)
class AdapterLayout:
    """The layout of each layer's matrices in a vector. Layers of one kind have the same one."""

    decoder: DecoderSpec
    modules: tuple[str, ...]
    """The short names of the modules that the adapter changes in each layer that has them."""
    rank: int
    dora: bool = False
    """Whether modules have magnitudes."""

    def __post_init__(self) -> None:
        known = self.base.tunable
        if not self.modules or (unknown := {*self.modules} - {*known}):
            shown = ", ".join(sorted(unknown)) if self.modules else "none"
            raise ValueError(f"modules to tune are {shown}; choose from {', '.join(known)}")
        if self.dora and (shared := {*self.modules} - {*self.base.scalable}):
            raise ValueError(
                f"dora is on, and modules to tune have {', '.join(sorted(shared))}, whose outputs are not its own; "
                f"choose from {', '.join(self.base.scalable)}"
            )
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}; it must be at least 1")

    @cached_property
    def base(self) -> AdaptedModules:
        """The modules that adapters of the decoder may change."""
        return adapted_modules(self.decoder)

    @cached_property
    def groups(self) -> tuple[dict[str, tuple[str, ...]], ...]:
        """For each layer and each fused linear layer of it, those of its modules that the adapter changes."""
        found = []
        for layer in range(self.base.num_layers):
            chosen: dict[str, tuple[str, ...]] = {}
            for name, module in self.base.modules.items():
                if name in self.modules and self.base.has(layer, name):
                    chosen[module.field] = (*chosen.get(module.field, ()), name)
            found.append(chosen)
        return tuple(found)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each layer's matrices."""
        shapes = self.base.shapes()
        modules = [[shapes[name] for names in groups.values() for name in names] for groups in self.groups]
        return tuple(sum(self.rank * sum(each) + each[0] * self.dora for each in layer) for layer in modules)

    def split(self, vector: torch.Tensor, layers: range | None = None) -> tuple[torch.Tensor, ...]:
        """The vectors of these layers (None: of all), as views of one with one after the other."""
        sizes = self.sizes if layers is None else self.sizes[layers.start : layers.stop]
        return torch.split(vector, [*sizes])

    def views(self, layer: int, vector: torch.Tensor, magnitudes: torch.Tensor | None = None) -> dict[str, LoraGroup]:
        """The matrices in a layer's vector, as views.

        `magnitudes` is the vector for those of a DoRA; None: the same one.
        """
        shapes, at = self.base.shapes(), 0

        def part(*shape: int, source: torch.Tensor = vector) -> torch.Tensor:
            nonlocal at
            at += prod(shape)
            return source[at - prod(shape) : at].view(shape)

        wide_source = vector if magnitudes is None else magnitudes
        return {
            field: LoraGroup(
                part(len(names) * self.rank, shapes[names[0]][1]),
                tuple((module, part(shapes[module][0], self.rank)) for module in names),
                tuple(part(shapes[module][0], source=wide_source) for module in names if self.dora),
            )
            for field, names in self.groups[layer].items()
        }


class Halves:
    """The halves of a decoder's layers, and its head, or of this device's part of them. Layers count from its first.

    Callers must turn autograd off. All devices that share the layers make the same calls.
    """

    def __init__(self, model: Decoder, layout: AdapterLayout, scale: float) -> None:
        """`scale` is LoRA's s."""
        spec = model.decoder
        self.model, self.layout, self.scale = model, layout, scale
        self._group, self._pieces = model.group, module_pieces(spec, model.shard)
        self._spec = spec = model.shard.own(spec)
        device, dtype = model.spec.device, model.spec.dtype

        def frequencies(rope: Rope) -> torch.Tensor:
            return rope.inverse_frequencies(spec.head_dim, model.spec.max_model_len).to(device)

        shape = LayerShape(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            eps=spec.rms_eps,
            activation=spec.activation,
            dtype=dtype,
            inverse_frequencies=frequencies(spec.rope),
            amplitude=spec.rope.amplitude,
            layer_norm=spec.layer_norm,
            gated=spec.gated,
            qk_norm_whole=spec.qk_norm_whole,
            qk_layer_norm=spec.qk_layer_norm,
            kv_copies=model.shard.copies(model.decoder.num_kv_heads),
        )
        self._ops = training_ops_for(shape, self._group)
        self._local_layers, local = self._ops.layers, spec.other_rope
        self._local = spec.other_layers
        if local is not None:
            shape = replace(shape, inverse_frequencies=frequencies(local), amplitude=local.amplitude)
            self._local_layers = layer_ops_for(shape, self._group)
        self.attention = packed_attention_for(device, dtype, spec.head_dim, softcap=spec.softcap, sinks=spec.sinks)
        self._windows = spec.windows or (None,) * spec.num_layers
        self._recurrence = TrainingRecurrence(device)
        self.layers = layer_halves(spec)
        """The halves of each layer of this device."""
        self._mixers = tuple(self._mixer(layer, halves[0]) for layer, halves in enumerate(self.layers))
        self._columns = {name: piece.columns for pieces in self._pieces.values() for name, piece in pieces.items()}
        """The output columns of each module, and of each part of a fused one, in its linear layer."""
        inner = spec.intermediate_size
        self._inner = (
            {"gate": slice(0, inner), "up": slice(inner, 2 * inner)} if spec.gated else {"up": slice(0, inner)}
        )
        """The output columns of the MLP's first layer that its activation reads as a tensor of their own."""
        self._no_norm = torch.empty(0, dtype=dtype, device=device)

    def _mixer(self, layer: int, kind: HalfKind) -> TrainedMixer:
        """The mixer of a layer, or the MLP that takes its place."""
        spec = self._spec
        if kind == "mlp":
            return TrainedMlp()
        if kind == "recurrence":
            return self._trained_recurrence(layer)
        make = TrainedGatedAttention if spec.attention_gate else TrainedAttention
        weights, window, local = self.model.layers[layer], self._windows[layer], self._local[layer]
        attention = make(weights, spec, self._ops, self.attention, window=window, local=local)
        if kind == "attention" or spec.parallel_factors is None:
            return attention
        rows = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        return TrainedParallel(attention, self._trained_recurrence(layer), rows, spec.parallel_factors)

    def _trained_recurrence(self, layer: int) -> TrainedRecurrence:
        recurrence, weights, dtype = self._spec.recurrence, self.model.layers[layer], self.model.spec.dtype
        assert recurrence is not None
        given = RecurrentWeights(
            inputs=weights.qkv,
            bias=weights.qkv_bias,
            index=layer,
            tail=weights.mixer_tail,
            tensors=weights.recurrent,
        )
        state = tuple(torch.empty(0, *each.shape, dtype=each.dtype) for each in recurrence.state(dtype))
        width = recurrence.shapes(self._spec.hidden_size)["mixer_out"][0][1]
        return TrainedRecurrence(recurrence.mixer(given, 0, self._group), self._recurrence, state, width, dtype)

    def mixes(self, kind: HalfKind) -> bool:
        """Whether a half of this kind is a layer's mixer, or stands in its place, so that `mixer_forward` runs it."""
        return kind != "mlp" or bool(self._spec.mlps)

    def own(self, adapter: LayerAdapter) -> LayerAdapter:
        """This device's part of a layer's whole matrices, as views."""
        found = {}
        for field, group in adapter.items():
            pieces = [(b, self._pieces[module]) for module, b in group.b]
            inputs = next(iter(pieces[0][1].values())).inputs  # equal for all modules that share an input
            rows = tuple((name, b[piece.outputs]) for b, parts in pieces for name, piece in parts.items())
            magnitudes = tuple(
                whole[piece.outputs]
                for whole, (_, parts) in zip(group.magnitudes, pieces, strict=False)  # a LoRA has none
                for piece in parts.values()
            )
            found[field] = LoraGroup(group.a[:, inputs], rows, magnitudes)
        return found

    def begin_magnitudes(self, layer: int, vector: torch.Tensor) -> None:
        """Write the norms of the changed rows to the magnitudes in a layer's vector [elements]: all gains are 1 then.

        All devices that share the layer get those of all rows.
        """
        held = torch.zeros_like(vector)
        number = self.model.shard.layers.start + layer
        whole, devices = self.layout.views(number, vector), self.layout.views(number, held)
        for field, group in self.own(whole).items():
            norms = self._norms(field, layer, group)
            for (name, _), magnitudes, count in zip(
                group.b, group.magnitudes, self.own(devices)[field].magnitudes, strict=True
            ):
                magnitudes.copy_(norms[self._columns[name]])
                count.fill_(1.0)
        for field, group in whole.items():
            for magnitudes, count in zip(group.magnitudes, devices[field].magnitudes, strict=True):
                sums = self._summed(in_rows(torch.cat((magnitudes * count, count)))).view(2, -1)
                magnitudes.copy_(sums[0] / sums[1])

    def pack(self, ids: torch.Tensor, lengths: tuple[int, ...]) -> PackedTokens:
        """Pack token ids [T] int64 on the device as sequences of these lengths.

        Positions begin at 0 in each sequence.
        """
        device = ids.device
        positions = sent(torch.cat([torch.arange(length) for length in lengths]), device)
        rotation = local = self._ops.layers.rotation(positions)
        if self._local_layers is not self._ops.layers:
            local = self._local_layers.rotation(positions)
        slots = torch.arange(len(ids), device=device)
        packing = chunks = Packing.of(lengths, device)
        sizes = {window for window in self._windows if window is not None} if self._spec.chunked else set()
        if sizes:
            chunks = Packing.of(cut(lengths, min(sizes)), device)
        constants = self._spec.temperature
        factors = None if constants is None else temperatures(constants, positions, self.model.spec.dtype)
        recurrent = None if self._spec.recurrence is None else self._recurrence.make_metadata(segments_of(lengths))
        return PackedTokens(ids, positions, packing, chunks, factors, rotation, local, slots, recurrent)

    def kept_shapes(self, layer: int, kind: HalfKind, tokens: int) -> KeptShapes:
        """The tensors that a half of this device's layer keeps for this many tokens.

        An MLP half with experts keeps none.
        """
        spec, dtype, weights = self._spec, self.model.spec.dtype, self.model.layers[layer]
        groups, rank = self.layout.groups[self.model.shard.layers.start + layer], self.layout.rank
        shapes: KeptShapes
        if self.mixes(kind):
            rows = weights.qkv.shape[0] + (0 if weights.mixer_tail is None else len(weights.mixer_tail))
            shapes = {"qkv": ((tokens, rows), dtype), **self._mixers[layer].kept_shapes(tokens)}
        elif weights.experts is not None:
            return {}
        else:
            shapes = dict.fromkeys(self._inner, ((tokens, spec.intermediate_size), dtype))
        fields = ("qkv", "o") if self.mixes(kind) else ("gate_up", "down")
        if self._norms_output(fields[1]):
            shapes[f"output_{fields[1]}"] = ((tokens, spec.hidden_size), dtype)
        return shapes | {
            f"shrunk_{field}": ((tokens, len(groups[field]) * rank), dtype) for field in fields if field in groups
        }

    def embed(self, tokens: PackedTokens, out: torch.Tensor) -> None:
        """Write the stream [T, hidden] as it enters the first layer to `out`."""
        out.copy_(self.model.embedded(tokens.ids, tokens.positions))

    def mixer_forward(
        self, layer: int, x: torch.Tensor, tokens: PackedTokens, adapter: LayerAdapter, kept: Kept, out: torch.Tensor
    ) -> None:
        """Write x + mixer(x) [T, hidden] to `out`."""
        weights = self.model.layers[layer]
        mixed = self._mix(layer, x, tokens, adapter, kept)
        self._add_output("o", layer, x, mixed, weights.o_bias, adapter, kept, out)

    def mlp_forward(
        self,
        layer: int,
        x: torch.Tensor,
        entered: torch.Tensor,
        adapter: LayerAdapter,
        kept: Kept,
        out: torch.Tensor,
    ) -> None:
        """Write x + mlp(x) [T, hidden] to `out`. `entered` [T, hidden] is the layer's input."""
        weights = self.model.layers[layer]
        if weights.experts is not None:
            normed = self._norm(x, weights.post_norm)
            found = apply_experts(normed, weights.experts)
            if weights.gate_up.shape[0]:
                found = found + self._shared_expert(weights, normed)
            torch.add(x, self._summed(found), out=out)
            return
        product = self._gate(layer, self._mlp_input(x, entered), adapter, kept)
        self._add_output("down", layer, x, product, weights.down_bias, adapter, kept, out)

    def mixer_backward(
        self,
        layer: int,
        gradient: torch.Tensor,
        x: torch.Tensor,
        tokens: PackedTokens,
        adapter: LayerAdapter,
        grads: LayerAdapter,
        kept: Kept | None,
        beside: torch.Tensor,
    ) -> None:
        """Turn the gradient of `mixer_forward`'s result [T, hidden] into that of x, in place.

        Writes the adapter's gradients to `grads`. `kept` holds the forward's kept tensors; if it is None, they are
        computed again. `beside` is the memory of the MLP half's input: for parallel halves, `mlp_backward` left there
        what the MLP adds to the gradient.
        """
        weights = self.model.layers[layer]
        if kept is None:
            kept = {}
            if self._norms_output("o"):
                self.mixer_forward(layer, x, tokens, adapter, kept, torch.empty_like(x))
            else:
                self._mix(layer, x, tokens, adapter, kept)
        mixer, projected = self._mixers[layer], kept["qkv"]
        mixed = mixer.result(projected, kept)
        given = self._output_backward("o", gradient, self._output_norm(layer, "o"), kept)
        back, t = self._project_backward("o", layer, given, lambda: mixed, adapter, grads, kept)
        _write_grad_of_a(t, mixed, grads, "o")
        together = mixer.backward(back, projected, tokens, kept)
        del back
        normed = partial(self._norm, x, weights.input_norm)
        back, t = self._project_backward("qkv", layer, together, normed, adapter, grads, kept)
        if t is not None:
            _write_grad_of_a(t, normed(), grads, "qkv")
        self._ops.add_norm_backward(gradient, self._summed(back), x, weights.input_norm)
        if self._spec.parallel:
            gradient += beside

    def mlp_backward(
        self,
        layer: int,
        gradient: torch.Tensor,
        x: torch.Tensor,
        entered: torch.Tensor,
        adapter: LayerAdapter,
        grads: LayerAdapter,
        kept: Kept | None,
    ) -> None:
        """Turn the gradient of `mlp_forward`'s result [T, hidden] into that of x, as `mixer_backward` does.

        For parallel halves, x becomes what the MLP adds to the gradient of `entered`.
        """
        weights, norm = self.model.layers[layer], self._mlp_norm(layer)
        if weights.experts is not None:
            read = self._norm(x, norm)
            back = experts_backward(gradient, read, weights.experts, self._summed)
            if weights.gate_up.shape[0]:
                back = back + self._summed(pulled_back(partial(self._shared_expert, weights), read, gradient))
            self._ops.add_norm_backward(gradient, back, x, norm)
            return
        source = self._mlp_input(x, entered)
        if kept is None:
            kept = {}
            if self._norms_output("down"):
                self.mlp_forward(layer, x, entered, adapter, kept, torch.empty_like(x))
            else:
                self._gate(layer, source, adapter, kept)
        projected = self._output_backward("down", gradient, self._output_norm(layer, "down"), kept)
        back, t = self._project_backward("down", layer, projected, partial(self._gated, kept), adapter, grads, kept)
        if self._spec.gated:
            together, product = self._gate_backward(kept, back)
        else:
            together, product = self._ops.activation_backward(kept["up"], back)
        _write_grad_of_a(t, product, grads, "down")
        del back, product
        normed = partial(self._norm, source, norm)
        back, t = self._project_backward("gate_up", layer, together, normed, adapter, grads, kept)
        if t is not None:
            _write_grad_of_a(t, normed(), grads, "gate_up")
        back = self._summed(back)
        self._ops.add_norm_backward(x.zero_() if self._spec.parallel else gradient, back, source, norm)

    def head(
        self, stream: torch.Tensor, targets: torch.Tensor, loss: PositionLoss, *, backward: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the losses of rows [C, hidden], and the log probability of each target.

        `targets` is int64, [C], or [C, K] for K targets of each row. With `backward`, the rows become their gradient;
        otherwise they stay. The results stay on the device. They are float32, or float64 for float64 rows.
        """
        head, norm, narrow = self._dense(self.model.lm_head), self.model.norm, self.model.project_out
        cap = self._spec.logit_softcap
        normed = self._norm(stream, norm)
        logits = (normed if narrow is None else normed @ narrow.t()) @ head.t()
        if self.model.lm_head_bias is not None:
            logits += self.model.lm_head_bias
        slope = None
        if cap is not None:
            logits.div_(cap).tanh_()
            slope = 1.0 - wide(logits).square() if backward else None
            logits.mul_(cap)
        divisor = self._spec.logit_divisor
        if divisor != 1.0:
            logits.div_(divisor)
        if self._group is None:
            losses, logprobs = self._ops.loss_backward(logits, targets, loss, backward=backward)
        else:
            first = self.model.shard.vocabulary(self._spec.vocab_size).start
            losses, logprobs = shared_loss_backward(logits, targets, loss, first, self._group, backward=backward)
        if backward:
            if divisor != 1.0:
                logits.div_(divisor)
            back = self._summed((logits if slope is None else logits.mul_(slope)) @ head)
            gradient = torch.zeros_like(stream)
            self._ops.add_norm_backward(gradient, back if narrow is None else back @ narrow, stream, norm)
            stream.copy_(gradient)
        return losses.sum(), logprobs

    def _mix(
        self, layer: int, x: torch.Tensor, tokens: PackedTokens, adapter: LayerAdapter, kept: Kept
    ) -> torch.Tensor:
        """Compute a mixer half up to the output projection, and return the projection's input [T, width]."""
        weights = self.model.layers[layer]
        normed = self._norm(x, weights.input_norm)
        self._shrink(normed, "qkv", adapter, kept)
        low, gain = self._low("qkv", adapter, kept), self._gain("qkv", layer, adapter)
        kept["qkv"] = self._project(
            normed, self._weight("qkv", layer), weights.qkv_bias, low, kept.get("qkv"), gain=gain
        )
        mixer = self._mixers[layer]
        mixer.forward(kept["qkv"], tokens, kept)
        mixed = mixer.result(kept["qkv"], kept)
        self._shrink(mixed, "o", adapter, kept)
        return mixed

    def _gate(self, layer: int, x: torch.Tensor, adapter: LayerAdapter, kept: Kept) -> torch.Tensor:
        """Compute an MLP half up to the down projection, and return the projection's input [T, intermediate]."""
        weights = self.model.layers[layer]
        normed = self._norm(x, self._mlp_norm(layer))
        self._shrink(normed, "gate_up", adapter, kept)
        low, gain = self._low("gate_up", adapter, kept), self._gain("gate_up", layer, adapter)
        gate_up = self._dense(weights.gate_up)
        for name, rows in self._inner.items():
            weight = gate_up[rows]
            bias = None if weights.gate_up_bias is None else weights.gate_up_bias[rows]
            own = []
            for part, small, b in low:
                # A module has the columns of gate or of up, or all of them (Phi-3).
                start, stop = max(part.start, rows.start), min(part.stop, rows.stop)
                if start < stop:
                    columns = slice(start - rows.start, stop - rows.start)
                    own.append(Low(columns, small, b[start - part.start : stop - part.start]))
            own_gain = None if gain is None else gain[rows]
            kept[name] = self._project(normed, weight, bias, own, kept.get(name), gain=own_gain)
        product = self._gated(kept)
        self._shrink(product, "down", adapter, kept)
        return product

    def _gated(self, kept: Kept) -> torch.Tensor:
        """The down projection's input [T, intermediate], from the kept tensors."""
        if not self._spec.gated:
            return self._ops.activation(kept["up"])
        of_gate, of_product = self._spec.mlp_factors
        if (of_gate, of_product) == (1.0, 1.0):
            return self._ops.gate(kept["gate"], kept["up"])
        return self._ops.gate(kept["gate"] * of_gate, kept["up"]).mul_(of_product)

    def _gate_backward(self, kept: Kept, back: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of gate and up [T, 2 N], from that of `_gated`'s result; and that result [T, N]."""
        of_gate, of_product = self._spec.mlp_factors
        if (of_gate, of_product) == (1.0, 1.0):
            return self._ops.gate_backward(kept["gate"], kept["up"], back)
        together, product = self._ops.gate_backward(kept["gate"] * of_gate, kept["up"], back * of_product)
        together[:, : product.shape[1]] *= of_gate
        return together, product.mul_(of_product)

    def _shared_expert(self, weights: LayerWeights, normed: torch.Tensor) -> torch.Tensor:
        """The output [T, hidden] of a layer's shared expert, in operations that autograd can follow."""
        gate, up = (normed @ self._dense(weights.gate_up).t()).chunk(2, dim=-1)
        inner = ACTIVATIONS[self._spec.activation](gate) * up
        if weights.shared_gate is not None:
            inner = inner * (normed @ weights.shared_gate.t()).sigmoid()
        return inner @ self._dense(weights.down).t()

    def _mlp_input(self, x: torch.Tensor, entered: torch.Tensor) -> torch.Tensor:
        """The stream that an MLP half reads: its own input, or the layer's."""
        return entered if self._spec.parallel else x

    def _mlp_norm(self, layer: int) -> torch.Tensor:
        """The norm of the stream that an MLP half reads."""
        weights = self.model.layers[layer]
        if self._spec.norms_stream:  # the stream was normed at the end of the attention half
            return self._no_norm
        return weights.input_norm if self._spec.parallel and not len(weights.post_norm) else weights.post_norm

    def _norms_output(self, field: str) -> bool:
        """Whether what the projection `field` adds to the stream is normed, or the sum."""
        norm = "attention_out_norm" if field == "o" else "mlp_out_norm"
        return self._spec.norms_stream or norm in self._spec.norms

    def _output_norm(self, layer: int, field: str) -> torch.Tensor | None:
        """The norm of what the projection `field` adds to the stream, or of the sum; None: neither is normed."""
        weights = self.model.layers[layer]
        if self._spec.norms_stream:
            return weights.post_norm if field == "o" else weights.end_norm
        return weights.attention_out_norm if field == "o" else weights.mlp_out_norm

    def _add_output(
        self,
        field: str,
        layer: int,
        x: torch.Tensor,
        read: torch.Tensor,
        bias: torch.Tensor | None,
        adapter: LayerAdapter,
        kept: Kept,
        out: torch.Tensor,
    ) -> None:
        """Write x + the projection of `read`, normed as the family does, to `out`."""
        low, weight, gain = (
            self._low(field, adapter, kept),
            self._weight(field, layer),
            self._gain(field, layer, adapter),
        )
        norm = self._output_norm(layer, field)
        if norm is None:
            self._project_whole(read, weight, bias, low, out, x, gain)
            return
        name, whole = f"output_{field}", self._spec.norms_stream
        kept[name] = self._project_whole(read, weight, bias, low, kept.get(name), x if whole else None, gain)
        normed = self._norm(kept[name], norm)
        if whole:
            out.copy_(normed)
        else:
            torch.add(x, normed, out=out)

    def _output_backward(
        self, field: str, gradient: torch.Tensor, norm: torch.Tensor | None, kept: Kept
    ) -> torch.Tensor:
        """The gradient of a projection's output, from that of its half's result.

        Where the half norms the sum, `gradient` becomes that of the sum.
        """
        if norm is None:
            return gradient
        back = self._ops.norm_backward(gradient, kept[f"output_{field}"], norm)
        return gradient.copy_(back) if self._spec.norms_stream else back

    def _dense(self, weight: Weight) -> torch.Tensor:
        """The weight in the model's dtype. A quantized one is dequantized for this use only.

        Gradients pass through it, and it has none of its own, so a quantized base is as good as a plain one. In the
        backward, dequantizing once more costs less than keeping it.
        """
        return weight if isinstance(weight, torch.Tensor) else weight.dequantized(self.model.spec.dtype)

    def _weight(self, field: str, layer: int) -> torch.Tensor:
        """The weight of a projection of a layer, in the model's dtype."""
        weights = self.model.layers[layer]
        dense = self._dense(getattr(weights, field))
        return dense if field != "qkv" or weights.mixer_tail is None else torch.cat((dense, weights.mixer_tail))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._ops.layers.norm(x, weight)

    def _shrink(self, x: torch.Tensor, field: str, adapter: LayerAdapter, kept: Kept) -> None:
        """Store x Aᵀ of a group's modules in `kept`, if the adapter changes any of them.

        A may read the first columns of x alone: where attention and a recurrence are side by side.
        """
        if field in adapter:
            name, a = f"shrunk_{field}", adapter[field].a
            kept[name] = torch.mm(x[:, : a.shape[1]], a.t(), out=kept.get(name))

    def _low(self, field: str, adapter: LayerAdapter, kept: Kept) -> list[Low]:
        """The changes of a projection by a group."""
        if field not in adapter:
            return []
        group, shrunk = adapter[field], kept[f"shrunk_{field}"]
        return [
            Low(self._columns[name], group.of(number, shrunk, self.layout.rank), b)
            for number, (name, b) in enumerate(group.b)
        ]

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over the devices that share the layers. x may be overwritten."""
        return x if self._group is None else self._group.all_reduce(x)

    def _project_whole(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        low: Sequence[Low],
        out: torch.Tensor | None,
        residual: torch.Tensor | None,
        gain: torch.Tensor | None,
    ) -> torch.Tensor:
        """`_project`, summed over devices."""
        if self._group is None:
            return self._project(x, weight, bias, low, out, residual, gain)
        added = self._summed(self._project(x, weight, None, low, None, gain=gain))
        for other in (residual, bias):
            if other is not None:
                added = added + other
        return added if out is None else out.copy_(added)

    def _project(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        low: Sequence[Low],
        out: torch.Tensor | None,
        residual: torch.Tensor | None = None,
        gain: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """residual + gain (x weightᵀ + s (x Aᵀ) Bᵀ) + bias, [T, N]. `gain` is [N]; None: all are 1."""
        if gain is not None:
            out = self._project(x, weight, None, low, out).mul_(gain)
            for other in (residual, bias):
                if other is not None:
                    out += other
            return out
        out = x.new_empty(len(x), len(weight)) if out is None else out
        start = residual if bias is None else bias if residual is None else torch.add(residual, bias, out=out)
        if sum(part.stop - part.start for part, _, _ in low) == len(weight):
            # The small products come first: the large one adds to them as it writes, which moves fewer bytes.
            for part, small, b in low:
                first, beta = (out[:, part], 0.0) if start is None else (start[..., part], 1.0)
                torch.addmm(first, small, b.t(), beta=beta, alpha=self.scale, out=out[:, part])
            return out.addmm_(x, weight.t())
        if start is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(start, x, weight.t(), out=out)
        for part, small, b in low:
            out[:, part].addmm_(small, b.t(), alpha=self.scale)
        return out

    def _project_backward(
        self,
        field: str,
        layer: int,
        gradient: torch.Tensor,
        read: Callable[[], torch.Tensor],
        adapter: LayerAdapter,
        grads: LayerAdapter,
        kept: Kept,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The gradient of a projection's input [T, K] from that of its output [T, N]. Writes dB of the group, and dm.

        `read` gives the input. Also returns t of all modules, [T, modules * rank], for `_write_grad_of_a`; None if the
        group has no modules.
        """
        weight = self._weight(field, layer)
        if field not in adapter:
            return gradient @ weight, None
        if adapter[field].magnitudes:
            gradient = self._gain_backward(field, layer, gradient, read(), adapter, grads, kept)
        group, rank = adapter[field], self.layout.rank
        shrunk = kept[f"shrunk_{field}"]
        together = torch.empty_like(shrunk)
        for number, ((name, b), (_, grad)) in enumerate(zip(group.b, grads[field].b, strict=True)):
            part, low, t = (
                gradient[:, self._columns[name]],
                group.of(number, shrunk, rank),
                group.of(number, together, rank),
            )
            if number and len(group.b) * rank != together.shape[1]:  # a further part of the same module
                t.addmm_(part, b)
            else:
                torch.mm(part, b, out=t)
            product_in_float32(part.t(), low, grad, self.scale)
        together *= self.scale
        width = group.a.shape[1]
        if width == weight.shape[1]:
            return (together @ group.a).addmm_(gradient, weight), together
        back = gradient @ weight
        back[:, :width].addmm_(together, group.a)
        return back, together

    def _norms(self, field: str, layer: int, group: LoraGroup) -> torch.Tensor:
        """The norms [N] of the rows of W + s B A, over all devices; 1 for outputs that the group does not change."""
        weight = self._weight(field, layer)
        squares = torch.ones(len(weight), dtype=wide(weight[:0]).dtype, device=weight.device)
        for number, (name, b) in enumerate(group.b):
            columns = self._columns[name]
            squares[columns] = row_squares(weight[columns], group.a_of(number, self.layout.rank), b, self.scale)
        if field in INPUTS_SPLIT:
            squares = self._summed(in_rows(squares)).view(-1)
        return squares.sqrt()

    def _gain(self, field: str, layer: int, adapter: LayerAdapter) -> torch.Tensor | None:
        """The gains of a projection's outputs [N]; None if all are 1."""
        group = adapter.get(field)
        if group is None or not group.magnitudes:
            return None
        return self._gain_of(group, self._norms(field, layer, group))

    def _gain_of(self, group: LoraGroup, norms: torch.Tensor) -> torch.Tensor:
        """The gains [N] of rows with these norms [N]."""
        gain = torch.ones_like(norms)
        for (name, _), magnitudes in zip(group.b, group.magnitudes, strict=True):
            columns = self._columns[name]
            gain[columns] = magnitudes / norms[columns]
        return gain

    def _gain_backward(
        self,
        field: str,
        layer: int,
        gradient: torch.Tensor,
        x: torch.Tensor,
        adapter: LayerAdapter,
        grads: LayerAdapter,
        kept: Kept,
    ) -> torch.Tensor:
        """The gradient of z [T, N] from that of g z. Writes dm of the group. x is the projection's input."""
        low, norms = self._low(field, adapter, kept), self._norms(field, layer, adapter[field])
        z = self._project(x, self._weight(field, layer), None, low, None)
        products = (wide(gradient) * wide(z)).sum(0)
        for (name, _), grad in zip(grads[field].b, grads[field].magnitudes, strict=True):
            columns = self._columns[name]
            grad.copy_(products[columns] / norms[columns])
        return (wide(gradient) * self._gain_of(adapter[field], norms)).to(gradient.dtype)


def cut(lengths: Sequence[int], most: int) -> tuple[int, ...]:
    """Lengths of sequences that are cut after every `most` tokens."""
    return tuple(min(most, length - start) for length in lengths for start in range(0, length, most))


def _write_grad_of_a(t: torch.Tensor | None, x: torch.Tensor, grads: LayerAdapter, field: str) -> None:
    """Write dA of a group, from its input x [T, K] and the t of `_project_backward`."""
    if t is not None:
        a = grads[field].a
        product_in_float32(t.t(), x[:, : a.shape[1]], a, 1.0)


def segments_of(lengths: Sequence[int]) -> Segments:
    """Packed sequences of these lengths as the segments of a batch, for recurrences."""
    ends = np.cumsum([0, *lengths], dtype=np.int32)
    return Segments(ends, np.array(lengths, np.int32), np.arange(len(lengths), dtype=np.int32))
