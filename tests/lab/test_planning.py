"""Capacity planning: the search on servers with a known limit, and evaluations of candidates on an invented device."""

import signal
from dataclasses import replace
from functools import cache

import pytest

from holdfast.lab import workloads
from holdfast.lab.planning import (
    Candidate,
    CapacityQuestion,
    Evaluation,
    best_of,
    describe_load,
    evaluate,
    evaluate_fleet,
    evaluator,
    find_capacity,
    lasting,
    sustained,
)
from holdfast.lab.simulator.run import simulate
from holdfast.lab.workloads import Conversation, Turn
from holdfast.lm.config import EngineConfig
from tests.lab.simulator.simulation import PROFILE

QUESTION = CapacityQuestion(
    model="m",
    device="d",
    devices=2,
    price=3.6,
    profile=PROFILE,
    engine=EngineConfig(max_sequences=16),
    workload=workloads.fixed(4, 100, 8),
    variation=1.0,
    tbt_ms=12.0,
    ttft_ms=100.0,
    seconds=0.5,
)
PLAIN = Candidate(token_budget=128)


@cache
def evaluated() -> Evaluation:
    """The evaluation of the plain candidate, which several tests look at."""
    return evaluate(QUESTION, PLAIN)


def test_an_evaluation_has_the_capacity_within_the_limits_and_its_cost():
    evaluation = evaluated()
    assert evaluation.capacity > 0 and evaluation.reason == ""
    assert evaluation.figures["p99_itl_ms"] <= 12 and evaluation.figures["p99_ttft_ms"] <= 100
    assert evaluation.output_rate == pytest.approx(8 * evaluation.capacity)
    assert evaluation.cost == pytest.approx(3.6 / 3600 / evaluation.output_rate * 1e6)
    assert (evaluation.replicas, evaluation.fleet_capacity) == (2, 2 * evaluation.capacity)


def test_a_replica_costs_the_price_of_all_its_devices():
    changes = {"profile": None, "model": "llama-3-8b", "device": "a100-80gb", "devices": 8, "tbt_ms": 100.0}
    evaluation = evaluate(replace(QUESTION, **changes, ttft_ms=None), replace(PLAIN, tp=2, pp=2))
    assert evaluation.replicas == 2
    assert evaluation.cost == pytest.approx(4 * 3.6 / 3600 / evaluation.output_rate * 1e6)


def test_a_run_has_the_conversations_of_its_time_but_at_least_40():
    base = workloads.fixed(3, 100, 8)
    question = replace(QUESTION, seconds=30.0)
    assert len(question.arriving(base, 10.0)) == 300
    assert len(question.arriving(base, 0.1)) == 40


QUEUEING = replace(QUESTION, tbt_ms=1000.0, ttft_ms=None, workload=workloads.fixed(4, 50, 30))
"""Only the queue limits the rate: 16 sequences of 30 tokens run at once."""


def test_a_short_run_finds_about_the_capacity_of_a_long_one():
    """Runs of a quarter of a second would end before the queue is as long as two seconds, however fast it grows."""
    capacities = [evaluate(replace(QUEUEING, seconds=seconds), PLAIN).capacity for seconds in (0.25, 2.0)]
    assert max(capacities) < 1.15 * min(capacities)
    arriving = QUEUEING.arriving(QUEUEING.workload, 2 * capacities[0], 4.0)
    outcome = simulate(replace(QUEUEING.engine, **PLAIN.options()), PROFILE, arriving)
    assert len(arriving) / outcome.seconds < 1.15 * capacities[0], "no more are served where more arrive"


def test_a_run_is_longer_until_the_queue_of_its_conversations_would_be_seen():
    """A conversation takes 2 s. Forty arrive in a tenth of a second, and none begins late, because none has ended."""
    talk = [Conversation(0.0, (Turn(20, 10), Turn(10, 10, 1.8)))]
    asked = []

    def run(arriving):
        asked.append(arriving[-1].arrival - arriving[0].arrival)
        return simulate(QUESTION.engine, PROFILE, arriving).records

    figures = replace(QUEUEING, seconds=1.0).run_at(talk, 30.0, run)
    assert len(asked) == 2 and asked[0] < 2 and lasting(figures)
    assert figures["mean_lifetime"] == pytest.approx(2.0, abs=0.2)
    assert figures["arrival_window"] == asked[-1] > 5.5
    assert figures["num_conversations"] > 150
    assert describe_load(figures).startswith("the queue does not grow: conversations arrived for ")


def test_a_run_is_not_extended_if_it_failed_or_beyond_eight_times_the_given_length():
    slow = [Conversation(0.0, (Turn(20, 10), Turn(10, 10, 100.0)))]
    asked = []

    def run(arriving):
        asked.append(len(arriving))
        return simulate(QUESTION.engine, PROFILE, arriving).records

    question = replace(QUEUEING, seconds=1.0)
    figures = question.run_at(slow, 50.0, run)
    assert asked == [50, 400] and not lasting(figures)
    assert "too short to show whether the queue grows" in describe_load(figures)
    assert "it takes 300 s" in describe_load(figures)
    replace(question, tbt_ms=0.1).run_at(slow, 50.0, run)
    assert asked == [50, 400, 50], "no longer run could meet this limit"


def test_replicas_with_a_router_sustain_about_as_much_as_each_alone():
    question = replace(QUESTION, devices=3, seconds=0.5)
    alone = evaluate(question, PLAIN)
    fleet = evaluate_fleet(question, alone, "priced", "ethernet-100g")
    assert 0.9 < fleet.capacity / alone.fleet_capacity < 1.5  # they share bursts
    assert fleet.replicas == 3 and fleet.figures["p99_ttft_ms"] <= 100
    assert (fleet.moves, fleet.copied_tokens) == (0, 0)  # without a host tier


def test_replicas_that_share_the_cores_of_a_cpu_sustain_less_than_with_cores_of_their_own():
    on_cpu = replace(PROFILE, cost=replace(PROFILE.cost, device="CPU (x86_64, 2 threads)"))
    question = replace(QUESTION, profile=on_cpu, seconds=0.3)
    alone = evaluate(question, PLAIN)
    shared, own = (
        evaluate_fleet(replace(question, cores=cores), alone, "round-robin", "pcie4").capacity for cores in (2, 4)
    )
    assert shared < 0.7 * own
    assert on_cpu.threads == 2 and PROFILE.threads is None


def test_a_fleet_that_cannot_be_simulated_has_a_reason():
    alone = evaluated()
    with pytest.raises(ValueError, match="1000 replicas are to be simulated together; there may be at most 64"):
        evaluate_fleet(QUESTION, replace(alone, replicas=1000), "priced", "pcie4")
    with pytest.raises(ValueError, match="has no capacity"):
        evaluate_fleet(QUESTION, replace(alone, capacity=0.0), "priced", "pcie4")


def test_limits_that_cannot_be_met_give_a_reason_with_the_measured_latency():
    evaluation = evaluate(replace(QUESTION, tbt_ms=1.0), PLAIN)
    assert (evaluation.capacity, evaluation.cost) == (0.0, None)
    assert "P99 TBT" in evaluation.reason and "however few" in evaluation.reason


@pytest.mark.parametrize(
    ("changes", "candidate", "reason"),
    [
        ({}, replace(PLAIN, tp=4), "takes 4 devices of 2"),
        ({}, replace(PLAIN, tp=2), "measured on 1 device"),
        ({"workload": workloads.fixed(1, 5000, 8)}, PLAIN, "no request fits its context of 2,048"),
        ({"profile": None, "model": "llama-2-70b", "device": "a40"}, PLAIN, "take more devices"),
        ({}, replace(PLAIN, host_cache_gb=1.0), "host_cache_gb is 1.0"),
    ],
)
def test_a_candidate_that_cannot_run_has_no_capacity_and_a_reason(changes, candidate, reason):
    evaluation = evaluate(replace(QUESTION, **changes), candidate)
    assert evaluation.capacity == 0.0 and reason in evaluation.reason


def test_many_processes_give_the_same_evaluations_in_the_same_order_as_one():
    candidates = [PLAIN, Candidate(scheduler="prefill-first"), Candidate(tbt_target=10.0)]
    question = replace(QUESTION, seconds=0.1)
    with evaluator(question, 1) as evaluate_all:
        alone = list(evaluate_all(candidates))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, evaluator(question, 2) as evaluate_all:
        assert list(evaluate_all(candidates)) == alone
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143, "the processes have ended in order"
    assert signal.getsignal(signal.SIGTERM) is before
    assert [evaluation.candidate for evaluation in alone] == candidates


def test_the_best_has_the_most_capacity_on_all_devices():
    wide = replace(evaluated(), capacity=3.0, replicas=1)
    narrow = replace(wide, capacity=2.0, replicas=2)
    assert best_of([wide, narrow]) is narrow
    assert best_of([replace(wide, capacity=0.0)]) is None


def test_the_first_of_indistinguishable_capacities_is_best():
    plain = replace(evaluated(), capacity=3.0, replicas=1)
    assert best_of([plain, replace(plain, capacity=3.1)]) is plain
    more = replace(plain, capacity=3.3)
    assert best_of([plain, more]) is more


def test_a_candidate_gives_only_the_options_that_differ():
    assert Candidate().options() == {"host_cache_gb": 0.0}
    assert Candidate(scheduler="orca", host_cache_gb=8.0).options() == {"scheduler": "orca", "host_cache_gb": 8.0}
    assert Candidate(tbt_target=45.0, tp=2, pp=4).layout == "TP2 PP4"


def server(limit, calls=None):
    """A server whose P99 TBT exceeds 50 ms above `limit` requests per second."""

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


def test_a_queue_that_is_short_as_yet_but_grows_is_not_sustained():
    figures = {"p99_itl_ms": 10.0, "median_queued_ms": 100.0}
    assert sustained(figures | {"queue_growth": 0.04}, 50.0)
    assert not sustained(figures | {"queue_growth": 0.06}, 50.0)


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
