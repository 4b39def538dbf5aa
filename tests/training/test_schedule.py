"""The learning rate over a job."""

from __future__ import annotations

import pytest

from holdfast.training.schedule import learning_rate


def test_the_rate_rises_to_its_peak_and_falls_in_equal_parts() -> None:
    rates = [learning_rate(step, steps=10, peak=1.0, warmup=0.2) for step in range(10)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])


def test_no_step_has_rate_zero_and_none_is_above_the_peak() -> None:
    for steps in (1, 2, 3, 50, 100):
        for warmup in (0.0, 0.03, 0.5, 0.99):
            rates = [learning_rate(step, steps=steps, peak=0.1, warmup=warmup) for step in range(steps)]
            assert all(0.0 < rate <= 0.1 for rate in rates) and max(rates) == pytest.approx(0.1, rel=0.51)
