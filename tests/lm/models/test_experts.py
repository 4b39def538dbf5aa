"""Mixtures of experts: each family's spec from its config.json, and logits equal to those of Transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.core.layout import Layout
from holdfast.lm.kernels.linear.experts.experts import ExpertRule
from holdfast.lm.models.checkpoint_errors import UnsupportedCheckpoint
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.decoder_spec import DecoderSpec, layer_elements
from holdfast.lm.models.families import NATIVE
from holdfast.lm.models.hf import _paged_logits
from holdfast.lm.models.loader import load
from tests.checkpoints import make

CONFIG: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def spec_of(architecture: str, **changes: Any) -> DecoderSpec:
    return NATIVE[architecture]({**CONFIG, "architectures": [architecture], **changes})


@torch.inference_mode()
def difference(model: Any, module: Any) -> float:
    """The largest difference of two models' logits, in relation to the largest logit."""
    ids = torch.arange(24) * 7 % 384 + 3
    expected = module(ids[None]).logits[0]
    return float((_paged_logits(model, ids) - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    "changes",
    [
        dict(norm_topk_prob=False),
        dict(mlp_only_layers=[1]),
        dict(decoder_sparse_step=2, num_hidden_layers=3),
        dict(attention_bias=True, tie_word_embeddings=True),
        dict(use_sliding_window=True, sliding_window=8),
        dict(num_experts_per_tok=1),
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_variants_of_qwen3_moe_give_the_logits_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    module = make(tmp_path, "Qwen3Moe", **changes)
    model = load(tmp_path, device="cpu")
    assert isinstance(model, Decoder)
    assert difference(model, module) < 1e-5


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Mixtral", dict(sliding_window=8, num_experts_per_tok=3)),
        ("GptOss", dict(swiglu_limit=0.5, swiglu_alpha=1.2)),
        ("Phimoe", dict(router_jitter_noise=0.3, num_local_experts=9)),
        ("Llama4Text", dict(floor_scale=3, attn_scale=0.9, moe_layers=[0, 3])),
        ("Llama4Text", dict(floor_scale=1, attention_chunk_size=5, num_experts_per_tok=2, hidden_act="silu")),
        ("GptOss", dict(layer_types=["full_attention", "sliding_attention"], attention_bias=False)),
    ],
)
def test_variants_of_other_families_do_too(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    module = make(tmp_path, family, **changes)
    model = load(tmp_path, device="cpu")
    assert isinstance(model, Decoder)
    assert difference(model, module) < 1e-5


def test_phimoe_is_known_by_the_name_that_it_was_published_with(tmp_path: Path) -> None:
    module = make(tmp_path, "Phimoe")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["PhiMoEForCausalLM"]}))
    model = load(tmp_path, device="cpu")
    assert isinstance(model, Decoder) and model.spec.architecture == "PhiMoEForCausalLM"
    assert difference(model, module) < 1e-5


def test_a_dense_layer_between_has_an_mlp_and_no_experts(tmp_path: Path) -> None:
    make(tmp_path, "Qwen3Moe", mlp_only_layers=[0])
    model = load(tmp_path, device="cpu")
    assert isinstance(model, Decoder)
    dense, sparse = model.layers
    assert dense.experts is None and dense.gate_up.shape == (256, 64)
    assert sparse.experts is not None and sparse.gate_up.shape[0] == 0
    assert model.spec.weight_bytes == sum(t.nbytes for t in load_file(tmp_path / "model.safetensors").values())


def test_families_read_their_own_keys() -> None:
    mixtral = spec_of("MixtralForCausalLM", num_local_experts=4).experts
    assert mixtral is not None
    assert (mixtral.count, mixtral.intermediate_size, mixtral.rule) == (4, 96, ExpertRule(top_k=2))
    assert mixtral.sparse == (True,) * 4
    qwen = spec_of("Qwen3MoeForCausalLM", decoder_sparse_step=2, mlp_only_layers=[3]).experts
    assert qwen is not None
    assert (qwen.count, qwen.intermediate_size, qwen.rule) == (128, 768, ExpertRule(top_k=8, normalized=False))
    assert qwen.sparse == (False, True, False, False)
    phi = spec_of("PhimoeForCausalLM", router_jitter_noise=0.02)
    assert phi.experts is not None and not phi.head_bias
    assert (phi.experts.count, phi.experts.rule) == (16, ExpertRule(top_k=2, normalized=False, jitter=0.02))
    oss = spec_of("GptOssForCausalLM", sliding_window=7)
    assert oss.experts is not None and oss.sinks and oss.qkv_bias and oss.o_bias
    assert oss.windows == (7, None, 7, None) and oss.head_dim == 64
    assert oss.experts.rule == ExpertRule(top_k=4, clamp=(1.702, 7.0))


def test_a_stage_is_weighed_by_the_weights_that_a_token_reads() -> None:
    spec = spec_of("Qwen3MoeForCausalLM", decoder_sparse_step=2, num_experts_per_tok=3, moe_intermediate_size=32)
    dense, sparse = layer_elements(spec, 0), layer_elements(spec, 1)
    assert dense - 3 * 64 * 96 == sparse - 3 * 3 * 64 * 32
    assert layer_elements(replace(spec, experts=None), 1) == dense


def test_sparsemixer_chooses_two_experts_with_a_tolerance_of_at_least_0() -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"router_jitter_noise is -0\.1; it must be at least 0"):
        spec_of("PhimoeForCausalLM", router_jitter_noise=-0.1)
    with pytest.raises(UnsupportedCheckpoint, match="num_experts_per_tok is 3; SparseMixer chooses 2"):
        spec_of("PhimoeForCausalLM", num_experts_per_tok=3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(num_experts_per_tok=0), "num_experts_per_tok is 0; of 8 experts, at most 8"),
        (dict(num_experts_per_tok=9), "num_experts_per_tok is 9; of 8 experts, at most 8"),
        (dict(hidden_act="gelu"), "hidden_act 'gelu' is not supported for experts"),
    ],
)
def test_other_experts_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=reason):
        spec_of("MixtralForCausalLM", **changes)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    make(tmp_path, "Mixtral")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedCheckpoint, match=r"no tensor model\.layers\.1\.block_sparse_moe\.experts\.2\.w3"):
        load(tmp_path, device="cpu")


def test_tp_divides_the_columns_of_an_expert(tmp_path: Path) -> None:
    make(tmp_path, "Qwen3Moe", moe_intermediate_size=33)
    with pytest.raises(ValueError, match="tp is 2; it must divide the model's 33 columns of an expert"):
        load(tmp_path, device="cpu", layout=Layout(tp=2), rank=0)


def test_fp8_is_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path, "Mixtral")
    with pytest.raises(UnsupportedCheckpoint, match="quantization is fp8, which experts do not have"):
        load(tmp_path, device="cpu", quantization="fp8")


@pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
def test_random_experts_are_the_same_however_ranks_share_them(tmp_path: Path, family: str) -> None:
    make(tmp_path, family)
    whole = load(tmp_path, device="cpu", load_format="random")
    parts = [load(tmp_path, device="cpu", load_format="random", layout=Layout(tp=2), rank=rank) for rank in range(2)]
    assert isinstance(whole, Decoder) and whole.layers[0].experts is not None
    downs = [part.layers[0].experts.down for part in parts if isinstance(part, Decoder) and part.layers[0].experts]
    assert torch.equal(torch.cat(downs, 2), whole.layers[0].experts.down)
    assert whole.layers[0].experts.down.std() > 0.1
