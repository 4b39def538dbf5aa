"""Padded rows: the values that they add to a plan and to a result, and their sizes for planning."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal, NamedTuple

from holdfast.lm.types.padding import QUANTUM, BatchShape, whole_quanta
from holdfast.lm.types.plan import PartPlan, StepPlan
from holdfast.lm.types.result import PartResult


class Forward(NamedTuple):
    """One run of an unmodified model: some of a plan's segments, padded to the longest of them.

    A forward of the batch (not `apart`) computes the rows that are in the batch. If the row of a segment is not in it
    yet, its whole prompt is computed in this forward and the row joins: by vector shaping if other rows run (Baton
    §4.1), or left-padded if nothing runs. Each row of the batch has exactly one segment in it, or is in `ended`.

    A forward apart computes states that are not in the batch: one chunk of one prompt, or a group of whole prompts from
    position 0, left-padded. Their states join the batch by a `RowMove` "embed" of this plan or a later one.
    """

    stop: int
    """Its segments end before this index of the plan. They begin at the `stop` of the previous forward, or at 0."""
    apart: bool = False
    ended: tuple[int, ...] = ()
    """Rows of the batch that are computed although their sequences have ended (run to completion)."""


RowMoveKind = Literal["embed", "drop", "keep", "store", "offload", "copy", "load", "forget"]


class RowMove(NamedTuple):
    """A move of the state of one row, or of one slot, between the forwards of a plan.

    A row's state is in the batch, or apart. A slot holds one state outside of both, on the device or on the host.

    - embed: the row's state apart joins the batch (vector embedding, Baton §4.2).
    - drop: the row's state is given up, in the batch or apart. Its sequence ended or was preempted.
    - keep: the row's state goes to the slot and stays on the device. The row is empty then.
    - store: the row's state goes to the slot, on the host. The row is empty then.
    - offload: the slot's state goes from the device to the host.
    - copy: a copy of the state of slot `source`, which is on the device and stays there, goes to the slot, on the host.
    - load: a copy of the slot's state, cut to `length` positions, becomes the row's state apart. The slot keeps its
      own.
    - forget: the slot's state is given up.

    The scheduler knows when a copy to the host is complete from `TierCopied.swapped_out`, and when a load from there is
    from `swapped_in`. It needs neither before it plans on: what needs a state waits for it on the device.
    """

    before: int
    """Index of the forward that it happens before. The number of forwards: after the last one."""
    kind: RowMoveKind
    row: int = -1
    """Row of the executor; -1 for offload, copy and forget."""
    slot: int = -1
    """Slot; -1 for embed and drop."""
    length: int = 0
    """Positions of the state afterwards; 0 for drop and forget."""
    source: int = -1
    """Slot that is copied; -1 for all moves but copy."""


@dataclass(frozen=True, slots=True)
class RowPlan(PartPlan):
    """How the segments of a plan are computed on padded rows."""

    forwards: tuple[Forward, ...] = ()
    """The runs of the model that compute the segments, in order. Empty: a single run of packed tokens (paged)."""
    moves: tuple[RowMove, ...] = ()
    """Moves of the states of rows, in the order in which they happen."""


def idle_tokens(plan: StepPlan) -> int:
    """Tokens that the forwards compute and that belong to no segment: padding, and rows whose sequence has ended.

    One insertion of l tokens into a batch of B rows by shaping makes (B - 1)(l - 1) of them (Baton §4.1). Without
    `forwards` there is no padding.
    """
    columns = plan.columns
    lengths = [stop - start for start, stop in zip(columns.column("start"), columns.column("stop"), strict=True)]
    idle = at = 0
    for forward in plan.part(RowPlan).forwards:
        longest = max(lengths[at : forward.stop], default=1)
        rows = forward.stop - at + len(forward.ended)
        idle += rows * longest - sum(lengths[at : forward.stop])
        at = forward.stop
    return idle


@dataclass(frozen=True, slots=True)
class RowResult(PartResult):
    """News of the states of padded rows."""

    lost: tuple[str, ...] = ()
    """Ids of sequences whose state is gone because the device ran out of memory: none of their positions are computed.

    Their sampling segments in this plan and in later ones, up to the plan that starts them again, give no token
    (`counts`).
    """


@dataclass(frozen=True, slots=True)
class RowBytes:
    """Bytes of the state of one row, as a model that was not modified keeps it."""

    fixed: int = 0
    """Bytes that do not depend on the length: recurrent states."""
    growing: tuple[tuple[int, int | None], ...] = ()
    """Growing parts of a state: bytes of a position, and the most positions that are kept (a window); None for all."""

    def of(self, length: int) -> int:
        """Bytes of a state of this many positions."""
        return self.fixed + sum(each * (length if most is None else min(length, most)) for each, most in self.growing)

    @property
    def position(self) -> int:
        """Bytes of one position in a short state; if nothing grows, of the whole row."""
        return sum(each for each, _ in self.growing) or self.fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """The ways to compute rows that give the right logits, as probes against each prompt alone have shown.

    A way that is False is not used. The last resort, one row at a time, is right for every model.
    """

    chunks: bool
    """A prompt may be computed in several forwards."""
    left_padding: bool
    """Prompts of unequal length may be computed in one forward, placeholders in front. If not, only of equal length."""
    batched_decode: bool
    """Rows may be merged and decoded in one forward. If not, each forward has one row."""
    shaping: bool
    """A prompt may be computed with decodes in one forward of the batch (Baton §4.1)."""
    croppable: bool
    """A state may be cut to its first positions, so it can serve a prompt that has only these in common with it."""
    graphs: bool = False
    """A decode may be captured as a CUDA graph."""
    not_captured: str = ""
    """Why it may not, if there is a GPU and graphs are wanted."""
    continues: bool = True
    """A state serves any longer prompt that begins with its tokens. False if an encoder reads the prompt whole."""
    keeps_state: bool = True
    """The model gives its state out. If not, a row is computed from its first token in every step, alone."""

    @property
    def serves_others(self) -> bool:
        """Whether the state of an ended sequence serves a later prompt."""
        return self.keeps_state and self.continues

    @property
    def sentence(self) -> str:
        """The way of computing rows, for the line at start: `prompts in chunks, rows decoded together`."""
        prompts = "prompts in chunks" if self.chunks else "whole prompts"
        if not self.keeps_state:
            return "each row computed again from its first token in every step"
        rows = "rows decoded together" if self.batched_decode else "rows decoded one by one"
        graphs = ", decodes captured" if self.graphs else ""
        if self.not_captured:
            graphs = f", decodes not captured: {self.not_captured}"
        return f"{prompts}, {rows}{graphs}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """The sizes of padded rows that planning needs."""

    memory: int
    """Bytes for the states of all rows: the batch, states apart, and those kept on the device."""
    bytes: RowBytes
    abilities: Abilities
    host_memory: int = 0
    """Bytes for states on the host."""
    quantum: int = QUANTUM
    """The batch has room for a multiple of this many positions in each row."""
    settled: int = 0
    """Positions of the memory for the batch in captured decodes, which `memory` does not include. 0: there is none."""
    longest: int = 1 << 24
    """Most positions of a row."""

    @property
    def positions(self) -> int:
        """Number of positions that the memory holds, for stats; rows if a state does not grow."""
        return self.memory // self.bytes.position

    def settles(self, rows: int, width: int) -> bool:
        """Whether a decode leaves a batch of this size, with the new column, in the memory of captured decodes."""
        if not self.settled or not self.bytes.growing:
            return self.settled > 0
        shape = BatchShape.least(rows, width, self.longest, self.quantum)
        return width <= shape.columns and shape.positions <= self.settled

    def row_bytes(self, width: int) -> int:
        """Bytes of a row in a batch of this width."""
        return self.bytes.of(whole_quanta(width, self.quantum))

    def batch_bytes(self, rows: int, width: int) -> int:
        """Bytes of a batch of this many rows, the longest of which has `width` positions."""
        return rows * self.row_bytes(width)

    def widest_row(self, limit: int) -> int:
        """The widest row that is alone, in multiples of the quantum and at most the first from `limit`."""
        widths = range(self.quantum, limit + self.quantum, self.quantum)
        return self.quantum * bisect_right(widths, self.memory, key=self.bytes.of)

    def longest_row(self, limit: int) -> int:
        """The most positions of a row that is alone: `limit`, or the multiple of the quantum that fits the memory.

        At least the quantum, or `limit` if that is less.
        """
        while limit > self.quantum and self.row_bytes(limit) > self.memory:
            limit -= self.quantum
        return limit
