"""Deploys a model on devices: turns their names into the cost profile and the pipeline stages of a simulation.

A measured profile in the package, `profiles/MODEL--DEVICE.json`, takes precedence over one derived from the model's
shape and the device's data sheet. The name of a profile of several devices ends with their layout: `-tp2`, `-pp2` or
`-tp2-pp2`.

The linear layers of a step do arithmetic and read the weights. The two overlap, but not fully: the root of the sum of
their squares is within 10% of an H200's time for 1 to 8,192 tokens, while their maximum, the textbook roofline, is up
to 25% too low where they are equal. Arithmetic is done in whole tiles of tokens (tile quantisation, Sarathi-Serve
§4.3). Attention takes the larger of its arithmetic and of reading the cache. A segment's time in recurrent layers does
not depend on its position: its states are read and written, and a prompt is scanned (`_Stage.recurrence`). Under tensor
parallelism each device does its share of all, and the all-reduces of each layer are added (Megatron-LM). FP8 weights
and an FP8 cache have their own rates (`devices.Fp8`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from math import hypot
from typing import Protocol

from holdfast.core.config import DEFAULT_SEQUENCES
from holdfast.core.cost import CostModel, LinkCost
from holdfast.core.layout import Layout
from holdfast.engine.profiles import CostProfile
from holdfast.lab.simulator.devices import DEVICES, LINKS, Device, Link, fp8_of, look_up
from holdfast.lab.simulator.shapes import BYTES, MODELS, NATIVE, ModelShape
from holdfast.lm.config import EngineConfig
from holdfast.lm.types import BUDGET_TILE, DEFAULT_TOKEN_BUDGET

SAMPLED = 256
"""Largest number of tokens in a step for which the LM head computes logits."""
TOKENS = (1, *range(16, 65, 16), *(at for tile in range(64, 256, 64) for at in (tile + 1, tile + 64)),
          *(at for tile in range(256, 4096, 128) for at in (tile + 1, tile + 128)), 8192, 16384, 32768)  # fmt: skip
"""Token counts at which the linear layers' time is given: both ends of each tile, because the time jumps there."""
QUERIES = (1, 2, *(size for power in range(2, 15) for size in (1 << power, 3 << power - 1)), 32768)
"""Chunk lengths at which the time of attention is given: powers of two, and the numbers midway between them."""
CONTEXTS = tuple(at for at in QUERIES if at >= 16)
"""End positions at which the time of attention is given."""
MOST_PACKED = 64
"""Largest number of tokens of a step whose products read 4-bit weights as they are stored."""
QUERY_TILE = 64
"""Number of query rows that an attention kernel computes at once. Fewer rows take as long."""


class Wire(Protocol):
    """The link that carries messages between stages."""

    def send(self, size: float) -> float:
        """Seconds to send a message of `size` bytes."""


ONE_DEVICE = Layout()
FREE = LinkCost((1,), (0.0,))
"""A link whose cost is unknown and counted as 0."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages that a step passes in order, and the link between them."""

    stages: tuple[CostModel, ...]
    link: Wire
    token_bytes: int
    """Bytes of one token's activations, sent from stage to stage."""

    @classmethod
    def measured(cls, profile: CostProfile) -> Pipeline | None:
        """The stages that a profile was measured on; None for one stage. Each takes its share of any step.

        A stage's share includes the time that it takes to send. A step therefore takes longer than in the profile by
        the transfer times between stages, which no stage measures.
        """
        if profile.pp == 1:
            return None
        shares = profile.cost.shares(profile.pp)
        stages = tuple(replace(profile.cost.slower(share, share), stage_shares=()) for share in shares)
        return cls(stages, profile.send or FREE, profile.stream_bytes)

    def hop(self, tokens: int) -> float:
        """Seconds to send the activations of `tokens` tokens to the next stage."""
        return self.link.send(tokens * self.token_bytes)

    def whole(self) -> CostModel:
        """The cost model of a step that is alone in the pipeline: all stages and the hops between them."""
        stages, first = self.stages, self.stages[0]
        hops, contexts = len(stages) - 1, first.attention_contexts
        return replace(
            first,
            device=f"{len(stages)} stages of {first.device}",
            stage_shares=self.shares(),
            linear_seconds=tuple(
                sum(stage.linear(at) for stage in stages) + hops * self.hop(at) for at in first.linear_tokens
            ),
            attention_seconds=tuple(
                tuple(sum(stage.attention(query, context) for stage in stages) for context in contexts)
                for query in first.attention_queries
            ),
        )

    def shares(self) -> tuple[float, ...]:
        """Each stage's share of a step of the default size, like the shares of a measured profile."""
        seconds = [stage.linear(DEFAULT_TOKEN_BUDGET["cuda"]) for stage in self.stages]
        return tuple(each / sum(seconds) for each in seconds)


@dataclass(frozen=True, slots=True)
class Deployment:
    """The input of a simulation: `simulate(config, profile, workload, pipeline=pipeline)`."""

    profile: CostProfile
    pipeline: Pipeline | None
    """The stages; None if there is only one."""
    measured: bool
    """Whether the profile was measured. If not, it is derived from data sheets."""


def configured_shape(model: str | ModelShape, device: str, config: EngineConfig) -> ModelShape:
    """The model's shape with the weight and cache types of `config`. Raises ValueError if the engine would."""
    shape = model if isinstance(model, ModelShape) else look_up("model shape", MODELS, model)
    for name in ("quantization", "kv_cache_dtype"):
        if getattr(config, name) == "fp8":
            fp8_of(look_up("device", DEVICES, device), name)
    if config.quantization == "fp8" and not shape.native:
        raise ValueError(
            f"quantization is fp8, which native decoders have ({', '.join(NATIVE)}); {shape.name} runs on "
            "Transformers' code: leave it out"
        )
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
    shape = model if isinstance(model, ModelShape) else look_up("model shape", MODELS, model)
    sheet = look_up("device", DEVICES, device)
    if min(tp, pp) < 1 or pp > shape.layers:
        raise ValueError(f"tp is {tp} and pp is {pp}; both must be at least 1, and pp at most {shape.layers} layers")
    inside = look_up("link", LINKS, link or sheet.link)
    between = look_up("link", LINKS, stage_link or inside.name)
    devices = tp * pp
    joined = (link or stage_link) and devices > 1  # a measured profile includes the links of its devices
    packaged = None if joined else packaged_profile(shape, device, Layout(tp, pp))
    if packaged is not None:
        copied = packaged if packaged.copy_rate else replace(packaged, copy_rate=sheet.copy_rate * devices)
        return Deployment(copied, Pipeline.measured(copied), True)
    share, more = divmod(shape.layers, pp)
    stages = tuple(
        derive(shape, sheet, tp=tp, link=inside, layers=share + (at < more), head=at == pp - 1) for at in range(pp)
    )
    pipeline = Pipeline(stages, between, shape.hidden * BYTES) if pp > 1 else None
    profile = CostProfile(
        cost=pipeline.whole() if pipeline else stages[0],
        dtype="bfloat16",
        quantization=shape.quantization,
        kv_cache_dtype=shape.kv_cache_dtype,
        cache_tokens=cache_tokens(shape, sheet, devices=devices, memory_fraction=memory_fraction),
        max_model_len=shape.max_model_len,
        token_budget=DEFAULT_TOKEN_BUDGET["cuda"],
        tile=BUDGET_TILE["cuda"],
        token_bytes=shape.token_bytes,
        state_bytes=shape.state_bytes,
        copy_rate=sheet.copy_rate * devices,
        tp=tp,
        pp=pp,
        stream_bytes=shape.hidden * BYTES,
    )
    return Deployment(profile, pipeline, False)


def packaged_profile(shape: ModelShape, device: str, layout: Layout = ONE_DEVICE) -> CostProfile | None:
    """The package's measured profile of this model on these devices; None if there is none of this precision."""
    if replace(shape, quantization="none", kv_cache_dtype="auto") != MODELS.get(shape.name):
        return None  # another model with this name
    file = files("holdfast").joinpath("profiles", f"{shape.name}--{device}{layout.suffix}.json")
    if not file.is_file():
        return None
    with as_file(file) as path:
        profile = CostProfile.load(path)
    same = (profile.quantization, profile.kv_cache_dtype) == (shape.quantization, shape.kv_cache_dtype)
    return profile if same else None


def derive(
    shape: ModelShape,
    device: Device,
    *,
    tp: int = 1,
    link: Link | None = None,
    layers: int | None = None,
    head: bool = True,
) -> CostModel:
    """The cost model of `layers` layers (default: all) on `tp` devices joined by `link`, with or without the LM head.

    Raises ValueError if `tp` does not divide the heads, and for several devices without a link.
    """
    if shape.heads % tp:
        raise ValueError(f"tp is {tp}; it must divide the {shape.heads} heads of {shape.name}")
    if tp > 1 and link is None:
        raise ValueError(f"tp is {tp}, which takes a link between the devices")
    stage = _Stage(shape, device, tp, link, layers or shape.layers, head)
    return CostModel(
        model=shape.name,
        device=device.name if tp == 1 else f"{tp} {device.name}",
        linear_tokens=TOKENS,
        linear_seconds=tuple(map(stage.linear, TOKENS)),
        attention_queries=QUERIES,
        attention_contexts=CONTEXTS,
        attention_seconds=tuple(tuple(stage.attention(query, context) for context in CONTEXTS) for query in QUERIES),
    )


def cache_tokens(shape: ModelShape, device: Device, *, devices: int, memory_fraction: float = 0.9) -> int:
    """Number of positions in a KV cache that fits into the devices' memory with weights and a step's activations.

    Raises ValueError if none fits.
    """
    activations = 2e9
    free = devices * (device.memory * memory_fraction - activations) - shape.weight_bytes
    if shape.state_bytes:  # of running sequences, and of snapshots
        free = (free - DEFAULT_SEQUENCES * shape.state_bytes) * (1 - EngineConfig.snapshot_share)
    if free < shape.token_bytes:
        raise ValueError(
            f"{shape.name} takes {shape.weight_bytes / 1e9:.0f} GB, and {devices} {device.name} have "
            f"{devices * device.memory / 1e9:.0f}; take more devices (tp, pp)"
        )
    return int(free / shape.token_bytes)


class _Stage:
    """The layers that one group of devices computes."""

    def __init__(self, shape: ModelShape, device: Device, tp: int, link: Link | None, layers: int, head: bool) -> None:
        self.shape, self.device, self.tp, self.link, self.layers = shape, device, tp, link, layers
        self.head = shape.head_weights if head else 0

    def linear(self, tokens: int) -> float:
        """Seconds of a step of `tokens` tokens, without attention."""
        device, tp, rows = self.device, self.tp, round_to_tile(tokens)
        flops, bandwidth = device.flops * device.matmul, device.bandwidth * device.weights
        work = 2 * self.head * min(rows, SAMPLED) / flops
        read = BYTES * self.head / bandwidth
        rounding = 0.0
        if self.shape.quantization == "fp8":
            fp8 = fp8_of(device, "quantization")
            flops, bandwidth = fp8.flops * fp8.matmul, device.bandwidth * fp8.weights
            rounding = fp8.round_seconds if tokens > 1 else 0.0
        work += 2 * self.layers * self.shape.layer_weights * rows / flops
        read += self.layers * self.shape.layer_bytes / bandwidth
        if self.shape.stored.packed and self.shape.quantization == "none" and tokens > MOST_PACKED:
            read += 2 * BYTES * self.layers * self.shape.layer_weights / bandwidth  # written in 16 bits, and read again
        seconds = hypot(work, read) / tp + device.step_seconds + self.layers * (device.layer_seconds + rounding)
        if self.link is not None and tp > 1:
            size = tokens * self.shape.hidden * BYTES
            seconds += self.layers * self.shape.reductions * self.link.all_reduce(size, tp)
        return seconds

    def attention(self, query: int, context: int) -> float:
        """Seconds of the attention of `query` tokens that end at position `context`; 0 if they would start before 0."""
        if query > context:
            return 0.0
        shape, device, layers = self.shape, self.device, self.layers * self.shape.attention_layers / self.shape.layers
        reach = min(context, (shape.window or context) + query - 1)
        pairs = attended_pairs(query, context, shape.window) * (max(query, QUERY_TILE) / query if query > 1 else 1.0)
        work = 4 * pairs * shape.heads * shape.head_dim * layers
        read = reach * shape.token_bytes * self.layers / shape.layers
        rates = fp8_of(device, "kv_cache_dtype") if shape.kv_cache_dtype == "fp8" else device
        attended = max(work / (device.flops * rates.attention), read / (device.bandwidth * rates.cache))
        return (attended + self.recurrence(query)) / self.tp

    def recurrence(self, query: int) -> float:
        """Seconds of the recurrent layers for `query` tokens of a sequence, besides their products with weights.

        The states are read and written once. A prompt also takes a scan over its tokens, and their convolution.
        """
        if self.shape.kinds is None:
            return 0.0
        device, each = self.device, self.shape.kinds.recurrent
        seconds = 2 * each.state_bytes / (device.bandwidth * device.states)
        if query > 1:
            seconds += query * each.scan_operations / (device.flops * device.scan)
            seconds += query * each.convolved_bytes / (device.bandwidth * device.convolution)
        return self.layers * each.layers / self.shape.layers * seconds


def round_to_tile(tokens: int) -> int:
    """`tokens` rounded up to whole tiles: of 16 up to 64 tokens, of 64 up to 256, of 128 beyond."""
    tile = 16 if tokens <= 64 else 64 if tokens <= 256 else 128
    return -(-tokens // tile) * tile


def attended_pairs(query: int, context: int, window: int | None) -> int:
    """Number of (query, attended position) pairs of `query` tokens that end at position `context`."""

    def up_to(length: int) -> int:
        """Number of pairs of the first `length` queries."""
        if window is None or length <= window:
            return length * (length + 1) // 2
        return window * (window + 1) // 2 + (length - window) * window

    return up_to(context) - up_to(context - query)
