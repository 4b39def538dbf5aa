"""`holdfast plan`: which way to serve a model on given devices has the most capacity, and the command for it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from holdfast.cli.advice import HEAD, as_row, cells, recommend, show
from holdfast.cli.progress import Bar
from holdfast.cli.reports import changed, makeable, needs_matplotlib, writable, written
from holdfast.core.config import BUILTIN_MODEL, EngineConfig, SchedulerName, option
from holdfast.core.version import __version__
from holdfast.engine.checkpoint import Checkpoint, read_json
from holdfast.engine.profiles import CostProfile
from holdfast.lab.choice import WorkloadConfig
from holdfast.lab.planning import Candidate, Setting, Verdict, best_of, judges
from holdfast.lab.simulator.deployment import shape_on
from holdfast.lab.simulator.devices import DEVICES, LINKS, device_named, link_named
from holdfast.lab.simulator.shapes import MODELS, ModelShape, shape_of
from holdfast.lm.scheduler.choice import CHUNKED, NAMES
from holdfast.lm.types import precision_of

DEVICE = "h200"
MOST_DEVICES = 1024
"""Every layout over them is simulated, and beyond so many the search would not end while one waits."""
MARGIN = 0.9
"""A candidate with a computed budget aims at this share of the limit: steps in the world are not as predicted."""


Policy = tuple[SchedulerName, int | None, float | None]
"""A scheduler, its fixed budget or its target in ms."""
Layout = tuple[int, int, float]
"""tp, pp and GB of host tier."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """The devices, the limits, and what to choose from. Raises ValueError for what cannot be."""

    device: str | None = option(None, f"kind of device: {', '.join(sorted(DEVICES))}; default: {DEVICE}")
    devices: int = option(1, "how many there are")
    price: float | None = option(None, "of one device for an hour, in any currency")
    profile: str | None = option(
        None, "go by this profile of one device, a file of `holdfast profile --out`, in place of MODEL and --device"
    )
    slo_tbt: float = option(100.0, "P99 TBT must be at most this", unit="ms")
    slo_ttft: float | None = option(None, "P99 TTFT must be at most this", unit="ms")
    schedulers: str = option("stall-free,prefill-first,orca", "policies to compare, between commas; or all")
    token_budgets: tuple[float, ...] = option((512, 2048), "fixed budgets for policies that cut prompts")
    tp: tuple[float, ...] = option((), "devices that share each layer; default: 1, 2, 4 … that there are")
    pp: tuple[float, ...] = option((), "stages of a pipeline; default: 1, 2, 4 … that there are")
    link: str | None = option(None, f"what joins the devices of a layer: {', '.join(LINKS)}; default: the device's own")
    stage_link: str | None = option(None, "what joins the stages of a pipeline; default: the same")
    host_gb: tuple[float, ...] = option((0,), "sizes of the host tier in GB; 0 is none")
    seconds: float = option(60.0, "how long requests arrive in each simulated run")
    jobs: int | None = option(None, "processes at once; default: one for each core")
    json: str | None = option(None, "write the table to this file")
    report: str | None = option(None, "write a report to this file: one HTML page that needs no network")
    plots: str | None = option(None, "write the report's plots into this directory, as PNG")

    def __post_init__(self) -> None:
        for name in ("devices", "jobs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.devices > MOST_DEVICES:
            raise ValueError(f"devices is {self.devices}; at most {MOST_DEVICES:,} are planned with")
        for name in ("price", "slo_tbt", "slo_ttft", "seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value:g}; it must be above 0")
        for name in ("token_budgets", "tp", "pp"):
            for value in getattr(self, name):
                if not (1 <= value < float("inf")) or value != int(value):
                    raise ValueError(f"{name} holds {value:g}; each must be a whole number of at least 1")
        for size in self.host_gb:
            if not 0 <= size < float("inf"):
                raise ValueError(f"host_gb holds {size:g}; each must be at least 0 and finite")
        if unknown := self.scheduler_names - {*NAMES, "all"}:
            raise ValueError(f"scheduler {min(unknown)!r} is unknown; there are {', '.join(NAMES)}, or all")
        device_named(self.device or DEVICE)
        if self.profile is not None and self.device is not None:
            raise ValueError(f"device is {self.device}, and a profile is of its own; drop it, or name a MODEL")
        for name in ("tp", "pp"):
            most = max(getattr(self, name), default=1)
            if self.profile is not None and most > 1:
                raise ValueError(f"{name} holds {most:g}, and a profile is of one device; drop it, or name a MODEL")
        for name in ("link", "stage_link"):
            if getattr(self, name) is not None:
                link_named(getattr(self, name))
                if self.profile is not None:
                    raise ValueError(f"{name} joins devices, and a profile is of one; drop it, or name a MODEL")
                if self.devices == 1:
                    raise ValueError(f"{name} is {getattr(self, name)}, which joins devices; give --devices above 1")

    @property
    def policies(self) -> tuple[SchedulerName, ...]:
        """The schedulers that are known of those named, in the order of the known ones."""
        named = self.scheduler_names
        return tuple(name for name in NAMES if name in named or named == {"all"})

    @property
    def scheduler_names(self) -> set[str]:
        """The schedulers as they are named."""
        return {name.strip() for name in self.schedulers.split(",")}


def run(
    config: PlanConfig, load: WorkloadConfig, engine: EngineConfig, model: str | None, arguments: Sequence[str]
) -> int:
    """Judge, show, write. Returns the exit code: 1 where nothing keeps the limits. Raises ValueError, OSError."""
    for path in (config.json, config.report):
        writable(path)
    makeable(config.plots)
    if config.report is not None or config.plots is not None:
        needs_matplotlib()
    setting, ways = setting_of(config, load, engine, model), layouts(config)
    console = Console(highlight=False)
    console.print(Text(described(setting, load)), soft_wrap=True)
    verdicts = search(config, setting, ways)
    best = best_of(verdicts)
    show(console, verdicts, best)
    advice = recommend(verdicts, engine, BUILTIN_MODEL if setting.model == BUILTIN_MODEL else model)
    for line in advice:
        console.print(Text(line), soft_wrap=True)
    if config.json is not None:
        rows = [as_row(verdict) for verdict in verdicts]
        Path(config.json).write_text(json.dumps({"candidates": rows}, indent=1) + "\n", encoding="utf-8")
    if config.report is not None or config.plots is not None:
        write_report(console, config, load, setting, verdicts, advice, arguments)
    return 0 if best else 1


def write_report(
    console: Console,
    config: PlanConfig,
    load: WorkloadConfig,
    setting: Setting,
    verdicts: Sequence[Verdict],
    advice: Sequence[str],
    arguments: Sequence[str],
) -> None:
    """Draw and write. Raises OSError."""
    from holdfast.cli.plan_report import report_of  # an extra: matplotlib

    page = report_of(
        verdicts,
        best_of(verdicts),
        described(setting, load),
        advice,
        (HEAD, [cells(verdict) for verdict in verdicts]),
        [*changed(load), *changed(config, without=OUTPUTS), *changed(setting.engine)],
        shlex.join(["holdfast", "plan", *arguments]),
        f"Holdfast {__version__}",
    )
    console.print(written(page, config.report, config.plots), soft_wrap=True)


OUTPUTS = ("json", "report", "plots", "jobs")


def setting_of(config: PlanConfig, load: WorkloadConfig, engine: EngineConfig, model: str | None) -> Setting:
    """What all candidates share. Raises ValueError, OSError."""
    if (model is None) == (config.profile is None):
        raise ValueError(
            f"plan takes a MODEL or --profile FILE, one of them; known models: {', '.join(sorted(MODELS))}"
        )
    profile = None if config.profile is None else CostProfile.load(Path(config.profile))
    if profile is not None:
        profile.require(engine)
    device = config.device or DEVICE
    return Setting(
        model=profile.cost.model if profile else shape_on(shape_named(model or ""), device, engine),
        device=profile.cost.device if profile else device,
        devices=config.devices,
        price=config.price,
        profile=profile,
        engine=engine,
        workload=load.read(engine.seed),
        variation=load.variation,
        tbt_ms=config.slo_tbt,
        ttft_ms=config.slo_ttft,
        seconds=config.seconds,
        link=config.link,
        stage_link=config.stage_link,
    )


def shape_named(model: str) -> str | ModelShape:
    """A known shape by its name, or that of a config.json or of a checkpoint. Raises ValueError."""
    if model in MODELS:
        return model
    path = Path(model).expanduser()
    if path.suffix == ".json" and path.is_file():
        return shape_of(read_json(path), path.absolute().parent.name)
    if model == BUILTIN_MODEL or path.is_dir():
        found = Checkpoint.find(model)
        return shape_of(read_json(found.directory / "config.json"), found.name)
    raise ValueError(
        f"model {model} is unknown; give a checkpoint's directory, a config.json, or one of {', '.join(sorted(MODELS))}"
    )


def search(config: PlanConfig, setting: Setting, ways: Sequence[Layout]) -> list[Verdict]:
    """First every layout under the first policy, then every other policy on the best layout."""
    choices = policies(config)
    first = [candidate(policy, way) for way in ways for policy in choices[:1]]
    jobs = min(config.jobs or os.cpu_count() or 1, max(len(first), len(choices)))
    with judges(setting, jobs) as judge, Bar("simulating", len(first) + len(choices) - 1) as tell:
        verdicts: list[Verdict] = []

        def collect(candidates: Sequence[Candidate]) -> None:
            for verdict in judge(candidates):
                verdicts.append(verdict)
                tell(len(verdicts))

        collect(first)
        best = best_of(verdicts) or verdicts[0]
        collect([candidate(policy, layout_of(best.candidate)) for policy in choices[1:]])
        return verdicts


def candidate(policy: Policy, layout: Layout) -> Candidate:
    """A policy on a layout."""
    scheduler, budget, target = policy
    tp, pp, host = layout
    return Candidate(scheduler=scheduler, token_budget=budget, tbt_target=target, tp=tp, pp=pp, host_cache_gb=host)


def layout_of(given: Candidate) -> Layout:
    """A candidate's layout."""
    return given.tp, given.pp, given.host_cache_gb


def layouts(config: PlanConfig) -> list[Layout]:
    """Every tp, pp and host tier that the devices hold; the plainest first. Raises ValueError where there is none."""
    powers = [1 << power for power in range(config.devices.bit_length())]
    if config.profile is not None:
        powers = [1]
    found = [
        (int(tp), int(pp), host)
        for tp in config.tp or powers
        for pp in config.pp or powers
        for host in config.host_gb
        if tp * pp <= config.devices
    ]
    if not found:
        raise ValueError(f"no tp x pp of those given fits on {config.devices} devices; give more --devices")
    return sorted(set(found), key=lambda way: (way[0] * way[1], way))


def policies(config: PlanConfig) -> list[Policy]:
    """Schedulers with their budgets: the one that a target computes first, then fixed ones."""
    found: list[Policy] = []
    for name in config.policies:
        if name == "stall-free":
            found.append((name, None, round(MARGIN * config.slo_tbt, 3)))
        budgets = config.token_budgets if name in CHUNKED else ()
        found += [(name, int(budget), None) for budget in budgets]
        if name not in CHUNKED:
            found.append((name, None, None))
    return found


def described(setting: Setting, load: WorkloadConfig) -> str:
    """The question, in one line."""
    model = setting.model.name if isinstance(setting.model, ModelShape) else setting.model
    dtype = setting.profile.dtype if setting.profile else "bfloat16"
    precision = precision_of(dtype, setting.engine.quantization, setting.engine.kv_cache_dtype)
    ttft = "" if setting.ttft_ms is None else f", P99 TTFT within {setting.ttft_ms:g} ms"
    return (
        f"{model} on {setting.devices} x {setting.device}, {precision}, {load.lengths}, "
        f"P99 TBT within {setting.tbt_ms:g} ms{ttft}"
    )
