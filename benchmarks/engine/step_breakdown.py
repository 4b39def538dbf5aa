"""Where a step's time goes on a GPU: kernels by name and the gaps between them, for decodes and prefills.

    python -m benchmarks.engine.step_breakdown [--batches 1 32 256] [--out after.json] [--before before.json]
                                               [--plot out.png]
    python -m benchmarks.engine.step_breakdown --batches --prefill 2048 8192 --out prefill.json    # by token budget
    python -m benchmarks.engine.step_breakdown --batches --mixed 64 256 --out mixed.json  # by tokens of the prompt

The shape is Llama-3-8B's with random weights, decodes at prompts of 512 tokens, prefills of 8,192. PyTorch's profiler
lengthens a step somewhat, so the time of steps without it is printed too. During unprofiled prefills the clock and
power of the GPU are read. Mixed steps are whole steps of 128 decodes at contexts of 600 to 1,200, and of half as much,
with and without the given prompt tokens, in turn. Prints a table, writes JSON. `--plot` draws the decodes of both JSONs
(or the one there is) as stacked bars, and needs no GPU if `--after` names a result.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from benchmarks.engine.llama8b import LLAMA_3_8B, draw, offline, request
from benchmarks.lib.invocation import provenance, settle
from holdfast.engine.process.build import build
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.executor import PagedExecutor
from holdfast.lm.scheduler.policies import StallFree
from holdfast.lm.types import Sampling, Segment, StepPlan, TableWrite
from holdfast.loop.loop import Loop

PROMPT = 512
LONG_PROMPT = 8192
DECODES, CONTEXTS, CHUNK_ENDS = 128, (600, 1200), 1024
"""Sizes of mixed steps. A chunk of at most CHUNK_ENDS tokens ends there; a longer one begins its sequence."""
ROUNDS = 3
KINDS = {  # by the start or a part of a kernel's name, in this order
    "device_sum_kernel": "sums over devices",
    "skinny_gemm_kernel": "products",
    "nvjet": "products",
    "splitKreduce": "products",
    "product_kernel": "products",
    "add_parts_kernel": "products",
    "gemm": "products",
    "decode_kernel": "attention",
    "prefill_kernel": "attention",
    "step_kernel": "recurrence",
    "prepare_kernel": "recurrence",
    "scan_kernel": "recurrence",
    "output_kernel": "recurrence",
    "convolution_kernel": "convolution",
    "attend_kernel": "attention",
    "attend_parts_kernel": "attention",
    "join_parts_kernel": "attention",
    "merge_kernel": "attention",
    "norm_kernel": "norms",
    "rotate_write_kernel": "rotation, cache write",
    "silu_mul_kernel": "gate",
    "best_of": "greedy token",
    "best_kernel": "greedy token",
    "ArgMax": "greedy token",
    "reduce_kernel": "greedy token",
}
BETWEEN_DEVICES = ("device_sum_kernel", "best_kernel", "nccl")
"""Starts of the names of kernels in which devices exchange data, with other work that they do: norms, sums."""
OTHER, GAPS, IDLE = "other kernels", "between kernels", "between steps"
"""Gaps between steps are from a step's last kernel to the next one's first: the step's inputs and tokens are copied
there. Within a step, the library clears counters of its products.
"""
COPIES = ("Memcpy", "Memset")
STEP_COPIES = ("Memcpy HtoD", "Memcpy DtoH")
"""Copies between the host and the device."""


def kind_of(name: str) -> str:
    if name.startswith(BETWEEN_DEVICES):
        return "between devices"
    return next((kind for part, kind in KINDS.items() if part in name), OTHER)


def start(loop: Loop, batch: int) -> None:
    """Prefill `batch` sequences and start their decodes."""
    rng = random.Random(batch)
    stamp = time.monotonic()
    for index in range(batch):
        loop.add(request(f"{batch}-{index}-{stamp}", draw(rng, PROMPT), 400))
    for _ in range(batch * PROMPT // 2048 + 12):
        loop.step()


def finish(loop: Loop) -> None:
    while loop.has_work():
        loop.step()


def breakdown(loop: Loop, batch: int, steps: int) -> dict[str, Any]:
    """Microseconds of one step by kind and by kernel, and the measured spans."""
    start(loop, batch)
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        loop.step()
        times.append(time.perf_counter() - begin)
    with torch_profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            loop.step()
        torch.cuda.synchronize()
    finish(loop)
    return {
        "batch": batch,
        "step_ms_p50": round(1e3 * statistics.median(times), 3),
        **watched(profiler, per=steps),
    }


def stall_free(loop: Loop) -> StallFree:
    """The policy of a loop's steps, without those of the parts around it."""
    policy = loop.planner._policy
    while not isinstance(policy, StallFree):
        policy = policy.inner
    return policy


def prefill(loop: Loop, budget: int, prompts: int) -> dict[str, Any]:
    """Microseconds of one prompt alone, by kind and by kernel, at this token budget."""
    policy = stall_free(loop)
    policy.token_budget, before = budget, policy.token_budget
    rng = random.Random(budget)

    def compute() -> float:
        for index in range(prompts):
            loop.add(request(f"{budget}-{index}-{time.monotonic()}", draw(rng, LONG_PROMPT), 1))
        begin = time.perf_counter()
        finish(loop)
        return (time.perf_counter() - begin) / prompts

    with clocks() as readings:
        seconds = [compute() for _ in range(2)]
    with torch_profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        compute()
        torch.cuda.synchronize()
    policy.token_budget = before
    loaded = [reading for reading in readings if reading["watts"] > 0.5 * max(r["watts"] for r in readings)]
    return {
        "token_budget": budget,
        "prompt_ms": [round(1e3 * taken, 2) for taken in seconds],
        "clocks": {key: statistics.median(reading[key] for reading in loaded) for key in readings[0]} if loaded else {},
        **watched(profiler, per=prompts),
    }


def spans(chunk: int, share: float = 1.0) -> list[tuple[int, int]]:
    """First and last position of each segment of a mixed step: decodes, contexts spread evenly, then a chunk."""
    low, high = (share * context for context in CONTEXTS)
    stops = [round(low + (high - low) * index / (DECODES - 1)) for index in range(DECODES)]
    end = max(CHUNK_ENDS, chunk)
    return [(stop - 1, stop) for stop in stops] + [(end - chunk, end)] * bool(chunk)


def tables(block_size: int, longest: int) -> tuple[TableWrite, ...]:
    """Separate blocks for the rows of mixed steps."""
    width = -(-max(CONTEXTS[1], longest) // block_size)
    return tuple(TableWrite(row, 0, tuple(range(row * width, (row + 1) * width))) for row in range(DECODES + 1))


def timed(
    executor: PagedExecutor, parts: list[tuple[int, int]], steps: int, writes: tuple[TableWrite, ...] = ()
) -> list[float]:
    """Milliseconds of each step on the device, two in flight. Each row has these positions and random tokens."""
    rng, greedy = random.Random(len(parts)), Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
    segments = tuple(
        Segment(str(row), row if stop - start == 1 else DECODES, start, stop, draw(rng, stop - start), greedy)
        for row, (start, stop) in enumerate(parts)
    )
    times = []
    for number in range(steps + 1):
        if number < steps:
            executor.submit(StepPlan(number, segments, table_writes=() if number else writes))
        if number:
            times.append(1e3 * executor.collect().seconds)
    return times


def mixed(loop: Loop, chunks: list[int], steps: int) -> list[dict[str, Any]]:
    """Milliseconds and kernels of decode steps with and without each chunk, at the contexts and at half of them."""
    executor = loop.executor
    assert isinstance(executor, PagedExecutor)
    kinds = [(chunk, share) for chunk in (0, *chunks) for share in (1.0, 0.5)]
    writes = tables(executor.memory.batch.block_size, max(chunks))
    executor.memory.cache.data[:, :, : 1 + writes[-1].blocks[-1]].normal_()  # unwritten slots may be zeros
    timed(executor, spans(0), 1, writes)
    times: dict[tuple[int, float], list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for chunk, share in kinds:
            times[chunk, share] += timed(executor, spans(chunk, share), steps)[2:]
    results = []
    for chunk, share in kinds:
        with torch_profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            timed(executor, spans(chunk, share), steps)
            torch.cuda.synchronize()
        parts = spans(chunk, share)
        results.append(
            {
                "decodes": DECODES,
                "chunk": chunk,
                "context": sum(stop for _, stop in parts[:DECODES]),
                "step_ms_p50": round(statistics.median(times[chunk, share]), 3),
                **watched(profiler, per=steps),
            }
        )
    return results


@contextmanager
def clocks() -> Iterator[list[dict[str, float]]]:
    """Clock, power and temperature of the GPU every 20 ms. The list is filled when the context ends."""
    query = "--query-gpu=clocks.sm,power.draw.instant,temperature.gpu"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-lms", "20"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    readings: list[dict[str, float]] = []
    try:
        yield readings
    finally:
        process.terminate()
        lines, _ = process.communicate()
        for line in lines.splitlines():
            values = [part.strip() for part in line.split(",")]
            if len(values) == 3 and all(value.replace(".", "").isdigit() for value in values):
                readings.append(dict(zip(("sm_mhz", "watts", "celsius"), map(float, values), strict=True)))


def watched(profiler: torch_profile, *, per: int) -> dict[str, Any]:
    """Microseconds by kind and by kernel of the profiled work, divided by `per`."""
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and event.name
    )
    while spans[0][2].startswith(COPIES):
        del spans[0]
    kernels: dict[str, list[float]] = defaultdict(list)
    kinds: dict[str, float] = defaultdict(float)
    gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
    reached, last, copied = spans[0][0], spans[0][2], False
    for begin, end, name in spans:
        if name.startswith(COPIES):
            copied |= name.startswith(STEP_COPIES)
            continue
        kernels[name[:120]].append(end - begin)
        # Kernels of a chain overlap, so only the time that a kernel adds counts.
        kinds[kind_of(name)] += max(0.0, end - max(begin, reached)) / per
        if begin > reached:
            kinds[IDLE if copied else GAPS] += (begin - reached) / per
            gaps[last[:60], name[:60]].append(begin - reached)
        if end > reached:
            reached, last = end, name
        copied = False
    by_time = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    by_gap = sorted(gaps.items(), key=lambda item: -sum(item[1]))
    span = (reached - spans[0][0]) / per
    return {
        "watched_ms": round(span / 1e3, 3),
        "idle_share": round(kinds[IDLE] / span, 4),
        "kinds_us": {kind: round(us, 1) for kind, us in sorted(kinds.items(), key=lambda item: -item[1])},
        "kernels": [
            {"name": name, "calls": round(len(us) / per, 2), "us_each": round(statistics.median(us), 2)}
            for name, us in by_time[:25]
        ],
        "gaps": [
            {"after": after, "before": before, "count": round(len(us) / per, 2), "us": round(sum(us) / per, 2)}
            for (after, before), us in by_gap[:15]
        ],
    }


def plot(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Stacked bars of the kinds, one for each batch size and result."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = {label: [line for line in lines if "batch" in line] for label, lines in results.items()}
    batches = [line["batch"] for line in next(iter(results.values()))]
    kinds = [*dict.fromkeys(KINDS.values()), "between devices", OTHER, GAPS, IDLE]
    colors = dict(zip(kinds, pyplot.get_cmap("tab10").colors, strict=False))
    figure, axes = pyplot.subplots(1, len(batches), figsize=(3 * len(batches), 4.5))
    for axis, batch in zip(axes if len(batches) > 1 else [axes], batches, strict=True):
        for place, lines in enumerate(results.values()):
            bottom = 0.0
            line = next((line for line in lines if line["batch"] == batch), None)
            for kind in kinds if line else ():
                height = line["kinds_us"].get(kind, 0.0) / 1e3
                axis.bar(place, height, bottom=bottom, color=colors[kind], label=kind, width=0.7)
                bottom += height
            axis.text(place, bottom, f"{bottom:.2f}", ha="center", va="bottom")
        axis.set_xticks(range(len(results)), list(results))
        axis.set_title(f"batch {batch}")
    first = axes[0] if len(batches) > 1 else axes
    first.set_ylabel("ms a step")
    handles, labels = first.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="lower center", ncols=4, fontsize="small")
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(path, dpi=120)


def measure(
    batches: list[int], steps: int, budgets: list[int], chunks: list[int], shape: dict[str, Any]
) -> dict[str, Any]:
    directory = Path(tempfile.mkdtemp(prefix="breakdown-"))
    (directory / "config.json").write_text(json.dumps(LLAMA_3_8B | shape))
    most = max([8, *batches, *[DECODES + 1 for _ in chunks]])
    options: dict[str, Any] = dict(max_sequences=most, prefix_sharing=False, max_waiting=10_000)
    if budgets:
        options["token_budget"] = max(budgets)
    loop, _ = build(EngineConfig(model=str(directory), load_format="random", **options))
    settle(loop)
    offline(loop, "warm-up", [(PROMPT, 8)] * 8)
    results = [breakdown(loop, batch, steps) for batch in batches]
    results += [prefill(loop, budget, 3) for budget in budgets]
    if chunks:
        results += mixed(loop, chunks, steps)
    return {"about": provenance(), "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 32, 128, 256])
    parser.add_argument("--steps", type=int, default=20, help="steps watched, and as many not watched")
    parser.add_argument(
        "--prefill", nargs="*", type=int, default=[], metavar="BUDGET", help="token budgets of prefills"
    )
    parser.add_argument("--mixed", nargs="*", type=int, default=[], metavar="TOKENS", help="prompts beside decodes")
    parser.add_argument("--shape", default="{}", help="JSON that changes the model's shape")
    parser.add_argument("--out", type=Path, help="write the JSON here")
    parser.add_argument("--after", type=Path, help="do not measure: take this JSON")
    parser.add_argument("--before", type=Path, help="a JSON to draw beside it")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    found = json.loads(arguments.after.read_text()) if arguments.after else None
    shape = json.loads(arguments.shape)
    found = found or measure(arguments.batches, arguments.steps, arguments.prefill, arguments.mixed, shape)
    for line in found["results"]:
        kinds = "  ".join(f"{kind} {us / 1e3:.3f}" for kind, us in line["kinds_us"].items())
        if "batch" in line:
            taken = f"batch {line['batch']}: {line['step_ms_p50']} ms a step"
        elif "chunk" in line:
            taken = f"chunk {line['chunk']}, context {line['context']}: {line['step_ms_p50']} ms a step"
        else:
            taken = f"budget {line['token_budget']}: {line['prompt_ms']} ms a prompt, {line['clocks']}"
        print(f"{taken}; watched {line['watched_ms']}: {kinds}", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    if arguments.plot:
        results = {"after": found["results"]}
        if arguments.before:
            results = {"before": json.loads(arguments.before.read_text())["results"], **results}
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
