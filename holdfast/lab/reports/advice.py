"""What `holdfast plan` answers: the table of candidates, what to do, and the command that serves the best of them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from holdfast.cli.tables import table
from holdfast.core.config import BUILTIN_MODEL, EngineConfig
from holdfast.lab.planning import SHARED_OPTIONS, Candidate, Verdict, best_of

SERVED_DEVICES = 1
"""What `holdfast serve` runs a model on."""
PLACEHOLDER = "$MODEL"
"""Stands for a checkpoint's directory where only a model's shape is known."""

HEAD = ("policy", "replicas", "rate/s", "out tok/s", "TBT p99", "TTFT p99", "cost/M")
"""Of the table, which 80 columns hold."""


def cells(verdict: Verdict) -> tuple[str, ...]:
    """A row of the table: capacity and tokens of all replicas together."""
    names = (verdict.candidate.policy, f"{verdict.replicas} × {verdict.candidate.layout}")
    if not verdict.capacity:
        return (*names, "none", "", "", "", "")
    figures = verdict.figures
    return (
        *names,
        f"{verdict.fleet:.3g}",
        f"{verdict.tokens * verdict.replicas:,.0f}",
        f"{figures['p99_itl_ms']:,.1f}",
        f"{figures['p99_ttft_ms']:,.0f}",
        "" if verdict.cost is None else f"{verdict.cost:,.3f}",
    )


def show(console: Console, verdicts: Sequence[Verdict], best: Verdict | None) -> None:
    """The table, and why some have no capacity."""
    shown = table("capacity of all devices together", HEAD, words=2, padding=0)
    for verdict in verdicts:
        shown.add_row(*cells(verdict), style="bold" if verdict is best else "" if verdict.capacity else "dim")
    console.print(shown)
    for told in dict.fromkeys(map(reason_of, verdicts)):
        if told:
            console.print(Text(told, style="dim"), soft_wrap=True)


def reason_of(verdict: Verdict) -> str:
    """Why a candidate has no capacity; of a layout that cannot be, the same for every policy."""
    if not verdict.reason:
        return ""
    policy = f"{verdict.candidate.policy}, " if verdict.fits else ""
    return f"{policy}{verdict.candidate.layout}: {verdict.reason}"


def recommend(verdicts: Sequence[Verdict], engine: EngineConfig, model: str | None) -> list[str]:
    """What to do, line by line; the command comes last, where there is one."""
    best = best_of(verdicts)
    if best is None and not any(verdict.fits for verdict in verdicts):
        return ["no layout fits these devices: give more or other --devices, another --tp and --pp, or a smaller model"]
    if best is None:
        return ["nothing keeps these limits: raise --slo-tbt or --slo-ttft, or give more or faster --devices"]
    lines = [
        f"best: {best.candidate.policy} on {best.candidate.layout}, {best.fleet:.3g} conversations a second in all"
    ]
    servable = best_of([verdict for verdict in verdicts if verdict.candidate.devices <= SERVED_DEVICES])
    if servable is not best:
        lines.append(f"holdfast serve runs a model on {SERVED_DEVICES} device for now, so this cannot be served yet")
    if servable is None:
        return [*lines, "nothing that runs on one device keeps these limits"]
    if servable is not best:
        lines.append(f"what can be: {servable.candidate.policy}, {servable.fleet:.3g} conversations a second in all")
    served = served_model(model)
    notes = [f"{PLACEHOLDER} is the checkpoint's directory"] if served == PLACEHOLDER else []
    notes += [f"on each of the {servable.replicas} devices, behind a load balancer"] if servable.replicas > 1 else []
    where = f" ({', '.join(notes)})" if notes else ""
    command = serve_command(servable.candidate, engine, served)
    return [*lines, f"to serve it{where}:", command]


def served_model(model: str | None) -> str:
    """What `holdfast serve` is to be called with: a checkpoint that is there, or what stands for one."""
    path = Path(model or PLACEHOLDER).expanduser()
    directory = path.parent if path.suffix == ".json" else path
    if model == BUILTIN_MODEL:
        return BUILTIN_MODEL
    return str(directory) if any(directory.glob("*.safetensors")) else PLACEHOLDER


def serve_command(chosen: Candidate, engine: EngineConfig, model: str) -> str:
    """The command line: what the candidate sets, and what the plan was told to set for all."""
    default = EngineConfig()
    shared = {
        field.name: getattr(engine, field.name)
        for field in fields(engine)
        if field.name in SHARED_OPTIONS and getattr(engine, field.name) != getattr(default, field.name)
    }
    words = []
    for name, value in (chosen.options() | shared).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", f"{value:g}" if isinstance(value, float) else str(value)]
    named = f'"{PLACEHOLDER}"' if model == PLACEHOLDER else shlex.quote(model)
    return " ".join(["holdfast serve", named, *map(shlex.quote, words)])


def as_row(verdict: Verdict) -> dict[str, Any]:
    """A verdict for JSON."""
    chosen = verdict.candidate
    return {
        "scheduler": chosen.scheduler,
        "token_budget": chosen.token_budget,
        "tbt_target": chosen.tbt_target,
        "tp": chosen.tp,
        "pp": chosen.pp,
        "host_cache_gb": chosen.host_cache_gb,
        "replicas": verdict.replicas,
        "capacity": verdict.capacity,
        "fleet_capacity": verdict.fleet,
        "output_tokens_per_s": verdict.tokens,
        "cost_per_million_output_tokens": verdict.cost,
        "reason": verdict.reason,
        "figures": dict(verdict.figures),
    }
