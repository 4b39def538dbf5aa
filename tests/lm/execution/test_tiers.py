"""Conversations on a real model with two tiers that are far too small: greedy tokens stay those of Hugging Face.

Also with keys and values in FP8, where Hugging Face's cache rounds likewise.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.types import Request, SamplingParams
from holdfast.lm.config import EngineConfig
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.retention import EVICTIONS, RetentionRule
from holdfast.lm.models.base import Model
from holdfast.lm.models.loader import load
from holdfast.lm.scheduler.paged import PagedKind
from holdfast.lm.scheduler.policies import StallFree
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import SchedulerStats
from holdfast.loop.loop import Loop
from tests.checkpoints import VOCAB, make
from tests.invariants import check_scheduler
from tests.late_streams import ForgottenStream, LateStream
from tests.long import then_long
from tests.paged import allocated
from tests.rounded_cache import cache_for

CONVERSATIONS, TURNS, NEW_TOKENS, GENERATED = 6, 6, 9, 6
BLOCK_SIZE, BUDGET, ROWS = 4, 24, 4
DEVICE_BLOCKS, HOST_BLOCKS = 40, 50


@dataclass
class Small:
    """A model and Transformers' own module of it."""

    model: Model
    kv_cache_dtype: str
    module: Any
    known: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    """Answers of the module by prompt. The prompts of different tests are mostly the same."""

    def expected(self, prompt: tuple[int, ...], found: tuple[int, ...]) -> tuple[int, ...]:
        """The module's answer. It is generated only if it is not `found`, which takes one forward to see."""
        if prompt not in self.known:
            self.known[prompt] = found if self.says(prompt, found) else self.generated(prompt)
        return self.known[prompt]

    @torch.inference_mode()
    def says(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> bool:
        """Whether each token of a whole answer is the module's likeliest one after those before."""
        if len(answer) < GENERATED or {*self.model.spec.eos_token_ids} & {*answer}:
            return False
        tokens = torch.tensor([prompt + answer[:-1]], device=self.model.spec.device)
        logits = self.module(tokens, **cache_for(self.module, self.kv_cache_dtype)).logits
        return tuple(logits[0, len(prompt) - 1 :].argmax(-1).tolist()) == answer

    def generated(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        tokens = torch.tensor([prompt], device=self.model.spec.device)
        seen = torch.ones_like(tokens)  # otherwise an answer's token 0 would count as padding
        out = self.module.generate(
            tokens,
            attention_mask=seen,
            max_new_tokens=GENERATED,
            do_sample=False,
            **cache_for(self.module, self.kv_cache_dtype),
        )
        return tuple(out[0, len(prompt) :].tolist())


KINDS = [("Llama", "auto"), ("Llama", "fp8"), ("Gemma4Text", "auto"), ("Gemma4Text", "fp8"), ("DeepseekV3", "auto")]
"""Families and the types of their caches. Gemma 4 has layers of two head sizes, and DeepSeek keeps latents."""


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    family, kv_cache_dtype = request.param
    return family, kv_cache_dtype


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def small(request: pytest.FixtureRequest, kind: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Small:
    torch.set_num_threads(1)
    family, kv_cache_dtype = kind
    directory: Path = tmp_path_factory.mktemp(family)
    module = make(directory, family).to(request.param)
    return Small(load(directory, device=request.param, dtype="float32"), kv_cache_dtype, module)


def converse(
    small: Small,
    *,
    eviction: str = "retention",
    steps_in_flight: int = 2,
    device_blocks: int = DEVICE_BLOCKS,
    by_layer: bool = False,
    groups: int = 4,
    **streams: Any,
) -> tuple[list[tuple[tuple[int, ...], tuple[int, ...]]], SchedulerStats]:
    """Conversations that take turns at random, branch and break off. Returns the turns (prompt, answer) and stats."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        token_budget=BUDGET,
        max_sequences=ROWS,
        kv_cache_dtype=small.kv_cache_dtype,
        swap_in_groups=groups,
    )
    executor = allocated(small.model, config, device_blocks, HOST_BLOCKS, **streams).executor
    rule = RetentionRule(EVICTIONS[eviction], cost=float, chunk_blocks=2, block_size=BLOCK_SIZE)
    pool = BlockPool(device_blocks, BLOCK_SIZE, rule=rule, host_blocks=HOST_BLOCKS)
    scheduler = Scheduler(
        StallFree(BUDGET),
        PagedKind(pool, by_layer=by_layer),
        max_sequences=ROWS,
        max_model_len=small.model.spec.max_model_len,
        sharing=True,
    )
    ticks, names = count(), count()
    loop = Loop(scheduler, executor, steps_in_flight, lambda: float(next(ticks)))
    draw = random.Random(3)
    greeting = tuple(draw.randrange(1, VOCAB) for _ in range(10))
    histories = [greeting] * CONVERSATIONS
    turns: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    running: dict[str, int] = {}
    answers: dict[str, tuple[int, ...]] = {}
    aborts = 10
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
        check_scheduler(scheduler)
    executor.close()
    return turns, loop.stats()


@pytest.mark.parametrize(
    ("eviction", "steps_in_flight"),
    then_long(2, [("retention", 1), ("tail-first", 2), ("retention", 2)]),  # the last one runs where copies are late
)
def test_answers_with_a_host_tier_equal_those_of_the_model_without_a_cache(
    small: Small, eviction: str, steps_in_flight: int
) -> None:
    turns, stats = converse(small, eviction=eviction, steps_in_flight=steps_in_flight)
    assert len(turns) == CONVERSATIONS * TURNS
    for prompt, answer in turns:
        assert answer == small.expected(prompt, answer)
    assert stats.blocks_swapped_out > 50
    assert stats.blocks_swapped_in > 20
    assert stats.host_blocks_dropped > 0
    assert eviction == "tail-first" or stats.tokens_recovered > 20


@pytest.mark.parametrize(("by_layer", "groups"), then_long(2, [(False, 4), (True, 1), (True, 64)]))
def test_answers_are_equal_with_copies_as_late_as_allowed(small: Small, by_layer: bool, groups: int) -> None:
    if small.model.spec.device.type != "cpu":
        pytest.skip("the late stream copies on the host")
    turns, stats = converse(small, make_stream=LateStream, by_layer=by_layer, groups=groups)
    for prompt, answer in turns:
        assert answer == small.expected(prompt, answer)
    assert stats.blocks_swapped_in > 20


@pytest.mark.always("cpu-Llama-auto")
def test_answers_are_wrong_if_steps_do_not_wait_for_copies(small: Small) -> None:
    if small.model.spec.device.type != "cpu":
        pytest.skip("the late stream copies on the host")
    turns, _ = converse(small, make_stream=ForgottenStream)
    assert any(answer != small.expected(prompt, answer) for prompt, answer in turns)
