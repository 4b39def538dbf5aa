"""Speculation: guessed tokens, several of which one step verifies."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.engine.process.part_builder import PartBuilder, excluded
from holdfast.lm.parts.planning import Planning
from holdfast.lm.parts.speculation.choice import make_drafter, make_parts
from holdfast.lm.scheduler.part import Part
from holdfast.lm.types import EngineShape


class SpeculationBuilder(PartBuilder):
    """Builds the drafter, which guesses tokens so that one step verifies several of them."""

    name = "speculation"
    is_optional = True

    def allocated(self, shape: EngineShape) -> EngineShape:
        """Raises ValueError if the configuration names a drafter, and the engine can have none."""
        config, reason = self.site.config, excluded((self.name,), self.site)
        if reason and config.speculation not in ("auto", "off"):
            raise ValueError(f"speculation is {config.speculation}, and {reason}")
        self._drafter = None if reason else make_drafter(config, shape, self.site.device.kind)
        return shape

    def is_priced(self, shape: EngineShape) -> bool:
        return bool(self._drafter)

    def planners(self, planning: Planning) -> Iterable[Part]:
        return make_parts(planning, self._drafter)
