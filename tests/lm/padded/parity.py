"""Requests through the real scheduler and executor, beside what the model's own `generate` gives each of them alone."""

from __future__ import annotations

import random
from collections import Counter
from copy import copy
from itertools import count
from typing import Any

from holdfast.core.types import Request, SamplingParams
from holdfast.lm.choice import make_scheduler
from holdfast.lm.config import EngineConfig
from holdfast.lm.padded.device import PaddedDevice
from holdfast.lm.types import QUANTUM, MemoryMeasurement, RowPlan, StepPlan, StepResult
from holdfast.loop.loop import Loop
from tests.lm.padded.histories import FailingDriver, model_of
from tests.padded_checks import VOCAB, StatePlaces, generate_alone

LONGEST_PROMPT, GENERATED = 40, 9


def device_of(module: Any) -> PaddedDevice:
    """The device of a tiny model, which has probed what it can do."""
    return PaddedDevice(model_of(module), EngineConfig(device="cpu", executor="padded"))


class Case:
    """Random requests for a tiny model, and what it generates for each alone. Half of them end by a token.

    A model that keeps its state inside generates without it: RecurrentGemma begins a prompt of one token with the state
    that the call before has left.
    """

    def __init__(self, device: PaddedDevice, *, requests: int = 10, seed: int = 1) -> None:
        self.device = device
        device.model.module.generation_config.use_cache = device.abilities.keeps_state
        draw = random.Random(seed)
        self.requests: list[Request] = []
        self.expected: dict[str, tuple[int, ...]] = {}
        for number in range(requests):
            prompt = tuple(draw.randrange(1, VOCAB) for _ in range(draw.randint(1, LONGEST_PROMPT)))
            tokens = generate_alone(device.model.module, prompt, draw.randint(1, GENERATED))
            ends = (draw.choice(tokens),) if number % 2 else ()
            stop = min((tokens.index(end) + 1 for end in ends), default=len(tokens))
            params = SamplingParams(temperature=0, max_tokens=len(tokens), ignore_eos=True, stop_token_ids=ends)
            self.requests.append(Request(str(number), prompt, params, priority=number % 3))
            self.expected[str(number)] = tokens[:stop]


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

    @property
    def happened(self) -> Counter[str]:
        """How often: each kind of move, a chunk behind another, a prompt beside decodes, a group of prompts."""
        seen = Counter[str](move.kind for plan in self.plans for move in plan.part(RowPlan).moves)
        for plan in self.plans:
            at = 0
            for forward in plan.part(RowPlan).forwards:
                own, at = plan.segments[at : forward.stop], forward.stop
                started = sum(not each.start for each in own)
                seen["chunk"] += forward.apart and any(each.start for each in own)
                seen["shape"] += not forward.apart and 0 < started < len(own)
                seen["group"] += forward.apart and started > 1
        return +seen


def serve(
    case: Case,
    *,
    seed: int = 3,
    arriving: float = 0.4,
    fails: float = 0.0,
    rows_in_memory: int = 20,
    host_rows: int = 0,
    **options: Any,
) -> tuple[dict[str, tuple[int, ...]], Watched]:
    """What each request gets, and what was run. Before each step requests arrive until a draw exceeds `arriving`."""
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
            while waiting and draw.random() < arriving:
                loop.add(waiting.pop(0))
            for output in loop.step() or ():
                outputs[output.request_id] += output.tokens
            if not waiting and not loop.has_work():
                break
        assert not waiting and not loop.has_work(), "not done after 2000 steps"
    finally:
        loop.close()
    return {name: tuple(tokens) for name, tokens in outputs.items()}, watched
