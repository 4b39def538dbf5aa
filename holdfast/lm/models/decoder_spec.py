"""What the checkpoint of a native decoder says: its sizes and options, and the names and shapes of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from holdfast.lm.kernels.linear.experts.experts import ExpertRule
from holdfast.lm.models.rope import Rope

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """Sizes and options of one checkpoint. An option that is off costs nothing in `Decoder.forward`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_eps: float
    rope: Rope
    names: WeightNames
    activation: str = "silu"
    tied: bool = False
    """The LM head is the embedding."""
    qk_norm: bool = False
    """Queries and keys are normed within each head."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = ()
    """By layer, how many positions a query sees, including its own; None or empty: all."""
    sinks: bool = False
    """Each head has a logit without a value (GPT-OSS)."""
    experts: ExpertSpec | None = None
    """The experts of layers that have them in place of an MLP."""
    init_std: float = 0.02
    """Standard deviation of random weights."""

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, kw_only=True)
class ExpertSpec:
    """The experts of a decoder, and how its checkpoint holds them."""

    count: int
    intermediate_size: int
    """Of one expert."""
    sparse: tuple[bool, ...]
    """By layer of the whole decoder, whether it has experts."""
    rule: ExpertRule
    biased: bool
    """Whether router and experts have biases."""
    names: ExpertNames


@dataclass(frozen=True)
class ExpertNames:
    """The names of a layer's experts after the layer's prefix.

    Each expert has tensors of its own, named with {} for its number; or, if `fused`, gate_up is one tensor of all
    experts [E, hidden, 2 inner], whose columns are gate and up in turns, and down another [E, inner, hidden].
    """

    router: str
    gate_up: tuple[str, ...]
    down: str
    fused: bool = False


@dataclass(frozen=True)
class WeightNames:
    """The tensor names of a family of checkpoints. A fused weight lists its parts, from its first row down."""

    embedding: str
    norm: str
    lm_head: str
    layer: str
    """The prefix of a layer, with {} for its number."""
    fields: dict[str, tuple[str, ...]]
    """By field of LayerWeights, the names after the prefix."""
    ignored: tuple[str, ...] = ()
    """Endings of tensors that are ignored: old checkpoints saved their rope frequencies."""


MLP_FIELDS = ("gate_up", "down", "gate_up_bias", "down_bias")
"""The fields of LayerWeights that a layer with experts has not."""

LINEAR_FIELDS = ("qkv", "o", "gate_up", "down")
"""The fields of LayerWeights that may be FP8: nearly all bytes that a step reads, except the LM head."""


def layer_shapes(spec: DecoderSpec) -> dict[str, tuple[Shape, ...]]:
    """By field of LayerWeights, the shapes of the parts that are fused along their rows."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[Shape, ...]] = {
        "input_norm": ((hidden,),),
        "qkv": ((q, hidden), (kv, hidden), (kv, hidden)),
        "o": ((hidden, q),),
        "post_norm": ((hidden,),),
        "gate_up": ((inner, hidden), (inner, hidden)),
        "down": ((hidden, inner),),
    }
    if spec.qk_norm:
        shapes |= {"q_norm": ((spec.head_dim,),), "k_norm": ((spec.head_dim,),)}
    if spec.qkv_bias:
        shapes["qkv_bias"] = ((q,), (kv,), (kv,))
    if spec.o_bias:
        shapes["o_bias"] = ((hidden,),)
    if spec.sinks:
        shapes["sinks"] = ((spec.num_heads,),)
    if spec.mlp_bias:
        shapes |= {"gate_up_bias": ((inner,), (inner,)), "down_bias": ((hidden,),)}
    return shapes


def expert_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    """By name after the layer's prefix, the shapes of the tensors of a layer's experts."""
    experts, hidden = spec.experts, spec.hidden_size
    if experts is None:
        return {}
    names, count, inner = experts.names, experts.count, experts.intermediate_size
    shapes: dict[str, Shape] = {names.router + ".weight": (count, hidden)}
    if experts.biased:
        shapes[names.router + ".bias"] = (count,)
    if names.fused:
        shapes |= {names.gate_up[0]: (count, hidden, 2 * inner), names.down: (count, inner, hidden)}
        if experts.biased:
            shapes |= {names.gate_up[0] + "_bias": (count, 2 * inner), names.down + "_bias": (count, hidden)}
        return shapes
    for expert in range(count):
        shapes |= {name.format(expert): (inner, hidden) for name in names.gate_up}
        shapes[names.down.format(expert)] = (hidden, inner)
    return shapes


def layer_elements(spec: DecoderSpec, layer: int) -> int:
    """Numbers in all tensors of a layer that one token reads."""
    shapes, experts = layer_shapes(spec), spec.experts
    if experts is None or not experts.sparse[layer]:
        return sum(map(elements_of, shapes.values()))
    attention = sum(elements_of(parts) for field, parts in shapes.items() if field not in MLP_FIELDS)
    return attention + 3 * experts.rule.top_k * spec.hidden_size * experts.intermediate_size


def elements_of(shapes: tuple[Shape, ...]) -> int:
    """Numbers in all parts of a weight."""
    return sum(prod(shape) for shape in shapes)
