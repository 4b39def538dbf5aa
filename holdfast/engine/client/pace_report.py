"""PaceReport: how many times between two tokens were above the latency target at this client, for the engine."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.engine import messages
from holdfast.lm.scheduler.correction import MAX_LEARNED_MARGIN

REPORT_SECONDS = 0.25
"""Least seconds between two reports."""


class PaceReport:
    """Counts times between two tokens of streams, and how many of them were late. Reports them now and then.

    The engine knows when its steps end. The way from there to a stream's reader, through an event loop that sends the
    tokens of other streams, is known only here. The engine answers late tokens with smaller steps, so tokens that say
    nothing of that are left out, as if they had not come:

    - Tokens of a step in time that are late because their way took longer than that of the token before by more than
      the largest margin of a step: this process stood still, or its machine did.
    - All tokens whose way took longer than the target: this process still works on an earlier step, so the times
      between tokens are its own.
    """

    def __init__(self, target: float, send: Callable[[messages.TokenWaits], None]) -> None:
        """`target` is the most seconds between two tokens of a stream; infinity: nothing need be reported."""
        self.target, self._send = target, send
        self._count = self._late = 0
        self._due_at = 0.0
        """Time of the next report at the earliest."""

    def note(self, seconds: float, now: float, *, way: float = 0.0, way_before: float = 0.0) -> None:
        """Count a time between two tokens that ended at `now`.

        `way` is the time in seconds from the end of the engine's step until the reader had the token, and `way_before`
        that of the token before it; 0: unknown.
        """
        late, delay = seconds > self.target, way - way_before
        stood_still = seconds - delay <= self.target and delay > MAX_LEARNED_MARGIN * self.target
        if way > self.target or (late and stood_still):
            return
        self._count += 1
        self._late += late
        if now >= self._due_at:
            self._send(messages.TokenWaits(self._count, self._late))
            self._count = self._late = 0
            self._due_at = now + REPORT_SECONDS
