"""Which tokens the rows of a draw may have: what a part of a step adds to the draws of padded rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from holdfast.lm.types import Segment, StepPlan


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


class RowPart(Protocol):
    """A part's state on a device of padded rows, from the moment when the weights are there."""

    def row_rules(self, rows: int, device: torch.device) -> RowRules:
        """The rules for the draws of an executor of this many rows."""
        ...
