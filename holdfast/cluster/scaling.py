"""When to add a replica and when to take one away: by queueing time, with hysteresis. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

UP_SECONDS = 3.0
"""Requests must queue for so long before a replica is added, and again before the next one."""
ROOM = 0.7
"""A replica is taken away only if the requests would fill at most this share of the places of the others."""


@dataclass(frozen=True, slots=True)
class Load:
    """What all replicas have to do."""

    queued_seconds: float
    """How long the request that waits longest has waited for its first step; 0 if none waits."""
    running: int
    """Requests in progress."""
    places: int
    """Requests that one replica runs at a time."""


class Scaler:
    """Watches the load and says when to change the number of replicas."""

    def __init__(self, least: int, most: int, up_seconds: float, down_seconds: float) -> None:
        """Between `least` and `most` replicas. Queueing for `up_seconds` is too long; after `down_seconds` without any
        queueing there may be too many."""
        self._least, self._most, self._limit, self._down = least, most, up_seconds, down_seconds
        self._busy_since: float | None = None
        self._calm_since: float | None = None

    def decide(self, load: Load, replicas: int, now: float, *, changing: bool = False) -> Literal[-1, 0, 1]:
        """How many replicas to add, given that there are so many. To be called about once a second.

        While `changing`, one is being started or drained, and nothing else is done.
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
