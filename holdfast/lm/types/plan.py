"""StepPlan: one step, decided and not yet applied."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from holdfast.core.columns import Columns
from holdfast.lm.types.sampling import Sampling

PENDING = -1
"""Stands for the last token that the row sampled, which the host may not know yet. The executor fills it in."""
GUESSED = -2
"""Stands for the first token that the device guessed after that; GUESSED - n for the n-th one after it."""


class Segment(NamedTuple):
    """Compute positions [start, stop) of one sequence.

    A decode is a segment of length 1, or longer if it verifies drafted tokens. A prefill chunk, or the recomputation of
    a dropped range, is a segment too. A segment may be planned only when every earlier position of its sequence is in
    the cache, or is swapped in or computed within the same step.
    """

    sequence_id: str
    row: int
    """Row of the executor's persistent state: its block table, or its padded row, and the token it sampled last."""
    start: int
    stop: int
    tokens: tuple[int, ...]
    """Token ids at [start, stop). The first may be PENDING; known or drafted tokens follow, or GUESSED ones."""
    sampling: Sampling | None
    """How to sample after the segment; None if it ends before the last token. `StepPlan.samples` has the number."""

    @property
    def length(self) -> int:
        """Number of query tokens."""
        return self.stop - self.start


class TableWrite(NamedTuple):
    """New entries of a row's block table: `blocks` go to its indices [start, start + len(blocks))."""

    row: int
    start: int
    blocks: tuple[int, ...]


class BlockCopy(NamedTuple):
    """The contents of one block, keys and values of all layers, copied to a block of the other tier."""

    source: int
    target: int


class BlockMove(NamedTuple):
    """The contents of one block copied to another of the same tier, before the plan's segments run."""

    source: int
    target: int


class TierCopies(NamedTuple):
    """The copies between the device and the host that a plan begins, and those that it waits for."""

    swap_in: tuple[BlockCopy, ...] = ()
    """Copies from host to device.

    Nothing reads or writes their target blocks before a plan that awaits the copies, or a result that reports them
    complete.
    """
    swap_out: tuple[BlockCopy, ...] = ()
    """Copies from device to host.

    The source blocks stay unchanged until a result reports the copies complete. They are written to the host only after
    `swap_in` has read there. A plan without segments is complete when all its copies are.
    """
    awaits: int = -1
    """Number of a plan: the segments need its `swap_in`, and those of all plans before it. -1: none.

    If it is this very plan, each layer is awaited when the segments come to it. Other copies run during the segments.
    """


NO_COPIES = TierCopies()


class Forecast(NamedTuple):
    """The policy's prediction of a step, for observers."""

    budget: int = 0
    """Tokens that the policy would have let into the step; 0: not known."""
    predicted: float = 0.0
    """Seconds that the policy expects the segments to take; 0: no prediction."""


NO_FORECAST = Forecast()


@dataclass(frozen=True, slots=True)
class PartPlan:
    """The contribution of a part to a plan. Every field has a default that stands for nothing."""

    @property
    def computes(self) -> bool:
        """Whether the device computes anything for it besides the segments."""
        return False

    @property
    def is_long(self) -> bool:
        """Whether the device may take far longer for it than for the segments of a step."""
        return False


P = TypeVar("P")


_EMPTY: dict[type[Any], Any] = {}
"""The value of each class that stands for nothing. Made once, because it is asked for at every step."""


def nothing(kind: type[P]) -> P:
    """The value of this class that stands for nothing."""
    if kind not in _EMPTY:
        _EMPTY[kind] = kind()
    empty: P = _EMPTY[kind]
    return empty


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, decided and not yet applied. Plain data: it can be printed, asserted, simulated, replayed."""

    step: int
    segments: abc.Sequence[Segment]
    """The work of the step. The scheduler gives the segments as Columns."""
    table_writes: tuple[TableWrite, ...] = ()
    """New entries of block tables, applied before the segments run, in order."""
    copies: TierCopies = NO_COPIES
    """Copies between the device and the host."""

    samples: tuple[int, ...] | None = None
    """Most tokens to sample after each sampling segment, in plan order; None: exactly one after each.

    A segment with 1 gives exactly one. One with n > 1 ends with n - 1 drafted tokens to verify. It gives the drafted
    tokens that are accepted and one more, or fewer, down to none.
    """

    preempted: tuple[str, ...] = ()
    """Ids of sequences that lost their blocks to make room for this step. With a host tier their state goes there."""
    parts: tuple[PartPlan, ...] = ()
    """Contributions of the parts, in the order of the parts. A part that adds nothing is left out."""
    forecast: Forecast = NO_FORECAST

    def part(self, kind: type[P]) -> P:
        """The contribution of the part with plans of this class; `kind()` if it adds nothing."""
        for part in self.parts:
            if isinstance(part, kind):
                return part
        return nothing(kind)

    @property
    def computes(self) -> bool:
        """Whether the device computes anything. A plan that computes nothing is complete when all its copies are."""
        return bool(self.segments) or any(part.computes for part in self.parts)

    @property
    def columns(self) -> Columns[Segment]:
        """The segments by column."""
        return Columns.of(Segment, self.segments)

    @property
    def num_tokens(self) -> int:
        """Number of query tokens of the step, which the token budget bounds."""
        columns = self.columns
        starts: list[int] = columns.column("start")
        stops: list[int] = columns.column("stop")
        return sum(stops) - sum(starts)

    @property
    def drafts(self) -> list[tuple[int, ...]] | None:
        """The drafted tokens of each sampling segment, in plan order; None for a plan without any."""
        if self.samples is None:
            return None
        pairs = zip(self.columns.column("tokens"), self.columns.column("sampling"), strict=True)
        sampled = [tokens for tokens, sampling in pairs if sampling is not None]
        return [tokens[len(tokens) - most + 1 :] for tokens, most in zip(sampled, self.samples, strict=True)]

    @property
    def num_sampled(self) -> int:
        """Number of sampling segments: the length of StepResult.tokens if `samples` is None."""
        return sum([sampling is not None for sampling in self.columns.column("sampling")])
