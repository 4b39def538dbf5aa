"""Scaling: decides by queueing time when to add or remove a replica, with hysteresis. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

UP_SECONDS = 3.0
"""Seconds for which requests must queue before a replica is added. They count anew after each addition."""
ROOM = 0.7
"""Maximum load of the remaining replicas, as a share of their places, for a replica to be removed."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load of all replicas together."""

    queued_seconds: float
    """Seconds that the longest waiting request has waited for its first step; 0 if none waits."""
    running: int
    """Number of requests in progress."""
    places: int
    """Number of requests that one replica can run at the same time."""


class Scaler:
    """Decides when to change the number of replicas."""

    def __init__(self, least: int, most: int, up_seconds: float, down_seconds: float) -> None:
        """Keep between `least` and `most` replicas.

        Add a replica when queueing takes longer than `up_seconds`. Remove one when nothing has queued for
        `down_seconds`.
        """
        self._least, self._most, self._limit, self._down = least, most, up_seconds, down_seconds
        self._busy_since: float | None = None
        self._calm_since: float | None = None

    def decide(self, load: Load, replicas: int, now: float, *, changing: bool = False) -> Literal[-1, 0, 1]:
        """Return the change of the number of replicas: -1, 0 or 1. Must be called about once a second.

        While `changing`, a replica is being started or drained, and the result is 0.
        """
        busy = load.queued_seconds > self._limit
        calm = load.queued_seconds == 0 and load.running <= ROOM * load.places * (replicas - 1)
        self._busy_since = (now if self._busy_since is None else self._busy_since) if busy else None
        self._calm_since = (now if self._calm_since is None else self._calm_since) if calm else None
        if changing:
            return 0
        if self._busy_since is not None and now - self._busy_since >= UP_SECONDS and replicas < self._most:
            self._busy_since = self._calm_since = None
            return 1
        if self._calm_since is not None and now - self._calm_since >= self._down and replicas > self._least:
            self._calm_since = None
            return -1
        return 0
