"""Verification: the results of decodes that have a draft."""

import pytest

from holdfast.core.types import FinishReason
from holdfast.lm.parts.speculation.verification import Verification
from holdfast.lm.types import PENDING, StepResult
from tests.scheduling import answer, create_requests, create_scheduler, spans


def speculating(draft, *others, max_tokens, **options):
    """A scheduler with a prompt of six tokens, and others, whose decodes verify `draft`."""

    class Speculating(Verification):
        name = "speculating"

        def draft(self, step):
            return {entry: tuple(draft) for entry, _, _ in step.decodes}

    scheduler = create_scheduler(budget=10, parts=[Speculating()], **options)
    for request in create_requests(6, *others, max_tokens=max_tokens):
        scheduler.add(request)
    plan = scheduler.schedule(0.0)
    scheduler.update(plan, answer(plan), 0.0)
    return scheduler


@pytest.mark.parametrize(("tokens", "following"), [((), 6), ((7,), 7), ((7, 8), 8), ((7, 8, 9), 9)])
def test_a_decode_with_drafts_goes_on_behind_the_tokens_its_result_accepts(tokens, following):
    scheduler = speculating((7, 8), max_tokens=20)
    plan = scheduler.schedule(0.0)
    assert (spans(plan), plan.samples, plan.segments[0].tokens) == ([("0", 6, 9)], (3,), (PENDING, 7, 8))
    assert scheduler.schedule(0.0) is None, "it sits out until its outcome is known"
    outputs = scheduler.update(plan, StepResult(plan.step, tokens, 0.0, counts=(len(tokens),)), 0.0)
    assert [output.tokens for output in outputs] == ([tokens] if tokens else [])
    assert scheduler.schedule(0.0).segments[0].start == following


def test_a_draft_is_cut_at_the_budget_the_limit_and_free_blocks():
    assert spans(speculating(range(50), max_tokens=50).schedule(0.0)) == [("0", 6, 16)]
    assert spans(speculating(range(50), max_tokens=3).schedule(0.0)) == [("0", 6, 8)]
    scheduler = speculating(range(50), 4, max_tokens=6, blocks=4, block_size=4)
    assert spans(scheduler.schedule(0.0)) == [("0", 6, 8), ("1", 4, 8)]


def test_a_sequence_ends_at_its_end_token_among_several():
    scheduler = speculating((7, 8), max_tokens=20, eos=(8,))
    plan = scheduler.schedule(0.0)
    (output,) = scheduler.update(plan, StepResult(plan.step, (7, 8, 9), 0.0, counts=(3,)), 0.0)
    assert (output.tokens, output.finish_reason) == ((7, 8), FinishReason.STOP)
    assert scheduler.stats().blocks_used == 0


@pytest.mark.parametrize(("tokens", "counts"), [((1, 2, 3, 4), (4,)), ((1, 2), (1,)), ((1, 2), None), ((1,), (1, 0))])
def test_a_result_with_other_counts_than_planned_is_refused(tokens, counts):
    scheduler = speculating((7, 8), max_tokens=20)
    plan = scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match="is due"):
        scheduler.update(plan, StepResult(plan.step, tokens, 0.0, counts=counts), 0.0)
