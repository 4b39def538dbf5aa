"""The config.json of a model in a GGUF file, from the file's metadata."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.lm.models.checkpoint_errors import UnsupportedCheckpoint
from holdfast.lm.models.gguf_hybrids import HYBRIDS
from holdfast.lm.models.gguf_values import Config, Metadata


def config_of(metadata: Metadata) -> Config:
    """The config.json of the model. Raises UnsupportedCheckpoint for an architecture that is not known."""
    if metadata.architecture not in FAMILIES:
        raise UnsupportedCheckpoint(
            f"a GGUF file of architecture {metadata.architecture!r} is not supported; known: {', '.join(FAMILIES)}"
        )
    if metadata.get("attention.temperature_scale"):
        raise UnsupportedCheckpoint("GGUF key attention.temperature_scale is not supported")
    return {**_shared(metadata), **FAMILIES[metadata.architecture](metadata)}


def _shared(metadata: Metadata) -> Config:
    """The entries that all families have."""
    number = metadata.number
    hidden, heads = number("embedding_length"), metadata.nonzero("attention.head_count", None)
    head_dim = number("attention.key_length", hidden // heads)
    if (values := number("attention.value_length", head_dim)) != head_dim:
        raise UnsupportedCheckpoint(f"the GGUF file has keys of {head_dim} numbers and values of {values}")
    if "token_embd.weight" not in metadata.shapes:
        raise UnsupportedCheckpoint("the GGUF file has no tensor token_embd.weight")
    special = {name: metadata.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot")}
    ends = [special[name] for name in ("eos", "eot") if special[name] is not None]
    drafts = number("nextn_predict_layers", 0)
    return {
        "hidden_size": hidden,
        "num_hidden_layers": number("block_count") - drafts,
        "num_nextn_predict_layers": drafts,
        "intermediate_size": metadata.nonzero("feed_forward_length", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.nonzero("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base", 10_000.0),
        "vocab_size": metadata.shapes["token_embd.weight"][0],
        "tie_word_embeddings": not metadata.has("output.weight"),
        "bos_token_id": special["bos"],
        "eos_token_id": [*dict.fromkeys(ends)] or None,
        "torch_dtype": "bfloat16",
        **_rotation(metadata, head_dim),
    }


def _rotation(metadata: Metadata, head_dim: int) -> Config:
    """The scaling of the rotation, and the share of each head that is rotated."""
    share = metadata.number("rope.dimension_count", head_dim) / head_dim
    partial = {} if share == 1 else {"partial_rotary_factor": share}
    longest = metadata.number("context_length")
    original = metadata.number("rope.scaling.original_context_length", longest)
    factor = metadata.number("rope.scaling.factor", 1.0)
    kind = metadata.get("rope.scaling.type", "none")
    names = ("rope_factors_short.weight", "rope_factors_long.weight")
    if all(map(metadata.has, names)):
        short, long = map(metadata.values, names)
        scaling: Config = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        if amplitude := metadata.get("rope.scaling.attn_factor"):
            scaling["attention_factor"] = amplitude
        return partial | {"rope_scaling": scaling, "original_max_position_embeddings": original}
    if metadata.has("rope_freqs.weight"):
        # Llama 3's scaling is stored as its result: one factor for the wavelength of each pair.
        factors = metadata.values("rope_freqs.weight")
        scaling = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
        return partial | {"rope_scaling": scaling, "original_max_position_embeddings": longest}
    if kind in ("none", "longrope") or factor in (0, 1):
        return partial
    if kind == "linear":
        return partial | {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        return partial | {"rope_scaling": scaling}
    raise UnsupportedCheckpoint(f"GGUF key rope.scaling.type is {kind!r}; known: none, linear, yarn, longrope")


def _llama(metadata: Metadata) -> Config:
    """Llama, Mistral and Mixtral, which are one architecture in GGUF."""
    if metadata.get("expert_count"):
        return {
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": metadata.number("expert_count"),
            "num_experts_per_tok": metadata.number("expert_used_count"),
            "sliding_window": None,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": metadata.has("blk.0.attn_q.bias"),
        "mlp_bias": metadata.has("blk.0.ffn_up.bias"),
    }


def _qwen2(metadata: Metadata) -> Config:
    return {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}


def _qwen3(metadata: Metadata) -> Config:
    return {"architectures": ["Qwen3ForCausalLM"], "attention_bias": metadata.has("blk.0.attn_q.bias")}


def _qwen3_moe(metadata: Metadata) -> Config:
    """Qwen3-MoE. Shares of experts are normalized, as llama.cpp does for this architecture."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "sliding_window": None,
    }


def _gemma(metadata: Metadata, largest: int) -> Config:
    """Entries that Gemma 2 and 3 share. The model of `largest` layers scales scores by another head size."""
    layers, heads = metadata.number("block_count"), metadata.number("attention.head_count")
    plain = metadata.number("embedding_length") // heads
    return {
        "sliding_window": metadata.number("attention.sliding_window"),
        "query_pre_attn_scalar": plain if layers == largest else metadata.number("attention.key_length", plain),
    }


def _gemma2(metadata: Metadata) -> Config:
    return {
        "architectures": ["Gemma2ForCausalLM"],
        **_gemma(metadata, 46),
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping"),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
    }


def _gemma3(metadata: Metadata) -> Config:
    """Gemma 3. Layers with a window rotate by a base that GGUF does not name."""
    scaling = _rotation(metadata, 1).get("rope_scaling")
    theta = metadata.number("rope.freq_base", 1e6)
    return {
        "architectures": ["Gemma3ForCausalLM"],
        **_gemma(metadata, 62),
        "rope_parameters": {
            "full_attention": {"rope_type": "default", **(scaling or {}), "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "rope_scaling": None,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
    }


def _phi3(metadata: Metadata) -> Config:
    return {"architectures": ["Phi3ForCausalLM"], "sliding_window": metadata.get("attention.sliding_window") or None}


def _olmo2(metadata: Metadata) -> Config:
    return {"architectures": ["Olmo2ForCausalLM"]}


def _lfm2(metadata: Metadata) -> Config:
    """LFM2. A layer with a short convolution has no KV heads."""
    heads, count = metadata.get("attention.head_count_kv"), metadata.number("block_count")
    if not isinstance(heads, list) or len(heads) != count:
        raise UnsupportedCheckpoint(
            f"GGUF key lfm2.attention.head_count_kv is {heads!r}; a list of {count} is supported"
        )
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["full_attention" if each else "conv" for each in heads],
        "conv_L_cache": metadata.number("shortconv.l_cache"),
        "conv_bias": metadata.has(f"blk.{heads.index(0) if 0 in heads else 0}.shortconv.in_proj.bias"),
        "block_auto_adjust_ff_dim": False,
        "norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
    }


FAMILIES: dict[str, Callable[[Metadata], Config]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen2vl": _qwen2,
    "qwen3": _qwen3,
    "qwen3vl": _qwen3,
    "qwen3moe": _qwen3_moe,
    "qwen3vlmoe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "lfm2": _lfm2,
    **HYBRIDS,
}
"""For each of GGUF's architectures, the entries of config.json that it adds to those of all."""
