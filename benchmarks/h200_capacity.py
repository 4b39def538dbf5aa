"""Served capacity on a GPU, really served: three policies on one engine, by data set and SLO; and what chunking costs.

Run: python benchmarks/h200_capacity.py predict --profile FILE --out DIR       # simulated, on any machine
     python benchmarks/h200_capacity.py measure --out DIR --budget SECONDS     # again until nothing is left
     python benchmarks/h200_capacity.py chunking --out DIR
     python benchmarks/h200_capacity.py show --out DIR

A Mistral-7B shape with random weights, in one process on the real clock, end-of-sequence ignored. The SLOs are those of
Sarathi-Serve's Table 3 by its rule: P99 TBT within 5 (strict) and 25 times (relaxed) the decode step of 32 sequences at
a context of 4,096 on this device, and a median wait of at most 2 s for the first step. `predict` searches each capacity
by simulation, `measure` serves what should be kept and what should not, 12% apart, and goes on from there until the
capacity lies between two rates. A probe is a Poisson process cut off after a window, whose second half counts: requests
and arrivals are the same for all policies. What it gave is written to DIR/capacity.json at once, and a later call goes
on with what is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from holdfast.bench import workloads
from holdfast.bench.capacity import find_capacity, sustained
from holdfast.bench.records import Record, percentile
from holdfast.bench.workloads import DATASETS, Workload
from holdfast.core.config import EngineConfig
from holdfast.engine.profiles import Profile
from holdfast.simulator.run import simulate

SYSTEMS = ("orca", "prefill-first", "computed")
TIMES = {"strict": 5, "relaxed": 25}
"""By SLO, times the reference decode step."""
MARGIN = 0.97
"""The target that is set, of the SLO: a target is kept by 95 of 100 steps, the SLO is on the 99th."""
MOST_SEQUENCES = 128
APART = 1.12
PROMPTS, CHUNKS = (2048, 8192, 16_256), (512, 1024, 2048)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=("predict", "measure", "chunking", "show"))
    parser.add_argument("--shape", default="mistral-7b-v0.3")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", type=Path, help="a measured profile; default: DIR/profile.json, or measured first")
    parser.add_argument("--datasets", nargs="+", default=["openchat_sharegpt4", "arxiv_summarization"])
    parser.add_argument("--slos", nargs="+", default=list(TIMES), choices=list(TIMES))
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--probes", type=int, default=4, help="the most of one setting")
    parser.add_argument("--window", type=float, default=25.0, help="seconds of a probe")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no probe is begun")
    parser.add_argument("--small", action="store_true", help="the built-in model on this CPU, a tenth of the lengths")
    args = parser.parse_args()
    args.began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    book = Book(args.out / "capacity.json")
    if "predict" in args.what:
        predict(args, book, profile_of(args))
    if {"measure", "chunking"} & set(args.what):
        from_here(args, book)
    if "show" in args.what:
        print("\n".join(table(book)))
        draw(book, args.out)


class Book:
    """What is known so far, in a file that is written at each change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.data: dict[str, Any] = {"about": {}, "predicted": {}, "probes": {}, "chunking": []}
        if path.is_file():
            self.data |= json.loads(path.read_text())

    def write(self) -> None:
        self._path.write_text(json.dumps(self.data, indent=1) + "\n")


def profile_of(args: argparse.Namespace) -> Profile | None:
    """The profile to go by, if there is one."""
    path = args.profile or args.out / "profile.json"
    return Profile.load(path) if path.is_file() else None


def engine(system: str, longest: int, cache_tokens: int, slo: float) -> EngineConfig:
    """The engine that stands for a system of the paper; `computed` is the default with nothing but a target."""
    common: dict[str, Any] = dict(max_model_len=longest, max_sequences=MOST_SEQUENCES, prefix_sharing=False)
    if system == "orca":  # no paging: as many sequences as fit at the longest length
        most = max(1, min(MOST_SEQUENCES, cache_tokens // longest))
        return EngineConfig(**common | {"max_sequences": most}, scheduler="orca")
    if system == "prefill-first":
        return EngineConfig(**common, scheduler="prefill-first")
    return EngineConfig(**common, tbt_target=slo * 1000 * MARGIN)


def slo_of(book: Book, profile: Profile, slo: str, small: bool) -> float:
    """Seconds of P99 TBT; the reference step is that of the first profile that the book has seen."""
    step = 1000 * profile.cost.step([(1, 256 if small else 4096)] * 32)
    return TIMES[slo] * float(book.data["about"].setdefault("decode_step_ms", round(step, 4))) / 1000


def longest_of(dataset: str, small: bool) -> int:
    """The longest sequence of a data set."""
    return DATASETS[dataset].limit // (16 if small else 1)


def load(dataset: str, rate: float, window: float, small: bool) -> Workload:
    """What arrives within the window."""
    drawn = workloads.drawn(dataset, 1 + round(1.5 * rate * window), seed=0)
    if small:
        drawn = [
            workloads.Conversation(
                0.0, tuple(workloads.Turn(1 + turn.prompt // 16, 1 + turn.output // 16) for turn in one.turns)
            )
            for one in drawn
        ]
    return [one for one in workloads.poisson(drawn, rate, seed=0) if one.arrival <= window]


def figures(records: list[Record], window: float) -> dict[str, float]:
    """The figures of the window's second half; who has not begun by then has waited until its end."""
    half = window / 2
    seen = [[at for at in record.token_times if at <= window] for record in records]
    gaps = sorted(1e3 * (after - before) for times in seen for before, after in pairwise(times) if after > half)
    late = [record for record in records if record.arrival > half]
    waits = sorted(
        1e3 * ((record.scheduled if times and record.scheduled is not None else window) - record.arrival)
        for record, times in zip(records, seen, strict=True)
        if record.arrival > half
    )
    ttft = sorted(
        1e3 * ((times[0] if times else window) - record.arrival)
        for record, times in zip(records, seen, strict=True)
        if record.arrival > half
    )
    return {
        "median_itl_ms": round(percentile(gaps, 0.5), 2),
        "p99_itl_ms": round(percentile(gaps, 0.99), 2),
        "max_itl_ms": round(gaps[-1], 2),
        "median_ttft_ms": round(percentile(ttft, 0.5), 1),
        "p99_ttft_ms": round(percentile(ttft, 0.99), 1),
        "median_queued_ms": round(percentile(waits, 0.5), 1),
        "output_tok_s": round(sum(at > half for times in seen for at in times) / half, 1),
        "requests": len(late),
    }


def predict(args: argparse.Namespace, book: Book, profile: Profile | None) -> None:
    """Search each capacity by simulation."""
    if profile is None:
        raise SystemExit("predict takes a measured profile: give --profile")
    for key, dataset, slo, system in settings(args):
        longest = longest_of(dataset, args.small)
        limit = slo_of(book, profile, slo, args.small)
        config = engine(system, longest, profile.cache_tokens, limit)

        def run(rate: float, config: EngineConfig = config, dataset: str = dataset) -> dict[str, float]:
            workload = load(dataset, rate, args.window, args.small)
            return figures(simulate(config, profile, workload).records, args.window)

        found = find_capacity(run, limit * 1000, start=8.0 if dataset.startswith("open") else 3.0)
        book.data["predicted"][key] = round(found, 3)
        book.write()
        print(f"{key}: {found:.3g} a second by simulation", file=sys.stderr, flush=True)


def settings(args: argparse.Namespace) -> list[tuple[str, str, str, str]]:
    """(key, data set, SLO, system) of all that is asked for."""
    return [
        (f"{dataset} {slo} {system}", dataset, slo, system)
        for slo in args.slos
        for dataset in args.datasets
        for system in args.systems
    ]


def from_here(args: argparse.Namespace, book: Book) -> None:
    """Build the engine and do what needs it."""
    from in_real_time import RealEngine, checkpoint_of

    wanted = DATASETS if "chunking" in args.what else args.datasets
    longest = max(longest_of(dataset, args.small) for dataset in wanted)
    options: dict[str, Any] = dict(
        max_model_len=longest,
        max_sequences=MOST_SEQUENCES,
        scheduler="prefill-first",
        host_cache_gb=0.0,
    )
    if args.small:
        options |= dict(device="cpu", threads=1, cache_gb=0.5)
    else:
        options |= dict(model=checkpoint_of(args.shape), load_format="random", device="cuda")
    kept = profile_of(args)
    real = RealEngine(EngineConfig(**options), profile=kept)
    if kept is None:
        real.profile.save((args.out / "profile.json").absolute())
    book.data["about"] |= dict(model=real.info.model, device=real.info.memory.device, command=" ".join(sys.argv))
    common = dict(max_model_len=longest, max_sequences=MOST_SEQUENCES, prefix_sharing=False)
    real.serve(EngineConfig(**common), workloads.fixed(4, 100, 8))
    if "measure" in args.what:
        measure(args, book, real)
    if "chunking" in args.what:
        chunking(args, book, real, longest)
    real.close()


def measure(args: argparse.Namespace, book: Book, real: Any) -> None:
    """Probe every setting around what is predicted of it."""
    for key, dataset, slo, system in settings(args):
        limit = slo_of(book, real.profile, slo, args.small)
        config = engine(system, longest_of(dataset, args.small), real.profile.cache_tokens, limit)
        probes = book.data["probes"].setdefault(key, [])
        while (rate := following(book.data["predicted"].get(key, 4.0), probes, args.probes)) is not None:
            if time.monotonic() - args.began + args.window + 3 > args.budget:
                return
            records, steps = real.serve(config, load(dataset, rate, args.window, args.small), until=args.window)
            got = figures(records, args.window) | {"rate": round(rate, 3), "slo_ms": round(1e3 * limit, 2)}
            got["longest_step_ms"] = round(1e3 * max(step.seconds for step in steps), 2)
            got["kept"] = sustained(got, limit * 1000)
            probes.append(got)
            book.write()
            print(f"{key}: {json.dumps(got)}", flush=True)


def following(predicted: float, probes: list[dict[str, Any]], most: int) -> float | None:
    """The next rate to probe; None when the capacity is between two of them, or enough was tried."""
    good = max((probe["rate"] for probe in probes if probe["kept"]), default=0.0)
    bad = min((probe["rate"] for probe in probes if not probe["kept"] and probe["rate"] > good), default=None)
    if not probes:
        return predicted * 0.96
    if (good and bad) or len(probes) >= most:
        return None
    return good * APART if good else bad / APART if bad else None


def chunking(args: argparse.Namespace, book: Book, real: Any, longest: int) -> None:
    """Sarathi-Serve's Figure 11: seconds of a prefill in chunks, over that of the whole prompt at once."""
    book.data["chunking"] = []
    common = dict(max_model_len=longest, max_sequences=MOST_SEQUENCES, prefix_sharing=False)
    for prompt in PROMPTS:
        prompt = prompt // 16 if args.small else prompt
        sizes = [size // 16 if args.small else size for size in CHUNKS]
        for chunk in (*(size for size in sizes if size < prompt), prompt):
            taken = []
            for _ in range(4):
                _, steps = real.serve(EngineConfig(**common, token_budget=chunk), workloads.fixed(1, prompt, 1))
                taken.append(sum(step.seconds for step in steps))
            seconds = sorted(taken[1:])[1]
            predicted = sum(real.profile.cost.step(step.segments) for step in steps)
            book.data["chunking"].append(
                dict(prompt=prompt, chunk=chunk, ms=round(1e3 * seconds, 2), predicted_ms=round(1e3 * predicted, 2))
            )
            print(json.dumps(book.data["chunking"][-1]), flush=True)
    book.write()


def capacities(book: Book) -> dict[str, tuple[float, float | None]]:
    """By setting, the highest rate that was kept, and the lowest above it that was not."""
    found = {}
    for key, probes in book.data["probes"].items():
        good = max((probe["rate"] for probe in probes if probe["kept"]), default=0.0)
        bad = min((probe["rate"] for probe in probes if not probe["kept"] and probe["rate"] > good), default=None)
        if probes:
            found[key] = good, bad
    return found


def between(good: float, bad: float | None) -> str:
    """A capacity in words: where it lies."""
    return f"{good:.3g} to {bad:.3g}" if bad else f"{good:.3g} or more"


def table(book: Book) -> list[str]:
    """Capacities and chunks, for the documentation."""
    found = capacities(book)
    lines = [
        "| data set | SLO | orca | prefill-first | computed | at least, over orca | over prefill-first |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in dict.fromkeys(key.rpartition(" ")[0] for key in found):
        cells = []
        for system in SYSTEMS:
            key = f"{row} {system}"
            said = "not run" if key not in found else between(*found[key])
            cells.append(f"{said}; simulated {book.data['predicted'].get(key, 0):.3g}")
        best = found.get(f"{row} computed", (0.0, None))[0]
        bounds = [found.get(f"{row} {system}", (0.0, None))[1] for system in SYSTEMS[:2]]
        ratios = [f"{best / bound:.2f}" if best and bound else "not bounded" for bound in bounds]
        dataset, slo = row.split()
        lines.append(f"| {dataset} | {slo} | {' | '.join(cells)} | {' | '.join(ratios)} |")
    if book.data["chunking"]:
        lines += ["", "| prompt | chunk | ms | over the whole | by the cost model |", "|---|---|---|---|---|"]
        whole = {row["prompt"]: row for row in book.data["chunking"] if row["chunk"] == row["prompt"]}
        for row in book.data["chunking"]:
            all_at_once = whole[row["prompt"]]
            over = row["ms"] / all_at_once["ms"], row["predicted_ms"] / all_at_once["predicted_ms"]
            lines.append(f"| {row['prompt']:,} | {row['chunk']:,} | {row['ms']} | {over[0]:.3f} | {over[1]:.3f} |")
    return lines


def draw(book: Book, out: Path) -> None:
    """Capacities by setting, and the overhead of chunking."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found, chunks = capacities(book), book.data["chunking"]
    rows = list(dict.fromkeys(key.rpartition(" ")[0] for key in found))
    names = {"orca": "Orca", "prefill-first": "prefill first (vLLM of the papers)", "computed": "stall-free, computed"}
    colours = {"orca": "#9aa5b1", "prefill-first": "#d99a3d", "computed": "#1f6feb"}
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.4), width_ratios=(1.3, 1))
    for index, system in enumerate(SYSTEMS):
        known = [found.get(f"{row} {system}", (0.0, None)) for row in rows]
        at = [good for good, _ in known]
        places = [place + 0.27 * (index - 1) for place in range(len(rows))]
        bars = axes[0].bar(places, at, 0.25, label=names[system], color=colours[system])
        axes[0].bar_label(bars, [between(*pair) if pair[0] else "" for pair in known], padding=2, fontsize=9)
    axes[0].set_xticks(range(len(rows)), [row.replace(" ", "\n") for row in rows])
    axes[0].set_ylabel("requests a second")
    axes[0].set_title("Served capacity: highest rate kept, to lowest that was not", loc="left")
    axes[0].legend(frameon=False)
    sizes = sorted({row["chunk"] for row in chunks if row["chunk"] < row["prompt"]})
    for index, prompt in enumerate(dict.fromkeys(row["prompt"] for row in chunks)):
        of = {row["chunk"]: row["ms"] for row in chunks if row["prompt"] == prompt}
        over = [100 * (of[size] / of[prompt] - 1) if size in of and size < prompt else 0.0 for size in sizes]
        places = [place + 0.27 * (index - 1) for place in range(len(sizes))]
        bars = axes[1].bar(places, over, 0.25, label=f"prompt of {prompt:,}")
        axes[1].bar_label(bars, [f"{value:.1f}%" if value else "" for value in over], padding=2, fontsize=9)
    axes[1].set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
    axes[1].set_xlabel("tokens of a chunk")
    axes[1].set_ylabel("more time than the whole prompt at once, %")
    axes[1].set_title("What chunking costs", loc="left")
    axes[1].legend(frameon=False, loc="upper right")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.15)
    figure.tight_layout()
    figure.savefig(out / "capacity.png", dpi=150)


if __name__ == "__main__":
    main()
