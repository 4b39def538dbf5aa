"""PenaltyPart: gives the device the tokens that penalties, bad words and limits of thinking read."""

from __future__ import annotations

from holdfast.lm.parts.planning import Planning
from holdfast.lm.parts.sent_tokens import SentTokens
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.part import Part, PartStep
from holdfast.lm.types import History, PartPlan
from holdfast.lm.types.penalties import PenaltyPlan


class PenaltyPart(Part):
    """The device counts a row's new tokens itself, once it has the tokens with which the sequence entered the row."""

    name = "penalties"

    def __init__(self, *, every_step: bool = False) -> None:
        """`every_step`: the device counts nothing itself, and needs the tokens with each step that samples."""
        self.awake = False
        self._sent = SentTokens(every_step=every_step)

    def added(self, entry: Entry) -> None:
        if entry.sampling.counts:
            self._sent.add(entry)
            self.awake = True

    def ended(self, entry: Entry) -> None:
        self._sent.remove(entry)
        self.awake = bool(self._sent)

    def finish(self, step: PartStep) -> PartPlan | None:
        histories = tuple([self._history(entry) for entry in self._sent.due(step)])
        return PenaltyPlan(histories) if histories else None

    @staticmethod
    def _history(entry: Entry) -> History:
        shaping = entry.sampling.shaping
        assert shaping is not None
        return History(entry.row, tuple(entry.sequence.tokens[shaping.history_start :]))


def make_parts(planning: Planning) -> tuple[PenaltyPart, ...]:
    """The part of a scheduler. A device of padded rows keeps no tokens, so each step names them."""
    return (PenaltyPart(every_step=planning.on_rows),)
