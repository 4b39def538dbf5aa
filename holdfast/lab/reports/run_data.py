"""From the records of a run to what a report draws: distributions, what went on when, the worst stalls."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import pairwise
from typing import Any

from holdfast.lab.records import Record

POINTS = 400
"""Of a distribution, spread evenly; as many again in its last hundredth."""
BINS = 160
"""Of a run's time."""
STALLS = 8


@dataclass(frozen=True, slots=True)
class Distribution:
    """Values in ms, ascending, and for each the share of all that lie at or below it."""

    values: tuple[float, ...]
    shares: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        """The distribution of some values, thinned."""
        ascending = sorted(values)
        last = len(ascending) - 1
        wanted = [at / POINTS for at in range(POINTS)] + [0.99 + 0.01 * at / POINTS for at in range(POINTS + 1)]
        places = sorted({round(share * last) for share in wanted}) if ascending else []
        return cls(tuple(ascending[at] for at in places), tuple((at + 1) / (last + 1) for at in places))


@dataclass(frozen=True, slots=True)
class Course:
    """What went on, in bins of equal length. Times in seconds from the first arrival."""

    times: tuple[float, ...]
    """The middle of each bin."""
    waiting: tuple[int, ...]
    """Requests that have arrived and wait for their first step; for their first token where steps are unknown."""
    running: tuple[int, ...]
    """Requests between that and their last token."""
    tokens: tuple[float, ...]
    """Generated tokens a second."""

    @classmethod
    def of(cls, records: Sequence[Record]) -> Course:
        """The course of a run; `records` are those that succeeded."""
        began = min(record.arrival for record in records)
        width = max((max(record.token_times[-1] for record in records) - began) / BINS, 1e-9)
        times = tuple((at + 0.5) * width for at in range(BINS))
        tokens = [0.0] * BINS
        for record in records:
            share = (record.output_tokens or len(record.token_times)) / len(record.token_times)
            for time in record.token_times:
                tokens[min(BINS - 1, int((time - began) / width))] += share
        starts = [record.token_times[0] if record.scheduled is None else record.scheduled for record in records]
        arrived, started, ended = (
            [bisect_right(at, began + time) for time in times]
            for at in (
                sorted(record.arrival for record in records),
                sorted(starts),
                sorted(record.token_times[-1] for record in records),
            )
        )
        return cls(
            times,
            tuple(come - gone for come, gone in zip(arrived, started, strict=True)),
            tuple(come - gone for come, gone in zip(started, ended, strict=True)),
            tuple(count / width for count in tokens),
        )


@dataclass(frozen=True, slots=True)
class Stall:
    """A long gap between two tokens of a stream."""

    ms: float
    at: float
    """Seconds from the first arrival to the token that came late."""
    request: int
    """Number of the request, from 0 in order of asking."""
    token: int
    """How many tokens it had before."""
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run, as a report shows it."""

    figures: dict[str, Any]
    """What `summary` says of it, and its `request_rate` if it had one."""
    ttft: Distribution
    tbt: Distribution
    course: Course
    stalls: tuple[Stall, ...]
    """The longest first."""

    @classmethod
    def of(cls, records: Sequence[Record], figures: dict[str, Any]) -> Run:
        """A run with at least one request that succeeded."""
        numbered = [
            (number, record) for number, record in enumerate(records) if not record.error and record.token_times
        ]
        good = [record for _, record in numbered]
        began = min(record.arrival for record in good)
        gaps = [
            ((after - before) * 1e3, after - began, number, token, record.prompt_tokens)
            for number, record in numbered
            for token, (before, after) in enumerate(pairwise(record.token_times), start=1)
        ]
        return cls(
            figures,
            Distribution.of([(record.token_times[0] - record.arrival) * 1e3 for record in good]),
            Distribution.of([gap[0] for gap in gaps]),
            Course.of(good),
            tuple(Stall(*gap) for gap in nlargest(STALLS, gaps)),
        )
