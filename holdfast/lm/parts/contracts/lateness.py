"""Lateness: how much later tokens come than the predicted ends of their steps."""

from __future__ import annotations

from collections import deque

STEPS_IN_SPAN = 128
"""Steps of which only the largest lateness is kept."""
SPANS = 16
"""Number of spans that count, the newest one among them."""
FIRST_SECONDS = 0.01
"""Lateness of an engine whose steps do not take exactly their prices, before any of them was seen."""


class Lateness:
    """The largest lateness among the latest steps, at least SPANS - 1 times STEPS_IN_SPAN of them.

    A stream breaks its contract by a single late token, so neither the mean nor a percentile will do. Most of it is
    time that the process spends on arrivals while the device has nothing to do.
    """

    def __init__(self, first: float = 0.0) -> None:
        """`first` is the lateness in seconds that is assumed before any step was seen."""
        self._spans = deque([first], maxlen=SPANS)
        """The largest lateness of each span in seconds, the oldest span first."""
        self._steps = 0
        """Number of steps in the newest span."""
        self.largest = first
        """The largest lateness in seconds."""

    def add(self, seconds: float) -> None:
        """Note the lateness of one step; a negative one, of a step that ended early, counts as none."""
        if self._steps == STEPS_IN_SPAN:
            self._spans.append(0.0)
            self._steps = 0
            self.largest = max(self._spans)
        self._steps += 1
        if seconds > self._spans[-1]:
            self._spans[-1] = seconds
            self.largest = max(self.largest, seconds)
