"""From a scheduler's name to its policy and the size of its steps."""

from dataclasses import replace

import pytest

from holdfast.core.config import EngineConfig
from holdfast.lm.scheduler.baselines import Unified
from holdfast.lm.scheduler.choice import CHUNKED, NAMES, RESERVING, capacity_of, choose_policy, make_policy
from holdfast.lm.scheduler.policies import LatencyTarget, StallFree
from holdfast.lm.types import EngineShape
from tests.lm.scheduler.test_latency_target import COST
from tests.scheduling import create_requests, create_scheduler


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_fills_a_step_up_to_its_capacity(name):
    capacity = capacity_of(name, token_budget=8, max_model_len=64, max_sequences=3, limit=1000)
    assert capacity == (8 if name in CHUNKED else 192 if name in RESERVING else 67)
    scheduler = create_scheduler(
        policy=make_policy(name, token_budget=8, capacity=capacity), max_sequences=3, max_model_len=64
    )
    for request in create_requests(63, 63, 63, max_tokens=1):
        scheduler.add(request)
    plan = scheduler.schedule(0.0)
    assert plan.num_tokens == (8 if name in CHUNKED else 189 if name in RESERVING else 63)


def test_the_unified_policy_admits_prompts_up_to_the_budget_and_has_room_for_the_last_of_them_whole():
    policy = make_policy("unified", token_budget=8, capacity=67)
    assert isinstance(policy, Unified)
    assert (policy.threshold, policy.token_budget) == (8, 67)


@pytest.mark.parametrize(("limit", "capacity"), [(1, 67), (100, 100), (1000, 192)])
def test_the_limit_bounds_steps_of_many_whole_prompts_but_leaves_room_for_the_longest(limit, capacity):
    for name in RESERVING:
        sizes = {"token_budget": 8, "max_model_len": 64, "max_sequences": 3}
        assert capacity_of(name, **sizes, limit=limit) == capacity


SHAPE = EngineShape(
    model="m", precision="float32", num_blocks=64, token_budget=100, max_step_tokens=256, max_model_len=512,
    vocab_size=50, tile=16,
)  # fmt: skip


@pytest.mark.parametrize(("budget", "used"), [(257, 256), (256, 256), (17, 16), (16, 16), (15, 15), (1, 1)])
def test_a_fixed_budget_is_rounded_down_to_whole_tiles_unless_below_one(budget, used):
    for name in CHUNKED:
        policy = choose_policy(EngineConfig(scheduler=name), replace(SHAPE, token_budget=budget), None)
        assert policy.token_budget == used


def test_an_automatic_budget_is_the_largest_multiple_of_the_tile_that_meets_the_target():
    def budget(target_ms, **options):
        config = EngineConfig(tbt_target=target_ms, token_budget="auto", max_sequences=4, **options)
        policy = choose_policy(config, SHAPE, COST)
        assert isinstance(policy, StallFree)
        return policy.token_budget

    def seconds(tokens):
        return COST.step([(1, 512)] * 4 + [(tokens - 4, 512)])

    assert budget(9.0) % 16 == 0
    assert seconds(budget(9.0)) <= 0.009 < seconds(budget(9.0) + 16)
    assert budget(0.001) == 16, "prefills go on under any target"
    assert budget(60_000.0) == 256, "the buffers of a step hold no more"


def test_a_target_without_a_fixed_budget_computes_one_each_step():
    assert isinstance(choose_policy(EngineConfig(tbt_target=50.0), SHAPE, COST), LatencyTarget)
    for budget in (None, "auto"):
        with pytest.raises(ValueError, match="takes a profile"):
            choose_policy(EngineConfig(tbt_target=50.0, token_budget=budget), SHAPE, None)


def test_each_name_is_a_policy_class_of_its_own():
    assert len({type(make_policy(name, token_budget=8, capacity=67)) for name in NAMES}) == len(NAMES)


def test_a_latency_target_requires_the_stall_free_scheduler():
    assert EngineConfig(tbt_target=50).scheduler == "stall-free"
    with pytest.raises(ValueError, match="scheduler is orca"):
        EngineConfig(tbt_target=50, scheduler="orca")
