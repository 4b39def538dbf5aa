"""Which tokens of a step with drafts are given: those that were drafted right, and one more. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast.lm.types import StepPlan, StepResult


def drafts_of(plan: StepPlan) -> list[tuple[int, ...]] | None:
    """The drafted tokens of each sampling segment, in plan order; None for a plan without any."""
    if plan.samples is None:
        return None
    columns = plan.columns
    pairs = zip(columns.column("tokens"), columns.column("sampling"), strict=True)
    sampled = [tokens for tokens, sampling in pairs if sampling is not None]
    return [tokens[len(tokens) - most + 1 :] for tokens, most in zip(sampled, plan.samples, strict=True)]


def verified(result: StepResult, drafts: Sequence[Sequence[int]]) -> StepResult:
    """A result that has a token drawn at every sampled position, cut to the tokens that are given.

    Position by position the model draws what it would draw without a draft, with the noise of that position. A draw is
    the sequence's next token if all guesses in front of it were right. So the tokens are those that it would have had,
    one by one: also with a temperature, for the same seed. (Rejection sampling, as by Leviathan et al. 2023, would keep
    the distribution only.)
    """
    kept: list[int] = []
    counts: list[int] = []
    at, tokens = 0, result.tokens
    for draft in drafts:
        right = 0
        while right < len(draft) and tokens[at + right] == draft[right]:
            right += 1
        kept.extend(range(at, at + right + 1))
        counts.append(right + 1)
        at += len(draft) + 1
    logprobs = tuple([result.logprobs[place] for place in kept]) if result.logprobs else ()
    return replace(result, tokens=tuple([tokens[place] for place in kept]), counts=tuple(counts), logprobs=logprobs)
