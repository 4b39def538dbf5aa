"""LowestFirst: the snapshots of the lowest rank, found without a look at all of them each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import nsmallest
from typing import Generic, Protocol, TypeVar

from holdfast.lm.memory.retention import Use

SHARE = 16
"""For a tier with n slots, n // SHARE snapshots are chosen at a time."""

Rank = tuple[int, float, Use]
"""The lowest goes first."""


class Ranked(Protocol):
    """A state that can be given up."""

    pins: int
    """Number of copies that need it."""
    used: Use
    """When it was last used."""


RankedT = TypeVar("RankedT", bound=Ranked)


class LowestFirst(Generic[RankedT]):
    """Snapshots of one tier by rank, the lowest first.

    Ranks change as time passes, and as KV blocks come and go. So there is no queue that stays in order. Instead a
    sixteenth of the snapshots, the lowest at that time, are chosen together and then given one after the other.
    Snapshots that were used meanwhile are left out. With fewer than 32 slots the order is exact.
    """

    def __init__(self, belongs: Callable[[RankedT], bool], rank: Callable[[RankedT, float], Rank], slots: int) -> None:
        """`belongs` says whether a snapshot is one of these. The tier has this many slots."""
        self._belongs = belongs
        self._rank = rank
        self._batch = max(1, slots // SHARE)
        self._chosen: list[tuple[RankedT, Use]] = []
        """The snapshots chosen and their last uses at that time, the lowest rank last."""

    def first(self, snapshots: Callable[[], Iterable[RankedT]], now: float) -> tuple[RankedT, ...]:
        """The snapshot of the lowest rank that the next plan does not need, or none. `snapshots` gives all of them."""
        while self._chosen:
            snapshot, used = self._chosen[-1]
            if self._fits(snapshot) and snapshot.used == used:
                return (snapshot,)
            self._chosen.pop()
        found = nsmallest(self._batch, filter(self._fits, snapshots()), key=lambda each: self._rank(each, now))
        self._chosen = [(each, each.used) for each in reversed(found)]
        return tuple(found[:1])

    def _fits(self, snapshot: RankedT) -> bool:
        return not snapshot.pins and self._belongs(snapshot)
