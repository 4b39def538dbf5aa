"""Parts of an executor: only the hooks that they override are called, and only their plans are read."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.batch import StagedStep
from holdfast.lm.execution.executor import PagedExecutor
from holdfast.lm.execution.part import EVERY_TOKEN, DrawRules, PartExecutor, PartHooks, part_of
from holdfast.lm.models.base import Model
from holdfast.lm.parts.adapters.values import AdapterPlan, AdapterResult
from holdfast.lm.types import PartResult, StepPlan
from holdfast.lm.types.penalties import PenaltyPlan
from tests.lm.execution.test_executor import GREEDY, decode, model, prefill
from tests.paged import allocated

__all__ = ["model"]


class Watching(PartExecutor):
    """A part that notes its calls."""

    plans = (AdapterPlan,)

    def __init__(self) -> None:
        self.calls: list[str] = []

    def before(self, plan: StepPlan) -> None:
        self.calls.append(f"before {plan.step}")

    def completed(self, *, wait: bool) -> Sequence[PartResult]:
        self.calls.append(f"completed, waiting: {wait}")
        return (AdapterResult(loaded=len(self.calls)),)

    def close(self) -> None:
        self.calls.append("close")


class Following(PartExecutor):
    """A part with rules for draws, which allow all tokens."""

    def rules(self, staged: StagedStep) -> DrawRules:
        return EVERY_TOKEN


def test_a_part_is_called_at_the_hooks_that_it_overrides_alone() -> None:
    watching, following, idle = Watching(), Following(), PartExecutor()
    hooks = PartHooks([watching, idle, following])
    assert hooks.parts == (watching, idle, following)
    assert hooks.before == hooks.completed == hooks.close == (watching,)
    assert hooks.rules == (following,)
    assert hooks.hidden == hooks.after == hooks.idle == ()


def test_two_parts_with_rules_for_draws_are_refused() -> None:
    with pytest.raises(ValueError, match="2 parts have rules for draws"):
        PartHooks([Following(), Following()])


def test_a_plan_with_a_value_that_no_part_reads_is_refused() -> None:
    hooks = PartHooks([Watching()], [PenaltyPlan])
    hooks.check(StepPlan(3, (), parts=(AdapterPlan(), PenaltyPlan())))
    with pytest.raises(ValueError, match="step 3 has a PenaltyPlan, and this executor has no part that reads it"):
        PartHooks([Watching()]).check(StepPlan(3, (), parts=(AdapterPlan(), PenaltyPlan())))


def test_a_part_is_found_by_its_class() -> None:
    watching = Watching()
    assert part_of([PartExecutor(), watching], Watching) is watching
    with pytest.raises(LookupError, match="there is no Following"):
        part_of([watching], Following)


def test_a_part_sees_every_plan_and_adds_to_every_result(model: Model) -> None:
    device = allocated(model, EngineConfig(max_sequences=4, block_size=4, token_budget=16), 32)
    watching = Watching()
    executor = PagedExecutor(model, device.attention, device.memory, [watching])
    assert executor.part(Watching) is watching
    loaded = []
    for plan in (prefill(0, GREEDY), decode(1, (0, 8, GREEDY)), StepPlan(2, ())):
        executor.submit(plan)
        loaded.append(executor.collect().part(AdapterResult).loaded)
    executor.close()
    waits = ["completed, waiting: False"] * 2 + ["completed, waiting: True"]
    assert watching.calls == [call for step in range(3) for call in (f"before {step}", waits[step])] + ["close"]
    assert loaded == [2, 4, 6]
