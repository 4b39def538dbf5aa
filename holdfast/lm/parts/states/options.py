"""Options of recurrent states."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.config import DEFAULT_SEQUENCES, CoreConfig, option

RUNNING_SHARE = 0.25
"""Largest share of the cache's memory that the states of running sequences take, by the default of max_sequences."""


def default_sequences(state_bytes: int, cache_bytes: int) -> int:
    """Number of sequences that run at once unless the configuration gives it, for states of this size in bytes.

    `cache_bytes` is the memory for the cache and for the states of running sequences.
    """
    return max(1, min(DEFAULT_SEQUENCES, int(RUNNING_SHARE * cache_bytes) // max(1, state_bytes)))


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
