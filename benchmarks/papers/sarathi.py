"""Sarathi-Serve's evaluation by simulation: capacity (Figures 9, 10), ablations (Table 4), joining decodes (Figure 8).

Run: python -m benchmarks.papers.sarathi checks | joining | bubbles | knee [--profiles FILE ...]
     python -m benchmarks.papers.sarathi capacity [--requests 512] [--models ...] [--systems ... [--add]]
                                         [--processes 2] [--vary NAME ...]
     python -m benchmarks.papers.sarathi ablation
     python -m benchmarks.papers.sarathi vary-capacity | vary-ablation [--vary NAME ...] [--seeds 0] [--lengths CSV]
                                         [--replay] [--systems orca vllm sarathi]

Holdfast's own schedulers run over its own memory on a virtual clock. None of the devices was at hand: profiles are
derived from data sheets (holdfast/lab/simulator/deployment.py), and `checks` compares the derived times with every time
that the paper's text states. The capacity is the highest Poisson rate at which P99 TBT stays within the SLO (Table 3)
and the median request waits at most 2 s. `orca` and `vllm` are Holdfast's `orca` and `prefill-first` schedulers, not
those systems. Results and plots go to benchmarks/papers/results/.

`vary-capacity` and `vary-ablation` change the set-up, one thing at a time or together, to find out why a figure differs
from the paper's. Capacities are then of openchat_sharegpt4, where all ratios in the paper's text come from. The
authors' runs are in github.com/microsoft/sarathi-serve, branch osdi-sarathi-serve, folder osdi-experiments. The lengths
of their requests are in branch niyama_asplos2026,
data/processed_traces/sharegpt_8k_filtered_stats_llama2_tokenizer.csv; `--lengths` takes that file in place of the
distribution fitted to Table 2. `--replay` takes the requests in the order and at the arrival times of the authors' own
runs, which have one seed; `vary-capacity` then ends each run after 30 minutes and `vary-ablation` takes their rates, as
their scripts do. The lengths of arxiv_summarization are not published, so these stay fitted. Each call adds its rows to
benchmarks/papers/results/sarathi-varied.json.

Figures of "the later version" are those of OSDI 2024 (arXiv 2403.02310v3), where the same authors measured again.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.lib import papers
from benchmarks.lib.paper_workloads import authors_arrivals, in_authors_order, sarathi_lengths
from benchmarks.lib.papers import LAUNCH_SECONDS
from holdfast.core.cost import CostModel
from holdfast.engine.profiles import CostProfile
from holdfast.lab import workloads
from holdfast.lab.metrics import summary
from holdfast.lab.planning import TOLERANCE, find_capacity
from holdfast.lab.schedulers import HybridOnly
from holdfast.lab.simulator.deployment import Deployment, deploy, derive
from holdfast.lab.simulator.devices import DEVICES, LINKS, Link
from holdfast.lab.simulator.run import simulate
from holdfast.lab.simulator.shapes import MODELS
from holdfast.lab.workloads import DATASETS, Workload
from holdfast.lm.config import EngineConfig
from holdfast.lm.scheduler.builder import Policy, StepBuilder
from holdfast.lm.scheduler.pipeline_target import PipelineLatencyTarget
from holdfast.lm.scheduler.policies import whole_tiles
from holdfast.lm.types import EngineShape

SHAREGPT, ARXIV = "openchat_sharegpt4", "arxiv_summarization"
WITHOUT_BOUND = 1 << 20
"""Largest number of tokens of a step that none reaches."""
CEILING = 4096
"""Largest computed budget in tokens, divided among pipeline stages: larger steps are no cheaper and leave bubbles."""
BUDGETS = {"strict": (512, 1024, 2048), "relaxed": (1536, 2048, 4096)}
"""For each SLO, the fixed budgets that are tried. Sarathi-Serve's own are among them."""


@dataclass(frozen=True)
class Setting:
    """A row of Tables 1 and 3."""

    model: str
    layout: dict[str, Any]
    strict: float
    """Limit of P99 TBT in seconds; `relaxed` is another."""
    relaxed: float
    start: float
    """Requests per second at which the search begins."""
    relaxed_budget: int = 2048
    most_of_orca: int = 16
    """Number of sequences of Orca in the authors' configuration."""

    def limit(self, slo: str) -> float:
        """Limit of P99 TBT in seconds."""
        return self.relaxed if slo == "relaxed" else self.strict

    def budget(self, slo: str) -> int:
        """The token budget that the paper fixes for this SLO."""
        return self.relaxed_budget if slo == "relaxed" else 512


A100S = {"device": "a100-80gb"}
A40S = {"device": "a40", "tp": 4, "pp": 2, "link": "nvlink-pairs", "stage_link": "pcie4-staged"}
"""NVLink joins pairs only, so a ring over four devices also goes over PCIe."""
TWO_NODES = {**A100S, "tp": 4, "pp": 2, "link": "pcie4", "stage_link": "ethernet-100g-tcp"}
SETTINGS = {
    "Mistral-7B": Setting("mistral-7b", A100S, 0.1, 0.5, start=1.5),
    "Yi-34B": Setting("yi-34b", {**A100S, "tp": 2}, 0.2, 1.0, start=0.6),
    "LLaMA2-70B": Setting("llama-2-70b", A40S, 1.0, 5.0, start=0.25, relaxed_budget=1536, most_of_orca=8),
    "Falcon-180B": Setting("falcon-180b", TWO_NODES, 1.0, 5.0, start=0.25, most_of_orca=8),
}
PAPER = {  # all figures in the text; the bars of Figures 9 and 10 are not among them
    ("Mistral-7B", SHAREGPT, "strict", "orca"): 3.2,
    ("Yi-34B", SHAREGPT, "relaxed", "vllm"): 2.7,
}
PAPER_BEST = {"Mistral-7B": 2.6, "Yi-34B": 2.8, "Falcon-180B": 6.9}
"""Largest gain over vLLM or Orca on any data set and SLO (§1)."""
LATER = {
    ("Mistral-7B", SHAREGPT, "strict", "vllm"): 3.5,  # Figure 12
    ("Yi-34B", SHAREGPT, "strict", "orca"): 4.0,
    ("Yi-34B", SHAREGPT, "strict", "vllm"): 3.7,
    ("Yi-34B", SHAREGPT, "relaxed", "vllm"): 1.65,  # Figure 12
    ("Falcon-180B", SHAREGPT, "strict", "vllm"): 3.6,  # Figure 13
    ("Falcon-180B", SHAREGPT, "relaxed", "vllm"): 1.48,  # Figure 13
}
"""All ratios in the text of the later version that name a model, an SLO and a baseline (§5.1 to §5.3)."""
TABLE_4 = {
    SHAREGPT: {"hybrid-only": (0.56, 1.08), "chunked-only": (1.04, 0.34), "stall-free": (0.85, 0.29)},
    ARXIV: {"hybrid-only": (4.18, 1.76), "chunked-only": (4.86, 0.38), "stall-free": (3.03, 0.35)},
}
"""P50 TTFT and P99 TBT in seconds."""
TABLE_4_LATER = {
    SHAREGPT: {"hybrid-only": (0.53, 0.68), "chunked-only": (1.04, 0.17), "stall-free": (0.76, 0.14)},
    ARXIV: {"hybrid-only": (3.78, 1.38), "chunked-only": (5.38, 0.20), "stall-free": (3.90, 0.17)},
}
"""Table 4 of the later version, whose script has chunks of 512 tokens (osdi-experiments/table-6)."""
SCRIPT_RATES = {SHAREGPT: 1.0, ARXIV: 0.5}
"""Requests per second in that script."""
TIME_LIMIT = 1800.0
"""Seconds after which the authors end a run of a capacity search."""
SYSTEMS = {
    "orca": "Orca",
    "vllm": "vLLM",
    "sarathi": "Sarathi",
    "once": "computed once",
    "computed": "computed each step",
    "fixed": "best fixed (budget)",
}
"""Columns of `capacity`. `sarathi` has the paper's fixed budget. `once` computes the budget from the SLO at the start
(Algorithm 3, lines 1 and 2), `computed` at every step.
"""
VARIATIONS = papers.VARIATIONS | {
    "ray": "9 ms more a step, 16 on A40s, as Vidur recorded of the host",
    "orca": "Orca runs at most 16 sequences, 8 in the pipelines, as the authors' configurations say",
    "slo": "the SLO is 5 and 25 times our own step of 32 decodes at 4k, the paper's rule",
    "headroom": "1% of the blocks are kept for running sequences, vLLM's watermark, not 10%",
    "rate": "ablation: the rates and the chunk of the authors' script, 1 and 0.5 requests/s and 512 tokens",
    "synchronous": "ablation: one step in flight, as in the authors' engine, so that a prompt joins one step earlier",
    "arxiv-0.4": "ablation: with --replay, arxiv comes at 0.4 requests/s, not at the script's 0.5",
    "8192": "ablation: steps of hybrid-only hold at most 8,192 tokens on both data sets",
    "together": "ablation: a step of hybrid-only holds all prompts that wait, as Orca's does",
    "whole": "ablation: hybrid-only is stall-free with a budget of the longest length, as in the authors' script",
}
NAMED = ("Yi-34B/relaxed", "Yi-34B/strict", "Mistral-7B/strict", "Mistral-7B/relaxed", "LLaMA2-70B/strict",
         "LLaMA2-70B/relaxed", "Falcon-180B/strict", "Falcon-180B/relaxed")  # fmt: skip
SAME_SET_UP = ("setting", "vary", "lengths", "requests", "seed", "replay")
"""Keys in which a later row must agree with an earlier one to replace it."""


@cache
def deployed(name: str, vary: tuple[str, ...] = ()) -> Deployment:
    """The model on the paper's devices, varied."""
    setting = SETTINGS[name]
    seconds = (0.016 if setting.layout["device"] == "a40" else 0.009) if "ray" in vary else 0.0
    return papers.deployed(setting.model, vary, step_seconds=seconds, **setting.layout)


def engine(system: str, dataset: str, cache_tokens: int, slo: float) -> EngineConfig:
    """The configuration for a system; `fixed-N` is a budget of N. `slo` is in seconds."""
    longest = DATASETS[dataset].limit + 1
    common: dict[str, Any] = {"max_model_len": longest, "max_sequences": 128, "prefix_sharing": False}
    if system == "orca":  # without paging, as many sequences as fit at the longest length
        most = max(1, min(128, cache_tokens // longest))
        return EngineConfig(**common | {"max_sequences": most}, scheduler="orca")
    if system == "vllm":
        return EngineConfig(**common, scheduler="prefill-first", token_budget=longest)
    if system == "once":
        return EngineConfig(**common, token_budget="auto", tbt_target=slo * 1000)  # type: ignore[arg-type]
    if system == "computed":
        return EngineConfig(**common, tbt_target=slo * 1000)
    return EngineConfig(**common, token_budget=int(system.removeprefix("fixed-")))


def requests(dataset: str, count: int, seed: int, lengths: Path | None = None, replay: bool = False) -> Workload:
    """Requests of a data set. For sharegpt they come from the file if there is one.

    Their order is drawn by `seed`, or is the authors' with `replay`.
    """
    if lengths is None or dataset != SHAREGPT:
        return workloads.sample_dataset(dataset, count, seed)
    found = sarathi_lengths(lengths, DATASETS[dataset].limit)
    return in_authors_order(found, count) if replay else random.Random(seed).sample(found, count)


class Unbalanced(PipelineLatencyTarget):
    """A target that bounds the streams of each step alone, without making steps equal."""

    @classmethod
    def of(cls, cost: CostModel, target: float, stages: int, shape: EngineShape) -> Policy:
        """The policy of an engine of this shape; `target` in seconds."""
        return cls(cost, target, tile=shape.tile, ceiling=whole_tiles(shape.max_step_tokens, shape.tile), stages=stages)

    def prefill_budget(self, step: StepBuilder) -> int:
        return step.budget

    def wait(self, seconds: float) -> float:
        return self._passage(seconds)[-1] - self._since[0]

    def _weigh_decodes(self, step: StepBuilder) -> None:
        step.weigh = None


def bubbles(names: Iterable[str], count: int) -> list[dict[str, Any]]:
    """Share of time that each stage is idle with 64 requests in progress, by policy, on the pipelines."""
    rows = []
    for name in (name for name in names if deployed(name).pipeline is not None):
        deployment, setting = deployed(name), SETTINGS[name]
        assert deployment.pipeline is not None
        stages, cost = len(deployment.pipeline.stages), deployment.profile.cost
        for dataset in (SHAREGPT, ARXIV):
            work = requests(dataset, count, 0)
            tokens = sum(turn.prompt + turn.output for one in work for turn in one.turns)
            for system in ("orca", "vllm", "fixed-512", "fixed-2048", "computed", "unbalanced"):
                target = setting.strict
                config = engine("computed" if system == "unbalanced" else system, dataset, 10**9, target)
                profile = replace(deployment.profile, token_budget=CEILING // stages)

                outcome = simulate(
                    config,
                    profile,
                    work,
                    concurrency=64,
                    pipeline=deployment.pipeline,
                    make_policy=partial(Unbalanced.of, cost, target, stages) if system == "unbalanced" else None,
                )
                figures = summary(outcome.records)
                rows.append(
                    {"model": name, "dataset": dataset, "system": system, "idle": outcome.idle}
                    | {"tokens_per_s": tokens / outcome.seconds, "p99_tbt_s": figures["p99_itl_ms"] / 1e3}
                )
    return rows


def show_bubbles(rows: list[dict[str, Any]]) -> list[str]:
    """Idle share by stage, throughput and tail."""
    lines = ["| model | data set | policy | idle by stage | tokens/s | P99 TBT, s |", "|---|---|---|---|---|---|"]
    for row in rows:
        idle = ", ".join(f"{share:.1%}" for share in row["idle"])
        figures = f"{idle} | {row['tokens_per_s']:,.0f} | {row['p99_tbt_s']:.2f}"
        lines.append(f"| {row['model']} | {row['dataset']} | {row['system']} | {figures} |")
    return lines


def hybrid_without_bound(shape: EngineShape) -> Policy:
    """The policy `hybrid-only` whose steps hold any number of tokens."""
    return HybridOnly(WITHOUT_BOUND)


def served(
    deployment: Deployment,
    config: EngineConfig,
    work: Workload,
    rate: float,
    seed: int,
    make_policy: Callable[[EngineShape], Policy] | None = None,
    *,
    replay: bool = False,
    until: float = inf,
) -> dict[str, Any]:
    """The figures of one simulated run that ends at `until` seconds. With `replay`, arrivals are the authors'."""
    stages = len(deployment.pipeline.stages) if deployment.pipeline else 1
    profile = replace(deployment.profile, token_budget=CEILING // stages)
    arriving = authors_arrivals(work, rate) if replay else workloads.gamma_arrivals(work, rate, seed)
    outcome = simulate(config, profile, arriving, pipeline=deployment.pipeline, make_policy=make_policy, until=until)
    return summary(outcome.records)


class Search(NamedTuple):
    """A search for a capacity."""

    name: str
    dataset: str
    slo: str
    system: str
    requests: int
    close: float = TOLERANCE
    """Ratio of the bounds at which the search ends."""
    vary: tuple[str, ...] = ()
    seed: int = 0
    lengths: Path | None = None
    replay: bool = False


def capacity_of(search: Search) -> tuple[Search, float]:
    """The search, and the requests per second that it finds."""
    name, dataset, slo, system, count, close, vary, seed, lengths, replay = search
    deployment, setting = deployed(name, vary), SETTINGS[name]
    limit = setting.limit(slo)
    if "slo" in vary:
        limit = (25 if slo == "relaxed" else 5) * deployment.profile.cost.step([(1, 4096)] * 32)
    config = engine(system, dataset, deployment.profile.cache_tokens, limit)
    if "orca" in vary and system == "orca":
        most = min(config.most_sequences, setting.most_of_orca)
        config = replace(config, max_sequences=most)
    if "headroom" in vary:
        config = replace(config, headroom=0.01)
    work, until = requests(dataset, count, seed, lengths, replay), TIME_LIMIT if replay else inf
    found = find_capacity(
        lambda rate: served(deployment, config, work, rate, seed, replay=replay, until=until),
        limit * 1000, start=setting.start, tolerance=close,
    )  # fmt: skip
    print(f"  {name} {dataset} {slo} {system} {' '.join(vary)}: {found:.3g}", file=sys.stderr, flush=True)
    return search, found


def capacity(
    names: Iterable[str], systems: Sequence[str], count: int, processes: int, vary: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Figures 9 and 10, with budgets computed from the SLO and the best fixed one; varied if `vary` names anything."""
    searches = []
    for dataset in (SHAREGPT, ARXIV):
        for name in names:
            for slo in BUDGETS:
                wanted = [system for system in systems if system not in ("sarathi", "fixed")]
                if "fixed" in systems:
                    wanted += [f"fixed-{budget}" for budget in BUDGETS[slo]]
                elif "sarathi" in systems:
                    wanted.append(f"fixed-{SETTINGS[name].budget(slo)}")
                searches += [Search(name, dataset, slo, system, count, 0.02, vary) for system in wanted]
    with get_context("spawn").Pool(processes) as pool:
        found = dict(pool.imap_unordered(capacity_of, searches))
    rows = []
    for name, dataset, slo in dict.fromkeys(search[:3] for search in searches):
        at = {search.system: rate for search, rate in found.items() if search[:3] == (name, dataset, slo)}
        if (own := f"fixed-{SETTINGS[name].budget(slo)}") in at:
            at["sarathi"] = at[own]
        row: dict[str, Any] = {"model": name, "dataset": dataset, "slo": slo, "capacity": at}
        if "fixed" in systems:
            row["best_fixed"], row["best_budget"] = max((at[f"fixed-{budget}"], budget) for budget in BUDGETS[slo])
        rows.append(row)
    return rows


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The old rows with the new capacities in them, then rows of new settings."""
    rows = {(row["model"], row["dataset"], row["slo"]): row for row in old}
    for row in new:
        known = rows.setdefault((row["model"], row["dataset"], row["slo"]), row)
        rows[row["model"], row["dataset"], row["slo"]] = known | row | {"capacity": known["capacity"] | row["capacity"]}
    return list(rows.values())


def ratio(over: float, under: float) -> float:
    """The quotient; infinity for a divisor of 0."""
    return over / under if under else inf


def show_capacity(rows: list[dict[str, Any]]) -> list[str]:
    """The table: requests per second, ratios, the paper's next to ours; a dash for a system that did not run."""
    over = (("sarathi", "orca"), ("sarathi", "vllm"), ("computed", "fixed"), ("once", "computed"))
    heads = ["model", "data set", "SLO", *SYSTEMS.values(), *(f"{SYSTEMS[a]} / {SYSTEMS[b]}" for a, b in over)]
    lines = [f"| {' | '.join(heads)} |".replace(" (budget) |", " |"), "|---" * len(heads) + "|"]
    for row in rows:
        at, key = dict(row["capacity"]), (row["model"], row["dataset"], row["slo"])
        if "best_fixed" in row:
            at["fixed"] = row["best_fixed"]
        cells = [*key, *(f"{at[system]:.3g}" if system in at else "-" for system in SYSTEMS)]
        if "fixed" in at:
            cells[-1] += f" ({row['best_budget']})"
        for one, other in over:
            stated = f" ({PAPER[*key, other]})" if one == "sarathi" and (*key, other) in PAPER else ""
            cells.append(f"{ratio(at[one], at[other]):.2f}{stated}" if {one, other} <= at.keys() else "-")
        lines.append(f"| {' | '.join(cells)} |")
    both = [row["capacity"] for row in rows if {"orca", "vllm"} <= row["capacity"].keys()]
    if both:
        above = sum(at["vllm"] > at["orca"] for at in both)
        lines.append(f"\nvLLM serves more than Orca in {above} of {len(both)} rows; the paper has it clearly ahead.")
    for name, stated in PAPER_BEST.items():
        of = [at for row, at in ((row, row["capacity"]) for row in rows) if row["model"] == name and "sarathi" in at]
        ratios = [ratio(at["sarathi"], at[system]) for at in of for system in ("orca", "vllm") if system in at]
        if ratios:
            lines.append(f"\n{name}: at most {max(ratios):.2f} times a baseline; the paper says up to {stated}.")
    return lines


def ablation(
    vary: tuple[str, ...] = (), seed: int = 0, lengths: Path | None = None, replay: bool = False
) -> dict[str, Any]:
    """Table 4: P50 TTFT and P99 TBT in seconds by data set and scheduler, and the rates.

    The paper gives no rate. For each data set it is the one at which stall-free batching has the paper's P50 TTFT; with
    `replay` it is the authors'.
    """
    deployment, cells, rates = deployed("Yi-34B", vary), {}, {}
    for dataset, systems in TABLE_4.items():
        work = requests(dataset, 128, seed, lengths, replay)
        common: dict[str, Any] = {"max_model_len": DATASETS[dataset].limit + 1, "max_sequences": 128}
        common |= {"prefix_sharing": False, "token_budget": 512 if "rate" in vary else 1024}
        common |= {"steps_in_flight": 1} if "synchronous" in vary else {}

        def at(rate: float, scheduler: Any, common: Any = common, work: Workload = work) -> tuple[float, float]:
            options = common | {"scheduler": scheduler}
            if scheduler == "hybrid-only" and {"whole", "8192"} & set(vary):
                longest = 8192 if "8192" in vary else common["max_model_len"]
                options |= {"scheduler": "stall-free", "token_budget": longest}
            unbounded = hybrid_without_bound if "together" in vary and scheduler == "hybrid-only" else None
            figures = served(deployment, EngineConfig(**options), work, rate, seed, unbounded, replay=replay)
            return figures["median_ttft_ms"] / 1000, figures["p99_itl_ms"] / 1000

        low, high = 0.05, 4.0
        if replay or "rate" in vary:
            low = high = 0.4 if dataset == ARXIV and "arxiv-0.4" in vary else SCRIPT_RATES[dataset]
        while high / low > 1.02:
            middle = (low * high) ** 0.5
            if at(middle, "stall-free")[0] < systems["stall-free"][0]:
                low = middle
            else:
                high = middle
        rates[dataset] = low
        cells[dataset] = {scheduler: at(low, scheduler) for scheduler in systems}
    return {"rates": rates, "cells": cells}


def show_ablation(found: dict[str, Any]) -> list[str]:
    """Table 4 and our figures."""
    lines = [
        "| data set | scheduler | P50 TTFT, s (paper) | ours | P99 TBT, s (paper) | ours | off |",
        "|---|---|---|---|---|---|---|",
    ]
    for dataset, systems in TABLE_4.items():
        for scheduler, paper in systems.items():
            ours, rate = found["cells"][dataset][scheduler], found["rates"][dataset]
            off = " / ".join(f"{mine / stated - 1:+.0%}" for mine, stated in zip(ours, paper, strict=True))
            shown = f"{paper[0]} | {ours[0]:.2f} | {paper[1]} | {ours[1]:.2f} | {off}"
            lines.append(f"| {dataset} ({rate:.2f}/s) | {scheduler} | {shown} |")
    return lines


def vary(args: argparse.Namespace) -> None:
    """Add the varied rows that are asked for to those of earlier calls, and show them all."""
    stem, about, varied = args.out / "sarathi-varied", papers.origin(args.lengths, args.out), tuple(args.vary)
    kept = json.loads(stem.with_suffix(".json").read_text()) if stem.with_suffix(".json").exists() else {}
    kept = {"capacity": [], "ablation": []} | kept
    for seed in args.seeds:
        row = about | {"vary": args.vary, "lengths": origin_of(args.lengths), "seed": seed, "replay": args.replay}
        if args.part == "vary-ablation":
            kept["ablation"].append(row | ablation(varied, seed, args.lengths, args.replay))
            continue
        for setting in args.settings:
            name, slo = setting.split("/")
            found = {}
            for system in ("orca", "vllm", "sarathi"):
                if system not in args.systems:
                    continue
                run = f"fixed-{SETTINGS[name].budget(slo)}" if system == "sarathi" else system
                found[system] = capacity_of(
                    Search(name, SHAREGPT, slo, run, args.requests, TOLERANCE, varied, seed, args.lengths, args.replay)
                )[1]
            kept["capacity"].append(row | {"setting": setting, "requests": args.requests, "capacity": found})
    for part, rows in kept.items():
        kept[part] = latest(rows)
    lines = [*show_varied_capacity(kept["capacity"]), "", *show_varied_ablation(kept["ablation"])]
    stem.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n")
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def latest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last row of each set-up. Capacities that it lacks come from the earlier row, whose command it then names."""
    kept: dict[str, dict[str, Any]] = {}
    for row in rows:
        key = json.dumps([row.get(name) or None for name in SAME_SET_UP])
        before = kept.get(key, {})
        own = row.get("capacity", {})
        missing = {name: found for name, found in before.get("capacity", {}).items() if name not in own}
        kept[key] = row
        if missing:
            kept[key] = row | {"capacity": missing | own, "earlier": before["command"]}
    return list(kept.values())


def show_varied_capacity(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each setting and variation: the median over seeds, and the range if there are several."""
    heads = ["setting", "varied", "lengths", "requests", "seeds", "Orca", "vLLM", "Sarathi"]
    heads += ["/Orca (paper)", "/vLLM (paper)"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: NAMED.index(row["setting"])):
        key = (row["setting"], " + ".join(row["vary"]) or "as ours", lengths_of(row), row["requests"])
        alike.setdefault(key, []).append(row["capacity"])

    def spread(values: list[float]) -> str:
        if not values:
            return "-"
        middle = f"{median(values):.3g}"
        return middle if len(values) == 1 else f"{middle} ({min(values):.3g} to {max(values):.3g})"

    for key, found in alike.items():
        name, slo = key[0].split("/")
        cells = [*map(str, key), str(len(found))]
        cells += [spread([at[system] for at in found if system in at]) for system in ("orca", "vllm", "sarathi")]
        for system in ("orca", "vllm"):
            ratios = [ratio(at["sarathi"], at[system]) for at in found if {"sarathi", system} <= at.keys()]
            cells.append(f"{spread(ratios)} [{stated_ratio(name, slo, system)}]")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def stated_ratio(name: str, slo: str, system: str) -> str:
    """The paper's gain over a baseline on sharegpt, or its largest one with this model; then the later version's."""
    key = (name, SHAREGPT, slo, system)
    stated = f"{PAPER[key]}" if key in PAPER else f"at most {PAPER_BEST[name]}" if name in PAPER_BEST else ""
    later = f"later {LATER[key]}" if key in LATER else ""
    return "; ".join(filter(None, (stated, later))) or "-"


def show_varied_ablation(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each variation and data set: P50 TTFT and P99 TBT of each scheduler, s."""
    lines = [
        "| data set | varied | lengths | seed | requests/s | hybrid-only | chunked-only | stall-free |",
        "|---|---|---|---|---|---|---|---|",
    ]
    replayed: set[str] = set()
    for dataset in TABLE_4:
        for version, table in (("the paper", TABLE_4), ("the later version", TABLE_4_LATER)):
            paper = [f"{ttft:.2f} / {tbt:.2f}" for ttft, tbt in table[dataset].values()]
            lines.append(f"| {dataset} | {version} | | | | {' | '.join(paper)} |")
        for row in rows:
            if dataset == ARXIV and row["lengths"] != origin_of(None) and not row.get("replay"):
                continue  # the authors' lengths of these are not published
            varied = " + ".join(row["vary"]) or "as ours"
            if dataset == SHAREGPT and row.get("replay"):
                if varied in replayed:
                    continue  # the seed draws only the lengths of arxiv
                replayed.add(varied)
            cells = [f"{ttft:.2f} / {tbt:.2f}" for ttft, tbt in row["cells"][dataset].values()]
            rate = f"{row['rates'][dataset]:.2f}"
            lengths = lengths_of(row) if dataset == SHAREGPT or not row.get("replay") else "fitted, replayed"
            lines.append(f"| {' | '.join([dataset, varied, lengths, str(row['seed']), rate, *cells])} |")
    return lines


def lengths_of(row: dict[str, Any]) -> str:
    """The origin of a row's lengths, and whether its requests come in the authors' order and at their times."""
    return f"{row['lengths']}{', replayed' if row.get('replay') else ''}"


def origin_of(lengths: Path | None) -> str:
    """The origin of the lengths."""
    return "authors'" if lengths else "fitted"


MEASURED = "mistral-7b-v0.3"
"""A model with a measured profile."""


def joining() -> list[dict[str, Any]]:
    """Figure 8: a decode step alone, with a whole prompt, and with a chunk that fills the budget.

    Each is computed as derived, and with the host's time to launch the layers as the authors recorded it. The last
    model's steps were measured, on an H200.
    """
    rows = []
    layouts: tuple[tuple[str, dict[str, Any], int], ...] = (
        ("mistral-7b", {**A100S}, 256),
        ("llama-2-70b", {**A100S, "tp": 4, "link": "pcie4"}, 512),
        (MEASURED, {"device": "h200"}, 256),
    )
    for model, layout, budget in layouts:
        cost = deploy(model, **layout).profile.cost
        launched = papers.deployed(model, ("launch",), **layout).profile.cost
        for batch in (8, 16, 32, 64):
            for context in (1024, 2048, 4096):
                decodes = [(1, context)] * batch
                alone = cost.step(decodes)
                whole, chunk = (cost.step([*decodes, (size, context)]) for size in (context, budget - batch))
                slow = launched.step(decodes)
                late, later = (launched.step([*decodes, (size, context)]) for size in (context, budget - batch))
                rows.append(
                    {"model": model, "batch": batch, "context": context, "budget": budget, "alone": alone}
                    | {"whole": whole / alone, "chunked": chunk / alone}
                    | {"launched_alone": slow, "launched_whole": late / slow, "launched_chunked": later / slow}
                )
    return rows


def show_joining(rows: list[dict[str, Any]]) -> list[str]:
    """Times of a decode step that a prompt joins, divided by the step alone."""
    heads = (
        "| model | batch | context | decodes alone, ms | + whole prompt | + chunk | the same, launched layer by layer |"
    )
    lines = [heads, "|---" * 7 + "|"]
    for row in rows:
        cells = [row["model"], row["batch"], row["context"], f"{row['alone'] * 1e3:.1f}", f"{row['whole']:.1f}x"]
        late = f"{row['launched_alone'] * 1e3:.1f} ms, {row['launched_whole']:.1f}x, {row['launched_chunked']:.2f}x"
        cells += [f"{row['chunked']:.2f}x", "measured" if row["model"] == MEASURED else late]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    derived = [row for row in rows if row["model"] != MEASURED]
    worst, late = (max(row[name] for row in derived) for name in ("whole", "launched_whole"))
    told = f"At most {worst:.1f} times with a whole prompt, and {late:.1f} if no step is shorter than its launches; "
    lines += ["", f"{told}the paper says up to 28.3, and not for which prompt."]
    whole, chunked = (max(row[name] for row in rows if row["model"] == MEASURED) for name in ("whole", "chunked"))
    return [*lines, "", f"{MEASURED} on an H200, measured: at most {whole:.1f} times, and {chunked:.2f} with a chunk."]


DEGREES = (1, 2, 4, 8)
"""Degrees of tensor parallelism in Figure 7."""
KNEE_TOKENS = (1, 32, 64, 128, 256, 384, 512, 768, 1024, 2048, 4096)
SLOPE = (2048, 4096)
"""Range of tokens in which the time of a step grows in proportion."""
KNEES = {1: "200 in theory", 8: "500 to 600 at higher degrees"}
"""Token counts from which linear layers are bound by arithmetic, according to the paper (footnote 2)."""
LAYER_RECORDS = {  # ms of the four products of a layer of Llama-2-70B on A100s by degree, at each of KNEE_TOKENS
    1: (1.072, 1.120, 1.125, 1.297, 2.117, 3.058, 3.910, 5.947, 8.128, 14.585, 29.599),
    2: (0.529, 0.571, 0.593, 0.734, 1.058, 1.516, 2.017, 3.015, 4.135, 7.520, 14.716),
    4: (0.284, 0.301, 0.307, 0.383, 0.588, 0.724, 1.038, 1.476, 2.115, 3.772, 7.309),
    8: (0.152, 0.160, 0.166, 0.204, 0.336, 0.401, 0.583, 0.739, 1.012, 1.986, 3.731),
}
"""Medians that Vidur publishes (github.com/microsoft/vidur at 7d47513: data/profiling/compute/a100/meta-llama/
Llama-2-70b-hf/mlp.csv: attn_pre_proj, attn_post_proj, mlp_up_proj and mlp_down_proj), without launches."""
LEVEL = 1.5
"""A step counts as flat while it takes at most this many times the step of one token."""


def knee(profiles: Sequence[Path]) -> list[dict[str, Any]]:
    """Figure 7: time of the linear layers by tokens and degree, and the tokens from which it grows in proportion.

    That is where the time of one token meets the line through the times of 2,048 and 4,096; and the most tokens of a
    step that takes at most LEVEL times as long as one token. Derived for LLaMA2-70B on A100s, with and without the
    all-reduces of a layer. Then follow what Vidur recorded of the products, alone and with the time in which a host
    launches a layer as the least, and the measured profiles.
    """
    shape, device, free = MODELS["llama-2-70b"], DEVICES["a100-80gb"], Link("none", inf, 0.0)
    costs: list[tuple[str, int, CostModel]] = []
    for link, told_link in ((free, "without all-reduces"), (LINKS[device.link], f"all-reduces over {device.link}")):
        for tp in DEGREES:
            costs.append((f"llama-2-70b on a100-80gb, {told_link}", tp, derive(shape, device, tp=tp, link=link)))
    for path in profiles:
        profile = CostProfile.load(path)
        costs.append((f"{profile.cost.model} on {profile.cost.device}, measured", profile.tp, profile.cost))
    curves = [(what, tp, {at: 1e3 * cost.linear(at) for at in KNEE_TOKENS}) for what, tp, cost in costs]
    for least, how in ((0.0, "recorded by Vidur"), (LAUNCH_SECONDS, "recorded by Vidur, launched layer by layer")):
        for tp, layer in LAYER_RECORDS.items():
            of = {at: shape.layers * max(ms, 1e3 * least) for at, ms in zip(KNEE_TOKENS, layer, strict=True)}
            curves.append((f"llama-2-70b on a100-80gb, products {how}", tp, of))
    rows = []
    for what, tp, ms in curves:
        (low, high), (first, then) = SLOPE, (ms[at] for at in SLOPE)
        slope = (then - first) / (high - low)
        flat, grows = ms[1], (first - slope * low, slope)
        rows.append(
            {"what": what, "tp": tp, "ms": ms, "level": level_until(ms)}
            | {"knee": max(0.0, (flat - grows[0]) / grows[1]), "paper": KNEES.get(tp, "")}
        )
    return rows


def level_until(ms: dict[int, float]) -> float:
    """The tokens at which a step takes LEVEL times as long as one of one token, between the given ones."""
    limit, before = LEVEL * ms[1], 1
    for at, took in ms.items():
        if took > limit:
            return before + (at - before) * (limit - ms[before]) / (took - ms[before])
        before = at
    return before


def show_knee(rows: list[dict[str, Any]]) -> list[str]:
    """Times by tokens, and the knee next to the paper's."""
    heads = ["linear layers of", "TP", *(f"{at:,}" for at in KNEE_TOKENS), "knee, tokens", f"{LEVEL:g} times one token"]
    heads.append("the paper")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        times = [f"{row['ms'][at]:.2f}" for at in KNEE_TOKENS]
        lines.append(
            f"| {row['what']} | {row['tp']} | {' | '.join(times)} | {row['knee']:.0f} | {row['level']:.0f} | "
            f"{row['paper']} |"
        )
    return lines


LAYERS = {  # ms of a layer of Llama-2-70B over four devices, its all-reduces left out: by device and tokens
    "a40": {32: 0.861, 512: 2.301, 2048: 8.801},
    "a100-80gb": {32: 0.329, 512: 1.127, 2048: 4.212},
}
REDUCTIONS = {  # ms of an all-reduce over four devices: by link and bytes
    "nvlink-pairs": {524_288: 0.054, 33_554_432: 1.260},
    "pcie4": {526_336: 0.091, 33_554_432: 2.157},
}
"""Medians that Vidur publishes (github.com/microsoft/vidur, data/profiling: at 7d47513 mlp.csv of Llama-2-70b-hf in
compute/a40 and compute/a100, and network/a100_pairwise_nvlink/all_reduce.csv; at 513ddc1 a40/all_reduce.csv)."""

PREFILLS = {2047: 0.378, 4095: 0.775, 8191: 1.754, 16383: 4.535}
"""Seconds of whole prefills of Yi-34B over two A100s by tokens, as Sarathi-Serve's authors recorded them; and in chunks
of 512, and one decode (github.com/microsoft/sarathi-serve at 02d2567, osdi-experiments: figure-9/chunking-overhead.csv,
figure-2/decode.csv)."""
CHUNKED, ONE_DECODE = {8191: 1.959, 16383: 4.513}, 0.0468


def checks_of_the_authors() -> list[dict[str, Any]]:
    """Steps as the authors recorded them, with the derived ones."""
    yi = deployed("Yi-34B").profile.cost

    def row(what: str, paper: float, ours: float) -> dict[str, Any]:
        return {"what": f"Yi-34B, {what}, s (the authors' records)", "paper": paper, "ours": ours}

    def in_chunks(tokens: int, size: int) -> float:
        stops = [*range(size, tokens, size), tokens]
        return sum(yi.step([(stop - start, stop)]) for start, stop in zip([0, *stops], stops, strict=False))

    return [
        *(row(f"prefill of {tokens:,}", took, yi.step([(tokens, tokens)])) for tokens, took in PREFILLS.items()),
        *(row(f"{tokens:,} in chunks of 512", took, in_chunks(tokens, 512)) for tokens, took in CHUNKED.items()),
        row("one decode", ONE_DECODE, yi.step([(1, 1024)])),
    ]


def checks_of_vidur() -> list[dict[str, Any]]:
    """Layers and all-reduces as measured elsewhere, with the derived ones."""
    shape, free = MODELS["llama-2-70b"], Link("none", inf, 0.0)
    rows: list[dict[str, Any]] = []
    for device, measured in LAYERS.items():
        one, two = (derive(shape, DEVICES[device], tp=4, link=free, layers=at, head=False) for at in (1, 2))
        rows += [
            {
                "what": f"{device}: a layer of Llama-2-70B, TP4, {tokens} tokens, ms (Vidur)",
                "paper": ms,
                "ours": (two.linear(tokens) - one.linear(tokens)) * 1e3,
            }
            for tokens, ms in measured.items()
        ]
    for link, measured in REDUCTIONS.items():
        rows += [
            {
                "what": f"{link}: all-reduce of {size / 1e6:.1f} MB over four, ms (Vidur)",
                "paper": ms,
                "ours": LINKS[link].all_reduce(size, 4) * 1e3,
            }
            for size, ms in measured.items()
        ]
    return rows


def checks() -> list[dict[str, Any]]:
    """Every step time that the paper's text states or implies, with the derived one, and parts measured by others."""
    rows: list[dict[str, Any]] = []
    for name, setting in SETTINGS.items():
        ours = deployed(name).profile.cost.step([(1, 4096)] * 32)
        rows.append(
            {
                "what": f"{name}, 32 decodes at 4k, s (Table 3: strict SLO / 5)",
                "paper": setting.strict / 5,
                "ours": ours,
            }
        )
    mistral, yi = (deployed(name).profile.cost for name in ("Mistral-7B", "Yi-34B"))
    rows += [
        {"what": "Mistral-7B, prefill of 257 over 256 tokens (§4.3: up to)", "paper": 1.32,
         "ours": mistral.step([(257, 257)]) / mistral.step([(256, 256)])},
        {"what": "Mistral-7B, linear layers of 128 over 1 token (Figure 5: nearly the same)", "paper": 1.0,
         "ours": mistral.linear(128) / mistral.linear(1)},
        {"what": "Mistral-7B's layers, products of 128 over 1 token (Vidur, of the same shape)", "paper": 0.377 / 0.276,
         "ours": mistral.linear(128) / mistral.linear(1)},
        {"what": "Yi-34B, step of 1,024 tokens, chunk at 8k (Table 4, P99 TBT), s", "paper": 0.29,
         "ours": yi.step([(1000, 8192)] + [(1, 2500)] * 24)},
        {"what": "Yi-34B, step of 1,024 tokens, chunk at 16k (Table 4, P99 TBT), s", "paper": 0.35,
         "ours": yi.step([(1000, 16000)] + [(1, 8000)] * 24)},
    ]  # fmt: skip
    return rows + checks_of_the_authors() + checks_of_vidur()


def show_checks(rows: list[dict[str, Any]]) -> list[str]:
    """The lines: paper, ours, error."""
    lines = ["| what | stated | derived | error |", "|---|---|---|---|"]
    return lines + [
        f"| {row['what']} | {row['paper']:.3g} | {row['ours']:.3g} | {row['ours'] / row['paper'] - 1:+.0%} |"
        for row in rows
    ]


def plot_capacity(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars of capacity: a panel for each model and data set."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["model"] for row in rows))
    colors = ("#b0b7c3", "#7f8fa9", "#4c78a8", "#f2a65a", "#e45756", "#72b7b2")
    figure, axes = plt.subplots(2, len(names), figsize=(3.6 * len(names), 6), squeeze=False, layout="constrained")
    for column, name in enumerate(names):
        for line, dataset in enumerate((SHAREGPT, ARXIV)):
            axis = axes[line][column]
            of = [row for row in rows if (row["model"], row["dataset"]) == (name, dataset)]
            for index, (system, title) in enumerate(SYSTEMS.items()):
                heights = [(row["capacity"] | {"fixed": row.get("best_fixed", 0)}).get(system, 0) for row in of]
                places = [at + (index - 2.5) * 0.14 for at in range(len(of))]
                axis.bar(places, heights, 0.13, label=title.removesuffix(" (budget)"), color=colors[index])
            axis.set_xticks(range(len(of)), [f"{row['slo']} SLO" for row in of])
            axis.set_title(f"{name}, {dataset.split('_')[0]}", fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
    for line in axes:
        line[0].set_ylabel("capacity, requests/s")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("checks", "capacity", "ablation", "joining", "bubbles", "knee", "vary-capacity", "vary-ablation")
    parser.add_argument("part", choices=parts)
    parser.add_argument("--models", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--add", action="store_true", help="add these capacities to those that the JSON file has")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=papers.RESULTS, help="folder for the JSON, the table and the plot")
    parser.add_argument("--settings", nargs="+", default=list(NAMED), choices=NAMED, help="of vary-capacity")
    parser.add_argument("--vary", nargs="+", default=[], choices=VARIATIONS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of the varied parts")
    parser.add_argument("--lengths", type=Path, help="CSV with num_prefill_tokens, num_decode_tokens")
    parser.add_argument("--replay", action="store_true", help="take the authors' order and arrivals, of --lengths")
    parser.add_argument("--profiles", nargs="*", type=Path, default=[], help="measured profiles, of `knee`")
    args = parser.parse_args()
    if args.replay and not (args.lengths and args.part.startswith("vary")):
        parser.error("--replay is of vary-capacity and vary-ablation, and needs --lengths")
    stem = args.out / f"sarathi-{args.part}"
    match args.part:
        case "checks":
            papers.save(stem, rows := checks(), show_checks(rows))
        case "joining":
            papers.save(stem, rows := joining(), show_joining(rows))
        case "bubbles":
            papers.save(stem, rows := bubbles(args.models, args.requests), show_bubbles(rows))
        case "knee":
            papers.save(stem, rows := knee(args.profiles), show_knee(rows))
        case "ablation":
            papers.save(stem, found := ablation(), show_ablation(found))
        case "capacity":
            rows, earlier = capacity(args.models, args.systems, args.requests, args.processes, tuple(args.vary)), ""
            stem = stem.with_name("-".join([stem.name, *args.vary]))
            if args.add:
                before = json.loads(stem.with_suffix(".json").read_text())
                rows, earlier = merged(before["rows"], rows), f"{before['command']}, {before['date']}"
            papers.save(stem, rows, show_capacity(rows), earlier)
            if not args.vary:
                plot_capacity(rows, stem.with_suffix(".png"))
        case _:
            vary(args)


if __name__ == "__main__":
    main()
