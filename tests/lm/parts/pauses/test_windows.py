"""Windows: the time of turns as it is learned, and whom that concerns."""

import random

import pytest

from holdfast.core.pause import Pause
from holdfast.lm.memory.turns import NEW, Departure, TurnTracker
from holdfast.lm.parts.pauses.windows import Windows

TOOL = Pause("tool:x")


class Taught(Windows):
    """Windows by a tracker of turns, each of which ends with a block of its own."""

    def __init__(self):
        self.tracker = TurnTracker()
        super().__init__(self.tracker.kinds)
        self.now = 0.0
        self.turns = 0

    def leave(self, pause, tenant=""):
        self.turns += 1
        digest = b"%d" % self.turns
        self.tracker.left([digest], Departure(f"{self.turns}", tenant, pause), NEW, 2 * self.turns, self.now)
        return digest

    def teach(self, pause, gaps, tenant=""):
        for gap in gaps:
            digest = self.leave(pause, tenant)
            self.now += gap
            self.tracker.begin([digest], 0, self.now)
        return self


def test_nothing_is_expected_of_a_kind_that_was_never_seen():
    assert Taught().expect("", TOOL) is None and Taught().expect("", Pause()) is None


def test_the_time_of_a_tools_result_is_learned_from_its_earlier_results():
    window = Taught().teach(TOOL, [3.0] * 20).expect("", TOOL)
    assert 2.4 < window.expected < 4.0 and 1.5 < window.soonest < 3.0 and 6.0 <= window.latest < 16.0


def test_gaps_of_all_lengths_give_no_window():
    choose = random.Random(1)
    assert Taught().teach(TOOL, [10 ** choose.uniform(-1, 3) for _ in range(60)]).expect("", TOOL) is None


def test_a_hint_counts_at_once_and_until_it_turns_out_to_be_wrong():
    windows, hinted = Taught(), Pause("tool:x", expected=20.0)
    window = windows.expect("", hinted)
    assert 8.0 < window.soonest < 15.0 and 16.0 < window.expected < 26.0 and 40.0 < window.latest < 110.0
    windows.teach(hinted, [1.0] * 30)
    assert windows.expect("", hinted).expected < 2.0


def test_hints_that_are_always_late_by_a_factor_are_corrected_by_it():
    windows, hinted = Taught(), Pause("tool:x", expected=20.0)
    windows.teach(hinted, [30.0] * 30)
    assert 24.0 < windows.expect("", hinted).expected < 40.0


def test_a_kind_begins_with_the_gaps_of_its_parent_kind():
    windows = Taught().teach(Pause("tool:a"), [3.0] * 40)
    assert windows.expect("", Pause("tool:b")).expected == pytest.approx(3.2, rel=0.3)


def test_nothing_is_learned_from_another_tenant():
    windows = Taught().teach(TOOL, [3.0] * 40, tenant="liar")
    assert windows.expect("honest", TOOL) is None


def test_a_hint_of_no_pause_at_all_counts_as_a_short_one():
    window = Taught().expect("", Pause("tool:x", expected=0.0))
    assert 0.0 < window.soonest < window.expected < window.latest < 1.0
    Taught().teach(Pause("tool:x", expected=0.0), [0.0, 1e6])


def test_turns_that_never_come_do_not_make_those_that_come_any_later():
    windows = Taught()
    for _ in range(60):
        windows.leave(TOOL)
        windows.teach(TOOL, [3.0])
    window = windows.expect("", TOOL)
    assert 2.0 < window.expected < 5.0 and window.latest < 40.0
