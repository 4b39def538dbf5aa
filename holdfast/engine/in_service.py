"""Corrects a measured cost model by what steps take while the loop runs beside them.

On a CPU a step shares its interpreter, its caches and its memory with the planning of the next one, and no step is like
the one before it: in service it takes longer than the same work does again and again.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from statistics import median

from holdfast.core.cost import CostModel
from holdfast.core.types import Request, SamplingParams
from holdfast.lm.types import LanguageExecutor, LanguageLoop, StepPlan, StepResult
from holdfast.loop.contracts import Clock

SECONDS = 3.0
"""How long requests go on to be served."""
APART = 3
"""Steps between two requests."""
PROMPT = 256
"""Tokens of the longest prompt."""
OUTPUT = (8, 48)
"""Tokens of the shortest answer and of the longest."""
LEAST = 8
"""So many steps of a kind must have been seen to correct it."""


def in_service(
    cost: CostModel,
    executor: LanguageExecutor,
    make_loop: Callable[[LanguageExecutor], LanguageLoop],
    *,
    vocab_size: int,
    clock: Clock,
) -> CostModel:
    """The cost model with its decode steps and its others as much longer as the median one of each is in the loop.

    Serves requests for SECONDS of `clock`, of tokens below `vocab_size`. `make_loop` puts a loop around an executor;
    its memory must be its own, and what is written to the cache has no owner afterwards.
    """
    longest = min(PROMPT, cost.attention_contexts[-1] - OUTPUT[1] - 1)
    if longest < 1:
        return cost
    watched = _Watched(executor)
    loop, choose = make_loop(watched), random.Random(0)
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
        spans = [(segment.length, segment.stop) for segment in plan.segments]
        kinds[plan.num_tokens > len(spans)].append(seconds / cost.step(spans))
    decodes, others = (median(ratios) if len(ratios) >= LEAST else 1.0 for ratios in kinds)
    return cost.slower(decodes, others)


class _Watched:
    """Goes around an executor and notes what each step took."""

    def __init__(self, inner: LanguageExecutor) -> None:
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

    def close(self) -> None:
        self._inner.close()
