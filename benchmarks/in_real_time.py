"""An engine in this process on the real clock, for benchmarks: built once, its policy exchanged from run to run."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.core.config import EngineConfig
from holdfast.core.cost import CostModel
from holdfast.engine.build import build
from holdfast.engine.profiles import CostProfile
from holdfast.lab.metrics import Record
from holdfast.lab.simulator.reserve import Reserve
from holdfast.lab.simulator.run import VOCAB_SIZE, Clients, make_scheduler
from holdfast.lab.simulator.shapes import ModelShape, model_named
from holdfast.lab.workloads import Workload
from holdfast.lm.types import StepPlan, StepResult
from holdfast.loop.contracts import Executor
from holdfast.loop.loop import Loop


def checkpoint_of(shape: ModelShape | str) -> str:
    """A directory with the config.json of a known shape, for weights drawn at random; it is named after the shape."""
    if isinstance(shape, str):
        shape = model_named(shape)
    directory = Path(tempfile.mkdtemp()) / shape.name
    directory.mkdir()
    fields: dict[str, Any] = dict(
        architectures=["MistralForCausalLM" if shape.window else "LlamaForCausalLM"],
        model_type="mistral" if shape.window else "llama",
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.max_model_len,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        bos_token_id=1,
        eos_token_id=2,
        hidden_act="silu",
        torch_dtype="bfloat16",
        tie_word_embeddings=False,
    )
    if shape.window:
        fields["sliding_window"] = shape.window
    (directory / "config.json").write_text(json.dumps(fields))
    return str(directory)


class WallClock:
    """Real seconds from now on. A `simulator.run.WaitableClock`."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self._start

    def advance_to(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self()))


class Stepped(NamedTuple):
    """A step as it was run. Times in seconds on the perf counter."""

    segments: tuple[tuple[int, int], ...]
    """(query, context) of each."""
    planned: float
    """When its submission began."""
    submitted: float
    ended: float
    """When its result was had."""
    seconds: float
    """The device's own measure."""


class Recorder:
    """Goes around an executor and notes each step."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._plans: deque[tuple[StepPlan, float, float]] = deque()
        self._raw: list[tuple[StepPlan, float, float, float, float]] = []

    def submit(self, plan: StepPlan) -> None:
        began = time.perf_counter()
        self._inner.submit(plan)
        self._plans.append((plan, began, time.perf_counter()))

    def collect(self) -> StepResult:
        result = self._inner.collect()
        self._raw.append((*self._plans.popleft(), time.perf_counter(), result.seconds))
        return result

    def steps(self) -> list[Stepped]:
        """All steps with segments, in order."""
        return [Stepped(spans_of(plan), *times) for plan, *times in self._raw if plan.num_tokens]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def spans_of(plan: StepPlan) -> tuple[tuple[int, int], ...]:
    """(query, context) of each segment."""
    starts, stops = plan.columns.column("start"), plan.columns.column("stop")
    return tuple((stop - start, stop) for start, stop in zip(starts, stops, strict=True))


class RealEngine:
    """A model on this machine's device. Weights, cache and graphs stay from run to run, scheduler and memory do not."""

    def __init__(self, config: EngineConfig, *, profile: CostProfile | None = None) -> None:
        """`config` must have room for all that later runs ask for: the widest step, the most sequences.

        Without a `profile` the device is measured.
        """
        loop, self.info = build(replace(config, prefix_sharing=False), measure=profile is None)
        profile = profile or CostProfile.load(Path(self.info.profile_path))
        self.executor = loop._executor
        self.profile = replace(profile, cache_tokens=self.info.num_blocks * self.info.block_size)
        gc.collect()
        gc.freeze()

    def serve(
        self, config: EngineConfig, workload: Workload, *, concurrency: int | None = None, until: float = float("inf")
    ) -> tuple[list[Record], list[Stepped]]:
        """What clients saw and what steps were run, with nobody else asking; stops `until` seconds have passed."""
        recorder, clock = Recorder(self.executor), WallClock()
        loop = Loop(make_scheduler(config, self.profile), recorder, config.steps_in_flight, clock)
        clients = Clients(
            workload, loop, clock, vocab_size=min(self.info.vocab_size, VOCAB_SIZE), concurrency=concurrency
        )
        gc.collect()
        gc.disable()
        try:
            while clock() < until and clients.advance():
                pass
            while loop._plans:
                recorder.collect()
                loop._plans.popleft()
        finally:
            gc.enable()
        return clients.records, recorder.steps()

    def close(self) -> None:
        """Let go of the device."""
        self.executor.close()


def predicted(cost: CostModel, steps: list[Stepped]) -> list[float]:
    """What the cost model says of the very steps that were run, one behind the other as they were, seconds."""
    reserve, taken, free_at = Reserve(cost.burst), [], 0.0
    for step in steps:
        idle = max(0.0, step.ended - step.seconds - free_at)
        taken.append(reserve.step(sum(query for query, _ in step.segments), cost.step(step.segments), idle))
        free_at = step.ended
    return taken
