"""Corrects a measured cost model by what steps take while the loop runs beside them.

On a CPU a step shares its interpreter, its caches and its memory with the planning of the next one, and no step is like
the one before it: in service it takes longer than the same work does again and again.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

from holdfast.core.cost import CostModel
from holdfast.core.protocols import Clock, Executor
from holdfast.core.types import Request, SamplingParams, StepPlan, StepResult
from holdfast.engine.loop import Loop

SECONDS = 3.0
"""How long requests go on to be served."""
APART = 3
"""Steps between two requests."""
OUTPUT = (8, 48)
PROMPT = 256
"""The longest prompt."""
LEAST = 8
"""So many steps of a kind must have been seen to correct it."""


def in_service(
    cost: CostModel, executor: Executor, make_loop: Callable[[Executor], Loop], *, vocab_size: int, clock: Clock
) -> CostModel:
    """The cost model with its decode steps and its others as much longer as the median one of each is in the loop.

    Serves requests for some seconds. `make_loop` puts a loop around an executor; its memory must be its own, and what
    is written to the cache has no owner afterwards.
    """
    watched = _Watched(executor)
    loop = make_loop(watched)
    choose = random.Random(0)
    longest = min(PROMPT, cost.attention_contexts[-1] - OUTPUT[1] - 1)
    if longest < 1:
        return cost
    began, number = clock(), 0
    while clock() - began < SECONDS:
        if number % APART == 0:
            prompt = tuple(choose.choices(range(vocab_size), k=choose.randint(1, longest)))
            params = SamplingParams(temperature=0.0, max_tokens=choose.randint(*OUTPUT), ignore_eos=True)
            loop.add(Request(f"pace-{number}", prompt, params, arrival=clock()))
        loop.step()
        number += 1
    watched.drain()
    kinds: tuple[list[float], list[float]] = [], []
    for plan, seconds in watched.steps:
        _, _, starts, stops, _, _ = plan.columns.columns
        spans = [(stop - start, stop) for start, stop in zip(starts, stops, strict=True)]
        kinds[plan.num_tokens > len(spans)].append(seconds / cost.step(spans))
    decodes, others = (median(ratios) if len(ratios) >= LEAST else 1.0 for ratios in kinds)
    return cost.slower(decodes, others)


class _Watched:
    """Goes around an executor and notes what each step took."""

    def __init__(self, inner: Executor) -> None:
        self.steps: list[tuple[StepPlan, float]] = []
        self._inner = inner
        self._plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._inner.submit(plan)
        self._plans.append(plan)

    def collect(self) -> StepResult:
        result = self._inner.collect()
        plan = self._plans.popleft()
        if plan.num_tokens:
            self.steps.append((plan, result.seconds))
        return result

    def drain(self) -> None:
        """Wait for the steps in flight."""
        while self._plans:
            self.collect()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
