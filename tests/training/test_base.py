"""The base model's digest and sizes."""

from __future__ import annotations

from dataclasses import field, make_dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from holdfast.core.layout import Layout
from holdfast.core.training_cost import HALVES
from holdfast.lm.execution.stage_link import GlooLink
from holdfast.lm.kernels.mxfp4 import Mxfp4Matrices
from holdfast.lm.kernels.packed import Form
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.loader import load
from holdfast.training.base import described, digest_of_model, digest_of_shards, training_shape
from tests.lm.kernels.packed_weights import draw_packed
from tests.lm.models.test_quantized import make_mxfp4
from tests.ranks import Rank, in_ranks
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


def test_a_new_field_with_a_default_leaves_the_text_of_older_models_as_it_was() -> None:
    inner = [("size", int), ("layers", tuple[int, ...], field(default=()))]
    Older = make_dataclass("Spec", [("width", int), ("inner", object)])
    Newer = make_dataclass(
        "Spec", [*[("width", int), ("inner", object)], ("names", dict[str, int], field(default_factory=dict))]
    )
    Inner, Wider = make_dataclass("Inner", inner), make_dataclass("Inner", [*inner, ("scale", float, 1.0)])
    text = described(Older(3, {"a": (Inner(1),)}))
    assert described(Newer(3, {"a": (Wider(1),)})) == text
    changed = [
        Newer(4, {"a": (Wider(1),)}),
        Newer(3, {"a": (Wider(2),)}),
        Newer(3, {"a": (Wider(1, (2,)),)}),
        Newer(3, {"a": (Wider(1, (), 2.0),)}),
        Newer(3, {"b": (Wider(1),)}),
        Newer(3, {"a": (Wider(1),)}, {"x": 1}),
    ]
    assert len({text, *map(described, changed)}) == 7


def test_options_and_dtype_of_a_model_change_its_digest(tmp_path: Path) -> None:
    _, model = native("llama", tmp_path / "base")
    found = {digest_of_model(model)}
    for change in (
        {"rms_eps": 0.25},
        {"qk_norm": True},
        {"names": replace(model.decoder.names, heads=("head.weight",))},
    ):
        with mock.patch.object(model, "decoder", replace(model.decoder, **change)):
            found.add(digest_of_model(model))
    assert len(found) == 4


def test_a_changed_bit_of_packed_experts_changes_the_digest(tmp_path: Path) -> None:
    make_mxfp4(tmp_path, 96)
    model = load(tmp_path, device="cpu")
    assert isinstance(model, Decoder) and model.layers[1].experts is not None
    weights = model.layers[1].experts.down
    assert isinstance(weights, Mxfp4Matrices)
    found = {digest_of_model(model)}
    for tensor in (weights.data, weights.scale):
        tensor[2, 5, 1] ^= 1
        found.add(digest_of_model(model))
    assert len(found) == 3


def test_a_changed_number_of_one_packed_expert_changes_the_digest(tmp_path: Path) -> None:
    _, model = native("qwen3-moe", tmp_path / "base")
    experts = model.layers[1].experts
    assert experts is not None
    down, _ = draw_packed(Form.INT8, *experts.down.shape[:2], 64)
    model.layers = (model.layers[0], replace(model.layers[1], experts=replace(experts, down=down)))
    first = digest_of_model(model)
    down.data[2, 5, 1] ^= 1
    second = digest_of_model(model)
    down.scale[2, 5, 1] *= 2
    assert len({first, second, digest_of_model(model)}) == 3


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(tp=4), Layout(pp=2), Layout(tp=2, pp=2)], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2", "stablelm"])
def test_ranks_that_share_a_model_find_the_digest_of_the_whole(tmp_path: Path, layout: Layout, family: str) -> None:
    options = dict(qk_layernorm=True) if family == "stablelm" else {}  # a norm for each head
    _, model = native(family, tmp_path / "base", num_attention_heads=4, num_key_value_heads=2, **options)
    links = []

    def work(rank: Rank) -> str:
        link = GlooLink(rank.processes(range(layout.ranks)), layout, rank.rank) if layout.pp > 1 else None
        links.append(link)  # messages on their way must not end with it
        group = rank.group()
        part = load(tmp_path / "base", device="cpu", dtype="float32", layout=layout, rank=rank.rank, group=group)
        assert isinstance(part, Decoder)
        return digest_of_shards(part, link)

    assert in_ranks(layout, work)[0] == digest_of_model(model)


def test_the_digest_depends_on_every_tensor_of_a_recurrence(tmp_path: Path) -> None:
    _, model = native("bamba", tmp_path / "base")
    digests = {digest_of_model(model)}
    for tensor in model.layers[0].recurrent.values():
        tensor[(0,) * tensor.dim()] += 1
        digests.add(digest_of_model(model))
    assert len(digests) == 1 + len(model.layers[0].recurrent) > 5


@pytest.mark.parametrize("family", ["bamba", "nemotron-h", "falcon-h1", "qwen3-next"])
def test_the_shape_of_a_hybrid_model_counts_the_weights_of_one_token(family: str, tmp_path: Path) -> None:
    layers = ["linear_attention", "mlp", "full_attention"]
    module, model = native(family, tmp_path / "base", **({"layers_block_type": layers} if "nemotron" in family else {}))
    shape, spec = training_shape(model.decoder), model.decoder
    found = sum(shape.count(half) * shape.weights(half) for half in HALVES)
    linear = [
        part.weight.numel()
        for name, part in module.named_modules()
        if type(part).__name__ == "Linear" and name.startswith("model.layers") and "shared_expert_gate" not in name
    ]
    chosen = 0
    if spec.experts is not None:
        chosen = 3 * spec.hidden_size * spec.experts.intermediate_size * spec.experts.rule.per_token * spec.num_layers
    assert found == sum(linear) + chosen


def test_the_shape_counts_all_weights_that_a_forward_multiplies_by(tmp_path: Path) -> None:
    module, model = native("llama", tmp_path / "base")
    shape = training_shape(model.decoder)
    linear = sum(weight.numel() for name, weight in module.named_parameters() if name.endswith("proj.weight"))
    assert shape.num_layers * (shape.attention_weights + shape.mlp_weights) == linear
    assert shape.head_weights == module.lm_head.weight.numel()
