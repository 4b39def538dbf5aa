"""Promises: the accepted contracts, what is left to do for each, and whether each was kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from holdfast.core.contract import TERMS, Contract, Term
from holdfast.lm.memory.protocol import AnyMemory
from holdfast.lm.parts.contracts.forecast import Prompt
from holdfast.lm.parts.contracts.lengths import CERTAIN, Survival
from holdfast.lm.scheduler.entries import Entry

RESERVE = 0.05
"""Share of each promised time that is left over: tokens take time to reach their stream."""
MOST_RESERVE = 0.4
"""Most seconds that are left over. A token's way does not take longer because its answer is long."""
JOINING = 2
"""Most steps in flight in which a sequence whose copies from the host are complete is not planned."""


@dataclass(slots=True)
class Promise:
    """An accepted contract, and the deliveries so far. Times are in seconds on the scheduler's clock."""

    contract: Contract
    arrival: float
    tokens: int
    """Most tokens that its answer is expected to have."""
    blocks: int
    """Number of blocks that its sequence is expected to need in all."""
    most: int = 0
    """Most tokens that its answer may have."""
    answer_start: int = 0
    """Position of the first token of its answer."""
    survival: Survival = CERTAIN
    """How long answers like its own are."""
    outgrown: bool = False
    """Whether its answer has become longer than expected. No later contract is refused for its completion then."""
    first: float = inf
    """Time of the first token; infinite: none has come."""
    last: float = 0.0
    """Time of the latest token."""
    longest_gap: float = 0.0
    """Longest time between two deliveries."""
    due: float = field(init=False)
    """Time by which its first token must come, less the reserve."""
    tbt: float = field(init=False)
    """Longest time between two tokens in seconds, less the reserve."""
    complete_by: float = field(init=False)
    """Time by which its last token must come, less the reserve."""

    def __post_init__(self) -> None:
        contract = self.contract
        self.due = self.arrival + without_reserve(contract.ttft)
        self.tbt = without_reserve(contract.tbt)
        self.complete_by = self.arrival + without_reserve(contract.complete)

    def learn(self, survival: Survival) -> None:
        """Note how long answers like its own are by now."""
        self.survival = survival

    def outgrow(self, tokens: int, blocks: int) -> None:
        """Expect a longer answer, of up to `tokens` tokens, with which the sequence needs `blocks` blocks."""
        self.tokens, self.blocks, self.outgrown = tokens, blocks, True

    def tokens_left(self, entry: Entry) -> int:
        """Number of steps that the sequence still takes at the most, if its prompt takes one."""
        return max(1, self.tokens - answered(entry))

    def delivered(self, now: float) -> None:
        """Note that tokens were given out at `now`."""
        if self.first == inf:
            self.first = now
        else:
            self.longest_gap = max(self.longest_gap, now - self.last)
        self.last = now

    def broken_by(self, now: float) -> Term | None:
        """The first term that the deliveries up to `now` have broken; None: they have kept them all."""
        first, last = (now, now) if self.first == inf else (self.first, self.last)
        taken = {"ttft": first - self.arrival, "tbt": self.longest_gap, "complete": last - self.arrival}
        for term in TERMS:
            promised: float | None = getattr(self.contract, term)
            if promised is not None and taken[term] > promised:
                return term
        return None


@dataclass(slots=True)
class Outcomes:
    """Numbers of contracts by what became of them."""

    accepted: int = 0
    kept: int = 0
    refused: int = 0
    broken: dict[Term, int] = field(default_factory=lambda: dict.fromkeys(TERMS, 0))
    """Number of broken contracts by the first broken term."""

    def stats(self) -> dict[str, int]:
        """The fields of SchedulerStats."""
        broken = {f"contracts_broken_{term}": count for term, count in self.broken.items()}
        return {
            "contracts_accepted": self.accepted, "contracts_kept": self.kept, "contracts_refused": self.refused
        } | broken  # fmt: skip


class Promises:
    """The accepted contracts whose sequences have not ended."""

    def __init__(self) -> None:
        self.outcomes = Outcomes()
        self.bound = inf
        """Most seconds that a step may take; infinite: no contract is open."""
        self.is_loose = False
        """Whether a contract has ended, so that a larger bound may do."""
        self.stamp = 0
        """Changes with the sequences that decode, with what is left to do for them, and with their lengths."""
        self._open: dict[Entry, Promise] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[tuple[Entry, Promise]]:
        return iter(self._open.items())

    def get(self, entry: Entry) -> Promise | None:
        """The promise to a sequence, if it has one."""
        return self._open.get(entry)

    def add(self, entry: Entry, promise: Promise, bound: float) -> None:
        """Accept a contract. From now on steps take at most `bound` seconds."""
        self._open[entry] = promise
        self.outcomes.accepted += 1
        self.bound = bound

    def given(self, entries: Iterable[Entry], now: float) -> list[tuple[Entry, Promise]]:
        """Note that these sequences were given tokens at `now`. Returns those with longer answers than expected."""
        opened = self._open
        promised = [(entry, opened[entry]) for entry in entries if entry in opened] if opened else []
        for _, promise in promised:
            promise.delivered(now)
        return [(entry, promise) for entry, promise in promised if answered(entry) > promise.tokens]

    def changed(self) -> None:
        """Note that sequences have gone on, or that their lengths are forecast anew."""
        self.stamp += 1

    def loosen(self, bound: float | None) -> None:
        """Let steps take up to `bound` seconds, if that is more; None: no bound is known that would do."""
        self.is_loose = False
        if bound is not None:
            self.bound = max(self.bound, bound)

    def ended(self, entry: Entry, now: float) -> None:
        """Count the contract of a sequence that has ended, at `now`.

        A client that leaves while its first token is not due yet has neither.
        """
        promise = self._open.pop(entry, None)
        if promise is None:
            return
        self.is_loose = True
        self.changed()
        if not self._open:
            self.bound, self.is_loose = inf, False
        if term := promise.broken_by(now):
            # An answer that began on another engine has its first token: the one that was due here is the next one.
            resumed = term == "ttft" and entry.sequence.request.answered > 0
            self.outcomes.broken["tbt" if resumed else term] += 1
        elif promise.first < inf:
            self.outcomes.kept += 1

    def latest(self, entries: Iterable[Entry]) -> float:
        """The latest time at which the first tokens among the next ones of these sequences may come."""
        first = [self._open[entry] for entry in entries if entry in self._open]
        return min((each.due for each in first if each.first == inf), default=inf)

    def outstanding(self, pool: AnyMemory) -> int:
        """Number of blocks that the accepted sequences have still to be given."""
        return sum(max(0, promise.blocks - len(entry.cache.blocks)) for entry, promise in self)


class Departures:
    """The copies to the host that make room on the device for waiting sequences, in the order in which they start."""

    def __init__(self, pool: AnyMemory, decoding: int, in_flight: int) -> None:
        """The room is that of `pool`, less a block for each of `decoding` sequences, which may need one first.

        A block can be used once the plan that copies it has ended, which is `in_flight` steps later.
        """
        self._pool, self._in_flight = pool, in_flight
        self._room = pool.allocatable - max(0, decoding)

    def before(self, entry: Entry) -> tuple[int, float]:
        """Steps in which a sequence waits for its blocks, and the seconds of the copies in them.

        The sequence counts as started, so that the next one finds less room.
        """
        pool = self._pool
        if entry.cache.capacity or pool.host is None:
            return 0, 0.0
        blocks = pool.blocks_for(entry.sequence.length)
        self._room -= blocks
        short = min(-self._room, pool.num_blocks)
        if short <= 0:
            return 0, 0.0
        return self._in_flight + -(-min(short, blocks) // pool.max_copies), pool.copy_seconds(short) or 0.0


def prompt_of(entry: Entry, promise: Promise, pool: AnyMemory) -> Prompt:
    """A sequence that lacks a part of its prompt, as a forecast sees it."""
    so_far, need = answered(entry), needed(entry, pool)
    return Prompt(
        need.positions,
        entry.sequence.length,
        promise.tokens_left(entry),
        promise.due,
        inf if promise.outgrown else promise.complete_by,
        copying=need.seconds,
        pauses=entry.cache.most_cuts(entry.sequence.length),
        joining=JOINING if need.copies else 0,
        has_row=entry.cache.capacity > 0,
        survival=promise.survival,
        so_far=so_far,
        allowed=promise.most - so_far,
    )


def answered(entry: Entry) -> int:
    """Number of tokens of a sequence's answer that are known or planned."""
    return entry.sequence.length - entry.sequence.request.answer_start


class Need(NamedTuple):
    """The work that a sequence needs before its first token."""

    positions: int
    """Number of positions that no plan computes yet."""
    seconds: float = 0.0
    """Predicted seconds in which its state is copied from the host."""
    copies: bool = False
    """Whether any state is copied."""


def needed(entry: Entry, pool: AnyMemory) -> Need:
    """The work that a sequence needs before its first token. Its state on the host is copied if the memory would do so.

    Until the rate of copies is known, such state counts as computed.
    """
    sequence, cache = entry.sequence, entry.cache
    if cache.capacity:
        seconds = pool.copy_seconds(len(pool.copies.swapping_in)) if entry.swap_in_step >= 0 else 0.0
        return Need(unplanned(entry), seconds or 0.0, entry.swap_in_step >= 0)
    found = cache.match(sequence.tokens if entry.uses_kept else sequence.tokens[:1])
    lacking = sequence.length - found.positions(pool.block_size)
    on_host = len(found.host)
    if not on_host:
        return Need(lacking)
    seconds = pool.copy_seconds(on_host)
    if seconds is None:
        return Need(min(sequence.length, lacking + on_host * pool.block_size), copies=True)
    return Need(lacking, seconds, copies=True)


def unplanned(entry: Entry) -> int:
    """Number of positions of a sequence with blocks that no plan computes yet."""
    missing = entry.cache.missing(entry.sequence.length)
    beyond = entry.sequence.length - missing[-1][1] if missing else 0  # a state is kept where the last range ends
    return beyond + sum(stop - start for start, stop in missing)


def without_reserve(seconds: float | None) -> float:
    """A promised time, or infinity if there is none, less the reserve."""
    return inf if seconds is None else seconds - min(RESERVE * seconds, MOST_RESERVE)
