"""What grammars add to a plan and to a result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from holdfast.lm.types.plan import PartPlan
from holdfast.lm.types.result import PartResult
from holdfast.lm.types.sampling import Sampling


class Answer(NamedTuple):
    """What a sequence with a grammar has answered so far."""

    row: int
    start: int
    """Tokens of its prompt."""
    tokens: tuple[int, ...]
    tenant: str = ""
    """Whose it is. The time that its grammar takes counts for this tenant."""


class ConstrainedRow(NamedTuple):
    """A sampled row whose token a grammar restricts."""

    at: int
    """Its index among the step's sampled rows, of which a segment with a draft has several."""
    row: int
    """Of the executor."""
    start: int
    """The segment's, as are those below."""
    stop: int
    tokens: tuple[int, ...]
    sampling: Sampling
    place: int
    """Index of its segment among those that sample, in plan order."""


class Forced(NamedTuple):
    """Tokens that must follow a sampled one, as its sequence's grammar allows no other."""

    at: int
    """Index of the sampling segment, in plan order."""
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GrammarPlan(PartPlan):
    """What the device must know of answers that follow a grammar."""

    answers: tuple[Answer, ...] = ()
    """Of sampling segments with a grammar: the first one of a sequence in its row has it."""


@dataclass(frozen=True, slots=True)
class GrammarResult(PartResult):
    """What grammars say of the tokens that a step gave."""

    forced: tuple[Forced, ...] = ()
    """What must follow some of the tokens. Left out where `Sampling.skips` is false."""
