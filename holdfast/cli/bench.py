"""`holdfast bench`: a workload against a server, a model that runs here, or a simulation; figures and reports."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from holdfast.cli.bench_tables import show
from holdfast.cli.flags import check_url
from holdfast.cli.progress import turns_of
from holdfast.cli.reports import changed, makeable, needs_matplotlib, writable, written
from holdfast.cli.targets import Simulated, Target, engine_here, server
from holdfast.core.config import EngineConfig, option
from holdfast.core.version import __version__
from holdfast.engine.profiles import CostProfile
from holdfast.lab import workloads
from holdfast.lab.capacity import find_capacity
from holdfast.lab.choice import WorkloadConfig
from holdfast.lab.records import Record, Slo, summary
from holdfast.lab.series import Run
from holdfast.lab.simulator.deployment import deploy, shape_on
from holdfast.lab.simulator.devices import DEVICES, LINKS
from holdfast.lab.simulator.shapes import MODELS
from holdfast.lab.workloads import Workload

SIMULATED_OPTIONS = (
    "scheduler", "token_budget", "tbt_target", "max_sequences", "max_model_len", "block_size", "headroom",
    "steps_in_flight", "prefix_sharing", "trace", "seed", "host_cache_gb", "chunk_size", "eviction", "swap_threshold",
    "memory_fraction", "quantization", "kv_cache_dtype",
)  # fmt: skip
"""What of an engine counts in a simulation."""
SHORT_SECONDS = 20.0
"""Arrivals that last no longer say little of a capacity."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Where to send a workload, at which rates, and what counts as good. Raises ValueError for what cannot be."""

    url: str | None = option(None, "send it to the server at this URL (OpenAI's API; any server)")
    simulate: str | None = option(
        None,
        "simulate it on the device of this profile, a file of `holdfast profile --out`; or MODEL@DEVICE, of "
        f"{', '.join(sorted(MODELS))} and {', '.join(sorted(DEVICES))}",
    )
    tp: int = option(1, "devices that share each layer, for a simulated MODEL@DEVICE")
    pp: int = option(1, "groups of devices that share out the layers, the stages of a pipeline")
    link: str | None = option(None, f"what joins the devices of a layer: {', '.join(LINKS)}; default: the device's own")
    stage_link: str | None = option(None, "what joins the stages; default: the same")
    copy_gbs: float | None = option(
        None, "GB a second of the simulated copies to the host tier; default: what the profile says"
    )
    api_key: str | None = option(None, "key for the server; default: HOLDFAST_API_KEY")
    served_model: str | None = option(None, "model name to ask the server for; default: the first that it lists")
    rates: tuple[float, ...] = option(
        (), "conversations a second, by a Poisson process, one run for each; default: a trace's times, else all at once"
    )
    speed: float = option(1.0, "replay a trace's own times so many times as fast")
    concurrency: int | None = option(None, "keep so many conversations under way, whatever their arrivals")
    vocab_size: int = option(256, "prompts are made of token ids below this, for a server")
    cache_tokens: int | None = option(None, "size of the simulated KV cache in tokens; default: the profile's")
    host_us: float = option(0.0, "host time of each simulated step in microseconds")
    slo_ttft: float | None = option(None, "goodput counts requests whose TTFT is at most this", unit="ms")
    slo_tpot: float | None = option(None, "the same for the time per output token", unit="ms")
    slo_e2el: float | None = option(None, "the same for the end-to-end latency", unit="ms")
    capacity: float | None = option(
        None, "find the highest rate whose P99 TBT is at most this, and P99 TTFT at most --slo-ttft if given", unit="ms"
    )
    json: str | None = option(None, "write the figures to this file, named as `vllm bench serve` names them")
    report: str | None = option(None, "write a report to this file: one HTML page that needs no network")
    plots: str | None = option(None, "write the report's plots into this directory, as PNG")

    def __post_init__(self) -> None:
        if self.url is not None and self.simulate is not None:
            raise ValueError(
                "bench takes a MODEL to run here, --url URL for a server, or --simulate PROFILE: one of them"
            )
        check_url(self.url)
        for name in ("concurrency", "cache_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        for name in ("speed", "slo_ttft", "slo_tpot", "slo_e2el", "capacity", "rates", "copy_gbs"):
            given = getattr(self, name)
            for value in given if isinstance(given, tuple) else (given,):
                if value is not None and not 0 < value < float("inf"):
                    raise ValueError(f"{name} is {value:g}; it must be above 0")
        if (self.tp, self.pp, self.link, self.stage_link) != (1, 1, None, None) and "@" not in (self.simulate or ""):
            raise ValueError(
                "tp, pp, link and stage_link are for --simulate MODEL@DEVICE; a profile has its own layout"
            )
        if self.link is not None and self.tp == self.pp == 1:
            raise ValueError(f"link is {self.link}, which joins devices; give --tp or --pp above 1")
        if self.stage_link is not None and self.pp == 1:
            raise ValueError(f"stage_link is {self.stage_link}, which joins stages; give --pp above 1")
        if not 0 <= self.host_us < float("inf"):
            raise ValueError(f"host_us is {self.host_us:g}; it must be at least 0 and finite")
        if self.concurrency is not None and (self.rates or self.capacity):
            raise ValueError(
                "concurrency is a closed loop, which has no rate; drop --concurrency, or --rates and --capacity"
            )
        if self.rates and self.capacity:
            raise ValueError("capacity looks for the rate itself; drop --rates or --capacity")

    @property
    def wants_report(self) -> bool:
        """Whether anything is drawn."""
        return self.report is not None or self.plots is not None


def run(config: BenchConfig, load: WorkloadConfig, engine: EngineConfig, arguments: Sequence[str]) -> int:
    """Send or simulate, show, write. Returns the exit code.

    `arguments` are the command's own, for the report. Raises ValueError, OSError, EngineStartError with the reason.
    """
    if config.wants_report:
        needs_matplotlib()
    if engine.trace is not None and (config.capacity is not None or len(config.rates) > 1):
        raise ValueError("trace is the timeline of one run; give it with one of --rates, and without --capacity")
    for path in (config.json, config.report, engine.trace):
        writable(path)
    makeable(config.plots)
    console = Console(highlight=False)
    base = load.read(engine.seed)
    with target_of(config, engine, console) as target:
        if target.longest is not None:
            asked = turns_of(base)
            base = workloads.cut(base, target.longest)
            if not base:
                raise ValueError(f"all {asked} requests are longer than the context of {target.longest:,} tokens")
            if turns_of(base) < asked:
                console.print(f"{asked - turns_of(base)} of {asked} requests are longer than the context and left out")
        bench = _Bench(config, load, engine.seed, target, base)
        capacity = bench.all()
    runs = bench.runs
    figures = [run.figures for run in runs]
    show(console, figures)
    for line in bench.remarks:
        console.print(Text(line), soft_wrap=True)
    if capacity is not None:
        console.print(told_capacity(config, capacity, base))
    if config.json is not None:
        result: Any = figures[0] if len(runs) == 1 and capacity is None else {"runs": figures, "capacity": capacity}
        Path(config.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if config.wants_report:
        write_report(console, config, load, engine, target, runs, capacity, arguments)
    return 0


class _Bench:
    """The runs of one call, in order of their rates."""

    def __init__(self, config: BenchConfig, load: WorkloadConfig, seed: int, target: Target, base: Workload) -> None:
        self.runs: list[Run] = []
        self.remarks: list[str] = []
        """What a person should know of a run, line by line: what went wrong in it, what its figures owe to others."""
        self._config, self._load, self._seed, self._target, self._base = config, load, seed, target, base
        slo = Slo(config.slo_ttft, config.slo_tpot, config.slo_e2el)
        self._slo = slo if slo != Slo() else None

    def all(self) -> float | None:
        """Do what the options ask for. Returns the capacity, if it was asked for."""
        config, capacity = self._config, None
        if config.capacity is not None:
            capacity = find_capacity(self.at, config.capacity, ttft_ms=config.slo_ttft)
            self.runs.sort(key=lambda run: float(run.figures["request_rate"]))
        elif config.rates:
            for rate in sorted(config.rates):
                self.at(rate)
        else:
            self.take(self._target.run(workloads.scaled(self._base, config.speed), self._load.workload))
        return capacity

    def at(self, rate: float) -> Mapping[str, float]:
        """The figures at a rate."""
        arriving = self._load.arriving(self._base, rate, self._seed)
        return self.take(self._target.run(arriving, f"{rate:.4g} a second"), rate)

    def take(self, records: list[Record], rate: float | None = None) -> dict[str, Any]:
        """Keep what a run gave, without its records: a search may hold many."""
        about: dict[str, Any] = {} if rate is None else {"request_rate": rate}
        about |= {"burstiness": self._load.variation**-2} if rate is not None else {}
        about |= {"model_id": self._target.model, "num_prompts": len(records)}
        about |= {"max_concurrency": self._config.concurrency} if self._config.concurrency else {}
        figures = about | summary(records, self._slo)
        self.runs.append(Run.of(records, figures))
        at = "" if rate is None else f" at {rate:.4g} a second"
        if errors := [record.error for record in records if record.error]:
            self.remarks.append(f"{len(errors)} of {len(records)} requests failed{at}, as in: {errors[0]}")
        if figures["cached_tokens"] and not self._load.shares:
            self.remarks.append(
                f"{figures['cached_tokens']:,} prompt tokens{at} came from the cache, though no two of these prompts "
                "are alike: an earlier call sent the same; give another --seed"
            )
        return figures


def target_of(config: BenchConfig, engine: EngineConfig, console: Console) -> AbstractContextManager[Target]:
    """What the options say to measure. Raises ValueError, OSError."""
    if config.simulate is not None:
        return nullcontext(simulated(config, config.simulate, engine, console))
    if config.url is None:
        return engine_here(engine, console, config.concurrency)
    return server(
        config.url,
        api_key=config.api_key,
        model=config.served_model,
        vocab_size=config.vocab_size,
        concurrency=config.concurrency,
        seed=engine.seed,
    )


def simulated(config: BenchConfig, named: str, engine: EngineConfig, console: Console) -> Simulated:
    """The profile of a file, or of MODEL@DEVICE: says where that comes from. Raises ValueError, OSError."""
    model, at, device = named.partition("@")
    if at and not Path(named).exists():
        deployment = deploy(
            shape_on(model, device, engine),
            device,
            tp=config.tp,
            pp=config.pp,
            link=config.link,
            stage_link=config.stage_link,
            memory_fraction=engine.memory_fraction,
        )
        profile, pipeline = deployment.profile, deployment.pipeline
        source = "measured" if deployment.measured else "derived from data sheets"
        console.print(
            f"{model} on {profile.cost.device}, {profile.precision}, {source}: "
            f"{profile.cache_tokens:,} tokens of KV cache",
            soft_wrap=True,
        )
    else:
        profile, pipeline = CostProfile.load(Path(named)), None
        profile.require(engine)
    if config.cache_tokens is not None:
        profile = replace(profile, cache_tokens=config.cache_tokens)
    if config.copy_gbs is not None:
        profile = replace(profile, copy_rate=config.copy_gbs * 1e9)
    return Simulated(engine, profile, pipeline, config.host_us / 1e6, config.concurrency)


def told_capacity(config: BenchConfig, capacity: float, base: Workload) -> str:
    """What was found, and how far it holds."""
    ttft = "" if config.slo_ttft is None else f" and P99 TTFT within {config.slo_ttft:g} ms"
    told = f"capacity: {capacity:.3g} a second with P99 TBT within {config.capacity:g} ms{ttft}"
    if capacity and len(base) / capacity < SHORT_SECONDS:
        told += (
            f"\n{len(base)} conversations arrive within {len(base) / capacity:.2g} s at that rate, too few to tell a "
            f"lasting load from a burst; give --requests {max(1, round(capacity * 3 * SHORT_SECONDS))}"
        )
    return told


def write_report(
    console: Console,
    config: BenchConfig,
    load: WorkloadConfig,
    engine: EngineConfig,
    target: Target,
    runs: Sequence[Run],
    capacity: float | None,
    arguments: Sequence[str],
) -> None:
    """Draw and write. Raises OSError."""
    from holdfast.lab import report  # an extra: matplotlib

    limits = {"p99_itl_ms": config.capacity, "p99_ttft_ms": config.slo_ttft}
    settings = [("target", target.name), ("workload", load.workload)]
    settings += changed(load, without=("workload",)) + changed(config, without=("url", "api_key", *OUTPUTS))
    settings += [] if config.url is not None else changed(engine, without=("model", "trace"))
    page = report.of_runs(
        runs,
        title=target.name,
        workload=load.lengths,
        limits={name: limit for name, limit in limits.items() if limit is not None},
        capacity=capacity,
        settings=settings,
        command=shlex.join(["holdfast", "bench", *without_key(arguments)]),
        footer=f"Holdfast {__version__}",
    )
    console.print(written(page, config.report, config.plots), soft_wrap=True)


OUTPUTS = ("json", "report", "plots", "simulate")


def without_key(arguments: Sequence[str]) -> list[str]:
    """The arguments, with what must not be shown left out."""
    before = ("", *arguments)
    return [
        "…" if previous == "--api-key" else re.sub(r"^(--api-key=).*", r"\1…", argument)
        for previous, argument in zip(before, arguments, strict=False)
    ]
