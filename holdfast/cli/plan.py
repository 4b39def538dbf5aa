"""`holdfast plan`: finds how to serve a model on given devices with the highest capacity, and the command."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from holdfast.cli.flags import flag_of, require_at_least_1, require_positive
from holdfast.cli.output import Steps, changed_options, check_outputs, stage_printer
from holdfast.cluster.config import MOST_REPLICAS, ClusterConfig
from holdfast.cluster.local_spawner import cores
from holdfast.cluster.routing import POLICIES, RouterName
from holdfast.core.config import BUILTIN_MODEL, PACKED_SCHEDULERS, SchedulerName, option
from holdfast.engine.checkpoint import Checkpoint, read_json
from holdfast.engine.hub import is_id
from holdfast.engine.profiles import CostProfile
from holdfast.files.results import write_result
from holdfast.lab import planning
from holdfast.lab.goodput import KEPT, REFUSED, ContractEvaluation, asks_contracts, evaluate_contracts
from holdfast.lab.planning import (
    SHARED_OPTIONS,
    Candidate,
    CapacityQuestion,
    Evaluation,
    FleetEvaluation,
    best_of,
    describe_load,
    evaluate_fleet,
)
from holdfast.lab.reports.tables import show_candidates, show_contracts
from holdfast.lab.simulator.deployment import configured_shape
from holdfast.lab.simulator.devices import DEVICES, LINKS, look_up
from holdfast.lab.simulator.shapes import MODELS, ModelShape, shape_from_config
from holdfast.lab.workloads import WorkloadConfig
from holdfast.lm.config import EngineConfig
from holdfast.lm.types import precision_of

DEVICE = "h200"
SERVED_DEVICES = 8
"""Maximum number of devices on which `holdfast serve` runs a model. They are on one host."""
REPLICA_LINK = "ethernet-100g"
PLACEHOLDER = "$MODEL"
"""Placeholder for the checkpoint's directory, used if only the shape of the model is known."""
MAX_DEVICES = 1024
"""Maximum number of devices in a plan. Every layout over them is simulated, so more would take too long."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Devices, latency limits and candidates of a capacity plan. Raises ValueError for invalid options."""

    device: str | None = option(None, f"kind of device: {', '.join(sorted(DEVICES))}; default: {DEVICE}")
    devices: int = option(1, "number of devices")
    price: float | None = option(None, "price of one device for an hour, in any currency")
    profile: str | None = option(
        None,
        "use this profile, a file written by `holdfast profile --out`, in place of MODEL, --device, --tp and --pp",
    )
    slo_tbt: float = option(100.0, "P99 TBT must be at most this", unit="ms")
    slo_ttft: float | None = option(None, "P99 TTFT must be at most this; default: no limit", unit="ms")
    schedulers: str = option("stall-free,prefill-first,orca", "policies to compare, separated by commas, or all")
    token_budgets: tuple[float, ...] = option((512, 2048), "fixed token budgets for policies that chunk prompts")
    tp: tuple[float, ...] = option((), "devices that share each layer; default: 1, 2, 4 … up to --devices")
    pp: tuple[float, ...] = option((), "pipeline stages; default: 1, 2, 4 … up to --devices")
    link: str | None = option(
        None, f"link between the devices of a layer: {', '.join(LINKS)}; default: the device's own"
    )
    stage_link: str | None = option(None, "link between pipeline stages; default: the same")
    host_gb: tuple[float, ...] = option((0,), "sizes of the host tier in GB; 0 is off")
    routing: str | None = option(
        None,
        f"simulate all replicas of the best candidate together, with a router: {', '.join(POLICIES)}; "
        "default: multiply what one sustains",
    )
    replica_link: str | None = option(
        None, f"link between replicas, over which --routing moves state; default: {REPLICA_LINK}"
    )
    cores: int | None = option(
        None, "with --routing and the --profile of a CPU: cores that all replicas share; default: those of this machine"
    )
    seconds: float = option(60.0, "seconds during which requests arrive in each simulated run")
    jobs: int | None = option(None, "processes to use; default: one for each core")
    json: str | None = option(None, "write the candidates to this file as JSON")
    report: str | None = option(None, "write a report to this file: one HTML page that needs no network")
    plots: str | None = option(None, "write the report's plots into this directory, as PNG")

    def __post_init__(self) -> None:
        require_at_least_1(self, "devices", "cores", "jobs")
        if self.devices > MAX_DEVICES:
            raise ValueError(f"devices is {self.devices}; it must be at most {MAX_DEVICES:,}")
        require_positive(self, "price", "slo_tbt", "slo_ttft", "seconds")
        for name in ("token_budgets", "tp", "pp"):
            for value in getattr(self, name):
                if not (1 <= value < float("inf")) or value != int(value):
                    raise ValueError(f"{name} holds {value:g}; each must be a whole number of at least 1")
        for size in self.host_gb:
            if not 0 <= size < float("inf"):
                raise ValueError(f"host_gb holds {size:g}; each must be at least 0 and finite")
        if unknown := self.scheduler_names - {*PACKED_SCHEDULERS, "all"}:
            raise ValueError(f"scheduler {min(unknown)!r} is unknown; there are {', '.join(PACKED_SCHEDULERS)}, or all")
        look_up("device", DEVICES, self.device or DEVICE)
        if self.profile is not None and self.device is not None:
            raise ValueError(f"device is {self.device}, and a profile has its own device; drop it, or name a MODEL")
        for name in ("tp", "pp"):
            most = max(getattr(self, name), default=1)
            if self.profile is not None and most > 1:
                raise ValueError(
                    f"{name} holds {most:g}, and a profile has a layout of its own; drop it, or name a MODEL"
                )
        for name in ("link", "stage_link"):
            if getattr(self, name) is not None:
                look_up("link", LINKS, getattr(self, name))
                if self.profile is not None:
                    raise ValueError(
                        f"{name} joins devices, and a profile has links of its own; drop it, or name a MODEL"
                    )
                if self.devices == 1:
                    raise ValueError(f"{name} is {getattr(self, name)}, which joins devices; give --devices above 1")

        if self.routing is None and self.replica_link is not None:
            raise ValueError(f"replica_link is {self.replica_link}, which only a router uses; give --routing, too")
        if self.routing is not None and self.router is None:
            raise ValueError(f"routing {self.routing!r} is unknown; there are {', '.join(POLICIES)}")
        if self.replica_link is not None:
            look_up("link", LINKS, self.replica_link)
        if self.cores is not None and (self.routing is None or self.profile is None):
            raise ValueError(
                f"cores is {self.cores}, which a router's replicas on a CPU share; give --routing and --profile"
            )

    @property
    def router(self) -> RouterName | None:
        """The routing policy that `routing` names; None if it names none."""
        return next((name for name in POLICIES if name == self.routing), None)

    @property
    def policies(self) -> tuple[SchedulerName, ...]:
        """The schedulers to compare, in the order of PACKED_SCHEDULERS."""
        named = self.scheduler_names
        return tuple(name for name in PACKED_SCHEDULERS if name in named or named == {"all"})

    @property
    def scheduler_names(self) -> set[str]:
        """The names in `schedulers`. They may be invalid."""
        return {name.strip() for name in self.schedulers.split(",")}


def run(
    config: PlanConfig, workload: WorkloadConfig, engine: EngineConfig, model: str | None, arguments: Sequence[str]
) -> int:
    """Make the capacity plan, print it and write the files. Returns the exit code: 1 if no candidate has capacity.

    `arguments` is the command line, for the report. Raises ValueError, OSError.
    """
    check_outputs(config.json, report=config.report, plots=config.plots)
    question = question_of(config, workload, engine, model)
    measured = question.profile
    tp, pp = (config.tp, config.pp) if measured is None else ((measured.tp,), (measured.pp,))
    layouts = planning.make_layouts(config.devices, tp, pp, config.host_gb)
    policies = planning.make_policies(config.policies, config.token_budgets, config.slo_tbt)
    console = Console(highlight=False)
    console.print(Text(describe(question, workload)), soft_wrap=True)
    steps, stage = Steps("simulating", len(layouts) + len(policies) - 1), stage_printer(Console(stderr=True))
    with steps.shown():
        jobs = config.jobs or os.cpu_count() or 1
        evaluations = planning.make_capacity_plan(
            question, layouts, policies, jobs,
            lambda candidates: steps.begin("; ".join(f"{each.policy} on {each.layout}" for each in candidates)),
            lambda evaluation: steps.end(describe_evaluation(evaluation)),
        )  # fmt: skip
    best = best_of(evaluations)
    show_candidates(console, evaluations, best)
    named = BUILTIN_MODEL if question.model == BUILTIN_MODEL else model
    advice = recommend(evaluations, question.engine, named, most_devices(question), config.router)
    fleet = None
    if best is not None:
        advice[1:1] = [describe_load(best.figures), *filter(None, [best.beyond])]
    contracts = None
    if best is not None and asks_contracts(question.workload):
        stage("searching the rate at which contracts are kept")
        contracts = evaluate_contracts(question, best)
        show_contracts(console, contracts)
        advice.insert(1, describe_contracts(contracts, best.replicas))
    if config.router is not None and best is not None and best.replicas > 1:
        stage(f"simulating {best.replicas} replicas together, with a {config.router} router")
        fleet = evaluate_fleet(question, best, config.router, config.replica_link or REPLICA_LINK)
        advice.insert(1, describe_fleet(fleet, best))
    for line in advice:
        console.print(Text(line), soft_wrap=True)
    if config.json is not None:
        written_fleet = {} if fleet is None else {"fleet": asdict(fleet)}
        written_contracts = {} if contracts is None else {"contracts": asdict(contracts)}
        rows = [as_json(each) for each in evaluations]
        text = json.dumps({"candidates": rows} | written_fleet | written_contracts, indent=1)
        write_result(config.json, text + "\n")
    if config.report is not None or config.plots is not None:
        from holdfast.lab.reports.report import plan_report  # Imports matplotlib, which is an extra.

        settings = changed_options(workload) + changed_options(config, without=("json", "report", "plots", "jobs"))
        settings += changed_options(engine)
        command = shlex.join(["holdfast", "plan", *arguments])
        report = plan_report(evaluations, describe(question, workload), advice, contracts)
        written = report.write(config.report, config.plots, settings=settings, command=command)
        console.print(f"written: {', '.join(written)}", soft_wrap=True)
    return 0 if best else 1


def question_of(
    config: PlanConfig, workload: WorkloadConfig, engine: EngineConfig, model: str | None
) -> CapacityQuestion:
    """Return the question that the options describe. Raises ValueError, OSError."""
    if (model is None) == (config.profile is None):
        raise ValueError(
            f"plan takes a MODEL or --profile FILE, one of them; known models: {', '.join(sorted(MODELS))}"
        )
    profile = None if config.profile is None else CostProfile.load(Path(config.profile))
    if profile is not None:
        profile.require(engine)
        if profile.rows is not None:
            engine = replace(engine, executor="padded")
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
        longer=workload.longer,
        cores=config.cores or cores(),
    )


def shape_named(model: str, revision: str | None = None) -> str | ModelShape:
    """Return the name of a known shape, or the shape of a config.json or a checkpoint. Raises ValueError."""
    if model in MODELS:
        return model
    path = Path(model).expanduser()
    if path.suffix == ".json" and path.is_file():
        return shape_from_config(read_json(path), path.absolute().parent.name)
    if model == BUILTIN_MODEL or path.is_dir():
        found = Checkpoint.find(model)
        return shape_from_config(read_json(found.directory / "config.json"), found.name)
    if is_id(model):
        found = Checkpoint.find(model, revision, weights=False)
        return shape_from_config(read_json(found.directory / "config.json"), found.name)
    raise ValueError(
        f"model {model} is unknown; give a checkpoint's directory, a config.json, an id of the hub, or one of "
        f"{', '.join(sorted(MODELS))}"
    )


def describe(question: CapacityQuestion, workload: WorkloadConfig) -> str:
    """Return the question as one line of text."""
    model = question.model.name if isinstance(question.model, ModelShape) else question.model
    dtype = question.profile.dtype if question.profile else "bfloat16"
    precision = precision_of(dtype, question.engine.quantization, question.engine.kv_cache_dtype)
    within = (
        "of any length (--slo-ttft MS limits it)" if question.ttft_ms is None else f"within {question.ttft_ms:g} ms"
    )
    return (
        f"{model} on {question.devices} x {question.device}, {precision}, {workload.title}, "
        f"P99 TBT within {question.tbt_ms:g} ms, P99 TTFT {within}"
    )


def describe_evaluation(evaluation: Evaluation) -> str:
    """Return an evaluation as one line of text."""
    found = f"{evaluation.capacity:.3g} conversations a second a replica" if evaluation.capacity else evaluation.reason
    return f"{evaluation.candidate.policy} on {evaluation.candidate.layout}: {found}"


def describe_fleet(fleet: FleetEvaluation, best: Evaluation) -> str:
    """Return a line of text: the load that all replicas sustain together, compared with one replica's."""
    if not fleet.capacity:
        return f"with a {fleet.router} router, {fleet.replicas} replicas meet these limits at no rate"
    return (
        f"with a {fleet.router} router: {fleet.replicas} replicas sustain {fleet.capacity:.3g} conversations a "
        f"second ({fleet.capacity / best.fleet_capacity:.0%} of {fleet.replicas} times one), P99 TTFT "
        f"{fleet.figures['p99_ttft_ms']:,.0f} ms; {fleet.found:.1%} of reusable prompt tokens found, busy times within "
        f"{fleet.spread:.1%}"
    )


def describe_contracts(contracts: ContractEvaluation, replicas: int) -> str:
    """Return a line of text: the load at which all replicas together keep their contracts."""
    if not contracts.rate:
        return "no rate keeps the contracts: give longer times with --contract, or a faster --device"
    each = "" if replicas == 1 else f" ({contracts.rate:.3g} each)"
    return (
        f"contracts: up to {contracts.rate * replicas:.3g} conversations a second{each}, at least {KEPT:.0%} of the "
        f"accepted contracts are kept and at most {REFUSED:.0%} refused"
    )


def most_devices(question: CapacityQuestion) -> int:
    """Return the maximum number of devices for `holdfast serve`. It is one if the model has no native decoder."""
    shape = question.model if isinstance(question.model, ModelShape) else MODELS.get(question.model)
    return SERVED_DEVICES if shape is None or shape.native else 1


def recommend(
    evaluations: Sequence[Evaluation],
    engine: EngineConfig,
    model: str | None,
    most: int = SERVED_DEVICES,
    router: RouterName | None = None,
) -> list[str]:
    """Return the advice as lines. If anything can be served on at most `most` devices, the last line is the command.

    `router` is the routing policy for several replicas; None for the default.
    """
    best = best_of(evaluations)
    if evaluations and all(each.reason.startswith(planning.TOO_LONG) for each in evaluations):
        return [
            "every request is too long: give shorter --prompt-tokens or --output-tokens, or a longer --max-model-len"
        ]
    if best is None and not any(each.fits for each in evaluations):
        return ["no layout fits these devices: give more --devices, another --device, --tp or --pp, or a smaller model"]
    if best is None:
        return [
            "nothing meets these limits: raise --slo-tbt or --slo-ttft, or give more --devices or a faster --device"
        ]
    rate = f"{best.fleet_capacity:.3g} conversations a second in all"
    lines = [f"best: {best.candidate.policy} on {best.candidate.layout}, {rate}"]
    servable = best_of([each for each in evaluations if each.candidate.devices <= most])
    within = "one device" if most == 1 else f"{most} devices of a host"
    if servable is not best:
        lines.append(f"holdfast serve runs this model on at most {within}, so this cannot be served")
    if servable is None:
        return [*lines, f"nothing that runs on {within} meets these limits"]
    if servable is not best:
        rate = f"{servable.fleet_capacity:.3g} conversations a second in all"
        lines.append(f"best that can be served: {servable.candidate.policy} on {servable.candidate.layout}, {rate}")
    served = served_model(model)
    notes = [f"{PLACEHOLDER} is the checkpoint's directory"] if served == PLACEHOLDER else []
    replicas, each = servable.replicas, servable.candidate.devices
    if replicas > 1:
        hosts = "one host" if replicas * each <= SERVED_DEVICES else "the hosts of a Ray cluster"
        notes.append(f"{replicas} replicas on the {replicas * each} devices of {hosts}, behind one address")
    if replicas > MOST_REPLICAS:
        notes.append(f"run it {-(-replicas // MOST_REPLICAS)} times, as one address has at most {MOST_REPLICAS}")
    where = f" ({'; '.join(notes)})" if notes else ""
    return [*lines, f"to serve it{where}:", serve_command(servable.candidate, engine, served, replicas, router)]


def served_model(model: str | None) -> str:
    """Return MODEL for the command: the checkpoint if its weights are here, otherwise a placeholder."""
    path = Path(model or PLACEHOLDER).expanduser()
    directory = path.parent if path.suffix == ".json" else path
    if model == BUILTIN_MODEL or (model is not None and is_id(model) and not path.exists()):
        return model
    return str(directory) if any(directory.glob("*.safetensors")) else PLACEHOLDER


def serve_command(
    chosen: Candidate, engine: EngineConfig, model: str, replicas: int = 1, router: RouterName | None = None
) -> str:
    """Return the command line, with the candidate's options and the shared options that differ from their defaults.

    Replicas that need more devices than one host has run on the nodes of a Ray cluster.
    """
    default, given = asdict(EngineConfig()), asdict(engine)
    same = ("executor", *SHARED_OPTIONS)
    shared = {name: given[name] for name in given if name in same and given[name] != default[name]}
    words = []
    for name, value in (chosen.options() | shared).items():
        if isinstance(value, bool):
            words.append(flag_of(name if value else f"no_{name}"))
        else:
            words += [flag_of(name), f"{value:g}" if isinstance(value, float) else str(value)]
    if replicas > 1:
        words += ["--replicas", str(min(replicas, MOST_REPLICAS))]
        words += ["--routing", router] if router not in (None, ClusterConfig.routing) else []
        words += ["--ray"] if replicas * chosen.devices > SERVED_DEVICES else []
    named = f'"{PLACEHOLDER}"' if model == PLACEHOLDER else shlex.quote(model)
    return " ".join(["holdfast serve", named, *map(shlex.quote, words)])


def as_json(evaluation: Evaluation) -> dict[str, Any]:
    """Return an evaluation as `holdfast plan --json` writes it."""
    return asdict(evaluation.candidate) | {
        "replicas": evaluation.replicas,
        "capacity": evaluation.capacity,
        "fleet_capacity": evaluation.fleet_capacity,
        "output_tokens_per_s": evaluation.output_rate,
        "cost_per_million_output_tokens": evaluation.cost,
        "reason": evaluation.reason,
        "figures": dict(evaluation.figures),
    }
