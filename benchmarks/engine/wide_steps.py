"""Steps of hundreds of decodes on a GPU: their time by operator, and the same steps with one operator changed.

    python -m benchmarks.engine.wide_steps [--parts steps chat products attention] [--budget SECONDS] [--out out.json]

The shape is Llama-3-8B's with random weights; contexts are spread as those of the offline chat of
`benchmarks.engine.llama8b` at the same number of decodes.

- steps: time of a step on the device and between two results, kernels by kind, what comes after the last norm (the
  LM head, a copy of the logits, the greedy token), and a bound: products at PRODUCT_RATE, keys and values at COPY_RATE.
  Steps of the same rows follow without keys to read (`contexts of 1`), with the gate in its product or apart, and after
  pauses, with the GPU's clock and power; then mixed steps of 508 decodes and prompts.
- chat: the offline chat, with as many rows at once as `LLM.generate` has, and with all.
- products: each product by number of rows, whole, and cut by rows or by outputs, by both of the library's interfaces.
- attention: the decode kernel at these contexts, by launch settings.

Prints a line for each measurement as it comes. A part begins only within the budget.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from benchmarks.engine.llama8b import LLAMA_3_8B, chat_lengths, draw, offline, started
from benchmarks.engine.step_breakdown import clocks, watched
from benchmarks.lib.invocation import provenance, settle
from holdfast.lm.execution.executor import PagedExecutor
from holdfast.lm.execution.graphs import KINDS, Captured
from holdfast.lm.types import Sampling, Segment, StepPlan, TableWrite

CONTEXTS = {
    8: 1700,
    72: 700,
    104: 700,
    128: 620,
    192: 543,
    256: 470,
    272: 459,
    304: 443,
    320: 430,
    384: 407,
    448: 388,
    480: 380,
    512: 308,
}
"""Mean context of the chat's decodes by their number, as of 2026-11-30; those of 72 and 104 are from a simulation."""
SIGMA = 0.7
"""Deviation of the logarithm of a context."""
PROMPTS = ((70,), (196,), (128, 256), (200, 250, 307))
"""Lengths of the prompts of mixed steps."""
MIXED_ROWS = 508
POWER_ROWS, POWER_SECONDS = 512, 1.5
GATED_ROWS = (104, 128, 72)
"""Rows for which the gate is in its product."""
SLOW_ROWS = 448
"""Rows whose products the library computes slower than those of 512."""
PRODUCT_RATE, COPY_RATE = 790e12, 4.29e12
"""Operations and bytes per second that one H200 was measured to reach (docs/notes)."""
ROWS = (*range(256, 513, 16), 576, 640)
"""Numbers of rows of products."""
LAUNCHES = ((32, 4, 3), (32, 2, 4), (64, 4, 3), (64, 4, 4))
"""Keys a round, warps and stages of the decode kernel."""
STREAMS = (2, 3, 4, 6)
"""Programs of a processor that are taken to read at the full rate. The more, the shorter are the pieces of contexts."""
STEPS, PROFILED = 12, 3
BEGAN = time.monotonic()

lines: list[dict[str, Any]] = []


def say(**line: Any) -> None:
    lines.append(line)
    print(f"[{time.monotonic() - BEGAN:5.1f}] " + json.dumps(line), flush=True)


def contexts_of(rows: int, mean: int) -> list[int]:
    """Contexts whose logarithms are normal, the same in each run, with this mean."""
    normal = statistics.NormalDist(0.0, SIGMA)
    shares = [2.718281828 ** normal.inv_cdf((row + 0.5) / rows) for row in range(rows)]
    scale = mean * rows / sum(shares)
    found = [max(2, round(scale * share)) for share in shares]
    random.Random(rows).shuffle(found)
    return found


class Steps:
    """Runs steps of given positions on an executor. Each row has blocks of its own."""

    def __init__(self, executor: PagedExecutor) -> None:
        self.executor = executor
        self.block_size = executor.memory.batch.block_size
        executor.memory.cache.data.normal_()  # a GPU is faster on zeros

    def run(self, spans: list[tuple[int, int]], steps: int) -> tuple[list[float], list[float]]:
        """Milliseconds of each step on the device, and between two results. Two steps are in flight."""
        rng, greedy = random.Random(len(spans)), Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
        segments = tuple(
            Segment(str(row), row, start, stop, draw(rng, stop - start), greedy)
            for row, (start, stop) in enumerate(spans)
        )
        writes, first = [], 1
        for row, (_, stop) in enumerate(spans):
            blocks = -(-stop // self.block_size)
            writes.append(TableWrite(row, 0, tuple(range(first, first + blocks))))
            first += blocks
        device, apart, last = [], [], time.perf_counter()
        for number in range(steps + 1):
            if number < steps:
                self.executor.submit(StepPlan(number, segments, table_writes=() if number else tuple(writes)))
            if number:
                device.append(1e3 * self.executor.collect().seconds)
                now = time.perf_counter()
                apart.append(1e3 * (now - last))
                last = now
        return device[2:], apart[2:-1]

    def power(self, spans: list[tuple[int, int]]) -> None:
        """Print how long these steps take at the start and the end of POWER_SECONDS, and each after a pause."""
        time.sleep(0.5)
        with clocks() as readings:
            taken, begin = list[float](), time.perf_counter()
            while time.perf_counter() - begin < POWER_SECONDS:
                taken += self.run(spans, 4 * STEPS)[0]
        tenth = max(1, len(taken) // 10)
        paused = []
        for _ in range(STEPS):
            time.sleep(0.1)
            paused += self.run(spans, 3)[0]
        say(
            power=len(spans),
            first_ms=round(statistics.median(taken[:tenth]), 2),
            last_ms=round(statistics.median(taken[-tenth:]), 2),
            paused_ms=round(statistics.median(paused), 2),
            watts=round(max((each["watts"] for each in readings), default=0.0)),
            mhz=[each["sm_mhz"] for each in readings[10::10]],
        )

    def measure(self, spans: list[tuple[int, int]], *, profiled: bool, **about: Any) -> float:
        """Print the times of these steps, and what is in them. Returns the median on the device."""
        device, apart = self.run(spans, STEPS)
        found: dict[str, Any] = {}
        if profiled:
            with torch_profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
                self.run(spans, PROFILED)
                torch.cuda.synchronize()
            seen = watched(profiler, per=PROFILED)
            found = dict(
                profiled_ms=seen["watched_ms"],
                kinds_us=seen["kinds_us"],
                end_us=end_of_step(profiler),
                kernels=[(each["name"][:60], each["calls"], each["us_each"]) for each in seen["kernels"][:12]],
            )
        say(
            **about,
            tokens=sum(stop - start for start, stop in spans),
            ms=round(statistics.median(device), 3),
            spread=[round(min(device), 3), round(max(device), 3)],
            apart_ms=round(statistics.median(apart), 3),
            bound_ms=bound(spans),
            **found,
        )
        return statistics.median(device)


def bound(spans: list[tuple[int, int]]) -> dict[str, float]:
    """Milliseconds that a step takes at the rates above: its products, its head, and reading its keys and values."""
    hidden, inner, layers, vocab = 4096, 14336, 32, 128256
    kv = 1024
    weights = layers * (hidden * (2 * hidden + 2 * kv) + 3 * hidden * inner)
    tokens, rows = sum(stop - start for start, stop in spans), len(spans)
    read = sum(stop for _, stop in spans) * 2 * 2 * kv * layers
    products = max(2 * weights * tokens / PRODUCT_RATE, 2 * weights / COPY_RATE)
    head = max(2 * hidden * vocab * rows / PRODUCT_RATE, 2 * hidden * vocab / COPY_RATE)
    return dict(
        products=round(1e3 * products, 2), head=round(1e3 * head, 2), attention=round(1e3 * read / COPY_RATE, 2)
    )


def end_of_step(profiler: torch_profile) -> list[tuple[str, float]]:
    """Names and microseconds of the kernels after a step's last norm."""
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and event.name
    )
    norms = [place for place, span in enumerate(spans) if "norm_kernel" in span[2]]
    after = spans[norms[-1] + 1 :] if norms else []
    return [(name[:60], round(stop - start, 1)) for start, stop, name in after[:8]]


def recapture(executor: PagedExecutor, rows: int) -> None:
    """Capture a step of decodes again, with the operators as they are now."""
    graphs = executor.memory.graphs[0]
    executor.memory.batch.clear()
    with torch.inference_mode():
        metadata = graphs._rehearse(graphs._decode, rows)
        memsets = graphs._memsets if rows > KINDS[-1] else None
        graphs._decodes[rows] = Captured(graphs._captured(graphs._decode, rows, metadata, memsets), metadata)


def steps_part(loop: Any, chosen: list[int]) -> None:
    executor = loop.executor
    assert isinstance(executor, PagedExecutor)
    steps = Steps(executor)
    spans = {rows: [(stop - 1, stop) for stop in contexts_of(rows, mean)] for rows, mean in CONTEXTS.items()}
    begin = time.perf_counter()
    while time.perf_counter() - begin < 0.5:
        steps.run(spans[512], STEPS)
    for rows in reversed(chosen):
        steps.measure(spans[rows], profiled=rows in (8, 104, 304, 320, 448, 512), rows=rows)
        steps.measure([(0, 1)] * rows, profiled=False, rows=rows, changed="contexts of 1")
    graphs = executor.memory.graphs[0]
    ready, seconds = graphs._ready_decodes, graphs._decode_seconds
    left_out = [size for size in graphs.sizes.decodes if size not in ready]
    say(left_out=left_out, replay_ms={size: round(1e3 * seconds[size], 2) for size in sorted(seconds)})
    if SLOW_ROWS in left_out:
        recapture(executor, SLOW_ROWS)
        graphs._ready_decodes = sorted({*ready, SLOW_ROWS})
        steps.measure(spans[SLOW_ROWS], profiled=True, rows=SLOW_ROWS, changed="own size")
        graphs._ready_decodes = ready
    for own in (spans[rows] for rows in (POWER_ROWS, GATED_ROWS[0])):
        steps.power(own)
    ops = executor._model._ops
    launch = ops.launch
    for rows in GATED_ROWS * 2:
        ops.launch = lambda x, weight, *, cut=False, gated=False: launch(x, weight, cut=cut)
        recapture(executor, rows)
        steps.measure(spans[rows], profiled=False, rows=rows, changed="gate apart from its product")
        ops.launch = launch
        recapture(executor, rows)
        steps.measure(spans[rows], profiled=False, rows=rows, changed="gate in its product")
    decodes = [(stop - 1, stop) for stop in contexts_of(MIXED_ROWS, CONTEXTS[512])]
    for prompts in PROMPTS:
        steps.measure([*decodes, *((0, prompt) for prompt in prompts)], profiled=True, mixed=prompts)


def chat_part(loop: Any) -> None:
    for spread in (True, False):
        notes = Notes()
        loop.observe(notes)
        say(spread=spread, **offline(loop, f"chat {spread}", chat_lengths(), spread=spread))
        loop.ignore(notes)
        say(spread=spread, by_kind=notes.table())


class Notes:
    """Notes each step of a loop: its decodes, tokens and seconds."""

    KINDS = (16, 64, 128, 256, 512, 640, 1024, 8192)

    def __init__(self) -> None:
        self._plans: list[tuple[int, int]] = []
        self._steps: list[tuple[int, int, float]] = []

    def planned(self, plan: StepPlan) -> None:
        spans = [*zip(plan.columns.column("start"), plan.columns.column("stop"), strict=True)]
        self._plans.append((sum(stop - start == 1 for start, stop in spans), sum(b - a for a, b in spans)))

    def ended(self, result: Any) -> None:
        self._steps.append((*self._plans.pop(0), result.seconds))

    def close(self) -> None:
        """Nothing is open."""

    def table(self) -> dict[str, tuple[int, float, float]]:
        """Number of steps, seconds and mean milliseconds, by kind: decodes alone, or with prompts, up to a size."""
        kinds: dict[str, list[float]] = {}
        for decodes, tokens, seconds in self._steps:
            size = next(size for size in self.KINDS if tokens <= size)
            kinds.setdefault(f"{'decodes' if decodes == tokens else 'prompts'} <= {size}", []).append(seconds)
        return {
            kind: (len(taken), round(sum(taken), 3), round(1e3 * statistics.mean(taken), 3))
            for kind, taken in sorted(kinds.items())
        }


@torch.inference_mode()
def products_part() -> None:
    from benchmarks.kernels.products_gpu import HEAD, LAYERS, SHAPES, Products, kernel_names, timed

    products = Products(max(ROWS))
    names = kernel_names(products, list(ROWS))
    begin = time.perf_counter()
    while time.perf_counter() - begin < 0.3:
        products.run("gate_up", 0, [512])
        torch.cuda.synchronize()

    def run(name: str, layer: int, rows: int, by_rows: int, by_outputs: int) -> None:
        weight = products.weights[name][layer]
        x, out = products.inputs[weight.shape[1]][:rows], products.outputs[weight.shape[0]][:rows]
        high, wide = -(-rows // by_rows), -(-len(weight) // by_outputs // 128) * 128
        for top in range(0, rows, high):
            for left in range(0, len(weight), wide):
                part = out[top : top + high, left : left + wide]
                torch.mm(x[top : top + high], weight[left : left + wide].t(), out=part)

    for rows in reversed(ROWS):
        for name in SHAPES | HEAD:
            found: dict[str, float] = {}
            for label, (library, by_rows, by_outputs) in {
                "whole": ("cublas", 1, 1),
                "lt": ("cublaslt", 1, 1),
                "2 of rows": ("cublas", 2, 1),
                "2 of outputs": ("cublas", 1, 2),
                "4 of outputs": ("cublas", 1, 4),
            }.items():
                if by_outputs > 1 and name not in ("gate_up", "head"):
                    continue
                layers = 2 if name == "head" else LAYERS
                torch.backends.cuda.preferred_blas_library(library)
                run(name, 0, rows, by_rows, by_outputs)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for layer in range(layers):
                        run(name, layer, rows, by_rows, by_outputs)
                graph.replay()
                found[label] = round(1e3 * statistics.median(timed(graph.replay) for _ in range(5)) / layers, 1)
            torch.backends.cuda.preferred_blas_library("cublas")
            say(rows=rows, product=name, us=found, kernel=names[name, rows])


def attention_part() -> None:
    from benchmarks.kernels import attention_gpu as gpu
    from holdfast.lm.kernels.attention import tiles

    variants = [dict(block_n=keys, warps=warps, stages=stages) for keys, warps, stages in LAUNCHES]
    gpu.NARROW_VARIANTS[:] = variants
    copy = gpu.copy_rate()
    for rows in (104, 192, 512, 8):
        groups = tuple((1, 1, stop) for stop in contexts_of(rows, CONTEXTS[rows]))
        work = gpu.Work(part="decode", name=f"{rows} of a chat", groups=groups)
        found = gpu.measure(work, None, tune=True, only=["holdfast"])
        torch.cuda.empty_cache()
        us = {name: round(1e3 * line["ms"], 1) for name, line in found.items() if "ms" in line}
        failed = {name: line["not_run"][:80] for name, line in found.items() if "not_run" in line}
        own, cut = (tiles.STREAMS, tiles.CROWD_STREAMS), {}
        for streams in STREAMS:
            tiles.STREAMS = tiles.CROWD_STREAMS = streams
            cut[streams] = round(1e3 * gpu.measure(work, None, tune=False, only=["holdfast"])["holdfast"]["ms"], 1)
        tiles.STREAMS, tiles.CROWD_STREAMS = own
        bound_us = round(1e6 * work.cache_bytes() / copy / 1e12, 1)
        say(attention=rows, us=us, by_streams=cut, bound_us=bound_us, failed=failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("steps", "chat", "products", "attention")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--rows", nargs="+", type=int, choices=list(CONTEXTS), default=list(CONTEXTS))
    parser.add_argument("--budget", type=float, default=float("inf"), help="begin no part after so many seconds")
    parser.add_argument("--out", type=Path, help="write the JSON here")
    arguments = parser.parse_args()
    say(about=provenance())
    engine = None
    try:
        if {"steps", "chat"} & {*arguments.parts}:
            options = dict(max_sequences=512, prefix_sharing=False, token_budget="large", host_cache_gb=0.0)
            engine, stages = started(LLAMA_3_8B, cache_gb=50.0, **options)
            settle(engine.loop)
            offline(engine.loop, "warm-up", [(512, 8)] * 8)
            say(stages=stages)
        for part in arguments.parts:
            if time.monotonic() - BEGAN > arguments.budget:
                say(left_out=part)
            elif part in ("steps", "chat") and engine is not None:
                steps_part(engine.loop, arguments.rows) if part == "steps" else chat_part(engine.loop)
            else:
                (products_part if part == "products" else attention_part)()
            if arguments.out:
                arguments.out.write_text(json.dumps(lines, indent=1) + "\n")
    finally:
        if arguments.out:
            arguments.out.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
