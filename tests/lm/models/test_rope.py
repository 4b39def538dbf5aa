"""Frequencies equal those of Transformers, bit for bit if both compute in the same order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from holdfast.lm.models.checkpoint_errors import UnsupportedCheckpoint
from holdfast.lm.models.rope import Rope, rope_of

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024},
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
]


@pytest.mark.parametrize("given", SCALINGS, ids=lambda given: given["rope_type"])
def test_frequencies_equal_those_of_transformers(given: dict[str, Any]) -> None:
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=4096, rope_parameters={**given}
    )
    theirs = LlamaRotaryEmbedding(config)
    ours = rope_of({"max_position_embeddings": 4096, "rope_parameters": given})
    torch.testing.assert_close(ours.inverse_frequencies(64), theirs.inv_freq, rtol=1e-6, atol=0)
    assert ours.amplitude == pytest.approx(theirs.attention_scaling)


def test_older_config_keys_give_the_same_rope() -> None:
    scaling = {"type": "linear", "factor": 4.0}
    old = rope_of({"max_position_embeddings": 4096, "rope_theta": 1e4, "rope_scaling": scaling})
    assert old == rope_of({"max_position_embeddings": 4096, "rope_parameters": SCALINGS[1]})


def frequencies(length: int, head: int, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours and those of Transformers."""
    config = LlamaConfig(
        hidden_size=4 * head, num_attention_heads=4, max_position_embeddings=length, rope_parameters={**given}
    )
    ours = rope_of({"max_position_embeddings": length, "rope_parameters": given})
    return ours.inverse_frequencies(head), LlamaRotaryEmbedding(config).inv_freq


def test_yarn_without_a_factor_stretches_to_the_models_length() -> None:
    given = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 1024}
    rope = rope_of({"max_position_embeddings": 8192, "rope_parameters": given})
    assert rope.factor == 8.0
    ours, theirs = frequencies(8192, 64, **given, factor=None)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert ours[-1] == pytest.approx(1e4 ** (-62 / 64) / 8)


@pytest.mark.parametrize(
    ("original", "beta_fast", "beta_slow"),
    [(4096, 1e4, 1.0), (1 << 20, 32.0, 1e-3), (1250, 16.0, 16.0)],
    ids=["from below the first", "to beyond the last", "no width"],
)
def test_yarns_ramp_stays_within_the_dimensions(original: int, beta_fast: float, beta_slow: float) -> None:
    given: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    given["original_max_position_embeddings"] = original
    given |= {"beta_fast": beta_fast, "beta_slow": beta_slow, "truncate": beta_fast != beta_slow}
    ours, theirs = frequencies(4 * original, 64, **given)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_unknown_scaling_is_refused() -> None:
    with pytest.raises(UnsupportedCheckpoint, match="rope scaling 'shortrope'"):
        rope_of({"rope_scaling": {"rope_type": "shortrope"}})


@pytest.mark.parametrize("nested", [{}, {"original_max_position_embeddings": 512}])
@pytest.mark.parametrize("kind", ["yarn", "llama3", "longrope"])
def test_the_original_length_of_the_config_goes_before_that_of_the_scaling(kind: str, nested: dict[str, int]) -> None:
    given: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **nested}
    if kind == "llama3":
        given |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "longrope":
        given |= {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    lengths = {"max_position_embeddings": 4096, "original_max_position_embeddings": 1024}
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters={**given}, **lengths)
    theirs = LlamaRotaryEmbedding(config)
    ours = rope_of({**lengths, "rope_parameters": given})
    assert ours.original_length == config.rope_parameters["original_max_position_embeddings"] == 1024
    assert ours.amplitude == pytest.approx(theirs.attention_scaling)
    torch.testing.assert_close(ours.inverse_frequencies(64), theirs.inv_freq, rtol=1e-6, atol=0)
    assert rope_of({**lengths, "rope_parameters": {**given, "original_max_position_embeddings": 1024}}) == ours
    alone = rope_of({"max_position_embeddings": 4096, "rope_parameters": {**given, **nested}})
    assert alone.original_length == nested.get("original_max_position_embeddings", 4096)


@pytest.mark.parametrize("share", [1.5, -0.5])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=f"partial_rotary_factor is {share}; it must be above 0"):
        rope_of({"partial_rotary_factor": share}, partial=True)


def test_neighbours_of_a_head_are_put_half_of_it_apart() -> None:
    assert Rope(1e4).pairs(8) is None
    for share, order in ((1.0, [0, 2, 4, 6, 1, 3, 5, 7]), (0.5, [0, 2, 4, 5, 1, 3, 6, 7])):
        pairs = Rope(1e4, share=share, interleaved=True).pairs(8)
        assert pairs is not None and pairs.tolist() == order
