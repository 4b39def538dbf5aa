"""SimulatedDisk: runs a disk tier's jobs on a virtual clock, each for the time that its bytes take. NoDisk: none."""

from __future__ import annotations

from collections import deque
from math import inf

from holdfast.lab.simulator.executor import VirtualClock
from holdfast.lm.parts.tiers.planner import TierPart
from holdfast.lm.tiers import Outcome, TierDone, TierJob

DISK_RATE = 3e9
"""Default rate in bytes per second, that of a local NVMe drive."""
DISK_LATENCY = 2e-4
"""Seconds from the start of a job to its first byte."""
DONE: Outcome = "done"


class SimulatedDisk:
    """A disk that does one job at a time, reads before writes, and loses nothing."""

    def __init__(self, part: TierPart, clock: VirtualClock, block_bytes: int, rate: float = DISK_RATE) -> None:
        """`rate` is in bytes per second. Raises ValueError unless it is above 0."""
        if not rate > 0:
            raise ValueError(f"the disk's rate is {rate} bytes a second; it must be above 0")
        self._part, self._clock = part, clock
        self._block_seconds = block_bytes / rate
        self._queues: tuple[deque[TierJob], deque[TierJob]] = deque(), deque()
        self._running: tuple[float, TierJob] | None = None
        self._free_at = 0.0

    def exchange(self) -> None:
        """Report jobs that have ended to the planner, and begin those that it wants. The `refresh` of a loop."""
        now, ended = self._clock(), list[TierDone]()
        self._queue(now)
        while self._running is not None and self._running[0] <= now:
            ends, job = self._running
            ended.append(TierDone(job.number, (DONE,) * len(job.blocks), self._seconds(job)))
            self._running, self._free_at = None, ends
            self._start()
        if ended:
            self._part.done(ended, now)
            self._queue(now)

    def wait(self) -> None:
        """Move the clock to the end of the job in progress, if there is one and a request waits."""
        self.exchange()
        if self._running is not None and self._part.awaited:
            self._clock.advance_to(self._running[0])

    @property
    def next_end(self) -> float:
        """Time at which the read in progress ends; infinity if there is none. An idle engine may go on then."""
        return self._running[0] if self._running is not None and self._running[1].kind == "read" else inf

    def _queue(self, now: float) -> None:
        for job in self._part.jobs(now):
            self._queues[job.kind == "write"].append(job)
        if self._running is None:
            self._free_at = max(self._free_at, now)
            self._start()

    def _start(self) -> None:
        reads, writes = self._queues
        if reads or writes:
            job = (reads or writes).popleft()
            self._running = self._free_at + self._seconds(job), job

    def _seconds(self, job: TierJob) -> float:
        return DISK_LATENCY + len(job.blocks) * self._block_seconds


class NoDisk:
    """An engine without a disk tier."""

    next_end = inf

    def exchange(self) -> None:
        """Do nothing: there are no jobs."""

    def wait(self) -> None:
        """Do nothing: no request waits for a job."""
