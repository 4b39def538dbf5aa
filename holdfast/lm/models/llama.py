"""Llama and Mistral as the decoder's plainest form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.lm.kernels.linear.layers import ACTIVATIONS
from holdfast.lm.models.base import UnsupportedCheckpoint
from holdfast.lm.models.decoder import DecoderSpec, WeightNames
from holdfast.lm.models.rope import rope_of

NAMES = WeightNames(
    embedding="model.embed_tokens.weight",
    norm="model.norm.weight",
    lm_head="lm_head.weight",
    layer="model.layers.{}.",
    fields={
        "input_norm": ("input_layernorm.weight",),
        "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        "q_norm": ("self_attn.q_norm.weight",),
        "k_norm": ("self_attn.k_norm.weight",),
        "o": ("self_attn.o_proj.weight",),
        "o_bias": ("self_attn.o_proj.bias",),
        "post_norm": ("post_attention_layernorm.weight",),
        "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "gate_up_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
        "down": ("mlp.down_proj.weight",),
        "down_bias": ("mlp.down_proj.bias",),
    },
    ignored=(".rotary_emb.inv_freq",),
)


def shared(config: Mapping[str, Any]) -> dict[str, Any]:
    """The DecoderSpec fields that Llama and its relatives read from the same keys."""
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        fields = {
            "architecture": config["architectures"][0],
            "vocab_size": int(config["vocab_size"]),
            "hidden_size": hidden,
            "intermediate_size": int(config["intermediate_size"]),
            "num_layers": int(config["num_hidden_layers"]),
            "max_positions": int(config["max_position_embeddings"]),
        }
    except KeyError as missing:
        raise UnsupportedCheckpoint(f"config.json has no {missing.args[0]!r}") from None
    activation = config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise UnsupportedCheckpoint(f"hidden_act {activation!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise UnsupportedCheckpoint(f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")
    return fields | {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": int(config.get("head_dim") or hidden // heads),
        "rms_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope": rope_of(config),
        "names": NAMES,
        "activation": activation,
        "tied": bool(config.get("tie_word_embeddings", False)),
        "init_std": float(config.get("initializer_range", 0.02)),
    }


def llama(config: Mapping[str, Any]) -> DecoderSpec:
    """Llama 1 to 3.3, and what copies it."""
    biased = bool(config.get("attention_bias", False))
    return DecoderSpec(**shared(config), qkv_bias=biased, o_bias=biased, mlp_bias=bool(config.get("mlp_bias", False)))


def mistral(config: Mapping[str, Any]) -> DecoderSpec:
    """Mistral: a window in all layers, or in none."""
    window = config.get("sliding_window", 4096)
    fields = shared({"num_key_value_heads": 8, **config})
    return DecoderSpec(**fields, windows=(window,) * fields["num_layers"])
