"""Pensieve's evaluation by simulation: Holdfast's own scheduler and memory on virtual clocks. No model runs.

Run: python -m benchmarks.papers.pensieve rates [--figures 10 11 13 14 15] [--seconds 600] [--vary NAME ...]
                                          [--context 16384] [--longer cut | drop] [--thinks 60 ...] [--processes 1]
     python -m benchmarks.papers.pensieve fig10 | fig14 | fig15 [--opt] [--rates 1 2 4 8] [--seeds 1] ...
     python -m benchmarks.papers.pensieve fig10 --measured FILE ...      # plots the JSON of multiturn.py or of `fitted`
     python -m benchmarks.papers.pensieve fitted --rates 24 28 [--modes tiers] [--set NAME=VALUE] [--json FILE]

`rates` searches the throughput of stateful and stateless systems on derived A100s. Figure 315 is the thesis' 3.15.
Conversations have the lengths of ShareGPT and UltraChat (§6.1, Table 2), arrive by a Poisson process, and have
exponential think times. A GPU has 40 GB of KV cache and 200 GB of host memory; contexts end at 16,384 tokens. A longer
conversation is cut there, or dropped (`--longer drop`), as in §6.1; each run has the share that is left out. A run
begins in the steady state: conversations that began before it have turns left, and their history is new to the cache.
It lasts `--seconds`, or three think times if that is longer; its second half counts. The rate rises by steps of 1.4
until the mean normalized latency is twice LIMIT, then is bisected around LIMIT. A system's throughput is the rate of
requests that came (slow answers delay later turns) where the line between two runs crosses LIMIT. The paper reads its
gains off curves and does not say at which latency, so LIMITS has three. The JSON file keeps what is done; an
interrupted run continues from it. TensorRT-LLM is a stateless system whose steps hold prompts and decodes together
(in-flight batching) on an A100 with an H200's shares of the peaks and its time to launch: fused kernels, no Python.
Variations of costs leave it as it is, and `tail` is of ShareGPT alone.

`fig10`, `fig14` and `fig15` use a constant model of step times: by default linear layers and attention of an 8B model
on one H200, with `--opt` OPT-13B on one A100 (§6.1, §6.6). They compare eviction orders and count recomputed tokens.
Copies between tiers take no time.

`fitted` plays the conversations of multiturn.py on a clock fitted to recorded steps of a Llama-3-8B shape on one H200
(docs/notes/2026-11-21-conversations.md), with 16 GB of cache on the device and 32 GB on the host.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args

from benchmarks.lib import papers
from benchmarks.lib.invocation import add_engine_options
from holdfast.core.cost import Burst
from holdfast.core.types import Request, SamplingParams
from holdfast.lab import workloads
from holdfast.lab.metrics import summary
from holdfast.lab.simulator.executor import Reserve, SimulatedExecutor, VirtualClock
from holdfast.lab.simulator.run import simulate
from holdfast.lab.workloads import LeftOut, Lengths, LongerName, Workload
from holdfast.lm.config import EngineConfig
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.retention import EVICTIONS, RetentionRule, cost_by_position
from holdfast.lm.scheduler.builder import StepBuilder
from holdfast.lm.scheduler.order import make_order
from holdfast.lm.scheduler.paged import PagedKind
from holdfast.lm.scheduler.policies import StallFree
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import StepPlan, StepResult, TierCopied
from holdfast.loop.loop import Loop

# ---- rates: throughput on derived devices -------------------------------------------------------------------------

LIMIT = 100.0
LIMITS = (50.0, LIMIT, 200.0)
"""Limits of the mean normalized latency, in ms per token."""
STEP, BISECTIONS = 1.4, 2
LONGEST = 16_384
CACHE, HOST = 40e9, 200.0
"""Bytes of KV cache, and GB of host memory, for each GPU."""
LAYERS = 80
"""Groups of layers in which state is swapped in. It is one layer at a time (§4.3.3): the largest model has 80."""
MANY_TURNS = "ShareGPT, 5 or more turns"
DATASETS = {"ShareGPT": workloads.SHAREGPT, "UltraChat": workloads.ULTRACHAT, MANY_TURNS: workloads.SHAREGPT}
LEAST_TURNS = {MANY_TURNS: 5}
"""Fewest turns of the conversations that a data set is cut to."""
LOWEST = {"opt-13b": 1.8, "llama-2-13b-gqa": 3.5, "opt-66b": 1.8, "llama-2-70b": 2.5}
"""Requests per second of the first run."""

SYSTEMS: dict[str, dict[str, Any]] = {
    "vLLM": {"scheduler": "prefill-first", "prefix_sharing": False, "token_budget": LONGEST},
    "TensorRT-LLM": {"scheduler": "unified", "prefix_sharing": False, "fused": True},
    "Pensieve": {"scheduler": "unified", "host": True},
    "Pensieve (GPU cache)": {"scheduler": "unified"},
    "separate phases": {"scheduler": "prefill-first", "host": True},
    "LRU of chunks": {"scheduler": "unified", "host": True, "eviction": "lru"},
    "LRU of conversations": {"scheduler": "unified", "host": True, "eviction": "lru-conversation"},
    "value by turns": {"scheduler": "unified", "host": True, "eviction": "pauses"},
    "Holdfast": {"scheduler": "stall-free", "host": True},
}
BOTH = ("vLLM", "Pensieve")
VARIATIONS = papers.VARIATIONS | {
    "nvlink": "NVLink between all four GPUs, not PCIe between pairs",
    "memory": "50 GB of host memory a GPU, a quarter",
    "all-memory": "220 GB of host memory a GPU, all that the paper's machines have",
    "swaps": "the copies of all GPUs share one link to the host",
    "tail": "ShareGPT's lengths have the stated long tail, and conversations beyond the context are dropped",
}
HOSTS = {"memory": HOST / 4, "all-memory": 220.0}
"""GB of host memory a GPU under a variation."""


class Context(NamedTuple):
    """The most tokens of a conversation, and whether a longer one is cut or dropped."""

    longest: int = LONGEST
    longer: LongerName = "cut"


CUT = Context()


class Task(NamedTuple):
    """A curve."""

    model: str
    gpus: int
    dataset: str
    system: str
    think: float


FIGURES: dict[int, list[Task]] = {
    10: [
        Task(model, 1, dataset, system, 60.0)
        for dataset, more in (("ShareGPT", ("Holdfast",)), ("UltraChat", ()))
        for model in ("opt-13b", "llama-2-13b-gqa")
        for system in (*BOTH, "TensorRT-LLM", "Pensieve (GPU cache)", *more)
    ],
    11: [
        Task(model, 4, "ShareGPT", system, 60.0)
        for model in ("opt-66b", "llama-2-70b")
        for system in (*BOTH, "Pensieve (GPU cache)")
    ],
    13: [Task("llama-2-13b-gqa", 1, "ShareGPT", system, 60.0) for system in ("separate phases", "Pensieve")],
    14: [
        Task("opt-13b", 1, "ShareGPT", system, 60.0)
        for system in ("LRU of conversations", "LRU of chunks", "Pensieve", "value by turns")
    ],
    15: [
        Task("llama-2-13b-gqa", 1, "ShareGPT", system, think)
        for system, thinks in (("Pensieve", (30.0, 60.0, 120.0, 300.0, 600.0)), ("vLLM", (60.0, 120.0, 600.0)))
        for think in thinks
    ],
}
FIGURES[315] = [Task(model, 1, MANY_TURNS, system, 60.0) for model in ("opt-13b", "llama-2-13b-gqa") for system in BOTH]
"""Figure 3.15 of the thesis."""
PAPER = {  # gain of Pensieve over vLLM, as the text states it
    (315, "opt-13b", MANY_TURNS): 1.3,
    (315, "llama-2-13b-gqa", MANY_TURNS): 1.7,
    (10, "opt-13b", "ShareGPT"): 1.33,
    (10, "llama-2-13b-gqa", "ShareGPT"): 1.57,
    (10, "opt-13b", "UltraChat"): 1.17,
    (10, "llama-2-13b-gqa", "UltraChat"): 1.58,
    (11, "opt-66b", "ShareGPT"): 1.5,
    (11, "llama-2-70b", "ShareGPT"): 1.6,
}


PAPER_OVER_TENSORRT = {
    (10, "opt-13b", "ShareGPT"): 1.19,
    (10, "llama-2-13b-gqa", "ShareGPT"): 1.57,
    (10, "opt-13b", "UltraChat"): 1.13,
    (10, "llama-2-13b-gqa", "UltraChat"): 1.47,
}
"""Gain of Pensieve over TensorRT-LLM, as the text states it."""

TAIL = "ShareGPT, long tail"
LOG_TURNS, SPREAD_OF_TURNS, SPREAD_OF_TALKS = 0.9805, 1.132, 0.79
"""Mean and standard deviation of the logarithm of the number of turns, and deviation of that of a conversation's scale.

They follow from three facts of the paper and the thesis: 5.56 turns on average, 36% of the conversations with 5 or more
turns, and 0.57% with more than 16,384 tokens.
"""


def long_tailed(count: int, think: float, seed: int) -> Workload:
    """Conversations with ShareGPT's means and the stated tails, all arriving at once.

    The number of turns is lognormal, rounded up. Each conversation has a scale of its own, by which its prompts and
    answers are longer or shorter than the means.
    """
    choose, means, talks = random.Random(seed), workloads.SHAREGPT, []
    for _ in range(count):
        turns = max(1, math.ceil(choose.lognormvariate(LOG_TURNS, SPREAD_OF_TURNS)))
        scale = choose.lognormvariate(-(SPREAD_OF_TALKS**2) / 2, SPREAD_OF_TALKS)
        prompts = Lengths.of_mean(scale * means.prompt, 1.0, 4, LONGEST)
        outputs = Lengths.of_mean(scale * means.output, 0.6, 4, LONGEST)
        thinks = [0.0, *(choose.expovariate(1 / think) for _ in range(turns - 1))]
        drawn = [workloads.Turn(prompts.draw(choose), outputs.draw(choose), pause) for pause in thinks]
        talks.append(workloads.Conversation(0.0, tuple(drawn)))
    return talks


def draw_talks(dataset: str, count: int, think: float) -> Workload:
    """Conversations of a data set, all arriving at once, of any length."""
    if dataset == TAIL:
        return long_tailed(count, think, seed=0)
    return workloads.multi_turn(count, think, seed=0, means=DATASETS[dataset])


def steady(
    dataset: str, think: float, rate: float, seconds: float, context: Context, token_seconds: float = 0.03
) -> tuple[Workload, LeftOut]:
    """Conversations whose requests come at `rate` a second from the start, for `seconds`; and what was left out.

    Conversations longer than the context are cut or dropped before any has arrived.

    The process begins long before; what would have been asked before the start (an answer taken to last `token_seconds`
    for each token) is the history of those that go on, and becomes part of the first prompt that is asked.
    """
    before = 20 * think
    share, turns_each = chosen_share(dataset, context)
    count = max(8, round((before + seconds) * rate / turns_each / share))
    drawn = chosen(dataset, draw_talks(dataset, count, think))
    fitting = workloads.fit_context(drawn, context.longest, context.longer)
    under_way = []
    for talk in workloads.gamma_arrivals(fitting, rate / turns_each, seed=0):
        at, history, turns = talk.arrival - before, 0, []
        begins = at
        for turn in talk.turns:
            at += turn.think
            if 0 <= at < seconds:
                if not turns:
                    begins = at
                turns.append(replace(turn, prompt=history + turn.prompt))
                history = 0
            elif at < 0:
                history += turn.prompt + turn.output
            at += token_seconds * turn.output
        if turns:
            under_way.append(workloads.Conversation(begins, tuple(turns)))
    return sorted(under_way, key=lambda talk: talk.arrival), LeftOut.of(drawn, fitting)


def chosen(dataset: str, drawn: Workload) -> Workload:
    """The conversations that have enough turns for the data set."""
    least = LEAST_TURNS.get(dataset, 1)
    return [talk for talk in drawn if len(talk.turns) >= least]


@cache
def chosen_share(dataset: str, context: Context = CUT) -> tuple[float, float]:
    """The share of the conversations that have enough turns and are not dropped, and their mean number of turns."""
    if dataset not in LEAST_TURNS and dataset != TAIL:
        return 1.0, DATASETS[dataset].turns
    drawn = draw_talks(dataset, 20_000, 0.1)
    enough = workloads.fit_context(chosen(dataset, drawn), context.longest, context.longer)
    return len(enough) / len(drawn), statistics.mean(len(talk.turns) for talk in enough)


def served(task: Task, rate: float, seconds: float, vary: Sequence[str] = (), context: Context = CUT) -> dict[str, Any]:
    """The figures of one simulated run."""
    options = dict(SYSTEMS[task.system])
    link = "pcie4" if task.gpus > 2 and "nvlink" not in vary else None
    fused = options.pop("fused", False)
    profile = papers.deployed(task.model, vary, fused=fused, device="a100-80gb", tp=task.gpus, link=link).profile
    profile = replace(
        profile,
        cache_tokens=int(CACHE * task.gpus / profile.token_bytes),
        copy_rate=profile.copy_rate / (task.gpus if "swaps" in vary else 1),
    )
    memory = next((HOSTS[name] for name in vary if name in HOSTS), HOST)
    host = memory * task.gpus if options.pop("host", False) else 0.0
    sizes = {"max_model_len": context.longest, "max_sequences": 256, "swap_in_groups": LAYERS, "host_cache_gb": host}
    config = EngineConfig(**{**sizes, **options})
    seconds = max(seconds, 3 * task.think)
    dataset = task.dataset
    if "tail" in vary:
        dataset, context = TAIL, context._replace(longer="drop")
    workload, left_out = steady(dataset, task.think, rate, seconds, context)
    outcome = simulate(config, profile, workload)
    counted = [record for record in outcome.records if seconds / 2 <= record.arrival < seconds]
    found, stats = summary(counted), outcome.stats
    asked = sum(record.prompt_tokens for record in counted)
    computed = sum(record.prompt_tokens - record.cached_tokens for record in outcome.records)
    new = sum(turn.prompt for talk in workload for turn in talk.turns)
    return {name: found[name] for name in SHOWN} | {
        "asked_rate": len(counted) / (seconds / 2),
        "cached_share": found["cached_tokens"] / asked,
        "uncached_tokens": asked - found["cached_tokens"],
        "recomputed_tokens_whole_run": computed - new,
        "hit_share_whole_run": stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0,
        "host_hit_share_whole_run": stats.prefix_hits_on_host / stats.prefix_queries if stats.prefix_queries else 0.0,
        "preemptions": stats.preemptions,
        **left_out.figures(),
    }


LATENCY = "mean_normalized_latency_ms"
SHOWN = ("completed", LATENCY, "p90_normalized_latency_ms", "median_ttft_ms", "median_itl_ms")


class Job(NamedTuple):
    """A curve to simulate, and its runs that are known."""

    task: Task
    seconds: float
    rates: Sequence[float]
    vary: Sequence[str]
    context: Context
    known: Sequence[dict[str, Any]] = ()


def curve(job: Job, keep: Callable[[Task, list[dict[str, Any]]], None] | None = None) -> tuple[Task, Any]:
    """Run at these rates, or without any at rising ones, up to far beyond the limit, and at some in between.

    `keep` gets the runs so far after each run.
    """
    task, seconds, rates, vary, context, known = job
    runs: dict[float, dict[str, Any]] = {run["rate"]: run for run in known}

    def latency(rate: float) -> float:
        if rate not in runs:
            began = time.process_time()
            run = served(task, rate, seconds, vary, context)
            runs[rate] = {"rate": rate, "seconds": seconds, **run, "cpu_seconds": round(time.process_time() - began, 1)}
            told = " ".join(f"{run[name]:.3g}" for name in ("asked_rate", LATENCY, "cached_share"))
            print(f"  {' '.join(map(str, task))}: {rate:.3g}/s {told}", file=sys.stderr, flush=True)
            if keep is not None:
                keep(task, [runs[rate] for rate in sorted(runs)])
        return float(runs[rate][LATENCY])

    for rate in rates:
        latency(rate)
    if rates:
        return task, [runs[rate] for rate in sorted(runs)]
    low, rate = LOWEST[task.model] / STEP, LOWEST[task.model]
    while latency(rate) <= LIMIT:
        low, rate = rate, rate * STEP
    high = rate
    while latency(rate) <= 2 * LIMIT:
        rate *= STEP
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        if latency(middle) <= LIMIT:
            low = middle
        else:
            high = middle
    return task, [runs[rate] for rate in sorted(runs)]


def throughput(runs: Sequence[dict[str, Any]], limit: float) -> float:
    """Requests per second at which the latency crosses the limit; 0 if the first run is beyond it."""
    for before, after in pairwise(runs):
        low, high = before[LATENCY], after[LATENCY]
        if low <= limit < high:
            share = (limit - low) / (high - low)
            return float(before["asked_rate"] + (after["asked_rate"] - before["asked_rate"]) * share)
    return 0.0


Found = dict[Task, list[dict[str, Any]]]


def show(figures: Sequence[int], found: Found) -> list[str]:
    """A line for each curve of each figure; gains are over the figure's first system of the same model and data."""
    limits = " | ".join(f"{limit:g} ms" for limit in LIMITS)
    lines = [
        f"| figure | model | data set | think, s | system | requests/s at {LIMIT:g} ms | gain at {limits} | paper |",
        "|---|---|---|---|---|---|" + "---|" * (len(LIMITS) + 1),
    ]
    for figure in figures:
        for task in FIGURES[figure]:
            if task not in found:
                continue
            first = next(of for of in FIGURES[figure] if (of.model, of.dataset) == (task.model, task.dataset))
            if figure == 15:  # vLLM is stateless: how long users think does not matter to it
                first = task._replace(system="vLLM", think=60.0)
            stated = PAPER.get((figure, task.model, task.dataset), "") if task.system == "Pensieve" else ""
            reached = f"{throughput(found[task], LIMIT):.2f}"
            cells = [figure, task.model, task.dataset, f"{task.think:g}", task.system, reached]
            cells += [*gains(found, task, first), stated]
            lines.append(f"| {' | '.join(map(str, cells))} |")
            key, other = (figure, task.model, task.dataset), task._replace(system="TensorRT-LLM")
            if task.system == "Pensieve" and key in PAPER_OVER_TENSORRT and other in found:
                cells = [*key, f"{task.think:g}", "Pensieve over TensorRT-LLM", ""]
                cells += [*gains(found, task, other), PAPER_OVER_TENSORRT[key]]
                lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def gains(found: Found, task: Task, under: Task) -> list[str]:
    """The throughput of one curve over that of another at each of LIMITS; a dash where the other has none."""
    pairs = [(throughput(found[task], limit), throughput(found.get(under, ()), limit)) for limit in LIMITS]
    return [f"{over / below:.2f}" if below else "-" for over, below in pairs]


def show_rates(figures: Sequence[int], found: Found) -> list[str]:
    """A line for each run."""
    lines = [
        "| model | data set | think, s | system | requests/s | ms a token, mean | p90 | TTFT p50 | from the cache | "
        "computed again, tokens | conversations left out |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for task in dict.fromkeys(task for figure in figures for task in FIGURES[figure] if task in found):
        for run in found[task]:
            names = ("asked_rate", LATENCY, "p90_normalized_latency_ms", "median_ttft_ms", "cached_share")
            cells = [f"{run[name]:.3g}" for name in names]
            cells.append(f"{run['recomputed_tokens_whole_run']:,}" if "recomputed_tokens_whole_run" in run else "")
            cells.append(f"{run.get('left_out_conversations_share', 0.0):.2%}")  # earlier files left none out
            lines.append(f"| {task.model} | {task.dataset} | {task.think:g} | {task.system} | {' | '.join(cells)} |")
    return lines


def plot(figures: Sequence[int], found: Found, path: Path) -> None:
    """Normalized latency over the rate, a panel for each figure, model and data set."""
    import matplotlib.pyplot as plt

    keys = ((figure, task.model, task.dataset) for figure in figures for task in FIGURES[figure] if task in found)
    panels = list(dict.fromkeys(keys))
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    size = (3.8 * columns + 1.6 * (len(panels) == 1), 3.3 * lines)  # one panel has its legend next to it
    drawing, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    for number, axis in enumerate(axes.flat):
        axis.set_visible(number < len(panels))
    colours: dict[str, str] = {}
    for axis, (figure, model, dataset) in zip(axes.flat, panels, strict=False):
        for task in FIGURES[figure]:
            if (task.model, task.dataset) == (model, dataset) and task in found:
                label = task.system if figure != 15 else f"{task.system}, {task.think:g} s"
                rates, latencies = ([run[name] for run in found[task]] for name in ("asked_rate", LATENCY))
                style = "--" if task.system == "vLLM" else "-"
                colour = colours.setdefault(label, f"C{len(colours)}")  # one for each curve's name in all panels
                axis.plot(rates, latencies, style, color=colour, marker="o", markersize=3, label=label)
        axis.axhline(LIMIT, color="#999999", linewidth=0.8, linestyle=":")
        axis.set_ylim(0, 2.2 * LIMIT)
        name = "3.15 of the thesis" if figure == 315 else figure
        axis.set_title(f"Figure {name}: {model},\n{dataset}", fontsize=9)
        axis.set_xlabel("requests/s")
        axis.spines[["top", "right"]].set_visible(False)
    named = {name: line for axis in axes.flat for line, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    one = len(panels) == 1
    place: dict[str, Any] = {"loc": "outside right center" if one else "outside upper center"}
    drawing.legend(list(named.values()), list(named), ncols=1 if one else len(named), frameon=False, **place)
    for line in axes:
        line[0].set_ylabel("normalized latency, ms a token")
    drawing.savefig(path, dpi=110)
    plt.close(drawing)


def search_rates(args: argparse.Namespace) -> None:
    """Run the curves that are missing or not complete, and write all of these figures."""
    which = "-".join(f"fig{figure}" for figure in args.figures)
    context = Context(args.context, args.longer)
    named = [] if context == CUT else [f"{context.longer}-{context.longest}"]
    parts = [which, *args.vary, *named, *(["rates"] if args.rates else [])]
    stem = args.out / "-".join(["pensieve-simulated", *parts])
    kept, earlier = stem.with_suffix(".json"), ""
    found: Found = {}
    begun: Found = {}
    if kept.exists():
        before = json.loads(kept.read_text())
        commands = [f"{before['command']}, {before['date']}", *before.get("earlier", "").split("; ")]
        earlier = "; ".join(dict.fromkeys(filter(None, commands)))
        for row in before["rows"]:
            (begun if row.get("begun") else found)[Task(**row["task"])] = row["runs"]
    wanted = dict.fromkeys(task for figure in args.figures for task in FIGURES[figure] if task not in found)
    jobs = [
        Job(task, args.seconds, args.rates, args.vary, context, begun.get(task, ()))
        for task in wanted
        if task.model in args.models
        and task.system in args.systems
        and task.dataset in args.datasets
        and task.think in (args.thinks or [task.think])
        and (task.dataset == "ShareGPT" or "tail" not in args.vary)
    ]

    def write() -> None:
        about = papers.origin(args.out) | ({"earlier": earlier} if earlier else {})
        kept.write_text(json.dumps(about | {"rows": rows_of(found, begun)}, indent=1) + "\n")

    def keep(task: Task, runs: list[dict[str, Any]]) -> None:
        begun[task] = runs
        write()

    def done(task: Task, runs: list[dict[str, Any]]) -> None:
        found[task] = runs
        begun.pop(task, None)
        write()

    if args.processes == 1:
        for job in jobs:
            done(*curve(job, keep))
    else:
        with get_context("spawn").Pool(args.processes) as pool:
            for task, runs in pool.imap_unordered(curve, jobs):
                done(task, runs)
    show_all = show_rates if args.rates else show
    papers.save(stem, rows_of(found, begun), show_all(args.figures, found), earlier)
    if not args.vary:
        plot(args.figures, found, stem.with_suffix(".png"))


def rows_of(found: Found, begun: Found) -> list[dict[str, Any]]:
    """The curves in a form for JSON, those that are not complete last."""
    rows = [{"task": task._asdict(), "runs": runs} for task, runs in found.items()]
    return rows + [{"task": task._asdict(), "runs": runs, "begun": True} for task, runs in begun.items()]


# ---- fig10, fig14, fig15: eviction orders on a constant model of step times ----------------------------------------

BASE, TOKEN, PAIR = 5e-3, 28e-6, 1.7e-9
"""Seconds of a step, of each of its tokens, and of each pair of a query and a position that it attends to."""
CHUNK, BLOCK = 32, 16

OPT = dict(
    # 13e9 weights of 2 bytes over 1.5 TB/s, 2 operations each at 156 TFLOP/s; in attention 4 operations by 5,120
    # dimensions by 40 layers; 819,200 bytes of keys and values a position, which give device and host.
    base=17.3e-3, token=0.167e-3, pair=5.3e-9, decode=0.55e-6, device=48_828, host=244_140, think=60.0, sharegpt=True,
)  # fmt: skip


@dataclass
class Conversation:
    """A user's turns, drawn before the run, and the conversation's tokens so far."""

    number: int
    turns: list[tuple[int, int, float]]
    tokens: list[int] = field(default_factory=list)
    asked_at: float = 0.0


def drawn_conversations(options: argparse.Namespace) -> Iterator[tuple[float, Conversation]]:
    """Arrivals; turns of (new tokens, answered tokens, seconds of thought after them)."""
    if options.sharegpt:
        yield from sharegpt(options)
        return
    draw, now = random.Random(options.seed), 0.0
    for number in range(options.conversations):
        now += draw.expovariate(options.rate)
        document = int(draw.lognormvariate(math.log(options.document), 0.7)) if options.document else 0
        count = min(40, 1 + int(draw.expovariate(1 / options.turns)))
        turns = [
            (
                max(4, int(draw.lognormvariate(3.8, 1.0))) + (0 if turn else min(document, 12_000)),
                max(4, int(draw.gammavariate(2.0, options.answer / 2))),
                draw.expovariate(1 / options.think),
            )
            for turn in range(count)
        ]
        yield now, Conversation(number, turns)


def sharegpt(options: argparse.Namespace) -> Iterator[tuple[float, Conversation]]:
    """Conversations with the means of ShareGPT (Pensieve, Table 2) and the spread of `multiturn.py`'s."""
    draw, now = random.Random(options.seed), 0.0

    def length(mean: float, sigma: float, most: int) -> int:
        return max(4, min(most, round(draw.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))

    for number in range(options.conversations):
        now += draw.expovariate(options.rate)
        count = min(40, 1 + int(math.log(1 - draw.random()) / math.log(1 - 1 / 5.56)))
        turns = [
            (length(37.77, 1.0, 2048), length(204.58, 0.8, 1024), draw.expovariate(1 / options.think))
            for _ in range(count)
        ]
        yield now, Conversation(number, turns)


def step_seconds(plan: StepPlan, options: argparse.Namespace) -> float:
    """Seconds of a step."""
    pairs = sum((segment.stop - segment.start) * (segment.start + segment.stop) / 2 for segment in plan.segments)
    decoded = sum(segment.stop for segment in plan.segments if segment.stop - segment.start == 1)
    tokens = plan.num_tokens
    # Few tokens take the time of reading the weights, many the time of their operations.
    linear = max(options.base, options.token * tokens) if options.decode else options.base + options.token * tokens
    return float(linear + options.pair * pairs + options.decode * decoded)


def play(options: argparse.Namespace, eviction: str, device: int, host: int, stateful: bool) -> dict[str, Any]:
    """The figures of all conversations under one eviction order."""
    token, pair = options.token, options.pair
    rule = RetentionRule(EVICTIONS[eviction], lambda at: CHUNK * (token + pair * at), CHUNK // BLOCK, BLOCK)
    scheduler = Scheduler(
        StallFree(2048),
        PagedKind(BlockPool(device // BLOCK, BLOCK, rule=rule, host_blocks=host // BLOCK)),
        max_sequences=256,
        max_model_len=device,
        sharing=stateful,
    )
    events: list[tuple[float, int, Conversation]] = []
    order = itertools.count()
    for at, conversation in drawn_conversations(options):
        heapq.heappush(events, (at, next(order), conversation))
    alive: dict[str, Conversation] = {}
    now, needed, generated, requests, again_seconds, latencies = 0.0, 0, 0, 0, 0.0, []
    fresh: dict[str, int] = {}
    while events or scheduler.has_work():
        while events and events[0][0] <= now:
            at, _, conversation = heapq.heappop(events)
            said, answered, _ = conversation.turns[0]
            base = (conversation.number + 1) << 16
            conversation.tokens += range(base + len(conversation.tokens), base + len(conversation.tokens) + said)
            conversation.asked_at = at
            alive[str(conversation.number)] = conversation
            sampling = SamplingParams(max_tokens=answered, ignore_eos=True)
            request = Request(str(conversation.number), tuple(conversation.tokens), sampling, arrival=at)
            scheduler.add(request)
            needed += said + answered - 1
            fresh[request.id] = len(request.prompt) - said
        plan = scheduler.schedule(now)
        if plan is None:
            now = max(now, events[0][0])
            continue
        now += step_seconds(plan, options)
        for segment in plan.segments:
            old = min(segment.stop, fresh[segment.sequence_id])  # an earlier turn computed up to here
            if segment.start < old:
                again_seconds += (old - segment.start) * (token + pair * (segment.start + old) / 2)
        result = StepResult(
            plan.step, (1,) * plan.num_sampled, 0.0, copied=TierCopied(swapped_out=plan.step, swapped_in=plan.step)
        )
        for output in scheduler.update(plan, result, now):
            conversation = alive[output.request_id]
            conversation.tokens += output.tokens
            generated += 1
            if output.finish_reason is not None:
                _, answered, thought = conversation.turns.pop(0)
                latencies.append((now - conversation.asked_at) / answered * 1e3)
                requests += 1
                del alive[output.request_id]
                if conversation.turns and len(conversation.tokens) < min(device // 4, 14_000):
                    heapq.heappush(events, (now + thought, next(order), conversation))
    stats = scheduler.stats()
    on_device = stats.prefix_hits - stats.prefix_hits_on_host
    return dict(
        again=stats.tokens_computed - needed,
        again_seconds=round(again_seconds, 2),
        hits=round(stats.prefix_hits / stats.prefix_queries, 4),
        host_hits=round(stats.prefix_hits_on_host / max(1, stats.prefix_queries - on_device), 4),
        norm_latency_ms_p50=round(statistics.median(latencies), 2),
        norm_latency_ms_mean=round(statistics.mean(latencies), 2),
        norm_latency_ms_p90=round(statistics.quantiles(latencies, n=10)[8], 2),
        req_s=round(requests / now, 3),
        tokens_s=round(generated / now, 1),
        preempted=stats.preemptions,
        blocks_swapped_in=stats.blocks_swapped_in,
        mean_prompt=round(stats.prefix_queries / max(1, requests)),
    )


KEPT = {
    "stateless": ("lru", False, False),
    "device cache": ("retention", False, True),
    "both tiers": ("retention", True, True),
}
"""For each system: eviction order, whether there is a host tier, whether anything is kept between turns."""
COLOURS = {"stateless": "#8a8a8a", "device cache": "#c26a2d", "both tiers": "#3b6ea5", "retention": "#3b6ea5"}
COLOURS |= {"lru": "#c26a2d", "lru-conversation": "#8a8a8a", "tail-first": "#6a9a4f"}
NAMES = {"stateless": "stateless", "device": "device cache", "tiers": "both tiers"}


def modelled(options: argparse.Namespace, system: str, **changed: Any) -> dict[str, Any]:
    """One run of a system."""
    eviction, host, stateful = KEPT[system]
    options = argparse.Namespace(**vars(options) | changed)
    return play(options, eviction, options.device, options.host if host else 0, stateful)


def fig10(options: argparse.Namespace) -> dict[str, Any]:
    """Throughput against normalized latency."""
    if options.measured:
        rows: dict[str, list[dict[str, Any]]] = {}
        for path in options.measured:
            for row in json.loads(path.read_text())["results"]:
                rows.setdefault(NAMES[row["mode"]], []).append(row)
        return {name: sorted(points, key=lambda point: float(point["req_s"])) for name, points in rows.items()}
    return {system: [dict(rate=r, **modelled(options, system, rate=r)) for r in options.rates] for system in KEPT}


def fig14(options: argparse.Namespace) -> dict[str, Any]:
    """Retention value against other orders: recomputed tokens and hits."""
    rows: dict[str, Any] = {}
    for rate in options.rates:
        for eviction in ("retention", "lru", "lru-conversation", "tail-first"):
            runs = [
                play(changed, eviction, options.device, options.host, True)
                for seed in range(options.seed, options.seed + options.seeds)
                for changed in [argparse.Namespace(**vars(options) | dict(rate=rate, seed=seed))]
            ]
            mean = {name: round(sum(run[name] for run in runs) / len(runs), 4) for name in runs[0]}
            rows.setdefault(eviction, []).append(dict(rate=rate, **mean, runs=runs))
            print(eviction, rate, json.dumps(mean), flush=True)
    return rows


def fig15(options: argparse.Namespace) -> dict[str, Any]:
    """All systems at one rate, by mean think time."""
    return {
        system: [dict(think=think, **modelled(options, system, think=think)) for think in options.thinks]
        for system in KEPT
    }


def draw(which: str, rows: dict[str, Any], axes: list[Any]) -> None:
    """The figure's panels."""
    x, left, right, scale = {
        "fig10": ("req_s", "norm_latency_ms_mean", "norm_latency_ms_p90", 1.0),
        "fig14": ("rate", "again_seconds", "hits", 100.0),
        "fig15": ("think", "norm_latency_ms_mean", "again", 1e-6),
    }[which]
    for name, points in rows.items():
        style: dict[str, Any] = dict(marker="o", label=name, color=COLOURS[name])
        axes[0].plot([point[x] for point in points], [point[left] for point in points], **style)
        axes[1].plot([point[x] for point in points], [scale * point[right] for point in points], **style)
    labels = {
        "fig10": ("requests a second", "normalized latency, mean, ms a token", "normalized latency, p90, ms a token"),
        "fig14": ("new conversations a second", "device seconds of tokens computed again", "prompt tokens found, %"),
        "fig15": ("mean think time, s", "normalized latency, mean, ms a token", "million tokens computed again"),
    }[which]
    for panel, label in zip(axes, labels[1:], strict=True):
        panel.set_xlabel(labels[0])
        panel.set_ylabel(label)
        panel.set_ylim(0, 1.1 * panel.get_ylim()[1])
        panel.legend()


def model_figure(options: argparse.Namespace) -> None:
    """Run or read a figure, and write its numbers and plot."""
    from matplotlib import pyplot

    which = options.what
    rows = dict(fig10=fig10, fig14=fig14, fig15=fig15)[which](options)
    read = [json.loads(path.read_text())["about"] for path in options.measured]
    how = "measured" if read and not any(about.get("modelled") for about in read) else "modelled"
    stem = "-".join(filter(None, (f"pensieve-{which}-{how}", options.name)))
    names = [path.name for path in options.measured]
    about = {name: value for name, value in vars(options).items() if name != "run"} | dict(out="", measured=names)
    (options.out / f"{stem}.json").write_text(json.dumps(dict(about=about, rows=rows), indent=1))
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    draw(which, rows, list(axes))
    title = f"{which}, {how}: {', '.join(names)}"
    if not names:
        title = (
            f"{which}, modelled: {options.conversations} conversations, {options.device:,} tokens on the device, "
            f"{options.host:,} on the host, first prompts of {options.document:g} tokens more"
        )
    figure.suptitle(title, fontsize=10)
    figure.savefig(options.out / f"{stem}.png", dpi=120)
    for name, points in rows.items():
        for point in points:
            print(name, json.dumps(point))


# ---- fitted: the conversations of multiturn.py on a clock fitted to recorded steps ---------------------------------

BLOCKS, HOST_BLOCKS, BLOCK_BYTES = 7629, 15258, 1 << 21
VOCABULARY, FITTED_LONGEST = 128_256, 8192
MIXED = {
    64: 5.33, 128: 6.35, 192: 7.85, 256: 8.6, 384: 11.4, 512: 13.5, 640: 16.2, 768: 18.5, 896: 20.5, 1024: 23,
    1152: 26.5, 1280: 29, 1408: 32, 1536: 35, 1664: 37, 1792: 40, 1920: 42, 2048: 43.5,
}  # fmt: skip
"""Milliseconds of a step with a prompt, without attention, by its padded tokens. The record has few above 512 tokens;
those follow from the measured products."""


class H200:
    """Recorded step times, in place of `holdfast.lab.simulator.executor.StepTimes`."""

    copy_seconds = BLOCK_BYTES / 35e9
    swap_in_groups = 4
    block_bytes = BLOCK_BYTES

    def __init__(self, even_attention: bool) -> None:
        self._mixed_context = 0.0249 if even_attention else 0.039

    def reserves(self) -> list[Reserve]:
        """No burst: the recorded steps include it."""
        return [Reserve(Burst())]

    def hop(self, plan: StepPlan) -> float:
        """No time: there is one stage."""
        return 0.0

    def stages(self, plan: StepPlan) -> list[float]:
        """Seconds of a step."""
        spans = [(segment.start, segment.stop) for segment in plan.segments]
        if not spans:
            return [1e-4]
        tokens = sum(stop - start for start, stop in spans)
        context = sum(stop for start, stop in spans if stop - start == 1) / 1e3
        if tokens == len(spans):
            ms = 4.0856 + 0.015864 * (-(-tokens // 8) * 8) + 0.0249 * context
        else:
            pairs = sum((stop - start) * (start + stop) / 2e3 for start, stop in spans if stop - start > 1)
            size = next(size for size in MIXED if tokens <= size)
            ms = MIXED[size] + self._mixed_context * context + 0.0085 * min(pairs, 60) + 0.0018 * max(0, pairs - 60)
        return [(ms + 0.33 * bool(plan.copies.swap_in)) / 1e3]


class Gathering(StallFree):
    """Stall-free batching in which prompts join only every `every`-th step while 64 or more sequences run."""

    def __init__(self, token_budget: int, every: int) -> None:
        super().__init__(token_budget)
        self._every = every

    def plan(self, step: StepBuilder) -> None:
        step.budget = self.token_budget
        step.displace()
        step.decode()
        if len(step.running) < 64 or step.number % self._every == 0:
            step.prefill()
            step.admit()


def fitted(args: argparse.Namespace) -> None:
    """Play the conversations at each mode and rate."""
    from benchmarks.engine.multiturn import converse
    from benchmarks.lib.multiturn_talks import MODES, workload

    results: list[dict[str, Any]] = []
    for mode in args.modes:
        config = EngineConfig(max_sequences=512, max_waiting=100_000, **(MODES[mode] | dict(args.set)))
        for rate in args.rates:
            clock = VirtualClock()
            executor = SimulatedExecutor(H200(args.even_attention), clock)  # type: ignore[arg-type]
            rule = RetentionRule.of(config, partial(cost_by_position, balance=24_000))
            host_blocks = HOST_BLOCKS if mode == "tiers" else 0
            pool = BlockPool(BLOCKS, 16, rule=rule, host_blocks=host_blocks, low_water=config.swap_threshold)
            scheduler = Scheduler(
                Gathering(config.fixed_token_budget or 2048, args.join_every), PagedKind(pool), max_sequences=512,
                max_model_len=FITTED_LONGEST, vocab_size=VOCABULARY, headroom=config.headroom,
                sharing=config.prefix_sharing, order=make_order(config),
            )  # fmt: skip
            row = converse(
                Loop(scheduler, executor, 2, clock),
                list(workload(rate, args.seconds, args.think, args.seed)),
                warm=args.warm, until=args.until, clock=clock,
                sleep=lambda seconds, clock=clock: clock.advance_to(clock.now + max(1e-6, seconds)),
                info=SimpleNamespace(vocab_size=VOCABULARY, max_model_len=FITTED_LONGEST),  # type: ignore[arg-type]
            )  # fmt: skip
            results.append(dict(mode=mode, rate=rate) | row)
            print("MODELLED " + json.dumps(results[-1]), flush=True)
            if args.json:
                about = dict(modelled=True, command=papers.origin(args.json)["command"])
                args.json.write_text(json.dumps(dict(about=about, results=results), indent=1))


class Preset(argparse.Action):
    """Sets the options of OPT; options after it override them."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, *_: Any, **__: Any) -> None:
        vars(namespace).update(OPT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)

    rates = commands.add_parser("rates", help="Figures 10, 11, 13, 14, 15 and 3.15 (315) on derived devices")
    rates.set_defaults(run=search_rates)
    rates.add_argument("--figures", nargs="+", type=int, default=list(FIGURES), choices=FIGURES)
    rates.add_argument("--seconds", type=float, default=600.0)
    rates.add_argument("--rates", nargs="+", type=float, default=[], help="only these, into a file of their own")
    rates.add_argument("--vary", nargs="+", default=[], choices=VARIATIONS, help="what differs from our set-up")
    rates.add_argument("--models", nargs="+", default=list(LOWEST), choices=LOWEST)
    rates.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    rates.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=DATASETS)
    rates.add_argument("--thinks", nargs="+", type=float, default=[], help="only these think times of Figure 15")
    rates.add_argument(
        "--longer",
        default="cut",
        choices=get_args(LongerName),
        help="cut or drop conversations longer than the context",
    )
    rates.add_argument("--context", type=int, default=LONGEST, help="most tokens of a conversation")
    rates.add_argument("--processes", type=int, default=1)
    rates.add_argument("--out", type=Path, default=papers.RESULTS, help="folder for the JSON, the table and the plot")

    for which in ("fig10", "fig14", "fig15"):
        figure = commands.add_parser(which, help="eviction orders on a constant model of step times")
        figure.set_defaults(run=model_figure)
        figure.add_argument("--opt", action=Preset, nargs=0, help="OPT-13B on an A100; options after it override it")
        figure.add_argument("--conversations", type=int, default=150)
        figure.add_argument("--rate", type=float, default=4.0, help="new conversations a second, of fig15")
        figure.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0, 4.0, 8.0], help="of fig10 and fig14")
        figure.add_argument("--turns", type=float, default=8.0, help="mean turns of a conversation")
        figure.add_argument("--answer", type=float, default=120.0, help="mean tokens of an answer")
        figure.add_argument("--think", type=float, default=30.0, help="mean seconds between turns")
        figure.add_argument("--thinks", type=float, nargs="+", default=[60.0, 120.0, 300.0, 600.0], help="of fig15")
        figure.add_argument("--device", type=int, default=32_000, help="tokens that the device holds")
        figure.add_argument("--host", type=int, default=48_000, help="tokens that the host tier holds")
        figure.add_argument("--document", type=float, default=0.0, help="median extra tokens of a first prompt")
        figure.add_argument("--sharegpt", action="store_true", help="ShareGPT's lengths, whatever other options say")
        figure.add_argument("--seed", type=int, default=0)
        figure.add_argument("--seeds", type=int, default=1, help="runs of fig14 to average, each with its own seed")
        figure.add_argument("--base", type=float, default=BASE, help="seconds of a step")
        figure.add_argument("--token", type=float, default=TOKEN, help="seconds of each token")
        figure.add_argument("--pair", type=float, default=PAIR, help="seconds of each position a token attends to")
        figure.add_argument("--decode", type=float, default=0.0, help="more seconds of each position of a decode")
        figure.add_argument("--measured", type=Path, nargs="+", default=[], help="JSON of multiturn.py or `fitted`")
        figure.add_argument("--out", type=Path, default=papers.RESULTS)
        figure.add_argument("--name", default="", help="goes into the names of the files")

    modelled = commands.add_parser("fitted", help="conversations on a clock fitted to recorded H200 steps")
    modelled.set_defaults(run=fitted)
    modelled.add_argument("--rates", type=float, nargs="+", required=True, help="new conversations a second")
    modelled.add_argument("--modes", nargs="+", choices=("stateless", "device", "tiers"), default=["tiers"])
    modelled.add_argument("--seconds", type=float, default=90.0, help="conversations arrive for so long")
    modelled.add_argument("--think", type=float, default=5.0)
    modelled.add_argument("--seed", type=int, default=0)
    modelled.add_argument("--warm", type=float, default=10.0)
    modelled.add_argument("--until", type=float, default=45.0)
    modelled.add_argument(
        "--join-every", type=int, default=1, help="prompts join every so many steps beside 64 decodes"
    )
    modelled.add_argument("--even-attention", action="store_true", help="mixed steps attend as fast as decode steps")
    add_engine_options(modelled)
    modelled.add_argument("--json", type=Path, help="for `fig10 --measured`")

    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
