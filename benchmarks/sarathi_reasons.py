"""Why our Sarathi-Serve figures differ from the paper's: its set-up varied, one thing at a time and together.

Run: python benchmarks/sarathi_reasons.py capacity [--settings Yi-34B/relaxed ...] [--vary NAME ...] [--requests 128]
         [--seeds 0] [--lengths CSV]
     python benchmarks/sarathi_reasons.py ablation [--vary NAME ...] [--seeds 0] [--lengths CSV]

Capacities are of openchat_sharegpt4, where all ratios that the paper's text gives come from. What the authors ran is in
github.com/microsoft/sarathi-serve, branch osdi-sarathi-serve, folder osdi-experiments; the lengths of their requests in
branch niyama_asplos2026, data/processed_traces/sharegpt_8k_filtered_stats_llama2_tokenizer.csv, which `--lengths` takes
in place of the distribution fitted to Table 2. Each call adds its rows to benchmarks/results/sarathi-reasons.json.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from sarathi import ARXIV, CEILING, PAPER, PAPER_BEST, RESULTS, SETTINGS, SHAREGPT, START, TABLE_4, engine, ratio
from varied import LAYER_SECONDS, deployed

from holdfast.core.config import EngineConfig
from holdfast.lab import workloads
from holdfast.lab.metrics import summary
from holdfast.lab.planning import find_capacity
from holdfast.lab.simulator.deployment import Deployment
from holdfast.lab.simulator.run import simulate
from holdfast.lab.simulator.shapes import model_named
from holdfast.lab.workloads import DATASETS, Conversation, Turn, Workload

VARIATIONS = {
    "heads": "attention reads keys and values once for each query head",
    "host": "0.36 ms more for each layer of a step, as the authors recorded of Yi-34B",
    "ray": "9 ms more a step, 16 on A40s, as Vidur recorded of the host",
    "orca": "Orca runs at most 16 sequences, 8 in the pipelines, as the authors' configurations say",
    "slo": "the SLO is 5 and 25 times our own step of 32 decodes at 4k, the paper's rule",
    "headroom": "1% of the blocks are kept for running sequences, vLLM's watermark, not 10%",
    "rate": "ablation: the rates and the chunk of the authors' script, 1 and 0.5 requests/s and 512 tokens",
}
"""What `--vary` changes; benchmarks/varied.py has more of the first two."""
MOST_OF_ORCA = {"Mistral-7B": 16, "Yi-34B": 16, "LLaMA2-70B": 8, "Falcon-180B": 8}
NAMED = ("Yi-34B/relaxed", "Yi-34B/strict", "Mistral-7B/strict", "Falcon-180B/strict")
SYSTEMS = ("orca", "vllm", "sarathi")
KEPT = RESULTS / "sarathi-reasons.json"
SET_UP = ("setting", "vary", "lengths", "requests", "seed")
"""What tells rows apart: a later one takes the place of an earlier."""


def under(name: str, vary: Sequence[str]) -> Deployment:
    """The model on the paper's devices, varied."""
    setting, seconds = SETTINGS[name], 0.0
    if "host" in vary:
        seconds += LAYER_SECONDS * model_named(setting.model).layers
    if "ray" in vary:
        seconds += 0.016 if setting.layout["device"] == "a40" else 0.009
    return deployed(setting.model, per_head="heads" in vary, step_seconds=seconds, **setting.layout)


def requests(dataset: str, count: int, seed: int, lengths: Path | None) -> Workload:
    """Requests of a data set; of sharegpt those of the file, if there is one, in an order that the seed gives."""
    if lengths is None or dataset != SHAREGPT:
        return workloads.sample_dataset(dataset, count, seed)
    limit = DATASETS[dataset].limit
    with lengths.open(newline="") as file:
        turns = [Turn(int(row["num_prefill_tokens"]), int(row["num_decode_tokens"])) for row in csv.DictReader(file)]
    turns = [turn for turn in turns if turn.prompt + turn.output <= limit]
    return [Conversation(0.0, (turn,)) for turn in random.Random(seed).sample(turns, count)]


def served(deployment: Deployment, config: EngineConfig, work: Workload, rate: float, seed: int) -> dict[str, Any]:
    """The figures of one simulated run."""
    stages = len(deployment.pipeline.stages) if deployment.pipeline else 1
    profile = replace(deployment.profile, token_budget=CEILING // stages)
    arriving = workloads.poisson_arrivals(work, rate, seed)
    return summary(simulate(config, profile, arriving, pipeline=deployment.pipeline).records)


def capacity_of(
    system: str, name: str, slo: str, vary: Sequence[str], count: int, seed: int, lengths: Path | None
) -> float:
    """Requests a second."""
    deployment, setting = under(name, vary), SETTINGS[name]
    limit = setting.relaxed if slo == "relaxed" else setting.strict
    if "slo" in vary:
        limit = (25 if slo == "relaxed" else 5) * deployment.profile.cost.step([(1, 4096)] * 32)
    budget = setting.relaxed_budget if slo == "relaxed" else 512
    config = engine(
        f"fixed-{budget}" if system == "sarathi" else system, SHAREGPT, deployment.profile.cache_tokens, limit
    )
    if "orca" in vary and system == "orca":
        most = min(config.max_sequences, MOST_OF_ORCA[name])
        config = replace(config, max_sequences=most)
    if "headroom" in vary:
        config = replace(config, headroom=0.01)
    work = requests(SHAREGPT, count, seed, lengths)
    return find_capacity(lambda rate: served(deployment, config, work, rate, seed), limit * 1000, start=START[name])


def show_capacity(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each setting and variation: the median over seeds, and the range where there are several."""
    lines = [
        "| setting | varied | lengths | requests | seeds | Orca | vLLM | Sarathi | /Orca (paper) | /vLLM (paper) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: NAMED.index(row["setting"])):
        key = (row["setting"], " + ".join(row["vary"]) or "as ours", row["lengths"], row["requests"])
        alike.setdefault(key, []).append(row["capacity"])

    def spread(values: list[float]) -> str:
        middle = f"{median(values):.3g}"
        return middle if len(values) == 1 else f"{middle} ({min(values):.3g} to {max(values):.3g})"

    for key, found in alike.items():
        name, slo = key[0].split("/")
        cells = [*map(str, key), str(len(found)), *(spread([at[system] for at in found]) for system in SYSTEMS)]
        for system in ("orca", "vllm"):
            stated = PAPER.get((name, SHAREGPT, slo, system), PAPER_BEST.get(name, 0.0))
            at_most = "" if (name, SHAREGPT, slo, system) in PAPER else "at most "
            cells.append(f"{spread([ratio(at['sarathi'], at[system]) for at in found])} [{at_most}{stated}]")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def ablation(vary: Sequence[str], seed: int, lengths: Path | None) -> dict[str, Any]:
    """Table 4: the rate at which our combined P50 TTFT is the paper's, and the six cells of each data set there."""
    deployment, cells, rates = under("Yi-34B", vary), {}, {}
    for dataset, systems in TABLE_4.items():
        work = requests(dataset, 128, seed, lengths)
        longest = DATASETS[dataset].limit + 1

        def at(
            rate: float, scheduler: Any, dataset: str = dataset, longest: int = longest, work: Workload = work
        ) -> tuple[float, float]:
            config = EngineConfig(
                max_model_len=longest,
                max_sequences=128,
                prefix_sharing=False,
                scheduler=scheduler,
                token_budget=512 if "rate" in vary else 1024,
            )
            figures = served(deployment, config, work, rate, seed)
            return figures["median_ttft_ms"] / 1000, figures["p99_itl_ms"] / 1000

        low, high = 0.05, 4.0
        if "rate" in vary:
            low = high = 1.0 if dataset == SHAREGPT else 0.5
        while high / low > 1.02:
            middle = (low * high) ** 0.5
            if at(middle, "stall-free")[0] < systems["stall-free"][0]:
                low = middle
            else:
                high = middle
        rates[dataset] = low
        cells[dataset] = {scheduler: at(low, scheduler) for scheduler in systems}
    return {"vary": list(vary), "seed": seed, "lengths": told(lengths), "rates": rates, "cells": cells}


def show_ablation(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each variation and data set: P50 TTFT and P99 TBT of each scheduler, s."""
    lines = [
        "| data set | varied | lengths | seed | requests/s | hybrid-only | chunked-only | stall-free |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for dataset, systems in TABLE_4.items():
        paper = [f"{ttft:.2f} / {tbt:.2f}" for ttft, tbt in systems.values()]
        lines.append(f"| {dataset} | the paper | | | | {' | '.join(paper)} |")
        for row in rows:
            if dataset == ARXIV and row["lengths"] != told(None):
                continue  # the authors' lengths of these are not published
            varied = " + ".join(row["vary"]) or "as ours"
            cells = [f"{ttft:.2f} / {tbt:.2f}" for ttft, tbt in row["cells"][dataset].values()]
            rate = f"{row['rates'][dataset]:.2f}"
            lines.append(f"| {' | '.join([dataset, varied, row['lengths'], str(row['seed']), rate, *cells])} |")
    return lines


def told(lengths: Path | None) -> str:
    """Where the lengths come from."""
    return "authors'" if lengths else "fitted"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("capacity", "ablation"))
    parser.add_argument("--settings", nargs="+", default=list(NAMED), choices=NAMED)
    parser.add_argument("--vary", nargs="+", default=[], choices=VARIATIONS)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--lengths", type=Path, default=None, help="CSV with num_prefill_tokens, num_decode_tokens")
    args = parser.parse_args()

    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {"capacity": [], "ablation": []}
    about = {
        "date": date.today().isoformat(),
        "command": "python benchmarks/sarathi_reasons.py " + " ".join(sys.argv[1:]),
    }
    if args.lengths:
        about["command"] = about["command"].replace(str(args.lengths), args.lengths.name)
    if args.part == "ablation":
        kept["ablation"] += [about | ablation(args.vary, seed, args.lengths) for seed in args.seeds]
    else:
        for setting in args.settings:
            name, slo = setting.split("/")
            for seed in args.seeds:
                found = {
                    system: capacity_of(system, name, slo, args.vary, args.requests, seed, args.lengths)
                    for system in SYSTEMS
                }
                row = {"setting": setting, "vary": args.vary, "lengths": told(args.lengths)}
                row |= {"requests": args.requests, "seed": seed, "capacity": found}
                print(json.dumps(row), file=sys.stderr, flush=True)
                kept["capacity"].append(about | row)
    for part, rows in kept.items():
        kept[part] = list({json.dumps([row.get(name) for name in SET_UP]): row for row in rows}.values())
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    lines = [*show_capacity(kept["capacity"]), "", *show_ablation(kept["ablation"])]
    KEPT.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
