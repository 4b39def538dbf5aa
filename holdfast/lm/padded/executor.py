"""PaddedExecutor: runs step plans through an unmodified model, forward by forward."""

from __future__ import annotations

from holdfast.lm.padded.driver import Driver
from holdfast.lm.padded.host_rows import HostRows
from holdfast.lm.padded.running_rows import RunningRows
from holdfast.lm.types import Abilities, StepPlan, StepResult


class PaddedExecutor:
    """`loop.contracts.Executor` for a model of Transformers, unmodified, on padded rows.

    The moves and forwards of a plan (`StepPlan.row_moves`, `StepPlan.forwards`) run in the plan's order; forwards apart
    may run on a second stream beside those of the batch. On CUDA `submit` returns once the work is launched. On a CPU
    one worker thread runs the steps in order. Sampled tokens feed the next forward on the device (`PENDING`).

    Where the model lacks an ability a forward is run in parts, at worst one row at a time, with the same tokens.

    Where memory runs out in a forward, the states of that forward are dropped. `StepResult.lost` names its sequences
    and `counts` says that they gave no token. Segments of a lost sequence in later plans compute nothing, until one
    starts at 0.
    """

    def __init__(self, driver: Driver, abilities: Abilities, rows: RunningRows, host: HostRows | None) -> None:
        self.driver, self.abilities, self.rows, self.host = driver, abilities, rows, host

    def submit(self, plan: StepPlan) -> None:
        """Start the step and return without waiting for it. Raises ValueError for a plan that it cannot run.

        A plan has `forwards` if it has segments. Its last `stop` is their number.
        """
        raise NotImplementedError

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight. Raises what that step raised, except for lack of memory."""
        raise NotImplementedError

    def prepare(self) -> bool:
        """Use a pause to capture one more graph. Returns whether it did; not while a step is in flight."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the worker, or wait for the device, and give back the host memory. Steps in flight are abandoned."""
        raise NotImplementedError
