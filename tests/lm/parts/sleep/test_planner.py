"""SleepPart at the scheduler's hooks: the device comes to rest, and its conversations are found again after it."""

import itertools
import random
from dataclasses import replace

import pytest

from holdfast.lm.parts.sleep.planner import SleepPart
from holdfast.loop.loop import Loop
from tests.scheduling import FakeDevice, answer, create_requests, create_scheduler, run_alone

BLOCKS, HOST = 32, 64


class Late(SleepPart):
    """The part, whose pool is known once the scheduler is made."""

    def __init__(self):
        """Nothing is known yet."""

    def attach(self, queues):
        super().__init__(queues.pool)
        super().attach(queues)


class Sleeper:
    """A scheduler with the part, over a device that checks every read, and what the loop gave so far."""

    def __init__(self, *, host_blocks=HOST, steps_in_flight=2, seed=None):
        self.device = FakeDevice(BLOCKS, 4, host_blocks, choose=None if seed is None else random.Random(seed))
        self.part = Late()
        self.scheduler = create_scheduler(
            parts=[self.part], blocks=BLOCKS, budget=16, max_sequences=4, host_blocks=host_blocks
        )
        (self.pool,) = self.scheduler.block_pools
        self.loop = Loop(self.scheduler, self.device, steps_in_flight, itertools.count().__next__)
        self.tokens = {}

    def add(self, *requests):
        for request in requests:
            self.device.expect(request)
            self.tokens[request.id] = ()
            self.loop.add(request)

    def step(self):
        for output in self.loop.step() or ():
            self.tokens[output.request_id] += output.tokens

    def run(self):
        while self.loop.has_work():
            self.step()

    def rest(self, *, suspend):
        """Go on until the device is at rest, and forget its state."""
        self.part.close(suspend=suspend)
        for _ in range(1000):
            if self.part.at_rest and self.part.has_flushed:
                break
            self.step()
        assert self.part.at_rest and self.part.has_flushed
        self.part.forget(1e6)
        self.device.slots = [None] * len(self.device.slots)
        assert self.pool.allocatable == BLOCKS and self.pool.used == self.pool.cached == 0


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_running_sequences_end_first_and_idle_state_is_found_on_the_host_after(seed):
    sleeper = Sleeper(seed=seed)
    requests = create_requests(17, 9, 30, max_tokens=6)
    sleeper.add(*requests)
    for _ in range(3):
        sleeper.step()
    sleeper.rest(suspend=False)
    assert sleeper.tokens == {request.id: run_alone(request)[0] for request in requests}
    assert not sleeper.loop.has_work()
    sleeper.part.reopen()
    again = replace(requests[2], id="again")
    sleeper.add(again)
    sleeper.run()
    assert sleeper.tokens["again"] == run_alone(again)[0]
    stats = sleeper.scheduler.stats()
    assert stats.prefix_hits == stats.prefix_hits_on_host == 28 and stats.tokens_dropped == 0


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_suspended_sequences_go_on_after_and_compute_nothing_twice(seed, steps_in_flight):
    sleeper = Sleeper(seed=seed, steps_in_flight=steps_in_flight)
    requests = create_requests(16, 8, 24, max_tokens=12)
    sleeper.add(*requests)
    for _ in range(6):
        sleeper.step()
    before = dict(sleeper.tokens)
    sleeper.rest(suspend=True)
    assert all(0 < len(sleeper.tokens[name]) < 12 for name in before), "all are under way"
    assert sleeper.scheduler.stats().waiting == 3 and sleeper.loop.has_work()
    computed = sleeper.scheduler.stats().tokens_computed
    sleeper.part.reopen()
    sleeper.run()
    assert sleeper.tokens == {request.id: run_alone(request)[0] for request in requests}
    left = sum(12 - len(tokens) for tokens in before.values())
    # The last, partial block of each sequence is computed again.
    assert sleeper.scheduler.stats().tokens_computed - computed <= left + 3 * 4


def test_no_sequence_starts_while_others_are_suspended():
    sleeper = Sleeper()
    first, late = create_requests(8, 8, max_tokens=6)
    sleeper.add(first)
    sleeper.step()
    sleeper.part.close(suspend=True)
    sleeper.add(late)
    for _ in range(20):
        sleeper.step()
    assert sleeper.tokens["1"] == () and sleeper.part.at_rest
    sleeper.part.forget(1e6)
    sleeper.device.slots = [None] * len(sleeper.device.slots)
    sleeper.part.reopen()
    sleeper.run()
    assert sleeper.tokens == {request.id: run_alone(request)[0] for request in (first, late)}


def test_a_small_host_keeps_what_fits_and_the_rest_is_computed_again():
    sleeper = Sleeper(host_blocks=4)
    requests = create_requests(16, 16, 16, max_tokens=2)
    sleeper.add(*requests)
    sleeper.rest(suspend=False)
    assert sleeper.pool.host.cached == 4 and sleeper.scheduler.stats().tokens_dropped > 0
    sleeper.part.reopen()
    again = [replace(request, id=f"again {request.id}") for request in requests]
    sleeper.add(*again)
    sleeper.run()
    assert all(sleeper.tokens[request.id] == run_alone(request)[0] for request in again)


def test_without_a_host_tier_the_device_is_simply_emptied():
    sleeper = Sleeper(host_blocks=0)
    sleeper.add(*create_requests(16, max_tokens=2))
    sleeper.rest(suspend=False)
    assert sleeper.scheduler.stats().tokens_dropped == 16


def test_an_engine_that_is_woken_up_before_it_rests_goes_on_as_if_nothing_had_been():
    sleeper = Sleeper()
    requests = create_requests(17, 9, max_tokens=8)
    sleeper.add(*requests)
    for _ in range(2):
        sleeper.step()
    sleeper.part.close(suspend=True)
    sleeper.step()
    sleeper.part.reopen()
    sleeper.run()
    assert sleeper.tokens == {request.id: run_alone(request)[0] for request in requests}
    assert not sleeper.part.has_work and not sleeper.part.wants_step


def test_state_in_use_is_not_forgotten():
    sleeper = Sleeper()
    sleeper.add(*create_requests(17, max_tokens=8))
    sleeper.step()
    with pytest.raises(RuntimeError, match="blocks are in use"):
        sleeper.part.forget(1.0)


def test_a_sequence_keeps_its_row_and_blocks_until_the_step_that_computes_it_has_ended():
    sleeper = Sleeper()
    sleeper.add(*create_requests(9))
    scheduler = sleeper.scheduler
    plan = scheduler.schedule(0.0)
    sleeper.part.close(suspend=True)
    assert scheduler.schedule(1.0) is None
    assert scheduler.stats().running == 1 and sleeper.pool.used == 3 and not sleeper.part.at_rest
    scheduler.update(plan, answer(plan), 2.0)
    scheduler.schedule(3.0)
    assert scheduler.stats().running == sleeper.pool.used == 0 and scheduler.stats().waiting == 1


def test_the_device_is_not_at_rest_while_state_is_on_its_way_to_a_sequence_that_was_aborted():
    sleeper = Sleeper()
    kept, other = create_requests(16, 8, max_tokens=8)
    sleeper.add(kept)
    sleeper.rest(suspend=False)
    sleeper.part.reopen()
    scheduler, part = sleeper.scheduler, sleeper.part
    scheduler.add(other)
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, answer(plan), 1.0)
    scheduler.add(replace(kept, id="again"))
    plan = scheduler.schedule(2.0)
    assert plan.copies.swap_in and plan.segments, "the other sequence does not wait for the copies"
    scheduler.update(plan, answer(plan, swapped_in=-1), 3.0)
    scheduler.abort_all()
    part.close(suspend=False)
    assert not part.at_rest and part.wants_step
    last = scheduler.schedule(4.0)
    assert not (last.segments or part.at_rest)
    scheduler.update(last, answer(last), 5.0)
    while not part.has_flushed:
        last = scheduler.schedule(6.0)
        scheduler.update(last, answer(last), 7.0)
    part.forget(1e6)
    assert sleeper.pool.allocatable == BLOCKS


def test_the_device_is_not_at_rest_while_it_computes_a_step_of_sequences_that_were_aborted():
    sleeper = Sleeper(host_blocks=0)
    sleeper.add(*create_requests(9))
    plan = sleeper.scheduler.schedule(0.0)
    sleeper.scheduler.abort_all()
    sleeper.part.close(suspend=False)
    assert not sleeper.part.at_rest and sleeper.pool.used == 0
    sleeper.scheduler.update(plan, answer(plan), 1.0)
    assert sleeper.part.at_rest
