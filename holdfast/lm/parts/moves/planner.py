"""MovePart: reports when no plan in flight reads the host tier any longer, so that moves may write there."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.lm.parts.moves.options import MoveOptions
from holdfast.lm.parts.planning import Planning
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.part import Part
from holdfast.lm.types import StepPlan, StepResult


class MovePart(Part):
    """Marks in the sequence of plans, for moves that fill reserved blocks of the host tier from another engine.

    While a move waits for a mark to be passed, plans are made even if they have nothing to do, because only a result
    says which copies are complete. The host tier must be able to swap in.
    """

    name = "moves"

    def __init__(self) -> None:
        self._planned = -1
        """Number of the last plan."""
        self._settled = -1
        """Number of a plan: its copies from the host, and those of all plans before it, are known to be complete."""
        self._barrier = -1
        """The latest mark."""

    def barrier(self) -> int:
        """Set a mark after the plans made so far, for `passed`."""
        self._barrier = self._planned
        return self._barrier

    def passed(self, barrier: int) -> bool:
        """Whether no plan made before this mark can still read the host."""
        return self._settled >= barrier

    def planned(self, plan: StepPlan) -> None:
        self._planned = plan.step

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> Iterable[Entry]:
        self._settled = max(self._settled, result.copied.swapped_in)
        return ()

    @property
    def wants_step(self) -> bool:
        return self._settled < self._barrier

    @property
    def has_work(self) -> bool:
        return self._settled < self._barrier


def make_parts(planning: Planning) -> tuple[MovePart, ...]:
    """The part of a scheduler whose host tier exchanges blocks with other engines."""
    reachable = planning.config.part(MoveOptions).chunk_host
    return (MovePart(),) if reachable and planning.shape.num_host_blocks and not planning.on_rows else ()
