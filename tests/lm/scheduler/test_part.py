"""Parts: which events of a sequence each part sees, in which order, while the sequence waits, runs and ends."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from holdfast.lm.scheduler.part import Hooks, Part
from tests.lm.scheduler.test_histories import STEPS, History, check
from tests.scheduling import create_requests, create_scheduler

FOLLOWING = {
    "new": {"added"},
    "added": {"queued", "held", "ended"},
    "queued": {"started", "left", "held"},
    "held": {"queued", "left"},
    "left": {"queued", "held", "ended"},
    "started": {"stopped"},
    "stopped": {"queued", "held", "ended"},
}
"""Possible next events of a sequence, by event, as one part sees them. `ended` is the last."""


class Recording(Part):
    """Checks the order of the events of each sequence, and holds some sequences for some steps."""

    name = "recording"
    waits_for = "order"

    def __init__(self, choose, often):
        self.choose, self.often = choose, often
        self.last, self.holds, self.seen, self.steps = {}, [], Counter(), []

    def attach(self, queues):
        self.queues = queues

    def note(self, entry, event):
        before = self.last.get(entry, "new")
        assert event in FOLLOWING[before], f"{event} after {before}"
        self.last[entry] = event
        self.seen[event] += 1

    def hold(self, entry, often):
        holds = self.choose.random() < often
        self.note(entry, "held" if holds else "queued")
        if holds:
            self.holds.append(entry)
        return holds

    def added(self, entry):
        self.note(entry, "added")

    def queued(self, entry):
        return self.hold(entry, self.often)

    def starting(self, entry, now):
        assert self.last[entry] == "queued"
        return self.choose.random() < self.often and self.hold_now(entry)

    def hold_now(self, entry):
        self.note(entry, "held")
        self.holds.append(entry)
        return True

    def left(self, entry):
        self.note(entry, "left")
        if entry in self.holds:
            self.holds.remove(entry)

    def started(self, entry):
        assert entry.row >= 0 and entry.cache.capacity >= entry.sequence.length
        self.note(entry, "started")

    def stopped(self, entry):
        assert entry.row >= 0, "its row and blocks are still its own"
        self.note(entry, "stopped")

    def ended(self, entry):
        assert entry.sequence.ended and entry.row < 0
        self.note(entry, "ended")
        del self.last[entry]

    def advance(self, now):
        self.steps.append("advance")
        for entry in [entry for entry in self.holds if self.choose.random() < 0.5 or now % 5 == 0]:
            self.holds.remove(entry)
            self.note(entry, "queued")  # if another part holds it, `left` follows
            self.queues.release(entry, self)

    def begin(self, step):
        self.steps.append("begin")

    def planned(self, plan):
        self.steps.append("planned")

    def apply(self, plan, result, now):
        self.steps.append("apply")
        return ()

    @property
    def wants_step(self):
        return bool(self.holds)

    @property
    def has_work(self):
        return bool(self.holds)


class Held(History):
    """A history with two parts that hold sequences, and one that only listens."""

    def more_parts(self):
        choose = random.Random(self.random.randrange(1 << 30))
        self.recording = [Recording(choose, 0.2), Recording(choose, 0.0), Recording(choose, 0.2)]
        return self.recording

    def nothing_runs(self):
        pass

    def judge(self, preempted):
        pass


@pytest.mark.parametrize("seed", range(12))
def test_each_part_is_told_of_each_sequence_in_order_and_of_its_end_once(seed):
    history = Held(seed)
    while len(history.recording[0].steps) < 4 * STEPS:
        while history.random.random() < 0.4 and history.scheduler.stats().waiting < 12:
            history.add()
        if history.random.random() < 0.04:
            history.abort()
        history.step()
    for name in [*history.scheduler.entries][::3]:
        history.scheduler.abort(name)
        history.aborted.add(name)
    for _ in range(5000):
        if not (history.scheduler.entries or history.plans):
            break
        history.step()
    history.steps = max(history.steps, STEPS)
    check(history)
    for part in history.recording:
        assert not (part.last or part.holds), "it has seen the end of each"
        assert part.seen["added"] == part.seen["ended"] == len(history.requests)
        assert part.seen["started"] == part.seen["stopped"]
        kinds = Counter(part.steps)
        assert kinds["advance"] >= kinds["begin"] >= kinds["planned"] == kinds["apply"]
        order = [event for event in part.steps if event != "apply"]
        assert all(after != "begin" or before == "advance" for before, after in pairwise(order))
        assert all(after != "planned" or before == "begin" for before, after in pairwise(order))


def test_a_hook_is_called_for_the_parts_that_override_it_in_their_order():
    class Silent(Part):
        name = "silent"

    class First(Silent):
        def advance(self, now):
            pass

    class Other(First):
        @property
        def has_work(self):
            return True

    first, silent, other = First(), Silent(), Other()
    hooks = Hooks([first, silent, other])
    assert hooks.parts == (first, silent, other)
    assert (hooks.advance, hooks.has_work) == ((first, other), (other,))
    rest = set(Hooks.__slots__) - {"advance", "has_work", "parts"}
    assert all(getattr(hooks, hook) == () for hook in rest)
    every = {name for name in vars(Part) if not name.startswith("_")} - {"attach", "awake", "name", "waits_for"}
    assert every == {*Hooks.__slots__} - {"parts"}, "each hook of a part is called by somebody"


def test_a_part_that_overrides_nothing_changes_nothing():
    part = Part()
    entry = object()
    assert (part.queued(entry), part.starting(entry, 0.0), part.make_room(3, 0.0)) == (False, False, False)
    assert part.uses_kept(entry) and part.finish(None) is None and not part.wants_step and not part.has_work
    assert (part.base_identity("it"), [*part.apply(None, None, 0.0)], part.stats()) == ("it", [], {})


def test_a_request_that_finds_a_row_is_offered_to_the_parts_at_once_and_one_that_has_to_wait_is_not():
    class Offered(Part):
        name = "offered"

        def __init__(self):
            self.offered = []

        def starting(self, entry, now):
            self.offered.append(entry.id)
            return False

    part = Offered()
    scheduler = create_scheduler(parts=[part], max_sequences=2)
    for request in create_requests(4, 4, 4, 4):
        scheduler.add(request)
    assert part.offered == ["0", "1"]
