"""An application's turns on a device that a language model uses, too: its share of the time, by hand and at random."""

from __future__ import annotations

import random
from math import inf

import pytest

from holdfast.core.device_turns import LATE_SECONDS, WINDOW_SECONDS, DeviceTurns


def rounds_of(turns: DeviceTurns, seconds: float, until: float, *, works: bool = True, late_until: float = 0.0) -> int:
    """The number of rounds of an application that always has work, until a time."""
    now, rounds = 0.0, 0
    while now < until:
        pause = turns.pause(now, inf if works else 0.0, late_until)
        if pause:
            now += pause
        else:
            turns.spent(seconds)
            now += seconds
            rounds += 1
    return rounds


@pytest.mark.whole_product
@pytest.mark.parametrize("share", [0.05, 0.25, 0.8])
@pytest.mark.parametrize("seconds", [0.001, 0.03, 0.4])
def test_rounds_take_their_share_while_a_model_works_however_long_they_are(share: float, seconds: float) -> None:
    until = 400 * max(seconds, 0.01)
    assert rounds_of(DeviceTurns(share), seconds, until) * seconds / until == pytest.approx(share, rel=0.1)


def test_nothing_is_bound_while_the_model_has_no_work_or_the_share_is_all() -> None:
    assert rounds_of(DeviceTurns(0.1), 0.01, 1.0, works=False) == pytest.approx(100, abs=1)
    assert rounds_of(DeviceTurns(1.0), 0.01, 1.0) == pytest.approx(100, abs=1)


def test_a_model_that_has_stopped_is_not_waited_for() -> None:
    turns = DeviceTurns(0.1)
    turns.pause(0.0, 5.0, 0.0)
    turns.spent(100.0)
    assert turns.pause(1.0, 5.0, 0.0) == 4.0
    assert turns.pause(5.0, 5.0, 0.0) == 0.0
    assert turns.pause(6.0, 9.0, 0.0) == 0.0, "the debt of before is forgotten"


def test_no_round_begins_while_streams_are_late_and_that_time_earns_nothing() -> None:
    turns = DeviceTurns(0.5)
    turns.pause(0.0, inf, 0.0)
    assert turns.pause(1.0, inf, 1.0 + LATE_SECONDS) == pytest.approx(LATE_SECONDS)
    assert turns.pause(1.0 + LATE_SECONDS, inf, 1.0 + LATE_SECONDS) > 0.0
    assert turns.pause(1.1 + LATE_SECONDS, inf, 1.0 + LATE_SECONDS) == 0.0


def test_an_application_without_work_saves_up_half_a_second_of_the_model_s_at_most() -> None:
    turns = DeviceTurns(0.2)
    for now in range(100):
        assert turns.pause(float(now), inf, 0.0) == 0.0 or now == 0
    saved, now = 0.0, 99.0
    while not turns.pause(now, inf, 0.0):
        turns.spent(0.001)
        saved += 0.001
    assert saved == pytest.approx(0.2 * WINDOW_SECONDS, abs=0.002)


def test_over_random_rounds_the_share_is_never_passed_by_more_than_a_round_and_the_window() -> None:
    choose = random.Random(5)
    for _ in range(50):
        share, turns, now, spent = choose.uniform(0.05, 0.9), None, 0.0, 0.0
        turns = DeviceTurns(share)
        while now < 20.0:
            pause = turns.pause(now, inf, 0.0)
            if pause or choose.random() < 0.1:
                now += max(pause, 0.0) or choose.uniform(0, 0.2)
                continue
            seconds = choose.uniform(0.0, 0.1)
            turns.spent(seconds)
            now, spent = now + seconds, spent + seconds
            assert spent <= share * (now + WINDOW_SECONDS) + 0.1 + 1e-9


@pytest.mark.parametrize("share", [0.0, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="app_share is"):
        DeviceTurns(share)
