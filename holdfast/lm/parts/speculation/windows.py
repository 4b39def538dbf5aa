"""Where a draft head keeps the keys and values of each row: the last positions of its sequence, without a gap."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Span(NamedTuple):
    """One segment of a step, as far as a head reads it."""

    name: str
    """The sequence."""
    row: int
    start: int
    stop: int
    samples: int
    """Number of tokens drawn after the segment's last positions; 0: none."""


class Shift(NamedTuple):
    """Positions of a row that move to its first slots, before any is written."""

    row: int
    source: int
    """Slot of the first of them."""
    moved: int
    """Number of positions."""


class Kept(NamedTuple):
    """The positions of one segment that get keys and values."""

    span: Span
    first: int
    """The first of these positions. It lies before the segment if the token after it came only now."""
    slot: int
    """Slot of the first position."""


@dataclass(slots=True)
class Row:
    """The positions [base, end) of a sequence that one row keeps, from slot 0 on."""

    name: str = ""
    base: int = 0
    end: int = 0
    waits: bool = False
    """Whether the last position still lacks its keys and values, because the token after it is not known."""


@dataclass(slots=True)
class Windows:
    """The kept positions of all rows.

    A position's keys depend on the token after it. A row begins anew at a gap: after a step that the head did not read,
    a prefix that was in the cache, or a range that is computed again. So what is missing is never wrong, only shorter.
    """

    slots: int
    """Slots of a row."""
    rows: dict[int, Row] = field(default_factory=dict)

    def enter(self, spans: Iterable[Span], ahead: int) -> tuple[list[Kept], list[Shift]]:
        """The places of a step's positions, and what moves first. `ahead` slots stay free after the last position."""
        kept: list[Kept] = []
        shifts: list[Shift] = []
        seen: set[int] = set()
        for span in spans:
            row = self.rows.setdefault(span.row, Row())
            again = span.row in seen
            seen.add(span.row)
            if row.name != span.name or not row.base <= span.start <= row.end or (again and row.waits):
                row.name, row.base, row.end, row.waits = span.name, span.start, span.start, False
                kept = _without(kept, span.row) if again else kept
            first = span.start - 1 if row.waits and span.start == row.end else span.start
            last = span.stop if span.samples else span.stop - 1
            if last + ahead - row.base > self.slots:
                base = max(row.base, last - self.slots // 2)
                if base < first and not again:
                    shifts.append(Shift(span.row, base - row.base, first - base))
                else:  # nothing that is kept is near enough, or it is written in this very step
                    base = first = max(base, first)
                    kept = _without(kept, span.row) if again else kept
                row.base = base
            row.end, row.waits = span.stop, not span.samples
            kept.append(Kept(span, first, first - row.base))
        return kept, shifts


def _without(kept: list[Kept], row: int) -> list[Kept]:
    """These positions without those of a row, which begins anew in the same step."""
    return [each for each in kept if each.span.row != row]
