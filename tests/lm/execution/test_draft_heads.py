"""A real model gives equal tokens with and without a draft head, whatever happens meanwhile."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.cost import CostModel
from holdfast.core.types import Request, SamplingParams, TokenLogprobs
from holdfast.lm.choice import compose_scheduler, make_planning
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.draft_head import DraftHead
from holdfast.lm.models.loader import load
from holdfast.lm.parts.speculation.choice import make_head_parts
from holdfast.lm.parts.speculation.device import HeadDevice
from holdfast.lm.parts.speculation.values import HeadPlan, HeadResult
from holdfast.lm.parts.standard import standard_parts
from holdfast.lm.types import SchedulerStats, Segment, StepPlan, StepResult, TableWrite
from holdfast.loop.loop import Loop
from tests.heads import make_head
from tests.invariants import check_scheduler
from tests.paged import sizes

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "initializer_range": 0.5,
}
WHOLE = CONFIG | {"hidden_size": 64, "head_dim": 16}
"""Heads of 16 numbers, so that the library in C computes whole steps."""
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
"""Answers of few tokens, of which the head guesses two."""
KINDS: tuple[dict[str, Any], ...] = (
    dict(temperature=0.0, logit_bias=FEW),
    dict(temperature=0.4, logit_bias=FEW),
    dict(temperature=0.7, top_k=3, top_p=0.9, logit_bias=FEW, logprobs=2),
    dict(temperature=0.5, frequency_penalty=0.1, repetition_penalty=1.02, logit_bias=FEW, logprobs=0),
    dict(temperature=0.3, min_p=0.1, min_tokens=20, stop_token_ids=(9,), ignore_eos=False, logit_bias=FEW),
    dict(temperature=1.0),
)

Answers = dict[str, tuple[list[int], list[TokenLogprobs]]]


@pytest.fixture(scope="module", params=[CONFIG, WHOLE], ids=["torch", "whole steps"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    directory: Path = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(request.param))
    loaded = load(directory, device="cpu", load_format="random")
    assert isinstance(loaded, Decoder)
    return loaded


@pytest.fixture(scope="module")
def head(model: Decoder, tmp_path_factory: pytest.TempPathFactory) -> DraftHead:
    made = make_head(tmp_path_factory.mktemp("head"), model, (3, 7))
    assert isinstance(made, DraftHead)
    return made


def requests(seed: int) -> list[Request]:
    choose = random.Random(seed)
    shared = tuple(choose.randrange(64) for _ in range(24))
    return [
        Request(
            str(number),
            (*shared[: choose.choice((0, 8, 24))], *(choose.randrange(64) for _ in range(choose.randint(1, 40)))),
            SamplingParams(**{"seed": number, "max_tokens": choose.randint(20, 70), "ignore_eos": True} | kind),
            priority=choose.choice((0, 0, 1)),
        )
        for number, kind in enumerate(choose.choices(KINDS, k=12))
    ]


def loop_of(
    model: Decoder, head: DraftHead | None, *, host: int = 0, flight: int = 2, observers: Any = (), **options: Any
) -> Any:
    config = EngineConfig(
        **dict(max_sequences=6, block_size=4, draft_tokens=4) | options,
        speculation="off" if head is None else "eagle3",
        draft_model="" if head is None else "head",
        host_cache_gb=0.001 if host else 0,
    )
    device_parts = [] if head is None else [HeadDevice(head, config.most_sequences, model.spec.weight_bytes)]
    device = PagedDevice(model, config, parts=device_parts)
    shape = device.allocate(sizes(60, host))
    planning = make_planning(config, shape, FREE)
    parts = [*([] if head is None else make_head_parts(planning, 0.001)), *standard_parts(planning)]
    scheduler = compose_scheduler(planning, planning.policy, parts)
    return Loop(scheduler, device.executor, flight, time.monotonic, observers=observers)


def play(model: Decoder, seed: int, head: DraftHead | None) -> tuple[Answers, set[str], SchedulerStats]:
    """Answers of requests that come and are aborted at random, the ids of the aborted ones, and the stats."""
    choose = random.Random(seed)
    host = choose.choice((0, 40))
    budget = choose.choice((16, 48))
    loop = loop_of(model, head, host=host, flight=choose.choice((1, 2, 3)), token_budget=budget)
    answers: Answers = {}
    aborted: set[str] = set()
    waiting = requests(seed)
    while waiting or loop.has_work():
        if waiting and choose.random() < 0.4:
            request = waiting.pop()
            loop.add(request)
            answers[request.id] = [], []
        if head is not None and answers and choose.random() < 0.02:
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


def test_random_histories_give_the_tokens_that_each_request_gets_without_a_head(
    model: Decoder, head: DraftHead
) -> None:
    drafted = accepted = preempted = shared = 0
    for seed in (0, 1):
        plain, _, _ = play(model, seed, None)
        answers, aborted, stats = play(model, seed, head)
        drafted, accepted = drafted + stats.tokens_drafted, accepted + stats.drafts_accepted
        preempted, shared = preempted + stats.preemptions, shared + stats.prefix_hits
        for name, (tokens, told) in answers.items():
            expected, of_expected = plain[name]
            assert tokens == (expected[: len(tokens)] if name in aborted else expected)
            assert [each.logprob for each in told] == pytest.approx(
                [each.logprob for each in of_expected[: len(told)]], abs=1e-4
            )
    assert drafted > 125 and accepted > 50 and preempted > 0 and shared > 12


class Seen:
    """Keeps every plan and its result."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []

    def planned(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def ended(self, result: StepResult) -> None:
        self.results.append(result)

    def close(self) -> None:
        pass


def reference(head: DraftHead, taps: torch.Tensor, tokens: list[int], first: int, known: int, count: int) -> list[int]:
    """The guesses after `known` tokens, by the whole text [first, known), with no cache.

    `taps` [known, layers, hidden] are the inputs of the tapped layers. Keys are computed anew for each guess.
    """
    hidden = head.combine(taps[first : known - 1])
    following = torch.tensor(tokens[first + 1 : known])
    for _ in range(count):
        positions = torch.arange(first, first + len(following))
        entered, residual = head.enter(hidden, following)
        keys, values = head.keys_values(entered, positions)
        query = head.queries(entered[-1:], positions[-1:])
        everything = torch.ones(1, len(following), dtype=torch.bool)
        out = head.leave(head.attend(query, keys[None], values[None], everything), residual[-1:])
        hidden = torch.cat((hidden, out))
        following = torch.cat((following, head.guess(out)))
    return following.tolist()[-count:]


def taps_of(model: Decoder, head: DraftHead, tokens: list[int]) -> torch.Tensor:
    """The inputs of the head's tapped layers for a text that is computed in one step."""
    device = HeadDevice(head, 1, 1)
    paged = PagedDevice(model, EngineConfig(max_sequences=1, token_budget=256, block_size=4), parts=[device])
    paged.allocate(sizes(60))
    blocks = tuple(range(-(-len(tokens) // 4)))
    segment = Segment("one", 0, 0, len(tokens), tuple(tokens), None)
    plan = StepPlan(0, (segment,), (TableWrite(0, 0, blocks),), parts=(HeadPlan(keeps=True),))
    paged.executor.submit(plan)
    paged.executor.collect()
    paged.executor.close()
    return device.memory.taps.into[: len(tokens)].clone()


def test_guesses_are_those_of_the_whole_text_after_chunks_drafts_and_rejections(
    model: Decoder, head: DraftHead
) -> None:
    seen = Seen()
    loop = loop_of(model, head, token_budget=16, max_sequences=3, observers=(seen,))
    choose = random.Random(5)
    prompts = {name: [choose.randrange(64) for _ in range(length)] for name, length in (("a", 5), ("b", 37), ("c", 21))}
    for number, (name, prompt) in enumerate(prompts.items()):
        params = SamplingParams(temperature=0.4, seed=number, max_tokens=40, ignore_eos=True, logit_bias=FEW)
        loop.add(Request(name, tuple(prompt), params))
    texts = {name: list(prompt) for name, prompt in prompts.items()}
    while loop.has_work():
        for output in loop.step() or ():
            texts[output.request_id] += output.tokens
    loop.close()
    taps = {name: taps_of(model, head, tokens) for name, tokens in texts.items()}
    compared = rejected = chunked = 0
    for plan, result in zip(seen.plans, seen.results, strict=True):
        sampled = [segment for segment in plan.segments if segment.sampling is not None]
        chunked += len(plan.segments) - len(sampled)
        counts = result.counts or [1] * len(sampled)
        most = plan.samples or [1] * len(sampled)
        for segment, count, several, guesses in zip(
            sampled, counts, most, result.part(HeadResult).drafts, strict=False
        ):
            known = segment.stop - several + 1 + count
            if known > len(texts[segment.sequence_id]) or not guesses:
                continue
            rejected += count < several
            text = texts[segment.sequence_id]
            assert list(guesses) == reference(head, taps[segment.sequence_id], text, 0, known, len(guesses))
            compared += 1
    assert compared > 30 and rejected > 5 and chunked > 2
