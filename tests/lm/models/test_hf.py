"""Which architectures run through Transformers, and why others do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.lm.models import hf
from holdfast.lm.models.checkpoint_errors import UnsupportedCheckpoint
from holdfast.lm.models.families import NATIVE
from holdfast.lm.models.hf import TransformersModel
from holdfast.lm.models.loader import load
from tests.checkpoints import make


def refusal(directory: Path, **options: Any) -> str:
    with pytest.raises(UnsupportedCheckpoint) as refused:
        load(directory, device="cpu", **options)
    return str(refused.value)


def test_sizes_come_from_the_calls_of_the_attention_function(tmp_path: Path) -> None:
    make(tmp_path, "Starcoder2", num_key_value_heads=1, head_dim=None)
    model = load(tmp_path, device="cpu")
    assert isinstance(model, TransformersModel)
    spec = model.spec
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 4, 1, 16)
    assert (spec.vocab_size, spec.max_model_len) == (384, 256)


def test_values_narrower_than_keys_are_padded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(NATIVE, "DeepseekV3ForCausalLM")
    make(tmp_path, "DeepseekV3")
    assert load(tmp_path, device="cpu").spec.head_dim == 24


def test_random_weights_need_no_tensors(tmp_path: Path) -> None:
    make(tmp_path, "Starcoder2")
    (tmp_path / "model.safetensors").unlink()
    assert load(tmp_path, device="cpu", load_format="random").spec.architecture == "Starcoder2ForCausalLM"


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("StableLm", "StableLmForCausalLM cannot run on a paged cache: it drops the keywords"),
        ("Bloom", "BloomForCausalLM cannot run on a paged cache: it never calls"),
    ],
)
def test_architectures_that_would_not_use_the_cache_are_refused(
    tmp_path: Path, family: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(NATIVE, f"{family}ForCausalLM", raising=False)
    make(tmp_path, family)
    assert reason in refusal(tmp_path)


def test_a_layer_type_that_is_not_attention_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "SmolLM3")
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"full_attention",', '"chunked_attention",'))
    config.write_text(config.read_text().replace('"full_attention"\n', '"chunked_attention"\n'))
    assert "chunked_attention" in refusal(tmp_path)


def test_an_unknown_attention_keyword_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "Starcoder2")
    monkeypatch.setattr(hf, "HARMLESS", hf.HARMLESS - {"position_ids"})
    assert "its attention takes 'position_ids'" in refusal(tmp_path)


def test_a_model_whose_paged_logits_differ_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "GptOss")
    monkeypatch.delitem(NATIVE, "GptOssForCausalLM")

    honest = hf.paged_attention

    def without_sinks(*arguments: Any, s_aux: torch.Tensor, **keywords: Any) -> tuple[torch.Tensor, None]:
        return honest(*arguments, **keywords)

    monkeypatch.setattr(hf, "PAGED", "holdfast-without-sinks")
    monkeypatch.setattr(hf, "paged_attention", without_sinks)
    assert "its logits differ by" in refusal(tmp_path)


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    make(tmp_path, "Starcoder2")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    first = min(tensors)
    save_file({name: tensor for name, tensor in tensors.items() if name != first}, path, {"format": "pt"})
    assert "missing tensors" in refusal(tmp_path)
    save_file(tensors | {"model.extra": torch.zeros(3)}, path, {"format": "pt"})
    assert "unexpected tensors, first model.extra" in refusal(tmp_path)


def test_longrope_beyond_its_original_length_is_refused(tmp_path: Path) -> None:
    factors = [1.0] * 8
    make(
        tmp_path,
        "Starcoder2",
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": 64,
        },
    )
    assert "give max_model_len 64 or less" in refusal(tmp_path)
    assert load(tmp_path, device="cpu", max_model_len=64).spec.max_model_len == 64
