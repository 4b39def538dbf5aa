"""The parts that serve the options of ordinary requests, in their order."""

from __future__ import annotations

from holdfast.lm.parts.grammars.planner import GrammarPart
from holdfast.lm.parts.penalties.planner import PenaltyPart
from holdfast.lm.parts.prompts.planner import PromptPart
from holdfast.lm.parts.vectors.planner import VectorPart
from holdfast.lm.scheduler.part import Part


def parts_of_requests() -> tuple[Part, ...]:
    """The parts of a scheduler over a paged cache, for the options of its requests."""
    return PromptPart(), VectorPart(), PenaltyPart(), GrammarPart()


def parts_of_rows() -> tuple[Part, ...]:
    """The parts of a scheduler over padded rows, for the options of its requests. Its device keeps no tokens."""
    return (PenaltyPart(every_step=True),)
