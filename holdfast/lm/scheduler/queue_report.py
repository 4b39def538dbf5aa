"""A report on the queues for people: who waits and why, and how far running sequences are. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.queues import Queues

REASONS = {
    "no row": "all rows are taken (max_sequences)",
    "no blocks": "too few blocks are free beside those that running sequences may need",
    "budget": "the steps so far were full (token budget or TBT target), or its turn comes with the next one",
    "copies under way": "its state is being copied from the host, or idle state to the host to make room",
    "fetching": "its state is being brought back from the disk or the remote tier",
    "results in flight": "it was preempted, and its last tokens are still being computed",
    "adapter loading": "its adapter is not on the device yet",
    "shared prefix": "another request computes the beginning of its prompt, and it goes on from there",
    "tenant limit": "as many sequences of its tenant run as may (max_tenant_sequences)",
    "order": "others are ahead of it, and the first of them cannot start",
}
"""Each reason for which a request waits, and its explanation."""


class WaitingRequest(NamedTuple):
    """A request that does not run: it has not started, or was preempted."""

    id: str
    reason: str
    """One of REASONS."""
    tokens: int
    """Number of tokens of its prompt and of its answer so far."""
    arrival: float
    """Time of arrival in seconds."""


class RunningRequest(NamedTuple):
    """A request that has a row."""

    id: str
    planned: int
    """Positions that are computed, or planned."""
    tokens: int
    """Known tokens."""
    prompt: int
    """Tokens of its prompt."""


class QueueReport(NamedTuple):
    """The queues at one time."""

    waiting: int
    running: int
    free_rows: int
    first: tuple[WaitingRequest, ...]
    """The first of the waiting requests."""
    rows: tuple[RunningRequest, ...]
    """The first of the running requests."""


def report_queues(queues: Queues, most: int) -> QueueReport:
    """The queues now, with at most `most` requests of each kind."""
    arriving = [waiting_request(entry, "copies under way") for entry in queues.swapping_in[:most]]
    waiting = islice(_reasons(queues), most)
    rows = [
        RunningRequest(entry.id, entry.cache.planned, len(entry.sequence.tokens), len(entry.sequence.request.prompt))
        for entry in islice(queues.running, most)
    ]
    number = queues.num_waiting + len(queues.swapping_in)
    return QueueReport(number, len(queues.running), len(queues.free_rows), (*arriving, *waiting), tuple(rows))


def waiting_request(entry: Entry, reason: str) -> WaitingRequest:
    """The report on one waiting sequence."""
    sequence = entry.sequence
    return WaitingRequest(entry.id, reason, len(sequence.tokens), sequence.request.arrival)


def _reasons(queues: Queues) -> Iterable[WaitingRequest]:
    first = queues.waiting.first()
    starting = queues.hooks.starting
    for entry, part in queues.held.items():
        if part in starting:  # the entry was about to start, so it stands before those that wait
            yield waiting_request(entry, part.waits_for)
    for entry in queues.waiting:
        yield waiting_request(entry, reason(queues, entry) if entry is first else "order")
    for entry, part in queues.held.items():
        if part not in starting:
            yield waiting_request(entry, part.waits_for)


def reason(queues: Queues, entry: Entry) -> str:
    """Why the first of the waiting sequences has not started: one of REASONS."""
    pool, sequence = queues.pool, entry.sequence
    reserved = queues.headroom if queues.running else 0
    if not queues.free_rows:
        return "no row"
    if sequence.in_flight:
        return "results in flight"
    shortage = pool.shortage(entry.cache.match(sequence.tokens), sequence.length, reserved)
    return shortage or ("copies under way" if queues.swapping_in else "budget")
