"""Orca with a bounded batch beside Holdfast's blocks, on the workload of FineInfer's Figure 9, by simulation.

Run: python benchmarks/fineinfer_sim.py [--requests 600] [--vary NAME ...]

This is not FineInfer's own comparison: neither its SimpleReqManager (padded batches, memory reserved for the longest)
nor its Nopad runs here. `padded` is Holdfast's `orca` scheduler with a constant limit on sequences, which is the number
that would fit if each request kept the longest prompt's length and 1,024 tokens of output. No padding is computed, and
requests join at every step, so it is faster than the paper's: it saturates at 1.8 and 12 requests/s where the paper's
breaks down at 0.24 and 0.3. `blocks` is Holdfast's default: stall-free batching with chunked prompts, blocks of 16
tokens and 10% of them kept free for running sequences. So the ratio of batches is comparable, latencies are not.

A Llama-3-8B shape on an RTX 3090, derived from its data sheet. Requests have the mean lengths that §4.1 states,
lognormal, each at most 1,024 tokens in and out.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from holdfast.core.config import EngineConfig
from holdfast.lab import workloads
from holdfast.lab.metrics import summary
from holdfast.lab.simulator.deployment import deploy
from holdfast.lab.simulator.run import simulate
from holdfast.lab.workloads import Conversation, Lengths, Turn

LONGEST = 1024
DATASETS = {"ShareGPT": (161.31, 337.99, 4.7), "Alpaca": (19.31, 58.45, 4.5)}
"""Mean tokens in and out, and the paper's ratio of batches."""
SIGMA = 1.0
"""Standard deviation of the logarithm of lengths; the paper states none."""
VARIATIONS = {
    "memory": "padded has 1/2.9 of the tokens (§4.2: blocks hold up to 2.9 times as many in all)",
    "flat": "padded keeps memory for twice LONGEST tokens a request, whatever runs beside it",
    "reserve": "blocks are kept for LONGEST tokens out of each request as well (§3.4.2 changes where, not how many)",
    "most": "blocks serve at most 56 requests at once (§3.4.2: there is a limit, its value is not stated)",
}
"""What `--vary` changes, and its source in the paper."""
MEMORY, MOST = 2.9, 56


def requests(dataset: str, count: int) -> list[Conversation]:
    """Requests of these lengths, all at once."""
    choose = random.Random(dataset)
    prompt, output = (Lengths.of_mean(mean, SIGMA, 1, LONGEST) for mean in DATASETS[dataset][:2])
    return [Conversation(0.0, (Turn(prompt.draw(choose), output.draw(choose)),)) for _ in range(count)]


def padded_batch(tokens: int, work: Sequence[Conversation], flat: bool = False) -> int:
    """Requests that fit `tokens` if each takes the length of the longest that runs, and LONGEST more (§3.3.3).

    Running requests are sampled by the steps they take, each somewhere in its output. If `flat`, each takes twice
    LONGEST.
    """
    if flat:
        return tokens // (2 * LONGEST)
    choose, turns = random.Random(0), [talk.turns[0] for talk in work]
    running = choose.choices(turns, weights=[turn.output for turn in turns], k=8192)
    lengths = [turn.prompt + choose.random() * turn.output for turn in running]

    def longest(size: int) -> float:
        return fmean(max(lengths[at : at + size]) for at in range(0, len(lengths), size))

    size = 0
    while (size + 1) * (longest(size + 1) + LONGEST) <= tokens:
        size += 1
    return size


def compare(dataset: str, count: int, vary: Sequence[str] = ()) -> dict[str, Any]:
    """Mean batch at full load, and normalized latency at half the rate that `blocks` reaches there.

    Full load lasts until the last request starts: a step's tokens come at one time.
    """
    profile = deploy("llama-3-8b", "rtx-3090").profile
    common: dict[str, Any] = {"max_model_len": 2 * LONGEST, "prefix_sharing": False}
    work = requests(dataset, count)
    few = padded_batch(int(profile.cache_tokens / (MEMORY if "memory" in vary else 1)), work, "flat" in vary)
    many = MOST if "most" in vary else 1024
    if "reserve" in vary:
        many = min(many, int(profile.cache_tokens / (fmean(talk.turns[0].prompt for talk in work) + LONGEST)))
    configs = {
        "padded": EngineConfig(**common, scheduler="orca", max_sequences=few),
        "blocks": EngineConfig(**common, max_sequences=many),
    }
    row: dict[str, Any] = {"dataset": dataset, "paper": DATASETS[dataset][2]}
    for name, config in configs.items():
        outcome = simulate(config, profile, work)
        full = max(record.scheduled or 0.0 for record in outcome.records)
        times = [time for record in outcome.records for time in record.token_times if time <= full]
        row[name] = {"batch": len(times) / len(set(times)), "requests_per_second": count / outcome.seconds}
    rate = row["blocks"]["requests_per_second"] / 2
    for name, config in configs.items():
        figures = summary(simulate(config, profile, workloads.gamma_arrivals(work, rate, seed=0)).records)
        row[name]["normalized_latency_ms"] = figures["mean_normalized_latency_ms"]
    return row | {"rate": rate, "ratio": row["blocks"]["batch"] / row["padded"]["batch"]}


def main() -> None:
    from papers import RESULTS, save

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--vary", nargs="+", default=[], choices=VARIATIONS, help="what differs from our set-up")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON and the table")
    args = parser.parse_args()
    rows = [compare(dataset, args.requests, args.vary) for dataset in DATASETS]
    lines = [
        "| lengths | batch, `padded` | batch, `blocks` | ratio | paper's ratio | ms a token: `padded` | `blocks` |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['dataset']} | {row['padded']['batch']:.1f} | {row['blocks']['batch']:.1f} | {row['ratio']:.2f} | "
        f"{row['paper']} | {row['padded']['normalized_latency_ms']:,.0f} at {row['rate']:.2f}/s | "
        f"{row['blocks']['normalized_latency_ms']:,.0f} |"
        for row in rows
    ]
    save(args.out / "-".join(["fineinfer-simulated", *args.vary]), rows, lines)


if __name__ == "__main__":
    main()
