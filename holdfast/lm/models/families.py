"""The model families that run natively, and how each reads its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from holdfast.lm.kernels.linear.layers import ACTIVATIONS
from holdfast.lm.models.checkpoint_errors import NotNative, UnsupportedCheckpoint
from holdfast.lm.models.convolution_layers import convolutional, lfm2_config
from holdfast.lm.models.decoder_spec import DecoderSpec, ExpertSpec, Part, WeightNames
from holdfast.lm.models.delta_layers import DEFAULTS, hybrid
from holdfast.lm.models.experts import (
    at_least_one,
    deepseek_v2_experts,
    deepseek_v3_experts,
    gpt_oss_experts,
    granite_experts,
    llama4_experts,
    mixtral_experts,
    nemotron_experts,
    phimoe_experts,
    qwen3_5_moe_experts,
    qwen3_moe_experts,
    qwen3_next_experts,
    qwen3_vl_moe_experts,
)
from holdfast.lm.models.gemma4 import gemma4_config, gemma4_spec
from holdfast.lm.models.latent_layers import GLM, MINICPM, V2, V3, YOUTU, latent_config, latent_layers, minicpm_layers
from holdfast.lm.models.layer_norm_families import falcon, gpt2, norm, opt
from holdfast.lm.models.mamba_layers import DEFAULTS as MAMBA_DEFAULTS
from holdfast.lm.models.mamba_layers import (
    bamba_layers,
    falcon_layers,
    granite_layers,
    nemotron_config,
    nemotron_layers,
)
from holdfast.lm.models.rope import rope_of
from holdfast.lm.models.text_decoders import WITH_IMAGES, text_decoder, without_sections

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


def shared(config: Mapping[str, Any], *, partial: bool = False, **defaults: Any) -> dict[str, Any]:
    """The DecoderSpec fields that all families read from the same keys.

    `defaults` are those of the family's config class in Transformers. `partial` is passed to `rope_of`.
    """
    config = defaults | {**config}
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
        "rope": rope_of(config, partial=partial),
        "names": NAMES,
        "activation": activation,
        "tied": bool(config.get("tie_word_embeddings", False)),
        "init_std": float(config.get("initializer_range", 0.02)),
    }


def llama(config: Mapping[str, Any]) -> DecoderSpec:
    """Llama 1 to 3.3, and models with the same architecture."""
    biased = bool(config.get("attention_bias", False))
    fields = shared(config, max_position_embeddings=2048)
    return DecoderSpec(**fields, qkv_bias=biased, o_bias=biased, mlp_bias=bool(config.get("mlp_bias", False)))


def mistral(config: Mapping[str, Any]) -> DecoderSpec:
    """Mistral: the same sliding window in all layers, or none."""
    window = config.get("sliding_window", 4096)
    fields = shared(config, num_key_value_heads=8, max_position_embeddings=131_072)
    return DecoderSpec(**fields, windows=(window,) * fields["num_layers"])


def qwen2(config: Mapping[str, Any]) -> DecoderSpec:
    """Qwen2 and 2.5: biases on queries, keys and values."""
    fields = shared(config, max_position_embeddings=32_768)
    return DecoderSpec(**fields, windows=windows_of(config, fields["num_layers"]), qkv_bias=True)


def qwen3(config: Mapping[str, Any]) -> DecoderSpec:
    """Qwen3: queries and keys normed within each head. The head size is 128 by default."""
    fields = shared({**config, "head_dim": config.get("head_dim") or 128}, max_position_embeddings=32_768)
    biased = bool(config.get("attention_bias", False))
    return DecoderSpec(
        **fields, windows=windows_of(config, fields["num_layers"]), qk_norm=True, qkv_bias=biased, o_bias=biased
    )


def mixtral(config: Mapping[str, Any]) -> DecoderSpec:
    """Mixtral: Mistral with experts in every layer."""
    defaults: dict[str, Any] = dict(
        num_key_value_heads=8, max_position_embeddings=131_072, rms_norm_eps=1e-5, rope_theta=1e6
    )
    fields = shared(config, **defaults)
    windows = (config.get("sliding_window"),) * fields["num_layers"]
    return DecoderSpec(**fields, windows=windows, experts=mixtral_experts(config, fields["num_layers"]))


def qwen3_moe(config: Mapping[str, Any]) -> DecoderSpec:
    """Qwen3-MoE: Qwen3 with experts in some layers, all of them by default."""
    fields = shared(config, num_key_value_heads=4, intermediate_size=6144, max_position_embeddings=32_768)
    return with_experts(config, fields, qwen3_moe_experts(config, fields["num_layers"]))


def with_experts(config: Mapping[str, Any], fields: dict[str, Any], experts: ExpertSpec) -> DecoderSpec:
    """A Qwen3 with experts."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    biased = bool(config.get("attention_bias", False))
    return DecoderSpec(
        **fields,
        windows=(window,) * fields["num_layers"],
        qk_norm=True,
        qkv_bias=biased,
        o_bias=biased,
        experts=experts,
    )


def qwen2_vl(config: Mapping[str, Any]) -> DecoderSpec:
    """The text decoder of Qwen2-VL and Qwen2.5-VL: Qwen2."""
    defaults = dict(num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6, max_window_layers=80)
    return qwen2({**defaults, **config})


def qwen3_vl(config: Mapping[str, Any]) -> DecoderSpec:
    """The text decoder of Qwen3-VL: Qwen3."""
    return qwen3({"max_position_embeddings": 128_000, "rope_theta": 5e5, **config})


def qwen3_vl_moe(config: Mapping[str, Any]) -> DecoderSpec:
    """The text decoder of Qwen3-VL-MoE: Qwen3-MoE, with the tensors of all experts of a layer in one."""
    defaults: dict[str, Any] = dict(num_key_value_heads=16, intermediate_size=5632, rope_theta=5e5)
    config = {**defaults, "max_position_embeddings": 128_000, **config}
    fields = shared(config)
    return with_experts(config, fields, qwen3_vl_moe_experts(config, fields["num_layers"]))


def qwen3_next(config: Mapping[str, Any]) -> DecoderSpec:
    """Qwen3-Next: three of four layers are recurrent, and attention has output gates. Experts besides a shared one."""
    config = {**DEFAULTS, **config}
    fields = hybrid(config, shared(config, partial=True), grouped=not config.get("separate_tensors"))
    return DecoderSpec(**fields, experts=qwen3_next_experts(config, fields["num_layers"]))


def qwen3_5(config: Mapping[str, Any]) -> DecoderSpec:
    """Qwen3.5: the layers of Qwen3-Next, with an MLP in place of experts."""
    config = without_sections({**DEFAULTS, "num_key_value_heads": 4, "intermediate_size": 12_288, **config})
    return DecoderSpec(**hybrid(config, shared(config, partial=True), grouped=False))


def qwen3_5_moe(config: Mapping[str, Any]) -> DecoderSpec:
    """Qwen3.5-MoE: Qwen3.5 with experts in all layers, besides a shared one."""
    config = without_sections({**DEFAULTS, **config})
    fields = hybrid(config, shared(config, partial=True), grouped=False)
    return DecoderSpec(**fields, experts=qwen3_5_moe_experts(config, fields["num_layers"]))


def lfm2(config: Mapping[str, Any]) -> DecoderSpec:
    """LFM2: short convolutions between two gates in most layers, and attention in the others."""
    config = lfm2_config(config)
    return DecoderSpec(**convolutional(config, shared(config)))


def bamba(config: Mapping[str, Any]) -> DecoderSpec:
    """Bamba: Mamba-2 in most layers. In the others, attention rotates half of each head."""
    defaults: dict[str, Any] = dict(num_key_value_heads=8, intermediate_size=14_336, rms_norm_eps=1e-5)
    config = {**MAMBA_DEFAULTS, **defaults, "max_position_embeddings": 262_144, **config, "partial_rotary_factor": 0.5}
    return DecoderSpec(**bamba_layers(config, shared(config, partial=True)))


def granite_hybrid(config: Mapping[str, Any]) -> DecoderSpec:
    """Granite 4: Mamba-2 in most layers, four multipliers, and an MLP, or experts besides a shared one."""
    defaults: dict[str, Any] = dict(max_position_embeddings=2048, shared_intermediate_size=1024)
    config = {**MAMBA_DEFAULTS, **defaults, **config}
    if (experts := granite_experts(config, int(config["num_hidden_layers"]))) is None:
        config = {**config, "intermediate_size": config["shared_intermediate_size"]}
    return DecoderSpec(**granite_layers(config, shared(config), experts))


def falcon_h1(config: Mapping[str, Any]) -> DecoderSpec:
    """Falcon-H1: attention and Mamba-2 side by side in every layer, and many multipliers."""
    defaults: dict[str, Any] = dict(num_key_value_heads=8, intermediate_size=14_336, rms_norm_eps=1e-5)
    config = {**MAMBA_DEFAULTS, **defaults, "max_position_embeddings": 8192, "mamba_d_ssm": 1024, **config}
    return DecoderSpec(**falcon_layers(config, shared(config)))


def nemotron_h(config: Mapping[str, Any]) -> DecoderSpec:
    """Nemotron-H and Nemotron 3: each layer is Mamba-2, attention without a rotation, an MLP or experts alone."""
    config = nemotron_config(config)
    kinds = config["layer_types"]
    experts = nemotron_experts(config, kinds) if "moe" in kinds else None
    return DecoderSpec(**nemotron_layers(config, shared(config), experts))


GPT_OSS_ROPE = dict(rope_type="yarn", factor=32.0, truncate=False, original_max_position_embeddings=4096)
"""The scaling of GPT-OSS's rotation, unless its config names another."""


def gpt_oss(config: Mapping[str, Any]) -> DecoderSpec:
    """GPT-OSS: attention sinks, windows in every second layer, biases, and experts with a clamped gate."""
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config = {**config, "rope_scaling": GPT_OSS_ROPE}
    defaults: dict[str, Any] = dict(max_position_embeddings=131_072, rms_norm_eps=1e-5, rope_theta=150_000.0)
    fields = shared(config, num_key_value_heads=8, head_dim=64, **defaults)
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


def llama4(config: Mapping[str, Any]) -> DecoderSpec:
    """The text decoder of Llama 4: chunks of attention in rotated layers, and experts in some layers or all."""
    defaults: dict[str, Any] = dict(max_position_embeddings=131_072, rms_norm_eps=1e-5, rope_theta=5e5)
    config = {**defaults, "intermediate_size": 8192, "num_key_value_heads": 8, "head_dim": 128, **config}
    fields = shared(config)
    count = fields["num_layers"]
    experts = llama4_experts(config, count)
    every, steps = at_least_one(config, "no_rope_layer_interval", 4), at_least_one(config, "floor_scale", 8192)
    rotated = config.get("no_rope_layers") or [(layer + 1) % every != 0 for layer in range(count)]
    if len(rotated) < count:
        raise UnsupportedCheckpoint(f"no_rope_layers lists {len(rotated)} layers of {count}")
    unrotated = tuple(not turns for turns in rotated[:count])
    normed, biased = bool(config.get("use_qk_norm", True)), bool(config.get("attention_bias", False))
    rope, grows = fields["rope"], bool(config.get("attn_temperature_tuning", True))
    fields |= {
        "names": replace(NAMES, fields={**NAMES.fields, **FEED_FORWARD}),
        "intermediate_size": int(config.get("intermediate_size_mlp", 16_384)),
        # A norm after the rotation undoes its factor.
        "rope": replace(rope, interleaved=True, amplitude=1.0 if normed else rope.amplitude),
    }
    return DecoderSpec(
        **fields,
        windows=chunks_of(config, unrotated),
        chunked=True,
        unrotated=unrotated,
        unit_qk_norm=normed,
        temperature=(float(config.get("attn_scale", 0.1)), steps) if grows else None,
        qkv_bias=biased,
        o_bias=biased,
        experts=experts,
    )


FEED_FORWARD = {
    "gate_up": ("feed_forward.gate_proj.weight", "feed_forward.up_proj.weight"),
    "down": ("feed_forward.down_proj.weight",),
}
"""The tensor names of a Llama 4's MLP in layers without experts."""


def chunks_of(config: Mapping[str, Any], unrotated: tuple[bool, ...]) -> tuple[int | None, ...]:
    """The size of a chunk of attention in each layer of a Llama 4: in the rotated ones, unless layer_types says."""
    size, kinds = config.get("attention_chunk_size", 8192), config.get("layer_types")
    if size is not None:
        size = at_least_one(config, "attention_chunk_size", 8192)
    if kinds is None:
        return tuple(None if still else size for still in unrotated)
    if unknown := set(kinds) - {"full_attention", "chunked_attention"}:
        raise UnsupportedCheckpoint(f"layer type {min(unknown)!r} is not supported")
    if len(kinds) != len(unrotated):
        raise UnsupportedCheckpoint(f"layer_types lists {len(kinds)} layers of {len(unrotated)}")
    return tuple(size if kind == "chunked_attention" else None for kind in kinds)


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


def phi3(config: Mapping[str, Any]) -> DecoderSpec:
    """Phi-3 and Phi-4: queries, keys and values in one tensor, gate and up in another."""
    fields = shared(config, partial=True, max_position_embeddings=4096, rms_norm_eps=1e-5)
    hidden, inner, dim = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
    heads, kv_heads = fields["num_heads"], fields["num_kv_heads"]
    all_heads = heads + 2 * kv_heads
    qkv, gate_up = ((all_heads * dim, hidden), (all_heads, dim)), ((2 * inner, hidden), (2, inner))
    stored = {
        "self_attn.q_proj.weight": Part("self_attn.qkv_proj.weight", *qkv, at=(0, 0, heads)),
        "self_attn.k_proj.weight": Part("self_attn.qkv_proj.weight", *qkv, at=(0, heads, heads + kv_heads)),
        "self_attn.v_proj.weight": Part("self_attn.qkv_proj.weight", *qkv, at=(0, heads + kv_heads, all_heads)),
        "mlp.gate_proj.weight": Part("mlp.gate_up_proj.weight", *gate_up, at=(0, 0, 1)),
        "mlp.up_proj.weight": Part("mlp.gate_up_proj.weight", *gate_up, at=(0, 1, 2)),
    }
    fields["names"] = replace(NAMES, parts=stored)
    return DecoderSpec(**fields, windows=(config.get("sliding_window"),) * fields["num_layers"])


LAYER_NORMS = {"input_norm": norm("input_layernorm"), "post_norm": norm("post_attention_layernorm")}
"""The tensor names of a Llama's two norms, if they are layer norms."""


def stablelm(config: Mapping[str, Any]) -> DecoderSpec:
    """StableLM: layer norms, and a share of each head rotated. StableLM 2 12B has a norm for each head, too."""
    config = {"partial_rotary_factor": 0.25, **config, "head_dim": None}
    fields = shared(config, partial=True, num_key_value_heads=32, max_position_embeddings=4096)
    hidden, heads = fields["hidden_size"], fields["num_heads"]
    if hidden % heads:
        raise UnsupportedCheckpoint(f"hidden_size is {hidden}; it must be a multiple of the {heads} attention heads")
    parallel = bool(config.get("use_parallel_residual", False))
    norms = ("input_norm",) if parallel else ("input_norm", "post_norm")
    by_head = {
        f"{short}_norm": tuple(f"self_attn.{short}_layernorm.norms.{head}.weight" for head in range(fields[count]))
        for short, count in (("q", "num_heads"), ("k", "num_kv_heads"))
    }
    fields |= {
        "names": replace(NAMES, fields={**NAMES.fields, **LAYER_NORMS, **by_head}),
        "rms_eps": float(config.get("layer_norm_eps", 1e-5)),
    }
    normed = bool(config.get("qk_layernorm", False))
    return DecoderSpec(
        **fields,
        layer_norm=True,
        norms=norms,
        parallel=parallel,
        qkv_bias=bool(config.get("use_qkv_bias", False)),
        qk_norm=normed,
        qk_layer_norm=normed,
    )


def nemotron(config: Mapping[str, Any]) -> DecoderSpec:
    """Nemotron: layer norms of weight 1 + w, an MLP of squared ReLU without a gate, half of each head rotated."""
    config = {"hidden_act": "relu2", "partial_rotary_factor": 0.5, **config}
    fields = shared(config, partial=True, max_position_embeddings=4096, initializer_range=0.0134)
    fields |= {
        "names": replace(NAMES, fields={**NAMES.fields, **LAYER_NORMS, **UP_ALONE}),
        "rms_eps": float(config.get("norm_eps", 1e-5)),
    }
    biased = bool(config.get("attention_bias", False))
    return DecoderSpec(
        **fields,
        layer_norm=True,
        norm_offset=1.0,
        gated=False,
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


UP_ALONE = {"gate_up": ("mlp.up_proj.weight",), "gate_up_bias": ("mlp.up_proj.bias",)}
"""The tensor names of the first layer of an MLP without a gate."""


def phimoe(config: Mapping[str, Any]) -> DecoderSpec:
    """Phi-3.5-MoE: layer norms, biases, and two experts of each token, chosen by SparseMixer."""
    defaults: dict[str, Any] = dict(num_key_value_heads=8, max_position_embeddings=131_072, rms_norm_eps=1e-5)
    fields = shared(config, rope_theta=1e6, **defaults)
    fields["names"] = replace(NAMES, fields={**NAMES.fields, **LAYER_NORMS})
    if fields["rope"].kind != "default":
        fields["rope"] = replace(fields["rope"], amplitude=mscale_of(config))
    biased = bool(config.get("attention_bias", False))
    return DecoderSpec(
        **fields,
        windows=(config.get("sliding_window"),) * fields["num_layers"],
        layer_norm=True,
        qkv_bias=biased,
        o_bias=biased,
        head_bias=bool(config.get("lm_head_bias", False)),
        experts=phimoe_experts(config, fields["num_layers"]),
    )


def mscale_of(config: Mapping[str, Any]) -> float:
    """The factor on cosine and sine of a Phi-3.5-MoE whose rotation is scaled."""
    given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    short, long = (given.get(f"{kind}_mscale") for kind in ("short", "long"))
    if not isinstance(short, int | float) or not isinstance(long, int | float):
        raise UnsupportedCheckpoint("the rotation is scaled; it needs short_mscale and long_mscale, two numbers")
    if short != long:
        raise NotNative(
            f"short_mscale is {short:g} and long_mscale is {long:g}; all sequences have one factor here, of any length"
        )
    return float(short)


def olmo2(config: Mapping[str, Any]) -> DecoderSpec:
    """OLMo 2: each half's output is normed before it is added, and queries and keys over all heads together."""
    fields = shared(config, rms_norm_eps=1e-5, max_position_embeddings=2048)
    biased = bool(config.get("attention_bias", False))
    fields["names"] = named(
        attention_out_norm="post_attention_layernorm.weight", mlp_out_norm="post_feedforward_layernorm.weight"
    )
    norms = ("attention_out_norm", "mlp_out_norm")
    return DecoderSpec(**fields, norms=norms, qk_norm=True, qk_norm_whole=True, qkv_bias=biased, o_bias=biased)


GEMMA_NAMES = dict(
    attention_out_norm="post_attention_layernorm.weight",
    post_norm="pre_feedforward_layernorm.weight",
    mlp_out_norm="post_feedforward_layernorm.weight",
)


def gemma(config: Mapping[str, Any], every: int) -> dict[str, Any]:
    """DecoderSpec fields that Gemma 2 and 3 share: scaled embeddings, and norms of weight 1 + w around each half.

    Every layer has a window except each `every`-th.
    """
    if config.get("use_bidirectional_attention"):
        raise NotNative("use_bidirectional_attention is on, and only causal decoders are served")
    defaults = dict(num_key_value_heads=4, head_dim=256, sliding_window=4096, tie_word_embeddings=True)
    config = {**defaults, **config, "use_sliding_window": True}
    fields = shared({**config, "hidden_act": config.get("hidden_activation") or "gelu_pytorch_tanh"})
    count = fields["num_layers"]
    kinds = [("full" if (index + 1) % every == 0 else "sliding") + "_attention" for index in range(count)]
    biased = bool(config.get("attention_bias", False))
    return fields | dict(
        names=named(**GEMMA_NAMES),
        norms=("input_norm", "attention_out_norm", "post_norm", "mlp_out_norm"),
        norm_offset=1.0,
        embedding_scale=float(fields["hidden_size"] ** 0.5),
        query_scale=float(config.get("query_pre_attn_scalar", 256) ** -0.5),
        windows=windows_of({**config, "layer_types": config.get("layer_types") or kinds}, count),
        qkv_bias=biased,
        o_bias=biased,
    )


def gemma2(config: Mapping[str, Any]) -> DecoderSpec:
    """Gemma 2: every second layer has a window; scores and logits are capped."""
    caps = dict(
        softcap=config.get("attn_logit_softcapping", 50.0), logit_softcap=config.get("final_logit_softcapping", 30.0)
    )
    return DecoderSpec(**gemma({"max_position_embeddings": 8192, **config}, 2), **caps)


def gemma3(config: Mapping[str, Any]) -> DecoderSpec:
    """Gemma 3. Five of six layers have a window and their own rotation. Queries and keys are normed."""
    config = {"max_position_embeddings": 131_072, **config}
    if config.get("attn_logit_softcapping") is not None:
        # Transformers' Gemma 3 reads this key but does not apply it.
        config = {**config, "attn_logit_softcapping": None}
    given = config.get("rope_parameters") or {}
    nested = {key: {**config, "rope_parameters": given.get(key)} for key in ("full_attention", "sliding_attention")}
    if "full_attention" not in given:
        nested["full_attention"] = {**config}
    local = {**nested["sliding_attention"], "rope_theta": config.get("rope_local_base_freq"), "rope_scaling": None}
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    fields = gemma({**config, "rope_parameters": None, "rope_scaling": None}, every)
    fields["rope"] = rope_of(nested["full_attention"], theta=1e6)
    return DecoderSpec(
        **fields, qk_norm=True, local_rope=rope_of(local), logit_softcap=config.get("final_logit_softcapping")
    )


def gemma3_text(config: Mapping[str, Any]) -> DecoderSpec:
    """The text decoder of a Gemma 3 that takes images. Published configs leave out what is Transformers' default."""
    return gemma3({"vocab_size": 262_208, "num_attention_heads": 8, **config})


def gemma4(config: Mapping[str, Any]) -> DecoderSpec:
    """Gemma 4: layers with a window and layers without have heads of their own, and some read another's keys."""
    return gemma4_spec(config, shared(gemma4_config(config)))


def gemma4_unified(config: Mapping[str, Any]) -> DecoderSpec:
    """The text decoder of Gemma 4 12B: a Gemma 4 without embeddings for each layer, and without experts."""
    defaults = dict(max_position_embeddings=262_144, sliding_window=1024, hidden_size_per_layer_input=0)
    return gemma4({**defaults, **config})


def deepseek_v2(config: Mapping[str, Any]) -> DecoderSpec:
    """DeepSeek-V2 and V2-Lite: latent attention, and experts besides shared ones after the first layers."""
    config = latent_config(config, V2)
    fields = latent_layers(config, shared(config))
    return DecoderSpec(**fields, experts=deepseek_v2_experts(config, fields["num_layers"]))


def deepseek_v3(config: Mapping[str, Any]) -> DecoderSpec:
    """DeepSeek-V3, R1 and Kimi K2: V2 with experts chosen by sigmoids and a correction."""
    config = latent_config(config, V3)
    fields = latent_layers(config, shared(config))
    return DecoderSpec(**fields, experts=deepseek_v3_experts(config, fields["num_layers"]))


def glm4_moe_lite(config: Mapping[str, Any]) -> DecoderSpec:
    """GLM-4.7-Flash: a small DeepSeek-V3 with one group of experts."""
    return deepseek_v3({**GLM, **config})


def youtu(config: Mapping[str, Any]) -> DecoderSpec:
    """Youtu-LLM: latent attention, and an MLP in every layer."""
    config = latent_config(config, YOUTU)
    fields = latent_layers(config, shared(config))
    fields["init_std"] = float(config.get("initializer_range") or 2 / (5 * fields["hidden_size"]) ** 0.5)
    return DecoderSpec(**fields)


def minicpm3(config: Mapping[str, Any]) -> DecoderSpec:
    """MiniCPM3: latent attention, an MLP in every layer, and multipliers of embeddings, stream and logits."""
    config = latent_config(config, MINICPM)
    return DecoderSpec(**minicpm_layers(config, shared(config)))


def named(**changed: str) -> WeightNames:
    """Llama's tensor names, with some of them changed."""
    return replace(NAMES, fields={**NAMES.fields, **{field: (name,) for field, name in changed.items()}})


NATIVE: dict[str, Callable[[Mapping[str, Any]], DecoderSpec]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Phi3ForCausalLM": phi3,
    "Olmo2ForCausalLM": olmo2,
    "StableLmForCausalLM": stablelm,
    "NemotronForCausalLM": nemotron,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma4ForCausalLM": gemma4,
    "OPTForCausalLM": opt,
    "FalconForCausalLM": falcon,
    "GPT2LMHeadModel": gpt2,
    "MixtralForCausalLM": mixtral,
    "PhimoeForCausalLM": phimoe,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "GptOssForCausalLM": gpt_oss,
    "Qwen3NextForCausalLM": qwen3_next,
    "Qwen3_5ForCausalLM": qwen3_5,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe,
    "Llama4ForCausalLM": llama4,
    "Lfm2ForCausalLM": lfm2,
    "BambaForCausalLM": bamba,
    "GraniteMoeHybridForCausalLM": granite_hybrid,
    "NemotronHForCausalLM": nemotron_h,
    "FalconH1ForCausalLM": falcon_h1,
    "DeepseekV2ForCausalLM": deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek_v3,
    "Glm4MoeLiteForCausalLM": glm4_moe_lite,
    "YoutuForCausalLM": youtu,
    "MiniCPM3ForCausalLM": minicpm3,
}
"""For each architecture, the function that reads its config.json."""

TEXT: dict[str, Callable[[Mapping[str, Any]], DecoderSpec]] = {
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "phimoe": phimoe,
    "qwen2": qwen2,
    "qwen2_vl_text": qwen2_vl,
    "qwen2_5_vl_text": qwen2_vl,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "qwen3_vl_text": qwen3_vl,
    "qwen3_vl_moe_text": qwen3_vl_moe,
    "phi3": phi3,
    "stablelm": stablelm,
    "nemotron": nemotron,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "gemma4_text": gemma4,
    "gemma4_unified_text": gemma4_unified,
    "gpt_oss": gpt_oss,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5_moe,
    "llama4_text": llama4,
}
"""For each model_type of a text_config, the function that reads it."""


def with_images(config: Mapping[str, Any]) -> DecoderSpec:
    """The text decoder of a model that also takes images."""
    return text_decoder(config, TEXT)


NATIVE |= dict.fromkeys(WITH_IMAGES, with_images)
