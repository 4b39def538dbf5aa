"""The values that grammars add to a plan and to a result."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.lm.grammar.rows import Answer, Forced
from holdfast.lm.types.plan import PartPlan
from holdfast.lm.types.result import PartResult


@dataclass(frozen=True, slots=True)
class GrammarPlan(PartPlan):
    """The part of a plan from which the device learns the answers that follow a grammar."""

    answers: tuple[Answer, ...] = ()
    """Answers of sampling segments with a grammar. Only the first segment of a sequence in its row has one."""


@dataclass(frozen=True, slots=True)
class GrammarResult(PartResult):
    """The tokens that grammars force after those that a step gave."""

    forced: tuple[Forced, ...] = ()
    """Tokens that must follow some of the tokens. Left out if `Sampling.skips` is false."""
