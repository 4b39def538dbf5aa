"""Devices of chosen sizes: as many blocks as a test asks for, whatever memory the machine has."""

from __future__ import annotations

from typing import Any

from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.models.base import Model
from holdfast.lm.types import MemoryMeasurement


def sizes(num_blocks: int, host_blocks: int = 0, snapshots: int = 0) -> MemoryMeasurement:
    """The measurement of a device with room for this many blocks, and for this many snapshots of recurrent states."""
    return MemoryMeasurement(
        device="test",
        total=0,
        weights=0,
        activations=0,
        cache=num_blocks,
        block=1,
        host_cache=host_blocks,
        snapshots=snapshots,
    )


def allocated(
    model: Model, config: EngineConfig, num_blocks: int, host_blocks: int = 0, *, snapshots: int = 0, **options: Any
) -> PagedDevice:
    """A device with a cache of this many blocks. All of its host tier can be used."""
    device = PagedDevice(model, config, **options)
    device.allocate(sizes(num_blocks, host_blocks, snapshots))
    if device.memory.host is not None:
        device.memory.host.begin()
        device.memory.host.wait()
    return device
