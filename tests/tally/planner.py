"""TallyPart: the planner's side of the tally."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.core.types import Request
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.part import Part, PartStep
from holdfast.lm.types import PartPlan, StepPlan, StepResult
from tests.tally.values import TallyPlan, TallyResult

LONGEST = 100
"""Most tokens of a prompt that is counted."""


class TallyPart(Part):
    """Asks the device to count every n-th step."""

    name = "tally"

    def __init__(self, every: int) -> None:
        self.steps = self.positions = 0
        self._every = every

    def check(self, request: Request) -> None:
        if len(request.prompt) > LONGEST:
            raise ValueError(f"the prompt has {len(request.prompt)} tokens; the tally counts at most {LONGEST}")

    def finish(self, step: PartStep) -> PartPlan | None:
        if step.number % self._every or not step.planned:
            return None
        return TallyPlan(tuple([stop - start for start, stop in step.spans]))

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> Iterable[Entry]:
        if plan.part(TallyPlan).lengths:
            self.steps += 1
            self.positions += result.part(TallyResult).positions
        return ()

    def stats(self) -> Mapping[str, float]:
        return {}
