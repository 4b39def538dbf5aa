"""The model families that run natively, and how each reads its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.lm.kernels.linear.layers import ACTIVATIONS
from holdfast.lm.models.base import UnsupportedCheckpoint
from holdfast.lm.models.decoder_spec import DecoderSpec, WeightNames
from holdfast.lm.models.experts import gpt_oss_experts, mixtral_experts, qwen3_moe_experts
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
        "sinks": ("self_attn.sinks",),
        "post_norm": ("post_attention_layernorm.weight",),
        "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "gate_up_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
        "down": ("mlp.down_proj.weight",),
        "down_bias": ("mlp.down_proj.bias",),
    },
    ignored=(".rotary_emb.inv_freq",),
)


def shared(config: Mapping[str, Any]) -> dict[str, Any]:
    """The DecoderSpec fields that all families read from the same keys."""
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
    """Llama 1 to 3.3, and models with the same architecture."""
    biased = bool(config.get("attention_bias", False))
    return DecoderSpec(**shared(config), qkv_bias=biased, o_bias=biased, mlp_bias=bool(config.get("mlp_bias", False)))


def mistral(config: Mapping[str, Any]) -> DecoderSpec:
    """Mistral: the same sliding window in all layers, or none."""
    window = config.get("sliding_window", 4096)
    fields = shared({"num_key_value_heads": 8, **config})
    return DecoderSpec(**fields, windows=(window,) * fields["num_layers"])


def qwen2(config: Mapping[str, Any]) -> DecoderSpec:
    """Qwen2 and 2.5: biases on queries, keys and values."""
    fields = shared(config)
    return DecoderSpec(**fields, windows=windows_of(config, fields["num_layers"]), qkv_bias=True)


def qwen3(config: Mapping[str, Any]) -> DecoderSpec:
    """Qwen3: queries and keys normed within each head. The head size is 128 by default."""
    fields = shared({**config, "head_dim": config.get("head_dim") or 128})
    biased = bool(config.get("attention_bias", False))
    return DecoderSpec(
        **fields, windows=windows_of(config, fields["num_layers"]), qk_norm=True, qkv_bias=biased, o_bias=biased
    )


def mixtral(config: Mapping[str, Any]) -> DecoderSpec:
    """Mixtral: Mistral with experts in every layer."""
    fields = shared({"num_key_value_heads": 8, **config})
    windows = (config.get("sliding_window"),) * fields["num_layers"]
    return DecoderSpec(**fields, windows=windows, experts=mixtral_experts(config, fields["num_layers"]))


def qwen3_moe(config: Mapping[str, Any]) -> DecoderSpec:
    """Qwen3-MoE: Qwen3 with experts in some layers, all of them by default."""
    fields = shared({"num_key_value_heads": 4, "intermediate_size": 6144, **config})
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    biased = bool(config.get("attention_bias", False))
    return DecoderSpec(
        **fields,
        windows=(window,) * fields["num_layers"],
        qk_norm=True,
        qkv_bias=biased,
        o_bias=biased,
        experts=qwen3_moe_experts(config, fields["num_layers"]),
    )


def gpt_oss(config: Mapping[str, Any]) -> DecoderSpec:
    """GPT-OSS: attention sinks, windows in every second layer, biases, and experts with a clamped gate."""
    fields = shared({"num_key_value_heads": 8, "head_dim": 64, "rope_theta": 150_000.0, **config})
    count = fields["num_layers"]
    kinds = config.get("layer_types") or ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]
    given = {"sliding_window": 128, **config, "use_sliding_window": True, "layer_types": kinds}
    biased = bool(config.get("attention_bias", True))
    return DecoderSpec(
        **fields,
        windows=windows_of(given, count),
        qkv_bias=biased,
        o_bias=biased,
        sinks=True,
        experts=gpt_oss_experts(config, count),
    )


def windows_of(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer, from `layer_types`, or from `max_window_layers` in older configs."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    kinds = config.get("layer_types")
    if kinds is None:
        full = config.get("max_window_layers", 28)
        return tuple(window if index >= full else None for index in range(num_layers))
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise UnsupportedCheckpoint(f"layer type {min(unknown)!r} is not supported")
    if len(kinds) != num_layers:
        raise UnsupportedCheckpoint(f"layer_types lists {len(kinds)} layers of {num_layers}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


NATIVE: dict[str, Callable[[Mapping[str, Any]], DecoderSpec]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "MixtralForCausalLM": mixtral,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "GptOssForCausalLM": gpt_oss,
}
"""By architecture, the function that reads its config.json."""
