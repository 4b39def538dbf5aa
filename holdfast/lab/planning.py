"""Capacity planning: what each way to serve a workload on given devices sustains within limits, and what it costs."""

from __future__ import annotations

import math
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from holdfast.core.config import EngineConfig, SchedulerName
from holdfast.engine.profiles import CostProfile
from holdfast.lab import workloads
from holdfast.lab.capacity import CLOSE, find_capacity
from holdfast.lab.records import summary
from holdfast.lab.simulator.deployment import Deployment, deploy
from holdfast.lab.simulator.run import simulate
from holdfast.lab.simulator.shapes import ModelShape
from holdfast.lab.workloads import Workload

SHARED_OPTIONS = (
    "max_sequences", "max_model_len", "block_size", "headroom", "memory_fraction", "prefix_sharing", "chunk_size",
    "eviction", "seed", "quantization", "kv_cache_dtype",
)  # fmt: skip
"""What of an engine is the same for all candidates."""
LEAST = 40
"""Conversations of a run, however low its rate."""
STRIDE = 1.2
"""First factor of a search, whose start is a good guess where throughput is the bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to serve: a policy with its budget, a layout over devices, a host tier."""

    scheduler: SchedulerName = "stall-free"
    token_budget: int | None = None
    tbt_target: float | None = None
    """Milliseconds."""
    tp: int = 1
    pp: int = 1
    host_cache_gb: float = 0.0

    @property
    def devices(self) -> int:
        """Devices of one replica."""
        return self.tp * self.pp

    @property
    def policy(self) -> str:
        """The scheduler and its budget, for people."""
        if self.tbt_target is not None:
            return f"{self.scheduler}, {self.tbt_target:g} ms"
        return self.scheduler if self.token_budget is None else f"{self.scheduler}, {self.token_budget:,} tokens"

    @property
    def layout(self) -> str:
        """How a replica lies over devices, and its host tier, for people."""
        parts = [f"TP{self.tp}"] if self.tp > 1 else []
        parts += [f"PP{self.pp}"] if self.pp > 1 else []
        host = f" + {self.host_cache_gb:g} GB host" if self.host_cache_gb else ""
        return (" ".join(parts) or "1 device") + host

    def options(self) -> dict[str, Any]:
        """The engine's options that differ from their defaults, by name; the host tier is always said."""
        wanted = {"scheduler": self.scheduler, "token_budget": self.token_budget, "tbt_target": self.tbt_target}
        default = EngineConfig()
        changed = {name: value for name, value in wanted.items() if value != getattr(default, name)}
        return changed | {"host_cache_gb": self.host_cache_gb}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all candidates have in common. Plain data: it goes to other processes."""

    model: str | ModelShape
    """A shape, or the name of a known one; not read where there is a profile."""
    device: str
    devices: int
    price: float | None
    """Of one device for an hour."""
    profile: CostProfile | None
    """As measured on one device; else it is made for each layout."""
    engine: EngineConfig
    workload: Workload
    """Conversations to draw from; a run takes as many as arrive in its time, again from the first where they end."""
    variation: float
    tbt_ms: float
    ttft_ms: float | None
    seconds: float
    """How long conversations arrive in each run."""
    link: str | None = None
    """What joins the devices of a layer; None: the device's own."""
    stage_link: str | None = None
    """What joins the stages of a pipeline; None: the same."""

    def deployment(self, candidate: Candidate) -> Deployment:
        """Profile and stages of a replica. Raises ValueError where it does not fit."""
        if self.profile is not None:
            if candidate.devices > 1:
                raise ValueError("the profile was measured on one device")
            return Deployment(self.profile, None, True, 1)
        return deploy(
            self.model,
            self.device,
            tp=candidate.tp,
            pp=candidate.pp,
            link=self.link,
            stage_link=self.stage_link,
            memory_fraction=self.engine.memory_fraction,
        )

    def arriving(self, base: Workload, rate: float) -> Workload:
        """A run's conversations at a rate."""
        count = max(LEAST, math.ceil(rate * self.seconds))
        drawn = [base[number % len(base)] for number in range(count)]
        return workloads.gamma(drawn, rate, self.variation, self.engine.seed)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a candidate. Of one replica, but for `fleet`."""

    candidate: Candidate
    capacity: float
    """Conversations a second that it sustains; 0 where it cannot."""
    figures: Mapping[str, Any]
    """Of the run at that rate, as `bench.records.summary` names them; empty where there is none."""
    tokens: float
    """Generated tokens a second at that rate, as it goes on: without the run's slow end."""
    replicas: int
    """How many of it the devices hold."""
    cost: float | None
    """Of a million generated tokens at that rate; None without a price or capacity."""
    reason: str = ""
    """Why there is no capacity."""
    fits: bool = True
    """Whether it can run at all: where it cannot, no policy can on its layout."""

    @property
    def fleet(self) -> float:
        """Conversations a second of all replicas."""
        return self.capacity * self.replicas


def judge(setting: Setting, candidate: Candidate) -> Verdict:
    """Search a candidate's capacity. The same arguments give the same verdict."""
    replicas = setting.devices // candidate.devices
    try:
        if not replicas:
            raise ValueError(f"takes {candidate.devices} devices of {setting.devices}")
        deployment = setting.deployment(candidate)
        profile, engine = deployment.profile, replace(setting.engine, **candidate.options())
        base = workloads.cut(setting.workload, longest(engine, profile))
        if not base:
            raise ValueError(f"no request fits its context of {longest(engine, profile):,} tokens")
        runs: dict[float, dict[str, Any]] = {}

        def at(rate: float) -> dict[str, Any]:
            arriving = setting.arriving(base, rate)
            figures = summary(simulate(engine, profile, arriving, pipeline=deployment.pipeline).records)
            runs[rate] = figures | {"num_conversations": len(arriving)}
            return runs[rate]

        start = guess(engine, deployment, base)
        capacity = find_capacity(at, setting.tbt_ms, ttft_ms=setting.ttft_ms, start=start, stride=STRIDE)
    except ValueError as error:
        return Verdict(candidate, 0.0, {}, 0.0, replicas, None, str(error), fits=False)
    if not capacity:
        fewest = runs[min(runs)]
        reason = f"P99 TBT {fewest['p99_itl_ms']:,.0f} ms, TTFT {fewest['p99_ttft_ms']:,.0f} ms however few arrive"
        return Verdict(candidate, 0.0, {}, 0.0, replicas, None, reason)
    figures = runs[capacity]
    tokens = capacity * figures["total_output_tokens"] / figures["num_conversations"]
    cost = None if setting.price is None else setting.price * candidate.devices / 3600 / tokens * 1e6
    return Verdict(candidate, capacity, figures, tokens, replicas, cost)


def longest(engine: EngineConfig, profile: CostProfile) -> int:
    """Tokens that a context holds."""
    return min(engine.max_model_len or profile.max_model_len, profile.cache_tokens + 1)


def guess(engine: EngineConfig, deployment: Deployment, base: Workload) -> float:
    """Where to begin the search: what is done a second when more comes at once than runs at once. Saves long runs."""
    sample = [replace(base[number % len(base)], arrival=0.0) for number in range(2 * engine.max_sequences)]
    outcome = simulate(engine, deployment.profile, sample, pipeline=deployment.pipeline)
    return len(sample) / outcome.seconds


Judge = Callable[[Sequence[Candidate]], Iterator[Verdict]]
"""Judges candidates, in their order."""


@contextmanager
def judges(setting: Setting, jobs: int) -> Iterator[Judge]:
    """A way to judge many, in so many processes at once. Leaving it ends them, whatever they do."""
    if jobs == 1:
        yield partial(map, partial(judge, setting))
        return
    # Spawned, as a forked child would inherit the locks of threads that it does not have. An interrupt is ours to
    # see: children inherit that it is ignored, as they would otherwise show where they were.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        pool = multiprocessing.get_context("spawn").Pool(jobs)
    finally:
        signal.signal(signal.SIGINT, before)
    with pool:
        yield partial(pool.imap, partial(judge, setting))


def best_of(verdicts: Sequence[Verdict]) -> Verdict | None:
    """The one with the highest capacity over all devices; None where none has any.

    A search cannot tell apart what is closer than its bounds: of those the first is best, which is the plainest.
    """
    most = max((verdict.fleet for verdict in verdicts), default=0.0)
    return next((verdict for verdict in verdicts if verdict.capacity and verdict.fleet >= most * (1 - CLOSE)), None)
