"""The spec that LFM2 gets from its config.json, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.lm.models.checkpoint_errors import NotNative, UnsupportedCheckpoint
from holdfast.lm.models.decoder_spec import DecoderSpec
from holdfast.lm.models.families import NATIVE

SIZES: dict[str, Any] = dict(
    vocab_size=100, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8
)


def spec_of(**differences: Any) -> DecoderSpec:
    config = {**SIZES, "full_attn_idxs": [1], "architectures": ["Lfm2ForCausalLM"], **differences}
    return NATIVE["Lfm2ForCausalLM"](config)


def test_the_width_of_the_mlp_is_two_thirds_of_the_given_one_in_whole_multiples() -> None:
    assert spec_of(block_multiple_of=10).intermediate_size == 70
    assert spec_of(block_multiple_of=10, block_ffn_dim_multiplier=1.5).intermediate_size == 100
    assert spec_of(block_ffn_dim_multiplier=None).intermediate_size == 64
    assert spec_of(block_auto_adjust_ff_dim=False).intermediate_size == 96
    assert spec_of(block_auto_adjust_ff_dim=False, block_ff_dim=50).intermediate_size == 50


def test_the_head_is_the_embedding_unless_the_config_says_otherwise() -> None:
    assert spec_of().tied
    assert not spec_of(tie_word_embeddings=False).tied
    assert not spec_of(tie_word_embeddings=True, tie_embedding=False).tied


def test_a_model_with_attention_alone_has_no_recurrent_layers() -> None:
    assert spec_of(full_attn_idxs=None).recurrence is None
    assert spec_of().recurrent == (True, False)


@pytest.mark.parametrize(
    ("differences", "reason"),
    [
        ({"full_attn_idxs": []}, "none of its layers has attention"),
        ({"layer_types": ["conv", "sliding_attention"]}, "'sliding_attention' is neither"),
        ({"conv_L_cache": 1}, "conv_L_cache is 1; it must be at least 2"),
    ],
)
def test_variants_that_are_not_computed_run_by_other_code(differences: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotNative, match=reason):
        spec_of(**differences)


def test_a_list_of_other_length_than_the_layers_is_refused() -> None:
    with pytest.raises(UnsupportedCheckpoint, match="layer_types lists 1 layers of 2"):
        spec_of(layer_types=["full_attention"])
