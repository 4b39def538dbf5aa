"""A copy stream that runs every copy as late as possible, and one whose copies cannot be waited for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from holdfast.lm.copy_streams import CopyEvent


class LateArrival:
    """Completes when it is waited for, or after enough polls."""

    def __init__(self, stream: LateStream) -> None:
        self.stream = stream
        self.polls = 0
        self.here = False

    def wait(self) -> None:
        self.stream.run_until(self)

    def finish(self) -> None:
        self.stream.run_until(self)

    def seconds(self) -> float:
        return 0.25

    def done(self) -> bool:
        self.polls += 1
        if self.polls > self.stream.patience:
            self.stream.run_until(self)
        return self.here


class LateStream:
    """Queues copies until one of them is needed, and then runs them in order up to that one."""

    def __init__(self, patience: int = 2) -> None:
        self.patience = patience
        self.queue: deque[tuple[LateArrival, Callable[[], None], CopyEvent | None]] = deque()
        self.lock = threading.RLock()

    def follow(self) -> None:
        pass

    def upload(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers

    def copy(self, work: Callable[[], None], after: CopyEvent | None = None) -> LateArrival:
        arrival = LateArrival(self)
        with self.lock:
            self.queue.append((arrival, work, after))
        return arrival

    def run_until(self, wanted: LateArrival) -> None:
        with self.lock:
            while not wanted.here:
                arrival, work, after = self.queue.popleft()
                if after is not None:
                    after.finish()
                work()
                arrival.here = True


class ForgottenArrival(LateArrival):
    """An arrival that the computation does not wait for."""

    def wait(self) -> None:
        pass


class ForgottenStream(LateStream):
    """A late stream whose arrivals the computation does not wait for, to show the error without the wait."""

    def copy(self, work: Callable[[], None], after: CopyEvent | None = None) -> LateArrival:
        arrival = ForgottenArrival(self)
        with self.lock:
            self.queue.append((arrival, work, after))
        return arrival
