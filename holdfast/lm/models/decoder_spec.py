"""DecoderSpec: the sizes and options of a native decoder, and the names and shapes of its checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from holdfast.lm.kernels.linear.experts.experts import ExpertRule
from holdfast.lm.models.base import Shape
from holdfast.lm.models.latent import LatentSpec
from holdfast.lm.models.mixer import RecurrentSpec
from holdfast.lm.models.rope import UNROTATED, Rope


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
    """Number added under the square root of every norm."""
    rope: Rope
    names: WeightNames
    activation: str = "silu"
    tied: bool = False
    """Whether the LM head is the embedding."""
    qk_norm: bool = False
    """Whether queries and keys are normed within each head."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = ()
    """For each layer, the number of positions that a query sees, including its own. None, or an empty tuple: all."""
    chunked: bool = False
    """Whether `windows` are chunks: a query sees the positions from the last multiple of the number on (Llama 4)."""
    sinks: bool = False
    """Whether each head has a logit without a value (GPT-OSS)."""
    experts: ExpertSpec | None = None
    """The experts of layers that have experts in place of an MLP; None: every layer has an MLP."""
    init_std: float = 0.02
    """The standard deviation of random weights."""
    norms: tuple[str, ...] = ("input_norm", "post_norm")
    """The norms of a layer, as fields of LayerWeights."""
    head_bias: bool = False
    """Whether the LM head has a bias."""
    final_norm: bool = True
    """Whether there is a norm before the LM head."""
    layer_norm: bool = False
    """Whether norms are layer norms with a bias. Otherwise they are RMS norms."""
    norm_offset: float = 0.0
    """Number added to the stored weights of all norms, and not to their biases."""
    norms_stream: bool = False
    """Whether each half of a layer norms the stream itself (Transformer, §3.1), not only the next half's input."""
    parallel: bool = False
    """Whether attention and MLP of a layer read the same stream. Without a post_norm, both read the same norm of it."""
    gated: bool = True
    """Whether the MLP has a gate: activation(gate) * up. Otherwise it is activation(up)."""
    qk_norm_whole: bool = False
    """Whether queries and keys are normed over all heads together instead of within each head."""
    qk_layer_norm: bool = False
    """Whether the norm of queries and keys is a layer norm without a bias, with factors of each head's own."""
    embedding_scale: float = 1.0
    """The factor on embeddings, rounded to their dtype."""
    stream_scale: float = 1.0
    """Another factor on embeddings, which is not rounded."""
    embedding_width: int = 0
    """Width of an embedding if projections lead from it to the stream and back to the LM head; 0: hidden_size."""
    position_rows: int = 0
    """Number of rows in the table of learned positions, which are added to embeddings; 0: no table."""
    position_offset: int = 0
    """The row of position 0 in that table."""
    local_rope: Rope | None = None
    """The rotation of layers with a window; None: they use `rope`, like all others."""
    unrotated: tuple[bool, ...] = ()
    """For each layer, whether it has no rotation; an empty tuple: all layers have one."""
    unit_qk_norm: bool = False
    """Whether the queries and keys of rotated layers have a norm without weights within each head (Llama 4).

    It comes before the rotation, which changes no length, so a norm after the rotation is the same.
    """
    temperature: tuple[float, int] | None = None
    """The constants (a, n) by which queries of layers without rotation grow with their position p; None: they do not.

    The factor is 1 + a ln(1 + floor((p + 1) / n)) (Scalable-Softmax, arXiv 2501.19399, §2, in steps of n positions).
    """
    softcap: float | None = None
    """The cap on attention scores: a score becomes cap * tanh(score / cap)."""
    logit_softcap: float | None = None
    """The cap on logits: a logit becomes cap * tanh(logit / cap)."""
    logit_divisor: float = 1.0
    """The number that logits are divided by."""
    attention_gate: bool = False
    """Whether each head of attention has an output gate: its result is multiplied by the sigmoid of the gate."""
    recurrence: RecurrentSpec | None = None
    """The recurrent layers; None: every layer has attention."""
    mlps: tuple[bool, ...] = ()
    """For each layer, whether it is an MLP or experts alone; the others are a mixer alone. The activation is relu².

    Empty: each layer is a mixer and then an MLP or experts."""
    parallel_factors: tuple[float, float] | None = None
    """The factors on the results of attention and of the recurrence, in layers that have both; None: a recurrent layer
    has no attention."""
    mlp_factors: tuple[float, float] = (1.0, 1.0)
    """The factors on the MLP's gate before the activation, and on the input of the MLP's last projection."""
    query_scale: float | None = None
    """The factor on attention scores; None: head_dim ** -0.5."""
    unit_v_norm: bool = False
    """Whether values have a norm without weights within each head."""
    layer_specs: tuple[DecoderSpec, ...] = ()
    """The spec of each layer by itself, where layers differ in sizes or tensor names; empty: all are as this spec says.

    This spec then has the sizes of the first layer."""
    kv_source: int | None = None
    """In the spec of one layer: the number of the earlier layer whose keys and values it reads; None: it has
    its own."""
    layer_tensors: Mapping[str, Shape] = field(default_factory=dict)
    """Shapes of further tensors of a layer, by field. Every device holds them whole."""
    tensors: Mapping[str, Shape] = field(default_factory=dict)
    """Shapes of further tensors of the whole decoder, by name. Every device holds them whole."""
    token_tables: Mapping[str, Shape] = field(default_factory=dict)
    """Shapes of further tables with a row for each token, by name. Devices share the rows, as they do the
    embedding's."""

    latent: LatentSpec | None = None
    """The sizes of latent attention, which all layers have; None: attention over keys and values of each KV head.

    With latent attention there is one KV head, and `head_dim` is `LatentSpec.cached`."""

    def of_layer(self, layer: int) -> DecoderSpec:
        """The spec of one layer."""
        return self.layer_specs[layer] if self.layer_specs else self

    @property
    def recurrent(self) -> tuple[bool, ...]:
        """For each layer, whether it is recurrent."""
        return (False,) * self.num_layers if self.recurrence is None else self.recurrence.layers

    @property
    def cached(self) -> tuple[bool, ...]:
        """For each layer, whether it has attention, and keys and values of its own."""
        mlps = self.mlps or (False,) * self.num_layers
        alone = (state and self.parallel_factors is None for state in self.recurrent)
        reads = (self.of_layer(layer).kv_source is not None for layer in range(self.num_layers))
        return tuple(not any(lacks) for lacks in zip(alone, mlps, reads, strict=True))

    @property
    def other_rope(self) -> Rope | None:
        """The rotation of `other_layers`, if some layers have another one than `rope`."""
        return UNROTATED if any(self.unrotated) else self.local_rope

    @property
    def other_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it has `other_rope`."""
        if any(self.unrotated):
            return self.unrotated
        windows = self.windows or (None,) * self.num_layers
        return tuple(self.local_rope is not None and window is not None for window in windows)

    @property
    def rotated_dim(self) -> int:
        """Width of the part of a query or key that `rope` is made for."""
        return self.head_dim if self.latent is None else self.latent.rotated

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5) if self.query_scale is None else self.query_scale

    @property
    def embedding_size(self) -> int:
        """Width of an embedding."""
        return self.embedding_width or self.hidden_size

    @property
    def plain_positions(self) -> int:
        """Default length limit of a sequence, in positions.

        For LongRoPE it is the original length, because longer sequences need another set of frequencies.
        """
        return (
            min(self.max_positions, self.rope.original_length) if self.rope.kind == "longrope" else self.max_positions
        )

    @property
    def most_positions(self) -> int:
        """Largest max_model_len that can be asked for. Dynamic scaling extends the config's own limit."""
        return int(self.max_positions * self.rope.factor) if self.rope.kind == "dynamic" else self.max_positions


@dataclass(frozen=True)
class Part:
    """The place of a weight that a checkpoint stores transposed, or together with others in one tensor."""

    name: str
    """The tensor's name after the layer's prefix."""
    shape: Shape
    """The tensor's shape."""
    rows: Shape = ()
    """The dimensions that the tensor's rows are split into, such as KV heads, heads per KV head, numbers per head."""
    at: tuple[int, int, int] = (0, 0, 0)
    """The rows that belong to the weight: a dimension of `rows`, start and stop."""
    transposed: bool = False
    """Whether the tensor is stored as [inputs, outputs]. `rows` describes the transposed tensor, [outputs, inputs]."""


@dataclass(frozen=True, kw_only=True)
class ExpertSpec:
    """The experts of a decoder, and how its checkpoint holds them."""

    count: int
    """Number of experts that the router chooses from."""
    intermediate_size: int
    """Width of one expert's MLP."""
    sparse: tuple[bool, ...]
    """For each layer of the whole decoder, whether it has experts."""
    rule: ExpertRule
    biased: bool
    """Whether router and experts have biases."""
    names: ExpertNames
    shared_size: int = 0
    """Width of the shared expert, which every token reads; 0: there is none."""
    shared_gate: bool = True
    """Whether the shared expert's output is multiplied by a gate of its own."""
    beside_mlp: bool = False
    """Whether a layer with experts has an MLP, too, whose output is normed by itself (Gemma 4)."""


@dataclass(frozen=True)
class ExpertNames:
    """The tensor names of a layer's experts, after the layer's prefix.

    By default each expert has its own tensors, and {} in a name stands for its number. Without a gate, gate_up is up
    alone. If `fused`, gate_up is one
    tensor of all experts [E, hidden, 2 inner], and down is another [E, inner, hidden]. With `fused` rows, both are
    stored transposed: [E, 2 inner, hidden] and [E, hidden, inner].
    """

    router: str
    """The router's name, without `.weight`."""
    gate_up: tuple[str, ...]
    down: str
    fused: Literal["", "alternating", "halves", "rows"] = ""
    """Whether the columns of a fused gate_up alternate between gate and up, or all of gate's columns or rows come
    first."""
    shared: tuple[str, ...] = ()
    """The names of gate, up and down of the shared expert, if there is one. It is as wide as the others."""
    correction: str = ""
    """The name of the numbers that are added to scores only to choose experts; empty: there are none."""


@dataclass(frozen=True)
class WeightNames:
    """The tensor names of a family of checkpoints. A fused weight lists its parts, from its first row down."""

    embedding: str
    norm: str
    lm_head: str
    layer: str
    """The prefix of a layer's tensors, with {} for the layer's number."""
    fields: dict[str, tuple[str, ...]]
    """For each field of LayerWeights, the tensor names after the prefix."""
    ignored: tuple[str, ...] = ()
    """Endings of tensor names to ignore, such as the rope frequencies that old checkpoints saved."""
    positions: str = ""
    """The name of the table of learned positions."""
    project_in: str = ""
    project_out: str = ""
    """The names of the projections between embeddings and the stream, if their widths differ."""
    parts: Mapping[str, Part] = field(default_factory=dict)
    """The place of each weight in `fields` that is not a tensor of its own."""
    base: str = ""
    """The beginning of all names but the LM head's."""
    bases: tuple[str, ...] = ("",)
    """Other beginnings of the same names: those of checkpoints of the bare model, or of a larger model that contains
    it."""
    heads: tuple[str, ...] = ()
    """Other names of the LM head."""
    others: tuple[str, ...] = ()
    """Beginnings of tensor names that are not the decoder's, such as a vision tower's."""

    @property
    def head_bias(self) -> str:
        """The bias of the LM head."""
        return self.lm_head.removesuffix("weight") + "bias"

    @property
    def norm_bias(self) -> str:
        """The bias of the last norm, if it is a layer norm."""
        return self.norm.removesuffix("weight") + "bias"


MLP_FIELDS = ("gate_up", "down", "gate_up_bias", "down_bias")
"""The fields of LayerWeights that a layer with experts lacks."""

ATTENTION_FIELDS = ("qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_bias", "sinks")
"""The fields of LayerWeights that a recurrent layer lacks, or fills with tensors of its own."""

LINEAR_FIELDS = ("qkv", "o", "gate_up", "down")
"""The fields of LayerWeights that may be FP8. They are nearly all bytes that a step reads, except the LM head."""

QUANTIZED_FIELDS = (*LINEAR_FIELDS, "mixer_in", "mixer_out", "mlp_in", "mlp_out", "shared_gate_up", "shared_down")
"""The fields of a checkpoint's layers that become one of LINEAR_FIELDS."""


def layer_shapes(spec: DecoderSpec) -> dict[str, tuple[Shape, ...]]:
    """For each field of LayerWeights, the shapes of the parts that are fused along their rows.

    This is for layers with attention and an MLP. `shapes_of_layer` is for any layer.
    """
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    norm: tuple[Shape, ...] = ((hidden,), (hidden,)) if spec.layer_norm else ((hidden,),)
    mlp = 2 if spec.gated else 1
    shapes: dict[str, tuple[Shape, ...]] = {
        "qkv": ((q, hidden),) * spec.attention_gate + ((q, hidden), (kv, hidden), (kv, hidden)),
        "o": ((hidden, q),),
        "gate_up": ((inner, hidden),) * mlp,
        "down": ((hidden, inner),),
        **dict.fromkeys(spec.norms, norm),
        **{field: (shape,) for field, shape in spec.layer_tensors.items()},
    }
    if spec.kv_source is not None:
        shapes["qkv"] = shapes["qkv"][:1]
    if spec.qk_norm:
        widths = (q, kv) if spec.qk_norm_whole else (spec.head_dim, spec.head_dim)
        counts = (spec.num_heads, spec.num_kv_heads) if spec.qk_layer_norm else (1, 1)
        shapes |= {"q_norm": ((widths[0],),) * counts[0], "k_norm": ((widths[1],),) * counts[1]}
        if spec.kv_source is not None:
            del shapes["k_norm"]
    if spec.qkv_bias:
        shapes["qkv_bias"] = ((q,), (kv,), (kv,))[: len(shapes["qkv"])]
    if spec.o_bias:
        shapes["o_bias"] = ((hidden,),)
    if spec.sinks:
        shapes["sinks"] = ((spec.num_heads,),)
    if spec.latent is not None:
        shapes |= spec.latent.shapes(hidden, spec.num_heads)
    if spec.mlp_bias:
        shapes |= {"gate_up_bias": ((inner,),) * mlp, "down_bias": ((hidden,),)}
    return shapes


def shapes_of_layer(spec: DecoderSpec, layer: int) -> dict[str, tuple[Shape, ...]]:
    """For each field that a layer reads from the checkpoint, the shapes of its parts. Experts are not among them."""
    shapes, hidden, experts = layer_shapes(spec.of_layer(layer)), spec.hidden_size, spec.experts
    sparse = experts is not None and experts.sparse[layer]
    if spec.mlps and spec.mlps[layer] and not sparse:
        return _shapes_of_mlp(spec, shapes)
    if spec.mlps:
        shapes = {field: parts for field, parts in shapes.items() if field not in MLP_FIELDS}
    if spec.recurrence is not None and spec.recurrent[layer]:
        if spec.parallel_factors is None:
            shapes = {field: parts for field, parts in shapes.items() if field not in ATTENTION_FIELDS}
        shapes |= spec.recurrence.shapes(hidden)
    if experts is not None and sparse and not experts.beside_mlp:
        shapes = {field: parts for field, parts in shapes.items() if field not in MLP_FIELDS}
        if spec.mlps:
            shapes = {field: parts for field, parts in shapes.items() if field not in ATTENTION_FIELDS}
        if size := experts.shared_size:
            shapes |= {"shared_gate_up": ((size, hidden),) * (1 + spec.gated), "shared_down": ((hidden, size),)}
            if experts.shared_gate:
                shapes["shared_gate"] = ((1, hidden),)
    return shapes


def _shapes_of_mlp(spec: DecoderSpec, shapes: Mapping[str, tuple[Shape, ...]]) -> dict[str, tuple[Shape, ...]]:
    """The shapes of a layer that is an MLP alone, from those of `layer_shapes`."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    found = {field: shapes[field] for field in spec.norms}
    found |= {"mlp_in": ((inner, hidden),), "mlp_out": ((hidden, inner),)}
    return found | ({"mlp_in_bias": ((inner,),), "mlp_out_bias": ((hidden,),)} if spec.mlp_bias else {})


def expert_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    """The shapes of the tensors of a layer's experts, by name after the layer's prefix."""
    experts, hidden = spec.experts, spec.hidden_size
    if experts is None:
        return {}
    names, count, inner = experts.names, experts.count, experts.intermediate_size
    shapes: dict[str, Shape] = {names.router + ".weight": (count, hidden)}
    if experts.biased:
        shapes[names.router + ".bias"] = (count,)
    if names.correction:
        shapes[names.correction] = (count,)
    shapes |= dict(zip(names.shared, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=False))
    if names.fused:
        gate_up, down = (hidden, 2 * inner), (inner, hidden)
        if names.fused == "rows":
            gate_up, down = gate_up[::-1], down[::-1]
        shapes |= {names.gate_up[0]: (count, *gate_up), names.down: (count, *down)}
        if experts.biased:
            shapes |= {names.gate_up[0] + "_bias": (count, 2 * inner), names.down + "_bias": (count, hidden)}
        return shapes
    for expert in range(count):
        shapes |= {name.format(expert): (inner, hidden) for name in names.gate_up}
        shapes[names.down.format(expert)] = (hidden, inner)
    return shapes


def layer_elements(spec: DecoderSpec, layer: int) -> int:
    """Number of weights of a layer that one token reads. A token reads only its chosen experts."""
    experts, found = spec.experts, sum(map(elements_of, shapes_of_layer(spec, layer).values()))
    if experts is None or not experts.sparse[layer]:
        return found
    return found + experts.rule.matrices * experts.rule.per_token * spec.hidden_size * experts.intermediate_size


def elements_of(shapes: tuple[Shape, ...]) -> int:
    """Number of elements in all parts of a weight."""
    return sum(prod(shape) for shape in shapes)
