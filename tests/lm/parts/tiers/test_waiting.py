"""Sequences that wait for blocks of the disk: when they ask, what is held for them, and that they ask again."""

from holdfast.lm.parts.tiers.planner import TierPart
from holdfast.lm.tiers import LowerShape, StoredBlock, TierDone
from tests.scheduling import answer, create_requests, create_scheduler


def with_disk(request):
    """A scheduler whose disk has all full blocks of a request, which waits. Returns it and their digests."""
    plain = create_scheduler(host_blocks=16, lower=LowerShape(1 << 22, 8))
    plain.add(request)
    kept = plain.entries[request.id].cache.digests
    stored = tuple(StoredBlock(slot, digest, slot, 1.0) for slot, digest in enumerate(kept))
    lower = LowerShape(1 << 22, 8, stored)
    scheduler = create_scheduler(blocks=16, host_blocks=16, low_water=1.0, lower=lower)
    scheduler.add(request)
    return scheduler, kept


def fetch(scheduler, now):
    """Let the jobs that have begun end well."""
    jobs = scheduler.part(TierPart).jobs(now)
    scheduler.part(TierPart).done([TierDone(job.number, ("done",) * len(job.blocks), 0.0) for job in jobs], now)
    return jobs


def step(scheduler, now):
    """Make the next plan and apply its result; the plan."""
    plan = scheduler.schedule(now)
    if plan is not None:
        scheduler.update(plan, answer(plan), now)
    return plan


def test_a_sequence_waits_for_its_blocks_and_starts_with_them():
    scheduler, kept = with_disk(*create_requests(13))
    assert step(scheduler, 0.0) is None and scheduler.part(TierPart).awaited
    assert [block.digest for job in fetch(scheduler, 0.0) for block in job.blocks] == [*kept]
    assert step(scheduler, 0.1).segments and not scheduler.part(TierPart).awaited
    assert scheduler.stats().prefix_hits_on_disk == 12


def test_a_preempted_sequence_asks_again_for_what_has_left_the_device_and_the_host():
    scheduler, kept = with_disk(*create_requests(13))
    step(scheduler, 0.0)
    fetch(scheduler, 0.0)
    for now in (0.1, 0.2):
        step(scheduler, now)
    scheduler.queues.preempt(scheduler.entries["0"], 0.3)
    pool = scheduler.queues.pool
    for number in range(100, 103):  # a block of it in each plan
        pool.swap_out(number, 0, 0.3)
        pool.finish_swap_out(number)
    pool.free(pool.allocate(pool.num_blocks, 0.3), 0.3)
    for digest in kept:
        pool.host.drop(digest)
    step(scheduler, 0.4)
    assert scheduler.part(TierPart).awaited, "the disk still has them"
    assert fetch(scheduler, 0.4)
    assert step(scheduler, 0.5).segments
    assert scheduler.stats().prefix_hits_on_disk == 12, "they count at its first start alone"


def test_what_was_held_for_a_sequence_is_given_back_when_it_is_aborted_while_it_waits():
    scheduler, _ = with_disk(*create_requests(13))
    step(scheduler, 0.0)
    scheduler.abort("0")
    assert not scheduler.part(TierPart).awaited
    fetch(scheduler, 0.1)
    assert scheduler.queues.pool.host.held == 0 and not scheduler.has_work()
