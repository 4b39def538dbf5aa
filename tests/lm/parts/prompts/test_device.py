"""Log probabilities of prompt tokens on the executor are those of the rows that would be sampled there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from holdfast.core.types import TokenLogprobs
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.executor import PagedExecutor
from holdfast.lm.models.base import HiddenModel, Model
from holdfast.lm.parts.prompts.device import PromptDevice
from holdfast.lm.parts.prompts.values import PromptPlan, PromptReport, PromptResult
from holdfast.lm.types import Segment, StepPlan, TableWrite
from tests.lm.execution.test_executor import GREEDY, PROMPT, model, prefill
from tests.paged import allocated

__all__ = ["model"]


@pytest.fixture
def executor(model: Model) -> Iterator[PagedExecutor]:
    assert isinstance(model, HiddenModel)
    config = EngineConfig(max_sequences=4, block_size=4, token_budget=16)
    executor = allocated(model, config, 32, parts=[PromptDevice(model)]).executor
    yield executor
    executor.close()


def after(executor: PagedExecutor, length: int) -> TokenLogprobs:
    """The log probability of the token drawn after the first tokens of the prompt, with two alternatives."""
    segment = Segment("1", 1, 0, length, PROMPT[:length], replace(GREEDY, logprobs=2))
    executor.submit(StepPlan(0, (segment,), (TableWrite(1, 0, tuple(range(8, 16))),)))
    (told,) = executor.collect().logprobs
    assert told is not None
    return told


def test_they_are_those_of_draws_after_the_same_tokens(executor: PagedExecutor) -> None:
    expected = [after(executor, length) for length in range(1, len(PROMPT))]
    targets = tuple(each.top_ids[0] for each in expected)
    plan = prefill(0, GREEDY)
    executor.submit(plan)
    alone = executor.collect().tokens
    executor.submit(
        replace(plan, parts=(PromptPlan(reports=(PromptReport(0, 0, targets, 2), PromptReport(0, 2, (5,), 0))),))
    )
    result = executor.collect()
    told, other = result.part(PromptResult).logprobs
    ranks, other_ranks = result.part(PromptResult).ranks
    assert ranks == (1,) * len(targets) and len(other_ranks) == 1
    assert (other_ranks[0] == 1) == (targets[2] == 5)
    assert result.tokens == alone
    assert [each.top_ids for each in told] == [each.top_ids for each in expected]
    for each, right in zip(told, expected, strict=True):
        assert each.logprob == pytest.approx(right.top_logprobs[0], abs=1e-5)
        assert each.top_logprobs == pytest.approx(right.top_logprobs, abs=1e-5)
    assert len(other) == 1 and other[0].top_ids == ()


def test_a_step_that_reports_none_has_no_result(executor: PagedExecutor) -> None:
    executor.submit(prefill(0, GREEDY))
    assert executor.collect().parts == ()
