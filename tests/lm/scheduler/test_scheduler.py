"""The scheduler from outside: what it takes and refuses, how sequences end, what it reports."""

import pytest

from holdfast.core.types import FinishReason
from holdfast.lm.types import PENDING, StepResult
from tests.scheduling import answer, create_requests, create_scheduler, spans


def run_step(scheduler, token=7, now=0.0):
    plan = scheduler.schedule(now)
    return scheduler.update(plan, answer(plan, token), now)


def test_a_request_goes_from_prompt_to_length_limit():
    scheduler = create_scheduler()
    (request,) = create_requests(5, max_tokens=3)
    scheduler.add(request)
    plans, outputs = [], []
    while scheduler.has_work():
        plan = scheduler.schedule(1.5)
        plans += spans(plan)
        outputs += scheduler.update(plan, answer(plan), 2.0)
    assert plans == [("0", 0, 5), ("0", 5, 6), ("0", 6, 7)]
    assert [output.tokens for output in outputs] == [(7,), (7,), (7,)]
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.LENGTH]
    assert outputs[-1].scheduled_at == 1.5
    assert scheduler.stats().blocks_used == 0


def test_the_models_end_token_ends_a_sequence_unless_it_is_to_be_ignored():
    scheduler = create_scheduler(eos=(2,))
    ending, ignoring = create_requests(5, 6)[0], create_requests(5, 6, ignore_eos=True)[1]
    scheduler.add(ending)
    scheduler.add(ignoring)
    outputs = run_step(scheduler, token=2)
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("0", FinishReason.STOP), ("1", None)]
    assert outputs[0].tokens == (2,)


def test_a_requests_own_stop_token_ends_it_even_when_the_models_is_ignored():
    scheduler = create_scheduler(eos=(2,))
    scheduler.add(create_requests(5, stop_token_ids=(9,), ignore_eos=True)[0])
    assert run_step(scheduler, token=9)[0].finish_reason is FinishReason.STOP


def test_the_longest_sequence_of_the_model_ends_a_request():
    scheduler = create_scheduler(max_model_len=7)
    scheduler.add(create_requests(5, max_tokens=100)[0])
    assert run_step(scheduler)[0].finish_reason is None
    assert run_step(scheduler)[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (128, {}, "has 128 tokens.*limit of 128"),
        ((), {}, "empty"),
        (60, {"blocks": 15}, "60 prompt tokens and up to 4 generated ones take 63 positions.*has 60"),
        ((5, 100), {"vocab_size": 100}, "token id 100; .* between 0 and 99"),
        ((5, -1), {}, "token id -1"),
    ],
)
def test_what_can_never_run_is_refused_with_the_limit(prompt, options, message):
    scheduler = create_scheduler(**options)
    with pytest.raises(ValueError, match=message):
        scheduler.add(create_requests(prompt)[0])
    assert not scheduler.has_work()


def test_the_largest_request_that_fits_is_taken_and_ends():
    scheduler = create_scheduler(blocks=16)
    scheduler.add(create_requests(61, max_tokens=4)[0])
    while scheduler.has_work():
        run_step(scheduler)
    assert scheduler.stats().preemptions == 0


def test_an_id_is_served_once_at_a_time():
    scheduler = create_scheduler()
    (request,) = create_requests(5, max_tokens=1)
    scheduler.add(request)
    with pytest.raises(ValueError, match="request 0 is already"):
        scheduler.add(request)
    run_step(scheduler)
    scheduler.add(request)
    assert scheduler.has_work()


def test_a_step_is_planned_before_the_token_that_it_continues_is_known():
    scheduler = create_scheduler()
    scheduler.add(create_requests(5, max_tokens=3)[0])
    first, second, third = (scheduler.schedule(0.0) for _ in range(3))
    assert spans(first) + spans(second) + spans(third) == [("0", 0, 5), ("0", 5, 6), ("0", 6, 7)]
    assert second.segments[0].tokens == third.segments[0].tokens == (PENDING,)
    assert scheduler.schedule(0.0) is None, "three tokens are on their way, no more may come"
    reasons = [scheduler.update(plan, answer(plan), 0.0)[0].finish_reason for plan in (first, second, third)]
    assert reasons == [None, None, FinishReason.LENGTH]


def test_what_was_planned_beyond_an_end_is_dropped():
    scheduler = create_scheduler(eos=(2,))
    scheduler.add(create_requests(5)[0])
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert scheduler.update(first, answer(first, 2), 0.0)[0].finish_reason is FinishReason.STOP
    assert not scheduler.has_work()
    assert scheduler.update(second, answer(second), 0.0) == []


def test_an_abort_frees_at_once_and_drops_what_is_in_flight():
    scheduler = create_scheduler(max_sequences=1)
    running, waiting = create_requests(5, 6)
    scheduler.add(running)
    scheduler.add(waiting)
    plan = scheduler.schedule(0.0)
    scheduler.abort("0")
    assert (scheduler.stats().blocks_used, scheduler.stats().running) == (0, 0)
    scheduler.abort("1")
    assert scheduler.stats().waiting == 0
    assert not scheduler.has_work()
    assert scheduler.update(plan, answer(plan), 0.0) == []
    scheduler.check()


def test_an_abort_of_what_has_ended_is_nothing():
    scheduler = create_scheduler()
    scheduler.add(create_requests(5, max_tokens=1)[0])
    run_step(scheduler)
    scheduler.abort("0")
    scheduler.abort("never seen")
    assert not scheduler.has_work()


def test_a_token_in_flight_for_an_aborted_request_does_not_reach_a_new_one_of_that_id():
    scheduler = create_scheduler()
    (request,) = create_requests(5)
    scheduler.add(request)
    stale = scheduler.schedule(0.0)
    scheduler.abort("0")
    scheduler.add(request)
    fresh = scheduler.schedule(0.0)
    assert scheduler.update(stale, answer(stale, 11), 0.0) == []
    assert [output.tokens for output in scheduler.update(fresh, answer(fresh, 12), 0.0)] == [(12,)]


def test_results_must_come_in_the_order_of_their_plans():
    scheduler = create_scheduler()
    scheduler.add(create_requests(5)[0])
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match=r"step 0 .* is due; got plan 1"):
        scheduler.update(second, answer(second), 0.0)
    assert first.step == 0


def test_a_result_must_bring_a_token_for_each_that_was_to_be_sampled():
    scheduler = create_scheduler()
    scheduler.add(create_requests(5)[0])
    plan = scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match="with 1 sampled tokens is due"):
        scheduler.update(plan, StepResult(plan.step, (), 0.0), 0.0)


def test_equal_prompts_share_their_prefix_and_say_how_much():
    scheduler = create_scheduler(block_size=4)
    prompt = tuple(range(10))
    first, second = create_requests(prompt, prompt, max_tokens=1)
    scheduler.add(first)
    assert run_step(scheduler)[0].cached_tokens == 0
    scheduler.add(second)
    plan = scheduler.schedule(0.0)
    assert spans(plan) == [("1", 8, 10)]
    assert scheduler.update(plan, answer(plan), 0.0)[0].cached_tokens == 8
    assert (scheduler.stats().prefix_queries, scheduler.stats().prefix_hits) == (20, 8)
    assert scheduler.stats().tokens_computed == 12


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_the_next_turn_of_a_conversation_finds_what_was_generated(steps_in_flight):
    scheduler = create_scheduler(block_size=4)
    (first,) = create_requests(6, max_tokens=7)
    scheduler.add(first)
    plans = []
    while scheduler.has_work():
        while len(plans) < steps_in_flight and (plan := scheduler.schedule(0.0)):
            plans.append(plan)
        plan = plans.pop(0)
        scheduler.update(plan, answer(plan), 0.0)
    (second,) = create_requests((*first.prompt, *[7] * 7, 5), max_tokens=1)
    scheduler.add(second)
    assert run_step(scheduler)[0].cached_tokens == 12, "the last token generated was never computed"


def test_another_tenant_gets_nothing_from_the_cache():
    scheduler = create_scheduler(block_size=4)
    prompt = tuple(range(10))
    for tenant, cached in (("a", 0), ("b", 0), ("a", 8)):
        scheduler.add(create_requests(prompt, max_tokens=1, tenant=tenant)[0])
        assert run_step(scheduler)[0].cached_tokens == cached


def test_without_sharing_nothing_is_kept():
    scheduler = create_scheduler(block_size=4, sharing=False)
    prompt = tuple(range(10))
    for _ in range(2):
        scheduler.add(create_requests(prompt, max_tokens=1)[0])
        assert run_step(scheduler)[0].cached_tokens == 0
    assert scheduler.stats().blocks_cached == 0


def test_a_request_without_a_seed_gets_the_same_one_in_every_run_and_each_its_own():
    def seeds(seed):
        scheduler = create_scheduler(seed=seed)
        for request in create_requests(5, 5, 5):
            scheduler.add(request)
        return [segment.sampling.seed for segment in scheduler.schedule(0.0).segments]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 6
    scheduler = create_scheduler()
    scheduler.add(create_requests(5, seed=42)[0])
    assert scheduler.schedule(0.0).segments[0].sampling.seed == 42


def test_statistics_tell_queues_and_blocks():
    scheduler = create_scheduler(max_sequences=1, block_size=4, blocks=16)
    for request in create_requests(9, 5):
        scheduler.add(request)
    run_step(scheduler)
    stats = scheduler.stats()
    assert (stats.running, stats.waiting) == (1, 1)
    assert (stats.blocks_total, stats.blocks_used, stats.blocks_cached) == (16, 3, 0)
    scheduler.abort("0")
    assert scheduler.stats().blocks_cached == 2


def test_micro_batches_share_no_sequence_and_each_takes_its_part_of_the_decodes():
    scheduler = create_scheduler(micro_batches=2)
    for request in create_requests(3, 3, 3, 3):
        scheduler.add(request)
    run_step(scheduler)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert [name for name, _, _ in spans(first)] == ["0", "1"]
    assert [name for name, _, _ in spans(second)] == ["2", "3"]
    assert scheduler.schedule(0.0) is None  # every sequence waits for its token
    scheduler.update(first, answer(first), 0.0)
    assert spans(scheduler.schedule(0.0)) == [("0", 4, 5), ("1", 4, 5)]


def test_the_chunks_of_a_prompt_follow_each_other_through_the_stages():
    scheduler = create_scheduler(budget=4, micro_batches=2)
    scheduler.add(create_requests(10)[0])
    assert [spans(scheduler.schedule(0.0)) for _ in range(2)] == [[("0", 0, 4)], [("0", 4, 8)]]
