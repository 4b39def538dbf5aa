"""The config.json of hybrid models in GGUF files. The tensors of a layer say what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.lm.models.checkpoint_errors import UnsupportedCheckpoint
from holdfast.lm.models.gguf_values import Config, Metadata

RECURRENT = "ssm_a"
"""The name of a tensor that all recurrent layers have, and no others."""
SEPARATE = "separate_tensors"
"""The key of a config.json that says that tensors are stored separately which the family's own checkpoints join."""


def _kinds(metadata: Metadata) -> list[str]:
    """The kind of each layer. Layers with a state are recurrent, and all others have attention."""
    kinds = metadata.layers_with(RECURRENT)
    return ["linear_attention" if recurrent else "full_attention" for recurrent in kinds]


def _delta(metadata: Metadata, architecture: str) -> Config:
    """Entries that models with gated delta nets share."""
    number = metadata.number
    heads, inner = number("ssm.time_step_rank"), number("ssm.inner_size")
    head_dim = number("attention.key_length", number("embedding_length") // number("attention.head_count"))
    return {
        "architectures": [architecture],
        "layer_types": _kinds(metadata),
        "partial_rotary_factor": number("rope.dimension_count", head_dim) / head_dim,
        "linear_num_key_heads": number("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": number("ssm.state_size"),
        "linear_value_head_dim": _share(inner, heads, "ssm.inner_size", "ssm.time_step_rank"),
        "linear_conv_kernel_dim": number("ssm.conv_kernel"),
        SEPARATE: True,
    }


def _share(whole: int, parts: int, *keys: str) -> int:
    """The size of each of `parts` equal parts. Raises UnsupportedCheckpoint naming the keys if there are none."""
    if parts < 1 or whole % parts:
        raise UnsupportedCheckpoint(f"GGUF key {keys[0]} is {whole}; it must be a multiple of {keys[1]}, {parts}")
    return whole // parts


def _mixture(metadata: Metadata) -> Config:
    """The entries of experts besides a shared one, in Qwen's families."""
    return {
        "num_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.number("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _qwen3_5(metadata: Metadata) -> Config:
    return _delta(metadata, "Qwen3_5ForCausalLM")


def _qwen3_5_moe(metadata: Metadata) -> Config:
    return {**_delta(metadata, "Qwen3_5MoeForCausalLM"), **_mixture(metadata)}


def _qwen3_next(metadata: Metadata) -> Config:
    return {**_delta(metadata, "Qwen3NextForCausalLM"), **_mixture(metadata)}


def _mamba(metadata: Metadata) -> Config:
    """Entries that Granite 4, Bamba and Falcon-H1 share. They have Mamba-2."""
    number = metadata.number
    heads, inner = number("ssm.time_step_rank"), number("ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": _share(inner, heads, "ssm.inner_size", "ssm.time_step_rank"),
        "mamba_n_groups": number("ssm.group_count"),
        "mamba_d_state": number("ssm.state_size"),
        "mamba_d_conv": number("ssm.conv_kernel"),
        "mamba_conv_bias": metadata.any_has("ssm_conv1d.bias"),
        "mamba_proj_bias": metadata.any_has("ssm_in.bias"),
        "attention_bias": metadata.any_has("attn_q.bias"),
        "mlp_bias": metadata.any_has("ffn_up.bias"),
    }


def _granite_hybrid(metadata: Metadata) -> Config:
    """Granite 4, or Bamba, which has the same architecture in GGUF: it rotates a part of each head."""
    hidden = metadata.number("embedding_length")
    expand = _share(metadata.number("ssm.inner_size"), hidden, "ssm.inner_size", "embedding_length")
    shared, rotated = {**_mamba(metadata), "mamba_expand": expand}, bool(metadata.get("rope.scaling.finetuned"))
    if rotated and not metadata.get("residual_scale"):
        attention = [layer for layer, kind in enumerate(_kinds(metadata)) if kind == "full_attention"]
        return {**shared, "architectures": ["BambaForCausalLM"], "attn_layer_indices": attention}
    experts = metadata.number("expert_count", 0)
    width = "expert_shared_feed_forward_length" if experts else "feed_forward_length"
    return {
        **shared,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": _kinds(metadata),
        "position_embedding_type": "rope" if rotated else None,
        "num_local_experts": experts,
        "num_experts_per_tok": metadata.number("expert_used_count", 0),
        "shared_intermediate_size": _shared_width(metadata) or metadata.nonzero(width, None),
        "attention_multiplier": metadata.get("attention.scale"),
        "embedding_multiplier": metadata.get("embedding_scale"),
        "residual_multiplier": metadata.get("residual_scale"),
        "logits_scaling": metadata.get("logit_scale"),
        SEPARATE: True,
    }


def _shared_width(metadata: Metadata) -> int:
    """Width of the MLP, or of the shared expert, of the first layer; 0: it has neither."""
    found = (metadata.shapes.get(f"blk.0.{name}.weight") for name in ("ffn_up_shexp", "ffn_up"))
    return next((shape[0] for shape in found if shape is not None), 0)


def _falcon_h1(metadata: Metadata) -> Config:
    """Falcon-H1. Its multipliers are in the weights."""
    return {
        **_mamba(metadata),
        "architectures": ["FalconH1ForCausalLM"],
        "mamba_d_ssm": metadata.number("ssm.inner_size"),
        "mamba_rms_norm": metadata.any_has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def _nemotron_h(metadata: Metadata) -> Config:
    """Nemotron-H. Each layer is Mamba-2, attention, experts, or an MLP."""
    number = metadata.number
    heads, inner = number("ssm.time_step_rank"), number("ssm.inner_size")
    tensors = {RECURRENT: "linear_attention", "attn_q.weight": "full_attention", "ffn_gate_inp.weight": "moe"}
    kinds = ["mlp"] * len(metadata.layers_with(RECURRENT))
    for tensor, kind in tensors.items():
        kinds = [kind if has else own for own, has in zip(kinds, metadata.layers_with(tensor), strict=True)]
    found: dict[str, Any] = {
        "architectures": ["NemotronHForCausalLM"],
        "layers_block_type": kinds,
        "mamba_num_heads": heads,
        "mamba_head_dim": _share(inner, heads, "ssm.inner_size", "ssm.time_step_rank"),
        "n_groups": number("ssm.group_count"),
        "ssm_state_size": number("ssm.state_size"),
        "conv_kernel": number("ssm.conv_kernel"),
        "use_conv_bias": metadata.any_has("ssm_conv1d.bias"),
        "use_bias": metadata.any_has("ssm_in.bias"),
        "mlp_bias": metadata.any_has("ffn_up.bias"),
        "layer_norm_epsilon": number("attention.layer_norm_rms_epsilon"),
    }
    return found


def _nemotron_h_moe(metadata: Metadata) -> Config:
    """Nemotron 3: Nemotron-H with experts."""
    number = metadata.number
    groups = number("expert_group_count", 1)
    return {
        **_nemotron_h(metadata),
        "n_routed_experts": number("expert_count"),
        "num_experts_per_tok": number("expert_used_count"),
        "moe_intermediate_size": number("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": number("expert_shared_feed_forward_length"),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", True)),
        "routed_scaling_factor": number("expert_weights_scale", 1.0) or 1.0,
        "n_group": groups,
        "topk_group": number("expert_group_used_count", groups),
        "moe_latent_size": metadata.get("moe_latent_size"),
    }


HYBRIDS: dict[str, Callable[[Metadata], Config]] = {
    "qwen35": _qwen3_5,
    "qwen35moe": _qwen3_5_moe,
    "qwen3next": _qwen3_next,
    "granitehybrid": _granite_hybrid,
    "falcon-h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h_moe,
}
"""For each of GGUF's architectures of hybrids, the entries of config.json that it adds to those of all."""
