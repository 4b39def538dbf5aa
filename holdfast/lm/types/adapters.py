"""What adapters add to a plan and to a result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from holdfast.lm.types.plan import PartPlan
from holdfast.lm.types.result import PartResult


class AdapterLoad(NamedTuple):
    """An adapter's weights copied from the host into a slot on the device."""

    slot: int
    """Only plans before this one may read what it held."""
    adapter: str
    """Its content id (`Identity.adapter`)."""


@dataclass(frozen=True, slots=True)
class AdapterPlan(PartPlan):
    """The adapters that a plan brings to the device, and those that its segments use."""

    loads: tuple[AdapterLoad, ...] = ()
    """Begun before the segments run. `AdapterResult.loaded` says when they are complete; until then no segment reads
    their slots. A plan without segments is complete when all loads are."""
    slots: tuple[int, ...] = ()
    """For each segment, the slot of its adapter, or -1. Empty: no segment has one."""


@dataclass(frozen=True, slots=True)
class AdapterResult(PartResult):
    """How far the loads of adapters have come."""

    loaded: int = -1
    """Number of a plan: its adapter loads, and those of all plans before it, are complete."""
    lost: tuple[str, ...] = ()
    """Those of such adapters that could not be read any more. Their slots hold what they held."""
