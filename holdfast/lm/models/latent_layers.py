"""Latent attention in checkpoints: how DeepSeek-V2, V3 and models like them describe it, and name its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.lm.models.checkpoint_errors import NotNative, UnsupportedCheckpoint
from holdfast.lm.models.decoder_spec import WeightNames
from holdfast.lm.models.latent import LatentSpec

DEFAULTS: dict[str, Any] = dict(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128)
"""Transformers' defaults for keys that all families of this module have in common."""

V2: dict[str, Any] = DEFAULTS | dict(
    hidden_size=4096,
    intermediate_size=11_008,
    moe_intermediate_size=1407,
    n_routed_experts=64,
    n_shared_experts=2,
    q_lora_rank=1536,
    max_position_embeddings=2048,
)
"""Transformers' defaults for a DeepSeek-V2."""

V3: dict[str, Any] = DEFAULTS | dict(
    intermediate_size=18_432,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    first_k_dense_replace=3,
    routed_scaling_factor=2.5,
    q_lora_rank=1536,
    max_position_embeddings=4096,
    num_nextn_predict_layers=1,
)
"""Transformers' defaults for a DeepSeek-V3."""

GLM: dict[str, Any] = DEFAULTS | dict(
    intermediate_size=10_240,
    moe_intermediate_size=1536,
    n_routed_experts=64,
    n_shared_experts=1,
    num_experts_per_tok=4,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    routed_scaling_factor=1.8,
    q_lora_rank=768,
    qk_nope_head_dim=192,
    v_head_dim=256,
    rms_norm_eps=1e-5,
    max_position_embeddings=202_752,
    num_nextn_predict_layers=1,
)
"""Transformers' defaults for a GLM-4.7-Flash."""

YOUTU: dict[str, Any] = DEFAULTS | dict(
    intermediate_size=6144, q_lora_rank=1536, max_position_embeddings=131_072, tie_word_embeddings=True
)
"""Transformers' defaults for a Youtu-LLM."""

MINICPM: dict[str, Any] = dict(
    kv_lora_rank=256,
    q_lora_rank=768,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    intermediate_size=6400,
    max_position_embeddings=32_768,
    initializer_range=0.1,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    rope_interleave=False,
    scale_emb=12,
    scale_depth=1.4,
    dim_model_base=256,
)
"""Transformers' defaults for a MiniCPM3."""

FIELDS = {
    "qkv": ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    "qkv_bias": ("self_attn.q_a_proj.bias", "self_attn.kv_a_proj_with_mqa.bias"),
    "query_norm": ("self_attn.q_a_layernorm.weight",),
    "query_up": ("self_attn.q_b_proj.weight",),
    "latent_norm": ("self_attn.kv_a_layernorm.weight",),
    "latent_up": ("self_attn.kv_b_proj.weight",),
    "shared_gate_up": ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    "shared_down": ("mlp.shared_experts.down_proj.weight",),
}
"""The tensor names of fields that differ from Llama's, after the layer's prefix."""

WHOLE_QUERIES = ("self_attn.q_proj.weight", FIELDS["qkv"][1])
"""The names of `qkv` where queries are computed from the stream."""


def latent_config(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A config with a family's defaults. Its number of KV heads is left out, because all heads share one latent."""
    return {**defaults, **config, "num_key_value_heads": None}


def latent_layers(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The DecoderSpec fields of a model with latent attention without its experts, from those that all families read.

    Raises NotNative for biases of queries that are computed from the stream, and of an MLP.
    """
    latent = latent_of(config)
    if config.get("mlp_bias"):
        raise NotNative("mlp_bias is on, and an MLP after latent attention has no biases here")
    names: WeightNames = fields["names"]
    given = {**names.fields, **FIELDS}
    if not latent.query_rank:
        given["qkv"] = WHOLE_QUERIES
    first = fields["num_layers"]
    unread = range(first, first + int(config.get("num_nextn_predict_layers") or 0))
    names = replace(names, fields=given, others=tuple(f"model.layers.{layer}." for layer in unread))
    return {
        **fields,
        "names": names,
        "latent": latent,
        "num_kv_heads": 1,
        "head_dim": latent.cached,
        "query_scale": query_scale(config, latent.query),
        "rope": replace(fields["rope"], interleaved=bool(config.get("rope_interleave", True))),
    }


def minicpm_layers(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The DecoderSpec fields of a MiniCPM3, from those that all families read.

    Each half of a layer adds r f(norm(x)) to the stream x, where r is scale_depth over the root of the number of
    layers. Here the stream is x / r, as for a Granite 4 (`mamba_layers.granite_layers`).
    """
    hidden, layers = fields["hidden_size"], fields["num_layers"]
    values = config.get("v_head_dim") or hidden // fields["num_heads"]
    depth, base = config.get("scale_depth") or math.sqrt(layers), config.get("dim_model_base") or hidden
    share = _positive("scale_depth", depth) / math.sqrt(layers)
    found = latent_layers({**config, "v_head_dim": values}, fields)
    return found | {
        "rms_eps": fields["rms_eps"] / share**2,
        "embedding_scale": _positive("scale_emb", config["scale_emb"]),
        "stream_scale": 1 / share,
        "logit_divisor": hidden / _positive("dim_model_base", base),
    }


def _positive(key: str, value: Any) -> float:
    """A number of the config. Raises UnsupportedCheckpoint if it is not positive."""
    if value <= 0:
        raise UnsupportedCheckpoint(f"{key} is {value:g}; it must be above 0")
    return float(value)


def latent_of(config: Mapping[str, Any]) -> LatentSpec:
    """The sizes of latent attention. Raises UnsupportedCheckpoint naming a size below 1, or an odd rotated one."""
    keys = dict(rank="kv_lora_rank", rotated="qk_rope_head_dim", plain="qk_nope_head_dim", value="v_head_dim")
    sizes = {name: int(config[key]) for name, key in keys.items()}
    for name, key in keys.items():
        if sizes[name] < 1:
            raise UnsupportedCheckpoint(f"{key} is {sizes[name]}; it must be at least 1")
    if sizes["rotated"] % 2:
        raise UnsupportedCheckpoint(f"qk_rope_head_dim is {sizes['rotated']}; it must be even, as pairs are rotated")
    biased, query_rank = bool(config.get("attention_bias", False)), int(config.get("q_lora_rank") or 0)
    if biased and not query_rank:
        raise NotNative("attention_bias is on without q_lora_rank, and such queries have no bias")
    return LatentSpec(**sizes, query_rank=query_rank, biased=biased)


def query_scale(config: Mapping[str, Any], width: int) -> float:
    """The factor on scores of queries of this width. YaRN's temperature is in it, as far as `mscale_all_dim` says."""
    given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    weight, factor = float(given.get("mscale_all_dim") or 0.0), float(given.get("factor") or 1.0)
    if given.get("rope_type", given.get("type", "default")) == "default" or not weight or factor <= 1:
        return float(width**-0.5)
    return float(width**-0.5 * (0.1 * weight * math.log(factor) + 1.0) ** 2)
