"""The benchmark of the served pace: how it reads a server's metrics."""

from __future__ import annotations

from prometheus_client import generate_latest

from benchmarks.engine.served_pace import late_by, times_between_tokens
from holdfast.server.metrics import Metrics


def test_late_tokens_are_those_that_a_server_counted_during_the_load() -> None:
    metrics = Metrics()
    for seconds in (0.02, 0.2):  # before the load
        metrics.tbt.observe(seconds)
    before = times_between_tokens(generate_latest(metrics.registry).decode())
    for seconds in (0.024, 0.0249, 0.026, 0.3):
        metrics.tbt.observe(seconds)
    after = times_between_tokens(generate_latest(metrics.registry).decode())
    assert late_by(before, after, 0.025) == "server_above_25 50.00  server_above_30 25.00  server_above_35 25.00"


def test_a_target_between_two_bounds_is_judged_by_the_next_ones() -> None:
    counts = {0.01: 1.0, 0.025: 3.0, float("inf"): 4.0}
    assert late_by({}, counts, 0.012) == "server_above_25 25.00"
