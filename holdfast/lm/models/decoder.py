"""The native decoder: one transformer over packed tokens. A spec describes how an architecture differs from Llama."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch.nn import functional

from holdfast.lm.kernels.cache.kv_cache import KVShape
from holdfast.lm.kernels.collectives.protocol import Group
from holdfast.lm.kernels.fp8 import Weight
from holdfast.lm.kernels.linear import layer_ops_for
from holdfast.lm.kernels.linear.layers import Change, LayerOps, LayerShape, Normed
from holdfast.lm.kernels.lora.protocol import Lora, LoraStack, StepAdapters
from holdfast.lm.kernels.rows import each_row
from holdfast.lm.models.attention_mixer import (
    AttentionMixer,
    AttentionWeights,
    GatedAttentionMixer,
    ParallelMixer,
    TemperedAttentionMixer,
    adapted,
)
from holdfast.lm.models.base import ModelSpec, StepInput
from holdfast.lm.models.decoder_spec import DecoderSpec
from holdfast.lm.models.latent import LatentMixer, LatentWeights
from holdfast.lm.models.layer_weights import LayerWeights, WeightReader, WeightSource, as_read
from holdfast.lm.models.mixer import Mixer, RecurrentWeights
from holdfast.lm.models.mlp_mixer import MlpMixer, NoMixer
from holdfast.lm.models.one_by_one import row_by_row, token_by_token
from holdfast.lm.models.projection import Projection
from holdfast.lm.models.rope import Rope
from holdfast.lm.models.same_bits import arithmetic_of, fixed_form
from holdfast.lm.models.shard import Piece, Shard, vocabulary_piece
from holdfast.lm.models.whole_steps import HeadWeights, whole_steps_of

Norms = tuple[torch.Tensor, torch.Tensor | None]
"""The norm of the stream after a projection, and the norm of the projection itself."""


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
        invariant: bool = False,
        ranks: int = 1,
        move_weights: Callable[[object], None] | None = None,
    ) -> None:
        """Fill the weights from `source`. With `fp8`, quantize those of QUANTIZED_FIELDS as each one is loaded.

        `shard` is the part that this device holds; by default it holds the whole model. `group` is the devices that
        share its layers, if there are several; they load at the same time. `invariant`: the bits of a token's results
        depend on the tokens before it alone, not on a step's others (`check_same_bits`), nor on the
        number of devices that share layers, up to `ranks`. `move_weights` gets all weights once they are read, and may
        move their tensors to other memory.
        """
        names = decoder.names
        shard = shard or Shard(layers=range(decoder.num_layers))
        self.decoder = decoder
        """The spec of the whole decoder, of which this may be a shard."""
        self.shard, self.group = shard, group
        self._device, self._dtype, self._invariant, self._ranks = device, dtype, invariant, ranks
        form = partial(fixed_form, device=device, dtype=dtype, ranks=ranks) if invariant else as_read
        reader = WeightReader(decoder, shard, source, device=device, dtype=dtype, group=group, form=form)
        self._no_norm = reader.no_norm
        own = shard.own(decoder)
        tokens = vocabulary_piece(decoder, shard)
        self.embedding = reader.fused((names.embedding,), (tokens,)) if shard.first else reader.none
        self.layers = tuple(map(self._made, reader.layers(fp8=fp8)))
        self.norm = self._final_norm(reader)
        narrow = bool(decoder.embedding_width)
        hidden, width = decoder.hidden_size, decoder.embedding_size
        self.project_in = reader.whole(names.project_in, hidden, width) if narrow and shard.first else None
        self.project_out = reader.whole(names.project_out, width, hidden) if narrow and shard.last else None
        rows = decoder.position_rows if shard.first else 0
        self.positions = reader.whole(names.positions, rows, hidden) if rows else None
        self.tensors = {name: reader.whole(name, *shape) for name, shape in decoder.tensors.items()}
        """The tensors of `DecoderSpec.tensors`, by name."""
        self.token_tables = {
            name: reader.fused((name,), (Piece(shape, (shard.vocabulary(shape[0]), range(shape[1]))),))
            for name, shape in decoder.token_tables.items()
        }
        """This device's rows of `DecoderSpec.token_tables`, by name."""
        self._embedding_scale = torch.tensor(decoder.embedding_scale, dtype=dtype).item() * decoder.stream_scale
        self.lm_head = self._lm_head(reader, tokens)
        biased = decoder.head_bias and shard.last
        self.lm_head_bias = (
            reader.fused((names.head_bias,), (Piece(tokens.whole[:1], tokens.own[:1]),)) if biased else None
        )
        if move_weights is not None:
            ends = (self.embedding, self.norm, self.project_in, self.project_out, self.positions)
            move_weights((*ends, self.layers, self.tensors, self.token_tables, self.lm_head, self.lm_head_bias))
        self._first_token = tokens.own[0].start
        # A window at least as long as the longest sequence hides nothing.
        windows = tuple(
            None if window is None or window >= max_model_len else window
            for window in own.windows or (None,) * own.num_layers
        )
        self._max_model_len = max_model_len
        self._ops, self._local_ops = self._layer_ops(own)
        self._mixers = self._make_mixers(own, windows)
        whole = shard.tp == 1 and shard.first and shard.last and type(self) is Decoder and ranks == 1
        kinds = [self._ops.shape] + ([self._local_ops.shape] if self._local_ops is not self._ops else [])
        last = HeadWeights(self.norm, self.lm_head, self.lm_head_bias)
        self.whole_steps = (
            whole_steps_of(decoder, self.layers, last, windows, kinds, every=invariant) if whole else None
        )
        """The steps that one call computes; None if no step of this decoder is computed so."""
        self._one_by_one = invariant and device.type == "cpu" and self.whole_steps is None
        """Whether tokens are computed one after the other, as nothing else gives them the same bits in any step."""
        changes = self._settled() if invariant else ""
        weight_bytes = reader.nbytes
        if device.type == "cpu" and not invariant and move_weights is None:
            weights = (weight for layer in self.layers for weight in (layer.qkv, layer.gate_up))
            weight_bytes += self._ops.pack((*weights, self.lm_head))
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
            weight_bytes=weight_bytes,
            stream_width=0 if shard.first and shard.last else decoder.hidden_size,
            first=shard.first,
            last=shard.last,
            latent_rank=0 if decoder.latent is None else decoder.latent.rank,
            recurrent_layers=sum(own.recurrent),
            state=() if own.recurrence is None else own.recurrence.state(dtype),
            recurrence=own.recurrence,
            arithmetic=arithmetic_of(device, changes, ranks=ranks, one_by_one=self._one_by_one) if invariant else "",
            one_by_one=self._one_by_one,
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
                alone = NoMixer() if layer.experts is not None else MlpMixer(layer.qkv, layer.qkv_bias, index)
                mixers.append(recurrent or alone)
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

    def _made(self, layer: LayerWeights) -> LayerWeights:
        """A layer's weights in the form in which steps use them, from those that were read."""
        return layer

    def _final_norm(self, reader: WeightReader) -> torch.Tensor:
        """The weight of the norm before the LM head."""
        if not self.decoder.final_norm:
            return self._no_norm
        parts = (self.decoder.names.norm, self.decoder.names.norm_bias)[: 1 + self.decoder.layer_norm]
        return reader.norm(parts, (Piece.all_of(self.decoder.hidden_size),) * len(parts))

    def _lm_head(self, reader: WeightReader, tokens: Piece) -> Weight:
        """The LM head of this device's tokens. It is the embedding itself if the two are tied and both are here.

        On a CPU a tied head that the checkpoint holds packed is read a second time: it is the largest weight of a small
        model, and a step reads all of it.
        """
        decoder, names = self.decoder, self.decoder.names
        if not self.shard.last:
            return reader.none
        name = names.embedding if decoder.tied else names.lm_head
        shared = decoder.tied and self.shard.first
        packed = reader.packed((name,), (tokens,)) if self._device.type == "cpu" or not shared else None
        if packed is not None:
            return packed
        return self.embedding if shared else reader.fused((name,), (tokens,))

    def _layer_ops(self, own: DecoderSpec) -> tuple[LayerOps, LayerOps]:
        """The operations of layers with the spec's `rope`, and of those with its `other_rope`."""
        ops, local = self._ops_of(own, own.rope), own.other_rope
        return ops, ops if local is None else self._ops_of(own, local)

    def _settled(self) -> str:
        """`LayerOps.settle` for all weights that it multiplies."""
        ends = [each for each in (self.project_in, self.project_out, self.lm_head) if each is not None]
        weights = [*chain.from_iterable(layer.multiplied for layer in self.layers), *ends]
        (changes,) = {ops.settle(weights) for ops in (self._ops, self._local_ops)}
        return changes

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
        return layer_ops_for(shape, self.group, invariant=self._invariant, ranks=self._ranks)

    def forward(self, step: StepInput) -> torch.Tensor:
        if self.whole_steps is not None and self.whole_steps.takes(step):
            return self._finished(self.whole_steps.logits(self.embedded(step.ids, step.positions), step))
        rows = self.body(step)
        return self.head(rows, step.adapters) if self.shard.last else rows[0]

    def hidden(self, step: StepInput) -> torch.Tensor:
        """The final norm's output [R, hidden]; in a stage before the last, the stream [T, hidden].

        It is in float32 where the library in C computes all steps.
        """
        if self.whole_steps is not None and self.whole_steps.every:
            return self.whole_steps.normed(self.embedded(step.ids, step.positions), step)
        rows = self.body(step)
        return self._ops.computed(self._last(rows, step.adapters)) if self.shard.last else rows[0]

    def logits(self, hidden: Normed) -> torch.Tensor:
        """Logits [R, own_vocab_size] of rows of `hidden`."""
        if self.whole_steps is not None and self.whole_steps.every:
            return self._finished(self.whole_steps.head(hidden))
        return each_row(self._logits, hidden) if self._one_by_one else self._logits(hidden)

    def _logits(self, hidden: Normed) -> torch.Tensor:
        """`logits` of all rows together."""
        if self.project_out is not None:
            hidden = self._ops.linear(hidden, self.project_out)
        return self._finished(self._ops.linear(hidden, self.lm_head, self.lm_head_bias))

    def _finished(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits from the products with the LM head, which may be overwritten."""
        if (cap := self.decoder.logit_softcap) is not None:
            logits = each_row(partial(_capped, cap=cap), logits) if self._invariant else _capped(logits, cap=cap)
        return logits if self.decoder.logit_divisor == 1.0 else logits.div_(self.decoder.logit_divisor)

    def body(self, step: StepInput) -> tuple[torch.Tensor, ...]:
        """The residual stream and the output of the last layer's mixer, [R, ...]. The head needs only these rows.

        The residual stream is one tensor that every layer adds to in place. A stage before the last returns the stream
        of all tokens, [T, hidden], and nothing else.
        """
        if not self._one_by_one:
            return self._body(step)
        rows = step if self.shard.last else replace(step, sample_at=None)
        return token_by_token(self._body, rows)

    def _body(self, step: StepInput) -> tuple[torch.Tensor, ...]:
        """`body` of all tokens together."""
        ops = self._ops
        rotations = [ops.rotation(step.positions)]
        if self._local_ops is not ops:
            rotations.append(self._local_ops.rotation(step.positions))
        stream = self.embedded(step.ids, step.positions) if step.stream is None else step.stream
        normed = ops.norm(stream, self.layers[0].input_norm)
        adapters = step.adapters
        for index, mixer in enumerate(self._mixers):
            if step.taps is not None:
                step.taps.keep(index, stream)
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
        if self._one_by_one:
            return row_by_row(self._last_together, rows, adapters)
        return self._last_together(rows, adapters)

    def _last_together(self, rows: tuple[torch.Tensor, ...], adapters: StepAdapters | None) -> Normed:
        """`_last` of all rows together."""
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
        if spec.mlps and layer.experts is None:
            return ops.add_linear_norm(stream, attended, layer.o, layer.o_bias, following)
        if spec.parallel:
            normed = ops.norm(stream, layer.post_norm if len(layer.post_norm) else layer.input_norm)
            inner = ops.gated_linear(normed, layer.gate_up, layer.gate_up_bias)
            attention, mlp = (attended, layer.o, layer.o_bias), (inner, layer.down, layer.down_bias)
            return ops.add_linears_norm(stream, attention, mlp, following)
        normed = attended
        if not spec.mlps:
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

    def _scale_shared(self, inner: torch.Tensor, normed: torch.Tensor, gate: torch.Tensor) -> None:
        """Multiply what a shared expert's last projection reads, [T, inner], by its gate for `normed`, in place."""
        opening = self._ops.linear(normed, gate) if self._invariant else normed @ gate.t()
        inner *= opening.sigmoid()

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
            assert stacks.o is not None and stacks.gate_up is not None and stacks.down is not None
            normed = ops.norm(stream, layer.post_norm if len(layer.post_norm) else layer.input_norm)
            inner = ops.gate(adapted(ops, normed, layer.gate_up, layer.gate_up_bias, stacks.gate_up, adapters, lora))
            halves = ((attended, layer.o, layer.o_bias), stacks.o), ((inner, layer.down, layer.down_bias), stacks.down)
            changes = [self._change(x, stack, adapters, lora) for (x, *_), stack in halves]
            return ops.add_linears_norm(stream, halves[0][0], halves[1][0], following, changes)

        def add(
            x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, stack: LoraStack | None, norms: Norms
        ) -> Normed:
            assert stack is not None
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

        if self.decoder.mlps and layer.experts is None:
            return add(attended, layer.o, layer.o_bias, stacks.o, (following, None))
        normed = attended
        if not self.decoder.mlps:
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


def _capped(logits: torch.Tensor, *, cap: float) -> torch.Tensor:
    """Logits between -cap and cap, in place of the given ones."""
    return logits.div_(cap).tanh_().mul_(cap)
