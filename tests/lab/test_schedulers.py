"""The policies of the literature: the segments of each step."""

import pytest

from holdfast.lab.schedulers import ChunkedOnly, HybridOnly, Orca, PrefillFirst, RequestLevel, Unified
from holdfast.lm.scheduler.policies import StallFree
from tests.scheduling import answer, create_requests, create_scheduler, spans


def steps(policy, *prompts, joins=(), max_tokens=3, **options):
    """Segments of each step until all requests are done; `joins` are prompts that arrive after the first step."""
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


def test_request_level_decodes_a_batch_to_its_end_while_later_arrivals_wait():
    planned, _ = steps(RequestLevel(64), 5, 6, joins=[4])
    assert planned == [
        [("0", 0, 5), ("1", 0, 6)],
        [("0", 5, 6), ("1", 6, 7)],
        [("0", 6, 7), ("1", 7, 8)],
        [("2", 0, 4)],
        [("2", 4, 5)],
        [("2", 5, 6)],
    ]


def test_request_level_prefills_a_large_batch_in_several_steps_without_later_arrivals():
    planned, _ = steps(RequestLevel(8), 5, 6, 7, joins=[4], max_tokens=2)
    assert planned == [
        [("0", 0, 5), ("1", 0, 3)],
        [("1", 3, 6), ("2", 0, 5)],
        [("2", 5, 7)],
        [("0", 5, 6), ("1", 6, 7), ("2", 7, 8)],
        [("3", 0, 4)],
        [("3", 4, 5)],
    ]


def test_request_level_forms_its_batch_of_as_many_requests_as_there_are_rows():
    planned, _ = steps(RequestLevel(64), 5, 6, 4, max_sequences=2)
    assert planned == [
        [("0", 0, 5), ("1", 0, 6)],
        [("0", 5, 6), ("1", 6, 7)],
        [("0", 6, 7), ("1", 7, 8)],
        [("2", 0, 4)],
        [("2", 4, 5)],
        [("2", 5, 6)],
    ]


@pytest.mark.parametrize("policy", [HybridOnly, PrefillFirst])
def test_a_whole_prompt_uses_budget_only_for_uncached_tokens(policy):
    """The last prompt has 20 tokens, 16 of them cached. With the 16 of the one before, it fits a budget of 24."""
    first = tuple(range(1, 21))
    scheduler = create_scheduler(policy=policy(24), block_size=4)
    earlier, other, again = create_requests(first, tuple(range(40, 56)), first, max_tokens=1)
    for requests in ([earlier], [other, again]):
        for request in requests:
            scheduler.add(request)
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, answer(plan), 0.0)
    assert spans(plan) == [("1", 0, 16), ("2", 16, 20)]


def test_orca_adds_whole_prompts_to_all_decodes():
    planned, _ = steps(Orca(64), 5, joins=[40])
    assert planned[:2] == [[("0", 0, 5)], [("0", 5, 6), ("1", 0, 40)]]


@pytest.mark.parametrize(("policy", "starts"), [(Orca, 1), (RequestLevel, 1), (HybridOnly, 2), (PrefillFirst, 2)])
def test_reserving_policies_admit_fewer_requests_and_preempt_none(policy, starts):
    """Two prompts of two blocks that grow to three, in five blocks."""
    planned, stats = steps(policy(64), 5, 6, max_tokens=6, blocks=5, block_size=4, sharing=False)
    assert len(planned[0]) == starts
    assert stats.preemptions == starts - 1


def test_prefill_first_delays_decodes_for_a_prompt():
    planned, _ = steps(PrefillFirst(64), 5, joins=[40])
    assert planned[:3] == [[("0", 0, 5)], [("1", 0, 40)], [("0", 5, 6), ("1", 40, 41)]]


def test_hybrid_only_adds_every_whole_prompt_that_memory_allows():
    planned, _ = steps(HybridOnly(64), 5, joins=[20, 20])
    assert planned[1] == [("0", 5, 6), ("1", 0, 20), ("2", 0, 20)]


def test_unified_adds_whole_prompts_until_the_step_reaches_its_threshold():
    planned, _ = steps(Unified(8, 64), 5, joins=[20, 20])
    assert planned[1] == [("0", 5, 6), ("1", 0, 20)]
    assert planned[2] == [("0", 6, 7), ("1", 20, 21), ("2", 0, 20)]


@pytest.mark.parametrize(("threshold", "together"), [(20, 1), (21, 2), (40, 2), (41, 3)])
def test_a_step_of_unified_that_holds_its_threshold_takes_no_other_prompt(threshold, together):
    planned, _ = steps(Unified(threshold, 64), 20, 20, 20)
    assert len(planned[0]) == together


def test_a_whole_prompt_that_exceeds_the_step_waits_for_the_next():
    planned, _ = steps(HybridOnly(30), 20, 20)
    assert planned[0] == [("0", 0, 20)]
    assert planned[1] == [("0", 20, 21), ("1", 0, 20)]


def test_chunked_only_alternates_chunks_and_decodes():
    planned, _ = steps(ChunkedOnly(8), 5, joins=[20])
    assert planned[:6] == [
        [("0", 0, 5)],
        [("0", 5, 6)],
        [("1", 0, 8)],
        [("0", 6, 7)],
        [("1", 8, 16)],
        [("1", 16, 20)],
    ]


FIGURE_4 = {
    "vLLM": (PrefillFirst(64), ["C whole, D whole", "A, B, C, D", "A, B, C, D"]),
    "Orca": (Orca(64), ["A, B, C whole, D whole", "A, B, C, D", "A, B, C, D"]),
    "FasterTransformer": (RequestLevel(64), ["A, B", "A, B", "A, B", "C whole, D whole"]),
    "Sarathi-Serve": (StallFree(8), ["A, B, C part", "A, B, C part", "A, B, C, D part"]),
}
"""Sarathi-Serve, Figure 4: the steps after C and D have arrived, while A and B decode."""


@pytest.mark.parametrize(("policy", "timeline"), FIGURE_4.values(), ids=FIGURE_4)
def test_only_chunks_neither_stall_decodes_nor_keep_prompts_waiting(policy, timeline):
    planned, _ = steps(policy, 2, 2, joins=[12, 12], max_tokens=4)

    def told(name, start, stop):
        whole = "whole" if stop - start == 12 else "part"
        return "ABCD"[int(name)] + ("" if stop - start == 1 else f" {whole}")

    found = [", ".join(told(*span) for span in step) for step in planned[1:]]
    assert found[: len(timeline)] == timeline


@pytest.mark.parametrize("policy", [RequestLevel, Orca, PrefillFirst, HybridOnly, ChunkedOnly, lambda n: Unified(n, 1)])
def test_a_capacity_of_zero_is_refused(policy):
    with pytest.raises(ValueError, match="is 0; it must be at least 1"):
        policy(0)
