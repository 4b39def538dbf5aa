"""Speculation: guessed tokens, several of which one step verifies."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.engine.process.part_builder import PartBuilder
from holdfast.lm.parts.planning import Planning
from holdfast.lm.parts.speculation.choice import make_drafter, make_parts
from holdfast.lm.scheduler.part import Part
from holdfast.lm.types import EngineShape


class SpeculationBuilder(PartBuilder):
    """Builds the drafter, which guesses tokens so that one step verifies several of them."""

    name = "speculation"

    def allocated(self, shape: EngineShape) -> EngineShape:
        self._drafter = make_drafter(self.site.config, shape, self.site.device.kind)
        return shape

    def is_priced(self, shape: EngineShape) -> bool:
        return bool(self._drafter)

    def planners(self, planning: Planning) -> Iterable[Part]:
        return make_parts(planning, self._drafter)
