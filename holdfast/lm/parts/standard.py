"""The parts that serve what any request may ask for, in their order."""

from __future__ import annotations

from holdfast.lm.parts.grammars.planner import GrammarPart
from holdfast.lm.parts.penalties.planner import PenaltyPart
from holdfast.lm.parts.prompts.planner import PromptPart
from holdfast.lm.parts.vectors.planner import VectorPart
from holdfast.lm.scheduler.part import Part


def parts_of_requests() -> tuple[Part, ...]:
    """The parts of a scheduler over a paged cache, for what its requests may ask for."""
    return PromptPart(), VectorPart(), PenaltyPart(), GrammarPart()


def parts_of_rows() -> tuple[Part, ...]:
    """The parts of a scheduler over padded rows, for what its requests may ask for. Its device keeps no tokens."""
    return (PenaltyPart(every_step=True),)
