"""PenaltyPart: the device gets the tokens of a row once, and again after a preemption."""

import pytest

from holdfast.core.types import ThinkingBudget
from holdfast.lm.types.penalties import PenaltyPlan
from tests.padded_rows import create_row_scheduler
from tests.scheduling import answer, create_requests, create_scheduler


def histories(plan):
    return [each.tokens for each in plan.part(PenaltyPlan).histories]


def test_a_history_is_sent_with_the_first_segment_that_samples():
    scheduler = create_scheduler(budget=3)
    (request,) = create_requests((1, 2, 3, 4, 5), presence_penalty=0.5)
    scheduler.add(request)
    plans = [scheduler.schedule(0.0) for _ in range(3)]
    assert [histories(plan) for plan in plans] == [[], [(1, 2, 3, 4, 5)], []]


def test_a_history_is_sent_again_after_a_preemption():
    scheduler = create_scheduler(blocks=4, block_size=2)
    asking, other = create_requests((1, 2, 3), (4, 5, 6), max_tokens=4, presence_penalty=0.5)
    for request in (other, asking):
        scheduler.add(request)
    sent = []
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        sent += [history for history in histories(plan) if history[0] == 1]
        scheduler.update(plan, answer(plan), 0.0)
    assert scheduler.stats().preemptions and sent == [(1, 2, 3), (1, 2, 3, 7, 7)]


def test_a_history_is_sent_with_every_step_of_padded_rows():
    scheduler = create_row_scheduler()
    (request,) = create_requests((1, 2, 3), presence_penalty=0.5)
    scheduler.add(request)
    plan = scheduler.schedule(0.0)
    assert histories(plan) == [(1, 2, 3)]
    scheduler.update(plan, answer(plan), 0.0)
    assert histories(scheduler.schedule(0.0)) == [(1, 2, 3, 7)]


@pytest.mark.parametrize(
    "reads",
    [{"thinking": ThinkingBudget(9, 5, 6, opened=True)}, {"bad_words": ((5, 6),)}],
    ids=["thinking", "bad words"],
)
def test_a_draw_that_reads_the_answer_alone_needs_only_the_end_of_the_prompt(reads):
    scheduler = create_scheduler(blocks=4, block_size=2)
    asking, other = create_requests((1, 2, 3), (4, 5, 6), max_tokens=4, **reads)
    for request in (other, asking):
        scheduler.add(request)
    sent = []
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        sent += [history for history in histories(plan) if history[0] == 3]
        scheduler.update(plan, answer(plan), 0.0)
    assert scheduler.stats().preemptions and sent == [(3,), (3, 7, 7)]


def test_nothing_is_sent_for_a_request_without_penalties():
    scheduler = create_scheduler()
    for request in create_requests(3, 4):
        scheduler.add(request)
    assert not scheduler.schedule(0.0).parts
