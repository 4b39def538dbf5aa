"""Small random checkpoints, written by Transformers into a directory of the test's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 384

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    # Wide enough that the likeliest token is clear of the next one, whatever order sums are taken in.
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}

LEGACY = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
}

DIFFERENCES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 12},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    "Qwen3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "GPT2": LEGACY,
    "Gemma2": {"sliding_window": 12, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "Gemma3Text": {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
    "GptOss": {"sliding_window": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Mixtral": {"num_local_experts": 4},
    "OPT": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "Starcoder2": {"sliding_window": None},
    "Phi3": {},
    "StableLm": {},
    "Bloom": {},
    "DeepseekV3": {
        "head_dim": 8,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
}


def make(directory: Path, name: str, *, seed: int = 0, shard: str = "50GB", **differences: Any) -> Any:
    """Write a checkpoint of the family `name` and give Transformers' own module of it."""
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **DIFFERENCES[name], **differences})
    torch.manual_seed(seed)
    # Its plainest attention: PyTorch's own leaves out Gemma 2's cap in some versions of Transformers.
    module = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if key.endswith(("bias", "norm.weight", "layernorm.weight", "sinks")):
                parameter.normal_(0.5, 0.5)  # a default of 0 or 1 would not tell whether it is used
    module.save_pretrained(directory, max_shard_size=shard)
    return module
