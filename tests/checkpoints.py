"""Small random checkpoints, written by Transformers into a directory of the test's own."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
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

DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
"""Sizes of recurrent layers, and a layer with attention."""
MIXTURE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}

LATENT: dict[str, Any] = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
"""Sizes of latent attention and of the experts of its models."""

MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
}
"""Sizes of Mamba-2's layers."""
GRANITE: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "shared_intermediate_size": 72,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.35,
    "attention_multiplier": 0.2,
    "logits_scaling": 1.5,
}

GEMMA_4_TYPES = [*["sliding_attention"] * 2, "full_attention"] * 2
GEMMA_4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": GEMMA_4_TYPES,
    "sliding_window": 12,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
}
"""A Gemma 4 with embeddings for each layer, half of whose layers read the keys and values of earlier ones (E2B)."""
GEMMA_4_DENSE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": GEMMA_4_TYPES[:3],
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
"""The differences of a larger Gemma 4: fewer KV heads, whose values are the keys, in layers of full attention (31B)."""
GEMMA_4_MIXTURE: dict[str, Any] = GEMMA_4_DENSE | {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 40,
}
"""A larger Gemma 4 with experts next to the MLP (26B-A4B)."""

NEMOTRON_3: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention", "moe"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}
"""The differences of a Nemotron-H with experts."""

DIFFERENCES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 12},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    "Qwen3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "GPT2": LEGACY,
    "Gemma2": {"sliding_window": 12, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "Gemma3Text": {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
    "Gemma4Text": GEMMA_4,
    "GptOss": {"sliding_window": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Mixtral": {"num_local_experts": 4},
    "Phimoe": {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.1},
    "Qwen3Moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "Qwen3Next": DELTA | MIXTURE | {"norm_topk_prob": True},
    "Qwen3_5Text": DELTA,
    "Qwen3_5MoeText": DELTA | MIXTURE,
    "Llama4Text": {
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 12,
        "floor_scale": 8,
    },
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "Bamba": MAMBA | {"attn_layer_indices": [1]},
    "GraniteMoeHybrid": MAMBA | GRANITE | {"num_local_experts": 0},
    "FalconH1": MAMBA
    | {
        "mamba_d_ssm": 128,
        "embedding_multiplier": 2.5,
        "lm_head_multiplier": 0.7,
        "key_multiplier": 0.6,
        "attention_in_multiplier": 0.8,
        "attention_out_multiplier": 0.9,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.75,
        "ssm_multipliers": [0.9, 0.8, 1.2, 1.1, 0.7],
        "mlp_multipliers": [0.88, 0.59],
    },
    "NemotronH": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "ssm_state_size": 20,
        "chunk_size": 8,
    },
    "OPT": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "Starcoder2": {"sliding_window": None},
    "Phi3": {"sliding_window": 12},
    "Olmo2": {},
    "Falcon": {"head_dim": ..., "alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    "SmolLM3": {"layer_types": ["full_attention", "full_attention"]},
    "StableLm": {"head_dim": ...},
    "Nemotron": {},
    "Bloom": {},
    "DeepseekV2": LATENT
    | {
        "topk_method": "group_limited_greedy",
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "routed_scaling_factor": 3.0,
        "first_k_dense_replace": 1,
    },
    "DeepseekV3": LATENT
    | {
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "num_mtp_layers": 0,
    },
    "Glm4MoeLite": LATENT | {"head_dim": ..., "n_group": 1, "topk_group": 1, "q_lora_rank": 20},
    "MiniCPM3": {
        "head_dim": 8,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 20,
        "dim_model_base": 16,
    },
    "Youtu": {
        "head_dim": 8,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 20,
    },
}


def skip_other_norms(name: str, groups: int) -> None:
    """Skip the test if this Transformers norms gated outputs of all groups as one, as 5.17 does with some models."""
    norm = {"Bamba": "BambaRMSNormGated", "GraniteMoeHybrid": "GraniteMoeHybridRMSNormGated"}.get(name)
    if norm is None or groups == 1:
        return
    module = importlib.import_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
    if "group_size" not in inspect.signature(getattr(module, norm)).parameters:
        pytest.skip(f"Transformers {transformers.__version__} has one group in {norm}")


def make(directory: Path, name: str, *, seed: int = 0, shard: str = "50GB", **differences: Any) -> Any:
    """Write a checkpoint of a family and give Transformers' own module of it. A difference of ... drops a key."""
    settings = {**SIZES, **DIFFERENCES[name], **differences}
    skip_other_norms(name, settings.get("mamba_n_groups", 1))
    config = getattr(transformers, f"{name}Config")(
        **{key: value for key, value in settings.items() if value is not ...}
    )
    torch.manual_seed(seed)
    # Its plainest attention: PyTorch's own leaves out Gemma 2's cap in some versions of Transformers.
    module = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            endings = ("bias", "norm.weight", "layernorm.weight", "sinks", "mamba.D", "mixer.D")
            if key.endswith((*endings, "norm_1.weight", "norm_2.weight", "scale")) or ".norms." in key:
                parameter.normal_(0.5, 0.5)  # a default of 0 or 1 would not tell whether it is used
        for key, buffer in module.named_buffers():
            if key.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
            if key.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)
    module.save_pretrained(directory, max_shard_size=shard)
    return module


TINY_VOCAB = 97
TINY_LONGEST = 128
"""Most positions of a tiny model."""
_PLAIN: dict[str, Any] = dict(
    vocab_size=TINY_VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=TINY_LONGEST,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
)
_COMMON = _PLAIN | dict(num_key_value_heads=2, head_dim=16)
_GPT: dict[str, Any] = dict(
    vocab_size=TINY_VOCAB,
    n_embd=64,
    n_layer=2,
    n_head=4,
    n_positions=TINY_LONGEST,
    n_ctx=TINY_LONGEST,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
)
_EXPERTS: dict[str, Any] = dict(num_local_experts=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_LATENT: dict[str, Any] = DIFFERENCES["DeepseekV3"]
_MAMBA2: dict[str, Any] = dict(
    mamba_n_heads=4,
    mamba_d_head=32,
    mamba_n_groups=1,
    mamba_d_state=16,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_chunk_size=8,
)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _COMMON),
    "mistral-sliding": ("Mistral", _COMMON | dict(sliding_window=8)),
    "qwen2": ("Qwen2", _COMMON),
    "qwen3": ("Qwen3", _COMMON),
    "falcon-alibi": ("Falcon", _PLAIN | dict(alibi=True, new_decoder_architecture=False, multi_query=True, bias=True)),
    "falcon-rotary": ("Falcon", _PLAIN | dict(alibi=False, multi_query=True)),
    "falcon-new": ("Falcon", _PLAIN | dict(alibi=False, new_decoder_architecture=True, num_kv_heads=2)),
    "bloom": ("Bloom", _COMMON | dict(n_head=4, n_layer=2)),
    "mpt": ("Mpt", _COMMON | dict(d_model=64, n_heads=4, n_layers=2, max_seq_len=128, expansion_ratio=2)),
    "gptj": ("GPTJ", _GPT | dict(rotary_dim=8)),
    "gpt-neo": (
        "GPTNeo",
        _COMMON | dict(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=8),
    ),
    "gpt-neox": ("GPTNeoX", _COMMON),
    "codegen": ("CodeGen", _GPT | dict(rotary_dim=8)),
    "stablelm": ("StableLm", _COMMON),
    "gpt2": ("GPT2", _GPT),
    "gpt-bigcode": ("GPTBigCode", _GPT),
    "opt": ("OPT", _COMMON | dict(ffn_dim=128, word_embed_proj_dim=64)),
    "phi": ("Phi", _COMMON),
    "phi3": ("Phi3", _COMMON),
    "phimoe": ("Phimoe", _COMMON | _EXPERTS),
    "gemma": ("Gemma", _COMMON),
    "gemma2": ("Gemma2", _COMMON | dict(sliding_window=8, query_pre_attn_scalar=16)),
    "gemma3": ("Gemma3Text", _COMMON | dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])),
    "gemma4": ("Gemma4Text", _COMMON | GEMMA_4 | dict(vocab_size_per_layer_input=TINY_VOCAB, sliding_window=8)),
    "gpt-oss": ("GptOss", _COMMON | dict(sliding_window=8) | _EXPERTS),
    "olmo": ("Olmo", _COMMON),
    "olmo2": ("Olmo2", _COMMON),
    "olmoe": ("Olmoe", _COMMON | _EXPERTS),
    "qwen2-moe": ("Qwen2Moe", _COMMON | _EXPERTS | dict(shared_expert_intermediate_size=32)),
    "qwen3-moe": ("Qwen3Moe", _COMMON | _EXPERTS),
    "mixtral": ("Mixtral", _COMMON | _EXPERTS),
    "deepseek-v2": ("DeepseekV2", _COMMON | _LATENT | dict(topk_method="greedy")),
    "deepseek-v3": ("DeepseekV3", _COMMON | _LATENT),
    "starcoder2": ("Starcoder2", _COMMON),
    "persimmon": ("Persimmon", _COMMON),
    "cohere": ("Cohere", _COMMON),
    "cohere2": ("Cohere2", _COMMON | dict(sliding_window=8)),
    "granite": ("Granite", _COMMON),
    "granitemoe": ("GraniteMoe", _COMMON | _EXPERTS),
    "glm": ("Glm", _COMMON),
    "glm4": ("Glm4", _COMMON),
    "exaone4": ("Exaone4", _COMMON | dict(sliding_window=8, sliding_window_pattern=2)),
    "smollm3": ("SmolLM3", _COMMON),
    "nemotron": ("Nemotron", _COMMON),
    "dbrx": (
        "Dbrx",
        _COMMON
        | dict(
            d_model=64,
            n_heads=4,
            n_layers=2,
            max_seq_len=128,
            attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=10000.0),
            ffn_config=dict(ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2, hidden_size=64),
        ),
    ),
    "llama4-chunked": (
        "Llama4Text",
        _COMMON
        | _EXPERTS
        | dict(attention_chunk_size=8, intermediate_size_mlp=128, use_qk_norm=True, interleave_moe_layer_step=2),
    ),
    "minimax": ("MiniMax", _COMMON | _EXPERTS | dict(layer_types=["linear_attention", "full_attention"], block_size=4)),
    "diffllama": ("DiffLlama", _COMMON),
    "biogpt": ("BioGpt", _COMMON),
    "xglm": ("XGLM", _COMMON | dict(d_model=64, ffn_dim=128, num_layers=2, attention_heads=4)),
    "ctrl": ("CTRL", _GPT | dict(dff=128)),
    "openai-gpt": ("OpenAIGPT", _GPT),
    "rwkv": ("Rwkv", _COMMON | dict(context_length=128, attention_hidden_size=64)),
    "mamba": ("Mamba", _COMMON | dict(state_size=16)),
    "falcon-mamba": ("FalconMamba", _COMMON | dict(state_size=16)),
    "mamba2": ("Mamba2", _COMMON | dict(state_size=16, num_heads=8, head_dim=16, n_groups=1, chunk_size=8, expand=2)),
    "jamba": (
        "Jamba",
        _COMMON
        | _EXPERTS
        | dict(
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=16,
            use_mamba_kernels=False,
        ),
    ),
    "bamba": ("Bamba", _COMMON | _MAMBA2 | dict(attn_layer_indices=[1])),
    "zamba": (
        "Zamba",
        _COMMON
        | dict(
            num_hidden_layers=3,
            attn_layer_period=2,
            attn_layer_offset=1,
            layers_block_type=["mamba", "hybrid", "mamba"],
            mamba_d_state=16,
            n_mamba_heads=2,
            tie_word_embeddings=False,
            use_mamba_kernels=False,
            num_key_value_heads=4,
            attention_head_dim=32,
            attention_hidden_size=128,
        ),
    ),
    "zamba2": (
        "Zamba2",
        _COMMON
        | dict(
            num_hidden_layers=3,
            layers_block_type=["mamba", "hybrid", "mamba"],
            mamba_d_state=16,
            n_mamba_heads=8,
            mamba_headdim=16,
            chunk_size=8,
            num_mem_blocks=1,
            use_mamba_kernels=False,
            num_key_value_heads=4,
            attention_head_dim=32,
            attention_hidden_size=128,
        ),
    ),
    "falcon-h1": ("FalconH1", _COMMON | _MAMBA2 | dict(mamba_d_ssm=128)),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        _COMMON | _MAMBA2 | _EXPERTS | dict(layer_types=["mamba", "attention"], shared_intermediate_size=64),
    ),
    "nemotron-h": (
        "NemotronH",
        _COMMON
        | dict(
            layers_block_type=["mamba", "attention", "moe"],
            mamba_num_heads=4,
            mamba_head_dim=32,
            ssm_state_size=16,
            n_groups=1,
            chunk_size=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=32,
        ),
    ),
    "recurrent-gemma": (
        "RecurrentGemma",
        _COMMON
        | dict(
            attention_window_size=8,
            lru_width=64,
            num_hidden_layers=3,
            block_types=["recurrent", "recurrent", "attention"],
        ),
    ),
    "qwen3-next": (
        "Qwen3Next",
        _COMMON
        | _EXPERTS
        | dict(
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            shared_expert_intermediate_size=32,
        ),
    ),
    "qwen3.5": (
        "Qwen3_5Text",
        _COMMON
        | dict(
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        ),
    ),
    "olmo-hybrid": (
        "OlmoHybrid",
        _COMMON
        | dict(
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        ),
    ),
    "lfm2": ("Lfm2", _COMMON | dict(layer_types=["conv", "full_attention"], block_ff_dim=128)),
    "xlstm": (
        "xLSTM",
        dict(
            vocab_size=TINY_VOCAB,
            hidden_size=64,
            num_heads=4,
            num_hidden_layers=2,
            qk_dim_factor=1.0,
            chunk_size=16,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
        ),
    ),
    "deepseek-v4": (
        "DeepseekV4",
        _COMMON
        | dict(
            layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
            compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 4},
            sliding_window=8,
        ),
    ),
    "kimi-linear": (
        "KimiLinear",
        _COMMON
        | _LATENT
        | dict(
            layer_types=["linear_attention", "full_attention"],
            topk_group=1,
            linear_num_heads=4,
            linear_head_dim=16,
            linear_num_key_heads=4,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            n_group=1,
            num_experts=4,
            num_shared_experts=1,
        ),
    ),
    "gemma3n": (
        "Gemma3nText",
        _COMMON
        | dict(
            sliding_window=8,
            num_hidden_layers=4,
            layer_types=["sliding_attention", "full_attention"] * 2,
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=TINY_VOCAB,
            laurel_rank=8,
            altup_num_inputs=2,
            activation_sparsity_pattern=[0.0] * 4,
            intermediate_size=[128] * 4,
        ),
    ),
}
"""Causal decoders of Transformers by a name: the stem of the config class, and a config of a tiny model."""


def tiny(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **differences: Any) -> Any:
    """Transformers' own module of one of `FAMILIES` with random weights, in eval mode. Its attention is its own choice.

    Biases and norms are drawn too: a default of 0 or 1 would not tell whether they are used.
    """
    stem, sizes = FAMILIES[family]
    config = getattr(transformers, f"{stem}Config")(**{**sizes, "tie_word_embeddings": False, **differences})
    torch.manual_seed(seed)
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias") and "dt" not in name:
                parameter.normal_(0.0, 0.1)  # wider ones drown what the tokens say
            elif name.endswith(("norm.weight", "layernorm.weight")) or ".norms." in name:
                parameter.normal_(1.0, 0.3)
    return module
