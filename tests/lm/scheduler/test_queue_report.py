"""A report on the queues: each waiting request has the reason for which it waits."""

from dataclasses import replace

from holdfast.core.types import Identity
from holdfast.lm.parts.adapters.planner import AdapterPart
from holdfast.lm.parts.adapters.pool import AdapterPool
from holdfast.lm.parts.tiers.planner import TierPart
from holdfast.lm.scheduler.queue_report import REASONS, RunningRequest, report_queues
from holdfast.lm.tiers import LowerShape, StoredBlock
from tests.scheduling import answer, create_requests, create_scheduler


def reasons(scheduler):
    found = {each.id: each.reason for each in report_queues(scheduler.queues, 8).first}
    assert set(found.values()) <= set(REASONS)
    return found


def started(*prompts, max_tokens=8, **options):
    """A scheduler after its first step."""
    scheduler = create_scheduler(block_size=4, **options)
    for request in create_requests(*prompts, max_tokens=max_tokens):
        scheduler.add(request)
    step(scheduler)
    return scheduler


def step(scheduler, **options):
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, answer(plan, **options), 0.0)


def test_a_request_waits_for_a_row_and_those_behind_it_for_their_turn():
    scheduler = started(5, 5, 5, max_sequences=1)
    assert reasons(scheduler) == {"1": "no row", "2": "order"}


def test_a_request_waits_for_blocks():
    scheduler = started(20, 30, blocks=10)
    assert reasons(scheduler) == {"1": "no blocks"}


def test_a_request_waits_for_the_budget():
    scheduler = started(60, 5, budget=8)
    assert reasons(scheduler) == {"1": "budget"}


def test_a_request_waits_until_idle_state_is_copied_to_the_host_to_make_room():
    scheduler = create_scheduler(block_size=4, blocks=16, host_blocks=32)
    first, second, third = create_requests(40, 44, 5, max_tokens=1)
    for request in (first, second):
        scheduler.add(request)
        while scheduler.has_work():
            step(scheduler)
    scheduler.add(replace(third, params=replace(third.params, max_tokens=9)))
    step(scheduler)
    scheduler.add(replace(first, id="again"))
    step(scheduler)
    assert reasons(scheduler) == {"again": "copies under way"}
    assert report_queues(scheduler.queues, 8).waiting == 1


def test_a_request_waits_for_its_adapter():
    served = Identity("m")
    adapters = AdapterPart(AdapterPool(1))
    scheduler = create_scheduler(served=served, parts=[adapters])
    adapters.add("a@1")
    plain, adapted = create_requests(5, 5, identity=served)
    scheduler.add(plain)
    scheduler.add(replace(adapted, identity=replace(served, adapter="a@1")))
    step(scheduler)
    assert reasons(scheduler) == {"1": "adapter loading"}


def test_running_requests_tell_how_far_they_are():
    scheduler = started(20, budget=8)
    assert report_queues(scheduler.queues, 8).rows == (RunningRequest("0", 8, 20, 20),)
    step(scheduler)
    step(scheduler)
    assert report_queues(scheduler.queues, 8).rows == (RunningRequest("0", 20, 21, 20),)


def test_a_look_changes_no_plan():
    plans = []
    for looks in (False, True):
        scheduler = create_scheduler(block_size=4, blocks=12, host_blocks=8, max_sequences=3)
        for request in create_requests(20, 30, 18, 9, 14, max_tokens=6):
            scheduler.add(request)
        made = []
        while scheduler.has_work():
            if looks:
                report_queues(scheduler.queues, 8)
            plan = scheduler.schedule(0.0)
            made.append(plan)
            scheduler.update(plan, answer(plan), 0.0)
        plans.append(made)
    assert plans[0] == plans[1]


def test_a_request_waits_for_what_the_disk_has_of_it():
    (request,) = create_requests(13)
    plain = create_scheduler(block_size=4, host_blocks=16, sharing=True, lower=LowerShape(1 << 22, 8))
    plain.add(request)
    kept = plain.entries["0"].cache.digests
    stored = tuple(StoredBlock(slot, digest, slot, 1.0) for slot, digest in enumerate(kept))
    scheduler = create_scheduler(block_size=4, host_blocks=16, sharing=True, lower=LowerShape(1 << 22, 8, stored))
    scheduler.add(request)
    scheduler.part(TierPart).jobs(0.0)
    scheduler.schedule(0.0)
    assert reasons(scheduler) == {"0": "fetching"}


def test_a_preempted_request_waits_for_its_results_in_flight():
    scheduler = create_scheduler(block_size=4, blocks=2)
    for request in create_requests(4, 4):
        scheduler.add(request)
    scheduler.schedule(0.0)
    scheduler.schedule(0.0)
    scheduler.abort("0")
    assert reasons(scheduler) == {"1": "results in flight"}


def test_a_report_counts_all_and_lists_the_first_of_each_kind_with_its_size_and_arrival():
    scheduler = create_scheduler(max_sequences=3, budget=256)
    for number, request in enumerate(create_requests(*[5] * 7)):
        scheduler.add(replace(request, arrival=float(number)))
    step(scheduler)
    report = report_queues(scheduler.queues, 2)
    assert (report.waiting, report.running, report.free_rows) == (4, 3, 0)
    assert [(each.id, each.tokens, each.arrival) for each in report.first] == [("3", 5, 3.0), ("4", 5, 4.0)]
    assert [each.id for each in report.rows] == ["0", "1"]


def test_the_headroom_of_running_sequences_counts_where_blocks_are_short():
    scheduler = started(20, 16, blocks=10, headroom=0.2)
    assert scheduler.stats().blocks_used == 5
    assert reasons(scheduler) == {"1": "no blocks"}, "5 are free, 2 of them are set aside"
    scheduler.abort("0")
    assert reasons(scheduler) == {"1": "budget"}, "it starts with the next step"


def test_a_sequence_whose_state_is_coming_back_waits_for_its_copies_and_has_a_row():
    scheduler = create_scheduler(block_size=4, blocks=16, host_blocks=32, max_sequences=4)
    first, second, third = create_requests(24, 40, 5, max_tokens=1)
    for request in (first, second):
        scheduler.add(request)
        while scheduler.has_work():
            step(scheduler)
    scheduler.add(replace(third, params=replace(third.params, max_tokens=9)))
    step(scheduler)
    scheduler.add(replace(first, id="again"))
    for _ in range(9):
        plan = scheduler.schedule(0.0)
        if plan.copies.swap_in:
            break
        scheduler.update(plan, answer(plan), 0.0)
    report = report_queues(scheduler.queues, 8)
    assert [(each.id, each.reason) for each in report.first] == [("again", "copies under way")]
    assert (report.waiting, report.running, report.free_rows) == (1, 1, 2)
