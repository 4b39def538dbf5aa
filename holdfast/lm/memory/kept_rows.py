"""KeptRows: the states that finished requests left, found by the prefix of a prompt. For padded rows."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.lm.memory.digests import DigestCache
from holdfast.lm.memory.retention import MIN_AGE, RetentionRule

STRIDE = 16
"""A state that can be cut is found at prefixes whose length is a multiple of this many tokens."""
REMEMBERED = 1 << 16
"""Number of digests of recent prompts that are remembered, about 100 bytes each."""


class FoundRow(NamedTuple):
    """A kept state that serves a prompt."""

    slot: int
    length: int
    """Leading tokens of the prompt that need not be computed. If this is less than the state's length, the state is
    cut.
    """
    on_host: bool


@dataclass(slots=True)
class _Kept:
    """One kept state: its tokens, as digests and a tail, and its cost."""

    prefixes: list[bytes]
    """The root, then the digest of each prefix whose length is a multiple of STRIDE."""
    tail: array[int]
    """The tokens after the last of these prefixes, fewer than STRIDE."""
    size: int
    worth: float
    """Cost of computing the state again, per byte."""
    used: tuple[float, int]
    """When it was last used: time in seconds, and a number that orders equal times."""
    on_host: bool = False

    @property
    def length(self) -> int:
        return (len(self.prefixes) - 1) * STRIDE + len(self.tail)


class KeptRows:
    """Which slots hold the state of which tokens, on the device or on the host, and which are given up first. Pure.

    A state serves a prompt that begins with all of its tokens and has at least one more. One that can be cut also
    serves a prompt that begins with some of them: its first multiple of STRIDE tokens. Each identity has a root of its
    own (`Identity.root`), so tenants share nothing. The slots are numbered by the caller, who also bounds the bytes.
    """

    def __init__(self, bytes_of: Callable[[int], int], rule: RetentionRule, *, croppable: bool) -> None:
        """`bytes_of` is `RowBytes.of`. `rule` ranks the states when room is needed."""
        self._bytes_of, self._rule, self._croppable = bytes_of, rule, croppable
        self._rows: dict[int, _Kept] = {}
        self._ends: dict[bytes, dict[int, None]] = {}
        """For each digest, the slots whose last prefix it is, in the order in which they were added."""
        self._passing: dict[bytes, dict[int, None]] = {}
        """For each digest, the slots that can be cut to its prefix. Empty unless states can be cut."""
        self._digests = DigestCache(STRIDE, REMEMBERED)
        self._uses = 0
        self.device_bytes = 0
        """Bytes of the states on the device."""
        self.host_bytes = 0
        """Bytes of the states on the host."""

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, slot: object) -> bool:
        return slot in self._rows

    def length(self, slot: int) -> int:
        """Positions of a kept state."""
        return self._rows[slot].length

    def on_host(self, slot: int) -> bool:
        """Whether a kept state is on the host."""
        return self._rows[slot].on_host

    def size(self, slot: int) -> int:
        """Bytes of a kept state."""
        return self._rows[slot].size

    def positions(self, *, on_host: bool) -> int:
        """Positions of all kept states of one tier."""
        return sum(row.length for row in self._rows.values() if row.on_host == on_host)

    def find(self, root: bytes, tokens: Sequence[int]) -> FoundRow | None:
        """The state that saves most of these tokens, on the device if two save as many; None if there is none.

        The last token never counts: it must be computed to give logits.
        """
        known = array("I", tokens)
        prefixes = self._prefixes(root, known[: len(known) - 1])
        for count in range(len(prefixes) - 1, -1, -1):
            slot, best = -1, 0
            for other in self._ends.get(prefixes[count], ()):
                row = self._rows[other]
                if row.length < best or (row.length == best and row.on_host):
                    continue
                if row.length < len(known) and known[count * STRIDE : row.length] == row.tail:
                    slot, best = other, row.length
            if not best and count:
                slot, best = self._last_of(self._passing.get(prefixes[count], {})), count * STRIDE
            if slot >= 0:
                return FoundRow(slot, best, self._rows[slot].on_host)
        return None

    def _last_of(self, slots: dict[int, None]) -> int:
        """The slot added last among those on the device, or else on the host; -1 if there is none."""
        on_device = (slot for slot in reversed(slots) if not self._rows[slot].on_host)
        return next(on_device, next(reversed(slots), -1))

    def _prefixes(self, root: bytes, tokens: array[int]) -> list[bytes]:
        whole = len(tokens) // STRIDE * STRIDE
        return [root, *self._digests.digests(root, tokens[:whole])]

    def add(self, slot: int, root: bytes, tokens: Sequence[int], now: float) -> tuple[int, ...]:
        """Record that the slot, on the device, holds the state of these tokens. Returns the slots that became useless.

        If another state serves all that this one would, that is the new slot, and the other counts as used now.
        Otherwise they are the slots of states that this one replaces. They are already forgotten here; the caller gives
        them up. Raises RuntimeError for a slot that holds a state, and ValueError without tokens.
        """
        if slot in self._rows:
            raise RuntimeError(f"slot {slot} keeps a state already")
        if not tokens:
            raise ValueError("tokens is empty; a state to keep has at least one")
        known = array("I", tokens)
        prefixes = self._prefixes(root, known)
        tail = known[(len(prefixes) - 1) * STRIDE :]
        if (other := self._standing_in(prefixes[-1], tail)) >= 0:
            self.touch(other, now)
            return (slot,)
        covered = tuple(self._covered(prefixes, known)) if self._croppable else ()
        for other in covered:
            self.forget(other)
        length, size = len(known), self._bytes_of(len(known))
        # The cost grows about linearly with the position, so the middle one stands for all of them.
        cost = self._rule.cost(length // 2) * length if self._rule.eviction.by_cost else float(size)
        self._rows[slot] = _Kept(prefixes, tail, size, cost / size, self._use(now))
        for index, digest in self._places(self._rows[slot]):
            index.setdefault(digest, {})[slot] = None
        self.device_bytes += size
        return covered

    def _places(self, row: _Kept) -> list[tuple[dict[bytes, dict[int, None]], bytes]]:
        """Each index that lists a state, with the digest that it is listed under."""
        passing = row.prefixes if self._croppable else []
        return [(self._ends, row.prefixes[-1]), *((self._passing, digest) for digest in passing)]

    def _standing_in(self, prefix: bytes, tail: array[int]) -> int:
        """A slot whose state serves every prompt that one with this last prefix and tail would; -1 if there is none."""
        for slot in self._ends.get(prefix, ()):
            theirs = self._rows[slot].tail
            if theirs == tail or (self._croppable and not tail):
                return slot
        return -1 if tail else self._last_of(self._passing.get(prefix, {}))

    def _covered(self, prefixes: list[bytes], tokens: array[int]) -> list[int]:
        """The slots whose states hold a prefix of these tokens and nothing else."""
        covered = []
        for count, digest in enumerate(prefixes):
            for slot in self._ends.get(digest, ()):
                tail, at = self._rows[slot].tail, count * STRIDE
                if tokens[at : at + len(tail)] == tail:
                    covered.append(slot)
        return covered

    def touch(self, slot: int, now: float) -> None:
        """Count a state as used now."""
        self._rows[slot].used = self._use(now)

    def _use(self, now: float) -> tuple[float, int]:
        self._uses += 1
        return now, self._uses

    def offload(self, slot: int) -> None:
        """Move a state of the device to the host."""
        row = self._rows[slot]
        if row.on_host:
            raise RuntimeError(f"the state of slot {slot} is on the host already")
        row.on_host = True
        self.device_bytes -= row.size
        self.host_bytes += row.size

    def forget(self, slot: int) -> None:
        """Remove the state of a slot, because it is given up."""
        row = self._rows.pop(slot)
        if row.on_host:
            self.host_bytes -= row.size
        else:
            self.device_bytes -= row.size
        for index, digest in self._places(row):
            slots = index[digest]
            del slots[slot]
            if not slots:
                del index[digest]

    def victims(self, now: float, *, on_host: bool) -> list[int]:
        """The slots of one tier, the state of the lowest value first.

        The value of a state is the cost of computing it again, per byte and per second since its last use (Pensieve
        §4.3.1, with whole states in place of chunks).
        """
        slots = [slot for slot, row in self._rows.items() if row.on_host == on_host]
        return sorted(slots, key=lambda slot: self._rank(self._rows[slot], now))

    def _rank(self, row: _Kept, now: float) -> tuple[float, tuple[float, int]]:
        return row.worth / max(now - row.used[0], MIN_AGE), row.used
