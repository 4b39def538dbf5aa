"""Engines in this process on the real clock: one whose policy changes between runs, and a record of every step."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lib.invocation import settle
from holdfast.core.columns import Columns
from holdfast.core.cost import CostModel
from holdfast.core.types import SequenceOutput
from holdfast.engine.process.build import build
from holdfast.engine.profiles import CostProfile
from holdfast.lab.metrics import Record
from holdfast.lab.simulator.devices import look_up
from holdfast.lab.simulator.executor import Reserve
from holdfast.lab.simulator.run import VOCAB_SIZE, Clients, engine_shape
from holdfast.lab.simulator.shapes import MODELS, ModelShape
from holdfast.lab.workloads import Workload
from holdfast.lm.choice import make_scheduler, steps_in_flight
from holdfast.lm.config import EngineConfig
from holdfast.lm.scheduler.builder import Policy
from holdfast.lm.types import EngineShape, StepPlan, StepResult
from holdfast.loop.contracts import Executor
from holdfast.loop.loop import Loop


def checkpoint_of(shape: ModelShape | str) -> str:
    """A new directory, named after the shape, with its config.json, for random weights. See `config_of`."""
    if isinstance(shape, str):
        shape = look_up("model shape", MODELS, shape)
    fields = config_of(shape)
    directory = Path(tempfile.mkdtemp()) / shape.name
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(fields))
    return str(directory)


def config_of(shape: ModelShape) -> dict[str, Any]:
    """The config.json of a model of the shape: Llama, Mistral (with a window), or OPT (without a gate, by its name).

    Raises ValueError for other shapes without a gate, which would be another model's.
    """
    fields: dict[str, Any] = dict(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.max_model_len,
        bos_token_id=1,
        eos_token_id=2,
        torch_dtype="bfloat16",
    )
    if shape.name.startswith("opt"):
        kind = dict(architectures=["OPTForCausalLM"], model_type="opt", ffn_dim=shape.intermediate)
        return fields | kind | dict(word_embed_proj_dim=shape.hidden, tie_word_embeddings=True)
    if not shape.gated:
        raise ValueError(f"no config.json is known of {shape.name}; take a shape of Llama, Mistral or OPT")
    fields |= dict(
        architectures=["MistralForCausalLM" if shape.window else "LlamaForCausalLM"],
        model_type="mistral" if shape.window else "llama",
        intermediate_size=shape.intermediate,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        hidden_act="silu",
        tie_word_embeddings=False,
    )
    return fields | ({"sliding_window": shape.window} if shape.window else {})


class WallClock:
    """Real seconds from now on. A `simulator.run.WaitableClock`."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self._start

    def advance_to(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self()))


class Stepped(NamedTuple):
    """A step that ran. Times are seconds on the perf counter."""

    segments: tuple[tuple[int, int], ...]
    """(query, context) of each segment."""
    planned: float
    """Time at which its submission began."""
    submitted: float
    ended: float
    """Time at which its result arrived."""
    seconds: float
    """Seconds measured by the device."""
    stages: tuple[float, ...] = ()
    """Seconds of each stage of a pipeline; empty for one stage."""


class Recorder:
    """Wraps an executor and records each step."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._plans: deque[tuple[StepPlan, float, float]] = deque()
        self._raw: list[tuple[StepPlan, float, float, float, float, tuple[float, ...]]] = []
        self.last_step = -1
        """Number of the last step that was submitted."""

    def submit(self, plan: StepPlan) -> None:
        began, self.last_step = time.perf_counter(), plan.step
        self._inner.submit(plan)
        self._plans.append((plan, began, time.perf_counter()))

    def collect(self) -> StepResult:
        result = self._inner.collect()
        self._raw.append((*self._plans.popleft(), time.perf_counter(), result.seconds, result.stages))
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
    """A model on this machine's devices. Runs share weights, cache, graphs; each has its own scheduler and memory."""

    def __init__(self, config: EngineConfig, *, profile: CostProfile | None = None, measure: bool = True) -> None:
        """`config` sets the layout, the widest step, the most sequences and the host tier of all later runs.

        Without a `profile`, it measures one; without `measure`, it estimates one, and `config` has a target.
        """
        if config.host_cache_gb in ("auto", 0.0):
            config = replace(config, prefix_sharing=False)
        loop, self.info = build(config, measure=measure and profile is None)
        settle(loop)
        profile = profile or CostProfile.load(Path(self.info.profile_path))
        self.executor = loop.executor
        self.profile = replace(profile, cache_tokens=self.info.num_blocks * self.info.block_size)
        self._steps = 0
        """The number of the next step. Copies to the host are identified by the steps that began them."""
        gc.collect()
        gc.freeze()

    @contextmanager
    def serving(
        self,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        make_policy: Callable[[EngineShape], Policy] | None = None,
    ) -> Iterator[tuple[Loop, Recorder]]:
        """A loop with an empty cache, and the record of its steps. Ends the steps in flight when the context ends.

        No step is wider than the engine was built for, whatever `config` allows. `cache_gb` may be smaller than the
        engine's.
        """
        profile, recorder = self.profile, Recorder(self.executor)
        if config.cache_gb is not None and profile.token_bytes:
            profile = replace(
                profile, cache_tokens=min(profile.cache_tokens, int(config.cache_gb * 1e9 / profile.token_bytes))
            )
        shape = engine_shape(config, profile, host_blocks=self.info.num_host_blocks if config.host_cache_gb else 0)
        most = min(shape.max_step_tokens, self.info.token_budget)
        shape = replace(shape, max_step_tokens=most, vocab_size=self.info.vocab_size)
        policy = make_policy(shape) if make_policy is not None else None
        scheduler = make_scheduler(config, shape, profile.cost, policy=policy, stages=config.pp)
        scheduler._steps = self._steps
        loop: Loop = Loop(scheduler, recorder, steps_in_flight(config, config.pp), clock)
        gc.collect()
        gc.disable()
        try:
            yield loop, recorder
            while loop._plans:
                recorder.collect()
                loop._plans.popleft()
        finally:
            gc.enable()
            self._steps = max(self._steps, recorder.last_step + 1)

    def serve(
        self,
        config: EngineConfig,
        workload: Workload,
        *,
        concurrency: int | None = None,
        until: float = float("inf"),
        make_policy: Callable[[EngineShape], Policy] | None = None,
    ) -> tuple[list[Record], list[Stepped]]:
        """Serve a workload alone; stop after `until` seconds. Returns the clients' records, and the steps."""
        clock = WallClock()
        with self.serving(config, clock, make_policy) as (loop, recorder):
            clients = Clients(
                workload, loop, clock, vocab_size=min(self.info.vocab_size, VOCAB_SIZE), concurrency=concurrency
            )
            while clock() < until and clients.advance():
                pass
        return clients.records, recorder.steps()

    def close(self) -> None:
        """Free the device."""
        self.executor.close()


def predicted(cost: CostModel, steps: list[Stepped]) -> list[float]:
    """Seconds that the cost model predicts for these steps, in their order and with their idle times."""
    reserve, taken, free_at = Reserve(cost.burst), [], 0.0
    for step in steps:
        idle = max(0.0, step.ended - step.seconds - free_at)
        taken.append(reserve.step(sum(query for query, _ in step.segments), cost.step(step.segments), idle))
        free_at = step.ended
    return taken


NAMES = (
    "step", "plan", "planned", "submitted", "collect", "collected", "updated", "seconds", "decodes", "context",
    "prefill", "pairs", "chunks", "in", "out", "awaits", "waiting", "running", "arriving", "ready", "available",
    "preempted", "copies",
)  # fmt: skip
"""Columns of a step record. Times are seconds on the monotonic clock, `seconds` those on the device. `context` counts
the positions that decodes attend to, `pairs` those of all tokens of chunks together. Copies are (step, whether inwards,
bytes, seconds), noted when they end."""


class StepRecord:
    """Records each step of a loop: host times, contents of the step, device time.

    Costs 1 ms per step of 100 sequences.
    """

    def __init__(self, loop: Loop) -> None:
        self.rows: list[list[Any]] = []
        self._under_way: dict[int, dict[str, Any]] = {}
        self._scheduler, self._executor = loop.planner, loop.executor
        self._inner = (
            self._scheduler.schedule, self._scheduler.update, self._executor.submit, self._executor.collect
        )  # fmt: skip
        for holder, name in (
            (self._scheduler, "schedule"), (self._scheduler, "update"),
            (self._executor, "submit"), (self._executor, "collect"),
        ):  # fmt: skip
            setattr(holder, name, getattr(self, f"_{name}"))

    def write(self, path: Path) -> None:
        """Write the rows so far as JSON."""
        rounded = [[round(value, 6) if isinstance(value, float) else value for value in row] for row in self.rows]
        path.write_text(json.dumps(dict(names=NAMES, rows=rounded)))

    def _schedule(self, now: float) -> StepPlan | None:
        began = time.monotonic()
        plan = self._inner[0](now)
        if plan is None:
            return None
        row: dict[str, Any] = dict(step=plan.step, plan=began, planned=time.monotonic())
        spans = [(segment.start, segment.stop) for segment in plan.segments]
        chunks = [span for span in spans if span[1] - span[0] > 1]
        queues, pool = self._scheduler._queues, self._scheduler._queues.pool
        row |= dict(
            decodes=len(spans) - len(chunks), context=sum(stop for start, stop in spans if stop - start == 1),
            prefill=sum(stop - start for start, stop in chunks), chunks=len(chunks),
            pairs=sum((stop - start) * (start + stop) // 2 for start, stop in chunks),
            awaits=plan.copies.awaits, waiting=len(queues.waiting), running=len(queues.running),
            arriving=len(queues.swapping_in), ready=pool.allocatable, available=pool.available,
            preempted=len(plan.preempted),
        )  # fmt: skip
        row["in"], row["out"] = len(plan.copies.swap_in), len(plan.copies.swap_out)
        self._under_way[plan.step] = row
        return plan

    def _submit(self, plan: StepPlan) -> None:
        self._inner[2](plan)
        self._under_way[plan.step]["submitted"] = time.monotonic()

    def _collect(self) -> StepResult:
        began = time.monotonic()
        result = self._inner[3]()
        copies = [(copy.step, copy.inward, copy.bytes, round(copy.seconds, 6)) for copy in result.copied.times]
        self._under_way[result.step] |= dict(
            collect=began, collected=time.monotonic(), seconds=result.seconds, copies=copies
        )
        return result

    def _update(self, plan: StepPlan, result: StepResult, now: float) -> Columns[SequenceOutput]:
        outputs = self._inner[1](plan, result, now)
        row = self._under_way.pop(plan.step)
        row["updated"] = time.monotonic()
        self.rows.append([row[name] for name in NAMES])
        return outputs
