"""Bounds on goodput: how many requests any scheduler of one device could finish in time, even with hindsight."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from holdfast.core.contract import Contract
from holdfast.core.cost import CostModel

SHIFTS = 16
"""Number of ways in which time is divided. Each gives a bound of its own."""
DEPTH = 24
"""Number of times that the whole time is halved at most."""


class Job(NamedTuple):
    """Work that a device must do between two times."""

    release: float
    due: float
    seconds: float
    """Least time of the device that the work takes."""


def most_on_time(jobs: Sequence[Job]) -> int:
    """An upper bound on the number of jobs that one device finishes in time, in whatever order and knowing all ahead.

    The relaxation: within any interval, the jobs that lie in it whole take no longer together than it lasts. It is kept
    for the intervals of a binary division of the time only, and what a job does outside of its own interval costs
    nothing. These intervals are nested or apart, so dropping the longest jobs of each, from the smallest intervals up,
    leaves the most jobs (Moore 1968, for one chain of intervals). The bound is the least one of SHIFTS divisions.
    """
    if not jobs:
        return 0
    begin, end = min(job.release for job in jobs), max(job.due for job in jobs)
    length = end - begin
    return min(_kept(jobs, begin - length * shift / SHIFTS, 2 * length) for shift in range(SHIFTS))


def _kept(jobs: Sequence[Job], begin: float, length: float) -> int:
    """The bound of the division that halves [begin, begin + length) again and again."""
    levels: list[dict[int, list[float]]] = [{} for _ in range(DEPTH)]
    for job in jobs:
        level, index = _smallest(job, begin, length)
        levels[level].setdefault(index, []).append(-job.seconds)
    for level in range(DEPTH - 1, -1, -1):
        room = length / 2**level
        for index, held in levels[level].items():
            heapify(held)
            taken = -sum(held)
            while held and taken > room:
                taken += heappop(held)
            if level:
                _merge(levels[level - 1], index // 2, held)
    return sum(map(len, levels[0].values()))


def _smallest(job: Job, begin: float, length: float) -> tuple[int, int]:
    """The level and the index of the smallest interval that holds a job whole."""
    low, high = (job.release - begin) / length, (job.due - begin) / length
    level = index = 0
    while level + 1 < DEPTH:
        below = int(low * 2 ** (level + 1))
        if high * 2 ** (level + 1) > below + 1:
            break
        level, index = level + 1, below
    return level, index


def _merge(held: dict[int, list[float]], index: int, more: list[float]) -> None:
    """Add jobs to those of an interval, the fewer to the more."""
    there = held.get(index, [])
    fewer, many = sorted((there, more), key=len)
    for seconds in fewer:
        heappush(many, seconds)
    held[index] = many


class LeastTimes:
    """Least time of a device that the tokens of one request take, in the best steps that its cost model has."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        mixed = [seconds / tokens for tokens, seconds in zip(cost.linear_tokens, cost.linear_seconds, strict=True)]
        alone = [seconds / rows for rows, seconds in zip(cost.decode_rows, cost.decode_seconds, strict=True)]
        self._token = min(mixed + alone)
        """Seconds of one token, apart from attention."""

    def prompt(self, start: int, stop: int) -> float:
        """Seconds of computing the positions [start, stop) of a prompt."""
        points = [start, *(1 << power for power in range(6, stop.bit_length()) if start < 1 << power < stop), stop]
        attention, least = 0.0, self._attention(stop)
        for before, after in reversed([*pairwise(points)]):
            least = min(least, self._attention(before))
            attention += (after - before) * least
        return (stop - start) * self._token + attention

    def answer(self, context: int, tokens: int) -> float:
        """Seconds of `tokens` decodes after `context` positions. A longer context costs no less than this one."""
        rows = self._cost.decode_rows or (1,)
        return tokens * (self._token + min(self._cost.decode(count, context) for count in rows))

    def _attention(self, end: int) -> float:
        """Least seconds of attention for one token of a chunk that ends at position `end`."""
        chunks = [length for length in (*self._cost.attention_queries, end) if 0 < length <= end]
        return min((self._cost.attention(length, end) / length for length in chunks), default=0.0)


class Asked(NamedTuple):
    """One request, as a bound sees it."""

    arrival: float
    contract: Contract
    prompt: float
    """Least seconds of its prompt."""
    answer: float
    """Least seconds of its answer."""
    output: int
    """Tokens of its answer."""


def most_kept(requests: Sequence[Asked]) -> int:
    """An upper bound on the contracts that one device keeps, whatever its scheduler knows ahead.

    It is the lesser of two: prompts by their first tokens, and whole requests by their last ones, which are due by
    `complete`, and by the first token and the longest gaps between tokens. A term that is not promised has no end.
    """
    last = max((each.arrival for each in requests), default=0.0) + sum(each.prompt + each.answer for each in requests)
    prompts = [Job(each.arrival, _due(each, last, whole=False), each.prompt) for each in requests]
    wholes = [Job(each.arrival, _due(each, last, whole=True), each.prompt + each.answer) for each in requests]
    return min(most_on_time(prompts), most_on_time(wholes))


def _due(asked: Asked, last: float, *, whole: bool) -> float:
    """Time by which the first token, or with `whole` the last one, is due; `last` if it is not promised."""
    contract, ends = asked.contract, [last]
    if contract.complete is not None:
        ends.append(asked.arrival + contract.complete)
    if contract.ttft is not None and not whole:
        ends.append(asked.arrival + contract.ttft)
    if contract.ttft is not None and contract.tbt is not None and whole:
        ends.append(asked.arrival + contract.ttft + contract.tbt * (asked.output - 1))
    return min(ends)
