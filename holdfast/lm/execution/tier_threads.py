"""TierThreads: threads that move blocks between the host tier and the tiers behind it, beside the loop."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from holdfast.lm.execution.disk_store import DiskStore
from holdfast.lm.execution.host_memory import HostBlocks
from holdfast.lm.execution.remote_store import RemoteStore
from holdfast.lm.tiers import Outcome, TierDone, TierJob

DISK_THREADS, REMOTE_THREADS = 4, 2

log = logging.getLogger("holdfast.engine")


class TierThreads:
    """Does the jobs of `LowerTiers`. Reads come before writes that have not begun.

    A job touches only blocks of the host that the books hold or reserve for it, so it needs no lock.
    """

    def __init__(
        self,
        host: HostBlocks,
        disk: DiskStore | None,
        remote: RemoteStore | None,
        clock: Callable[[], float],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`host` is the host tier. `clock` is the engine's. `wake` is called, in any thread, when a job has ended."""
        self._host = host
        self._disk, self._remote = disk, remote
        self._clock_began = time.time() - clock()
        """The time at 0 of the engine's clock. Measured once, so blocks of one last use keep one on the disk."""
        self._ended: deque[TierDone] = deque()
        self._waiting: dict[str, tuple[deque[TierJob], deque[TierJob]]] = {}
        self._pools: dict[str, ThreadPoolExecutor] = {}
        for tier, store, threads in (("disk", disk, DISK_THREADS), ("remote", remote, REMOTE_THREADS)):
            if store is not None:
                self._pools[tier] = ThreadPoolExecutor(threads, f"holdfast-{tier}")
                self._waiting[tier] = deque(), deque()
        self._lock = threading.Lock()
        self._under_way = 0
        self._closing = False
        self._told_failure = False
        self._wake = wake

    @property
    def busy(self) -> bool:
        """Whether a job has not ended, or has and was not taken."""
        return self._under_way > 0 or bool(self._ended)

    def start(self, jobs: Iterable[TierJob]) -> None:
        """Begin these jobs."""
        for job in jobs:
            with self._lock:
                self._under_way += 1
                self._waiting[job.tier][job.kind == "write"].append(job)
            self._pools[job.tier].submit(self._do_next, job.tier)

    def take(self) -> list[TierDone]:
        """The jobs that have ended since the last call."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def close(self) -> None:
        """Stop after the jobs that have begun. The host's memory may go then."""
        self._closing = True
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)
        for store in (self._disk, self._remote):
            if store is not None:
                store.close()

    def _do_next(self, tier: str) -> None:
        if self._closing:
            return
        with self._lock:
            urgent, others = self._waiting[tier]
            job = (urgent or others).popleft()
        began = time.perf_counter()
        try:
            outcomes = self._do(job)
        except Exception:  # the sequence that waits for it must not wait for ever
            log.exception("holdfast: a job of the %s tier failed", tier)
            outcomes = ["failed"] * len(job.blocks)
        if "failed" in outcomes and not self._told_failure:
            self._told_failure = True
            log.warning("holdfast: the %s tier could not %s a block; what it lacks is computed", tier, job.kind)
        if corrupt := outcomes.count("corrupt"):
            log.warning("holdfast: %d blocks of the %s tier were corrupt and are dropped", corrupt, tier)
        self._ended.append(TierDone(job.number, tuple(outcomes), time.perf_counter() - began))
        with self._lock:
            self._under_way -= 1
        self._wake()

    def _do(self, job: TierJob) -> list[Outcome]:
        host, disk, remote, blocks = self._host, self._disk, self._remote, job.blocks
        if job.tier == "disk":
            assert disk is not None
            if job.kind == "write":
                used = [self._clock_began + block.last_use for block in blocks]
                return disk.write(blocks, [host[block.host] for block in blocks], used)
            return disk.read(blocks, [host[block.host] for block in blocks])
        assert remote is not None
        if job.kind == "probe":
            return remote.probe(blocks)
        return (remote.write if job.kind == "write" else remote.read)(blocks, [host[block.host] for block in blocks])
