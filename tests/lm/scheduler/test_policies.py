"""Stall-free batching: decodes, then started prefills, then new requests."""

import pytest

from holdfast.lm.scheduler.policies import StallFree
from tests.scheduling import answer, create_requests, create_scheduler, spans


def test_decodes_come_first_then_started_prefills_then_new_requests():
    scheduler = create_scheduler(budget=8)
    decoding, started, new = create_requests(6, 10, 5)
    scheduler.add(decoding)
    scheduler.add(started)
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, answer(plan), 0.0)
    assert spans(plan) == [("0", 0, 6), ("1", 0, 2)]
    scheduler.add(new)
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, answer(plan), 0.0)
    assert spans(plan) == [("0", 6, 7), ("1", 2, 9)]
    assert spans(scheduler.schedule(0.0)) == [("0", 7, 8), ("1", 9, 10), ("2", 0, 5)]


def test_a_decode_of_a_lower_class_is_not_stalled_by_a_prefill_of_a_higher_one():
    scheduler = create_scheduler(budget=4)
    low, high = create_requests(2, 20, priority=1)[0], create_requests(2, 20)[1]
    scheduler.add(low)
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, answer(plan), 0.0)
    scheduler.add(high)
    assert spans(scheduler.schedule(0.0)) == [("0", 2, 3), ("1", 0, 3)]


def test_a_budget_of_zero_is_refused():
    with pytest.raises(ValueError, match="token_budget is 0"):
        StallFree(0)
