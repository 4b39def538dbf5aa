"""The parts of a scheduler that need nothing of an engine's process, in their order."""

from __future__ import annotations

from holdfast.lm.parts.adapters import planner as adapters
from holdfast.lm.parts.grammars import planner as grammars
from holdfast.lm.parts.moves import planner as moves
from holdfast.lm.parts.penalties import planner as penalties
from holdfast.lm.parts.planning import Planning
from holdfast.lm.parts.prompts import planner as prompts
from holdfast.lm.parts.tiers import planner as tiers
from holdfast.lm.parts.vectors import planner as vectors
from holdfast.lm.scheduler.part import Part


def standard_parts(planning: Planning) -> list[Part]:
    """These parts, as far as the configuration and the shape ask for them. An engine's process has further ones."""
    return [
        *prompts.make_parts(planning),
        *vectors.make_parts(planning),
        *penalties.make_parts(planning),
        *grammars.make_parts(planning),
        *adapters.make_parts(planning),
        *tiers.make_parts(planning),
        *moves.make_parts(planning),
    ]
