"""Capacity planning: the highest request rate that a deployment sustains within latency limits, and its cost."""

from __future__ import annotations

import math
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from holdfast.cluster.routing import RouterName, RoutingRules, make_router
from holdfast.core.config import SchedulerName
from holdfast.engine.profiles import CostProfile
from holdfast.lab import workloads
from holdfast.lab.metrics import Record, Slo, queue_growth, summary
from holdfast.lab.simulator.cluster import ClusterOutcome, apart, on_cores, simulate_cluster
from holdfast.lab.simulator.deployment import Deployment, Pipeline, deploy
from holdfast.lab.simulator.devices import LINKS, look_up
from holdfast.lab.simulator.run import context_length, simulate
from holdfast.lab.simulator.shapes import ModelShape
from holdfast.lab.workloads import LeftOut, LongerName, Workload
from holdfast.lm.choice import find_policy
from holdfast.lm.config import EngineConfig

MAX_QUEUED_MS = 2000.0
"""Longest median wait in ms for the first step under a sustained load (Sarathi-Serve §5)."""
MAX_QUEUE_GROWTH = 0.05
"""Largest share of the arriving requests that may still wait when arrivals end (`metrics.queue_growth`)."""
TOLERANCE = 0.05
"""Default gap between the bounds of a search at which it ends, as a share of the lower bound."""
MIN_RATE, MAX_RATE = 1e-3, 1e5
"""Bounds of a search, in requests per second."""
SHARED_OPTIONS = (
    "max_sequences", "max_model_len", "block_size", "headroom", "memory_fraction", "prefix_sharing", "chunk_size",
    "eviction", "seed", "quantization", "kv_cache_dtype",
)  # fmt: skip
"""Engine options that are the same for all candidates."""
MIN_CONVERSATIONS = 40
"""Smallest number of conversations in a run, however low its rate."""
LIFETIMES = 3.0
"""Length of a run's arrivals, in mean lifetimes of its conversations. During about the first lifetime the number of
open conversations rises, and no queue forms however high the rate is."""
MOST_EXTENSION = 8.0
"""Longest time of arrivals in a run, divided by the time that was asked for."""
MAX_ROUTED = 64
"""Largest number of replicas that are simulated together."""
FIRST_STEP = 1.2
"""First factor of a candidate's search. It is small because throughput is a good first guess of the capacity."""
TARGET_MARGIN = 0.9
"""Share of the TBT limit that a computed budget aims at, because real steps differ from predicted ones."""

Policy = tuple[SchedulerName, int | None, float | None]
"""A scheduler with its fixed budget in tokens or its TBT target in ms."""
Layout = tuple[int, int, float]
"""tp, pp and the size of the host tier in GB."""


def sustained(figures: Mapping[str, float], tbt_ms: float, ttft_ms: float | None = None) -> bool:
    """Whether P99 TBT and P99 TTFT are within their limits and the queue is short and does not grow.

    The queue is short if the median wait for the first step is at most MAX_QUEUED_MS. It grows if the figure
    `queue_growth` says so; without that figure only its length counts. If `figures` has no queueing times, TTFT
    replaces them. Without `ttft_ms`, TTFT has no limit.
    """
    queued = figures["median_queued_ms" if "median_queued_ms" in figures else "median_ttft_ms"]
    prompt = ttft_ms is None or figures["p99_ttft_ms"] <= ttft_ms
    steady = queued <= MAX_QUEUED_MS and figures.get("queue_growth", 0.0) <= MAX_QUEUE_GROWTH
    return prompt and figures["p99_itl_ms"] <= tbt_ms and steady


def load_figures(records: Sequence[Record], workload: Workload, slo: Slo | None = None) -> dict[str, Any]:
    """`metrics.summary` of a run, with figures that separate a lasting load from a burst.

    - `arrival_window`: seconds from the first conversation's arrival to the last one's.
    - `queue_growth`: growth of the queue in that window (`metrics.queue_growth`).
    - `mean_lifetime`: seconds from a conversation's arrival to its last token, including the times between its turns.

    Raises ValueError if no request succeeded.
    """
    arrivals = [conversation.arrival for conversation in workload]
    window = max(arrivals) - min(arrivals)
    figures = summary(records, slo)
    thought = sum(turn.think for conversation in workload for turn in conversation.turns[1:])
    served = figures["mean_e2el_ms"] / 1e3 * figures["completed"]
    return figures | {
        "arrival_window": window,
        "queue_growth": queue_growth(records, window),
        "mean_lifetime": (served + thought) / len(workload),
    }


def describe_load(figures: Mapping[str, float]) -> str:
    """One line of text: how long the load of a run lasted, and whether that is long enough to show a growing queue."""
    window, lifetime = figures["arrival_window"], figures["mean_lifetime"]
    lasted = f"conversations arrived for {window:,.3g} s, {window / lifetime:,.2g} times as long as one lasts"
    if lasting(figures):
        return f"the queue does not grow: {lasted}"
    return f"the run was too short to show whether the queue grows: {lasted}; it takes {LIFETIMES * lifetime:,.0f} s"


def lasting(figures: Mapping[str, float]) -> bool:
    """Whether conversations arrived for at least LIFETIMES lifetimes, so that the load is not just a burst."""
    return figures["arrival_window"] >= LIFETIMES * figures["mean_lifetime"]


def find_capacity(
    run: Callable[[float], Mapping[str, float]],
    tbt_ms: float,
    *,
    ttft_ms: float | None = None,
    start: float = 1.0,
    step: float = 2.0,
    tolerance: float = TOLERANCE,
) -> float:
    """The highest sustained rate in requests per second, to within `tolerance`; 0.0 if no rate is sustained.

    `run` returns the figures of a run at a rate; `search_rate` searches. Raises ValueError as it does.
    """
    return search_rate(lambda rate: sustained(run(rate), tbt_ms, ttft_ms), start=start, step=step, tolerance=tolerance)


def search_rate(
    good: Callable[[float], bool], *, start: float = 1.0, step: float = 2.0, tolerance: float = TOLERANCE
) -> float:
    """The highest rate in requests per second that is `good`, to within `tolerance`; 0.0 if none is.

    The search goes up or down from `start` by a factor until it has a bound on both sides, then bisects. The factor is
    `step` at first, so choose a small one if `start` is a good guess; it is squared each time, up to 2. Raises
    ValueError for arguments with which the search would never end.
    """
    if not (0 < start < math.inf and step > 1):
        raise ValueError(f"start is {start} and step {step}; they must be above 0 and above 1, and start finite")
    if not tolerance > 0:
        raise ValueError(f"tolerance is {tolerance}; it must be above 0")
    best, worst = 0.0, 0.0
    rate = start
    while not (best and worst):
        if good(rate):
            best, rate = rate, rate * step
        else:
            worst, rate = rate, rate / step
        step = min(step * step, 2.0)
        if rate < MIN_RATE:
            return 0.0
        if rate > MAX_RATE:
            return best
    while worst / best > 1 + tolerance:
        rate = (best * worst) ** 0.5
        if good(rate):
            best = rate
        else:
            worst = rate
    return best


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve: the parts of a `Policy`, then those of a `Layout`."""

    scheduler: SchedulerName = "stall-free"
    token_budget: int | None = None
    tbt_target: float | None = None
    """Target between tokens in milliseconds; None without a target."""
    tp: int = 1
    pp: int = 1
    host_cache_gb: float = 0.0

    @property
    def devices(self) -> int:
        """Number of devices in one replica."""
        return self.tp * self.pp

    @property
    def policy(self) -> str:
        """The scheduler and its budget, as text."""
        if self.tbt_target is not None:
            return f"{self.scheduler}, {self.tbt_target:g} ms"
        return self.scheduler if self.token_budget is None else f"{self.scheduler}, {self.token_budget:,} tokens"

    @property
    def layout(self) -> str:
        """The devices of a replica and its host tier, as text."""
        parts = [f"TP{self.tp}"] if self.tp > 1 else []
        parts += [f"PP{self.pp}"] if self.pp > 1 else []
        host = f" + {self.host_cache_gb:g} GB host" if self.host_cache_gb else ""
        return (" ".join(parts) or "1 device") + host

    def options(self) -> dict[str, Any]:
        """The engine options that differ from their defaults, by name. The host tier is always among them."""
        wanted = {"scheduler": self.scheduler, "token_budget": self.token_budget, "tbt_target": self.tbt_target}
        default = EngineConfig()
        wanted |= {"tp": self.tp, "pp": self.pp}
        changed = {name: value for name, value in wanted.items() if value != getattr(default, name)}
        return changed | {"host_cache_gb": self.host_cache_gb}


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityQuestion:
    """The question that a capacity plan answers, shared by all candidates.

    It is plain data, so processes can exchange it.
    """

    model: str | ModelShape
    """A model's shape, or the name of a known one. Not used if there is a profile."""
    device: str
    devices: int
    price: float | None
    """Price of one device per hour; None if unknown."""
    profile: CostProfile | None
    """A measured profile, valid for its own layout only. None: each layout has its own, derived or packaged."""
    engine: EngineConfig
    workload: Workload
    """Conversations to draw from. A run takes as many as arrive in its time, and starts over at the end of the list."""
    variation: float
    tbt_ms: float
    ttft_ms: float | None
    seconds: float
    """Seconds during which conversations arrive in each run.

    A run is longer if it must show whether the queue grows.
    """
    link: str | None = None
    """Link between the devices of a layer. None: the device's own."""
    stage_link: str | None = None
    """Link between the stages of a pipeline. None: `link`."""
    longer: LongerName = "cut"
    """Whether conversations longer than a candidate's context are cut or dropped."""
    cores: int | None = None
    """Number of cores that all replicas share, for the profile of a CPU. None: as many as they have threads."""

    def deployment(self, candidate: Candidate) -> Deployment:
        """Profile and stages of a replica. Raises ValueError if the model does not fit."""
        if self.profile is not None:
            if (candidate.tp, candidate.pp) != (self.profile.tp, self.profile.pp):
                own = Candidate(tp=self.profile.tp, pp=self.profile.pp)
                raise ValueError(f"the profile was measured on {own.layout}")
            return Deployment(self.profile, Pipeline.measured(self.profile), True)
        return deploy(
            self.model,
            self.device,
            tp=candidate.tp,
            pp=candidate.pp,
            link=self.link,
            stage_link=self.stage_link,
            memory_fraction=self.engine.memory_fraction,
        )

    def arriving(self, base: Workload, rate: float, seconds: float | None = None) -> Workload:
        """The conversations that arrive at `rate` in `seconds` seconds; by default the question's own time."""
        count = max(MIN_CONVERSATIONS, math.ceil(rate * (seconds or self.seconds)))
        drawn = [base[number % len(base)] for number in range(count)]
        return workloads.gamma_arrivals(drawn, rate, self.engine.seed, self.variation)

    def run_at(
        self,
        base: Workload,
        rate: float,
        run: Callable[[Workload], Sequence[Record]],
        holds: Callable[[Mapping[str, float]], bool] | None = None,
    ) -> dict[str, Any]:
        """The figures of a run at `rate`, long enough to show whether the rate is sustained.

        `holds` says from a run's figures whether it is; by default, `sustained` within the question's limits. A run
        that seems to sustain its rate is repeated with more arrivals until they last for LIFETIMES of its
        conversations, or MOST_EXTENSION times as long as asked for. Raises ValueError as `run` does.
        """
        holds = holds or partial(sustained, tbt_ms=self.tbt_ms, ttft_ms=self.ttft_ms)
        seconds, most = self.seconds, MOST_EXTENSION * self.seconds
        while True:
            arriving = self.arriving(base, rate, seconds)
            figures = load_figures(run(arriving), arriving) | {"num_conversations": len(arriving)}
            longest = max(seconds, figures["arrival_window"])
            if not holds(figures) or lasting(figures) or longest >= most:
                return figures
            seconds = min(most, max(1.1 * LIFETIMES * figures["mean_lifetime"], 1.1 * longest))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The capacity and cost of a candidate, for one replica. `fleet_capacity` is the capacity of all replicas."""

    candidate: Candidate
    capacity: float
    """Conversations per second that one replica sustains; 0 if none."""
    figures: Mapping[str, Any]
    """`load_figures` of the run at that rate, and the shares left out by the context; empty without capacity."""
    output_rate: float
    """Generated tokens per second at that rate in the long run, without the slow end of a run."""
    replicas: int
    """Number of replicas that the devices hold."""
    cost: float | None
    """Cost of a million generated tokens at that rate; None without a price or without capacity."""
    reason: str = ""
    """The reason why there is no capacity; empty if there is some."""
    beyond: str = ""
    """How far the steps of that run exceed those of the measured profile, in words; empty if they do not."""
    fits: bool = True
    """Whether the candidate can run at all. If not, no policy can run on its layout."""

    @property
    def fleet_capacity(self) -> float:
        """Conversations per second that all replicas sustain."""
        return self.capacity * self.replicas


TOO_LONG = "no request fits its context"
"""Beginning of the reason of a candidate for whose context every request is too long."""


def evaluate(question: CapacityQuestion, candidate: Candidate) -> Evaluation:
    """Search a candidate's capacity. Deterministic: the same arguments give the same evaluation."""
    replicas = question.devices // candidate.devices
    try:
        if not replicas:
            raise ValueError(f"takes {candidate.devices} devices of {question.devices}")
        deployment = question.deployment(candidate)
        profile, engine = deployment.profile, without_contracts(question.engine, candidate)
        longest = context_length(engine, profile)
        base = workloads.fit_context(question.workload, longest, question.longer)
        if not base:
            raise ValueError(f"{TOO_LONG} of {longest:,} tokens")
        left_out = LeftOut.of(question.workload, base).figures()
        runs: dict[float, dict[str, Any]] = {}
        beyond: dict[float, str] = {}

        def run_at(rate: float) -> dict[str, Any]:
            def run(arriving: Workload) -> list[Record]:
                outcome = simulate(engine, profile, arriving, pipeline=deployment.pipeline)
                beyond[rate] = profile.beyond(outcome.most_decodes, outcome.most_tokens)
                return outcome.records

            runs[rate] = question.run_at(base, rate, run)
            return runs[rate]

        start = saturated_rate(engine, deployment, base)
        capacity = find_capacity(run_at, question.tbt_ms, ttft_ms=question.ttft_ms, start=start, step=FIRST_STEP)
    except ValueError as error:
        return Evaluation(candidate, 0.0, {}, 0.0, replicas, None, str(error), fits=False)
    if not capacity:
        fewest = runs[min(runs)]
        reason = f"P99 TBT {fewest['p99_itl_ms']:,.0f} ms, TTFT {fewest['p99_ttft_ms']:,.0f} ms however few arrive"
        return Evaluation(candidate, 0.0, {}, 0.0, replicas, None, reason)
    figures = runs[capacity] | left_out
    output_rate = capacity * figures["total_output_tokens"] / figures["num_conversations"]
    cost = None if question.price is None else question.price * candidate.devices / 3600 / output_rate * 1e6
    return Evaluation(candidate, capacity, figures, output_rate, replicas, cost, beyond=beyond[capacity])


def without_contracts(engine: EngineConfig, candidate: Candidate) -> EngineConfig:
    """The engine of a candidate that refuses no request. One that refuses has no rate at which its queue grows."""
    return replace(engine, **candidate.options(), contracts="off")


@dataclass(frozen=True, slots=True)
class FleetEvaluation:
    """The capacity of all replicas of a candidate together, with one router."""

    router: RouterName
    replicas: int
    capacity: float
    """Conversations per second that the replicas sustain together; 0 if none."""
    figures: Mapping[str, Any]
    """`load_figures` of the run at that rate; empty without capacity."""
    found: float
    """Prompt tokens found in that run, as a share of those that one replica with unlimited memory would find."""
    spread: float
    """Busy time of the busiest replica minus that of the least busy one, as a share of the mean."""
    moves: int
    """Number of conversations moved ahead of need."""
    copied_tokens: int
    """Number of tokens whose KV was copied between replicas."""


def evaluate_fleet(
    question: CapacityQuestion, evaluation: Evaluation, router: RouterName, link: str
) -> FleetEvaluation:
    """Search the capacity of all replicas of an evaluated candidate together, with a router of this policy.

    `link` joins the replicas; state moves over it if they have a host tier. Deterministic. Raises ValueError for an
    evaluation without capacity, for more than MAX_ROUTED replicas and for padded rows.
    """
    candidate, replicas = evaluation.candidate, evaluation.replicas
    if not evaluation.capacity:
        raise ValueError(f"{candidate.policy} on {candidate.layout} has no capacity, so its replicas have none")
    if replicas > MAX_ROUTED:
        raise ValueError(f"{replicas} replicas are to be simulated together; there may be at most {MAX_ROUTED}")
    deployment = question.deployment(candidate)
    profile, engine = deployment.profile, without_contracts(question.engine, candidate)
    base = workloads.fit_context(question.workload, context_length(engine, profile), question.longer)
    rules = RoutingRules(block_size=engine.block_size, step_tokens=engine.fixed_token_budget or profile.token_budget)
    # Each engine on a CPU takes as many cores as its profile had threads.
    cores = None if question.cores is None or profile.threads is None else question.cores / profile.threads
    runs: dict[float, tuple[dict[str, Any], ClusterOutcome]] = {}

    def run(arriving: Workload) -> ClusterOutcome:
        return simulate_cluster(
            engine,
            profile,
            arriving,
            make_router(router, profile.cost, rules, seed=engine.seed),
            replicas=replicas,
            link=look_up("link", LINKS, link),
            pipeline=deployment.pipeline,
            sharing=apart if cores is None else on_cores(cores),
        )

    def run_at(rate: float) -> dict[str, Any]:
        outcomes: list[ClusterOutcome] = []

        def records_of(arriving: Workload) -> list[Record]:
            outcomes.append(run(arriving))
            return outcomes[-1].records

        figures = question.run_at(base, rate, records_of)
        runs[rate] = figures, outcomes[-1]
        return figures

    start = evaluation.fleet_capacity
    capacity = find_capacity(run_at, question.tbt_ms, ttft_ms=question.ttft_ms, start=start, step=FIRST_STEP)
    figures, outcome = runs[capacity or min(runs)]
    copied = outcome.fetched_tokens + outcome.moved_tokens
    return FleetEvaluation(
        router, replicas, capacity, figures if capacity else {}, outcome.found, outcome.spread, outcome.moves, copied
    )


def saturated_rate(engine: EngineConfig, deployment: Deployment, base: Workload) -> float:
    """Conversations completed per second when all arrive at once.

    As a first guess of the capacity, it saves long runs.
    """
    sample = [replace(base[number % len(base)], arrival=0.0) for number in range(2 * engine.most_sequences)]
    outcome = simulate(engine, deployment.profile, sample, pipeline=deployment.pipeline)
    return len(sample) / outcome.seconds


@contextmanager
def evaluator(question: CapacityQuestion, jobs: int) -> Iterator[Callable[[Sequence[Candidate]], Iterator[Evaluation]]]:
    """A function that evaluates candidates in order, in `jobs` processes. Leaving the context ends them at once.

    With several processes, SIGTERM raises SystemExit in this one meanwhile, so that it leaves the context, too.
    """
    if jobs == 1:
        yield partial(map, partial(evaluate, question))
        return
    # A process that SIGTERM ends at once leaves its pool's semaphores to Python's tracker, which prints a warning.
    ended = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        # Spawn, because a forked child would inherit locks of threads that it does not have. Children ignore Ctrl-C,
        # which this process handles; otherwise each would print a traceback.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            pool = multiprocessing.get_context("spawn").Pool(jobs)
        finally:
            signal.signal(signal.SIGINT, before)
        with pool:
            yield partial(pool.imap, partial(evaluate, question))
    finally:
        signal.signal(signal.SIGTERM, ended)


def best_of(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """The evaluation with the highest capacity over all devices; None if none has any.

    A search cannot separate capacities that are within its tolerance. The first of them is chosen, which is the
    plainest.
    """
    highest = max((each.fleet_capacity for each in evaluations), default=0.0)
    near = highest * (1 - TOLERANCE)
    return next((each for each in evaluations if each.capacity and each.fleet_capacity >= near), None)


def make_capacity_plan(
    question: CapacityQuestion,
    layouts: Sequence[Layout],
    policies: Sequence[Policy],
    jobs: int,
    on_begin: Callable[[Sequence[Candidate]], None],
    on_end: Callable[[Evaluation], None],
) -> list[Evaluation]:
    """Evaluate every layout under the first policy, then every other policy on the best layout.

    Uses at most `jobs` processes. `on_begin` receives the candidates of each of the two rounds before it, and `on_end`
    each of the `len(layouts) + len(policies) - 1` evaluations.
    """
    evaluations: list[Evaluation] = []
    with evaluator(question, min(jobs, max(len(layouts), len(policies)))) as evaluate_all:

        def collect(candidates: Sequence[Candidate]) -> None:
            if candidates:
                on_begin(candidates)
            for evaluation in evaluate_all(candidates):
                evaluations.append(evaluation)
                on_end(evaluation)

        collect([Candidate(*policies[0], *layout) for layout in layouts])
        best = (best_of(evaluations) or evaluations[0]).candidate
        collect([Candidate(*policy, best.tp, best.pp, best.host_cache_gb) for policy in policies[1:]])
    return evaluations


def make_layouts(devices: int, tp: Sequence[float], pp: Sequence[float], host_gb: Sequence[float]) -> list[Layout]:
    """Every combination of tp, pp and host tier that fits on `devices`, plainest first. Raises ValueError if none fits.

    An empty `tp` or `pp` stands for all powers of two up to `devices`.
    """
    powers = [1 << power for power in range(devices.bit_length())]
    found = {
        (int(width), int(depth), host)
        for width in tp or powers
        for depth in pp or powers
        for host in host_gb
        if width * depth <= devices
    }
    if not found:
        raise ValueError(f"no tp x pp of those given fits on {devices} devices; give more --devices")
    return sorted(found, key=lambda layout: (layout[0] * layout[1], layout))


def make_policies(schedulers: Sequence[SchedulerName], budgets: Sequence[float], tbt_ms: float) -> list[Policy]:
    """Schedulers with their budgets: stall-free with a TBT target first, then with each fixed budget; then others."""
    found: list[Policy] = []
    for name in schedulers:
        if name == "stall-free":
            found.append((name, None, round(TARGET_MARGIN * tbt_ms, 3)))
        if find_policy(name).chunks:
            found += [(name, int(budget), None) for budget in budgets]
        else:
            found.append((name, None, None))
    return found
