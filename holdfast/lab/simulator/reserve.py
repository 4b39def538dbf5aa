"""Reserve: how much boost a simulated device has left."""

from __future__ import annotations

from holdfast.core.cost import HEAVY, Burst


class Reserve:
    """The boost left of a burst, in seconds. Heavy steps use it up; all other time restores it at the same rate."""

    def __init__(self, burst: Burst) -> None:
        self._burst = burst
        self._left = burst.seconds

    def step(self, tokens: int, seconds: float, idle: float = 0.0) -> float:
        """Seconds that the next step takes, if it has `tokens` query tokens and takes `seconds` at the steady pace.

        It starts `idle` seconds after the step before it ended.
        """
        burst = self._burst
        if not burst.seconds:
            return seconds
        left = min(burst.seconds, self._left + idle)
        if tokens < HEAVY:
            self._left = min(burst.seconds, left + seconds)
            return seconds
        fast = min(left, burst.share * seconds)
        self._left = left - fast
        return fast + seconds - fast / burst.share
