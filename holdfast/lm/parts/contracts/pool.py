"""Pool: how many answers of unknown lengths still go on after a number of steps, and their contexts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, sqrt
from operator import mul
from typing import NamedTuple

from holdfast.lm.parts.contracts.lengths import BINS, Survival, bin_of, cell_of

COARSE = 2
"""Number of bins of the tokens so far that are taken together. Each counts as the first of them."""


class Answer(NamedTuple):
    """A sequence that decodes, whose answer may end at any token."""

    survival: Survival
    """How long answers like this one are."""
    so_far: int
    """Tokens of the answer so far."""
    left: int
    """Most tokens that it may still be given; at least 1."""
    positions: int
    """Positions of its context."""


class Sums(NamedTuple):
    """Expected number of sequences that go on, the sum of their positions, and the variances of both."""

    rows: float = 0.0
    positions: float = 0.0
    variance: float = 0.0
    """Variance of the rows."""
    spread: float = 0.0
    """Variance of the positions."""

    def plus(self, other: Sums) -> Sums:
        """The sums over both."""
        return Sums(
            self.rows + other.rows,
            self.positions + other.positions,
            self.variance + other.variance,
            self.spread + other.spread,
        )

    def upper(self, margin: float, grown: int) -> tuple[int, int]:
        """Rows, and positions once each has grown by `grown`: the means and `margin` standard deviations."""
        deviation = sqrt(self.variance)
        positions = self.positions + grown * self.rows + margin * (sqrt(self.spread) + grown * deviation)
        return ceil(self.rows + margin * deviation), ceil(positions)


class Pool:
    """Accepted sequences whose lengths are learned. Far less is unsure of all of them together than of each.

    Each goes on or ends by a chance of its own. The chance is an estimate, whose error is common to all: n sequences
    whose chance was learned from answers of weight w have 1 + n/w times the variance that they had if it were known
    (Greenwood's variance of the Kaplan-Meier estimate, and Cauchy's inequality for the sum of deviations).
    """

    def __init__(self, answers: Iterable[tuple[Survival, int, int, int]] = (), *, others: int = 0) -> None:
        """`answers` has the fields of an `Answer` for each. `others` is the number of sequences in other pools that are
        added to this one.
        """
        groups = defaultdict[tuple[Survival, int, int], list[int]](list)
        bins, short = BINS, len(BINS) - 1
        steps = 0
        for survival, so_far, left, positions in answers:
            first = bins[so_far + 1] if so_far < short else bin_of(so_far + 1)
            groups[survival, first // COARSE * COARSE, (left - 1).bit_length()].append(positions)
            if left > steps:
                steps = left
        self.count = sum(map(len, groups.values()))
        """Number of the sequences."""
        self.steps = steps
        """Most steps that any of them takes."""
        self._sums = summed(groups, cell_of(steps - 1) + 1 if steps else 0, self.count + others)

    def most_blocks(self, margin: float, block_size: int) -> int:
        """Blocks of `block_size` positions that the sequences need together in any step: `margin` deviations above the
        mean, rounded up for each sequence.
        """
        most = 0
        for cell, sums in enumerate(self._sums):
            rows, positions = sums.upper(margin, 4 << cell)
            most = max(most, -(-positions // block_size) + min(rows, self.count))
        return most

    def at(self, step: int) -> Sums:
        """The sums in this step and all later ones at the most."""
        return self._sums[cell_of(step)] if step < self.steps else NOBODY


def summed(groups: Mapping[tuple[Survival, int, int], list[int]], cells: int, among: int) -> Sequence[Sums]:
    """The sums at the first step of each of `cells` cells, with the error that is common to `among` sequences.

    `groups` has the positions of each sequence by survival, bin of the tokens so far, and number of bits of its last
    step.
    """
    going: dict[tuple[Survival, int], list[list[int]]] = {}
    for (survival, first, bits), group in groups.items():  # those that may go on in each cell
        of_cells = going.get((survival, first))
        if of_cells is None:
            of_cells = going[survival, first] = [[0, 0, 0] for _ in range(cells)]
        last = of_cells[max(0, bits - 2)]
        last[0] += len(group)
        last[1] += sum(group)
        last[2] += sum(map(mul, group, group))
    rows, positions, variance, spread = ([0.0] * cells for _ in range(4))
    for (survival, first), of_cells in going.items():
        doubt, chances = 1 + among / survival.weight_above(first), survival.chances(first)
        count = total = squares = 0
        for cell in range(cells - 1, -1, -1):
            more = of_cells[cell]
            count, total, squares = count + more[0], total + more[1], squares + more[2]
            if count:
                chance, product = chances[cell]
                rows[cell] += chance * count
                positions[cell] += chance * total
                variance[cell] += product * count * doubt
                spread[cell] += product * squares * doubt
    return [*map(Sums, rows, positions, variance, spread)]


NOBODY = Sums()
"""The sums over no sequence."""
EMPTY = Pool()
"""No sequence."""
