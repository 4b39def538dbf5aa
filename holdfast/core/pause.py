"""Pauses: what is known of the time between the end of a turn and the request that needs its state again."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_KIND = 64
"""Largest number of characters in a kind of pause."""
MAX_PAUSE = 86_400.0
"""Longest pause in seconds that may be expected: a day."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Knowledge of the gap between the end of a sequence and the next request that continues it.

    Raises ValueError, naming the value and the limit, for anything out of range.
    """

    kind: str = ""
    """The thing that the conversation waits for: `person`, `tool:NAME`, `branch`, `batch`, or any other word. Gaps are
    learned by kind; the part before a colon is the parent kind. Empty: unknown."""
    expected: float | None = None
    """Seconds from the end of the sequence to its next request, as the client expects. None: no hint."""
    keep_until: float | None = None
    """Time, on the clock of the scheduler's `now`, until which the client wants the state kept. None: no wish."""
    superseded: bool = False
    """Whether the state will not be needed again: a regenerated answer's old branch, a finished sub-agent."""

    def __post_init__(self) -> None:
        if len(self.kind) > MAX_KIND or not (self.kind.isprintable() and self.kind.isascii()):
            raise ValueError(
                f"kind of pause is {self.kind!r}; it must have at most {MAX_KIND} printable ASCII characters"
            )
        if self.expected is not None and not (math.isfinite(self.expected) and 0.0 <= self.expected <= MAX_PAUSE):
            raise ValueError(
                f"expected_pause_ms is {self.expected * 1e3:g}; it must lie between 0 and {MAX_PAUSE * 1e3:.0f}"
            )
        if self.keep_until is not None and not math.isfinite(self.keep_until):
            raise ValueError(f"keep_until is {self.keep_until:g}; it must be a finite time in seconds")

    @property
    def parent(self) -> str:
        """The parent kind: `tool` for `tool:search`. Empty for a kind without a colon."""
        return self.kind.partition(":")[0] if ":" in self.kind else ""


NO_PAUSE = Pause()
"""Nothing is known of the pause."""
