"""Metrics of a run from the records of its requests."""

import pytest

from holdfast.lab.metrics import Record, Slo, summary


def records():
    return [
        Record(arrival=1.0, prompt_tokens=10, scheduled=1.1, token_times=[1.2, 1.3, 1.6], cached_tokens=4),
        Record(arrival=2.0, prompt_tokens=20, scheduled=2.2, token_times=[2.5]),
        Record(arrival=2.0, prompt_tokens=20, error="refused"),
    ]


def test_the_summary_covers_the_requests_that_succeeded():
    figures = summary(records())
    expected = {
        "completed": 2,
        "failed": 1,
        "duration": 1.5,
        "total_input_tokens": 30,
        "total_output_tokens": 4,
        "cached_tokens": 4,
        "request_throughput": 2 / 1.5,
        "output_throughput": 4 / 1.5,
        "total_token_throughput": 34 / 1.5,
        "max_output_tokens_per_s": 3,
        "max_concurrent_requests": 1,
        "mean_ttft_ms": 350.0,
        "mean_tpot_ms": 200.0,
        "mean_itl_ms": 200.0,
        "p99_itl_ms": 298.0,
        "mean_e2el_ms": 550.0,
        "mean_normalized_latency_ms": 350.0,
        "median_queued_ms": 150.0,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


def test_goodput_counts_requests_that_meet_every_limit():
    assert summary(records(), Slo(ttft=400))["request_goodput"] == pytest.approx(1 / 1.5)
    assert summary(records(), Slo(tpot=100))["request_goodput"] == pytest.approx(1 / 1.5), "one token has no TPOT"
    assert summary(records(), Slo(ttft=600, tpot=300, e2el=700))["request_goodput"] == pytest.approx(2 / 1.5)


def test_a_run_without_success_is_refused_with_the_reasons():
    with pytest.raises(ValueError, match="none of 1 requests succeeded: refused"):
        summary(records()[2:])
