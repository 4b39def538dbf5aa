"""The learning rate over a job."""

from __future__ import annotations

import pytest

from holdfast.training.optimizer import learning_rate


def test_the_rate_rises_to_its_peak_and_falls_in_equal_parts() -> None:
    rates = [learning_rate(step, steps=10, peak=1.0, warmup=0.2) for step in range(10)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])


@pytest.mark.parametrize("warmup", [0.0, 0.03, 0.5, 0.99])
@pytest.mark.parametrize("steps", [1, 2, 3, 50, 100])
def test_the_peak_comes_at_the_end_of_the_warm_up_and_no_step_has_rate_zero(steps: int, warmup: float) -> None:
    rates = [learning_rate(step, steps=steps, peak=0.1, warmup=warmup) for step in range(steps)]
    rising = round(steps * warmup)
    assert min(rates) > 0.0 and max(rates) == pytest.approx(0.1, rel=1e-9)
    assert rates.index(max(rates)) == max(0, rising - 1), "it does not come later"
    assert rates[: rising + 1] == sorted(rates[: rising + 1]), "never down before the peak"
    assert rates[rising:] == sorted(rates[rising:], reverse=True), "never up after it"
    if rising < steps:
        assert rates[-1] == pytest.approx(0.1 / (steps - rising)), "the last step has one part of the decay"
