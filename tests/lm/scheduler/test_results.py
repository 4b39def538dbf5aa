"""Results: tokens go to the sequences that still lack them, and the outputs say what changed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.types import FinishReason, TokenLogprobs
from holdfast.lm.scheduler.order import Fair
from holdfast.lm.scheduler.part import Part
from holdfast.lm.scheduler.results import valid_counts
from tests.invariants import check_scheduler
from tests.scheduling import answer, create_requests, create_scheduler, spans


class Adding(Part):
    """Lets a test act on the outputs of a step."""

    name = "adding"

    def __init__(self, act: Any) -> None:
        self.act = act

    def finish(self, step: Any) -> Any:
        return SimpleNamespace()  # so that `sampled` is called

    def sampled(self, plan: Any, result: Any, sampling: Any, outputs: Any) -> None:
        self.act(sampling, outputs)


def run(scheduler: Any, token: int = 7, now: float = 0.0) -> Any:
    plan = scheduler.schedule(now)
    return scheduler.update(plan, answer(plan, token), now)


def filled(*prompts: Any, act: Any = lambda sampling, outputs: None, **options: Any) -> Any:
    tokens = options.pop("max_tokens", 8)
    scheduler = create_scheduler(parts=[Adding(act)], block_size=4, **options)
    for request in create_requests(*prompts, max_tokens=tokens):
        scheduler.add(request)
    return scheduler


def test_appended_tokens_come_with_the_drawn_one_and_are_computed_in_the_next_step() -> None:
    lacking: list[bool] = []
    scheduler = filled(5, act=lambda sampling, outputs: lacking.append(outputs.extend(sampling[0], (11, 12))))
    (output,) = run(scheduler)
    assert output.tokens == (7, 11, 12) and lacking == [True]
    entry = scheduler.entries["0"]
    assert not entry.decoding and entry.sequence.length == 8
    assert spans(scheduler.schedule(0.0)) == [("0", 5, 8)]


def test_appended_tokens_end_a_sequence_at_its_limit_or_its_end_token() -> None:
    for limit, eos, expected, reason in (
        (3, (), (7, 11, 12), FinishReason.LENGTH),
        (9, (12,), (7, 11, 12), FinishReason.STOP),
        (9, (), (7, 11, 12, 13), None),
    ):
        scheduler = filled(
            5, act=lambda sampling, outputs: outputs.extend(sampling[0], (11, 12, 13)), max_tokens=limit, eos=eos
        )
        (output,) = run(scheduler)
        assert (output.tokens, output.finish_reason) == (expected, reason)
        check_scheduler(scheduler)


def test_nothing_is_appended_to_a_sequence_that_got_no_token_or_has_ended_or_lost_its_row() -> None:
    def act(sampling: Any, outputs: Any) -> None:
        told.append([outputs.extend(entry, (11, 12)) for entry in entries])

    told: list[list[bool]] = []
    scheduler = filled(5, 30, act=act, budget=8)
    entries = [scheduler.entries[name] for name in ("0", "1")]
    outputs = run(scheduler)
    assert [output.tokens for output in outputs] == [(7, 11, 12)] and told == [[True, False]]
    scheduler.queues.preempt(entries[0], 0.0)
    told.clear()
    run(scheduler)
    assert told == [[False, False]]


def test_what_plans_in_flight_sample_of_appended_tokens_is_dropped_and_the_first_unknown_one_counts() -> None:
    scheduler = filled(5)
    plans = [scheduler.schedule(0.0) for _ in range(3)]
    scheduler.part(Adding).act = lambda sampling, outputs: outputs.extend(sampling[0], (8, 9, 10))
    scheduler.update(plans[0], answer(plans[0], 7), 0.0)
    scheduler.part(Adding).act = lambda sampling, outputs: None
    tokens = [list(scheduler.update(plan, answer(plan, 8), 0.0)) for plan in plans[1:]]
    assert tokens == [[], []], "both are known"
    plan = scheduler.schedule(0.0)
    assert spans(plan) == [("0", 7, 9)], "positions that those plans have computed are kept"
    (output,) = scheduler.update(plan, answer(plan, 20), 0.0)
    assert output.tokens == (20,)
    assert [*scheduler.entries["0"].sequence.tokens[5:]] == [7, 8, 9, 10, 20]


def test_a_tenant_pays_for_appended_tokens_too() -> None:
    order = Fair(weight=3.0)
    scheduler = filled(5, act=lambda sampling, outputs: outputs.extend(sampling[0], (11, 12)), order=order)
    run(scheduler)
    assert order.served == {"": 5 + 3 * 3.0}


def test_a_field_reaches_the_sequences_it_names_also_those_without_a_token_unless_they_ended() -> None:
    def act(sampling: Any, outputs: Any) -> None:
        outputs.add("vector", {entry: entry.id.encode() for entry in entries.values()})

    scheduler = filled(5, 30, 3, act=act, budget=9)
    entries = dict(scheduler.entries)
    scheduler.abort("2")
    outputs = run(scheduler)
    assert [(output.request_id, output.tokens, output.vector) for output in outputs] == [
        ("0", (7,), b"0"),
        ("1", (), b"1"),
    ]


def test_log_probabilities_stay_with_their_tokens_when_others_in_the_step_have_ended() -> None:
    scheduler = filled(5, 6, 7)
    plan = scheduler.schedule(0.0)
    records = tuple(TokenLogprobs(-float(place), (), ()) if place != 1 else None for place in range(3))
    scheduler.abort("0")
    result = replace(answer(plan), tokens=(10, 11, 12), logprobs=records)
    outputs = scheduler.update(plan, result, 0.0)
    assert [(output.request_id, output.tokens, output.logprobs) for output in outputs] == [
        ("1", (11,), ()),
        ("2", (12,), (records[2],)),
    ]


def test_preemptions_of_a_step_that_is_not_made_are_told_by_the_next_plan() -> None:
    scheduler = filled(8, 8, blocks=4, host_blocks=8, max_sequences=4)
    first = scheduler.schedule(0.0)
    assert scheduler.schedule(0.0) is None, "the victim's blocks have to be copied to the host first"
    assert scheduler.stats().preemptions == 1
    scheduler.update(first, answer(first), 0.0)
    plans = []
    while len(plans) < 3:
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, answer(plan), 0.0)
        plans.append(plan.preempted)
    assert plans == [("1",), (), ()]


COUNTS = st.lists(st.integers(-1, 4), max_size=4)


@given(counts=COUNTS, most=COUNTS, extra=st.integers(-1, 1), lost=st.sets(st.integers(0, 3)))
def test_a_result_gives_each_segment_one_token_or_as_many_as_its_draft_allows(
    counts: list[int], most: list[int], extra: int, lost: set[int]
) -> None:
    size = min(len(counts), len(most))
    entries: Any = [SimpleNamespace(lost_before=9 if at in lost else 8) for at in range(size)]
    plan: Any = SimpleNamespace(step=8, samples=most)
    result: Any = SimpleNamespace(counts=counts, tokens=(0,) * max(0, sum(counts) + extra))
    right = len(counts) == len(most) and sum(counts) == len(result.tokens)
    for at, (count, limit) in enumerate(zip(counts, most, strict=False)):
        allowed = {1} | ({*range(limit + 1)} if limit > 1 else set()) | ({0} if at in lost else set())
        right = right and count in allowed
    assert valid_counts(plan, result, entries) == right


def test_a_result_without_counts_gives_one_token_each() -> None:
    entries: Any = [SimpleNamespace(lost_before=0)] * 2
    plan: Any = SimpleNamespace(step=1, samples=(3, 1))
    for tokens, right in (((1, 2), True), ((1,), False), ((1, 2, 3), False)):
        result: Any = SimpleNamespace(counts=None, tokens=tokens)
        assert valid_counts(plan, result, entries) == right


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_sequence_that_ends_is_given_nothing_by_the_plans_behind_its_end(steps: int) -> None:
    scheduler = filled(5, 6, max_tokens=3, eos=(2,))
    plans = [scheduler.schedule(0.0) for _ in range(steps)]
    given: dict[str, int] = {}
    for token, plan in zip((2, 7, 7), plans, strict=False):
        for output in scheduler.update(plan, answer(plan, token), 0.0):
            given[output.request_id] = given.get(output.request_id, 0) + len(output.tokens)
            assert output.finish_reason is FinishReason.STOP
    assert given == {"0": 1, "1": 1} and not scheduler.has_work()
