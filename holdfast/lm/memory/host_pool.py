"""HostPool: the second tier, where copies of sealed blocks stay when the device gives theirs up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable

from holdfast.lm.memory.retention import Retention, RetentionRule, Victims


class HostPool:
    """The blocks 0 to `num_blocks - 1` in host memory, each for one sealed block; every operation costs O(1) a block.

    A place is in exactly one of four states:

        free ──reserve──▶ arriving (a copy from the device is under way: not found, not given up)
          ▲                   └──arrived──▶ kept (may be the only copy; given up by value)
          │                                   │ ▲
          │                                hold rest
          │                                   ▼ │
          └─────── given up ◀──────────── redundant (its device block is in use; given up first, as nothing is lost)
    """

    def __init__(self, num_blocks: int, rule: RetentionRule) -> None:
        self.num_blocks = num_blocks
        self.dropped = 0
        """Blocks given up by value, so far."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._sealed: dict[bytes, int] = {}
        self._digests: list[bytes | None] = [None] * num_blocks
        self._indices = [0] * num_blocks
        self._kept = Retention(rule)
        self._redundant: OrderedDict[int, None] = OrderedDict()
        self._arriving = 0

    @property
    def cached(self) -> int:
        """Places that hold a block."""
        return len(self._sealed)

    @property
    def arriving(self) -> int:
        """Places that a copy is under way to."""
        return self._arriving

    def find(self, digest: bytes) -> int | None:
        """The place of the block with this digest."""
        return self._sealed.get(digest)

    def victims(self, now: float) -> Victims:
        """What may be given up, the lowest value first."""
        return self._kept.victims(now)

    def reserve(self, value: float, victims: Victims) -> tuple[int | None, list[bytes]]:
        """A place for a block of this value, and what was given up for it; None if all here is worth at least as much.

        A redundant copy goes before any that may be the only one. A plan that copies a block to the device may at once
        give its place to another one: a step reads the host before it writes there.
        """
        lost: list[bytes] = []
        if not self._free:
            if self._redundant:
                lost = self._give_up([self._redundant.popitem(last=False)[0]])
            else:
                lowest = victims.take(below=value)
                if lowest is None:
                    return None, lost
                self.dropped += len(lowest[1])
                lost = self._give_up(lowest[1])
        self._arriving += 1
        return self._free.pop(), lost

    def arrived(self, place: int, digest: bytes, index: int) -> None:
        """The copy is complete, of the `index`-th block of its sequence; it counts as held, until it is put to rest."""
        self._arriving -= 1
        self._sealed[digest] = place
        self._digests[place] = digest
        self._indices[place] = index
        self._redundant[place] = None

    def hold(self, digest: bytes) -> None:
        """The device block of this digest is in use: a copy of it here is redundant."""
        self.hold_all((digest,))

    def hold_all(self, digests: Iterable[bytes]) -> None:
        """`hold` for each."""
        here = [place for digest in digests if (place := self._sealed.get(digest)) is not None]
        others = set(self._kept.discard_all(here))
        self._redundant.update((place, None) for place in here if place not in others)

    def rest(self, digest: bytes, last: float, release: int) -> None:
        """The device block of this digest is idle since `last`: a copy of it here will be needed."""
        self.rest_all((digest,), last, release)

    def rest_all(self, digests: Iterable[bytes], last: float, release: int) -> None:
        """`rest` for each."""
        here = [place for digest in digests if (place := self._sealed.get(digest)) is not None]
        for place in here:
            del self._redundant[place]
        self._kept.add_all(here, map(self._indices.__getitem__, here), last, release)

    def touch(self, digest: bytes, last: float, release: int) -> None:
        """Count a kept block as used at `last`."""
        place = self._sealed.get(digest)
        if place is not None and place in self._kept:
            self._kept.renew(place, last, release)

    def _give_up(self, places: list[int]) -> list[bytes]:
        """Make places free; what they held."""
        lost = []
        for place in places:
            digest = self._digests[place]
            assert digest is not None
            del self._sealed[digest]
            self._digests[place] = None
            self._free.append(place)
            lost.append(digest)
        return lost

    def check(self, arriving: Collection[int]) -> None:
        """Raise RuntimeError unless free + arriving + cached = total, no place counted twice."""
        states = [*self._free, *arriving, *self._kept, *self._redundant]
        if sorted(states) != list(range(self.num_blocks)) or len(arriving) != self._arriving:
            raise RuntimeError(f"places of the host tier are lost or in two states: {sorted(states)}")
        for digest, place in self._sealed.items():
            if self._digests[place] != digest:
                raise RuntimeError(f"a digest leads to place {place}, which does not bear it")
        if len(self._sealed) != len(self._kept) + len(self._redundant):
            raise RuntimeError("a place in the host tier is cached without being found by its digest")
