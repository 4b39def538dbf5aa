"""FetchQueue: waiting sequences whose kept blocks are on their way from the disk or the remote tier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from holdfast.lm.memory.lower_tiers import Fetch, LowerTiers
from holdfast.lm.memory.sequence_cache import SequenceCache
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.tiers import TierName

NOTHING: Mapping[TierName, int] = {"disk": 0, "remote": 0}


class FetchQueue:
    """Sequences that wait for their blocks. They have neither rows nor blocks of the device, and hold nobody up.

    A sequence waits until all that it asked for has come or failed, and no longer than its deadline. It then waits as
    any other does, and finds what has come on the host. That is held for it until it starts.
    """

    def __init__(self, lower: LowerTiers) -> None:
        self.lower = lower
        self._waiting: dict[Entry, Fetch] = {}
        self._arrived: dict[Entry, Fetch] = {}

    def __len__(self) -> int:
        """Sequences that wait for their blocks."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[Entry]:
        """The sequences that wait for their blocks."""
        return iter(self._waiting)

    def begin(self, entry: Entry, now: float) -> bool:
        """Ask for what the lower tiers have of a waiting sequence, once. Returns whether it has to wait for that."""
        if entry.fetched or entry.sequence.in_flight or not entry.uses_kept:
            return False
        entry.fetched = True
        assert isinstance(entry.cache, SequenceCache)  # padded rows have no such tiers
        missing = entry.cache.lacking(entry.sequence.tokens)
        fetch = self.lower.fetch(missing, now) if missing else None
        if fetch is not None:
            self._waiting[entry] = fetch
        return fetch is not None

    def advance(self, now: float) -> list[Entry]:
        """Those whose wait is over."""
        over = [entry for entry, fetch in self._waiting.items() if fetch.complete or now >= fetch.deadline]
        for entry in over:
            fetch = self._arrived[entry] = self._waiting.pop(entry)
            if not fetch.complete:
                self.lower.end_wait(fetch)
        return over

    def settle(self, entry: Entry) -> Mapping[TierName, int]:
        """A sequence starts or ends: what was held for it is no longer. Returns the blocks that came, by tier."""
        fetch = self._waiting.pop(entry, None) or self._arrived.pop(entry, None)
        if fetch is None:
            return NOTHING
        self.lower.close(fetch)
        return fetch.came

    def __contains__(self, entry: Entry) -> bool:
        """Whether a sequence waits for its blocks."""
        return entry in self._waiting
