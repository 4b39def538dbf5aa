"""Plots, as SVG in the colours of its page or as PNG. The only module that imports matplotlib."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

from holdfast.lab.goodput import LoadedRun
from holdfast.lab.reports.run_data import Distribution, Run

MAX_CURVES = 5
"""Largest number of distributions in one plot. If there are more runs, an even selection is drawn."""
LOG_RATIO = 30.0
"""Ratio of an axis's largest value to its smallest from which it is logarithmic. In a distribution, of its median."""


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours by purpose. In SVG each is a placeholder colour that `svg` replaces by a CSS variable of the page."""

    ink: str
    quiet: str
    grid: str
    accent: str
    second: str
    limit: str
    card: str
    """The background of the plot."""
    ramp: tuple[str, ...]
    """Colours of curves, from the lowest rate to the highest."""


PRINT = Palette(
    ink="#22272e", quiet="#6b7480", grid="#e4e7eb", accent="#2f6690", second="#c27c2c", limit="#b5473c", card="#ffffff",
    ramp=("#a9cbe0", "#76a9ca", "#4986ae", "#2f6690", "#173f5f"),
)  # fmt: skip
COLOURS = ("ink", "quiet", "grid", "accent", "second", "limit", "card")
NAMES = (*COLOURS, *(f"ramp-{at}" for at in range(MAX_CURVES)))
PLACEHOLDERS = {name: f"#0a0b{at:02x}" for at, name in enumerate(NAMES, start=16)}
PAGE = Palette(ramp=tuple(PLACEHOLDERS.values())[len(COLOURS) :], **{name: PLACEHOLDERS[name] for name in COLOURS})
Draw = Callable[[Palette], Figure]
"""Function that draws one plot in the colours of a palette: a plot function whose other arguments are bound."""


def svg(draw: Draw, label: str) -> str:
    """The plot as an SVG element, for an HTML page whose style defines --ink and the other colours."""
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        draw(PAGE).savefig(text, format="svg", transparent=True, metadata={"Date": None})
    element = text.getvalue()
    element = element[element.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r'<g id="[^"]*"', "<g", element)
    for name, placeholder in PLACEHOLDERS.items():
        element = element.replace(placeholder, f"var(--{name})")
    return element.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def png(draw: Draw, path: Path) -> None:
    """Write the plot as a PNG file. Raises OSError."""
    draw(PRINT).savefig(path, format="png", dpi=160, facecolor=PRINT.card)


def distributions(metric: str, title: str, runs: Sequence[Run], limit: float | None, palette: Palette) -> Figure:
    """The cumulative distribution of each run's `metric` ("ttft" or "tbt"), over milliseconds."""
    figure, (axes,) = canvas(palette, 5.4, 3.1, 1)
    shown = spread(runs, MAX_CURVES)
    ratio = 1.0
    for run, colour in zip(shown, ramp(palette, len(shown)), strict=True):
        curve: Distribution = getattr(run, metric)
        if curve.values:
            axes.step(curve.values, [share * 100 for share in curve.shares], color=colour, where="post")
            ratio = max(ratio, curve.values[-1] / max(curve.values[len(curve.values) // 4], 1e-9))
    if ratio > LOG_RATIO:
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    axes.set_ylim(0, 101)
    axes.xaxis.set_major_formatter(FuncFormatter(readable))
    mark_limit(axes, palette, limit, vertical=True)
    label_logarithmic(axes)
    heading(axes, palette, title, "cumulative %, over ms")
    if len(shown) > 1:
        legend(axes, palette, [f"{run.figures['request_rate']:.3g} /s" for run in shown], "lower right")
    return figure


def metrics_by_rate(
    runs: Sequence[Run], limits: Mapping[str, float], capacity: float | None, palette: Palette
) -> Figure:
    """Throughput, P99 TBT and P99 TTFT over the request rate."""
    panels = (
        ("output_throughput", "Throughput", "output tokens a second"),
        ("p99_itl_ms", "P99 TBT", "ms"),
        ("p99_ttft_ms", "P99 TTFT", "ms"),
    )
    figure, all_axes = canvas(palette, 11, 3.0, 1, len(panels))
    rates = [run.figures["request_rate"] for run in runs]
    for axes, (name, title, unit) in zip(all_axes, panels, strict=True):
        values = [run.figures[name] for run in runs]
        axes.plot(rates, values, color=palette.accent, marker="o", markersize=4)
        if max(values) > LOG_RATIO * max(min(values), 1e-9):
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, 1.12 * max(max(values), limits.get(name, 0.0)))
        if max(rates) > LOG_RATIO * min(rates):
            axes.set_xscale("log")
        else:
            axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(FuncFormatter(readable))
        axes.yaxis.set_major_formatter(FuncFormatter(readable))
        mark_limit(axes, palette, limits.get(name), vertical=False)
        mark_limit(axes, palette, capacity, vertical=True, quiet=True)
        label_logarithmic(axes)
        heading(axes, palette, title, f"{unit}, by rate")
    return figure


CONTRACT_OUTCOMES = (
    ("contracts_kept", "kept"),
    ("contracts_refused", "refused"),
    ("contracts_broken_ttft", "ttft broken"),
    ("contracts_broken_tbt", "tbt broken"),
    ("contracts_broken_complete", "complete broken"),
    ("contracts_broken_failed", "failed"),
)
"""Figures of what became of contracts, and their names in plots."""


def contracts(run: Run, palette: Palette) -> Figure:
    """A bar for each outcome of the contracts of one run."""
    rows = [(name, float(run.figures[key])) for key, name in CONTRACT_OUTCOMES]
    return bars("Contracts", "requests", rows, 0, palette)


def contracts_by_rate(runs: Sequence[Run], palette: Palette) -> Figure:
    """Shares of the contracts that were kept, refused and broken, and kept requests per second, over the rate."""
    return _contracts([run.figures["request_rate"] for run in runs], [run.figures for run in runs], palette)


def loads(runs: Sequence[LoadedRun], palette: Palette) -> Figure:
    """Shares of contracts and kept requests per second over the loads of a capacity plan."""
    return _contracts([run.rate for run in runs], [run.figures for run in runs], palette)


def _contracts(rates: Sequence[float], figures: Sequence[Mapping[str, Any]], palette: Palette) -> Figure:
    def line(name: str, *, accent: bool = False) -> Line:
        shares = [100 * each[f"contracts_{name}"] / each["contracts"] for each in figures]
        return Line(name, rates, shares, accent)

    kept = Line("kept", rates, [each["contract_goodput"] for each in figures], accent=True)
    shares = [line("kept", accent=True), line("refused"), line("broken")]
    shown = [
        Panel("Contracts", "% of those asked for, by rate", shares),
        Panel("Goodput", "kept requests a second, by rate", [kept]),
    ]
    return panels(shown, 2, palette)


def timeline(run: Run, palette: Palette) -> Figure:
    """Running and waiting requests, and generated tokens per second, over the time of a run."""
    figure, (above, below) = canvas(palette, 11, 4.4, 2)
    times = run.timeline.times
    above.fill_between(times, run.timeline.running, color=palette.accent, alpha=0.22, linewidth=0, step="mid")
    above.plot(times, run.timeline.running, color=palette.accent, drawstyle="steps-mid")
    above.plot(times, run.timeline.waiting, color=palette.second, drawstyle="steps-mid")
    below.fill_between(times, run.timeline.tokens, color=palette.accent, alpha=0.22, linewidth=0, step="mid")
    below.plot(times, run.timeline.tokens, color=palette.accent, drawstyle="steps-mid")
    for axes in (above, below):
        axes.set_xlim(0, times[-1])
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(readable))
    above.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    heading(above, palette, "Requests", "running and waiting, over seconds")
    heading(below, palette, "Generated tokens", "per second, over seconds")
    legend(above, palette, ["running", "waiting"], "upper right")
    return figure


def bars(title: str, unit: str, rows: Sequence[tuple[str, float]], best: int | None, palette: Palette) -> Figure:
    """A horizontal bar for each (name, value). Bar number `best` has the accent colour; a value of 0 reads "none"."""
    figure, (axes,) = canvas(palette, 5.4, 1.0 + 0.3 * len(rows), 1)
    values = [value for _, value in rows]
    colours = [palette.accent if at == best else palette.ramp[0] for at in range(len(rows))]
    axes.barh(range(len(rows)), values, color=colours, height=0.62)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_xticks([])
    axes.set_xlim(0, 1.18 * (max(values, default=0.0) or 1.0))
    axes.spines["bottom"].set_visible(False)
    for at, value in enumerate(values):
        text, colour = readable(value) if value else "none", palette.ink if at == best else palette.quiet
        axes.annotate(text, (value, at), (5, 0), textcoords="offset points", va="center", color=colour, fontsize=9)
    heading(axes, palette, title, unit)
    return figure


@dataclass(frozen=True, slots=True)
class Line:
    """One named curve."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    accent: bool = False
    """Whether the curve is the subject of the plot. Other curves are drawn in quieter colours."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves over one another, with a title and a unit."""

    title: str
    unit: str
    lines: Sequence[Line]
    log: bool = False
    """Whether the vertical axis is logarithmic."""
    log_x: bool = False


def panels(shown: Sequence[Panel], columns: int, palette: Palette) -> Figure:
    """A figure of several panels of named curves, `columns` panels in each row."""
    rows = -(-len(shown) // columns)
    figure, all_axes = canvas(palette, 5.0 * columns, 3.3 * rows, rows, columns)
    for axes, panel in zip(all_axes, shown, strict=False):
        quiet = iter((palette.second, palette.limit, palette.quiet, palette.ramp[1], palette.ink) * 4)
        accents = iter((palette.accent, palette.ramp[4], palette.ramp[1]) * 4)
        for line in panel.lines:
            colour = next(accents) if line.accent else next(quiet)
            marker = "o" if len(line.x) < 30 else ""
            axes.plot(line.x, line.y, color=colour, marker=marker, markersize=3.5, linewidth=2 if line.accent else 1.3)
        if panel.log:
            axes.set_yscale("log")
        if panel.log_x:
            axes.set_xscale("log")
        else:  # the names next to a panel leave room for few numbers
            axes.xaxis.set_major_locator(MaxNLocator(4))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(readable))
            axis.set_minor_formatter(NullFormatter())
        label_logarithmic(axes)
        heading(axes, palette, panel.title, panel.unit)
        legend(axes, palette, [line.name for line in panel.lines], "right")
    for axes in all_axes[len(shown) :]:
        axes.set_visible(False)
    return figure


def canvas(palette: Palette, width: float, height: float, rows: int, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of `width` by `height` inches with plain axes, `rows` by `columns`."""
    spaced = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=0.06, hspace=0.06)
    figure = Figure(figsize=(width, height), layout=spaced)
    all_axes: list[Axes] = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in all_axes:
        axes.set_facecolor("none")
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(palette.grid)
        axes.tick_params(which="both", length=0, colors=palette.quiet, labelsize=9, pad=5)
        axes.grid(axis="y", color=palette.grid, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.yaxis.set_major_locator(MaxNLocator(5))
    return figure, all_axes


def heading(axes: Axes, palette: Palette, title: str, unit: str) -> None:
    """Write the title at the upper left of a plot, with the unit next to it."""
    text = axes.annotate(
        title, (0, 1), (0, 10), xycoords="axes fraction", textcoords="offset points",
        color=palette.ink, fontsize=10.5, fontweight="bold",
    )  # fmt: skip
    units = axes.annotate(
        unit, (1, 0), (7, 1.0), xycoords=text, textcoords="offset points", color=palette.quiet, fontsize=9,
    )  # fmt: skip
    units.set_in_layout(False)  # may overlap the neighbour's margin


def legend(
    axes: Axes, palette: Palette, names: Sequence[str], place: Literal["lower right", "upper right", "right"]
) -> None:
    """Label the first lines: "upper right" above the plot, "right" next to it, "lower right" inside, over the lines."""
    outside: dict[str, dict[str, Any]] = {
        "upper right": {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": len(names)},
        "right": {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)},
    }
    where = outside.get(place, {"loc": place})
    shown = axes.legend(
        axes.get_lines()[: len(names)], names, fontsize=9, handlelength=1.4, borderaxespad=0.2,
        facecolor=palette.card, edgecolor="none", framealpha=1.0, **where,
    )  # fmt: skip
    shown.set_zorder(5)
    for text in shown.get_texts():
        text.set_color(palette.quiet)


def mark_limit(axes: Axes, palette: Palette, at: float | None, *, vertical: bool, quiet: bool = False) -> None:
    """Draw a dashed line at `at`, unless it is None."""
    if at is not None:
        draw = axes.axvline if vertical else axes.axhline
        draw(at, color=palette.quiet if quiet else palette.limit, linewidth=1, linestyle=(0, (4, 3)))


def label_logarithmic(axes: Axes) -> None:
    """Label at least two numbers of each logarithmic axis that spans fewer than two powers of 10."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        if axis.get_scale() != "log" or len(within(low, high, (1,))) > 1:
            continue
        finer = (within(low, high, multiples) for multiples in ((1, 2, 5), range(1, 10)))
        found = next((ticks for ticks in finer if len(ticks) > 1), None)
        axis.set_major_locator(FixedLocator(found) if found else MaxNLocator(4))


def within(low: float, high: float, multiples: Sequence[int]) -> list[float]:
    """The multiples of powers of 10 from `low` to `high`. Both bounds are above 0."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [value for at in powers for each in multiples if low <= (value := each * 10.0**at) <= high]


def ramp(palette: Palette, count: int) -> tuple[str, ...]:
    """Colours for `count` curves, the darkest last."""
    if count == 1:
        return (palette.accent,)
    last = len(palette.ramp) - 1
    return tuple(palette.ramp[round(at * last / (count - 1))] for at in range(count))


def spread(runs: Sequence[Run], limit: int) -> list[Run]:
    """At most `limit` of the runs, evenly spaced, including the first and the last."""
    if len(runs) <= limit:
        return list(runs)
    return [runs[round(at * (len(runs) - 1) / (limit - 1))] for at in range(limit)]


def readable(value: float, position: int | None = None) -> str:
    """The number without an exponent: 12,000, not 1.2e4. A matplotlib formatter, hence `position`."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
