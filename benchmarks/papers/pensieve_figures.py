"""Figures of Pensieve that show why state should be kept (3, 4), its lengths (thesis 3.10, 3.11), and its latencies.

Run: python -m benchmarks.papers.pensieve_figures history | chunk | latency
     python -m benchmarks.papers.pensieve_figures lengths [--sharegpt FILE]

- history (Figure 3): 32 requests with 200 new tokens each, by the size of the conversation's history: seconds of the
  prefill if the history is computed again and if it is kept, and of 200 steps that generate.
- chunk (Figure 4): time of attention of a chunk of 32 tokens by its context, over that of all other operations.
- latency (abstract and §3.6.2 of the thesis): the mean normalized latencies of Pensieve, with both tiers and with the
  GPU's cache alone, and of vLLM at the same requests per second. They come from the runs that
  `benchmarks.papers.pensieve rates --figures 10 11` has stored.
- lengths (3.10 and 3.11): conversations by number of turns, and by all their tokens, as `workloads.multi_turn` draws
  them for ShareGPT, and with the long tail of `pensieve rates --vary tail`; with `--sharegpt`, those of the file, too.

A profile of OPT-13B on an A100 is derived from data sheets; that of a Llama-3-8B on an H200 was measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.lib import papers
from benchmarks.papers.pensieve import LATENCY, LONGEST, Task, long_tailed
from holdfast.lab import workloads
from holdfast.lab.simulator.deployment import deploy
from holdfast.lab.workloads import Workload
from holdfast.lab.workloads.fields import estimate_tokens

DEPLOYED = (("opt-13b", "a100-80gb"), ("llama-3-8b", "h200"))
BATCH, NEW, STEPS, CHUNK = 32, 200, 200, 32
HISTORIES = (0, 256, 512, 1024, 2048, 4096, 8192, 16_000)
CONTEXTS = (32, 256, 512, 1024, 2048, 4096, 8192, 16_384)
STORED = "pensieve-simulated-fig10-fig11.json"
SHARES = (0.25, 0.5, 0.75, 0.9, 1.0)
"""Rates at which latencies are compared, over the highest one at which vLLM was simulated below 200 ms a token."""
HIGHEST = 200.0
"""Latency in ms a token beyond which a system is past its peak."""
TURNS = (1, 2, 3, 4, 5, 8, 12, 20, 40)
TOKENS = (128, 512, 1024, 2048, 4096, 8192, LONGEST)
STATED = {("turns", 5): 0.36, ("tokens", LONGEST): 0.9943}
"""Shares that the thesis states (§3.6.1, §3.6.4): of at least this number of turns, and of at most these tokens."""
GPU_ALONE = {"opt-13b": 0.20, "llama-2-13b-gqa": 0.40}
"""Largest shares by which the GPU's cache alone lowers the latency before the peak (the thesis, §3.6.2)."""


def history() -> list[dict[str, Any]]:
    """Seconds of prefills with and without the history's state, and of the generation, by history."""
    rows = []
    for model, device in DEPLOYED:
        cost = deploy(model, device).profile.cost
        for size in HISTORIES:
            prompt = size + NEW
            rows.append(
                {"model": model, "device": device, "history": size}
                | {"computed_s": cost.step([(prompt, prompt)] * BATCH), "kept_s": cost.step([(NEW, prompt)] * BATCH)}
                | {"generation_s": sum(cost.step([(1, prompt + step)] * BATCH) for step in range(1, STEPS + 1))}
            )
    return rows


def show_history(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each history."""
    lines = ["| model, device | history | prefill, computed again, s | kept, s | 200 steps, s |", "|---" * 5 + "|"]
    lines += [
        f"| {row['model']}, {row['device']} | {row['history']:,} | {row['computed_s']:.2f} | {row['kept_s']:.2f} | "
        f"{row['generation_s']:.2f} |"
        for row in rows
    ]
    for model, device in DEPLOYED:
        of = [row for row in rows if row["model"] == model]
        longer = next((row["history"] for row in of if row["computed_s"] > row["generation_s"]), None)
        told = f"from a history of {longer:,} on" if longer is not None else "nowhere here"
        lines += ["", f"{model} on {device}: the prefill takes longer than the generation {told}."]
    return [*lines, "", "The paper: the prefill with the history soon takes longer than the generation (Figure 3)."]


def chunk() -> list[dict[str, Any]]:
    """Attention of a chunk over the other operations of the same step, by context."""
    rows = []
    for model, device in DEPLOYED:
        cost = deploy(model, device).profile.cost
        rows += [
            {"model": model, "device": device, "context": at, "ratio": cost.attention(CHUNK, at) / cost.linear(CHUNK)}
            for at in CONTEXTS
        ]
    return rows


def show_chunk(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each context, and how far from a line through the ends the curve is."""
    lines = ["| context | " + " | ".join(f"{model}, {device}" for model, device in DEPLOYED) + " |", "|---|---|---|"]
    for at in CONTEXTS:
        lines.append(f"| {at:,} | " + " | ".join(f"{row['ratio']:.3f}" for row in rows if row["context"] == at) + " |")
    for model, device in DEPLOYED:
        of = {row["context"]: row["ratio"] for row in rows if row["model"] == model}
        slope = of[CONTEXTS[-1]] / of[CONTEXTS[-1] // 2]
        lines += [
            "",
            f"{model} on {device}: the last doubling of the context multiplies it by {slope:.2f}; a line, by 2.",
        ]
    return [*lines, "", "The paper: it grows linearly with the context (Figure 4)."]


def at_rate(runs: Sequence[dict[str, Any]], rate: float) -> float | None:
    """The mean normalized latency in ms a token at a rate, between the nearest two runs; None outside all."""
    for before, after in pairwise(runs):
        low, high = before["asked_rate"], after["asked_rate"]
        if low <= rate <= high:
            share = (rate - low) / (high - low) if high > low else 0.0
            return float(before[LATENCY] + share * (after[LATENCY] - before[LATENCY]))
    return None


def latency(stored: Path) -> list[dict[str, Any]]:
    """Latencies of Pensieve and vLLM at equal rates, from stored runs."""
    complete = [row for row in json.loads(stored.read_text())["rows"] if not row.get("begun")]
    found = {Task(**row["task"]): row["runs"] for row in complete}
    rows = []
    for task, runs in found.items():
        if task.system != "vLLM":
            continue
        most = max(run["asked_rate"] for run in runs if run[LATENCY] <= HIGHEST)
        for share in SHARES:
            under = at_rate(runs, share * most)
            ours = at_rate(found[task._replace(system="Pensieve")], share * most)
            alone = at_rate(found[task._replace(system="Pensieve (GPU cache)")], share * most)
            if under is not None and ours is not None:
                rows.append(
                    {"model": task.model, "gpus": task.gpus, "dataset": task.dataset, "rate": share * most}
                    | {"vllm_ms": under, "pensieve_ms": ours, "less": 1 - ours / under}
                    | ({} if alone is None else {"gpu_ms": alone, "gpu_less": 1 - alone / under})
                )
    return rows


def show_latency(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each rate."""
    heads = ["model", "data set", "requests/s", "vLLM, ms a token", "Pensieve", "less", "GPU cache alone", "less"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row["model"], row["dataset"], f"{row['rate']:.2f}", f"{row['vllm_ms']:.0f}"]
        cells += [f"{row['pensieve_ms']:.0f}", f"{row['less']:.0%}"]
        cells += [f"{row['gpu_ms']:.0f}", f"{row['gpu_less']:.0%}"] if "gpu_ms" in row else ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    best = [max(row["less"] for row in rows if (row["model"], row["dataset"]) == key)
            for key in dict.fromkeys((row["model"], row["dataset"]) for row in rows)]  # fmt: skip
    told = f"At most {min(best):.0%} to {max(best):.0%} less, by model and data set; the thesis says 40 to 77%."
    lines += ["", told]
    for model, stated in GPU_ALONE.items():
        of = [row["gpu_less"] for row in rows if row["model"] == model and "gpu_less" in row]
        told = f"The GPU's cache alone, {model}: at most {max(of):.0%} less; the thesis says up to {stated:.0%}."
        lines += ["", told] if of else []
    return lines


def lengths(file: Path | None) -> list[dict[str, Any]]:
    """Shares of conversations by least number of turns, and by most tokens in all, for each origin."""
    origins: dict[str, Workload] = {"drawn": workloads.multi_turn(20_000, 60.0, seed=0)}
    origins["with the long tail"] = long_tailed(20_000, 60.0, seed=0)
    if file is not None:
        origins["the file"] = workloads.chats_json(file, estimate_tokens, seed=0)
    rows = []
    for origin, talks in origins.items():
        sizes = [sum(turn.prompt + turn.output for turn in talk.turns) for talk in talks]
        turns = [len(talk.turns) for talk in talks]
        rows += [
            {"origin": origin, "what": "turns", "at": at, "share": mean(count >= at for count in turns)}
            for at in TURNS
        ] + [
            {"origin": origin, "what": "tokens", "at": at, "share": mean(size <= at for size in sizes)}
            for at in TOKENS
        ]  # fmt: skip
    return rows


def show_lengths(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each number of turns and of tokens."""
    origins = list(dict.fromkeys(row["origin"] for row in rows))
    lines = [f"| share of conversations | {' | '.join(origins)} | the thesis |", "|---" * (2 + len(origins)) + "|"]
    for what, label in (("turns", "at least {:,} turns"), ("tokens", "at most {:,} tokens in all")):
        for at in dict.fromkeys(row["at"] for row in rows if row["what"] == what):
            cells = [f"{row['share']:.1%}" for row in rows if (row["what"], row["at"]) == (what, at)]
            stated = STATED.get((what, at))
            cells.append("" if stated is None else f"{100 * stated:.4g}%")
            lines.append(f"| {label.format(at)} | {' | '.join(cells)} |")
    return lines


def plot_lengths(rows: list[dict[str, Any]], path: Path) -> None:
    """Figures 3.10 and 3.11 of the thesis: shares of conversations by turns and by tokens."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    labels = {
        "turns": ("turns", "share with at least as many"),
        "tokens": ("tokens in all", "share with at most as many"),
    }
    for axis, (what, (x, y)) in zip(axes, labels.items(), strict=True):
        for origin in dict.fromkeys(row["origin"] for row in rows):
            of = [row for row in rows if (row["origin"], row["what"]) == (origin, what)]
            axis.plot([row["at"] for row in of], [row["share"] for row in of], marker="o", label=origin)
        stated = [(at, share) for (of_what, at), share in STATED.items() if of_what == what]
        axis.plot(*zip(*stated, strict=True), "kx", markersize=9, label="the thesis")
        axis.set(xscale="log", xlabel=x, ylabel=y, ylim=(0, 1.05))
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot(part: str, rows: list[dict[str, Any]], path: Path) -> None:
    """The figure, drawn as in the paper."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MultipleLocator, StrMethodFormatter

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axis, (model, device) in zip(axes, DEPLOYED, strict=True):
        of = [row for row in rows if row["model"] == model]
        if part == "history":
            for name, label in (("computed_s", "prefill, computed again"), ("kept_s", "prefill, history kept"),
                                ("generation_s", f"{STEPS} steps of generation")):  # fmt: skip
                axis.plot([row["history"] for row in of], [row[name] for row in of], marker="o", label=label)
            axis.set(xlabel="tokens of history", ylabel="seconds", title=f"{model} on {device}, batch {BATCH}")
            axis.legend(frameon=False)
        else:
            axis.plot([row["context"] for row in of], [row["ratio"] for row in of], marker="o")
            axis.set(xlabel="tokens of context", ylabel="attention / the rest", title=f"{model} on {device}")
        axis.xaxis.set_major_locator(MultipleLocator(4000))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("history", "chunk", "latency", "lengths"))
    parser.add_argument("--sharegpt", type=Path, help="ShareGPT's JSON file, of `lengths`")
    parser.add_argument("--stored", type=Path, default=papers.RESULTS / STORED, help="runs that `latency` compares")
    parser.add_argument("--out", type=Path, default=papers.RESULTS, help="folder for the JSON, the table and the plot")
    args = parser.parse_args()
    stem = args.out / f"pensieve-{args.part}"
    match args.part:
        case "history":
            plot("history", rows := history(), stem.with_suffix(".png"))
            papers.save(stem, rows, show_history(rows))
        case "chunk":
            plot("chunk", rows := chunk(), stem.with_suffix(".png"))
            papers.save(stem, rows, show_chunk(rows))
        case "latency":
            papers.save(stem, rows := latency(args.stored), show_latency(rows))
        case _:
            papers.save(stem, rows := lengths(args.sharegpt), show_lengths(rows))
            plot_lengths(rows, stem.with_suffix(".png"))


if __name__ == "__main__":
    main()
