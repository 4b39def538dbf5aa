"""ContractOrder: accepted contracts go first, by the time at which they are due; all others as in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from math import inf

from holdfast.core.contract import MAX_CONTRACT
from holdfast.core.types import Request
from holdfast.lm.scheduler.entries import Entry, Rank, RankedQueue, WaitingQueue
from holdfast.lm.scheduler.order import Order


class ContractOrder(Order):
    """Requests with a contract rank by the time of their first token, ahead of all others, which rank as in `inner`.

    A contract is only accepted while those before it leave room, so those without one wait as long as contracts keep
    the engine busy.
    """

    def __init__(self, inner: Order, given: Callable[[Iterable[Entry]], None]) -> None:
        """`inner` ranks requests without a contract. `given` takes note of the sequences that a step gave a token."""
        self.inner, self._given = inner, given
        self.displaces = inner.displaces

    def rank(self, request: Request, number: int) -> Rank:
        contract = request.contract
        if not contract:
            return self.inner.rank(request, number)
        times = [time for time in (contract.ttft, contract.complete) if time is not None]
        return (-inf, request.arrival + min(times, default=MAX_CONTRACT), number)

    def queue(self) -> WaitingQueue:
        inner = self.inner.queue()
        return inner if isinstance(inner, RankedQueue) else ContractsFirst(inner)  # ranks alone put contracts first

    def started(self, entry: Entry) -> None:
        self.inner.started(entry)

    def sampled(self, entries: Iterable[Entry]) -> None:
        self.inner.sampled(entries)
        self._given(entries)


def has_contract(entry: Entry) -> bool:
    """Whether a sequence has an accepted contract."""
    return entry.rank[0] == -inf


class ContractsFirst:
    """Waiting entries: those with contracts in rank order, then the others in a queue of their own."""

    def __init__(self, others: WaitingQueue) -> None:
        self._others, self._contracts = others, RankedQueue()

    def __len__(self) -> int:
        return len(self._contracts) + len(self._others)

    def __iter__(self) -> Iterator[Entry]:
        return chain(self._contracts, self._others)

    def add(self, entry: Entry) -> None:
        (self._contracts if has_contract(entry) else self._others).add(entry)

    def remove(self, entry: Entry) -> None:
        (self._contracts if has_contract(entry) else self._others).remove(entry)

    def first(self) -> Entry | None:
        return self._contracts.first() or self._others.first()
