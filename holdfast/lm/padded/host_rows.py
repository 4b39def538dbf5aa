"""HostRows: states of single rows in pinned host memory, by slot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from holdfast.lm.copy_streams import CompletedCopy, CopiesInFlight, CopyEvent, CopyInFlight, CopyStream, stream_for
from holdfast.lm.padded.state_layout import State, StateLayout
from holdfast.lm.types import RowBytes, TierCopied


class LoadingState:
    """A state that is being copied to the device."""

    def __init__(self, layout: StateLayout) -> None:
        self._layout = layout
        self.state: State | None = None
        self.end: CopyEvent

    def take(self) -> State:
        """The state. Computation started from now on, on the current stream, waits for the copy. Call it once."""
        self.end.wait()
        state, self.state = self.state, None
        for tensor in self._layout.tensors(state):
            if tensor.is_cuda:  # it was allocated on the copy stream: its memory must not be reused there too soon
                tensor.record_stream(torch.cuda.current_stream())
        return state


@dataclass(slots=True)
class _Slot:
    """A state on the host. `state` is None until its copy has run."""

    length: int
    bytes: int
    stored: CopyEvent | None = None
    state: State | None = None


class HostRows:
    """Copies states to the host and back on streams of their own; on a CPU a copy is complete at once.

    A store waits for the computation begun so far. A load waits for the store of its slot, and work that reads the
    state afterwards waits for the load (`LoadingState.take`). So a load that begins a plan ahead costs that plan no
    time.
    """

    def __init__(
        self,
        layout: StateLayout,
        capacity: int,
        device: torch.device,
        *,
        row_bytes: RowBytes | None = None,
        make_stream: Callable[[], CopyStream] | None = None,
    ) -> None:
        """`capacity` is in bytes. States come from `device` and go back there.

        `row_bytes` is by default the layout's. `make_stream` makes what copies run on, one for each direction.
        """
        self.layout = layout
        self.capacity = capacity
        self.used = 0
        """Bytes of the stored states."""
        self._device = device
        self._row_bytes = row_bytes or layout.row_bytes()
        make = make_stream or (lambda: stream_for(device))
        self._out, self._in = make(), make()
        self._slots: dict[int, _Slot] = {}
        self._copies = CopiesInFlight()
        self._lock = threading.Lock()
        """Held while `_slots` and `used` change: states that arrive from elsewhere are put here by other threads."""

    def __contains__(self, slot: int) -> bool:
        return slot in self._slots

    def length(self, slot: int) -> int:
        """Positions of the state in a slot."""
        return self._slots[slot].length

    def store(self, slot: int, state: State, length: int, step: int) -> None:
        """Begin to copy a state of one row to the slot, in plan `step`.

        Consumes the state and replaces the slot's old one.

        Raises MemoryError beyond the capacity, which the scheduler counts too.
        """
        self.forget(slot)
        size = self._row_bytes.of(length)
        if self.used + size > self.capacity:
            raise MemoryError(
                f"slot {slot} needs {size} bytes of host memory for {length} positions; {self.used} of {self.capacity} "
                "are used"
            )
        stored = _Slot(length, size)

        def work() -> None:
            stored.state = self.layout.to(state, torch.device("cpu"), pinned=self._device.type == "cuda")

        self._out.follow()
        stored.stored = self._out.copy(work)
        self._add(slot, stored)
        self._copies.outward.append(CopyInFlight(step, size, (stored.stored,), source=state))

    def stored(self, slot: int) -> Sequence[State]:
        """The state of a slot whose copy to the host is complete, on the CPU; empty if there is none."""
        found = self._slots.get(slot)
        return () if found is None or found.state is None else (found.state,)

    def put(self, slot: int, state: State, length: int) -> None:
        """Put a state on the host that has arrived from elsewhere into an empty slot. For any thread."""
        self._add(slot, _Slot(length, self._row_bytes.of(length), CompletedCopy(0.0), state))

    def _add(self, slot: int, stored: _Slot) -> None:
        with self._lock:
            self._slots[slot] = stored
            self.used += stored.bytes

    def load(self, slot: int, length: int, step: int) -> LoadingState:
        """Begin to copy a slot's first `length` positions to the device, in plan `step`. The slot keeps its state.

        Raises ValueError for a slot without a state of this length, or a state that cannot be cut to it.
        """
        if slot not in self._slots or not 0 < length <= self._slots[slot].length:
            held = self._slots[slot].length if slot in self._slots else 0
            raise ValueError(f"{length} positions are wanted of slot {slot}, which has {held}")
        stored, loading = self._slots[slot], LoadingState(self.layout)

        def work() -> None:
            state = self.layout.to(stored.state, self._device)
            loading.state = state if length == stored.length else self.layout.cut(state, length)

        loading.end = self._in.copy(work, after=stored.stored)
        self._copies.inward.append(CopyInFlight(step, stored.bytes, (loading.end,), source=stored))
        return loading

    def forget(self, slot: int) -> None:
        """Give up the slot's state, once copies of it are complete."""
        with self._lock:
            if (stored := self._slots.pop(slot, None)) is not None:
                self.used -= stored.bytes

    def completed(self, step: int, *, wait: bool) -> TierCopied:
        """Copies of plans up to `step` that have completed. With `wait`, block until all begun so far have."""
        return self._copies.completed(step, wait=wait)

    def close(self) -> None:
        """Wait for the copies under way and free the memory."""
        self._copies.finish()
        self._slots.clear()
        self.used = 0
