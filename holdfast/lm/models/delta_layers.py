"""Gated delta nets in checkpoints: how Qwen3-Next and Qwen3.5 describe them, and where their tensors are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.lm.models.checkpoint_errors import NotNative, UnsupportedCheckpoint
from holdfast.lm.models.decoder_spec import Part, WeightNames
from holdfast.lm.models.delta_net import DeltaSpec

DEFAULTS: dict[str, Any] = dict(
    head_dim=256,
    num_key_value_heads=2,
    max_position_embeddings=32_768,
    partial_rotary_factor=0.25,
    intermediate_size=5632,
    shared_expert_intermediate_size=512,
    moe_intermediate_size=512,
    norm_topk_prob=True,
)
"""Transformers' defaults for keys that the families of this module have in common."""

INPUTS = tuple(f"linear_attn.{name}.weight" for name in ("query", "key", "value", "gate", "rate", "time"))
"""The names of the parts of `mixer_in`. A checkpoint stores them together with others (`WeightNames.parts`)."""
CONV = "linear_attn.conv.weight"
QUERY, GATE = "self_attn.query.weight", "self_attn.gate.weight"

FIELDS = {
    "mixer_in": INPUTS,
    "conv": (CONV,),
    "decay": ("linear_attn.A_log",),
    "time_bias": ("linear_attn.dt_bias",),
    "gain": ("linear_attn.norm.weight",),
    "mixer_out": ("linear_attn.out_proj.weight",),
    "shared_gate_up": ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
    "shared_down": ("mlp.shared_expert.down_proj.weight",),
    "shared_gate": ("mlp.shared_expert_gate.weight",),
}
"""For each field that these families add to Llama's, the tensor names after the layer's prefix."""


def hybrid(config: Mapping[str, Any], fields: Mapping[str, Any], *, grouped: bool) -> dict[str, Any]:
    """The DecoderSpec fields of a Qwen3-Next or Qwen3.5 without its experts, from those that all families read.

    If `grouped`, the checkpoint stores the projections of a recurrent layer together for each key head (Qwen3-Next).
    Raises NotNative for biases in attention, and for a model without attention.
    """
    if config.get("attention_bias"):
        raise NotNative("attention_bias is on, and gated attention has no biases here")
    if fields["activation"] != "silu":
        raise NotNative(f"hidden_act is {fields['activation']}, and recurrent layers have silu only")
    delta = delta_of(config, fields)
    hidden, heads, dim = fields["hidden_size"], fields["num_heads"], fields["head_dim"]
    names: WeightNames = fields["names"]
    qkv = (GATE, QUERY, *names.fields["qkv"][1:])
    stored = (2 * heads * dim, hidden), (heads, 2, dim)
    attention = {
        name: Part("self_attn.q_proj.weight", *stored, at=(1, at, at + 1)) for at, name in enumerate((QUERY, GATE))
    }
    conv = {CONV: Part("linear_attn.conv1d.weight", (delta.channels, 1, delta.width))}
    inputs = grouped_inputs(delta, hidden) if grouped else separate_inputs(delta, hidden)
    names = replace(
        names,
        fields={**names.fields, **FIELDS, "qkv": qkv},
        parts={**attention, **conv, **inputs},
        base="model.",
        bases=("model.language_model.",),
        others=("mtp.",),
    )
    return {**fields, "names": names, "recurrence": delta, "attention_gate": True, "qk_norm": True, "norm_offset": 1.0}


def delta_of(config: Mapping[str, Any], fields: Mapping[str, Any]) -> DeltaSpec:
    """The recurrent layers. By default every fourth layer has attention.

    Raises NotNative for other kinds of layers, and for a model without attention.
    """
    every, num_layers = int(config.get("full_attention_interval") or 4), fields["num_layers"]
    kinds = config.get("layer_types") or [
        "full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in range(num_layers)
    ]
    if unknown := set(kinds) - {"full_attention", "linear_attention"}:
        raise NotNative(f"layer type {min(unknown)!r} is neither full_attention nor linear_attention")
    if len(kinds) != num_layers:
        raise UnsupportedCheckpoint(f"layer_types lists {len(kinds)} layers of {num_layers}")
    if "full_attention" not in kinds:
        raise NotNative("none of its layers has attention")
    sizes = dict(key_heads=("num_key_heads", 16), value_heads=("num_value_heads", 32), key_dim=("key_head_dim", 128))
    sizes |= dict(value_dim=("value_head_dim", 128), width=("conv_kernel_dim", 4))
    found = {name: int(config.get(f"linear_{key}") or default) for name, (key, default) in sizes.items()}
    if found["value_heads"] % found["key_heads"]:
        raise UnsupportedCheckpoint(
            f"linear_num_value_heads is {found['value_heads']}; it must be a multiple of linear_num_key_heads, "
            f"{found['key_heads']}"
        )
    if found["width"] < 2:
        raise NotNative(f"linear_conv_kernel_dim is {found['width']}; it must be at least 2")
    return DeltaSpec(layers=tuple(kind == "linear_attention" for kind in kinds), eps=fields["rms_eps"], **found)


def separate_inputs(delta: DeltaSpec, hidden: int) -> dict[str, Part]:
    """The parts of `mixer_in` as Qwen3.5 stores them: queries, keys and values in one tensor, others on their own."""
    together, shape = "linear_attn.in_proj_qkv.weight", ((delta.channels, hidden), (delta.channels,))
    edges = (0, delta.keys, 2 * delta.keys, delta.channels)
    parts = {
        name: Part(together, *shape, at=(0, start, stop))
        for name, start, stop in zip(INPUTS, edges[:-1], edges[1:], strict=False)
    }
    rows = (delta.values, delta.value_heads, delta.value_heads)
    for name, stored, count in zip(INPUTS[3:], "zba", rows, strict=True):
        parts[name] = Part(f"linear_attn.in_proj_{stored}.weight", (count, hidden))
    return parts


def grouped_inputs(delta: DeltaSpec, hidden: int) -> dict[str, Part]:
    """The parts of `mixer_in` as Qwen3-Next stores them: each key head with the value heads that use it."""
    shared = delta.value_heads // delta.key_heads
    of_values = shared * delta.value_dim
    parts: dict[str, Part] = {}
    for stored, widths, names in (
        ("qkvz", (delta.key_dim, delta.key_dim, of_values, of_values), INPUTS[:4]),
        ("ba", (shared, shared), INPUTS[4:]),
    ):
        group, start = sum(widths), 0
        shape = (delta.key_heads * group, hidden), (delta.key_heads, group)
        for name, width in zip(names, widths, strict=True):
            parts[name] = Part(f"linear_attn.in_proj_{stored}.weight", *shape, at=(1, start, start + width))
            start += width
    return parts
