"""Engines of models with latent attention: turns of a conversation, tiers, drafts, and what they refuse."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.types import Request, SamplingParams
from holdfast.engine.process.build import build, build_engine
from holdfast.engine.process.parts.tiers import TierHandler
from holdfast.lm.config import EngineConfig
from holdfast.lm.types import LanguageLoop
from tests.checkpoints import VOCAB, make

SIZES: dict[str, Any] = dict(
    device="cpu", threads=1, block_size=4, cache_gb=0.01, max_sequences=4, max_model_len=200, token_budget=32
)


@pytest.fixture(scope="module", params=["DeepseekV2", "DeepseekV3", "Glm4MoeLite", "MiniCPM3"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    torch.set_num_threads(1)
    directory: Path = tmp_path_factory.mktemp("checkpoint")
    return make(directory, request.param), directory


def drawn(length: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(1, VOCAB) for _ in range(length))


def generated(module: Any, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    tokens = module.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return tuple(tokens[0, len(prompt) :].tolist())


def answer(loop: LanguageLoop, name: str, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """The tokens of a request, and how many tokens of its prompt were not computed."""
    tokens, cached = (), 0
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    loop.add(Request(name, prompt, params, arrival=time.monotonic()))
    while loop.has_work():
        for output in loop.step() or ():
            tokens, cached = tokens + output.tokens, output.cached_tokens
    return tokens, cached


@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"speculation": "ngram"}], ids=["plain", "drafts"])
def test_turns_have_transformers_tokens_and_compute_only_what_is_new(
    served: tuple[Any, Path], options: dict[str, Any]
) -> None:
    loop, info = build(EngineConfig(model=str(served[1]), **SIZES, **options))
    assert info.executor == "paged"
    prompt, length = drawn(41, seed=1), 0
    for turn in range(3):
        found, cached = answer(loop, str(turn), prompt)
        assert found == generated(served[0], prompt, 9)
        assert cached == max(0, length - 1) // 4 * 4  # whole blocks of the turn before, whose last token has no key
        length = len(prompt + found)
        prompt += found + drawn(7, seed=turn + 1)
    loop.close()


def test_a_block_takes_the_bytes_of_its_latents(served: tuple[Any, Path]) -> None:
    engine = build_engine(EngineConfig(model=str(served[1]), **SIZES))
    config = served[0].config
    numbers = config.num_hidden_layers * SIZES["block_size"] * (config.kv_lora_rank + config.qk_rope_head_dim)
    assert engine.info.memory.block == 4 * numbers
    engine.close()


def test_latents_come_back_from_the_host_and_the_disk_after_a_restart(served: tuple[Any, Path], tmp_path: Path) -> None:
    config = served[0].config
    block = 4 * config.num_hidden_layers * 4 * (config.kv_lora_rank + config.qk_rope_head_dim) / 1e9
    tiers: dict[str, Any] = dict(host_cache_gb=20 * block, disk_cache_dir=str(tmp_path / "disk"), eviction="lru")
    sizes = SIZES | dict(cache_gb=20 * block, disk_cache_gb=0.01, **tiers)
    prompts = [drawn(41, seed=number) for number in range(5)]
    for turn in range(2):
        engine = build_engine(EngineConfig(model=str(served[1]), **sizes))
        for number, prompt in enumerate(prompts):
            found, cached = answer(engine.loop, f"{turn} {number}", prompt)
            assert found == generated(served[0], prompt, 9)
            assert 32 <= cached <= 40 if turn else cached == 0
        engine.handler(TierHandler).flush(engine.loop, 200)
        stats = engine.loop.stats()
        assert stats.disk_blocks_cached >= 50
        assert stats.prefix_hits_on_disk >= (5 * 32 if turn else 0)
        engine.loop.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_adapters": 1}, "adapters of a model with latent attention run on padded rows"),
        ({"tuning": True}, "a model with latent attention cannot be tuned"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is fp8, which latent attention does not have"),
    ],
)
def test_options_that_latent_attention_does_not_have_are_refused(
    served: tuple[Any, Path], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        build_engine(EngineConfig(model=str(served[1]), **SIZES, **options, executor="paged")).close()


def test_a_model_with_adapters_runs_on_padded_rows(served: tuple[Any, Path]) -> None:
    engine = build_engine(EngineConfig(model=str(served[1]), **SIZES | {"block_size": 16}, max_adapters=1))
    assert engine.info.executor == "padded"
    assert engine.info.executor_reason.startswith("adapters of a model with latent attention run on padded rows")
    engine.close()
