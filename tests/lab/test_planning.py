"""Capacity planning over an invented device: candidates in, verdicts out, the same each time."""

from dataclasses import replace

import pytest

from holdfast.core.config import EngineConfig
from holdfast.lab import workloads
from holdfast.lab.planning import Candidate, Setting, best_of, judge, judges
from tests.lab.simulator.simulation import PROFILE

SETTING = Setting(
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


def test_the_capacity_is_that_of_the_search_and_costs_what_its_tokens_take():
    verdict = judge(SETTING, PLAIN)
    assert verdict.capacity > 0 and verdict.reason == ""
    assert verdict.figures["p99_itl_ms"] <= 12 and verdict.figures["p99_ttft_ms"] <= 100
    assert verdict.tokens == pytest.approx(8 * verdict.capacity)
    assert verdict.cost == pytest.approx(3.6 / 3600 / verdict.tokens * 1e6)
    assert (verdict.replicas, verdict.fleet) == (2, 2 * verdict.capacity)


def test_a_run_lasts_its_time_whatever_the_rate():
    base = workloads.fixed(3, 100, 8)
    setting = replace(SETTING, seconds=30.0)
    assert len(setting.arriving(base, 10.0)) == 300
    assert len(setting.arriving(base, 0.1)) == 40


def test_limits_that_none_can_keep_are_told_with_what_was_seen():
    verdict = judge(replace(SETTING, tbt_ms=1.0), PLAIN)
    assert (verdict.capacity, verdict.cost) == (0.0, None)
    assert "P99 TBT" in verdict.reason and "however few" in verdict.reason


@pytest.mark.parametrize(
    ("changes", "candidate", "reason"),
    [
        ({}, replace(PLAIN, tp=4), "takes 4 devices of 2"),
        ({}, replace(PLAIN, tp=2), "measured on one device"),
        ({"workload": workloads.fixed(1, 5000, 8)}, PLAIN, "no request fits its context of 2,048"),
        ({"profile": None, "model": "llama-2-70b", "device": "a40"}, PLAIN, "take more devices"),
        ({}, replace(PLAIN, host_cache_gb=1.0), "host_cache_gb is 1.0"),
    ],
)
def test_what_cannot_be_has_no_capacity_and_says_why(changes, candidate, reason):
    verdict = judge(replace(SETTING, **changes), candidate)
    assert verdict.capacity == 0.0 and reason in verdict.reason


def test_many_processes_give_what_one_gives_in_the_same_order():
    candidates = [PLAIN, Candidate(scheduler="prefill-first"), Candidate(tbt_target=10.0)]
    with judges(SETTING, 1) as judge_all:
        alone = list(judge_all(candidates))
    with judges(SETTING, 2) as judge_all:
        assert list(judge_all(candidates)) == alone
    assert [verdict.candidate for verdict in alone] == candidates


def test_the_best_has_the_most_capacity_on_all_devices():
    wide = replace(judge(SETTING, PLAIN), capacity=3.0, replicas=1)
    narrow = replace(wide, capacity=2.0, replicas=2)
    assert best_of([wide, narrow]) is narrow
    assert best_of([replace(wide, capacity=0.0)]) is None


def test_of_what_a_search_cannot_tell_apart_the_first_is_best():
    plain = replace(judge(SETTING, PLAIN), capacity=3.0, replicas=1)
    assert best_of([plain, replace(plain, capacity=3.1)]) is plain
    more = replace(plain, capacity=3.3)
    assert best_of([plain, more]) is more


def test_a_candidate_gives_only_the_options_that_differ():
    assert Candidate().options() == {"host_cache_gb": 0.0}
    assert Candidate(scheduler="orca", host_cache_gb=8.0).options() == {"scheduler": "orca", "host_cache_gb": 8.0}
    assert Candidate(tbt_target=45.0, tp=2, pp=4).layout == "TP2 PP4"
