"""Evidence of a draft head decides how its next guesses and passes are judged."""

from __future__ import annotations

import random

import pytest

from holdfast.lm.parts.speculation.evidence import (
    BESIDES,
    EXPLORE,
    FIRST,
    HEAD_GAIN,
    HOPE,
    LATEST,
    SHORT,
    HeadRow,
    PassTimes,
    Rates,
)

EXPECTED = 2e-4


def measured(times: PassTimes, *seconds: float, passes: int = 4) -> PassTimes:
    for each in seconds:
        times.measured(each * (passes + BESIDES), passes)
    return times


def test_a_few_slow_passes_change_no_prediction_and_most_slow_ones_do() -> None:
    times = PassTimes()
    assert times.seconds(EXPECTED) == EXPECTED
    few = LATEST // 2
    assert measured(times, *[0.06] * few).seconds(EXPECTED) == EXPECTED
    assert measured(times, 0.06).seconds(EXPECTED) == pytest.approx(0.06)
    assert measured(times, *[3e-4] * LATEST).seconds(EXPECTED) == pytest.approx(3e-4)


def test_passes_stall_until_one_takes_about_the_predicted_time() -> None:
    times = PassTimes()
    assert times.stalls(EXPECTED), "none was measured"
    assert measured(times, 0.06).stalls(EXPECTED)
    assert not measured(times, 1.5 * EXPECTED).stalls(EXPECTED)


def test_one_trial_outweighs_all_earlier_passes() -> None:
    times = measured(PassTimes(), *[0.06] * LATEST)
    times.tried()
    assert times.seconds(EXPECTED) == pytest.approx(0.06), "nothing is measured yet"
    assert measured(times, 3e-4, passes=1).seconds(EXPECTED) == pytest.approx(3e-4)
    times.tried()
    assert measured(times, 0.06).seconds(EXPECTED) == pytest.approx(0.06), "hope alone no longer counts"


def test_trials_take_their_share_of_the_time_after_the_first_one() -> None:
    times, cost, step = PassTimes(), 1e-3, 4e-3
    assert times.may_try(60.0)
    times.tried()
    steps = 0
    while not times.may_try(cost):
        times.earn(step, cost)
        steps += 1
    assert steps == pytest.approx(cost / EXPLORE / step, abs=1)
    for _ in range(10 * steps):
        times.earn(step, cost)
    assert not times.may_try(2 * cost), "time without trials is not saved up"


@pytest.mark.parametrize("rates", [(0.9, 0.6, 0.3), (0.2, 0.9, 0.9)])
def test_chances_are_those_of_the_guesses_place(rates: tuple[float, ...]) -> None:
    learned, choose = Rates(3), random.Random(1)
    for _ in range(600):
        hits = next((place for place, rate in enumerate(rates) if choose.random() >= rate), 3)
        learned.learn(hits, missed=hits < 3)
    assert list(learned.chances(learned.mean, 3)) == pytest.approx(rates, abs=0.17)
    first, *_ = learned.chances(learned.mean / 2, 3)
    assert first == pytest.approx(next(learned.chances(learned.mean, 1)) / 2)
    assert max(learned.chances(1.0, 3)) < 1.0


def test_rates_start_with_hope_and_go_back_to_it_without_guesses() -> None:
    rates = Rates(2)
    assert list(rates.chances(HOPE, 2)) == pytest.approx([HOPE, HOPE])
    for _ in range(100):
        rates.learn(0, missed=True)
    assert next(rates.chances(rates.mean, 1)) < 0.2
    for _ in range(5000):
        rates.forget()
    assert list(rates.chances(rates.mean, 2)) == pytest.approx([HOPE, HOPE], abs=0.01)


def test_the_first_guesses_of_a_sequence_and_those_after_a_pause_weigh_most() -> None:
    row, steps = HeadRow(0.3, 10), []
    for known in range(10, 30):
        before = row.chance(known)
        row = row.learned(known, 1, missed=False)
        steps.append((row.hits - before) / (1 - before))
        row = HeadRow(row.hits, known + 1, SHORT, row.verified)
    assert steps[0] == pytest.approx(1 / FIRST) and steps[-1] == pytest.approx(HEAD_GAIN)
    assert row.learned(row.known, 1, missed=False, trial=True).hits > row.hits + 0.2 * (1 - row.hits)
    assert steps == pytest.approx(sorted(steps, reverse=True))
    rested = row.learned(row.known + 4 * SHORT, 0, missed=True)
    assert rested.hits < 0.65 * row.chance(row.known + 4 * SHORT)
