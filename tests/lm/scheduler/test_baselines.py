"""The policies of the literature: what each puts into a step, step by step."""

import pytest

from holdfast.lm.scheduler.baselines import ChunkedOnly, HybridOnly, Orca, PrefillFirst, RequestLevel, Unified
from tests.scheduling import answer, create_requests, create_scheduler, spans


def steps(policy, *prompts, joins=(), max_tokens=3, **options):
    """What each step computes until all is done; `joins` are prompts that arrive after the first step."""
    scheduler = create_scheduler(policy=policy, **options)
    requests = create_requests(*prompts, *joins, max_tokens=max_tokens)
    for request in requests[: len(prompts)]:
        scheduler.add(request)
    planned = []
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        planned.append(spans(plan))
        scheduler.update(plan, answer(plan), 0.0)
        if len(planned) == 1:
            for request in requests[len(prompts) :]:
                scheduler.add(request)
    return planned, scheduler.stats()


def test_request_level_starts_nobody_before_the_last_of_the_batch_has_ended():
    planned, _ = steps(RequestLevel(64), 5, 6, joins=[4])
    assert planned == [
        [("0", 0, 5), ("1", 0, 6)],
        [("2", 0, 4)],  # the batch still forms: nobody has been decoded
        [("0", 5, 6), ("1", 6, 7), ("2", 4, 5)],
        [("0", 6, 7), ("1", 7, 8), ("2", 5, 6)],
    ]
    planned, _ = steps(RequestLevel(64), 5, 6, joins=[4], max_sequences=2)
    assert planned[-3:] == [[("2", 0, 4)], [("2", 4, 5)], [("2", 5, 6)]]
    assert planned[:-3] == [
        [("0", 0, 5), ("1", 0, 6)],
        [("0", 5, 6), ("1", 6, 7)],
        [("0", 6, 7), ("1", 7, 8)],
    ]


def test_orca_mixes_decodes_with_whole_prompts():
    planned, _ = steps(Orca(64), 5, joins=[40])
    assert planned[:2] == [[("0", 0, 5)], [("0", 5, 6), ("1", 0, 40)]]


@pytest.mark.parametrize(("policy", "starts"), [(Orca, 1), (RequestLevel, 1), (HybridOnly, 2), (PrefillFirst, 2)])
def test_a_reservation_is_for_the_longest_length_and_saves_from_preemption(policy, starts):
    """Two prompts of two blocks that grow to three, in five blocks."""
    planned, stats = steps(policy(64), 5, 6, max_tokens=6, blocks=5, block_size=4, sharing=False)
    assert len(planned[0]) == starts
    assert stats.preemptions == starts - 1


def test_prefill_first_lets_decodes_wait_for_a_prompt():
    planned, _ = steps(PrefillFirst(64), 5, joins=[40])
    assert planned[:3] == [[("0", 0, 5)], [("1", 0, 40)], [("0", 5, 6), ("1", 40, 41)]]


def test_hybrid_only_takes_in_whole_whatever_memory_allows():
    planned, _ = steps(HybridOnly(64), 5, joins=[20, 20])
    assert planned[1] == [("0", 5, 6), ("1", 0, 20), ("2", 0, 20)]


def test_unified_takes_in_prompts_whole_until_the_step_reaches_its_threshold():
    planned, _ = steps(Unified(8, 64), 5, joins=[20, 20])
    assert planned[1] == [("0", 5, 6), ("1", 0, 20)]
    assert planned[2] == [("0", 6, 7), ("1", 20, 21), ("2", 0, 20)]


def test_a_prompt_that_a_step_cannot_hold_whole_waits_for_the_next():
    planned, _ = steps(HybridOnly(30), 20, 20)
    assert planned[0] == [("0", 0, 20)]
    assert planned[1] == [("0", 20, 21), ("1", 0, 20)]


def test_chunked_only_lets_chunks_and_decodes_take_turns():
    planned, _ = steps(ChunkedOnly(8), 5, joins=[20])
    assert planned[:6] == [
        [("0", 0, 5)],
        [("0", 5, 6)],
        [("1", 0, 8)],
        [("0", 6, 7)],
        [("1", 8, 16)],
        [("1", 16, 20)],
    ]


@pytest.mark.parametrize("policy", [RequestLevel, Orca, PrefillFirst, HybridOnly, ChunkedOnly, lambda n: Unified(n, 1)])
def test_a_step_of_nothing_is_refused(policy):
    with pytest.raises(ValueError, match="is 0; it must be at least 1"):
        policy(0)
