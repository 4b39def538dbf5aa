"""HybridTiers: the tiers below the host for hybrid models, with KV blocks and snapshots of recurrent states."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import NamedTuple

from holdfast.core.cost import CostModel
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.digests import usable_blocks
from holdfast.lm.memory.prices import Prices
from holdfast.lm.memory.state_pool import StatePool
from holdfast.lm.parts.tiers.joined_states import JoinedStates, StateAccount
from holdfast.lm.parts.tiers.lower_tiers import Fetch, LowerTiers, longest_wait
from holdfast.lm.parts.tiers.remote_states import RemoteStates
from holdfast.lm.parts.tiers.state_tiers import StateTiers
from holdfast.lm.tiers import LowerShape, TierDone, TierJob

SAMPLES = 16
"""Number of places in a range of positions at which the cost of computing them is looked up."""

Cost = Callable[[int, int], float]
"""Seconds to compute a number of tokens again, up to a position (`CostModel.recompute`)."""


class Wanted(NamedTuple):
    """A sequence's start in the tiers below the host, and the fetch that brings it."""

    fetch: Fetch
    blocks: Mapping[int, bytes]
    """Digests of the KV blocks that the memory lacks, by place."""
    state: bytes
    """Digest of the recurrent state; empty if the memory has it."""


class HybridTiers:
    """Composes the account of blocks and that of recurrent states (`planner.BelowHost`).

    A recurrent state serves only with all KV blocks before it, and they only with the state. So either all that a
    sequence lacks of a start is brought, or nothing. A sequence first gets a slot of the host for its state, then room
    for its blocks. So those that hold room for blocks never wait for a slot.
    """

    def __init__(self, pool: BlockPool, blocks: LowerTiers, states: StateAccount, cost: Cost | None) -> None:
        """`cost` None: reading is always cheaper than computing."""
        self._pool, self._blocks, self._states, self._cost = pool, blocks, states, cost
        self.disk = blocks.disk
        self._queue: deque[Wanted] = deque()
        """Starts whose states wait for a slot of the host."""
        self._refused = 0
        """Number of blocks so far that were computed although a lower tier had them."""

    @property
    def can_flush(self) -> bool:
        """Whether idle blocks or states of the device could be copied to the host now, to be written."""
        return self._blocks.can_flush or self._states.can_flush

    @property
    def has_news(self) -> bool:
        """Whether `jobs` may have new ones, because the host has got blocks or states."""
        return self._blocks.has_news or self._states.has_news

    @property
    def wants_step(self) -> bool:
        """Whether a plan without segments is to copy states."""
        return self._states.wants_step

    @property
    def unwritten(self) -> int:
        """Number of blocks and states of the host that are being written, or still to be written."""
        return self._blocks.unwritten + self._states.unwritten

    @property
    def unflushed(self) -> bool:
        """Whether the device has idle blocks or states that the host lacks."""
        return self._blocks.unflushed or self._states.unflushed

    def flush(self, idle: bool) -> None:
        """Let the next plan copy idle blocks and states down if there is nothing else to do (`idle`)."""
        self._blocks.flush(idle)
        self._states.flush(idle)

    def renew(self) -> None:
        """Begin to note in the files when blocks were last used. A state is followed by one with its own time."""
        self._blocks.renew()

    def tiers(self, digests: Iterable[bytes]) -> str:
        """The lower tiers that have the block of each digest: letters of `block_map.TIERS_BELOW`, or - for none."""
        return self._blocks.tiers(digests)

    def begin_swap_in(self, step: int) -> None:
        """Note that plan `step` copies blocks of the host to the device."""
        self._blocks.begin_swap_in(step)

    def finish_swap_in(self, step: int) -> None:
        """Note that the copies to the device have ended, of plan `step` and of all plans before it."""
        self._blocks.finish_swap_in(step)

    def fetch(self, missing: Mapping[int, bytes], now: float) -> Fetch | None:
        """Begin to bring back the start that a sequence lacks (`HybridCache.lacking`). None if nothing is brought.

        Nothing is if computing it takes less time, or if half of the host has no room for its blocks.
        """
        saved = -min(missing)
        blocks, state = {at: digest for at, digest in missing.items() if at >= 0}, missing[-saved]
        stop = self._states.length(state) or (max(blocks, default=0) + 1) * self._pool.block_size
        seconds = self._computing(max(0, stop - saved), stop)
        if not self._is_worth(blocks, state, seconds):
            self._refused += len(blocks)
            return None
        fetch = Fetch(now, now + longest_wait(seconds), queued=1)
        self._queue.append(Wanted(fetch, blocks, state))
        self._begin(now)
        return None if fetch.complete else fetch

    def question(self, digests: Sequence[bytes], stop: int, now: float) -> Fetch | None:
        """Ask the remote tier which states come after these blocks, and which of them it has.

        None without a remote tier that works, or if computing the tokens takes less time than reading a state.
        """
        seconds = self._computing(max(0, stop - len(digests) * self._pool.block_size), stop)
        asked = [each for each in self._states.remote if not self._blocks.remote_down]
        if not asked or (seconds is not None and asked[0].link.seconds(asked[0].size) >= seconds):
            return None
        fetch = Fetch(now, now + longest_wait(seconds), asks=True)
        self._blocks.ask(fetch, digests)
        first = usable_blocks(stop, self._pool.block_size) - len(digests)
        for each in asked:
            each.ask(fetch, digests, first)
        return fetch

    def _is_worth(self, blocks: Mapping[int, bytes], state: bytes, seconds: float | None) -> bool:
        """Whether the host has room for these blocks, and they are read with the state before they are computed."""
        host, link = self._pool.host, self._states.link_of(state)
        if host is None or len(blocks) > host.num_blocks // 2:
            return False
        size = len(blocks) * self._blocks.prices.block_bytes + (self._states.size if state else 0)
        if seconds is None or link.seconds(size + self._states.reading) < seconds:
            return True
        link.refuse()
        return False

    def _computing(self, start: int, stop: int) -> float | None:
        """Seconds to compute positions [start, stop); None if the cost is unknown."""
        if self._cost is None:
            return None
        step = max(1, -(-(stop - start) // SAMPLES))
        return sum(self._cost(min(step, stop - at), min(at + step, stop)) for at in range(start, stop, step))

    def _begin(self, now: float) -> None:
        """Begin the reads for which the host has a slot and is large enough by now, in order."""
        while self._queue:
            fetch, blocks, state = self._queue[0]
            if not fetch.over and not (self._is_large(len(blocks)) and self._states.fetch(state, fetch, now)):
                return
            self._queue.popleft()
            fetch.queued -= 1
            if not fetch.over:
                self._blocks.extend(fetch, blocks, now)

    def _is_large(self, count: int) -> bool:
        """Whether the host is so large by now that `count` blocks are at most half of it. It grows after a start."""
        return self._pool.host is not None and count <= self._pool.host.ready // 2

    def end_wait(self, fetch: Fetch) -> None:
        """Note that a sequence does not wait for the rest of a fetch."""
        self._blocks.end_wait(fetch)

    def close(self, fetch: Fetch) -> None:
        """Note that the sequence of a fetch has started or ended."""
        self._blocks.close(fetch)
        self._states.close(fetch)

    def jobs(self, now: float) -> list[TierJob]:
        """The jobs to begin now."""
        self._begin(now)
        return [*self._blocks.jobs(now), *self._states.jobs(now)]

    def done(self, ended: Iterable[TierDone], now: float) -> None:
        """Take note of jobs that have ended. Jobs of states have numbers below zero."""
        ended = [*ended]
        self._states.done([each for each in ended if each.number < 0], now)
        self._blocks.done([each for each in ended if each.number >= 0], now)

    def stats(self) -> Mapping[str, float]:
        """Counters and present sizes of these tiers: fields of `SchedulerStats`. Bytes count blocks and states."""
        found = dict[str, float](self._blocks.stats())
        for name, value in self._states.stats().items():
            found[name] = found.get(name, 0) + value
        found["blocks_cheaper_computed"] += self._refused
        return found


def hybrid_tiers(
    pool: BlockPool, states: StatePool, lower: LowerShape, snapshots: LowerShape, cost: CostModel | None, now: float
) -> HybridTiers:
    """The account of tiers with blocks (`lower`) and recurrent states (`snapshots`). `now` is when they were listed.

    Raises ValueError as `LowerTiers` and `StateTiers` do.
    """
    # Blocks serve only together, so none of them is left out for its price.
    blocks = LowerTiers(pool, lower, Prices(None, block_size=pool.block_size, block_bytes=lower.block_bytes), now)
    recompute = None if cost is None else cost.recompute
    numbers, kept, remote = count(-1, -1), list[StateTiers](), list[RemoteStates]()
    if lower.disk_blocks or not snapshots.remote:
        kept = [StateTiers(states, pool.block_size, snapshots, now, numbers)]
    if snapshots.remote:
        remote = [RemoteStates(states, blocks, pool.block_size, numbers)]
    account = JoinedStates(states, kept, remote) if remote else kept[0]
    return HybridTiers(pool, blocks, account, recompute)
