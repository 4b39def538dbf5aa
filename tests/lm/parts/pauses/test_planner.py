"""PausePart at the scheduler's hooks: when blocks come back ahead of a turn, and when not."""

from dataclasses import replace
from math import inf

import pytest

from holdfast.core.pause import Pause
from holdfast.lm.choice import make_scheduler
from holdfast.lm.config import EngineConfig
from holdfast.lm.parts.pauses.observed import observed
from holdfast.lm.parts.pauses.planner import AheadPart, PausePart
from tests.invariants import check_scheduler
from tests.lm.test_choice import SHAPE
from tests.scheduling import answer, create_requests, create_scheduler


class Engine:
    """A scheduler over 16 blocks of 4 tokens with a host tier, whose steps take no time."""

    def __init__(self, **settings):
        self.scheduler = create_scheduler(
            **{"blocks": 16, "host_blocks": 64, "pauses": True, "low_water": 0.5, "max_sequences": 4, **settings}
        )
        self.part = self.scheduler.part(PausePart)
        self.pool = self.scheduler.pool

    def run(self, request, now=0.0):
        """Serve one request to its end. Returns the plans."""
        self.scheduler.add(request)
        plans = []
        while self.scheduler.entries:
            plans.append(self.step(now))
        return plans

    def step(self, now):
        plan = self.scheduler.schedule(now)
        if plan is not None:
            self.scheduler.update(plan, answer(plan), now)
            check_scheduler(self.scheduler)
        return plan

    def idle(self, now):
        """Let an idle engine do what it has to do. Returns the number of blocks that came back."""
        self.part.look(now)
        brought = 0
        while self.scheduler.has_work():
            plan = self.step(now)
            brought += 0 if plan is None else len(plan.copies.swap_in)
        return brought

    def on_device(self, request):
        digests = self.pool.digest_cache.digests(request.identity.root(), request.prompt)
        return sum(block is not None for block in self.pool.find_all(digests))


PERSON = Pause("person")


def paused(engine, pause, now=0.0, other=PERSON):
    """A conversation of 6 blocks that others have evicted since its answer, and the last of these others."""
    own, *others = create_requests(24, 28, 28, max_tokens=1)
    engine.run(own, now)
    engine.part.note(own.id, pause, now)
    for each in others:
        engine.run(each, now)
        engine.part.note(each.id, other, now)
    while engine.step(now) is not None:
        pass  # it copies idle state to the host, ahead of need
    assert engine.on_device(own) < 6
    return own, others[-1]


def test_state_comes_back_shortly_before_a_turn_is_expected_and_the_turn_finds_it():
    engine = Engine()
    own, _ = paused(engine, Pause("tool:x", expected=10.0))
    assert 3.0 < engine.part.next_look < 8.5
    assert engine.idle(3.0) == 0 and engine.on_device(own) < 6
    assert engine.idle(9.0) > 0 and engine.on_device(own) == 6
    (follow,) = create_requests(own.prompt + (7,) * 6, max_tokens=1)
    first, *_ = engine.run(follow, 10.0)
    assert not first.copies.swap_in
    stats = engine.scheduler.stats()
    assert stats.blocks_swapped_in_ahead == stats.blocks_ahead_used > 0 and stats.blocks_ahead_wasted == 0
    assert (stats.pauses_noted, stats.turns_expected) == (3, 2)


def test_without_a_hint_nothing_comes_back():
    engine = Engine()
    own, _ = paused(engine, Pause("person"))
    assert engine.part.next_look == inf and engine.idle(1e6) == 0 and engine.on_device(own) < 6


def test_a_client_that_announces_a_turn_gets_its_state_at_once():
    engine = Engine()
    own, _ = paused(engine, Pause("person"))
    engine.part.warm(engine.pool.digest_cache.digests(own.identity.root(), own.prompt), 20.0)
    assert engine.idle(20.0) > 0 and engine.on_device(own) == 6


def test_a_turn_that_came_early_is_not_expected_any_more():
    engine = Engine()
    own, _ = paused(engine, Pause("tool:x", expected=10.0))
    (follow,) = create_requests(own.prompt + (7,) * 6, max_tokens=1)
    engine.run(follow, 1.0)
    engine.run(create_requests(0, 0, 0, 0, 40, max_tokens=1)[-1], 2.0)
    assert engine.idle(9.0) == 0


def test_a_turn_that_does_not_come_is_expected_no_longer_than_five_times_its_pause():
    engine = Engine()
    own, _ = paused(engine, Pause("tool:x", expected=10.0))
    assert engine.idle(51.0) == 0 and engine.on_device(own) < 6
    assert len(engine.part.turns) == 3, "what it left may be needed later, and nobody knows when"


def test_state_that_is_needed_sooner_or_of_which_nothing_was_said_does_not_give_way():
    soon = Engine()
    own, other = paused(soon, Pause("tool:x", expected=10.0), other=Pause("tool:y", expected=5.0))
    held = soon.on_device(other)
    soon.idle(8.5)
    assert soon.on_device(other) >= held
    silent = Engine()
    own, *others = create_requests(24, 28, 28, max_tokens=1)
    silent.run(own)
    silent.part.note(own.id, Pause("tool:x", expected=10.0), 0.0)
    for each in others:
        silent.run(each)
    free, held = len(silent.pool._free), silent.on_device(others[-1])
    assert silent.idle(9.0) <= free and silent.on_device(others[-1]) == held


def test_the_tail_of_a_superseded_answer_gives_way_and_the_prompt_that_it_shares_does_not():
    engine = Engine()
    (own,) = create_requests(16, max_tokens=9)
    engine.run(own)
    engine.part.note(own.id, Pause("branch", superseded=True), 0.0)
    digests = engine.part._ended[own.id].digests
    late = [engine.part.turns.is_needed_after(1e9, 0.0, digest) for digest in digests]
    assert late == [False] * 4 + [True] * 2


def test_while_a_request_waits_or_copies_are_under_way_nothing_comes_back():
    engine = Engine(max_sequences=1)
    paused(engine, Pause("tool:x", expected=10.0))
    first, second = create_requests(0, 0, 0, 0, 4, 4, max_tokens=20)[-2:]
    engine.scheduler.add(first)
    engine.step(9.0)
    engine.scheduler.add(second)
    for _ in range(10):
        plan = engine.step(9.0)
        assert not plan.copies.swap_in
    engine.scheduler.abort(second.id)
    plan = engine.scheduler.schedule(9.0)
    assert plan.segments and plan.copies.swap_in and plan.copies.awaits == -1
    after = engine.scheduler.schedule(9.0)
    assert not after.copies.swap_in, "one step's copies at a time"


def test_a_step_brings_as_many_blocks_as_the_link_copies_in_its_time_and_at_least_one():
    engine = Engine(chunk_blocks=4)
    engine.pool.host_link.latency = 0.0
    engine.pool.host_link.seconds_per_byte = 1.0 / (1 << 20)  # a block a second
    part = engine.part
    assert [part._most(seconds) for seconds in (0.0, 0.5, 1.5, 3.5)] == [1, 1, 1, 3]
    engine.pool.host_link.seconds_per_byte = 1e-12
    assert part._most(1.0) == engine.pool.max_copies


def test_blocks_that_a_request_takes_while_their_copies_are_on_the_way_are_awaited():
    engine = Engine()
    paused(engine, Pause("tool:x", expected=10.0))
    engine.part.look(9.0)
    bringing = engine.scheduler.schedule(9.0)
    assert bringing.copies.swap_in and not bringing.segments
    big = create_requests(0, 0, 0, 30, max_tokens=1)[-1]
    engine.scheduler.add(big)
    taking = engine.scheduler.schedule(9.0)
    assert taking.segments and taking.copies.awaits == bringing.step
    engine.scheduler.update(bringing, answer(bringing), 9.0)
    engine.scheduler.update(taking, answer(taking), 9.0)
    check_scheduler(engine.scheduler)
    assert engine.scheduler.stats().blocks_ahead_wasted > 0


def test_bringing_blocks_leaves_as_many_to_allocate():
    engine = Engine()
    paused(engine, Pause("tool:x", expected=10.0))
    before = engine.pool.available, engine.pool.allocatable
    assert engine.idle(9.0) > 0
    assert (engine.pool.available, engine.pool.allocatable) == before


def test_an_idle_engine_that_can_swap_in_nothing_does_not_spin():
    engine = Engine()
    own, *others = create_requests(24, 28, 28, max_tokens=1)
    engine.run(own)
    engine.part.note(own.id, Pause("tool:x", expected=10.0), 0.0)
    for each in others:
        engine.run(each)  # nothing is said of them
    engine.part.look(9.0)
    steps = 0
    while engine.scheduler.has_work():
        engine.step(9.0)
        steps += 1
        assert steps < 20
    assert not engine.part.has_work


def test_a_note_of_an_unknown_request_changes_nothing():
    engine = Engine()
    engine.part.note("nobody", Pause("tool:x", expected=1.0), 0.0)
    assert engine.part.next_look == inf and engine.scheduler.stats().pauses_noted == 0


def test_switched_off_it_notes_pauses_and_brings_nothing():
    pool = create_scheduler(host_blocks=16).pool
    part = PausePart(pool, observed("retention", pool.rule.turns, 4))
    part.warm([b"x"], 1.0)
    part.look(2.0)
    assert part.next_look == inf and not part.has_work and len(part.turns) == 1


def test_the_pause_that_a_request_names_is_noted_when_it_ends():
    engine = Engine()
    (own,) = create_requests(24, max_tokens=1)
    engine.run(replace(own, pause=Pause("tool:x", expected=10.0)))
    assert engine.part.next_look < 10.0 and engine.scheduler.stats().pauses_noted == 1


def test_the_time_of_a_tool_is_learned_from_the_turns_after_it():
    engine = Engine()
    (own,) = create_requests(24, max_tokens=1)
    prompt, now = own.prompt, 0.0
    for turn in range(9):
        prompt += (turn + 1,) * 4
        request = replace(own, id=f"turn {turn}", prompt=prompt)
        engine.run(request, now)
        engine.part.note(request.id, Pause("tool:x"), now)
        now += 10.0
    assert now - 6.0 < engine.part.next_look < now


@pytest.mark.parametrize("eviction", ["pauses", "retention"])
def test_the_eviction_gets_to_know_of_every_pause(eviction):
    engine = Engine(eviction=eviction)
    (own,) = create_requests(16, max_tokens=9)
    engine.run(own)
    engine.part.note(own.id, Pause("tool:x", superseded=True), 3.0)
    use = engine.pool._idle.retained.last_use(engine.pool._cached[engine.part._ended[own.id].digests[-1]])
    assert (engine.pool.rule.turns.worth(*use, 4.0) == 0.0) is (eviction == "pauses")


@pytest.mark.parametrize(("ahead", "host_blocks", "comes"), [(True, 8, True), (False, 8, False), (True, 0, False)])
def test_the_configuration_and_the_host_tier_decide_whether_state_comes_back_ahead(ahead, host_blocks, comes):
    shape = replace(SHAPE, num_host_blocks=host_blocks, block_bytes=1024)
    part = make_scheduler(EngineConfig(swap_in_ahead=ahead, host_cache_gb=0.1), shape, None).part(PausePart)
    part.warm([b"x"], 1.0)
    assert isinstance(part, AheadPart) is comes


def test_a_superseded_answer_without_a_block_of_its_own_leaves_the_turn_after_its_prompt_expected():
    engine = Engine()
    first, second = (replace(request, prompt=(1,) * 16) for request in create_requests(16, 16, max_tokens=2))
    engine.run(first)
    engine.run(second)
    engine.part.note(second.id, Pause("tool:x", expected=10.0), 0.0)
    engine.part.note(first.id, Pause("branch", superseded=True), 0.0)
    assert engine.part.next_look < 10.0


def test_blocks_that_came_back_are_the_first_to_be_allocated():
    engine = Engine()
    paused(engine, Pause("tool:x", expected=10.0))
    assert engine.idle(9.0) == 2
    size = 4 * (len(engine.pool._free) + 2)
    engine.run(create_requests(0, 0, 0, size, max_tokens=1)[-1], 9.0)
    assert engine.scheduler.stats().blocks_ahead_wasted == 2


def test_while_a_request_lacks_blocks_nothing_comes_back():
    engine = Engine()
    paused(engine, Pause("tool:x", expected=10.0))
    assert engine.pool.is_calm and not engine.pool.fits(17, ())
    assert not engine.pool.is_calm
    engine.part.look(9.0)
    assert not engine.part.has_work
