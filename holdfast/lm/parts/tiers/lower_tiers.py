"""LowerTiers: keeps account of the tiers below the host tier: a local disk and a service that engines share."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from math import inf
from operator import attrgetter

from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.host_pool import HostPool
from holdfast.lm.memory.prices import Link, Prices
from holdfast.lm.memory.retention import Use
from holdfast.lm.tiers import NO_SLOT, JobKind, LowerShape, TierBlock, TierDone, TierJob, TierName

JOB_BYTES = 4 << 20
"""Approximate bytes of a job: a disk reads large pieces fastest, and handing over a job takes time."""
READ_BYTES = 2 << 20
"""Approximate bytes of a read from the disk. Smaller, because a sequence waits for it.

Threads read the parts of a conversation together, and the first are noted while others are still read.
"""
WRITE_BYTES = 64 << 20
"""Most bytes that are being written to one tier at a time. Their blocks cannot be evicted meanwhile."""
SLOT = attrgetter("slot")
REMOTE_KNOWN = 1 << 17
"""Number of remembered digests that the remote tier was seen to have: no block is written there twice in a row."""
SHORTEST_WAIT, LONGEST_WAIT = 0.25, 10.0
"""Least and most seconds that a sequence waits for its blocks."""
UNKNOWN_WAIT = 5.0
"""Most seconds that a sequence waits if the cost of computing its blocks again is unknown."""


def longest_wait(seconds: float | None) -> float:
    """Most seconds that a sequence waits for state whose computation takes `seconds`; None: not known."""
    return UNKNOWN_WAIT if seconds is None else min(max(2 * seconds, SHORTEST_WAIT), LONGEST_WAIT)


@dataclass(eq=False, slots=True)
class Fetch:
    """The blocks, or the state of a row, that a waiting sequence gets from the lower tiers."""

    began: float
    deadline: float
    """Time from which the sequence does not wait any longer, in seconds."""
    pending: set[bytes] = field(default_factory=set)
    """Digests of the blocks still to arrive."""
    probing: bool = False
    """Whether the remote tier is being asked what it has."""
    queued: int = 0
    """Number of its requests that wait for room on the host."""
    held: list[int] = field(default_factory=list)
    """Blocks of the host tier that have arrived, or slots of states. They are held until the sequence has started."""
    came: dict[TierName, int] = field(default_factory=lambda: {"disk": 0, "remote": 0})
    """Number of blocks that came, by the tier that gave them; on padded rows, of positions."""
    size: dict[TierName, int] = field(default_factory=dict)
    """Bytes asked of each tier, including blocks that were asked for before and had not arrived."""
    open: bool = True
    """Whether its sequence has neither started nor ended."""
    over: bool = False
    """Whether the sequence has stopped waiting for it."""
    asks: bool = False
    """Whether it brings nothing, and only asks what the remote tier has."""

    @property
    def complete(self) -> bool:
        """Whether nothing is left to arrive."""
        return not (self.pending or self.probing or self.queued)


NOBODY = Fetch(0.0, 0.0, open=False, over=True)
"""Stands for the sequence of blocks that are brought ahead of need."""


@dataclass(eq=False, slots=True)
class Arrival:
    """Blocks on their way to the host that were asked for together."""

    hosts: dict[bytes, int]
    """By digest, the block of the host that is filled."""
    fetches: list[Fetch]
    """Fetches that wait for some of them. The first is NOBODY if they were not asked for."""

    @property
    def is_asked(self) -> bool:
        """Whether a sequence has asked for some of them."""
        return self.fetches != [NOBODY]


@dataclass(slots=True)
class JobBook:
    """A job that has not ended."""

    job: TierJob
    fetch: Fetch | None = None
    """Fetch of a probe."""
    after: int | None = None
    """Plan whose copies to the device must end before the job may write to the host; None: not known yet."""
    started: bool = False


class LowerTiers:
    """Decides which blocks go from the host tier to the disk and the remote tier, and which come back.

    The disk is a `HostPool` of its own, with the same states and the same value. Blocks go down ahead of need: each
    block that the host gets is written to every lower tier, as fast as the tier takes it. So a block that the host
    evicts is mostly there already. A block comes back when a waiting sequence needs it and `Prices` say that computing
    it again would take longer.

    The jobs are decided here (`jobs`) and done by others. Their ends are reported at the next boundary of a step
    (`done`). A block of the host is held while it is written to a tier. A block that is to be filled is reserved, and
    filled only once no plan can read its old contents (`HostPool.reserve`).

    In each tier free + cached + reserved = total. The remote tier bounds itself, by lifetime and eviction.
    """

    def __init__(self, pool: BlockPool, shape: LowerShape, prices: Prices, now: float) -> None:
        """The tiers below `pool`, which must have a host tier. `now` is the time when the disk's contents were listed.

        Raises ValueError without a host tier.
        """
        if pool.host is None:
            raise ValueError("a disk tier and a remote tier lie behind the host tier, and there is none")
        self.prices = prices
        self.links: dict[TierName, Link] = {
            "disk": Link(latency=1e-3, rate=1e9),
            "remote": Link(latency=3e-3, rate=5e8),
        }
        self._pool, self._host = pool, pool.host
        self._host.take_uses()
        self._remote = shape.remote
        self._remote_down = shape.remote_down
        """Whether the remote tier has failed, and no check since then has found that it works."""
        self._checking = False
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._tiers: list[TierName] = []
        self._dirty: dict[TierName, OrderedDict[bytes, None]] = {}
        """Blocks of the host that each tier may lack, in the order in which to write them."""
        self._writing: dict[TierName, set[bytes]] = {}
        for name, there in (("disk", shape.disk_blocks > 0), ("remote", shape.remote)):
            if there:
                tier: TierName = "disk" if name == "disk" else "remote"
                self._tiers.append(tier)
                self._dirty[tier] = OrderedDict()
                self._writing[tier] = set()
        self.disk = HostPool(shape.disk_blocks, pool.rule) if shape.disk_blocks else None
        self._arriving: dict[bytes, Arrival] = {}
        self._unasked = 0
        """Number of blocks on their way to the host that are brought ahead of need."""
        self._reads = 0
        """Number of reads that have not ended."""
        self._has_begun = False
        """Whether a read ahead of need was begun that `jobs` has not given."""
        self._renewed: set[bytes] = set()
        """Blocks of the disk that were used since its files last said so."""
        self._held = 0
        """Number of blocks of the host that fetches hold."""
        self._queue: deque[tuple[Fetch, TierName, dict[int, bytes]]] = deque()
        """Reads to begin once the host has room: at most half of the host is for waiting sequences."""
        self._books: dict[int, JobBook] = {}
        self._numbers = 0
        self._uses = 0
        self._copying_in = self._copied_in = -1
        self._batch = max(1, JOB_BYTES // shape.block_bytes)
        self._read_batch = max(1, READ_BYTES // shape.block_bytes)
        self._most_written = max(1, min(WRITE_BYTES // shape.block_bytes, self._host.num_blocks // 4))
        self._written: dict[TierName, int] = {"disk": 0, "remote": 0}
        self._read: dict[TierName, int] = {"disk": 0, "remote": 0}
        self._corrupt = self._failures = self._given_up = 0
        self.num_blocks = shape.disk_blocks
        """Number of blocks that the disk has room for."""
        pool.serve_below(self.has, self)
        self._load(shape, now)

    def _load(self, shape: LowerShape, now: float) -> None:
        """Take over the contents of the disk. If two blocks have one digest, the later one stays."""
        disk = self.disk
        if disk is None:
            return
        blocks = {stored.digest: stored for stored in shape.stored if stored.slot < disk.num_blocks}
        slots = {stored.slot for stored in blocks.values()}
        disk.take(slots)
        for stored in blocks.values():
            self._uses += 1
            disk.cache_block(stored.slot, stored.digest, stored.place, (now - stored.age, self._uses))

    @property
    def backlog(self) -> bool:
        """Whether too much is still to be written for the host to get more."""
        return max(map(len, self._dirty.values())) + self._host.unread_uses >= max(1, self._host.ready // 4)

    @property
    def can_flush(self) -> bool:
        """Whether idle blocks of the device could be copied to the host now, and from there to the lower tiers."""
        return self._pool.can_swap_out and self._host.ready > 0 and not self.backlog

    @property
    def unwritten(self) -> int:
        """Number of blocks of the host that are being written to a lower tier, or still to be written."""
        self._note()
        return max(len(self._dirty[tier]) + len(self._writing[tier]) for tier in self._tiers)

    @property
    def unflushed(self) -> bool:
        """Whether the device has idle blocks that the host lacks."""
        return self._pool.can_swap_out

    @property
    def has_news(self) -> bool:
        """Whether `jobs` may have new ones, because blocks of the host were filled or used."""
        return self._host.unread_uses > 0 or self._has_begun

    @property
    def wants_step(self) -> bool:
        """Always False: a plan with copies of blocks is made for their sake."""
        return False

    def flush(self, idle: bool) -> None:
        """Let the next plan copy idle blocks down if there is nothing else to do (`idle`) and these tiers take them."""
        self._pool.flush(idle and self.can_flush)

    def has(self, digest: bytes) -> bool:
        """Whether the disk has this block, or the remote tier was seen to have it."""
        return self.has_on_disk(digest) or digest in self._known

    def has_on_disk(self, digest: bytes) -> bool:
        """Whether the disk has this block."""
        return self.disk is not None and self.disk.find(digest) is not None

    def tiers(self, digests: Iterable[bytes]) -> str:
        """The lower tiers that have the state of each digest: letters of `block_map.TIERS_BELOW`, or - for none."""
        arriving, remote = self._arriving, self._known
        on_disk: Mapping[bytes, int] = {} if self.disk is None else self.disk.by_digest
        return "".join(
            [
                "f" if digest in arriving else "k" if digest in on_disk else "r" if digest in remote else "-"
                for digest in digests
            ]
        )

    def begin_swap_in(self, step: int) -> None:
        """Note that plan `step` copies blocks of the host to the device."""
        self._copying_in = step

    def finish_swap_in(self, step: int) -> None:
        """Note that the copies to the device have ended, of plan `step` and of all plans before it."""
        self._copied_in = max(self._copied_in, step)

    def jobs(self, now: float) -> list[TierJob]:
        """The jobs to begin now."""
        self._note()
        self._has_begun = False
        while self._queue and (self._room(self._queue[0][2]) or self._queue[0][0].over):
            fetch, tier, there = self._queue.popleft()
            fetch.queued -= 1
            if not fetch.over:
                fetch.began = now
                self._ask(tier, there, fetch, now)
        for tier in self._tiers:
            self._write(tier, now)
        if self._remote_down and not self._checking:
            self._checking = True
            self._begin("remote", "check", ())
        begun = []
        for book in self._books.values():
            if book.after is None:  # plans that were made with it may copy what its blocks held
                book.after = self._copying_in if book.job.kind == "read" else -1
            if not book.started and book.after <= self._copied_in:
                book.started = True
                begun.append(book.job)
        return begun

    def _note(self) -> None:
        """Read the host's news of state that it got, or that has been used again on the host or on the device.

        The disk's order of eviction follows these uses, also of state that the host has evicted.
        """
        disk, host, used = self.disk, self._host, dict[Use, list[bytes]]()
        for digest, use in host.take_uses():
            here = host.find(digest) is not None
            if disk is not None and disk.find(digest) is not None:
                if use is not None:
                    used.setdefault(use, []).append(digest)
            elif disk is not None and here:
                self._dirty["disk"][digest] = None
            if self._remote and here and digest not in self._known:
                self._dirty["remote"][digest] = None
        if disk is not None:
            for use, digests in used.items():
                disk.touch_all(digests, use)
                self._renewed.update(digests)

    def renew(self) -> None:
        """Begin to note in the disk's files when its blocks were last used, so that a restart knows their order."""
        self._note()
        disk, blocks = self.disk, list[TierBlock]()
        for digest in self._renewed:
            if disk is not None and (slot := disk.hold(digest)) is not None:
                last, _ = disk.last_use(slot) or (0.0, 0)
                blocks.append(TierBlock(digest, disk.index_of(slot), slot=slot, last_use=last))
        self._renewed.clear()
        self._begin("disk", "renew", blocks)

    def _write(self, tier: TierName, now: float) -> None:
        """Begin to write blocks to a tier, as many as may be under way.

        Blocks of one conversation are written one after the other, so that they lie together on the disk.
        """
        dirty, writing, host, disk = self._dirty[tier], self._writing[tier], self._host, self.disk
        if tier == "remote" and self._remote_down:
            dirty.clear()
            return
        found: list[tuple[Use, int, bytes, int]] = []
        while dirty and len(writing) < self._most_written:
            digest, _ = dirty.popitem(last=False)
            there = digest in self._known if disk is None or tier == "remote" else disk.find(digest) is not None
            if there or digest in writing or (source := host.hold(digest)) is None:
                continue  # the host has evicted the last: its state is lost
            writing.add(digest)
            found.append((host.last_use(source) or (now, 0), host.index_of(source), digest, source))
        victims = disk.victims(now) if disk is not None and found else None
        blocks: list[TierBlock] = []
        for (last, call), index, digest, source in sorted(found):
            slot = NO_SLOT
            if tier == "disk":
                assert disk is not None and victims is not None
                taken, evicted = disk.reserve(self._value(index, (last, call), now), victims)
                self._renewed.difference_update(evicted)
                if taken is None:
                    host.release((source,))
                    writing.discard(digest)
                    continue
                slot = taken
            blocks.append(TierBlock(digest, index, source, slot, last))
        self._begin(tier, "write", blocks)

    def _value(self, index: int, use: Use, now: float) -> float:
        rule = self._pool.rule
        return rule.class_cost(rule.cost_class(index)) * rule.turns.worth(*use, now)

    def fetch(self, missing: Mapping[int, bytes], now: float) -> Fetch | None:
        """Begin to bring back the blocks that a sequence lacks: digests by place. None if there is nothing to bring."""
        fetch = Fetch(now, now + longest_wait(self.prices.computing([*missing])))
        on_disk, rest = dict[int, bytes](), dict[int, bytes]()
        for index, digest in missing.items():
            on_its_way = digest in self._arriving or self.has_on_disk(digest)
            (on_disk if on_its_way else rest)[index] = digest
        self._ask("disk", on_disk, fetch, now)
        if self._remote and not self._remote_down and self.prices.worth([*rest], self.links["remote"]):
            fetch.probing = True
            self._begin("remote", "probe", [TierBlock(digest, index) for index, digest in rest.items()], fetch)
        return None if fetch.complete else fetch

    def extend(self, fetch: Fetch, there: Mapping[int, bytes], now: float) -> None:
        """Let a fetch have those of these blocks that the disk has, or the remote tier was seen to have, by place."""
        on_disk = {at: each for at, each in there.items() if each in self._arriving or self.has_on_disk(each)}
        self._ask("disk", on_disk, fetch, now)
        if self._remote and not self._remote_down:
            rest = {at: each for at, each in there.items() if at not in on_disk and each in self._known}
            self._ask("remote", rest, fetch, now)

    @property
    def remote_down(self) -> bool:
        """Whether the remote tier has failed, and no check since then has found that it works."""
        return self._remote_down

    def question(self, digests: Sequence[bytes], stop: int, now: float) -> Fetch | None:
        """None: `fetch` asks itself."""
        return None

    def know(self, digest: bytes) -> None:
        """Note that the remote tier has the block of this digest."""
        self._know(digest)

    def ask(self, fetch: Fetch, digests: Sequence[bytes]) -> None:
        """Let a fetch wait for the answer which of these blocks the remote tier has, as far as no tier is known to."""
        pool, missing = self._pool, list[TierBlock]()
        for place, (digest, block) in enumerate(zip(digests, pool.find_all(digests), strict=True)):
            if block is None and pool.find_on_host(digest) is None and not self.has(digest):
                missing.append(TierBlock(digest, place))
        if missing:
            fetch.probing = True
            self._begin("remote", "probe", missing, fetch)

    def _ask(self, tier: TierName, there: Mapping[int, bytes], fetch: Fetch, now: float) -> None:
        """Let a fetch have these blocks of a tier, also if other fetches wait for them or they are still to be read."""
        lacking = {}
        for index, digest in there.items():
            if (arrival := self._arriving.get(digest)) is not None:
                if arrival.fetches[-1] is not fetch:
                    arrival.fetches.append(fetch)
                fetch.pending.add(digest)
            elif self._host.find(digest) is None and (tier == "remote" or self.has_on_disk(digest)):
                lacking[index] = digest
        if lacking:
            self._bring(tier, lacking, fetch, now)

    def _bring(self, tier: TierName, there: Mapping[int, bytes], fetch: Fetch, now: float) -> None:
        """Begin to read those of these blocks that are cheaper to bring than to compute, or queue the read for room.

        If half of the host has no room for them all, the last ones are read: they cost most to compute.
        """
        host, disk, size = self._host, self.disk, self.prices.block_bytes
        ahead = size * (self._num_asked + sum([len(blocks) for _, _, blocks in self._queue]))
        chosen = self.prices.worth([*there], self.links[tier], ahead)
        if not self._room(chosen):
            fetch.queued += 1
            self._queue.append((fetch, tier, {index: there[index] for index in chosen}))
            return
        indices = sorted(chosen, reverse=True)[: host.ready // 2]
        targets, evicted = host.reserve_all(len(indices), inf, host.victims(now))
        self._pool.evicted_from_host(evicted)
        digests = [there[index] for index in indices[: len(targets)]]
        slots = [NO_SLOT] * len(digests)
        if tier == "disk":
            assert disk is not None
            self._uses += 1
            slots = disk.hold_all(digests, (now, self._uses))
        targets.reverse()  # so that blocks that follow each other mostly do so on the host, too
        blocks = [*map(TierBlock, digests, indices, targets, slots)]
        if tier == "disk":
            blocks.sort(key=SLOT)  # so that what lies together is read together
        self._arriving.update(dict.fromkeys(digests, Arrival(dict(zip(digests, targets, strict=True)), [fetch])))
        fetch.pending.update(digests)
        if blocks:
            fetch.size[tier] = size * len(blocks) + ahead
        self._begin(tier, "read", blocks)

    def _room(self, blocks: Collection[int]) -> bool:
        """Whether the host has room for these blocks, or for the most blocks that it may have for one sequence."""
        most = self._host.ready // 2
        return min(len(blocks), most) <= most - self._held - self._num_asked

    @property
    def _num_asked(self) -> int:
        """Number of blocks on their way to the host that were asked for. The others are of one read at most."""
        return len(self._arriving) - self._unasked

    # Ahead of need.

    @property
    def is_reading(self) -> bool:
        """Whether any block is on its way to the host, or waits for room there."""
        return bool(self._reads or self._queue)

    def lead(self, blocks: int) -> float:
        """Seconds that it takes to have this many blocks on the host."""
        return self.links[self._tiers[0]].seconds(blocks * self.prices.block_bytes)

    def read_ahead(
        self, digests: Sequence[bytes], start: int, others: Iterator[bytes], gives_way: Callable[[bytes], bool]
    ) -> int:
        """Begin one read of blocks that no sequence has asked for, unless another read is under way (`FromBelow`).

        So a sequence that asks meanwhile waits for one read at most, and finds as much room as without it.
        """
        if self.is_reading:
            return start
        missing = (place for place in range(start, len(digests)) if self._is_missing(digests[place]))
        places = [*islice(missing, self._read_batch)]
        if not places:
            return len(digests)
        tier = self._tier_of(digests[places[0]])
        alike = [*takewhile(lambda place: self._tier_of(digests[place]) == tier, places)]
        targets = self._room_ahead(len(alike), others, gives_way)
        self._begin_reading(tier, [TierBlock(digests[at], at, host) for at, host in zip(alike, targets, strict=False)])
        return (*alike, alike[-1] + 1)[len(targets)]

    def _is_missing(self, digest: bytes) -> bool:
        """Whether only a tier below the host has a block, and it is not on its way."""
        pool = self._pool
        here = pool.find_all((digest,)) != [None] or self._host.find(digest) is not None
        return not here and digest not in self._arriving and self.has(digest)

    def _tier_of(self, digest: bytes) -> TierName:
        """The tier to read a block from that is below the host."""
        return "disk" if self.has_on_disk(digest) else "remote"

    def _room_ahead(self, count: int, others: Iterator[bytes], gives_way: Callable[[bytes], bool]) -> list[int]:
        """Reserve up to `count` blocks of the host without state that anybody needs there.

        Free blocks are left for two plans that copy to the host. So no plan evicts other state while a read is under
        way, whose blocks cannot be evicted.
        """
        pool, host = self._pool, self._host
        kept_free = 2 * pool.max_copies
        for digest in others if host.num_free < kept_free + count else ():
            if self.has_on_disk(digest) and gives_way(digest) and pool.find_all((digest,)) == [None]:
                host.give_up(digest)
                if host.num_free == kept_free + count:
                    break
        return host.reserve_spare(count, kept_free)

    def _begin_reading(self, tier: TierName, blocks: Sequence[TierBlock]) -> None:
        """Begin to read blocks that no sequence has asked for into reserved blocks of the host."""
        disk = self.disk
        if tier == "disk" and disk is not None:
            blocks = [block._replace(slot=slot) for block in blocks if (slot := disk.hold(block.digest)) is not None]
        hosts = {block.digest: block.host for block in blocks}
        self._arriving.update(dict.fromkeys(hosts, Arrival(hosts, [NOBODY])))
        self._unasked += len(hosts)
        self._has_begun = bool(hosts)
        self._begin(tier, "read", blocks)

    def close(self, fetch: Fetch) -> None:
        """Note that the sequence of a fetch has started or ended: nothing is held for it from now on."""
        if not fetch.open:
            return
        fetch.open, fetch.over = False, True
        self._held -= len(fetch.held)
        self._host.release(fetch.held)
        fetch.held.clear()

    def end_wait(self, fetch: Fetch) -> None:
        """Note that a sequence does not wait for the rest of its blocks."""
        self._given_up += 1
        fetch.over = True
        fetch.pending.clear()
        fetch.probing = False

    def done(self, ended: Iterable[TierDone], now: float) -> None:
        """Take note of jobs that have ended."""
        for each in ended:
            book = self._books.pop(each.number)
            self._reads -= book.job.kind == "read"
            match book.job.kind:
                case "write":
                    self._finish_write(book.job, each)
                case "read":
                    self._finish_read(book.job, each, now)
                case "probe":
                    self._finish_probe(book, each, now)
                case "renew":
                    self._finish_renewal(book.job)
                case "check":
                    self._finish_check(each)
                    continue
            failed = each.outcomes.count("failed")
            self._failures += failed
            if failed and book.job.tier == "remote":
                self._remote_down = True

    def note_remote_failure(self) -> None:
        """Note that the remote tier does not work."""
        self._remote_down = True

    def _finish_write(self, job: TierJob, ended: TierDone) -> None:
        disk = self.disk
        self._host.release([block.host for block in job.blocks])
        for block, outcome in zip(job.blocks, ended.outcomes, strict=True):
            self._writing[job.tier].discard(block.digest)
            if outcome == "done":
                self._written[job.tier] += 1
            if job.tier == "remote":
                if outcome == "done":
                    self._know(block.digest)
                continue
            assert disk is not None
            if outcome == "done":
                self._uses += 1
                disk.cache_block(block.slot, block.digest, block.place, (block.last_use, self._uses))
            else:
                disk.free(block.slot)

    def _finish_renewal(self, job: TierJob) -> None:
        assert self.disk is not None
        self.disk.release([block.slot for block in job.blocks])

    def _finish_read(self, job: TierJob, ended: TierDone, now: float) -> None:
        disk, tier = self.disk, job.tier
        if tier == "disk":
            assert disk is not None
            disk.release([block.slot for block in job.blocks])
        digests = [block.digest for block in job.blocks]
        arrival = self._arriving[digests[0]]
        for digest in digests:
            del self._arriving[digest]
        if arrival.fetches[0] is NOBODY:
            self._unasked -= len(digests)
        came = list[tuple[int, bytes, int]]()
        for (digest, place, host, *_), outcome in zip(job.blocks, ended.outcomes, strict=True):
            done = outcome == "done"
            if done:
                came.append((host, digest, place))
            else:
                self._corrupt += outcome == "corrupt"
                self._host.free(host)
            if tier == "remote":
                self._know(digest) if done else self._known.pop(digest, None)
            elif not done:
                assert disk is not None
                disk.drop(digest)
                self._renewed.discard(digest)
        self._read[tier] += len(came)
        self._pool.cache_on_host(came, now, asked=arrival.is_asked)
        for fetch in arrival.fetches:
            self._arrive(fetch, tier, digests, (now, self._pool.uses))

    def _arrive(self, fetch: Fetch, tier: TierName, ended: list[bytes], use: Use) -> None:
        """Report to a fetch which of its blocks have come, as used at `use`, and which will not."""
        pending = fetch.pending
        awaited = [digest for digest in ended if digest in pending]
        if fetch.over or not awaited:
            return
        held = self._host.hold_all(awaited, use)
        fetch.held += held
        fetch.came[tier] += len(held)
        self._held += len(held)
        pending.difference_update(awaited)
        if not pending and len(fetch.size) == 1:
            self.links[tier].observe(fetch.size.get(tier, 0), use[0] - fetch.began)

    def _finish_probe(self, book: JobBook, ended: TierDone, now: float) -> None:
        there = {}
        for block, outcome in zip(book.job.blocks, ended.outcomes, strict=True):
            if outcome == "done":
                self._know(block.digest)
                there[block.place] = block.digest
            else:
                self._known.pop(block.digest, None)
        fetch = book.fetch
        if fetch is None or not (fetch.open and fetch.probing):
            return
        fetch.probing = False
        if not fetch.asks:
            self._ask("remote", there, fetch, now)

    def _finish_check(self, ended: TierDone) -> None:
        self._checking = False
        if ended.outcomes == ("failed",):
            return
        self._remote_down = False
        if ended.outcomes == ("missing",):
            self._known.clear()
        # Blocks that the host got or used meanwhile were not written.
        self._dirty["remote"].update((digest, None) for digest in self._host.by_digest if digest not in self._known)

    def _know(self, digest: bytes) -> None:
        self._known[digest] = None
        self._known.move_to_end(digest)
        if len(self._known) > REMOTE_KNOWN:
            self._known.popitem(last=False)

    def _begin(self, tier: TierName, kind: JobKind, blocks: Sequence[TierBlock], fetch: Fetch | None = None) -> None:
        """Queue a job for these blocks, or several jobs for many blocks. A probe or a check is always one job."""
        step = self._read_batch if kind == "read" and tier == "disk" else self._batch
        if kind in ("probe", "check"):
            step = max(1, len(blocks))
        for start in range(0, 1 if kind == "check" else len(blocks), step):
            job = TierJob(self._numbers, tier, kind, tuple(blocks[start : start + step]))
            self._books[self._numbers] = JobBook(job, fetch)
            self._reads += kind == "read"
            self._numbers += 1

    def stats(self) -> dict[str, int]:
        """Counters and present sizes of these tiers: fields of `SchedulerStats`."""
        disk, size = self.disk, self.prices.block_bytes
        return {
            "disk_blocks_total": disk.num_blocks if disk is not None else 0,
            "disk_blocks_cached": disk.cached if disk is not None else 0,
            "disk_bytes_written": self._written["disk"] * size,
            "disk_bytes_read": self._read["disk"] * size,
            "disk_blocks_dropped": disk.dropped if disk is not None else 0,
            "remote_down": int(self._remote_down),
            "remote_bytes_written": self._written["remote"] * size,
            "remote_bytes_read": self._read["remote"] * size,
            "blocks_corrupt": self._corrupt,
            "tier_failures": self._failures,
            "blocks_cheaper_computed": self.prices.refused,
            "fetches_given_up": self._given_up,
        }
