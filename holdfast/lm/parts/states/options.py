"""Options of recurrent states."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.config import CoreConfig, option


@dataclass(frozen=True, kw_only=True)
class StateOptions(CoreConfig):
    """How much memory snapshots of recurrent states take."""

    snapshot_share: float = option(
        0.25,
        "share of the cache's memory, on the device, on the host and on the disk, for snapshots of recurrent states at "
        "the ends of turns; for models with recurrent layers",
        between=(0.01, 0.9),
        executor="paged",
    )
