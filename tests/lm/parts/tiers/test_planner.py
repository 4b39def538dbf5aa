"""TierPart at the scheduler's hooks: who waits for blocks of the disk, for how long, and that nothing is left held."""

from dataclasses import replace

from holdfast.lm.parts.adapters.planner import AdapterPart
from holdfast.lm.parts.adapters.pool import AdapterPool
from holdfast.lm.parts.tiers.planner import TierPart
from holdfast.lm.tiers import LowerShape, StoredBlock, TierDone
from tests.scheduling import answer, create_requests, create_scheduler, spans


def with_stored_prompt(*prompts):
    requests = create_requests(*prompts)
    shape = LowerShape(1 << 22, 8)
    plain = create_scheduler(host_blocks=16, lower=shape)
    plain.add(requests[0])
    cache = plain._entries["0"].cache
    digests = cache._digests
    stored = tuple(StoredBlock(slot, each, slot, 1.0) for slot, each in enumerate(digests))
    scheduler = create_scheduler(host_blocks=16, lower=LowerShape(1 << 22, 8, stored))
    for request in requests:
        scheduler.add(request)
    return scheduler


def test_others_run_while_a_sequence_waits_for_its_blocks():
    scheduler = with_stored_prompt(13, 6)
    jobs = scheduler.part(TierPart).jobs(0.0)
    plan = scheduler.schedule(0.0)
    assert spans(plan) == [("1", 0, 6)] and scheduler.part(TierPart).awaited
    scheduler.update(plan, answer(plan), 0.1)
    scheduler.part(TierPart).done([TierDone(job.number, ("done",) * len(job.blocks), 0.0) for job in jobs], 0.1)
    plan = scheduler.schedule(0.1)
    assert len(plan.copies.swap_in) == 3 and not scheduler.part(TierPart).awaited
    scheduler.update(plan, answer(plan), 0.2)
    assert spans(scheduler.schedule(0.2))[-1] == ("0", 12, 13), "only what no tier had is computed"
    assert scheduler.stats().prefix_hits_on_disk == 12


def test_a_sequence_waits_no_longer_than_its_deadline():
    scheduler = with_stored_prompt(13)
    scheduler.part(TierPart).jobs(0.0)
    assert scheduler.schedule(4.9) is None
    assert spans(scheduler.schedule(5.0)) == [("0", 0, 13)]
    assert scheduler.stats().fetches_given_up == 1


def test_a_sequence_that_is_aborted_while_it_waits_leaves_nothing_behind():
    scheduler = with_stored_prompt(13)
    jobs = scheduler.part(TierPart).jobs(0.0)
    scheduler.abort("0")
    scheduler.part(TierPart).done([TierDone(job.number, ("done",) * len(job.blocks), 0.0) for job in jobs], 0.1)
    assert not scheduler.has_work() and scheduler._queues.pool.host.held == 0


def all_done(jobs):
    return [TierDone(job.number, ("done",) * len(job.blocks), 0.0) for job in jobs]


def test_a_sequence_that_an_adapter_holds_up_after_its_wait_keeps_what_has_come():
    scheduler = with_stored_prompt(13)
    part, host = scheduler.part(TierPart), scheduler.pool.host
    part.done(all_done(part.jobs(0.0)), 0.1)
    scheduler.queues.release(scheduler.entries["0"], part)
    scheduler.queues.hold(scheduler.entries["0"], AdapterPart(AdapterPool(1)))
    assert host.held == 3
    scheduler.abort("0")
    assert host.held == 0


def test_a_preempted_sequence_asks_again_and_its_figures_stay_those_of_its_first_start():
    scheduler = with_stored_prompt(13)
    part, entry = scheduler.part(TierPart), scheduler.entries["0"]
    part.done(all_done(part.jobs(0.0)), 0.1)
    for now in (0.1, 0.2):
        plan = scheduler.schedule(now)
        scheduler.update(plan, answer(plan), now)
    assert entry.sequence.cached_by_tier == (0, 12, 0)
    scheduler.queues.preempt(entry, 0.3)
    assert part.starting(entry, 0.3) is False, "the device has all of it"
    plan = scheduler.schedule(0.3)
    assert spans(plan) == [("0", 12, 15)]
    assert entry.sequence.cached_by_tier == (0, 12, 0) and scheduler.stats().prefix_hits_on_disk == 12


def test_a_sequence_is_asked_for_once_while_it_waits():
    scheduler = with_stored_prompt(13)
    part, entry = scheduler.part(TierPart), scheduler.entries["0"]
    assert part.awaited and scheduler.queues.held == {entry: part}
    part.done(all_done(part.jobs(0.0)), 0.1)
    part.advance(0.1)
    assert not part.awaited and not part.starting(entry, 0.1)


def test_idle_state_is_copied_down_in_a_pause_and_is_work_only_then():
    scheduler = create_scheduler(host_blocks=16, lower=LowerShape(1 << 22, 8))
    (request,) = create_requests(12, max_tokens=1)
    scheduler.add(request)
    part = scheduler.part(TierPart)
    assert not part.has_work
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, answer(plan), 0.0)
    assert part.has_work and scheduler.has_work()
    scheduler.add(replace(request, id="another"))
    assert not part.has_work, "a request goes first"
    scheduler.abort("another")
    plan = scheduler.schedule(1.0)
    assert len(plan.copies.swap_out) == 3 and not plan.segments
    scheduler.update(plan, answer(plan), 1.0)
    assert not scheduler.has_work()
