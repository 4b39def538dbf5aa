"""SchedulerStats: numbers on queues and memory after a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Numbers on queues and memory after a step."""

    waiting: int
    running: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    """Unowned blocks that still hold reusable state."""
    preemptions: int
    prefix_queries: int
    """Prompt tokens of admitted requests."""
    prefix_hits: int
    """Number of these tokens that the prefix cache had."""
    tokens_computed: int
    tokens_recovered: int = 0
    """Positions that were dropped and computed again although later ones were kept."""
    host_blocks_total: int = 0
    host_blocks_ready: int = 0
    """Blocks of the host tier that can be used; the others are still being locked."""
    host_blocks_cached: int = 0
    """Blocks of the host tier that hold state."""
    host_blocks_dropped: int = 0
    """Blocks given up for others of a higher value."""
    blocks_swapped_in: int = 0
    blocks_swapped_out: int = 0
    blocks_swapped_in_ahead: int = 0
    """Blocks copied from the host before any sequence asked for them."""
    blocks_ahead_used: int = 0
    """Number of `blocks_swapped_in_ahead` that a sequence then shared."""
    blocks_ahead_wasted: int = 0
    """Number of `blocks_swapped_in_ahead` that were allocated for other state first."""
    pauses_noted: int = 0
    """Ended answers so far of which clients said what follows."""
    turns_expected: int = 0
    """Conversations whose next turn is expected now."""
    prefix_hits_on_host: int = 0
    """Number of `prefix_hits` that came from the host tier."""
    suspensions: int = 0
    """Number of `preemptions` whose state went to the host tier."""
    tokens_dropped: int = 0
    """Tokens whose state was given up in every tier."""
    forwards: int = 0
    """Runs of the model so far. This field and the four below are for padded rows."""
    idle_tokens: int = 0
    """Tokens computed so far that belong to no request (`idle_tokens`)."""
    rows_wide: int = 0
    """Positions of each row of the batch for which memory is counted, before rounding up."""
    rows_prefilled: int = 0
    """Number of `running` sequences that were prefilled ahead and wait for a place in the batch."""
    shrinks: int = 0
    """Steps in which the device ran out of memory. The batch was made smaller each time."""
    adapters_known: int = 0
    """Adapters that requests may ask for."""
    adapters_resident: int = 0
    """Number of these adapters in a slot on the device."""
    adapter_loads: int = 0
    """Copies of adapters to the device so far."""
    blocks_training: int = 0
    """Blocks lent to training: free + cached + used + training = total."""
    training_tokens: int = 0
    """Tokens of the micro-batches of tuning jobs that were computed."""
    training_seconds: float = 0.0
    """Device time of the slices of training, in seconds."""
    deferred_seconds: float = 0.0
    """Seconds that requests have waited by the deferral bound, summed."""
    tokens_drafted: int = 0
    """Guessed tokens that steps have verified."""
    drafts_accepted: int = 0
    """Number of these tokens that the model would have drawn itself."""
    snapshots_total: int = 0
    """Slots for snapshots of recurrent states on the device. This field and those below are for hybrid models."""
    snapshots_used: int = 0
    """Number of these slots that the next step reads or writes. free + kept + used = total."""
    snapshots_kept: int = 0
    """Number of other slots that hold a snapshot."""
    snapshots_saved: int = 0
    """Snapshots made so far."""
    snapshots_dropped: int = 0
    """Snapshots that no tier has any more."""
    snapshots_swapped_out: int = 0
    snapshots_swapped_in: int = 0
    host_snapshots_total: int = 0
    """Slots for snapshots on the host."""
    host_snapshots_kept: int = 0
    """Number of these slots that hold a snapshot."""
    snapshot_hits: int = 0
    """Starts of sequences from a snapshot so far."""
    snapshot_tokens: int = 0
    """Tokens that these sequences did not have to compute."""
    disk_snapshots_total: int = 0
    """Places for snapshots on the disk."""
    disk_snapshots_kept: int = 0
    """Number of these places that hold a snapshot."""
    prefix_hits_on_disk: int = 0
    """Number of `prefix_hits` that came from the disk for their request."""
    prefix_hits_on_remote: int = 0
    """Number of `prefix_hits` that came from the remote tier for their request."""
    disk_blocks_total: int = 0
    disk_blocks_cached: int = 0
    disk_bytes_written: int = 0
    disk_bytes_read: int = 0
    disk_blocks_dropped: int = 0
    """Blocks that the disk gave up for others of a higher value."""
    remote_down: int = 0
    """1 while the remote tier does not work; over several engines, the number of engines that find so."""
    remote_bytes_written: int = 0
    remote_bytes_read: int = 0
    blocks_corrupt: int = 0
    """Blocks of the disk or the remote tier whose bytes were not those written; they are computed again."""
    tier_failures: int = 0
    """Blocks that could not be written to these tiers or read from them."""
    blocks_cheaper_computed: int = 0
    """Blocks that these tiers had, and that were computed again because that is faster."""
    fetches_given_up: int = 0
    """Requests that stopped waiting for their blocks and computed them."""
    chunk_bytes_in: int = 0
    """Bytes of KV blocks that have come from other engines."""
    chunk_bytes_out: int = 0
    """Bytes of KV blocks that were sent to other engines."""
    chunk_rate: float = 0.0
    """Bytes per second of recent moves into this engine; 0 before the first."""
    chunk_failures: int = 0
    """Moves into this engine that ended early because of an error."""
    contracts_accepted: int = 0
    """Requests whose contract was accepted."""
    contracts_refused: int = 0
    """Requests that were refused because their contract could not be kept."""
    contracts_kept: int = 0
    """Ended requests whose contract was kept."""
    contracts_broken_ttft: int = 0
    """Ended requests with an accepted contract whose first token came too late."""
    contracts_broken_tbt: int = 0
    """Such requests whose first token came in time, and that had to wait too long for a later one."""
    contracts_broken_complete: int = 0
    """Such requests that kept both, and whose last token came too late."""
    warming: int = 0
    """1 as long as the engine has graphs to capture in its next pauses, or memory of the host tier to pin."""
    sleep_level: int = 0
    """Level at which the engine sleeps, falls asleep or wakes up. It takes no requests meanwhile. 0: it is awake."""
