"""The engine's composition root, where the kinds of work meet: from a configuration to a loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from holdfast.core.config import EngineConfig
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.in_service import in_service
from holdfast.engine.messages import (
    EngineInfo,
)
from holdfast.engine.profiles import CostProfile, kept_at, precision_of
from holdfast.engine.trace import TracedExecutor
from holdfast.lm.execution import device as devices
from holdfast.lm.execution.cost_profile import measure_cost, measure_recomputation
from holdfast.lm.execution.executor import DEFAULT_BUDGET, PagedExecutor
from holdfast.lm.kernels.attention import backends as attention
from holdfast.lm.models.loader import load
from holdfast.lm.scheduler.choice import capacity_of, make_scheduler
from holdfast.lm.scheduler.policies import StallFree
from holdfast.lm.types import BUDGET_TILE, EngineShape, LanguageExecutor, LanguageLoop, MemoryMeasurement
from holdfast.loop.contracts import Clock
from holdfast.loop.loop import Loop

clock = time.monotonic


def build(
    config: EngineConfig,
    *,
    began: float | None = None,
    measure: bool = False,
    on_progress: Callable[[str], None] = lambda stage: None,
) -> tuple[LanguageLoop, EngineInfo]:
    """Load the model, measure the device, divide its memory, and put the loop together.

    `began` is when the start was asked for, on the monotonic clock; `on_progress` is told each stage in words. A target
    takes the device's profile: the one that is kept, or a new one if there is none or `measure` asks for it. Raises
    ValueError (UnsupportedCheckpoint among them) and MemoryError with a reason for people.
    """
    began = clock() if began is None else began
    stages = StartStages(began, clock, on_progress)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    checkpoint = Checkpoint.find(config.model)
    stages.begin(f"loading {checkpoint.name}")
    executor = make_executor(config, checkpoint.directory)
    info = describe(executor, checkpoint, divide_memory(executor, stages))
    shape = shape_of(executor, info)
    profile = find_profile(executor, info, shape, measure=measure, on_progress=stages.begin)
    cost = profile.cost if profile else None
    if cost is None and weighs(config, info):
        stages.begin("measuring what recomputation costs")
        cost = measure_recomputation(executor, name=info.model, chunk=config.chunk_size)
    scheduler = make_scheduler(config, shape, cost)
    suspends = info.num_host_blocks > 0
    traced = TracedExecutor(executor, config.trace, clock, suspends=suspends) if config.trace else executor
    loop = Loop(scheduler, traced, config.steps_in_flight, clock)
    spent = stages.end()
    return loop, replace(info, started_in=clock() - began, stages=spent, profile=info.profile if profile else "")


def make_executor(config: EngineConfig, directory: Path) -> PagedExecutor:
    """The model on its device with what computes its steps, before there is a cache. Raises ValueError, MemoryError."""
    device = devices.resolve(config.device)
    attention.require(config.attention_backend, device, fp8_cache=config.kv_cache_dtype == "fp8")
    model = load(
        directory,
        device=device,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        load_format=config.load_format,
        quantization=config.quantization,
    )
    capacity = capacity_of(
        config.scheduler,
        token_budget=budget_of(config, device),
        max_model_len=model.spec.max_model_len,
        max_sequences=config.max_sequences,
    )
    return PagedExecutor(model, config, token_budget=capacity)


def budget_of(config: EngineConfig, device: torch.device) -> int:
    """The most tokens of a step: as configured, or the default of the device's kind."""
    return config.token_budget or DEFAULT_BUDGET[device.type]


def divide_memory(executor: PagedExecutor, stages: StartStages) -> MemoryMeasurement:
    """Measure what a step takes, and make the cache of both tiers and the graphs of steps in what is left."""
    captured = executor.config.cuda_graphs and executor.device.type == "cuda"
    if captured:
        stages.begin("compiling kernels")
        executor.compile()
    stages.begin("measuring memory")
    memory = executor.profile()
    making = []
    if memory.num_host_blocks:
        making.append(f"taking {memory.num_host_blocks * memory.block / 1e9:.1f} GB of host memory")
    if captured:
        making.append("capturing graphs")
    if making:
        stages.begin(" and ".join(making))
    executor.allocate(memory.num_blocks, memory.num_host_blocks)
    return memory


def describe(executor: PagedExecutor, checkpoint: Checkpoint, memory: MemoryMeasurement) -> EngineInfo:
    """What the engine is; `profile` is where its profile is kept, if there is one."""
    config, spec = executor.config, executor.model.spec
    dtype = str(spec.dtype).removeprefix("torch.")
    precision = precision_of(dtype, config.quantization, config.kv_cache_dtype)
    return EngineInfo(
        model=checkpoint.name,
        device=memory.device,
        precision=precision,
        memory=memory,
        num_blocks=memory.num_blocks,
        num_host_blocks=memory.num_host_blocks,
        block_size=config.block_size,
        token_budget=executor.token_budget,
        # A sequence's last token is never computed, so the pool holds one position less than the longest sequence.
        max_model_len=min(spec.max_model_len, memory.num_blocks * config.block_size + 1),
        max_sequences=config.max_sequences,
        max_waiting=config.max_waiting,
        vocab_size=spec.vocab_size,
        started_in=0.0,
        profile=str(kept_at(checkpoint.directory, precision, pace_of(config, executor.device.type, memory.device))),
    )


def pace_of(config: EngineConfig, kind: str, name: str) -> str:
    """The device's name, with the options that make steps of one model run at another pace on a device of its kind."""
    if kind != "cuda":
        return name
    backend = [] if config.attention_backend in ("auto", "holdfast") else [config.attention_backend]
    return ", ".join([name, *backend, *([] if config.cuda_graphs else ["no graphs"])])


class StartStages:
    """Tells what a start does next, and keeps what each stage took."""

    def __init__(self, began: float, clock: Clock, tell: Callable[[str], None]) -> None:
        self._clock, self._tell = clock, tell
        self._stage, self._began = "starting", began
        self._spent: list[tuple[str, float]] = []

    def begin(self, stage: str) -> None:
        """End the stage before, and begin this one."""
        self.end()
        self._stage = stage
        self._tell(stage)

    def end(self) -> tuple[tuple[str, float], ...]:
        """End the last stage; what all took, in seconds."""
        now = self._clock()
        self._spent.append((self._stage, now - self._began))
        self._began = now
        return tuple(self._spent)


def weighs(config: EngineConfig, info: EngineInfo) -> bool:
    """Whether chunks are given up by what it costs to compute them again."""
    return info.num_host_blocks > 0 and config.eviction == "retention"


def find_profile(
    executor: PagedExecutor, info: EngineInfo, shape: EngineShape, *, measure: bool, on_progress: Callable[[str], None]
) -> CostProfile | None:
    """The profile of the device where something goes by it: the one that is kept, or a new one, kept from now on."""
    config, path = executor.config, Path(info.profile)
    wanted = config.tbt_target is not None
    if measure or (wanted and not path.is_file()):
        on_progress("measuring the device's pace")
        cost = measure_cost(executor, name=info.model)
        if executor.device.type == "cpu":  # elsewhere the loop takes nothing from the device
            cost = in_service(
                cost, executor, partial(_practice, executor, shape), vocab_size=info.vocab_size, clock=clock
            )
        profile = CostProfile(
            cost=cost,
            dtype=str(executor.model.spec.dtype).removeprefix("torch."),
            quantization=config.quantization,
            kv_cache_dtype=config.kv_cache_dtype,
            cache_tokens=info.num_blocks * info.block_size,
            max_model_len=info.max_model_len,
            token_budget=DEFAULT_BUDGET[executor.device.type],
            tile=BUDGET_TILE[executor.device.type],
            token_bytes=info.memory.block // info.block_size,
        )
        profile.save(path)
        return profile
    return CostProfile.load(path) if wanted or (weighs(config, info) and path.is_file()) else None


def shape_of(executor: PagedExecutor, info: EngineInfo) -> EngineShape:
    """The engine as allocated.

    A token takes 2 operations for each weight, and 4 for each position that it attends to, in every dimension of every
    head: attention equals the rest where the position is weights / (2 · layers · heads · head_dim). A weight in FP8
    counts as half of one, since it takes half the time.
    """
    spec = executor.model.spec
    weights = spec.weight_bytes // spec.dtype.itemsize
    return EngineShape(
        model=info.model,
        precision=info.precision,
        num_blocks=info.num_blocks,
        num_host_blocks=info.num_host_blocks,
        token_budget=budget_of(executor.config, executor.device),
        max_step_tokens=executor.token_budget,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        tile=BUDGET_TILE[executor.device.type],
        attention_balance=max(1, weights // (2 * spec.num_layers * spec.num_heads * spec.head_dim)),
    )


def _practice(executor: PagedExecutor, shape: EngineShape, watched: LanguageExecutor) -> LanguageLoop:
    """A loop with a memory of its own, as if it were the engine's."""
    scheduler = make_scheduler(executor.config, shape, None, policy=StallFree(executor.token_budget))
    return Loop(scheduler, watched, executor.config.steps_in_flight, clock)
