"""BatchMaker's Figures 2.5 to 2.15 by simulation: the planner that serves, over the paper's V100 cell times.

Run: python -m benchmarks.papers.cells_papers measure --only lstm  # some figures; again for the others
     python -m benchmarks.papers.cells_papers show                 # table and plot from all runs so far

Device times and what they rest on are in `benchmarks/lib/cells/simulation.py`. Scheduling and gather cost the cellular
planner 34 us a task and 0.243 us for each State input of each node. Two of the paper's figures fix both: a step of 64
takes 250 us with them and 185 without, and 20K sentences a second with a mean length of 24 are 1,067 us for each step
of 512, of which 784 are the cell's. Padding and the ideal run fixed graphs: bare cells. DyNet gathers too, and builds
and merges graphs on the host: 2.8 us a node, as DyNet 2.2 takes here (0.22 ms for a tree of 20 leaves). Fold's host
time is not known and left out.

A run lasts --seconds of arrivals, four times as long with padding; its first 30% do not count. The peak is the highest
rate, within 4%, where in the second half the p90 is at most 500 ms and at least 95% of the arrivals are answered.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np

from benchmarks.lib.cells import models
from benchmarks.lib.cells.baselines import Merging, Padding
from benchmarks.lib.cells.simulation import V100, Device, ManyWorkers, Ran, highest, simulate
from benchmarks.lib.cells.workloads import complete_tree, poisson_arrivals, random_trees, sentence_lengths
from benchmarks.lib.papers import RESULTS, origin
from holdfast.cells.cell import Cell
from holdfast.cells.graph import CellGraph
from holdfast.cells.plan import CellRequest
from holdfast.cells.planner import CellPlanner
from holdfast.core.cell_cost import CellCost
from holdfast.core.version import __version__

STEM = RESULTS / "cells-simulated"
CELLULAR = replace(V100, task_seconds=34e-6, gather_seconds=0.243e-6, move_seconds=0.33e-6, _cache={})
"""Costs of the cellular planner. A row's h and c are 8 KiB; NVLink copies them at 25 GB/s."""
UNIT = CellCost((64,), (1.0,))
"""One unit of time at any batch size up to 64."""
FOLD = replace(V100, gather_seconds=0.243e-6, _cache={})
DYNET = replace(FOLD, node_seconds=2.8e-6, _cache={})
LIMIT = 0.5
"""Largest p90 of a sustained rate, in seconds."""
OVERLOAD = 25_000
"""Requests per second that no padding serves."""
BACKLOG = 100_000
"""Number of sentences that wait from the start, where buckets are to be full."""
RARE_ABOVE = 100
"""Length above which sentences are rare: 99% are below it (section 2.7.1)."""
FILLING = 0.3
"""Share of a run's requests that does not count."""


def up_to(most: int) -> tuple[int, ...]:
    """Supported batch sizes: powers of two to 64, every 32 above."""
    return tuple(size for size in (1, 2, 4, 8, 16, 32, 64, *range(96, most + 1, 32)) if size <= most)


def no_run(weights: Any, **inputs: Any) -> Any:
    raise RuntimeError("a cell that only stands for its time does not run")


@dataclass(frozen=True)
class System:
    """One line of a figure."""

    name: str
    cells: tuple[Cell, ...]
    device: Device
    plan: Callable[[tuple[Cell, ...], int], ManyWorkers]
    """Function that makes the planner from cells and the number of workers."""
    unfold: Callable[[Any], CellGraph]
    """Function that unfolds a sentence's length, or a tree."""
    patience: int = 1
    """Factor by which its runs last longer: a cycle over all buckets takes up to a second."""


Unfold = Callable[[Any], CellGraph]
Plan = Callable[[tuple[Cell, ...], int], ManyWorkers]


def cellular(cells: tuple[Cell, ...], unfold: Unfold, name: str, max_tasks: int = 5) -> System:
    def plan(cells: tuple[Cell, ...], workers: int) -> ManyWorkers:
        return CellPlanner(cells, workers=workers, max_tasks=max_tasks, capacity=65536)

    return System(name, cells, CELLULAR, plan, unfold)


def padding(width: int, most: int) -> Plan:
    return lambda cells, workers: Padding(cells, width=width, most=most, workers=workers)


def merging(by: Literal["depth", "agenda"], most: int) -> Plan:
    return lambda cells, workers: Merging(cells, by=by, most=most, workers=workers)


def lstm_systems(most: int = 512, widths: Sequence[int] = (10,), max_tasks: int = 5) -> list[System]:
    cell = models.lstm_cell(1, no_run, sizes=up_to(most))

    @cache
    def unfold(length: int) -> CellGraph:
        return models.sentence(cell, np.zeros(length, np.int64))

    padded = [
        System(f"padding, width {width}, {most}", (cell,), V100, padding(width, most), unfold, patience=4)
        for width in widths
    ]
    return [cellular((cell,), unfold, f"cellular, {most}", max_tasks), *padded]


def pair_systems(encoder_most: int = 512, padded: bool = False, decoder_priority: int = 1) -> System:
    encoder = models.encoder_cell(1, no_run, sizes=up_to(256 if padded else encoder_most))
    decoder = models.decoder_cell(1, no_run, sizes=up_to(256), priority=decoder_priority)

    @cache
    def unfold(length: int) -> CellGraph:
        return models.sentence_pair(encoder, decoder, np.zeros(length, np.int64), length)

    if padded:
        return System("padding, width 10, 256", (encoder, decoder), V100, padding(10, 256), unfold, patience=4)
    return cellular((encoder, decoder), unfold, f"cellular, {encoder_most},256")


def of_trees(leaf: Cell, internal: Cell) -> Unfold:
    return cache(lambda tree: models.parse_tree(leaf, internal, tree, np.zeros(tree.leaves, np.int64)))


def tree_cells(most: int = 64, internal_priority: int = 1) -> tuple[Cell, Cell]:
    leaf = models.leaf_cell(1, no_run, sizes=up_to(most))
    return leaf, models.internal_cell(1, no_run, sizes=up_to(most), priority=internal_priority)


def tree_systems() -> dict[str, System]:
    cells = tree_cells()
    wide = tree_cells(4096)  # Fold and DyNet bound the trees, not the nodes of a task
    leaf = models.leaf_operators(1, no_run, no_run, {}, sizes=up_to(4096))
    internal = models.internal_operators(1, no_run, no_run, {}, sizes=up_to(4096))

    @cache
    def unfold(tree: Any) -> CellGraph:
        return models.tree_of_operators(leaf, internal, tree, np.zeros(tree.leaves, np.int64))

    operators = (leaf.linear, leaf.gates, internal.linear, internal.gates)
    systems = (
        cellular(cells, of_trees(*cells), "cellular, 64"),
        System("by operator, 64", operators, DYNET, merging("agenda", 64), unfold),
        System("by depth, 64", wide, FOLD, merging("depth", 64), of_trees(*wide)),
        System("ideal, 64", cells, V100, padding(1, 64), of_trees(*cells)),
    )
    return {system.name: system for system in systems}


Draw = Callable[[int], Sequence[Any]]
"""Function that draws the given number of sentences or trees."""


def lengths(seed: int, **options: Any) -> Draw:
    return lambda count: sentence_lengths(count, seed, **options).tolist()


def trees(seed: int) -> Draw:
    """Draw from 2,000 random trees, as the paper draws from 10K."""
    some = random_trees(2000, seed)
    return lambda count: [some[at] for at in np.random.default_rng([seed, 9]).integers(0, len(some), count)]


def equal_trees(count: int) -> Sequence[Any]:
    return [complete_tree(16)] * count


@dataclass
class Runner:
    """Runs systems at rates."""

    seconds: float
    seed: int

    def serve(self, system: System, draw: Draw, rate: float, workers: int = 1, in_flight: int = 1) -> Ran:
        count = max(50, int(rate * self.seconds * system.patience))
        given = zip(draw(count), poisson_arrivals(count, rate, self.seed).tolist(), strict=True)
        requests = [CellRequest(str(at), system.unfold(each), when) for at, (each, when) in enumerate(given)]
        types = dict(enumerate(system.cells))
        until = requests[-1].arrival + 2 * LIMIT
        return simulate(
            system.plan(system.cells, workers),
            types,
            system.device,
            requests,
            workers=workers,
            steps_in_flight=in_flight,
            until=until,
        )

    def row(self, system: System, draw: Draw, rate: float, workers: int = 1, in_flight: int = 1) -> dict[str, Any]:
        """The figures of one run."""
        started = time.perf_counter()
        ran = self.serve(system, draw, rate, workers, in_flight)
        served = ran.served.after(FILLING)
        row = dict(
            system=system.name,
            rate=rate,
            throughput=round(ran.served.throughput(FILLING), 1),
            p50_ms=ms(served.p(50)),
            p90_ms=ms(served.p(90)),
            p99_ms=ms(served.p(99)),
            queuing_p50_ms=ms(np.quantile(served.queuing, 0.5, method="lower")),
            queuing_p99_ms=ms(np.quantile(served.queuing, 0.99, method="lower")),
            computation_p50_ms=ms(np.quantile(served.computation, 0.5, method="lower")),
            computation_p90_ms=ms(np.quantile(served.computation, 0.9, method="lower")),
            mean_task=round(float(np.mean(ran.sizes)), 1),
        )
        print(f"{row}  ({time.perf_counter() - started:.1f} s)", flush=True)
        return row

    def peak(self, system: System, draw: Draw, guess: float, workers: int = 1) -> float:
        """The highest sustained rate."""

        def sustained(rate: float) -> bool:
            served = self.serve(system, draw, rate, workers).served
            return served.after(0.5).p(90) <= LIMIT and served.answered(0.5) >= 0.95

        low = guess * 0.8
        while not sustained(low):
            low *= 0.7
        found = highest(sustained, low, guess * 1.15, near=1.04)
        print(f"peak of {system.name}: {found:.0f}", flush=True)
        return found

    def curve(
        self, system: System, draw: Draw, rates: Sequence[float], guess: float, workers: int = 1
    ) -> dict[str, Any]:
        peak = self.peak(system, draw, guess, workers)
        rows = [self.row(system, draw, rate, workers) for rate in [*(r for r in rates if r < 0.97 * peak), peak]]
        return dict(system=system.name, workers=workers, peak=round(peak), rows=rows)


def ms(seconds: float) -> float | None:
    """Milliseconds for JSON; None if requests were not answered."""
    return round(float(seconds) * 1e3, 3) if np.isfinite(seconds) else None


LSTM_RATES = (1000, 2000, 5000, 8000, 12000, 16000, 18000)


def measure_timeline(run: Runner) -> Any:
    """Figure 2.5. Lengths of requests 5 to 8 and their arrivals are in the picture only; the longest has 7."""
    cell = models.lstm_cell(1, no_run, sizes=(1, 2, 3, 4))
    unit = Device({"lstm": UNIT})
    sentences = ((2, 0.0), (3, 0.0), (3, 0.0), (5, 0.0), (3, 1.5), (4, 2.2), (7, 2.4), (2, 4.5))
    rows = []
    for name, planner in (
        ("cellular", CellPlanner([cell], max_tasks=1)),
        ("graph batching", Merging([cell], by="depth", most=4)),
    ):
        requests = [
            CellRequest(str(at), models.sentence(cell, np.zeros(length, np.int64)), when)
            for at, (length, when) in enumerate(sentences, start=1)
        ]
        ran = simulate(planner, {0: cell}, unit, requests)
        rows.append(
            dict(
                system=name,
                scheduled=ran.served.scheduled.tolist(),
                finished=ran.served.finished.tolist(),
                tasks=ran.sizes,
            )
        )
    return rows


def measure_lstm(run: Runner) -> Any:
    """Figure 2.7a."""
    ours, theirs = lstm_systems()
    draw = lengths(run.seed)
    return [run.curve(ours, draw, LSTM_RATES, 20000), run.curve(theirs, draw, LSTM_RATES, 16000)]


def measure_small(run: Runner) -> Any:
    """Figure 2.7b."""
    ours, theirs = lstm_systems(64)
    draw = lengths(run.seed)
    return [run.curve(ours, draw, LSTM_RATES, 10000), run.curve(theirs, draw, LSTM_RATES, 8000)]


def measure_widths(run: Runner) -> Any:
    """Figure 2.8, and the throughput of each width if far more arrives than it can serve."""
    _, *padded = lstm_systems(widths=(1, 10, 40))
    draw = lengths(run.seed)
    found = []
    for system in padded:
        rows = [run.row(system, draw, rate) for rate in (1000, 5000)]
        served = run.serve(system, draw, OVERLOAD).served
        found.append(dict(system=system.name, overloaded=round(served.throughput(0.5)), rows=rows))
        print(found[-1]["overloaded"], flush=True)
    return found


def measure_backlog(run: Runner) -> Any:
    """Throughput of each width if BACKLOG sentences wait from the start: of all lengths, and without the longest."""
    _, *padded = lstm_systems(widths=(1, 10, 40))
    every = lengths(run.seed)(BACKLOG)
    found = []
    for name, some in (("all", every), (f"at most {RARE_ABOVE}", [each for each in every if each <= RARE_ABOVE])):
        for system in padded:
            requests = [CellRequest(str(at), system.unfold(each), 0.0) for at, each in enumerate(some)]
            types = dict(enumerate(system.cells))
            plan = system.plan(system.cells, 1)
            ran = simulate(plan, types, system.device, requests, workers=1, steps_in_flight=1, until=np.inf)
            rate = round(len(some) / float(ran.served.finished.max()))
            found.append(dict(system=system.name, lengths=name, sentences=len(some), throughput=rate))
            print(found[-1], flush=True)
    return found


def measure_times(run: Runner) -> Any:
    """Figure 2.9: distributions at 5,000 a second."""
    rows = []
    for system in lstm_systems():
        ran = run.serve(system, lengths(run.seed), 5000)
        served = ran.served.after(FILLING)
        shares = np.linspace(0, 1, 201)
        rows.append(
            dict(
                system=system.name,
                queuing_ms=[ms(at) for at in np.quantile(served.queuing, shares, method="lower")],
                computation_ms=[ms(at) for at in np.quantile(served.computation, shares, method="lower")],
                mean_task=float(np.mean(ran.sizes)),
                task_p90=float(np.quantile(ran.sizes, 0.9)),
            )
        )
    return rows


def measure_lengths(run: Runner) -> Any:
    """Figure 2.10."""
    drawn = sentence_lengths(100_000, run.seed)
    return dict(
        mean=float(drawn.mean()),
        longest=int(drawn.max()),
        share_below_100=float((drawn < 100).mean()),
        quantiles=np.quantile(drawn, np.linspace(0, 1, 101)).tolist(),
    )


def measure_variance(run: Runner) -> Any:
    """Figure 2.11. Buckets of equal lengths have the bound 24: width 24 for the padding baseline there."""
    found = {}
    for name, options, width, guess in (
        ("fixed 24", dict(fixed=24), 24, 24000),
        ("clip 50", dict(clip=50), 10, 18000),
        ("clip 100", dict(clip=100), 10, 16000),
    ):
        draw = lengths(run.seed, **options)
        rates = (2000, 5000, 12000)
        found[name] = [run.curve(system, draw, rates, guess) for system in lstm_systems(widths=(width,))]
    return found


def measure_pairs(run: Runner, workers: int) -> Any:
    """Figure 2.13."""
    draw = lengths(run.seed)
    rates = [workers * rate for rate in (250, 1000, 2000, 3000)]
    systems = [pair_systems(512), pair_systems(256), pair_systems(padded=True)]
    return [
        run.curve(system, draw, rates, workers * guess, workers)
        for system, guess in zip(systems, (4500, 4300, 2800), strict=True)
    ]


TREE_RATES = (250, 500, 1000, 1500, 2000, 3000, 5000)


def measure_trees(run: Runner) -> Any:
    """Figure 2.14."""
    systems, draw = tree_systems(), trees(run.seed)
    guesses = (("cellular, 64", 6000), ("by operator, 64", 2500), ("by depth, 64", 4000))
    return [run.curve(systems[name], draw, TREE_RATES, guess) for name, guess in guesses]


def measure_equal_trees(run: Runner) -> Any:
    """Figure 2.15."""
    systems = tree_systems()
    guesses = (("cellular, 64", 6000), ("by operator, 64", 2500), ("by depth, 64", 4000), ("ideal, 64", 9000))
    return [run.curve(systems[name], equal_trees, TREE_RATES, guess) for name, guess in guesses]


def measure_tasks(run: Runner) -> Any:
    """MaxTasksToSubmit: LSTM at a quarter and at nine tenths of the paper's peak, trees at 1,000 a second."""
    found = []
    for most in (1, 2, 5, 10, 20):
        system, *_ = lstm_systems(max_tasks=most)
        draw = lengths(run.seed)
        rows = [run.row(system, draw, rate) for rate in (5000, 18000)]
        cells = tree_cells()
        by_tree = cellular(cells, of_trees(*cells), "trees", most)
        found.append(dict(max_tasks=most, rows=rows, trees=run.row(by_tree, trees(run.seed), 1000)))
    return found


def measure_priority(run: Runner) -> Any:
    """Priority of the later or the earlier cell type, with one and two rounds in flight: trees and pairs."""
    found = []
    for in_flight in (1, 2):
        for name, priority in (("later first", 1), ("earlier first", -1)):
            cells = tree_cells(internal_priority=priority)
            system = cellular(cells, of_trees(*cells), "trees")
            pairs = pair_systems(decoder_priority=priority)
            of_tree = [run.row(system, trees(run.seed), rate, in_flight=in_flight) for rate in (1000, 5000)]
            of_pair = [run.row(pairs, lengths(run.seed), rate, in_flight=in_flight) for rate in (1000, 3500)]
            found.append(dict(priority=name, in_flight=in_flight, trees=of_tree, pairs=of_pair))
    return found


FIGURES: Mapping[str, Callable[[Runner], Any]] = {
    "timeline": measure_timeline,
    "lstm": measure_lstm,
    "small": measure_small,
    "widths": measure_widths,
    "backlog": measure_backlog,
    "times": measure_times,
    "lengths": measure_lengths,
    "variance": measure_variance,
    "pairs-2": lambda run: measure_pairs(run, 2),
    "pairs-4": lambda run: measure_pairs(run, 4),
    "trees": measure_trees,
    "equal-trees": measure_equal_trees,
    "tasks": measure_tasks,
    "priority": measure_priority,
}


@dataclass(frozen=True)
class Compared:
    """A figure of the paper and ours."""

    figure: str
    what: str
    paper: float
    ours: float
    unit: str = ""
    why: str = ""
    """The reason for a difference of over 15%, or for a fitted figure."""

    def line(self) -> str:
        off = self.ours / self.paper - 1
        why = self.why if abs(off) > 0.15 or self.why.startswith("fitted") else ""
        shown = [f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" for value in (self.paper, self.ours)]
        cells = self.figure, self.what, *(each + self.unit for each in shown), f"{off:+.0%}", why
        return f"| {' | '.join(cells)} |"


@dataclass(frozen=True)
class Ordered:
    """A statement of the paper about an order or a bound, and whether it holds here."""

    figure: str
    what: str
    holds: bool
    ours: str

    def line(self) -> str:
        return f"| {self.figure} | {self.what} | {'holds' if self.holds else 'does not hold'} | {self.ours} |"


def p90_at(curve: Mapping[str, Any], rate: float) -> float:
    """The p90 in ms of the nearest rate that ran."""
    row = min(curve["rows"], key=lambda row: abs(row["rate"] - rate))
    return float(row["p90_ms"])


def at_half(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """Our p90 divided by the baseline's, minus 1, at the rate nearest to half of the baseline's peak."""
    rates = {row["rate"] for row in theirs["rows"]} & {row["rate"] for row in ours["rows"]}
    half = min(rates, key=lambda rate: abs(rate - theirs["peak"] / 2))
    return p90_at(ours, half) / p90_at(theirs, half) - 1


def listed(numbers: Sequence[float], unit: str) -> str:
    return ", ".join(f"{number:,.0f}" for number in numbers) + unit


TURNS = "turns: at 1,000/s ten buckets below 100 have work, and one turn of each takes 550 x 185 us"


def compared(every: Mapping[str, Any]) -> tuple[list[Compared], list[Ordered]]:
    """All figures that have run."""
    made = {name: each["made"] for name, each in every.items()}
    rows: list[Compared] = []
    orders: list[Ordered] = []
    if "timeline" in made:
        ours, theirs = made["timeline"]
        for at, value in ((1, 2), (2, 3), (3, 3)):
            rows.append(Compared("2.5", f"request {at} leaves, cellular", value, ours["finished"][at - 1]))
        rows.append(Compared("2.5", "request 5 joins", 2, ours["scheduled"][4]))
        rows.append(Compared("2.5", "requests 6 and 7 join", 3, max(ours["scheduled"][5:7])))
        rows.append(Compared("2.5", "first batch ends, graph batching", 5, max(theirs["finished"][:4])))
        rows.append(Compared("2.5", "second batch ends", 12, max(theirs["finished"])))
    if "lengths" in made:
        drawn = made["lengths"]
        rows.append(Compared("2.10", "mean length", 24, drawn["mean"]))
        rows.append(Compared("2.10", "longest", 330, drawn["longest"]))
        rows.append(Compared("2.10", "share below 100", 0.99, drawn["share_below_100"]))
    if "lstm" in made:
        ours, theirs = made["lstm"]
        rows.append(Compared("2.7a", "p90 at 5K/s, cellular", 12, p90_at(ours, 5000), " ms"))
        rows.append(Compared("2.7a", "p90 at 8K/s, cellular", 12, p90_at(ours, 8000), " ms"))
        rows.append(Compared("2.7a", "peak, cellular", 20000, ours["peak"], "/s", "fitted: gather costs"))
        rows.append(Compared("2.7a", "lowest p90, padding", 25, min(r["p90_ms"] for r in theirs["rows"]), " ms", TURNS))
        rows.append(Compared("2.7a", "rate where p90 passes 500 ms, padding", 16000, theirs["peak"], "/s", TURNS_PEAK))
        rows.append(Compared("2.7a", "peak over padding", 1.25, ours["peak"] / theirs["peak"], "", TURNS_PEAK))
        less = at_half(ours, theirs)
        orders.append(
            Ordered(
                "2.7a", "p90 37.5 to 90.5% less below half of padding's peak", less <= -0.375, f"{less:+.0%} at half"
            )
        )
    if "small" in made and "lstm" in made:
        ours, theirs = made["small"]
        large = made["lstm"][0]
        ratio = p90_at(ours, 5000) / p90_at(large, 5000)
        rows.append(Compared("2.7b", "p90 at 5K/s, at most 64 over at most 512", 1, ratio))
        orders.append(
            Ordered("2.7b", "lower peak with 64", ours["peak"] < large["peak"], f"{ours['peak']} and {large['peak']}/s")
        )
    if "widths" in made:
        one, ten, forty = made["widths"]
        low = [p90_at(curve, 1000) for curve in (forty, ten, one)]
        orders.append(
            Ordered("2.8", "p90 at low load: width 40 < 10 < 1", low == sorted(low), listed(low, " ms at 1K/s"))
        )
        most = [curve["overloaded"] for curve in (one, ten, forty)]
        falls = most == sorted(most, reverse=True)
        orders.append(Ordered("2.8", "peak: width 1 > 10 > 40", falls, listed(most, "/s when overloaded")))
    if "backlog" in made:
        for name, about in (("all", ""), (f"at most {RARE_ABOVE}", f", without sentences above {RARE_ABOVE}")):
            most = [each["throughput"] for each in made["backlog"] if each["lengths"] == name]
            falls = most == sorted(most, reverse=True)
            orders.append(Ordered("2.8", f"the same, all waiting from the start{about}", falls, listed(most, "/s")))
    if "times" in made:
        ours, theirs = made["times"]
        rows.append(Compared("2.9", "p99 queuing at 5K/s, cellular", 1.38, ours["queuing_ms"][198], " ms", STEPS))
        rows.append(
            Compared(
                "2.9", "nodes of a task at 5K/s", 64, ours["mean_task"], "", "5,000/s x 24 steps x 250 us = 30 nodes"
            )
        )
        orders.append(Ordered("2.9", "p99 queuing over 100 ms, padding", theirs["queuing_ms"][198] > 100, f"{theirs['queuing_ms'][198]:.0f} ms"))  # fmt: skip # noqa: E501
        gains = [theirs[key][100] - ours[key][100] for key in ("queuing_ms", "computation_ms")]
        orders.append(Ordered("2.9", "queuing is the larger gain (medians)", gains[0] > gains[1], f"{gains[0]:.1f} and {gains[1]:.1f} ms"))  # fmt: skip # noqa: E501
    if "variance" in made:
        ours, theirs = made["variance"]["fixed 24"]
        bound = 512 / (784e-6 * 24)
        rows.append(Compared("2.11", "peak over the bound, equal lengths, cellular", 0.87, ours["peak"] / bound))
        rows.append(Compared("2.11", "the same, padding", 1.0, theirs["peak"] / bound))
        for side, name in ((0, "cellular"), (1, "padding")):
            low = [p90_at(made["variance"][key][side], 5000) for key in ("fixed 24", "clip 50", "clip 100")]
            peaks = [made["variance"][key][side]["peak"] for key in ("fixed 24", "clip 50", "clip 100")]
            falls = peaks == sorted(peaks, reverse=True)
            orders.append(Ordered("2.11", f"peak falls with the spread, {name}", falls, ", ".join(f"{x}/s" for x in peaks) + "; p90 at 5K/s " + ", ".join(f"{x:.0f} ms" for x in low)))  # fmt: skip # noqa: E501
    for devices, peak in ((2, 8500), (4, 17000)):
        if f"pairs-{devices}" in made:
            large, small, theirs = made[f"pairs-{devices}"]
            figure = f"2.13, {devices} GPUs"
            rows.append(Compared(figure, "peak, 512,256", peak, large["peak"], "/s", PAIRS))
            rows.append(Compared(figure, "512,256 over 256,256", 1.05, large["peak"] / small["peak"]))
            rows.append(Compared(figure, "peak over padding", 1.6, large["peak"] / theirs["peak"], "", ROUGH))
            less = at_half(large, theirs)
            orders.append(Ordered(figure, "p90 17.5 to 82.6% less", less <= -0.175, f"{less:+.0%} at half of padding's peak"))  # fmt: skip # noqa: E501
    if "pairs-2" in made and "pairs-4" in made:
        ratio = made["pairs-4"][0]["peak"] / made["pairs-2"][0]["peak"]
        rows.append(Compared("2.13", "4 GPUs over 2", 2, ratio, "", PAIRS))
    if "trees" in made:
        ours, dynet, fold = made["trees"]
        rows.append(Compared("2.14", "p90 at 1K/s, cellular", 6.8, p90_at(ours, 1000), " ms", TREES))
        rows.append(Compared("2.14", "p90 at 1K/s, by operator", 9.5, p90_at(dynet, 1000), " ms", TREES))
        rows.append(
            Compared("2.14", "p90 over DyNet's at 1K/s", 0.72, p90_at(ours, 1000) / p90_at(dynet, 1000), "", TREES)
        )
        rows.append(Compared("2.14", "peak, cellular", 3100, ours["peak"], "/s", TREES))
        rows.append(Compared("2.14", "peak, by operator", 2100, dynet["peak"], "/s", TREES))
        rows.append(
            Compared("2.14", "peak over by operator (text: 1.8)", 1.48, ours["peak"] / dynet["peak"], "", TREES)
        )
        rows.append(Compared("2.14", "peak over by depth", 4, ours["peak"] / fold["peak"], "", FOLD_HOST))
    if "equal-trees" in made:
        ours, dynet, fold, ideal = made["equal-trees"]
        rows.append(Compared("2.15", "peak over the ideal", 0.7, ours["peak"] / ideal["peak"], "", EQUAL))
        at = [p90_at(curve, 500) for curve in (ours, dynet, ideal)]
        orders.append(Ordered("2.15", "the ideal's p90 is above ours and DyNet's", at[2] > max(at[:2]), ", ".join(f"{x:.1f} ms" for x in at) + " (cellular, by operator, ideal, at 500/s)"))  # fmt: skip # noqa: E501
    return rows, orders


STEPS = "5 steps of 27 nodes, 232 us each; the paper's 5 of 64 take 250 us each"
TURNS_PEAK = "turns, and the share of long sentences (see the note)"
ROUGH = "padding's turns (see the note)"
PAIRS = "the run ends before the queue of the GPUs has settled"
TREES = "no time of a TreeLSTM cell is given; the paper's peak implies 550 us a task of 64, its p90 half of that"
FOLD_HOST = "Fold's host time, which dominates in the paper, is not known and not simulated"
EQUAL = "see the note"


def show(stem: Path, every: Mapping[str, Any]) -> None:
    """Print the tables and write them, and draw the curves."""
    from holdfast.lab.reports import plots

    rows, orders = compared(every)
    lines = ["| figure | | paper | ours | off | why, or what was fitted |", "|---|---|---|---|---|---|"]
    lines += [row.line() for row in rows]
    lines += ["", "| figure | the paper | here | |", "|---|---|---|---|", *(order.line() for order in orders)]
    made = {name: each["made"] for name, each in every.items()}
    if "tasks" in made:
        lines += [
            "",
            "| MaxTasksToSubmit | p90 at 5K/s | p99 queuing | p90 at 18K/s | answered/s | trees, p90 at 1K/s |",
        ]
        lines += ["|---|---|---|---|---|---|"]
        for each in made["tasks"]:
            low, high, tree = *each["rows"], each["trees"]
            lines.append(
                f"| {each['max_tasks']} | {low['p90_ms']:.1f} ms | {low['queuing_p99_ms']:.2f} ms | "
                f"{high['p90_ms']:.1f} ms | {high['throughput']:.0f} | {tree['p90_ms']:.2f} ms |"
            )
    if "priority" in made:
        lines += [
            "",
            "| priority | rounds in flight | trees: p50, p90 at 1K/s | at 5K/s | pairs: p50, p90 at 1K/s | at 3.5K/s |",
        ]
        lines += ["|---|---|---|---|---|---|"]
        for each in made["priority"]:
            cells = [f"{row['p50_ms']:.1f}, {row['p90_ms']:.1f} ms" for row in (*each["trees"], *each["pairs"])]
            lines.append(f"| {each['priority']} | {each['in_flight']} | " + " | ".join(cells) + " |")
    about = sorted({each["command"] for each in every.values()} | {origin(stem.parent)["command"]})
    versions = "; ".join(
        sorted({", ".join(f"{k} {v}" for k, v in each["versions"].items()) for each in every.values()})
    )
    dates = ", ".join(sorted({each["date"] for each in every.values()}))
    print("\n".join(lines))
    head = "\n".join(f"`{command}`" for command in about)
    stem.with_suffix(".md").write_text(f"{head}\n\n{dates}; {versions}\n\n" + "\n".join(lines) + "\n")
    shown = []
    for name, title in (
        ("lstm", "2.7a LSTM, 512"), ("small", "2.7b LSTM, 64"), ("widths", "2.8 bucket widths"),
        ("pairs-2", "2.13 Seq2Seq, 2 GPUs"), ("pairs-4", "2.13 Seq2Seq, 4 GPUs"), ("trees", "2.14 TreeLSTM"),
        ("equal-trees", "2.15 equal trees"),
    ):  # fmt: skip
        curves = made.get(name, [])
        if curves:
            shown.append(
                plots.Panel(title, "p90 ms, over requests a second", [curve_of(curve) for curve in curves], log=True)
            )
    for name, curves in made.get("variance", {}).items():
        lines_of = [curve_of(curve) for curve in curves]
        shown.append(plots.Panel(f"2.11 {name}", "p90 ms, over requests a second", lines_of, log=True))
    for key in ("queuing", "computation") if "times" in made else ():
        lines_of = [
            plots.Line(each["system"], *above_zero(each[f"{key}_ms"]), accent="cellular" in each["system"])
            for each in made["times"]
        ]
        shown.append(plots.Panel(f"2.9 {key} at 5K/s", "cumulative %, over ms", lines_of, log_x=True))
    if "lengths" in made:
        quantiles = made["lengths"]["quantiles"]
        shown.append(plots.Panel("2.10 lengths", "cumulative %, over words", [plots.Line("drawn", quantiles, list(range(101)), accent=True)]))  # fmt: skip # noqa: E501
    if shown:
        plots.png(lambda palette: plots.panels(shown, 3, palette), stem.with_suffix(".png"))


def curve_of(curve: Mapping[str, Any]) -> Any:
    from holdfast.lab.reports import plots

    rows = [row for row in curve["rows"] if row["p90_ms"] is not None]
    return plots.Line(
        curve["system"],
        [row["rate"] for row in rows],
        [row["p90_ms"] for row in rows],
        accent="cellular" in curve["system"],
    )


def above_zero(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Values above 0 and their cumulative percentages, for a logarithmic axis."""
    shares = np.linspace(0, 100, len(values)).tolist()
    kept = [(value, share) for value, share in zip(values, shares, strict=True) if value > 0]
    return [value for value, _ in kept], [share for _, share in kept]


def load(stem: Path) -> dict[str, Any]:
    """The runs so far."""
    path = stem.with_suffix(".json")
    return json.loads(path.read_text()) if path.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "show"))
    parser.add_argument("--only", nargs="+", default=list(FIGURES), choices=list(FIGURES))
    parser.add_argument("--seconds", type=float, default=2.0, help="virtual seconds of arrivals of one run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=STEM, help="files to write, without their suffix")
    arguments = parser.parse_args()
    if arguments.what == "measure":
        run = Runner(arguments.seconds, arguments.seed)
        for name in arguments.only:
            made = FIGURES[name](run)
            versions = dict(holdfast=__version__, numpy=np.__version__, matplotlib=matplotlib.__version__)
            every = load(arguments.out)
            every[name] = origin(arguments.out.parent) | dict(versions=versions, made=made)
            arguments.out.with_suffix(".json").write_text(json.dumps(every, indent=1) + "\n")
    else:
        show(arguments.out, load(arguments.out))


if __name__ == "__main__":
    main()
