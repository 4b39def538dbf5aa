"""RowTiers: keeps account of the disk tier of padded rows, which holds whole states of conversations."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.lm.memory.host_pool import HostPool
from holdfast.lm.memory.kept_rows import STRIDE, KeptRows, RowKey
from holdfast.lm.memory.prices import Link
from holdfast.lm.memory.retention import MIN_AGE
from holdfast.lm.memory.row_pool import RowPool, StateBelow
from holdfast.lm.parts.tiers.lower_tiers import READ_BYTES, WRITE_BYTES, Fetch, longest_wait
from holdfast.lm.tiers import JobKind, LowerShape, StateAbout, TierBlock, TierDone, TierJob

NAME_BYTES = 24
"""Bytes of a state's digest at the start of the digest of its pieces. The number of its write follows."""
NUMBER_BYTES = 8
LEAST_GAIN = STRIDE
"""Fewest tokens that a read must save: so few are computed within a step that runs anyway."""
SAMPLES = 16
"""Number of places in a range of positions at which the cost of computing them is looked up."""

Cost = Callable[[int, int], float]
"""Seconds to compute a number of tokens again, up to a position (`CostModel.recompute`)."""


@dataclass(slots=True)
class _Moving:
    """A state that is being written or read."""

    kind: JobKind
    row: int
    """Number of the state on the disk."""
    key: RowKey
    slot: int
    """Slot of the host that is written or filled."""
    last_use: float
    pieces: int
    """Number of pieces whose jobs have not ended."""
    began: float
    jobs: list[TierJob]
    """Jobs that have not begun."""
    good: bool = True
    """Whether all pieces so far were moved."""
    copied: bool = False
    """Whether the slot has a copy that was made to be written, and nothing else."""
    replaced: Sequence[bytes] = ()
    """Digests of states that this one makes useless once it is written."""
    fetches: list[Fetch] = field(default_factory=list)
    """Fetches that wait for it."""


class RowTiers:
    """Decides which states of ended sequences go from the host to the disk, and which come back. Pure.

    A state is written in pieces of one size, to any free places of the disk. The digest of its pieces begins with the
    state's digest and ends with the number of the write, so pieces of two writes are never taken for one state. A state
    that comes to the host is written at once. In a pause, states of the device are copied to the host to be written;
    those copies pass through the host, and the device keeps its own.

    A state comes back when a waiting sequence begins with its tokens, if reading it takes less time than computing what
    the memory lacks. The state of lowest value gives way to one of higher value, as on the host (`KeptRows.victims`).

    The places are free, or of one state that is on the disk or on its way there: free + cached + moving = total.
    """

    def __init__(self, pool: RowPool, shape: LowerShape, cost: Cost | None, now: float) -> None:
        """The disk below `pool`. `now` is the time when its contents were listed.

        `cost` None: reading is always cheaper than computing. Raises ValueError without a host tier.
        """
        if not pool.shape.host_memory:
            raise ValueError("a disk tier lies behind the host tier, and there is none")
        self._pool, self._piece, self._cost = pool, shape.block_bytes, cost
        self._total = shape.disk_blocks
        croppable, digests = pool.shape.abilities.croppable, pool.kept.digests
        self._states = KeptRows(pool.bytes, pool.rule, croppable=croppable, digests=digests)
        self._places: dict[int, tuple[int, ...]] = {}
        """Places of the pieces of each state on the disk, or on its way there."""
        self._names: dict[int, bytes] = {}
        """Digest of the pieces of each state."""
        self._by_digest: dict[bytes, int] = {}
        """States on the disk by their digests."""
        self._free: deque[int] = deque()
        self._rows = self._numbers = self._writes = 0
        self._dirty: OrderedDict[int, int] = OrderedDict()
        """Slots of the host to be written, each with the slot whose state it has: another one if it is a copy."""
        self._copies: dict[int, int] = {}
        """Slot of the device by slot of its copy on the host, until the copy is written."""
        self._tried: set[int] = set()
        """Slots whose states were copied to the host to be written."""
        self._moving: dict[int, _Moving] = {}
        """States that are being moved, by their numbers on the disk."""
        self._of_job: dict[int, int] = {}
        """Number of the state by number of the job."""
        self._queue: deque[tuple[Fetch, int]] = deque()
        """Fetches that wait for room on the host, and the states that they want."""
        self.disk: HostPool | None = None
        """Always None: states on the disk are not blocks."""
        self.link = Link(latency=1e-3, rate=1e9)
        """Time that reads of the disk take."""
        self._written = self._read = self._dropped = self._corrupt = self._failures = self._given_up = self._refused = 0
        self._load(shape, now)
        pool.serve_below(self.find, self.has)

    def _load(self, shape: LowerShape, now: float) -> None:
        """Take over the contents of the disk. If two states have one digest, the later one stays."""
        taken: set[int] = set()
        for stored in shape.states:
            try:
                key = RowKey.unpacked(stored.about.key)
            except ValueError:
                continue
            right = self._pieces(key) == len(stored.slots) and max(stored.slots) < self._total
            if not right or key.digest[:NAME_BYTES] != stored.digest[:NAME_BYTES]:
                continue
            if (other := self._by_digest.get(key.digest)) is not None:
                taken.difference_update(self._places[other])
                self._forget(other)
            number = int.from_bytes(stored.digest[NAME_BYTES:], "little")
            self._writes = max(self._writes, number + 1)
            self._add(self._new_row(stored.slots, stored.digest), key, now - stored.age)
            taken.update(stored.slots)
        self._free = deque(place for place in range(self._total) if place not in taken)

    def tiers(self, digests: Iterable[bytes]) -> str:
        """For each digest of a block a dash: states are not paged, and no block is here."""
        return "-" * len([*digests])

    # Sizes.

    def _pieces(self, key: RowKey) -> int:
        """Number of pieces of a state with its description."""
        size = StateAbout.size_with(len(key.packed())) + self._pool.bytes(key.length)
        return -(-size // self._piece)

    def _about(self, key: RowKey) -> StateAbout:
        return StateAbout(key.length, key.packed(), self._pieces(key))

    # States on the disk.

    def _new_row(self, places: tuple[int, ...], name: bytes) -> int:
        row, self._rows = self._rows, self._rows + 1
        self._places[row], self._names[row] = places, name
        return row

    def _add(self, row: int, key: RowKey, last_use: float) -> None:
        self._states.put(row, key, last_use)
        self._by_digest[key.digest] = row

    def _forget(self, row: int) -> None:
        """Forget a state on the disk. Its places are free."""
        digest = self._states.key(row).digest
        self._states.forget(row)
        del self._by_digest[digest]
        self._give_back(row)

    def _give_back(self, row: int) -> None:
        self._free.extend(self._places.pop(row))
        del self._names[row]

    def has(self, key: RowKey) -> bool:
        """Whether a state on the disk serves every prompt that one with this key would."""
        return self._states.standing_in(key) >= 0

    def find(self, root: bytes, tokens: Sequence[int], saved: int) -> StateBelow | None:
        """The state on the disk that is worth reading for a prompt of which the memory saves `saved` tokens."""
        found = self._states.find(root, tokens) if len(self._states) else None
        if found is None or found.length < saved + LEAST_GAIN or not self._pool.serves(found, tokens):
            return None
        if not self._is_worth(found.slot, saved, found.length):
            self._refused += 1
            self.link.refuse()
            return None
        return StateBelow(found.length, self._states.key(found.slot).digest)

    def _is_worth(self, row: int, saved: int, length: int) -> bool:
        """Whether a state is read sooner than the positions [saved, length) are computed."""
        seconds = self._computing(saved, length)
        ahead = sum(self._states.size(each) for each, moving in self._moving.items() if moving.kind == "read")
        return seconds is None or self.link.seconds(self._states.size(row) + ahead) < seconds

    def _computing(self, start: int, stop: int) -> float | None:
        """Seconds to compute positions [start, stop); None if the cost is unknown."""
        if self._cost is None:
            return None
        step = max(1, -(-(stop - start) // SAMPLES))
        return sum(self._cost(min(step, stop - at), min(at + step, stop)) for at in range(start, stop, step))

    # States that come back.

    def fetch(self, missing: Mapping[int, bytes], now: float) -> Fetch | None:
        """Begin to bring back the state that a sequence lacks. None if there is nothing to bring.

        `missing` has the state's digest by the number of tokens that it saves.
        """
        for length, digest in missing.items():
            row = self._by_digest.get(digest)
            if row is not None and self._pool.bytes(self._states.key(row).length) <= self._pool.shape.host_memory:
                fetch = Fetch(now, now + longest_wait(self._computing(0, length)), pending={digest})
                fetch.came["disk"] = length
                if not self._bring(fetch, row, now):
                    fetch.queued = 1
                    self._queue.append((fetch, row))
                return fetch
        return None

    def _bring(self, fetch: Fetch, row: int, now: float) -> bool:
        """Begin to read a state, or wait with others that do. Returns False if the host has no room for it."""
        if (moving := self._moving.get(row)) is not None:
            moving.fetches.append(fetch)
            return True
        key = self._states.key(row)
        slot = self._pool.begin_arrival(self._pool.bytes(key.length))
        if slot is None:
            return False
        self._states.touch(row, now)
        self._states.hold(row)
        moving = self._begin("read", row, key, slot, now, READ_BYTES)
        moving.fetches.append(fetch)
        return True

    def close(self, fetch: Fetch) -> None:
        """Note that the sequence of a fetch has started or ended: nothing is held for it from now on."""
        fetch.open, fetch.over = False, True
        for slot in fetch.held:
            self._pool.kept.release(slot)
        fetch.held.clear()

    def question(self, digests: Sequence[bytes], stop: int, now: float) -> Fetch | None:
        """None: only this engine writes to its disk."""
        return None

    def end_wait(self, fetch: Fetch) -> None:
        """Note that a sequence does not wait for its state any longer."""
        self._given_up += 1
        fetch.over = True
        fetch.came["disk"] = 0
        fetch.pending.clear()

    def _try_again(self, now: float) -> None:
        """Begin the reads for which the host has room by now, in order."""
        while self._queue:
            fetch, row = self._queue[0]
            there = row in self._places and not fetch.over
            if there and not self._bring(fetch, row, now):
                return
            self._queue.popleft()
            fetch.queued = 0
            if not there and not fetch.over:
                self._fail(fetch)

    @staticmethod
    def _fail(fetch: Fetch) -> None:
        fetch.pending.clear()
        fetch.came["disk"] = 0

    # States that go down.

    @property
    def backlog(self) -> bool:
        """Whether states are still to be written, or more bytes are being written than may be at a time."""
        return bool(self._dirty) or self._bytes_in_writing >= WRITE_BYTES

    @property
    def _bytes_in_writing(self) -> int:
        return sum(moving.pieces * self._piece for moving in self._moving.values() if moving.kind == "write")

    @property
    def can_flush(self) -> bool:
        """Whether a state of the device could be copied to the host now, to be written."""
        return not self.backlog and any(True for _ in self._to_copy())

    def _to_copy(self) -> Iterator[int]:
        """Slots of the kept states that only the device has, that were not tried, and for which the host has room."""
        kept, most = self._pool.kept, self._pool.host_room
        for slot in kept.slots:
            if slot not in kept or kept.on_host(slot):  # a copy may have cost another state its place on the host
                continue
            if slot not in self._tried and kept.size(slot) <= most and not self.has(kept.key(slot)):
                yield slot

    def flush(self, idle: bool) -> None:
        """Let the next plan copy states of the device to the host if there is nothing else to do (`idle`)."""
        if not (idle and self.can_flush) or self._pool.storing:
            return
        self._tried.intersection_update(self._pool.kept.slots)
        size = 0
        for source in self._to_copy():
            slot = self._pool.copy_to_host(source) if size < WRITE_BYTES else None
            if slot is None:
                return
            self._tried.add(source)
            self._copies[slot] = source
            size += self._pool.kept.size(source)

    @property
    def has_news(self) -> bool:
        """Whether `jobs` may have new ones, because states have come to the host."""
        return self._pool.news_of_host

    @property
    def wants_step(self) -> bool:
        """Whether the result of a plan is needed, which says that copies to the host are complete."""
        return self._pool.storing

    @property
    def unwritten(self) -> int:
        """Number of states of the host that are being written, or still to be written."""
        return len(self._dirty) + sum(moving.kind == "write" for moving in self._moving.values())

    @property
    def unflushed(self) -> bool:
        """Whether the device has a state that neither the host nor the disk has."""
        return any(True for _ in self._to_copy())

    def renew(self) -> None:
        """Do nothing: a turn that uses a state leaves a longer one, which is written with its own time."""

    def begin_swap_in(self, step: int) -> None:
        """Do nothing: a load of a state reads it, wherever it is."""

    def finish_swap_in(self, step: int) -> None:
        """Do nothing: a state that arrives gets a slot that no plan has named."""

    def jobs(self, now: float) -> list[TierJob]:
        """The jobs to begin now."""
        self._try_again(now)
        for slot in self._pool.take_on_host():
            self._dirty[slot] = self._copies.get(slot, slot)
        while self._dirty and self._bytes_in_writing < WRITE_BYTES:
            slot, source = self._dirty.popitem(last=False)
            if not self._write(slot, source, now) and slot in self._copies:
                self._end_copy(slot)
        begun = [job for moving in self._moving.values() for job in moving.jobs]
        for moving in self._moving.values():
            moving.jobs = []
        return begun

    def _write(self, slot: int, source: int, now: float) -> bool:
        """Begin to write the state of a slot. Returns False if it is of no use, or worth less than what is there."""
        kept = self._pool.kept
        if source not in kept:  # a suspended state, or one that was given up meanwhile
            return False
        key, value = kept.key(source), kept.value(source, now)
        others = any(each.key == key and each.kind == "write" for each in self._moving.values())
        if others or self.has(key):
            return False
        places = self._reserve(self._pieces(key), value, now)
        if not places:
            return False
        name = key.digest[:NAME_BYTES] + self._writes.to_bytes(NUMBER_BYTES, "little")
        self._writes += 1
        row = self._new_row(places, name)
        moving = self._begin("write", row, key, slot, now, 0, last_use=kept.last_use(source))
        moving.copied, moving.replaced = slot in self._copies, kept.replaced(source)
        return True

    def _reserve(self, count: int, value: float, now: float) -> tuple[int, ...]:
        """Take free places for a state of this value. States of lower value give theirs up. Empty without room."""
        if count > self._total:
            return ()
        self._renew()
        room, victims = len(self._free), list[int]()
        for row in self._states.victims(now, on_host=False) if count > room else ():
            if self._states.value(row, now) >= value:
                return ()
            victims.append(row)
            room += len(self._places[row])
            if room >= count:
                break
        if room < count:
            return ()
        for row in victims:
            self._dropped += len(self._places[row])
            self._forget(row)
        return tuple(self._free.popleft() for _ in range(count))

    def _renew(self) -> None:
        """Count states on the disk as used when their copies in memory were."""
        kept = self._pool.kept
        for slot in kept.slots:
            row = self._by_digest.get(kept.key(slot).digest)
            if row is not None and self._states.last_use(row) < kept.last_use(slot):
                self._states.touch(row, kept.last_use(slot))

    def _begin(
        self, kind: JobKind, row: int, key: RowKey, slot: int, now: float, together: int, *, last_use: float = 0.0
    ) -> _Moving:
        """Queue the jobs of a state: one, or several of about `together` bytes each."""
        places, name, about = self._places[row], self._names[row], self._about(key)
        blocks = [TierBlock(name, at, slot, place, last_use) for at, place in enumerate(places)]
        step = max(1, together // self._piece) if together else len(blocks)
        moving = self._moving[row] = _Moving(kind, row, key, slot, last_use, len(blocks), now, [])
        for start in range(0, len(blocks), step):
            job = TierJob(self._numbers, "disk", kind, tuple(blocks[start : start + step]), about)
            moving.jobs.append(job)
            self._of_job[self._numbers] = row
            self._numbers += 1
        return moving

    # Jobs that have ended.

    def done(self, ended: Iterable[TierDone], now: float) -> None:
        """Take note of jobs that have ended."""
        for each in ended:
            moving = self._moving[self._of_job.pop(each.number)]
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
                del self._moving[moving.row]
                (self._end_write if moving.kind == "write" else self._end_read)(moving, now)

    def _end_write(self, moving: _Moving, now: float) -> None:
        if moving.copied:
            self._end_copy(moving.slot)
        if not moving.good:
            self._give_back(moving.row)
            return
        self._add(moving.row, moving.key, moving.last_use)
        for digest in moving.replaced:
            row = self._by_digest.get(digest)
            if row is not None and row not in self._moving:
                self._forget(row)

    def _end_copy(self, slot: int) -> None:
        del self._copies[slot]
        self._pool.pass_on(slot)

    def _end_read(self, moving: _Moving, now: float) -> None:
        row = moving.row
        self._states.release(row)
        if not moving.good:
            self._pool.cancel_arrival(moving.slot)
            self._forget(row)
            for fetch in moving.fetches:
                self._fail(fetch)
            return
        self.link.observe(self._states.size(row), max(now - moving.began, MIN_AGE))
        kept = self._pool.end_arrival(moving.slot, moving.key, now)
        for fetch in moving.fetches:
            fetch.pending.discard(moving.key.digest)
            if not kept:
                fetch.came["disk"] = 0
            elif not fetch.over:
                fetch.held.append(moving.slot)
                self._pool.kept.hold(moving.slot)

    def stats(self) -> Mapping[str, Any]:
        """Counters and present sizes of the disk: fields of `SchedulerStats`. A block is a position, as in the pool."""
        position, piece = self._pool.shape.bytes.position, self._piece
        return {
            "disk_blocks_total": self._total * piece // position,
            "disk_blocks_cached": sum(len(self._places[row]) for row in self._by_digest.values()) * piece // position,
            "disk_bytes_written": self._written * piece,
            "disk_bytes_read": self._read * piece,
            "disk_blocks_dropped": self._dropped * piece // position,
            "blocks_corrupt": self._corrupt,
            "tier_failures": self._failures,
            "blocks_cheaper_computed": self._refused,
            "fetches_given_up": self._given_up,
        }
