"""LowerStates: what every tier of recurrent states below the host keeps account of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from holdfast.lm.memory.prices import Link
from holdfast.lm.memory.snapshots import Snapshot
from holdfast.lm.memory.state_pool import StatePool
from holdfast.lm.parts.tiers.lower_tiers import WRITE_BYTES, Fetch


class LowerStates:
    """The snapshots of the host that go down to one tier, and those that stay on the host for who asked for them."""

    def __init__(self, pool: StatePool, link: Link) -> None:
        """`pool` has the host's snapshots; `link` is the first guess of the time that reads take.

        Raises ValueError if the host has no slot for a snapshot, through which each goes.
        """
        if not pool.host_slots:
            raise ValueError("the host tier holds no recurrent state; raise host_cache_gb or snapshot_share")
        self.size = pool.slot_bytes
        """Bytes of a state."""
        self.link = link
        """Time that reads take."""
        self._pool = pool
        self._dirty: OrderedDict[Snapshot, None] = OrderedDict()
        """Snapshots to be written, in this order."""
        self._writing: set[bytes] = set()
        """Digests of the states that are being written."""
        self._most_written = max(1, WRITE_BYTES // self.size)
        self._held: dict[Fetch, list[Snapshot]] = {}
        """Snapshots that stay on the host for sequences that wait."""
        self._written = self._read = self._corrupt = self._failures = 0

    @property
    def backlog(self) -> bool:
        """Whether as many states are to be written as may be written at a time."""
        return self.unwritten >= self._most_written

    @property
    def unwritten(self) -> int:
        """Number of snapshots of the host that are being written, or still to be written."""
        return len(self._dirty) + len(self._writing)

    @property
    def has_news(self) -> bool:
        """Whether `jobs` may have new ones, because snapshots have come to the host."""
        return bool(self._dirty)

    def offer(self, snapshot: Snapshot) -> None:
        """Take note that the copy of a snapshot to the host is complete, so that it can be written."""
        self._dirty[snapshot] = None

    def read_ahead(self, digest: bytes, now: float) -> bool:
        """False: this tier gives states only to sequences that ask."""
        return False

    def _hold(self, snapshot: Snapshot, fetches: Iterable[Fetch]) -> None:
        """Let a snapshot of the host stay for those of these fetches that still wait."""
        for fetch in fetches:
            if not fetch.over:
                snapshot.holds += 1
                self._held.setdefault(fetch, []).append(snapshot)

    def close(self, fetch: Fetch) -> None:
        """Note that the sequence of a fetch has started or ended: no snapshot stays for it from now on."""
        for snapshot in self._held.pop(fetch, ()):
            snapshot.holds -= 1
