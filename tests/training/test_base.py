"""The base model's digest and sizes."""

from __future__ import annotations

from pathlib import Path

import torch

from holdfast.lm.models.loader import load
from holdfast.training.base import digest_of_model, training_shape
from tests.tuning import native


def test_equal_models_have_one_digest_and_any_changed_or_moved_weight_another(tmp_path: Path) -> None:
    _, model = native("llama", tmp_path / "base")
    again = load(tmp_path / "base", device="cpu", dtype="float32")
    first = digest_of_model(model)
    assert digest_of_model(again) == first  # type: ignore[arg-type]
    rounded = load(tmp_path / "base", device="cpu", dtype="bfloat16")
    found = {first, digest_of_model(rounded)}  # type: ignore[arg-type]
    for index in range(3):
        weights = model.layers[1].down if index else model.embedding
        assert isinstance(weights, torch.Tensor)
        before = weights.clone()
        if index == 2:
            weights[[0, 1]] = before[[1, 0]]
        else:
            weights[3, 5] += 2.0**-20
        found.add(digest_of_model(model))
        weights.copy_(before)
    assert len(found) == 5 and digest_of_model(model) == first


def test_the_shape_counts_all_weights_that_a_forward_multiplies_by(tmp_path: Path) -> None:
    module, model = native("llama", tmp_path / "base")
    shape = training_shape(model.decoder)
    linear = sum(weight.numel() for name, weight in module.named_parameters() if name.endswith("proj.weight"))
    assert shape.num_layers * (shape.attention_weights + shape.mlp_weights) == linear
    assert shape.head_weights == module.lm_head.weight.numel()
