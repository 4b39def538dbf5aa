"""The learning rate of each step: a linear warm-up, then linear decay to zero."""

from __future__ import annotations


def learning_rate(step: int, *, steps: int, peak: float, warmup: float) -> float:
    """The rate of a step, from 0 to steps - 1. `warmup` is the share of all steps until `peak` is reached.

    No step has rate 0: the first has a part of the peak, and the last one step's part of the decay.
    """
    rising = round(steps * warmup)
    if step < rising:
        return peak * ((step + 1) / rising)
    return peak * ((steps - step) / (steps - rising))
