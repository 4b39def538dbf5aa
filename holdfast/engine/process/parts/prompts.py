"""Log probabilities of the tokens of prompts."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.engine.process.part_builder import PartBuilder
from holdfast.lm.parts.planning import Planning
from holdfast.lm.parts.prompts.planner import make_parts
from holdfast.lm.scheduler.part import Part


class PromptBuilder(PartBuilder):
    """Builds the planner's side. All of its messages are those of requests."""

    name = "prompts"

    def planners(self, planning: Planning) -> Iterable[Part]:
        return make_parts(planning)
