"""TierThreads: threads that move blocks or states of rows between the host and the lower tiers while the loop runs."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from holdfast.lm.execution.disk_store import DiskStore
from holdfast.lm.execution.remote_store import RemoteStore
from holdfast.lm.tiers import REMOTE_PAUSE, HostBytes, JobBytes, Outcome, Pieces, TierDone, TierJob, TierName

DISK_THREADS, REMOTE_THREADS = 4, 2

log = logging.getLogger("holdfast.engine")


class TierThreads:
    """Runs the jobs of `LowerTiers`. Reads come before writes that have not begun.

    A job uses only host blocks that `LowerTiers` holds or reserves for it, so it needs no lock.
    """

    def __init__(
        self,
        host: HostBytes,
        disk: DiskStore | None,
        remote: RemoteStore | None,
        clock: Callable[[], float],
        wake: Callable[[], None] = lambda: None,
        *,
        pause: float = REMOTE_PAUSE,
    ) -> None:
        """`host` is the host tier. `clock` is the engine's. `wake` is called, in any thread, when a job has ended.

        Each check of the remote tier first waits for `pause` seconds.
        """
        self._host = host
        self._disk, self._remote = disk, remote
        self._clock_began = time.time() - clock()
        """The system's time at 0 of the engine's clock. It is measured once, so that equal last uses stay equal on the
        disk."""
        self._ended: deque[TierDone] = deque()
        self._waiting: dict[str, tuple[deque[HeldJob], deque[HeldJob]]] = {}
        self._pools: dict[str, ThreadPoolExecutor] = {}
        for tier, store, threads in (("disk", disk, DISK_THREADS), ("remote", remote, REMOTE_THREADS)):
            if store is not None:
                self._pools[tier] = ThreadPoolExecutor(threads, f"holdfast-{tier}")
                self._waiting[tier] = deque(), deque()
        self._lock = threading.Lock()
        self._under_way = 0
        self._pause, self._wake = pause, wake
        self._closed = threading.Event()
        self._checks: set[threading.Thread] = set()
        """The checks of the remote tier that have not ended."""
        self._failing: set[TierName] = set()
        """The tiers whose failure has been logged. The disk stays here; the remote tier leaves when it works again."""

    @property
    def busy(self) -> bool:
        """Whether a job is running, or has ended and was not taken yet. Checks do not count."""
        return self._under_way > 0 or bool(self._ended)

    @property
    def trouble(self) -> str:
        """The reason why the remote tier does not work, for people; empty if it works, or if there is none."""
        return self._remote.trouble if self._remote is not None and "remote" in self._failing else ""

    def start(self, jobs: Iterable[TierJob]) -> None:
        """Begin these jobs."""
        for job in jobs:
            if job.kind == "check":
                self._begin_check(job)
                continue
            held = HeldJob(job, NO_BYTES if job.kind in ("probe", "find", "renew") else self._host.begin(job))
            with self._lock:
                self._under_way += 1
                self._waiting[job.tier][job.kind == "write"].append(held)
            self._pools[job.tier].submit(self._do_next, job.tier)

    def take(self) -> list[TierDone]:
        """The jobs that have ended since the last call."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def close(self) -> None:
        """Stop after the jobs and the checks that have begun. The host's memory may be freed then."""
        self._closed.set()
        for check in tuple(self._checks):
            check.join()  # otherwise it would open a connection after the store has closed all
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)
        for store in (self._disk, self._remote):
            if store is not None:
                store.close()

    def _do_next(self, tier: str) -> None:
        if self._closed.is_set():
            return
        with self._lock:
            urgent, others = self._waiting[tier]
            job, held = (urgent or others).popleft()
        began, found = time.perf_counter(), tuple[bytes, ...]()
        try:
            outcomes, found = self._do(job, held)
        except Exception:  # otherwise the sequence that needs the job would wait forever
            log.exception("holdfast: a job of the %s tier failed", tier)
            outcomes = ["failed"] * len(job.blocks)
        outcomes = held.end(outcomes)
        if "failed" in outcomes:
            self.log_failure(job.tier, f"could not {job.kind} a block")
        if corrupt := outcomes.count("corrupt"):
            log.warning("holdfast: %d blocks of the %s tier were corrupt and are dropped", corrupt, tier)
        self._ended.append(TierDone(job.number, tuple(outcomes), time.perf_counter() - began, found))
        with self._lock:
            self._under_way -= 1
        self._wake()

    def log_failure(self, tier: TierName, what: str) -> None:
        """Log that a tier has failed, unless that was logged and it has not worked since."""
        with self._lock:
            if tier in self._failing:
                return
            self._failing.add(tier)
        if tier == "disk" or self._remote is None:
            log.warning("holdfast: the %s tier %s; what it lacks is computed", tier, what)
        else:
            log.warning(
                "holdfast: the remote tier on %s %s: %s; what it lacks is computed, and it is tried again every %g s",
                self._remote.where, what, self._remote.trouble, self._pause,
            )  # fmt: skip

    def _begin_check(self, job: TierJob) -> None:
        """Begin a check of the remote tier in a thread of its own: its pause must keep no other job waiting."""
        self._checks = {check for check in self._checks if check.is_alive()}
        check = threading.Thread(target=self._check, args=(job,), name="holdfast-check", daemon=True)
        self._checks.add(check)
        check.start()

    def _check(self, job: TierJob) -> None:
        """Check after a pause whether the remote tier works again."""
        began = time.perf_counter()
        if self._closed.wait(self._pause):
            return
        assert self._remote is not None
        try:
            outcome = self._remote.check()
        except Exception:  # the next check reports it
            log.exception("holdfast: the remote tier could not be checked")
            outcome = "failed"
        if self._closed.is_set():
            return
        if outcome != "failed":
            with self._lock:
                self._failing.discard("remote")
            log.warning("holdfast: the remote tier on %s works again", self._remote.where)
        self._ended.append(TierDone(job.number, (outcome,), time.perf_counter() - began))
        self._wake()

    def _do(self, job: TierJob, held: JobBytes) -> tuple[list[Outcome], tuple[bytes, ...]]:
        """Do a job. Returns its outcomes, and the keys that it has found (`TierDone.found`)."""
        if job.kind == "find":
            assert self._remote is not None
            return self._remote.find(job.blocks)
        return self._outcomes(job, held), ()

    def _outcomes(self, job: TierJob, held: JobBytes) -> list[Outcome]:
        disk, remote, blocks = self._disk, self._remote, job.blocks
        used = [self._clock_began + block.last_use for block in blocks]
        if job.kind == "probe":
            assert remote is not None
            return remote.probe(blocks)
        if job.kind == "renew":
            assert disk is not None
            return disk.renew(blocks, used)
        data = held.pieces()
        if not data:
            return ["missing"] * len(blocks)
        if job.tier == "disk":
            assert disk is not None
            return disk.write(blocks, data, used) if job.kind == "write" else disk.read(blocks, data)
        assert remote is not None
        return (remote.write if job.kind == "write" else remote.read)(blocks, data)


class NoBytes:
    """The memory of a job that needs none (`JobBytes`)."""

    def pieces(self) -> Sequence[Pieces]:
        """Empty."""
        return ()

    def end(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The outcomes as they are."""
        return [*outcomes]


NO_BYTES = NoBytes()


class HeldJob(NamedTuple):
    """A job that waits for a thread, with its memory on the host."""

    job: TierJob
    bytes: JobBytes
