"""Deploys a model on devices: turns their names into the cost profile and the pipeline stages of a simulation.

A measured profile in the package, `profiles/MODEL--DEVICE.json`, takes precedence over a derived one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.resources import as_file, files

from holdfast.core.config import EngineConfig
from holdfast.core.cost import CostModel, interpolate
from holdfast.engine.profiles import CostProfile
from holdfast.lab.simulator.devices import Device, Link, device_named, fp8_of, link_named
from holdfast.lab.simulator.roofline import cache_tokens, derive
from holdfast.lab.simulator.shapes import BYTES, MODELS, NATIVE, ModelShape, model_named
from holdfast.lm.types import BUDGET_TILE

TOKEN_BUDGET = 2048
"""Default token budget of an engine on a GPU."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages that a step passes in order, and the link between them."""

    stages: tuple[CostModel, ...]
    link: Link
    token_bytes: int
    """Bytes of one token's activations, sent from stage to stage."""

    def hop(self, tokens: int) -> float:
        """Seconds to send the activations of `tokens` tokens to the next stage."""
        return self.link.send(tokens * self.token_bytes)

    def whole(self) -> CostModel:
        """The cost model of a step alone in the pipeline: all stages and the hops between them."""
        first = self.stages[0]
        hops = len(self.stages) - 1
        return replace(
            first,
            device=f"{len(self.stages)} stages of {first.device}",
            linear_seconds=tuple(
                sum(interpolate(stage.linear_tokens, stage.linear_seconds, at) for stage in self.stages)
                + hops * self.hop(at)
                for at in first.linear_tokens
            ),
            attention_seconds=tuple(
                tuple(
                    sum(stage.attention(query, context) for stage in self.stages)
                    for context in first.attention_contexts
                )
                for query in first.attention_queries
            ),
        )


@dataclass(frozen=True, slots=True)
class Deployment:
    """The input of a simulation: `simulate(config, profile, workload, pipeline=pipeline)`."""

    profile: CostProfile
    pipeline: Pipeline | None
    """None if there is only one stage."""
    measured: bool
    """Whether the profile was measured. If not, it is derived from data sheets."""
    devices: int


def configured_shape(model: str | ModelShape, device: str, config: EngineConfig) -> ModelShape:
    """The model's shape with the weight and cache types of `config`. Raises ValueError where the engine would."""
    shape = model if isinstance(model, ModelShape) else model_named(model)
    if config.quantization == "fp8":
        fp8_of(device_named(device), "quantization")
        if not shape.native:
            raise ValueError(
                f"quantization is fp8, which native decoders have ({', '.join(NATIVE)}); {shape.name} runs on "
                "Transformers' code: leave it out"
            )
    if config.kv_cache_dtype == "fp8":
        fp8_of(device_named(device), "kv_cache_dtype")
    return replace(shape, quantization=config.quantization, kv_cache_dtype=config.kv_cache_dtype)


def deploy(
    model: str | ModelShape,
    device: str,
    *,
    tp: int = 1,
    pp: int = 1,
    link: str | None = None,
    stage_link: str | None = None,
    memory_fraction: float = 0.9,
) -> Deployment:
    """Deploy the model on tp x pp devices: `tp` devices share each layer, and `pp` stages divide the layers.

    `link` joins the devices of a layer and defaults to the device's own; `stage_link` joins the stages and defaults to
    `link`. The shape says what is stored in FP8 (`configured_shape`). Raises ValueError for unknown names, for a layout
    that does not divide the model, and if the weights do not fit.
    """
    shape = model if isinstance(model, ModelShape) else model_named(model)
    sheet = device_named(device)
    if min(tp, pp) < 1 or pp > shape.layers:
        raise ValueError(f"tp is {tp} and pp is {pp}; both must be at least 1, and pp at most {shape.layers} layers")
    inside = link_named(link or sheet.link)
    between = link_named(stage_link or inside.name)
    packaged = packaged_profile(shape, device) if tp * pp == 1 else None
    if packaged is not None:
        copied = packaged if packaged.copy_rate else replace(packaged, copy_rate=sheet.copy_rate)
        return Deployment(copied, None, True, 1)
    share, more = divmod(shape.layers, pp)
    stages = tuple(
        derive(shape, sheet, tp=tp, link=inside, layers=share + (at < more), head=at == pp - 1) for at in range(pp)
    )
    pipeline = Pipeline(stages, between, shape.hidden * BYTES) if pp > 1 else None
    cost = pipeline.whole() if pipeline else stages[0]
    return Deployment(_profile(shape, sheet, cost, tp * pp, memory_fraction), pipeline, False, tp * pp)


def _profile(shape: ModelShape, device: Device, cost: CostModel, devices: int, memory_fraction: float) -> CostProfile:
    return CostProfile(
        cost=cost,
        dtype="bfloat16",
        quantization=shape.quantization,
        kv_cache_dtype=shape.kv_cache_dtype,
        cache_tokens=cache_tokens(shape, device, devices=devices, memory_fraction=memory_fraction),
        max_model_len=shape.max_model_len,
        token_budget=TOKEN_BUDGET,
        tile=BUDGET_TILE["cuda"],
        token_bytes=shape.token_bytes,
        copy_rate=device.copy_rate * devices,
    )


def packaged_profile(shape: ModelShape, device: str) -> CostProfile | None:
    """The package's measured profile of this model on one such device; None if there is none of this precision."""
    if replace(shape, quantization="none", kv_cache_dtype="auto") != MODELS.get(shape.name):
        return None  # another model of that name
    file = files("holdfast").joinpath("profiles", f"{shape.name}--{device}.json")
    if not file.is_file():
        return None
    with as_file(file) as path:
        profile = CostProfile.load(path)
    same = (profile.quantization, profile.kv_cache_dtype) == (shape.quantization, shape.kv_cache_dtype)
    return profile if same else None
