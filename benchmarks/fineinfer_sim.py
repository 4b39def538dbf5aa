"""FineInfer's comparison by simulation: padded reservation against blocks as needed, at full load (its Figure 9).

Run: python benchmarks/fineinfer_sim.py [--requests 600] [--vary NAME ...]

A Llama-3-8B shape on an RTX 3090, derived from its data sheet, and requests with the mean lengths that §4.1 states,
lognormal, each at most 1,024 tokens in and out. `padded` keeps for each request what the longest in the batch has, and
1,024 tokens out; its kernels are ours and compute no padding, so its latency is better than the paper's.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

from holdfast.core.config import EngineConfig
from holdfast.lab import workloads
from holdfast.lab.metrics import summary
from holdfast.lab.simulator.deployment import deploy
from holdfast.lab.simulator.run import simulate
from holdfast.lab.workloads import Conversation, Lengths, Turn

RESULTS = Path(__file__).parent / "results"
LONGEST = 1024
DATASETS = {"ShareGPT": (161.31, 337.99, 4.7), "Alpaca": (19.31, 58.45, 4.5)}
"""Mean tokens in and out, and how many times the batch the paper has with blocks."""
SIGMA = 1.0
"""Of the lengths' logarithm; the paper states no spread."""
VARIATIONS = {
    "memory": "padded has 1/2.9 of the tokens (§4.2: blocks hold up to 2.9 times as many in all)",
    "flat": "padded keeps memory for twice LONGEST tokens a request, whatever runs beside it",
    "reserve": "blocks are kept for LONGEST tokens out of each request as well (§3.4.2 changes where, not how many)",
    "most": "blocks serve at most 56 requests at once (§3.4.2: there is a most, which is not stated)",
}
"""What `--vary` changes, and where the paper has it from."""
MEMORY, MOST = 2.9, 56


def requests(dataset: str, count: int) -> list[Conversation]:
    """Requests of these lengths, all at once."""
    choose = random.Random(dataset)
    prompt, output = (Lengths.of_mean(mean, SIGMA, 1, LONGEST) for mean in DATASETS[dataset][:2])
    return [Conversation(0.0, (Turn(prompt.draw(choose), output.draw(choose)),)) for _ in range(count)]


def padded_batch(tokens: int, work: Sequence[Conversation], flat: bool = False) -> int:
    """Requests that fit `tokens` where each takes what the longest of them has, and LONGEST more (§3.3.3).

    Those that run are met as often as they take steps, and each in the midst of its output. If `flat`, each takes the
    longest length.
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
    """Average batch at full load, and normalized latency at half the rate that blocks as needed reach there.

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
        figures = summary(simulate(config, profile, workloads.poisson_arrivals(work, rate, seed=0)).records)
        row[name]["normalized_latency_ms"] = figures["mean_normalized_latency_ms"]
    return row | {"rate": rate, "ratio": row["blocks"]["batch"] / row["padded"]["batch"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--vary", nargs="+", default=[], choices=VARIATIONS, help="what differs from our set-up")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON and the table")
    args = parser.parse_args()
    rows = [compare(dataset, args.requests, args.vary) for dataset in DATASETS]
    lines = [
        "| lengths | batch, padded | batch, blocks | ratio | paper | ms a token at x/s: padded | blocks |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['dataset']} | {row['padded']['batch']:.1f} | {row['blocks']['batch']:.1f} | {row['ratio']:.2f} | "
        f"{row['paper']} | {row['padded']['normalized_latency_ms']:,.0f} at {row['rate']:.2f}/s | "
        f"{row['blocks']['normalized_latency_ms']:,.0f} |"
        for row in rows
    ]
    print("\n".join(lines))
    today, command = date.today().isoformat(), "python benchmarks/fineinfer_sim.py " + " ".join(sys.argv[1:])
    stem = args.out / "-".join(["fineinfer-simulated", *args.vary])
    stem.with_suffix(".json").write_text(json.dumps({"date": today, "command": command, "rows": rows}, indent=1) + "\n")
    stem.with_suffix(".md").write_text(f"`{command.strip()}`, {today}\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
