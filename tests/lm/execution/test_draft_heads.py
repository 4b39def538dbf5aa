"""A real model gives equal tokens with and without a draft head, whatever happens meanwhile."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.types import Request, SamplingParams
from holdfast.lm.choice import compose_scheduler, make_planning
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.executor import PagedExecutor
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.draft_head import DraftHead
from holdfast.lm.models.loader import load
from holdfast.lm.parts.speculation import device as head_device
from holdfast.lm.parts.speculation.choice import make_head_parts
from holdfast.lm.parts.speculation.device import HeadDevice
from holdfast.lm.parts.speculation.values import HeadPlan, HeadResult
from holdfast.lm.parts.standard import standard_parts
from holdfast.lm.types import Segment, StepPlan, StepResult, TableWrite
from holdfast.loop.loop import Loop
from tests.drafted import CONFIG as DRAFTED
from tests.drafted import FEW, FREE, KINDS, TICKS, Played, check_histories, play, requests, ticks
from tests.heads import make_head
from tests.paged import sizes

__all__ = ["ticks"]
pytestmark = pytest.mark.usefixtures("ticks")

CONFIG = DRAFTED | {"num_hidden_layers": 3}
WHOLE = CONFIG | {"hidden_size": 64, "head_dim": 16}
"""Heads of 16 numbers, so that the library in C computes whole steps."""


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
    return Loop(scheduler, device.executor, flight, TICKS.monotonic, observers=observers)


def played(model: Decoder, seed: int, head: DraftHead | None) -> Played:
    """A random history with this head. Without one no request is aborted."""
    choose = random.Random(seed)
    host = choose.choice((0, 40))
    budget = choose.choice((16, 48))
    loop = loop_of(model, head, host=host, flight=choose.choice((1, 2, 3)), token_budget=budget)
    waiting = requests(seed, KINDS, 12, prompt=40, tokens=70)
    return play(loop, waiting, choose, aborts=head is not None)


@pytest.mark.always("whole steps")
def test_random_histories_give_the_tokens_that_each_request_gets_without_a_head(
    model: Decoder, head: DraftHead
) -> None:
    check_histories([(played(model, seed, None)[0], played(model, seed, head)) for seed in (0, 1)])


class Moment:
    """A CUDA event of a device that has done all work at once."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = TICKS.perf_counter()

    def synchronize(self) -> None:
        assert self.at, "nobody waits for what is not launched"

    def query(self) -> bool:
        return self.at > 0

    def elapsed_time(self, other: Moment) -> float:
        return 1000 * (other.at - self.at)


@pytest.mark.always("whole steps")
def test_launched_as_on_a_gpu_the_tokens_are_the_same_and_guesses_come_with_the_next_result(
    model: Decoder, head: DraftHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, seen = played(model, 0, None)[0], Seen()
    monkeypatch.setattr(torch.cuda, "Event", Moment)
    monkeypatch.setattr(PagedExecutor, "close", lambda executor: None)
    choose = random.Random(0)
    loop = loop_of(model, head, flight=2, observers=(seen,), token_budget=48)
    loop.executor._worker.shutdown()
    loop.executor._worker = None
    found, _, stats = play(loop, requests(0, KINDS, 12, prompt=40, tokens=70), choose, aborts=False)
    assert {name: tokens for name, (tokens, _) in found.items()} == {
        name: tokens for name, (tokens, _) in plain.items()
    }
    asked = [plan.part(HeadPlan).drafts for plan in seen.plans]
    assert sum(map(bool, asked)) > 20 and stats.drafts_accepted > 5
    for drafts, result in zip(asked, seen.results[1:], strict=False):
        assert result.part(HeadResult).passes == drafts
    assert sum(plan.samples is not None for plan in seen.plans) > 10


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


def test_a_rehearsal_of_any_size_changes_no_later_guess(
    model: Decoder, head: DraftHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [Request(str(number), tuple(range(5 + number, 40)), SamplingParams(temperature=0.0, max_tokens=40))
             for number in range(5)]  # fmt: skip

    def answers() -> tuple[dict[str, list[int]], int]:
        loop, found = loop_of(model, head), {request.id: list[int]() for request in asked}
        for request in asked:
            loop.add(request)
        while loop.has_work():
            for output in loop.step() or ():
                found[output.request_id] += output.tokens
        accepted = loop.stats().drafts_accepted
        loop.close()
        return found, accepted

    plain = answers()
    sizes_of_a_gpu = partial(head_device.rehearsed, kind="cuda")
    monkeypatch.setattr(head_device, "rehearsed", lambda rows, slots, tokens, kind: sizes_of_a_gpu(rows, slots, tokens))
    assert answers() == plain


def test_a_gpu_rehearses_decodes_of_all_rows_and_prompts_as_far_as_a_step_goes() -> None:
    assert head_device.rehearsed(256, 512, 2048, "cpu") == [(1, 1)]
    sizes = head_device.rehearsed(256, 512, 2048, "cuda")
    assert {(1, 1), (1, 4), (64, 1), (256, 1), (256, 4), (1, 256)} <= {*sizes}
    assert all(rows * positions <= 2048 and rows <= 256 and positions + 2 <= 512 for rows, positions in sizes)
    assert all(rows * positions <= 16 for rows, positions in head_device.rehearsed(256, 512, 16, "cuda"))
