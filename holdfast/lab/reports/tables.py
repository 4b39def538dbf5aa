"""The figures of `holdfast bench` as tables in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from holdfast.cli.tables import table

COLUMNS = {
    "request_rate": "rate /s",
    "completed": "done",
    "failed": "failed",
    "request_throughput": "req/s",
    "request_goodput": "good/s",
    "output_throughput": "out tok/s",
    "total_token_throughput": "tok/s",
    "cached_share": "cached",
}
TIMES = {"ttft": "TTFT", "itl": "TBT", "tpot": "TPOT", "e2el": "end to end", "normalized_latency": "normalized"}


def show(console: Console, runs: Sequence[Mapping[str, Any]]) -> None:
    """The figures of all runs: a line for each, then their latencies."""
    runs = [
        {**figures, "cached_share": f"{figures['cached_tokens'] / figures['total_input_tokens']:.0%}"}
        for figures in runs
    ]
    shown = {key: title for key, title in COLUMNS.items() if any(key in figures for figures in runs)}
    throughput = table("throughput", tuple(shown.values()))
    for figures in runs:
        throughput.add_row(*(number(figures, key) for key in shown))
    console.print(throughput)
    console.print(latencies(runs[0]) if len(runs) == 1 else latencies_by_rate(runs))


def latencies(figures: Mapping[str, Any]) -> Table:
    """All latencies of one run."""
    made = table("latency, ms", ("", "mean", "p50", "p90", "p99"), words=1)
    for name, title in TIMES.items():
        made.add_row(title, *(f"{figures[f'{which}_{name}_ms']:,.2f}" for which in ("mean", "median", "p90", "p99")))
    return made


def latencies_by_rate(runs: Sequence[Mapping[str, Any]]) -> Table:
    """Median and P99 of each run; the rest is in the JSON."""
    made = table("latency, ms: p50 / p99", ("rate /s", *TIMES.values()))
    for figures in runs:
        cells = (" / ".join(brief(figures[f"{which}_{name}_ms"]) for which in ("median", "p99")) for name in TIMES)
        made.add_row(number(figures, "request_rate"), *cells)
    return made


def brief(value: float) -> str:
    """A time, short enough for five pairs in 80 columns."""
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def number(figures: Mapping[str, Any], key: str) -> str:
    """One figure for people; empty where there is none."""
    value = figures.get(key)
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
