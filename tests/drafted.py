"""Random histories of a loop whose decodes verify drafts: requests that come and are aborted, and their answers."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.core.cost import CostModel
from holdfast.core.types import Request, SamplingParams, TokenLogprobs
from holdfast.lm.execution import executor
from holdfast.lm.parts.speculation import device as head_device
from holdfast.lm.types import SchedulerStats
from tests.invariants import check_scheduler

CONFIG: dict[str, Any] = {
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
"""A small model of which each token matters to the next."""
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
    dict(temperature=0.3, min_p=0.1, min_tokens=20, stop_token_ids=(9,), ignore_eos=False, logit_bias=FEW),
    dict(temperature=1.0),
)
"""Sampling parameters of requests."""

Answers = dict[str, tuple[list[int], list[TokenLogprobs]]]
"""Tokens and log probabilities of each request."""
Played = tuple[Answers, set[str], SchedulerStats]
"""Answers, the ids of aborted requests, and the stats at the end."""


class Ticks(threading.local):
    """The module `time`, in which each thread reads a clock that goes on by a tick with every reading.

    So measured times say the same on any machine, and so do the decisions that rest on them.
    """

    TICK = 2.0**-10

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += self.TICK
        return self.now

    monotonic = perf_counter

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


TICKS = Ticks()


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    """Steps and passes of draft heads are measured in ticks."""
    for module in (executor, head_device):
        monkeypatch.setattr(module, "time", TICKS)
    return TICKS


def requests(seed: int, kinds: Sequence[dict[str, Any]], count: int, *, prompt: int, tokens: int) -> list[Request]:
    """Random requests, some of which begin alike, of up to `prompt` further tokens and answers of up to `tokens`."""
    choose = random.Random(seed)
    shared = tuple(choose.randrange(64) for _ in range(24))
    return [
        Request(
            str(number),
            (*shared[: choose.choice((0, 8, 24))], *(choose.randrange(64) for _ in range(choose.randint(1, prompt)))),
            SamplingParams(**{"seed": number, "max_tokens": choose.randint(20, tokens), "ignore_eos": True} | kind),
            priority=choose.choice((0, 0, 1)),
        )
        for number, kind in enumerate(choose.choices(kinds, k=count))
    ]


def play(loop: Any, waiting: list[Request], choose: random.Random, *, aborts: bool) -> Played:
    """Answer requests that come at random, and of which some are aborted if `aborts`. Closes the loop."""
    answers: Answers = {}
    aborted: set[str] = set()
    while waiting or loop.has_work():
        if waiting and choose.random() < 0.4:
            request = waiting.pop()
            loop.add(request)
            answers[request.id] = [], []
        if aborts and answers and choose.random() < 0.02:
            name = choose.choice(list(answers))
            loop.abort(name)
            aborted.add(name)
        for output in loop.step() or ():
            assert output.request_id not in aborted
            answers[output.request_id][0].extend(output.tokens)
            answers[output.request_id][1].extend(output.logprobs)
        check_scheduler(loop.planner)
    stats = loop.stats()
    assert (stats.waiting, stats.running, stats.blocks_used) == (0, 0, 0)
    loop.close()
    return answers, aborted, stats


def check_histories(histories: Sequence[tuple[Answers, Played]]) -> None:
    """Check that each request got the tokens that it gets without drafts, and that these histories had every event."""
    drafted = accepted = preempted = shared = 0
    for plain, (answers, aborted, stats) in histories:
        drafted, accepted = drafted + stats.tokens_drafted, accepted + stats.drafts_accepted
        preempted, shared = preempted + stats.preemptions, shared + stats.prefix_hits
        for name, (tokens, told) in answers.items():
            expected, of_expected = plain[name]
            assert tokens == (expected[: len(tokens)] if name in aborted else expected)
            assert [each.logprob for each in told] == pytest.approx(
                [each.logprob for each in of_expected[: len(told)]], abs=1e-4
            )
    assert drafted > 125 and accepted > 50 and preempted > 0 and shared > 12
