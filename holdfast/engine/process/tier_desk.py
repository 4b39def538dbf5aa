"""TierDesk: hands the jobs of the tiers behind the host to the threads that do them, between the steps of the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from holdfast.engine import messages
from holdfast.lm.parts.tiers.planner import TierPart
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.tiers import TierDone, TierJob
from holdfast.lm.types import LanguageLoop
from holdfast.loop.contracts import Clock

PAUSE = 0.002
"""Seconds between two looks at the threads while state is flushed."""


class Threads(Protocol):
    """Does jobs beside the loop: `holdfast.lm.execution.tier_threads.TierThreads`."""

    wake: Callable[[], None]

    @property
    def busy(self) -> bool:
        """Whether a job has not ended, or has and was not taken."""
        ...

    def start(self, jobs: Iterable[TierJob]) -> None:
        """Begin these jobs."""
        ...

    def take(self) -> list[TierDone]:
        """The jobs that have ended since the last call."""
        ...

    def close(self) -> None:
        """Stop after the jobs that have begun."""
        ...


class TierDesk:
    """Between a scheduler, which decides what is moved, and the threads that move it. For the thread of the loop."""

    def __init__(self, scheduler: Scheduler, threads: Threads, clock: Clock) -> None:
        self._scheduler, self._part = scheduler, scheduler.part(TierPart)
        self._threads, self._clock = threads, clock

    @property
    def wake(self) -> Callable[[], None]:
        """Called when something has been moved, in any thread."""
        return self._threads.wake

    @wake.setter
    def wake(self, wake: Callable[[], None]) -> None:
        self._threads.wake = wake

    @property
    def busy(self) -> bool:
        """Whether something is being moved: the scheduler is to be told of it."""
        return self._threads.busy

    @property
    def awaited(self) -> bool:
        """Whether a request waits for what is moved."""
        return self._part.awaited

    def exchange(self) -> None:
        """Tell the scheduler what has been moved, and begin what it wants moved."""
        now, ended = self._clock(), self._threads.take()
        if ended:
            self._part.done(ended, now)
        self._threads.start(self._part.jobs(now))

    def answers(self) -> Sequence[messages.FromEngine]:
        """As the desks of other messages do: exchange, and answer nothing."""
        self.exchange()
        return ()

    def flush(self, loop: LanguageLoop, seconds: float) -> None:
        """End all requests, and write idle state to the tiers behind the host, for so long at most."""
        self._scheduler.abort_all()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.exchange()
            if loop.has_work():
                loop.step()
            elif self.busy:
                time.sleep(PAUSE)
            else:
                return

    def close(self) -> None:
        """Stop what is being moved. The host's memory may go then."""
        self._threads.close()
