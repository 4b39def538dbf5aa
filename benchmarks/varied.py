"""What the papers' engines may have done that a derived deployment leaves out, to vary its part in a figure.

`per_head`: attention reads the keys and values once for each query head, as PagedAttention did in vLLM of 2023 (a
thread block for each query head and sequence) and PyTorch's memory-efficient attention does; ours reads them once for
all query heads of a group. `step_seconds`: what a step takes besides, of host and of launches. Of Yi-34B on two A100s,
whose step we derive as 25 ms, Sarathi-Serve's authors recorded 46.8 ms for one decode (github.com/microsoft/
sarathi-serve, branch osdi-sarathi-serve, osdi-experiments/figure-2/decode.csv): 22 ms more, 0.36 for each of 60 layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdfast.core.cost import CostModel
from holdfast.lab.simulator.deployment import Deployment, deploy
from holdfast.lab.simulator.shapes import model_named

LAYER_SECONDS = 0.36e-3
"""A layer's share of what that record has more than we derive."""


def deployed(model: str, *, per_head: bool = False, step_seconds: float = 0.0, **layout: Any) -> Deployment:
    """`deploy(model, **layout)` with this changed; a pipeline's stages share `step_seconds`. Memory stays as it is."""
    shape = model_named(model)
    plain = deploy(shape, **layout)
    heads = deploy(replace(shape, kv_heads=shape.heads), **layout) if per_head else plain
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
