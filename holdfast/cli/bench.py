"""`holdfast bench`: runs a workload on a server, a local model or a simulation, and reports the metrics."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from holdfast.cli.flags import check_url, require_at_least_1, require_positive
from holdfast.cli.output import changed_options, check_outputs
from holdfast.cli.targets import Ran, Target, local_engine, server, simulated_engine
from holdfast.core.config import option
from holdfast.engine.profiles import CostProfile
from holdfast.files.results import write_result
from holdfast.lab import workloads
from holdfast.lab.metrics import Slo, summary
from holdfast.lab.planning import LIFETIMES, find_capacity, lasting, load_figures
from holdfast.lab.reports.run_data import Run
from holdfast.lab.reports.tables import show_figures
from holdfast.lab.simulator.deployment import Pipeline, configured_shape, deploy
from holdfast.lab.simulator.devices import DEVICES, LINKS
from holdfast.lab.simulator.shapes import MODELS
from holdfast.lab.simulator.tiers import DISK_RATE
from holdfast.lab.workloads import LeftOut, LongerName, Workload, WorkloadConfig
from holdfast.lm.config import EngineConfig

SIMULATED_OPTIONS = (
    "scheduler", "token_budget", "tbt_target", "max_sequences", "max_model_len", "block_size", "headroom",
    "steps_in_flight", "prefix_sharing", "trace", "seed", "host_cache_gb", "chunk_size", "eviction", "swap_threshold",
    "swap_in", "swap_in_groups",
    "memory_fraction", "quantization", "kv_cache_dtype", "tp", "pp", "order", "ttft_target", "contracts",
    "contract_confidence",
)  # fmt: skip
"""Engine options that affect a simulation."""
SHORT_SECONDS = 20.0
"""Minimum seconds of arrivals for a reliable capacity."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Target, request rates and latency limits of a benchmark. Raises ValueError for invalid options."""

    url: str | None = option(None, "run it on the server at this URL (any server with OpenAI's API)")
    simulate: str | None = option(
        None,
        "simulate it with this profile, a file written by `holdfast profile --out`; or with MODEL@DEVICE, MODEL one of "
        f"{', '.join(sorted(MODELS))}, DEVICE one of {', '.join(sorted(DEVICES))}",
    )
    link: str | None = option(
        None, f"link between the devices of a layer: {', '.join(LINKS)}; default: the device's own"
    )
    stage_link: str | None = option(None, "link between pipeline stages; default: the same")
    copy_gbs: float | None = option(
        None, "speed of simulated copies to the host tier in GB a second; default: the profile's"
    )
    disk_gbs: float | None = option(
        None, "speed of a simulated disk tier (--disk-cache-dir) in GB a second; default: 3, of an NVMe drive"
    )
    api_key: str | None = option(None, "key for the server; default: HOLDFAST_API_KEY")
    served_model: str | None = option(None, "model name to ask the server for; default: the first that it lists")
    rates: tuple[float, ...] = option(
        (), "conversations a second, as a Poisson process, one run for each; default: a trace's times, else all at once"
    )
    speed: float = option(1.0, "replay a trace's times this many times as fast")
    concurrency: int | None = option(None, "keep this many conversations open, ignoring arrival times")
    vocab_size: int = option(256, "token ids of prompts are below this, for a server")
    cache_tokens: int | None = option(None, "size of the simulated KV cache in tokens; default: the profile's")
    host_us: float = option(0.0, "host time of each simulated step in microseconds")
    tell_contracts: bool = option(
        True, "ask for the contracts of --contract or of the workload; if not, only measure which ones are kept"
    )
    tell_pauses: bool = option(
        True,
        "say when the next turn is expected, as the workload or --pause-noise has it, and which answers are replaced; "
        "if not, the server learns pauses by itself",
    )
    slo_ttft: float | None = option(None, "goodput counts requests with at most this TTFT", unit="ms")
    slo_tpot: float | None = option(None, "goodput counts requests with at most this time per output token", unit="ms")
    slo_e2el: float | None = option(None, "goodput counts requests with at most this end-to-end latency", unit="ms")
    capacity: float | None = option(
        None, "find the highest rate whose P99 TBT is at most this, and P99 TTFT at most --slo-ttft if given", unit="ms"
    )
    json: str | None = option(None, "write the metrics to this file as JSON, named as `vllm bench serve` names them")
    report: str | None = option(None, "write a report to this file: one HTML page that needs no network")
    plots: str | None = option(None, "write the report's plots into this directory, as PNG")

    def __post_init__(self) -> None:
        if self.url is not None and self.simulate is not None:
            raise ValueError(
                "bench takes a MODEL to run here, --url URL for a server, or --simulate PROFILE: one of them"
            )
        check_url(self.url)
        require_at_least_1(self, "concurrency", "cache_tokens")
        require_positive(self, "speed", "slo_ttft", "slo_tpot", "slo_e2el", "capacity", "rates", "copy_gbs", "disk_gbs")
        if not 0 <= self.host_us < float("inf"):
            raise ValueError(f"host_us is {self.host_us:g}; it must be at least 0 and finite")
        if self.concurrency is not None and (self.rates or self.capacity):
            raise ValueError(
                "concurrency is a closed loop, which has no rate; drop --concurrency, or --rates and --capacity"
            )
        if self.rates and self.capacity:
            raise ValueError("capacity looks for the rate itself; drop --rates or --capacity")


def run(config: BenchConfig, workload: WorkloadConfig, engine: EngineConfig, arguments: Sequence[str]) -> int:
    """Run the benchmark, print the metrics and write the files. Returns the exit code.

    `arguments` is the command line, for the report. Raises ValueError, OSError, EngineStartError.
    """
    check_outputs(config.json, engine.trace, report=config.report, plots=config.plots)
    check_links(config, engine)
    if engine.trace is not None and (config.capacity is not None or len(config.rates) > 1):
        raise ValueError("trace is the timeline of one run; give it with at most one rate, and without --capacity")
    console = Console(highlight=False)
    base = workload.read(engine.seed)
    if config.speed != 1 and (
        config.rates or config.capacity or config.concurrency or not any(each.arrival for each in base)
    ):
        raise ValueError(
            f"speed is {config.speed:g}, which replays a trace's own times; give a trace with --workload, and drop "
            "--rates, --capacity and --concurrency"
        )
    with target_of(config, engine, console) as target:
        left_out = dict[str, float]()
        if (longest := target.context_length) is not None:
            base, left_out = within_context(base, longest, workload.longer, console)
        bench = _Bench(config, workload, engine.seed, target, base, left_out)
        capacity = bench.run_all()
    runs = bench.runs
    figures = [run.figures for run in runs]
    show_figures(console, figures)
    for line in (*bench.warnings, *filter(None, [target.note()])):
        console.print(Text(line), soft_wrap=True)
    if capacity is not None:
        console.print(describe_capacity(config, capacity, base, figures), soft_wrap=True)
    if config.json is not None:
        result: Any = figures[0] if len(runs) == 1 and capacity is None else {"runs": figures, "capacity": capacity}
        write_result(config.json, json.dumps(result, indent=1) + "\n")
    if config.report is not None or config.plots is not None:
        from holdfast.lab.reports.report import bench_report  # imports matplotlib, an extra

        settings = [("target", target.name), ("workload", workload.workload)]
        settings += changed_options(workload, without=("workload",))
        settings += changed_options(config, without=("url", "api_key", "json", "report", "plots", "simulate"))
        settings += [] if config.url is not None else changed_options(engine, without=("model", "trace"))
        wanted = {"p99_itl_ms": config.capacity, "p99_ttft_ms": config.slo_ttft}
        limits = {name: limit for name, limit in wanted.items() if limit is not None}
        report = bench_report(runs, title=target.name, workload=workload.title, limits=limits, capacity=capacity)
        command = shlex.join(["holdfast", "bench", *without_key(arguments)])
        written = report.write(config.report, config.plots, settings=settings, command=command)
        console.print(f"written: {', '.join(written)}", soft_wrap=True)
    return 0


def within_context(
    base: Workload, longest: int, longer: LongerName, console: Console
) -> tuple[Workload, dict[str, float]]:
    """Return the conversations within `longest` tokens, and which shares are left out, by the names of metrics.

    Prints what is left out. Raises ValueError if nothing is left.
    """
    fitting = workloads.fit_context(base, longest, longer)
    left_out = LeftOut.of(base, fitting)
    if not fitting:
        raise ValueError(f"all {len(base)} conversations are longer than the context of {longest:,} tokens")
    if left_out.requests:
        console.print(f"longer than the context, and left out: {left_out}", soft_wrap=True)
    return fitting, left_out.figures()


def check_links(config: BenchConfig, engine: EngineConfig) -> None:
    """Raises ValueError for links that connect nothing, and for links or a layout that conflict with a profile."""
    derived = "@" in (config.simulate or "")
    if not derived and (config.link, config.stage_link) != (None, None):
        raise ValueError("link and stage_link are for --simulate MODEL@DEVICE")
    if config.simulate is not None and not derived and engine.layout.ranks > 1:
        raise ValueError("tp and pp are for --simulate MODEL@DEVICE; a profile has its own layout")
    if config.link is not None and engine.layout.ranks == 1:
        raise ValueError(f"link is {config.link}, which joins devices; give --tp or --pp above 1")
    if config.stage_link is not None and engine.pp == 1:
        raise ValueError(f"stage_link is {config.stage_link}, which joins stages; give --pp above 1")


@dataclass
class _Bench:
    """The runs of one command, ordered by rate."""

    config: BenchConfig
    workload: WorkloadConfig
    seed: int
    target: Target
    base: Workload
    left_out: Mapping[str, float]
    """Shares of the workload that are longer than the context, by the names of metrics. Empty: it is not known."""
    runs: list[Run] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """Warnings to print: failed requests, and metrics that earlier runs have affected."""

    def run_all(self) -> float | None:
        """Run the configured rates, or search for the capacity. Returns the capacity if it was searched for."""
        config = self.config
        if config.capacity is not None:
            capacity = find_capacity(self.run_at, config.capacity, ttft_ms=config.slo_ttft)
            self.runs.sort(key=lambda run: float(run.figures["request_rate"]))
            return capacity
        for rate in sorted(config.rates):
            self.run_at(rate)
        if not config.rates:
            self._keep(self.target.run(workloads.speed_up(self.base, config.speed), self.workload.workload))
        return None

    def run_at(self, rate: float) -> Mapping[str, float]:
        """Run the workload at this rate. Returns the metrics."""
        arriving = workloads.gamma_arrivals(self.base, rate, self.seed, self.workload.variation)
        return self._keep(self.target.run(arriving, f"{rate:.4g} a second"), rate, arriving)

    def _keep(self, ran: Ran, rate: float | None = None, arriving: Workload = ()) -> dict[str, Any]:
        """Keep the metrics of a run, but not its records, because a search has many runs. Returns the metrics.

        `arriving` is the run's workload if it arrives at a rate. The metrics then also show whether the queue grows.
        """
        config, records = self.config, ran.records
        slo = Slo(config.slo_ttft, config.slo_tpot, config.slo_e2el)
        at, figures = "", dict[str, Any]()
        if rate is not None:
            at = f" at {rate:.4g} a second"
            figures |= {"request_rate": rate, "burstiness": self.workload.variation**-2}
        figures |= {"model_id": self.target.model, "num_prompts": len(records)}
        figures |= {"max_concurrency": config.concurrency} if config.concurrency else {}
        figures |= self.left_out
        wanted = slo if slo != Slo() else None
        figures |= load_figures(records, arriving, wanted) if arriving else summary(records, wanted)
        figures |= {"stages_idle": ran.idle} if ran.idle else {}
        self.runs.append(Run.of(records, figures))
        if errors := [record.error for record in records if record.error]:
            self.warnings.append(f"{len(errors)} of {len(records)} requests failed{at}, as in: {errors[0]}")
        if figures["cached_tokens"] and not self.workload.shares_prefixes:
            self.warnings.append(
                f"{figures['cached_tokens']:,} prompt tokens{at} came from the cache, though no two of these prompts "
                "are alike: an earlier benchmark sent the same ones; give another --seed"
            )
        return figures


def target_of(config: BenchConfig, engine: EngineConfig, console: Console) -> AbstractContextManager[Target]:
    """Return the target that the options select. Raises ValueError, OSError, EngineStartError."""
    if config.simulate is not None:
        return nullcontext(simulation(config, config.simulate, engine, console))
    if config.url is None:
        return local_engine(
            engine, console, config.concurrency, tells=config.tell_contracts, tells_pauses=config.tell_pauses
        )
    return server(
        config.url,
        api_key=config.api_key,
        model=config.served_model,
        vocab_size=config.vocab_size,
        concurrency=config.concurrency,
        seed=engine.seed,
        tells=config.tell_contracts,
        tells_pauses=config.tell_pauses,
    )


def simulation(config: BenchConfig, source: str, engine: EngineConfig, console: Console) -> Target:
    """Return a simulation of a profile's file, or of MODEL@DEVICE, and print its origin. Raises ValueError, OSError."""
    model, at, device = source.partition("@")
    if at and not Path(source).exists():
        shape = configured_shape(model, device, engine)
        links = {"link": config.link, "stage_link": config.stage_link}
        found = deploy(shape, device, tp=engine.tp, pp=engine.pp, **links, memory_fraction=engine.memory_fraction)
        profile, pipeline = found.profile, found.pipeline
        origin = "measured" if found.measured else "derived from data sheets"
        cache = profile.cache_tokens if config.cache_tokens is None else config.cache_tokens
        details = f"{profile.precision}, {origin}: {cache:,} tokens of KV cache"
        console.print(f"{model} on {profile.cost.device}, {details}", soft_wrap=True)
    else:
        if source in MODELS and not Path(source).exists():
            devices = ", ".join(sorted(DEVICES))
            raise ValueError(f"simulate is {source}, which needs a device: {source}@DEVICE, DEVICE one of {devices}")
        profile = CostProfile.load(Path(source))
        profile.require(engine)
        pipeline, engine = Pipeline.measured(profile), replace(engine, tp=profile.tp, pp=profile.pp)
        if profile.rows is not None:
            engine = replace(engine, executor="padded")
    if config.cache_tokens is not None:
        profile = replace(profile, cache_tokens=config.cache_tokens)
    if config.copy_gbs is not None:
        profile = replace(profile, copy_rate=config.copy_gbs * 1e9)
    if not config.tell_contracts:
        engine = replace(engine, contracts="off")
    disk_rate = DISK_RATE if config.disk_gbs is None else config.disk_gbs * 1e9
    host_seconds, told = config.host_us / 1e6, config.tell_pauses
    return simulated_engine(engine, profile, pipeline, host_seconds, config.concurrency, disk_rate, tells_pauses=told)


def describe_capacity(
    config: BenchConfig, capacity: float, base: Workload, figures: Sequence[Mapping[str, Any]]
) -> str:
    """Return the capacity as text, with a warning if conversations arrived for too short a time.

    `figures` has the metrics of each run.
    """
    ttft = "" if config.slo_ttft is None else f" and P99 TTFT within {config.slo_ttft:g} ms"
    text = f"capacity: {capacity:.3g} a second with P99 TBT within {config.capacity:g} ms{ttft}"
    found = next((each for each in figures if capacity and each.get("request_rate") == capacity), None)
    if found is None:
        return text
    long_enough = 3 * SHORT_SECONDS
    if not lasting(found):
        long_enough = max(long_enough, 1.1 * LIFETIMES * found["mean_lifetime"])
    elif len(base) / capacity >= SHORT_SECONDS:
        return f"{text}, and the queue does not grow"
    return (
        f"{text}\n{len(base)} conversations arrive within {len(base) / capacity:.2g} s at that rate, and one lasts "
        f"{found['mean_lifetime']:.2g} s: too few to tell a lasting load from a burst; "
        f"give --requests {max(1, math.ceil(capacity * long_enough))}"
    )


def without_key(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the API key replaced by an ellipsis."""
    before = ("", *arguments)
    return [
        "…" if previous == "--api-key" else "--api-key=…" if argument.startswith("--api-key=") else argument
        for previous, argument in zip(before, arguments, strict=False)
    ]
