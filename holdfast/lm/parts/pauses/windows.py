"""Windows: when a conversation's next turn is expected, by what is known of its kind of pause."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.pause import Pause
from holdfast.lm.memory.gaps import EDGES, Kinds, Rates, bin_of
from holdfast.lm.memory.turns import LEAST_EXPECTED

EARLY, LATE = 0.25, 0.9
"""Shares of all gaps that have ended when a turn may come, and when it is late."""
SPREAD = 8.0
"""Largest ratio of the third quartile of gaps to the first for which the time of a turn counts as known."""


class Window(NamedTuple):
    """The time of a turn, in seconds from the beginning of the pause before it."""

    soonest: float
    expected: float
    latest: float
    """Twice the time by which all but a few turns have come."""


class Windows:
    """The windows of turns by the gaps of all kinds of pauses, and by what clients' hints were worth.

    Only gaps that have ended count: a turn that never comes does not make those that come any later.
    """

    def __init__(self, kinds: Kinds) -> None:
        """`kinds` are those of a tracker of turns, which teaches them."""
        self._kinds = kinds

    def expect(self, tenant: str, pause: Pause) -> Window | None:
        """When the turn after a pause is expected. None: gaps of this kind differ too much, or were never seen.

        Nothing is expected after pauses below `LEAST_EXPECTED`: they leave no time to copy, and before anything is seen
        of a kind, a quarter of its gaps count as shorter.
        """
        kind = self._kinds.find(tenant, pause.kind)
        if pause.expected is not None and kind.believes_hints:
            return window_of(kind.ratios.ended, max(pause.expected, LEAST_EXPECTED))
        rates = kind.gaps.ended
        first, third = rates.quantile(0.25), rates.quantile(0.75)
        return window_of(rates) if first >= LEAST_EXPECTED and third <= SPREAD * first else None


def window_of(rates: Rates, scale: float = 1.0) -> Window:
    """The window of a turn by the rates of its gaps, in units of `scale` seconds.

    A quantile is the end of its bin. The state has to be there before, at the beginning of the bin.
    """
    soonest = EDGES[max(0, bin_of(rates.quantile(EARLY)) - 1)]
    return Window(*(scale * time for time in (soonest, rates.quantile(0.5), 2 * rates.quantile(LATE))))
