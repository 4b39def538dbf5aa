"""From a scheduler's name to its policy and the size of its steps."""

import sys
from dataclasses import replace

import pytest

from holdfast.core.config import PACKED_SCHEDULERS, ROW_SCHEDULERS, SCHEDULERS
from holdfast.core.cost import PaddedCost
from holdfast.lab.schedulers import Unified
from holdfast.lm.choice import (
    capacity_of,
    choose_policy,
    describe_budget,
    describe_target,
    make_policy,
    make_scheduler,
    steps_in_flight,
)
from holdfast.lm.config import EngineConfig
from holdfast.lm.memory.row_pool import RowPool
from holdfast.lm.scheduler.pipeline_target import PipelineLatencyTarget
from holdfast.lm.scheduler.policies import LatencyTarget, StallFree
from holdfast.lm.types import EngineShape, RowPlan, StateShape
from tests.lm.scheduler.test_latency_target import COST
from tests.padded_rows import ABLE, shape_of_rows
from tests.scheduling import answer, create_requests, create_scheduler

CHUNKED, RESERVING = ("stall-free", "chunked-only"), ("request-level", "orca")


@pytest.mark.parametrize("name", PACKED_SCHEDULERS)
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


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"token_budget": 128}, ""),
        ({"token_budget": 130}, "128 of 130 are used, whole matrix tiles of 16"),
        ({"token_budget": 96}, "steps of 65 to 128 take equally long here, so 128 costs no more"),
        (
            {"token_budget": 97},
            "96 of 97 are used, whole matrix tiles of 16; "
            "steps of 65 to 128 take equally long here, so 128 costs no more",
        ),
        ({"token_budget": 97, "scheduler": "orca"}, ""),
        ({"tbt_target": 50.0}, ""),
    ],
)
def test_what_becomes_of_a_token_budget_is_said_in_words(options, note):
    cost = replace(COST, linear_tokens=(1, 64, 65, 128), linear_seconds=(0.001, 0.002, 0.003, 0.003))
    assert describe_budget(EngineConfig(**options), SHAPE, cost) == note


@pytest.mark.parametrize(
    ("target", "contracts", "note"),
    [
        (0.9, True, "the TBT target of 0.9 ms is below the smallest step, which takes 4.1 ms here, so every token is "
         "late, and every contract is refused"),
        (4.05, False, "the TBT target of 4.05 ms is below the smallest step, which takes 4.1 ms here, so every token "
         "is late"),
        (4.2, True, ""),
        (None, True, ""),
    ],
)  # fmt: skip
def test_a_target_below_the_smallest_step_is_said_in_words(target, contracts, note):
    config = EngineConfig(tbt_target=target)
    assert describe_target(config, COST, contracts=contracts) == note
    assert describe_target(config, None, contracts=contracts) == ""


def test_an_automatic_budget_is_the_largest_multiple_of_the_tile_that_meets_the_target():
    def budget(target_ms, blocks=128, **options):
        config = EngineConfig(tbt_target=target_ms, token_budget="auto", max_sequences=4, **options)
        policy = choose_policy(config, replace(SHAPE, num_blocks=blocks), COST)
        assert isinstance(policy, StallFree)
        return policy.token_budget

    def seconds(tokens, context=512):
        return COST.step([(1, context)] * 4 + [(tokens - 4, max(context, tokens - 4))])

    assert budget(9.0) % 16 == 0
    assert seconds(budget(9.0)) <= 0.009 < seconds(budget(9.0) + 16)
    small = budget(9.0, blocks=16)  # 256 positions: 64 for each of 4 decodes
    assert seconds(small, 64) <= 0.009 < seconds(small + 16, 64) and small > budget(9.0)
    assert budget(0.001) == 16, "prefills go on under any target"
    assert budget(60_000.0) == 256, "the buffers of a step hold no more"


def test_a_target_without_a_fixed_budget_computes_one_each_step():
    assert isinstance(choose_policy(EngineConfig(tbt_target=50.0), SHAPE, COST), LatencyTarget)
    for budget in (None, "auto"):
        with pytest.raises(ValueError, match="takes a profile"):
            choose_policy(EngineConfig(tbt_target=50.0, token_budget=budget), SHAPE, None)


def test_each_name_is_a_policy_class_of_its_own():
    assert len({type(make_policy(name, token_budget=8, capacity=67)) for name in PACKED_SCHEDULERS}) == len(
        PACKED_SCHEDULERS
    )


def test_a_latency_target_requires_the_stall_free_scheduler():
    assert EngineConfig(tbt_target=50).scheduler == "stall-free"
    with pytest.raises(ValueError, match="scheduler is orca"):
        EngineConfig(tbt_target=50, scheduler="orca")


ROWS = replace(SHAPE, executor="padded", rows=shape_of_rows(4096))


def padded(**options):
    return EngineConfig(executor="padded", max_sequences=4, **options)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_name_plans_padded_rows(name):
    scheduler = make_scheduler(padded(scheduler=name, prefix_sharing=False), ROWS, None)
    assert isinstance(scheduler.pool, RowPool)
    for request in create_requests(5, 8):
        scheduler.add(replace(request, prompt=(1,) * len(request.prompt)))
    plan = scheduler.schedule(0.0)
    assert plan.part(RowPlan).forwards[-1].stop == len(plan.segments) > 0


def test_each_name_is_a_policy_class_of_its_own_on_padded_rows():
    assert len({type(choose_policy(padded(scheduler=name), ROWS, None)) for name in SCHEDULERS}) == len(SCHEDULERS)


@pytest.mark.parametrize("name", ROW_SCHEDULERS)
def test_a_model_that_runs_on_the_paged_executor_refuses_policies_of_rows(name):
    with pytest.raises(ValueError, match=f"scheduler is {name}, which plans padded rows, and the model runs on the"):
        make_scheduler(EngineConfig(scheduler=name), SHAPE, None)


MINE = """
from holdfast.lm.scheduler.policies import FixedBudget

class PrefillsFirst(FixedBudget):
    chunks = True

    def plan(self, step):
        step.budget = self.token_budget
        step.prefill()
        step.admit()
        step.decode()

no_class = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The module `mine` in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text(MINE)
    yield
    sys.modules.pop("mine", None)


def test_a_scheduler_may_be_a_class_of_the_users_own(module):
    config = EngineConfig(scheduler="mine:PrefillsFirst")
    policy = choose_policy(config, SHAPE, None)
    assert type(policy).__name__ == "PrefillsFirst" and policy.token_budget == 96, "a whole number of tiles"
    assert capacity_of(config.scheduler, token_budget=8, max_model_len=64, max_sequences=3, limit=1) == 8
    scheduler = make_scheduler(config, SHAPE, None)
    for request in create_requests(8, 8):
        scheduler.add(replace(request, prompt=(1,) * len(request.prompt)))
    first = scheduler.schedule(0.0)
    assert [segment.length for segment in first.segments] == [8, 8]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine:Missing", "scheduler mine:Missing: 'Missing' is not in mine"),
        (
            "mine:no_class",
            "scheduler mine:no_class: it must be a subclass of holdfast.lm.scheduler.policies",
        ),
        ("not_there:X", "scheduler not_there:X: there is no module not_there"),
    ],
)
def test_a_scheduler_that_cannot_be_found_is_refused_with_its_name(name, said, module):
    with pytest.raises(ValueError, match=said):
        make_scheduler(EngineConfig(scheduler=name), SHAPE, None)


@pytest.mark.parametrize("name", ["shaping", "orca"])
def test_prompts_beside_decodes_are_refused_where_the_model_gives_wrong_tokens(name):
    shape = replace(ROWS, rows=shape_of_rows(4096, abilities=replace(ABLE, shaping=False)))
    with pytest.raises(ValueError, match=f"scheduler is {name}.*choose embedding"):
        make_scheduler(padded(scheduler=name), shape, None)


def test_a_step_of_padded_rows_must_hold_a_decode_of_every_row():
    config = EngineConfig(executor="padded", max_sequences=97)
    with pytest.raises(ValueError, match="max_sequences is 97, and a step holds 96 tokens"):
        make_scheduler(config, ROWS, None)
    make_scheduler(replace(config, max_sequences=96), ROWS, None)


def test_a_target_on_padded_rows_is_computed_from_the_cost_of_their_forwards():
    policy = choose_policy(padded(tbt_target=50.0), ROWS, COST)
    assert isinstance(policy, LatencyTarget) and isinstance(policy.corrected, PaddedCost)


def test_a_target_in_a_pipeline_bounds_the_wait_for_all_stages():
    config = EngineConfig(tbt_target=50.0)
    policy = choose_policy(config, SHAPE, COST, stages=2)
    assert isinstance(policy, PipelineLatencyTarget)
    assert not isinstance(choose_policy(config, SHAPE, COST), PipelineLatencyTarget)
    with pytest.raises(ValueError, match="the pipeline has 2 stages, and the cost profile of m on d has 3"):
        make_scheduler(config, SHAPE, replace(COST, stage_shares=(0.25, 0.25, 0.5)), stages=2)


@pytest.mark.parametrize(("given", "stages", "steps"), [(2, 1, 2), (2, 2, 3), (2, 4, 5), (1, 3, 3)])
def test_each_further_stage_has_one_more_step_in_flight(given, stages, steps):
    assert steps_in_flight(EngineConfig(steps_in_flight=given), stages) == steps


def test_padded_rows_run_on_one_stage():
    with pytest.raises(ValueError, match="a pipeline has 2 stages"):
        make_scheduler(padded(), ROWS, None, stages=2)


HYBRID = replace(SHAPE, states=StateShape(snapshots=3, host_snapshots=2, slot_bytes=1))


def test_a_model_with_recurrent_states_gets_a_memory_of_blocks_and_snapshots():
    stats = make_scheduler(EngineConfig(model="m", max_sequences=4), HYBRID, None).stats()
    assert (stats.blocks_total, stats.snapshots_total, stats.host_snapshots_total) == (64, 3, 2)
    assert make_scheduler(EngineConfig(model="m", max_sequences=4), SHAPE, None).stats().snapshots_total == 0


@pytest.mark.parametrize(("scheduler", "first"), [("stall-free", 16), ("hybrid-only", 20)])
def test_prompts_are_cut_at_a_known_prefix_only_by_policies_that_cut_prompts(scheduler, first):
    made = make_scheduler(EngineConfig(model="m", max_sequences=4, scheduler=scheduler), HYBRID, None)
    requests = create_requests((*range(16), 1), (*range(16), 2, 2, 2), max_tokens=1)
    for request in requests:
        made.add(request)
        plan = made.schedule(0.0)
        made.update(plan, answer(plan), 0.0)
    assert plan.segments[0].stop == min(first, 19)


def test_states_do_not_go_with_padded_rows():
    with pytest.raises(ValueError, match=r"StateShape.*padded executor"):
        replace(HYBRID, executor="padded", rows=shape_of_rows(ABLE))
