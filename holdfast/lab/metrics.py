"""Records of requests, and the metrics of a run, named as in `vllm bench serve`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, zip_longest
from math import sqrt
from typing import Any, Literal

from holdfast.core.contract import NO_CONTRACT, TERMS, Contract

Outcome = Literal["kept", "refused", "failed", "ttft", "tbt", "complete"]
"""Outcome of a contract: it was kept, refused at arrival, lost to a failure, or one of its terms was broken."""
BROKEN: tuple[Outcome, ...] = (*TERMS, "failed")
"""Outcomes of a contract that was accepted and not kept."""
OUTCOMES: tuple[Outcome, ...] = ("kept", "refused", *BROKEN)


@dataclass(slots=True)
class Record:
    """One request as a client saw it. Times are in seconds on one clock."""

    arrival: float
    prompt_tokens: int
    scheduled: float | None = None
    """Time at which the first segment was planned; None if unknown."""
    token_times: list[float] = field(default_factory=list)
    """Arrival time of each generated token, ascending. Over HTTP, tokens that arrive together have one time."""
    output_tokens: int | None = None
    """Number of generated tokens; None: one for each entry of `token_times`."""
    cached_tokens: int = 0
    error: str = ""
    """The reason why the request failed; empty if it succeeded."""
    contract: Contract = NO_CONTRACT
    """The times that the client asked to be promised."""
    refused: str = ""
    """The reason for which the server refused the contract when the request arrived; empty if it did not."""

    @property
    def outcome(self) -> Outcome:
        """Outcome of the contract. A request without a contract, or one that failed, keeps nothing."""
        if self.refused:
            return "refused"
        if self.error or not self.token_times:
            return "failed"
        return self.contract.broken([time - self.arrival for time in self.token_times]) or "kept"

    @property
    def generated(self) -> int:
        """Number of generated tokens."""
        return self.output_tokens or len(self.token_times)


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in milliseconds that a request must meet to count towards goodput. None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None


class NoSuccess(ValueError):
    """A run has no metrics, because no request succeeded."""


def summary(records: Sequence[Record], slo: Slo | None = None) -> dict[str, Any]:
    """The metrics of a run, times in ms. Raises NoSuccess if no request succeeded.

    `itl` is the gap between two tokens of a stream (TBT). `tpot` is (end-to-end - TTFT) / (tokens - 1). Normalized
    latency is end-to-end / tokens. The duration lasts from the first arrival to the last token.
    """
    good = [record for record in records if not record.error and record.token_times]
    refused = sum(1 for record in records if record.refused)
    if not good:
        reasons = {record.error or record.refused for record in records if record.error or record.refused}
        raise NoSuccess(
            f"none of {len(records)} requests succeeded: {'; '.join(sorted(reasons)[:3]) or 'no tokens came'}"
        )
    outputs = [record.generated for record in good]
    ttft = [(record.token_times[0] - record.arrival) * 1e3 for record in good]
    e2el = [(record.token_times[-1] - record.arrival) * 1e3 for record in good]
    timed = list(zip(outputs, ttft, e2el, strict=True))
    tpot = [(end - first) / (count - 1) if count > 1 else None for count, first, end in timed]
    gaps = [(after - before) * 1e3 for record in good for before, after in pairwise(record.token_times)]
    duration = max(record.token_times[-1] for record in good) - min(record.arrival for record in good)
    prompt_tokens = sum(record.prompt_tokens for record in good)
    edges = sorted([(record.arrival, 1) for record in good] + [(record.token_times[-1], -1) for record in good])
    result: dict[str, Any] = {
        "completed": len(good),
        "failed": len(records) - len(good) - refused,
        "duration": duration,
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": sum(outputs),
        "cached_tokens": sum(record.cached_tokens for record in good),
        "request_throughput": len(good) / duration,
        "output_throughput": sum(outputs) / duration,
        "total_token_throughput": (prompt_tokens + sum(outputs)) / duration,
        "max_output_tokens_per_s": _peak_tokens_per_second(good),
        "max_concurrent_requests": max(accumulate(change for _, change in edges)),
    }
    if slo is not None:
        limits = ((slo.ttft, ttft), (slo.tpot, tpot), (slo.e2el, e2el))
        missed = {  # a request of one token has no TPOT, so it cannot miss the limit
            number
            for limit, values in limits
            for number, value in enumerate(values)
            if limit is not None and value is not None and value > limit
        }
        result["request_goodput"] = (len(good) - len(missed)) / duration
    result |= contract_figures(records, duration)
    result |= _statistics("ttft", ttft) | _statistics("tpot", [value for value in tpot if value is not None])
    result |= _statistics("itl", gaps) | _statistics("e2el", e2el)
    result |= _statistics("normalized_latency", [end / count for count, _, end in timed])
    queued = [(record.scheduled - record.arrival) * 1e3 for record in good if record.scheduled is not None]
    return result | _statistics("queued", queued) if queued else result


def contract_figures(records: Sequence[Record], seconds: float) -> dict[str, float]:
    """Outcomes of the contracts in a run of this many seconds; empty if no request asked for one.

    - `contracts`: number of requests that asked for a contract. Each is kept, refused or broken.
    - `contracts_kept`, `contracts_refused`, `contracts_broken`: their numbers. The broken ones are counted again by the
      first term that was broken: `contracts_broken_ttft`, `_tbt`, `_complete`; or `_failed` if the request failed.
    - `contracts_kept_share`: kept contracts as a share of the accepted ones; 1 if none was accepted.
    - `contracts_refused_share`: refused contracts as a share of all.
    - `contract_goodput`, `contract_token_goodput`: requests whose contract was kept, and their generated tokens, per
      second.
    """
    asked = [record for record in records if record.contract]
    if not asked:
        return {}
    outcomes = [record.outcome for record in asked]
    counts = {name: outcomes.count(name) for name in OUTCOMES}
    accepted = len(asked) - counts["refused"]
    tokens = sum(record.generated for record, outcome in zip(asked, outcomes, strict=True) if outcome == "kept")
    return {
        "contracts": len(asked),
        "contracts_kept": counts["kept"],
        "contracts_refused": counts["refused"],
        "contracts_broken": accepted - counts["kept"],
        **{f"contracts_broken_{name}": counts[name] for name in BROKEN},
        "contracts_kept_share": counts["kept"] / accepted if accepted else 1.0,
        "contracts_refused_share": counts["refused"] / len(asked),
        "contract_goodput": counts["kept"] / seconds,
        "contract_token_goodput": tokens / seconds,
    }


class StageTimes:
    """How long steps were in flight in a run, and how long each stage of a pipeline computed meanwhile."""

    def __init__(self) -> None:
        self._under_way = 0.0
        self._busy: list[float] = []

    def add(self, under_way: float, stages: Sequence[float]) -> None:
        """Add seconds with steps in flight, and the seconds in which each stage computed."""
        self._under_way += under_way
        self._busy = [before + took for before, took in zip_longest(self._busy, stages, fillvalue=0.0)]

    def idle(self) -> list[float]:
        """Share of the time with steps in flight in which each stage computed nothing; empty before any time passed.

        In a pipeline these are its bubbles. One stage is the whole device.
        """
        return [1 - busy / self._under_way for busy in self._busy] if self._under_way else []


def queue_growth(records: Sequence[Record], window: float) -> float:
    """Share of the requests arriving in the later half of `window` seconds that still waited at its end.

    The window begins with the first arrival. A request begins when its first step is planned or, if that is not known,
    when its first token comes. The shortest wait of all requests counts as no wait.

    The later half is expected to begin as many requests as arrive on average in half a window, or as many as arrived
    there if they are fewer; so neither a burst nor a lull counts as growth. The share is 0 if chance explains it: if at
    most the square root of the expected number still waited, the usual deviation of random arrivals.
    """
    begun = [
        (record.arrival, record.token_times[0] if record.scheduled is None else record.scheduled)
        for record in records
        if not record.error and record.token_times
    ]
    if not begun:
        return 0.0
    stop = min(arrival for arrival, _ in begun) + window
    middle, least = stop - window / 2, min(start - arrival for arrival, start in begun)
    arrived = sum(middle <= arrival <= stop for arrival, _ in begun)
    started = sum(middle <= start - least <= stop for _, start in begun)
    expected = min(arrived, len(begun) / 2)
    left = expected - started
    return left / expected if expected and left > sqrt(expected) else 0.0


def _peak_tokens_per_second(records: Sequence[Record]) -> float:
    """Largest number of tokens that arrived in any one second, counting seconds from the first arrival."""
    began = min(record.arrival for record in records)
    seconds: dict[int, float] = {}
    for record in records:
        share = record.generated / len(record.token_times)
        for time in record.token_times:
            second = int(time - began)
            seconds[second] = seconds.get(second, 0.0) + share
    return max(seconds.values())


def _statistics(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation, P90 and P99; zeros if there are no values."""
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
    """The value below which `share` of the values lies, interpolated between neighbours."""
    at = share * (len(ascending) - 1)
    below = int(at)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (at - below) * (ascending[above] - ascending[below])
