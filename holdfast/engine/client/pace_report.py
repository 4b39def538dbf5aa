"""PaceReport: how many times between two tokens were above the latency target at this client, for the engine."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.engine import messages

REPORT_SECONDS = 0.25
"""Least seconds between two reports."""


class PaceReport:
    """Counts times between two tokens of streams, and how many of them were late. Reports them now and then.

    The engine knows when its steps end. The way from there to a stream's reader, through an event loop that sends the
    tokens of other streams, is known only here.
    """

    def __init__(self, target: float, send: Callable[[messages.TokenWaits], None]) -> None:
        """`target` is the most seconds between two tokens of a stream; infinity: nothing need be reported."""
        self.target, self._send = target, send
        self._count = self._late = 0
        self._due_at = 0.0
        """Time of the next report at the earliest."""

    def note(self, seconds: float, now: float) -> None:
        """Count a time between two tokens that ended at `now`."""
        self._count += 1
        self._late += seconds > self.target
        if now >= self._due_at:
            self._send(messages.TokenWaits(self._count, self._late))
            self._count = self._late = 0
            self._due_at = now + REPORT_SECONDS
