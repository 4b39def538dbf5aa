"""The spec that each native family reads from its config.json."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from holdfast.lm.models.base import UnsupportedCheckpoint
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
OWN_NAMES: dict[str, dict[str, int]] = {
    "GPT2LMHeadModel": {"vocab_size": 100, "n_embd": 128, "n_layer": 4, "n_head": 32},
    "OPTForCausalLM": {**PLAIN, "ffn_dim": 96, "word_embed_proj_dim": 128},
}


@pytest.mark.parametrize("architecture", NATIVE)
def test_missing_config_fields_have_the_defaults_of_transformers(architecture: str) -> None:
    with_images = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    known = (*with_images.items(), *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    kind = {name: kind for kind, name in known}[architecture]
    given: dict[str, Any] = OWN_NAMES.get(architecture, PLAIN)
    if architecture in WITH_IMAGES:
        kind = "gemma3" if architecture.startswith("Gemma3") else kind
        given = {"text_config": {**given, "model_type": AutoConfig.for_model(kind).get_text_config().model_type}}
    whole = AutoConfig.for_model(kind, **given).to_dict()
    named = {"architectures": [architecture], "model_type": kind}
    assert NATIVE[architecture]({**given, **named}) == NATIVE[architecture]({**whole, **named})
