"""The planner's sides of parts that are made of the configuration and the shape alone, in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.lm.parts.adapters import planner as adapters
from holdfast.lm.parts.contracts import planner as contracts
from holdfast.lm.parts.grammars import planner as grammars
from holdfast.lm.parts.moves import planner as moves
from holdfast.lm.parts.pauses import planner as pauses
from holdfast.lm.parts.penalties import planner as penalties
from holdfast.lm.parts.planning import Planning
from holdfast.lm.parts.prompts import planner as prompts
from holdfast.lm.parts.sleep import planner as sleep
from holdfast.lm.parts.tenants import planner as tenants
from holdfast.lm.parts.tiers import planner as tiers
from holdfast.lm.parts.vectors import planner as vectors
from holdfast.lm.scheduler.part import Part

STANDARD: tuple[Callable[[Planning], Sequence[Part]], ...] = (
    contracts.make_parts,
    prompts.make_parts,
    vectors.make_parts,
    tenants.make_parts,
    penalties.make_parts,
    grammars.make_parts,
    adapters.make_parts,
    tiers.make_parts,
    moves.make_parts,
    pauses.make_parts,
    sleep.make_parts,
)
"""Functions that make the parts, none if the configuration or the shape asks for none.

Engines and simulations have these parts after those that need a device: drafts have a step's budget before the tokens
that a grammar forces.
"""


def standard_parts(planning: Planning) -> list[Part]:
    """The parts of `STANDARD`."""
    return [part for make in STANDARD for part in make(planning)]
