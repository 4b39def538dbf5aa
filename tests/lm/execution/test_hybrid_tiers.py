"""Conversations on real hybrid models with tiers that are far too small: greedy tokens stay those of Hugging Face."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.types import Request, SamplingParams
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.retention import EVICTIONS, RetentionRule
from holdfast.lm.memory.state_pool import StatePool
from holdfast.lm.models.base import Model
from holdfast.lm.models.loader import load
from holdfast.lm.parts.states.device import StateDevice
from holdfast.lm.scheduler.hybrid import HybridKind
from holdfast.lm.scheduler.policies import StallFree
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import SchedulerStats, StateShape
from holdfast.loop.loop import Loop
from tests.checkpoints import NEMOTRON_3, VOCAB, make
from tests.hybrid import check_hybrid
from tests.late_streams import LateStream
from tests.long import then_long
from tests.paged import sizes

CONVERSATIONS, TURNS, NEW_TOKENS, GENERATED = 6, 5, 9, 6
BLOCK_SIZE, BUDGET, ROWS = 4, 24, 4
DEVICE_BLOCKS, HOST_BLOCKS, SNAPSHOTS = 40, 50, 4

Turn = tuple[tuple[int, ...], tuple[int, ...]]
"""A prompt and its answer."""


@dataclass
class Small:
    """A model and Transformers' own module of it."""

    model: Model
    module: Any
    known: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    """Answers of the module by prompt. The prompts of different tests are mostly the same."""

    def expected(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        if prompt not in self.known:
            self.known[prompt] = self.generated(prompt)
        return self.known[prompt]

    def generated(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        tokens = torch.tensor([prompt])
        seen = torch.ones_like(tokens)
        out = self.module.generate(tokens, attention_mask=seen, max_new_tokens=GENERATED, do_sample=False)
        return tuple(out[0, len(prompt) :].tolist())


MODELS: dict[str, dict[str, Any]] = {"Qwen3_5Text": {}, "NemotronH": NEMOTRON_3}
"""The models, by family, and their differences."""


@pytest.fixture(scope="module", params=MODELS)
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Small:
    torch.set_num_threads(1)
    directory: Path = tmp_path_factory.mktemp(request.param)
    module = make(directory, request.param, **MODELS[request.param])
    return Small(load(directory, device="cpu", dtype="float32"), module)


def converse(
    small: Small, *, steps_in_flight: int = 2, host: bool = True, **streams: Any
) -> tuple[list[Turn], SchedulerStats]:
    """Conversations that take turns at random, branch and break off. Returns the turns and the statistics."""
    host_blocks, host_snapshots = (HOST_BLOCKS, SNAPSHOTS) if host else (0, 0)
    config = EngineConfig(block_size=BLOCK_SIZE, token_budget=BUDGET, max_sequences=ROWS)
    device = PagedDevice(small.model, config, parts=[StateDevice(0.25)], **streams)
    device.allocate(replace(sizes(DEVICE_BLOCKS, host_blocks, SNAPSHOTS), host_snapshots=host_snapshots))
    if device.memory.host is not None:
        device.memory.host.begin()
        device.memory.host.wait()
    rule = RetentionRule(EVICTIONS["retention"], cost=float, chunk_blocks=2, block_size=BLOCK_SIZE)
    pool = BlockPool(DEVICE_BLOCKS, BLOCK_SIZE, rule=rule.from_the_end(), host_blocks=host_blocks)
    shape = StateShape(snapshots=SNAPSHOTS, host_snapshots=host_snapshots, slot_bytes=1)
    kind = HybridKind(pool, StatePool(shape, ROWS, pool, rule))
    scheduler = Scheduler(
        StallFree(BUDGET), kind, max_sequences=ROWS, max_model_len=small.model.spec.max_model_len, sharing=True
    )
    ticks, names = count(), count()
    loop = Loop(scheduler, device.executor, steps_in_flight, lambda: float(next(ticks)))
    draw = random.Random(3)
    greeting = tuple(draw.randrange(1, VOCAB) for _ in range(10))
    histories, turns = [greeting] * CONVERSATIONS, list[Turn]()
    running, answers, aborts = dict[str, int](), dict[str, tuple[int, ...]](), 6
    to_come = [number for number in range(CONVERSATIONS) for _ in range(TURNS)]
    draw.shuffle(to_come)
    while to_come or loop.has_work():
        idle = [number for number in to_come if number not in running.values()]
        if idle and len(running) < ROWS:
            number = idle[0]
            to_come.remove(number)
            if draw.random() < 0.1:  # a branch of another conversation
                histories[number] = draw.choice([other for other in histories if len(other) <= len(histories[number])])
            histories[number] += tuple(draw.randrange(1, VOCAB) for _ in range(NEW_TOKENS))
            name = f"turn-{next(names)}"
            running[name], answers[name] = number, ()
            loop.add(Request(name, histories[number], SamplingParams(temperature=0, max_tokens=GENERATED)))
        if running and aborts and draw.random() < 0.1:  # somebody leaves in the middle of an answer
            aborts -= 1
            name = draw.choice(list(running))
            loop.abort(name)
            to_come.append(running.pop(name))
        for output in loop.step() or ():
            answers[output.request_id] += output.tokens
            if output.finish_reason is not None:
                number, answer = running.pop(output.request_id), answers[output.request_id]
                turns.append((histories[number], answer))
                histories[number] += answer
        check_hybrid(scheduler)
    device.executor.close()
    return turns, loop.stats()


@pytest.mark.always("Qwen3_5Text-1", "NemotronH-3")
@pytest.mark.parametrize("steps_in_flight", then_long(2, [1, 3, 2]))  # two are in flight where copies are late
def test_answers_from_snapshots_equal_those_of_the_model_without_a_cache(small: Small, steps_in_flight: int) -> None:
    turns, stats = converse(small, steps_in_flight=steps_in_flight)
    assert len(turns) == CONVERSATIONS * TURNS
    for prompt, answer in turns:
        assert answer == small.expected(prompt)
    assert stats.snapshot_hits > 10
    assert stats.snapshots_dropped > 10
    assert stats.snapshots_swapped_in > 0


@pytest.mark.always("Qwen3_5Text")
def test_answers_are_equal_with_copies_as_late_as_allowed(small: Small) -> None:
    turns, stats = converse(small, make_stream=LateStream)
    for prompt, answer in turns:
        assert answer == small.expected(prompt)
    assert stats.blocks_swapped_in > 10


@pytest.mark.always("Qwen3_5Text")
def test_answers_are_equal_without_a_host_tier(small: Small) -> None:
    turns, stats = converse(small, host=False)
    for prompt, answer in turns:
        assert answer == small.expected(prompt)
    assert stats.snapshot_hits > 10
