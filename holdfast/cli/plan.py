"""`holdfast plan`: finds the way to serve a model on given devices with the most capacity, and the command for it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from holdfast.cli.progress import progress_bar
from holdfast.cli.reports import changed_options, check_outputs
from holdfast.core.config import BUILTIN_MODEL, EngineConfig, SchedulerName, option
from holdfast.core.version import __version__
from holdfast.engine.checkpoint import Checkpoint, read_json
from holdfast.engine.profiles import CostProfile
from holdfast.lab.planning import CapacityQuestion, Evaluation, best_of, make_capacity_plan, make_layouts, make_policies
from holdfast.lab.reports.advice import as_json, recommend
from holdfast.lab.reports.tables import show_candidates
from holdfast.lab.simulator.deployment import configured_shape
from holdfast.lab.simulator.devices import DEVICES, LINKS, look_up
from holdfast.lab.simulator.shapes import MODELS, ModelShape, shape_from_config
from holdfast.lab.workloads import WorkloadConfig
from holdfast.lm.scheduler.choice import NAMES
from holdfast.lm.types import precision_of

DEVICE = "h200"
MAX_DEVICES = 1024
"""Every layout over the devices is simulated. Beyond this number the search would take too long."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """The devices, the latency limits and the candidates of a capacity plan. Raises ValueError for invalid options."""

    device: str | None = option(None, f"kind of device: {', '.join(sorted(DEVICES))}; default: {DEVICE}")
    devices: int = option(1, "number of devices")
    price: float | None = option(None, "price of one device for an hour, in any currency")
    profile: str | None = option(
        None,
        "use this profile, a file written by `holdfast profile --out` on one device, in place of MODEL and --device",
    )
    slo_tbt: float = option(100.0, "P99 TBT must be at most this", unit="ms")
    slo_ttft: float | None = option(None, "P99 TTFT must be at most this", unit="ms")
    schedulers: str = option("stall-free,prefill-first,orca", "policies to compare, separated by commas, or all")
    token_budgets: tuple[float, ...] = option((512, 2048), "fixed token budgets for policies that chunk prompts")
    tp: tuple[float, ...] = option((), "devices that share each layer; default: 1, 2, 4 … up to --devices")
    pp: tuple[float, ...] = option((), "pipeline stages; default: 1, 2, 4 … up to --devices")
    link: str | None = option(
        None, f"link between the devices of a layer: {', '.join(LINKS)}; default: the device's own"
    )
    stage_link: str | None = option(None, "link between pipeline stages; default: the same")
    host_gb: tuple[float, ...] = option((0,), "sizes of the host tier in GB; 0 is off")
    seconds: float = option(60.0, "seconds during which requests arrive in each simulated run")
    jobs: int | None = option(None, "processes to use; default: one for each core")
    json: str | None = option(None, "write the candidates to this file as JSON")
    report: str | None = option(None, "write a report to this file: one HTML page that needs no network")
    plots: str | None = option(None, "write the report's plots into this directory, as PNG")

    def __post_init__(self) -> None:
        for name in ("devices", "jobs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.devices > MAX_DEVICES:
            raise ValueError(f"devices is {self.devices}; it must be at most {MAX_DEVICES:,}")
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
        look_up("device", DEVICES, self.device or DEVICE)
        if self.profile is not None and self.device is not None:
            raise ValueError(f"device is {self.device}, and a profile has its own device; drop it, or name a MODEL")
        for name in ("tp", "pp"):
            most = max(getattr(self, name), default=1)
            if self.profile is not None and most > 1:
                raise ValueError(f"{name} holds {most:g}, and a profile is of one device; drop it, or name a MODEL")
        for name in ("link", "stage_link"):
            if getattr(self, name) is not None:
                look_up("link", LINKS, getattr(self, name))
                if self.profile is not None:
                    raise ValueError(f"{name} joins devices, and a profile is of one; drop it, or name a MODEL")
                if self.devices == 1:
                    raise ValueError(f"{name} is {getattr(self, name)}, which joins devices; give --devices above 1")

    @property
    def policies(self) -> tuple[SchedulerName, ...]:
        """The schedulers to compare, in the order of NAMES."""
        named = self.scheduler_names
        return tuple(name for name in NAMES if name in named or named == {"all"})

    @property
    def scheduler_names(self) -> set[str]:
        """The names in `schedulers`, not yet checked."""
        return {name.strip() for name in self.schedulers.split(",")}


def run(
    config: PlanConfig, workload: WorkloadConfig, engine: EngineConfig, model: str | None, arguments: Sequence[str]
) -> int:
    """Make the capacity plan, print it and write the files. Returns the exit code: 1 if no candidate has capacity.

    `arguments` are those of the command line, for the report. Raises ValueError, OSError.
    """
    check_outputs(config.json, report=config.report, plots=config.plots)
    question = question_of(config, workload, engine, model)
    one_device = () if config.profile is None else (1,)
    layouts = make_layouts(config.devices, config.tp or one_device, config.pp or one_device, config.host_gb)
    policies = make_policies(config.policies, config.token_budgets, config.slo_tbt)
    console = Console(highlight=False)
    console.print(Text(describe(question, workload)), soft_wrap=True)
    with progress_bar("simulating", len(layouts) + len(policies) - 1) as on_progress:
        evaluations = make_capacity_plan(question, layouts, policies, config.jobs or os.cpu_count() or 1, on_progress)
    best = best_of(evaluations)
    show_candidates(console, evaluations, best)
    advice = recommend(evaluations, engine, BUILTIN_MODEL if question.model == BUILTIN_MODEL else model)
    for line in advice:
        console.print(Text(line), soft_wrap=True)
    if config.json is not None:
        rows = [as_json(each) for each in evaluations]
        Path(config.json).write_text(json.dumps({"candidates": rows}, indent=1) + "\n", encoding="utf-8")
    if config.report is not None or config.plots is not None:
        write_report(console, config, workload, question, evaluations, advice, arguments)
    return 0 if best else 1


def write_report(
    console: Console,
    config: PlanConfig,
    workload: WorkloadConfig,
    question: CapacityQuestion,
    evaluations: Sequence[Evaluation],
    advice: Sequence[str],
    arguments: Sequence[str],
) -> None:
    """Write the page and the plots. Raises OSError."""
    from holdfast.lab.reports.plan_report import plan_report  # imports matplotlib, an extra

    page = plan_report(
        evaluations,
        describe(question, workload),
        advice,
        settings=changed_options(workload) + changed_options(config, OUTPUTS) + changed_options(question.engine),
        command=shlex.join(["holdfast", "plan", *arguments]),
        footer=f"Holdfast {__version__}",
    )
    console.print("written: " + ", ".join(page.write(config.report, config.plots)), soft_wrap=True)


OUTPUTS = ("json", "report", "plots", "jobs")


def question_of(
    config: PlanConfig, workload: WorkloadConfig, engine: EngineConfig, model: str | None
) -> CapacityQuestion:
    """The question that the options ask. Raises ValueError, OSError."""
    if (model is None) == (config.profile is None):
        raise ValueError(
            f"plan takes a MODEL or --profile FILE, one of them; known models: {', '.join(sorted(MODELS))}"
        )
    profile = None if config.profile is None else CostProfile.load(Path(config.profile))
    if profile is not None:
        profile.require(engine)
    device = config.device or DEVICE
    return CapacityQuestion(
        model=profile.cost.model if profile else configured_shape(shape_named(model or ""), device, engine),
        device=profile.cost.device if profile else device,
        devices=config.devices,
        price=config.price,
        profile=profile,
        engine=engine,
        workload=workload.read(engine.seed),
        variation=workload.variation,
        tbt_ms=config.slo_tbt,
        ttft_ms=config.slo_ttft,
        seconds=config.seconds,
        link=config.link,
        stage_link=config.stage_link,
    )


def shape_named(model: str) -> str | ModelShape:
    """The name of a known shape, or the shape of a config.json or a checkpoint. Raises ValueError."""
    if model in MODELS:
        return model
    path = Path(model).expanduser()
    if path.suffix == ".json" and path.is_file():
        return shape_from_config(read_json(path), path.absolute().parent.name)
    if model == BUILTIN_MODEL or path.is_dir():
        found = Checkpoint.find(model)
        return shape_from_config(read_json(found.directory / "config.json"), found.name)
    raise ValueError(
        f"model {model} is unknown; give a checkpoint's directory, a config.json, or one of {', '.join(sorted(MODELS))}"
    )


def describe(question: CapacityQuestion, workload: WorkloadConfig) -> str:
    """The question as one line of text."""
    model = question.model.name if isinstance(question.model, ModelShape) else question.model
    dtype = question.profile.dtype if question.profile else "bfloat16"
    precision = precision_of(dtype, question.engine.quantization, question.engine.kv_cache_dtype)
    ttft = "" if question.ttft_ms is None else f", P99 TTFT within {question.ttft_ms:g} ms"
    return (
        f"{model} on {question.devices} x {question.device}, {precision}, {workload.title}, "
        f"P99 TBT within {question.tbt_ms:g} ms{ttft}"
    )
