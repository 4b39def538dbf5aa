r"""Served capacity on a GPU: three policies on one engine, by data set and SLO; and what chunking costs.

Run: python -m benchmarks.engine.h200_capacity predict --profile FILE --out DIR       # simulated, on any machine
     python -m benchmarks.engine.h200_capacity measure --out DIR --budget SECONDS     # again until nothing is left
     python -m benchmarks.engine.h200_capacity predict measure --systems orca --base FILE --again \
         --profile FILE --out DIR                                                     # only Orca's rows, once more
     python -m benchmarks.engine.h200_capacity measure --shape llama-2-70b --tp 2 --pp 2 --slos strict \
         --orca-tokens 16384 --at openchat_sharegpt4 strict computed 4 --out DIR
     python -m benchmarks.engine.h200_capacity chunking --out DIR
     python -m benchmarks.engine.h200_capacity show --profile FILE --out DIR          # tables and DIR/capacity.png

A Mistral-7B shape with random weights serves in one process on the real clock; end-of-sequence is ignored. The SLOs
follow the rule of Sarathi-Serve's Table 3: P99 TBT within 5 (strict) and 25 times (relaxed) the decode step of 32
sequences at a context of 4,096 on this device, and a median wait of at most 2 s for the first step. `predict` searches
each capacity by simulation. `measure` serves 12% less and 12% more, one probe of each setting in turn, and goes on
until the capacity lies between two rates that are near one another. A probe is a Poisson process cut off after a window
whose second half counts, with the same requests and arrivals for all policies. Orca and prefill-first know no SLO:
their probes count under both. Each probe is written to DIR/capacity.json at once; a later call continues there. `show`
simulates every served probe and prints both figures. `predict --window SECONDS --seed NUMBER` shows the part of a
capacity that comes from the window and the arrivals.

Orca's steps hold any number of whole prompts, up to ORCA_TOKENS tokens. The widest step of each probe is recorded,
which shows whether the bound was reached.

`--tp` and `--pp` serve a larger shape on several GPUs. Such an engine starts with an estimated profile, which gives
the SLOs. Without a profile, `predict` derives one of that layout from data sheets (`--device`); the SLOs of a derived
profile hold until the engine has its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from holdfast.engine.profiles import CostProfile
from holdfast.lab import workloads
from holdfast.lab.metrics import Record, percentile
from holdfast.lab.planning import find_capacity, sustained
from holdfast.lab.simulator.deployment import Pipeline, deploy
from holdfast.lab.simulator.devices import look_up
from holdfast.lab.simulator.run import simulate
from holdfast.lab.simulator.shapes import MODELS, ModelShape
from holdfast.lab.workloads import DATASETS, Workload
from holdfast.lm.config import EngineConfig

SYSTEMS = ("orca", "prefill-first", "computed")
TIMES = {"strict": 5, "relaxed": 25}
"""SLO divided by the reference decode step."""
MARGIN = 0.97
"""Target divided by the SLO: the SLO holds for 99 of 100 gaps, and nearly all steps keep a target."""
MOST_SEQUENCES = 128
ORCA_TOKENS = 32_768
"""Largest number of tokens in one of Orca's steps. The paper's bound is the longest length times the batch, whose
activations do not fit next to the cache. By simulation sharegpt's capacities are the same with 16,384 to 65,536.
"""
BELOW, ABOVE = 0.96, 1.075
"""The first two rates divided by the predicted capacity. A search by simulation ends up to 5% below the capacity.

A prediction for a derived device may be further off: `--first` takes wider ones.
"""
APART, NEAR = 1.12, 1.3
"""Factor to the next rate while all or none were kept, and factor between the bounds that ends the search."""
WINDOWS = {"openchat_sharegpt4": 20.0, "arxiv_summarization": 35.0}
"""Seconds of a probe. A rate above the capacity shows in a queue that grows, so a shorter window accepts a higher rate.
arxiv has 1 to 4 requests a second, so 10 s would hold too few.
"""
FEWEST = 30
"""Fewest requests that a probe is expected to hold. A low rate takes a longer window."""
SEEDS = {"openchat_sharegpt4": 0, "arxiv_summarization": 8}
"""Seeds of lengths and arrivals. A short window may hold far more or fewer requests than its rate says: with seed 0,
arxiv has 0.5 to 1.3 times the expected prompt tokens at 1 to 4.5 requests/s. Among the first ten seeds, 8 comes nearest
(0.8 to 1.2).
"""
PROMPTS, CHUNKS = (2048, 8192, 16_256), (512, 1024, 2048)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=("predict", "measure", "chunking", "show"))
    parser.add_argument("--shape", default="mistral-7b-v0.3")
    parser.add_argument("--tp", type=int, default=1, help="devices that share each layer")
    parser.add_argument("--pp", type=int, default=1, help="stages that share the layers")
    parser.add_argument("--device", default="h200", help="device of a derived profile")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--base", type=Path, help="a capacity.json to start from, if DIR has none")
    parser.add_argument("--again", action="store_true", help="drop from --base what it has of --systems and --datasets")
    parser.add_argument("--profile", type=Path, help="a measured profile; default: DIR/profile.json, or measured first")
    parser.add_argument("--datasets", nargs="+", default=["openchat_sharegpt4", "arxiv_summarization"])
    parser.add_argument("--slos", nargs="+", default=list(TIMES), choices=list(TIMES))
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--probes", type=int, default=4, help="most probes of one setting")
    parser.add_argument(
        "--at",
        nargs=4,
        action="append",
        metavar=("DATASET", "SLO", "SYSTEM", "RATE"),
        help="make this probe in place of those that would follow",
    )
    parser.add_argument("--first", nargs=2, type=float, default=[BELOW, ABOVE], help="first rates over the predicted")
    parser.add_argument("--orca-tokens", type=int, default=ORCA_TOKENS, help="largest number of tokens of Orca's steps")
    parser.add_argument("--window", type=float, help="for predict: seconds of a probe")
    parser.add_argument("--seed", type=int, help="for predict: of lengths and arrivals")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no probe is begun")
    parser.add_argument("--small", action="store_true", help="the built-in model on this CPU, a 16th of the lengths")
    args = parser.parse_args()
    if (args.window, args.seed) != (None, None) and args.what != ["predict"]:
        parser.error("--window and --seed are for predict alone: served probes are to compare with one another")
    if args.tp < 1 or args.pp < 1:
        parser.error(f"--tp is {args.tp} and --pp {args.pp}; both are at least 1")
    if not 0 < args.first[0] < args.first[1]:
        parser.error(f"--first is {args.first[0]:g} and {args.first[1]:g}; give the lower rate first, above 0")
    args.began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    book = Book(args.out / "capacity.json", args.base)
    if args.again:
        book.forget(args.datasets, args.systems)
    if "predict" in args.what:
        predict(args, book, profile_of(args) or derived(args))
    if {"measure", "chunking"} & set(args.what):
        from_here(args, book)
    if "show" in args.what:
        if (profile := profile_of(args)) is not None:
            simulate_probes(args, book, profile)
        print("\n".join(table(book)))
        draw(book, args.out)


class Book:
    """Results so far, in a file that is written at each change."""

    def __init__(self, path: Path, base: Path | None = None) -> None:
        """Continue from the file at `path`, or else from `base`."""
        self._path = path
        self.data: dict[str, Any] = {"about": {}, "predicted": {}, "probes": {}, "chunking": []}
        if path.is_file() or base is not None:
            self.data |= json.loads((path if path.is_file() else base).read_text())  # type: ignore[union-attr]

    def forget(self, datasets: Collection[str], systems: Collection[str]) -> None:
        """Drop probes and predictions of these systems on these data sets; the SLOs stay."""
        for kept in (self.data["predicted"], self.data["probes"]):
            for key in list(kept):
                dataset, _, system = key.split()
                if dataset in datasets and system in systems:
                    del kept[key]

    def write(self) -> None:
        self._path.write_text(json.dumps(self.data, indent=1) + "\n")


def profile_of(args: argparse.Namespace) -> CostProfile | None:
    """The measured or estimated profile to use, if there is one. Raises ValueError if `--profile` names none."""
    path = args.profile or args.out / "profile.json"
    return CostProfile.load(path) if args.profile or path.is_file() else None


def shape_of(args: argparse.Namespace) -> ModelShape:
    """The shape, with positions for the longest sequence of any data set."""
    shape = look_up("model shape", MODELS, args.shape)
    return replace(shape, max_model_len=max(shape.max_model_len, *(each.limit for each in DATASETS.values())))


def derived(args: argparse.Namespace) -> CostProfile | None:
    """The profile of several devices, derived from data sheets; None for one device, whose profile is measured."""
    if args.tp * args.pp == 1:
        return None
    return deploy(shape_of(args), args.device, tp=args.tp, pp=args.pp).profile


def every_run(longest: int, tp: int, pp: int) -> dict[str, Any]:
    """Options that the configurations of all runs share."""
    sizes: dict[str, Any] = dict(max_model_len=longest, max_sequences=MOST_SEQUENCES, tp=tp, pp=pp)
    return sizes | dict(prefix_sharing=False, host_cache_gb=0.0)


def engine(system: str, longest: int, cache_tokens: int, slo: float, *, orca_tokens: int = ORCA_TOKENS, tp: int = 1,
           pp: int = 1) -> EngineConfig:  # fmt: skip
    """The configuration for a system of the paper; `computed` sets only a target. `slo` is in milliseconds."""
    common = every_run(longest, tp, pp)
    if system == "orca":  # without paging, as many sequences as fit at the longest length
        most = max(1, min(MOST_SEQUENCES, cache_tokens // longest))
        budget = min(longest * most, orca_tokens)
        return EngineConfig(**common | {"max_sequences": most}, scheduler="orca", token_budget=budget)
    if system == "prefill-first":
        return EngineConfig(**common, scheduler="prefill-first")
    return EngineConfig(**common, tbt_target=slo * MARGIN)


def refer(book: Book, profile: CostProfile, small: bool, *, of_device: bool = True) -> None:
    """Set the reference step of the SLOs from the first profile used; one of the device replaces a derived one."""
    about = book.data["about"]
    if "decode_step_ms" in about and not (of_device and about.get("decode_step_derived")):
        return
    about["decode_step_ms"] = round(1000 * profile.cost.step([(1, 256 if small else 4096)] * 32), 4)
    about.pop("decode_step_derived", None)
    if not of_device:
        about["decode_step_derived"] = True


def slo_of(book: Book, slo: str) -> float:
    """The limit of P99 TBT, in milliseconds."""
    return TIMES[slo] * float(book.data["about"]["decode_step_ms"])


def longest_of(dataset: str, small: bool) -> int:
    """Length of the longest sequence of a data set."""
    return DATASETS[dataset].limit // (16 if small else 1)


def window_of(dataset: str, rate: float, small: bool) -> float:
    """Seconds of a probe. A probe must be longer than 8 s, or no median wait could reach 2 s in its second half."""
    return 12.0 if small else max(WINDOWS[dataset], round(FEWEST / rate, 1))


def load(dataset: str, rate: float, window: float, small: bool, seed: int | None = None) -> Workload:
    """Requests that arrive within the window."""
    seed = SEEDS[dataset] if seed is None else seed
    drawn = workloads.sample_dataset(dataset, 20 + round(2 * rate * window), seed)
    if small:
        drawn = [
            workloads.Conversation(
                0.0, tuple(workloads.Turn(max(1, turn.prompt // 16), max(1, turn.output // 16)) for turn in one.turns)
            )
            for one in drawn
        ]
    return [one for one in workloads.gamma_arrivals(drawn, rate, seed) if one.arrival <= window]


def figures(records: list[Record], window: float) -> dict[str, float]:
    """The figures of the window's second half. A request that has not begun by its end has waited until then.

    Raises ValueError if no request or no gap between tokens falls into it.
    """
    half = window / 2
    seen = [[at for at in record.token_times if at <= window] for record in records]
    gaps = sorted(1e3 * (after - before) for times in seen for before, after in pairwise(times) if after > half)
    late = [record for record in records if record.arrival > half]
    if not (gaps and late):
        raise ValueError(
            f"{len(late)} requests and {len(gaps)} gaps in the second half of {window:g} s: nothing to judge"
        )
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


def predict(args: argparse.Namespace, book: Book, profile: CostProfile | None) -> None:
    """Search each capacity by simulation."""
    if profile is None:
        raise SystemExit("predict takes a measured profile: give --profile")
    refer(book, profile, args.small, of_device=profile_of(args) is not None)
    into = book.data["predicted"]
    if (args.window, args.seed) != (None, None):
        other = [f"{name} {value:g}" for name in ("window", "seed") if (value := getattr(args, name)) is not None]
        into = book.data.setdefault("predicted_otherwise", {}).setdefault(", ".join(other), {})
    for key in settings(args):
        start = (8.0 if key.startswith("open") else 3.0) if profile.tp * profile.pp == 1 else 1.0  # of larger models
        run = partial(simulated, args, book, profile, key, window=args.window, seed=args.seed)
        into[key] = round(find_capacity(run, slo_of(book, key.split()[1]), start=start), 3)
        book.write()
        print(f"{key}: {into[key]:.3g} a second by simulation", file=sys.stderr, flush=True)


def simulated(
    args: argparse.Namespace,
    book: Book,
    profile: CostProfile,
    key: str,
    rate: float,
    *,
    window: float | None = None,
    seed: int | None = None,
) -> dict[str, float]:
    """The figures of a probe by simulation, with the window and seed of served probes unless others are given."""
    dataset, slo, system = key.split()
    window = window or window_of(dataset, rate, args.small)
    sizes: dict[str, Any] = dict(orca_tokens=args.orca_tokens, tp=profile.tp, pp=profile.pp)
    config = engine(system, longest_of(dataset, args.small), profile.cache_tokens, slo_of(book, slo), **sizes)
    workload, pipeline = load(dataset, rate, window, args.small, seed), Pipeline.measured(profile)
    return figures(simulate(config, profile, workload, pipeline=pipeline).records, window)


def simulate_probes(args: argparse.Namespace, book: Book, profile: CostProfile) -> None:
    """Add simulated figures to each probe."""
    for key, probes in book.data["probes"].items():
        for probe in probes:
            probe["simulated"] = simulated(args, book, profile, key, probe["rate"])
    book.write()


def settings(args: argparse.Namespace) -> list[str]:
    """The chosen settings, each as "DATASET SLO SYSTEM"."""
    return [f"{dataset} {slo} {system}" for slo in args.slos for dataset in args.datasets for system in args.systems]


def from_here(args: argparse.Namespace, book: Book) -> None:
    """Build the engine, then measure and chunk."""
    from benchmarks.lib.in_real_time import RealEngine, checkpoint_of
    from benchmarks.lib.invocation import command, provenance

    wanted = DATASETS if "chunking" in args.what else args.datasets
    longest = max(longest_of(dataset, args.small) for dataset in wanted)
    many = args.tp * args.pp > 1
    options: dict[str, Any] = dict(max_model_len=longest, max_sequences=MOST_SEQUENCES, tp=args.tp, pp=args.pp)
    # An engine with a host tier estimates its profile. Measuring one of several devices takes minutes.
    options |= dict(host_cache_gb=(0.1 if args.small else 1.0) if many else 0.0)
    options |= dict(scheduler="prefill-first")  # steps hold the longest prompt and all decodes
    if "measure" in args.what and "orca" in args.systems:
        options |= dict(token_budget=max(args.orca_tokens // (16 if args.small else 1), longest))
    if args.small:
        options |= dict(device="cpu", threads=args.tp * args.pp, cache_gb=0.5)
    else:
        options |= dict(model=checkpoint_of(shape_of(args)), load_format="random", device="cuda")
    kept = profile_of(args)
    real = RealEngine(EngineConfig(**options), profile=kept, measure=not many)
    if kept is None:
        real.profile.save((args.out / "profile.json").absolute())
    refer(book, real.profile, args.small)
    book.data["about"] |= dict(model=real.info.model, device=real.info.memory.device, tp=args.tp, pp=args.pp)
    book.data["about"].setdefault("commands", []).append(command())
    book.write()
    print(
        json.dumps(provenance() | dict(options=options, started_s=round(time.monotonic() - args.began, 1))), flush=True
    )
    real.serve(EngineConfig(**every_run(longest, args.tp, args.pp)), workloads.fixed(4, 100, 8))
    if "measure" in args.what:
        measure(args, book, real)
    if "chunking" in args.what:
        chunking(args, book, real, longest)
    real.close()


def measure(args: argparse.Namespace, book: Book, real: Any) -> None:
    """Make the probes of `--at` whose answer is open, or else probe every setting around its predicted capacity."""
    if args.at:
        for *setting, named in args.at:
            key, rate = " ".join(setting), float(named)
            if open_between(rate, bracket(book, key)) and not probe(args, book, real, key, rate):
                return
        return
    for made in range(args.probes):
        for key in settings(args):
            if len(book.data["probes"].get(key, ())) > made:
                continue
            rate = following(book.data["predicted"].get(key, 4.0), bracket(book, key), args.first)
            if rate is not None and not probe(args, book, real, key, rate):
                return


def probe(args: argparse.Namespace, book: Book, real: Any, key: str, rate: float) -> bool:
    """Serve a setting at a rate. Returns False, without a probe, if too little time is left."""
    dataset, slo, system = key.split()
    limit, window = slo_of(book, slo), window_of(dataset, rate, args.small)
    if (left := args.budget - (time.monotonic() - args.began)) < window + 3:
        told = f"{key} at {rate:g}/s is not begun: it takes {window + 3:g} s, and {left:.0f} of the budget are left"
        print(told, file=sys.stderr, flush=True)
        return False
    sizes: dict[str, Any] = dict(orca_tokens=args.orca_tokens, tp=args.tp, pp=args.pp)
    config = engine(system, longest_of(dataset, args.small), real.profile.cache_tokens, limit, **sizes)
    records, steps = real.serve(config, load(dataset, rate, window, args.small), until=window)
    got: dict[str, Any] = dict(rate=rate, slo_ms=round(limit, 2), window=window) | figures(records, window)
    got["longest_step_ms"] = round(1e3 * max(step.seconds for step in steps), 2)
    got["widest_step"] = max(sum(query for query, _ in step.segments) for step in steps)
    got["kept"] = sustained(got, limit)
    book.data["probes"].setdefault(key, []).append(got)
    book.write()
    print(f"{key}: {json.dumps(got)}", flush=True)
    return True


def bracket(book: Book, key: str) -> tuple[float, float | None]:
    """The highest kept rate of a setting (0.0 for none), and the lowest rate above it that was not kept.

    A rate probed several times counts as kept if every probe was.
    """
    dataset, slo, system = key.split()
    under = (slo,) if system == "computed" else TIMES
    probes = [probe for other in under for probe in book.data["probes"].get(f"{dataset} {other} {system}", ())]
    kept: dict[float, bool] = {}
    for probe in probes:
        kept[probe["rate"]] = kept.get(probe["rate"], True) and sustained(probe, slo_of(book, slo))
    good = max((rate for rate in kept if kept[rate]), default=0.0)
    return good, min((rate for rate in kept if rate > good), default=None)


def open_between(rate: float, known: tuple[float, float | None]) -> bool:
    """Whether a probe at this rate may narrow the `known` bounds. A bound itself may be probed again."""
    good, bad = known
    return good <= rate and (bad is None or rate <= bad)


def following(
    predicted: float, known: tuple[float, float | None], first: Sequence[float] = (BELOW, ABOVE)
) -> float | None:
    """The next rate to probe, to three decimals, between the `known` bounds; None if they are near enough.

    The `first` two rates are these shares of the predicted one.
    """
    good, bad = known
    if good and bad and bad <= NEAR * good:
        return None
    for rate in (round(predicted * share, 3) for share in first):
        if good < rate and (bad is None or rate < bad):
            return rate
    if bad is None:
        return round(good * APART, 3)
    return round((good * bad) ** 0.5 if good else bad / APART, 3)


def chunking(args: argparse.Namespace, book: Book, real: Any, longest: int) -> None:
    """Sarathi-Serve's Figure 11: time of a prefill in chunks over that of the whole prompt at once."""
    book.data["chunking"] = []
    common = every_run(longest, args.tp, args.pp)
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
    """The bounds of each setting that has probes."""
    keys = (f"{row} {slo} {system}" for row in WINDOWS for slo in TIMES for system in SYSTEMS)
    found = {key: bracket(book, key) for key in keys}
    return {key: known for key, known in found.items() if known != (0.0, None)}


def between(good: float, bad: float | None) -> str:
    """Two bounds in words."""
    if not good:
        return f"under {bad:.3g}"
    return f"{good:.3g} to {bad:.3g}" if bad else f"{good:.3g} or more"


def gain(over: tuple[float, float | None], base: tuple[float, float | None]) -> str:
    """Bounds of the ratio to `base`, in words."""
    least = over[0] / base[1] if base[1] else 0.0
    most = over[1] / base[0] if over[1] and base[0] else None
    return between(least, most) if least or most else "not bounded"


def table(book: Book) -> list[str]:
    """Capacities, probes and chunks as tables, with simulated figures in parentheses."""
    found = capacities(book)
    lines = [
        "| data set | SLO | orca | prefill-first | computed | over orca | over prefill-first |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in dict.fromkeys(key.rpartition(" ")[0] for key in found):
        known = [found.get(f"{row} {system}") for system in SYSTEMS]
        told = [book.data["predicted"].get(f"{row} {system}") for system in SYSTEMS]
        cells = [
            (between(*pair) if pair else "not run") + (f" ({rate:.3g})" if rate else "")
            for pair, rate in zip(known, told, strict=True)
        ]
        *bases, best = known
        cells += [gain(best, base) if best and base else "" for base in bases]
        lines.append(f"| {' | '.join([*row.split(), *cells])} |")
    lines += [
        "",
        "| data set, SLO, policy | window, s | requests/s | TBT p99, ms | median wait, ms | output tok/s | kept |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, probes in book.data["probes"].items():
        for probe in probes:
            told = probe.get("simulated", {})
            shown = [
                f"{probe[name]:,.{places}f}" + (f" ({told[name]:,.{places}f})" if told else "")
                for name, places in (("p99_itl_ms", 1), ("median_queued_ms", 0), ("output_tok_s", 0))
            ]
            kept = "yes" if probe["kept"] else "no"
            lines.append(f"| {key} | {probe['window']:g} | {probe['rate']:.2f} | {' | '.join(shown)} | {kept} |")
    if book.data["chunking"]:
        lines += ["", "| prompt | chunk | ms | over the whole | by the cost model |", "|---|---|---|---|---|"]
        whole = {row["prompt"]: row for row in book.data["chunking"] if row["chunk"] == row["prompt"]}
        for row in book.data["chunking"]:
            all_at_once = whole[row["prompt"]]
            over = row["ms"] / all_at_once["ms"], row["predicted_ms"] / all_at_once["predicted_ms"]
            lines.append(f"| {row['prompt']:,} | {row['chunk']:,} | {row['ms']} | {over[0]:.3f} | {over[1]:.3f} |")
    return lines


def draw(book: Book, out: Path) -> None:
    """Plot the bounds of each capacity, and the overhead of chunking if it was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = len({key.rpartition(" ")[0] for key in capacities(book)})
    panels, height = (2, 3) if book.data["chunking"] else (1, 2)
    size = (6.5 * panels + 1.5 * (panels == 1), 1.6 + 1.05 * max(height, rows))
    figure, axes = pyplot.subplots(1, panels, figsize=size, width_ratios=(1.3, 1)[:panels], squeeze=False)
    draw_capacities(axes[0, 0], book)
    if book.data["chunking"]:
        draw_chunking(axes[0, 1], book.data["chunking"])
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out / "capacity.png", dpi=150)


def draw_capacities(axis: Any, book: Book) -> None:
    """Bars from the highest rate kept to the lowest that was not, and the predictions."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    found, predicted = capacities(book), book.data["predicted"]
    rows = list(dict.fromkeys(key.rpartition(" ")[0] for key in found))
    names = {"orca": "Orca", "prefill-first": "prefill first (vLLM of the papers)", "computed": "stall-free, computed"}
    colours = {"orca": "#7b8794", "prefill-first": "#d99a3d", "computed": "#1f6feb"}
    probed = sorted({probe["window"] for probes in book.data["probes"].values() for probe in probes})
    windows = " and ".join(f"{window:g}" for window in dict.fromkeys((probed[0], probed[-1])))
    between_them = "of" if len(probed) <= 2 else "between"
    simulated_mark: dict[str, Any] = dict(marker="|", markersize=13, markeredgewidth=1.6, color="black")
    right = 1.25 * max(bad or good for good, bad in found.values())
    for key, (good, bad) in found.items():
        row, _, system = key.rpartition(" ")
        at, colour, told = rows.index(row) + 0.27 * (SYSTEMS.index(system) - 1), colours[system], predicted.get(key, 0)
        axis.hlines(at, 0, good, color=colour, linewidth=1.2, alpha=0.5)
        if bad:
            axis.barh(at, bad - good, 0.17, good, color=colour)
        else:
            axis.plot(good, at, marker=">", markersize=8, color=colour)
        axis.text(max(bad or good, told) + 0.02 * right, at, between(good, bad), va="center", fontsize=9)
        if told:
            axis.plot(told, at, **simulated_mark)
    axis.set_yticks(range(len(rows)), [row.replace(" ", "\n") for row in rows])
    axis.set(xlim=(0, right), ylim=(len(rows) - 0.5, -0.5), xlabel=f"requests/s, in windows {between_them} {windows} s")
    axis.set_title("Capacity: from the highest rate kept to the lowest that was not", loc="left", fontsize=11)
    handles = [Patch(color=colours[system], label=name) for system, name in names.items()]
    handles.append(Line2D([], [], linestyle="", label="simulated", **simulated_mark))
    below = -0.75 / (axis.figure.get_size_inches()[1] - 1.2)
    axis.legend(handles=handles, frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, below), ncols=4)


def draw_chunking(axis: Any, chunks: Sequence[dict[str, Any]]) -> None:
    """Bars of a prompt's time in chunks over the whole prompt's, by chunk size."""
    sizes = sorted({row["chunk"] for row in chunks if row["chunk"] < row["prompt"]})
    for index, prompt in enumerate(dict.fromkeys(row["prompt"] for row in chunks)):
        of = {row["chunk"]: row["ms"] for row in chunks if row["prompt"] == prompt}
        over = [100 * (of[size] / of[prompt] - 1) if size in of and size < prompt else 0.0 for size in sizes]
        places = [place + 0.27 * (index - 1) for place in range(len(sizes))]
        bars = axis.bar(places, over, 0.25, label=f"prompt of {prompt:,}")
        axis.bar_label(bars, [f"{value:.1f}%" if value else "" for value in over], padding=2, fontsize=9)
    axis.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
    axis.set_xlabel("tokens of a chunk")
    axis.set_ylabel("more time than the whole prompt at once, %")
    axis.set_title("What chunking costs", loc="left", fontsize=11)
    axis.legend(frameon=False, loc="upper right")
    axis.margins(y=0.15)


if __name__ == "__main__":
    main()
