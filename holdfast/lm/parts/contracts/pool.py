"""Pool: how many answers of unknown lengths still go on after a number of steps, and their contexts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

from holdfast.lm.parts.contracts.lengths import Survival, bin_of, cell_of


class Answer(NamedTuple):
    """A sequence that decodes, whose answer may end at any token."""

    survival: Survival
    """How long answers like this one are."""
    so_far: int
    """Tokens of the answer so far."""
    left: int
    """Most tokens that it may still be given."""
    positions: int
    """Positions of its context."""


@dataclass(slots=True)
class Sums:
    """Expected number of sequences that go on, the sum of their positions, and the variances of both.

    Each sequence goes on or not by a chance of its own. The chance itself is an estimate, whose error is common to
    all (Greenwood's variance of the Kaplan-Meier estimate), so its deviations are added up and not its variances.
    """

    rows: float = 0.0
    positions: float = 0.0
    variance: float = 0.0
    """Variance of the rows, by chance."""
    cross: float = 0.0
    """Covariance of rows and positions, by chance."""
    spread: float = 0.0
    """Variance of the positions, by chance."""
    error: float = 0.0
    """Deviation of the rows, by the error of the estimate."""
    offset: float = 0.0
    """Deviation of the positions, by the error of the estimate."""

    def add(self, chance: float, weight: float, count: int, positions: int, squares: int) -> None:
        """Add `count` sequences of `positions` in all that go on with this chance, estimated from `weight` answers.

        `squares` is the sum of the squares of their positions.
        """
        doubt = chance * (1 - chance)
        self.rows += chance * count
        self.positions += chance * positions
        if doubt > 0:
            self.variance += doubt * count
            self.cross += doubt * positions
            self.spread += doubt * squares
            deviation = sqrt(doubt / weight)
            self.error += deviation * count
            self.offset += deviation * positions

    def plus(self, other: Sums) -> Sums:
        """The sums over both."""
        return Sums(
            self.rows + other.rows,
            self.positions + other.positions,
            self.variance + other.variance,
            self.cross + other.cross,
            self.spread + other.spread,
            self.error + other.error,
            self.offset + other.offset,
        )

    def upper(self, margin: float, grown: int) -> tuple[float, float]:
        """Rows, and positions once each has grown by `grown`, that are exceeded by no more than `margin` deviations."""
        rows = self.rows + margin * sqrt(self.variance + self.error**2)
        spread = self.spread + grown * (2 * self.cross + grown * self.variance)
        offset = self.offset + grown * self.error
        return rows, self.positions + grown * self.rows + margin * sqrt(spread + offset**2)


class Pool:
    """The accepted sequences that decode and whose lengths are learned, by the step: a sum is surer than each."""

    def __init__(self, answers: Iterable[Answer] = ()) -> None:
        groups: defaultdict[tuple[Survival, int, int], list[int]] = defaultdict(lambda: [0, 0, 0])
        self.count = 0
        """Number of the sequences."""
        self.steps = 0
        """Most steps that any of them takes."""
        for survival, so_far, left, positions in answers:
            group = groups[survival, bin_of(so_far + 1), cell_of(left - 1)]
            group[0] += 1
            group[1] += positions
            group[2] += positions * positions
            self.steps = max(self.steps, left)
            self.count += 1
        self._sums = tuple([Sums() for _ in range(cell_of(self.steps - 1) + 1)]) if self.steps else ()
        """Sums at the first step of each cell of GRID."""
        for (survival, first, last), (count, positions, squares) in groups.items():
            chances, weight = survival.chances(first), survival.weight_above(first)
            for sums, chance in zip(self._sums[: last + 1], chances, strict=False):
                sums.add(chance, weight, count, positions, squares)

    def at(self, step: int) -> Sums:
        """The sums in all steps from the start of this step's cell of GRID on. They only fall."""
        return self._sums[cell_of(step)] if step < self.steps else NOBODY


NOBODY = Sums()
"""The sums over no sequence."""
