"""Pensieve's evaluation by simulation: throughput of stateful and stateless serving (Figures 10, 11, 13, 14, 15).

Run: python benchmarks/pensieve_sim.py [--figures 10 11 13 14 15] [--seconds 600] [--processes 2]

Conversations with ShareGPT's figures (§6.1) arrive for `--seconds` by a Poisson process; 40 GB of KV cache and 200 GB
of host memory a GPU, contexts up to 16,384 tokens, think times of 60 s. What is asked in the second half of that time
counts. The throughput of a system is the highest rate of requests at which the mean normalized latency stays within
LIMIT: the paper reads its gains off curves and does not say at which latency. Devices are derived from data sheets
(holdfast/simulator/roofline.py), none was at hand.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from holdfast.bench import workloads
from holdfast.bench.records import summary
from holdfast.core.config import EngineConfig
from holdfast.simulator.deployment import deploy
from holdfast.simulator.run import simulate

RESULTS = Path(__file__).parent / "results"
LIMIT = 100.0
"""Mean normalized latency, ms a token."""
LONGEST = 16_384
CACHE, HOST = 40e9, 200.0
"""Bytes of KV cache, GB of host memory: each a GPU."""
TURNS = 5.56
LOWEST, HIGHEST = 0.5, 16.0
"""Requests a second between which the throughput is sought."""

SYSTEMS: dict[str, dict[str, Any]] = {
    "vLLM": {"scheduler": "prefill-first", "prefix_sharing": False, "token_budget": LONGEST},
    "Pensieve": {"scheduler": "unified", "host": True},
    "Pensieve (GPU cache)": {"scheduler": "unified"},
    "separate phases": {"scheduler": "prefill-first", "host": True},
    "LRU": {"scheduler": "unified", "host": True, "eviction": "lru"},
    "Holdfast": {"scheduler": "stall-free", "host": True},
}
BOTH = ("vLLM", "Pensieve")
FIGURES: dict[int, list[tuple[str, int, str, float]]] = {  # model, GPUs, system, think time
    10: [
        (model, 1, system, 60.0)
        for model in ("opt-13b", "llama-2-13b-gqa")
        for system in (*BOTH, "Pensieve (GPU cache)", "Holdfast")
    ],
    11: [
        (model, 4, system, 60.0) for model in ("opt-66b", "llama-2-70b") for system in (*BOTH, "Pensieve (GPU cache)")
    ],
    13: [("llama-2-13b-gqa", 1, system, 60.0) for system in ("separate phases", "Pensieve")],
    14: [("opt-13b", 1, system, 60.0) for system in ("LRU", "Pensieve")],
    15: [("llama-2-13b-gqa", 1, system, think) for think in (60.0, 120.0, 300.0, 600.0) for system in BOTH],
}
PAPER = {  # gain of Pensieve over vLLM, as the text states it
    (10, "opt-13b", 60.0): 1.33,
    (10, "llama-2-13b-gqa", 60.0): 1.57,
    (11, "opt-66b", 60.0): 1.5,
    (11, "llama-2-70b", 60.0): 1.6,
}


def served(model: str, gpus: int, system: str, think: float, rate: float, seconds: float) -> dict[str, Any]:
    """The figures of one simulated run of conversations that come to `rate` requests a second once it is steady."""
    options = dict(SYSTEMS[system])
    deployment = deploy(model, "a100-80gb", tp=gpus, link="pcie4" if gpus > 2 else None)
    profile = deployment.profile
    profile = replace(profile, cache_tokens=int(CACHE * gpus / profile.token_bytes))
    host = HOST * gpus if options.pop("host", False) else 0.0
    config = EngineConfig(**{"max_model_len": LONGEST, "max_sequences": 256, "host_cache_gb": host, **options})
    count = max(8, round(seconds * rate / TURNS))
    talks = workloads.cut(workloads.multi_turn(count, think, seed=0), LONGEST)
    outcome = simulate(config, profile, workloads.poisson(talks, rate / TURNS, seed=0))
    counted = [record for record in outcome.records if seconds / 2 <= record.arrival <= seconds]
    figures = summary(counted)
    asked = sum(record.prompt_tokens for record in counted)
    return figures | {
        "asked_rate": len(counted) / (seconds / 2),
        "cached_share": figures["cached_tokens"] / asked,
        "swapped_in": outcome.stats.blocks_swapped_in,
        "dropped": outcome.stats.host_blocks_dropped,
    }


def throughput(task: tuple[str, int, str, float, float]) -> tuple[tuple[str, int, str, float], dict[str, Any]]:
    """The highest rate within the limit, to 6%, and every run on the way."""
    model, gpus, system, think, seconds = task
    runs: list[dict[str, Any]] = []
    low, high, reached = LOWEST, HIGHEST, 0.0
    while high / low > 1.06:
        rate = (low * high) ** 0.5
        figures = served(model, gpus, system, think, rate, seconds)
        shown = (
            "mean_normalized_latency_ms",
            "p90_normalized_latency_ms",
            "median_ttft_ms",
            "cached_share",
            "swapped_in",
            "dropped",
        )
        runs.append({"rate": figures["asked_rate"], **{name: figures[name] for name in shown}})
        if figures["mean_normalized_latency_ms"] <= LIMIT:
            low, reached = rate, figures["asked_rate"]
        else:
            high = rate
    print(f"  {model} {system} think {think:g}: {reached:.3g}", file=sys.stderr, flush=True)
    return task[:4], {"throughput": reached, "runs": sorted(runs, key=lambda run: float(run["rate"]))}


def show(figures: list[int], found: dict[tuple[str, int, str, float], dict[str, Any]]) -> list[str]:
    """A line for each run of each figure; gains are over the figure's first system of the same model and think time."""
    lines = ["| figure | model | think, s | system | requests/s | gain | paper |", "|---|---|---|---|---|---|---|"]
    for figure in figures:
        for model, gpus, system, think in FIGURES[figure]:
            of = [task for task in FIGURES[figure] if (task[0], task[3]) == (model, think)]
            reached = found[model, gpus, system, think]["throughput"]
            gain = reached / found[of[0]]["throughput"]
            stated = PAPER.get((figure, model, think), "") if system == "Pensieve" else ""
            lines.append(f"| {figure} | {model} | {think:g} | {system} | {reached:.2f} | {gain:.2f} | {stated} |")
    return lines


def plot(figures: list[int], found: dict[tuple[str, int, str, float], dict[str, Any]], path: Path) -> None:
    """Normalized latency over the rate, a panel for each figure and model."""
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((figure, task[0]) for figure in figures for task in FIGURES[figure]))
    drawing, axes = plt.subplots(1, len(panels), figsize=(3.8 * len(panels), 3.4), squeeze=False, layout="constrained")
    for axis, (figure, model) in zip(axes[0], panels, strict=True):
        for task in FIGURES[figure]:
            if task[0] == model:
                runs = found[task]["runs"]
                label = task[2] if figure != 15 else f"{task[2]}, think {task[3]:g} s"
                axis.plot(
                    [run["rate"] for run in runs],
                    [run["mean_normalized_latency_ms"] for run in runs],
                    marker="o",
                    markersize=3,
                    label=label,
                )
        axis.axhline(LIMIT, color="#999999", linewidth=0.8, linestyle="--")
        axis.set_ylim(0, 3 * LIMIT)
        axis.set_title(f"Figure {figure}: {model}", fontsize=10)
        axis.set_xlabel("requests/s")
        axis.legend(frameon=False, fontsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("normalized latency, ms a token")
    drawing.savefig(path, dpi=130)
    plt.close(drawing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", nargs="+", type=int, default=list(FIGURES), choices=FIGURES)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON, the table and the plot")
    args = parser.parse_args()

    tasks = list(dict.fromkeys((*task, args.seconds) for figure in args.figures for task in FIGURES[figure]))
    with get_context("spawn").Pool(args.processes) as pool:
        found = dict(pool.imap_unordered(throughput, tasks))
    lines = show(args.figures, found)
    print("\n".join(lines))
    today, command = date.today().isoformat(), "python benchmarks/pensieve_sim.py " + " ".join(sys.argv[1:])
    rows = [
        {"model": key[0], "gpus": key[1], "system": key[2], "think": key[3], **value} for key, value in found.items()
    ]
    stem = args.out / "pensieve-simulated"
    stem.with_suffix(".json").write_text(json.dumps({"date": today, "command": command, "rows": rows}, indent=1) + "\n")
    stem.with_suffix(".md").write_text(f"`{command}`, {today}\n\n" + "\n".join(lines) + "\n")
    plot(args.figures, found, stem.with_suffix(".png"))


if __name__ == "__main__":
    main()
