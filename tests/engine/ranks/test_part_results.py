"""A part's work on every rank is complete once the last rank has done it."""

from __future__ import annotations

from holdfast.engine.ranks.part_results import LoadsOfRanks, PartResults, SlicesOfRanks, StatesOfRanks, split
from holdfast.lm.parts.adapters.values import AdapterLoad, AdapterPlan, AdapterResult
from holdfast.lm.parts.grammars.values import GrammarResult
from holdfast.lm.parts.tuning.values import TrainingPlan, TrainingReport, TrainingSlice
from holdfast.lm.types import PartPlan, StateCopy, StatePlan, StepPlan
from holdfast.lm.types.states import StateResult


def plan(step: int, *parts: PartPlan) -> StepPlan:
    return StepPlan(step, (), parts=parts)


def loads(step: int, *adapters: str) -> StepPlan:
    return plan(step, AdapterPlan(tuple(AdapterLoad(slot, name) for slot, name in enumerate(adapters))))


def test_a_load_is_complete_once_every_rank_has_made_it() -> None:
    found = LoadsOfRanks(2)
    for step in (3, 4):
        found.submitted(loads(step, f"adapter {step}"))
    found.reported(0, 4, AdapterResult(4))
    assert found.result(4) is None
    found.reported(1, 5, AdapterResult(3))
    assert found.result(5) == AdapterResult(3)
    assert found.result(6) is None, "each load is reported once"
    found.reported(1, 7, AdapterResult(7))
    assert found.result(7) == AdapterResult(4)


def test_an_adapter_that_one_rank_lost_is_reported_once_no_rank_may_still_copy_to_its_slot() -> None:
    found = LoadsOfRanks(3)
    found.submitted(loads(3, "lost", "kept"))
    found.submitted(loads(4, "other"))
    found.reported(1, 3, AdapterResult(3, ("lost",)))
    found.reported(0, 4, AdapterResult(4))
    assert found.result(4) is None
    found.reported(2, 5, AdapterResult(4, ("lost",)))
    assert found.result(5) == AdapterResult(3, ("lost",))
    found.reported(1, 6, AdapterResult(4))
    assert found.result(6) == AdapterResult(4), "it is reported once"


def test_a_loss_is_that_of_one_load_not_of_earlier_or_later_ones() -> None:
    found = LoadsOfRanks(2)
    found.submitted(loads(3, "first"))
    found.submitted(loads(4, "lost"))
    found.reported(0, 4, AdapterResult(4, ("lost",)))
    found.reported(1, 4, AdapterResult(3))
    assert found.result(4) == AdapterResult(3)
    found.reported(1, 5, AdapterResult(4))
    assert found.result(5) == AdapterResult(4, ("lost",))
    found.submitted(loads(6, "lost"))
    for rank in range(2):
        found.reported(rank, 6, AdapterResult(6))
    assert found.result(6) == AdapterResult(6), "its files are there again"


def test_only_a_plan_that_waits_needs_its_loads_and_those_before_it() -> None:
    found = LoadsOfRanks(2)
    found.submitted(loads(1, "a"))
    found.submitted(loads(3, "b"))
    assert found.complete(2, waits=False)
    assert not found.complete(2, waits=True)
    for rank in range(2):
        found.reported(rank, 1, AdapterResult(1))
    assert found.complete(2, waits=True)
    assert not found.complete(3, waits=True)


def test_a_slice_is_complete_with_the_last_rank_and_took_as_long_as_on_the_slowest() -> None:
    found = SlicesOfRanks(2)
    found.submitted(plan(5, TrainingPlan(TrainingSlice("job", 0, 0, "run", 0, 2))))
    found.submitted(plan(6, TrainingPlan(lent=3)))
    assert found.complete(6, waits=False), "it has no slice"
    found.reported(1, 5, TrainingReport("job", seconds=0.5, loss=None))
    assert not found.complete(5, waits=False)
    found.reported(0, 5, TrainingReport("job", seconds=0.25, loss=2.0, launch_seconds=0.125))
    assert found.complete(5, waits=False)
    assert found.result(5) == TrainingReport("job", seconds=0.5, loss=2.0, launch_seconds=0.125)
    assert found.result(6) is None


def test_results_go_to_their_part() -> None:
    found, given = PartResults(1), (AdapterResult(1), GrammarResult(), TrainingReport("job"))
    assert split(given) == {True: [given[0], given[2]], False: [given[1]]}
    found.submitted(
        StepPlan(
            1,
            (),
            parts=(
                AdapterPlan((AdapterLoad(0, "a"),)),
                TrainingPlan(TrainingSlice("job", 0, 0, "run", 0, 1)),
            ),
        )
    )
    assert not found.complete(1, waits=False)
    found.reported(0, 1, given)
    assert found.complete(1, waits=True)
    assert found.results(1) == [AdapterResult(1), TrainingReport("job")]


def test_a_step_with_copies_of_states_to_the_host_waits_for_every_rank() -> None:
    found = StatesOfRanks(2)
    found.submitted(plan(3, StatePlan(swap_out=(StateCopy(4, 0),))))
    found.submitted(plan(4, StatePlan(swap_in=(StateCopy(0, 1),))))
    found.submitted(plan(5, StatePlan(saves=(StateCopy(0, 4),))))
    assert found.complete(5, waits=False), "copies on the device are in order on each rank"
    found.reported(0, 3, StateResult())
    found.reported(0, 4, StateResult())
    assert not found.complete(3, waits=False) and not found.complete(4, waits=True)
    found.reported(1, 3, StateResult())
    assert found.complete(3, waits=False) and not found.complete(4, waits=False)
    assert found.result(3) == StateResult() and found.result(5) is None
