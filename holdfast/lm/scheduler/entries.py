"""Entries: a sequence with its place in a queue, and the queue in rank order."""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from holdfast.lm.memory.protocol import AnyState
from holdfast.lm.types import Sampling, Sequence

Rank = tuple[float, ...]
"""Lower goes first. No two requests have the same one."""

NO_ROW = -1
AWAITED = sys.maxsize
"""`Entry.next_step` of a sequence that sits out until the outcome of its drafted tokens is known."""


@dataclass(slots=True, eq=False)
class Entry:
    """A sequence in a queue, with all that planning needs to know of it."""

    sequence: Sequence
    id: str
    rank: Rank
    cache: AnyState
    """Which of its positions are resident."""
    sampling: Sampling
    limit: int
    """The sequence ends at this length."""
    ends: frozenset[int]
    """Token ids that end it."""
    row: int = NO_ROW
    """Row of the executor's batch state while it runs."""
    decoding: bool = False
    """It lacks only the position of its last token, which its row has sampled or is sampling."""
    decode_limit: int = 0
    """Decodes up to this position need no look at limit and blocks."""
    next_check: int = 0
    """While fewer tokens than this are known, only end tokens are looked at."""
    next_step: int = 0
    """First step that may plan or preempt it; it sits out all steps before that one.

    A step that plans it sets this to the number of the following step. After a sampling segment it is as many steps
    later as a pipeline has stages, or the next step once the token is known. After drafted tokens, whose outcome is
    uncertain, it is AWAITED.
    """
    known_before: int = 0
    """Plans of a lower number give it tokens that it has already: its grammar forces them."""
    drawn_last: bool = True
    """Its last token is the one that its row drew last. Not so once a draft was verified: the host tells it then."""
    lost_before: int = 0
    """Plans of a lower number may give it no token: its state was lost."""
    history_in: tuple[int, int] = (NO_ROW, 0)
    """The row that its history or its answer was sent to, and how often it had been preempted by then."""
    tells: int | None = None
    """Alternatives to tell with the log probability of each token of its prompt; None: tell nothing."""
    told: int = 0
    """Plans made so far tell the prompt's tokens up to this position."""
    swap_in_step: int = -1
    """Number of the plan that copies in its state from the host; -1 once it is there or the next plan waits for it."""


class RankedQueue:
    """Entries in rank order. Adding at the back, and removing at the front or the back, are cheap."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """In rank order. Entries behind the current one may come and go during the iteration."""
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
        """The entry that goes last; the queue must not be empty."""
        return self._entries[-1]

    def first(self) -> Entry | None:
        """The entry that goes first; None if the queue is empty."""
        return self._entries[0] if self._entries else None


RANK = attrgetter("rank")
