"""Recurrent states that come back from the host to the device ahead of a turn, next to their blocks."""

import random
from math import inf

import pytest

from holdfast.core.pause import Pause
from holdfast.lm.memory.snapshots import NO_SLOT
from holdfast.lm.parts.pauses.planner import PausePart
from holdfast.lm.parts.tiers.state_tiers import pieces_of
from holdfast.lm.tiers import LowerShape
from holdfast.lm.types.states import StatePlan
from tests.hybrid import check_hybrid
from tests.lm.parts.pauses.test_from_below import BLOCK_BYTES
from tests.lm.parts.pauses.test_from_below import Engine as TieredEngine
from tests.lm.parts.pauses.test_planner import Engine
from tests.lm.parts.tiers.test_hybrid_tier_histories import FakeDisk, HybridTieredHistory, live
from tests.lm.scheduler.test_histories import STEPS, check
from tests.lm.scheduler.test_hybrid_histories import HybridHistory
from tests.scheduling import create_requests

SIZES = {"blocks": 32, "host_blocks": 128, "snapshots": 2, "host_snapshots": 8, "low_water": 0.5}


def gone_to_the_host(pause, other=Pause("person")):  # noqa: B008
    """A conversation whose state is only on the host, as others have ended since."""
    engine = Engine(**SIZES)
    own, *others = create_requests(24, 28, 28, 28, max_tokens=1)
    for each, said in ((own, pause), *((each, other) for each in others)):
        engine.run(each, 0.0)
        engine.part.note(each.id, said, 0.0)
        engine.idle(0.0)
        while engine.step(0.0) is not None:
            pass
    return engine, own


def snapshot_of(engine, request):
    """The snapshot after all tokens of a request whose answer has one token."""
    digests = engine.pool.digest_cache.digests(request.identity.root(), request.prompt)
    (found,) = engine.scheduler._kind.states._kept[digests[-1]]
    return found


def test_the_state_of_a_turn_comes_back_shortly_before_it_and_the_turn_copies_it_on_the_device():
    engine, own = gone_to_the_host(Pause("tool:x", expected=10.0))
    snapshot = snapshot_of(engine, own)
    assert snapshot.is_on_host
    engine.idle(3.0)
    assert snapshot.is_on_host, "it is too early"
    engine.idle(9.0)
    assert NO_SLOT not in (snapshot.slot, snapshot.host)
    check_hybrid(engine.scheduler)
    (follow,) = create_requests(own.prompt + (7,) * 6, max_tokens=1)
    first, *_ = engine.run(follow, 10.0)
    states = first.part(StatePlan)
    assert states.starts and not states.swap_in


def test_a_state_whose_turn_is_expected_sooner_keeps_its_slot():
    engine, own = gone_to_the_host(Pause("tool:x", expected=10.0), other=Pause("tool:y", expected=9.5))
    held = {each for each in engine.scheduler._kind.states.snapshots() if each.slot != NO_SLOT}
    engine.part.look(9.0)
    engine.step(9.0)
    assert {each for each in engine.scheduler._kind.states.snapshots() if each.slot != NO_SLOT} >= held
    assert snapshot_of(engine, own).is_on_host


class PausedHybrid(HybridHistory):
    """A history of a hybrid model in which clients say what follows their answers, right or wrong."""

    def more_settings(self):
        return {**super().more_settings(), "pauses": True}

    def step(self):
        if self.requests and self.random.random() < 0.5:
            name, expected = self.random.choice(list(self.requests)[-12:]), self.random.choice((None, 0.0, 1.0, 3.0))
            self.scheduler.part(PausePart).note(name, Pause("tool:x", expected=expected), float(self.steps))
        super().step()


@pytest.mark.parametrize("seed", range(12))
def test_every_segment_begins_with_the_state_of_the_tokens_before_it_whatever_is_expected(seed):
    history = PausedHybrid(seed)
    while history.steps < STEPS:
        while history.random.random() < 0.2 and history.scheduler.stats().waiting < 12:
            history.add()
        history.step()
        if not history.plans and not history.scheduler.has_work():
            history.steps += 1  # time goes on in an idle engine
    history.drain()
    check(history)


def gone_to_the_disk(pause, other=Pause("person"), disk_states=20):  # noqa: B008
    """A conversation whose state is only on the disk, as others have ended since."""
    snapshots = LowerShape(BLOCK_BYTES, disk_states * pieces_of(1 << 20, 4, BLOCK_BYTES))
    lower = LowerShape(BLOCK_BYTES, 256, snapshots=snapshots)
    sizes = {"blocks": 40, "host_blocks": 80, "snapshots": 2, "host_snapshots": 4, "max_model_len": 96}
    engine = TieredEngine(**{**sizes, "lower": lower})
    own, *others = create_requests(24, *[28] * 8, max_tokens=1)
    part = engine.scheduler.part(PausePart)
    for each, said in ((own, pause), *((each, other) for each in others)):
        engine.run(each, 0.0)
        part.note(each.id, said, 0.0)
        engine.tiers.lower.flush(idle=True)
        engine.idle(0.0, steps=20)
    return engine, own


def kept_after(engine, request):
    """The snapshots in memory after all tokens of a request."""
    return [*engine.scheduler._kind.states._kept.get(engine.digests(request)[-1], ())]


def test_a_state_that_only_the_disk_has_comes_to_the_host_and_the_device_before_its_turn():
    engine, own = gone_to_the_disk(Pause("tool:x", expected=10.0))
    below = engine.tiers.lower._states
    assert not kept_after(engine, own) and [*below.keys(engine.digests(own)[-1])]
    engine.idle(3.0, steps=10)
    assert not kept_after(engine, own), "it is too early"
    engine.scheduler.part(PausePart).look(9.0)
    while not engine.scheduler._kind.states._host.reserved:
        assert engine.tiers.has_news, "an idle engine has to know that there is something to read"
        engine.exchange(9.0)
        engine.steps += 1
        engine.scheduler.part(PausePart).look(9.0)
    assert engine.tiers.has_news
    engine.idle(9.0)
    (snapshot,) = kept_after(engine, own)
    assert NO_SLOT not in (snapshot.slot, snapshot.host) and snapshot.used[0] == -inf
    assert not engine.scheduler._kind.states._host.reserved
    check_hybrid(engine.scheduler)
    (follow,) = create_requests(own.prompt + (7,) * 6, max_tokens=1)
    assert engine.run(follow, 10.0) == 6, "nothing but the new tokens is computed"
    assert snapshot.used[0] == 10.0


def test_states_that_are_needed_sooner_keep_their_slots_on_the_host_and_nothing_is_read():
    engine, own = gone_to_the_disk(Pause("tool:x", expected=10.0), other=Pause("tool:y", expected=9.5))
    states = engine.scheduler._kind.states
    held = {each for each in states.snapshots() if each.host != NO_SLOT}
    assert len(states._host.free) < 2
    engine.scheduler.part(PausePart).look(9.0)
    assert not kept_after(engine, own)
    assert {each for each in states.snapshots() if each.host != NO_SLOT} >= held


class PausedOverDisk(HybridTieredHistory):
    """A history over a disk in which clients say what follows their answers, right or wrong."""

    def more_settings(self):
        return {**super().more_settings(), "pauses": True}

    def step(self):
        now = float(self.steps)
        if self.requests and self.random.random() < 0.5:
            name, expected = self.random.choice(list(self.requests)[-12:]), self.random.choice((None, 0.0, 1.0, 3.0))
            self.scheduler.part(PausePart).note(name, Pause("tool:x", expected=expected), now)
        self.scheduler.part(PausePart).look(now)
        super().step()


@pytest.mark.parametrize("seed", range(8))
def test_states_that_are_read_ahead_are_exact_whatever_the_disk_does(seed):
    disk = FakeDisk(200, 10, random.Random(seed), 0.2)
    history = PausedOverDisk(seed, disk)
    live(history, STEPS)
    history.drain()
    history.settle()
    check(history)
