"""Transfer: copies of blocks between device and host, beside the computation and in step with it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple, Protocol, overload

import numpy as np
import torch

from holdfast.lm.kernels.cache.kv_cache import KVCache, copy_blocks
from holdfast.lm.types import BlockCopy, CopyTime, StepPlan

LayerCache = tuple[torch.Tensor, torch.Tensor]

GROUPS = 4
"""Parts of the layers that a plan's own swap-in comes in: its computation starts when the first of them is there."""
NUMBERS = 8192


class Arrival(Protocol):
    """The end of a copy."""

    def wait(self) -> None:
        """Make the computation that is started from now on wait for it; not the caller."""
        ...

    def finish(self) -> None:
        """Make the caller wait for it."""
        ...

    def done(self) -> bool: ...

    def seconds(self) -> float:
        """How long it took, once it is done."""
        ...


class CopyStream(Protocol):
    """Does copies one after the other, beside the computation."""

    def follow(self) -> None:
        """Let later copies wait for the computation that was started so far."""
        ...

    def upload(self, numbers: torch.Tensor) -> torch.Tensor:
        """Block numbers of the host as the stream's copies take them."""
        ...

    def copy(self, work: Callable[[], None], after: Arrival | None = None) -> Arrival:
        """Do `work`, once `after` has arrived, and say when it is done."""
        ...


class Done:
    """An arrival that was."""

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


class InOrder:
    """Copies at once: on a CPU, where they run in the thread that computes."""

    def follow(self) -> None:
        pass

    def upload(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers

    def copy(self, work: Callable[[], None], after: Arrival | None = None) -> Arrival:
        began = time.perf_counter()
        work()
        return Done(time.perf_counter() - began)


class CudaArrival:
    """Two events on a copy stream: before a copy and after it."""

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
    """A CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())

    def upload(self, numbers: torch.Tensor) -> torch.Tensor:
        # Of few sizes, so that pinned memory is soon found and not taken anew, which would wait for the device.
        room = -(-numbers.numel() // NUMBERS) * NUMBERS
        pinned = torch.empty(room, dtype=numbers.dtype, pin_memory=True)[: numbers.numel()].view_as(numbers)
        with torch.cuda.stream(self._stream):
            return pinned.copy_(numbers).to(self._stream.device, non_blocking=True)

    def copy(self, work: Callable[[], None], after: Arrival | None = None) -> Arrival:
        arrival = CudaArrival()
        with torch.cuda.stream(self._stream):
            if after is not None:
                after.wait()
            arrival.began.record()
            work()
            arrival.event.record()
        return arrival


def stream_for(device: torch.device) -> CopyStream:
    """A copy stream of the device's kind."""
    return CudaStream(device) if device.type == "cuda" else InOrder()


class ArrivingLayers(Sequence[LayerCache]):
    """Each layer's cache, for the model to ask for; the computation then waits for what is swapped in to that layer.

    So the first layers compute while the later ones are still being copied (Pensieve §4.3.3).
    """

    def __init__(self, layers: Sequence[LayerCache], arrivals: Sequence[Arrival]) -> None:
        self._layers, self._arrivals = layers, arrivals

    @overload
    def __getitem__(self, layer: int) -> LayerCache: ...
    @overload
    def __getitem__(self, layer: slice) -> Sequence[LayerCache]: ...
    def __getitem__(self, layer: int | slice) -> LayerCache | Sequence[LayerCache]:
        if isinstance(layer, slice):
            return [self[index] for index in range(*layer.indices(len(self)))]
        self._arrivals[layer].wait()
        return self._layers[layer]

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[LayerCache]:
        return (self[index] for index in range(len(self)))


class Transfers:
    """The copies of each plan, begun in plan order, and which of those to the host are complete.

    What keeps them right, with the guarantees of `core.types.StepPlan`:

    - A swap-in follows the computation begun so far, which may still read what its blocks held before. A plan that
      awaits it waits for it: for one begun before, all at once; for its own, layer by layer. No other plan does.
    - A swap-out follows the computation begun so far, which writes what it copies; nobody writes to its blocks before
      `completed` says that it is done. It also waits until every swap-in begun so far is done: these may read the
      place that it writes to, and the two directions together would slow down the one that is urgent (Pensieve §5).
    """

    def __init__(
        self,
        device: KVCache,
        host: KVCache,
        layers: Sequence[LayerCache],
        make_stream: Callable[[], CopyStream],
    ) -> None:
        """`layers` are the device's, as the computation takes them."""
        self._device, self._host, self._layers = device, host, layers
        self._inward, self._outward = make_stream(), make_stream()
        self._last_in: Arrival | None = None
        self._coming: deque[_UnderWay] = deque()
        self._leaving: deque[_UnderWay] = deque()
        self._begun = -1
        self._block_bytes = device.data[:, :, 0].numel() * device.data.element_size()
        step = -(-len(layers) // GROUPS)
        self._groups = [slice(first, first + step) for first in range(0, len(layers), step)]

    def warm_up(self) -> None:
        """Copy a block each way, before there is anything in them: the first copy compiles its kernel."""
        copy = (BlockCopy(0, 0),)
        self.begin(StepPlan(-1, (), swap_in=copy, swap_out=copy))
        self.completed(wait=True)

    def begin(self, plan: StepPlan) -> Sequence[LayerCache]:
        """Start a plan's copies; gives the layers' caches for its computation, which must be started next.

        They are the very layers given to `Transfers` unless the plan awaits its own copies.
        """
        layers = self._layers
        for earlier in tuple(self._coming):
            if earlier.step <= plan.awaits:
                earlier.parts[-1].wait()
        if plan.swap_in:
            own = plan.awaits >= plan.step
            self._inward.follow()
            places, blocks = self._inward.upload(block_numbers(plan.swap_in))
            copy = partial(copy_blocks, self._host, places, self._device, blocks)
            groups = self._groups if own else [slice(0, len(layers))]
            parts = tuple(self._inward.copy(partial(copy, group)) for group in groups)
            self._last_in = parts[-1]
            self._coming.append(_UnderWay(plan.step, parts, len(places)))
            if own:
                layers = ArrivingLayers(layers, [parts[at // groups[0].stop] for at in range(len(layers))])
        if plan.swap_out:
            self._outward.follow()
            blocks, places = self._outward.upload(block_numbers(plan.swap_out))
            work = partial(copy_blocks, self._device, blocks, self._host, places)
            arrival = self._outward.copy(work, after=self._last_in)
            self._leaving.append(_UnderWay(plan.step, (arrival,), len(places)))
        self._begun = plan.step
        return layers

    def completed(self, *, wait: bool) -> Completed:
        """What is complete by now; with `wait`, all that was begun so far is waited for."""
        copies: list[CopyTime] = []
        swapped_out, swapped_in = (self._passed(under_way, wait, copies) for under_way in (self._leaving, self._coming))
        return Completed(swapped_out, swapped_in, tuple(copies))

    def _passed(self, under_way: deque[_UnderWay], wait: bool, copies: list[CopyTime]) -> int:
        begun = self._begun
        while under_way:
            step, parts, blocks = under_way[0]
            if wait:
                parts[-1].finish()
            elif not parts[-1].done():
                return step - 1
            under_way.popleft()
            seconds = sum(part.seconds() for part in parts)
            copies.append(CopyTime(step, under_way is self._coming, blocks * self._block_bytes, seconds))
        return begun


def block_numbers(copies: Sequence[BlockCopy]) -> torch.Tensor:
    """Sources and targets of copies, int64 [2, n]. The device may be waiting: `torch.tensor` would take ten times."""
    flat = np.fromiter(chain.from_iterable(copies), np.int64, 2 * len(copies))
    return torch.from_numpy(flat.reshape(-1, 2).T.copy())


class _UnderWay(NamedTuple):
    """Copies of one plan in one direction, its last part the last to arrive."""

    step: int
    parts: tuple[Arrival, ...]
    blocks: int


class Completed(NamedTuple):
    """As the fields of a `StepResult`."""

    swapped_out: int
    swapped_in: int
    copies: tuple[CopyTime, ...]
