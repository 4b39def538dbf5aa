"""PagedMemory: the memory and graphs that a paged device allocates."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.lm.execution.batch import Batch
from holdfast.lm.execution.graphs import StepGraphs
from holdfast.lm.execution.host_memory import HostMemory
from holdfast.lm.execution.transfer import Transfers
from holdfast.lm.kernels.cache.kv_cache import KVCache
from holdfast.lm.models.base import NO_STATES, LayerCache, StateMemory

Layers = tuple[LayerCache, ...]
"""Key cache and value cache of each layer."""


@dataclass(frozen=True, slots=True)
class PagedMemory:
    """The memory and graphs that a `PagedDevice` allocates."""

    cache: KVCache
    layers: Layers
    batch: Batch
    graphs: tuple[StepGraphs, ...] = ()
    """The graphs of steps by kind (`StagedStep.kind`); empty if steps are not captured."""
    host: HostMemory | None = None
    """The host tier if it has to be locked; else None."""
    transfers: Transfers | None = None
    host_cache: KVCache | None = None
    """The blocks of the host tier, each in one piece; None without a host tier."""
    states: StateMemory = NO_STATES
    """The states of recurrent layers."""
