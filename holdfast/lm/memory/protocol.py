"""The protocol of a memory kind: paged blocks, rows of a padded batch, or whatever else holds the state of sequences.

| verb | of the memory | of one sequence's state |
|---|---|---|
| is there room | `admits`, `needed`, `holds`, `can_grow`, `shortage` | |
| find | | `match`, `lacking`, `touch`, `missing` |
| allocate, fork | | `allocate`, with state that `match` found: it is shared, or copied |
| append | `can_grow` | `grow`, `plan`, `draft`, `accept`, `cache_blocks` |
| free | `freed_by` | `end`, `suspend` |
| swap | `swap_out`, `copied` | `allocate`, which returns the copies from the host |
| lend | `can_lend`, `lend`, `reclaim`, `lent` | `move` |
| report | `stats`, `shortage` | `blocks`, `digests` |

Sizes are in blocks. Where state is not paged a block is one position, so `block_size` is 1. The scheduler's side of a
kind, with the builder of its plans, is `lm.scheduler.kind.MemoryKind`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Sized
from typing import Any, Protocol, TypeVar

from holdfast.lm.memory.copy_ledger import CopyLedger
from holdfast.lm.memory.host_pool import HostPool
from holdfast.lm.memory.turns import NOTHING_SAID, Departure
from holdfast.lm.types import BlockCopy, BlockMove, TierCopied


class Found(Sized, Protocol):
    """The kept state that serves a waiting sequence. Its length is the number of blocks that need not be computed."""

    @property
    def shared(self) -> Collection[int]:
        """The found blocks that are on the device. Empty where state is not paged."""
        ...

    @property
    def copied(self) -> Collection[int]:
        """Further blocks on the device of which the sequence gets copies. They must stay until it has them."""
        ...

    @property
    def host(self) -> Sized:
        """The found blocks that only the host has."""
        ...

    def positions(self, block_size: int) -> int:
        """Number of positions that need not be computed, with blocks of `block_size` positions."""
        ...


FoundT = TypeVar("FoundT", bound=Found)


class SequenceState(Protocol[FoundT]):
    """Which positions of one sequence are resident, and how many it has room for.

    Plans run on the device in the order in which they are made. So a position counts as resident for the plan that
    computes it and for every later plan.
    """

    planned: int
    """Positions [0, planned) are resident, or a plan already made computes them."""

    @property
    def capacity(self) -> int:
        """Number of positions that the sequence has room for."""
        ...

    @property
    def next_full(self) -> int:
        """`cache_blocks` has nothing to do while fewer tokens than this are known."""
        ...

    @property
    def blocks(self) -> Sequence[int]:
        """The block table. Always empty where state is not paged."""
        ...

    @property
    def digests(self) -> list[bytes]:
        """The digests of its first blocks, as far as they were needed; empty if the sequence shares no blocks.

        Always the same list. Callers must not change it.
        """
        ...

    def missing(self, length: int) -> tuple[tuple[int, int], ...]:
        """The ranges of [0, length) that are not resident and that no plan computes yet, in ascending order.

        A state that is to be kept at a position leaves out what comes after it until a plan has computed that position.
        """
        ...

    def most_cuts(self, length: int) -> int:
        """Most steps that could compute more of the first `length` positions and do not, as a state is saved there."""
        ...

    def plan(self, start: int, stop: int) -> None:
        """Record that a plan computes [start, stop), the beginning of the first missing range."""
        ...

    def draft(self, start: int, stop: int) -> int:
        """Have the current plan, which computes `start`, verify a draft at [start + 1, stop), as far as there is room.

        Returns the stop for which there is room. No position from `start` on counts as computed until `accept` says
        how many do. Without room for any of the draft, the result is start + 1 and nothing changes.
        """
        ...

    def accept(self, count: int) -> None:
        """Count the first `count` positions of the verified draft as computed, as its result says."""
        ...

    def match(self, tokens: Sequence[int]) -> FoundT:
        """Find the kept state of these tokens. The last token never counts: it must be computed to give logits."""
        ...

    def lacking(self, tokens: Sequence[int]) -> dict[int, bytes]:
        """The digests of what tiers below the memory could add. The last token never counts.

        For paged blocks, all full blocks that no tier of the memory has, by place. Other kinds say what their numbers
        mean.
        """
        ...

    def candidates(self, tokens: Sequence[int]) -> Sequence[bytes]:
        """Digests of the last full blocks, after which another engine may have left a state for these tokens.

        They are empty where `lacking` names all that may be below the memory, or where nearly all is known.
        """
        ...

    def touch(self, tokens: Sequence[int], now: float) -> None:
        """Count the kept state of a waiting sequence as used now, so that it stays until the sequence starts."""
        ...

    def allocate(self, found: FoundT, length: int, now: float) -> tuple[BlockCopy, ...]:
        """Take the state found, and room for the rest of `length` positions. The sequence must have no room yet.

        Returns the block copies from the host that the current plan must do.
        """
        ...

    def occupy(self, row: int) -> None:
        """The sequence has this row of the plans from now on, until `end` or `suspend`. Called after `allocate`."""
        ...

    def move(self, places: Mapping[int, int]) -> None:
        """Replace blocks of the table whose contents moved: `places` maps old to new (`SequenceMemory.lend`)."""
        ...

    def grow(self, now: float) -> None:
        """Add room for at least one more position. The memory must allow it (`SequenceMemory.can_grow`)."""
        ...

    def cache_blocks(self, tokens: Sequence[int]) -> None:
        """Let others find all computed state of these known tokens."""
        ...

    def end(self, tokens: Sequence[int], now: float, departure: Departure = NOTHING_SAID) -> bool:
        """Give up the room, because the sequence has ended with these tokens. Others may find its state.

        `departure` says what is known of the time until then.

        Returns whether its row is free, if it has one. It is not while the batch still computes it.
        """
        ...

    def suspend(self, tokens: Sequence[int], now: float) -> bool:
        """Give up the room, because the sequence must wait with these known tokens.

        It finds as much of its state again as stays (`match`).

        Returns whether that state is on the host, or goes there.
        """
        ...


class SequenceMemory(Protocol[FoundT]):
    """The memory of all sequences on one device. `now` is in seconds and never decreases."""

    num_blocks: int
    block_size: int
    max_copies: int
    """The most blocks that one plan copies in either direction, unless a single sequence brings in more."""
    copies: CopyLedger
    """Block copies under way between the tiers."""
    host: HostPool | None
    """The blocks of the host tier."""
    swapped_in: int
    swapped_out: int
    """Number of blocks copied to the host so far."""
    dropped: int
    """Number of blocks whose state was lost so far: no tier has it."""
    lent: int
    """Blocks that are lent to a part now. They come back when it gives them up (`Part.make_room`)."""
    can_lend: bool
    """Whether it lends blocks at all."""

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated, now or once idle state has moved to the host."""
        ...

    @property
    def allocatable(self) -> int:
        """Number of blocks that can be allocated now."""
        ...

    @property
    def can_swap_out(self) -> bool:
        """Whether copies to the host are under way, or could begin, that make blocks allocatable."""
        ...

    @property
    def cached(self) -> int:
        """Number of blocks that have no owner and still hold state."""
        ...

    @property
    def used(self) -> int:
        """Number of blocks with an owner."""
        ...

    def blocks_for(self, positions: int) -> int:
        """Number of blocks that hold this many positions of one sequence, alone."""
        ...

    def longest(self, limit: int) -> int:
        """The most positions of a sequence that has the memory to itself; not counted far beyond `limit`."""
        ...

    def holds(self, count: int, blocks: int, longest: int) -> bool:
        """Whether `count` sequences of at most `longest` positions fit; `blocks` is what they take if each is alone.

        For policies that reserve a request's longest length.
        """
        ...

    def admits(self, found: FoundT, length: int, reserved: int) -> bool:
        """Whether a waiting sequence of `length` positions may start and leave `reserved` blocks available.

        If it must wait only until idle state is copied to the host, the next `swap_out` makes room.
        """
        ...

    def needed(self, found: FoundT, length: int) -> int:
        """Least number of available blocks that starting a sequence of `length` positions takes."""
        ...

    def freed_by(self, victim: SequenceState[FoundT], after: Collection[SequenceState[FoundT]]) -> int:
        """Number of blocks that preempting `victim` makes available, once the sequences in `after` are preempted.

        The number is an estimate: admission checks memory again. A batch of rows shrinks in width only when its longest
        row leaves, so there the order counts.
        """
        ...

    def can_grow(self, state: SequenceState[FoundT]) -> bool:
        """Whether a running sequence can get room for one more position now."""
        ...

    def swap_out(self, step: int, num_tokens: int, now: float) -> tuple[BlockCopy, ...]:
        """Begin to copy idle state to the host in plan `step` of `num_tokens` tokens. Returns the copies to do."""
        ...

    def copied(self, copied: TierCopied) -> None:
        """Take note of the copies between the tiers that are complete."""
        ...

    def copy_seconds(self, blocks: int) -> float | None:
        """Predicted seconds to copy this many blocks from the host; None if the rate is not known."""
        ...

    def lend(self, count: int, now: float, *, most_moves: int) -> tuple[BlockMove, ...]:
        """Lend up to `count` more blocks to a part. `lent` says how many in all.

        The plan must do the returned moves first, at most `most_moves`, and every state must name the new places at
        once (`SequenceState.move`).
        """
        ...

    def reclaim(self, count: int) -> None:
        """Take `count` of the lent blocks back. They are free at once. Raises RuntimeError if fewer are lent."""
        ...

    def shortage(self, found: FoundT, length: int, reserved: int) -> str:
        """Why a waiting sequence of `length` positions may not start and leave `reserved` blocks available.

        "no blocks" or "copies under way", two of `queue_report.REASONS`; empty if memory does not keep it.
        """
        ...

    def stats(self) -> Mapping[str, int]:
        """The fields of SchedulerStats that the memory knows."""
        ...


AnyState = SequenceState[Any]
AnyMemory = SequenceMemory[Any]
"""A memory as the scheduler sees it: the scheduler only passes the result of `match` back to the same memory."""
