"""Reports: one HTML file that needs no network, and its plots as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from holdfast.lab import drawings
from holdfast.lab.drawings import Draw
from holdfast.lab.series import Run

TEMPLATE = Path(__file__).with_name("report.html")
LATENCIES = {
    "ttft": "TTFT",
    "itl": "TBT",
    "tpot": "TPOT",
    "e2el": "End to end",
    "normalized_latency": "Normalized",
    "queued": "Queued",
}


@dataclass(frozen=True, slots=True)
class Tile:
    """A headline figure."""

    name: str
    value: str
    unit: str
    note: str = ""
    missed: bool = False
    """Whether it misses its limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a report: a caption, then plots, a table, text to copy; each may be missing."""

    title: str
    caption: str = ""
    draws: Mapping[str, Draw]
    """Plots by the names of their files."""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    best: int | None = None
    """Number of the row that stands out."""
    code: str = ""

    @property
    def plots(self) -> list[str]:
        """The plots as SVG."""
        return [drawings.svg(draw, name.replace("-", " ")) for name, draw in self.draws.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that a page says."""

    title: str
    lead: str
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    settings: Sequence[tuple[str, str]]
    command: str
    footer: str

    def write_html(self, path: Path) -> None:
        """Write the page. Raises OSError."""
        environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(report=self)
        path.write_text(page, encoding="utf-8")

    def write_plots(self, directory: Path) -> list[Path]:
        """Write each plot as a PNG file. Returns their paths. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        paths = []
        for section in self.sections:
            for name, draw in section.draws.items():
                drawings.png(draw, directory / f"{name}.png")
                paths.append(directory / f"{name}.png")
        return paths


def of_runs(
    runs: Sequence[Run],
    *,
    title: str,
    workload: str,
    limits: Mapping[str, float],
    capacity: float | None,
    settings: Sequence[tuple[str, str]],
    command: str,
    footer: str,
) -> Report:
    """The report of one run, of a sweep, or of a capacity search with what it found.

    `limits` are those on `p99_itl_ms`, `p99_ttft_ms` and so on, where there are any.
    """
    main = shown_run(runs, capacity)
    rate = main.figures.get("request_rate")
    which = f"the run at {rate:.3g} requests a second" if len(runs) > 1 else "the run"
    sections = [
        Section(
            title="How long clients wait",
            caption="TTFT is the time to a request's first token, TBT each gap between two of its tokens."
            + (" Dashed: the limit." if limits else ""),
            draws={
                "ttft": drawings.distributions("ttft", "Time to first token", runs, limits.get("p99_ttft_ms")),
                "tbt": drawings.distributions("tbt", "Time between tokens", runs, limits.get("p99_itl_ms")),
            },
        ),
        Section(
            title="Latency",
            caption=f"Of {which}, in milliseconds. Normalized is end to end over output tokens.",
            draws={},
            head=("", "mean", "p50", "p90", "p99"),
            rows=[
                (label, *(f"{main.figures[f'{part}_{name}_ms']:,.1f}" for part in ("mean", "median", "p90", "p99")))
                for name, label in LATENCIES.items()
                if f"mean_{name}_ms" in main.figures
            ],
        ),
    ]
    if len(runs) > 1:
        sections.insert(0, _over_rate(runs, limits, capacity, runs.index(main)))
    sections.append(
        Section(title="What went on", caption=f"Of {which}.", draws={"timeline": drawings.course(main)}),
    )
    if main.stalls:
        sections.append(_stalls(main, which))
    return Report(
        title=title,
        lead=_lead(runs, main, workload),
        tiles=_tiles(main, limits, capacity),
        sections=sections,
        settings=settings,
        command=command,
        footer=footer,
    )


def shown_run(runs: Sequence[Run], capacity: float | None) -> Run:
    """The run that figures and timeline are of: that at the capacity, else that of the highest rate."""
    at_capacity = [run for run in runs if capacity and run.figures["request_rate"] == capacity]
    return at_capacity[0] if at_capacity else runs[-1]


def _lead(runs: Sequence[Run], main: Run, workload: str) -> str:
    figures = main.figures
    of = f" in that run of {len(runs)} which is shown in detail" if len(runs) > 1 else ""
    failed = f", {figures['failed']:,} failed" if figures["failed"] else ""
    return (
        f"{figures['completed']:,} requests of {workload}{failed}, {figures['total_input_tokens']:,} tokens in and "
        f"{figures['total_output_tokens']:,} out, {figures['duration']:,.1f} seconds{of}."
    )


def _tiles(main: Run, limits: Mapping[str, float], capacity: float | None) -> list[Tile]:
    figures = main.figures
    tiles = []
    if capacity is not None:
        tiles.append(Tile("Capacity", f"{capacity:.3g}", "requests/s", "within the limits", missed=not capacity))
    tiles.append(
        Tile("Throughput", f"{figures['output_throughput']:,.0f}", "tok/s out",
             f"{figures['request_throughput']:.3g} requests/s"),
    )  # fmt: skip
    if figures.get("request_goodput") is not None:
        share = figures["request_goodput"] / figures["request_throughput"]
        tiles.append(Tile("Goodput", f"{figures['request_goodput']:.3g}", "requests/s", f"{share:.0%} meet the SLO"))
    for name, label in (("ttft", "TTFT"), ("itl", "TBT")):
        median, tail = figures[f"median_{name}_ms"], figures[f"p99_{name}_ms"]
        limit = limits.get(f"p99_{name}_ms")
        note = f"p50 {short(median)} ms" + (f", limit {short(limit)}" if limit is not None else "")
        tiles.append(Tile(f"{label} p99", short(tail), "ms", note, missed=limit is not None and tail > limit))
    cached = figures["cached_tokens"] / figures["total_input_tokens"]
    tiles.append(Tile("From the cache", f"{cached:.0%}", "", "of the prompts' tokens"))
    return tiles


def _over_rate(runs: Sequence[Run], limits: Mapping[str, float], capacity: float | None, best: int) -> Section:
    names = ("request_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
    return Section(
        title="Over the rate",
        caption="What each rate of requests gives."
        + (" Dashed: limits, and the highest rate that keeps them." if capacity is not None else ""),
        draws={"rates": drawings.over_rate(runs, limits, capacity)},
        head=("rate /s", "req/s", "out tok/s", "TTFT p50", "TTFT p99", "TBT p50", "TBT p99 (ms)"),
        rows=[(f"{run.figures['request_rate']:.3g}", *(short(run.figures[name]) for name in names)) for run in runs],
        best=best,
    )


def _stalls(main: Run, which: str) -> Section:
    return Section(
        title="Worst stalls",
        caption=f"The longest gaps between two tokens of a stream, of {which}.",
        draws={},
        head=("gap, ms", "at, s", "request", "after token", "prompt tokens"),
        rows=[
            (f"{each.ms:,.1f}", f"{each.at:,.2f}", f"{each.request:,}", f"{each.token:,}", f"{each.prompt_tokens:,}")
            for each in main.stalls
        ],
    )


def short(value: float) -> str:
    """A figure with about three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
