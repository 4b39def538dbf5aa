"""Ranked queues stay in order under any changes, and resumed sequences begin anew."""

import random
from types import SimpleNamespace

from holdfast.lm.scheduler.entries import RankedQueue
from tests.scheduling import answer, create_requests, create_scheduler


def test_a_ranked_queue_stays_in_order_under_random_changes():
    choose = random.Random(0)
    queue, held = RankedQueue(), []
    for number in range(500):
        if held and choose.random() < 0.45:
            entry = choose.choice(held)
            held.remove(entry)
            queue.remove(entry)
        else:
            entry = SimpleNamespace(rank=(choose.randrange(3), number))
            held.append(entry)
            queue.add(entry)
        held.sort(key=lambda entry: entry.rank)
        assert list(queue) == held
        assert list(reversed(queue)) == held[::-1]
        assert not held or queue.last() is held[-1]
        assert queue.first() is (held[0] if held else None)
        assert len(queue) == len(held)


def test_a_sequence_that_resumes_is_planned_no_further_than_its_new_blocks_reach():
    scheduler = create_scheduler(block_size=4)
    scheduler.add(create_requests(9, max_tokens=16)[0])
    entry = scheduler.entries["0"]

    def step():
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, answer(plan), 0.0)

    step()
    for _ in range(3):  # as for a draft
        entry.cache.grow(0.0)
    while entry.cache.planned < 14:
        step()
    assert entry.cache.capacity == 24, "it may be planned that far"
    scheduler.queues.preempt(entry, 0.0)
    while scheduler.has_work():
        step()
        assert entry.cache.planned <= entry.cache.capacity
    assert entry.sequence.preemptions == 1 and len(entry.sequence.tokens) == 9 + 16
