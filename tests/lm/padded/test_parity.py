"""Through the real scheduler every request gets greedily what the model's own `generate` gives it alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import copy
from itertools import count
from typing import Any

import pytest
import torch

from holdfast.core.config import EngineConfig
from holdfast.core.types import Request, SamplingParams
from holdfast.lm.padded.device import PaddedDevice
from holdfast.lm.padded.growing_layer import QUANTUM
from holdfast.lm.scheduler.choice import make_scheduler
from holdfast.lm.types import MemoryMeasurement, StepPlan, StepResult
from holdfast.loop.loop import Loop
from tests.lm.padded.histories import FailingDriver, model_of
from tests.padded_checks import FAMILIES, VOCAB, StatePlaces, generate_alone, tiny

REQUESTS, LONGEST_PROMPT, GENERATED = 10, 40, 9
SCHEDULERS = (
    "stall-free", "embedding", "shaping", "run-to-completion", "prefill-apart", "padded-batches", "orca",
    "request-level", "prefill-first",
)  # fmt: skip


class Case:
    """A tiny model, requests for it, and what it generates for each alone. Half of them end by a token."""

    def __init__(self, family: str) -> None:
        self.module = tiny(family)
        draw = random.Random(1)
        self.requests, self.expected = [], {}
        for number in range(REQUESTS):
            prompt = tuple(draw.randrange(1, VOCAB) for _ in range(draw.randint(1, LONGEST_PROMPT)))
            tokens = generate_alone(self.module, prompt, draw.randint(1, GENERATED))
            ends = (draw.choice(tokens),) if number % 2 else ()
            stop = min((tokens.index(end) + 1 for end in ends), default=len(tokens))
            params = SamplingParams(temperature=0, max_tokens=len(tokens), ignore_eos=True, stop_token_ids=ends)
            self.requests.append(Request(str(number), prompt, params, priority=number % 3))
            self.expected[str(number)] = tokens[:stop]
        self.device = PaddedDevice(model_of(self.module), EngineConfig(device="cpu", executor="padded"))


class Watched:
    """An executor whose plans are followed by `StatePlaces`, as long as no state is lost."""

    def __init__(self, executor: Any, *, follow: bool) -> None:
        self.executor, self.follow = executor, follow
        self.places = StatePlaces()
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        if self.follow:
            self.places.apply(plan)
        self.executor.submit(plan)

    def collect(self) -> StepResult:
        self.results.append(self.executor.collect())
        return self.results[-1]

    def close(self) -> None:
        self.executor.close()


def serve(
    case: Case, *, seed: int = 3, fails: float = 0.0, rows_in_memory: int = 20, host_rows: int = 0, **options: Any
) -> tuple[dict[str, tuple[int, ...]], Watched]:
    """What each request gets, where requests arrive at random; what was run."""
    settings = {"max_sequences": 4, "token_budget": 24} | options
    device = copy(case.device)  # probing takes longest, and is the same for all
    config = device.config = EngineConfig(device="cpu", executor="padded", **settings)
    device.token_budget = settings["token_budget"]
    failure = random.Random(seed)
    if fails:
        device.driver = FailingDriver(case.device.driver, lambda: failure.random() < fails)
    row = device.row_bytes.of(QUANTUM)
    cache, host = int(row * rows_in_memory / config.shrink_threshold) + 1, row * host_rows
    shape = device.allocate(MemoryMeasurement("cpu", 0, 0, 0, cache, device.row_bytes.position, host))
    watched = Watched(device.executor, follow=not fails)
    ticks = count()
    loop = Loop(make_scheduler(config, shape, None), watched, config.steps_in_flight, lambda: next(ticks) / 100)
    draw, waiting = random.Random(seed), list(case.requests)
    outputs: dict[str, list[int]] = {request.id: [] for request in waiting}
    try:
        for _ in range(2000):
            while waiting and draw.random() < 0.4:
                loop.add(waiting.pop(0))
            for output in loop.step() or ():
                outputs[output.request_id] += output.tokens
            if not waiting and not loop.has_work():
                break
        assert not waiting and not loop.has_work(), "not done after 2000 steps"
    finally:
        loop.close()
    return {name: tuple(tokens) for name, tokens in outputs.items()}, watched


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    torch.set_num_threads(1)
    yield Case(request.param)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_tokens_are_those_of_each_request_alone(case: Case, scheduler: str, steps_in_flight: int) -> None:
    if scheduler in ("shaping", "orca") and not case.device.abilities.shaping:
        pytest.skip("the model is refused there: its prompts cannot be computed beside decodes")
    tokens, watched = serve(case, scheduler=scheduler, steps_in_flight=steps_in_flight)
    assert tokens == case.expected
    kinds = {move.kind for plan in watched.plans for move in plan.row_moves}
    assert ("embed" in kinds) == (scheduler not in ("shaping", "orca", "run-to-completion", "request-level"))
    if scheduler == "stall-free" and case.device.abilities.chunks:
        assert any(each.start and each.length > 1 for plan in watched.plans for each in plan.segments)


@pytest.mark.parametrize("scheduler", ["stall-free", "embedding", "padded-batches"])
def test_tokens_are_equal_when_the_device_runs_out_of_memory_now_and_then(case: Case, scheduler: str) -> None:
    tokens, watched = serve(case, scheduler=scheduler, fails=0.05)
    assert tokens == case.expected
    assert any(result.lost for result in watched.results)


@pytest.mark.parametrize("host_rows", [0, 10])
def test_tokens_are_equal_when_rows_are_displaced_by_more_urgent_ones(case: Case, host_rows: int) -> None:
    tokens, watched = serve(case, rows_in_memory=2, host_rows=host_rows, headroom=0.0, seed=5)
    assert tokens == case.expected
    kinds = [move.kind for plan in watched.plans for move in plan.row_moves]
    assert any(plan.preempted for plan in watched.plans)
    assert ("store" in kinds) == ("load" in kinds) == bool(host_rows)
