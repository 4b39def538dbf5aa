"""Pace: the planner learns from clients how many tokens came later than the latency target."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from holdfast.engine import messages
from holdfast.engine.process.handler import Handler, Refusal, no_answer
from holdfast.engine.process.part_builder import PartBuilder, Served
from holdfast.lm.scheduler.scheduler import Scheduler


class PaceHandler(Handler):
    """Passes on what clients say of the times between tokens."""

    receives = (messages.TokenWaits,)

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def receive(self, message: messages.TokenWaits) -> None:
        # A client may be of another team: what cannot be true is not learned.
        if 0 <= message.late <= message.count:
            self._scheduler.note_waits(message.count, message.late)


class PaceBuilder(PartBuilder):
    """Builds the handler of reports about the pace."""

    name = "pace"
    refusals: ClassVar[dict[type, Refusal]] = {messages.TokenWaits: no_answer}

    def handlers(self, served: Served) -> Iterable[Handler]:
        return [PaceHandler(served.scheduler)] if self.site.config.tbt_seconds else []
