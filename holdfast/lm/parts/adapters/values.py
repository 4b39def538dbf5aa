"""The values that adapters add to a plan and to a result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from holdfast.lm.types.news import PartNews
from holdfast.lm.types.plan import PartPlan
from holdfast.lm.types.result import PartResult


class AdapterLoad(NamedTuple):
    """An adapter's weights copied from the host into a slot on the device."""

    slot: int
    """Slot on the device. Only earlier plans may read its old contents."""
    adapter: str
    """Content id of the adapter (`Identity.adapter`)."""


@dataclass(frozen=True, slots=True)
class AdapterPlan(PartPlan):
    """The adapters that a plan brings to the device, and those that its segments use."""

    loads: tuple[AdapterLoad, ...] = ()
    """Loads that begin before the segments run.

    `AdapterResult.loaded` says when they are complete; until then no segment reads their slots. A plan without
    segments is complete when all its loads are.
    """
    slots: tuple[int, ...] = ()
    """Slot of each segment's adapter, or -1. Empty: no segment has one."""
    complete: tuple[int, ...] = ()
    """Slots whose loads are complete on all devices, and which no earlier plan has completed.

    Before the loads and the segments, the devices finish what takes all of their parts of these slots' adapters.
    """


@dataclass(frozen=True, slots=True)
class AdapterResult(PartResult):
    """Progress of the loads of adapters."""

    loaded: int = -1
    """Number of a plan: its adapter loads, and those of all plans before it, are complete."""
    lost: tuple[str, ...] = ()
    """Adapters among the completed loads that could not be read. Their slots hold what they held before."""

    @property
    def of_each_rank(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class AdapterKnown(PartNews):
    """An adapter that plans may load from now on."""

    adapter: str
    """Content id of the adapter."""
    name: str
    directory: str
    """Directory of its files, on the host of all ranks."""


@dataclass(frozen=True, slots=True)
class AdapterForgotten(PartNews):
    """An adapter that no plan loads any more."""

    adapter: str
    """Content id of the adapter."""
