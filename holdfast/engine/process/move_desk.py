"""MoveDesk: what moves of KV blocks between engines do to this engine's memory, between two steps of its loop.

Sockets and bytes are the business of threads (`chunk_service.py`). They ask here for blocks to read and to fill. All
that changes the books happens in the thread of the loop, in `answers`, and takes no longer than looking blocks up.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

from holdfast.engine import messages
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.parts.moves.planner import MovePart
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import SchedulerStats
from holdfast.loop.contracts import Clock

T = TypeVar("T")

FILL_SHARE = 0.5
"""Of the host tier, the most that moves into this engine hold at a time."""
LOAN_SHARE = 0.125
"""Of the host tier, the most that one loan holds. A reader has two."""


class Job(Protocol):
    """Something that takes several steps. For the loop's thread."""

    def start(self) -> None:
        """Begin. Called once, before anything else."""
        ...

    def advance(self) -> bool:
        """Go on as far as is possible now. Returns whether it has ended."""
        ...

    def ready(self) -> bool:
        """Whether `advance` would do anything."""
        ...


class MoveDesk:
    """Finds, holds and fills blocks for others than the loop. For its thread, but for `call`."""

    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        self.wake: Callable[[], None] = lambda: None
        """Called in another thread when there is something to do."""
        self.service: MoveService | None = None
        """What moves the bytes; None where nothing can be moved."""
        self._scheduler, self._clock = scheduler, clock
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._jobs: list[Job] = []
        self._told: queue.SimpleQueue[messages.FromEngine] = queue.SimpleQueue()
        self._filling = 0
        """Blocks reserved or held by moves into this engine."""

    @property
    def pool(self) -> BlockPool | None:
        """The paged memory; None on padded rows."""
        pool = self._scheduler.pool
        return pool if isinstance(pool, BlockPool) else None

    @property
    def busy(self) -> bool:
        """Whether an answer will come without any step of the loop."""
        return self.service is not None and self.service.busy

    @property
    def ready(self) -> bool:
        """Whether `answers` has something to do now."""
        return not self._calls.empty() or any(job.ready() for job in self._jobs)

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Do this between two steps. For any thread. Whoever gives the answer up cancels it, before its time."""
        answer: Future[T] = Future()
        self._calls.put((work, answer))
        self.wake()
        return answer

    def tell(self, message: messages.FromEngine) -> None:
        """Send this to the client between two steps. For any thread."""
        self._told.put(message)
        self.wake()

    def begin(self, job: Job) -> None:
        """Start this between two steps, and advance it until it has ended. For any thread."""
        self.call(partial(self._begin, job))

    def _begin(self, job: Job) -> None:
        job.start()
        self._jobs.append(job)

    def find(self, number: int, chain: Sequence[bytes]) -> messages.ChunksFound:
        """How many tokens of a chain of digests are here, by tier."""
        pool = self.pool
        if pool is None:
            return messages.ChunksFound(number, 0, 0, 0)
        on_device = pool.find_all(chain)
        others = [digest for digest, block in zip(chain, on_device, strict=True) if block is None]
        behind = [digest for digest in others if pool.find_on_host(digest) is None]
        lower = sum(map(pool.kept_below, behind)) if pool.kept_below is not None else 0
        counts = len(chain) - len(others), len(others) - len(behind), lower
        return messages.ChunksFound(number, *(blocks * pool.block_size for blocks in counts))

    def fetch(self, message: messages.FetchChunks) -> None:
        """Bring blocks from another engine; `answers` says how many have come."""
        if self.service is None or self.pool is None:
            self.tell(messages.ChunksFetched(message.number, 0, "this engine moves no state"))
        else:
            self.service.fetch(message)

    def stop(self, number: int) -> None:
        """Give up the rest of a fetch. What has come stays."""
        if self.service is not None:
            self.service.stop(number)

    def with_stats(self, stats: SchedulerStats) -> SchedulerStats:
        """The engine's figures with those of moves."""
        return stats if self.service is None else self.service.with_stats(stats)

    def answers(self) -> Iterator[messages.FromEngine]:
        """Do what others have asked for, and tell what has come of it."""
        while not self._calls.empty():
            work, answer = self._calls.get()
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(work())
                except Exception as error:
                    answer.set_exception(error)
        self._jobs = [job for job in self._jobs if not job.advance()]
        while not self._told.empty():
            yield self._told.get()

    def close(self) -> None:
        """End all moves. Nothing calls `wake` any more."""
        self.wake = lambda: None
        if self.service is not None:
            self.service.close()

    def give_way(self, digests: Sequence[bytes]) -> None:
        """As `BlockPool.give_way`: these have come to another engine."""
        assert self.pool is not None
        self.pool.give_way(digests)

    def which(self, digests: Sequence[bytes]) -> bytes:
        """For each digest 1 if its block is here, on the device or the host, else 0."""
        pool = self.pool
        assert pool is not None
        return bytes(
            block is not None or pool.find_on_host(digest) is not None
            for digest, block in zip(digests, pool.find_all(digests), strict=True)
        )

    @property
    def most_lent(self) -> int:
        """Blocks of one loan at most: through a small host tier, a long sequence moves bit by bit. For any thread."""
        assert self.pool is not None and self.pool.host is not None
        return max(1, int(self.pool.host.ready * LOAN_SHARE))

    def room(self) -> int:
        """Blocks of the host tier that moves into this engine may still take."""
        assert self.pool is not None and self.pool.host is not None
        return max(0, int(self.pool.host.ready * FILL_SHARE) - self._filling)

    def note_filling(self, change: int) -> None:
        """So many more blocks are reserved or held by moves into this engine."""
        self._filling += change

    def barrier(self) -> int:
        """As `MovePart.barrier`."""
        return self._scheduler.part(MovePart).barrier()

    def passed(self, barrier: int) -> bool:
        """As `MovePart.passed`."""
        return self._scheduler.part(MovePart).passed(barrier)

    def now(self) -> float:
        """The time."""
        return self._clock()


class MoveService(Protocol):
    """Moves the bytes: `engine.chunk_service.ChunkService`."""

    address: str
    """Where other engines find this one."""

    @property
    def busy(self) -> bool:
        """Whether a fetch is under way."""
        ...

    def fetch(self, message: messages.FetchChunks) -> None:
        """Begin a fetch; `MoveDesk.tell` gets its answer."""
        ...

    def stop(self, number: int) -> None:
        """Give up the rest of a fetch."""
        ...

    def with_stats(self, stats: SchedulerStats) -> SchedulerStats:
        """These figures with those of moves."""
        ...

    def close(self) -> None:
        """End everything."""
        ...


class Loan:
    """Blocks of the host tier that another engine reads. What is only on the device is copied there first."""

    def __init__(self, desk: MoveDesk, digests: Sequence[bytes]) -> None:
        """Begin with `MoveDesk.begin`; `end` must follow in any case."""
        self.given: Future[list[int | None]] = Future()
        """The block of each digest, all held; None for one that is not here."""
        assert desk.pool is not None
        self._pool, self._digests = desk.pool, digests
        self._blocks: list[int | None] = [None] * len(digests)
        self._waiting = list(range(len(digests)))

    def start(self) -> None:
        self._pool.want_on_host(self._digests)

    def ready(self) -> bool:
        pool, digests = self._pool, self._digests
        return any(
            pool.find_on_host(digests[at]) is not None or not pool.coming_to_host(digests[at]) for at in self._waiting
        )

    def advance(self) -> bool:
        host = self._pool.host
        if self.given.done() or host is None:
            return True
        left = []
        for at in self._waiting:
            block = self._blocks[at] = host.hold(self._digests[at])
            if block is None and self._pool.coming_to_host(self._digests[at]):
                left.append(at)
        self._waiting = left
        if not left:
            self.given.set_result(self._blocks)
        return not left

    def end(self) -> None:
        """Release all, and wait for no more. In the loop's thread, once nothing is read any more."""
        self.given.cancel()
        blocks, self._blocks, self._waiting = self._blocks, [], []
        if self._pool.host is not None:
            self._pool.host.release([block for block in blocks if block is not None])


class Room:
    """Blocks of the host tier that are filled from another engine, then held until the move has ended."""

    def __init__(self, desk: MoveDesk, pairs: Sequence[tuple[int, bytes]]) -> None:
        """For these blocks of a sequence, each its index and digest. Begin with `MoveDesk.begin`; `end` must follow."""
        self.given: Future[dict[int, tuple[int, bytes]]] = Future()
        """By reserved block, the index and digest of what is to fill it, in order. Nothing reads these blocks any more.

        Less than was asked for if what is here is worth more, or if too much comes in already.
        """
        assert desk.pool is not None and desk.pool.host is not None
        self._desk, self._pool, self._host, self._pairs = desk, desk.pool, desk.pool.host, pairs
        self._places: dict[int, tuple[int, bytes]] = {}
        self._held: list[int] = []
        self._barrier = -1

    def start(self) -> None:
        now = self._desk.now()
        victims = self._host.victims(now)
        for index, digest in self._pairs[: self._desk.room()]:
            block = self._pool.reserve_on_host(index, now, victims)
            if block is None:
                break
            self._places[block] = index, digest
        if self._places:
            self._desk.note_filling(len(self._places))
            self._barrier = self._desk.barrier()

    def ready(self) -> bool:
        return not self.given.done() and self._desk.passed(self._barrier)

    def advance(self) -> bool:
        if self.ready():
            self.given.set_result(dict(self._places))
        return self.given.done()

    def arrived(self, blocks: Sequence[int]) -> int:
        """These blocks are filled: let requests find them. Returns how many were missing. In the loop's thread."""
        filled = []
        for block in blocks:
            index, digest = self._places.pop(block)
            filled.append((block, digest, index))
        count = self._pool.cache_on_host(filled, self._desk.now())
        for _, digest, _ in filled:
            held = self._host.hold(digest)
            assert held is not None
            self._held.append(held)
        return count

    def end(self) -> None:
        """Free what was not filled, and release the rest. In the loop's thread, once nothing is written any more."""
        self.given.cancel()
        self._desk.note_filling(-len(self._places) - len(self._held))
        for block in self._places:
            self._host.free(block)
        self._host.release(self._held)
        self._places, self._held = {}, []
