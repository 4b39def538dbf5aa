"""Figures of Sarathi-Serve that show why: stalls (1), phases (3), operators (5), arithmetic intensity (6), chunks (11).

Run: python -m benchmarks.papers.sarathi_figures phases | operators | intensity | chunks
     python -m benchmarks.papers.sarathi_figures lengths [--lengths CSV]
     python -m benchmarks.papers.sarathi_figures stalls [--rate 0.25] [--rates 0.1 0.2 ...]
     python -m benchmarks.papers.sarathi_figures disaggregation [--models Yi-34B] [--requests 256] [--processes 2]

`operators` is the time of a step of Mistral-7B by operator, for one prompt and for decodes. `chunks` divides the time
of prompts in chunks by that of whole ones, by operator: of Yi-34B, next to what the authors recorded, and of Mistral-7B
as measured on an H200. `lengths` has the quantiles of Table 2, of what `workloads` draws by it, and of the authors'
file, if it is given (`sarathi` says where it is).

As in `sarathi`, Holdfast's own schedulers run on a virtual clock, over devices derived from data sheets; `phases` has
the measured profile of Mistral-7B on an H200, too. `vLLM` is the `prefill-first` scheduler.

`disaggregation` (§6) compares replicas that compute prompts and decodes together (stall-free) with replicas of which
some compute prompts alone and the others decode (SplitWise, DistServe). The paper leaves this open. A prompt's state
goes from the device to its host, over the link to the other's host, and to its device, as Holdfast moves state between
replicas; it comes before the second token. All replicas together have the same number of devices. Prefill replicas have
a budget of 2,048 tokens, as no decode waits for them. A capacity is the highest rate at which P99 TBT keeps the SLO of
Table 3, the median request waits at most 2 s, and, with `--ttft`, P99 TTFT keeps that limit, too.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from multiprocessing import get_context
from pathlib import Path
from statistics import median, pstdev
from typing import Any, NamedTuple

from benchmarks.lib import papers
from benchmarks.papers.sarathi import ARXIV, PREFILLS, SETTINGS, SHAREGPT, deployed, engine, requests
from holdfast.cluster.routing import make_router
from holdfast.lab import workloads
from holdfast.lab.metrics import Record, percentile, summary
from holdfast.lab.planning import find_capacity
from holdfast.lab.simulator.cluster import simulate_cluster
from holdfast.lab.simulator.deployment import deploy, derive
from holdfast.lab.simulator.devices import DEVICES, LINKS, Link
from holdfast.lab.simulator.run import simulate
from holdfast.lab.simulator.shapes import BYTES, MODELS
from holdfast.lab.workloads import Workload

PROMPT = 1024
"""Number of tokens of each prompt, and of each decode's context, in Figure 3."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Numbers of tokens of a step in `intensity`."""
STALL = 1.0
"""Seconds between two tokens of a stream from which `stalls` counts a stall."""
TRACED = {"vLLM": "vllm", "Sarathi-Serve": "fixed-512"}
HOST_GB = 128.0
"""Size of the host tier of each replica, through which state goes."""
REPLICAS = 4
SPLITS = (1, 2, 3)
"""Numbers of the replicas that compute prompts."""
NETWORKS = ("pcie4", "ethernet-100g", "ethernet-25g")
FREE = Link("none", inf, 0.0)
ONE_AND_128 = ("decodes: 1", "prompt of 128")
CHUNKS = (512, 1024, 2048)
CHUNKS_RECORDED = {
    2047: {512: 1.152, 1024: 1.175, 2048: 0.999},
    4095: {512: 1.189, 1024: 1.202, 2048: 1.024},
    8191: {512: 1.117, 1024: 1.109, 2048: 0.937},
    16383: {512: 0.995, 1024: 0.961, 2048: 0.805},
}
"""Time in chunks over the whole prompt's, by prompt and chunk (osdi-experiments/figure-9/chunking-overhead.csv)."""
TABLE_2 = {
    SHAREGPT: {"prompt": (1730, 5696, 2088), "output": (415, 834, 101)},
    ARXIV: {"prompt": (7059, 12985, 3638), "output": (208, 371, 265)},
}
"""Median, P90 and standard deviation."""


def phases() -> list[dict[str, Any]]:
    """Figure 3: tokens per second of prefills and of decodes by batch size."""
    models = (("mistral-7b", "a100-80gb", "derived"), ("mistral-7b-v0.3", "h200", "measured"))
    rows = []
    for model, device, origin in models:
        cost = deploy(model, device).profile.cost
        for batch in BATCHES:
            rows.append(
                {"device": device, "profile": origin, "batch": batch}
                | {"prefill": batch * PROMPT / cost.step([(PROMPT, PROMPT)] * batch)}
                | {"decode": batch / cost.step([(1, PROMPT)] * batch)}
            )
    return rows


def show_phases(rows: list[dict[str, Any]]) -> list[str]:
    """Throughput of both phases by batch size, and over a batch of one."""
    lines = ["| device | batch | prefill, tokens/s | over one | decode, tokens/s | over one |", "|---" * 6 + "|"]
    for row in rows:
        (one,) = (each for each in rows if each["device"] == row["device"] and each["batch"] == 1)
        cells = [
            f"{row[phase]:,.0f} | {row[phase] / one[phase]:.2f}" for phase in ("prefill", "decode")
        ]  # fmt: skip
        lines.append(f"| {row['device']}, {row['profile']} | {row['batch']} | {' | '.join(cells)} |")
    return [*lines, "", "The paper: batching raises decodes almost linearly, and prefills hardly."]


def by_operator(name: str, layout: dict[str, Any], segments: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Seconds of a derived step by operator: linear layers, attention, all-reduces, fixed time of steps and layers."""
    shape, device, tp = MODELS[name], DEVICES["a100-80gb"], layout.get("tp", 1)
    cost, free = deploy(shape, "a100-80gb", **layout).profile.cost, derive(shape, device, tp=tp, link=FREE)
    tokens = sum(query for query, _ in segments)
    fixed = device.step_seconds + shape.layers * device.layer_seconds
    return {
        "linear": free.linear(tokens) - fixed,
        "attention": sum(cost.attention(query, context) for query, context in segments),
        "all-reduce": cost.linear(tokens) - free.linear(tokens),
        "fixed": fixed,
    }


def operators() -> list[dict[str, Any]]:
    """Figure 5: milliseconds of one prompt, and of decodes at a context of PROMPT, by operator, for Mistral-7B."""
    rows = []
    for what, sizes in (("prompt of", (128, 256, 512, 1024, 2048, 4096)), ("decodes:", (1, 2, 4, 8, 16, 32, 64))):
        for size in sizes:
            segments = [(size, size)] if what == "prompt of" else [(1, PROMPT)] * size
            found = by_operator("mistral-7b", {}, segments)
            ms = {operator: 1e3 * seconds for operator, seconds in found.items()}
            rows.append({"what": f"{what} {size:,}", "tokens": size, "ms": ms})
    return rows


def show_operators(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each step: milliseconds by operator, and the share of the linear layers."""
    lines = ["| step | linear, ms | attention | fixed | share of the linear layers |", "|---" * 5 + "|"]
    for row in rows:
        ms = row["ms"]
        cells = [f"{ms[operator]:.2f}" for operator in ("linear", "attention", "fixed")]
        lines.append(f"| {row['what']} | {' | '.join(cells)} | {ms['linear'] / sum(ms.values()):.0%} |")
    one, many = (next(row["ms"]["linear"] for row in rows if row["what"] == what) for what in ONE_AND_128)
    told = f"The linear layers of 128 tokens take {many / one:.2f} times as long as those of one decode."
    return [*lines, "", f"{told} The paper has them nearly the same; Vidur recorded 1.37 for layers of this shape."]


def measured(segments: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Seconds of a step of Mistral-7B by operator, as measured on an H200. Fixed time is in the linear layers."""
    cost = deploy("mistral-7b-v0.3", "h200").profile.cost
    attention = sum(cost.attention(query, context) for query, context in segments)
    return {"linear": cost.linear(sum(query for query, _ in segments)), "attention": attention}


def chunks() -> list[dict[str, Any]]:
    """Figure 11: time of a prompt in chunks over that of the whole prompt, by operator: Yi-34B, and measured."""
    rows = []
    for what, step in (("Yi-34B, two A100s, derived", yi_operators), ("Mistral-7B, H200, measured", measured)):
        for prompt in PREFILLS:
            whole = step([(prompt, prompt)])
            for size in CHUNKS:
                stops = [*range(size, prompt, size), prompt]
                parts = [step([(stop - start, stop)]) for start, stop in pairwise([0, *stops])]
                found = {operator: sum(part[operator] for part in parts) for operator in whole}
                over = {operator: seconds / whole[operator] for operator, seconds in found.items()}
                over["total"] = sum(found.values()) / sum(whole.values())
                rows.append({"what": what, "prompt": prompt, "chunk": size, "over": over})
                if step is yi_operators:
                    rows[-1]["recorded"] = CHUNKS_RECORDED[prompt][size]
    return rows


def yi_operators(segments: Sequence[tuple[int, int]]) -> dict[str, float]:
    """`by_operator` of Yi-34B on two A100s."""
    return by_operator("yi-34b", {"tp": 2}, segments)


def show_chunks(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each prompt and chunk."""
    names = ("linear", "attention", "all-reduce", "total")
    lines = [f"| model | prompt | chunks of | {' | '.join(names)} | total, the authors' records |", "|---" * 8 + "|"]
    for row in rows:
        cells = [f"{row['over'][name]:.2f}" if name in row["over"] else "" for name in names]
        cells.append(f"{row['recorded']:.2f}" if "recorded" in row else "")
        lines.append(f"| {row['what']} | {row['prompt']:,} | {row['chunk']:,} | {' | '.join(cells)} |")
    told = "The paper: attention and all-reduce gain most; linear layers gain least, and next to nothing at 2,048."
    return [*lines, "", told]


def lengths(file: Path | None) -> list[dict[str, Any]]:
    """Table 2: median, P90 and standard deviation of prompts and outputs, as stated, drawn and in the authors' file."""
    rows = []
    for dataset, stated in TABLE_2.items():
        origins = {"drawn": requests(dataset, 20_000, 0)}
        if file is not None and dataset == SHAREGPT:
            with file.open(newline="") as lines:
                count = sum(1 for _ in csv.DictReader(lines))
            origins["the authors' file"] = requests(dataset, count, 0, file)
        for part in ("prompt", "output"):
            rows.append({"dataset": dataset, "of": part, "origin": "Table 2", "figures": stated[part]})
            for origin, work in origins.items():
                sizes = sorted(getattr(turn, part) for talk in work for turn in talk.turns)
                found = (median(sizes), percentile(sizes, 0.9), pstdev(sizes))
                rows.append({"dataset": dataset, "of": part, "origin": origin, "figures": found})
    return rows


def show_lengths(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each data set, part and origin."""
    lines = ["| data set | tokens of | from | median | P90 | standard deviation |", "|---" * 6 + "|"]
    for row in rows:
        cells = " | ".join(f"{figure:,.0f}" for figure in row["figures"])
        lines.append(f"| {row['dataset']} | {row['of']} | {row['origin']} | {cells} |")
    told = "Table 2 has the standard deviations of the outputs the wrong way round: the authors' own file has 266 for "
    return [*lines, "", f"{told}{SHAREGPT}, which the table gives to {ARXIV}."] if len(rows) > 8 else lines


def intensity() -> list[dict[str, Any]]:
    """Figure 6: operations for each byte that the linear layers of LLaMA2-70B read and write, by tokens of the step.

    On four A100s, each of which has a quarter of each matrix. The activations count once as input and once as output of
    each matrix.
    """
    shape, device, degree = MODELS["llama-2-70b"], DEVICES["a100-80gb"], 4
    weights = shape.layers * shape.layer_weights / degree
    wide = (shape.heads + 2 * shape.kv_heads) * shape.head_dim / degree
    inner = shape.intermediate / degree
    # Inputs and outputs of the matrices: queries, keys and values; output; gate, up and down.
    activations = (shape.hidden + wide) + (shape.heads * shape.head_dim / degree + shape.hidden)
    activations += (shape.hidden + 2 * inner) + (inner + shape.hidden)
    cost = deploy(shape, "a100-80gb", tp=degree, link="nvlink3").profile.cost
    ridge = device.flops / device.bandwidth
    rows = []
    for tokens in TOKENS:
        work = 2 * weights * tokens
        moved = BYTES * (weights + shape.layers * activations * tokens)
        seconds = cost.linear(tokens)
        rows.append(
            {"tokens": tokens, "intensity": work / moved, "ridge": ridge}
            | {"of_arithmetic": work / seconds / device.flops, "of_bandwidth": moved / seconds / device.bandwidth}
        )
    return rows


def show_intensity(rows: list[dict[str, Any]]) -> list[str]:
    """Operations a byte, and the used shares of the device, by tokens."""
    lines = ["| tokens of a step | operations a byte | of peak arithmetic | of peak bandwidth |", "|---" * 4 + "|"]
    lines += [
        f"| {row['tokens']:,} | {row['intensity']:.0f} | {row['of_arithmetic']:.0%} | {row['of_bandwidth']:.0%} |"
        for row in rows
    ]
    ridge = rows[0]["ridge"]
    return [*lines, "", f"The device's own ratio is {ridge:.0f} operations a byte: below it, memory is the bound."]


def stalls(rate: float, rates: Sequence[float], count: int) -> dict[str, Any]:
    """Figure 1: Yi-34B on two A100s, prompts of arxiv: streams at one rate, and P99 TBT over rates, by scheduler."""
    deployment, work = deployed("Yi-34B"), requests(ARXIV, count, 0)
    profile = replace(deployment.profile, token_budget=4096)

    def run(system: str, at: float) -> list[Record]:
        config = engine(system, ARXIV, profile.cache_tokens, 0.0)
        return simulate(config, profile, workloads.gamma_arrivals(work, at, 0)).records

    traced, over = [], []
    for name, system in TRACED.items():
        records = run(system, rate)
        gaps = [
            (later - earlier, earlier) for one in records for earlier, later in pairwise(one.token_times)
        ]  # fmt: skip
        longest, began = max(gaps)
        times = sorted(time for one in records for time in one.token_times)
        traced.append(
            {"system": name, "rate": rate, "longest_gap_s": longest, "began": began, "times": times}
            | {"stalls": sum(gap >= STALL for gap, _ in gaps)}
            | {"stalled": sum(any(b - a >= STALL for a, b in pairwise(one.token_times)) for one in records)}
            | {"requests": len(records), "p99_tbt_s": summary(records)["p99_itl_ms"] / 1e3}
        )
        over += [
            {"system": name, "rate": at, "p99_tbt_s": summary(run(system, at))["p99_itl_ms"] / 1e3} for at in rates
        ]
    return {"traced": traced, "over": over}


def show_stalls(found: dict[str, Any]) -> list[str]:
    """The stalls at one rate, then P99 TBT by rate."""
    lines = [
        f"| at {found['traced'][0]['rate']:g} requests/s | longest gap of a stream, s | gaps of {STALL:g} s or more | "
        "streams with one | P99 TBT, s |",
        "|---" * 5 + "|",
    ]
    lines += [
        f"| {row['system']} | {row['longest_gap_s']:.2f} | {row['stalls']} | {row['stalled']} of {row['requests']} | "
        f"{row['p99_tbt_s']:.2f} |"
        for row in found["traced"]
    ]
    rates = sorted({row["rate"] for row in found["over"]})
    lines += ["", f"| P99 TBT, s, at | {' | '.join(f'{at:g}/s' for at in rates)} |", "|---" * (1 + len(rates)) + "|"]
    for name in TRACED:
        at = {row["rate"]: row["p99_tbt_s"] for row in found["over"] if row["system"] == name}
        lines.append(f"| {name} | {' | '.join(f'{at[rate]:.2f}' for rate in rates)} |")
    return [*lines, "", "The paper shows stalls of several seconds in vLLM and none in Sarathi-Serve (Figure 1)."]


class Search(NamedTuple):
    """A search for the capacity of replicas."""

    name: str
    dataset: str
    slo: str
    system: str
    """`fixed-N` or `computed` for replicas that do both, `N prefill` for N that compute prompts alone."""
    link: str
    requests: int
    ttft: float | None

    @property
    def prefill(self) -> int:
        """Number of replicas that compute prompts alone."""
        return int(self.system.split()[0]) if self.system.endswith("prefill") else 0


def arriving(search: Search, rate: float) -> Workload:
    """The requests, at a rate for all replicas together."""
    return workloads.gamma_arrivals(requests(search.dataset, search.requests, 0), rate, 0)


def figures_at(search: Search, rate: float) -> dict[str, Any]:
    """The figures of one simulated run."""
    deployment, setting = deployed(search.name), SETTINGS[search.name]
    if search.prefill:
        config = replace(engine("fixed-2048", search.dataset, 0, 0.0), prefix_sharing=True, host_cache_gb=HOST_GB)
    else:
        config = engine(search.system, search.dataset, 0, setting.limit(search.slo))
    outcome = simulate_cluster(
        config,
        replace(deployment.profile, token_budget=4096),
        arriving(search, rate),
        make_router("least-loaded"),
        replicas=REPLICAS,
        prefill=search.prefill,
        link=LINKS[search.link],
    )
    found = summary(outcome.records)
    kinds = outcome.busy[: search.prefill], outcome.busy[search.prefill :]
    found["busy"] = [sum(busy) / len(busy) / outcome.seconds for busy in kinds if busy]
    return found


def capacity_of(search: Search) -> dict[str, Any]:
    """The capacity that a search finds, and the figures at it."""
    setting = SETTINGS[search.name]
    limit, ttft = setting.limit(search.slo) * 1000, None if search.ttft is None else search.ttft * 1000
    rate = find_capacity(
        lambda at: figures_at(search, at), limit, ttft_ms=ttft, start=REPLICAS * setting.start, tolerance=0.04
    )
    row: dict[str, Any] = {**search._asdict(), "capacity": rate}
    if rate:
        found = figures_at(search, rate)
        row |= {name: found[name] for name in ("median_ttft_ms", "p99_ttft_ms", "p99_itl_ms", "busy")}
    print(f"  {search}: {rate:.3g}", file=sys.stderr, flush=True)
    return row


def disaggregation(
    names: Iterable[str], slos: Iterable[str], count: int, ttft: float | None, processes: int
) -> list[dict[str, Any]]:
    """Capacities of replicas that do both and of replicas that do one, by data set, SLO and link."""
    searches = []
    for name in names:
        for dataset in (SHAREGPT, ARXIV):
            for slo in slos:
                together = (f"fixed-{SETTINGS[name].budget(slo)}", "computed")
                searches += [Search(name, dataset, slo, system, NETWORKS[0], count, ttft) for system in together]
                searches += [
                    Search(name, dataset, slo, f"{prefill} prefill", link, count, ttft)
                    for prefill in SPLITS
                    for link in (NETWORKS if prefill == SPLITS[0] else NETWORKS[1:2])
                ]
    with get_context("spawn").Pool(processes) as pool:
        return pool.map(capacity_of, searches, chunksize=1)


def show_disaggregation(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each search."""
    lines = [
        f"| model | data set | SLO | {REPLICAS} replicas | link | requests/s | P50, P99 TTFT, s | P99 TBT, s | busy |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        cells = [row["name"], row["dataset"], row["slo"]]
        if row["system"].endswith("prefill"):
            prefill = int(row["system"].split()[0])
            cells += [f"{prefill} compute prompts, {REPLICAS - prefill} decode", row["link"]]
        else:
            cells += [f"both, budget {row['system'].removeprefix('fixed-')}", ""]
        cells.append(f"{row['capacity']:.2f}")
        if row["capacity"]:
            cells += [
                f"{row['median_ttft_ms'] / 1e3:.2f}, {row['p99_ttft_ms'] / 1e3:.2f}", f"{row['p99_itl_ms'] / 1e3:.3f}",
                ", ".join(f"{share:.0%}" for share in row["busy"]),
            ]  # fmt: skip
        else:
            cells += ["", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def plot(part: str, found: Any, path: Path) -> None:
    """The figure, drawn as in the paper."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    if part == "phases":
        for axis, phase in ((left, "prefill"), (right, "decode")):
            for device in dict.fromkeys(row["device"] for row in found):
                of = [row for row in found if row["device"] == device]
                axis.plot([row["batch"] for row in of], [row[phase] for row in of], marker="o", label=device)
            axis.set(xscale="log", xlabel="batch", ylabel="tokens/s", title=f"{phase}, {PROMPT:,} tokens", ylim=0)
            axis.set_xticks(BATCHES, map(str, BATCHES))
        left.legend(frameon=False)
    elif part == "operators":
        for axis, begins, title in ((left, "prompt of", "one prompt"), (right, "decodes:", "decodes")):
            of = [row for row in found if row["what"].startswith(begins)]
            bottoms = [0.0] * len(of)
            for operator in ("linear", "attention", "fixed"):
                heights = [row["ms"][operator] for row in of]
                axis.bar([f"{row['tokens']:,}" for row in of], heights, bottom=bottoms, label=operator)
                bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
            axis.set(xlabel="tokens", ylabel="ms of a step", title=f"{title}, Mistral-7B")
        left.legend(frameon=False)
    elif part == "chunks":
        for axis, what in zip((left, right), dict.fromkeys(row["what"] for row in found), strict=True):
            for size in CHUNKS:
                of = [row for row in found if (row["what"], row["chunk"]) == (what, size)]
                label, prompts = f"chunks of {size:,}", [row["prompt"] for row in of]
                (line,) = axis.plot(prompts, [row["over"]["total"] for row in of], marker="o", label=label)
                if axis is left:
                    axis.plot(prompts, [row["recorded"] for row in of], ":", color=line.get_color())
            axis.axhline(1.0, color="gray", linewidth=0.8)
            axis.set(xscale="log", xlabel="tokens of the prompt", ylabel="over the whole prompt", title=what)
            axis.set_xticks([*PREFILLS], [f"{prompt:,}" for prompt in PREFILLS])
            axis.minorticks_off()
        left.set_title("Yi-34B, derived (dotted: the authors' records)")
        left.legend(frameon=False)
    elif part == "intensity":
        tokens = [row["tokens"] for row in found]
        left.plot(tokens, [row["intensity"] for row in found], marker="o")
        left.axhline(found[0]["ridge"], color="gray", linestyle="--", label="the device's own ratio")
        left.set(xscale="log", xlabel="tokens of a step", ylabel="operations a byte", title="arithmetic intensity")
        left.legend(frameon=False)
        for name, label in (("of_arithmetic", "arithmetic"), ("of_bandwidth", "bandwidth")):
            right.plot(tokens, [row[name] for row in found], marker="o", label=label)
        right.set(xscale="log", xlabel="tokens of a step", ylabel="share of the peak", title="use", ylim=0)
        right.legend(frameon=False)
    else:
        for row in found["traced"]:
            near = [time for time in row["times"] if abs(time - found["traced"][0]["began"]) < 20]
            began = found["traced"][0]["began"] - 20
            left.plot([time - began for time in near], range(len(near)), label=row["system"])
        left.set(xlabel="seconds", ylabel="tokens generated", title="around vLLM's longest stall")
        for name in TRACED:
            of = [row for row in found["over"] if row["system"] == name]
            right.plot([row["rate"] for row in of], [row["p99_tbt_s"] for row in of], marker="o", label=name)
        right.set(xlabel="requests/s", ylabel="P99 TBT, s", title="tail over load", yscale="log")
        left.legend(frameon=False)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


PARTS: dict[str, tuple[Callable[[], list[dict[str, Any]]], Callable[[list[dict[str, Any]]], list[str]]]] = {
    "phases": (phases, show_phases),
    "operators": (operators, show_operators),
    "intensity": (intensity, show_intensity),
    "chunks": (chunks, show_chunks),
}
"""The figures that follow from costs alone: what computes and what shows them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=(*PARTS, "lengths", "stalls", "disaggregation"))
    parser.add_argument("--models", nargs="+", default=["Yi-34B"], choices=SETTINGS, help="of `disaggregation`")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--rate", type=float, default=0.25, help="requests/s of the streams that `stalls` follows")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45])
    parser.add_argument("--slos", nargs="+", default=["strict"], choices=("strict", "relaxed"), help="of Table 3")
    parser.add_argument("--lengths", type=Path, help="CSV with num_prefill_tokens, num_decode_tokens, of `lengths`")
    parser.add_argument("--ttft", type=float, help="limit of P99 TTFT in seconds, of `disaggregation`")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=papers.RESULTS, help="folder for the JSON, the table and the plot")
    args = parser.parse_args()
    stem = args.out / f"sarathi-{args.part}"
    if args.part == "disaggregation":
        rows = disaggregation(args.models, args.slos, args.requests, args.ttft, args.processes)
        papers.save(stem, rows, show_disaggregation(rows))
        return
    if args.part == "stalls":
        streams = stalls(args.rate, args.rates, args.requests)
        plot(args.part, streams, stem.with_suffix(".png"))
        traced = [{name: value for name, value in row.items() if name != "times"} for row in streams["traced"]]
        papers.save(stem, streams | {"traced": traced}, show_stalls(streams))
        return
    if args.part == "lengths":
        papers.save(stem, rows := lengths(args.lengths), show_lengths(rows), given=args.lengths)
        return
    find, show = PARTS[args.part]
    plot(args.part, rows := find(), stem.with_suffix(".png"))
    papers.save(stem, rows, show(rows))


if __name__ == "__main__":
    main()
