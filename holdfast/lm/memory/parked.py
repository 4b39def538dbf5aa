"""Parked: idle groups that are worth so much more than what is given up that nobody has to look at them for a while."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from holdfast.lm.memory.gaps import BINS

SLACK = 0.6
"""Share of the worths at which groups were parked that the worths may fall to before these groups are looked at."""


class Believing(Protocol):
    """A kind of pause."""

    @property
    def beliefs(self) -> tuple[bool, bool]:
        """Whether its forecasts go by hints, and whether by paces."""
        ...


class Source(Protocol):
    """The worths of idle state by the bin of its age."""

    @property
    def worths(self) -> Sequence[float]:
        """The worths as known now. A new object once any has changed."""
        ...


def stays_above(worths: Sequence[float], at: int, level: float) -> int:
    """The first bin from bin `at` on in which SLACK of the worth is no more than `level`; BINS if there is none."""
    level /= SLACK
    for number in range(at, BINS):
        if worths[number] <= level:
            return number
    return BINS


class Parked:
    """Groups of one kind of pause and one source of worths, by their last uses.

    Each was parked until an age up to which SLACK of its value is above a bound. So its value is above that bound as
    long as the worths are at least SLACK of those at that time, and the kind's forecasts go by the same as then.
    """

    def __init__(self, kind: Believing, source: Source) -> None:
        self._kind, self._source = kind, source
        self._beliefs = kind.beliefs
        self.worths = self._highest = source.worths
        """The worths as last seen, and the highest that they were since this object was made."""
        self._fell = False
        self.entries: dict[tuple[float, int], float] = {}
        """Scale of the forecast of each group, by its last use."""

    def add(self, use: tuple[float, int], scale: float) -> None:
        """Add the group with this last use and this scale of its forecast."""
        self.entries[use] = scale
        self._compare()

    @property
    def holds(self) -> bool:
        """Whether the bound still holds for all groups. Once it does not, it never does again."""
        self._compare()
        return not self._fell and self._kind.beliefs == self._beliefs

    def begin_again(self) -> bool:
        """Let the bound be one of what is known now. Returns False if the kind's forecasts go by something else now."""
        self.worths = self._highest = self._source.worths
        self._fell = False
        return self._kind.beliefs == self._beliefs

    def _compare(self) -> None:
        worths = self._source.worths
        if worths is self.worths:
            return
        self.worths = worths
        for now, highest in zip(worths, self._highest, strict=True):
            if now < SLACK * highest:
                self._fell = True
                return
        self._highest = [*map(max, worths, self._highest)]
