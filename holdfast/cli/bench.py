"""`holdfast bench`: a workload against a server, or simulated on a measured device; figures as a table and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from holdfast.bench import workloads
from holdfast.bench.capacity import find_capacity
from holdfast.bench.load import LoadClient
from holdfast.bench.records import Record, Slo, summary
from holdfast.bench.workloads import DATASETS, Workload
from holdfast.core.config import EngineConfig, option
from holdfast.engine.profiles import Profile
from holdfast.engine.timeline import TracedExecutor
from holdfast.simulator.deployment import Pipeline, deploy
from holdfast.simulator.devices import DEVICES, LINKS
from holdfast.simulator.run import simulate
from holdfast.simulator.shapes import MODELS

ENGINE_OPTIONS = (
    "scheduler", "token_budget", "tbt_target", "max_sequences", "max_model_len", "block_size", "headroom",
    "steps_in_flight", "prefix_sharing", "trace", "seed", "host_cache_gb", "chunk_size", "eviction", "swap_threshold",
    "memory_fraction",
)  # fmt: skip
"""What of an engine can be chosen in a simulation."""
CHARACTERS_A_TOKEN = 4
"""A text's length in tokens where no tokenizer is at hand."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to send, where, and what counts as good. Raises ValueError for what cannot be."""

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
    workload: str = option(
        "fixed",
        f"fixed, multi-turn, {', '.join(DATASETS)}, or a file: an Azure .csv, a Mooncake .jsonl, a ShareGPT .json",
    )
    requests: int = option(100, "how many conversations; of a file, the first so many")
    prompt_tokens: int = option(256, "length of each prompt, for fixed")
    output_tokens: int = option(64, "length of each answer, for fixed")
    think: float = option(5.0, "mean think time in seconds, for multi-turn")
    rate: tuple[str, ...] = option(
        (),
        "conversations a second, by a Poisson process; may be repeated; default: a trace's own times, else all at once",
    )
    variation: float = option(1.0, "standard deviation over mean of the intervals; above 1 comes in bursts")
    speed: float = option(1.0, "replay a trace's own times so many times as fast")
    concurrency: int | None = option(None, "keep so many conversations under way, whatever their arrivals")
    vocab_size: int = option(256, "prompts are made of token ids below this, for a server")
    cache_tokens: int | None = option(None, "size of the simulated KV cache in tokens; default: the profile's")
    host_us: float = option(0.0, "host time of each simulated step in microseconds")
    slo_ttft: float | None = option(None, "goodput counts requests whose TTFT is at most this many ms")
    slo_tpot: float | None = option(None, "the same for the time per output token")
    slo_e2el: float | None = option(None, "the same for the end-to-end latency")
    capacity: float | None = option(None, "find the highest rate whose P99 TBT is at most this many ms")
    json: str | None = option(None, "write the figures to this file, named as `vllm bench serve` names them")

    def __post_init__(self) -> None:
        if (self.url is None) == (self.simulate is None):
            raise ValueError("bench takes --url URL for a server or --simulate PROFILE for a simulation, one of them")
        if self.url is not None and not re.match(r"https?://\S+$", self.url):
            raise ValueError(f"url is {self.url}; it must look like http://127.0.0.1:8000")
        for name in ("requests", "prompt_tokens", "output_tokens", "concurrency", "cache_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        for name in ("think", "variation", "speed"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.copy_gbs is not None and not self.copy_gbs > 0:
            raise ValueError(f"copy_gbs is {self.copy_gbs}; it must be above 0")
        if (self.tp, self.pp, self.link, self.stage_link) != (1, 1, None, None) and "@" not in (self.simulate or ""):
            raise ValueError(
                "tp, pp, link and stage_link are for --simulate MODEL@DEVICE; a profile has its own layout"
            )
        if any(not rate > 0 for rate in self.rates):
            raise ValueError(f"rate is {', '.join(self.rate)}; each must be above 0")
        if self.concurrency is not None and (self.rate or self.capacity):
            raise ValueError(
                "concurrency is a closed loop, which has no rate; drop --concurrency, or --rate and --capacity"
            )

    @property
    def rates(self) -> list[float]:
        """The rates as numbers."""
        try:
            return [float(rate) for rate in self.rate]
        except ValueError:
            raise ValueError(f"rate is {', '.join(self.rate)}; it must be a number") from None


Runner = Callable[[Workload, str], list[Record]]
"""Sends a workload, under a title for people, and gives its records."""


def run(config: BenchConfig, engine: EngineConfig) -> int:
    """Send or simulate, show, write. Returns the exit code. Raises ValueError, OSError with the reason."""
    console = Console(highlight=False)
    base = read_workload(config, engine.seed)
    if config.simulate is not None:
        profile, pipeline = simulated(config, engine, console)
        asked = turns_of(base)
        base = workloads.cut(base, min(engine.max_model_len or profile.max_model_len, profile.cache_tokens + 1))
        if turns_of(base) < asked:
            console.print(f"{asked - turns_of(base)} of {asked} requests are longer than the context and left out")
        runner = simulator(config, engine, profile, pipeline)
    else:
        runner = sender(config)
    slo = Slo(config.slo_ttft, config.slo_tpot, config.slo_e2el)
    limits = slo if slo != Slo() else None

    def at(rate: float) -> dict[str, Any]:
        arriving = workloads.gamma(base, rate, config.variation, engine.seed)
        return {"request_rate": rate, **summary(runner(arriving, f"{rate:g} a second"), limits)}

    if config.capacity is not None:
        runs: list[dict[str, Any]] = []
        capacity = find_capacity(lambda rate: runs.append(at(rate)) or runs[-1], config.capacity)  # type: ignore[func-returns-value]
        runs.sort(key=lambda figures: float(figures["request_rate"]))
    elif config.rate:
        capacity, runs = None, [at(rate) for rate in config.rates]
    else:
        capacity, runs = None, [summary(runner(workloads.scaled(base, config.speed), config.workload), limits)]
    show(console, runs)
    if capacity is not None:
        console.print(f"capacity: {capacity:.3g} a second with P99 TBT within {config.capacity:g} ms")
    if config.json is not None:
        result: Any = runs[0] if len(runs) == 1 and capacity is None else {"runs": runs, "capacity": capacity}
        Path(config.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def read_workload(config: BenchConfig, seed: int) -> Workload:
    """The conversations that the options ask for. Raises ValueError, OSError."""
    name = config.workload
    if name == "fixed":
        return workloads.fixed(config.requests, config.prompt_tokens, config.output_tokens)
    if name == "multi-turn":
        return workloads.multi_turn(config.requests, config.think, seed)
    if name in DATASETS:
        return workloads.drawn(name, config.requests, seed)
    match Path(name).suffix:
        case ".csv":
            read: Workload = workloads.azure_csv(name)
        case ".jsonl":
            read = workloads.mooncake_jsonl(name)
        case ".json":
            read = workloads.sharegpt_json(name, lambda text: -(-len(text) // CHARACTERS_A_TOKEN))
        case _:
            known = ", ".join(("fixed", "multi-turn", *DATASETS))
            raise ValueError(f"workload {name} is unknown; there are {known}, and .csv, .jsonl and .json files")
    return read[: config.requests]


def simulated(config: BenchConfig, engine: EngineConfig, console: Console) -> tuple[Profile, Pipeline | None]:
    """The profile of a file, or of a model on devices: says where that comes from. Raises ValueError, OSError."""
    assert config.simulate is not None
    model, named, device = config.simulate.partition("@")
    if named and not Path(config.simulate).exists():
        deployment = deploy(
            model,
            device,
            tp=config.tp,
            pp=config.pp,
            link=config.link,
            stage_link=config.stage_link,
            memory_fraction=engine.memory_fraction,
        )
        profile, pipeline = deployment.profile, deployment.pipeline
        source = "measured" if deployment.measured else "derived from data sheets"
        console.print(f"{model} on {profile.cost.device}, {source}: {profile.cache_tokens:,} tokens of KV cache")
    else:
        profile, pipeline = Profile.load(Path(config.simulate)), None
    if config.cache_tokens is not None:
        profile = replace(profile, cache_tokens=config.cache_tokens)
    if config.copy_gbs is not None:
        profile = replace(profile, copy_rate=config.copy_gbs * 1e9)
    return profile, pipeline


def simulator(config: BenchConfig, engine: EngineConfig, profile: Profile, pipeline: Pipeline | None = None) -> Runner:
    """Runs workloads over the virtual clock."""

    def run(workload: Workload, title: str) -> list[Record]:
        with Bar(title, workload) as tell:
            traced: list[TracedExecutor] = []

            def wrap(executor: Any, clock: Any) -> Any:
                if engine.trace is None:
                    return executor
                traced.append(
                    TracedExecutor(executor, engine.trace, clock, suspends=engine.host_cache_gb not in ("auto", 0))
                )
                return traced[0]

            try:
                return simulate(
                    engine,
                    profile,
                    workload,
                    concurrency=config.concurrency,
                    host_seconds=config.host_us / 1e6,
                    pipeline=pipeline,
                    wrap=wrap,
                    on_progress=tell,
                ).records
            finally:
                for executor in traced:
                    executor.close()

    return run


def sender(config: BenchConfig) -> Runner:
    """Sends workloads to the server."""
    assert config.url is not None
    base = config.url.rstrip("/").removesuffix("/v1") + "/v1/"
    headers = {"authorization": f"Bearer {config.api_key}"} if config.api_key else {}

    async def send(workload: Workload, tell: Callable[[int], None]) -> list[Record]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        timeout = httpx.Timeout(30, read=None)
        async with httpx.AsyncClient(base_url=base, headers=headers, limits=limits, timeout=timeout) as http:
            model = config.served_model or await first_model(http)
            client = LoadClient(http, model, vocab_size=config.vocab_size, on_progress=tell)
            return await client.run(workload, config.concurrency)

    def run(workload: Workload, title: str) -> list[Record]:
        with Bar(title, workload) as tell:
            records: list[Record] = uvloop.run(send(workload, tell))
            return records

    return run


async def first_model(http: httpx.AsyncClient) -> str:
    """The first model that a server lists. Raises OSError if it cannot be asked."""
    try:
        response = await http.get("models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise OSError(f"{http.base_url}models does not list a model: {type(error).__name__}: {error}") from None


def turns_of(workload: Workload) -> int:
    """Requests in all."""
    return sum(len(conversation.turns) for conversation in workload)


class Bar:
    """A progress bar on standard error; calling it says how many requests have ended."""

    def __init__(self, title: str, workload: Workload) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(title, total=turns_of(workload))
        self._told = 0

    def __enter__(self) -> Callable[[int], None]:
        self._bar.start()
        return self._tell

    def __exit__(self, *raised: object) -> None:
        self._bar.stop()

    def _tell(self, ended: int) -> None:
        if ended != self._told:
            self._told = ended
            self._bar.update(self._task, completed=ended)


COLUMNS = {
    "request_rate": "rate /s",
    "completed": "done",
    "failed": "failed",
    "request_throughput": "req/s",
    "request_goodput": "good/s",
    "output_throughput": "out tok/s",
    "total_token_throughput": "tok/s",
}
TIMES = {"ttft": "TTFT", "itl": "TBT", "tpot": "TPOT", "e2el": "end to end", "normalized_latency": "normalized"}


def show(console: Console, runs: list[dict[str, Any]]) -> None:
    """The figures of all runs: a line for each, then their latencies."""
    table = Table(title="throughput", title_justify="left")
    shown = {key: title for key, title in COLUMNS.items() if any(key in figures for figures in runs)}
    for title in shown.values():
        table.add_column(title, justify="right")
    for figures in runs:
        table.add_row(*(number(figures, key) for key in shown))
    console.print(table)
    latencies = Table(title="latency, ms", title_justify="left")
    latencies.add_column("rate /s" if any("request_rate" in figures for figures in runs) else "", justify="right")
    for title in ("", "mean", "p50", "p90", "p99"):
        latencies.add_column(title, justify="right")
    for figures in runs:
        for index, (name, title) in enumerate(TIMES.items()):
            cells = (f"{figures[f'{which}_{name}_ms']:,.2f}" for which in ("mean", "median", "p90", "p99"))
            latencies.add_row("" if index else number(figures, "request_rate"), title, *cells)
    console.print(latencies)


def number(figures: Mapping[str, Any], key: str) -> str:
    """One figure for people; empty where there is none."""
    value = figures.get(key)
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
