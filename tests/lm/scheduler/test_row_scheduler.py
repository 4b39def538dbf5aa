"""Preemption and scaling of padded rows, and states that the device loses, by hand."""

from dataclasses import replace

import pytest

from holdfast.core.types import FinishReason
from holdfast.lab.row_schedulers import RunToCompletion
from holdfast.lm.scheduler.policies import StallFree
from holdfast.lm.scheduler.row_kind import TRIES
from holdfast.lm.scheduler.row_policies import Embedding
from holdfast.lm.types import RowPlan, RowResult, StepResult, TierCopied
from tests.padded_rows import FakeRows, check_rows, create_row_scheduler, forwards_of, moves_of, shape_of_rows
from tests.scheduling import answer, create_requests, run_alone


def one_step(scheduler, now=0.0):
    plan = scheduler.schedule(now)
    scheduler.update(plan, answer(plan), now)
    check_rows(scheduler)
    return plan


def add(scheduler, *prompts, first=0, **options):
    for request in create_requests(*[1] * first, *prompts, **options)[first:]:
        scheduler.add(request)


def kinds(plan):
    return [move.kind for move in plan.part(RowPlan).moves]


def lost(plan, *names):
    """A result in which these sequences lost their states, and all others got a token."""
    counts = tuple(0 if segment.sequence_id in names else 1 for segment in plan.segments if segment.sampling)
    return StepResult(
        plan.step,
        (7,) * sum(counts),
        0.0,
        counts=counts,
        copied=TierCopied(swapped_out=plan.step, swapped_in=plan.step),
        parts=(RowResult(lost=names),),
    )


@pytest.mark.parametrize("policy", [StallFree(64), Embedding(300)])
def test_an_urgent_request_takes_the_row_of_a_lower_class_and_runs_in_the_next_step(policy):
    ahead = 2 if isinstance(policy, Embedding) else 0
    scheduler = create_row_scheduler(policy, shape=shape_of_rows(host=100), max_sequences=1, prefill_ahead=ahead)
    add(scheduler, 5, priority=1, max_tokens=9)
    one_step(scheduler), one_step(scheduler)
    add(scheduler, 3, first=1, max_tokens=2)
    plan = one_step(scheduler)
    assert any(segment.sequence_id == "1" and segment.start == 0 for segment in plan.segments)
    plan, before = one_step(scheduler), plan
    assert forwards_of(plan)[0] == ("batch", [("1", 3, 4)], ())
    assert "0" in before.preempted + plan.preempted
    assert "store" in kinds(before) + kinds(plan)


def test_an_interrupted_row_comes_back_when_the_urgent_one_has_ended_with_nothing_computed_again():
    scheduler = create_row_scheduler(shape=shape_of_rows(host=100), max_sequences=1)
    add(scheduler, 5, priority=1, max_tokens=9)
    one_step(scheduler), one_step(scheduler)
    add(scheduler, 3, first=1, max_tokens=2)
    plan = one_step(scheduler)
    assert moves_of(plan) == [(0, "store", 0, 0, 6)]
    one_step(scheduler)
    plan = one_step(scheduler)
    assert forwards_of(plan) == [("batch", [("0", 6, 7)], ())]
    assert plan.segments[0].tokens == (7,), "the row does not hold the token any more"
    assert moves_of(plan)[-3:] == [(0, "load", 0, 0, 6), (0, "forget", -1, 0, 0), (0, "embed", 0, -1, 6)]
    assert scheduler.stats().suspensions == 1


def test_an_interrupted_row_is_computed_again_where_the_host_has_no_memory():
    scheduler = create_row_scheduler(max_sequences=1)
    add(scheduler, 5, priority=1, max_tokens=9)
    one_step(scheduler), one_step(scheduler)
    add(scheduler, 3, first=1, max_tokens=2)
    assert kinds(one_step(scheduler)) == ["drop"]
    one_step(scheduler)
    assert forwards_of(one_step(scheduler)) == [("apart", [("0", 0, 7)], ())]


def test_the_longest_row_of_the_last_class_leaves_when_the_batch_would_exceed_its_threshold():
    """Rows of 10, 20 and 12 positions: three of 21 fit 66, and three of 23 do not."""
    scheduler = create_row_scheduler(shape=shape_of_rows(66))
    add(scheduler, 10, 20, 12, max_tokens=30)
    one_step(scheduler), one_step(scheduler), one_step(scheduler)
    plan = one_step(scheduler)
    assert plan.preempted == ("1",)
    assert [segment.sequence_id for segment in plan.segments] == ["0", "2"]


def test_the_first_in_rank_stays_and_may_use_all_the_memory():
    scheduler = create_row_scheduler(shape=shape_of_rows(40), threshold=0.5)
    add(scheduler, 4, 2, max_tokens=25)
    served = []
    while scheduler.has_work() and len(served) < 60:
        plan = one_step(scheduler)
        assert "0" not in plan.preempted
        served.append(plan)
    assert not scheduler.has_work()
    assert scheduler.stats().preemptions > 0


def test_the_batch_shrinks_above_the_threshold_and_grows_again_below_it():
    shape = shape_of_rows(200, host=1000)
    scheduler = create_row_scheduler(shape=shape, threshold=0.9, headroom=0.1, max_sequences=8)
    device = FakeRows(shape, most_rows=8)
    requests = create_requests(*[6] * 8, max_tokens=40)
    requests += create_requests(*[1] * 8, *[3] * 8, max_tokens=6)[8:]
    for request in requests:
        scheduler.add(request)
        device.expect(request)
    given, rows = {}, []
    for now in range(1000):
        plan = scheduler.schedule(float(now))
        if plan is None:
            break
        device.submit(plan)
        for output in scheduler.update(plan, device.collect(), float(now)):
            given.setdefault(output.request_id, []).extend(output.tokens)
        rows.append(len(device.batch))
    full = rows.index(8)
    least = min(rows[full : full + 40])
    assert least < 6, "eight rows of 46 positions are twice the memory"
    assert max(rows[full + 40 :]) > least + 1, "more short rows fit"
    assert scheduler.stats().shrinks == 0, "no memory ran out"
    assert {name: tuple(tokens) for name, tokens in given.items()} == {
        request.id: run_alone(request)[0] for request in requests
    }


def test_a_lost_sequence_is_computed_again_from_its_known_tokens_with_less_memory():
    scheduler = create_row_scheduler(shape=shape_of_rows(1000))
    add(scheduler, 5, 9, max_tokens=6)
    one_step(scheduler)
    plan = scheduler.schedule(0.0)
    assert not list(scheduler.update(plan, lost(plan, "0", "1"), 0.0))
    check_rows(scheduler)
    assert (scheduler.stats().shrinks, scheduler.stats().waiting) == (1, 2)
    plan = scheduler.schedule(0.0)
    assert forwards_of(plan) == [("apart", [("0", 0, 6), ("1", 0, 10)], ())]
    assert plan.part(RowPlan).moves == (), "the device has dropped the states itself"


def test_plans_in_flight_give_no_token_for_a_lost_sequence():
    scheduler = create_row_scheduler()
    add(scheduler, 5, 9, max_tokens=6)
    one_step(scheduler)
    plans = [scheduler.schedule(0.0), scheduler.schedule(0.0)]
    scheduler.update(plans[0], lost(plans[0], "1"), 0.0)
    again = scheduler.schedule(0.0)
    assert ("1", 0, 10) in [(segment.sequence_id, segment.start, segment.stop) for segment in again.segments]
    (output,) = scheduler.update(plans[1], replace(lost(plans[1], "1"), parts=(RowResult(lost=()),)), 0.0)
    assert output.request_id == "0"
    outputs = scheduler.update(again, answer(again), 0.0)
    assert {output.request_id for output in outputs} == {"0", "1"}


def test_a_missing_token_of_a_sequence_that_was_not_lost_is_an_error():
    scheduler = create_row_scheduler()
    add(scheduler, 5, 9, max_tokens=6)
    plan = scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match="2 sampled tokens is due"):
        scheduler.update(plan, replace(lost(plan, "1"), parts=(RowResult(lost=("0",)),)), 0.0)


def test_a_lost_row_of_an_ended_sequence_is_free_again():
    scheduler = create_row_scheduler(RunToCompletion(300), max_sequences=2)
    for request, most in zip(create_requests(5, 9), (1, 8), strict=True):
        scheduler.add(replace(request, params=replace(request.params, max_tokens=most)))
    one_step(scheduler)
    plan = scheduler.schedule(0.0)
    assert forwards_of(plan) == [("batch", [("1", 9, 10)], (0,))]
    scheduler.update(plan, lost(plan, "0", "1"), 0.0)
    check_rows(scheduler)
    plan = scheduler.schedule(0.0)
    assert forwards_of(plan) == [("batch", [("1", 0, 10)], ())]


def test_a_sequence_that_does_not_even_fit_alone_ends_there():
    scheduler = create_row_scheduler()
    add(scheduler, 5, max_tokens=6)
    one_step(scheduler)
    for number in range(TRIES):
        plan = scheduler.schedule(0.0)
        outputs = list(scheduler.update(plan, lost(plan, "0"), 0.0))
        assert len(outputs) == (number == TRIES - 1)
    assert (outputs[0].tokens, outputs[0].finish_reason) == ((), FinishReason.LENGTH)
    assert not scheduler.has_work()


def test_an_aborted_row_leaves_before_the_next_forward():
    scheduler = create_row_scheduler()
    add(scheduler, 5, 9, max_tokens=6)
    one_step(scheduler), one_step(scheduler)
    scheduler.abort("0")
    plan = scheduler.schedule(0.0)
    assert moves_of(plan) == [(0, "drop", 0, -1, 0)]
    assert forwards_of(plan) == [("batch", [("1", 10, 11)], ())]


def test_a_row_that_samples_its_last_token_in_flight_leaves_the_batch_at_once():
    scheduler = create_row_scheduler()
    add(scheduler, 5, 9, max_tokens=2)
    one_step(scheduler)
    first = scheduler.schedule(0.0)
    assert scheduler.schedule(0.0) is None, "nothing of them is left to compute"
    assert {output.finish_reason for output in scheduler.update(first, answer(first), 0.0)} == {FinishReason.LENGTH}


def test_stats_count_forwards_and_idle_tokens():
    scheduler = create_row_scheduler()
    add(scheduler, 8, 10, max_tokens=3)
    one_step(scheduler), one_step(scheduler)
    stats = scheduler.stats()
    assert (stats.forwards, stats.idle_tokens, stats.tokens_computed) == (2, 2, 20)
    assert (stats.rows_wide, stats.blocks_used, stats.running) == (11, 22, 2)
