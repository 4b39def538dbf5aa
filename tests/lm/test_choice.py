"""From a scheduler's name to its policy and the size of its steps."""

from dataclasses import replace

import pytest

from holdfast.core.config import ROW_SCHEDULERS, EngineConfig
from holdfast.core.cost import PaddedCost
from holdfast.lm.choice import (
    CHUNKED,
    EVERY_NAME,
    NAMES,
    RESERVING,
    capacity_of,
    choose_policy,
    make_policy,
    make_scheduler,
    make_tuner,
    steps_in_flight,
)
from holdfast.lm.parts.tuning.deferral import DEFAULT_BOUND, Deferred
from holdfast.lm.parts.tuning.slices import RESERVE, TrainingSlices
from holdfast.lm.scheduler.baselines import Unified
from holdfast.lm.scheduler.pipeline_target import PipelineLatencyTarget
from holdfast.lm.scheduler.policies import LatencyTarget, StallFree
from holdfast.lm.scheduler.row_scheduler import RowScheduler
from holdfast.lm.types import EngineShape, RowPlan
from tests.lm.scheduler.test_latency_target import COST
from tests.padded_rows import ABLE, shape_of_rows
from tests.scheduling import create_requests, create_scheduler
from tests.training_plans import SHAPE as SIZES
from tests.training_plans import blocks_of, make_steps


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
    assert len({type(make_policy(name, token_budget=8, capacity=67)) for name in NAMES}) == len(NAMES)


def test_a_latency_target_requires_the_stall_free_scheduler():
    assert EngineConfig(tbt_target=50).scheduler == "stall-free"
    with pytest.raises(ValueError, match="scheduler is orca"):
        EngineConfig(tbt_target=50, scheduler="orca")


ROWS = replace(SHAPE, executor="padded", rows=shape_of_rows(4096))


def padded(**options):
    return EngineConfig(executor="padded", max_sequences=4, **options)


@pytest.mark.parametrize("name", EVERY_NAME)
def test_every_name_plans_padded_rows(name):
    scheduler = make_scheduler(padded(scheduler=name, prefix_sharing=False), ROWS, None)
    assert isinstance(scheduler, RowScheduler)
    for request in create_requests(5, 8):
        scheduler.add(replace(request, prompt=(1,) * len(request.prompt)))
    plan = scheduler.schedule(0.0)
    assert plan.part(RowPlan).forwards[-1].stop == len(plan.segments) > 0


def test_each_name_is_a_policy_class_of_its_own_on_padded_rows():
    assert len({type(choose_policy(padded(scheduler=name), ROWS, None)) for name in EVERY_NAME}) == len(EVERY_NAME)


@pytest.mark.parametrize("name", ROW_SCHEDULERS)
def test_a_model_that_runs_on_the_paged_executor_refuses_policies_of_rows(name):
    with pytest.raises(ValueError, match=f"scheduler is {name}, which plans padded rows, and the model runs on the"):
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


def tuned(config=None, shape=SHAPE, cost=COST, **options):
    config = config or EngineConfig()
    return make_scheduler(config, shape, cost, tuner=make_tuner(config, SHAPE, COST, SIZES), **options)


def test_training_goes_by_the_deferral_rule_without_a_target_and_in_slices_with_one():
    policy = tuned()._policy
    assert isinstance(policy, Deferred) and isinstance(policy.inner, StallFree) and policy.bound == DEFAULT_BOUND
    assert tuned(deferral_bound=0.0)._policy.bound == 0.0
    policy = tuned(EngineConfig(tbt_target=50), tuning_progress=True)._policy
    assert isinstance(policy, TrainingSlices) and isinstance(policy.inner, LatencyTarget)
    assert (policy.target, policy.progress) == (0.05, True)
    assert isinstance(tuned(EngineConfig(tbt_target=50, token_budget="auto"))._policy.inner, StallFree)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(config=EngineConfig(scheduler="orca")), "tuning is for the stall-free scheduler, and scheduler is orca"),
        (dict(stages=2), "a pipeline has 2 stages; tuning runs on one"),
        (dict(config=EngineConfig(tbt_target=50), deferral_bound=1.0), "deferral_bound is 1.0 and tbt_target is 50"),
        (dict(config=EngineConfig(executor="padded", max_sequences=64), shape=ROWS), "tuning needs a paged cache"),
        (dict(deferral_bound=-1.0), "deferral_bound is -1.0; it must be at least 0"),
    ],
)
def test_what_training_does_not_go_with_is_refused_by_name(change, words):
    with pytest.raises(ValueError, match=words):
        tuned(**change)


def test_a_bound_without_training_is_refused():
    with pytest.raises(ValueError, match=r"deferral_bound is 1\.0, and no training is taken"):
        make_scheduler(EngineConfig(), SHAPE, COST, deferral_bound=1.0)


def test_a_tuner_gets_its_share_of_the_cache_and_what_32_decodes_leave_of_the_target():
    tuner = make_tuner(EngineConfig(), SHAPE, COST, SIZES, memory_fraction=0.25)
    assert (tuner.max_blocks, tuner.max_unit_seconds) == (16, float("inf"))
    tuner = make_tuner(EngineConfig(tbt_target=1000), SHAPE, COST, SIZES, block_seconds=0.5)
    held = SHAPE.num_blocks * 16 // 32
    assert tuner.max_unit_seconds == pytest.approx(1.0 * (1 - RESERVE) - COST.step([(1, held)] * 32))
    assert held < 512, "no cache holds 32 sequences as long as the model allows"
    large = make_tuner(EngineConfig(tbt_target=1000), replace(SHAPE, num_blocks=4096), COST, SIZES)
    assert large.max_unit_seconds == pytest.approx(1.0 * (1 - RESERVE) - COST.step([(1, 512)] * 32))
    assert tuner.cost.block_seconds == 0.5
    for share in (0.0, 1.1):
        with pytest.raises(ValueError, match=f"tuning_memory_fraction is {share}"):
            make_tuner(EngineConfig(), SHAPE, COST, SIZES, memory_fraction=share)


def test_a_target_that_decodes_alone_exceed_refuses_every_job_by_what_to_change():
    seconds = COST.step([(1, 32)] * 32)  # as long as the cache holds so many
    tuner = make_tuner(EngineConfig(tbt_target=1e3 * seconds), SHAPE, COST, SIZES, exact=True)
    with pytest.raises(ValueError) as refusal:
        tuner.add("job", make_steps([16]), blocks_of(1))
    target, took = f"{1e3 * seconds:g} ms", f"a step of 32 decodes takes {1e3 * seconds:.1f} ms"
    assert str(refusal.value) == (
        f"job job has no room beside streams: tbt_target is {target}, of which {RESERVE:.0%} stays free, and {took}, "
        "which leaves nothing for training: raise tbt_target, or give a deferral_bound instead"
    )
    make_tuner(EngineConfig(tbt_target=3e3 * seconds), SHAPE, COST, SIZES).add("job", make_steps([16]), blocks_of(1))
