"""StepResult: the tokens of one step, and how long it took."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, replace
from typing import NamedTuple, Self, TypeVar

from holdfast.core.types import TokenLogprobs
from holdfast.lm.types.plan import nothing


class CopyTime(NamedTuple):
    """Time of the copies that one plan began in one direction."""

    step: int
    inward: bool
    """Whether they went from host to device; otherwise from device to host."""
    bytes: int
    seconds: float


class TierCopied(NamedTuple):
    """Progress of the copies between the device and the host."""

    swapped_out: int = -1
    """Number of a plan: its copies to the host, and those of all plans before it, are complete."""
    swapped_in: int = -1
    """Number of a plan: its copies to the device, and those of all plans before it, are complete."""
    times: tuple[CopyTime, ...] = ()
    """Times of the copies that were seen to complete since the last result."""


NONE_COPIED = TierCopied()


@dataclass(frozen=True, slots=True)
class PartResult:
    """The result of a part's work in a step. Every field has a default that stands for nothing."""

    def of_accepted(self, last: abc.Sequence[int]) -> Self:
        """This result of a step with drafts, where `last` are the places of the last accepted token of each draw."""
        return self

    @property
    def seconds_apart(self) -> float:
        """Seconds that the device spent on the part's work and that `StepResult.seconds` does not include."""
        return 0.0

    @property
    def of_each_rank(self) -> bool:
        """Whether every rank that shares the model gives such a result, so that the planner needs all of them."""
        return False


P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step: no, one or several tokens for each sampling segment of its plan."""

    step: int
    tokens: tuple[int, ...]
    """The tokens of all sampling segments, in plan order."""
    seconds: float
    """Seconds that the device spent on the step.

    In a pipeline, the time of all stages and of their messages, without their waits for each other: the time that the
    step takes alone in the pipeline.
    """
    counts: abc.Sequence[int] | None = None
    """Number of `tokens` that each sampling segment gave, in plan order; None: one each."""
    copied: TierCopied = NONE_COPIED
    """Progress of the copies between the tiers."""
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """Log probabilities of each token; None if its request does not ask. Empty: no request of the step asks."""
    stages: tuple[float, ...] = ()
    """Seconds that each stage of a pipeline spent on the step; empty for one stage."""
    parts: tuple[PartResult, ...] = ()
    """Results of the parts. A part without news is left out."""

    def part(self, kind: type[P]) -> P:
        """The result of the part with results of this class; `kind()` if it gave nothing."""
        for part in self.parts:
            if isinstance(part, kind):
                return part
        return nothing(kind)

    @property
    def seconds_apart(self) -> float:
        """Seconds that the device spent on work of parts after the step, which `seconds` does not include."""
        return sum([part.seconds_apart for part in self.parts])

    def with_parts(self, *parts: PartResult) -> StepResult:
        """This result, with the results of more parts."""
        return replace(self, parts=(*self.parts, *parts)) if parts else self

    def verified(self, drafts: abc.Sequence[abc.Sequence[int]]) -> StepResult:
        """This result, with a token drawn at every sampled position, cut to the tokens that follow from right guesses.

        At each position the model draws the same token as it would without a draft, with the noise of that position. A
        draw is the sequence's next token if all guesses before it were right. So the tokens are the same as one by one,
        also with a temperature, for the same seed. (Rejection sampling, as by Leviathan et al. 2023, would keep the
        distribution only.)
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
