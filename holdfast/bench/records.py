"""Records of requests, and the figures that they add up to, under the names that `vllm bench serve` gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


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
        raise ValueError(f"none of {len(records)} requests succeeded: {'; '.join(sorted(reasons)) or 'no tokens came'}")
    outputs = np.array([record.output_tokens or len(record.token_times) for record in good], np.float64)
    first = np.array([record.token_times[0] for record in good])
    last = np.array([record.token_times[-1] for record in good])
    arrival = np.array([record.arrival for record in good])
    ttft, e2el = (first - arrival) * 1e3, (last - arrival) * 1e3
    many = outputs > 1
    tpot = (e2el - ttft)[many] / (outputs[many] - 1)
    gaps = [np.diff(record.token_times) for record in good]
    duration = float(last.max() - arrival.min())
    prompt_tokens = sum(record.prompt_tokens for record in good)
    cached = sum(record.cached_tokens for record in good)
    result: dict[str, Any] = {
        "completed": len(good),
        "failed": len(records) - len(good),
        "duration": duration,
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": int(outputs.sum()),
        "cached_tokens": cached,
        "request_throughput": len(good) / duration,
        "output_throughput": float(outputs.sum()) / duration,
        "total_token_throughput": (prompt_tokens + float(outputs.sum())) / duration,
    }
    if slo is not None:
        per_request = np.full(len(good), np.nan)
        per_request[many] = tpot
        met = np.ones(len(good), bool)
        for limit, values in ((slo.ttft, ttft), (slo.tpot, per_request), (slo.e2el, e2el)):
            if limit is not None:
                met &= ~(values > limit)  # one token has no TPOT, and misses none
        result["request_goodput"] = float(met.sum()) / duration
    result |= figures("ttft", ttft) | figures("tpot", tpot) | figures("itl", np.concatenate(gaps) * 1e3)
    result |= figures("e2el", e2el) | figures("normalized_latency", e2el / outputs)
    queued = [record.scheduled - record.arrival for record in good if record.scheduled is not None]
    if queued:
        result |= figures("queued", np.array(queued) * 1e3)
    return result


def figures(name: str, values: Floats) -> dict[str, float]:
    """Mean, median, standard deviation, P90 and P99; zeros for no values."""
    if not values.size:
        values = np.zeros(1)
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(p50),
        f"std_{name}_ms": float(values.std()),
        f"p90_{name}_ms": float(p90),
        f"p99_{name}_ms": float(p99),
    }
