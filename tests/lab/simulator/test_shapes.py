"""Shapes of models: published sizes, and sizes read from config.json."""

import json

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from holdfast.lab.simulator.devices import look_up
from holdfast.lab.simulator.shapes import MODELS, NATIVE, shape_from_config
from holdfast.lm.models import families
from holdfast.lm.models.decoder_spec import elements_of, shapes_of_layer
from holdfast.lm.models.loader import decoder_spec
from holdfast.lm.models.text_decoders import WITH_IMAGES
from tests.checkpoints import make


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


HYBRIDS = {
    "Qwen3_5Text": {},
    "Qwen3Next": {"num_experts": 0},
    "Lfm2": {"block_auto_adjust_ff_dim": True, "block_multiple_of": 40},
    "Bamba": {},
    "GraniteMoeHybrid": {"intermediate_size": 40},
    "FalconH1": {},
    "NemotronH": {},
}
"""Families with recurrent layers, and how the tests' checkpoints differ."""
LINEAR = {
    "attention": ("qkv", "o"),
    "mlp": ("gate_up", "down", "mlp_in", "mlp_out"),
    "recurrent": ("mixer_in", "conv", "mixer_out"),
}


@pytest.mark.parametrize("family", HYBRIDS)
def test_sizes_of_recurrent_layers_are_those_of_the_engine(tmp_path, family):
    make(tmp_path, family, **HYBRIDS[family])
    spec = decoder_spec(tmp_path)
    shape = shape_from_config(json.loads((tmp_path / "config.json").read_text()), "x")
    layers = [shapes_of_layer(spec, layer) for layer in range(spec.num_layers)]
    counted = {
        part: sum(elements_of(each[field]) for each in layers for field in fields if field in each)
        for part, fields in LINEAR.items()
    }
    assert shape.weights == counted
    state = sum(spec.recurrent) * sum(tensor.nbytes for tensor in spec.recurrence.state(torch.bfloat16))
    assert shape.state_bytes == state > 0
    assert shape.token_bytes == 2 * 2 * sum(spec.cached) * spec.num_kv_heads * spec.head_dim
    assert shape.layers == spec.num_layers and shape.native


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}},
}


@pytest.mark.parametrize(
    ("given", "size", "plain"),
    [
        ({}, 2.0, ()),
        (GPTQ, 0.5 + 3 / 128, ()),
        (GPTQ | {"group_size": -1}, 0.5 + 3 / 4096, ()),
        (GPTQ | {"dynamic": {"-:.*attn.*": {}, "-:.*mtp.*": {}}}, 0.5 + 3 / 128, ("attention", "recurrent")),
        ({"quant_method": "awq", "modules_to_not_convert": ["linear_attn", "lm_head"]}, 0.5 + 3 / 128, ("recurrent",)),
        (PACKED | {"ignore": ["re:.*self_attn.*", "lm_head"]}, 0.5 + 3 / 32, ("attention",)),
        (PACKED | {"ignore": ["model.layers.3.mlp.down_proj"]}, 0.5 + 3 / 32, ("mlp",)),
        ({"quant_method": "fp8", "modules_to_not_convert": ["linear_attn.in_proj_a"]}, 1.0, ()),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 2.0, ()),
        ({"quant_method": "mxfp4"}, 2.0, ()),
    ],
)
def test_quantized_checkpoints_take_their_own_bytes(given, size, plain):
    hybrid = {
        "model_type": "qwen3_5_text", "num_hidden_layers": 8, "hidden_size": 4096, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 12_288, "vocab_size": 1000,
        "max_position_embeddings": 4096, "quantization_config": given,
    }  # fmt: skip
    shape = shape_from_config(hybrid, "x")
    wanted = sum(count * (2.0 if part in plain else size) for part, count in shape.weights.items())
    assert shape.stored.plain == plain
    assert shape.layer_bytes == pytest.approx(wanted / 8, rel=1e-6)


LATENT = ("DeepseekV2", "DeepseekV3", "Glm4MoeLite", "Youtu", "MiniCPM3")
"""Native families with latent attention, whose steps are not simulated."""


def test_native_architectures_are_recognized():
    inner = {*families.TEXT} | {"qwen2_vl", "qwen2_5_vl"}  # these two have the text's sizes next to vision_config
    assert inner - {"qwen3_5_moe_text", "gemma4_text", "gemma4_unified_text"} <= {*NATIVE}
    outer = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, "") for kind in NATIVE} - {""}
    others = {f"{name}ForCausalLM" for name in (*LATENT, "Qwen3_5Moe", "Gemma4")}
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
        ({"model_type": "gemma4_text"}, "layers that differ in heads"),
        ({"kv_lora_rank": 512}, "latent attention, which the simulator does not support"),
    ],
)
def test_a_config_with_missing_or_invalid_sizes_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        shape_from_config(config, "x")
