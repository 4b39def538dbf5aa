"""Windows: the time of turns as it is learned, and whom that concerns."""

import random

import pytest

from holdfast.core.pause import Pause
from holdfast.lm.parts.pauses.windows import Windows

TOOL = Pause("tool:x")


def taught(windows, pause, gaps, tenant=""):
    for number, gap in enumerate(gaps):
        windows.learn(tenant, pause, 100.0 * number, 100.0 * number + gap)
    return windows


def test_nothing_is_expected_of_a_kind_that_was_never_seen():
    assert Windows().expect("", TOOL) is None and Windows().expect("", Pause()) is None


def test_the_time_of_a_tools_result_is_learned_from_its_earlier_results():
    window = taught(Windows(), TOOL, [3.0] * 20).expect("", TOOL)
    assert 2.4 < window.expected < 4.0 and 1.5 < window.soonest < 3.0 and 6.0 <= window.latest < 16.0


def test_gaps_of_all_lengths_give_no_window():
    choose = random.Random(1)
    assert taught(Windows(), TOOL, [10 ** choose.uniform(-1, 3) for _ in range(60)]).expect("", TOOL) is None


def test_a_hint_counts_at_once_and_until_it_turns_out_to_be_wrong():
    windows, hinted = Windows(), Pause("tool:x", expected=20.0)
    window = windows.expect("", hinted)
    assert 8.0 < window.soonest < 15.0 and 16.0 < window.expected < 26.0 and 40.0 < window.latest < 110.0
    taught(windows, hinted, [1.0] * 30)
    assert windows.expect("", hinted).expected < 2.0


def test_hints_that_are_always_late_by_a_factor_are_corrected_by_it():
    windows, hinted = Windows(), Pause("tool:x", expected=20.0)
    taught(windows, hinted, [30.0] * 30)
    assert 24.0 < windows.expect("", hinted).expected < 40.0


def test_a_kind_begins_with_the_gaps_of_its_parent_kind():
    windows = taught(Windows(), Pause("tool:a"), [3.0] * 40)
    assert windows.expect("", Pause("tool:b")).expected == pytest.approx(3.2, rel=0.3)


def test_nothing_is_learned_from_another_tenant():
    windows = taught(Windows(), TOOL, [3.0] * 40, tenant="liar")
    assert windows.expect("honest", TOOL) is None


def test_a_hint_of_no_pause_at_all_counts_as_a_short_one():
    window = Windows().expect("", Pause("tool:x", expected=0.0))
    assert 0.0 < window.soonest < window.expected < window.latest < 1.0
    taught(Windows(), Pause("tool:x", expected=0.0), [0.0, 1e6])
