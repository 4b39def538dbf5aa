"""PromptPart: each token of a prompt is reported once, and never more than a result has."""

from dataclasses import replace

import pytest

from holdfast.lm.parts.prompts.values import PromptPlan, PromptResult
from tests.lm.scheduler.test_scheduler import run_step
from tests.scheduling import answer, create_requests, create_scheduler


def reporting(plan):
    """A result whose records are the tokens that are reported, and whose ranks are ten times these."""
    targets = [each.targets for each in plan.part(PromptPlan).reports]
    records = tuple(tuple((token, (), ()) for token in each) for each in targets)
    return replace(
        answer(plan), parts=(PromptResult(records, tuple(tuple(10 * token for token in each) for each in targets)),)
    )


def test_each_token_of_a_prompt_but_the_first_is_reported_once_whatever_is_cached_or_preempted():
    scheduler = create_scheduler(budget=6, blocks=11, block_size=2)
    plain, asking = create_requests(tuple(range(1, 8)), tuple(range(1, 15)), max_tokens=6)
    scheduler.add(plain)
    while scheduler.has_work():
        run_step(scheduler)
    scheduler.add(replace(asking, params=replace(asking.params, prompt_logprobs=0)))
    scheduler.add(replace(plain, id="beside", priority=-1))
    records, ranks, tokens, preempted = [], [], 0, False
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        preempted |= bool(plan.preempted)
        for output in scheduler.update(plan, reporting(plan), 0.0):
            records += [record[0] for record in output.prompt_logprobs]
            ranks += output.prompt_ranks
            if output.request_id == asking.id:
                tokens += len(output.tokens)
                assert output.cached_tokens == 0
    assert records == list(asking.prompt[1:]) and ranks == [10 * token for token in records]
    assert tokens == 6 and preempted


def test_named_tokens_are_reported_with_the_prompt_tokens_that_they_are_for():
    scheduler = create_scheduler(budget=3, block_size=2)
    (request,) = create_requests(8, prompt_logprobs=0, prompt_targets=((), (), (7,), (8, 9)))
    scheduler.add(request)
    found = []
    while scheduler.has_work():
        plan = scheduler.schedule(0.0)
        for report in plan.part(PromptPlan).reports:
            found += zip(report.targets, report.named or ((),) * len(report.targets), strict=True)
        scheduler.update(plan, reporting(plan), 0.0)
    assert found == [*zip(request.prompt[1:], [(), (), (7,), (8, 9), (), (), ()], strict=True)]


def test_a_result_that_does_not_report_what_its_plan_asks_is_an_error():
    scheduler = create_scheduler()
    (request,) = create_requests(5, prompt_logprobs=0)
    scheduler.add(request)
    plan = scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match="reports 1 prompts; got 0"):
        scheduler.update(plan, answer(plan), 0.0)


def test_an_aborted_prompt_reports_nothing_more():
    scheduler = create_scheduler(budget=3)
    (request,) = create_requests(9, prompt_logprobs=0)
    scheduler.add(request)
    plan = scheduler.schedule(0.0)
    scheduler.abort(request.id)
    assert list(scheduler.update(plan, reporting(plan), 0.0)) == []
