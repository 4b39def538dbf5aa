"""Stall-free batching: decodes, then started prefills, then new requests."""

import pytest

from holdfast.lab.schedulers import Orca, PrefillFirst, RequestLevel
from holdfast.lm.scheduler.correction import Correction
from holdfast.lm.scheduler.policies import FixedBudget, StallFree, compute_token_budget, reference_step, whole_tiles
from tests.lm.scheduler.test_latency_target import COST
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


def test_the_reference_step_has_32_decodes_of_4096_tokens_and_less_where_the_engine_holds_less():
    assert reference_step(64, 1 << 20) == (32, 4096)
    assert reference_step(8, 1 << 20) == (8, 4096)
    assert reference_step(64, 500) == (32, 500)
    assert reference_step(64, 1 << 20, cache_positions=3200) == (32, 100)
    assert reference_step(8, 1 << 20, cache_positions=3200) == (8, 400)
    assert reference_step(64, 1 << 20, cache_positions=5) == (32, 1), "a decode has a context"


@pytest.mark.whole_product
@pytest.mark.parametrize("target", [0.001, 0.006, 0.009, 0.02, 1.0])
@pytest.mark.parametrize("rows", [4, 64])
def test_the_budget_of_a_target_is_the_most_whole_tiles_whose_full_step_meets_it(target, rows):
    sizes = {"max_sequences": rows, "max_model_len": 300, "cache_positions": 10_000}
    budget = compute_token_budget(COST, target, tile=16, ceiling=250, **sizes)
    decodes, context = reference_step(**sizes)

    def seconds(tokens):
        chunk = max(0, tokens - decodes)
        return COST.step([(1, context)] * decodes + ([(chunk, max(chunk, context))] if chunk else []))

    assert budget % 16 == 0 and 16 <= budget <= 240
    assert seconds(budget) <= target or budget == 16
    assert budget == 240 or seconds(budget + 16) > target


def test_a_budget_is_cut_to_whole_tiles_but_never_to_nothing():
    assert [whole_tiles(tokens, 16) for tokens in (5, 15, 16, 17, 31, 32, 33)] == [5, 15, 16, 16, 16, 32, 32]


def test_a_policy_that_computes_prompts_whole_gets_the_capacity_and_one_of_chunks_the_budget():
    assert StallFree.sized(8, 100).token_budget == 8

    class Whole(FixedBudget):
        def plan(self, step):
            pass

    assert Whole.sized(8, 100).token_budget == 100


def test_a_correction_starts_at_the_prediction_plus_the_assumed_deviation_and_learns_both():
    correction = Correction(0.1)
    assert correction.factor == pytest.approx(1.35)
    correction.update(1.2)
    assert (correction.mean, correction.deviation) == (pytest.approx(1.05), pytest.approx(0.11))
    correction.update(1.05)
    assert (correction.mean, correction.deviation) == (pytest.approx(1.05), pytest.approx(0.099))


def test_a_correction_follows_a_change_of_pace_in_both_directions():
    for ratio in (0.3, 3.0):
        correction = Correction(0.02)
        for _ in range(200):
            correction.update(ratio)
        assert correction.mean == pytest.approx(ratio, rel=0.01)
        assert ratio <= correction.factor < 1.1 * ratio
