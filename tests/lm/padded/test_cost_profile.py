"""The measured cost of padded rows predicts the time that the device took."""

from dataclasses import replace

import pytest

from holdfast.core.cost import CostModel, PaddedCost
from holdfast.engine.profiles import CostProfile
from holdfast.lab.simulator.executor import SimulatedExecutor, VirtualClock
from holdfast.lab.simulator.padded import PaddedStepTimes
from holdfast.lab.simulator.run import engine_shape
from holdfast.lm.config import EngineConfig
from holdfast.lm.padded.cost_profile import estimate_padded_cost, measure_padded_cost
from tests.padded_checks import StatePlaces
from tests.padded_rows import ABLE

COST = CostModel(
    model="m",
    device="d",
    linear_tokens=(1, 4096),
    linear_seconds=(0.004, 0.404),
    attention_queries=(1, 4096),
    attention_contexts=(64, 4096),
    attention_seconds=((0.00001, 0.001), (0.002, 0.2)),
)
PROFILE = CostProfile(
    cost=COST, dtype="float32", cache_tokens=100_000, max_model_len=4096, token_budget=1024, tile=16, token_bytes=100
)
CONFIG = EngineConfig(executor="padded", max_sequences=8)


def simulated(profile=PROFILE):
    times = PaddedStepTimes(COST)
    return times, SimulatedExecutor(times, VirtualClock()), engine_shape(CONFIG, profile)


def test_predicted_decodes_and_chunks_equal_the_times_of_the_device():
    times, executor, shape = simulated()
    cost = measure_padded_cost(executor, shape, max_sequences=8, device="d")
    true = PaddedCost.of(COST)
    for rows, width in ((1, 100), (3, 700), (8, 1024)):
        assert cost.forward(rows, 1, width) == pytest.approx(true.forward(rows, 1, width), rel=0.05)
    for query, context in ((64, 64), (256, 1024), (1024, 1024)):
        assert cost.forward(1, query, context) == pytest.approx(true.forward(1, query, context), rel=0.05)
    assert len(times.batch) == 0, "no row is left behind"


def test_an_estimate_takes_fewer_steps():
    counted = []
    for make in (measure_padded_cost, estimate_padded_cost):
        _, executor, shape = simulated()
        submit, steps = executor.submit, []
        executor.submit = lambda plan, submit=submit, steps=steps: (steps.append(plan), submit(plan))
        make(executor, shape, max_sequences=8, device="d")
        counted.append(len(steps))
    assert counted[1] < counted[0] / 2


def test_an_engine_of_packed_tokens_is_refused():
    _, executor, _ = simulated()
    packed = engine_shape(EngineConfig(), PROFILE)
    with pytest.raises(ValueError, match="executor is paged"):
        measure_padded_cost(executor, packed, max_sequences=8, device="d")


@pytest.mark.parametrize("chunks", [True, False])
@pytest.mark.parametrize(("longest", "rows"), [(26, 8), (60, 1), (300, 5)])
def test_plans_stay_within_rows_positions_and_budget_and_leave_nothing(longest, rows, chunks):
    able = replace(engine_shape(CONFIG, PROFILE).rows, abilities=replace(ABLE, chunks=chunks))
    times, executor, shape = simulated(replace(PROFILE, max_model_len=longest, token_budget=64, rows=able))
    submit, plans = executor.submit, []
    executor.submit = lambda plan: (plans.append(plan), submit(plan))
    measure_padded_cost(executor, shape, max_sequences=rows, device="d")
    places = StatePlaces()
    for plan in plans:
        places.apply(plan)
        assert all(segment.row < rows and segment.stop <= longest for segment in plan.segments)
        assert plan.num_tokens <= shape.max_step_tokens
    starts = [segment.sequence_id for plan in plans for segment in plan.segments if not segment.start]
    assert len({*starts}) == len(starts), "each prompt is a sequence of its own"
    assert len(times.batch) == 0 and not places.apart and not places.slots
