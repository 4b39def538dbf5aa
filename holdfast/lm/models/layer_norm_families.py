"""The native families with layer norms and an MLP without a gate: OPT, GPT-2 and Falcon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.lm.kernels.linear.layers import ACTIVATIONS
from holdfast.lm.models.checkpoint_errors import NotNative, UnsupportedCheckpoint
from holdfast.lm.models.decoder_spec import DecoderSpec, Part, WeightNames
from holdfast.lm.models.rope import UNROTATED, rope_of


def sizes(config: Mapping[str, Any], **keys: str) -> dict[str, Any]:
    """The DecoderSpec fields that these families share. `keys` maps common keys to this config's names for them."""

    def size(key: str) -> int:
        name = keys.get(key, key)
        if config.get(name) is None:
            raise UnsupportedCheckpoint(f"config.json has no {name!r}")
        return int(config[name])

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    if hidden % heads:
        raise UnsupportedCheckpoint(f"hidden_size is {hidden}; it must be a multiple of the {heads} attention heads")
    return {
        "architecture": config["architectures"][0],
        "vocab_size": size("vocab_size"),
        "hidden_size": hidden,
        "num_layers": size("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "max_positions": size("max_position_embeddings"),
        "rms_eps": float(config.get("layer_norm_epsilon", 1e-5)),
        "rope": UNROTATED,
        "tied": bool(config.get("tie_word_embeddings", True)),
        "init_std": float(config.get("initializer_range", config.get("init_std", 0.02))),
        "layer_norm": True,
        "gated": False,
    }


def activation_of(config: Mapping[str, Any], key: str, default: str) -> str:
    """The activation that a key of the config names. Raises NotNative for one that is not in ACTIVATIONS."""
    name = str(config.get(key) or default)
    if name not in ACTIVATIONS:
        raise NotNative(f"{key} {name!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    return name


def norm(name: str) -> tuple[str, str]:
    """The names of a layer norm's two tensors."""
    return f"{name}.weight", f"{name}.bias"


OPT_NAMES = WeightNames(
    base="model.",
    embedding="model.decoder.embed_tokens.weight",
    positions="model.decoder.embed_positions.weight",
    project_in="model.decoder.project_in.weight",
    project_out="model.decoder.project_out.weight",
    norm="model.decoder.final_layer_norm.weight",
    lm_head="lm_head.weight",
    layer="model.decoder.layers.{}.",
    fields={
        "input_norm": norm("self_attn_layer_norm"),
        "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        "o": ("self_attn.out_proj.weight",),
        "o_bias": ("self_attn.out_proj.bias",),
        "post_norm": norm("final_layer_norm"),
        "gate_up": ("fc1.weight",),
        "gate_up_bias": ("fc1.bias",),
        "down": ("fc2.weight",),
        "down_bias": ("fc2.bias",),
    },
)
OPT_NORMS_AFTER = {"post_norm": norm("self_attn_layer_norm"), "end_norm": norm("final_layer_norm")}


def opt(config: Mapping[str, Any]) -> DecoderSpec:
    """OPT: learned positions from row 2 on. OPT-350m has narrow embeddings, and its norms come after each half."""
    fields = sizes({"max_position_embeddings": 2048, **config})
    if not config.get("layer_norm_elementwise_affine", True):
        raise NotNative("layer_norm_elementwise_affine is off, and the native decoder's norms have weights")
    hidden, width = fields["hidden_size"], int(config.get("word_embed_proj_dim") or fields["hidden_size"])
    before, biased = bool(config.get("do_layer_norm_before", True)), bool(config.get("enable_bias", True))
    names = OPT_NAMES
    if not before:
        kept = {field: parts for field, parts in names.fields.items() if field != "input_norm"}
        names = replace(names, fields=kept | OPT_NORMS_AFTER)
    return DecoderSpec(
        **fields,
        names=names,
        intermediate_size=int(config.get("ffn_dim") or 4 * hidden),
        activation=activation_of(config, "activation_function", "relu"),
        norms=("input_norm", "post_norm") if before else ("post_norm", "end_norm"),
        norms_stream=not before,
        final_norm=before and not config.get("_remove_final_layer_norm", False),
        embedding_width=width if width != hidden else 0,
        position_rows=fields["max_positions"] + 2,
        position_offset=2,
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=biased,
    )


def gpt2(config: Mapping[str, Any]) -> DecoderSpec:
    """GPT-2: learned positions, and weights stored as [inputs, outputs]."""
    for key, usual in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if bool(config.get(key, usual)) != usual:
            raise NotNative(f"{key} is {config[key]}, and the native decoder scales all layers alike")
    if config.get("add_cross_attention"):
        raise NotNative("add_cross_attention is on, and only causal decoders are served")
    fields = sizes(
        {"n_positions": 1024, **config},
        hidden_size="n_embd",
        num_attention_heads="n_head",
        num_hidden_layers="n_layer",
        max_position_embeddings="n_positions",
    )
    hidden, inner = fields["hidden_size"], int(config.get("n_inner") or 4 * fields["hidden_size"])
    parts = {
        "attn.c_proj.weight": Part("attn.c_proj.weight", (hidden, hidden), transposed=True),
        "mlp.c_fc.weight": Part("mlp.c_fc.weight", (hidden, inner), transposed=True),
        "mlp.c_proj.weight": Part("mlp.c_proj.weight", (inner, hidden), transposed=True),
    }
    thirds = ("attn.query", "attn.key", "attn.value")
    for index, third in enumerate(thirds):
        cut: dict[str, Any] = dict(rows=(3, hidden), at=(0, index, index + 1))
        parts[f"{third}.weight"] = Part("attn.c_attn.weight", (hidden, 3 * hidden), transposed=True, **cut)
        parts[f"{third}.bias"] = Part("attn.c_attn.bias", (3 * hidden,), **cut)
    names = WeightNames(
        base="transformer.",
        embedding="transformer.wte.weight",
        positions="transformer.wpe.weight",
        norm="transformer.ln_f.weight",
        lm_head="lm_head.weight",
        layer="transformer.h.{}.",
        fields={
            "input_norm": norm("ln_1"),
            "qkv": tuple(f"{third}.weight" for third in thirds),
            "qkv_bias": tuple(f"{third}.bias" for third in thirds),
            "o": ("attn.c_proj.weight",),
            "o_bias": ("attn.c_proj.bias",),
            "post_norm": norm("ln_2"),
            "gate_up": ("mlp.c_fc.weight",),
            "gate_up_bias": ("mlp.c_fc.bias",),
            "down": ("mlp.c_proj.weight",),
            "down_bias": ("mlp.c_proj.bias",),
        },
        ignored=(".attn.bias", ".attn.masked_bias"),
        parts=parts,
    )
    return DecoderSpec(
        **fields,
        names=names,
        intermediate_size=inner,
        activation=activation_of(config, "activation_function", "gelu_new"),
        position_rows=fields["max_positions"],
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )


def falcon(config: Mapping[str, Any]) -> DecoderSpec:
    """Falcon with rotary positions: attention and MLP in parallel; queries, keys and values in one tensor."""
    if config.get("alibi", False):
        raise NotNative("its attention adds a bias by distance (alibi), which the paged kernels do not compute")
    grouped = bool(config.get("new_decoder_architecture", False))
    parallel, biased = bool(config.get("parallel_attn", True)), bool(config.get("bias", False))
    if grouped and not parallel:
        raise NotNative("parallel_attn is off in the new decoder architecture, which the native decoder does not know")
    fields = sizes({"max_position_embeddings": 2048, **config})
    hidden, heads, dim = fields["hidden_size"], fields["num_heads"], fields["head_dim"]
    inner = int(config.get("ffn_hidden_size") or 4 * hidden)
    kv_heads = heads
    if grouped:
        kv_heads = int(config.get("num_kv_heads") or heads)
    elif config.get("multi_query", True):
        kv_heads = 1
    if heads % kv_heads:
        raise UnsupportedCheckpoint(f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")
    group = heads // kv_heads
    rows: tuple[int, ...] = (kv_heads, group + 2, dim)  # the query heads of a KV head, then its key, then its value
    at = {"query": (1, 0, group), "key": (1, group, group + 1), "value": (1, group + 1, group + 2)}
    total = kv_heads * (group + 2) * dim
    stored = "self_attention.query_key_value"
    parts = {
        f"self_attention.{name}.{kind}": Part(f"{stored}.{kind}", shape, rows=rows, at=at[name])
        for name in at
        for kind, shape in (("weight", (total, hidden)), ("bias", (total,)))
    }
    norms = {"input_norm": norm("input_layernorm")}
    if not parallel:
        norms["post_norm"] = norm("post_attention_layernorm")
    elif (config.get("num_ln_in_parallel_attn") or 2) == 2 and grouped:
        norms = {"input_norm": norm("ln_attn"), "post_norm": norm("ln_mlp")}
    names = WeightNames(
        base="transformer.",
        embedding="transformer.word_embeddings.weight",
        norm="transformer.ln_f.weight",
        lm_head="lm_head.weight",
        layer="transformer.h.{}.",
        fields={
            **norms,
            "qkv": tuple(f"self_attention.{name}.weight" for name in at),
            "qkv_bias": tuple(f"self_attention.{name}.bias" for name in at),
            "o": ("self_attention.dense.weight",),
            "o_bias": ("self_attention.dense.bias",),
            "gate_up": ("mlp.dense_h_to_4h.weight",),
            "gate_up_bias": ("mlp.dense_h_to_4h.bias",),
            "down": ("mlp.dense_4h_to_h.weight",),
            "down_bias": ("mlp.dense_4h_to_h.bias",),
        },
        ignored=(".rotary_emb.inv_freq", ".self_attention.rotary.inv_freq"),
        parts=parts,
    )
    fields |= {"num_kv_heads": kv_heads, "rope": rope_of({"max_position_embeddings": 2048, **config})}
    return DecoderSpec(
        **fields,
        names=names,
        intermediate_size=inner,
        activation=activation_of(config, "activation", "gelu"),
        norms=tuple(norms),
        parallel=parallel,
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=biased,
    )
