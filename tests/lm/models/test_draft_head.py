"""Draft heads are read as published, or refused in one line that names the value and the limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.lm.models.checkpoint_errors import UnsupportedCheckpoint
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.draft_head import read_head, tapped_layers
from holdfast.lm.models.loader import load
from tests.heads import write_head

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    loaded = load(directory, device="cpu", load_format="random")
    assert isinstance(loaded, Decoder)
    return loaded


def test_a_head_without_embedding_and_lm_head_takes_those_of_its_target(target: Decoder, tmp_path: Path) -> None:
    def without_head(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]

    head = read_head(write_head(tmp_path, target, change=without_head), target)
    assert head.tensors["lm_head.weight"] is target.lm_head and head.tensors["embed_tokens.weight"] is target.embedding
    assert not head.own & {"lm_head.weight", "embed_tokens.weight"}
    assert head.nbytes == sum(head.tensors[name].nbytes for name in head.spec.shapes)


def test_tensors_have_either_name_of_the_layer_and_guesses_are_tokens_of_the_target(
    target: Decoder, tmp_path: Path
) -> None:
    def renamed(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if name.startswith("midlayer."):
                tensors["model.layers.0." + name.removeprefix("midlayer.")] = tensors.pop(name)

    one = read_head(write_head(tmp_path / "one", target, (5, 40, 63)), target)
    other = read_head(write_head(tmp_path / "other", target, (5, 40, 63), change=renamed), target)
    hidden = torch.randn(50, 32, generator=torch.Generator().manual_seed(1))
    assert set(one.guess(hidden).tolist()) <= {5, 40, 63}
    assert torch.equal(one.guess(hidden), other.guess(hidden))


def test_the_normed_hidden_state_goes_on_where_the_head_says_so(target: Decoder, tmp_path: Path) -> None:
    hidden, following = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)) * 7, torch.arange(4)
    for before in (False, True):
        head = read_head(write_head(tmp_path / str(before), target, norm_before_residual=before), target)
        entered, residual = head.enter(hidden, following)
        assert torch.equal(residual, entered[:, 32:] if before else hidden)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, (2, 16, 29)),
        ({"eagle_aux_hidden_state_layer_ids": [29, 2, 16]}, (2, 16, 29)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, (2, 16, 29)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, (2, 16, 29)),
    ],
)
def test_tapped_layers_are_numbered_as_in_vllm_or_in_sglang(config: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert tapped_layers(config, 32) == layers


def drop(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def put(name: str, value: Any) -> Any:
    return lambda tensors: tensors.update({name: value})


BAD: dict[str, tuple[dict[str, Any], Any, str]] = {
    "another kind of head": (
        {"architectures": ["EagleLlamaForCausalLM"]}, None,
        "draft_model is a EagleLlamaForCausalLM; the heads that are known are LlamaForCausalLMEagle3 and "
        "Eagle3LlamaForCausalLM",
    ),
    "wrong width": (
        {"target_hidden_size": 48}, None,
        "draft_model is made for another model: its target_hidden_size is 48, and that of the model is 32",
    ),
    "wrong vocabulary": (
        {"vocab_size": 65, "draft_vocab_size": 64}, None,
        "draft_model is made for another model: its vocab_size is 65, and that of the model is 64",
    ),
    "too many draft tokens": (
        {"draft_vocab_size": 65}, None, "draft_vocab_size is 65; it is from 1 to vocab_size, 64",
    ),
    "two layers": (
        {"num_hidden_layers": 2}, None, "draft_model has 2 layers (num_hidden_layers); a draft head has 1",
    ),
    "a layer that is not there": (
        {"eagle_aux_hidden_state_layer_ids": [1, 3]}, None,
        "draft_model reads the inputs of layers 1, 3; they must differ and be from 0 to 2, as the model has 3 layers "
        "(eagle_aux_hidden_state_layer_ids)",
    ),
    "the same layer twice": (
        {"eagle_aux_hidden_state_layer_ids": [1, 1]}, None,
        "draft_model reads the inputs of layers 1, 1; they must differ and be from 0 to 2, as the model has 3 layers "
        "(eagle_aux_hidden_state_layer_ids)",
    ),
    "layers that are no numbers": (
        {"eagle_aux_hidden_state_layer_ids": ["1"]}, None,
        "eagle_aux_hidden_state_layer_ids is ['1']; it is a list of layer numbers",
    ),
    "a size of no number": (
        {"hidden_size": "32"}, None,
        "hidden_size of draft_model is '32'; it must be a whole number from 1 to 2147483647",
    ),
    "heads that do not divide": (
        {"num_key_value_heads": 3}, None,
        "the draft head has 4 heads of 8 numbers over 3 KV heads; the first must be a multiple of the last, and the "
        "second even",
    ),
    "a missing tensor": ({}, drop("fc.weight"), "draft_model lacks the tensor fc.weight [32, 64]"),
    "a tensor of another shape": (
        {}, put("fc.weight", torch.zeros(32, 96)),
        "tensor fc.weight of draft_model is [32, 96]; its config.json implies [32, 64]",
    ),
    "no LM head for its own vocabulary": (
        {}, drop("lm_head.weight"),
        "draft_model lacks the tensor lm_head.weight [2, 32], and the model has none that fits",
    ),
    "no map to the vocabulary": ({}, drop("d2t"), "draft_model lacks the tensor d2t [2]"),
    "a map out of the vocabulary": (
        {}, put("d2t", torch.tensor([3, 63])),
        "d2t of draft_model leads to tokens from 3 to 64; they must be from 0 to 63",
    ),
    "numbers that are not finite": (
        {}, put("norm.weight", torch.full((32,), torch.nan)),
        "tensor norm.weight holds NaN or infinite values, as float32: the checkpoint is damaged",
    ),
    "packed weights": (
        {}, put("norm.weight", torch.ones(32, dtype=torch.int8)),
        "tensor norm.weight of draft_model is torch.int8; packed heads are not read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_head_that_does_not_fit_is_refused_in_one_line(target: Decoder, tmp_path: Path, case: str) -> None:
    settings, change, message = BAD[case]
    write_head(tmp_path, target, (3, 7), change=change)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(UnsupportedCheckpoint) as error:
        read_head(tmp_path, target)
    assert str(error.value) == message


def test_a_target_with_recurrent_layers_or_of_other_code_is_refused(tmp_path: Path) -> None:
    hybrid = {
        "architectures": ["Lfm2ForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 160,
        "layer_types": ["conv", "full_attention"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(hybrid))
    with pytest.raises(UnsupportedCheckpoint, match="of those of Lfm2ForCausalLM 1 are recurrent"):
        read_head(tmp_path, load(tmp_path, device="cpu", load_format="random"))
    with pytest.raises(UnsupportedCheckpoint, match="object runs by other code"):
        read_head(tmp_path, object())
