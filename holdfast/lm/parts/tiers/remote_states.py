"""RemoteStates: the recurrent states in the remote tier, as far as this engine knows of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from holdfast.lm.memory.prices import Link
from holdfast.lm.memory.retention import MIN_AGE
from holdfast.lm.memory.snapshots import NO_SLOT, Snapshot, StateKey
from holdfast.lm.memory.state_pool import StatePool
from holdfast.lm.parts.tiers.lower_states import LowerStates
from holdfast.lm.parts.tiers.lower_tiers import REMOTE_KNOWN, Fetch, LowerTiers
from holdfast.lm.tiers import JobKind, StateAbout, TierBlock, TierDone, TierJob


@dataclass(slots=True)
class Write:
    """A state that is being written."""

    snapshot: Snapshot


@dataclass(slots=True)
class Read:
    """A state on its way to a slot of the host."""

    key: StateKey
    slot: int
    began: float
    mark: int
    """The job begins once the plans that `StatePool.mark` counts have ended."""
    fetches: list[Fetch] = field(default_factory=list)
    """Fetches that wait for it."""


@dataclass(slots=True)
class Question:
    """A question which states the tier has."""

    fetch: Fetch


class RemoteStates(LowerStates):
    """Decides which snapshots of recurrent states go from the host to the remote tier, and which come back. Pure.

    The tier bounds itself. A state is one value there, so it is found whole or not at all. The key of each state is
    listed under the digest of the full block before it. A waiting sequence asks which states come after its blocks
    (`ask`), because other engines write there, too. Answers are remembered, and forgotten when a read finds nothing.

    The account of the blocks in the same tier says whether it works.
    """

    def __init__(self, pool: StatePool, blocks: LowerTiers, block_size: int, numbers: Iterator[int]) -> None:
        """The remote tier below `pool`, with blocks of `block_size` tokens. `numbers` are those of jobs, below zero.

        Raises ValueError if the host has no slot for a snapshot, through which each goes.
        """
        super().__init__(pool, Link(latency=3e-3, rate=5e8))
        self._blocks, self._block_size, self._numbers = blocks, block_size, numbers
        self._known: OrderedDict[bytes, StateKey] = OrderedDict()
        """The states that the tier was seen to have, by digest."""
        self._by_parent: dict[bytes, dict[bytes, StateKey]] = {}
        self._arriving: dict[bytes, Read] = {}
        self._jobs: list[TierJob] = []
        """Jobs that have not begun."""
        self._books: dict[int, tuple[TierJob, Write | Read | Question]] = {}
        """The jobs that have not ended, by number."""
        self._was_down = False
        pool.serve_below(self)

    # The states of the tier.

    def has(self, digest: bytes) -> bool:
        """Whether the tier was seen to have the state of this digest, or is being given it."""
        return digest in self._known or digest in self._writing

    def keys(self, parent: bytes) -> Iterable[StateKey]:
        """The keys with this parent of the states that the tier was seen to have."""
        return [] if self._blocks.remote_down else [*self._by_parent.get(parent, {}).values()]

    def length(self, digest: bytes) -> int:
        """Number of tokens that the state of a digest has seen; 0 for one that is not known."""
        return self._known[digest].length if digest in self._known else 0

    def _know(self, key: StateKey) -> None:
        self._known[key.digest] = key
        self._known.move_to_end(key.digest)
        self._by_parent.setdefault(key.parent, {})[key.digest] = key
        if key.tail:
            self._blocks.know(key.tail_digest)  # it is written with the blocks; if it is lost, reading it says so
        if len(self._known) > REMOTE_KNOWN:
            self._forget(next(iter(self._known)))

    def _forget(self, digest: bytes) -> None:
        key = self._known.pop(digest, None)
        if key is not None:
            here = self._by_parent[key.parent]
            del here[digest]
            if not here:
                del self._by_parent[key.parent]

    def ask(self, fetch: Fetch, digests: Sequence[bytes], first: int) -> None:
        """Let a fetch wait for the answer which states come after these full blocks, from block `first` on."""
        fetch.queued += 1
        blocks = tuple([TierBlock(digest, place) for place, digest in enumerate(digests, first)])
        self._begin("find", blocks, Question(fetch), StateAbout(0, b"", 1))

    # States that go down.

    def jobs(self, now: float) -> list[TierJob]:
        """The jobs to begin now."""
        self._watch()
        while self._dirty and len(self._writing) < self._most_written:
            self._write(self._dirty.popitem(last=False)[0])
        begun = [job for job in self._jobs if self._is_quiet(job)]
        self._jobs = [job for job in self._jobs if not self._is_quiet(job)]
        return begun

    def _watch(self) -> None:
        """Leave a tier alone that does not work. Once it works again, write what it has missed."""
        down, was_down = self._blocks.remote_down, self._was_down
        self._was_down = down
        if down:
            self._dirty.clear()
        elif was_down:
            self._dirty.update((each, None) for each in self._pool.snapshots() if each.host != NO_SLOT)

    def _is_quiet(self, job: TierJob) -> bool:
        """Whether no plan in flight uses the slot of a job."""
        work = self._books[job.number][1]
        return not isinstance(work, Read) or self._pool.is_quiet(work.mark)

    def _write(self, snapshot: Snapshot) -> None:
        """Begin to write a snapshot, unless the tier has it."""
        key = snapshot.key
        if snapshot.host == NO_SLOT or self.has(key.digest):
            return
        self._writing.add(key.digest)
        snapshot.holds += 1
        self._move("write", key, snapshot.host, Write(snapshot), snapshot.used[0])

    # States that come back.

    @property
    def reading(self) -> int:
        """Bytes of the states that are being read."""
        return len(self._arriving) * self.size

    def fetch(self, digest: bytes, fetch: Fetch, now: float) -> bool:
        """Begin to read the state of a digest for a fetch, or let it wait for one that is being read.

        Returns False if the host has no room for it now. Does nothing for a state that is not known.
        """
        key, arrival = self._known.get(digest), self._arriving.get(digest)
        if key is None:
            return True
        if arrival is None:
            mark, slot = self._pool.mark, self._pool.reserve_on_host(now)
            if slot == NO_SLOT:
                return False
            arrival = self._arriving[digest] = Read(key, slot, now, mark)
            self._move("read", key, slot, arrival, now)
        arrival.fetches.append(fetch)
        fetch.pending.add(name_of(digest))
        return True

    # Jobs.

    def _move(self, kind: JobKind, key: StateKey, slot: int, work: Write | Read, used: float) -> None:
        about = StateAbout(key.length, key.parent + key.packed(), 1)
        self._begin(kind, (TierBlock(key.digest, 0, slot, last_use=used),), work, about)

    def _begin(
        self, kind: JobKind, blocks: tuple[TierBlock, ...], work: Write | Read | Question, about: StateAbout
    ) -> None:
        job = TierJob(next(self._numbers), "remote", kind, blocks, about)
        self._books[job.number] = job, work
        self._jobs.append(job)

    def done(self, ended: Iterable[TierDone], now: float) -> None:
        """Take note of jobs that have ended. Jobs of others are left out."""
        for each in ended:
            if each.number not in self._books:
                continue
            job, work = self._books.pop(each.number)
            if "failed" in each.outcomes:
                self._failures += 1
                self._blocks.note_remote_failure()
            match work:
                case Write(snapshot):
                    self._end_write(snapshot, each)
                case Read():
                    self._end_read(work, each, now)
                case Question(fetch):
                    self._end_question(fetch, job, each)

    def _end_write(self, snapshot: Snapshot, ended: TierDone) -> None:
        snapshot.holds -= 1
        self._writing.remove(snapshot.key.digest)
        if ended.outcomes == ("done",):
            self._written += 1
            self._know(snapshot.key)

    def _end_read(self, read: Read, ended: TierDone, now: float) -> None:
        digest = read.key.digest
        del self._arriving[digest]
        if ended.outcomes == ("done",):
            self._read += 1
            self.link.observe(self.size, max(now - read.began, MIN_AGE))
            self._hold(self._pool.cache_on_host(read.slot, read.key, now), read.fetches)
        else:
            self._corrupt += ended.outcomes.count("corrupt")
            self._pool.cancel_on_host(read.slot)
            self._forget(digest)
        for fetch in read.fetches:
            fetch.pending.discard(name_of(digest))

    def _end_question(self, fetch: Fetch, job: TierJob, ended: TierDone) -> None:
        places = {block.digest: block.place for block in job.blocks}
        for key in keys_of(ended.found):
            if key.parent in places and key.follows(places[key.parent], self._block_size):
                self._know(key)
        fetch.queued -= 1

    def stats(self) -> Mapping[str, int]:
        """Counters of the states in this tier."""
        return {
            "remote_bytes_written": self._written * self.size,
            "remote_bytes_read": self._read * self.size,
            "blocks_corrupt": self._corrupt,
            "tier_failures": self._failures,
        }


def keys_of(found: Iterable[bytes]) -> Iterator[StateKey]:
    """The keys of these bytes. Bytes that are no key are left out, as others write to the tier, too."""
    for packed in found:
        with suppress(ValueError):
            yield StateKey.unpacked(packed)


def name_of(digest: bytes) -> bytes:
    """The name of a state among the digests that a fetch waits for, which differs from those of KV blocks."""
    return b"state " + digest
