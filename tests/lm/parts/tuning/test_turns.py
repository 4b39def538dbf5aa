"""Turns: who has the device next, by the time that tenants and their jobs have used."""

from typing import NamedTuple

from holdfast.lm.parts.tuning.turns import CALL_SECONDS, TURN_SECONDS, Turns


class Job(NamedTuple):
    id: str
    tenant: str = ""
    lane: str = ""


def choose(turns, ready, current=None, *, between=True, known=None):
    return turns.choose(ready, current, ready if known is None else known, between=between)


def shares(turns, jobs, seconds, rounds):
    """Seconds that each job gets if all always have something to run, in steps of these many seconds."""
    used, current = dict.fromkeys((job.id for job in jobs), 0.0), None
    for _ in range(rounds):
        current = choose(turns, jobs, current)
        turns.charge(current, seconds[current.id])
        used[current.id] += seconds[current.id]
    return used


def test_jobs_over_files_of_one_tenant_run_one_after_the_other():
    turns, jobs = Turns(), [Job("one"), Job("two")]
    assert choose(turns, jobs) is jobs[0]
    turns.charge(jobs[0], 100 * TURN_SECONDS)
    assert choose(turns, jobs, jobs[0]) is jobs[0]
    assert choose(turns, jobs[1:], jobs[0], known=jobs) is jobs[1]


def test_tenants_share_the_time_however_long_their_steps_are_and_however_many_jobs_they_have():
    jobs = [Job("a", "a"), Job("b1", "b", "b1"), Job("b2", "b", "b2"), Job("b3", "b", "b3")]
    used = shares(Turns(), jobs, {"a": 7.0, "b1": 0.1, "b2": 0.5, "b3": 2.0}, 4000)
    total = sum(used.values())
    assert abs(used["a"] - total / 2) < 2 * TURN_SECONDS
    assert max(abs(used[each] - total / 6) for each in ("b1", "b2", "b3")) < 2 * TURN_SECONDS


def test_a_short_call_now_and_then_is_served_after_the_step_under_way():
    turns, long, short = Turns(), Job("long", "a"), Job("short", "b", "short")
    known, current, waits = [long, short], None, []
    for _ in range(50):
        for _ in range(20):
            current = choose(turns, [long], current, known=known)
            turns.charge(long, 1.0)
        waited = 0.0
        while (current := choose(turns, known, current)) is long:
            turns.charge(long, 1.0)
            waited += 1.0
        waits.append(waited)
        turns.charge(short, 0.05)
    assert waits[0] <= CALL_SECONDS and waits[1:] == [0.0] * 49


def test_a_call_that_comes_at_once_waits_until_the_other_job_has_used_a_little_more():
    turns, long, short = Turns(), Job("long", "a"), Job("short", "b", "short")
    current = choose(turns, [long], known=[long])
    current, waited = choose(turns, [long, short], current), 0.0
    while current is long:
        turns.charge(long, 0.5)
        waited += 0.5
        current = choose(turns, [long, short], current)
    assert waited == CALL_SECONDS


def test_many_short_calls_in_a_row_do_not_keep_out_another_tenant():
    turns, many, other = Turns(), Job("many", "a", "many"), Job("other", "b")
    choose(turns, [many])
    used = shares(turns, [many, other], {"many": 0.01, "other": 1.0}, 20_000)
    assert abs(used["many"] - used["other"]) < 2 * TURN_SECONDS


def test_a_turn_passes_only_between_two_steps():
    turns, jobs = Turns(), [Job("a", "a"), Job("b", "b")]
    assert choose(turns, jobs[:1]) is jobs[0]
    turns.charge(jobs[0], 2 * TURN_SECONDS)
    assert choose(turns, jobs, jobs[0], between=False) is jobs[0]
    assert choose(turns, jobs, jobs[0]) is jobs[1]


def test_a_tenant_that_was_away_has_at_most_one_turn_of_credit():
    turns, busy, late = Turns(), Job("busy", "a"), Job("late", "b")
    current = choose(turns, [late], known=[busy, late])
    turns.charge(late, 1.0)
    for _ in range(100):
        current = choose(turns, [busy], current, known=[busy, late])
        turns.charge(busy, TURN_SECONDS)
    used = shares(turns, [busy, late], {"busy": 1.0, "late": 1.0}, 1000)
    assert used["late"] - used["busy"] <= 2 * TURN_SECONDS


def test_a_job_that_is_gone_leaves_nothing_behind():
    turns = Turns()
    for number in range(20):
        job = Job(str(number), f"tenant-{number}", str(number))
        assert choose(turns, [job]) is job
        turns.charge(job, 5.0)
    assert choose(turns, []) is None
    assert not (turns._tenants._used or turns._tenants._last or turns._lanes)


def test_a_new_lane_of_a_tenant_is_not_measured_by_the_lanes_of_other_tenants():
    turns, first = Turns(), Job("first", "a", "first")
    many = [Job(f"b{number}", "b", f"b{number}") for number in range(5)]
    shares(turns, [first, *many], {job.id: 1.0 for job in (first, *many)}, 3000)
    new = Job("new", "a", "new")
    used = shares(turns, [first, new], {"first": 1.0, "new": 1.0}, 200)
    assert abs(used["first"] - used["new"]) < 2 * TURN_SECONDS


def test_the_tenant_whose_last_turn_is_longest_ago_is_next():
    turns, jobs, current, found = Turns(), [Job(each, each) for each in "abc"], None, ""
    for _ in range(9):
        current = choose(turns, jobs, current)
        turns.charge(current, TURN_SECONDS)
        found += current.id
    assert found == "abcabcabc"


def test_a_call_is_served_between_the_steps_of_a_job_of_its_own_tenant():
    turns, long, short = Turns(), Job("long"), Job("short", lane="short")
    current, waited = choose(turns, [long]), 0.0
    while (current := choose(turns, [long, short], current)) is long:
        turns.charge(long, 0.5)
        waited += 0.5
    assert waited == CALL_SECONDS
