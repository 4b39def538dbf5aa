"""The text of models that also take images: read as published, with the tokens of Transformers' whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from holdfast.core.layout import Layout
from holdfast.lm.models.checkpoint_errors import MisfitCheckpoint, UnsupportedCheckpoint
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.families import NATIVE
from holdfast.lm.models.hf import NotPaged
from holdfast.lm.models.loader import eos_token_ids, load, own_dtype
from holdfast.lm.models.text_decoders import WITH_IMAGES
from holdfast.lm.padded.loading import load_unmodified
from tests.checkpoints import GEMMA_4, GEMMA_4_DENSE, GEMMA_4_TYPES, SIZES
from tests.lm.execution.test_parity import run
from tests.lm.execution.test_variants import case_of
from tests.lm.models.test_quantized import difference, quantized

SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
CLIP = dict(
    model_type="clip_vision_model",
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
)
SIGLIP = CLIP | dict(model_type="siglip_vision_model")
PIXTRAL = CLIP | dict(model_type="pixtral")
QWEN = dict(depth=1, hidden_size=32, out_hidden_size=64, num_heads=2, intermediate_size=32)
DEEPSTACK = QWEN | dict(deepstack_visual_indexes=[0])
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
HYBRID = dict(
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
SHARING = {key: value for key, value in GEMMA_4.items() if "per_layer_input" not in key}
LLAMA_4 = CLIP | dict(model_type=..., vision_output_dim=32, projector_input_dim=32, projector_output_dim=32)

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        "gemma3",
        dict(layer_types=["sliding_attention", "full_attention"], sliding_window=12),
        SIGLIP,
        dict(mm_tokens_per_image=4),
    ),
    "Gemma4ForConditionalGeneration": (
        "gemma4",
        GEMMA_4,
        SIGLIP | dict(model_type=..., num_hidden_layers=1, head_dim=16, position_embedding_size=16),
        {},
    ),
    "Gemma4UnifiedForConditionalGeneration": (
        "gemma4_unified",
        SHARING | GEMMA_4_DENSE | dict(num_hidden_layers=6, layer_types=GEMMA_4_TYPES, num_kv_shared_layers=2),
        dict(patch_size=4, mm_embed_dim=32, mm_posemb_size=16, output_proj_dims=64),
        dict(audio_config=dict(audio_embed_dim=16)),
    ),
    "InternVLForConditionalGeneration": (
        "internvl",
        dict(model_type="qwen2"),
        dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=[28, 28]),
        dict(tie_word_embeddings=False),
    ),
    "LlavaForConditionalGeneration": ("llava", dict(model_type="llama"), CLIP, {}),
    "LlavaNextForConditionalGeneration": (
        "llava_next",
        dict(model_type="mistral", sliding_window=12),
        CLIP,
        dict(image_grid_pinpoints=[[28, 28]]),
    ),
    "LlavaOnevisionForConditionalGeneration": (
        "llava_onevision",
        dict(model_type="qwen2"),
        SIGLIP,
        dict(image_grid_pinpoints=[[28, 28]]),
    ),
    "Mistral3ForConditionalGeneration": (
        "mistral3",
        dict(model_type="mistral", sliding_window=None),
        PIXTRAL,
        dict(image_token_index=0, tie_word_embeddings=False),
    ),
    "Qwen2VLForConditionalGeneration": (
        "qwen2_vl",
        dict(rope_parameters=SECTIONS),
        dict(depth=1, embed_dim=32, hidden_size=64, num_heads=2),
        {},
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        "qwen2_5_vl",
        dict(rope_parameters=SECTIONS),
        QWEN | dict(fullatt_block_indexes=[0]),
        dict(tie_word_embeddings=True),
    ),
    "Qwen3VLForConditionalGeneration": (
        "qwen3_vl",
        dict(rope_parameters=SECTIONS | {"mrope_interleaved": True}),
        DEEPSTACK,
        {},
    ),
    "Qwen3VLMoeForConditionalGeneration": (
        "qwen3_vl_moe",
        dict(rope_parameters=SECTIONS | {"mrope_interleaved": True}) | EXPERTS,
        DEEPSTACK,
        {},
    ),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", HYBRID, DEEPSTACK, {}),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", HYBRID | EXPERTS, DEEPSTACK, {}),
    "Llama4ForConditionalGeneration": (
        "llama4",
        dict(
            num_local_experts=2,
            intermediate_size_mlp=96,
            moe_layers=[1],
            no_rope_layers=[1, 0],
            attention_chunk_size=12,
            floor_scale=8,
        ),
        LLAMA_4,
        {},
    ),
}
"""For each architecture: its model_type, the text's differences, the vision config, and the whole model's entries."""


def written(directory: Path, architecture: str, **differences: Any) -> Any:
    """Write a small random checkpoint of a model that takes images. Returns Transformers' module of it.

    `differences` are further entries of the text's config.
    """
    kind, text, vision, rest = CASES[architecture]
    text = text | differences
    vision = {key: value for key, value in vision.items() if value is not ...}
    config = transformers.AutoConfig.for_model(kind, text_config={**SIZES, **text}, vision_config=vision, **rest)
    torch.manual_seed(0)
    module = getattr(transformers, architecture)._from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if key.endswith(("bias", "norm.weight", "layernorm.weight")):
                parameter.normal_(0.5, 0.5)  # a default of 0 or 1 would not show whether it is used
    module.eval().save_pretrained(directory)
    return module


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("architecture", WITH_IMAGES)
def test_the_text_of_a_model_with_images_has_the_tokens_of_the_whole_model(tmp_path: Path, architecture: str) -> None:
    module = written(tmp_path, architecture)
    if architecture.startswith("Llama4"):  # the whole model of Transformers 5.23 fails without an image
        module = module.language_model
    case = case_of(module, tmp_path, [60, 9, 40])
    assert isinstance(case.model, Decoder) and case.model.spec.architecture == architecture
    tokens, plans = run(case, case.model, 4, 2, budget=24)
    assert tokens == case.expected
    assert any(segment.start > 0 and segment.stop - segment.start > 1 for plan in plans for segment in plan.segments)


def test_the_text_that_is_not_native_runs_by_transformers_code_alone(tmp_path: Path) -> None:
    architecture = "Qwen3_5ForConditionalGeneration"
    whole = written(tmp_path, architecture, attention_bias=True)
    with pytest.raises(NotPaged, match=f"{architecture} cannot run on a paged cache"):
        load(tmp_path, device="cpu")
    model = load_unmodified(tmp_path, device=torch.device("cpu"))
    assert not any("vis" in name for name, _ in model.module.named_parameters())
    ids = torch.arange(1, 20)[None]
    with torch.inference_mode():
        torch.testing.assert_close(model.module(input_ids=ids).logits, whole(input_ids=ids).logits)


def test_experts_are_read_as_first_published_and_as_transformers_5_writes_them(tmp_path: Path) -> None:
    architecture = "Qwen3VLMoeForConditionalGeneration"
    module = written(tmp_path, architecture)
    case = case_of(module, tmp_path, [30, 9])
    tensors = load_file(tmp_path / "model.safetensors")
    turned = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()
    }
    for stored in (tensors, turned):
        save_file(stored, tmp_path / "model.safetensors")
        whole = load(tmp_path, device="cpu")
        assert run(case, whole, 4, 2, budget=24)[0] == case.expected
        parts = [load(tmp_path, device="cpu", layout=Layout(tp=2), rank=rank) for rank in range(2)]
        experts = [each.layers[0].experts for each in (whole, *parts) if isinstance(each, Decoder)]
        assert all(experts)
        all_of, *halves = [each for each in experts if each is not None]
        assert torch.equal(torch.cat([half.down for half in halves], 2), all_of.down)
        both = [torch.cat(pair, 1) for pair in zip(*(half.gate_up.chunk(2, 1) for half in halves), strict=True)]
        assert torch.equal(torch.cat(both, 1), all_of.gate_up)


def test_the_first_checkpoints_of_qwen_vl_have_no_text_config(tmp_path: Path) -> None:
    case = case_of(written(tmp_path, "Qwen2_5_VLForConditionalGeneration"), tmp_path, [40, 9])
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    text.pop("rope_parameters")
    scaling = {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    (tmp_path / "config.json").write_text(json.dumps(text | scaling | config))
    assert run(case, load(tmp_path, device="cpu"), 4, 2, budget=24)[0] == case.expected


def test_a_decoder_of_an_unknown_family_is_left_to_transformers(tmp_path: Path) -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": {"model_type": "novel"}}))
    with pytest.raises(UnsupportedCheckpoint, match=r"ForConditionalGeneration \(model_type 'llava'\) is no causal"):
        load(tmp_path, device="cpu")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedCheckpoint, match=r"config\.json has no 'text_config'"):
        load(tmp_path, device="cpu")


def test_a_tensor_of_no_part_is_named_as_the_checkpoint_names_it(tmp_path: Path) -> None:
    written(tmp_path, "Qwen3VLForConditionalGeneration")
    tensors = load_file(tmp_path / "model.safetensors")
    extra = "model.language_model.layers.0.mlp.extra.weight"
    save_file(tensors | {extra: torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(MisfitCheckpoint, match=f"holds 1 tensors .*, first {extra}"):
        load(tmp_path, device="cpu")
    missing = "model.language_model.layers.1.mlp.up_proj.weight"
    tensors.pop(missing)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(MisfitCheckpoint, match=f"no tensor {missing}"):
        load(tmp_path, device="cpu")


def test_entries_that_only_the_text_config_has_are_found_there(tmp_path: Path) -> None:
    config = {"text_config": {"dtype": "bfloat16", "eos_token_id": [7, 9]}}
    assert own_dtype(config) is torch.bfloat16
    assert eos_token_ids(tmp_path, config) == (7, 9)
    assert own_dtype(config | {"torch_dtype": "float16"}) is torch.float16
    assert eos_token_ids(tmp_path, config | {"eos_token_id": 3}) == (3,)


def test_every_architecture_with_images_is_native() -> None:
    assert {*WITH_IMAGES} <= {*NATIVE}


@pytest.mark.parametrize("method", ["awq-32", "gptq-32", "fp8-tensor"])
def test_quantized_text_is_read_by_the_names_of_the_whole_model(tmp_path: Path, method: str) -> None:
    module = quantized(tmp_path, "Qwen3", method)
    tensors = load_file(tmp_path / "model.safetensors")
    moved = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(moved | {"model.visual.patch_embed.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    how = text.pop("quantization_config")
    whole = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "quantization_config": how}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"text_config": text | {"model_type": "qwen3_vl_text"}}))
    model = load(tmp_path, device="cpu")
    assert isinstance(model, Decoder) and not isinstance(model.layers[0].qkv, torch.Tensor)
    assert difference(model, module) < 1e-5
