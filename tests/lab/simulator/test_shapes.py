"""Shapes of models: published sizes, and sizes read from config.json."""

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from holdfast.lab.simulator.devices import look_up
from holdfast.lab.simulator.shapes import MODELS, NATIVE, shape_from_config
from holdfast.lm.models import families
from holdfast.lm.models.text_decoders import WITH_IMAGES


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mistral-7b", 7.24),
        ("llama-3-8b", 8.03),
        ("llama-2-13b", 13.0),
        ("llama-2-70b", 69.0),
        ("yi-34b", 34.4),
        ("opt-13b", 13.1),
        ("opt-66b", 66.2),
        ("falcon-180b", 179.5),
    ],
)
def test_a_known_shape_has_the_published_number_of_weights(name, billions):
    assert MODELS[name].weight_bytes / 2e9 == pytest.approx(billions, rel=0.01)


def test_a_cached_position_takes_bytes_in_proportion_to_kv_heads():
    assert MODELS["llama-3-8b"].token_bytes == 131_072
    assert MODELS["llama-2-13b"].token_bytes == 4 * MODELS["llama-2-13b-gqa"].token_bytes


def test_an_unknown_shape_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"gpt-9 is unknown; there are .*mistral-7b"):
        look_up("model shape", MODELS, "gpt-9")


def test_sizes_are_read_from_a_config():
    mistral = MODELS["mistral-7b"]
    config = {
        "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14_336, "vocab_size": 32_000, "max_position_embeddings": 32_768, "sliding_window": 4096,
    }  # fmt: skip
    assert shape_from_config(config, "mistral-7b") == mistral
    opt = {
        "model_type": "opt", "num_hidden_layers": 40, "hidden_size": 5120, "num_attention_heads": 40,
        "ffn_dim": 20_480, "vocab_size": 50_272, "max_position_embeddings": 2048,
    }  # fmt: skip
    assert shape_from_config(opt, "opt-13b") == MODELS["opt-13b"]


RECURRENT = (
    "Qwen3Next",
    "Qwen3_5",
    "Qwen3_5Moe",
    "Lfm2",
    "Bamba",
    "GraniteMoeHybrid",
    "FalconH1",
    "NemotronH",
)
"""Native families with recurrent layers, whose steps are not simulated."""
LATENT = ("DeepseekV2", "DeepseekV3", "Glm4MoeLite", "Youtu", "MiniCPM3")
"""Native families with latent attention, whose steps are not simulated either."""


def test_native_architectures_are_recognized():
    inner = {*families.TEXT} | {"qwen2_vl", "qwen2_5_vl"}  # these two have the text's sizes next to vision_config
    assert inner - {"qwen3_5_text", "qwen3_5_moe_text"} <= {*NATIVE}
    outer = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, "") for kind in NATIVE} - {""}
    others = {f"{name}ForCausalLM" for name in (*RECURRENT, *LATENT)}
    assert outer == {*families.NATIVE} - {*WITH_IMAGES} - others
    sizes = {
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
        "vocab_size": 100, "max_position_embeddings": 64,
    }  # fmt: skip
    assert shape_from_config(sizes | {"model_type": "qwen3"}, "x").native
    assert not shape_from_config(sizes | {"model_type": "gemma"}, "x").native
    assert MODELS["opt-13b"].native and MODELS["falcon-180b"].native


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "num_attention_heads is None"),
        ({"num_attention_heads": "many"}, "is many"),
        ({"num_experts": 8}, "experts"),
        ({"kv_lora_rank": 512}, "latent attention, which the simulator does not support"),
    ],
)
def test_a_config_with_missing_or_invalid_sizes_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        shape_from_config(config, "x")
