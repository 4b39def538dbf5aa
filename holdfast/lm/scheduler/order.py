"""Orders: which request goes first, which may displace which, and why no request waits forever."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator

from holdfast.core.config import CoreConfig
from holdfast.core.types import Request
from holdfast.lm.scheduler.entries import Entry, Rank, RankedQueue, WaitingQueue

DEFAULT_TTFT = 2.0
"""Deadline of the first token in seconds from arrival, for requests that name none."""


class Order(ABC):
    """Ranks each request once, when it is added. Ranks are distinct, and fixed while a request lives.

    So one of the waiting and running requests always ranks first. It is never displaced and never preempted, so it
    ends. Hence no request starves as long as only finitely many can ever rank ahead of it. Each order says which ones
    can.
    """

    displaces = False
    """Whether a waiting request may displace a running one that has a lower class and a later rank."""

    @abstractmethod
    def rank(self, request: Request, number: int) -> Rank:
        """The request's rank, lower first; `number` counts the requests added before it."""

    def queue(self) -> WaitingQueue:
        """An empty queue for waiting requests."""
        return RankedQueue()

    def started(self, entry: Entry) -> None:  # noqa: B027  most orders count nothing
        """Note that a request starts for the first time."""

    def sampled(self, entries: Iterable[Entry]) -> None:  # noqa: B027
        """Note that each of these sequences was given a token."""


class Fcfs(Order):
    """First come, first served: only earlier arrivals rank ahead of a request."""

    def rank(self, request: Request, number: int) -> Rank:
        return (request.arrival, number)


class Priority(Order):
    """Lower class numbers first, by arrival within a class; waiting lifts a request by one class per `aging` seconds.

    As time passes alike for all waiting requests, that is the fixed rank arrival + class · aging. Ahead of a request of
    class c rank earlier arrivals of its class and below, and requests of a class b < c that arrive less than
    (c - b) · aging seconds after it.
    """

    displaces = True

    def __init__(self, aging: float = 3600.0) -> None:
        """`aging` in seconds, above 0 and finite: otherwise a low class might wait forever."""
        self.aging = aging

    def rank(self, request: Request, number: int) -> Rank:
        return (request.arrival + request.priority * self.aging, request.priority, number)


class Deadline(Order):
    """Earliest deadline of the first token first.

    A deadline lies after its request's arrival, so requests that arrive after another's deadline rank after it.
    """

    def __init__(self, ttft_target: float = DEFAULT_TTFT) -> None:
        """`ttft_target` in seconds from arrival: the deadline of requests that name none."""
        self.ttft_target = ttft_target

    def rank(self, request: Request, number: int) -> Rank:
        allowed = self.ttft_target if request.deadline is None else request.deadline
        return (request.arrival + allowed, number)


class Fair(Fcfs):
    """The virtual token counter (Sheng et al., Fairness in Serving Large Language Models, 2023, Algorithm 2).

    Each tenant has a counter of its service: prompt tokens computed for it, plus its generated tokens times a weight.
    The tenant with the lowest counter goes next, with its earliest request. A tenant that comes back with nothing
    waiting is lifted to the lowest counter of the waiting tenants, so it cannot save up for a burst. Running requests
    rank by arrival.

    Another tenant's requests start ahead of a tenant's earliest one only while that tenant's counter is not above its
    own. That is at most the difference of the counters, plus the requests running by then. While two tenants have
    requests waiting, their service differs by at most 2 · max(longest prompt, weight · tokens that run at once), as the
    paper proves.
    """

    def __init__(self, weight: float = 2.0) -> None:
        """A generated token counts as `weight` prompt tokens; above 0."""
        self.weight = weight
        self.served: defaultdict[str, float] = defaultdict(float)
        """Service counter of each tenant."""

    def queue(self) -> TenantQueue:
        return TenantQueue(self.served)

    def started(self, entry: Entry) -> None:
        sequence = entry.sequence
        self.served[sequence.request.identity.tenant] += max(1, len(sequence.request.prompt) - sequence.cached_tokens)

    def sampled(self, entries: Iterable[Entry]) -> None:
        served, weight = self.served, self.weight
        for entry in entries:
            served[entry.sequence.request.identity.tenant] += weight


class TenantQueue:
    """Waiting entries, each tenant's in rank order. First is the first entry of the tenant with the lowest counter.

    Every operation goes through the waiting tenants, which are assumed to be few.
    """

    def __init__(self, served: dict[str, float]) -> None:
        """`served` holds the service counters."""
        self._served = served
        self._queues: dict[str, RankedQueue] = {}
        """Queues of the tenants with waiting requests; none is empty."""
        self._last = ""
        """The tenant whose request left the queue last."""

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Entry]:
        """All of the first tenant, then all of the next, by the counters as they are now."""
        for tenant in sorted(self._queues, key=lambda name: (self._served[name], next(iter(self._queues[name])).rank)):
            yield from self._queues[tenant]

    def add(self, entry: Entry) -> None:
        tenant, served = entry.sequence.request.identity.tenant, self._served
        if tenant not in self._queues:
            if entry.sequence.scheduled_at is None:  # a preempted one has saved nothing up
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
        served, firsts = self._served, [next(iter(queue)) for queue in self._queues.values()]
        return min(firsts, key=lambda entry: (served[entry.sequence.request.identity.tenant], entry.rank), default=None)


def make_order(config: CoreConfig) -> Order:
    """The order that a configuration asks for."""
    match config.order:
        case "fcfs":
            return Fcfs()
        case "priority":
            return Priority(config.priority_aging)
        case "deadline":
            return Deadline(DEFAULT_TTFT if config.ttft_seconds is None else config.ttft_seconds)
        case "fair":
            return Fair(config.fair_weight)
