"""Replicas with a router, simulated: the priced router against other policies, on traces and on a skewed load.

usage: python -m benchmarks.engine.routing WORKLOAD [WORKLOAD ...] [--policies NAME ...] [--replicas 8] [--speed X]
                                           [--requests N] [--seed N] [--jobs N] [--json FILE] [--asks]

A WORKLOAD is a Mooncake trace (.jsonl), an Azure trace (.csv) or `skewed`: ShareGPT-like conversations of which 8%
are very long, measured until the last of them arrives. Each replica is a Llama-3-8B shape on an H200 by its measured
profile, with a host tier of 200 GB; prompts beyond the measured context are extrapolated. Replicas are joined by
100-gigabit Ethernet. For each policy: the share of reusable prompt tokens found, of what one replica with endless
memory would find; TTFT; throughput; and how far the busiest and the idlest replica are apart, in busy time and in
tokens computed, as a share of the mean. `alone` is the P99 of the time that each prompt takes on an idle replica which
has all that can be reused of it: no policy can be faster.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.lib import paper_workloads
from benchmarks.lib.invocation import provenance
from holdfast.cluster.priced import Pricing
from holdfast.cluster.routing import POLICIES, RoutingRules, make_router
from holdfast.lab import workloads
from holdfast.lab.metrics import summary
from holdfast.lab.simulator.cluster import simulate_cluster, spread
from holdfast.lab.simulator.deployment import deploy
from holdfast.lab.simulator.devices import LINKS
from holdfast.lab.workloads import Workload
from holdfast.lm.config import EngineConfig

LINK = "ethernet-100g"
CONTEXT = 200_000
SPEEDS = {".jsonl": 4.0, ".csv": 30.0}
"""Factor by which a trace arrives faster than recorded."""
RATE, THINK, COUNT = 10.0, 5.0, 1200
"""Sizes of the skewed load: conversations per second, mean seconds before a turn, and number of conversations."""


def load(name: str, speed: float | None, requests: int | None, seed: int) -> tuple[Workload, int, float]:
    """The conversations, the tokens of a block, and the speed of arrivals: a factor on a trace's pace, or a rate."""
    if name == "skewed":
        rate = speed or RATE
        made = paper_workloads.skewed(requests or COUNT, THINK, seed)
        return workloads.gamma_arrivals(workloads.fit_context(made, CONTEXT), rate, seed), 16, rate
    kind = Path(name).suffix
    if kind not in SPEEDS:
        raise SystemExit(f"workload {name} is unknown; give a .jsonl or .csv trace, or skewed")
    read = workloads.mooncake_jsonl(name) if kind == ".jsonl" else workloads.azure_csv(name)
    pace = speed or SPEEDS[kind]
    # A trace's blocks have 512 tokens, so large blocks find as much there, and take less time to simulate.
    return workloads.speed_up(read[:requests], pace), 256 if kind == ".jsonl" else 16, pace


def measure(job: tuple[str, str, argparse.Namespace]) -> dict[str, Any]:
    """Run one policy on one workload."""
    name, policy, arguments = job
    workload, block_size, pace = load(name, arguments.speed, arguments.requests, arguments.seed)
    profile = replace(deploy("llama-3-8b", "h200").profile, max_model_len=CONTEXT)
    config = EngineConfig(host_cache_gb=200.0, block_size=block_size, max_model_len=CONTEXT)
    rules = RoutingRules(block_size=block_size, step_tokens=profile.token_budget)
    router, began = make_router(policy, profile.cost, rules), time.perf_counter()
    # A skewed load never ends: its last conversations alone would say little about a load.
    until = workload[-1].arrival if name == "skewed" else inf
    outcome = simulate_cluster(
        config, profile, workload, router,
        replicas=arguments.replicas, link=LINKS[LINK], asks=arguments.asks, until=until,
    )  # fmt: skip
    figures = summary(outcome.records)
    pricing = Pricing(profile.cost, profile.token_budget)
    alone = sorted(pricing.prefill(min(reusable, prompt - 1), prompt) for prompt, reusable in outcome.prompts)
    return dict(
        workload=Path(name).name, pace=pace, seed=arguments.seed,
        policy=policy + ", told what replicas hold" * arguments.asks,
        replicas=arguments.replicas, block_size=block_size,
        requests_asked=arguments.requests, requests=len(outcome.records), seconds=round(outcome.seconds, 2),
        reusable_tokens=outcome.reusable_tokens, found=round(outcome.found, 4),
        alone_p99_ms=round(alone[int(0.99 * (len(alone) - 1))], 2),
        **{key: round(figures[key], 2) for key in (
            "median_ttft_ms", "p90_ttft_ms", "p99_ttft_ms", "mean_ttft_ms", "median_itl_ms", "p99_itl_ms",
            "request_throughput", "output_throughput",
        )},
        busy=round(sum(outcome.busy) / arguments.replicas / outcome.seconds, 4),
        busy_spread=round(outcome.spread, 4),
        computed_spread=round(spread([each.tokens_computed for each in outcome.stats]), 4),
        routed=outcome.routed, fetched_tokens=outcome.fetched_tokens, moves=outcome.moves,
        moved_tokens=outcome.moved_tokens, simulated_in_s=round(time.perf_counter() - began, 1),
    )  # fmt: skip


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """The properties that identify a run."""
    return tuple(row.get(name) for name in ("workload", "pace", "seed", "replicas", "requests_asked", "policy"))


def show(rows: list[dict[str, Any]]) -> None:
    """A table for each workload. Each row compares its P99 TTFT with the prefix tree's."""
    widths = dict(found=6, p50=9, p99=8, tree=8, alone=8, rate=7, busy=5, spread=7, tokens=7, moves=5)
    print(f"{'policy':18} " + " ".join(f"{name:>{width}}" for name, width in widths.items()))
    tree = next((row["p99_ttft_ms"] for row in rows if row["policy"] == "prefix-tree"), None)
    for row in rows:
        found = f"{row['found']:6.3f}" if row["reusable_tokens"] else "     -"
        ratio = f"{row['p99_ttft_ms'] / tree:8.2f}" if tree else "       -"
        alone = f"{row['alone_p99_ms'] / tree:8.2f}" if tree else "       -"
        print(
            f"{row['policy']:18} {found} {row['median_ttft_ms']:9.0f} {row['p99_ttft_ms']:8.0f} {ratio} {alone} "
            f"{row['request_throughput']:7.2f} {row['busy']:5.2f} {row['busy_spread']:7.1%} "
            f"{row['computed_spread']:7.1%} {row['moves']:5}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", metavar="WORKLOAD")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--speed", type=float, help="times a trace's own pace; of `skewed`, conversations a second")
    parser.add_argument("--requests", type=int, help="the first of a trace; of `skewed`, conversations")
    parser.add_argument("--seed", type=int, default=0, help="of the skewed load")
    parser.add_argument("--asks", action="store_true", help="the router is told what replicas hold; no server's is")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="add the results to this file")
    arguments = parser.parse_args()
    jobs = [(name, policy, arguments) for name in arguments.workloads for policy in arguments.policies]
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        rows = pool.map(measure, jobs, chunksize=1)
    for name in arguments.workloads:
        of = [row for row in rows if row["workload"] == Path(name).name]
        print(
            f"\n{Path(name).name}, {of[0]['requests']} requests, pace {of[0]['pace']:g}, {arguments.replicas} replicas"
        )
        show(of)
    if arguments.json is not None:
        before = json.loads(arguments.json.read_text())["runs"] if arguments.json.exists() else []
        measured = {key(row) for row in rows}
        kept = [row for row in before if key(row) not in measured]
        arguments.json.write_text(json.dumps(provenance() | {"runs": kept + rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
