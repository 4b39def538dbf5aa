"""Entries: a sequence with its place in a queue, and the queue in rank order."""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from holdfast.lm.memory.protocol import AnyState
from holdfast.lm.types import Sampling, Sequence

Rank = tuple[float, ...]
"""Lower goes first. No two requests have the same one."""

NO_ROW = -1
AWAITED = sys.maxsize
"""`Entry.next_step` of a sequence that sits out every step until the result of its last segment is known."""


@dataclass(slots=True, eq=False)
class Entry:
    """A sequence in a queue, with everything that planning needs to know of it."""

    sequence: Sequence
    id: str
    rank: Rank
    cache: AnyState
    """The sequence's state in memory, which knows the resident positions."""
    sampling: Sampling
    limit: int
    """Length at which the sequence ends."""
    ends: frozenset[int]
    """Token ids that end the sequence."""
    row: int = NO_ROW
    """Row of the executor's batch state while the sequence runs; NO_ROW otherwise."""
    decoding: bool = False
    """Whether it lacks only the position of its last token, which its row has sampled or is sampling."""
    decode_limit: int = 0
    """Position up to which the sequence decodes without a check of its limit and its blocks."""
    next_check: int = 0
    """Number of known tokens below which only end tokens are checked."""
    next_step: int = 0
    """First step that may plan or preempt the sequence; it sits out all earlier steps.

    A step that plans the sequence sets this to the number of the following step. After a sampling segment, the value is
    as many steps later as the pipeline has stages, or the next step once the token is known. It is AWAITED while the
    number of tokens that the last segment gives is unknown.
    """
    lost_before: int = 0
    """Plans of a lower number give it no token, because its state was lost."""
    uses_kept: bool = True
    """Whether it may start from state that memory keeps of its tokens; otherwise all its positions are computed."""
    swap_in_step: int = -1
    """Number of the plan that copies in its state from the host; -1 once it is there or the next plan waits for it."""


class WaitingQueue(Protocol):
    """Waiting entries in the order in which they start."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Entry]: ...

    def add(self, entry: Entry) -> None:
        """Let an entry wait."""

    def remove(self, entry: Entry) -> None:
        """Remove an entry, which must be there."""

    def first(self) -> Entry | None:
        """The entry that starts next; None if the queue is empty."""


class RankedQueue:
    """Entries in rank order. Adding at the back, and removing at the front or the back, are cheap."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """The entries in rank order. Entries after the current one may come and go during the iteration."""
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
        """The entry with the last rank. The queue must not be empty."""
        return self._entries[-1]

    def first(self) -> Entry | None:
        """The entry with the first rank; None if the queue is empty."""
        return self._entries[0] if self._entries else None


RANK = attrgetter("rank")
