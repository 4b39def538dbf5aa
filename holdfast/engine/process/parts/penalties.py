"""Penalties for tokens that a sequence has had."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.engine.process.part_builder import PartBuilder
from holdfast.lm.parts.penalties.planner import make_parts
from holdfast.lm.parts.planning import Planning
from holdfast.lm.scheduler.part import Part


class PenaltyBuilder(PartBuilder):
    """Builds the planner's side. All of its messages are those of requests."""

    name = "penalties"

    def planners(self, planning: Planning) -> Iterable[Part]:
        return make_parts(planning)
