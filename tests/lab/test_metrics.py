"""Metrics of a run from the records of its requests."""

from dataclasses import replace

import pytest

from holdfast.core.contract import Contract
from holdfast.lab.metrics import Record, Slo, StageTimes, queue_growth, summary


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
    """The 11 values from 100 to 1,100 ms lie at each tenth of the distribution."""
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


def line(count, gap, *, wait=lambda number: 0.0, begin=7.0, planned=True):
    """Requests that arrive `gap` seconds apart; the first step of each follows after `wait` of its number."""
    made = []
    for number in range(count):
        arrival = begin + gap * number
        started = arrival + wait(number)
        made.append(
            Record(arrival, 1, scheduled=started if planned else None, token_times=[started, started + 0.2 * number])
        )
    return made


@pytest.mark.parametrize("planned", [True, False], ids=["with first steps", "with first tokens"])
@pytest.mark.parametrize("growth", [0.1, 0.5, 3.0])
def test_a_queue_grows_by_the_requests_that_are_left_waiting_in_the_later_half_of_the_arrivals(growth, planned):
    """Each request waits `growth` of a gap longer than the previous one: of 1 + `growth` arrivals, one begins."""
    made = line(1001, 0.1, wait=lambda number: 0.5 + 0.1 * growth * number, planned=planned)
    assert queue_growth(made, 100.0) == pytest.approx(1 - 1 / (1 + growth), abs=0.01)


def test_a_queue_of_a_constant_length_does_not_grow_however_long_it_is():
    assert queue_growth(line(1001, 0.1, wait=lambda number: 60.0), 100.0) == 0.0
    burst = line(1001, 0.1, wait=lambda number: 20.0 if number < 400 else 0.0)
    assert queue_growth(burst, 100.0) == 0.0, "it has gone"


def test_growth_that_chance_explains_does_not_count():
    """Ten of about 100 requests in the later half may wait at its end."""
    for waiting, grows in ((8, False), (14, True)):
        made = line(200, 0.1, wait=lambda number, waiting=waiting: 50.0 if number >= 200 - waiting else 0.0)
        assert (queue_growth(made, 19.9) > 0) == grows


@pytest.mark.parametrize("seconds", [0.75, 0.1], ids=["as many as arrive", "many more"])
@pytest.mark.parametrize("early", [True, False], ids=["lull", "burst"])
def test_neither_a_burst_nor_a_lull_in_the_later_half_is_growth(early, seconds):
    """Three of four requests arrive in one half, and the server begins as many in a second as arrive on average."""
    gaps = [0.5] * 300 + [1.5] * 100 if early else [1.5] * 100 + [0.5] * 300
    made, arrival, free = [], 0.0, 0.0
    for gap in gaps:
        arrival += gap
        free = max(free, arrival) + seconds
        made.append(Record(arrival, 1, scheduled=free, token_times=[free]))
    assert queue_growth(made, 300.0) == 0.0
    slow = [replace(each, scheduled=0.5 + 2.0 * number) for number, each in enumerate(made)]
    assert queue_growth(slow, 300.0) > 0.2, "one in two seconds is too slow"


def test_failed_requests_do_not_count_for_the_queue():
    failed = [replace(each, error="refused") for each in line(500, 0.1, wait=lambda number: float(number))]
    assert queue_growth(failed, 50.0) == 0.0
    assert queue_growth([*failed, *line(500, 0.1)], 50.0) == 0.0


def test_idle_shares_are_of_the_time_with_steps_in_flight_over_all_reports():
    times = StageTimes()
    assert times.idle() == []
    times.add(3.0, (3.0, 1.5))
    times.add(1.0, (0.0, 0.5))
    assert times.idle() == [0.25, 0.5]


def asked(contract=None, **fields):
    return Record(0.0, 1, contract=contract or Contract(ttft=1.0, tbt=0.5, complete=3.0), **fields)


def test_contracts_are_kept_refused_or_broken_by_their_first_term():
    made = [
        asked(token_times=[0.5, 0.9, 1.0], output_tokens=9),
        asked(token_times=[1.5, 1.9]),
        asked(token_times=[0.5, 1.1]),
        asked(Contract(complete=1.0), token_times=[0.5, 1.1]),
        asked(refused="full"),
        asked(error="lost", token_times=[0.1]),
        Record(0.0, 1, token_times=[2.0, 9.0]),
    ]
    figures = summary(made)
    expected = {
        "completed": 5,
        "failed": 1,
        "contracts": 6,
        "contracts_kept": 1,
        "contracts_refused": 1,
        "contracts_broken": 4,
        "contracts_broken_ttft": 1,
        "contracts_broken_tbt": 1,
        "contracts_broken_complete": 1,
        "contracts_broken_failed": 1,
        "contracts_kept_share": 1 / 5,
        "contracts_refused_share": 1 / 6,
        "contract_goodput": 1 / 9.0,
        "contract_token_goodput": 9 / 9.0,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


def test_a_contract_counts_from_the_arrival():
    late = Record(10.0, 1, token_times=[10.9, 11.2], contract=Contract(ttft=1.0, complete=1.5))
    assert late.outcome == "kept"


def test_a_run_without_contracts_has_no_figures_of_contracts():
    assert not [name for name in summary(records()) if "contract" in name]


def test_a_run_that_accepts_nothing_broke_nothing():
    figures = summary([asked(refused="full"), Record(0.0, 1, token_times=[1.0])])
    assert (figures["contracts_kept_share"], figures["contracts_refused_share"]) == (1.0, 1.0)


def test_a_run_in_which_all_is_refused_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="none of 1 requests succeeded: the queue is long"):
        summary([asked(refused="the queue is long")])
