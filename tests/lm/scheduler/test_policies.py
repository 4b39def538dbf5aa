"""Stall-free batching: decodes, then started prefills, then new requests."""

import pytest

from holdfast.lab.schedulers import Orca, PrefillFirst, RequestLevel
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


@pytest.mark.parametrize(
    ("policy", "following"),
    [
        (StallFree(6), ["ABC", "ABC", "ABCD", "ABCD"]),
        (Orca(64), ["ABCD", "ABCD", "ABCD", "ABCD"]),
        (PrefillFirst(64), ["CD", "ABCD", "ABCD", "ABCD"]),
        (RequestLevel(64), ["AB", "AB", "AB", "AB"]),
    ],
)
def test_two_prompts_join_two_decodes_as_in_figure_4_of_sarathi_serve(policy, following):
    scheduler = create_scheduler(policy=policy)
    requests = create_requests(2, 2, 8, 4, max_tokens=20)
    for request in requests[:2]:
        scheduler.add(request)
    steps = []
    for _ in range(2 + len(following)):
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, answer(plan), 0.0)
        steps.append("".join("ABCD"[int(name)] for name, _, _ in spans(plan)))
        if len(steps) == 2:
            for request in requests[2:]:
                scheduler.add(request)
    assert steps == ["AB", "AB", *following]
