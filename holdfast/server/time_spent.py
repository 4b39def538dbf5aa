"""TimeSpent: the parts of the time of one HTTP request, for the log of slow requests.

A request passes many objects, and the store and the search engine serve all of them. So the current request is a
context variable, which each task of a request inherits, and not an argument of every call.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from holdfast.engine.client.stream import Timings

Part = Literal["read", "text", "place", "queue", "prefill", "decode", "store", "search", "tools"]

PARTS: dict[Part, str] = {
    "read": "reading and checking the request, and its grammar",
    "text": "the chat template and the tokenizer",
    "place": "waiting for a place in the engine's queue",
    "queue": "waiting in the engine's queue",
    "prefill": "computing the prompt, with copies of its state from lower tiers",
    "decode": "generating the answer",
    "store": "the conversation store",
    "search": "web searches",
    "tools": "tools of remote servers",
}
"""The parts, in words. Time of no part is the client's, or that of other work of the server."""

_current: ContextVar[TimeSpent] = ContextVar("holdfast_time_spent")


class TimeSpent:
    """Seconds of one request by part. The choice that ends last counts for all choices."""

    def __init__(self) -> None:
        self.seconds: defaultdict[Part, float] = defaultdict(float)
        """Seconds so far by part."""
        self.preemptions = 0
        """Number of times that the request lost its blocks or its row to others."""

    def add(self, part: Part, seconds: float) -> None:
        """Add to a part."""
        self.seconds[part] += max(0.0, seconds)

    def add_engine(self, timings: Timings, before: float) -> None:
        """Add what one answer took in the engine. `before` are the seconds of its queue that count as other parts."""
        self.add("queue", timings.queued - before)
        self.add("prefill", timings.prefill)
        self.add("decode", timings.decode)
        self.preemptions += timings.preemptions

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return sum(self.seconds.values())

    def rest(self, total: float) -> float:
        """Return the seconds of `total` that belong to no part."""
        return max(0.0, total - self.total)

    def longest(self, total: float) -> str:
        """Return the part that took longest, in words."""
        most = max(PARTS, key=lambda part: self.seconds[part])
        return PARTS[most] if self.seconds[most] > self.rest(total) else "the client, or other work of the server"


@contextmanager
def watched() -> Iterator[TimeSpent]:
    """Gather the parts of a request within the context, also from the tasks that begin there."""
    spent = TimeSpent()
    token = _current.set(spent)
    try:
        yield spent
    finally:
        _current.reset(token)


def current() -> TimeSpent:
    """Return the parts of the present request; an object that nobody reads if its parts are not gathered."""
    return _current.get(None) or TimeSpent()


@contextmanager
def spending(part: Part) -> Iterator[None]:
    """Count the time within the context as a part of the present request, except for what other parts count of it."""
    spent, began = current(), time.monotonic()
    others = spent.total
    try:
        yield
    finally:
        spent.add(part, time.monotonic() - began - (spent.total - others))
