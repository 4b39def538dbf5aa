"""MovePart at the scheduler's hooks: a mark is passed once the copies of all plans before it are complete."""

from holdfast.lm.parts.moves.planner import MovePart
from tests.scheduling import answer, create_requests, create_scheduler


def engine():
    part = MovePart()
    scheduler = create_scheduler(parts=[part], host_blocks=16)
    (request,) = create_requests(12, max_tokens=3)
    scheduler.add(request)
    return part, scheduler


def test_nothing_planned_is_nothing_to_wait_for():
    part, _ = engine()
    assert part.passed(part.barrier())
    assert not part.has_work and not part.wants_step


def test_a_mark_is_passed_when_the_copies_from_the_host_of_all_plans_before_it_are_complete():
    part, scheduler = engine()
    plans = [scheduler.schedule(0.0) for _ in range(2)]
    mark = part.barrier()
    later = scheduler.schedule(0.0)
    scheduler.update(plans[0], answer(plans[0]), 0.0)
    assert not part.passed(mark)
    scheduler.update(plans[1], answer(plans[1], swapped_in=0), 0.0)
    assert not part.passed(mark), "its own copies are still under way"
    scheduler.update(later, answer(later, swapped_in=1), 0.0)
    assert part.passed(mark)


def test_plans_without_segments_are_made_until_the_mark_is_passed_and_none_after():
    part, scheduler = engine()
    plan = scheduler.schedule(0.0)
    mark = part.barrier()
    scheduler.abort("0")
    scheduler.update(plan, answer(plan, swapped_in=-1), 0.0)
    assert scheduler.has_work() and not part.passed(mark)
    plan = scheduler.schedule(0.0)
    assert not plan.segments
    assert scheduler.schedule(0.0) is None, "one in flight says as much as two"
    scheduler.update(plan, answer(plan), 0.0)
    assert part.passed(mark) and not scheduler.has_work() and scheduler.schedule(0.0) is None


def test_a_mark_that_was_passed_stays_passed():
    part, scheduler = engine()
    plans = [scheduler.schedule(0.0) for _ in range(2)]
    mark = part.barrier()
    scheduler.update(plans[0], answer(plans[0], swapped_in=1), 0.0)
    assert part.passed(mark)
    scheduler.update(plans[1], answer(plans[1], swapped_in=-1), 0.0)
    assert part.passed(mark) and not part.wants_step


def test_plans_without_segments_are_made_until_copies_to_the_host_are_known_to_be_complete():
    part, scheduler = engine()
    plan = scheduler.schedule(0.0)
    scheduler.abort("0")
    scheduler.update(plan, answer(plan, swapped_out=plan.step - 1), 0.0)
    part.await_copies()
    assert part.wants_step and scheduler.has_work(), "the plan that began them has ended, and they have not"
    plan = scheduler.schedule(0.0)
    assert not plan.segments
    scheduler.update(plan, answer(plan), 0.0)
    assert not part.has_work and not scheduler.has_work()
