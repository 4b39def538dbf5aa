"""SentTokens: the sequences whose tokens the device must know, and when they must be sent."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.lm.scheduler.entries import NO_ROW, Entry
from holdfast.lm.scheduler.part import PartStep

NOWHERE = (NO_ROW, 0)


class SentTokens:
    """Once the device has a row's earlier tokens, it adds the tokens of sampling segments itself."""

    def __init__(self, *, every_step: bool = False) -> None:
        """`every_step`: the device keeps no tokens, and must get them with each step that samples."""
        self._every_step = every_step
        self._sent_in: dict[Entry, tuple[int, int]] = {}
        """For each sequence, the row that its tokens were sent to, and how often it had been preempted by then."""

    def __bool__(self) -> bool:
        """Whether there are any such sequences."""
        return bool(self._sent_in)

    def add(self, entry: Entry) -> None:
        """Note a sequence whose tokens the device must know."""
        self._sent_in[entry] = NOWHERE

    def remove(self, entry: Entry) -> None:
        """Note that a sequence has ended. Ignores one that was not added."""
        self._sent_in.pop(entry, None)

    def due(self, step: PartStep) -> Iterator[Entry]:
        """The sequences whose tokens must be sent with this step; they count as sent."""
        sent_in = self._sent_in
        for entry, draw in zip(step.planned, step.draws, strict=True):
            if draw is None and entry in sent_in:
                sent_in[entry] = NOWHERE  # the segment that samples will not have these tokens
        for entry in step.sampling:
            place = entry.row, entry.sequence.preemptions
            if entry in sent_in and (self._every_step or sent_in[entry] != place):
                sent_in[entry] = place
                yield entry
