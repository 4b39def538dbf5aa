"""The page and the plots of `holdfast plan`. Takes matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.lab import drawings
from holdfast.lab.planning import Verdict
from holdfast.lab.report import Report, Section, Tile, short


def report_of(
    verdicts: Sequence[Verdict],
    best: Verdict | None,
    question: str,
    advice: Sequence[str],
    table: tuple[Sequence[str], Sequence[tuple[str, ...]]],
    settings: Sequence[tuple[str, str]],
    command: str,
    footer: str,
) -> Report:
    """The report; `advice` is lines for people, the last of which is a command where there is one.

    `table` is its head, and a row for each verdict.
    """
    at = verdicts.index(best) if best is not None else None
    ready = advice[-1].startswith("holdfast serve ")
    said = advice[:-1] if ready else advice
    names = [f"{verdict.candidate.policy}, {verdict.candidate.layout}" for verdict in verdicts]
    draws = {
        "capacity": drawings.bars(
            "Capacity", "conversations a second, all devices",
            [(name, verdict.fleet) for name, verdict in zip(names, verdicts, strict=True)], at,
        ),
    }  # fmt: skip
    if any(verdict.cost is not None for verdict in verdicts):
        rows = [(name, verdict.cost or 0.0) for name, verdict in zip(names, verdicts, strict=True)]
        draws["cost"] = drawings.bars("Cost", "of a million generated tokens", rows, at)
    refused = [(name, verdict.reason) for name, verdict in zip(names, verdicts, strict=True) if verdict.reason]
    sections = [
        Section(
            title="What to do",
            caption=" ".join(f"{line[0].upper()}{line[1:].rstrip(':')}." for line in said),
            draws={},
            code=advice[-1] if ready else "",
        ),
        Section(title="By candidate", caption="The highest rate within the limits.", draws=draws),
        Section(title="Table", draws={}, head=table[0], rows=table[1], best=at),
    ]
    if refused:
        sections.append(Section(title="Without capacity", draws={}, head=("candidate", "why"), rows=refused))
    return Report(
        title="Capacity plan",
        lead=question + ".",
        tiles=tiles(best),
        sections=sections,
        settings=settings,
        command=command,
        footer=footer,
    )


def tiles(best: Verdict | None) -> list[Tile]:
    """The headline."""
    if best is None:
        return [Tile("Capacity", "none", "", "within these limits", missed=True)]
    shown = [
        Tile("Capacity", f"{best.fleet:.3g}", "/s", "conversations, all devices"),
        Tile(
            "Throughput",
            f"{best.tokens * best.replicas:,.0f}",
            "tok/s out",
            f"{best.replicas} replica{'s' if best.replicas > 1 else ''}",
        ),
        Tile("TBT p99", short(best.figures["p99_itl_ms"]), "ms"),
        Tile("TTFT p99", short(best.figures["p99_ttft_ms"]), "ms"),
    ]
    return shown if best.cost is None else [*shown, Tile("Cost", f"{best.cost:.3g}", "", "a million tokens out")]
