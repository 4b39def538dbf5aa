"""Tables for a terminal of 80 columns: the figures of `holdfast bench` and the candidates of `holdfast plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.lab.goodput import ContractEvaluation
from holdfast.lab.planning import Evaluation

FIGURE_TITLES = {
    "request_rate": "rate /s",
    "completed": "done",
    "failed": "failed",
    "request_throughput": "req/s",
    "request_goodput": "good/s",
    "contract_goodput": "kept/s",
    "output_throughput": "out tok/s",
    "total_token_throughput": "tok/s",
    "cached_share": "cached",
    "stages_idle": "idle",
}
LATENCY_TITLES = {
    "ttft": "TTFT",
    "itl": "TBT",
    "tpot": "TPOT",
    "e2el": "end to end",
    "normalized_latency": "normalized",
}
CONTRACT_TITLES = {
    "request_rate": "rate /s",
    "contracts": "asked",
    "contracts_refused": "refused",
    "contracts_kept": "kept",
    "contracts_broken_ttft": "ttft",
    "contracts_broken_tbt": "tbt",
    "contracts_broken_complete": "complete",
    "contracts_broken_failed": "failed",
    "contracts_kept_share": "kept of accepted",
    "contract_token_goodput": "kept tok/s",
}
"""Columns of the table of contracts. The terms are those that were broken first."""
LOAD_HEAD = ("load", "rate /s", "kept of accepted", "refused", "kept/s", "kept tok/s")
CANDIDATE_HEAD = ("policy", "replicas", "rate/s", "out tok/s", "TBT p99", "TTFT p99", "cost/M")


def table(title: str, heads: Sequence[str], *, words: int = 0, padding: int = 1) -> Table:
    """An empty table. The first `words` columns hold text, the others numbers; `padding` spaces separate columns."""
    made = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, padding, 0, 0))
    for at, head in enumerate(heads):
        made.add_column(head, justify="left" if at < words else "right")
    return made


def show_figures(console: Console, runs: Sequence[Mapping[str, Any]]) -> None:
    """Print the throughput of each run, then the latencies."""
    runs = [_with_shares(figures) for figures in runs]
    shown = {key: title for key, title in FIGURE_TITLES.items() if any(key in figures for figures in runs)}
    throughput = table("throughput", tuple(shown.values()))
    for figures in runs:
        throughput.add_row(*(_number(figures, key) for key in shown))
    console.print(throughput)
    if any("contracts" in figures for figures in runs):
        console.print(_contracts(runs))
    console.print(_latencies(runs[0]) if len(runs) == 1 else _latencies_by_rate(runs))


def _contracts(runs: Sequence[Mapping[str, Any]]) -> Table:
    """Outcomes of the contracts of each run."""
    shown = {key: title for key, title in CONTRACT_TITLES.items() if any(key in figures for figures in runs)}
    made = table("contracts: refused, kept, or broken by term", tuple(shown.values()))
    for row in contract_rows(runs, tuple(shown)):
        made.add_row(*row)
    return made


def contract_rows(runs: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[tuple[str, ...]]:
    """A row for each run, with these figures of its contracts."""
    rows = [{**figures, "contracts_kept_share": f"{figures['contracts_kept_share']:.1%}"} for figures in runs]
    return [tuple(_number(figures, key) for key in keys) for figures in rows]


def show_contracts(console: Console, contracts: ContractEvaluation) -> None:
    """Print what becomes of contracts at loads below and above the rate at which they are kept."""
    if contracts.runs:
        made = table("contracts of one replica, by load", LOAD_HEAD)
        for row in load_rows(contracts):
            made.add_row(*row)
        console.print(made)


def load_rows(contracts: ContractEvaluation) -> list[tuple[str, ...]]:
    """A row under LOAD_HEAD for each load."""
    return [
        (
            f"{run.multiple:g}",
            f"{run.rate:.3g}",
            f"{run.figures['contracts_kept_share']:.1%}",
            f"{run.figures['contracts_refused_share']:.1%}",
            f"{run.figures['contract_goodput']:.3g}",
            f"{run.figures['contract_token_goodput']:,.0f}",
        )
        for run in contracts.runs
    ]


def _with_shares(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a run, with its shares as text: of prompt tokens from the cache, and of idle time by stage."""
    shown = {**figures, "cached_share": f"{figures['cached_tokens'] / figures['total_input_tokens']:.0%}"}
    idle = shown.pop("stages_idle", ())
    return shown | {"stages_idle": " ".join(f"{share:.0%}" for share in idle)} if len(idle) > 1 else shown


def _latencies(figures: Mapping[str, Any]) -> Table:
    """All latencies of one run."""
    made = table("latency, ms", ("", "mean", "p50", "p90", "p99"), words=1)
    for name, title in LATENCY_TITLES.items():
        made.add_row(title, *(f"{figures[f'{part}_{name}_ms']:,.2f}" for part in ("mean", "median", "p90", "p99")))
    return made


def _latencies_by_rate(runs: Sequence[Mapping[str, Any]]) -> Table:
    """Median and P99 of each run. The JSON file has the rest."""
    made = table("latency, ms: p50 / p99", ("rate /s", *LATENCY_TITLES.values()))
    for figures in runs:
        cells = (
            " / ".join(_brief(figures[f"{part}_{name}_ms"]) for part in ("median", "p99")) for name in LATENCY_TITLES
        )
        made.add_row(_number(figures, "request_rate"), *cells)
    return made


def _brief(value: float) -> str:
    """A time as text, short enough for five pairs in 80 columns."""
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _number(figures: Mapping[str, Any], key: str) -> str:
    """One figure; an empty string if the run does not have it."""
    value = figures.get(key)
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def show_candidates(console: Console, evaluations: Sequence[Evaluation], best: Evaluation | None) -> None:
    """Print the candidates, the reasons why some of them have no capacity, and what their contexts leave out."""
    shown = table("capacity of all devices together", CANDIDATE_HEAD, words=2, padding=0)
    for each in evaluations:
        shown.add_row(*candidate_row(each), style="bold" if each is best else "" if each.capacity else "dim")
    console.print(shown)
    for line in dict.fromkeys((*map(_reason_of, evaluations), *map(_left_out_of, evaluations))):
        if line:
            console.print(Text(line, style="dim"), soft_wrap=True)


def candidate_row(evaluation: Evaluation) -> tuple[str, ...]:
    """A row under CANDIDATE_HEAD: capacity and throughput of all replicas together."""
    names = (evaluation.candidate.policy, f"{evaluation.replicas} × {evaluation.candidate.layout}")
    if not evaluation.capacity:
        return (*names, "none", "", "", "", "")
    figures = evaluation.figures
    return (
        *names,
        f"{evaluation.fleet_capacity:.3g}",
        f"{evaluation.output_rate * evaluation.replicas:,.0f}",
        f"{figures['p99_itl_ms']:,.1f}",
        f"{figures['p99_ttft_ms']:,.0f}",
        "" if evaluation.cost is None else f"{evaluation.cost:,.3f}",
    )


def _reason_of(evaluation: Evaluation) -> str:
    """The reason why a candidate has no capacity. If its layout does not fit, the text is the same for every policy."""
    if not evaluation.reason:
        return ""
    policy = f"{evaluation.candidate.policy}, " if evaluation.fits else ""
    return f"{policy}{evaluation.candidate.layout}: {evaluation.reason}"


def _left_out_of(evaluation: Evaluation) -> str:
    """The share of the workload that is longer than the context; empty if there is none, or no capacity."""
    figures = evaluation.figures
    if not figures.get("left_out_requests_share"):
        return ""
    return (
        f"{evaluation.candidate.layout}: longer than its context, and left out: "
        f"{figures['left_out_requests_share']:.1%} of the requests, "
        f"{figures['left_out_conversations_share']:.1%} of the conversations whole"
    )
