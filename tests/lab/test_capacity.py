"""The capacity search on servers with a known limit."""

import pytest

from holdfast.lab.planning import find_capacity, sustained


def server(limit, calls=None):
    """A server whose P99 TBT exceeds 50 ms above `limit` requests a second."""

    def run(rate):
        if calls is not None:
            calls.append(rate)
        return {"p99_itl_ms": 40.0 if rate <= limit else 60.0, "median_ttft_ms": 100.0}

    return run


@pytest.mark.parametrize("limit", [0.03, 0.9, 1.0, 7.3, 400.0])
def test_the_found_capacity_is_within_5_percent_below_the_limit(limit):
    calls = []
    found = find_capacity(server(limit, calls), 50.0)
    assert limit / 1.05 <= found <= limit
    assert len(calls) < 25


def test_the_found_capacity_is_within_the_given_tolerance():
    assert 7.3 / 1.01 <= find_capacity(server(7.3), 50.0, tolerance=0.01) <= 7.3


@pytest.mark.parametrize("guess", [9.0, 10.0, 11.0])
def test_a_good_guess_with_a_small_step_takes_few_runs(guess):
    calls = []
    found = find_capacity(server(10.0, calls), 50.0, start=guess, step=1.2)
    assert 10.0 / 1.05 <= found <= 10.0
    assert len(calls) <= 5


def test_a_target_that_is_never_met_gives_zero():
    assert find_capacity(server(0.0), 50.0) == 0.0


def test_a_growing_queue_is_not_sustained_even_if_tbt_is_within_its_limit():
    figures = {"p99_itl_ms": 10.0, "median_ttft_ms": 2500.0}
    assert not sustained(figures, 50.0)
    assert sustained(figures | {"median_queued_ms": 1500.0}, 50.0)
    assert sustained({"p99_itl_ms": 10.0, "median_queued_ms": 1500.0}, 50.0)


def test_a_ttft_limit_counts_only_if_given():
    figures = {"p99_itl_ms": 10.0, "p99_ttft_ms": 900.0, "median_ttft_ms": 500.0}
    assert sustained(figures, 50.0) and sustained(figures, 50.0, ttft_ms=1000.0)
    assert not sustained(figures, 50.0, ttft_ms=800.0)


@pytest.mark.parametrize(
    ("start", "step"), [(0.0, 2.0), (-1.0, 2.0), (1.0, 1.0), (1.0, 0.5), (float("nan"), 2.0), (float("inf"), 2.0)]
)
def test_a_search_that_would_never_end_is_refused(start, step):
    with pytest.raises(ValueError, match="must be above 0 and above 1"):
        find_capacity(server(10.0), 50.0, start=start, step=step)


@pytest.mark.parametrize("tolerance", [0.0, -0.1, float("nan")])
def test_a_tolerance_of_zero_or_less_is_refused(tolerance):
    with pytest.raises(ValueError, match=r"tolerance is .*; it must be above 0"):
        find_capacity(server(10.0), 50.0, tolerance=tolerance)


def test_the_search_ends_on_a_server_without_a_limit():
    assert 5e4 <= find_capacity(server(float("inf")), 50.0) <= 1e5
