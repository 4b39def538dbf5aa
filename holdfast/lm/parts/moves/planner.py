"""MovePart: has plans made until copies from and to the host are known to be complete, for moves between engines."""

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
    says which copies are complete. So they are while another engine waits for blocks on their way to the host: the
    result of a plan that computes anything waits for no copy. The host tier must be able to swap in.
    """

    name = "moves"

    def __init__(self) -> None:
        self._planned = -1
        """Number of the last plan."""
        self._settled = -1
        """Number of a plan: its copies from the host, and those of all plans before it, are known to be complete."""
        self._barrier = -1
        """The latest mark."""
        self._copied = -1
        """Number of a plan: its copies to the host, and those of all plans before it, are known to be complete."""
        self._awaited = -1
        """Number of the last plan whose copies to the host a move waits for."""

    def barrier(self) -> int:
        """Set a mark after the plans made so far, for `passed`."""
        self._barrier = self._planned
        return self._barrier

    def passed(self, barrier: int) -> bool:
        """Whether no plan made before this mark can still read the host."""
        return self._settled >= barrier

    def await_copies(self) -> None:
        """Have plans made until the copies to the host of all plans so far are known to be complete."""
        self._awaited = self._planned

    def planned(self, plan: StepPlan) -> None:
        self._planned = plan.step

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> Iterable[Entry]:
        self._settled = max(self._settled, result.copied.swapped_in)
        self._copied = max(self._copied, result.copied.swapped_out)
        return ()

    @property
    def wants_step(self) -> bool:
        return self.has_work

    @property
    def has_work(self) -> bool:
        """Whether a move waits for copies that are not known to be complete."""
        return self._settled < self._barrier or self._copied < self._awaited


def make_parts(planning: Planning) -> tuple[MovePart, ...]:
    """The part of a scheduler whose host tier exchanges blocks with other engines."""
    reachable = planning.config.part(MoveOptions).chunk_host
    return (MovePart(),) if reachable and planning.shape.num_host_blocks and not planning.on_rows else ()
