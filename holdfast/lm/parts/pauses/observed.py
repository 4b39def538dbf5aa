"""Observed: the gaps between turns, as a tracker learns them once for the memory and for the part."""

from __future__ import annotations

from typing import Protocol, cast

from holdfast.core.pause import Pause
from holdfast.lm.memory.retention import Turns
from holdfast.lm.memory.turns import APPRAISALS, NEW, Departure, Start, TurnTracker
from holdfast.lm.parts.pauses.windows import Windows
from holdfast.lm.scheduler.entries import Entry


class Observed(Protocol):
    """Knowledge of the gaps between turns, and of what the part sees of sequences."""

    windows: Windows
    """When turns are expected, as far as known now."""

    def started(self, entry: Entry, now: float) -> None:
        """A sequence has a row and blocks."""
        ...

    def ended(self, entry: Entry, now: float) -> None:
        """A sequence has ended."""
        ...

    def note(self, request_id: str, pause: Pause, now: float) -> None:
        """More is known of the pause after a sequence."""
        ...


class OfMemory:
    """The knowledge of the memory's own tracker, by which the memory chooses its victims (`Observed`)."""

    def __init__(self, tracker: TurnTracker) -> None:
        self._tracker = tracker
        self.windows = Windows(tracker.kinds)

    def started(self, entry: Entry, now: float) -> None:
        """Do nothing: the sequence's cache reports it to the tracker."""

    def ended(self, entry: Entry, now: float) -> None:
        """Do nothing: the sequence's cache reports it to the tracker."""

    def note(self, request_id: str, pause: Pause, now: float) -> None:
        """Note the pause where the memory goes by it, too."""
        self._tracker.note(request_id, pause, now)


class OfPart:
    """The knowledge of a tracker of the part, where the memory evicts by last use alone (`Observed`)."""

    def __init__(self, block_size: int) -> None:
        """`block_size` is the number of tokens in a block."""
        self._block_size = block_size
        self._tracker = TurnTracker()
        self.windows = Windows(self._tracker.kinds)
        self._starts: dict[Entry, Start] = {}
        """The state that each sequence began with which has not ended."""
        self._ends = 0
        """Number of sequences that have ended so far."""

    def started(self, entry: Entry, now: float) -> None:
        """Note that a sequence goes on from a turn. One that was preempted and starts again does not count twice."""
        if entry not in self._starts:
            self._starts[entry] = self._tracker.begin(entry.cache.digests, 0, now)

    def ended(self, entry: Entry, now: float) -> None:
        """Begin the gap after a sequence."""
        request, digests = entry.sequence.request, entry.cache.digests
        start, prompt = self._starts.pop(entry, NEW), len(request.prompt)
        if not digests:
            return
        departure = Departure(entry.id, request.identity.tenant, request.pause, prompt)
        self._ends += 2  # the tracker may name what is shared by the next number
        self._tracker.left(digests, departure, start, self._ends, now, prompt=prompt // self._block_size)

    def note(self, request_id: str, pause: Pause, now: float) -> None:
        """Note the pause after a sequence that has ended."""
        self._tracker.note(request_id, pause, now)


def observed(eviction: str, turns: Turns, block_size: int) -> Observed:
    """The knowledge of gaps next to a memory that evicts by the order of this name and by `turns`."""
    if eviction in APPRAISALS:
        return OfMemory(cast(TurnTracker, turns))
    return OfPart(block_size)
