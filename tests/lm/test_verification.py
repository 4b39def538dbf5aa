"""Which drafted tokens are given, and that tokens are distributed as without drafts."""

from __future__ import annotations

import pytest
import torch

from holdfast.core.types import TokenLogprobs
from holdfast.lm.kernels.sampling.sample import sample
from holdfast.lm.parts.vectors.values import VectorResult
from holdfast.lm.types import PENDING, Sampling, Segment, StepPlan, StepResult

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)


def test_the_drafts_of_a_plan_are_the_ends_of_its_sampling_segments() -> None:
    segments = (
        Segment("a", 0, 4, 7, (PENDING, 8, 9), GREEDY),
        Segment("b", 1, 0, 2, (5, 6), None),
        Segment("c", 2, 3, 4, (PENDING,), GREEDY),
        Segment("d", 3, 9, 11, (1, 2), GREEDY),
    )
    assert StepPlan(0, segments, samples=(3, 1, 2)).drafts == [(8, 9), (), (2,)]
    assert StepPlan(0, segments).drafts is None


@pytest.mark.parametrize(
    ("drawn", "given"), [((8, 9, 3), (8, 9, 3)), ((8, 7, 3), (8, 7)), ((1, 9, 3), (1,)), ((9, 8, 3), (9,))]
)
def test_tokens_are_given_up_to_the_first_that_differs_from_its_guess(
    drawn: tuple[int, ...], given: tuple[int, ...]
) -> None:
    result = StepResult(0, (6, *drawn, 5), 0.1).verified([(), (8, 9), ()])
    assert (result.tokens, result.counts) == ((6, *given, 5), (1, len(given), 1))


def test_log_probabilities_stay_with_their_tokens() -> None:
    told = [TokenLogprobs(-float(token), (), ()) for token in (1, 9, 3)]
    result = StepResult(0, (1, 9, 3), 0.1, logprobs=(told[0], None, told[2])).verified([(2,), ()])
    assert (result.tokens, result.logprobs) == ((1, 3), (told[0], told[2]))


def test_each_segment_keeps_the_hidden_state_of_its_last_token() -> None:
    result = StepResult(0, (8, 9, 3, 5), 0.1, parts=(VectorResult(vectors=(b"", b"after 8", b"", b"state")),)).verified(
        [(8, 7), ()]
    )
    assert (result.tokens, result.counts, result.part(VectorResult).vectors) == (
        (8, 9, 5),
        (2, 1),
        (b"after 8", b"state"),
    )


@pytest.mark.parametrize("draft", range(4))
@pytest.mark.parametrize("filters", [(0, 1.0), (3, 1.0), (0, 0.8)])
def test_tokens_are_distributed_as_without_drafts(draft: int, filters: tuple[int, float]) -> None:
    """Of two positions, whatever the guess for the first one is. Its successors have a distribution of their own."""
    count, (top_k, top_p) = 6000, filters
    logits = torch.tensor([[0.5, 1.5, -0.5, 0.2], [1.0, -1.0, 0.3, 0.9]])
    seeds = torch.arange(count)
    drawn = [
        sample(
            row.expand(count, 4).clone(),
            torch.full((count,), 0.9),
            torch.full((count,), top_k),
            torch.full((count,), top_p),
            seeds,
            torch.full((count,), place + 10),
            any_random=True,
            any_filtered=filters != (0, 1.0),
        )
        for place, row in enumerate(logits)
    ]
    tokens = tuple(torch.stack(drawn, 1).flatten().tolist())
    result = StepResult(0, tokens, 0.0).verified([(draft,)] * count)
    assert result.counts is not None
    rest = iter(result.tokens)
    given = [[next(rest) for _ in range(number)] for number in result.counts]
    first, second = [each[0] for each in given], [each[1] for each in given if len(each) == 2]
    assert second if first.count(draft) else not second
    for row, found in zip(logits, (first, second), strict=True):
        scores = row / 0.9
        if top_k:
            scores[scores < scores.topk(top_k).values[-1]] = -torch.inf
        order = scores.softmax(0).sort(descending=True)
        shares = order.values * (order.values.cumsum(0) - order.values < top_p)
        expected = torch.zeros(4).scatter(0, order.indices, shares / shares.sum())
        for token in range(4 if found else 0):
            spread = (float(expected[token] * (1 - expected[token])) / len(found)) ** 0.5
            assert abs(found.count(token) / len(found) - float(expected[token])) <= 4.5 * spread
