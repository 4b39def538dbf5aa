"""The native decoder: one transformer over packed tokens, with a spec of how an architecture differs from Llama."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.nn import functional

from holdfast.lm.kernels.fp8 import Fp8Weight, Weight, quantize
from holdfast.lm.kernels.linear import layer_ops_for
from holdfast.lm.kernels.linear.layers import LayerShape, Normed, nothing
from holdfast.lm.models.adapters import StepAdapters
from holdfast.lm.models.base import ModelSpec, StepInput
from holdfast.lm.models.decoder_spec import LINEAR_FIELDS, DecoderSpec, Shape, elements_of, layer_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The tensors of one layer; None if the architecture has none."""

    input_norm: torch.Tensor  # [hidden]
    qkv: Weight  # [(H + 2 Hkv) D, hidden]
    o: Weight  # [hidden, H D]
    post_norm: torch.Tensor  # [hidden]
    gate_up: Weight  # [2 intermediate, hidden]
    down: Weight  # [hidden, intermediate]
    q_norm: torch.Tensor | None = None  # [D]
    k_norm: torch.Tensor | None = None  # [D]
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


class WeightSource(Protocol):
    """Where weights come from: a checkpoint, or a random generator."""

    def fill(self, name: str, into: torch.Tensor) -> None:
        """Write the tensor `name` into `into`, which has its shape. Raises UnsupportedCheckpoint if it cannot."""


class Decoder:
    """A `Model` of the architectures in `families.NATIVE`, run on packed tokens without padding."""

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
    ) -> None:
        """Fill the weights from `source`. With `fp8`, quantize those of LINEAR_FIELDS as each one is loaded."""
        names = decoder.names
        self._source, self._device, self._dtype = source, device, dtype
        self._bytes = 0
        self.decoder = decoder
        vocabulary = ((decoder.vocab_size, decoder.hidden_size),)
        self.embedding = self._fused((names.embedding,), vocabulary)
        shapes = layer_shapes(decoder)
        quantized = LINEAR_FIELDS if fp8 else ()
        # One buffer for all weights that are quantized. Freeing one for each would fragment memory.
        self._unquantized = self._empty(max((elements_of(shapes[field]) for field in quantized), default=0))
        self.layers = tuple(self._layer(index, shapes, quantized) for index in range(decoder.num_layers))
        del self._unquantized
        self.norm = self._fused((names.norm,), ((decoder.hidden_size,),))
        self.lm_head = self.embedding if decoder.tied else self._fused((names.lm_head,), vocabulary)
        del self._source
        self._ops = layer_ops_for(
            LayerShape(
                num_heads=decoder.num_heads,
                num_kv_heads=decoder.num_kv_heads,
                head_dim=decoder.head_dim,
                eps=decoder.rms_eps,
                activation=decoder.activation,
                dtype=dtype,
                inverse_frequencies=decoder.rope.inverse_frequencies(decoder.head_dim).to(device),
                amplitude=decoder.rope.amplitude,
            )
        )
        self.spec = ModelSpec(
            architecture=decoder.architecture,
            num_layers=decoder.num_layers,
            num_heads=decoder.num_heads,
            num_kv_heads=decoder.num_kv_heads,
            head_dim=decoder.head_dim,
            vocab_size=decoder.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            dtype=dtype,
            device=device,
            weight_bytes=self._bytes,
        )

    def _layer(self, index: int, shapes: dict[str, tuple[Shape, ...]], quantized: tuple[str, ...]) -> LayerWeights:
        family, weights = self.decoder.names, dict[str, Any]()
        for field, parts in shapes.items():
            names = tuple(family.layer.format(index) + name for name in family.fields[field])
            weights[field] = self._quantized(names, parts) if field in quantized else self._fused(names, parts)
        return LayerWeights(**weights)

    def _fused(self, names: tuple[str, ...], shapes: tuple[Shape, ...]) -> torch.Tensor:
        """One tensor with the rows of all parts."""
        rows = [shape[0] for shape in shapes]
        shape = (sum(rows), *shapes[0][1:])
        if self._device.type == "cpu" and len(shape) == 2 and names[0] != self.decoder.names.embedding:
            # Stored by inputs, which MKL computes up to twice as fast for few tokens.
            whole = self._empty(*shape[::-1]).t()
        else:
            whole = self._empty(*shape)
        self._fill(names, torch.split(whole, rows))
        self._bytes += whole.nbytes
        return whole

    def _quantized(self, names: tuple[str, ...], shapes: tuple[Shape, ...]) -> Fp8Weight:
        """One FP8 weight with the rows of all parts."""
        whole = self._unquantized[: elements_of(shapes)].view(-1, shapes[0][1])
        self._fill(names, torch.split(whole, [shape[0] for shape in shapes]))
        weight = quantize(whole)
        self._bytes += weight.nbytes
        return weight

    def _fill(self, names: tuple[str, ...], parts: Sequence[torch.Tensor]) -> None:
        for name, part in zip(names, parts, strict=True):
            self._source.fill(name, part)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self._device, dtype=self._dtype)

    def forward(self, step: StepInput) -> torch.Tensor:
        """Logits [R, vocab_size]."""
        return self.head(self.body(step), step.adapters)

    def body(self, step: StepInput) -> tuple[torch.Tensor, ...]:
        """The residual stream and the last layer's attention output, [R, ...]. Only these rows are needed from here on.

        The residual stream is one tensor that every layer adds to in place.
        """
        spec, ops = self.decoder, self._ops
        windows = spec.windows or (None,) * spec.num_layers
        rotation = ops.rotation(step.positions)
        stream = functional.embedding(step.ids, self.embedding)  # [T, hidden]
        normed = ops.norm(stream, self.layers[0].input_norm)
        adapters = step.adapters
        for index, (layer, window) in enumerate(zip(self.layers, windows, strict=True)):
            if adapters is None:
                qkv = ops.linear(normed, layer.qkv, layer.qkv_bias)
            else:
                normed = ops.computed(normed)
                finish = adapters.tokens.begin(normed, adapters.layers[index].qkv)
                qkv = ops.linear(normed, layer.qkv, layer.qkv_bias)
                finish.add(qkv)
            query = ops.rotate_and_write(
                qkv, rotation, layer.q_norm, layer.k_norm, step.caches[index], step.slot_mapping
            )
            attended = step.attend(index, query, scale=spec.scale, window=window).flatten(1)
            if index < spec.num_layers - 1:
                normed = self._finish(index, stream, attended, adapters)
        if step.sample_at is None:
            return stream, attended
        return stream.index_select(0, step.sample_at), attended.index_select(0, step.sample_at)

    def head(self, rows: tuple[torch.Tensor, ...], adapters: StepAdapters | None = None) -> torch.Tensor:
        """Logits [R, vocab_size]: the rest of the last layer, and the LM head."""
        stream, attended = rows
        last = self.decoder.num_layers - 1
        return self._ops.linear(self._finish(last, stream, attended, adapters, sampled=True), self.lm_head)

    def _finish(
        self,
        index: int,
        stream: torch.Tensor,
        attended: torch.Tensor,
        adapters: StepAdapters | None,
        *,
        sampled: bool = False,
    ) -> Normed:
        """The rest of a layer after attention, added to the stream; returns the stream normed for the next layer.

        The stream is that of all tokens, or of the `sampled` ones only.
        """
        ops, layer = self._ops, self.layers[index]
        following = self.norm if index == self.decoder.num_layers - 1 else self.layers[index + 1].input_norm
        if adapters is None:
            normed = ops.add_linear_norm(stream, attended, layer.o, layer.o_bias, layer.post_norm)
            inner, first = ops.gated_linear(normed, layer.gate_up, layer.gate_up_bias), nothing
        else:
            # Where a projection ends in the stream, so does what its adapters add.
            stacks, lora = adapters.layers[index], adapters.rows if sampled else adapters.tokens
            first = partial(lora.begin(attended, stacks.o, stream).add, stream)
            normed = ops.add_linear_norm(stream, attended, layer.o, layer.o_bias, layer.post_norm, first)
            normed = ops.computed(normed)
            finish = lora.begin(normed, stacks.gate_up)
            inner = ops.gate(ops.linear(normed, layer.gate_up, layer.gate_up_bias), finish)
            first = partial(lora.begin(inner, stacks.down, stream).add, stream)
        return ops.add_linear_norm(stream, inner, layer.down, layer.down_bias, following, first)
