"""Prices: whether kept blocks are copied back or computed again, whichever takes less time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

PART = 0.2
"""Weight of a new measurement against all measurements before it."""
LARGE = 1 << 20
"""Transfers of at least this many bytes measure the rate of a link; smaller ones measure its latency."""
RENEWED = 0.95
"""Factor on the price of a link that was refused, so that it is tried again after some refusals."""
GRAIN = 16
"""The cost of computing again is looked up every GRAIN blocks; places in between use the next lower one."""


class Link:
    """Time to move bytes over one link, learned from transfers: latency + bytes / rate."""

    def __init__(self, *, latency: float, rate: float) -> None:
        """`latency` in seconds and `rate` in bytes per second are assumed until something is measured."""
        self.latency = latency
        self.seconds_per_byte = 1 / rate
        self.measured: float | None = None
        """Seconds per byte of the latest large transfer; None before the first."""

    def seconds(self, size: int) -> float:
        """Predicted seconds to move `size` bytes."""
        return self.latency + size * self.seconds_per_byte

    def observe(self, size: int, seconds: float) -> None:
        """Learn from a transfer of `size` bytes that took `seconds`."""
        if size >= LARGE:
            measured = self.measured = max(0.0, seconds - self.latency) / size
            self.seconds_per_byte += PART * (measured - self.seconds_per_byte)
        elif size:
            measured = max(0.0, seconds - size * self.seconds_per_byte)
            self.latency += PART * (measured - self.latency)

    def refuse(self) -> None:
        """Lower the expected time a little, because nothing was moved: the price was too high to measure it again."""
        self.latency *= RENEWED
        self.seconds_per_byte *= RENEWED


class Prices:
    """Compares copying blocks back with computing them again (thesis §4.1.3)."""

    def __init__(self, recompute: Callable[[int], float] | None, *, block_size: int, block_bytes: int) -> None:
        """`recompute(position)` is the seconds to compute again the block that ends there.

        None: copying is always cheaper.

        Blocks have `block_size` tokens and `block_bytes` bytes.
        """
        self.block_bytes = block_bytes
        self._recompute = recompute
        self._block_size = block_size
        self._costs: list[float] = []
        self.refused = 0
        """Number of blocks so far that are computed again although a tier has them."""

    def computing(self, indices: Sequence[int]) -> float | None:
        """Seconds to compute again the blocks at these places of a sequence; None if the cost is unknown."""
        return None if self._recompute is None else sum(map(self._cost, indices))

    def worth(self, indices: Sequence[int], link: Link, ahead: int = 0) -> list[int]:
        """The last of these blocks that `link` copies back sooner than they are computed; `ahead` bytes go first.

        The cost of computing a block grows with its place, and the cost of copying it does not. So the last blocks are
        worth copying, or none if the latency and the bytes ahead outweigh all savings.
        """
        if self._recompute is None or not indices:
            return [*indices]
        each = self.block_bytes * link.seconds_per_byte
        chosen = [index for index in indices if self._cost(index) > each]
        saved = sum(map(self._cost, chosen)) - each * len(chosen)
        if saved <= link.seconds(ahead):
            chosen = []
            link.refuse()
        self.refused += len(indices) - len(chosen)
        return chosen

    def _cost(self, index: int) -> float:
        costs, at = self._costs, index // GRAIN
        assert self._recompute is not None
        while len(costs) <= at:
            costs.append(self._recompute((len(costs) * GRAIN + 1) * self._block_size))
        return costs[at]
