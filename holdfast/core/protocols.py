"""What the loop asks of the world: an Executor that runs plans, a Clock that tells the time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from holdfast.core.types import StepPlan, StepResult

Clock = Callable[[], float]
"""Seconds, monotonic; the real one is CLOCK_MONOTONIC, so stamps of several processes on one host compare."""


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """What the executor measured of its device, once the weights are loaded. Sizes in bytes."""

    device: str
    """The device in words, for people."""
    total: int
    weights: int
    activations: int
    """Peak of one step at the token budget, measured, beside weights and cache."""
    cache: int
    """What may be given to the KV cache."""
    block: int
    """One block of the KV cache: keys and values of `block_size` tokens in all layers."""
    host_cache: int = 0
    """What may be given to the host tier."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache on the device."""
        return self.cache // self.block

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the host tier."""
        return self.host_cache // self.block


class Executor(Protocol):
    """Runs plans in the order in which they are submitted; several may be in flight.

    Tokens that a step samples feed the next one on the device: a plan may ask for a token (`PENDING`) that the step
    before it has not yet given to the host.
    """

    def profile(self) -> MemoryProfile:
        """Measure the device. Returns sizes; changes nothing but the device's warm-up state."""
        ...

    def allocate(self, num_blocks: int, host_blocks: int = 0) -> None:
        """Make the KV cache: blocks on the device, and in host memory. Called once, before the first submit."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Start the step and return without waiting for it."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight. Raises what that step raised."""
        ...

    def close(self) -> None:
        """Let go of the device. Steps in flight are abandoned."""
        ...
