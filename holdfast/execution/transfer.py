"""Transfer: copies of blocks between device and host, beside the computation and in step with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol, overload

import torch

from holdfast.core.types import BlockCopy
from holdfast.kernels.cache import KVCache, copy_blocks

LayerCache = tuple[torch.Tensor, torch.Tensor]


class Arrival(Protocol):
    """The end of a copy."""

    def wait(self) -> None:
        """Make the computation that is started from now on wait for it; not the caller."""
        ...

    def finish(self) -> None:
        """Make the caller wait for it."""
        ...

    def done(self) -> bool: ...


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

    def wait(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def done(self) -> bool:
        return True


class InOrder:
    """Copies at once: on a CPU, where they run in the thread that computes."""

    def follow(self) -> None:
        pass

    def upload(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers

    def copy(self, work: Callable[[], None], after: Arrival | None = None) -> Arrival:
        work()
        return Done()


class CudaArrival:
    """An event on a copy stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)

    def finish(self) -> None:
        self.event.synchronize()

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class CudaStream:
    """A CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())

    def upload(self, numbers: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            return numbers.pin_memory().to(self._stream.device, non_blocking=True)

    def copy(self, work: Callable[[], None], after: Arrival | None = None) -> Arrival:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            if after is not None:
                after.wait()
            work()
            event.record()
        return CudaArrival(event)


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

    - A swap-in follows the computation begun so far, which may still read what its blocks held before; a layer's
      computation waits for that layer's copy.
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
        self._leaving: deque[tuple[int, Arrival]] = deque()
        self._begun = -1

    def warm_up(self) -> None:
        """Copy a block each way, before there is anything in them: the first copy compiles its kernel."""
        self.begin(-1, [BlockCopy(0, 0)], [BlockCopy(0, 0)])
        self.completed(wait=True)

    def begin(self, step: int, swap_in: Sequence[BlockCopy], swap_out: Sequence[BlockCopy]) -> Sequence[LayerCache]:
        """Start a plan's copies; gives the layers' caches for its computation, which must be started next.

        They are the very layers given to `Transfers` unless something is swapped in.
        """
        layers = self._layers
        if swap_in:
            self._inward.follow()
            places, blocks = self._inward.upload(torch.tensor(swap_in).t().contiguous())
            copy = partial(copy_blocks, self._host, places, self._device, blocks)
            arrivals = [self._inward.copy(partial(copy, slice(at, at + 1))) for at in range(len(layers))]
            self._last_in = arrivals[-1]
            layers = ArrivingLayers(layers, arrivals)
        if swap_out:
            self._outward.follow()
            blocks, places = self._outward.upload(torch.tensor(swap_out).t().contiguous())
            work = partial(copy_blocks, self._device, blocks, self._host, places)
            self._leaving.append((step, self._outward.copy(work, after=self._last_in)))
        self._begun = step
        return layers

    def completed(self, *, wait: bool) -> int:
        """Number of the last plan whose copies to the host, and those of all before it, are complete.

        With `wait`, all begun so far are waited for.
        """
        begun = self._begun
        while self._leaving:
            step, arrival = self._leaving[0]
            if wait:
                arrival.finish()
            elif not arrival.done():
                return step - 1
            self._leaving.popleft()
        return begun
