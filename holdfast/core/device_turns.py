"""DeviceTurns: when an application may use a device that it shares with a language model."""

from __future__ import annotations

from math import inf

WINDOW_SECONDS = 0.5
"""Seconds of a language model's work whose share may be saved up while no work of the application was ready."""
LATE_SECONDS = 0.25
"""Seconds for which the application gives way after a step with streams was longer than their target."""


class DeviceTurns:
    """Bounds an application's time by a share of the time in which a language model has work on the same device.

    The application earns the share while the language model works, and pays the time of each round. It may begin one
    while it owes nothing. While streams are late, it earns nothing. While the language model has no work, nothing is
    bound. Time is an argument, in seconds on a clock that both processes share.
    """

    def __init__(self, share: float) -> None:
        """`share` from above 0 to 1 (no bound); else ValueError."""
        if not 0 < share <= 1:
            raise ValueError(f"app_share is {share}; it must be above 0 and at most 1")
        self.share = share
        self._earned = 0.0
        """Seconds that are earned and not paid; below 0 after a round that was longer."""
        self._seen = -inf
        """When `pause` was last asked."""

    def pause(self, now: float, working_until: float, late_until: float) -> float:
        """Seconds for which no round may begin; 0 if one may.

        The language model has work until `working_until` as far as is known, and its streams are late until
        `late_until`.
        """
        if self.share == 1 or now >= working_until:
            self._earned, self._seen = max(0.0, self._earned), now
            return 0.0
        began = max(self._seen, min(now, late_until))
        self._earned = min(self.share * WINDOW_SECONDS, self._earned + self.share * max(0.0, now - began))
        self._seen = now
        if now < late_until:
            return min(late_until, working_until) - now
        return 0.0 if self._earned > 0 else min(working_until - now, max(1e-4, -self._earned / self.share))

    def spent(self, seconds: float) -> None:
        """Note the time of a round."""
        self._earned -= seconds
