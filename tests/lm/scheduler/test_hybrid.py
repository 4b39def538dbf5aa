"""Hybrid models from outside the scheduler: turns, shared prompts, preemptions, and what the statistics say."""

from dataclasses import replace

import pytest

from holdfast.core.types import Identity
from holdfast.lm.scheduler.queue_report import REASONS, report_queues
from holdfast.lm.types import StateCopy, StatePlan
from tests.hybrid import HybridDevice, check_hybrid
from tests.scheduling import create_requests, create_scheduler, spans

ROWS, SNAPSHOTS = 4, 6


def create(**options):
    """A scheduler of a hybrid model, and its device."""
    sizes = {"blocks": 64, "block_size": 4, "max_sequences": ROWS, "snapshots": SNAPSHOTS, **options}
    slots = sizes["max_sequences"] + sizes["snapshots"]
    device = HybridDevice(sizes["blocks"], sizes["block_size"], slots, sizes.get("host_blocks", 0))
    return create_scheduler(**sizes), device


def request(name, prompt, **options):
    """A request of this name and prompt."""
    (made,) = create_requests(tuple(prompt), **options)
    return replace(made, id=name)


def submit(scheduler, device, *requests):
    for each in requests:
        device.expect(each)
        scheduler.add(each)


def step(scheduler, device, now=0.0):
    """Plan and run a step. Returns its plan."""
    plan = scheduler.schedule(now)
    device.submit(plan)
    scheduler.update(plan, device.collect(), now)
    check_hybrid(scheduler)
    return plan


def run(scheduler, device, *requests):
    """Run these requests to their end. Returns the plans."""
    submit(scheduler, device, *requests)
    plans = []
    while scheduler.has_work():
        plans.append(step(scheduler, device))
    return plans


def test_the_next_turn_computes_only_its_new_tokens():
    scheduler, device = create()
    run(scheduler, device, request("a", range(10), max_tokens=4))
    prompt = (*device.streams["a"], 50, 51)
    plans = run(scheduler, device, request("b", prompt, max_tokens=1))
    assert spans(plans[0]) == [("b", 13, 16)], "the answer's last token was never computed"
    stats = scheduler.stats()
    assert (stats.prefix_hits, stats.snapshot_hits, stats.snapshot_tokens) == (13, 1, 13)
    assert (stats.snapshots_total, stats.snapshots_saved, stats.snapshots_dropped) == (SNAPSHOTS, 2, 0)


def test_tokens_found_on_the_host_are_no_more_than_those_found():
    scheduler, device = create(blocks=5, host_blocks=12)
    run(scheduler, device, request("a", range(10), max_tokens=1))
    for name in "bcd":  # they take the blocks of the first one
        run(scheduler, device, request(name, [ord(name)] * 19, max_tokens=1))
    run(scheduler, device, request("e", range(11), max_tokens=1))
    assert scheduler.stats().prefix_hits == scheduler.stats().prefix_hits_on_host == 10


def test_the_state_of_an_ended_sequence_is_saved_before_its_row_is_given_on():
    scheduler, device = create(max_sequences=1)
    submit(scheduler, device, request("a", range(9), max_tokens=1), request("b", range(100, 105), max_tokens=1))
    step(scheduler, device)
    plan = step(scheduler, device)
    assert plan.part(StatePlan) == StatePlan(saves=(StateCopy(0, 1),), starts=(StateCopy(-1, 0),))
    assert spans(plan) == [("b", 0, 5)]


def test_the_third_request_with_a_prefix_starts_where_the_second_left_its_state():
    scheduler, device = create()
    prefix = tuple(range(12))
    run(scheduler, device, request("a", (*prefix, 20, 21), max_tokens=1))
    second = run(scheduler, device, request("b", (*prefix, 30, 31), max_tokens=1))
    assert [spans(plan) for plan in second] == [[("b", 0, 12)], [("b", 12, 14)]]
    third = run(scheduler, device, request("c", (*prefix, 40, 41), max_tokens=1))
    assert [spans(plan) for plan in third] == [[("c", 12, 14)]]


def waiting(scheduler):
    return {each.id: each.reason for each in report_queues(scheduler.queues, 9).first}


def test_of_requests_with_one_new_prefix_at_once_two_compute_it_and_the_others_wait():
    scheduler, device = create()
    prefix = tuple(range(12))
    requests = [request(name, (*prefix, number, number), max_tokens=1) for number, name in enumerate("abcd", 20)]
    submit(scheduler, device, *requests)
    assert spans(step(scheduler, device)) == [("a", 0, 14), ("b", 0, 12)]
    assert waiting(scheduler) == {"c": "shared prefix", "d": "shared prefix"} and "shared prefix" in REASONS
    assert spans(step(scheduler, device)) == [("b", 12, 14), ("c", 12, 14), ("d", 12, 14)]
    assert scheduler.stats().tokens_computed == 14 + 12 + 3 * 2


def test_requests_stop_waiting_for_a_prefix_when_the_one_that_computes_it_ends():
    scheduler, device = create(budget=18)
    prefix = tuple(range(12))
    requests = [request(name, (*prefix, number, number), max_tokens=1) for number, name in enumerate("abc", 20)]
    submit(scheduler, device, *requests)
    assert spans(step(scheduler, device)) == [("a", 0, 14), ("b", 0, 4)]
    submit(scheduler, device, request("d", (*prefix, 40), max_tokens=1))
    assert waiting(scheduler)["d"] == "shared prefix"
    scheduler.abort("b")
    assert spans(step(scheduler, device)) == [("c", 4, 12)], "it goes on from the state that the other one leaves"
    assert waiting(scheduler) == {"d": "shared prefix"}
    assert spans(step(scheduler, device)) == [("c", 12, 14), ("d", 12, 13)]


def test_a_request_that_is_aborted_while_it_waits_for_a_prefix_is_forgotten():
    scheduler, device = create()
    prefix = tuple(range(12))
    requests = [request(name, (*prefix, number, number), max_tokens=1) for number, name in enumerate("abc", 20)]
    submit(scheduler, device, *requests)
    step(scheduler, device)
    scheduler.abort("c")
    run(scheduler, device)
    assert not scheduler.has_work() and scheduler.stats().waiting == 0


def test_nobody_waits_for_a_request_of_lower_rank():
    scheduler, device = create(budget=6)
    prefix = tuple(range(12))
    run(scheduler, device, request("a", (*prefix, 20), max_tokens=1))
    submit(scheduler, device, request("b", (*prefix, 30), max_tokens=1, priority=1))
    assert spans(step(scheduler, device)) == [("b", 0, 6)]
    submit(scheduler, device, request("c", (*prefix, 40), max_tokens=1))
    assert waiting(scheduler) == {"c": "budget"}


def test_a_plan_has_one_segment_for_a_row_however_large_its_budget():
    scheduler, device = create(budget=100)
    prefix = tuple(range(12))
    run(scheduler, device, request("a", prefix, max_tokens=1))
    submit(scheduler, device, request("b", (*prefix, 30), max_tokens=2), request("c", (*prefix, 31), max_tokens=2))
    while scheduler.has_work():
        plan = step(scheduler, device)
        assert len({segment.row for segment in plan.segments}) == len(plan.segments)


def test_a_preempted_sequence_goes_on_from_its_state():
    scheduler, device = create(blocks=6, host_blocks=12)
    submit(scheduler, device, *(request(name, [ord(name)] * 8, max_tokens=8) for name in "ab"))
    plans = []
    while scheduler.has_work():
        plans.append(step(scheduler, device))
    (at,) = [index for index, plan in enumerate(plans) if plan.preempted]
    assert plans[at].preempted == ("b",) and len(plans[at].part(StatePlan).saves) == 1
    again = [span for plan in plans[at:] for span in spans(plan) if span[0] == "b"]
    assert again[0][1] > 8, "its prompt is not computed again"


def test_an_abort_keeps_the_state_for_the_next_turn():
    scheduler, device = create()
    submit(scheduler, device, request("a", range(10), max_tokens=9))
    for _ in range(3):
        step(scheduler, device)
    scheduler.abort("a")
    check_hybrid(scheduler)
    (plan,) = run(scheduler, device, request("b", (*device.streams["a"], 50), max_tokens=1))
    assert spans(plan) == [("b", 12, 14)]


def test_another_tenant_computes_everything():
    scheduler, device = create()
    run(scheduler, device, request("a", range(10), max_tokens=1))
    plans = run(scheduler, device, request("b", range(12), max_tokens=1, identity=Identity(tenant="other")))
    assert spans(plans[0]) == [("b", 0, 12)]


def test_a_request_that_may_not_use_kept_state_starts_with_zeros():
    scheduler, device = create()
    run(scheduler, device, request("a", range(10), max_tokens=1))
    scheduler.add(request("b", range(12), max_tokens=1, prompt_logprobs=0))
    plan = scheduler.schedule(0.0)
    assert spans(plan) == [("b", 0, 12)] and plan.part(StatePlan).starts == (StateCopy(-1, plan.segments[0].row),)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_state_with_the_end_token_is_right_whatever_the_steps_in_flight(in_flight):
    scheduler, device = create()
    first = request("a", range(6), max_tokens=30, stop_token_ids=tuple(range(25)))
    submit(scheduler, device, first)
    plans = []
    while scheduler.has_work():
        while len(plans) < in_flight and (plan := scheduler.schedule(0.0)) is not None:
            device.submit(plan)
            plans.append(plan)
        scheduler.update(plans.pop(0), device.collect(), 0.0)
    for plan in plans:
        scheduler.update(plan, device.collect(), 0.0)
    stream = device.streams["a"][: len(device.streams["a"]) - (in_flight - 1)]
    (plan,) = run(scheduler, device, request("b", (*stream, 49), max_tokens=1))
    assert spans(plan) == [("b", len(stream) - (in_flight == 1), len(stream) + 1)]
