"""Which decoders, and which of their steps, the library in C computes as a whole on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from holdfast.lm.kernels.attention.torch_attention import TileMetadata, TorchAttention
from holdfast.lm.kernels.fp8 import Weight
from holdfast.lm.kernels.integer.library import Library, step_library
from holdfast.lm.kernels.integer.step import (
    ACTIVATIONS,
    DTYPES,
    HEAD_UNIT,
    NORMS,
    Stacks,
    StepLayer,
    StepSizes,
    StepTokens,
    TokenAdapters,
    WholeSteps,
)
from holdfast.lm.kernels.integer.weight import TILE, IntegerWeight
from holdfast.lm.kernels.linear.layers import LayerShape
from holdfast.lm.kernels.lora.protocol import LayerStacks, StepAdapters
from holdfast.lm.kernels.lora.torch_lora import TorchLora
from holdfast.lm.kernels.stacked import StackedWeight
from holdfast.lm.models.base import StepInput
from holdfast.lm.models.decoder_spec import DecoderSpec
from holdfast.lm.models.layer_weights import LayerWeights

MOST_TOKENS = 64
"""Largest step that is computed as a whole. Products take most of a larger one, and PyTorch's are as fast."""
MOST_OF_SEGMENT = 8
"""Largest number of tokens of a sequence in such a step. Each of them reads the whole context by itself."""
LINEAR = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The tensors of a decoder after its last layer."""

    norm: torch.Tensor  # [hidden]
    weight: Weight  # [V, hidden]
    bias: torch.Tensor | None  # [V]


def whole_steps_of(
    spec: DecoderSpec,
    layers: Sequence[LayerWeights],
    head: HeadWeights,
    windows: Sequence[int | None],
    shapes: Sequence[LayerShape],
    *,
    every: bool = False,
) -> DecoderSteps | None:
    """The whole steps of a decoder; None if the library is missing, or does not compute such a decoder.

    `windows` are those of its layers, and `shapes` those of its kinds of layers, by their rotation. `every`: the
    library computes all steps, also those of many tokens.
    """
    library, dtype = step_library(shapes[0].inverse_frequencies.device), shapes[0].dtype
    known = is_known(head.weight) and all(map(has_known_weights, layers))
    if library is None or dtype not in DTYPES or not known or not is_plain(spec):
        return None
    return DecoderSteps(library, spec, layers, head, windows, shapes, every=every)


def is_plain(spec: DecoderSpec) -> bool:
    """Whether a decoder has the layers of Llama, Qwen 2 and 3, or Gemma 2 and 3, but for sizes and tensors."""
    others = (spec.experts, spec.recurrence, spec.latent, spec.temperature, spec.parallel_factors)
    options = (
        *(spec.mlps, spec.parallel, spec.norms_stream, spec.layer_norm, spec.qk_norm_whole, spec.qk_layer_norm),
        *(spec.attention_gate, spec.layer_specs, spec.embedding_width, spec.unit_v_norm, spec.token_tables),
        *(spec.layer_tensors, spec.tensors, not spec.gated, not spec.final_norm, spec.mlp_factors != (1.0, 1.0)),
    )
    sizes = spec.head_dim % HEAD_UNIT == 0 and spec.activation in ACTIVATIONS and spec.num_kv_heads > 0
    return sizes and all(each is None for each in others) and not any(options)


def has_known_weights(layer: LayerWeights) -> bool:
    """Whether the library reads all weights of a layer."""
    # Both halves of a packed gate_up are whole tiles.
    inner = layer.down.shape[1]
    tiled = isinstance(layer.gate_up, torch.Tensor) or inner % TILE == 0
    return layer.end_norm is None and tiled and all(is_known(getattr(layer, name)) for name in LINEAR)


def is_known(weight: Weight) -> bool:
    """Whether the library reads a weight: plain numbers, integers, or rows of several integers from whole tiles on."""
    if isinstance(weight, StackedWeight):
        integers = all(isinstance(part, IntegerWeight) for part in weight.parts)
        return integers and not any(part.shape[0] % TILE for part in weight.parts[:-1])
    return isinstance(weight, torch.Tensor | IntegerWeight)


class DecoderSteps:
    """The steps of a decoder that the library computes as a whole."""

    def __init__(
        self,
        library: Library,
        spec: DecoderSpec,
        layers: Sequence[LayerWeights],
        head: HeadWeights,
        windows: Sequence[int | None],
        shapes: Sequence[LayerShape],
        *,
        every: bool = False,
    ) -> None:
        """The arguments are those of `whole_steps_of`. Raises ValueError for weights that the library does not take."""
        assert isinstance(head.weight, torch.Tensor | IntegerWeight | StackedWeight)
        self.every = every
        """Whether all steps are computed so. The bits of a token's results then depend on the tokens before it alone:
        the library adds up each number in one order, whatever the step's tokens."""
        self._dtype, self._layers = shapes[0].dtype, len(layers)
        self._stacks: tuple[tuple[LayerStacks, ...], tuple[Stacks, ...]] = (), ()
        """The adapters of the last step that had some, by layers, and as the library takes them."""
        sizes = StepSizes(
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            dim=spec.head_dim,
            eps=spec.rms_eps,
            scale=spec.scale,
            activation=spec.activation,
            softcap=spec.softcap,
            chunked=spec.chunked,
        )
        others = zip(layers, windows, spec.other_layers, strict=True)
        self._steps = WholeSteps(
            library,
            sizes,
            [_layer(layer, window, int(other)) for layer, window, other in others],
            head=head.weight,
            head_bias=head.bias,
            dtype=self._dtype,
            final_norm=head.norm,
            rotations=[(each.inverse_frequencies, each.amplitudes) for each in shapes],
        )

    def takes(self, step: StepInput) -> bool:
        """Whether the library computes this step: few tokens, without adapters, and attention left to choose."""
        if self.every:
            return True
        if len(step.ids) > MOST_TOKENS or step.adapters is not None or step.stream is not None:
            return False
        attention, metadata = step.attention, step.metadata
        if not isinstance(attention, TorchAttention) or not attention.in_whole_steps:
            return False
        return int(metadata.queries.max()) <= MOST_OF_SEGMENT and step.caches[0][0].dtype == self._dtype

    def logits(self, stream: torch.Tensor, step: StepInput) -> torch.Tensor:
        """Logits [R, V] of a step that `takes` accepts, from its embeddings [T, hidden], before caps and divisors."""
        if len(stream) <= MOST_TOKENS:
            return self._steps.logits(stream, self._tokens(step))
        return self.head(self.normed(stream, step))

    def normed(self, stream: torch.Tensor, step: StepInput) -> torch.Tensor:
        """The final norm's output [R, hidden] in float32, of which `head` gives the logits."""
        tokens = self._tokens(step)
        adapters = tokens.adapters
        if len(stream) <= MOST_TOKENS:
            return self._steps.normed(stream, tokens)
        wanted = np.arange(len(stream)) if step.sample_at is None else step.sample_at.numpy()
        found = stream.new_empty(len(wanted), stream.shape[1], dtype=torch.float32)
        # A token reads the keys of earlier positions. The step may hold them anywhere, also in the segment of another
        # sequence that begins alike and computes the shared blocks.
        order = np.argsort(step.positions.numpy(), kind="stable")
        place = np.argsort(order)[wanted]  # of each sampled token in that order
        for first in range(0, len(order), MOST_TOKENS):
            now = order[first : first + MOST_TOKENS]
            here = np.flatnonzero((place >= first) & (place < first + len(now)))
            at = torch.from_numpy(now)
            taps = None if tokens.taps is None else tokens.taps.new_empty(len(now), *tokens.taps.shape[1:])
            some = replace(
                tokens,
                positions=tokens.positions[at],
                slots=tokens.slots[at],
                rows=tokens.rows[now],
                adapters=None if adapters is None else replace(adapters, slots=adapters.slots[now]),
                sample_at=torch.from_numpy(place[here] - first),
                taps=taps,
            )
            found[torch.from_numpy(here)] = self._steps.normed(stream[at], some)
            if tokens.taps is not None and taps is not None:
                tokens.taps[at] = taps
        return found

    def head(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of the rows that `normed` gave, before caps and divisors."""
        parts = torch.split(normed, MOST_TOKENS)  # the library's scratch memory grows with the rows
        return self._steps.head(normed) if len(parts) < 2 else torch.cat([self._steps.head(part) for part in parts])

    def _tokens(self, step: StepInput) -> StepTokens:
        metadata: TileMetadata = step.metadata
        return StepTokens(
            positions=step.positions,
            slots=step.slot_mapping,
            rows=np.repeat(metadata.row, metadata.queries),
            tables=step.block_tables,
            caches=[step.caches[layer] for layer in range(self._layers)],
            longest=int(metadata.stop.max()),
            sample_at=step.sample_at,
            taps=None if step.taps is None else step.taps.into[: len(step.ids)],
            tap_layers=() if step.taps is None else step.taps.layers,
            adapters=None if step.adapters is None else self._adapters_of(step.adapters),
        )

    def _adapters_of(self, adapters: StepAdapters) -> TokenAdapters:
        """The adapters of a step as the library takes them."""
        assert isinstance(adapters.tokens, TorchLora)
        known, stacks = self._stacks
        if known is not adapters.layers:
            stacks = tuple((each.qkv, each.o, each.gate_up, each.down) for each in adapters.layers)
            self._stacks = adapters.layers, stacks
        return TokenAdapters(stacks, adapters.tokens.slots)


def _layer(layer: LayerWeights, window: int | None, rotation: int) -> StepLayer:
    weights = {name: getattr(layer, name) for name in (*LINEAR, *(f"{each}_bias" for each in LINEAR))}
    # A weight of no numbers stands for no norm.
    norms = {name: each for name in NORMS if (each := getattr(layer, name)) is not None and len(each)}
    return StepLayer(**weights, **norms, window=window, rotation=rotation)
