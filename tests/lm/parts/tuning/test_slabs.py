"""Slabs: the blocks that training has, and how it gives memory back before anybody waits or is preempted."""

import pytest

from holdfast.lm.parts.tuning.planner import TuningPart
from holdfast.lm.parts.tuning.slabs import QUIET_SECONDS
from holdfast.lm.parts.tuning.values import TrainingPlan
from holdfast.lm.scheduler.builder import Policy
from tests.invariants import check_scheduler
from tests.scheduling import FakeDevice, create_scheduler
from tests.training_plans import FakeTrainer, a_request, blocks_of, make_steps, make_tuner

UNIT = 0.0
"""Seconds that hold one unit, with at_least_one."""


class OneUnit(Policy):
    """Stall-free steps with a unit of training in each."""

    def __init__(self, part, trains=True):
        self.part, self.trains = part, trains

    def plan(self, step):
        self.part.lend(step)
        step.budget = 64
        step.displace()
        step.decode()
        step.prefill()
        step.admit()
        if self.trains:
            self.part.train(UNIT, at_least_one=True)


class Engine:
    def __init__(self, *, max_blocks=32, headroom=0.0, epochs=20, **options):
        blocks = 32
        self.tuner = make_tuner(max_blocks=max_blocks)
        part = TuningPart(self.tuner)
        self.policy = OneUnit(part)
        self.scheduler = create_scheduler(
            policy=self.policy,
            parts=[part],
            blocks=blocks,
            block_size=4,
            sharing=False,
            headroom=headroom,
            **options,
        )
        self.device = FakeDevice(blocks, 4)
        self.trainer = self.device.trainer = FakeTrainer(self.device.slots, 4)
        steps, size = make_steps((16,) * 8, micro_batch=32, epochs=epochs), blocks_of(2)
        self.tuner.add("job", steps, size)
        self.trainer.open("job", steps, size)
        self.now = 0.0

    def add(self, name, prompt, tokens=2, **options):
        request = a_request(name, prompt=prompt, tokens=tokens, **options)
        self.device.expect(request)
        self.scheduler.add(request)

    def step(self, seconds=0.01):
        self.now += seconds
        plan = self.scheduler.schedule(self.now)
        check_scheduler(self.scheduler)
        self.device.submit(plan)
        self.scheduler.update(plan, self.device.collect(), self.now)
        check_scheduler(self.scheduler)
        return plan

    def steps(self, count):
        return [self.step() for _ in range(count)]


def action(plan):
    return plan.part(TrainingPlan).slice.action if plan.part(TrainingPlan).slice else None


def test_training_gets_what_its_step_takes_with_kept_activations_and_gives_it_back_when_it_ends():
    engine = Engine(epochs=1)
    assert engine.step().part(TrainingPlan).lent == 2 + 3 * 4
    while action(plan := engine.step()) == "run":
        assert plan.part(TrainingPlan).lent == 14
    assert (action(plan), plan.part(TrainingPlan).lent) == ("offload", 2)
    assert engine.scheduler.stats().blocks_training == 0 and [*engine.tuner.ended] == ["job"]


def test_where_the_cache_is_too_small_for_kept_activations_training_computes_them_again():
    engine = Engine(max_blocks=13)
    plans = engine.steps(4)
    assert [plan.part(TrainingPlan).lent for plan in plans] == [6] * 4
    assert not plans[1].part(TrainingPlan).slice.keep


def test_training_takes_only_what_running_sequences_and_their_headroom_leave():
    engine = Engine(headroom=0.1)
    engine.policy.trains = False
    engine.add("a", prompt=63, tokens=4)
    engine.tuner.pause("job")
    engine.step()
    engine.tuner.resume("job")
    plan = engine.step()
    assert engine.scheduler.stats().blocks_used == 16
    assert plan.part(TrainingPlan).lent == 6, "32 - 16 for the sequence - 3 headroom - 2 spare: not enough for 14"


def test_plans_go_on_while_copies_hold_the_blocks_that_training_waits_for():
    engine = Engine()
    copies = engine.scheduler._queues.pool.copies
    copies.start_swap_in(range(16, 32), step=0)  # for a request that was aborted
    plan = engine.step()
    assert (plan.part(TrainingPlan), len(plan.segments)) == (TrainingPlan(), 0), (
        "its result tells that the copies are done"
    )
    assert action(engine.step()) == "restore"


def test_unused_blocks_go_first_and_no_slice_is_needed_for_them():
    engine = Engine()
    engine.steps(1)  # restored: two blocks in use, 14 lent
    engine.add("a", prompt=4 * 26 - 1, tokens=1)
    plan = engine.step()
    assert plan.segments and plan.part(TrainingPlan).lent == 6 and action(plan) == "run", (
        "what is left holds a micro-batch, not kept"
    )


@pytest.mark.parametrize(
    ("blocks_asked", "expected", "left"),
    [(18, "run", 14), (20, "release", 12), (26, "release", 6), (27, "drop", 5), (30, "drop", 2)],
)
def test_training_gives_up_the_least_that_a_waiting_request_needs_in_the_same_plan(blocks_asked, expected, left):
    engine = Engine()
    engine.steps(3)  # restored, and two units whose activations are kept
    engine.add("a", prompt=4 * blocks_asked - 1, tokens=1)
    plan = engine.step()
    assert plan.segments and action(plan) == expected and plan.part(TrainingPlan).lent == left


def test_a_job_leaves_the_device_for_a_request_that_needs_all_and_comes_back():
    engine = Engine()
    engine.steps(3)
    engine.add("a", prompt=4 * 32 - 1, tokens=1)
    plan = engine.step()
    assert (action(plan), plan.part(TrainingPlan).lent) == ("offload", 2) and not plan.segments
    plan = engine.step()
    assert plan.part(TrainingPlan).lent == 0 and len(plan.segments) == 1
    assert "restore" in [action(plan) for plan in engine.steps(3)]


def test_running_sequences_grow_into_what_training_gives_up_and_nobody_is_preempted():
    engine = Engine(headroom=0.0)
    engine.steps(2)
    for name in "abcd":
        engine.add(name, prompt=3, tokens=29)  # 8 blocks each in the end: all there are
    plans = engine.steps(60)
    assert not any(plan.preempted for plan in plans)
    assert {"release", "drop", "offload"} & {action(plan) for plan in plans}
    assert min(plan.part(TrainingPlan).lent for plan in plans) == 0


def test_training_yields_before_a_higher_class_displaces_anybody():
    engine = Engine(max_sequences=4)
    engine.steps(2)
    engine.add("low", prompt=39, tokens=10, priority=5)
    engine.step()
    engine.add("high", prompt=39, tokens=2)
    plan = engine.step()
    assert not plan.preempted and {s.sequence_id for s in plan.segments} == {"low", "high"}


def test_what_was_given_up_comes_back_after_a_quiet_second():
    engine = Engine()
    engine.steps(3)
    engine.add("big", prompt=4 * 20 - 1, tokens=1)
    engine.add("small", prompt=3, tokens=100)
    engine.step()
    given_up = engine.now
    while engine.step().part(TrainingPlan).lent < 14:
        assert engine.now < given_up + QUIET_SECONDS + 0.5
    assert engine.now >= given_up + QUIET_SECONDS


def test_blocks_of_running_sequences_move_out_of_the_way_and_keep_what_they_hold():
    engine = Engine(headroom=0.0)
    engine.tuner.pause("job")
    engine.add("first", prompt=95, tokens=1)
    engine.add("second", prompt=7, tokens=100)
    engine.steps(3)  # the second lies above the first, which has ended
    engine.tuner.resume("job")
    plans = engine.steps(90)
    moved = [move for plan in plans for move in plan.part(TrainingPlan).moves]
    assert len(moved) == 2 and max(plan.part(TrainingPlan).lent for plan in plans) == 14


def test_a_scheduler_without_a_tuner_plans_none_of_this():
    scheduler = create_scheduler()
    scheduler.add(a_request("a"))
    plan = scheduler.schedule(0.0)
    assert plan.part(TrainingPlan) == TrainingPlan()
