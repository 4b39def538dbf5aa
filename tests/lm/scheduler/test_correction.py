"""Correction: the margin over the mean converges to where P99 meets a target, whatever the errors look like."""

import math
import random

import pytest

from holdfast.lm.scheduler.correction import DEVIATIONS, LATE_SHARE, MARGIN_GAIN, MAX_LEARNED_MARGIN, Correction

TARGET = 25.0
ERRORS = {
    "normal": lambda step, draw: draw.gauss(1.0, 0.01),
    "wide": lambda step, draw: draw.gauss(1.1, 0.04),
    "one-sided": lambda step, draw: 0.97 + draw.expovariate(1 / 0.03),
    "heavy tail": lambda step, draw: 0.98 + 0.005 * draw.paretovariate(1.5),
    "rarely slow": lambda step, draw: 1.08 if draw.random() < 0.03 else draw.gauss(1.0, 0.003),
    "drift": lambda step, draw: draw.gauss(1.0 + 0.15 * math.sin(step / 400), 0.01),
    "bursts": lambda step, draw: draw.gauss(1.15 if step // 50 % 20 == 0 else 1.0, 0.01),
}
"""Measured over predicted time of a step, by the shape of the errors."""


def steps_of(error, correction, count, seed=0, tile=0.0):
    """Planned and measured times of steps that are as long as the target allows, less up to a `tile`."""
    draw, found = random.Random(seed), []
    for step in range(count):
        planned = TARGET / correction.factor - tile * draw.random()
        ratio = error(step, draw)
        correction.update(ratio)
        correction.note_late(planned * ratio > TARGET)
        found.append((planned, planned * ratio))
    return found


def percentile(times, share):
    return sorted(times)[int(share * len(times))]


@pytest.mark.parametrize("tile", [0.0, 1.3])
@pytest.mark.parametrize("assumed", [0.002, 0.18])
@pytest.mark.parametrize("shape", ERRORS)
def test_p99_of_steps_converges_to_the_target_from_both_sides(shape, assumed, tile):
    steps = steps_of(ERRORS[shape], Correction(assumed), 8000, tile=tile)[2000:]
    late = sum(taken > TARGET for _, taken in steps) / len(steps)
    assert 0.005 < late < 0.01
    assert 0.985 * TARGET < percentile([taken for _, taken in steps], 0.99) <= TARGET


@pytest.mark.parametrize("seed", range(3))
def test_steps_are_no_shorter_than_the_promise_takes(seed):
    steps = steps_of(ERRORS["normal"], Correction(0.02), 6000, seed)[1000:]
    best = TARGET / 1.0233  # 99 of 100 are below the mean and 2.33 standard deviations
    assert sum(planned for planned, _ in steps) / len(steps) > 0.985 * best


def test_a_spike_does_not_make_the_budget_collapse_and_is_forgotten():
    def error(step, draw):
        return 10.0 if 1000 <= step < 1010 else draw.gauss(1.0, 0.01)

    planned = [planned for planned, _ in steps_of(error, Correction(0.02), 6000)]
    before = sum(planned[500:1000]) / 500
    assert min(planned[1020:]) > 0.5 * before
    assert sum(planned[1100:1300]) / 200 > 0.85 * before
    assert sum(planned[4000:]) / 2000 > 0.99 * before


def test_a_single_outlier_shortens_steps_by_little():
    correction = Correction(0.02)
    steps_of(ERRORS["normal"], correction, 3000)
    before = correction.factor
    correction.update(40.0)
    correction.note_late(1.0)
    assert before < correction.factor < 1.10 * before


def test_the_learned_margin_is_bounded_on_both_sides():
    correction = Correction(0.02)
    for _ in range(1000):
        correction.note_late(1.0)
    assert correction.learned_margin == MAX_LEARNED_MARGIN
    for _ in range(100_000):
        correction.note_late(0.0)
    assert correction.learned_margin == pytest.approx(-DEVIATIONS * 0.02), "it can rise again at once"
    assert correction.factor == pytest.approx(1.0), "a step may be planned for the target, and for no more"


def test_late_steps_of_many_count_as_if_they_had_been_noted_one_by_one():
    together, alone = Correction(0.02), Correction(0.02)
    together.note_late(2.5, 40)
    for late in (1.0, 1.0, 0.5, *[0.0] * 37):
        alone.note_late(late)
    assert together.learned_margin == pytest.approx(alone.learned_margin)
    assert together.learned_margin == pytest.approx(MARGIN_GAIN * (2.5 - 40 * LATE_SHARE))
