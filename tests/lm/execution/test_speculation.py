"""A real model gives equal tokens with and without drafts, whatever happens meanwhile."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.cost import CostModel
from holdfast.core.types import Request, SamplingParams, TokenLogprobs
from holdfast.lm.choice import compose_scheduler, make_planning
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.models.base import Model
from holdfast.lm.models.loader import load
from holdfast.lm.parts.speculation.choice import make_drafter, make_parts
from holdfast.lm.parts.standard import standard_parts
from holdfast.lm.types import SchedulerStats
from holdfast.loop.loop import Loop
from tests.invariants import check_scheduler
from tests.long import then_long
from tests.paged import sizes

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "initializer_range": 0.5,
}
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
FREE = CostModel(
    model="m",
    device="d",
    linear_tokens=(1, 1024),
    linear_seconds=(1.0, 1.01),
    attention_queries=(1, 64),
    attention_contexts=(1, 64),
    attention_seconds=((0.0, 0.0), (0.0, 0.0)),
)
"""A cost model in which rows cost nothing, so drafts pay wherever they are sometimes right."""
FEW = ((3, 40.0), (7, 40.0), (9, 39.0))
"""Answers of few tokens repeat themselves."""
KINDS: tuple[dict[str, Any], ...] = (
    dict(temperature=0.0, logit_bias=FEW),
    dict(temperature=0.4, logit_bias=FEW),
    dict(temperature=0.7, top_k=3, top_p=0.9, logit_bias=FEW, logprobs=2),
    dict(temperature=0.5, frequency_penalty=0.1, repetition_penalty=1.02, logit_bias=FEW, logprobs=0),
    dict(temperature=0.0, logit_bias=((5, 100.0),)),
    dict(temperature=0.3, min_p=0.1, min_tokens=20, stop_token_ids=(9,), ignore_eos=False, logit_bias=FEW),
    dict(temperature=1.0),
)

Answers = dict[str, tuple[list[int], list[TokenLogprobs]]]


@pytest.fixture(scope="module", params=[CONFIG, GEMMA], ids=["llama", "gemma4"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory: Path = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(request.param))
    return load(directory, device="cpu", load_format="random")


def requests(seed: int) -> list[Request]:
    choose = random.Random(seed)
    shared = tuple(choose.randrange(64) for _ in range(24))
    return [
        Request(
            str(number),
            (*shared[: choose.choice((0, 8, 24))], *(choose.randrange(64) for _ in range(choose.randint(1, 12)))),
            SamplingParams(**{"seed": number, "max_tokens": choose.randint(20, 90), "ignore_eos": True} | kind),
            priority=choose.choice((0, 0, 1)),
        )
        for number, kind in enumerate(choose.choices(KINDS, k=14))
    ]


def play(model: Model, seed: int, speculation: Any, **options: Any) -> tuple[Answers, set[str], SchedulerStats]:
    """Answers of requests that come and are aborted at random, the ids of the aborted ones, and the stats."""
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
    loop = Loop(scheduler, device.executor, choose.choice((1, 2, 3)), time.monotonic)
    answers: Answers = {}
    aborted: set[str] = set()
    waiting = requests(seed)
    while waiting or loop.has_work():
        if waiting and choose.random() < 0.4:
            request = waiting.pop()
            loop.add(request)
            answers[request.id] = [], []
        if speculation != "off" and answers and choose.random() < 0.02:
            name = choose.choice(list(answers))
            loop.abort(name)
            aborted.add(name)
        for output in loop.step() or ():
            assert output.request_id not in aborted
            answers[output.request_id][0].extend(output.tokens)
            answers[output.request_id][1].extend(output.logprobs)
        check_scheduler(scheduler)
    stats = scheduler.stats()
    assert (stats.waiting, stats.running, stats.blocks_used) == (0, 0, 0)
    loop.close()
    return answers, aborted, stats


@pytest.mark.parametrize("first", then_long(1, [0, 2]))
@pytest.mark.parametrize("speculation", ["ngram", "suffix"])
def test_random_histories_give_the_tokens_that_each_request_gets_without_drafts(
    model: Model, speculation: str, first: int
) -> None:
    drafted = accepted = preempted = shared = 0
    for seed in (first, first + 1):
        plain, _, _ = play(model, seed, "off")
        answers, aborted, stats = play(model, seed, speculation)
        drafted, accepted = drafted + stats.tokens_drafted, accepted + stats.drafts_accepted
        preempted, shared = preempted + stats.preemptions, shared + stats.prefix_hits
        for name, (tokens, told) in answers.items():
            expected, of_expected = plain[name]
            assert tokens == (expected[: len(tokens)] if name in aborted else expected)
            assert [each.logprob for each in told] == pytest.approx(
                [each.logprob for each in of_expected[: len(told)]], abs=1e-4
            )
    assert drafted > 125 and accepted > 50 and preempted > 0 and shared > 12


def test_one_sequence_may_draw_more_tokens_than_there_are_rows(model: Model) -> None:
    plain, answers = (play(model, 3, kind, max_sequences=1, draft_tokens=20)[0] for kind in ("off", "suffix"))
    for name, (tokens, _) in answers.items():
        assert tokens == plain[name][0][: len(tokens)]
