"""The page of `holdfast plan`: a capacity plan's candidates and its advice. Imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.lab.planning import Evaluation, best_of
from holdfast.lab.reports import plots
from holdfast.lab.reports.report import Report, Section, Tile, short
from holdfast.lab.reports.tables import CANDIDATE_HEAD, candidate_row


def plan_report(
    evaluations: Sequence[Evaluation],
    question: str,
    advice: Sequence[str],
    *,
    settings: Sequence[tuple[str, str]],
    command: str,
    footer: str,
) -> Report:
    """The report of a capacity plan. `advice` is from `advice.recommend`: its last line may be a command."""
    best = best_of(evaluations)
    at = evaluations.index(best) if best is not None else None
    ready = advice[-1].startswith("holdfast serve ")
    said = advice[:-1] if ready else advice
    names = [f"{each.candidate.policy}, {each.candidate.layout}" for each in evaluations]
    named = list(zip(names, evaluations, strict=True))
    capacities = [(name, each.fleet_capacity) for name, each in named]
    draws = {"capacity": plots.bars("Capacity", "conversations a second, all devices", capacities, at)}
    if any(each.cost is not None for each in evaluations):
        costs = [(name, each.cost or 0.0) for name, each in named]
        draws["cost"] = plots.bars("Cost", "of a million generated tokens", costs, at)
    refused = [(name, each.reason) for name, each in named if each.reason]
    sections = [
        Section(
            title="Recommendation",
            caption=" ".join(f"{line[0].upper()}{line[1:].rstrip(':')}." for line in said),
            draws={},
            code=advice[-1] if ready else "",
        ),
        Section(title="By candidate", caption="The highest rate within the limits.", draws=draws),
        Section(
            title="Table",
            draws={},
            head=CANDIDATE_HEAD,
            rows=[candidate_row(each) for each in evaluations],
            best=at,
        ),
    ]
    if refused:
        sections.append(
            Section(title="Candidates without capacity", draws={}, head=("candidate", "reason"), rows=refused)
        )
    return Report(
        title="Capacity plan",
        lead=question + ".",
        tiles=_tiles(best),
        sections=sections,
        settings=settings,
        command=command,
        footer=footer,
    )


def _tiles(best: Evaluation | None) -> list[Tile]:
    if best is None:
        return [Tile("Capacity", "none", "", "within these limits", missed=True)]
    tiles = [
        Tile("Capacity", f"{best.fleet_capacity:.3g}", "/s", "conversations, all devices"),
        Tile(
            "Throughput",
            f"{best.output_rate * best.replicas:,.0f}",
            "tok/s out",
            f"{best.replicas} replica{'s' if best.replicas > 1 else ''}",
        ),
        Tile("TBT p99", short(best.figures["p99_itl_ms"]), "ms"),
        Tile("TTFT p99", short(best.figures["p99_ttft_ms"]), "ms"),
    ]
    return tiles if best.cost is None else [*tiles, Tile("Cost", f"{best.cost:.3g}", "", "per million tokens out")]
