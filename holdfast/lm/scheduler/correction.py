"""Correction: how far measured times are from predicted ones."""

from __future__ import annotations

from math import hypot

MEAN_GAIN, DEVIATION_GAIN = 0.25, 0.1
"""Weight of one step in the running mean and in the running mean deviation."""
DEVIATIONS = 3.5
"""Nearly all steps stay below the mean plus this many mean deviations: 2.8 standard deviations of a normal one."""
CLIP = 0.1
"""Clip each step's relative error here, so that one outlier cannot dominate the correction.

The limit rises to DEVIATIONS mean deviations where errors are larger than this anyway: else it could never adapt.
"""
MIN_RATIO, MAX_RATIO = 0.2, 20.0
"""Measured over predicted times are limited to this range."""
LATE_SHARE = 0.0075
"""Share of late steps to which the margin converges. P99 within a target leaves 1%, and the last part of the way to a
client makes some more late."""
MARGIN_GAIN = 0.01
"""A late step adds this to the margin, in times of the mean. Each other step takes LATE_SHARE of it away."""
MAX_LEARNED_MARGIN = 0.15
"""Most that late steps add to the margin, in times of the mean: shorter steps may not help against a delay."""


class Correction:
    """An upper estimate of measured over predicted step time, which nearly all steps stay below.

    It is the running mean plus 3.5 mean deviations; TCP estimates its retransmission timeout so, with four (Jacobson,
    Congestion Avoidance and Control, 1988). If steps take exactly a multiple of the prediction, it converges to that
    multiple.

    Streams get the tokens of a step when the host has its result, and wait for it since the result before. The mean of
    that time over the step's own is a second factor, and its deviation is independent of the first.

    How many deviations a promise takes depends on the shape of the errors, and on what happens to tokens after the
    step. A caller that knows which steps were late says so (`note_late`), and the margin over the mean follows: it
    rises with each late step and falls a little with each other, so that LATE_SHARE of the steps are late. This is the
    stochastic approximation of a quantile (Robbins and Monro, A Stochastic Approximation Method, 1951).
    """

    def __init__(self, deviation: float) -> None:
        """`deviation` is the mean deviation assumed before any step was measured, relative to the mean."""
        self.mean, self.deviation = 1.0, deviation
        self.host_mean, self.host_deviation = 1.0, 0.0
        """Running mean, and mean deviation, of the time between two results over the time of the second step."""
        self.learned_margin = 0.0
        """Margin that late steps have taught, in times of the mean, in addition to the one by deviations. Negative if
        fewer deviations are enough."""

    @property
    def factor(self) -> float:
        """Multiply the prediction of a step by this."""
        return self.mean * (self.host_mean + max(0.0, self._spread + self.learned_margin))

    @property
    def _spread(self) -> float:
        """Margin by deviations, in times of the mean."""
        return DEVIATIONS * hypot(self.deviation, self.host_deviation)

    def update(self, ratio: float) -> None:
        """Learn that a step took `ratio` times its predicted time."""
        limit = max(CLIP, DEVIATIONS * self.deviation)
        error = min(max(min(max(ratio, MIN_RATIO), MAX_RATIO) / self.mean - 1, -limit), limit)
        self.deviation += DEVIATION_GAIN * (abs(error) - self.deviation)
        self.mean *= 1 + MEAN_GAIN * error

    def update_host(self, ratio: float) -> None:
        """Learn that the result of a step came `ratio` times the step's time after the one before it."""
        error = min(max(ratio - self.host_mean, -CLIP), CLIP)
        self.host_deviation += DEVIATION_GAIN * (abs(error) - self.host_deviation)
        self.host_mean = min(max(1.0, self.host_mean + DEVIATION_GAIN * error), MAX_RATIO)

    def widen(self, margin: float) -> None:
        """Add this to the margin, in times of the mean, until steps have taught how much it takes."""
        self.learned_margin = min(self.learned_margin + margin, MAX_LEARNED_MARGIN)

    def note_late(self, late: float, steps: float = 1.0) -> None:
        """Learn that `late` of the `steps` that were as long as the target allowed came late; fractions count."""
        learned = self.learned_margin + MARGIN_GAIN * (late - LATE_SHARE * steps)
        self.learned_margin = min(max(learned, -self._spread), MAX_LEARNED_MARGIN)
