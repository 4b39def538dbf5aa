"""Corrects a measured cost model by the time that steps take while the loop serves requests.

On a CPU a step shares the interpreter, the caches and the memory with the planning of the next one, and no step repeats
the one before. So a step takes longer in service than when it is measured by repetition.
"""

from __future__ import annotations

import random
from collections import deque
from statistics import median

from holdfast.core.cost import CostModel
from holdfast.core.types import Request, SamplingParams
from holdfast.lm.types import LanguageLoop, StepPlan, StepResult
from holdfast.loop.contracts import Clock

SECONDS = 3.0
"""How long requests are served."""
STEPS_BETWEEN_REQUESTS = 3
PROMPT = 256
"""Tokens of the longest prompt."""
OUTPUT = (8, 48)
"""Tokens of the shortest answer and of the longest."""
LEAST = 8
"""A kind of step is corrected only if at least this many were seen."""


def in_service(
    cost: CostModel,
    loop: LanguageLoop,
    *,
    vocab_size: int,
    clock: Clock,
) -> CostModel:
    """Scale decode steps and mixed steps by their median measured/predicted ratio in the loop.

    Serves requests of random tokens below `vocab_size` for SECONDS of `clock`. The loop has a block pool of its own;
    the blocks that it writes have no owner afterwards.
    """
    longest = min(PROMPT, cost.attention_contexts[-1] - OUTPUT[1] - 1)
    if longest < 1:
        return cost
    watched, choose = _StepTimes(), random.Random(0)
    loop.observe(watched)
    began, number = clock(), 0
    while clock() - began < SECONDS:
        if number % STEPS_BETWEEN_REQUESTS == 0:
            prompt = tuple(choose.choices(range(vocab_size), k=choose.randint(1, longest)))
            params = SamplingParams(temperature=0.0, max_tokens=choose.randint(*OUTPUT), ignore_eos=True)
            loop.add(Request(f"pace-{number}", prompt, params, arrival=clock()))
        loop.step()
        number += 1
    while watched.in_flight:  # no plan depends on them
        watched.ended(loop.executor.collect())
    kinds: tuple[list[float], list[float]] = [], []
    for plan, seconds in watched.steps:
        spans = [(segment.length, segment.stop) for segment in plan.segments]
        kinds[plan.num_tokens > len(spans)].append(seconds / cost.step(spans))
    decodes, others = (median(ratios) if len(ratios) >= LEAST else 1.0 for ratios in kinds)
    return cost.slower(decodes, others)


class _StepTimes:
    """An observer that notes how long each step took."""

    def __init__(self) -> None:
        self.steps: list[tuple[StepPlan, float]] = []
        """The steps that computed tokens, and the seconds of each."""
        self.in_flight: deque[StepPlan] = deque()

    def planned(self, plan: StepPlan) -> None:
        self.in_flight.append(plan)

    def ended(self, result: StepResult) -> None:
        plan = self.in_flight.popleft()
        if plan.num_tokens:
            self.steps.append((plan, result.seconds))

    def close(self) -> None:
        """Do nothing: the times stay."""
