"""ContractAdmission: whether a contract can be kept next to those that are accepted, and when it could be otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from holdfast.core.contract import MAX_CONTRACT, Contract, Refusal
from holdfast.lm.memory.protocol import AnyMemory
from holdfast.lm.parts.contracts.forecast import Forecast, Room, Stream, allowed_pace
from holdfast.lm.parts.contracts.promises import Promise, Promises, stream_of
from holdfast.lm.scheduler.entries import Entry

LEAST_RATE = 0.25
"""Least rate at which prompts are computed while a pace is kept, as a share of the rate without any pace.

A contract with a faster pace is refused, because all others would pay for it.
"""
TRIES = 4
"""Most bounds that are tried for one contract."""
SLACK = 1 - 1e-9
"""Keeps a bound below the times that it must not exceed, whatever is lost to rounding."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A contract that can be kept."""

    bound: float
    """Most seconds that a step may take from now on."""


@dataclass(frozen=True, slots=True)
class Queue:
    """The accepted sequences as a forecast sees them."""

    pending: Sequence[tuple[Entry, Stream]]
    """Those that lack a part of their prompts, by rank."""
    decoding: Sequence[Stream]

    @property
    def prompts(self) -> list[Stream]:
        """The streams that lack a part of their prompts."""
        return [stream for _, stream in self.pending]

    @property
    def everyone(self) -> list[Stream]:
        """All streams."""
        return [*self.prompts, *self.decoding]


class ContractAdmission:
    """Decides on contracts at their arrival, and on the bound of steps once one has ended.

    A contract is accepted if rows and blocks are left for the whole of its answer, and if a forecast says that every
    accepted sequence, the new one among them, gets its tokens in time.
    """

    def __init__(
        self, forecast: Forecast, promises: Promises, *, max_sequences: int, target: float = inf
    ) -> None:
        """At most `max_sequences` run; steps with streams take at most `target` seconds."""
        self._forecast, self._promises = forecast, promises
        self._max_sequences, self._target = max_sequences, target

    def decide(
        self, entry: Entry, promise: Promise, pool: AnyMemory, *, headroom: int, now: float, start: float, factor: float
    ) -> Accepted | Refusal:
        """Accept a contract, or say why not.

        The next step begins at `start`, and takes at most `factor` times its price.
        """
        if refusal := self._lacks_place(promise, pool, headroom, now, start):
            return refusal
        queue = self.queue(pool, (entry, promise))
        found = self.find_bound(queue, start=start, factor=factor)
        if isinstance(found, float):
            return Accepted(found)
        return self._late(entry, promise, pool, queue, start=start, factor=factor)

    def queue(self, pool: AnyMemory, *more: tuple[Entry, Promise]) -> Queue:
        """The accepted sequences, and `more`."""
        streams = [(entry, stream_of(entry, promise, pool)) for entry, promise in (*self._promises, *more)]
        pending = sorted((pair for pair in streams if pair[1].missing), key=lambda pair: pair[0].rank)
        return Queue(pending, [stream for _, stream in streams if not stream.missing])

    def find_bound(self, queue: Queue, *, start: float, factor: float) -> float | None:
        """The largest bound of steps with which all contracts of a queue are kept; None if there is none."""
        bound = self._widest(queue, factor)
        tried = [bound]
        if self._promises.bound < bound:
            tried.append(self._promises.bound)
        for candidate in tried:
            if (found := self._narrowed(queue, candidate, start, factor)) is not None:
                return found
        return None

    def _widest(self, queue: Queue, factor: float) -> float:
        """The largest bound that paces and the largest step allow, in seconds."""
        paces = [stream.tbt for stream in queue.everyone]
        return min(self._target, self._full_step(queue, factor), *paces) * SLACK

    def _full_step(self, queue: Queue, factor: float) -> float:
        """Predicted seconds of the largest step, with as many decodes as there may be soon."""
        prices = self._forecast.prices
        rows, attention = self._forecast.load(queue.prompts, queue.decoding, (), 0, 1)
        most = max(1, prices.ceiling - rows)
        context = max((stream.context for stream in queue.prompts), default=most)
        return factor * (prices.linear(rows, most) + attention + prices.chunk(max(0, context - most), max(context, most)))

    def _narrowed(self, queue: Queue, bound: float, start: float, factor: float) -> float | None:
        """This bound, or a smaller one with which every sequence completes in time; None if contracts are broken."""
        for _ in range(TRIES):
            outlook = self._forecast.follow(queue.prompts, queue.decoding, start=start, bound=bound, factor=factor)
            if not outlook.decodes or len(outlook.firsts) < len(queue.pending):
                return None
            firsts = list(zip(queue.prompts, outlook.firsts, strict=True))
            if any(first > min(stream.due, stream.complete) for stream, first in firsts):
                return None
            pace = allowed_pace(firsts, queue.decoding, start)
            if pace >= bound:
                return bound if self._is_efficient(queue, bound, factor) else None
            bound = pace * SLACK
            if not bound > 0:
                return None
        return None

    def _is_efficient(self, queue: Queue, bound: float, factor: float) -> bool:
        """Whether steps within the bound compute prompts at LEAST_RATE of the rate of the largest steps."""
        full = self._full_step(queue, factor)
        if bound >= full * SLACK:
            return True
        prices = self._forecast.prices
        rows, attention = self._forecast.load(queue.prompts, queue.decoding, (), 0, 1)
        room = Room(prices, rows, attention)
        room.take(0, prices.ceiling, bound / factor)
        return room.tokens / bound >= LEAST_RATE * (prices.ceiling - rows) / full

    def _lacks_place(
        self, promise: Promise, pool: AnyMemory, headroom: int, now: float, start: float
    ) -> Refusal | None:
        """A refusal for want of rows or blocks; None if there are enough."""
        usable = pool.num_blocks - pool.lent - headroom
        held = sum(other.blocks for _, other in self._promises)
        if promise.blocks > usable:
            needed = f"it may need {promise.blocks} blocks of the KV cache, and contracts can have {usable}"
            return Refusal(f"the contract can never be kept: {needed}", inf)
        rows = len(self._promises) + 1 - self._max_sequences
        blocks = held + promise.blocks - usable
        if rows <= 0 and blocks <= 0:
            return None
        wait = self._until_free(rows, blocks, start) - now
        what = "all rows are" if rows > 0 else "the KV cache is"
        return Refusal(f"the contract cannot be kept now: {what} promised to accepted requests", wait)

    def _until_free(self, rows: int, blocks: int, start: float) -> float:
        """Time by which accepted sequences have given up this many rows and blocks."""
        step = self._promises.bound
        ends = sorted((promise.tokens_left(entry) * step, promise.blocks) for entry, promise in self._promises)
        for seconds, freed in ends:
            rows, blocks = rows - 1, blocks - freed
            if rows <= 0 and blocks <= 0:
                return start + seconds
        return inf

    def _late(
        self, entry: Entry, promise: Promise, pool: AnyMemory, queue: Queue, *, start: float, factor: float
    ) -> Refusal:
        """The refusal of a contract for want of time."""
        alone = Queue([pair for pair in queue.pending if pair[0] is entry], ())
        # In an idle engine, a request that arrives now starts now.
        if self._narrowed(alone, self._widest(alone, factor), promise.arrival, factor) is None:
            predicted = self._predict(alone, entry, promise, promise.arrival, factor)
            return Refusal("the contract can never be kept: even an idle engine is slower", inf, predicted)
        predicted = self._predict(queue, entry, promise, start, factor)
        if predicted.ttft is not None and promise.contract.ttft is not None and predicted.ttft > promise.contract.ttft:
            reason = "the accepted prompts before it take too long"
            wait = predicted.ttft - promise.time_of("ttft")
        else:
            reason = "accepted requests would be too slow beside it"
            lefts = [other.tokens_left(each) for each, other in self._promises]
            wait = min(lefts, default=1) * self._promises.bound
        return Refusal(f"the contract cannot be kept now: {reason}", max(0.001, wait), predicted)

    def _predict(self, queue: Queue, entry: Entry, promise: Promise, start: float, factor: float) -> Contract:
        """The times that a request could be promised behind the accepted ones."""
        waiting = [stream._replace(due=inf) for each, stream in queue.pending if each is not entry]
        own = next(stream for each, stream in queue.pending if each is entry)._replace(due=inf)
        load = Queue([*((entry, stream) for stream in waiting), (entry, own)], queue.decoding)
        others = [stream.tbt for stream in (*waiting, *queue.decoding)]
        bound = min(self._target, self._full_step(load, factor), *others)
        outlook = self._forecast.follow(load.prompts, load.decoding, start=start, bound=bound, factor=factor)
        if len(outlook.firsts) < len(load.pending):
            return Contract()
        ttft = outlook.firsts[-1] - promise.arrival
        return promised(ttft, bound, ttft + max(0, promise.tokens - 1) * bound)


def promised(ttft: float, tbt: float, complete: float) -> Contract:
    """These times as a contract; those that no contract can have are left out."""
    times = [time if 0 < time <= MAX_CONTRACT else None for time in (ttft, tbt, complete)]
    return Contract(*times)
