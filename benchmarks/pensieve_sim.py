"""Pensieve's evaluation by simulation: throughput of stateful and stateless serving (Figures 10, 11, 13, 14, 15).

Run: python benchmarks/pensieve_sim.py [--figures 10 11 13 14 15] [--seconds 600] [--processes 1]

Conversations with the figures of ShareGPT and UltraChat (§6.1, Table 2) come by a Poisson process, think times are
exponential; 40 GB of KV cache and 200 GB of host memory a GPU, contexts up to 16,384 tokens. A run begins in the steady
state: beside those that begin in it are conversations that began before and have turns left, whose history is new to
the cache. It lasts `--seconds`, or three think times where that is longer, and what is asked in its second half counts.

The rate rises by steps of 1.4 until the mean normalized latency is twice LIMIT, and is then bisected around LIMIT. A
system's throughput is the rate of requests that really came (slow answers delay the next turns) where it crosses LIMIT,
on a straight line between two runs. The paper reads its gains off curves and does not say at which latency, so LIMITS
gives others as well. Devices are derived from data sheets (holdfast/lab/simulator/roofline.py), none was at hand. `--vary`
changes the set-up by the names in VARIATIONS, into files of their own. What is done is kept in the JSON file: a run
that was interrupted goes on from there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from varied import LAYER_SECONDS, deployed

from holdfast.core.config import EngineConfig
from holdfast.lab import workloads
from holdfast.lab.metrics import summary
from holdfast.lab.simulator.run import simulate
from holdfast.lab.simulator.shapes import model_named
from holdfast.lab.workloads import Workload

RESULTS = Path(__file__).parent / "results"
LIMIT = 100.0
LIMITS = (50.0, LIMIT, 200.0)
"""Mean normalized latency, ms a token."""
STEP, BISECTIONS = 1.4, 2
LONGEST = 16_384
CACHE, HOST = 40e9, 200.0
"""Bytes of KV cache, GB of host memory: each a GPU."""
DATASETS = {"ShareGPT": workloads.SHAREGPT, "UltraChat": workloads.ULTRACHAT}
LOWEST = {"opt-13b": 1.8, "llama-2-13b-gqa": 3.5, "opt-66b": 1.8, "llama-2-70b": 2.5}
"""Requests a second of the first run."""

SYSTEMS: dict[str, dict[str, Any]] = {
    "vLLM": {"scheduler": "prefill-first", "prefix_sharing": False, "token_budget": LONGEST},
    "Pensieve": {"scheduler": "unified", "host": True},
    "Pensieve (GPU cache)": {"scheduler": "unified"},
    "separate phases": {"scheduler": "prefill-first", "host": True},
    "LRU of chunks": {"scheduler": "unified", "host": True, "eviction": "lru"},
    "LRU of conversations": {"scheduler": "unified", "host": True, "eviction": "lru-conversation"},
    "Holdfast": {"scheduler": "stall-free", "host": True},
}
BOTH = ("vLLM", "Pensieve")


VARIATIONS = {
    "heads": "attention reads keys and values once for each query head",
    "host": "0.36 ms more for each layer of a step, as Sarathi-Serve's authors recorded",
    "nvlink": "NVLink between all four GPUs, not PCIe between pairs",
    "memory": "50 GB of host memory a GPU, a quarter",
}
"""By name, what `--vary` changes; benchmarks/varied.py gives the sources of the first two."""


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
        for dataset, systems in (("ShareGPT", (*BOTH, "Pensieve (GPU cache)", "Holdfast")), ("UltraChat", BOTH))
        for model in ("opt-13b", "llama-2-13b-gqa")
        for system in systems
    ],
    11: [
        Task(model, 4, "ShareGPT", system, 60.0)
        for model in ("opt-66b", "llama-2-70b")
        for system in (*BOTH, "Pensieve (GPU cache)")
    ],
    13: [Task("llama-2-13b-gqa", 1, "ShareGPT", system, 60.0) for system in ("separate phases", "Pensieve")],
    14: [
        Task("opt-13b", 1, "ShareGPT", system, 60.0) for system in ("LRU of conversations", "LRU of chunks", "Pensieve")
    ],
    15: [
        Task("llama-2-13b-gqa", 1, "ShareGPT", system, think)
        for system, thinks in (("Pensieve", (60.0, 120.0, 300.0, 600.0)), ("vLLM", (60.0, 600.0)))
        for think in thinks
    ],
}
PAPER = {  # gain of Pensieve over vLLM, as the text states it
    (10, "opt-13b", "ShareGPT"): 1.33,
    (10, "llama-2-13b-gqa", "ShareGPT"): 1.57,
    (10, "opt-13b", "UltraChat"): 1.17,
    (10, "llama-2-13b-gqa", "UltraChat"): 1.58,
    (11, "opt-66b", "ShareGPT"): 1.5,
    (11, "llama-2-70b", "ShareGPT"): 1.6,
}


def steady(dataset: str, think: float, rate: float, seconds: float, token_seconds: float = 0.03) -> Workload:
    """Conversations whose requests come at `rate` a second from the start, for `seconds`.

    The process begins long before; what would have been asked before the start (an answer taken to last `token_seconds`
    for each token) is the history of those that go on, and becomes part of the first prompt that is asked.
    """
    talks = DATASETS[dataset]
    before = 20 * think
    count = max(8, round((before + seconds) * rate / talks.turns))
    drawn = workloads.fit_context(workloads.multi_turn(count, think, seed=0, means=talks), LONGEST)
    under_way = []
    for talk in workloads.poisson_arrivals(drawn, rate / talks.turns, seed=0):
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
    return sorted(under_way, key=lambda talk: talk.arrival)


def served(task: Task, rate: float, seconds: float, vary: Sequence[str] = ()) -> dict[str, Any]:
    """The figures of one simulated run."""
    options = dict(SYSTEMS[task.system])
    profile = deployed(
        task.model,
        device="a100-80gb",
        tp=task.gpus,
        link="pcie4" if task.gpus > 2 and "nvlink" not in vary else None,
        per_head="heads" in vary,
        step_seconds=LAYER_SECONDS * model_named(task.model).layers if "host" in vary else 0.0,
    ).profile
    profile = replace(profile, cache_tokens=int(CACHE * task.gpus / profile.token_bytes))
    host = HOST * task.gpus / (4 if "memory" in vary else 1) if options.pop("host", False) else 0.0
    config = EngineConfig(**{"max_model_len": LONGEST, "max_sequences": 256, "host_cache_gb": host, **options})
    seconds = max(seconds, 3 * task.think)
    outcome = simulate(config, profile, steady(task.dataset, task.think, rate, seconds))
    counted = [record for record in outcome.records if seconds / 2 <= record.arrival < seconds]
    found, stats = summary(counted), outcome.stats
    asked = sum(record.prompt_tokens for record in counted)
    return {name: found[name] for name in SHOWN} | {
        "asked_rate": len(counted) / (seconds / 2),
        "cached_share": found["cached_tokens"] / asked,
        "uncached_tokens": asked - found["cached_tokens"],
        "hit_share_whole_run": stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0,
        "host_hit_share_whole_run": stats.prefix_hits_on_host / stats.prefix_queries if stats.prefix_queries else 0.0,
        "preemptions": stats.preemptions,
    }


LATENCY = "mean_normalized_latency_ms"
SHOWN = ("completed", LATENCY, "p90_normalized_latency_ms", "median_ttft_ms", "median_itl_ms")


def curve(job: tuple[Task, float, Sequence[float], Sequence[str]]) -> tuple[Task, list[dict[str, Any]]]:
    """Runs at these rates; where there are none at rising ones, up to far beyond the limit, and at some between."""
    task, seconds, rates, vary = job
    runs: dict[float, dict[str, Any]] = {}

    def latency(rate: float) -> float:
        began = time.process_time()
        run = served(task, rate, seconds, vary)
        runs[rate] = {"rate": rate, "seconds": seconds, **run, "cpu_seconds": round(time.process_time() - began, 1)}
        told = " ".join(f"{run[name]:.3g}" for name in ("asked_rate", LATENCY, "cached_share"))
        print(f"  {' '.join(map(str, task))}: {rate:.3g}/s {told}", file=sys.stderr, flush=True)
        return float(run[LATENCY])

    for rate in rates:
        latency(rate)
    if rates:
        return task, [runs[rate] for rate in sorted(runs)]
    rate = LOWEST[task.model]
    while latency(rate) <= 2 * LIMIT:
        rate *= STEP
    low = max((rate for rate, run in runs.items() if run[LATENCY] <= LIMIT), default=LOWEST[task.model] / STEP)
    high = min(rate for rate, run in runs.items() if run[LATENCY] > LIMIT)
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        if latency(middle) <= LIMIT:
            low = middle
        else:
            high = middle
    return task, [runs[rate] for rate in sorted(runs)]


def throughput(runs: Sequence[dict[str, Any]], limit: float) -> float:
    """Requests a second at which the latency crosses the limit; 0 where the first run is beyond it."""
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
            if figure == 15:  # every think time beside vLLM at the longest
                first = task._replace(system="vLLM", think=600.0)
            gains = [
                f"{throughput(found[task], limit) / under:.2f}" if under else "-"
                for limit in LIMITS
                for under in [throughput(found.get(first, ()), limit)]
            ]
            stated = PAPER.get((figure, task.model, task.dataset), "") if task.system == "Pensieve" else ""
            reached = f"{throughput(found[task], LIMIT):.2f}"
            cells = [figure, task.model, task.dataset, f"{task.think:g}", task.system, reached, *gains, stated]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def show_rates(figures: Sequence[int], found: Found) -> list[str]:
    """A line for each run."""
    lines = [
        "| model | data set | think, s | system | requests/s | ms a token, mean | p90 | TTFT p50 | from the cache |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for task in dict.fromkeys(task for figure in figures for task in FIGURES[figure] if task in found):
        for run in found[task]:
            names = ("asked_rate", LATENCY, "p90_normalized_latency_ms", "median_ttft_ms", "cached_share")
            cells = [f"{run[name]:.3g}" for name in names]
            lines.append(f"| {task.model} | {task.dataset} | {task.think:g} | {task.system} | {' | '.join(cells)} |")
    return lines


def plot(figures: Sequence[int], found: Found, path: Path) -> None:
    """Normalized latency over the rate, a panel for each figure, model and data set."""
    import matplotlib.pyplot as plt

    panels = list(
        dict.fromkeys((figure, of.model, of.dataset) for figure in figures for of in FIGURES[figure] if of in found)
    )
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    drawing, axes = plt.subplots(
        lines, columns, figsize=(3.8 * columns, 3.3 * lines), squeeze=False, layout="constrained"
    )
    for place, axis in enumerate(axes.flat):
        axis.set_visible(place < len(panels))
    for axis, (figure, model, dataset) in zip(axes.flat, panels, strict=False):
        for task in FIGURES[figure]:
            if (task.model, task.dataset) == (model, dataset) and task in found:
                label = task.system if figure != 15 else f"{task.system}, {task.think:g} s"
                rates = [run["asked_rate"] for run in found[task]]
                axis.plot(
                    rates,
                    [run[LATENCY] for run in found[task]],
                    marker="o",
                    markersize=3,
                    label=label,
                    linestyle="--" if task.system == "vLLM" else "-",
                )
        axis.axhline(LIMIT, color="#999999", linewidth=0.8, linestyle=":")
        axis.set_ylim(0, 2.2 * LIMIT)
        axis.set_title(f"Figure {figure}: {model}, {dataset}", fontsize=9)
        axis.set_xlabel("requests/s")
        axis.legend(frameon=False, fontsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    for line in axes:
        line[0].set_ylabel("normalized latency, ms a token")
    drawing.savefig(path, dpi=110)
    plt.close(drawing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", nargs="+", type=int, default=list(FIGURES), choices=FIGURES)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rates", nargs="+", type=float, default=[], help="only these, into a file of their own")
    parser.add_argument("--vary", nargs="+", default=[], choices=VARIATIONS, help="what differs from our set-up")
    parser.add_argument("--models", nargs="+", default=list(LOWEST), choices=LOWEST)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON, the table and the plot")
    args = parser.parse_args()

    today, command = date.today().isoformat(), "python benchmarks/pensieve_sim.py " + " ".join(sys.argv[1:])
    which = "-".join(f"fig{figure}" for figure in args.figures)
    stem = args.out / "-".join(["pensieve-simulated", which, *args.vary, *(["rates"] if args.rates else [])])
    kept = stem.with_suffix(".json")
    found: Found = {}
    if kept.exists():
        found = {Task(**row["task"]): row["runs"] for row in json.loads(kept.read_text())["rows"]}
    jobs = dict.fromkeys(
        task
        for figure in args.figures
        for task in FIGURES[figure]
        if task not in found and task.model in args.models and task.system in args.systems
    )
    with get_context("spawn").Pool(args.processes) as pool:
        for task, runs in pool.imap_unordered(curve, [(task, args.seconds, args.rates, args.vary) for task in jobs]):
            found[task] = runs
            rows = [{"task": task._asdict(), "runs": runs} for task, runs in found.items()]
            told = {"date": today, "command": command, "rows": rows}
            kept.write_text(json.dumps(told, indent=1) + "\n")
    lines = (show_rates if args.rates else show)(args.figures, found)
    print("\n".join(lines))
    stem.with_suffix(".md").write_text(f"`{command}`, {today}\n\n" + "\n".join(lines) + "\n")
    plot(args.figures, found, stem.with_suffix(".png"))


if __name__ == "__main__":
    main()
