"""Checkpoints with latent attention: their configs, and logits that equal those of Transformers."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.lm.kernels.cache.kv_cache import KVShape
from holdfast.lm.kernels.linear.experts.experts import ALL_EXPERTS, Groups
from holdfast.lm.models.checkpoint_errors import MisfitCheckpoint, NotNative, UnsupportedCheckpoint
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.decoder_spec import DecoderSpec, layer_shapes
from holdfast.lm.models.families import NATIVE
from holdfast.lm.models.hf import _paged_logits
from holdfast.lm.models.loader import load
from tests.checkpoints import make

YARN = dict(rope_type="yarn", factor=40.0, beta_fast=32, beta_slow=1, original_max_position_embeddings=4096)
V2_LITE: dict[str, Any] = dict(
    architectures=["DeepseekV2ForCausalLM"],
    vocab_size=102_400,
    hidden_size=2048,
    intermediate_size=10_944,
    moe_intermediate_size=1408,
    num_hidden_layers=27,
    num_attention_heads=16,
    num_key_value_heads=16,
    n_shared_experts=2,
    n_routed_experts=64,
    routed_scaling_factor=1.0,
    kv_lora_rank=512,
    q_lora_rank=None,
    qk_rope_head_dim=64,
    v_head_dim=128,
    qk_nope_head_dim=128,
    topk_method="greedy",
    n_group=1,
    topk_group=1,
    num_experts_per_tok=6,
    moe_layer_freq=1,
    first_k_dense_replace=1,
    norm_topk_prob=False,
    scoring_func="softmax",
    max_position_embeddings=163_840,
    rope_theta=10_000,
    rope_scaling=dict(type="yarn", mscale=0.707, mscale_all_dim=0.707, **YARN),
)
"""The config that DeepSeek-V2-Lite is published with."""
V3: dict[str, Any] = dict(
    architectures=["DeepseekV3ForCausalLM"],
    vocab_size=129_280,
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=128,
    num_key_value_heads=128,
    n_group=8,
    topk_group=4,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    max_position_embeddings=163_840,
    num_nextn_predict_layers=1,
    rope_scaling=dict(type="yarn", mscale=1.0, mscale_all_dim=1.0, **YARN),
)
"""A part of the config that DeepSeek-V3 is published with."""


MINICPM: dict[str, Any] = dict(
    architectures=["MiniCPM3ForCausalLM"],
    vocab_size=73_448,
    hidden_size=2560,
    num_hidden_layers=62,
    num_attention_heads=40,
)


def spec_of(config: dict[str, Any], **changes: Any) -> DecoderSpec:
    return NATIVE[config["architectures"][0]]({**config, **changes})


def test_v2_lite_computes_queries_from_the_stream_and_keeps_576_numbers_per_token() -> None:
    spec = spec_of(V2_LITE)
    assert spec.latent is not None and spec.experts is not None
    assert (spec.latent.cached, spec.latent.query_rank, spec.num_kv_heads, spec.head_dim) == (576, 0, 1, 576)
    shapes = layer_shapes(spec)
    assert shapes["qkv"] == ((16 * 192, 2048), (576, 2048))
    assert shapes["latent_up"] == ((16 * 256, 512),) and shapes["o"] == ((2048, 2048),)
    assert spec.experts.shared_size == 2816 and spec.experts.sparse == (False, *[True] * 26)
    rule = spec.experts.rule
    assert (rule.top_k, rule.sigmoid, rule.normalized, rule.groups) == (6, False, False, ALL_EXPERTS)
    assert spec.scale == pytest.approx(192**-0.5 * (1 + 0.0707 * math.log(40)) ** 2)
    assert (spec.rope.interleaved, spec.rope.amplitude) == (True, 1.0)


def test_v3_chooses_experts_of_four_groups_by_corrected_sigmoids() -> None:
    spec = spec_of(V3)
    assert spec.latent is not None and spec.experts is not None
    assert (spec.latent.query_rank, spec.latent.rank) == (1536, 512)
    rule = spec.experts.rule
    assert (rule.sigmoid, rule.normalized, rule.factor, rule.groups) == (True, True, 2.5, Groups(8, 4, 2))
    assert spec.experts.names.correction == "mlp.gate.e_score_correction_bias"
    assert spec.experts.sparse.index(True) == 3
    assert spec.names.others == ("model.layers.61.",)


def test_kimi_k2_and_glm_have_one_group_of_experts() -> None:
    kimi = spec_of(V3, n_group=1, topk_group=1, n_routed_experts=384, num_attention_heads=64, num_key_value_heads=64)
    assert kimi.experts is not None and kimi.experts.rule.groups == ALL_EXPERTS
    glm = NATIVE["Glm4MoeLiteForCausalLM"](
        dict(
            architectures=["Glm4MoeLiteForCausalLM"],
            vocab_size=154_880,
            hidden_size=2048,
            num_hidden_layers=47,
            num_attention_heads=20,
            num_key_value_heads=20,
        )
    )
    assert glm.experts is not None and glm.latent is not None
    assert (glm.experts.rule.factor, glm.experts.rule.groups, glm.latent.query) == (1.8, ALL_EXPERTS, 256)
    assert (glm.rms_eps, glm.latent.eps) == (1e-5, 1e-6)


@pytest.mark.parametrize(
    ("config", "changes", "reason"),
    [
        (V2_LITE, dict(topk_method="noaux"), "topk_method 'noaux' is not supported; known: greedy, group_limited"),
        (V3, dict(n_group=7), "n_group is 7 and topk_group is 4; 256 experts have no such groups"),
        (V3, dict(topk_group=9), "n_group is 8 and topk_group is 9; 256 experts have no such groups"),
        (V3, dict(n_group=128, topk_group=2), "2 groups of 2 experts are too few for num_experts_per_tok 8"),
        (V3, dict(kv_lora_rank=0), "kv_lora_rank is 0; it must be at least 1"),
        (V3, dict(qk_rope_head_dim=63), "qk_rope_head_dim is 63; it must be even, as pairs are rotated"),
        (V3, dict(mlp_layer_types=["dense"]), "mlp_layer_types lists 1 layers of 61"),
        (V3, dict(n_group=0), "n_group is 0; it must be at least 1"),
        (MINICPM, dict(scale_depth=-1.0), "scale_depth is -1; it must be above 0"),
        (MINICPM, dict(scale_emb=0), "scale_emb is 0; it must be above 0"),
    ],
)
def test_bad_configs_are_refused_by_the_value(config: dict[str, Any], changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=reason):
        spec_of(config, **changes)


def test_biases_that_are_not_computed_are_left_to_transformers() -> None:
    with pytest.raises(NotNative, match="attention_bias is on without q_lora_rank"):
        spec_of(V2_LITE, attention_bias=True)
    with pytest.raises(NotNative, match="mlp_bias is on"):
        spec_of(V2_LITE, mlp_bias=True)


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    YARN | dict(mscale=0.707, mscale_all_dim=0.707, original_max_position_embeddings=32),
    YARN | dict(mscale=1.0, mscale_all_dim=0.5, original_max_position_embeddings=32),
]
BOOLEANS = [False, True]
V3_OPTIONS: dict[str, list[Any]] = dict(
    q_lora_rank=[None, 8, 24], attention_bias=BOOLEANS, rope_interleave=BOOLEANS, norm_topk_prob=BOOLEANS
)
OPTIONS: dict[str, dict[str, list[Any]]] = {
    "DeepseekV2": dict(
        q_lora_rank=[None, 24], topk_method=["greedy", "group_limited_greedy"], n_shared_experts=[1, 2, 3]
    ),
    "DeepseekV3": V3_OPTIONS | dict(n_shared_experts=[1, 2], num_mtp_layers=[0]),
    "Glm4MoeLite": V3_OPTIONS | dict(rms_norm_eps=[1e-5, 1e-2], n_group=[1, 2]),
    "Youtu": dict(q_lora_rank=[None, 24], rope_interleave=BOOLEANS),
    "MiniCPM3": dict(
        q_lora_rank=[None, 24],
        scale_emb=[1, 12],
        scale_depth=[None, 1.4],
        dim_model_base=[None, 16],
        v_head_dim=[None, 12],
    ),
}


def drawn(family: str, draw: random.Random) -> dict[str, Any]:
    """A config's differences: widths of any size, a rotation of any kind, and the family's options."""
    heads = draw.choice([1, 2, 3, 5])
    found = dict(
        num_attention_heads=heads,
        num_key_value_heads=heads,
        hidden_size=heads * draw.choice([16, 20]),
        num_hidden_layers=draw.choice([2, 3]),
        kv_lora_rank=draw.choice([8, 20, 32]),
        qk_rope_head_dim=(rotated := draw.choice([4, 8, 12])),
        head_dim=... if family == "Glm4MoeLite" else rotated,
        qk_nope_head_dim=draw.choice([4, 12, 16]),
        v_head_dim=draw.choice([4, 10, 24]),
        tie_word_embeddings=draw.choice(BOOLEANS),
        rope_parameters=draw.choice(ROPES) | {"rope_theta": 1e4},
    )
    if family not in ("Youtu", "MiniCPM3"):
        found |= dict(
            n_routed_experts=draw.choice([8, 12]),
            num_experts_per_tok=draw.choice([2, 4]),
            n_group=4,
            topk_group=draw.choice([2, 3]),
            routed_scaling_factor=draw.choice([1.0, 2.5]),
        )
    found |= {name: draw.choice(values) for name, values in OPTIONS[family].items()}
    if family == "Glm4MoeLite":
        found["topk_group"] = found["n_group"]
    if found["q_lora_rank"] is None:  # such queries have no bias
        found.pop("attention_bias", None)
    return found


def off_by(module: Any, directory: Path) -> float:
    """The largest difference between our logits, in chunks over the cache, and Transformers', as a share of theirs."""
    model = load(directory, device="cpu")
    assert isinstance(model, Decoder)
    ids = torch.arange(24) * 7 % 384 + 3
    with torch.inference_mode():
        expected = module(ids[None]).logits[0]
        return float((_paged_logits(model, ids) - expected).abs().max() / expected.abs().max())


def correct(module: Any, directory: Path) -> None:
    """Give the corrections of a saved model numbers that change the choice of experts."""
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.5, 0.5)
    module.save_pretrained(directory)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", OPTIONS)
def test_logits_at_drawn_sizes_equal_those_of_transformers(tmp_path: Path, family: str, seed: int) -> None:
    torch.set_num_threads(1)
    module = make(tmp_path, family, seed=seed, **drawn(family, random.Random(f"{family} {seed}")))
    correct(module, tmp_path)
    assert off_by(module, tmp_path) < 1e-5


def test_the_correction_is_read(tmp_path: Path) -> None:
    module = make(tmp_path, "DeepseekV3")
    before = load(tmp_path, device="cpu")
    correct(module, tmp_path)
    assert off_by(module, tmp_path) < 1e-5
    after = load(tmp_path, device="cpu")
    assert isinstance(before, Decoder) and isinstance(after, Decoder)
    corrections = []
    for model in (before, after):
        experts = model.layers[1].experts
        assert experts is not None and experts.correction is not None
        assert experts.correction.dtype == torch.float32
        corrections.append(experts.correction)
    assert not torch.equal(*corrections)


def test_experts_of_their_own_tensors_and_fused_ones_give_the_same_logits(tmp_path: Path) -> None:
    """Published checkpoints have tensors of each expert's own."""
    module = make(tmp_path, "DeepseekV3")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    singles = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for layer, (gate_up, down) in {
        layer: (each.mlp.experts.gate_up_proj, each.mlp.experts.down_proj)
        for layer, each in enumerate(module.model.layers)
        if hasattr(each.mlp, "experts")
    }.items():
        for expert, (rows, other) in enumerate(zip(gate_up, down, strict=True)):
            prefix, (gate, up) = f"model.layers.{layer}.mlp.experts.{expert}.", rows.detach().chunk(2)
            parts = dict(gate_proj=gate, up_proj=up, down_proj=other.detach())
            singles |= {f"{prefix}{name}.weight": part.clone() for name, part in parts.items()}
    for stored in (singles, fused_of(singles, module)):
        save_file(stored, path)
        assert off_by(module, tmp_path) < 1e-5


def fused_of(singles: dict[str, torch.Tensor], module: Any) -> dict[str, torch.Tensor]:
    """The tensors with those of all experts of a layer in one."""
    found = {name: tensor for name, tensor in singles.items() if ".mlp.experts." not in name}
    for layer, each in enumerate(module.model.layers):
        if hasattr(each.mlp, "experts"):
            prefix, experts = f"model.layers.{layer}.mlp.experts.", each.mlp.experts
            found[prefix + "gate_up_proj"] = experts.gate_up_proj.detach().clone()
            found[prefix + "down_proj"] = experts.down_proj.detach().clone()
    return found


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    module = make(tmp_path, "DeepseekV3")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"model.layers.2.eh_proj.weight": torch.zeros(3)}, path)
    with pytest.raises(MisfitCheckpoint, match=r"model\.layers\.2\.eh_proj\.weight"):
        load(tmp_path, device="cpu")
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("num_mtp_layers", None)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert off_by(module, tmp_path) < 1e-5


def test_the_cache_keeps_one_latent_and_one_rotated_key_per_token(tmp_path: Path) -> None:
    make(tmp_path, "DeepseekV3")
    spec = load(tmp_path, device="cpu").spec
    assert spec.kv_shapes == (KVShape(1, 16 + 8, 0),) * 2
    assert (spec.num_heads, spec.latent_rank) == (4, 16)


def test_random_weights_need_no_tensors(tmp_path: Path) -> None:
    make(tmp_path, "DeepseekV2")
    (tmp_path / "model.safetensors").unlink()
    model = load(tmp_path, device="cpu", load_format="random")
    assert isinstance(model, Decoder)
    with torch.inference_mode():
        assert _paged_logits(model, torch.arange(24)).isfinite().all()


def test_bytes_of_weights_count_every_tensor(tmp_path: Path) -> None:
    module = make(tmp_path, "DeepseekV3", tie_word_embeddings=False)
    stored = sum(tensor.nbytes for tensor in module.state_dict().values())
    assert load(tmp_path, device="cpu").spec.weight_bytes == stored
