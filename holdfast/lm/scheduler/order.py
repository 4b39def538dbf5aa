"""Orders: who goes first among waiting requests, who loses its place to whom, and why nobody waits for ever."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from holdfast.core.config import EngineConfig
from holdfast.core.types import Request
from holdfast.lm.scheduler.entries import Entry, Rank, RankedQueue, WaitingQueue

DEFAULT_TTFT = 2.0
"""Seconds after which the first token of a request that names no deadline is due."""


class Order(ABC):
    """Ranks each request once, as it is added. No two ranks are equal, and a rank stays while its request lives.

    So of the requests that wait or run there is always a first, and it is never displaced, nor does it lose blocks to
    anyone: it ends. Nobody starves, then, as long as only finitely many requests can ever rank ahead of one. Each order
    says which these are.
    """

    displaces = False
    """Whether a waiting request takes the row of a running one of a lower class that ranks behind it."""

    @abstractmethod
    def rank(self, request: Request, number: int) -> Rank:
        """The request's rank, lower first, given how many requests came before it."""

    def queue(self) -> WaitingQueue:
        """An empty queue for those who wait."""
        return RankedQueue()

    def started(self, entry: Entry) -> None:  # noqa: B027  most orders count nothing
        """Take note of a request that starts for the first time."""

    def sampled(self, entries: Iterable[Entry]) -> None:  # noqa: B027
        """Take note of a token for each of these."""


class Fcfs(Order):
    """First come, first served: ahead of a request are those that arrived before it."""

    def rank(self, request: Request, number: int) -> Rank:
        return (request.arrival, number)


class Priority(Order):
    """Lower classes first, and first come, first served within one. Waiting makes up for class.

    A request counts as one class higher for every `aging` seconds: ahead of one of class c are those that arrived
    before it, and those of a class b < c that arrive less than (c - b) · aging seconds after it. As time passes alike
    for all who wait, that is the fixed rank arrival + class · aging.
    """

    displaces = True

    def __init__(self, aging: float = 3600.0) -> None:
        """`aging` in seconds, above 0 and finite: else a low class might wait for ever."""
        self.aging = aging

    def rank(self, request: Request, number: int) -> Rank:
        return (request.arrival + request.priority * self.aging, request.priority, number)


class Deadline(Order):
    """Earliest deadline first: ahead of a request are those with a first token due before its own is.

    Deadlines lie behind arrivals, so whoever arrives after a request's deadline is behind it.
    """

    def __init__(self, ttft_target: float = DEFAULT_TTFT) -> None:
        """`ttft_target` in seconds: when the first token is due where the request does not say."""
        self.ttft_target = ttft_target

    def rank(self, request: Request, number: int) -> Rank:
        allowed = self.ttft_target if request.deadline is None else request.deadline
        return (request.arrival + allowed, number)


class Fair(Order):
    """The virtual token counter (Sheng et al., Fairness in Serving Large Language Models, 2023, Algorithm 2).

    Each tenant has a counter of what it was served: the prompt tokens that were computed for it and, weighted, the
    tokens generated. The tenant with the lowest goes next with its earliest request. One that had nothing waiting is
    lifted to the lowest counter among those that have, so that nobody saves up for a burst. Running requests rank by
    arrival.

    Ahead of a tenant's earliest request are, of each other tenant, those that start while that tenant's counter is not
    above its own: until then no more than the difference of the counters is served, and what runs by then. While two
    tenants have requests waiting, what they are served differs by at most 2 · max(longest prompt, weight · tokens that
    run at once), as they prove.
    """

    def __init__(self, weight: float = 2.0) -> None:
        """`weight` is how many prompt tokens a generated one counts; above 0."""
        self.weight = weight
        self.served: dict[str, float] = {}
        """Counters by tenant."""

    def rank(self, request: Request, number: int) -> Rank:
        return (request.arrival, number)

    def queue(self) -> WaitingQueue:
        return TenantQueue(self.served)

    def started(self, entry: Entry) -> None:
        sequence = entry.sequence
        self.served[sequence.request.identity.tenant] += max(1, len(sequence.request.prompt) - sequence.cached_tokens)

    def sampled(self, entries: Iterable[Entry]) -> None:
        served, weight = self.served, self.weight
        for entry in entries:
            served[entry.sequence.request.identity.tenant] += weight


class TenantQueue:
    """Who waits, each tenant's in rank order; first is the earliest of the tenant whose counter is lowest.

    Every operation looks at each tenant that waits: keys are few.
    """

    def __init__(self, served: dict[str, float]) -> None:
        """`served` are the counters."""
        self._served = served
        self._queues: dict[str, RankedQueue] = {}
        """Of tenants with requests waiting; none is empty."""
        self._last = ""
        """Whose request left last."""

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, entry: Entry) -> None:
        tenant, served = entry.sequence.request.identity.tenant, self._served
        if tenant not in self._queues:
            if entry.sequence.scheduled_at is None:  # one that was preempted has saved nothing up
                waiting = [served[other] for other in self._queues]
                served[tenant] = max(served.get(tenant, 0.0), min(waiting, default=served.get(self._last, 0.0)))
            self._queues[tenant] = RankedQueue()
        self._queues[tenant].add(entry)

    def remove(self, entry: Entry) -> None:
        tenant = self._last = entry.sequence.request.identity.tenant
        queue = self._queues[tenant]
        queue.remove(entry)
        if not queue:
            del self._queues[tenant]

    def first(self) -> Entry | None:
        served = self._served
        firsts = [queue.first() for queue in self._queues.values()]
        return min(
            [entry for entry in firsts if entry is not None],
            key=lambda entry: (served[entry.sequence.request.identity.tenant], entry.rank),
            default=None,
        )


def make_order(config: EngineConfig) -> Order:
    """The order that a configuration asks for."""
    match config.order:
        case "fcfs":
            return Fcfs()
        case "priority":
            return Priority(config.priority_aging)
        case "deadline":
            return Deadline(DEFAULT_TTFT if config.ttft_target is None else config.ttft_target / 1000)
        case "fair":
            return Fair(config.fair_weight)
