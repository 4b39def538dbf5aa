"""Capacity search: the highest rate of requests at which the time between tokens meets its target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

MOST_QUEUED_MS = 2000.0
"""Most milliseconds that the median request may wait for its first step (Sarathi-Serve §5: the load is sustained)."""
CLOSE = 0.05
"""The search ends when the bounds are this close to one another, unless it is told how close."""
LOWEST, HIGHEST = 1e-3, 1e5
"""The rates between which a capacity is looked for."""


def sustained(figures: Mapping[str, float], target_ms: float, ttft_ms: float | None = None) -> bool:
    """Whether P99 TBT is within the target, P99 TTFT within its own if there is one, and the queue does not grow.

    TTFT stands in where queueing is unknown.
    """
    queued = figures["median_queued_ms" if "median_queued_ms" in figures else "median_ttft_ms"]
    prompt = ttft_ms is None or figures["p99_ttft_ms"] <= ttft_ms
    return prompt and figures["p99_itl_ms"] <= target_ms and queued <= MOST_QUEUED_MS


def find_capacity(
    run: Callable[[float], Mapping[str, float]],
    target_ms: float,
    *,
    ttft_ms: float | None = None,
    start: float = 1.0,
    stride: float = 2.0,
    close: float = CLOSE,
) -> float:
    """The highest rate (requests a second) that is sustained, within `close` of it; 0.0 if none is.

    `run` gives the figures of a run at a rate. Goes from `start` up or down by a factor until it stands between two
    bounds, then bisects. The factor is `stride`, which suits how good a guess `start` is; its square next, and so on up
    to 2. Raises ValueError for a start, a stride or a closeness with which it would never end.
    """
    if not (0 < start < inf and stride > 1):
        raise ValueError(f"start is {start} and stride {stride}; they must be above 0 and above 1, and start finite")
    if not close > 0:
        raise ValueError(f"close is {close}; it must be above 0")
    good, bad = 0.0, 0.0
    rate = start
    while not (good and bad):
        if sustained(run(rate), target_ms, ttft_ms):
            good, rate = rate, rate * stride
        else:
            bad, rate = rate, rate / stride
        stride = min(stride * stride, 2.0)
        if rate < LOWEST:
            return 0.0
        if rate > HIGHEST:
            return good
    while bad / good > 1 + close:
        rate = (good * bad) ** 0.5
        if sustained(run(rate), target_ms, ttft_ms):
            good = rate
        else:
            bad = rate
    return good
