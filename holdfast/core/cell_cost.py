"""The cost model of cells: the time of one batch by its size, and the batch sizes that follow from it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, inf, log

NEAR_BEST = 0.95
"""Smallest throughput of the largest supported size, in nodes per second, as a share of the best throughput."""
LEAST_SAVING = 0.1
"""Smallest share of the time of the next larger size that a smaller size must save to be kept."""


@dataclass(frozen=True, slots=True)
class CellCost:
    """Seconds of one batch of one type of cell, by the number of nodes in it, as measured at some sizes.

    The time is flat below the first measured size, follows a power law between two sizes, and is proportional to the
    size beyond the last. Raises ValueError if sizes are missing or do not rise from at least 1, or if a time is not
    above 0 and finite.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise ValueError(f"a cell's cost has {len(self.sizes)} sizes and {len(self.seconds)} times; give one each")
        if self.sizes[0] < 1 or any(first >= then for first, then in pairwise(self.sizes)):
            raise ValueError(f"sizes of a cell's cost are {self.sizes}; they must rise from at least 1")
        for size, seconds in zip(self.sizes, self.seconds, strict=True):
            if not 0 < seconds < inf:
                raise ValueError(f"a cell's cost at {size} is {seconds} seconds; it must be above 0 and finite")

    def at(self, size: int) -> float:
        """Seconds of a batch of this size."""
        right = bisect_left(self.sizes, size)
        if right == len(self.sizes):
            return self.seconds[-1] * size / self.sizes[-1]
        if right == 0 or self.sizes[right] == size:
            return self.seconds[right]
        low, high = self.sizes[right - 1 : right + 1]
        before, after = self.seconds[right - 1 : right + 1]
        return before * exp(log(size / low) / log(high / low) * log(after / before))

    def throughput(self, size: int) -> float:
        """Nodes per second in batches of this size."""
        return size / self.at(size)

    def times(self, factor: float) -> CellCost:
        """A copy in which every time is multiplied by `factor`."""
        return CellCost(self.sizes, tuple(second * factor for second in self.seconds))


def choose_sizes(cost: CellCost, candidates: Sequence[int] = ()) -> tuple[int, ...]:
    """Choose the batch sizes to support from `candidates`, which rise. The default candidates are the measured sizes.

    The largest is the smallest candidate whose throughput is at least NEAR_BEST of the best (BatchMaker, Figure 2.3:
    larger batches would only make each node wait longer). From there down, a size is kept if it saves at least
    LEAST_SAVING of the time of the next larger size that is kept. The smallest is always kept, because tasks below it
    would run only as the first of a round (Algorithm 1, line 16).
    """
    some = tuple(candidates) or cost.sizes
    best = max(map(cost.throughput, some))
    largest = next(size for size in some if cost.throughput(size) >= NEAR_BEST * best)
    kept = [largest]
    for size in reversed(some):
        if size < largest and cost.at(size) <= (1 - LEAST_SAVING) * cost.at(kept[-1]):
            kept.append(size)
    if kept[-1] != some[0]:
        kept.append(some[0])
    return tuple(reversed(kept))
