"""From a configuration with tuning to the tuner and the policy, and what tuning does not go with."""

from dataclasses import replace

import pytest

from holdfast.lm.choice import make_planning
from holdfast.lm.config import EngineConfig
from holdfast.lm.parts.tuning.choice import make_tuner, with_training
from holdfast.lm.parts.tuning.deferral import Deferred
from holdfast.lm.parts.tuning.options import DEFAULT_BOUND
from holdfast.lm.parts.tuning.planner import TuningPart
from holdfast.lm.parts.tuning.slices import RESERVE, TrainingSlices
from holdfast.lm.scheduler.policies import LatencyTarget, StallFree
from tests.lm.scheduler.test_latency_target import COST
from tests.lm.test_choice import ROWS, SHAPE
from tests.training_plans import SHAPE as SIZES
from tests.training_plans import blocks_of, make_steps


def tuned(config=None, shape=SHAPE, cost=COST, *, stages=1, deferral_bound=None, progress=False):
    planning = make_planning(config or EngineConfig(), shape, cost, stages=stages)
    part = TuningPart(make_tuner(planning_of(planning.config), SIZES))
    return with_training(planning, planning.policy, part, deferral_bound, progress=progress)


def planning_of(config=None, shape=SHAPE):
    return make_planning(config or EngineConfig(), shape, COST)


def test_training_goes_by_the_deferral_rule_without_a_target_and_in_slices_with_one():
    policy = tuned()
    assert isinstance(policy, Deferred) and isinstance(policy.inner, StallFree) and policy.bound == DEFAULT_BOUND
    assert tuned(deferral_bound=0.0).bound == 0.0
    policy = tuned(EngineConfig(tbt_target=50), progress=True)
    assert isinstance(policy, TrainingSlices) and isinstance(policy.inner, LatencyTarget)
    assert (policy.target, policy.progress) == (0.05, True)
    assert isinstance(tuned(EngineConfig(tbt_target=50, token_budget="auto")).inner, StallFree)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(config=EngineConfig(scheduler="orca")), "tuning is for the stall-free scheduler, and scheduler is orca"),
        (dict(config=EngineConfig(tbt_target=50), deferral_bound=1.0), "deferral_bound is 1.0 and tbt_target is 50"),
        (dict(config=EngineConfig(executor="padded", max_sequences=64), shape=ROWS), "tuning needs a paged cache"),
        (dict(deferral_bound=-1.0), "deferral_bound is -1.0; it must be at least 0"),
    ],
)
def test_what_training_does_not_go_with_is_refused_by_name(change, words):
    with pytest.raises(ValueError, match=words):
        tuned(**change)


def test_a_tuner_gets_its_share_of_the_cache_and_what_32_decodes_leave_of_the_target():
    tuner = make_tuner(planning_of(), SIZES, memory_fraction=0.25)
    assert (tuner.max_blocks, tuner.max_unit_seconds) == (16, float("inf"))
    tuner = make_tuner(planning_of(EngineConfig(tbt_target=1000)), SIZES, block_seconds=0.5)
    held = SHAPE.num_blocks * 16 // 32
    assert tuner.max_unit_seconds == pytest.approx(1.0 * (1 - RESERVE) - COST.step([(1, held)] * 32))
    assert held < 512, "no cache holds 32 sequences as long as the model allows"
    large = make_tuner(planning_of(EngineConfig(tbt_target=1000), replace(SHAPE, num_blocks=4096)), SIZES)
    assert large.max_unit_seconds == pytest.approx(1.0 * (1 - RESERVE) - COST.step([(1, 512)] * 32))
    assert tuner.cost.block_seconds == 0.5
    staged = make_tuner(make_planning(EngineConfig(tbt_target=1000, pp=2), SHAPE, COST, stages=2), SIZES)
    assert staged.max_unit_seconds == pytest.approx(tuner.max_unit_seconds / 2), "two steps may have slices"
    for share in (0.0, 1.1):
        with pytest.raises(ValueError, match=f"tuning_memory_fraction is {share}"):
            make_tuner(planning_of(), SIZES, memory_fraction=share)


def test_a_target_that_decodes_alone_exceed_refuses_every_job_by_what_to_change():
    seconds = COST.step([(1, 32)] * 32)  # the cache holds this many contexts
    tuner = make_tuner(planning_of(EngineConfig(tbt_target=1e3 * seconds)), SIZES, exact=True)
    with pytest.raises(ValueError) as refusal:
        tuner.add("job", make_steps([16]), blocks_of(1))
    target, took = f"{1e3 * seconds:g} ms", f"a step of 32 decodes takes {1e3 * seconds:.1f} ms"
    assert str(refusal.value) == (
        f"job job has no room beside streams: tbt_target is {target}, of which {RESERVE:.0%} stays free, and {took}, "
        "which leaves nothing for training: raise tbt_target, or give a deferral_bound instead"
    )
    make_tuner(planning_of(EngineConfig(tbt_target=3e3 * seconds)), SIZES).add("job", make_steps([16]), blocks_of(1))
