"""Prices: whether kept blocks are brought back or computed again, whichever takes less time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

PART = 0.2
"""How much of a new measurement counts, against all before it."""
LARGE = 1 << 20
"""Bytes from which on a transfer tells the rate; below, it tells the latency."""
RENEWED = 0.95
"""A refused link is priced at this part of what it was, so that it is tried again after some refusals."""
GRAIN = 16
"""The cost of computing again is looked up at every so many blocks, and between them by the nearest below."""


class Link:
    """What it takes to move bytes over one link, learned from what it took: latency + bytes / rate."""

    def __init__(self, *, latency: float, rate: float) -> None:
        """`latency` in seconds, `rate` in bytes per second: what is assumed before anything was measured."""
        self.latency = latency
        self.seconds_per_byte = 1 / rate

    def seconds(self, size: int) -> float:
        """Predicted seconds to move `size` bytes."""
        return self.latency + size * self.seconds_per_byte

    def observe(self, size: int, seconds: float) -> None:
        """Learn from `size` bytes that took `seconds`."""
        if size >= LARGE:
            measured = max(0.0, seconds - self.latency) / size
            self.seconds_per_byte += PART * (measured - self.seconds_per_byte)
        elif size:
            measured = max(0.0, seconds - size * self.seconds_per_byte)
            self.latency += PART * (measured - self.latency)

    def refuse(self) -> None:
        """Nothing was moved, as it would have taken too long. Nothing is learned then, so hope grows a little."""
        self.latency *= RENEWED
        self.seconds_per_byte *= RENEWED


class Prices:
    """Compares bringing blocks back with computing them again (thesis §4.1.3)."""

    def __init__(self, recompute: Callable[[int], float] | None, *, block_size: int, block_bytes: int) -> None:
        """`recompute(position)` is the seconds to compute the block again that ends there. None: bringing is always
        cheaper. Blocks have `block_size` tokens and `block_bytes` bytes."""
        self.block_bytes = block_bytes
        self._recompute = recompute
        self._block_size = block_size
        self._costs: list[float] = []
        self.refused = 0
        """Blocks so far that are computed again though a tier has them."""

    def computing(self, indices: Sequence[int]) -> float | None:
        """Seconds to compute the blocks at these places of a sequence again; None if nobody knows."""
        return None if self._recompute is None else sum(map(self._cost, indices))

    def worth(self, indices: Sequence[int], link: Link, ahead: int = 0) -> list[int]:
        """Those of these blocks that `link` brings in less time than computing them takes.

        `ahead` bytes are moved before them. The cost of computing a block grows with its place, and that of bringing
        it does not; so they are the last ones, or none if the latency and what is ahead outweigh all that they save.
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
