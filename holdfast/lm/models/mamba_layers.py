"""Mamba-2 in checkpoints: how Bamba, Granite 4, Falcon-H1 and Nemotron-H describe it, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.lm.models.checkpoint_errors import NotNative, UnsupportedCheckpoint
from holdfast.lm.models.decoder_spec import ExpertSpec, Part, WeightNames
from holdfast.lm.models.mamba import MambaSpec
from holdfast.lm.models.rope import Rope

DEFAULTS: dict[str, Any] = dict(
    mamba_n_heads=128, mamba_n_groups=1, mamba_d_state=256, mamba_d_conv=4, mamba_expand=2, mamba_conv_bias=True
)
"""Transformers' defaults for keys that Bamba, Granite 4 and Falcon-H1 have in common."""

TENSORS = {
    "mixer_in": "in_proj.weight",
    "mixer_in_bias": "in_proj.bias",
    "conv": "conv.weight",  # a checkpoint stores it as conv1d.weight, with a dimension of 1 in the middle
    "conv_bias": "conv1d.bias",
    "decay": "A_log",
    "time_bias": "dt_bias",
    "skip": "D",
    "gain": "norm.weight",
    "mixer_out": "out_proj.weight",
    "mixer_out_bias": "out_proj.bias",
}
"""For each field of a recurrent layer, the tensor name after the prefix of its mixer."""

KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
"""The names of kinds of layers before Transformers 5, and their names now."""


def bamba_layers(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The DecoderSpec fields of a Bamba, from those that all families read."""
    count, attention = fields["num_layers"], config.get("attn_layer_indices") or ()
    mamba = mamba_of(config, fields, with_attention([layer not in attention for layer in range(count)]))
    names = bamba_names(mamba_names(fields["names"], mamba))
    biased, wide = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    return {**fields, "names": names, "recurrence": mamba, "qkv_bias": biased, "o_bias": biased, "mlp_bias": wide}


def bamba_names(names: WeightNames) -> WeightNames:
    """The tensor names of a Bamba or Falcon-H1, from those of its recurrent layers and Llama's."""
    mlp = ("gate_up", "gate_up_bias", "down", "down_bias")
    own = {field: tuple(map(feed_forward, names.fields[field])) for field in mlp}
    own["post_norm"] = ("pre_ff_layernorm.weight",)
    return replace(names, norm="model.final_layernorm.weight", fields={**names.fields, **own})


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
    mamba = mamba_of(config, fields, with_attention([kind == "linear_attention" for kind in kinds]))
    residual, logits = multiplier(config, "residual_multiplier"), multiplier(config, "logits_scaling")
    shared = fields["intermediate_size"]
    if experts is not None:
        shared = experts.shared_size
    biased = bool(config.get("attention_bias"))
    rotated = config.get("position_embedding_type") == "rope"
    names = mamba_names(fields["names"], mamba)
    if config.get("separate_tensors"):
        names = replace(names, fields={**names.fields, **SHARED_EXPERT})
    else:
        names = granite_names(names, fields["hidden_size"], shared)
    return {
        **fields,
        "names": names,
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
    """A multiplier of Granite or Falcon-H1; 1 by default. Raises UnsupportedCheckpoint if it is not positive."""
    value = float(1.0 if config.get(key) is None else config[key])
    if value <= 0:
        raise UnsupportedCheckpoint(f"{key} is {value:g}; it must be above 0")
    return value


SHARED_EXPERT = {
    "shared_gate_up": ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
    "shared_down": ("mlp.shared_expert.down_proj.weight",),
}
"""The tensor names of a shared expert whose gate and up are stored separately."""


def granite_names(names: WeightNames, hidden: int, shared: int) -> WeightNames:
    """The tensor names of a Granite 4 whose MLP, or shared expert, has the width `shared`."""
    gate, up, stored = "shared_mlp.gate.weight", "shared_mlp.up.weight", ((2 * shared, hidden), (2, shared))
    parts = {
        name: Part("shared_mlp.input_linear.weight", *stored, at=(0, at, at + 1)) for at, name in enumerate((gate, up))
    }
    down = ("shared_mlp.output_linear.weight",)
    own = {"gate_up": (gate, up), "down": down, "shared_gate_up": (gate, up), "shared_down": down}
    return replace(names, fields={**names.fields, **own}, parts={**names.parts, **parts})


def with_attention(recurrent: Sequence[bool]) -> Sequence[bool]:
    """For each layer, whether it is recurrent. Raises NotNative if all are, and none has attention."""
    if all(recurrent):
        raise NotNative("none of its layers has attention")
    return recurrent


def mamba_names(names: WeightNames, mamba: MambaSpec, prefix: str = "mamba.") -> WeightNames:
    """Tensor names with those of Mamba-2 among them. `prefix` is that of a layer's mixer."""
    own = {field: (prefix + name,) for field, name in TENSORS.items()}
    conv = Part(f"{prefix}conv1d.weight", (mamba.channels, 1, mamba.width))
    return replace(names, fields={**names.fields, **own}, parts={own["conv"][0]: conv})


def mamba_of(
    config: Mapping[str, Any],
    fields: Mapping[str, Any],
    layers: Sequence[bool],
    *,
    inner: int | None = None,
    **options: Any,
) -> MambaSpec:
    """The recurrent layers of Bamba, Granite 4 or Falcon-H1; `layers` says which layers are recurrent.

    `inner` is the number of all heads' elements; None: mamba_expand times hidden_size. `options` are other fields.

    Raises NotNative and UnsupportedCheckpoint as `checked` does.
    """
    if fields["activation"] != "silu":
        raise NotNative(f"hidden_act is {fields['activation']}, and recurrent layers have silu only")
    heads, given = int(config["mamba_n_heads"]), config.get("mamba_d_head", "auto")
    inner = int(config["mamba_expand"]) * fields["hidden_size"] if inner is None else inner
    head_dim = inner // heads if given == "auto" else int(given)
    if heads * head_dim != inner:
        raise UnsupportedCheckpoint(
            f"mamba_n_heads is {heads} and mamba_d_head is {head_dim}; their product must be the width of "
            f"Mamba-2, {inner}"
        )
    least, most = map(number, config.get("time_step_limit") or (0.0, float("inf")))
    return checked(
        layers=tuple(layers),
        heads=heads,
        head_dim=head_dim,
        groups=int(config["mamba_n_groups"]),
        state_size=int(config["mamba_d_state"]),
        width=int(config["mamba_d_conv"]),
        eps=fields["rms_eps"],
        bias=bool(config.get("mamba_proj_bias")),
        conv_bias=bool(config["mamba_conv_bias"]),
        time_limits=(least, most),
        **options,
    )


def checked(**fields: Any) -> MambaSpec:
    """A MambaSpec of these fields.

    Raises NotNative for a convolution without a state, and UnsupportedCheckpoint for groups that do not divide heads.
    """
    mamba = MambaSpec(**fields)
    if mamba.heads % mamba.groups:
        raise UnsupportedCheckpoint(
            f"Mamba-2 has {mamba.heads} heads; they must be a multiple of its {mamba.groups} groups"
        )
    if mamba.width < 2:
        raise NotNative(f"the width of its convolutions is {mamba.width}; it must be at least 2")
    return mamba


def falcon_layers(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The DecoderSpec fields of a Falcon-H1, from those that all families read.

    Its multipliers of what attention reads are folded into the scale of scores and the factor on attention's result.

    Raises NotNative for biases of projections, for a norm before the gate, and for other activations.
    """
    for key in ("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias"):
        if config.get(key):
            raise NotNative(f"{key} is on")
    normed = bool(config.get("mamba_rms_norm"))
    if normed and config.get("mamba_norm_before_gate", True):
        raise NotNative("mamba_norm_before_gate is on")
    if fields["activation"] != "silu":
        raise NotNative(f"hidden_act is {fields['activation']}, and recurrent layers have silu only")
    read, attended = multiplier(config, "attention_in_multiplier"), multiplier(config, "attention_out_multiplier")
    scanned, of_scan = multiplier(config, "ssm_in_multiplier"), config.get("ssm_multipliers") or (1.0,) * 5
    mamba = mamba_of(
        config,
        fields,
        (True,) * fields["num_layers"],
        inner=config["mamba_d_ssm"],
        normed=normed,
        multipliers=tuple(scanned * float(each) for each in of_scan),
    )
    of_gate, of_product = config.get("mlp_multipliers") or (1.0, 1.0)
    names = bamba_names(mamba_names(fields["names"], mamba))
    return {
        **fields,
        "names": names,
        "recurrence": mamba,
        "parallel_factors": (read * attended, multiplier(config, "ssm_out_multiplier")),
        "mlp_factors": (float(of_gate), float(of_product)),
        "query_scale": fields["head_dim"] ** -0.5 * read**2 * multiplier(config, "key_multiplier"),
        "stream_scale": multiplier(config, "embedding_multiplier"),
        "logit_divisor": 1 / multiplier(config, "lm_head_multiplier"),
    }


NEMOTRON_DEFAULTS: dict[str, Any] = dict(
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=4096,
    intermediate_size=21_504,
    layer_norm_epsilon=1e-5,
    mlp_hidden_act="relu2",
    mamba_hidden_act="silu",
    mamba_num_heads=128,
    mamba_head_dim=64,
    ssm_state_size=128,
    n_groups=8,
    conv_kernel=4,
    use_conv_bias=True,
    time_step_min=0.001,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=7688,
    moe_shared_expert_intermediate_size=7688,
    norm_topk_prob=True,
    routed_scaling_factor=1.0,
)
"""Transformers' defaults of Nemotron-H."""

OLD_KEYS = dict(
    mamba_n_groups="n_groups", mamba_d_conv="conv_kernel", mamba_dt_min="time_step_min", mamba_conv_bias="use_conv_bias"
)
"""Other keys for the same values of Nemotron-H. They take precedence, as in Transformers."""

LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
"""The letters of Nemotron-H's hybrid_override_pattern."""


def nemotron_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A Nemotron-H's config.json with Llama's keys, and Transformers' defaults for those that it lacks."""
    old = {new: config[key] for key, new in OLD_KEYS.items() if key in config}
    kinds = config.get("layers_block_type") or config.get("layer_types")
    if kinds is None and (pattern := config.get("hybrid_override_pattern")):
        kinds = [LETTERS.get(letter, letter) for letter in pattern]
    kinds = [KINDS.get(kind, kind) for kind in kinds or ("linear_attention", "moe", "full_attention", "mlp")]
    config = {**NEMOTRON_DEFAULTS, **config, **old, "layer_types": kinds, "num_hidden_layers": len(kinds)}
    # Attention has no rotation, and the head is never tied.
    plain = {"rope_parameters": None, "rope_scaling": None, "tie_word_embeddings": False, "hidden_act": "silu"}
    return {**config, **plain, "rms_norm_eps": config["layer_norm_epsilon"]}


def nemotron_layers(config: Mapping[str, Any], fields: Mapping[str, Any], experts: ExpertSpec | None) -> dict[str, Any]:
    """The DecoderSpec fields of a Nemotron-H with these experts, from those that all families read.

    Raises NotNative for experts with biases or of a latent, for other activations, and for a model without attention or
    without Mamba-2.
    """
    kinds = config["layer_types"]
    if experts is not None and config.get("mlp_bias"):
        raise NotNative("mlp_bias is on, and experts have no biases here")
    if experts is not None and config.get("moe_latent_size") is not None:
        raise NotNative(f"moe_latent_size is {config['moe_latent_size']}, and experts read the stream itself here")
    if unknown := {*kinds} - {*LETTERS.values()}:
        raise UnsupportedCheckpoint(f"layer type {min(unknown)!r} is not supported")
    for kind, name in (("full_attention", "attention"), ("linear_attention", "Mamba-2")):
        if kind not in kinds:
            raise NotNative(f"none of its layers has {name}")
    for key, known in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if config[key] != known:
            raise NotNative(f"{key} is {config[key]}, and such layers have {known} only")
    mamba = checked(
        layers=tuple(kind == "linear_attention" for kind in kinds),
        heads=int(config["mamba_num_heads"]),
        head_dim=int(config["mamba_head_dim"]),
        groups=int(config["n_groups"]),
        state_size=int(config["ssm_state_size"]),
        width=int(config["conv_kernel"]),
        eps=fields["rms_eps"],
        bias=bool(config.get("use_bias")),
        conv_bias=bool(config["use_conv_bias"]),
        # Transformers limits the time steps of prompts, but not those of single tokens. Here the limit holds for all:
        # results must not depend on how a sequence is cut into steps.
        time_limits=(float(config["time_step_min"]), float("inf")),
    )
    return {
        **fields,
        "names": nemotron_names(mamba_names(fields["names"], mamba, "mixer.")),
        "recurrence": mamba,
        "mlps": tuple(kind in ("mlp", "moe") for kind in kinds),
        "experts": experts,
        "gated": False,
        "activation": "relu2",
        "mlp_bias": bool(config.get("mlp_bias")),
        "norms": ("input_norm",),
        "rope": Rope(1.0, "none"),
    }


def nemotron_names(names: WeightNames) -> WeightNames:
    """The tensor names of a Nemotron-H, from those of its recurrent layers and Llama's."""
    own = {field: tuple(name.replace("self_attn", "mixer") for name in names.fields[field]) for field in ("qkv", "o")}
    own |= {"input_norm": ("norm.weight",), "mlp_in": ("mixer.up_proj.weight",), "mlp_out": ("mixer.down_proj.weight",)}
    own |= {"mlp_in_bias": ("mixer.up_proj.bias",), "mlp_out_bias": ("mixer.down_proj.bias",)}
    own["shared_gate_up"] = ("mixer.shared_experts.up_proj.weight",)
    own["shared_down"] = ("mixer.shared_experts.down_proj.weight",)
    return replace(
        names,
        embedding="model.embeddings.weight",
        norm="model.norm_f.weight",
        fields={**names.fields, **own},
        base="model.",
        bases=("backbone.",),
        others=("mtp.",),
    )


def number(value: Any) -> float:
    """A number of a config.json, where Transformers writes an infinite one as an object."""
    return float(value["__float__"] if isinstance(value, dict) else value)
