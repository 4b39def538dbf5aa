"""Code that simulations of papers share: devices with costs that a derivation leaves out, and result files.

`heads`: attention reads keys and values once for each query head. PagedAttention did so in vLLM of 2023 (a thread block
for each query head and sequence), and so does PyTorch's memory-efficient attention. Our kernels read them once for all
query heads of a group.

`host`: 0.36 ms more for each layer of a step. We derive 25 ms for one decode of Yi-34B on two A100s; Sarathi-Serve's
authors recorded 46.8 (github.com/microsoft/sarathi-serve, branch osdi-sarathi-serve, osdi-experiments/figure-2/
decode.csv). The 22 ms of difference are 0.36 ms for each of 60 layers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.lib.invocation import program
from holdfast.core.cost import CostModel
from holdfast.lab.simulator.deployment import Deployment, deploy
from holdfast.lab.simulator.shapes import MODELS

RESULTS = Path(__file__).parents[1] / "papers" / "results"
LAYER_SECONDS = 0.36e-3
VARIATIONS = {
    "heads": "attention reads keys and values once for each query head",
    "host": "0.36 ms more for each layer of a step, as Sarathi-Serve's authors recorded of Yi-34B",
}
"""Values of `--vary` that the simulations share."""


def deployed(model: str, vary: Collection[str] = (), *, step_seconds: float = 0.0, **layout: Any) -> Deployment:
    """`deploy(model, **layout)` with `heads` and `host` applied where `vary` names them, and every step made longer.

    Pipeline stages share the extra seconds. Memory does not change.
    """
    shape = MODELS[model]
    plain = deploy(shape, **layout)
    heads = deploy(replace(shape, kv_heads=shape.heads), **layout) if "heads" in vary else plain
    if "host" in vary:
        step_seconds += LAYER_SECONDS * shape.layers
    stages = len(plain.pipeline.stages) if plain.pipeline else 1

    def changed(cost: CostModel, attention: CostModel) -> CostModel:
        linear = tuple(seconds + step_seconds / stages for seconds in cost.linear_seconds)
        return replace(cost, linear_seconds=linear, attention_seconds=attention.attention_seconds)

    if plain.pipeline is None or heads.pipeline is None:
        pipeline, cost = None, changed(plain.profile.cost, heads.profile.cost)
    else:
        both = zip(plain.pipeline.stages, heads.pipeline.stages, strict=True)
        pipeline = replace(plain.pipeline, stages=tuple(changed(*stage) for stage in both))
        cost = pipeline.whole()
    return replace(plain, profile=replace(plain.profile, cost=cost), pipeline=pipeline)


def origin(*paths: Path | None) -> dict[str, str]:
    """Date and command of this run; of `paths` only the names are kept."""
    words = " ".join([*program(), *sys.argv[1:]])
    for path in filter(None, paths):
        words = words.replace(str(path), path.name)
    return {"date": date.today().isoformat(), "command": words}


def save(stem: Path, rows: Any, lines: Sequence[str], earlier: str = "") -> None:
    """Print the table, and write it and its rows next to each other as `stem`.md and `stem`.json.

    `earlier` is the command of the run that the rows were added to.
    """
    about = origin(stem.parent) | ({"earlier": earlier} if earlier else {})
    print("\n".join(lines))
    stem.with_suffix(".json").write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    added = f"; added to `{earlier}`" if earlier else ""
    stem.with_suffix(".md").write_text(f"`{about['command']}`, {about['date']}{added}\n\n" + "\n".join(lines) + "\n")
