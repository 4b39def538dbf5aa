"""The forwards of each policy of padded rows, by hand."""

from dataclasses import replace

import pytest

from holdfast.core.types import UserBatch
from holdfast.lab.row_schedulers import PATIENCE, PaddedBatches, PrefillApart, RunToCompletion
from holdfast.lm.choice import make_policy
from holdfast.lm.scheduler.correction import Correction
from holdfast.lm.scheduler.policies import LatencyTarget, StallFree
from holdfast.lm.scheduler.row_policies import Embedding, Shaping
from holdfast.lm.types import RowResult, StepResult, idle_tokens
from tests.core.test_cost import PADDED
from tests.padded_rows import ABLE, create_row_scheduler, forwards_of, moves_of, shape_of_rows
from tests.scheduling import answer, create_requests, create_scheduler


def start(policy, *prompts, lengths=None, **options):
    scheduler = create_row_scheduler(policy, **options)
    requests = create_requests(*prompts, max_tokens=4)
    for index, request in enumerate(requests):
        if lengths:
            request = replace(request, params=replace(request.params, max_tokens=lengths[index]))
        scheduler.add(request)
    return scheduler


def steps(scheduler, count):
    """The forwards of the next plans, each answered before the next."""
    said = []
    for _ in range(count):
        plan = scheduler.schedule(0.0)
        if plan is None:
            said.append(None)
            break
        said.append(forwards_of(plan))
        scheduler.update(plan, answer(plan), 0.0)
    return said


def test_stall_free_decodes_the_batch_and_computes_chunks_apart():
    scheduler = start(StallFree(10), 3, 12)
    assert steps(scheduler, 3) == [
        [("apart", [("1", 0, 7)], ()), ("apart", [("0", 0, 3)], ())],
        [("batch", [("0", 3, 4)], ()), ("apart", [("1", 7, 12)], ())],
        [("batch", [("0", 4, 5), ("1", 12, 13)], ())],
    ]


def test_a_short_end_of_a_prompt_is_computed_beyond_the_budget_and_not_apart():
    scheduler = start(StallFree(64), 34, 32)
    assert steps(scheduler, 1) == [[("apart", [("0", 0, 34), ("1", 0, 32)], ())]]


def test_a_longer_end_of_a_prompt_waits_for_the_next_step():
    scheduler = start(StallFree(64), 34, 33)
    assert steps(scheduler, 2) == [
        [("apart", [("1", 0, 30)], ()), ("apart", [("0", 0, 34)], ())],
        [("batch", [("0", 34, 35)], ()), ("apart", [("1", 30, 33)], ())],
    ]


def test_a_finished_prompt_is_embedded_before_the_next_decode():
    scheduler = start(StallFree(64), 3, 12)
    plan = scheduler.schedule(0.0)
    assert moves_of(plan) == []
    scheduler.update(plan, answer(plan), 0.0)
    plan = scheduler.schedule(0.0)
    assert moves_of(plan) == [(0, "embed", 0, -1, 3), (0, "embed", 1, -1, 12)]


def test_whole_prompts_of_similar_length_share_a_forward():
    scheduler = start(StallFree(64), 10, 3, 9)
    assert steps(scheduler, 1) == [[("apart", [("0", 0, 10), ("2", 0, 9)], ()), ("apart", [("1", 0, 3)], ())]]


def test_prompts_are_whole_where_the_model_cannot_compute_chunks():
    shape = shape_of_rows(abilities=replace(ABLE, chunks=False))
    scheduler = start(StallFree(10), 12, 5, 4, shape=shape)
    assert steps(scheduler, 2) == [
        [("apart", [("0", 0, 12)], ())],
        [("batch", [("0", 12, 13)], ()), ("apart", [("1", 0, 5), ("2", 0, 4)], ())],
    ]


def test_ended_rows_are_computed_until_the_last_ends():
    scheduler = start(RunToCompletion(300), 5, 9, 4, lengths=(1, 3, 4), max_sequences=2)
    assert steps(scheduler, 4) == [
        [("batch", [("0", 0, 5), ("1", 0, 9)], ())],
        [("batch", [("1", 9, 10)], (0,))],
        [("batch", [("1", 10, 11)], (0,))],
        [("batch", [("2", 0, 4)], ())],
    ]


def test_a_batch_that_has_ended_leaves_before_the_next_one_starts():
    scheduler = start(RunToCompletion(300), 5, 9, 4, lengths=(1, 1, 1), max_sequences=2)
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, answer(plan), 0.0)
    assert moves_of(scheduler.schedule(0.0)) == [(0, "drop", 0, -1, 0), (0, "drop", 1, -1, 0)]


def test_request_level_reserves_rows_of_the_longest_length():
    """Rows of at most 5 + 4 - 1 positions: two take 16 of 23, three would take 24."""
    shape = shape_of_rows(23)
    policy = make_policy("request-level", token_budget=64, capacity=300, executor="padded")
    assert steps(start(policy, 5, 5, 5, shape=shape), 1) == [[("batch", [("0", 0, 5), ("1", 0, 5)], ())]]


def test_prefill_apart_decodes_batches_of_prefilled_requests_to_completion():
    scheduler = start(PrefillApart(300), 4, 20, 5, 20, lengths=(3, 2, 3, 2), max_sequences=2, prefill_ahead=4)
    assert steps(scheduler, 6) == [
        [("apart", [("0", 0, 4), ("2", 0, 5)], ())],
        [("apart", [("1", 0, 20), ("3", 0, 20)], ())],
        [("batch", [("0", 4, 5), ("3", 20, 21)], ())],  # the digests of the ids come in the order 3, 0, 1, 2
        [("batch", [("0", 5, 6)], (3,))],
        [("batch", [("1", 20, 21), ("2", 5, 6)], ())],
        [("batch", [("2", 6, 7)], (2,))],
    ]


def test_shaping_computes_one_prompt_beside_the_decodes_while_a_row_is_free():
    scheduler = start(Shaping(300), 3, 5, lengths=(4, 4), max_sequences=3)
    plan = scheduler.schedule(0.0)
    assert forwards_of(plan) == [("batch", [("0", 0, 3), ("1", 0, 5)], ())]
    scheduler.update(plan, answer(plan), 0.0)
    for request in create_requests(1, 1, 6, 7)[2:]:
        scheduler.add(request)
    plan = scheduler.schedule(0.0)
    assert forwards_of(plan) == [("batch", [("0", 3, 4), ("1", 5, 6), ("2", 0, 6)], ())]
    assert idle_tokens(plan) == 2 * 5, "(B - 1)(l - 1)"
    scheduler.update(plan, answer(plan), 0.0)
    assert steps(scheduler, 1) == [[("batch", [("0", 4, 5), ("1", 6, 7), ("2", 6, 7)], ())]]


def test_embedding_prefills_groups_ahead_and_embeds_them_when_rows_are_free():
    scheduler = start(Embedding(300), 3, 12, 11, 4, lengths=(2, 4, 4, 4), max_sequences=2, prefill_ahead=2)
    assert steps(scheduler, 4) == [
        [("apart", [("0", 0, 3), ("3", 0, 4)], ())],
        [("batch", [("0", 3, 4), ("3", 4, 5)], ()), ("apart", [("1", 0, 12), ("2", 0, 11)], ())],
        [("batch", [("1", 12, 13), ("3", 5, 6)], ())],
        [("batch", [("1", 13, 14), ("3", 6, 7)], ())],
    ]


def test_orca_puts_all_decodes_and_every_prompt_into_one_forward():
    policy = make_policy("orca", token_budget=64, capacity=300, executor="padded")
    scheduler = start(policy, 3, 5, 7, max_sequences=8)
    assert steps(scheduler, 1) == [[("batch", [("0", 0, 3), ("1", 0, 5), ("2", 0, 7)], ())]]
    for request in create_requests(1, 1, 1, 6, 2)[3:]:
        scheduler.add(request)
    (forward,) = steps(scheduler, 1)[0]
    assert forward == ("batch", [("0", 3, 4), ("1", 5, 6), ("2", 7, 8), ("3", 0, 6), ("4", 0, 2)], ())


def test_newcomers_are_decoded_in_the_step_that_prefills_them():
    scheduler = start(PaddedBatches(300), 3, 12)
    plan = scheduler.schedule(0.0)
    assert forwards_of(plan) == [
        ("apart", [("1", 0, 12)], ()),
        ("apart", [("0", 0, 3)], ()),
        ("batch", [("0", 3, 4), ("1", 12, 13)], ()),
    ]
    assert moves_of(plan) == [(2, "embed", 0, -1, 3), (2, "embed", 1, -1, 12)]
    outputs = scheduler.update(plan, StepResult(plan.step, (1, 2, 3, 4), 0.0), 0.0)
    assert {output.request_id: output.tokens for output in outputs} == {"0": (2, 3), "1": (1, 4)}


def test_a_second_token_after_the_end_of_a_newcomer_is_dropped():
    scheduler = start(PaddedBatches(300), 3, eos=(9,))
    plan = scheduler.schedule(0.0)
    (output,) = scheduler.update(plan, StepResult(plan.step, (9, 4), 0.0), 0.0)
    assert (output.tokens, output.finish_reason) == ((9,), "stop")


def test_simple_request_manager_admits_while_rows_times_longest_and_most_new_tokens_fit():
    """Prompts 3, 12 and 5 with 4 new tokens: 1 × 7 and 2 × 16 fit 40, and 3 × 16 does not."""
    scheduler = start(PaddedBatches(300), 3, 12, 5, shape=shape_of_rows(40))
    plan = scheduler.schedule(0.0)
    assert {segment.sequence_id for segment in plan.segments} == {"0", "1"}
    assert scheduler.stats().waiting == 1


def test_simple_request_manager_counts_what_running_rows_have_grown_to():
    """Two rows of 3 grow to 5; then 3 × (5 + 4) = 27 exceeds 26, though it fitted at 3 × (3 + 4)."""
    scheduler = start(PaddedBatches(300), 3, 3, shape=shape_of_rows(26))
    steps(scheduler, 1)
    scheduler.add(create_requests(1, 1, 3)[2])
    assert [segment.sequence_id for segment in scheduler.schedule(0.0).segments] == ["0", "1"]


def test_simple_request_manager_takes_the_first_misfit_when_others_have_ended():
    scheduler = start(PaddedBatches(300), 3, 12, 5, lengths=(2, 2, 2), shape=shape_of_rows(28))
    assert {name for _, own, _ in steps(scheduler, 1)[0] for name, _, _ in own} == {"0", "1"}
    assert {name for _, own, _ in steps(scheduler, 1)[0] for name, _, _ in own} == {"2"}


def batches(*sizes, prompt=3, batch_size=None, **options):
    """A scheduler with a batch of each of these numbers of requests, 4 new tokens each. Request "b2" is b's third."""
    scheduler = create_row_scheduler(PaddedBatches(300), **options)
    for name, size in zip("abc", sizes, strict=False):
        add_batch(scheduler, name, range(size), batch_size or size, prompt=prompt)
    return scheduler


def add_batch(scheduler, name, numbers, size, prompt=3, arrival=0.0):
    for number in numbers:
        (request,) = create_requests(prompt)
        batch = UserBatch(name, size)
        scheduler.add(replace(request, id=f"{name}{number}", batch=batch, arrival=arrival))


def started(scheduler, now=0.0):
    """The sequences of the next plan, which is answered."""
    plan = scheduler.schedule(now)
    if plan is None:
        return set()
    scheduler.update(plan, answer(plan), now)
    return {segment.sequence_id for segment in plan.segments}


def test_a_batch_of_the_simple_request_manager_starts_whole_or_waits_whole():
    """Rows of 3 and 4 new tokens: 2 × 7 and 4 × 7 fit 28; the third batch would make it 5 rows."""
    scheduler = batches(2, 2, 1, shape=shape_of_rows(28), max_sequences=8)
    assert started(scheduler) == {"a0", "a1", "b0", "b1"}
    scheduler = batches(2, 3, 1, shape=shape_of_rows(28), max_sequences=8)
    assert started(scheduler) == {"a0", "a1"}


def test_a_batch_that_went_back_starts_before_later_ones_that_would_fit():
    scheduler = batches(2, 3, 1, shape=shape_of_rows(28), max_sequences=8)
    steps = [started(scheduler) for _ in range(5)]
    assert steps[:3] == [{"a0", "a1"}] * 3
    assert {"b0", "b1", "b2"} in steps or {"b0", "b1", "b2", "c0"} in steps
    assert all("c0" not in step or "b0" in step for step in steps)


def test_a_batch_goes_by_its_first_request_past_requests_that_came_between_its_own():
    scheduler = create_row_scheduler(PaddedBatches(300), shape=shape_of_rows(14), max_sequences=8)
    add_batch(scheduler, "a", [0], 2)
    add_batch(scheduler, "b", [0], 1)
    add_batch(scheduler, "a", [1], 2)
    assert started(scheduler) == {"a0", "a1"}


def test_requests_without_a_batch_start_one_by_one():
    """The first row has grown to 5, so 2 × 9 fit 24 and 3 × 9 do not."""
    scheduler = start(PaddedBatches(300), 3, shape=shape_of_rows(24))
    assert started(scheduler) == {"0"}
    for request in create_requests(3, 3, 3, 3)[1:]:
        scheduler.add(request)
    assert started(scheduler) == {"0", "1"}


def test_rows_bound_a_batch_as_memory_does():
    scheduler = batches(2, 3, shape=shape_of_rows(1000), max_sequences=4)
    assert started(scheduler) == {"a0", "a1"}


def test_a_batch_waits_for_its_requests_and_holds_up_no_other():
    scheduler = create_row_scheduler(PaddedBatches(300), max_sequences=8)
    add_batch(scheduler, "a", range(2), 3)
    add_batch(scheduler, "b", range(2), 2)
    assert started(scheduler) == {"b0", "b1"}
    add_batch(scheduler, "a", [2], 3)
    assert started(scheduler) == {"a0", "a1", "a2", "b0", "b1"}


def test_a_batch_whose_requests_never_all_come_starts_after_its_patience():
    scheduler = create_row_scheduler(PaddedBatches(300), max_sequences=8)
    add_batch(scheduler, "a", range(2), 3, arrival=5.0)
    assert started(scheduler, 5.0 + PATIENCE - 0.01) == set()
    assert started(scheduler, 5.0 + PATIENCE) == {"a0", "a1"}


def test_a_batch_too_large_for_an_empty_cache_starts_in_parts_while_nothing_runs():
    """4 rows × 7 fit 28, so a batch of 6 starts as 4 and, once these have ended, as 2."""
    scheduler = batches(6, shape=shape_of_rows(28), max_sequences=8)
    steps = [started(scheduler) for _ in range(6)]
    first, second = {"a0", "a1", "a2", "a3"}, {"a4", "a5"}
    assert steps[0] == first and second in steps
    assert all(step in (first, second, set()) for step in steps)


def test_a_preempted_request_of_a_batch_does_not_wait_for_the_others_again():
    scheduler = batches(3, shape=shape_of_rows(1000), max_sequences=8)
    assert started(scheduler) == {"a0", "a1", "a2"}
    plan = scheduler.schedule(0.0)
    lost = RowResult(lost=("a1",))
    scheduler.update(plan, replace(answer(plan), tokens=(7, 7), counts=(1, 0, 1), parts=(lost,)), 0.0)
    assert started(scheduler) == {"a0", "a1", "a2"}


def test_a_policy_of_rows_refuses_packed_steps():
    scheduler = create_scheduler(policy=Shaping(8))
    with pytest.raises(TypeError, match="Shaping plans padded rows"):
        scheduler.schedule(0.0)


def test_a_latency_target_prices_each_chunk_as_a_forward_of_its_own():
    def chunks(target):
        policy = LatencyTarget(replace(PADDED, deviation=0.0), target, tile=16, ceiling=512)
        scheduler = start(policy, 3, lengths=(20,), max_sequences=8, max_model_len=1024)
        steps(scheduler, 1)
        policy.correction = Correction(0.0)  # the answer above said that the step took no time
        for request in create_requests(1, 400)[1:]:
            scheduler.add(replace(request, params=replace(request.params, max_tokens=4)))
        plan = scheduler.schedule(0.0)
        return [segment.length for segment in plan.segments[1:]]

    decode = PADDED.forward(1, 1, 4)
    for target in (0.02, 0.03):
        (chunk,) = chunks(target)
        assert decode + PADDED.forward(1, chunk, chunk) <= target
        assert decode + PADDED.forward(1, chunk + 16, chunk + 16) > target
