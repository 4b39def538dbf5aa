"""HostRows: states of single rows in pinned host memory, by slot."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.lm.padded.state_layout import State, StateLayout
from holdfast.lm.types import CopyTime


class CompletedCopies(NamedTuple):
    """The fields of a `StepResult` about copies."""

    swapped_out: int
    swapped_in: int
    copies: tuple[CopyTime, ...]


class HostRows:
    """Copies states to the host and back on a stream of their own; on a CPU a copy is complete at once.

    A store waits for the computation begun so far. A load waits for the store of its slot, and what reads the state
    afterwards on the computing stream waits for the load.
    """

    def __init__(self, layout: StateLayout, capacity: int) -> None:
        """`capacity` in bytes."""
        self.layout = layout
        self.capacity = capacity

    def store(self, slot: int, state: State, length: int, step: int) -> None:
        """Begin to copy a state of one row to the slot, in plan `step`. Consumes it. What the slot held is lost.

        Raises MemoryError beyond the capacity, which the scheduler counts too.
        """
        raise NotImplementedError

    def load(self, slot: int, length: int, step: int) -> State:
        """Begin to copy a slot's first `length` positions to the device, in plan `step`. The slot keeps its state."""
        raise NotImplementedError

    def forget(self, slot: int) -> None:
        """Give up the slot's state, once copies of it are complete."""
        raise NotImplementedError

    def completed(self, step: int, *, wait: bool) -> CompletedCopies:
        """Copies that have completed, of plans up to `step`. With `wait`, block until all begun so far have."""
        raise NotImplementedError

    def close(self) -> None:
        """Wait for the copies under way and give back the memory."""
        raise NotImplementedError
