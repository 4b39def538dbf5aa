"""TrainingRoom: the time that a full step of streams leaves of the target between tokens for training."""

from __future__ import annotations

from holdfast.lm.scheduler.correction import Correction

LEAST_STEPS = 32
"""Number of measured steps after which the price of a step is known.

Before, the price is the measurement at the start, when the machine may have been busy.
"""


class TrainingRoom:
    """The seconds that are left for one unit of training after a full step of decodes.

    The step's price comes from the cost model, and is corrected by steps that are measured in service.
    """

    def __init__(
        self,
        target: float,
        share: float,
        decodes: int,
        seconds: float,
        *,
        deviation: float = 0.0,
        exact: bool = False,
        stages: int = 1,
    ) -> None:
        """Steps and slices take at most `share` of `target` seconds together.

        A full step has `decodes` decodes and is predicted to take `seconds`. `exact`: predictions are right by
        definition, as in a simulation. With several `stages`, as many steps share what is left.
        """
        self._stages = stages
        self.target, self.share, self.decodes, self._seconds = target, share, decodes, seconds
        self._correction, self._steps, self._exact = Correction(deviation), 0, exact

    @property
    def step_seconds(self) -> float:
        """The price of a full step: the predicted time, corrected by measured ones."""
        return self._seconds * self.factor

    @property
    def factor(self) -> float:
        """Mean ratio of measured to predicted seconds of a step; 1 before any was measured."""
        return self._correction.mean

    @property
    def seconds(self) -> float:
        """Seconds that are left for a unit; 0 or less if there are none."""
        return (self.target * self.share - self.step_seconds) / self._stages

    @property
    def known(self) -> bool:
        """Whether the price rests on enough measured steps to refuse a job."""
        return self._exact or self._steps >= LEAST_STEPS

    def observe(self, ratio: float) -> None:
        """Learn that a step of decodes took `ratio` times its predicted time."""
        self._correction.update(ratio)
        self._steps += 1

    def refusal(self, unit_seconds: float, tokens: int) -> str:
        """Why a unit of `unit_seconds` does not fit after a full step; empty if it fits.

        `tokens` is the number of tokens of its micro-batch.
        """
        price = f"a step of {self.decodes} decodes takes {1e3 * self.step_seconds:.1f} ms"
        if self.seconds <= 0:
            return (
                f"tbt_target is {1e3 * self.target:g} ms, of which {1 - self.share:.0%} stays free, and {price}, which "
                "leaves nothing for training: raise tbt_target, or give a deferral_bound instead"
            )
        if unit_seconds > self.seconds:
            return (
                f"one of its units takes {1e3 * unit_seconds:.1f} ms with {tokens} tokens, and a step has room for "
                f"{1e3 * self.seconds:.1f} ms, as {price}: choose a smaller micro_batch, or shorter data"
            )
        return ""
