"""The reports of `holdfast bench` and `holdfast plan`: one HTML file that needs no network. Imports matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import jinja2

from holdfast.core.version import __version__
from holdfast.files.regular import read_text
from holdfast.files.results import write_result, writing
from holdfast.lab.goodput import KEPT, ContractEvaluation
from holdfast.lab.planning import Evaluation, best_of
from holdfast.lab.reports import plots
from holdfast.lab.reports.plots import Draw, readable
from holdfast.lab.reports.run_data import Run
from holdfast.lab.reports.tables import (
    CANDIDATE_HEAD,
    CONTRACT_TITLES,
    LATENCY_TITLES,
    LOAD_HEAD,
    candidate_row,
    contract_rows,
    load_rows,
)

TEMPLATE = Path(__file__).with_name("report.html")


@dataclass(frozen=True, slots=True)
class Tile:
    """A headline figure."""

    name: str
    value: str
    unit: str
    note: str = ""
    missed: bool = False
    """Whether the figure misses its limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a report: a caption, plots, a table and text to copy. Each may be empty."""

    title: str
    caption: str = ""
    draws: Mapping[str, Draw] = field(default_factory=dict)
    """Plots by file name, without suffix."""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    best: int | None = None
    """Index of the highlighted row."""
    code: str = ""

    @property
    def plots(self) -> list[str]:
        """The plots as SVG."""
        return [plots.svg(draw, name.replace("-", " ")) for name, draw in self.draws.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of a command. `write` adds the command line and its settings."""

    title: str
    lead: str
    tiles: Sequence[Tile]
    sections: Sequence[Section]

    def write(
        self, html: str | None, directory: str | None, *, settings: Sequence[tuple[str, str]], command: str
    ) -> list[str]:
        """Write the page, and each plot as a PNG file, to the given paths. Returns all paths. Raises OSError."""
        paths = []
        if html is not None:
            environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
            template = environment.from_string(read_text(TEMPLATE))
            page = template.render(report=self, settings=settings, command=command, version=__version__)
            write_result(html, page)
            paths.append(html)
        if directory is not None:
            with writing(directory):
                Path(directory).mkdir(parents=True, exist_ok=True)
            for name, draw in (plot for section in self.sections for plot in section.draws.items()):
                path = Path(directory) / f"{name}.png"
                with writing(path):
                    plots.png(draw, path)
                paths.append(str(path))
        return paths


def bench_report(
    runs: Sequence[Run], *, title: str, workload: str, limits: Mapping[str, float], capacity: float | None
) -> Report:
    """The report of `runs`, ascending by rate. `capacity` is the result of a search, None if there was none.

    `limits` are in ms, by the name of the figure that they limit: `p99_itl_ms`, `p99_ttft_ms`.
    """
    # The report shows one run in detail: the run at the capacity, else the run with the highest rate.
    main = next((run for run in runs if capacity and run.figures["request_rate"] == capacity), runs[-1])
    which = f"the run at {main.figures['request_rate']:.3g} requests a second" if len(runs) > 1 else "the run"
    ttft = partial(plots.distributions, "ttft", "Time to first token", runs, limits.get("p99_ttft_ms"))
    tbt = partial(plots.distributions, "tbt", "Time between tokens", runs, limits.get("p99_itl_ms"))
    sections = [
        Section(
            title="How long clients wait",
            caption="TTFT is the time to a request's first token, TBT the time between two of its tokens."
            + (" Dashed: the limit." if limits else ""),
            draws={"ttft": ttft, "tbt": tbt},
        ),
        Section(
            title="Latency",
            caption=f"Milliseconds, in {which}. Normalized is end to end divided by output tokens.",
            head=("", "mean", "p50", "p90", "p99"),
            rows=[
                (
                    label[0].upper() + label[1:],
                    *(f"{main.figures[f'{part}_{name}_ms']:,.1f}" for part in ("mean", "median", "p90", "p99")),
                )
                for name, label in {**LATENCY_TITLES, "queued": "queued"}.items()
                if f"mean_{name}_ms" in main.figures
            ],
        ),
        Section(
            title="Timeline",
            caption=f"Load and throughput over {which}.",
            draws={"timeline": partial(plots.timeline, main)},
        ),
    ]
    if "contracts" in main.figures:
        sections.insert(0, _contracts(runs, runs.index(main)))
    if len(runs) > 1:
        sections.insert(0, _by_rate(runs, limits, capacity, runs.index(main)))
    if main.stalls:
        sections.append(_stalls(main, which))
    tiles = _run_tiles(main, limits, capacity)
    return Report(title=title, lead=_lead(runs, main, workload), tiles=tiles, sections=sections)


def _lead(runs: Sequence[Run], main: Run, workload: str) -> str:
    figures = main.figures
    which = f" in the run shown in detail, one of {len(runs)}" if len(runs) > 1 else ""
    failed = f", {figures['failed']:,} failed" if figures["failed"] else ""
    return (
        f"{figures['completed']:,} requests of {workload}{failed}, {figures['total_input_tokens']:,} tokens in and "
        f"{figures['total_output_tokens']:,} out, {figures['duration']:,.1f} seconds{which}."
    )


def _run_tiles(main: Run, limits: Mapping[str, float], capacity: float | None) -> list[Tile]:
    figures = main.figures
    tiles = []
    if capacity is not None:
        tiles.append(Tile("Capacity", f"{capacity:.3g}", "requests/s", "within the limits", missed=not capacity))
    rate = f"{figures['request_throughput']:.3g} requests/s"
    tiles.append(Tile("Throughput", f"{figures['output_throughput']:,.0f}", "tok/s out", rate))
    if figures.get("request_goodput") is not None:
        share = figures["request_goodput"] / figures["request_throughput"]
        tiles.append(Tile("Goodput", f"{figures['request_goodput']:.3g}", "requests/s", f"{share:.0%} meet the SLO"))
    if "contracts" in figures:
        kept = figures["contracts_kept_share"]
        refused = f"{figures['contracts_refused_share']:.0%} refused"
        note = f"{kept:.1%} of the accepted, {refused}"
        tiles.append(Tile("Contracts kept", f"{figures['contract_goodput']:.3g}", "/s", note, missed=kept < KEPT))
    for name, label in (("ttft", "TTFT"), ("itl", "TBT")):
        median, tail = figures[f"median_{name}_ms"], figures[f"p99_{name}_ms"]
        limit = limits.get(f"p99_{name}_ms")
        note = f"p50 {readable(median)} ms" + (f", limit {readable(limit)}" if limit is not None else "")
        tiles.append(Tile(f"{label} p99", readable(tail), "ms", note, missed=limit is not None and tail > limit))
    cached = figures["cached_tokens"] / figures["total_input_tokens"]
    return [*tiles, Tile("Prefix cache", f"{cached:.0%}", "", "of prompt tokens were cached")]


def _by_rate(runs: Sequence[Run], limits: Mapping[str, float], capacity: float | None, best: int) -> Section:
    names = ("request_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
    return Section(
        title="By request rate",
        caption="Throughput and latency at each rate."
        + (" Dashed: the limits, and the highest rate that meets them." if capacity is not None else ""),
        draws={"rates": partial(plots.metrics_by_rate, runs, limits, capacity)},
        head=("rate /s", "req/s", "out tok/s", "TTFT p50", "TTFT p99", "TBT p50", "TBT p99 (ms)"),
        rows=[(f"{run.figures['request_rate']:.3g}", *(readable(run.figures[name]) for name in names)) for run in runs],
        best=best,
    )


def _contracts(runs: Sequence[Run], best: int) -> Section:
    shown = {key: title for key, title in CONTRACT_TITLES.items() if key in runs[best].figures}
    draw = partial(plots.contracts_by_rate, runs) if len(runs) > 1 else partial(plots.contracts, runs[0])
    return Section(
        title="Contracts",
        caption="Requests that asked for a contract: refused on arrival, kept, or broken, by the first term that "
        "was broken. Goodput is what was kept, per second.",
        draws={"contracts": draw},
        head=tuple(shown.values()),
        rows=contract_rows([run.figures for run in runs], tuple(shown)),
        best=best,
    )


def _stalls(main: Run, which: str) -> Section:
    return Section(
        title="Worst stalls",
        caption=f"The longest gaps between two tokens of a stream, in {which}.",
        head=("gap, ms", "at, s", "request", "after token", "prompt tokens"),
        rows=[
            (f"{each.ms:,.1f}", f"{each.at:,.2f}", f"{each.request:,}", f"{each.token:,}", f"{each.prompt_tokens:,}")
            for each in main.stalls
        ],
    )


def plan_report(
    evaluations: Sequence[Evaluation],
    question: str,
    advice: Sequence[str],
    contracts: ContractEvaluation | None = None,
) -> Report:
    """The report of a capacity plan. The last line of `advice` may be a command."""
    best = best_of(evaluations)
    at = evaluations.index(best) if best is not None else None
    ready = advice[-1].startswith("holdfast serve ")
    said = advice[:-1] if ready else advice
    named = [(f"{each.candidate.policy}, {each.candidate.layout}", each) for each in evaluations]
    capacities = [(name, each.fleet_capacity) for name, each in named]
    draws = {"capacity": partial(plots.bars, "Capacity", "conversations a second, all devices", capacities, at)}
    if any(each.cost is not None for each in evaluations):
        costs = [(name, each.cost or 0.0) for name, each in named]
        draws["cost"] = partial(plots.bars, "Cost", "of a million generated tokens", costs, at)
    refused = [(name, each.reason) for name, each in named if each.reason]
    sections = [
        Section(
            title="Recommendation",
            caption=" ".join(f"{line[0].upper()}{line[1:].rstrip(':')}." for line in said),
            code=advice[-1] if ready else "",
        ),
        Section(title="By candidate", caption="The highest rate within the limits.", draws=draws),
        Section(title="Table", head=CANDIDATE_HEAD, rows=[candidate_row(each) for each in evaluations], best=at),
    ]
    if contracts is not None and contracts.runs:
        sections.insert(2, _loads(contracts))
    if refused:
        sections.append(Section(title="Candidates without capacity", head=("candidate", "reason"), rows=refused))
    return Report(title="Capacity plan", lead=question + ".", tiles=_plan_tiles(best), sections=sections)


def _loads(contracts: ContractEvaluation) -> Section:
    return Section(
        title="Contracts by load",
        caption="Contracts of one replica at multiples of the rate up to which they are kept. A client is told of a "
        "refusal when it asks. Goodput is the number of requests a second whose contract is kept.",
        draws={"loads": partial(plots.loads, contracts.runs)},
        head=LOAD_HEAD,
        rows=load_rows(contracts),
    )


def _plan_tiles(best: Evaluation | None) -> list[Tile]:
    if best is None:
        return [Tile("Capacity", "none", "", "within these limits", missed=True)]
    replicas = f"{best.replicas} replica{'s' if best.replicas > 1 else ''}"
    tiles = [
        Tile("Capacity", f"{best.fleet_capacity:.3g}", "/s", "conversations, all devices"),
        Tile("Throughput", f"{best.output_rate * best.replicas:,.0f}", "tok/s out", replicas),
        Tile("TBT p99", readable(best.figures["p99_itl_ms"]), "ms"),
        Tile("TTFT p99", readable(best.figures["p99_ttft_ms"]), "ms"),
    ]
    return tiles if best.cost is None else [*tiles, Tile("Cost", f"{best.cost:.3g}", "", "per million tokens out")]
