"""TierPart: the planner's side of the tiers below the host, with the sequences that wait for blocks from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol, cast

from holdfast.lm.memory.host_pool import HostPool
from holdfast.lm.memory.prices import Prices
from holdfast.lm.memory.row_pool import RowPool
from holdfast.lm.parts.planning import Planning
from holdfast.lm.parts.tiers.hybrid_tiers import hybrid_tiers
from holdfast.lm.parts.tiers.lower_tiers import Fetch, LowerTiers
from holdfast.lm.parts.tiers.row_tiers import RowTiers
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.hybrid import HybridKind
from holdfast.lm.scheduler.part import Part, PartQueues
from holdfast.lm.tiers import TierDone, TierJob, TierName
from holdfast.lm.types import StepPlan, StepResult

NOTHING: Mapping[TierName, int] = {"disk": 0, "remote": 0}


class BelowHost(Protocol):
    """The account of the tiers below the host.

    `LowerTiers` for blocks, `RowTiers` for states of rows, and `HybridTiers` for blocks and recurrent states.
    """

    disk: HostPool | None
    """The blocks of the disk; None if there are none."""

    @property
    def can_flush(self) -> bool:
        """Whether idle state of the device could be copied to the host now, and from there to these tiers."""
        ...

    @property
    def has_news(self) -> bool:
        """Whether `jobs` may have new ones, because the host has got state."""
        ...

    @property
    def wants_step(self) -> bool:
        """Whether the result of a plan is needed that has no segments."""
        ...

    @property
    def unwritten(self) -> int:
        """Number of blocks or states of the host that are being written to these tiers, or still to be written."""
        ...

    @property
    def unflushed(self) -> bool:
        """Whether the device has idle state that the host lacks."""
        ...

    def flush(self, idle: bool) -> None:
        """Let the next plan copy idle state down if there is nothing else to do (`idle`) and these tiers take it."""
        ...

    def renew(self) -> None:
        """Begin to note in the disk's files when state was last used, so that a restart knows its order."""
        ...

    def fetch(self, missing: Mapping[int, bytes], now: float) -> Fetch | None:
        """Begin to bring back what a sequence lacks (`SequenceState.lacking`). None if there is nothing to bring."""
        ...

    def question(self, digests: Sequence[bytes], stop: int, now: float) -> Fetch | None:
        """Begin to ask what other engines have left after these blocks of a sequence (`SequenceState.candidates`).

        `stop` is the number of the sequence's tokens. None: there is nothing to ask.
        """
        ...

    def end_wait(self, fetch: Fetch) -> None:
        """Note that a sequence does not wait for the rest of a fetch."""
        ...

    def close(self, fetch: Fetch) -> None:
        """Note that the sequence of a fetch has started or ended."""
        ...

    def begin_swap_in(self, step: int) -> None:
        """Note that plan `step` copies blocks of the host to the device."""
        ...

    def finish_swap_in(self, step: int) -> None:
        """Note that the copies to the device have ended, of plan `step` and of all plans before it."""
        ...

    def jobs(self, now: float) -> list[TierJob]:
        """The jobs to begin now."""
        ...

    def done(self, ended: Iterable[TierDone], now: float) -> None:
        """Take note of jobs that have ended."""
        ...

    def tiers(self, digests: Iterable[bytes]) -> str:
        """The lower tiers that have the block of each digest: letters of `block_map.TIERS_BELOW`, or - for none."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Fields of `SchedulerStats`."""
        ...


class TierPart(Part):
    """Sequences whose kept blocks come from the disk or the remote tier wait for them before they start.

    Where another engine may have left state that this one does not know of, a sequence first waits for an answer to
    that question. It then waits until all blocks that it asked for have come or failed, and no longer than its
    deadline. After that it waits like any other, and finds its blocks on the host. They are held for it until it
    starts.

    Others move the bytes: `jobs` says which jobs are to begin, and `done` takes their ends.
    """

    name = "tiers"
    waits_for = "fetching"

    def __init__(self, lower: BelowHost) -> None:
        self.lower = lower
        """The contents of these tiers, and the blocks on their way."""
        self._queues: PartQueues
        self._waiting: dict[Entry, Fetch] = {}
        """The sequences that wait for their blocks. This part holds them."""
        self._arrived: dict[Entry, Fetch] = {}
        """The sequences whose wait is over and that have not started."""
        self._asked: set[Entry] = set()
        """The sequences whose blocks were asked for since they last began to wait."""
        self._questioned: set[Entry] = set()
        """The sequences for which a question was considered since they last began to wait."""
        self._alive = 0
        """Number of sequences that have not ended."""
        self._hits: dict[TierName, int] = {"disk": 0, "remote": 0}
        """Number of tokens that came from each tier for a sequence that had not started before."""

    def jobs(self, now: float) -> Sequence[TierJob]:
        """The jobs that are to begin now."""
        return self.lower.jobs(now)

    def done(self, ended: Iterable[TierDone], now: float) -> None:
        """Take note of jobs that have ended."""
        self.lower.done(ended, now)

    @property
    def awaited(self) -> bool:
        """Whether a sequence waits for its blocks."""
        return bool(self._waiting)

    @property
    def has_news(self) -> bool:
        """Whether `jobs` may have new ones, although no request needs them."""
        return self.lower.has_news

    def attach(self, queues: PartQueues) -> None:
        self._queues = queues

    def added(self, entry: Entry) -> None:
        self._alive += 1

    def starting(self, entry: Entry, now: float) -> bool:
        """Ask these tiers for the blocks of a waiting sequence, once. Returns whether it has to wait for them."""
        sequence = entry.sequence
        if entry in self._asked or sequence.in_flight or not entry.uses_kept:
            return False
        fetch = self._question(entry, now)
        if fetch is None:
            self._asked.add(entry)
            missing = entry.cache.lacking(sequence.tokens)
            if missing:  # what the host has already must not leave it for what is read
                entry.cache.touch(sequence.tokens, now)
            fetch = self.lower.fetch(missing, now) if missing else None
        if fetch is None:
            return False
        self._waiting[entry] = fetch
        return True

    def _question(self, entry: Entry, now: float) -> Fetch | None:
        """Ask once what other engines have left for a sequence; None if there is nothing to ask."""
        if entry in self._questioned:
            return None
        self._questioned.add(entry)
        tokens = entry.sequence.tokens
        digests = entry.cache.candidates(tokens)
        return self.lower.question(digests, len(tokens), now) if digests else None

    def started(self, entry: Entry) -> None:
        """Note which of the blocks that the sequence found on the host have come from these tiers for it."""
        self._asked.discard(entry)
        self._questioned.discard(entry)
        came, size, sequence = self._settle(entry), self._queues.pool.block_size, entry.sequence
        if sequence.preemptions or came is NOTHING:
            return
        host, _, _ = sequence.cached_by_tier
        # Blocks without their recurrent state serve nothing, and a block may be full only in part.
        disk = min(came["disk"] * size, sequence.cached_tokens)
        remote = min(came["remote"] * size, sequence.cached_tokens - disk)
        self._hits["disk"] += disk
        self._hits["remote"] += remote
        sequence.cached_by_tier = max(0, host - disk - remote), disk, remote

    def ended(self, entry: Entry) -> None:
        self._alive -= 1
        self._asked.discard(entry)
        self._questioned.discard(entry)
        self._settle(entry)

    def advance(self, now: float) -> None:
        """Let sequences wait for a row once their wait for blocks is over, and copy idle state down in a pause."""
        if self._waiting:
            over = [entry for entry, fetch in self._waiting.items() if fetch.complete or now >= fetch.deadline]
            for entry in over:
                fetch = self._waiting.pop(entry)
                if not fetch.complete:
                    self.lower.end_wait(fetch)
                if fetch.asks:
                    self.lower.close(fetch)
                else:
                    self._arrived[entry] = fetch
            for entry in over:
                self._queues.release(entry, self)
        self.lower.flush(not self._alive)

    def planned(self, plan: StepPlan) -> None:
        if plan.copies.swap_in:
            self.lower.begin_swap_in(plan.step)

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> Iterable[Entry]:
        self.lower.finish_swap_in(result.copied.swapped_in)
        return ()

    @property
    def wants_step(self) -> bool:
        return self.lower.wants_step

    @property
    def has_work(self) -> bool:
        """Whether the only work left is to copy idle state down, and these tiers take it."""
        return not self._alive and (self.lower.wants_step or self.lower.can_flush)

    def stats(self) -> Mapping[str, float]:
        return {
            "prefix_hits_on_disk": self._hits["disk"],
            "prefix_hits_on_remote": self._hits["remote"],
            **self.lower.stats(),
        }

    def _settle(self, entry: Entry) -> Mapping[TierName, int]:
        """Let go of the blocks of a sequence that starts or ends. Returns the number that came for it, by tier."""
        fetch = self._waiting.pop(entry, None) or self._arrived.pop(entry, None)
        if fetch is None:
            return NOTHING
        self.lower.close(fetch)
        return fetch.came


def make_parts(planning: Planning) -> tuple[TierPart, ...]:
    """The part of a scheduler with tiers below its host tier. Its memory has one pool of blocks, or is of rows."""
    lower, cost, size = planning.shape.lower, planning.cost, planning.config.block_size
    if lower is None:
        return ()
    if planning.on_rows:
        rows = cast(RowPool, planning.kind.memory)
        return (TierPart(RowTiers(rows, lower, None if cost is None else cost.recompute, planning.now)),)
    (pool,) = planning.kind.block_pools
    if lower.snapshots is not None:
        states = cast(HybridKind, planning.kind).states
        return (TierPart(hybrid_tiers(pool, states, lower, lower.snapshots, cost, planning.now)),)
    again = None if cost is None else partial(cost.recompute, size)
    prices = Prices(again, block_size=size, block_bytes=lower.block_bytes)
    return (TierPart(LowerTiers(pool, lower, prices, planning.now)),)
