"""TuningPart at the scheduler's hooks: what it refuses, which plans it keeps, what it counts."""

from dataclasses import replace

import pytest

from holdfast.lm.memory.row_pool import RowPool
from holdfast.lm.parts.tuning.planner import TuningPart
from holdfast.lm.parts.tuning.values import TrainingPlan, TrainingReport
from holdfast.lm.scheduler.builder import Policy
from holdfast.lm.scheduler.row_kind import RowKind
from holdfast.lm.scheduler.row_policies import Embedding
from holdfast.lm.scheduler.scheduler import Scheduler
from tests.padded_rows import shape_of_rows
from tests.scheduling import answer, create_scheduler
from tests.training_plans import a_request, blocks_of, make_steps, make_tuner


class OneUnit(Policy):
    """Steps of one unit each while it trains, and of whatever waits."""

    def __init__(self, part):
        self.part, self.trains = part, True

    def plan(self, step):
        self.part.lend(step)
        step.budget = 64
        step.decode()
        step.admit()
        if self.trains:
            self.part.train(0.0, at_least_one=True)


def engine():
    part = TuningPart(make_tuner(max_blocks=32))
    policy = OneUnit(part)
    scheduler = create_scheduler(policy=policy, parts=[part])
    part.tuner.add("job", make_steps((16,) * 8, micro_batch=32), blocks_of(2))
    return policy, scheduler


def reported(plan, **changes):
    done = plan.part(TrainingPlan).slice
    report = TrainingReport(done.job, done.step, done.micro_batch, done.action, done.first, done.stop, **changes)
    return replace(answer(plan), parts=(report,))


def test_steps_of_training_alone_follow_each_other_while_others_are_in_flight():
    _, scheduler = engine()
    assert scheduler.has_work()
    plans = [scheduler.schedule(0.0) for _ in range(3)]
    assert [plan.part(TrainingPlan).slice.action for plan in plans] == ["restore", "run", "run"]
    assert not any(plan.segments for plan in plans)


def test_a_plan_without_a_slice_says_what_training_has_while_it_has_anything():
    policy, scheduler = engine()
    scheduler.add(a_request("a"))
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, reported(plan), 0.0)
    policy.trains = False
    plan = scheduler.schedule(0.0)
    assert not plan.part(TrainingPlan).slice and plan.part(TrainingPlan).lent == 14
    assert scheduler.stats().blocks_training == 14


@pytest.mark.parametrize("trained", [True, False])
def test_a_report_without_a_slice_and_a_slice_without_a_report_are_refused(trained):
    policy, scheduler = engine()
    plan = scheduler.schedule(0.0)
    result = answer(plan)
    if not trained:
        result = reported(plan)
        plan = replace(plan, parts=())
    with pytest.raises(RuntimeError, match="step 0 has slice"):
        scheduler.update(plan, result, 0.0)
    assert policy.part.tuner.in_flight == 1


def test_tokens_and_seconds_of_reports_are_counted():
    _, scheduler = engine()
    for _ in range(2):
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, reported(plan, tokens=16, seconds=0.5), 0.0)
    stats = scheduler.stats()
    assert (stats.training_tokens, stats.training_seconds, stats.deferred_seconds) == (32, 1.0, 0.0)


def test_padded_rows_lend_no_blocks():
    part = TuningPart(make_tuner())
    shape = shape_of_rows()
    with pytest.raises(ValueError, match="training needs a paged cache"):
        Scheduler(Embedding(64), RowKind(RowPool(shape), longest=64), [part], max_sequences=4, max_model_len=64)
