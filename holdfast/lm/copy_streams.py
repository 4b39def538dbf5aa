"""Copies between device and host that run at the same time as the computation, for every memory of `lm`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from holdfast.lm.types import CopyTime, TierCopied

UPLOAD_ROUNDING = 8192
"""Pinned buffers of block numbers are rounded up to a multiple of this."""


class CopyEvent(Protocol):
    """The end of a copy."""

    def wait(self) -> None:
        """Make computation started from now on wait for the copy. Does not block the caller."""

    def finish(self) -> None:
        """Block the caller until the copy is done."""

    def done(self) -> bool:
        """Whether the copy is done."""

    def seconds(self) -> float:
        """Seconds that the copy took, once it is done."""


class CopyStream(Protocol):
    """Runs copies in order, at the same time as the computation."""

    def follow(self) -> None:
        """Make later copies wait for the computation started so far."""

    def upload(self, numbers: torch.Tensor) -> torch.Tensor:
        """Move block numbers from the host to where the stream's copies read them."""

    def copy(self, work: Callable[[], None], after: CopyEvent | None = None) -> CopyEvent:
        """Run `work` once `after` is done; the event of its end."""


class CompletedCopy:
    """The event of a copy that is done."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def wait(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def done(self) -> bool:
        return True

    def seconds(self) -> float:
        return self._seconds


class HostStream:
    """The copy stream of a CPU: copies run at once, in the thread that computes."""

    def follow(self) -> None:
        pass

    def upload(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers

    def copy(self, work: Callable[[], None], after: CopyEvent | None = None) -> CopyEvent:
        began = time.perf_counter()
        work()
        return CompletedCopy(time.perf_counter() - began)


class CudaCopyEvent:
    """CUDA events on a copy stream, before and after a copy."""

    def __init__(self) -> None:
        self.began, self.event = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)

    def finish(self) -> None:
        self.event.synchronize()

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def seconds(self) -> float:
        return float(self.began.elapsed_time(self.event)) / 1000


class CudaStream:
    """The copy stream of a GPU: a CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())

    def upload(self, numbers: torch.Tensor) -> torch.Tensor:
        # Few sizes, so that the pinned allocator reuses buffers: a new one would wait for the device.
        room = -(-numbers.numel() // UPLOAD_ROUNDING) * UPLOAD_ROUNDING
        pinned = torch.empty(room, dtype=numbers.dtype, pin_memory=True)[: numbers.numel()].view_as(numbers)
        with torch.cuda.stream(self._stream):
            return pinned.copy_(numbers).to(self._stream.device, non_blocking=True)

    def copy(self, work: Callable[[], None], after: CopyEvent | None = None) -> CopyEvent:
        event = CudaCopyEvent()
        with torch.cuda.stream(self._stream):
            if after is not None:
                after.wait()
            event.began.record()
            work()
            event.event.record()
        return event


def stream_for(device: torch.device) -> CopyStream:
    """A copy stream of the device's kind."""
    return CudaStream(device) if device.type == "cuda" else HostStream()


class CopyInFlight(NamedTuple):
    """A copy that has begun, in one direction."""

    step: int
    """Number of the plan that began it."""
    bytes: int
    parts: Sequence[CopyEvent]
    """The ends of its parts, in their order."""
    source: Any = None
    """The state that it reads, if nothing else may hold it until the copy has ended."""

    @property
    def end(self) -> CopyEvent:
        """The end of the whole copy."""
        return self.parts[-1]


class CopiesInFlight:
    """The copies under way between device and host in both directions, each in plan order."""

    def __init__(self) -> None:
        self.inward: deque[CopyInFlight] = deque()
        """Copies to the device."""
        self.outward: deque[CopyInFlight] = deque()
        """Copies to the host."""

    def completed(self, step: int, *, wait: bool) -> TierCopied:
        """Copies of plans up to `step` that have completed. With `wait`, block until all of them have."""
        times: list[CopyTime] = []
        outward = self._passed(self.outward, step, wait, times)
        return TierCopied(outward, self._passed(self.inward, step, wait, times), tuple(times))

    def finish(self) -> None:
        """Wait for all copies under way, and forget them."""
        for copy in (*self.outward, *self.inward):
            copy.end.finish()
        self.outward.clear()
        self.inward.clear()

    def _passed(self, queue: deque[CopyInFlight], step: int, wait: bool, times: list[CopyTime]) -> int:
        """Move complete copies of plans up to `step` to `times`. Returns the last plan whose copies are complete.

        Copies of one plan are one entry of `times`.
        """
        inward = queue is self.inward
        while queue and queue[0].step <= step:
            copy = queue[0]
            if wait:
                copy.end.finish()
            elif not copy.end.done():
                return copy.step - 1
            queue.popleft()
            seconds, size = sum(part.seconds() for part in copy.parts), copy.bytes
            if times and (times[-1].step, times[-1].inward) == (copy.step, inward):
                before = times.pop()
                seconds, size = before.seconds + seconds, before.bytes + size
            times.append(CopyTime(copy.step, inward, size, seconds))
        return step
