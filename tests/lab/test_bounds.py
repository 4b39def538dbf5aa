"""Bounds on goodput, against brute force and against simulated runs."""

import random
from itertools import combinations

import pytest

from holdfast.core.contract import Contract
from holdfast.lab.bounds import Asked, Job, LeastTimes, most_kept, most_on_time
from holdfast.lab.workloads import Conversation, Turn
from tests.lab.simulator.simulation import COST, run


def in_time(jobs):
    """Whether one device can finish these jobs in time: earliest due first is the best preemptive order."""
    left, now = {at: job.seconds for at, job in enumerate(jobs)}, 0.0
    while left:
        ready = [at for at in left if jobs[at].release <= now]
        if not ready:
            now = min(jobs[at].release for at in left)
            continue
        first = min(ready, key=lambda at: jobs[at].due)
        later = [jobs[at].release for at in left if jobs[at].release > now]
        stop = min([now + left[first], *later])
        left[first] -= stop - now
        now = stop
        if left[first] <= 1e-9:
            del left[first]
            if now > jobs[first].due + 1e-9:
                return False
    return True


def best(jobs):
    """The largest number of jobs that one device finishes in time."""
    for count in range(len(jobs), 0, -1):
        if any(in_time(chosen) for chosen in combinations(jobs, count)):
            return count
    return 0


def drawn(choose, count):
    jobs = []
    for _ in range(count):
        release, seconds = choose.uniform(0, 10), choose.uniform(0.2, 4)
        jobs.append(Job(release, release + seconds * choose.uniform(1.0, 3.0), seconds))
    return jobs


@pytest.mark.parametrize("seed", range(40))
def test_no_schedule_finishes_more_jobs_than_the_bound(seed):
    jobs = drawn(random.Random(seed), 9)
    assert best(jobs) <= most_on_time(jobs) <= len(jobs)


def test_the_bound_is_exact_where_all_jobs_share_one_interval():
    jobs = [Job(0.0, 10.0, seconds) for seconds in (1, 2, 3, 4, 5, 6)]
    assert most_on_time(jobs) == best(jobs) == 4


def test_the_bound_drops_the_longest_jobs_of_each_interval():
    early = [Job(0.0, 1.0, 0.6)] * 2
    late = [Job(7.0, 8.0, 0.6)] * 3
    assert most_on_time([*early, *late]) == 2
    assert most_on_time([]) == 0


def test_an_interval_has_room_for_the_jobs_of_both_of_its_halves_together():
    jobs = [Job(0.0, 1.0, 0.9), Job(1.0, 2.0, 0.9), Job(0.0, 2.0, 0.9)]
    assert most_on_time([*jobs, Job(7.0, 8.0, 0.1)]) == best(jobs) + 1 == 3


def test_nothing_is_dropped_from_a_device_with_room():
    assert most_on_time([Job(at, at + 1.0, 0.5) for at in range(200)]) == 200


def test_no_run_is_faster_than_the_least_times():
    times = LeastTimes(COST)
    for prompt, output, streams in ((900, 40, 1), (200, 30, 12), (64, 100, 16)):
        outcome = run([Conversation(0.0, (Turn(prompt, output),))] * streams)
        least = streams * (times.prompt(0, prompt) + times.answer(prompt, output - 1))
        assert 0.1 * outcome.seconds < least <= outcome.seconds


def test_a_longer_prompt_and_a_longer_context_take_longer():
    times = LeastTimes(COST)
    assert times.prompt(0, 64) == pytest.approx(64 * 0.020 / 1024), "the first tokens have no context"
    assert times.prompt(512, 1024) > times.prompt(0, 512) > 512 * 0.00001
    assert times.prompt(0, 1024) > times.prompt(0, 512)
    assert times.answer(1000, 10) > times.answer(100, 10)


def test_a_contract_is_due_by_its_first_token_and_by_its_last_one():
    def kept(contract, prompt, answer):
        return most_kept([Asked(0.0, contract, prompt, answer, 11)] * 10)

    assert kept(Contract(ttft=1.0), 0.25, 9.0) == 4
    assert kept(Contract(ttft=1.0, tbt=0.1), 0.1, 0.4) == 4, "the last token is due after 2 s"
    assert kept(Contract(complete=3.0), 0.5, 0.5) == 3
    assert kept(Contract(tbt=0.1), 9.0, 9.0) == 10, "nothing says when the first token is due"
    assert most_kept([]) == 0


@pytest.mark.parametrize("gap", [0.004, 0.02])
def test_an_engine_keeps_no_more_contracts_than_the_bound(gap):
    contract, times = Contract(ttft=0.15, complete=0.6), LeastTimes(COST)
    asked = [Conversation(gap * at, (Turn(400, 6, contract=contract),)) for at in range(150)]
    bound = most_kept([Asked(each.arrival, contract, times.prompt(0, 400), times.answer(400, 5), 6) for each in asked])
    kept = sum(record.outcome == "kept" for record in run(asked).records)
    assert 0.3 * bound < kept <= bound
