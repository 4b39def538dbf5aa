"""StepResult: what one step gave."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, replace
from typing import NamedTuple, Self, TypeVar

from holdfast.core.types import TokenLogprobs
from holdfast.lm.types.plan import nothing


class CopyTime(NamedTuple):
    """How long the copies took that one plan began in one direction."""

    step: int
    inward: bool
    """Host to device; otherwise device to host."""
    bytes: int
    seconds: float


class TierCopied(NamedTuple):
    """How far the copies between the device and the host have come."""

    swapped_out: int = -1
    """Number of a plan: its copies to the host, and those of all plans before it, are complete."""
    swapped_in: int = -1
    """The number of such a plan for copies to the device."""
    times: tuple[CopyTime, ...] = ()
    """The copies that were seen to complete since the last result."""


NONE_COPIED = TierCopied()


@dataclass(frozen=True, slots=True)
class PartResult:
    """What a part's work in a step gave. Every field has a default that stands for nothing."""

    def of_accepted(self, last: abc.Sequence[int]) -> Self:
        """This result of a step with drafts, where `last` are the places of the last accepted token of each draw."""
        return self


P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave: no, one or several tokens for each sampling segment of its plan."""

    step: int
    tokens: tuple[int, ...]
    """The tokens of all sampling segments, in plan order."""
    seconds: float
    """Time that the device spent on the step. In a pipeline, that of all stages and of what they send, without their
    waits for each other: what the step takes alone in the pipeline."""
    counts: abc.Sequence[int] | None = None
    """How many of `tokens` each sampling segment gave, in plan order; None: one each."""
    copied: TierCopied = NONE_COPIED
    """How far the copies between the tiers have come."""
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """Of each of the tokens; None for one whose request does not ask. Empty: no request of the step does."""
    stages: tuple[float, ...] = ()
    """The time that each stage of a pipeline spent on the step; empty for one stage."""
    parts: tuple[PartResult, ...] = ()
    """What the work of parts gave. A part without news is left out."""

    def part(self, kind: type[P]) -> P:
        """What the part with results of this class gave; `kind()` where it gave nothing."""
        for part in self.parts:
            if isinstance(part, kind):
                return part
        return nothing(kind)

    def with_parts(self, *parts: PartResult) -> StepResult:
        """This result, with the results of more parts."""
        return replace(self, parts=(*self.parts, *parts)) if parts else self

    def verified(self, drafts: abc.Sequence[abc.Sequence[int]]) -> StepResult:
        """This result, with a token drawn at every sampled position, cut to those that follow from right guesses.

        Position by position the model draws what it would draw without a draft, with the noise of that position. A draw
        is the sequence's next token if all guesses in front of it were right. So the tokens are those that it would
        have had, one by one: also with a temperature, for the same seed. (Rejection sampling, as by Leviathan et al.
        2023, would keep the distribution only.)
        """
        kept: list[int] = []
        last: list[int] = []
        counts: list[int] = []
        at, tokens = 0, self.tokens
        for draft in drafts:
            right = 0
            while right < len(draft) and tokens[at + right] == draft[right]:
                right += 1
            kept.extend(range(at, at + right + 1))
            counts.append(right + 1)
            last.append(at + right)
            at += len(draft) + 1
        logprobs = tuple([self.logprobs[place] for place in kept]) if self.logprobs else ()
        parts = tuple([part.of_accepted(last) for part in self.parts])
        given = tuple([tokens[place] for place in kept])
        return replace(self, tokens=given, counts=tuple(counts), logprobs=logprobs, parts=parts)
