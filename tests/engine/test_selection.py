"""Selection: which executor runs a checkpoint, the reason that is given, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file, save_file

from holdfast.engine.process.build import build
from holdfast.engine.process.trace import Trace
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.executor import PagedExecutor
from holdfast.lm.models.checkpoint_errors import UnsupportedCheckpoint
from holdfast.lm.padded.executor import PaddedExecutor
from tests.checkpoints import make
from tests.engine.conftest import SMALL
from tests.engine.process.test_build import run_to_the_end
from tests.padded_checks import draw_prompts, generate_alone, write_tiny
from tests.scheduling import create_requests


@pytest.fixture(scope="session")
def bloom(tmp_path_factory):
    """A checkpoint whose attention Transformers cannot swap, and its module."""
    directory = tmp_path_factory.mktemp("models") / "bloom"
    return directory, write_tiny(directory, "bloom")


@pytest.fixture(scope="session")
def starcoder2(tmp_path_factory):
    """A checkpoint without a native decoder, whose attention can be swapped."""
    directory = tmp_path_factory.mktemp("models") / "starcoder2"
    make(directory, "Starcoder2")
    return directory


def config(directory, **options):
    return EngineConfig(model=str(directory), **{**SMALL, **options})


def tokens_of(loop, prompts, max_tokens=6):
    requests = create_requests(*prompts, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for request in requests:
        loop.add(request)
    given = run_to_the_end(loop)
    return [tuple(given[request.id]) for request in requests]


def test_models_whose_memory_cannot_be_returned_are_refused_with_sleep_mode(starcoder2, bloom, tmp_path):
    make(tmp_path / "bamba", "Bamba")
    cases = [
        (starcoder2, "enable_sleep_mode is on, which is for native decoders"),
        (bloom[0], "padded rows cannot run it with enable_sleep_mode True"),
        (tmp_path / "bamba", "the states of recurrent layers cannot be returned"),
    ]
    for directory, reason in cases:
        with pytest.raises(UnsupportedCheckpoint, match=reason):
            build(config(directory, enable_sleep_mode=True))


def test_auto_takes_the_native_decoder_then_swapped_attention_then_padded_rows(small, starcoder2, bloom):
    cases = [
        (small(), PagedExecutor, "LlamaForCausalLM has a native decoder"),
        (config(starcoder2), PagedExecutor, "Starcoder2ForCausalLM lets Transformers swap its attention"),
        (
            config(bloom[0]),
            PaddedExecutor,
            "BloomForCausalLM cannot run on a paged cache: it never calls Transformers' attention function; "
            "prompts in chunks, rows decoded together",
        ),
    ]
    for each, executor, reason in cases:
        loop, info = build(each)
        assert isinstance(loop.executor, executor)
        assert (info.executor, info.executor_reason) == (
            "paged" if executor is PagedExecutor else "padded",
            reason,
        )
        loop.close()


def test_padded_rows_give_the_tokens_of_the_unmodified_model(bloom):
    directory, module = bloom
    prompts = draw_prompts(3, 40, 9, 70, 1, 22)
    loop, info = build(config(directory, max_sequences=3, token_budget=32))
    assert tokens_of(loop, prompts, 8) == [generate_alone(module, prompt, 8) for prompt in prompts]
    assert info.block_size == 1 and info.num_blocks == loop.stats().blocks_total
    loop.close()


def test_a_native_model_runs_on_padded_rows_where_asked_to_and_gives_the_same_tokens(small):
    prompts = [tuple(range(n, n + 30)) for n in (0, 50, 90)]
    loops = [build(small(executor=name)) for name in ("paged", "padded")]
    assert [info.executor for _, info in loops] == ["paged", "padded"]
    assert loops[1][1].executor_reason.startswith("executor is padded; prompts in chunks")
    paged, padded = (tokens_of(loop, prompts) for loop, _ in loops)
    assert paged == padded
    for loop, _ in loops:
        loop.close()


def test_a_policy_of_padded_rows_selects_them_and_is_refused_on_the_paged_executor(small):
    loop, info = build(small(scheduler="embedding"))
    assert info.executor == "padded" and "scheduler is embedding" in info.executor_reason
    loop.close()
    with pytest.raises(ValueError, match="embedding"):
        small(scheduler="embedding", executor="paged")


def test_executor_paged_refuses_what_only_padded_rows_can_run(bloom):
    with pytest.raises(ValueError, match="BloomForCausalLM cannot run on a paged cache: it never calls"):
        build(config(bloom[0], executor="paged"))


@pytest.mark.parametrize("option", [{"kv_cache_dtype": "fp8"}, {"attention_backend": "torch"}])
def test_an_option_of_the_paged_executor_is_refused_with_both_reasons(bloom, option):
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=f"never calls .*; padded rows cannot run it with {name} {value}"):
        build(config(bloom[0], **option))


def test_fp8_weights_are_refused_where_there_is_no_native_decoder(bloom):
    with pytest.raises(ValueError, match="quantization is fp8, which only native decoders have"):
        build(config(bloom[0], quantization="fp8"))


@pytest.mark.parametrize(("name", "value"), [("prefill_ahead", 0), ("shrink_threshold", 0.5)])
def test_an_option_of_padded_rows_is_refused_where_the_paged_executor_runs(small, name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}, .* LlamaForCausalLM runs on the paged one"):
        build(small(**{name: value}))


def test_leave_to_run_remote_code_changes_nothing_for_a_model_that_needs_none(small):
    loop, info = build(small(trust_remote_code=True))
    assert info.executor == "paged"
    loop.close()


def test_a_checkpoint_that_neither_can_run_is_refused_with_both_reasons(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"], "model_type": "nothing"}))
    with pytest.raises(ValueError, match=r"NoSuchModel .*no causal decoder.*") as refused:
        build(config(tmp_path))
    assert "\n" not in str(refused.value)


def test_remote_code_runs_only_where_it_is_allowed(tmp_path, bloom):
    directory = tmp_path / "custom"
    shutil.copytree(bloom[0], directory)
    settings = json.loads((directory / "config.json").read_text())
    settings |= {
        "architectures": ["CustomForCausalLM"],
        "model_type": "custom-bloom",
        "auto_map": {"AutoConfig": "custom.CustomConfig", "AutoModelForCausalLM": "custom.CustomForCausalLM"},
    }
    (directory / "config.json").write_text(json.dumps(settings))
    (directory / "custom.py").write_text(CUSTOM)
    with pytest.raises(ValueError, match="trust_remote_code"):
        build(config(directory))
    assert not (directory / "ran").exists()
    loop, info = build(config(directory, trust_remote_code=True))
    assert info.executor == "padded" and (directory / "ran").exists()
    prompts = draw_prompts(5, 12)
    assert tokens_of(loop, prompts) == [generate_alone(bloom[1], prompt, 6) for prompt in prompts]
    loop.close()


CUSTOM = """
from pathlib import Path
from transformers import BloomConfig, BloomForCausalLM


class CustomConfig(BloomConfig):
    model_type = "custom-bloom"

    def __init__(self, **keywords):
        super().__init__(**keywords)
        Path(self._name_or_path or keywords.get("_name_or_path", ".")).joinpath("ran").touch()


class CustomForCausalLM(BloomForCausalLM):
    config_class = CustomConfig
"""


def test_weights_that_the_paged_executor_refused_are_read_once(bloom, monkeypatch):
    loads, load = [], transformers.AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM,
        "from_pretrained",
        lambda *given, **more: (loads.append(given), load(*given, **more))[1],
    )
    loop, _ = build(config(bloom[0]))
    assert len(loads) == 1
    loop.close()


def test_a_trace_of_padded_rows_shows_the_forwards_of_each_step(bloom, tmp_path):
    path = tmp_path / "t.json"
    loop, _ = build(config(bloom[0], trace=str(path)))
    assert isinstance(loop._observers[0], Trace)
    tokens_of(loop, draw_prompts(5, 9), 3)
    loop.close()
    bars = [event for event in json.loads(path.read_text()) if event["ph"] == "X"]
    forwards = [bar for bar in bars if (bar["pid"], bar["tid"]) == (0, 1)]
    assert any("apart" in bar["name"] for bar in forwards) and any(bar["name"] == "2 × 1" for bar in forwards)
    assert sum(bar["args"]["rows"] * bar["args"]["longest"] for bar in forwards) >= 5 + 9 + 2 * 2


def test_the_longest_sequence_is_one_that_fits_the_memory_of_a_row(bloom, tmp_path):
    directory, position = shutil.copytree(bloom[0], tmp_path / "long"), 2 * 2 * 64 * 4
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 2048}))
    loop, info = build(config(directory, cache_gb=600 * position / 1e9))
    assert info.max_model_len == 512
    with pytest.raises(ValueError, match=r"limit of 512"):
        info.limits.check(range(512), create_requests((1,), max_tokens=600)[0].params)
    (prompt,) = draw_prompts(200)
    assert tokens_of(loop, [prompt], 400) == [generate_alone(bloom[1], prompt, 312)]
    loop.close()


@pytest.mark.parametrize("family", ["mamba2", "rwkv"])
def test_a_state_that_does_not_grow_bounds_no_prompt(family, tmp_path):
    module = write_tiny(tmp_path / family, family)
    loop, info = build(config(tmp_path / family, cache_gb=0.0002))
    (prompt,) = draw_prompts(100)
    assert info.num_blocks < len(prompt)
    info.limits.check(prompt, create_requests((1,), max_tokens=5)[0].params)
    assert tokens_of(loop, [prompt], 5) == [generate_alone(module, prompt, 5)]
    loop.close()


def test_the_directory_of_the_test_is_left_as_it_was(bloom):
    assert sorted(path.suffix for path in Path(bloom[0]).iterdir()) == [".json", ".json", ".safetensors"]


@pytest.mark.parametrize("family", ["Llama", "OPT"])
@pytest.mark.parametrize("fault", ["cut off", "of another shape"])
def test_a_damaged_checkpoint_is_reported_once(tmp_path, capfd, caplog, family, fault):
    make(tmp_path, family)
    path = tmp_path / "model.safetensors"
    if fault == "cut off":
        os.truncate(path, path.stat().st_size // 2)
        said = "model.safetensors cannot be read as safetensors"
    else:
        tensors = load_file(path)
        name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
        save_file(tensors | {name: tensors[name][:99].clone()}, path, {"format": "pt"})
        said = rf"^tensor {name} has shape \(99, 64\); config.json makes it \(384, 64\)$"
    capfd.readouterr()
    with pytest.raises(ValueError, match=said) as told:
        build(config(tmp_path))
    assert "on padded rows" not in str(told.value)
    assert "REPORT" not in caplog.text and not capfd.readouterr().err, "Transformers' own report and progress bar"
