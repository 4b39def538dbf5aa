"""Logits of families at sizes and options drawn at random equal those of Transformers, in chunks over the cache."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.hf import _paged_logits
from holdfast.lm.models.loader import load
from tests.checkpoints import make

ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
]
SHARES = [0.5, 1.0]
BOOLEANS = [False, True]
OPTIONS: dict[str, dict[str, list[Any]]] = {
    "StableLm": dict(use_qkv_bias=BOOLEANS, qk_layernorm=BOOLEANS, use_parallel_residual=BOOLEANS),
    "Nemotron": dict(attention_bias=BOOLEANS, mlp_bias=BOOLEANS, hidden_size=[32, 48, 60]),
    "Phimoe": dict(
        attention_bias=BOOLEANS,
        lm_head_bias=BOOLEANS,
        num_local_experts=[2, 4, 7],
        router_jitter_noise=[0.0, 0.01, 0.5],
        sliding_window=[None, 5],
        hidden_size=[32, 48, 60],
    ),
    "Llama4Text": dict(
        attention_bias=BOOLEANS,
        attention_chunk_size=[None, 3, 8],
        attn_temperature_tuning=BOOLEANS,
        floor_scale=[1, 4],
        hidden_size=[32, 48, 60],
        interleave_moe_layer_step=[1, 2],
        no_rope_layer_interval=[2, 3],
        num_experts_per_tok=[1, 2],
        num_local_experts=[2, 5],
        use_qk_norm=BOOLEANS,
    ),
}
"""For each family, its options and the values that are drawn for them."""


def drawn(family: str, draw: random.Random) -> dict[str, Any]:
    """A config's differences: heads of any number and size, a rotation of any kind, and the family's options."""
    kv_heads, dim, rope = draw.choice([1, 2, 3]), draw.choice([8, 16, 20]), draw.choice(ROPES) | {"rope_theta": 1e4}
    heads = kv_heads * draw.choice([1, 2, 3])
    if family in ("StableLm", "Nemotron"):
        rope |= {"partial_rotary_factor": draw.choice(SHARES)}
    if family == "Phimoe" and rope["rope_type"] != "default":
        rope |= {"original_max_position_embeddings": 256, "short_mscale": 1.2, "long_mscale": 1.2}
    found = dict(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        num_hidden_layers=draw.choice([2, 3, 5]),
        tie_word_embeddings=draw.choice(BOOLEANS),
        rope_parameters=rope,
    )
    if family == "StableLm":
        found |= dict(head_dim=..., hidden_size=heads * dim)
    return found | {name: draw.choice(values) for name, values in OPTIONS[family].items()}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", OPTIONS)
def test_logits_at_drawn_sizes_equal_those_of_transformers(tmp_path: Path, family: str, seed: int) -> None:
    torch.set_num_threads(1)
    module = make(tmp_path, family, seed=seed, **drawn(family, random.Random(f"{family} {seed}")))
    model = load(tmp_path, device="cpu")
    assert isinstance(model, Decoder)
    ids = torch.arange(24) * 7 % 384 + 3
    with torch.inference_mode():
        expected = module(ids[None]).logits[0]
        off = (_paged_logits(model, ids) - expected).abs().max()
    assert off < 1e-5 * expected.abs().max()
