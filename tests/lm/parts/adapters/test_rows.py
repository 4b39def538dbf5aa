"""Greedy tokens with an adapter on padded rows are those of PEFT's own model, whatever other rows have."""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from holdfast.core.types import Identity, Request, SamplingParams
from holdfast.engine.process.build import Engine, build_engine
from holdfast.lm.config import EngineConfig
from holdfast.lm.padded.driver import Driver
from holdfast.lm.padded.loading import as_unmodified
from holdfast.lm.padded.lora import linear_layers
from tests.lm.padded.test_encoder_decoder import T5
from tests.padded_checks import draw_prompts, generate_alone, tiny, write_tiny

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

TARGETS = {
    "bloom": ["query_key_value", "dense_h_to_4h", "dense_4h_to_h"],
    "llama": ["q_proj", "v_proj", "down_proj"],
    "mamba2": ["in_proj"],
    "rwkv": ["key", "output"],
    "jamba": ["q_proj", "o_proj", "in_proj"],
}
"""Layers that adapters change, by family: keys and values, recurrent states, rows one by one, both kinds of state."""
RANKS = {"a": 4, "b": 7}
GENERATED = 12


@dataclass
class Case:
    """A checkpoint with adapters, and the model that PEFT makes of each of them. The name "" is the model itself."""

    directory: Path
    models: dict[str, Any]

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(f"{name}={self.directory / name}" for name in RANKS)

    def config(self, **options: Any) -> EngineConfig:
        given = {"executor": "padded", "device": "cpu", "threads": 1, "max_sequences": 4, "cache_gb": 0.02} | options
        return EngineConfig(model=str(self.directory / "base"), adapter=self.adapters, token_budget=64, **given)


@pytest.fixture(scope="module", params=TARGETS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp(request.param)
    module = write_tiny(directory / "base", request.param)
    models = {"": module}
    for name, rank in RANKS.items():
        torch.manual_seed(rank)
        config = peft.LoraConfig(
            r=rank, lora_alpha=3 * rank, target_modules=TARGETS[request.param], task_type="CAUSAL_LM",
            use_rslora=name == "b",
        )  # fmt: skip
        adapted = peft.get_peft_model(copy.deepcopy(module), config)
        for parameter_name, parameter in adapted.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.2)
        adapted.save_pretrained(directory / name)
        models[name] = adapted.merge_and_unload().eval()
    return Case(directory, models)


def served(engine: Engine, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    """The tokens of each request."""
    torch.set_num_threads(1)
    loop, tokens = engine.loop, {request.id: list[int]() for request in requests}
    try:
        for request in requests:
            loop.add(request)
        while loop.has_work():
            for output in loop.step() or ():
                tokens[output.request_id].extend(output.tokens)
    finally:
        engine.close()
    return {name: tuple(found) for name, found in tokens.items()}


def ask(engine: Engine, count: int) -> tuple[list[Request], dict[str, str]]:
    """Requests for the model and both adapters in turn, and the name of each one's adapter."""
    ids = {"": ""} | {info.name: info.id for info in engine.info.adapters}
    names = [("", *RANKS)[at % 3] for at in range(count)]
    params = SamplingParams(temperature=0.0, max_tokens=GENERATED, ignore_eos=True)
    lengths = [5 + 3 * at % 17 for at in range(count)]
    requests = [
        Request(f"{at}", tuple(prompt), params, identity=Identity(adapter=ids[names[at]]))
        for at, prompt in enumerate(draw_prompts(*lengths, seed=3))
    ]
    return requests, {request.id: name for request, name in zip(requests, names, strict=True)}


@pytest.mark.always("bloom-{}", "mamba*-*max_adapters*", "jamba-*embedding*")
@pytest.mark.parametrize("options", [{}, {"max_adapters": 1}, {"scheduler": "embedding"}], ids=str)
def test_each_row_gives_the_tokens_of_peft_s_model_with_its_adapter(case: Case, options: dict[str, Any]) -> None:
    engine = build_engine(case.config(**options))
    requests, names = ask(engine, 9)
    expected = {
        each.id: tuple(generate_alone(case.models[names[each.id]], each.prompt, GENERATED)) for each in requests
    }
    alone = {each.id: tuple(generate_alone(case.models[""], each.prompt, GENERATED)) for each in requests}
    assert all((expected[name] != alone[name]) == bool(adapter) for name, adapter in names.items())
    assert served(engine, requests) == expected


def test_layers_that_see_some_of_the_tokens_take_no_adapter() -> None:
    module = tiny("llama")
    mlp = module.model.layers[0].mlp
    mlp.expert = torch.nn.Linear(mlp.down_proj.out_features, 8)

    def route(mlp: Any, given: Any, output: torch.Tensor) -> None:
        mlp.expert(output.flatten(0, 1)[:2])  # as an expert gets the tokens that are routed to it

    mlp.register_forward_hook(route)
    found = linear_layers(Driver(as_unmodified(module)))
    assert "model.layers.0.mlp.down_proj" in found and "lm_head" in found
    assert "model.layers.0.mlp.expert" not in found


@pytest.mark.parametrize("case", ["bloom"], indirect=True)
def test_an_adapter_that_does_not_fit_is_refused_by_name(case: Case, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"adapter b .*rank 7; it must be from 1 to 4"):
        build_engine(case.config(max_adapter_rank=4))
    shutil.copytree(case.directory / "a", tmp_path / "a")
    config = tmp_path / "a" / "adapter_config.json"
    config.write_text(config.read_text().replace('"use_dora": false', '"use_dora": true'))
    dora = (f"c={tmp_path / 'a'}",)
    with pytest.raises(ValueError, match=r"adapter c in .*use_dora"):
        build_engine(EngineConfig(model=str(case.directory / "base"), executor="padded", adapter=dora))


def test_an_encoder_decoder_takes_no_adapter(tmp_path: Path) -> None:
    T5ForConditionalGeneration(T5Config(**T5)).save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match=r"adapters are those of causal models .* is an encoder-decoder"):
        build_engine(EngineConfig(model=str(tmp_path / "t5"), executor="padded", max_adapters=1))
