"""Records of requests, and the figures that they add up to, under the names that `vllm bench serve` gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import sqrt
from typing import Any


@dataclass(slots=True)
class Record:
    """One request. Times in seconds on one clock."""

    arrival: float
    prompt_tokens: int
    scheduled: float | None = None
    """When its first segment was planned, where that is known."""
    token_times: list[float] = field(default_factory=list)
    """When each generated token arrived; ascending. Over HTTP several tokens may come at once, as one time."""
    output_tokens: int | None = None
    """Generated tokens, where they are known not to be one for each time."""
    cached_tokens: int = 0
    error: str = ""
    """Why it failed; empty if it did not."""


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must meet to count as good. Milliseconds; None does not count."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None


def summary(records: Sequence[Record], slo: Slo | None = None) -> dict[str, Any]:
    """The figures of a run, times in ms. Raises ValueError if no request succeeded.

    `itl` are the gaps between the tokens of a stream (TBT); `tpot` is (end-to-end - TTFT) / (tokens - 1); normalized
    latency is end-to-end over tokens; the duration lasts from the first arrival to the last token.
    """
    good = [record for record in records if not record.error and record.token_times]
    if not good:
        reasons = {record.error for record in records if record.error}
        raise ValueError(
            f"none of {len(records)} requests succeeded: {'; '.join(sorted(reasons)[:3]) or 'no tokens came'}"
        )
    outputs = [record.output_tokens or len(record.token_times) for record in good]
    ttft = [(record.token_times[0] - record.arrival) * 1e3 for record in good]
    e2el = [(record.token_times[-1] - record.arrival) * 1e3 for record in good]
    timed = list(zip(outputs, ttft, e2el, strict=True))
    tpot = [(end - first) / (count - 1) if count > 1 else None for count, first, end in timed]
    gaps = [(after - before) * 1e3 for record in good for before, after in pairwise(record.token_times)]
    duration = max(record.token_times[-1] for record in good) - min(record.arrival for record in good)
    prompt_tokens = sum(record.prompt_tokens for record in good)
    result: dict[str, Any] = {
        "completed": len(good),
        "failed": len(records) - len(good),
        "duration": duration,
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": sum(outputs),
        "cached_tokens": sum(record.cached_tokens for record in good),
        "request_throughput": len(good) / duration,
        "output_throughput": sum(outputs) / duration,
        "total_token_throughput": (prompt_tokens + sum(outputs)) / duration,
        "max_output_tokens_per_s": most_in_a_second(good),
        "max_concurrent_requests": most_at_once([(record.arrival, record.token_times[-1]) for record in good]),
    }
    if slo is not None:
        limits = ((slo.ttft, ttft), (slo.tpot, tpot), (slo.e2el, e2el))
        missed = {  # one token has no TPOT, and misses none
            number
            for limit, values in limits
            for number, value in enumerate(values)
            if limit is not None and value is not None and value > limit
        }
        result["request_goodput"] = (len(good) - len(missed)) / duration
    result |= figures("ttft", ttft) | figures("tpot", [value for value in tpot if value is not None])
    result |= figures("itl", gaps) | figures("e2el", e2el)
    result |= figures("normalized_latency", [end / count for count, _, end in timed])
    queued = [(record.scheduled - record.arrival) * 1e3 for record in good if record.scheduled is not None]
    return result | figures("queued", queued) if queued else result


def most_in_a_second(records: Sequence[Record]) -> float:
    """Most tokens that came within one second, in seconds counted from the first arrival."""
    began = min(record.arrival for record in records)
    seconds: dict[int, float] = {}
    for record in records:
        share = (record.output_tokens or len(record.token_times)) / len(record.token_times)
        for time in record.token_times:
            second = int(time - began)
            seconds[second] = seconds.get(second, 0.0) + share
    return max(seconds.values())


def most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    """Most of these [start, end) that overlap."""
    edges = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    return max(accumulate(change for _, change in edges))


def figures(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation, P90 and P99; zeros for no values."""
    ascending = sorted(values) or [0.0]
    mean = sum(ascending) / len(ascending)
    return {
        f"mean_{name}_ms": mean,
        f"median_{name}_ms": percentile(ascending, 0.5),
        f"std_{name}_ms": sqrt(sum((value - mean) ** 2 for value in ascending) / len(ascending)),
        f"p90_{name}_ms": percentile(ascending, 0.9),
        f"p99_{name}_ms": percentile(ascending, 0.99),
    }


def percentile(ascending: Sequence[float], share: float) -> float:
    """The value below which this share lies, linear between neighbours."""
    at = share * (len(ascending) - 1)
    below = int(at)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (at - below) * (ascending[above] - ascending[below])
