"""The spec that each native family reads from its config.json."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from holdfast.lm.models.checkpoint_errors import NotNative, UnsupportedCheckpoint
from holdfast.lm.models.decoder_spec import DecoderSpec, layer_shapes
from holdfast.lm.models.families import NATIVE
from holdfast.lm.models.text_decoders import WITH_IMAGES

CONFIG: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def spec_of(architecture: str, **changes: Any) -> DecoderSpec:
    return NATIVE[architecture]({**CONFIG, "architectures": [architecture], **changes})


def test_llama_has_no_optional_parts() -> None:
    spec = spec_of("LlamaForCausalLM")
    assert not (spec.qk_norm or spec.qkv_bias or spec.o_bias or spec.mlp_bias or spec.tied or spec.windows)
    assert (spec.head_dim, spec.rope.theta, spec.scale) == (16, 10000.0, 0.25)
    assert layer_shapes(spec)["qkv"] == ((64, 64), (32, 64), (32, 64))


def test_llama_configs_may_add_biases() -> None:
    spec = spec_of("LlamaForCausalLM", attention_bias=True, mlp_bias=True)
    shapes = layer_shapes(spec)
    assert shapes["qkv_bias"] == ((64,), (32,), (32,))
    assert (shapes["o_bias"], shapes["down_bias"]) == (((64,),), ((64,),))


def test_qwen2_has_biases_on_its_projections_only() -> None:
    spec = spec_of("Qwen2ForCausalLM")
    assert spec.qkv_bias and not spec.o_bias
    assert spec.windows == (None, None, None)


def test_qwen3_norms_heads_of_128() -> None:
    spec = spec_of("Qwen3ForCausalLM")
    assert spec.qk_norm and not spec.qkv_bias
    assert spec.head_dim == 128
    assert layer_shapes(spec)["q_norm"] == ((128,),)


def test_stablelm_rotates_a_quarter_of_each_head_and_norms_by_layer_norms() -> None:
    spec = spec_of("StableLmForCausalLM")
    assert spec.layer_norm and spec.gated and not (spec.qkv_bias or spec.qk_norm or spec.parallel)
    assert (spec.rope.rotated(16), spec.rms_eps) == (4, 1e-5)
    assert layer_shapes(spec)["post_norm"] == ((64,), (64,))
    larger = spec_of("StableLmForCausalLM", qk_layernorm=True, use_parallel_residual=True)
    assert layer_shapes(larger)["q_norm"] == ((16,),) * 4 and layer_shapes(larger)["k_norm"] == ((16,),) * 2
    assert larger.names.fields["k_norm"][1] == "self_attn.k_layernorm.norms.1.weight"
    assert larger.norms == ("input_norm",)
    with pytest.raises(UnsupportedCheckpoint, match="hidden_size is 66; it must be a multiple of the 4 attention"):
        spec_of("StableLmForCausalLM", hidden_size=66)


def test_nemotron_has_squared_relu_without_a_gate_and_norms_of_1_plus_w() -> None:
    spec = spec_of("NemotronForCausalLM", norm_eps=1e-3)
    assert (spec.activation, spec.gated, spec.norm_offset, spec.rms_eps) == ("relu2", False, 1.0, 1e-3)
    assert spec.rope.rotated(16) == 8
    assert layer_shapes(spec)["gate_up"] == ((96, 64),)
    assert spec_of("NemotronForCausalLM", partial_rotary_factor=0.25).rope.rotated(16) == 4


def test_phimoe_has_one_factor_of_its_scaled_rotation_for_all_lengths() -> None:
    factors = dict(short_factor=[1.0] * 8, long_factor=[2.0] * 8, original_max_position_embeddings=32)
    scaling = dict(rope_type="longrope", **factors)
    spec = spec_of("PhimoeForCausalLM", rope_scaling=scaling | dict(short_mscale=1.25, long_mscale=1.25))
    assert (spec.rope.amplitude, spec.rope.theta, spec.plain_positions) == (1.25, 1e6, 32)
    with pytest.raises(NotNative, match=r"short_mscale is 1.25 and long_mscale is 1.5"):
        spec_of("PhimoeForCausalLM", rope_scaling=scaling | dict(short_mscale=1.25, long_mscale=1.5))
    with pytest.raises(UnsupportedCheckpoint, match="it needs short_mscale and long_mscale"):
        spec_of("PhimoeForCausalLM", rope_scaling=scaling | dict(short_mscale=1.25))


def test_llama4_has_chunks_in_rotated_layers_and_experts_in_those_listed() -> None:
    spec = spec_of("Llama4ForCausalLM", num_hidden_layers=8, interleave_moe_layer_step=2)
    assert spec.chunked and spec.windows == (8192, 8192, 8192, None) * 2
    assert spec.unrotated == (False, False, False, True) * 2 == spec.other_layers
    assert spec.rope.interleaved and spec.other_rope is not None and spec.other_rope.kind == "none"
    assert (spec.temperature, spec.intermediate_size, spec.head_dim) == ((0.1, 8192), 16_384, 128)
    assert spec.experts is not None and spec.experts.sparse == (False, True) * 4
    assert spec.experts.intermediate_size == 96 and spec.experts.rule.per_token == 2


def test_llama4_configs_may_list_its_layers() -> None:
    kinds = ["full_attention", "chunked_attention", "full_attention"]
    lists = dict(no_rope_layers=[0, 1, 1], moe_layers=[0], layer_types=kinds, attention_chunk_size=7)
    spec = spec_of("Llama4ForCausalLM", **lists, attn_temperature_tuning=False, use_qk_norm=False)
    assert spec.windows == (None, 7, None) and spec.unrotated == (True, False, False)
    assert spec.temperature is None and not spec.unit_qk_norm
    assert spec.experts is not None and spec.experts.sparse == (True, False, False)
    with pytest.raises(UnsupportedCheckpoint, match="layer type 'sliding_attention' is not supported"):
        spec_of("Llama4ForCausalLM", layer_types=["sliding_attention"] * 3)
    with pytest.raises(UnsupportedCheckpoint, match="layer_types lists 2 layers of 3"):
        spec_of("Llama4ForCausalLM", layer_types=kinds[:2])
    with pytest.raises(UnsupportedCheckpoint, match="no_rope_layers lists 2 layers of 3"):
        spec_of("Llama4ForCausalLM", no_rope_layers=[1, 0])
    for key in ("attention_chunk_size", "floor_scale", "no_rope_layer_interval", "interleave_moe_layer_step"):
        with pytest.raises(UnsupportedCheckpoint, match=f"{key} is 0; it must be at least 1"):
            spec_of("Llama4ForCausalLM", **{key: 0})


def test_mistral_windows_all_layers_or_none() -> None:
    assert spec_of("MistralForCausalLM").windows == (4096, 4096, 4096)
    assert spec_of("MistralForCausalLM", sliding_window=None).windows == (None, None, None)


def test_qwen_windows_its_upper_layers_or_the_listed_ones() -> None:
    given = {"use_sliding_window": True, "sliding_window": 32}
    assert spec_of("Qwen2ForCausalLM", **given, max_window_layers=2).windows == (None, None, 32)
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    assert spec_of("Qwen3ForCausalLM", **given, layer_types=kinds).windows == (32, None, None)
    assert spec_of("Qwen3ForCausalLM", layer_types=kinds).windows == (None, None, None)


def test_unknown_layer_types_are_refused() -> None:
    with pytest.raises(UnsupportedCheckpoint, match="'linear_attention'"):
        spec_of("Qwen3ForCausalLM", layer_types=["linear_attention"] * 3)
    with pytest.raises(UnsupportedCheckpoint, match="lists 2 layers of 3"):
        spec_of("Qwen3ForCausalLM", layer_types=["full_attention"] * 2)


def test_every_head_has_keys_of_its_own_where_the_config_does_not_say() -> None:
    config = {key: value for key, value in CONFIG.items() if key != "num_key_value_heads"}
    for architecture in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        spec = NATIVE[architecture]({**config, "architectures": [architecture]})
        assert (spec.num_heads, spec.num_kv_heads) == (4, 4)
        assert layer_shapes(spec)["qkv"] == ((4 * spec.head_dim, 64),) * 3
    assert spec_of("LlamaForCausalLM", num_key_value_heads=None).num_kv_heads == 4


def test_mistral_has_eight_heads_of_keys_where_the_config_does_not_say() -> None:
    config = {key: value for key, value in CONFIG.items() if key != "num_key_value_heads"}
    spec = NATIVE["MistralForCausalLM"]({**config, "architectures": ["MistralForCausalLM"], "num_attention_heads": 16})
    assert (spec.num_heads, spec.num_kv_heads) == (16, 8)


PLAIN: dict[str, int] = {
    "vocab_size": 100,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
}
OWN_NAMES: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"vocab_size": 100, "n_embd": 128, "n_layer": 4, "n_head": 32},
    "BambaForCausalLM": {**PLAIN, "attn_layer_indices": [1]},
    "GraniteMoeHybridForCausalLM": {**PLAIN, "layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "NemotronHForCausalLM": {**PLAIN, "hybrid_override_pattern": "M-*-"},
    "OPTForCausalLM": {**PLAIN, "ffn_dim": 96, "word_embed_proj_dim": 128},
    "DeepseekV2ForCausalLM": {**PLAIN, "num_experts_per_tok": 6},
}
OWN_KINDS = {"DeepseekV3ForCausalLM": "deepseek_v3"}
"""The model_type of architectures that have several in Transformers."""


@pytest.mark.parametrize("architecture", NATIVE)
def test_missing_config_fields_have_the_defaults_of_transformers(architecture: str) -> None:
    with_images = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    known = (*with_images.items(), *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    kind = ({name: kind for kind, name in known} | OWN_KINDS)[architecture]
    given: dict[str, Any] = OWN_NAMES.get(architecture, PLAIN)
    if architecture in WITH_IMAGES:
        kind = "gemma3" if architecture.startswith("Gemma3") else kind
        given = {"text_config": {**given, "model_type": AutoConfig.for_model(kind).get_text_config().model_type}}
    whole = AutoConfig.for_model(kind, **given).to_dict()
    named = {"architectures": [architecture], "model_type": kind}
    assert NATIVE[architecture]({**given, **named}) == NATIVE[architecture]({**whole, **named})
