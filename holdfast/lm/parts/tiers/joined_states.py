"""JoinedStates: the recurrent states of a disk and of the remote tier as one account."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from holdfast.lm.memory.prices import Link
from holdfast.lm.memory.snapshots import Snapshot, StateKey, StatesBelow
from holdfast.lm.memory.state_pool import StatePool
from holdfast.lm.parts.tiers.lower_tiers import Fetch
from holdfast.lm.parts.tiers.remote_states import RemoteStates
from holdfast.lm.parts.tiers.state_tiers import StateTiers
from holdfast.lm.tiers import TierDone, TierJob


class StateAccount(StatesBelow, Protocol):
    """The account of recurrent states below the host: `StateTiers` for a disk alone, or `JoinedStates`."""

    remote: Sequence[RemoteStates]
    """The account of the remote tier, if there is one."""
    size: int
    """Bytes of a state."""

    @property
    def can_flush(self) -> bool:
        """Whether a state could be saved, or copied to the host, to be written."""
        ...

    @property
    def unflushed(self) -> bool:
        """Whether the device has a state that no other tier has."""
        ...

    @property
    def unwritten(self) -> int:
        """Number of snapshots of the host that are being written, or still to be written."""
        ...

    @property
    def has_news(self) -> bool:
        """Whether `jobs` may have new ones, because snapshots have come to the host."""
        ...

    @property
    def wants_step(self) -> bool:
        """Whether a plan without segments is to save a state, or to copy one to the host."""
        ...

    @property
    def reading(self) -> int:
        """Bytes of the states that are being read."""
        ...

    def link_of(self, digest: bytes) -> Link:
        """The time that reading the state of a digest takes."""
        ...

    def length(self, digest: bytes) -> int:
        """Number of tokens that the state of a digest has seen; 0 for one that is not there."""
        ...

    def flush(self, idle: bool) -> None:
        """Let the next plans copy states to the host if there is nothing else to do (`idle`)."""
        ...

    def fetch(self, digest: bytes, fetch: Fetch, now: float) -> bool:
        """Begin to read the state of a digest for a fetch. Returns False if the host has no room for it now."""
        ...

    def close(self, fetch: Fetch) -> None:
        """Note that the sequence of a fetch has started or ended."""
        ...

    def jobs(self, now: float) -> list[TierJob]:
        """The jobs to begin now."""
        ...

    def done(self, ended: Iterable[TierDone], now: float) -> None:
        """Take note of jobs that have ended."""
        ...

    def stats(self) -> Mapping[str, int]:
        """Counters and present sizes: fields of `SchedulerStats`."""
        ...


class JoinedStates:
    """Composes the accounts of a disk, if there is one, and of the remote tier (`StateAccount`).

    Each snapshot is offered to both. A state that both have is read from the disk.
    """

    def __init__(self, pool: StatePool, disk: Sequence[StateTiers], remote: Sequence[RemoteStates]) -> None:
        """`disk` has at most one account, and `remote` one."""
        self._pool, self.remote = pool, remote
        self._tiers: tuple[StateTiers | RemoteStates, ...] = (*disk, *remote)
        self.size = pool.slot_bytes
        pool.serve_below(self)

    def has(self, digest: bytes) -> bool:
        """Whether a tier has the state of this digest, or is being given it."""
        return any(each.has(digest) for each in self._tiers)

    def keys(self, parent: bytes) -> Iterable[StateKey]:
        """The keys with this parent of the states that a tier has."""
        return [key for each in self._tiers for key in each.keys(parent)]

    def offer(self, snapshot: Snapshot) -> None:
        """Take note that the copy of a snapshot to the host is complete, so that it can be written."""
        for each in self._tiers:
            each.offer(snapshot)

    def read_ahead(self, digest: bytes, now: float) -> bool:
        """Begin to read the state of this digest to the host, though no sequence has asked for it."""
        return self._of(digest).read_ahead(digest, now)

    @property
    def can_flush(self) -> bool:
        return not any(each.backlog for each in self._tiers) and self._pool.can_flush

    @property
    def unflushed(self) -> bool:
        return self._pool.unflushed

    @property
    def unwritten(self) -> int:
        return max(each.unwritten for each in self._tiers)

    @property
    def has_news(self) -> bool:
        return any(each.has_news for each in self._tiers)

    @property
    def wants_step(self) -> bool:
        return self._pool.is_flushing

    @property
    def reading(self) -> int:
        return sum(each.reading for each in self._tiers)

    def _of(self, digest: bytes) -> StateTiers | RemoteStates:
        """The first tier that has the state of a digest; the last one if none has it."""
        return next((each for each in self._tiers if each.length(digest)), self._tiers[-1])

    def link_of(self, digest: bytes) -> Link:
        return self._of(digest).link

    def length(self, digest: bytes) -> int:
        return self._of(digest).length(digest)

    def flush(self, idle: bool) -> None:
        self._pool.flush(idle and not any(each.backlog for each in self._tiers))

    def fetch(self, digest: bytes, fetch: Fetch, now: float) -> bool:
        return self._of(digest).fetch(digest, fetch, now)

    def close(self, fetch: Fetch) -> None:
        for each in self._tiers:
            each.close(fetch)

    def jobs(self, now: float) -> list[TierJob]:
        return [job for each in self._tiers for job in each.jobs(now)]

    def done(self, ended: Iterable[TierDone], now: float) -> None:
        ended = [*ended]
        for each in self._tiers:
            each.done(ended, now)

    def stats(self) -> Mapping[str, int]:
        found = Counter[str]()
        for each in self._tiers:
            found.update(each.stats())
        return found
