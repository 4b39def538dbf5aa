"""Turns the records of a run into the data of a report: distributions, a timeline, the worst stalls."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import pairwise
from typing import Any

from holdfast.lab.metrics import Record

POINTS = 400
"""Number of evenly spaced points of a distribution. Its last hundredth has as many again."""
BINS = 160
"""Number of bins in a timeline."""
STALLS = 8
"""Number of stalls that a report lists."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A cumulative distribution: values in ms, ascending, each with the share of all values at or below it."""

    values: tuple[float, ...]
    shares: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        """The distribution of `values`, thinned to at most 2 * POINTS + 1 points."""
        ascending = sorted(values)
        last = len(ascending) - 1
        wanted = [at / POINTS for at in range(POINTS)] + [0.99 + 0.01 * at / POINTS for at in range(POINTS + 1)]
        places = sorted({round(share * last) for share in wanted}) if ascending else []
        return cls(tuple(ascending[at] for at in places), tuple((at + 1) / (last + 1) for at in places))


@dataclass(frozen=True, slots=True)
class Timeline:
    """Waiting and running requests and the token rate, in bins of equal length."""

    times: tuple[float, ...]
    """The middle of each bin, in seconds from the first arrival."""
    waiting: tuple[int, ...]
    """Number of requests that have arrived but not started. A request starts with its first step, or with its first
    token if its steps are unknown."""
    running: tuple[int, ...]
    """Number of requests that have started and not yet received their last token."""
    tokens: tuple[float, ...]
    """Generated tokens per second."""

    @classmethod
    def of(cls, records: Sequence[Record]) -> Timeline:
        """The timeline of a run. `records` are the requests that succeeded."""
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
            [bisect_right(events, began + time) for time in times]
            for events in (
                sorted(record.arrival for record in records),
                sorted(starts),
                sorted(record.token_times[-1] for record in records),
            )
        )
        return cls(
            times,
            tuple(before - after for before, after in zip(arrived, started, strict=True)),
            tuple(before - after for before, after in zip(started, ended, strict=True)),
            tuple(count / width for count in tokens),
        )


@dataclass(frozen=True, slots=True)
class Stall:
    """A long gap between two tokens of a stream."""

    ms: float
    at: float
    """Seconds from the first arrival to the late token."""
    request: int
    """Index of the request in the records, from 0."""
    token: int
    """Number of tokens that the request had received before the gap."""
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run, as a report shows it."""

    figures: dict[str, Any]
    """The run's `metrics.summary`, with its `request_rate` if it had one."""
    ttft: Distribution
    tbt: Distribution
    timeline: Timeline
    stalls: tuple[Stall, ...]
    """The longest gaps between tokens, longest first."""

    @classmethod
    def of(cls, records: Sequence[Record], figures: dict[str, Any]) -> Run:
        """The run that gave these records. At least one request must have succeeded."""
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
            Timeline.of(good),
            tuple(Stall(*gap) for gap in nlargest(STALLS, gaps)),
        )
