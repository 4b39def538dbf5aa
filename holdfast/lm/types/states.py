"""Recurrent states: the values that they add to a plan, and their sizes for planning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from holdfast.lm.types.plan import BlockMove, PartPlan
from holdfast.lm.types.result import PartResult


class StateCopy(NamedTuple):
    """The recurrent states of all layers of one sequence, copied from one slot to another."""

    source: int
    """Slot to read. In `StatePlan.starts`, -1 stands for the state before the first token, which is all zeros."""
    target: int
    """Slot to write."""


class KeptInputs(NamedTuple):
    """The inputs of tokens in the recurrent layers, kept until it is known which of these tokens count."""

    row: int
    """Row of the tokens' sequence."""
    places: tuple[int, ...]
    """The place of each token, in order."""


@dataclass(frozen=True, slots=True)
class StatePlan(PartPlan):
    """The copies of recurrent states that a plan does, in the order of the fields, before its segments run.

    Slot r below the number of rows is the state of the sequence in row r: segments read it and leave the new state in
    it. Slots above hold snapshots, which only copies write.

    A segment that verifies a draft leaves the state of its row as it is, and keeps the inputs of its tokens. The first
    plan after its result moves the state on by the accepted ones.
    """

    replays: tuple[KeptInputs, ...] = ()
    """The accepted tokens of drafts that earlier plans verified. The states of their rows move on by them."""

    saves: tuple[StateCopy, ...] = ()
    """Copies from rows to snapshots: states as the plans before this one leave them."""
    swap_in: tuple[StateCopy, ...] = ()
    """Copies from slots on the host: to rows of sequences that begin with this plan, and to snapshots ahead of need."""
    starts: tuple[StateCopy, ...] = ()
    """Copies from snapshots to the rows of other sequences that begin with this plan."""
    tails: tuple[BlockMove, ...] = ()
    """Copies of KV blocks that are full only in part, for the same sequences: each gets a block of its own.

    No copy from the host that this plan begins writes to their sources.
    """
    swap_out: tuple[StateCopy, ...] = ()
    """Copies from snapshots on the device to slots on the host. Each is complete before the next plan runs."""
    verifies: tuple[KeptInputs, ...] = ()
    """The segments of this plan that verify drafts, by row, and the place of each of their tokens."""

    @property
    def computes(self) -> bool:
        """Whether the device has work to do before the segments."""
        return bool(self.replays or self.saves or self.starts or self.tails or self.swap_out or self.swap_in)

    @property
    def uses_host(self) -> bool:
        """Whether the plan reads or writes slots on the host."""
        return bool(self.swap_out or self.swap_in)


@dataclass(frozen=True, slots=True)
class StateResult(PartResult):
    """A rank has done a plan's copies of states to the host and from there."""

    @property
    def of_each_rank(self) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """The sizes of recurrent states that planning needs."""

    snapshots: int
    """Number of slots for snapshots on the device. They come after the slots of the rows."""
    host_snapshots: int = 0
    """Number of slots for snapshots on the host."""
    slot_bytes: int
    """Bytes of a slot: the states of all layers of one sequence."""
    places: int = 0
    """Number of drafted tokens whose inputs the recurrent layers can keep; 0: no drafts are verified."""
