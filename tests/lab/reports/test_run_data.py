"""Data of a report, from records with a known timeline."""

import pytest

from holdfast.lab.metrics import Record, summary
from holdfast.lab.reports.run_data import BINS, Distribution, Run, Timeline


def records():
    return [
        Record(arrival=10.0, prompt_tokens=5, scheduled=11.0, token_times=[12.0, 13.0, 18.0]),
        Record(arrival=10.0, prompt_tokens=7, error="refused"),
        Record(arrival=14.0, prompt_tokens=9, scheduled=18.0, token_times=[19.0, 19.5, 20.0], output_tokens=6),
    ]


def test_a_thinned_distribution_keeps_its_smallest_and_largest_value():
    every = Distribution.of([float(value) for value in range(100_000, 0, -1)])
    assert (every.values[0], every.values[-1], every.shares[-1]) == (1.0, 100_000.0, 1.0)
    assert len(every.values) < 1000
    for value, share in zip(every.values, every.shares, strict=True):
        assert share == pytest.approx(value / 100_000)
    assert Distribution.of([3.0]) == Distribution((3.0,), (1.0,))
    assert Distribution.of([]) == Distribution((), ())


def test_a_timeline_counts_waiting_and_running_requests_in_each_bin():
    timeline = Timeline.of([record for record in records() if not record.error])
    seen = dict.fromkeys((0, 2, 5, 7, 9))
    for second in seen:
        at = second * BINS // 10 + BINS // 20
        assert timeline.times[at] == pytest.approx(second + 0.5, abs=0.05)
        seen[second] = (timeline.waiting[at], timeline.running[at])
    assert seen == {0: (1, 0), 2: (0, 1), 5: (1, 1), 7: (1, 1), 9: (0, 1)}
    assert sum(timeline.tokens) * 10 / BINS == pytest.approx(9), "six tokens came at three times"


def test_stalls_are_the_longest_gaps_with_their_time_request_and_token():
    run = Run.of(records(), summary(records()))
    first = run.stalls[0]
    assert (first.ms, first.at, first.request, first.token, first.prompt_tokens) == (5000.0, 8.0, 0, 2, 5)
    assert [stall.request for stall in run.stalls] == [0, 0, 2, 2]
    assert run.tbt.values == (500.0, 500.0, 1000.0, 5000.0)
    assert run.ttft.values == (2000.0, 5000.0)
