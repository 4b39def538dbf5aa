"""KeptRows: the states that finished requests left, found by the prefix of a prompt. For padded rows."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.lm.memory.digests import DigestCache
from holdfast.lm.memory.retention import RetentionRule
from holdfast.lm.memory.turns import Departure, Start
from holdfast.lm.memory.wishes import granted

STRIDE = 16
"""A state that can be cut is found at prefixes whose length is a multiple of this many tokens."""
REMEMBERED = 1 << 16
"""Number of digests of recent prompts that are remembered, about 100 bytes each."""
DIGEST_BYTES = 32
COUNTS = struct.Struct("<II")
"""Head of a packed key: the number of prefixes and the number of tokens in the tail."""


class RowKey(NamedTuple):
    """The tokens of a state, as digests and a tail."""

    prefixes: Sequence[bytes]
    """The root, then the digest of each prefix whose length is a multiple of STRIDE."""
    tail: array[int]
    """The tokens after the last of these prefixes, fewer than STRIDE."""

    @property
    def length(self) -> int:
        """Number of tokens."""
        return (len(self.prefixes) - 1) * STRIDE + len(self.tail)

    @property
    def digest(self) -> bytes:
        """SHA-256 of the last prefix's digest and the tail. It names the state."""
        return hashlib.sha256(self.prefixes[-1] + self.tail.tobytes()).digest()

    def packed(self) -> bytes:
        """The key as bytes, for a tier that outlives the engine. Numbers are in the machine's byte order."""
        return COUNTS.pack(len(self.prefixes), len(self.tail)) + b"".join(self.prefixes) + self.tail.tobytes()

    @classmethod
    def unpacked(cls, data: bytes) -> RowKey:
        """The key of these bytes. Raises ValueError for bytes that `packed` did not give."""
        prefixes, tokens = COUNTS.unpack_from(data) if len(data) >= COUNTS.size else (0, 0)
        tail, start = array("I"), COUNTS.size + prefixes * DIGEST_BYTES
        if not prefixes or tokens >= STRIDE or len(data) != start + tokens * tail.itemsize:
            raise ValueError(f"{len(data)} bytes are no key of {prefixes} prefixes and {tokens} further tokens")
        tail.frombytes(data[start:])
        return cls([data[at : at + DIGEST_BYTES] for at in range(COUNTS.size, start, DIGEST_BYTES)], tail)


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
    """One kept state: its tokens, and its cost."""

    key: RowKey
    size: int
    worth: float
    """Cost of computing the state again, per byte."""
    used: tuple[float, int]
    """When it was last used: time in seconds, and a number that orders equal times."""
    on_host: bool = False
    replaced: list[bytes] = field(default_factory=list)
    """Digests of the states that this one made useless, and of those that they had."""

    @property
    def length(self) -> int:
        return self.key.length


class KeptRows:
    """Which slots hold the state of which tokens, on the device or on the host, and which are given up first. Pure.

    A state serves a prompt that begins with all of its tokens and has at least one more. One that can be cut also
    serves a prompt that begins with some of them: its first multiple of STRIDE tokens. Each identity has a root of its
    own (`Identity.root`), so tenants share nothing. The slots are numbered by the caller, who also bounds the bytes.

    The states of a disk are in an object of their own. All of them count as on the device there.
    """

    def __init__(
        self,
        bytes_of: Callable[[int], int],
        rule: RetentionRule,
        *,
        croppable: bool,
        digests: DigestCache | None = None,
    ) -> None:
        """`bytes_of` gives a state's bytes by its length, as `RowBytes.of` does. `rule` ranks the states when room is
        needed. `digests` is the cache of another object that is asked for the same prompts.
        """
        self._bytes_of, self._rule, self._croppable = bytes_of, rule, croppable
        self._rows: dict[int, _Kept] = {}
        self._ends: dict[bytes, dict[int, None]] = {}
        """For each digest, the slots whose last prefix it is, in the order in which they were added."""
        self._passing: dict[bytes, dict[int, None]] = {}
        """For each digest, the slots that can be cut to its prefix. Empty unless states can be cut."""
        self.digests = digests or DigestCache(STRIDE, REMEMBERED)
        """Digests of recent prompts."""
        self._held: dict[int, int] = {}
        """Number of holds by slot."""
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

    def key(self, slot: int) -> RowKey:
        """The tokens of a kept state."""
        return self._rows[slot].key

    def last_use(self, slot: int) -> float:
        """When a kept state was last used, in seconds."""
        return self._rows[slot].used[0]

    def replaced(self, slot: int) -> Sequence[bytes]:
        """Digests of the states that a kept state made useless so far."""
        return self._rows[slot].replaced

    @property
    def slots(self) -> Sequence[int]:
        """The slots of all kept states, in the order in which they were added."""
        return tuple(self._rows)

    def hold(self, slot: int) -> None:
        """Keep a state from being a victim until `release` was called once for each hold."""
        self._held[slot] = self._held.get(slot, 0) + 1

    def release(self, slot: int) -> None:
        """End one hold of a state. Does nothing for one that was given up meanwhile."""
        if slot in self._held:
            self._held[slot] -= 1
            if not self._held[slot]:
                del self._held[slot]

    @property
    def held_bytes(self) -> int:
        """Bytes of the states on the host that are held."""
        return sum(self._rows[slot].size for slot in self._held if self._rows[slot].on_host)

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
                if row.length < len(known) and known[count * STRIDE : row.length] == row.key.tail:
                    slot, best = other, row.length
            if not best and count:
                slot, best = self._last_of(self._passing.get(prefixes[count], {})), count * STRIDE
            if slot >= 0:
                return FoundRow(slot, best, self._rows[slot].on_host)
        return None

    def begin(self, root: bytes, tokens: Sequence[int], now: float) -> Start:
        """A sequence with this prompt begins. Returns what it continues."""
        return self._rule.turns.begin(self._prefixes(root, array("I", tokens))[1:], 0, now)

    def left(self, root: bytes, tokens: Sequence[int], departure: Departure, start: Start, now: float) -> None:
        """A sequence with these tokens has ended whose state is kept."""
        digests = self._prefixes(root, array("I", tokens))[1:]
        if digests:
            self._uses += 1
            prompt = departure.prompt // STRIDE
            self._rule.turns.left(digests, departure, start, self._uses, now, prompt=prompt)

    def _last_of(self, slots: dict[int, None]) -> int:
        """The slot added last among those on the device, or else on the host; -1 if there is none."""
        on_device = (slot for slot in reversed(slots) if not self._rows[slot].on_host)
        return next(on_device, next(reversed(slots), -1))

    def _prefixes(self, root: bytes, tokens: array[int]) -> list[bytes]:
        whole = len(tokens) // STRIDE * STRIDE
        return [root, *self.digests.digests(root, tokens[:whole])]

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
        key = RowKey(prefixes, known[(len(prefixes) - 1) * STRIDE :])
        if (other := self.standing_in(key)) >= 0:
            self.touch(other, now)
            return (slot,)
        covered = tuple(self._covered(prefixes, known)) if self._croppable else ()
        replaced = [digest for other in covered for digest in (self.key(other).digest, *self.replaced(other))]
        for other in covered:
            self.forget(other)
        self.put(slot, key, now)
        self._rows[slot].replaced += replaced
        return covered

    def put(self, slot: int, key: RowKey, now: float, *, on_host: bool = False) -> None:
        """Record that the slot holds the state of a key, last used at `now`. No other state becomes useless.

        Raises RuntimeError for a slot that holds a state.
        """
        if slot in self._rows:
            raise RuntimeError(f"slot {slot} keeps a state already")
        length, size = key.length, self._bytes_of(key.length)
        # The cost grows about linearly with the position, so the middle one stands for all of them.
        cost = self._rule.cost(length // 2) * length if self._rule.eviction.by_cost else float(size)
        self._rows[slot] = _Kept(key, size, cost / size, self._use(now), on_host)
        for index, digest in self._places(self._rows[slot]):
            index.setdefault(digest, {})[slot] = None
        if on_host:
            self.host_bytes += size
        else:
            self.device_bytes += size

    def _places(self, row: _Kept) -> list[tuple[dict[bytes, dict[int, None]], bytes]]:
        """Each index that lists a state, with the digest that it is listed under."""
        prefixes = row.key.prefixes
        passing = prefixes if self._croppable else []
        return [(self._ends, prefixes[-1]), *((self._passing, digest) for digest in passing)]

    def standing_in(self, key: RowKey) -> int:
        """A slot whose state serves every prompt that one with this key would; -1 if there is none."""
        prefix, tail = key.prefixes[-1], key.tail
        for slot in self._ends.get(prefix, ()):
            theirs = self._rows[slot].key.tail
            if theirs == tail or (self._croppable and not tail):
                return slot
        return -1 if tail else self._last_of(self._passing.get(prefix, {}))

    def _covered(self, prefixes: list[bytes], tokens: array[int]) -> list[int]:
        """The slots whose states hold a prefix of these tokens and nothing else."""
        covered = []
        for count, digest in enumerate(prefixes):
            for slot in self._ends.get(digest, ()):
                tail, at = self._rows[slot].key.tail, count * STRIDE
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
        self._held.pop(slot, None)
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
        """The slots of one tier that are not held, the state of the lowest value first.

        The value of a state is the cost of computing it again, per byte and per second since its last use (Pensieve
        §4.3.1, with whole states in place of chunks), or times what the pauses of its kind make of it. States that
        clients want kept go last.
        """
        held = self._held
        slots = [slot for slot, row in self._rows.items() if row.on_host == on_host and slot not in held]
        kept = self._granted(now, on_host=on_host)
        return sorted(slots, key=lambda slot: (slot in kept, self.value(slot, now), self._rows[slot].used))

    def _granted(self, now: float, *, on_host: bool) -> set[int]:
        """The slots of one tier whose states are kept because clients want it."""
        here, turns = [(slot, row) for slot, row in self._rows.items() if row.on_host == on_host], self._rule.turns
        return granted([(slot, turns.wish_at(row.key.prefixes[-1]), row.size) for slot, row in here], now)

    def value(self, slot: int, now: float) -> float:
        """The value of a state (`victims`). Each byte costs the same if the rule does not go by cost."""
        row = self._rows[slot]
        return row.worth * self._rule.turns.worth_at(row.key.prefixes[-1], row.used[0], now)
