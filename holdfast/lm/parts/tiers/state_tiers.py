"""StateTiers: keeps account of the disk's snapshots of recurrent states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from holdfast.lm.memory.lowest_first import LowestFirst
from holdfast.lm.memory.prices import Link
from holdfast.lm.memory.retention import MIN_AGE, Use
from holdfast.lm.memory.snapshots import NO_SLOT, Snapshot, StateKey
from holdfast.lm.memory.state_pool import StatePool
from holdfast.lm.parts.tiers.lower_states import LowerStates
from holdfast.lm.parts.tiers.lower_tiers import READ_BYTES, Fetch
from holdfast.lm.parts.tiers.remote_states import RemoteStates
from holdfast.lm.tiers import JobKind, LowerShape, StateAbout, StoredState, TierBlock, TierDone, TierJob

DIGEST_BYTES = 32
NAME_BYTES = 24
"""Bytes of a state's digest at the start of the digest of its pieces. The number of its write follows."""
NUMBER_BYTES = 8
NOTHING = bytes(DIGEST_BYTES)
"""Stands for no state in a description."""


@dataclass(eq=False, slots=True)
class DiskState:
    """A recurrent state on the disk, or on its way there."""

    key: StateKey
    replaced: bytes
    """Digest of the state from which its conversation has gone on to this one; NOTHING without one."""
    place: int
    """Number of its place on the disk."""
    name: bytes
    """Digest of its pieces."""
    used: Use
    """When it was last used."""
    pins: int = 0
    """1 while it is being read, else 0."""


@dataclass(slots=True)
class _Moving:
    """A state that is being written or read."""

    kind: JobKind
    jobs: list[TierJob]
    """Jobs that have not begun."""
    mark: int
    """The jobs begin once the plans that `StatePool.mark` counts have ended."""
    pieces: int
    """Number of pieces whose jobs have not ended."""
    finish: Callable[[bool, float], None]
    """Called at the end with whether all pieces were moved, and the time."""
    good: bool = True
    """Whether all pieces so far were moved."""


@dataclass(slots=True)
class _Arrival:
    """A state on its way to a slot of the host."""

    slot: int
    began: float
    fetches: list[Fetch] = field(default_factory=list)
    """Fetches that wait for it."""


class StateTiers(LowerStates):
    """Decides which snapshots of recurrent states go from the host to the disk, and which come back. Pure.

    All states take the same number of pieces, which lie together at one of `total` places. A state begins with its
    description: the digest of the state that it replaces, and its key. The digest of its pieces has the number of the
    write, so pieces of two writes are never taken for one state. It is found once all of its pieces are written.

    A snapshot is written as soon as its copy on the host is complete (`StatePool.offer`). A state comes back to a
    reserved slot of the host when a waiting sequence asks for it (`fetch`).

    A state whose KV blocks are gone goes first, then one whose conversation has gone on, then that of the lowest value.
    Each place is free, or of one state that is on the disk or on its way there.

    Jobs of states have numbers below zero, so that they differ from those of blocks.
    """

    remote: Sequence[RemoteStates] = ()

    def __init__(
        self, pool: StatePool, block_size: int, shape: LowerShape, now: float, numbers: Iterator[int] | None = None
    ) -> None:
        """The disk below `pool`. `now` is the time when its contents were listed. `numbers` are those of jobs.

        Raises ValueError if the host has no slot for a snapshot, through which each goes, or the disk no place.
        """
        super().__init__(pool, Link(latency=1e-3, rate=1e9))
        self._piece = shape.block_bytes
        self._pieces = pieces_of(self.size, block_size, shape.block_bytes)
        self.total = shape.disk_blocks // self._pieces
        """Number of places."""
        if not self.total:
            raise ValueError(f"the disk tier has {shape.disk_blocks} pieces for states, and one takes {self._pieces}")
        self._states: dict[bytes, DiskState] = {}
        """The states on the disk, by digest."""
        self._by_parent: dict[bytes, list[DiskState]] = {}
        self._replaced: Counter[bytes] = Counter()
        """Number of states on the disk that replace the one of a digest."""
        self._arriving: dict[bytes, _Arrival] = {}
        """States that are being read, by digest."""
        self._moving: dict[bytes, _Moving] = {}
        """States that are being moved, by the digest of their pieces."""
        self._of_job: dict[int, bytes] = {}
        """Digest of the pieces by number of the job."""
        self._victims: LowestFirst[DiskState] = LowestFirst(self._is_stored, self._rank, self.total)
        self._writes = 0
        self._has_begun = False
        """Whether a read of a state that nobody has asked for may not have been given to the threads yet."""
        self._numbers = numbers or count(-1, -1)
        self._free = self._load(shape.states, now)
        pool.serve_below(self)

    def _load(self, stored: Iterable[StoredState], now: float) -> list[int]:
        """Take over the contents of the disk, and return the free places. The last state of a digest stays."""
        for number, each in enumerate(stored):
            try:
                key = StateKey.unpacked(each.about.key[DIGEST_BYTES:])
            except ValueError:
                continue
            place = each.slots[0] // self._pieces
            whole = each.slots == tuple(self._slots(place)) and place < self.total
            if not whole or key.digest[:NAME_BYTES] != each.digest[:NAME_BYTES]:
                continue
            self._writes = max(self._writes, number_of(each.digest) + 1)
            other = self._states.get(key.digest)
            if other is not None and number_of(other.name) > number_of(each.digest):
                continue
            if other is not None:
                self._remove(other)
            use = now - each.age, number
            self._add(DiskState(key, each.about.key[:DIGEST_BYTES], place, each.digest, use))
        taken = {state.place for state in self._states.values()}
        return [place for place in reversed(range(self.total)) if place not in taken]

    def _slots(self, place: int) -> range:
        """The pieces of a place."""
        return range(place * self._pieces, (place + 1) * self._pieces)

    # The states on the disk.

    def has(self, digest: bytes) -> bool:
        """Whether the disk has the state of this digest, or is being given it."""
        return digest in self._states or digest in self._writing

    def keys(self, parent: bytes) -> Iterable[StateKey]:
        """The keys with this parent of the states on the disk."""
        return [state.key for state in self._by_parent.get(parent, ())]

    def length(self, digest: bytes) -> int:
        """Number of tokens that the state of a digest has seen; 0 for one that is not on the disk."""
        return self._states[digest].key.length if digest in self._states else 0

    def _add(self, state: DiskState) -> None:
        self._states[state.key.digest] = state
        self._by_parent.setdefault(state.key.parent, []).append(state)
        self._replaced[state.replaced] += 1

    def _remove(self, state: DiskState) -> None:
        """Forget a state. Its place is in no list."""
        del self._states[state.key.digest]
        here = self._by_parent[state.key.parent]
        here.remove(state)
        if not here:
            del self._by_parent[state.key.parent]
        self._replaced[state.replaced] -= 1
        if not self._replaced[state.replaced]:
            del self._replaced[state.replaced]

    def _is_stored(self, state: DiskState) -> bool:
        return self._states.get(state.key.digest) is state

    def _rank(self, state: DiskState, now: float) -> tuple[bool, float, Use]:
        """The state of the lowest rank goes first."""
        value = self._pool.value_of(state.key, 0, state.used, now)
        return value > 0 and state.key.digest not in self._replaced, value, state.used

    # States that go down.

    @property
    def can_flush(self) -> bool:
        """Whether a state could be saved, or copied to the host, to be written."""
        return not self.backlog and self._pool.can_flush

    @property
    def unflushed(self) -> bool:
        """Whether the device has a state that no other tier has."""
        return self._pool.unflushed

    @property
    def wants_step(self) -> bool:
        """Whether a plan without segments is to save a state, or to copy one to the host."""
        return self._pool.is_flushing

    def flush(self, idle: bool) -> None:
        """Let the next plans copy states to the host if there is nothing else to do (`idle`)."""
        self._pool.flush(idle and not self.backlog)

    def jobs(self, now: float) -> list[TierJob]:
        """The jobs to begin now."""
        while self._dirty and len(self._writing) < self._most_written:
            self._write(self._dirty.popitem(last=False)[0], now)
        begun = list[TierJob]()
        for moving in self._moving.values():
            if self._pool.is_quiet(moving.mark):
                begun += moving.jobs
                moving.jobs = []
        self._has_begun = self._has_begun and any(moving.jobs for moving in self._moving.values())
        return begun

    def _write(self, snapshot: Snapshot, now: float) -> None:
        """Begin to write a snapshot, unless it is of no use, or worth less than all that is there."""
        key, before = snapshot.key, snapshot.previous
        if snapshot.host == NO_SLOT or self.has(key.digest):
            return
        replaced = before.key.digest if before.length and before.is_passed else NOTHING
        name = key.digest[:NAME_BYTES] + self._writes.to_bytes(NUMBER_BYTES, "little")
        state = DiskState(key, replaced, NO_SLOT, name, snapshot.used)
        if not self._find_place(state, now):
            return
        state.place = self._free.pop()
        self._writes += 1
        self._writing.add(key.digest)
        snapshot.holds += 1
        self._begin("write", state, snapshot.host, 0, self._pieces, partial(self._end_write, state, snapshot))

    def _find_place(self, state: DiskState, now: float) -> bool:
        """Make a place free for a state, if need be that of one of lower rank. Returns whether one is free."""
        if not self._free:
            self._renew()
            for victim in self._victims.first(self._states.values, now):
                if self._rank(victim, now) < self._rank(state, now):
                    self._remove(victim)
                    self._free.append(victim.place)
        return bool(self._free)

    def _renew(self) -> None:
        """Count states on the disk as used when their snapshots in memory were."""
        for snapshot in self._pool.snapshots():
            state = self._states.get(snapshot.key.digest)
            if state is not None:
                state.used = max(state.used, snapshot.used)

    def _end_write(self, state: DiskState, snapshot: Snapshot, good: bool, now: float) -> None:
        snapshot.holds -= 1
        self._writing.remove(state.key.digest)
        if good:
            self._add(state)
        else:
            self._free.append(state.place)

    # States that come back.

    def link_of(self, digest: bytes) -> Link:
        """The time that reads of the disk take."""
        return self.link

    @property
    def reading(self) -> int:
        """Bytes of the states that are being read."""
        return len(self._arriving) * self.size

    def fetch(self, digest: bytes, fetch: Fetch, now: float) -> bool:
        """Begin to read the state of a digest for a fetch, or let it wait for one that is being read.

        Returns False if the host has no room for it now. Does nothing for a state that is not on the disk.
        """
        state, arrival = self._states.get(digest), self._arriving.get(digest)
        if state is None:
            return True
        if arrival is None:
            mark, slot = self._pool.mark, self._pool.reserve_on_host(now)
            if slot == NO_SLOT:
                return False
            arrival = self._arriving[digest] = _Arrival(slot, now)
            state.used = now, state.used[1]
            self._begin_read(state, arrival, mark)
        arrival.fetches.append(fetch)
        fetch.pending.add(state.name)
        return True

    def _begin_read(self, state: DiskState, arrival: _Arrival, mark: int) -> None:
        state.pins = 1
        together = max(1, READ_BYTES // self._piece)
        self._begin("read", state, arrival.slot, mark, together, partial(self._end_read, state, arrival))

    def read_ahead(self, digest: bytes, now: float) -> bool:
        """Begin to read the state of this digest, though no sequence has asked for it. One is read at a time."""
        state = self._states.get(digest)
        if state is None or self._arriving:
            return digest in self._arriving
        mark, slot = self._pool.mark, self._pool.reserve_spare_on_host()
        if slot == NO_SLOT:
            return False
        arrival = self._arriving[digest] = _Arrival(slot, now)
        self._begin_read(state, arrival, mark)
        self._has_begun = True
        return True

    @property
    def has_news(self) -> bool:
        """Whether `jobs` may have new ones, because snapshots have come to the host or a state is to be read ahead."""
        return super().has_news or self._has_begun

    def _end_read(self, state: DiskState, arrival: _Arrival, good: bool, now: float) -> None:
        del self._arriving[state.key.digest]
        state.pins = 0
        if good:
            self.link.observe(self.size, max(now - arrival.began, MIN_AGE))
            found = self._cache(arrival, state.key, now)
            self._hold(found, arrival.fetches)
        else:
            self._pool.cancel_on_host(arrival.slot)
            self._remove(state)
            self._free.append(state.place)
        for fetch in arrival.fetches:
            fetch.pending.discard(state.name)

    def _cache(self, arrival: _Arrival, key: StateKey, now: float) -> Snapshot:
        """Let a state that was read be found on the host."""
        if arrival.fetches:
            return self._pool.cache_on_host(arrival.slot, key, now)
        return self._pool.cache_first_on_host(arrival.slot, key)

    # Jobs.

    def _begin(
        self,
        kind: JobKind,
        state: DiskState,
        slot: int,
        mark: int,
        together: int,
        finish: Callable[[bool, float], None],
    ) -> None:
        """Queue the jobs of a state, of `together` pieces each."""
        about = StateAbout(state.key.length, state.replaced + state.key.packed(), self._pieces)
        last, jobs = state.used[0], list[TierJob]()
        blocks = [TierBlock(state.name, at, slot, place, last) for at, place in enumerate(self._slots(state.place))]
        for start in range(0, len(blocks), together):
            job = TierJob(next(self._numbers), "disk", kind, tuple(blocks[start : start + together]), about)
            jobs.append(job)
            self._of_job[job.number] = state.name
        self._moving[state.name] = _Moving(kind, jobs, mark, len(blocks), finish)

    def done(self, ended: Iterable[TierDone], now: float) -> None:
        """Take note of jobs that have ended. Jobs of others are left out."""
        for each in ended:
            if each.number not in self._of_job:
                continue
            name = self._of_job.pop(each.number)
            moving = self._moving[name]
            moving.pieces -= len(each.outcomes)
            good = each.outcomes.count("done")
            moving.good = moving.good and good == len(each.outcomes)
            self._corrupt += each.outcomes.count("corrupt")
            self._failures += each.outcomes.count("failed")
            if moving.kind == "write":
                self._written += good
            else:
                self._read += good
            if not moving.pieces:
                del self._moving[name]
                moving.finish(moving.good, now)

    def stats(self) -> Mapping[str, int]:
        """Counters and present sizes of the states on the disk."""
        return {
            "disk_snapshots_total": self.total,
            "disk_snapshots_kept": len(self._states),
            "disk_bytes_written": self._written * self._piece,
            "disk_bytes_read": self._read * self._piece,
            "blocks_corrupt": self._corrupt,
            "tier_failures": self._failures,
        }


def whole_bytes(state_bytes: int, block_size: int) -> int:
    """Most bytes of a state of `state_bytes` with its description, for KV blocks of `block_size` tokens."""
    return StateAbout.size_with(DIGEST_BYTES + StateKey.most_bytes(block_size)) + state_bytes


def pieces_of(state_bytes: int, block_size: int, piece_bytes: int) -> int:
    """Number of pieces of a state with its description. See `whole_bytes`."""
    return -(-whole_bytes(state_bytes, block_size) // piece_bytes)


def number_of(name: bytes) -> int:
    """Number of the write that the digest of a state's pieces ends with."""
    return int.from_bytes(name[NAME_BYTES:], "little")
