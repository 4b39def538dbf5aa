"""HostSlots: the slots for snapshots on the host, and the plans in flight that still read or write them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from holdfast.lm.memory.snapshots import Snapshot

Copies = tuple[tuple[Snapshot, int], ...]
"""Snapshots that a plan copies to the host, with their slots there."""


class HostSlots:
    """Slots are free, reserved for a state that comes from a lower tier, or of one snapshot.

    A plan that was made may read or write a slot until its result has come, also a slot that was freed meanwhile. The
    copies of later plans run after it. A thread that fills a reserved slot has no such order: it must not begin while
    `is_quiet` is false for the number that `mark` gave when the slot was reserved.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = list(range(total - 1, -1, -1))
        self.reserved: set[int] = set()
        self._in_flight: deque[Copies] = deque()
        """Copies to the host of each plan in flight that reads or writes slots, the oldest first."""
        self._writers: dict[int, int] = {}
        """Number of the latest plan that copies to a slot, by slot."""
        self._made = self._ended = 0

    @property
    def kept(self) -> int:
        """Number of slots that hold a snapshot."""
        return self.total - len(self.free) - len(self.reserved)

    def reserve(self) -> int:
        """Reserve a free slot, and return it. There must be one."""
        slot = self.free.pop()
        self.reserved.add(slot)
        return slot

    def fill(self, slot: int) -> None:
        """End a reservation: the slot holds a snapshot."""
        self.reserved.remove(slot)

    def cancel(self, slot: int) -> None:
        """End a reservation: the slot is free."""
        self.reserved.remove(slot)
        self.free.append(slot)

    def begin(self, copies: Iterable[tuple[Snapshot, int]]) -> None:
        """Note a plan that reads or writes slots, with the snapshots that it copies to the host."""
        self._made += 1
        self._in_flight.append(tuple(copies))
        self._writers.update((slot, self._made) for _, slot in self._in_flight[-1])

    def end(self) -> list[Snapshot]:
        """Note that the result of the oldest such plan has come. Returns the snapshots that are whole on the host.

        A snapshot is left out if a later plan copies to its slot again: the slot may hold others in between.
        """
        self._ended += 1
        copies, writers = self._in_flight.popleft(), self._writers
        return [each for each, slot in copies if each.host == slot and writers[slot] == self._ended]

    @property
    def mark(self) -> int:
        """Number of plans so far that read or write slots."""
        return self._made

    def is_quiet(self, mark: int) -> bool:
        """Whether the plans that were made before `mark` was given have ended."""
        return self._ended >= mark
