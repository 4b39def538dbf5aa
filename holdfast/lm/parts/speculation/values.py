"""The values that a draft head adds to plans and results."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from holdfast.lm.types.plan import PartPlan
from holdfast.lm.types.result import PartResult


@dataclass(frozen=True, slots=True)
class HeadPlan(PartPlan):
    """A draft head's work in a step."""

    keeps: bool = False
    """Whether the head reads the step's hidden states. Otherwise it forgets the sequences of the step."""
    drafts: int = 0
    """Number of tokens to guess after the last token of each sampling segment."""


@dataclass(frozen=True, slots=True)
class HeadResult(PartResult):
    """The guesses of a draft head."""

    drafts: tuple[abc.Sequence[int], ...] = ()
    """For each sampling segment of the step that guessed, guesses at the tokens after the last one that it gave.

    Later steps name these tokens by `GUESSED`. On a GPU this result comes with that of the next step.
    """
    passes: int = 0
    """Number of passes through the head: the number of guesses for each segment."""
    seconds: float = 0.0
    """Seconds that the device spent on the head."""
    apart: bool = False
    """Whether `StepResult.seconds` does not include these seconds."""

    @property
    def seconds_apart(self) -> float:
        return self.seconds if self.apart else 0.0
