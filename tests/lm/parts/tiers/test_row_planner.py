"""TierPart on padded rows: who waits for a state of the disk, and that a pause writes what only the device has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.core.types import Identity
from holdfast.lm.memory.row_pool import RowPool
from holdfast.lm.parts.tiers.planner import TierPart
from holdfast.lm.parts.tiers.row_tiers import RowTiers
from holdfast.lm.scheduler.policies import StallFree
from holdfast.lm.scheduler.row_kind import RowKind
from holdfast.lm.scheduler.row_policies import Embedding, Shaping
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.tiers import LowerShape, StoredState, TierDone
from holdfast.lm.types import StepResult, TierCopied
from tests.padded_rows import forwards_of, moves_of, shape_of_rows
from tests.scheduling import create_requests

PIECE = 256


def create(policy, *, states=(), max_sequences=1, ahead=0):
    pool = RowPool(shape_of_rows(1000, host=500))
    tiers = RowTiers(pool, LowerShape(PIECE, disk_blocks=20, states=states), None, 0.0)
    return Scheduler(
        policy,
        RowKind(pool, longest=128, prefill_ahead=ahead),
        (TierPart(tiers),),
        max_sequences=max_sequences,
        max_model_len=128,
        vocab_size=1 << 20,
        headroom=0.0,
        sharing=True,
    )


def one_step(scheduler, now=0.0):
    """Plan a step and apply its result. Returns the plan; None if nothing can run."""
    plan = scheduler.schedule(now)
    if plan is not None:
        copied = TierCopied(swapped_out=plan.step, swapped_in=plan.step)
        scheduler.update(plan, StepResult(plan.step, (7,) * plan.num_sampled, 1.0, copied=copied), now)
    return plan


def finish(scheduler, now=0.0):
    while any(not entry.sequence.ended for entry in scheduler.entries.values()):
        one_step(scheduler, now)


def all_done(jobs):
    return [TierDone(job.number, ("done",) * len(job.blocks), 0.0) for job in jobs]


def written(requests):
    """The states of these requests on a disk."""
    scheduler = create(StallFree(64))
    part = scheduler.part(TierPart)
    for request in requests:
        scheduler.add(request)
    finish(scheduler)
    jobs = []
    while scheduler.has_work():
        one_step(scheduler)
        jobs += part.jobs(0.0)
    return tuple(
        StoredState(job.blocks[0].digest, tuple(block.slot for block in job.blocks), job.state, 1.0) for job in jobs
    )


@pytest.mark.parametrize("policy", [StallFree(64), Shaping(64), Embedding(64)], ids=["mixed", "shaping", "embedding"])
def test_a_sequence_that_waited_for_a_row_waits_for_its_state_before_it_starts(policy):
    first, other, last = create_requests(20, 21, 40, max_tokens=3)
    ahead = isinstance(policy, Embedding)
    scheduler = create(policy, states=written([last]), ahead=int(ahead))
    part = scheduler.part(TierPart)
    for request in (first, other, last):
        scheduler.add(request)
        one_step(scheduler)
    assert not part.awaited, "all rows are taken"
    finish_one(scheduler, other.id)
    assert part.awaited and last.id in scheduler.entries
    (job,) = part.jobs(1.0)
    part.done(all_done([job]), 1.5)
    plan = one_step(scheduler, 1.5)
    assert not part.awaited
    assert any(move[1] == "load" and move[4] == 32 for move in moves_of(plan)), "cut to whole strides"
    assert next(segment[1:] for each in forwards_of(plan) for segment in each[1]) == (32, 40)
    finish(scheduler, 1.5)
    assert scheduler.stats().prefix_hits_on_disk == 32
    assert scheduler.pool.kept.held_bytes == 0


def finish_one(scheduler, name):
    """Run until a request has ended, and plan once more."""
    for _ in range(20):
        one_step(scheduler)
        if name not in scheduler.entries:
            one_step(scheduler)
            return
    raise AssertionError(f"{name} does not end")


def test_others_run_while_a_sequence_waits_for_its_state():
    first, second = create_requests(40, 20, max_tokens=3)
    scheduler = create(StallFree(64), states=written([first]), max_sequences=2)
    part = scheduler.part(TierPart)
    scheduler.add(first), scheduler.add(second)
    assert part.awaited and len(part.jobs(0.0)) == 1
    plan = one_step(scheduler)
    assert [segment.sequence_id for segment in plan.segments] == [second.id]


def test_a_sequence_starts_without_its_state_after_its_deadline():
    (request,) = create_requests(40, max_tokens=3)
    scheduler = create(StallFree(64), states=written([request]))
    scheduler.add(request)
    assert scheduler.schedule(4.9) is None
    assert forwards_of(scheduler.schedule(5.0))[0][1] == [(request.id, 0, 40)]
    assert scheduler.stats().fetches_given_up == 1


def test_an_aborted_sequence_leaves_no_state_held():
    (request,) = create_requests(40, max_tokens=3)
    scheduler = create(StallFree(64), states=written([request]))
    scheduler.add(request)
    part = scheduler.part(TierPart)
    jobs = part.jobs(0.0)
    scheduler.abort(request.id)
    part.done(all_done(jobs), 0.1)
    assert scheduler.pool.kept.held_bytes == 0 and not scheduler.has_work()


def test_a_pause_is_work_until_each_state_of_the_device_is_copied_and_no_longer():
    requests = create_requests(40, 30, max_tokens=2)
    scheduler = create(StallFree(64), max_sequences=2)
    part = scheduler.part(TierPart)
    for request in requests:
        scheduler.add(request)
    assert not part.has_work
    finish(scheduler)
    plan = one_step(scheduler)
    assert not plan.segments and [move[1] for move in moves_of(plan)].count("copy") == 2
    assert part.has_news and not part.has_work
    jobs = part.jobs(0.0)
    assert len(jobs) == 2 and not part.has_news
    part.done(all_done(jobs), 0.0)
    assert not scheduler.has_work() and scheduler.stats().host_blocks_cached == 0


def test_tenants_share_nothing_on_the_disk():
    (request,) = create_requests(40, max_tokens=3)
    scheduler = create(StallFree(64), states=written([request]))
    scheduler.add(replace(request, identity=Identity(tenant="other")))
    assert not scheduler.part(TierPart).awaited
