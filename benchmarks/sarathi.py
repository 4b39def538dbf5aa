"""Sarathi-Serve's evaluation by simulation: capacity (Figures 9, 10), ablations (Table 4), joining decodes (Figure 8).

Run: python benchmarks/sarathi.py checks | capacity | ablation | joining [--requests 128] [--processes 2] [--json FILE]

Everything runs Holdfast's own schedulers over its own memory on a virtual clock, on profiles derived from data sheets
(holdfast/lab/simulator/roofline.py): none of these devices was at hand. `checks` holds the derived times against every time
that the paper's text states. The capacity is the highest Poisson rate at which P99 TBT stays within the SLO (Table 3)
and the median request waits at most 2 s. Results and plots are written to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import date
from functools import cache, partial
from math import inf
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from holdfast.core.config import EngineConfig
from holdfast.lab import workloads
from holdfast.lab.metrics import summary
from holdfast.lab.planning import find_capacity
from holdfast.lab.simulator.deployment import Deployment, deploy
from holdfast.lab.simulator.devices import DEVICES, LINKS, Link
from holdfast.lab.simulator.roofline import derive
from holdfast.lab.simulator.run import simulate
from holdfast.lab.simulator.shapes import MODELS
from holdfast.lab.workloads import DATASETS

RESULTS = Path(__file__).parent / "results"
SHAREGPT, ARXIV = "openchat_sharegpt4", "arxiv_summarization"
CLOSE = 0.02
"""The search ends when its bounds are this close to one another."""
CEILING = 4096
"""The most tokens of a computed budget, shared out among the stages: larger steps are no cheaper, and leave bubbles."""
BUDGETS = {"strict": (512, 1024, 2048), "relaxed": (1536, 2048, 4096)}
"""By SLO, the fixed budgets that are tried for the best; Sarathi-Serve's own among them."""


@dataclass(frozen=True)
class Setting:
    """A row of Tables 1 and 3."""

    model: str
    layout: dict[str, Any]
    strict: float
    relaxed: float
    """P99 TBT, seconds."""
    relaxed_budget: int = 2048


A100S = {"device": "a100-80gb"}
SETTINGS = {
    "Mistral-7B": Setting("mistral-7b", A100S, 0.1, 0.5),
    "Yi-34B": Setting("yi-34b", {**A100S, "tp": 2}, 0.2, 1.0),
    # NVLink in pairs: a ring over four devices goes over PCIe as well.
    "LLaMA2-70B": Setting(
        "llama-2-70b",
        {"device": "a40", "tp": 4, "pp": 2, "link": "nvlink-pairs", "stage_link": "pcie4-staged"},
        1.0,
        5.0,
        1536,
    ),
    "Falcon-180B": Setting(
        "falcon-180b", {**A100S, "tp": 4, "pp": 2, "link": "pcie4", "stage_link": "ethernet-100g-tcp"}, 1.0, 5.0
    ),
}
PAPER = {  # all that the text states; the bars of Figures 9 and 10 are not in it
    ("Mistral-7B", SHAREGPT, "strict", "orca"): 3.2,
    ("Yi-34B", SHAREGPT, "relaxed", "vllm"): 2.7,
}
PAPER_BEST = {"Mistral-7B": 2.6, "Yi-34B": 2.8, "Falcon-180B": 6.9}
"""The most over vLLM or Orca on any data set and SLO (§1)."""
TABLE_4 = {
    SHAREGPT: {"hybrid-only": (0.56, 1.08), "chunked-only": (1.04, 0.34), "stall-free": (0.85, 0.29)},
    ARXIV: {"hybrid-only": (4.18, 1.76), "chunked-only": (4.86, 0.38), "stall-free": (3.03, 0.35)},
}
"""P50 TTFT and P99 TBT in seconds."""


@cache
def deployed(name: str) -> Deployment:
    """The models on the paper's devices."""
    return deploy(SETTINGS[name].model, **SETTINGS[name].layout)


def engine(system: str, dataset: str, cache_tokens: int, slo: float) -> EngineConfig:
    """The engine that stands for a system of the paper; `fixed-N` is a budget of N, `computed` one from the SLO."""
    longest = DATASETS[dataset].limit + 1
    common: dict[str, Any] = {"max_model_len": longest, "max_sequences": 128, "prefix_sharing": False}
    if system == "orca":  # no paging: as many sequences as fit at the longest length
        most = max(1, min(128, cache_tokens // longest))
        return EngineConfig(**common | {"max_sequences": most}, scheduler="orca")
    if system == "vllm":
        return EngineConfig(**common, scheduler="prefill-first", token_budget=longest)
    if system == "computed":
        return EngineConfig(**common, tbt_target=slo * 1000)
    return EngineConfig(**common, token_budget=int(system.removeprefix("fixed-")))


def served(name: str, dataset: str, config: EngineConfig, rate: float, requests: int) -> dict[str, Any]:
    """The figures of one simulated run."""
    deployment = deployed(name)
    stages = len(deployment.pipeline.stages) if deployment.pipeline else 1
    profile = replace(deployment.profile, token_budget=CEILING // stages)
    workload = workloads.poisson_arrivals(workloads.sample_dataset(dataset, requests, seed=0), rate, seed=0)
    return summary(simulate(config, profile, workload, pipeline=deployment.pipeline).records)


def capacity_of(task: tuple[str, str, str, str, int, float]) -> tuple[tuple[str, str, str, str], float]:
    """The capacity of one system in one setting."""
    name, dataset, slo, system, requests, start = task
    limit = SETTINGS[name].relaxed if slo == "relaxed" else SETTINGS[name].strict
    config = engine(system, dataset, deployed(name).profile.cache_tokens, limit)
    run = partial(served, name, dataset, config, requests=requests)
    found = find_capacity(run, limit * 1000, start=start, tolerance=CLOSE)
    print(f"  {name} {dataset} {slo} {system}: {found:.3g}", file=sys.stderr, flush=True)
    return (name, dataset, slo, system), found


START = {"Mistral-7B": 1.5, "Yi-34B": 0.6, "LLaMA2-70B": 0.25, "Falcon-180B": 0.25}


def capacity(names: Iterable[str], requests: int, processes: int) -> list[dict[str, Any]]:
    """Figures 9 and 10, and the best fixed budget beside the computed one."""
    tasks = [
        (name, dataset, slo, system, requests, START[name])
        for dataset in (SHAREGPT, ARXIV)
        for name in names
        for slo in BUDGETS
        for system in ("orca", "vllm", "computed", *(f"fixed-{budget}" for budget in BUDGETS[slo]))
    ]
    with get_context("spawn").Pool(processes) as pool:
        found = dict(pool.imap_unordered(capacity_of, tasks))
    rows = []
    for name, dataset, slo in dict.fromkeys(task[:3] for task in tasks):
        at = {key[3]: capacity for key, capacity in found.items() if key[:3] == (name, dataset, slo)}
        best = max((at[f"fixed-{budget}"], budget) for budget in BUDGETS[slo])
        at["sarathi"] = at[f"fixed-{SETTINGS[name].relaxed_budget if slo == 'relaxed' else 512}"]
        rows.append(
            {
                "model": name,
                "dataset": dataset,
                "slo": slo,
                "capacity": at,
                "best_fixed": best[0],
                "best_budget": best[1],
            }
        )
    return rows


def ratio(over: float, under: float) -> float:
    """How many times; infinity over nothing."""
    return over / under if under else float("inf")


def show_capacity(rows: list[dict[str, Any]]) -> list[str]:
    """The table: queries a second, ratios, the paper's beside ours."""
    lines = [
        "| model | data set | SLO | Orca | vLLM | Sarathi | best fixed (budget) | computed | Sarathi/Orca (paper) | "
        "Sarathi/vLLM (paper) | computed/best fixed |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        at, key = row["capacity"], (row["model"], row["dataset"], row["slo"])
        paper = {system: f" ({PAPER[*key, system]})" if (*key, system) in PAPER else "" for system in ("orca", "vllm")}
        cells = [*key, *(f"{at[system]:.3g}" for system in ("orca", "vllm", "sarathi"))]
        cells += [f"{row['best_fixed']:.3g} ({row['best_budget']})", f"{at['computed']:.3g}"]
        cells += [f"{ratio(at['sarathi'], at[system]):.2f}{paper[system]}" for system in ("orca", "vllm")]
        cells.append(f"{ratio(at['computed'], row['best_fixed']):.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    for name, stated in PAPER_BEST.items():
        of = [row["capacity"] for row in rows if row["model"] == name]
        if of:
            most = max(ratio(at["sarathi"], at[system]) for at in of for system in ("orca", "vllm"))
            lines.append(f"\n{name}: at most {most:.2f} times a baseline; the paper says up to {stated}.")
    return lines


def ablation(requests: int = 128) -> list[dict[str, Any]]:
    """Table 4. The paper gives no rate: it is set, for each data set, so that our combined P50 TTFT is the paper's."""
    rows = []
    for dataset, systems in TABLE_4.items():
        longest = DATASETS[dataset].limit + 1

        def at(rate: float, scheduler: Any, dataset: str = dataset, longest: int = longest) -> dict[str, Any]:
            config = EngineConfig(
                max_model_len=longest, max_sequences=128, prefix_sharing=False, scheduler=scheduler, token_budget=1024
            )
            return served("Yi-34B", dataset, config, rate, requests)

        low, high = 0.05, 4.0
        while high / low > 1.02:
            middle = (low * high) ** 0.5
            if at(middle, "stall-free")["median_ttft_ms"] / 1000 < systems["stall-free"][0]:
                low = middle
            else:
                high = middle
        for scheduler, (ttft, tbt) in systems.items():
            figures = at(low, scheduler)
            ours = {"p50_ttft": figures["median_ttft_ms"] / 1000, "p99_tbt": figures["p99_itl_ms"] / 1000}
            rows.append(
                {
                    "dataset": dataset,
                    "scheduler": scheduler,
                    "rate": low,
                    "paper": {"p50_ttft": ttft, "p99_tbt": tbt},
                    **ours,
                }
            )
    return rows


def show_ablation(rows: list[dict[str, Any]]) -> list[str]:
    """Table 4 beside ours."""
    lines = [
        "| data set | scheduler | P50 TTFT, s (paper) | ours | P99 TBT, s (paper) | ours | off |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        paper = row["paper"]
        off = " / ".join(f"{row[key] / paper[key] - 1:+.0%}" for key in ("p50_ttft", "p99_tbt"))
        lines.append(
            f"| {row['dataset']} ({row['rate']:.2f}/s) | {row['scheduler']} "
            f"| {paper['p50_ttft']} | {row['p50_ttft']:.2f} | "
            f"{paper['p99_tbt']} | {row['p99_tbt']:.2f} | {off} |"
        )
    return lines


def joining() -> list[dict[str, Any]]:
    """Figure 8: a decode step alone, with a whole prompt, and with a chunk that fills the budget."""
    rows = []
    layouts = (("mistral-7b", {**A100S}, 256), ("llama-2-70b", {**A100S, "tp": 4, "link": "pcie4"}, 512))
    for model, layout, budget in layouts:
        cost = deploy(model, **layout).profile.cost
        for batch in (8, 16, 32, 64):
            for context in (1024, 2048, 4096):
                decodes = [(1, context)] * batch
                alone = cost.step(decodes)
                whole, chunk = (cost.step([*decodes, (size, context)]) for size in (context, budget - batch))
                rows.append(
                    {"model": model, "batch": batch, "context": context, "budget": budget, "alone": alone}
                    | {"whole": whole / alone, "chunked": chunk / alone}
                )
    return rows


def show_joining(rows: list[dict[str, Any]]) -> list[str]:
    """Times of a decode step that a prompt joins, over the step alone."""
    lines = ["| model | batch | context | decodes alone, ms | + whole prompt | + chunk |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {row['model']} | {row['batch']} | {row['context']} | {row['alone'] * 1e3:.1f} | {row['whole']:.1f}x | "
        f"{row['chunked']:.2f}x |"
        for row in rows
    ]
    worst = max(row["whole"] for row in rows)
    return [*lines, f"\nAt most {worst:.1f} times with a whole prompt; the paper says up to 28.3 (prompt not stated)."]


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
    """Steps as the authors recorded them, beside the derived ones."""
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
    """Layers and all-reduces as measured elsewhere, beside the derived ones."""
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
    """Every step time that the paper's text states or implies, beside the derived one, and parts measured by others."""
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
        {"what": "Yi-34B, step of 1,024 tokens, chunk at 8k (Table 4, P99 TBT), s", "paper": 0.29,
         "ours": yi.step([(1000, 8192)] + [(1, 2500)] * 24)},
        {"what": "Yi-34B, step of 1,024 tokens, chunk at 16k (Table 4, P99 TBT), s", "paper": 0.35,
         "ours": yi.step([(1000, 16000)] + [(1, 8000)] * 24)},
    ]  # fmt: skip
    return rows + checks_of_the_authors() + checks_of_vidur()


def show_checks(rows: list[dict[str, Any]]) -> list[str]:
    """Paper, ours, error."""
    lines = ["| what | stated | derived | error |", "|---|---|---|---|"]
    return lines + [
        f"| {row['what']} | {row['paper']:.3g} | {row['ours']:.3g} | {row['ours'] / row['paper'] - 1:+.0%} |"
        for row in rows
    ]


def plot_capacity(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars of capacity: a panel for each model and data set."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["model"] for row in rows))
    shown = {
        "orca": "Orca",
        "vllm": "vLLM",
        "sarathi": "Sarathi-Serve",
        "best": "best fixed budget",
        "computed": "computed",
    }
    colors = ("#b0b7c3", "#7f8fa9", "#4c78a8", "#72b7b2", "#e45756")
    figure, axes = plt.subplots(2, len(names), figsize=(3.6 * len(names), 6), squeeze=False, layout="constrained")
    for column, name in enumerate(names):
        for line, dataset in enumerate((SHAREGPT, ARXIV)):
            axis = axes[line][column]
            of = [row for row in rows if (row["model"], row["dataset"]) == (name, dataset)]
            axis.set_visible(bool(of))
            for index, (system, title) in enumerate(shown.items()):
                heights = [row["best_fixed"] if system == "best" else row["capacity"][system] for row in of]
                places = [at + (index - 2) * 0.16 for at in range(len(of))]
                axis.bar(places, heights, 0.15, label=title, color=colors[index])
            axis.set_xticks(range(len(of)), [f"{row['slo']} SLO" for row in of])
            axis.set_title(f"{name}, {dataset.split('_')[0]}", fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0][0].set_ylabel("capacity, requests/s")
        axes[1][0].set_ylabel("capacity, requests/s")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("checks", "capacity", "ablation", "joining"))
    parser.add_argument("--models", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON, the table and the plot")
    args = parser.parse_args()

    rows: list[dict[str, Any]]
    match args.part:
        case "checks":
            rows = checks()
            lines = show_checks(rows)
        case "capacity":
            rows = capacity(args.models, args.requests, args.processes)
            lines = show_capacity(rows)
        case "ablation":
            rows = ablation()
            lines = show_ablation(rows)
        case _:
            rows = joining()
            lines = show_joining(rows)
    print("\n".join(lines))
    today, command = date.today().isoformat(), "python benchmarks/sarathi.py " + " ".join(sys.argv[1:])
    stem = args.out / f"sarathi-{args.part}"
    stem.with_suffix(".json").write_text(json.dumps({"date": today, "command": command, "rows": rows}, indent=1) + "\n")
    stem.with_suffix(".md").write_text(f"`{command}`, {today}\n\n" + "\n".join(lines) + "\n")
    if args.part == "capacity":
        plot_capacity(rows, stem.with_suffix(".png"))


if __name__ == "__main__":
    main()
