"""Mamba-2 in checkpoints: how Bamba and Granite 4 describe it, and where its tensors are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.lm.models.base import NotNative, UnsupportedCheckpoint
from holdfast.lm.models.decoder_spec import ExpertSpec, Part, WeightNames
from holdfast.lm.models.mamba import MambaSpec
from holdfast.lm.models.rope import Rope

DEFAULTS: dict[str, Any] = dict(
    mamba_n_heads=128, mamba_n_groups=1, mamba_d_state=256, mamba_d_conv=4, mamba_expand=2, mamba_conv_bias=True
)
"""Transformers' defaults for keys that the families of this module have in common."""

CONV = "mamba.conv.weight"
"""The name of the convolution's weight as a matrix. A checkpoint stores it with a dimension of 1 in the middle."""

FIELDS = {
    "mixer_in": ("mamba.in_proj.weight",),
    "mixer_in_bias": ("mamba.in_proj.bias",),
    "conv": (CONV,),
    "conv_bias": ("mamba.conv1d.bias",),
    "decay": ("mamba.A_log",),
    "time_bias": ("mamba.dt_bias",),
    "skip": ("mamba.D",),
    "gain": ("mamba.norm.weight",),
    "mixer_out": ("mamba.out_proj.weight",),
    "mixer_out_bias": ("mamba.out_proj.bias",),
}
"""For each field that these families add to Llama's, the tensor names after the layer's prefix."""

KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
"""The names of kinds of layers before Transformers 5, and their names now."""


def bamba_layers(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The DecoderSpec fields of a Bamba, from those that all families read."""
    count, attention = fields["num_layers"], config.get("attn_layer_indices") or ()
    mamba = mamba_of(config, fields, [layer not in attention for layer in range(count)])
    names = mamba_names(fields["names"], mamba)
    own = {
        "post_norm": ("pre_ff_layernorm.weight",),
        **{field: tuple(map(feed_forward, names.fields[field])) for field in ("gate_up", "down")},
        **{field: tuple(map(feed_forward, names.fields[field])) for field in ("gate_up_bias", "down_bias")},
    }
    names = replace(names, norm="model.final_layernorm.weight", fields={**names.fields, **own})
    biased, wide = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    return {**fields, "names": names, "recurrence": mamba, "qkv_bias": biased, "o_bias": biased, "mlp_bias": wide}


def feed_forward(name: str) -> str:
    """Bamba's name of a tensor of Llama's MLP."""
    return name.replace("mlp.", "feed_forward.")


def granite_layers(config: Mapping[str, Any], fields: Mapping[str, Any], experts: ExpertSpec | None) -> dict[str, Any]:
    """The DecoderSpec fields of a Granite 4 with these experts, from those that all families read.

    Each half of a layer adds r f(norm(x)) to the stream x, where r is residual_multiplier. Here the stream is x / r, to
    which the half adds f(norm(x)): an RMS norm of x / r is one of x if the number under its root is divided by r².

    Raises UnsupportedCheckpoint for a multiplier of the stream that is not positive.
    """
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["mamba"] * fields["num_layers"]
    kinds = [KINDS.get(kind, kind) for kind in kinds]
    if unknown := set(kinds) - {*KINDS.values()}:
        raise NotNative(f"layer type {min(unknown)!r} is neither full_attention nor linear_attention")
    if len(kinds) != fields["num_layers"]:
        raise UnsupportedCheckpoint(f"layer_types lists {len(kinds)} layers of {fields['num_layers']}")
    mamba = mamba_of(config, fields, [kind == "linear_attention" for kind in kinds])
    residual, logits = multiplier(config, "residual_multiplier"), multiplier(config, "logits_scaling")
    shared = fields["intermediate_size"]
    if experts is not None:
        shared = experts.shared_size
    biased = bool(config.get("attention_bias"))
    rotated = config.get("position_embedding_type") == "rope"
    return {
        **fields,
        "names": granite_names(mamba_names(fields["names"], mamba), fields["hidden_size"], shared),
        "recurrence": mamba,
        "experts": experts,
        "rope": fields["rope"] if rotated else Rope(1.0, "none"),
        "rms_eps": fields["rms_eps"] / residual**2,
        "stream_scale": multiplier(config, "embedding_multiplier") / residual,
        "query_scale": multiplier(config, "attention_multiplier"),
        "logit_divisor": logits,
        "qkv_bias": biased,
        "o_bias": biased,
    }


def multiplier(config: Mapping[str, Any], key: str) -> float:
    """A multiplier of Granite; 1 by default. Raises UnsupportedCheckpoint if it is not positive."""
    value = float(1.0 if config.get(key) is None else config[key])
    if value <= 0:
        raise UnsupportedCheckpoint(f"{key} is {value:g}; it must be above 0")
    return value


def granite_names(names: WeightNames, hidden: int, shared: int) -> WeightNames:
    """The tensor names of a Granite 4 whose MLP, or shared expert, has the width `shared`."""
    gate, up, stored = "shared_mlp.gate.weight", "shared_mlp.up.weight", ((2 * shared, hidden), (2, shared))
    parts = {
        name: Part("shared_mlp.input_linear.weight", *stored, at=(0, at, at + 1)) for at, name in enumerate((gate, up))
    }
    down = ("shared_mlp.output_linear.weight",)
    own = {"gate_up": (gate, up), "down": down, "shared_gate_up": (gate, up), "shared_down": down}
    return replace(names, fields={**names.fields, **own}, parts={**names.parts, **parts})


def mamba_names(names: WeightNames, mamba: MambaSpec) -> WeightNames:
    """Tensor names with those of Mamba-2 among them."""
    conv = {CONV: Part("mamba.conv1d.weight", (mamba.channels, 1, mamba.width))}
    return replace(names, fields={**names.fields, **FIELDS}, parts=conv)


def mamba_of(config: Mapping[str, Any], fields: Mapping[str, Any], layers: Sequence[bool]) -> MambaSpec:
    """The recurrent layers of Bamba or Granite 4; `layers` says which layers are recurrent.

    Raises NotNative for activations and models that have no kernels, and UnsupportedCheckpoint for sizes that do not
    fit each other.
    """
    if fields["activation"] != "silu":
        raise NotNative(f"hidden_act is {fields['activation']}, and recurrent layers have silu only")
    if all(layers):
        raise NotNative("none of its layers has attention")
    heads, groups, width = (int(config[f"mamba_{key}"]) for key in ("n_heads", "n_groups", "d_conv"))
    inner, given = int(config["mamba_expand"]) * fields["hidden_size"], config.get("mamba_d_head", "auto")
    head_dim = inner // heads if given == "auto" else int(given)
    if heads * head_dim != inner:
        raise UnsupportedCheckpoint(
            f"mamba_n_heads is {heads} and mamba_d_head is {head_dim}; their product must be mamba_expand times "
            f"hidden_size, {inner}"
        )
    if heads % groups:
        raise UnsupportedCheckpoint(f"mamba_n_heads is {heads}; it must be a multiple of mamba_n_groups, {groups}")
    if width < 2:
        raise NotNative(f"mamba_d_conv is {width}; it must be at least 2")
    least, most = map(number, config.get("time_step_limit") or (0.0, float("inf")))
    return MambaSpec(
        layers=tuple(layers),
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_size=int(config["mamba_d_state"]),
        width=width,
        eps=fields["rms_eps"],
        bias=bool(config.get("mamba_proj_bias")),
        conv_bias=bool(config["mamba_conv_bias"]),
        time_limits=(least, most),
    )


def number(value: Any) -> float:
    """A number of a config.json, where Transformers writes an infinite one as an object."""
    return float(value["__float__"] if isinstance(value, dict) else value)
