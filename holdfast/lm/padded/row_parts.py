"""The work of parts in the steps of padded rows: restrictions of draws, and work around forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from holdfast.lm.copy_streams import CopyStream
from holdfast.lm.types import EngineShape, PartResult, Segment, StepPlan


class DrawnRows(NamedTuple):
    """The tokens of one draw, which may still be on their way to the host."""

    on_host: torch.Tensor
    """The tokens [R] int64, once `end` has passed."""
    end: Any = None
    """The CUDA event after the copy to the host; None on a CPU."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The drawn tokens. Waits for the device."""
        if self.end is not None:
            self.end.synchronize()
        return tuple(self.on_host.tolist())


class Restriction(Protocol):
    """The tokens that the rows of one draw may have."""

    def masks(self) -> torch.Tensor:
        """The masks [M, W] int32 of the restricted rows, on the device. Waits for the tokens of earlier draws."""
        ...

    def drawn(self, step: DrawnRows) -> None:
        """The draw was launched."""
        ...


class RowRules(Protocol):
    """The restrictions of all draws of an executor of padded rows, in their order."""

    def begin(self, plan: StepPlan) -> None:
        """The draws of this plan come next."""
        ...

    def of(self, segments: Sequence[Segment]) -> Restriction:
        """The restriction of a draw after these segments, of which at least one has a grammar."""
        ...


class RowWork(Protocol):
    """The work of a part in the steps of padded rows, in addition to rules for draws."""

    def before(self, plan: StepPlan) -> None:
        """Called when a plan is about to run. In the thread that runs the steps."""
        ...

    def changes(self, rows: Sequence[int]) -> bool:
        """Whether the part changes a forward of these rows of the plan that runs."""
        ...

    def forward(self, rows: Sequence[int]) -> AbstractContextManager[None]:
        """Context of a forward of these rows of the plan that runs, in their order in the forward."""
        ...

    def completed(self, *, wait: bool) -> Sequence[PartResult]:
        """A step has ended: results of other work that has ended by now. With `wait`, of all work begun so far."""
        ...

    def close(self) -> None:
        """End the part's threads. The device is idle by then."""
        ...


class RowPart(Protocol):
    """A part's state on a device of padded rows, from the moment when the weights are there."""

    def shaped(self, shape: EngineShape) -> EngineShape:
        """An engine's shape with what the part adds to it."""
        ...

    def row_rules(self, rows: int, device: torch.device) -> Sequence[RowRules]:
        """The rules for the draws of an executor of this many rows; none if the part restricts no draw."""
        ...

    def row_work(self, make_stream: Callable[[], CopyStream]) -> Sequence[RowWork]:
        """The part's work in steps, if it has any. `make_stream` makes streams for copies during the computation."""
        ...
