"""Gemma 4: how its config.json describes layers of two kinds, and their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.lm.kernels.linear.experts.experts import ExpertRule
from holdfast.lm.models.base import Shape
from holdfast.lm.models.checkpoint_errors import NotNative, UnsupportedCheckpoint
from holdfast.lm.models.decoder_spec import DecoderSpec, ExpertNames, ExpertSpec
from holdfast.lm.models.experts import MOST_CHOSEN, at_least_one
from holdfast.lm.models.rope import Rope

DEFAULTS: dict[str, Any] = dict(
    vocab_size=262_144,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=30,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=131_072,
    tie_word_embeddings=True,
    sliding_window=512,
    vocab_size_per_layer_input=262_144,
    hidden_size_per_layer_input=256,
)
"""Transformers' defaults, which published configs may leave out."""
SLIDING, FULL = "sliding_attention", "full_attention"
EVERY = 6
"""Every sixth layer has full attention unless the config lists the layers' types."""
GLOBAL_HEAD_DIM = 512
"""Size of a head in layers of full attention unless the config gives one."""
ROPES: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
"""The rotation of each type of layer unless the config gives others."""
EXPERTS = ExpertNames(router="router.proj", gate_up=("experts.gate_up_proj",), down="experts.down_proj", fused="rows")
FIELDS = {
    "attention_out_norm": ("post_attention_layernorm.weight",),
    "post_norm": ("pre_feedforward_layernorm.weight",),
    "mlp_out_norm": ("post_feedforward_layernorm.weight",),
    "layer_scale": ("layer_scalar",),
    "input_gate": ("per_layer_input_gate.weight",),
    "input_up": ("per_layer_projection.weight",),
    "input_out_norm": ("post_per_layer_input_norm.weight",),
    "router_scale": ("router.scale",),
    "expert_scale": ("router.per_expert_scale",),
    "experts_norm": ("pre_feedforward_layernorm_2.weight",),
    "dense_out_norm": ("post_feedforward_layernorm_1.weight",),
    "experts_out_norm": ("post_feedforward_layernorm_2.weight",),
}
"""The tensor names that differ from Llama's, and those of tensors that only Gemma 4 has."""
QKV = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
UNREAD = ("k_proj.weight", "v_proj.weight", "k_norm.weight", "v_norm.weight")
"""Tensors of attention that a checkpoint may hold for a layer that reads another one's keys and values."""
OTHERS = tuple(f"model.{name}." for name in ("vision_embedder", "embed_vision", "audio_tower", "embed_audio"))
"""Beginnings of the names of tensors that only images and sound need, besides those of other families."""
INPUT_TABLE = "model.embed_tokens_per_layer.weight"
INPUT_PROJECTION = "model.per_layer_model_projection.weight"
INPUT_NORM = "model.per_layer_projection_norm.weight"
"""The tensors of embeddings for each layer (PLE)."""


def gemma4_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with Transformers' defaults, in the names that all families read."""
    whole = {**DEFAULTS, **config}
    if whole.get("use_bidirectional_attention") == "all":
        raise NotNative("use_bidirectional_attention is all, and only causal decoders are served")
    return whole | {"hidden_act": whole.get("hidden_activation") or "gelu_pytorch_tanh", "rope_parameters": None}


def gemma4_spec(config: Mapping[str, Any], fields: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a Gemma 4. `config` is as published; `fields` are those that all families read."""
    given = {**DEFAULTS, **config}
    count, kinds = int(fields["num_layers"]), layer_types(given)
    sources = kv_sources(given, kinds)
    heads = heads_of_kinds(given, kinds)
    ropes = {kind: rope_of_kind(given, kind) for kind in (SLIDING, FULL)}
    biased = bool(given.get("attention_bias", False))
    experts = experts_of(given, count) if given.get("enable_moe_block") else None
    width = int(given["hidden_size_per_layer_input"] or 0)
    names = replace(fields["names"], fields={**fields["names"].fields, **FIELDS})
    common = DecoderSpec(
        **{**fields, "rope": ropes[FULL], "names": names},
        norms=("input_norm", "attention_out_norm", "post_norm", "mlp_out_norm"),
        embedding_scale=float(fields["hidden_size"] ** 0.5),
        query_scale=1.0,
        qk_norm=True,
        unit_v_norm=True,
        qkv_bias=biased,
        o_bias=biased,
        logit_softcap=given.get("final_logit_softcapping"),
        experts=experts,
        layer_tensors=layer_tensors(fields["hidden_size"], width, experts),
    )
    of_kind = {kind: replace(_with_heads(common, *heads[kind]), rope=ropes[kind]) for kind in heads}
    specs = tuple(_of_layer(of_kind[kind], given, kind, source) for kind, source in zip(kinds, sources, strict=True))
    window = at_least_one(given, "sliding_window", 512)
    names = replace(names, others=OTHERS, ignored=(*names.ignored, *unread(sources)))
    first = specs[0]
    return replace(
        common,
        names=names,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        local_rope=ropes[SLIDING],
        windows=tuple(window if kind == SLIDING else None for kind in kinds),
        layer_specs=specs,
        tensors=input_tensors(given, count, width),
        token_tables=input_table(given, count, width),
    )


def _with_heads(common: DecoderSpec, kv_heads: int, head_dim: int) -> DecoderSpec:
    """The spec of layers with these heads."""
    if common.num_heads % kv_heads:
        raise UnsupportedCheckpoint(f"{common.num_heads} attention heads cannot share {kv_heads} KV heads evenly")
    return replace(common, num_kv_heads=kv_heads, head_dim=head_dim)


def _of_layer(spec: DecoderSpec, config: Mapping[str, Any], kind: str, source: int | None) -> DecoderSpec:
    """The spec of one layer, from that of its type. `source` is the layer whose keys and values it reads, if any."""
    qkv: tuple[str, ...] = QKV
    if config.get("attention_k_eq_v") and kind == FULL:
        qkv = (QKV[0], QKV[1], QKV[1])  # values are the keys before norm and rotation
    if source is not None:
        qkv = QKV[:1]
    biases = tuple(name.replace(".weight", ".bias") for name in qkv)
    fields = {**spec.names.fields, "qkv": qkv, "qkv_bias": biases}
    wide = source is not None and config.get("use_double_wide_mlp")
    return replace(
        spec,
        names=replace(spec.names, fields=fields),
        intermediate_size=spec.intermediate_size * (2 if wide else 1),
        kv_source=source,
    )


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """The type of each layer. The last one has full attention, whatever the config lists, as in Transformers."""
    count = int(config["num_hidden_layers"])
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if (layer + 1) % EVERY else FULL for layer in range(count)]
    if unknown := set(kinds) - {SLIDING, FULL}:
        raise UnsupportedCheckpoint(f"layer type {min(unknown)!r} is not supported")
    if len(kinds) != count:
        raise UnsupportedCheckpoint(f"layer_types lists {len(kinds)} layers of {count}")
    return [*kinds[:-1], FULL]


def kv_sources(config: Mapping[str, Any], kinds: Sequence[str]) -> list[int | None]:
    """For each layer, the layer whose keys and values it reads, or None if it has its own.

    The last `num_kv_shared_layers` layers read those of the last layer before them that is of their type.
    """
    shared, count = int(config.get("num_kv_shared_layers") or 0), len(kinds)
    if not 0 <= shared < count:
        raise UnsupportedCheckpoint(
            f"num_kv_shared_layers is {shared}; of {count} layers, at least one must have its own keys and values"
        )
    own = kinds[: count - shared]
    if lacking := sorted(set(kinds) - set(own)):
        raise UnsupportedCheckpoint(
            f"num_kv_shared_layers is {shared} of {count} layers; no layer before them has {lacking[0]}"
        )
    last = {kind: layer for layer, kind in enumerate(own)}
    return [None if layer < len(own) else last[kind] for layer, kind in enumerate(kinds)]


def heads_of_kinds(config: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Number of KV heads and head size of layers of each type. Raises NotNative if layers of one type differ."""
    found: dict[str, tuple[int, int]] = {}
    for layer, kind in enumerate(kinds):
        heads = _heads(config, kind, layer)
        if found.setdefault(kind, heads) != heads:
            raise NotNative(f"layer {layer} has heads (number, size) of {heads}, and earlier {kind} {found[kind]}")
    return found


def _heads(config: Mapping[str, Any], kind: str, layer: int) -> tuple[int, int]:
    """Number of KV heads and head size of a layer.

    Published configs give the sizes of layers of full attention. Transformers 5.24 writes those of each layer instead.
    """
    sizes = {key: at_least_one(config, key, 1) for key in ("num_key_value_heads", "head_dim")}
    if config.get("per_layer_config") is not None:
        written = config["per_layer_config"].get(str(layer)) or {}
        sizes |= {key: at_least_one(written, key, size) for key, size in sizes.items()}
    elif kind == FULL:
        sizes["head_dim"] = at_least_one(config, "global_head_dim", GLOBAL_HEAD_DIM)
        if config.get("attention_k_eq_v"):
            few = at_least_one(config, "num_global_key_value_heads", sizes["num_key_value_heads"])
            sizes["num_key_value_heads"] = few
    return sizes["num_key_value_heads"], sizes["head_dim"]


def rope_of_kind(config: Mapping[str, Any], kind: str) -> Rope:
    """The rotation of layers of this type: of whole heads, or of the share of pairs that turn fastest (p-RoPE)."""
    given = (config.get("rope_parameters") or {}).get(kind) or ROPES[kind]
    scaling = given.get("rope_type", ROPES[kind]["rope_type"])
    theta = float(given.get("rope_theta", ROPES[kind]["rope_theta"]))
    if scaling == "default":
        return Rope(theta)
    if scaling != "proportional":
        raise NotNative(f"the rotation of {kind} is {scaling!r}; known are default and proportional")
    share = float(given.get("partial_rotary_factor", 1.0))
    if not 0 < share <= 1:
        raise UnsupportedCheckpoint(f"partial_rotary_factor is {share:g}; it must be above 0 and at most 1")
    return Rope(theta, kind=scaling, factor=float(given.get("factor", 1.0)), turning=share)


def layer_tensors(hidden: int, width: int, experts: ExpertSpec | None) -> dict[str, Shape]:
    """The shapes of tensors of a layer that only Gemma 4 has. `width` is that of embeddings for each layer."""
    found: dict[str, Shape] = {"layer_scale": (1,)}
    if width:
        found |= {"input_gate": (width, hidden), "input_up": (hidden, width), "input_out_norm": (hidden,)}
    if experts is not None:
        norms = ("experts_norm", "dense_out_norm", "experts_out_norm")
        found |= {"router_scale": (hidden,), "expert_scale": (experts.count,)} | dict.fromkeys(norms, (hidden,))
    return found


def input_tensors(config: Mapping[str, Any], layers: int, width: int) -> dict[str, Shape]:
    """The shapes of the decoder's tensors that make embeddings for each layer of this width; none for width 0."""
    hidden = int(config["hidden_size"])
    return {INPUT_PROJECTION: (layers * width, hidden), INPUT_NORM: (width,)} if width else {}


def input_table(config: Mapping[str, Any], layers: int, width: int) -> dict[str, Shape]:
    """The shape of the table of embeddings for each layer, which has all layers' rows of a token in one."""
    if not width:
        return {}
    rows = at_least_one(config, "vocab_size_per_layer_input", 1)
    if rows < int(config["vocab_size"]):
        raise UnsupportedCheckpoint(
            f"vocab_size_per_layer_input is {rows}; it must be at least vocab_size, {config['vocab_size']}"
        )
    return {INPUT_TABLE: (rows, layers * width)}


def experts_of(config: Mapping[str, Any], layers: int) -> ExpertSpec:
    """Experts next to the MLP of every layer; shares are normalized."""
    count, chosen = at_least_one(config, "num_experts", 0), at_least_one(config, "top_k_experts", 0)
    if chosen > min(count, MOST_CHOSEN):
        raise UnsupportedCheckpoint(
            f"top_k_experts is {chosen}; of {count} experts, at most {min(count, MOST_CHOSEN)} can be chosen"
        )
    return ExpertSpec(
        count=count,
        intermediate_size=at_least_one(config, "moe_intermediate_size", 0),
        sparse=(True,) * layers,
        rule=ExpertRule(top_k=chosen, activation="gelu_pytorch_tanh"),
        biased=False,
        names=EXPERTS,
        beside_mlp=True,
    )


def unread(sources: Sequence[int | None]) -> tuple[str, ...]:
    """Endings of tensor names that published checkpoints hold and nothing reads."""
    readers = [layer for layer, source in enumerate(sources) if source is not None]
    return tuple(f".layers.{layer}.self_attn.{name}" for layer in readers for name in UNREAD)
