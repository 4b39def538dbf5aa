"""The page of `holdfast bench`: one run, a sweep over rates, or a capacity search. Imports matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.lab.reports import plots
from holdfast.lab.reports.report import Report, Section, Tile, short
from holdfast.lab.reports.run_data import Run

LATENCIES = {
    "ttft": "TTFT",
    "itl": "TBT",
    "tpot": "TPOT",
    "e2el": "End to end",
    "normalized_latency": "Normalized",
    "queued": "Queued",
}


def bench_report(
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
    """The report of `runs`, ascending by rate. `capacity` is the result of a search, None if there was none.

    `limits` are in ms, by the name of the figure that they limit: `p99_itl_ms`, `p99_ttft_ms`.
    """
    main = main_run(runs, capacity)
    rate = main.figures.get("request_rate")
    which = f"the run at {rate:.3g} requests a second" if len(runs) > 1 else "the run"
    sections = [
        Section(
            title="How long clients wait",
            caption="TTFT is the time to a request's first token, TBT the time between two of its tokens."
            + (" Dashed: the limit." if limits else ""),
            draws={
                "ttft": plots.distributions("ttft", "Time to first token", runs, limits.get("p99_ttft_ms")),
                "tbt": plots.distributions("tbt", "Time between tokens", runs, limits.get("p99_itl_ms")),
            },
        ),
        Section(
            title="Latency",
            caption=f"Milliseconds, in {which}. Normalized is end to end divided by output tokens.",
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
        sections.insert(0, _by_rate(runs, limits, capacity, runs.index(main)))
    sections.append(
        Section(
            title="Timeline", caption=f"Load and throughput over {which}.", draws={"timeline": plots.timeline(main)}
        ),
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


def main_run(runs: Sequence[Run], capacity: float | None) -> Run:
    """The run that the report shows in detail: the one at the capacity, else the one with the highest rate."""
    at_capacity = [run for run in runs if capacity and run.figures["request_rate"] == capacity]
    return at_capacity[0] if at_capacity else runs[-1]


def _lead(runs: Sequence[Run], main: Run, workload: str) -> str:
    figures = main.figures
    which = f" in the run shown in detail, one of {len(runs)}" if len(runs) > 1 else ""
    failed = f", {figures['failed']:,} failed" if figures["failed"] else ""
    return (
        f"{figures['completed']:,} requests of {workload}{failed}, {figures['total_input_tokens']:,} tokens in and "
        f"{figures['total_output_tokens']:,} out, {figures['duration']:,.1f} seconds{which}."
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
    tiles.append(Tile("Prefix cache", f"{cached:.0%}", "", "of prompt tokens were cached"))
    return tiles


def _by_rate(runs: Sequence[Run], limits: Mapping[str, float], capacity: float | None, best: int) -> Section:
    names = ("request_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
    return Section(
        title="By request rate",
        caption="Throughput and latency at each rate."
        + (" Dashed: the limits, and the highest rate that meets them." if capacity is not None else ""),
        draws={"rates": plots.metrics_by_rate(runs, limits, capacity)},
        head=("rate /s", "req/s", "out tok/s", "TTFT p50", "TTFT p99", "TBT p50", "TBT p99 (ms)"),
        rows=[(f"{run.figures['request_rate']:.3g}", *(short(run.figures[name]) for name in names)) for run in runs],
        best=best,
    )


def _stalls(main: Run, which: str) -> Section:
    return Section(
        title="Worst stalls",
        caption=f"The longest gaps between two tokens of a stream, in {which}.",
        draws={},
        head=("gap, ms", "at, s", "request", "after token", "prompt tokens"),
        rows=[
            (f"{each.ms:,.1f}", f"{each.at:,.2f}", f"{each.request:,}", f"{each.token:,}", f"{each.prompt_tokens:,}")
            for each in main.stalls
        ],
    )
