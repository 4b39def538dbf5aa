"""Gemma 4's configs and tensor names, as published and as Transformers writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.lm.kernels.cache.kv_cache import KVShape
from holdfast.lm.models.checkpoint_errors import MisfitCheckpoint, NotNative, UnsupportedCheckpoint
from holdfast.lm.models.decoder_spec import DecoderSpec
from holdfast.lm.models.gemma4_decoder import Gemma4Decoder
from holdfast.lm.models.loader import load, native_spec, stored_names
from tests.checkpoints import GEMMA_4, GEMMA_4_DENSE, GEMMA_4_MIXTURE, VOCAB, make
from tests.lm.execution.test_parity import run
from tests.lm.execution.test_variants import case_of
from tests.lm.models.cut_prompts import logits_of

ARCHITECTURE = "Gemma4ForConditionalGeneration"
ROPES = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
E2B = dict(
    model_type="gemma4_text",
    hidden_size=1536,
    intermediate_size=6144,
    num_hidden_layers=35,
    num_attention_heads=8,
    num_key_value_heads=1,
    head_dim=256,
    global_head_dim=512,
    layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7,
    num_kv_shared_layers=20,
    use_double_wide_mlp=True,
    hidden_size_per_layer_input=256,
    vocab_size_per_layer_input=262144,
    final_logit_softcapping=30.0,
    sliding_window=512,
    rope_parameters=ROPES,
)
MIXTURE = dict(
    model_type="gemma4_text",
    hidden_size=2816,
    intermediate_size=2112,
    num_hidden_layers=30,
    num_attention_heads=16,
    num_key_value_heads=8,
    num_global_key_value_heads=2,
    head_dim=256,
    global_head_dim=512,
    attention_k_eq_v=True,
    enable_moe_block=True,
    num_experts=128,
    top_k_experts=8,
    moe_intermediate_size=704,
    hidden_size_per_layer_input=0,
    num_kv_shared_layers=0,
    sliding_window=1024,
    rope_parameters=ROPES,
)


def published(text: dict[str, Any], **changed: Any) -> DecoderSpec:
    return native_spec({"architectures": [ARCHITECTURE], "model_type": "gemma4", "text_config": {**text, **changed}})


def shapes_of(spec: DecoderSpec) -> list[KVShape]:
    """The sizes of keys and values, of the layers that have their own."""
    own = [each for each in spec.layer_specs if each.kv_source is None]
    return [KVShape(each.num_kv_heads, each.head_dim, each.head_dim) for each in own]


@pytest.mark.parametrize("differences", [{}, GEMMA_4_DENSE, GEMMA_4_MIXTURE], ids=["e2b", "dense", "mixture"])
def test_logits_are_those_of_transformers(tmp_path: Path, differences: dict[str, Any]) -> None:
    module = make(tmp_path, "Gemma4Text", **differences)
    model = load(tmp_path, device="cpu", dtype="float32")
    assert isinstance(model, Gemma4Decoder)
    ids = torch.arange(60) * 7 % VOCAB
    with torch.inference_mode():
        expected = module(ids[None]).logits[0]
    torch.testing.assert_close(logits_of(model, ids), expected, rtol=0, atol=2e-4)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_a_published_e2b_keeps_fifteen_layers_of_two_head_sizes() -> None:
    spec = published(E2B)
    assert shapes_of(spec) == [*[KVShape(1, 256, 256)] * 4, KVShape(1, 512, 512)] * 3
    assert [each.kv_source for each in spec.layer_specs[13:20]] == [None, None, 13, 13, 13, 13, 14]
    assert {each.intermediate_size for each in spec.layer_specs[:15]} == {6144}
    assert {each.intermediate_size for each in spec.layer_specs[15:]} == {12_288}
    assert spec.token_tables == {"model.embed_tokens_per_layer.weight": (262_144, 35 * 256)}
    assert spec.logit_softcap == 30.0 and spec.tied and spec.windows[:5] == (512, 512, 512, 512, None)


def test_a_published_mixture_has_keys_as_values_in_layers_of_full_attention() -> None:
    spec = published(MIXTURE)
    assert shapes_of(spec) == [*[KVShape(8, 256, 256)] * 5, KVShape(2, 512, 512)] * 5
    names = stored_names(spec)
    assert "model.layers.4.self_attn.v_proj.weight" in names and "model.layers.5.self_attn.v_proj.weight" not in names
    assert {"model.layers.0.mlp.up_proj.weight", "model.layers.0.experts.down_proj"} <= names
    assert spec.experts is not None and spec.experts.rule.top_k == 8 and spec.experts.count == 128
    assert not spec.token_tables and not spec.tensors


def test_the_last_layer_has_full_attention_whatever_the_config_lists() -> None:
    spec = published(MIXTURE, num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"])
    assert spec.windows == (None, None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(num_kv_shared_layers=35), "num_kv_shared_layers is 35; of 35 layers, at least one"),
        (dict(num_kv_shared_layers=31), "is 31 of 35 layers; no layer before them has full_attention"),
        (dict(num_key_value_heads=3), "8 attention heads cannot share 3"),
        (dict(layer_types=["chunked_attention"] * 35), "layer type 'chunked_attention' is not supported"),
        (dict(layer_types=["full_attention"]), "layer_types lists 1 layers of 35"),
        (dict(vocab_size_per_layer_input=100), "vocab_size_per_layer_input is 100; it must be at least vocab_size"),
        (dict(enable_moe_block=True), "num_experts is 0; it must be at least 1"),
        (dict(enable_moe_block=True, num_experts=4, top_k_experts=5), "top_k_experts is 5; of 4 experts, at most 4"),
        (dict(sliding_window=0), "sliding_window is 0; it must be at least 1"),
        (
            dict(rope_parameters=ROPES | {"full_attention": ROPES["full_attention"] | {"partial_rotary_factor": 1.5}}),
            "partial_rotary_factor is 1.5; it must be above 0 and at most 1",
        ),
    ],
)
def test_a_config_that_makes_no_model_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=message):
        published(E2B, **changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(use_bidirectional_attention="all"), "only causal decoders are served"),
        (dict(rope_parameters={"full_attention": {"rope_type": "yarn"}}), "full_attention is 'yarn'"),
        (dict(per_layer_config={"4": {"head_dim": 512}, "9": {"head_dim": 128}}), "layer 9 has heads"),
    ],
)
def test_a_variant_is_left_to_transformers(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(NotNative, match=message):
        published(E2B, **changed)


def test_images_that_text_may_see_both_ways_leave_text_causal() -> None:
    assert published(MIXTURE, use_bidirectional_attention="vision").windows == published(MIXTURE).windows


@pytest.mark.parametrize("differences", [{}, GEMMA_4_DENSE, GEMMA_4_MIXTURE], ids=["e2b", "dense", "mixture"])
def test_a_checkpoint_as_published_has_the_tokens_of_transformers(tmp_path: Path, differences: dict[str, Any]) -> None:
    case = case_of(make(tmp_path, "Gemma4Text", **differences), tmp_path, [60, 9])
    config = json.loads((tmp_path / "config.json").read_text())
    own = config.pop("per_layer_config")[str(config["layer_types"].index("full_attention"))]
    config |= {"global_head_dim": own["head_dim"], "num_global_key_value_heads": own.get("num_key_value_heads")}
    whole = {"architectures": [ARCHITECTURE], "model_type": "gemma4", "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    stored = load_file(tmp_path / "model.safetensors")
    moved = {"model.language_model." + name.removeprefix("model."): tensor for name, tensor in stored.items()}
    towers = ("vision_tower.a", "embed_vision.b", "audio_tower.c", "embed_audio.d")
    moved |= {f"model.{tower}.weight": torch.zeros(2) for tower in towers}
    if not differences:  # published checkpoints have these, and nothing reads them
        last = "model.language_model.layers.5.self_attn."
        moved |= {last + name: torch.zeros(3) for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight")}
    save_file(moved, tmp_path / "model.safetensors")
    model = load(tmp_path, device="cpu")
    assert isinstance(model, Gemma4Decoder)
    assert run(case, model, 4, 2, budget=24)[0] == case.expected


def test_keys_of_a_layer_that_has_its_own_are_not_ignored(tmp_path: Path) -> None:
    make(tmp_path, "Gemma4Text", **GEMMA_4_DENSE)
    stored = load_file(tmp_path / "model.safetensors")
    save_file(stored | {"model.layers.2.self_attn.v_proj.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(MisfitCheckpoint, match=r"layers\.2\.self_attn\.v_proj"):
        load(tmp_path, device="cpu")


def test_random_weights_need_no_checkpoint(tmp_path: Path) -> None:
    make(tmp_path, "Gemma4Text", **GEMMA_4)
    (tmp_path / "model.safetensors").unlink()
    model = load(tmp_path, device="cpu", load_format="random")
    assert isinstance(model, Gemma4Decoder)
    assert all((layer.more["layer_scale"] == 1).all() for layer in model.layers)
