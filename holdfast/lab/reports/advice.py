"""What `holdfast plan` recommends, and the `holdfast serve` command for it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from holdfast.core.config import BUILTIN_MODEL, EngineConfig
from holdfast.lab.planning import SHARED_OPTIONS, Candidate, Evaluation, best_of

SERVED_DEVICES = 1
"""Devices on which `holdfast serve` can run a model."""
PLACEHOLDER = "$MODEL"
"""Stands for the checkpoint's directory if only the shape of the model is known."""


def recommend(evaluations: Sequence[Evaluation], engine: EngineConfig, model: str | None) -> list[str]:
    """The advice, line by line. If anything can be served, the last line is the command."""
    best = best_of(evaluations)
    if best is None and not any(each.fits for each in evaluations):
        return ["no layout fits these devices: give more --devices, another --device, --tp or --pp, or a smaller model"]
    if best is None:
        return [
            "nothing meets these limits: raise --slo-tbt or --slo-ttft, or give more --devices or a faster --device"
        ]
    lines = [
        f"best: {best.candidate.policy} on {best.candidate.layout}, {best.fleet_capacity:.3g} conversations a second "
        "in all"
    ]
    servable = best_of([each for each in evaluations if each.candidate.devices <= SERVED_DEVICES])
    if servable is not best:
        lines.append(f"holdfast serve runs a model on {SERVED_DEVICES} device for now, so this cannot be served yet")
    if servable is None:
        return [*lines, "nothing that runs on one device meets these limits"]
    if servable is not best:
        lines.append(
            f"best on one device: {servable.candidate.policy}, {servable.fleet_capacity:.3g} conversations a second "
            "in all"
        )
    served = served_model(model)
    notes = [f"{PLACEHOLDER} is the checkpoint's directory"] if served == PLACEHOLDER else []
    notes += [f"on each of the {servable.replicas} devices, behind a load balancer"] if servable.replicas > 1 else []
    where = f" ({', '.join(notes)})" if notes else ""
    command = serve_command(servable.candidate, engine, served)
    return [*lines, f"to serve it{where}:", command]


def served_model(model: str | None) -> str:
    """The MODEL argument of the command: the checkpoint if its weights are here, else a placeholder."""
    path = Path(model or PLACEHOLDER).expanduser()
    directory = path.parent if path.suffix == ".json" else path
    if model == BUILTIN_MODEL:
        return BUILTIN_MODEL
    return str(directory) if any(directory.glob("*.safetensors")) else PLACEHOLDER


def serve_command(chosen: Candidate, engine: EngineConfig, model: str) -> str:
    """The command line: the options of the candidate, and the shared options that the user gave for all candidates."""
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


def as_json(evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation as `holdfast plan --json` writes it."""
    chosen = evaluation.candidate
    return {
        "scheduler": chosen.scheduler,
        "token_budget": chosen.token_budget,
        "tbt_target": chosen.tbt_target,
        "tp": chosen.tp,
        "pp": chosen.pp,
        "host_cache_gb": chosen.host_cache_gb,
        "replicas": evaluation.replicas,
        "capacity": evaluation.capacity,
        "fleet_capacity": evaluation.fleet_capacity,
        "output_tokens_per_s": evaluation.output_rate,
        "cost_per_million_output_tokens": evaluation.cost,
        "reason": evaluation.reason,
        "figures": dict(evaluation.figures),
    }
