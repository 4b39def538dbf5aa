"""A real model gives equal tokens with and without drafts, whatever happens meanwhile."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.lm.choice import compose_scheduler, make_planning
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.models.base import Model
from holdfast.lm.models.loader import load
from holdfast.lm.parts.speculation.choice import make_drafter, make_parts
from holdfast.lm.parts.standard import standard_parts
from holdfast.loop.loop import Loop
from tests.drafted import CONFIG, FREE, KINDS, TICKS, Played, check_histories, play, requests, ticks
from tests.long import then_long
from tests.paged import sizes

__all__ = ["ticks"]
pytestmark = pytest.mark.usefixtures("ticks")

GEMMA = CONFIG | {
    "architectures": ["Gemma4ForCausalLM"],
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "sliding_window": 12,
}
"""Layers of two head sizes, half of which read the keys of earlier ones."""
KINDS_HERE = (*KINDS, dict(temperature=0.0, logit_bias=((5, 100.0),)))


Play = Callable[..., Played]


@pytest.fixture(scope="module")
def plainly(model: Model) -> Play:
    """Plays random histories without drafts, each once. Their tests see equal ticks."""
    return cache(partial(played, model, speculation="off"))


@pytest.fixture(scope="module", params=[CONFIG, GEMMA], ids=["llama", "gemma4"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory: Path = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(request.param))
    return load(directory, device="cpu", load_format="random")


def played(model: Model, seed: int, speculation: Any, *, count: int = 14, **options: Any) -> Played:
    """A random history of this many requests with this drafter. Without drafts no request is aborted."""
    choose = random.Random(seed)
    host = choose.choice((0, 40))
    config = EngineConfig(
        **dict(max_sequences=6, block_size=4, token_budget=choose.choice((16, 48)), draft_tokens=6) | options,
        speculation=speculation,
        host_cache_gb=0.001 if host else 0,
    )
    device = PagedDevice(model, config)
    shape = device.allocate(sizes(60, host))
    planning = make_planning(config, shape, FREE)
    parts = [*make_parts(planning, make_drafter(config, shape, "cpu")), *standard_parts(planning)]
    scheduler = compose_scheduler(planning, planning.policy, parts)
    loop = Loop(scheduler, device.executor, choose.choice((1, 2, 3)), TICKS.monotonic)
    waiting = requests(seed, KINDS_HERE, count, prompt=12, tokens=90)
    return play(loop, waiting, choose, aborts=speculation != "off")


@pytest.mark.parametrize("first", then_long(1, [0, 2]))
@pytest.mark.parametrize("speculation", ["ngram", "suffix"])
def test_random_histories_give_the_tokens_that_each_request_gets_without_drafts(
    model: Model, plainly: Play, speculation: str, first: int
) -> None:
    check_histories([(plainly(seed)[0], played(model, seed, speculation)) for seed in (first, first + 1)])


@pytest.mark.always("llama")  # rows are the same for all models
def test_one_sequence_may_draw_more_tokens_than_there_are_rows(model: Model) -> None:
    plain, answers = (
        played(model, 3, kind, count=5, max_sequences=1, draft_tokens=20)[0] for kind in ("off", "suffix")
    )
    for name, (tokens, _) in answers.items():
        assert tokens == plain[name][0][: len(tokens)]
