"""Moves: the changes that moves of KV blocks between engines make to this engine's memory, between two steps.

Threads handle sockets and bytes (`chunk_service.py`). They ask here for blocks to read and to fill. All changes of the
memory's bookkeeping happen in the thread of the loop, in `answers`, and take no longer than looking blocks up.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

from holdfast.engine import messages
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.host_pool import HostPool
from holdfast.lm.parts.moves.planner import MovePart
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.loop.contracts import Clock

T = TypeVar("T")

LOOP_SECONDS = 10.0
"""Time for the loop to come to the end of a step."""
FILL_SHARE = 0.5
"""Largest share of the host tier that moves into this engine hold at a time."""
LOAN_SHARE = 0.125
"""Largest share of the host tier that one loan holds. A reader has two loans."""


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


class Moves:
    """Holds and fills blocks of the host tier for others than the loop. For its thread, but for `call`."""

    def __init__(self, scheduler: Scheduler, clock: Clock, wake: Callable[[], None]) -> None:
        """`wake` is called in another thread when there is something to do.

        Raises ValueError for a scheduler whose memory has no host tier.
        """
        self.pool, self.host = two_tiers(scheduler)
        self._part, self._clock, self._wake = scheduler.part(MovePart), clock, wake
        self._closed = False
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._jobs: list[Job] = []
        self._reports: queue.SimpleQueue[messages.FromEngine] = queue.SimpleQueue()
        self._filling = 0
        """Blocks reserved or held by moves into this engine."""

    @property
    def ready(self) -> bool:
        """Whether `answers` has something to do now."""
        return not self._calls.empty() or any(job.ready() for job in self._jobs)

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Do this between two steps. For any thread. A caller that gives the answer up cancels it, before its time."""
        answer: Future[T] = Future()
        self._calls.put((work, answer))
        self._call()
        return answer

    def report(self, message: messages.FromEngine) -> None:
        """Send this to the client between two steps. For any thread."""
        self._reports.put(message)
        self._call()

    def _call(self) -> None:
        if not self._closed:
            self._wake()

    def begin(self, job: Job) -> None:
        """Start this between two steps, and advance it until it has ended. For any thread."""
        self.call(partial(self._begin, job))

    def _begin(self, job: Job) -> None:
        job.start()
        self._jobs.append(job)

    def answers(self) -> Iterator[messages.FromEngine]:
        """Do the work that other threads have asked for. Then give its results."""
        while not self._calls.empty():
            work, answer = self._calls.get()
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(work())
                except Exception as error:
                    answer.set_exception(error)
        self._jobs = [job for job in self._jobs if not job.advance()]
        while not self._reports.empty():
            yield self._reports.get()

    def close(self) -> None:
        """From now on, nothing calls `wake`."""
        self._closed = True

    def give_way(self, digests: Sequence[bytes]) -> None:
        """Evict these blocks before others: another engine has them. See `BlockPool.give_way`."""
        self.pool.give_way(digests)

    def which(self, digests: Sequence[bytes]) -> bytes:
        """For each digest 1 if its block is here, on the device or the host, else 0."""
        return bytes(tier != "-" for tier in self.pool.tiers(digests))

    @property
    def most_lent(self) -> int:
        """Most blocks of one loan: through a small host tier, a long sequence moves bit by bit. For any thread."""
        return max(1, int(self.host.ready * LOAN_SHARE))

    def room(self) -> int:
        """Blocks of the host tier that moves into this engine may still take."""
        return max(0, int(self.host.ready * FILL_SHARE) - self._filling)

    def note_filling(self, change: int) -> None:
        """Note that moves into this engine reserve or hold this many more blocks."""
        self._filling += change

    def barrier(self) -> int:
        """A mark of the plans so far, for `passed`. See `MovePart.barrier`."""
        return self._part.barrier()

    def await_copies(self) -> None:
        """Let the copies to the host that plans have begun become known. See `MovePart.await_copies`."""
        self._part.await_copies()

    def passed(self, barrier: int) -> bool:
        """Whether all plans before this mark have ended their reads of the host. See `MovePart.passed`."""
        return self._part.passed(barrier)

    def now(self) -> float:
        """The time."""
        return self._clock()


def two_tiers(scheduler: Scheduler) -> tuple[BlockPool, HostPool]:
    """The pool of a scheduler's blocks and its host tier. Raises ValueError if there is none."""
    for pool in scheduler.block_pools:
        if pool.host:
            return pool, pool.host
    raise ValueError("there is no host tier, through which blocks move")


class Loan:
    """Blocks of the host tier that another engine reads. Blocks that are only on the device are copied there first."""

    def __init__(self, moves: Moves, digests: Sequence[bytes]) -> None:
        """Begin with `Moves.begin`; `end` must follow in any case."""
        self.given: Future[list[int | None]] = Future()
        """The block of each digest, all held; None for one that is not here."""
        self._moves, self._pool, self._host, self._digests = moves, moves.pool, moves.host, digests
        self._blocks: list[int | None] = [None] * len(digests)
        self._waiting = list(range(len(digests)))

    def start(self) -> None:
        self._pool.want_on_host(self._digests)

    def ready(self) -> bool:
        pool, on_host = self._pool, self._host.by_digest
        return any((digest := self._digests[at]) in on_host or not pool.coming_to_host(digest) for at in self._waiting)

    def advance(self) -> bool:
        if self.given.done():
            return True
        left = []
        for at in self._waiting:
            block = self._blocks[at] = self._host.hold(self._digests[at])
            if block is None and self._pool.coming_to_host(self._digests[at]):
                left.append(at)
        self._waiting = left
        if not left:
            self.given.set_result(self._blocks)
        elif any(self._digests[at] not in self._pool.copies.wanted for at in left):
            self._moves.await_copies()
        return not left

    def end(self) -> None:
        """Release all blocks, and wait for none. In the loop's thread, once nothing is read any longer."""
        self.given.cancel()
        blocks, self._blocks, self._waiting = self._blocks, [], []
        self._host.release([block for block in blocks if block is not None])


class Room:
    """Blocks of the host tier that are filled from another engine, then held until the move has ended."""

    def __init__(self, moves: Moves, pairs: Sequence[tuple[int, bytes]]) -> None:
        """For these blocks of a sequence, each its index and digest. Begin with `Moves.begin`; `end` must follow."""
        self.given: Future[dict[int, tuple[int, bytes]]] = Future()
        """Index and digest of the block that is to fill each reserved block, in order. Nothing reads these blocks.

        There are fewer than was asked for if the host tier's own blocks are worth more, or if too many come in already.
        """
        self._moves, self._pool, self._host, self._pairs = moves, moves.pool, moves.host, pairs
        self._places: dict[int, tuple[int, bytes]] = {}
        self._held: list[int] = []
        self._barrier = -1

    def start(self) -> None:
        now = self._moves.now()
        victims = self._host.victims(now)
        for index, digest in self._pairs[: self._moves.room()]:
            block = self._pool.reserve_on_host(index, now, victims)
            if block is None:
                break
            self._places[block] = index, digest
        if self._places:
            self._moves.note_filling(len(self._places))
            self._barrier = self._moves.barrier()

    def ready(self) -> bool:
        return not self.given.done() and self._moves.passed(self._barrier)

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
        count = self._pool.cache_on_host(filled, self._moves.now())
        held = [self._host.hold(digest) for _, digest, _ in filled]
        self._held += [block for block in held if block is not None]
        return count

    def end(self) -> None:
        """Free the blocks that were not filled, and release the rest. In the loop's thread, once nothing is written."""
        self.given.cancel()
        self._moves.note_filling(-len(self._places) - len(self._held))
        for block in self._places:
            self._host.free(block)
        self._host.release(self._held)
        self._places, self._held = {}, []
