"""TallyBuilder: joins the tally to an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.engine.process.handler import Handler, refusal
from holdfast.engine.process.part_builder import Order, PartBuilder, Served
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.part import DevicePart
from holdfast.lm.models.base import Model
from holdfast.lm.parts.message import Message
from holdfast.lm.parts.planning import Planning
from holdfast.lm.scheduler.part import Part
from tests.tally.device import TallyDevice
from tests.tally.messages import AskTally, Tallied, TallyRefused
from tests.tally.options import TallyOptions
from tests.tally.planner import TallyPart


class TallyHandler(Handler):
    """Answers with the tally."""

    receives = (AskTally,)

    def __init__(self, part: TallyPart) -> None:
        self._part = part
        self._asked: list[int] = []

    def receive(self, message: AskTally) -> None:
        self._asked.append(message.number)

    def answers(self) -> Iterable[Message]:
        asked, self._asked = self._asked, []
        return [Tallied(number, self._part.steps, self._part.positions) for number in asked]


class TallyBuilder(PartBuilder):
    """Builds the tally."""

    name = "tally"
    refusals = {AskTally: refusal(TallyRefused, "this engine counts nothing; give it tally_every")}  # noqa: RUF012

    @staticmethod
    def wanted(config: EngineConfig) -> bool:
        return config.part(TallyOptions).tally_every > 0

    @staticmethod
    def device_parts(
        config: EngineConfig, order: Order, model: Model, parts: Sequence[DevicePart]
    ) -> Sequence[DevicePart]:
        return (TallyDevice(),)

    def planners(self, planning: Planning) -> Iterable[Part]:
        return (TallyPart(planning.config.part(TallyOptions).tally_every),)

    def handlers(self, served: Served) -> Iterable[Handler]:
        return (TallyHandler(served.scheduler.part(TallyPart)),)
