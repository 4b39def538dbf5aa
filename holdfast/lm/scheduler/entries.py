"""Entries: a sequence with its place in a queue, and the queue in rank order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from holdfast.lm.memory.sequence_cache import SequenceCache
from holdfast.lm.types import Sampling, Sequence

Rank = tuple[float, ...]
"""Lower goes first. No two requests have the same one."""

NO_ROW = -1


@dataclass(slots=True, eq=False)
class Entry:
    """A sequence in a queue, with what planning it takes."""

    sequence: Sequence
    id: str
    rank: Rank
    cache: SequenceCache
    sampling: Sampling
    limit: int
    """The sequence ends at this length."""
    ends: frozenset[int]
    """Tokens that end it."""
    row: int = NO_ROW
    """Row of the executor's batch state while it runs."""
    decoding: bool = False
    """Its row holds its last token, sampled or being sampled: that position is all that it lacks."""
    decode_limit: int = 0
    """Up to here its decodes can be planned without a look at limit and blocks."""
    next_check: int = 0
    """Nothing but its end tokens need be looked at while fewer tokens than this are known."""
    planned_in: int = -1
    """Number of the last step with a segment of it."""
    swap_in_step: int = -1
    """Number of the plan that brings in what it lacks; -1 once that is there, or the next plan waits for it."""


class WaitingQueue(Protocol):
    """Entries that wait, and which of them goes first."""

    def __len__(self) -> int: ...
    def add(self, entry: Entry) -> None:
        """Take in an entry."""
        ...

    def remove(self, entry: Entry) -> None:
        """Let go of an entry that is in it."""
        ...

    def first(self) -> Entry | None:
        """Who goes first."""
        ...


class RankedQueue:
    """Entries in rank order; the common cases, in at the back and out at the front or the back, are cheap."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """First rank first. Entries behind the current one may come and go on the way."""
        return iter(self._entries)

    def __reversed__(self) -> Iterator[Entry]:
        return reversed(self._entries)

    def add(self, entry: Entry) -> None:
        insort(self._entries, entry, key=RANK)

    def remove(self, entry: Entry) -> None:
        index = bisect_left(self._entries, entry.rank, key=RANK)
        assert self._entries[index] is entry
        del self._entries[index]

    def last(self) -> Entry:
        """Who goes last; there must be one."""
        return self._entries[-1]

    def first(self) -> Entry | None:
        return self._entries[0] if self._entries else None


RANK = attrgetter("rank")
