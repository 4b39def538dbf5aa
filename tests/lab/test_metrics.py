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


def test_tokens_that_arrive_together_all_count_at_their_peak():
    """Three arrivals of six tokens: two in the first second, one in the next."""
    figures = summary([Record(arrival=0.0, prompt_tokens=1, token_times=[0.2, 0.9, 1.5], output_tokens=6)])
    assert figures["max_output_tokens_per_s"] == 4


@pytest.mark.parametrize("name", ["ttft", "tpot", "itl", "e2el", "normalized_latency", "queued"])
def test_each_latency_has_its_mean_median_deviation_p90_and_p99(name):
    """Of 11 values from 100 to 1,100 ms, each tenth of the way is one of them."""
    gaps = [0.1 * number for number in range(1, 12)]
    if name == "itl":
        made = [Record(0.0, 1, token_times=[sum(gaps[:at]) for at in range(12)])]
    elif name == "tpot":
        made = [Record(0.0, 1, token_times=[5.0, 5.0 + 2 * gap], output_tokens=3) for gap in gaps]
    else:
        made = [Record(0.0, 1, scheduled=gap, token_times=[gap]) for gap in gaps]
    figures = summary(made)
    expected = {"mean": 600.0, "median": 600.0, "std": 1e5**0.5, "p90": 1000.0, "p99": 1090.0}
    assert {part: figures[f"{part}_{name}_ms"] for part in expected} == pytest.approx(expected)


def test_goodput_counts_requests_that_meet_every_limit():
    assert summary(records(), Slo(ttft=400))["request_goodput"] == pytest.approx(1 / 1.5)
    assert summary(records(), Slo(tpot=100))["request_goodput"] == pytest.approx(1 / 1.5), "one token has no TPOT"
    assert summary(records(), Slo(e2el=550))["request_goodput"] == pytest.approx(1 / 1.5), "the first takes 600 ms"
    assert summary(records(), Slo(e2el=400))["request_goodput"] == 0.0
    assert summary(records(), Slo(ttft=600, tpot=300, e2el=700))["request_goodput"] == pytest.approx(2 / 1.5)


def test_a_run_without_success_is_refused_with_the_reasons():
    with pytest.raises(ValueError, match="none of 1 requests succeeded: refused"):
        summary(records()[2:])
