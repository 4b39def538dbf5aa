"""Ranked queues stay in order, whatever comes and goes."""

import random
from types import SimpleNamespace

from holdfast.lm.scheduler.entries import RankedQueue


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
