"""Slabs: the blocks that training has, and how it gives memory back before anybody waits or is preempted."""

from types import SimpleNamespace

import pytest

from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.parts.tuning.planner import TuningPart
from holdfast.lm.parts.tuning.slabs import QUIET_SECONDS, Slabs
from holdfast.lm.parts.tuning.tuner import Needs
from holdfast.lm.parts.tuning.values import NO_SLICE, TrainingPlan, TrainingSlice
from holdfast.lm.scheduler.builder import Policy
from tests.invariants import check_scheduler
from tests.lm.memory.test_hybrid_cache import Memory
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


class Scripted:
    """A tuner that needs, holds and gives up what a test says."""

    def __init__(self, least=0, most=0, held=0, after=(), max_blocks=64):
        self.needs, self.held, self.max_blocks = Needs(least, most), held, max_blocks
        self.after = dict(after)
        """Blocks that stay in use after an action."""
        self.runs = self.leaves = self.rests = False
        self.in_flight = self.lent = 0
        self.acted, self.slices = [], []

    def begin(self):
        pass

    def held_after(self, action):
        return self.after.get(action)

    def act(self, action):
        self.acted.append(action)
        if action != "offload":
            self.held = self.after[action]
        return TrainingSlice("job", 0, 0, action)

    def next_slice(self, seconds, *, at_least_one):
        return self.slices.pop(0)


def slabs_of(tuner, blocks=128, used=0, headroom=0, lent=0):
    """Slabs over a cache of pieces of two blocks, some of which sequences use and training has."""
    pool = BlockPool(blocks, 4)
    pool.allocate(used, 0.0)
    pool.lend(lent, 0.0, most_moves=0)
    tuner.lent = pool.lent
    return Slabs(pool, tuner, headroom), pool


def lent_after(slabs, *, busy=False, now=0.0):
    slabs.begin()
    moves, writes = slabs.lend((), busy=busy, now=now)
    assert not moves and not writes
    return slabs.lent


def test_training_gets_its_most_or_its_least_whichever_has_room():
    for used, busy, expected in ((0, False, 40), (88, False, 40), (89, False, 20), (108, False, 20), (109, False, 0)):
        tuner = Scripted(least=20, most=40)
        slabs, _ = slabs_of(tuner, used=used)
        assert lent_after(slabs, busy=busy) == tuner.lent == expected
    for used, expected in ((75, 40), (76, 20), (95, 20), (96, 0)):
        slabs, _ = slabs_of(Scripted(least=20, most=40), used=used, headroom=5)
        assert lent_after(slabs, busy=True) == expected, "5 of headroom and 8 more stay available"
    slabs, _ = slabs_of(Scripted(least=20, most=40, max_blocks=39))
    assert lent_after(slabs) == 20
    slabs, _ = slabs_of(Scripted(least=20, most=40, max_blocks=19))
    assert lent_after(slabs) == 0


def test_a_surplus_of_one_piece_stays_and_a_larger_one_goes_back_but_for_what_is_held():
    for lent, held, expected in ((42, 0, 42), (43, 0, 40), (60, 50, 50), (40, 0, 40)):
        tuner = Scripted(least=40, most=40, held=held)
        slabs, pool = slabs_of(tuner, lent=lent)
        assert lent_after(slabs) == expected == tuner.lent == pool.lent
    for held, expected in ((0, 0), (2, 2)):
        slabs, _ = slabs_of(Scripted(held=held), lent=2)
        assert lent_after(slabs) == expected, "nothing is needed"


def test_after_it_gave_blocks_up_training_gets_none_for_a_second_unless_nobody_is_there():
    tuner = Scripted(least=10, most=10)
    slabs, _ = slabs_of(tuner, lent=10)
    slabs.begin()
    assert slabs.yield_for(10, 5.0) and slabs.lent == 0
    assert lent_after(slabs, busy=True, now=5.9) == 0
    assert lent_after(slabs, busy=False, now=5.9) == 10
    slabs.begin()
    assert slabs.yield_for(9, 6.0) and slabs.lent == 0, "whole pieces"
    assert lent_after(slabs, busy=True, now=6.9) == 0 and lent_after(slabs, busy=True, now=7.0) == 10


def test_what_is_unused_goes_first_then_the_cheapest_action_that_is_enough():
    after = {"release": 20, "drop": 10, "offload": 0}
    for short, acted, given, lent in (
        (10, [], True, 30),
        (11, ["release"], True, 28),
        (20, ["release"], True, 20),
        (21, ["drop"], True, 18),
        (30, ["drop"], True, 10),
        (31, ["offload"], False, 30),
    ):
        tuner = Scripted(held=30, after=after)
        slabs, pool = slabs_of(tuner, lent=40)
        slabs.begin()
        assert slabs.yield_for(short, 0.0) == given
        assert (tuner.acted, pool.lent) == (acted, lent) and tuner.lent == lent
        assert [slabs.slice.action] == (acted or ["run"])


def test_an_action_that_there_is_nothing_for_is_passed_over_and_there_is_one_a_plan():
    tuner = Scripted(held=30, after={"drop": 10, "offload": 0})
    slabs, pool = slabs_of(tuner, lent=30)
    slabs.begin()
    assert slabs.yield_for(5, 0.0) and tuner.acted == ["drop"] and pool.lent == 24
    assert not slabs.yield_for(20, 0.0) and tuner.acted == ["drop"], "the plan has its slice"
    assert pool.lent == 10
    assert not slabs.train(1.0)
    slabs.begin()
    assert not slabs.slice
    assert not slabs.yield_for(0, 0.0) and not slabs.yield_for(-1, 0.0)
    pool.reclaim(10)
    assert not slabs.yield_for(1, 0.0) and tuner.acted == ["drop"]


def test_a_plan_has_a_slice_only_if_there_is_work():
    tuner = Scripted()
    slabs, _ = slabs_of(tuner)
    work = TrainingSlice("job", 0, 0, "run", 0, 3)
    tuner.slices = [None, work]
    slabs.begin()
    assert not slabs.train(1.0) and slabs.slice == NO_SLICE
    assert slabs.train(1.0) and slabs.slice == work
    assert not slabs.train(1.0), "one a plan"


def test_all_is_taken_back_once_training_neither_runs_nor_leaves_nor_is_under_way():
    for state in ("runs", "leaves", "in_flight", None):
        tuner = Scripted(held=0)
        slabs, pool = slabs_of(tuner, lent=10)
        if state is not None:
            setattr(tuner, state, 1)
        slabs.settle()
        assert pool.lent == tuner.lent == (10 if state else 0)


def test_training_waits_for_copies_only_while_they_hold_blocks_that_it_needs():
    tuner = Scripted(least=4, most=4)
    pool = BlockPool(8, 4, host_blocks=8, low_water=1.0)
    slabs = Slabs(pool, tuner, 0)
    blocks = pool.allocate(8, 0.0)
    for index, block in enumerate(blocks):
        pool.cache_block(block, bytes([index]) * 32, index)
    pool.free(blocks, 0.0)
    pool.swap_out(0, 0, 1.0)
    assert lent_after(slabs) == 0 and slabs.waits
    slabs.begin()
    assert not slabs.waits
    pool.finish_swap_out(0)
    for step in range(1, 5):
        pool.swap_out(step, 0, 1.0)
        pool.finish_swap_out(step)
    slabs.begin()
    slabs.lend((), busy=False, now=0.0)
    assert slabs.lent and not slabs.waits


def test_a_sequence_whose_table_stays_in_place_learns_that_the_source_of_its_tail_has_moved():
    memory = Memory(blocks=12)
    filler, tokens = memory.sequence(None), [0] * 16
    filler.allocate(filler.match(tokens), len(tokens), memory.now)
    memory.end(list(range(10)))
    filler.end(tokens, memory.now)
    cache, _ = memory.start([*range(9), 9, 10, 11], row=1)
    (source,) = memory.states.tails
    tuner = make_tuner(max_blocks=12)
    tuner.add("job", make_steps((16,)), lambda tokens, keep: 12 - source)
    moves, writes = Slabs(memory.pool, tuner, 0).lend([SimpleNamespace(cache=cache, row=1)], busy=False, now=memory.now)
    assert [move.source for move in moves] == [source] and not writes
    assert memory.states.tails == [moves[0].target]


def test_a_job_that_rests_on_the_device_keeps_its_blocks_and_no_others():
    tuner = Scripted(held=4)
    tuner.rests = True
    slabs, pool = slabs_of(tuner, lent=20)
    slabs.settle()
    assert pool.lent == 4
    tuner.rests = False
    slabs.settle()
    assert pool.lent == 0
