"""RowPool: memory as padded rows take it, by rows × longest, and where the state of each sequence is."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.lm.memory.copy_ledger import CopyLedger
from holdfast.lm.memory.host_pool import HostPool
from holdfast.lm.memory.protocol import SequenceState
from holdfast.lm.types import BlockCopy, RowMove, RowMoveKind, RowShape

Place = Literal["nowhere", "apart", "batch"]

LESS = 0.1
"""Share of the memory that is given up each time the device ran out of it."""
RECOVERY = 256
"""Steps without such a loss after which as much is tried again."""


@dataclass(frozen=True, slots=True)
class FoundRow:
    """What is kept of a waiting sequence: the first `length` positions, in a slot on the host."""

    length: int = 0
    slot: int = -1

    def __len__(self) -> int:
        """Positions that need not be computed."""
        return self.length

    @property
    def shared(self) -> Collection[int]:
        """No blocks: state is not paged."""
        return ()

    @property
    def host(self) -> tuple[()]:
        """No block copies: the state comes by a `RowMove`."""
        return ()


NOTHING_FOUND = FoundRow()


class RowState:
    """The state of one sequence: how many of its positions are computed, and where.

        nowhere ──plan──▶ apart ──embed──▶ batch          nowhere ──join──▶ batch
           ▲                └────leave, free, suspend───────┘                 (its prompt is computed in the batch)
           └──occupy: a suspended state comes back from its slot, apart

    The pool gives up its memory with `leave`, `free` and `suspend`. Plans run in the order in which they are made, so a
    move that is noted now happens before whatever is planned after it.
    """

    __slots__ = (
        "_pool", "ahead", "capacity", "lost_alone", "next_full", "place", "planned", "resumed", "row", "since", "slot",
    )  # fmt: skip

    blocks: Sequence[int] = ()

    def __init__(self, pool: RowPool, root: bytes | None = None) -> None:
        """`root` starts the chain of digests (`Identity.root`); None: nothing of it may serve other requests."""
        self._pool = pool
        self.planned = 0
        """Positions [0, planned) are computed, or a plan already made computes them."""
        self.capacity = 0
        """Positions that memory is counted for, beside what the longest row of the batch makes each row hold."""
        self.next_full = sys.maxsize
        self.place: Place = "nowhere"
        self.row = -1
        """The row of the plans that names it."""
        self.ahead = False
        """It was computed before there was a place for it in the batch."""
        self.slot = -1
        """Where a suspended state is."""
        self.resumed = False
        """The row does not hold its last token: the next decode must give it."""
        self.since = -1
        """Number of the plan that computes position 0."""
        self.lost_alone = 0
        """How often the device lost it while no other sequence had a state."""

    def missing(self, length: int) -> tuple[tuple[int, int], ...]:
        """The range of [0, length) that no plan computes yet."""
        return ((self.planned, length),) if self.planned < length else ()

    def plan(self, start: int, stop: int) -> None:
        """Note that a plan computes [start, stop). A state that is nowhere begins apart."""
        assert start == self.planned
        self.planned = stop
        self.capacity = max(self.capacity, stop)
        if self.place == "nowhere":
            self.place = "apart"

    def rollback(self, length: int) -> None:
        """Raises RuntimeError: no state of a row can forget a position."""
        raise RuntimeError(f"row {self.row} is rolled back to {length} positions; rows verify no drafts")

    def match(self, tokens: Sequence[int]) -> FoundRow:
        """Find the suspended state of this sequence."""
        return FoundRow(self.planned, self.slot) if self.slot >= 0 else NOTHING_FOUND

    def touch(self, tokens: Sequence[int], now: float) -> None:
        """Nothing: a suspended state stays until its sequence comes back or ends."""

    def allocate(self, found: FoundRow, length: int, now: float) -> tuple[BlockCopy, ...]:
        """Count memory for a row of the batch of `length` positions and one more. Returns no block copies."""
        assert self.place == "nowhere" and self not in self._pool.members
        self.planned, self.capacity = found.length, length + 1
        self._pool.members[self] = None
        return ()

    def occupy(self, row: int) -> None:
        """Take a row of the plans. A suspended state is loaded, and its slot is empty then."""
        self.row = row
        if self.slot >= 0:
            self._pool.move("load", row, self.slot, self.planned)
            self._forget_slot()
            self.place = "apart"

    def wait_ahead(self) -> None:
        """Count it beside the batch, until `embed`."""
        del self._pool.members[self]
        self._pool.ahead[self] = None
        self.ahead = True

    def embed(self) -> None:
        """Let a state apart join the batch (Baton §4.2)."""
        assert self.place == "apart"
        self.claim_place()
        self._pool.move("embed", self.row, length=self.planned)
        self.place = "batch"

    def claim_place(self) -> None:
        """Count a state that was computed ahead as a row of the batch."""
        if self.ahead:
            del self._pool.ahead[self]
            self._pool.members[self] = None
            self.ahead = False

    def join(self) -> None:
        """Join the batch in the forward that computes its whole prompt."""
        assert self.place == "nowhere"
        self.place = "batch"

    def grow(self, now: float) -> None:
        """Count memory for one more position."""
        self.capacity += 1

    def claim(self, positions: int) -> None:
        """Count memory for this many positions, which the batch must have room for (`RowPool.can_decode`)."""
        self.capacity = max(self.capacity, positions)

    def cache_blocks(self, tokens: Sequence[int]) -> None:
        """Nothing: other requests do not find this state."""

    def leave(self) -> None:
        """Give up the state: nothing more of the sequence is computed. Its row stays its own until `free`."""
        if self.place != "nowhere":
            self._pool.move("drop", self.row)
        self._vanish()

    def free(self, now: float) -> None:
        """Give up the state, wherever it is, and count it as not computed."""
        self.leave()
        self._forget_slot()
        self.planned = 0

    def suspend(self) -> bool:
        """Give up the row: its state goes to the host if there is room, or is computed again later. Whether it went."""
        size, pool = self._pool.bytes(self.planned), self._pool
        if self.place == "nowhere":
            self._vanish()
        elif size <= pool.host_free:
            self.slot = pool.store(self, size)
            self._vanish()
        else:
            pool.dropped += self.planned
            self.leave()
            self.planned = 0
        return self.slot >= 0

    def run_on(self) -> None:
        """Leave the sequence and stay in the batch, where its row is computed until the batch ends."""
        assert self.place == "batch"
        self._pool.ended[self.row] = self.planned
        self._vanish()

    def lose(self) -> None:
        """The device has lost the state: nothing is computed, and nothing is to be moved."""
        self._vanish()
        self._forget_slot(lost=True)
        self.planned = 0

    def _vanish(self) -> None:
        self._pool.members.pop(self, None)
        self._pool.ahead.pop(self, None)
        self.ahead = self.resumed = False
        self.place, self.capacity = "nowhere", 0

    def _forget_slot(self, *, lost: bool = False) -> None:
        if self.slot >= 0:
            self._pool.forget(self.slot, lost=lost)
            self.slot = -1


class RowPool:
    """The memory of padded rows. Sizes are in positions for the scheduler, and in bytes within.

    All rows of the batch are as wide as the longest of them, rounded up to the quantum of its buffers, so the batch
    takes rows × longest. A sequence counts as a row of the batch as soon as its prompt is started, with all the
    positions that are known. Beside the batch are the states that were computed ahead of a place in it.

    Running rows grow up to the threshold, and admission leaves the headroom below it: above the one rows leave, below
    the other they come back (Baton §4.3, batch size scaling). The first sequence in rank may use all the memory.

    Moves of states are noted in order (`move`); the builder of plans takes them (`take_moves`) each time it begins a
    forward, so they happen before it.
    """

    def __init__(self, shape: RowShape, *, threshold: float = 0.95) -> None:
        """`threshold` is the share of the memory above which rows leave."""
        self.shape = shape
        self.num_blocks = shape.positions
        self.block_size = 1
        self.max_copies = self.num_blocks
        self.copies = CopyLedger()
        """Empty: there are no block copies."""
        self.host: HostPool | None = None
        """None: states on the host are not blocks."""
        self.swapped_in = 0
        self.swapped_out = 0
        self.dropped = 0
        self.members: dict[RowState, None] = {}
        """States of running sequences: in the batch, or on their way there."""
        self.ahead: dict[RowState, None] = {}
        """States that were computed before there was a place for them."""
        self.ended: dict[int, int] = {}
        """By row, the length of states that stay in the batch although their sequences have ended."""
        self.shrinks = 0
        """How often the device ran out of memory."""
        self.host_used = 0
        """Bytes of states on the host."""
        self._threshold = threshold
        self._shares = 1.0
        self._steps_since_loss = 0
        self._moves: list[RowMove] = []
        self._slots: dict[int, int] = {}
        """By slot, the bytes of its state."""
        self._next_slot = 0
        self._stored: list[int] = []
        """Bytes of stores whose plan is not known yet."""
        self._storing: deque[tuple[int, int]] = deque()
        """Plan and bytes of stores that are not complete."""

    # Sizes, in bytes.

    def bytes(self, length: int) -> int:
        """Bytes of a state of this many positions, apart."""
        return self.shape.bytes.of(length)

    def row_bytes(self, width: int) -> int:
        """Bytes of a row in a batch of this width."""
        quantum = self.shape.quantum
        return self.shape.bytes.of(-(-width // quantum) * quantum)

    @property
    def memory(self) -> int:
        """Bytes that may be used in all; less than there are after the device ran out of them."""
        return int(self.shape.memory * self._shares)

    @property
    def rows(self) -> int:
        """Rows of the batch: those of running sequences, and those that stay until the batch ends."""
        return len(self.members) + len(self.ended)

    @property
    def width(self) -> int:
        """Positions of the longest row."""
        return max((*(state.capacity for state in self.members), *self.ended.values()), default=0)

    @property
    def beside(self) -> int:
        """Bytes of states beside the batch."""
        return sum(self.bytes(state.capacity) for state in self.ahead)

    @property
    def in_use(self) -> int:
        """Bytes in use, with those of rows that are about to leave for the host."""
        leaving = sum(self._stored) + sum(size for _, size in self._storing)
        return self.rows * self.row_bytes(self.width) + self.beside + leaving

    @property
    def host_free(self) -> int:
        """Bytes that states on the host may still take."""
        return self.shape.host_memory - self.host_used

    @property
    def _most(self) -> int:
        """Bytes that rows may grow to."""
        return int(self.memory * self._threshold)

    # What the scheduler asks, in positions.

    @property
    def available(self) -> int:
        """Positions of one row that still fit; an empty memory takes a row of any length."""
        if not (self.members or self.ended or self.ahead):
            return self.num_blocks
        return max(0, self._most - self.in_use) // self.shape.bytes.position

    @property
    def allocatable(self) -> int:
        """The same: no idle state has to be copied first."""
        return self.available

    @property
    def can_swap_out(self) -> bool:
        """False: rows go to the host when others need their memory, and then at once."""
        return False

    @property
    def cached(self) -> int:
        """0: no state stays without an owner."""
        return 0

    @property
    def used(self) -> int:
        """Positions in use, of all rows as wide as the longest, rounded up."""
        used = self.rows * self.row_bytes(self.width) + self.beside
        return min(self.num_blocks, -(-used // self.shape.bytes.position))

    def blocks_for(self, positions: int) -> int:
        """Positions that one row of this length takes, alone."""
        return positions

    def holds(self, count: int, blocks: int, longest: int) -> bool:
        """Whether a batch of `count` rows of at most `longest` positions fits; one row always does."""
        return count <= 1 or count * self.row_bytes(longest) + self.beside <= self._most

    def admits(self, found: FoundRow, length: int, reserved: int) -> bool:
        """Whether one more row of `length` positions, and one to come, may join and leave `reserved` available."""
        return self.admits_without((), length, reserved)

    def admits_without(self, victims: Collection[SequenceState[Any]], length: int, reserved: int) -> bool:
        """As `admits`, once the rows of `victims` have left. An empty batch always takes a row, however long."""
        rest = [state.capacity for state in self.members if state not in victims]
        if not rest and not self.ended and not self.ahead:
            return True
        width = max((length + 1, *rest, *self.ended.values()))
        total = (len(rest) + len(self.ended) + 1) * self.row_bytes(width) + self.in_use - self._batch_bytes()
        return total <= self._most - reserved * self.shape.bytes.position

    def admits_ahead(self, length: int, reserved: int) -> bool:
        """Whether a state of `length` positions may be computed ahead and leave `reserved` available."""
        if not (self.members or self.ended or self.ahead):
            return True
        return self.in_use + self.bytes(length + 1) <= self._most - reserved * self.shape.bytes.position

    def admits_place(self, state: RowState, reserved: int) -> bool:
        """Whether a state that was computed ahead may join the batch and leave `reserved` available."""
        if not self.members and not self.ended and len(self.ahead) == 1:
            return True
        total = (self.rows + 1) * self.row_bytes(max(self.width, state.capacity)) + self.in_use - self._batch_bytes()
        return total - self.bytes(state.capacity) <= self._most - reserved * self.shape.bytes.position

    def needed(self, found: FoundRow, length: int) -> int:
        """Positions that one more row of `length` takes, with those by which it makes the others wider."""
        wider = (self.rows + 1) * self.row_bytes(max(self.width, length + 1)) - self._batch_bytes()
        return wider // self.shape.bytes.position

    def freed_by(self, victim: SequenceState[Any], after: Collection[SequenceState[Any]]) -> int:
        """Positions that preempting `victim` makes available: its row, and what others lose if it was the longest."""
        rest = [state.capacity for state in self.members if state not in after]
        without = [state.capacity for state in self.members if state not in after and state is not victim]
        ended = tuple(self.ended.values())

        def size(capacities: Sequence[int]) -> int:
            return (len(capacities) + len(ended)) * self.row_bytes(max((*capacities, *ended), default=0))

        return (size(rest) - size(without)) // self.shape.bytes.position

    def can_grow(self, state: SequenceState[Any]) -> bool:
        """Whether this row may become one position longer."""
        width = max(self.width, state.capacity + 1)
        return self.rows * self.row_bytes(width) + self.beside <= self._most

    def can_decode(self, states: Iterable[RowState]) -> bool:
        """Whether each of these rows, and each that has ended, may become one position longer.

        States on their way to the host do not count: their room is there as soon as the copy is complete.
        """
        width = max(
            self.width,
            max((state.planned + 1 for state in states), default=0),
            max(self.ended.values(), default=-1) + 1,
        )
        return self.rows * self.row_bytes(width) + self.beside <= self._most

    def swap_out(self, step: int, num_tokens: int, now: float) -> tuple[BlockCopy, ...]:
        """No block copies. Stores noted so far belong to plan `step`."""
        self._storing += [(step, size) for size in self._stored]
        self._stored.clear()
        return ()

    def finish_swap_out(self, step: int) -> None:
        """The stores that plan `step` and earlier plans began are complete."""
        while self._storing and self._storing[0][0] <= step:
            self._storing.popleft()

    # Moves of states.

    def move(self, kind: RowMoveKind, row: int = -1, slot: int = -1, length: int = 0) -> None:
        """Note what happens to a state next."""
        self._moves.append(RowMove(-1, kind, row, slot, length))

    def take_moves(self, before: int) -> list[RowMove]:
        """The moves noted since the last call, all before the forward of this index."""
        moves = [move._replace(before=before) for move in self._moves]
        self._moves.clear()
        return moves

    def store(self, state: RowState, size: int) -> int:
        """Note that a row's state of `size` bytes goes to the host; its slot there."""
        slot, self._next_slot = self._next_slot, self._next_slot + 1
        self._slots[slot] = size
        self.host_used += size
        self.swapped_out += state.planned
        self._stored.append(size)
        self.move("store", state.row, slot, state.planned)
        return slot

    def forget(self, slot: int, *, lost: bool = False) -> None:
        """Note that a slot's state is given up; `lost`: it was never there."""
        self.host_used -= self._slots.pop(slot)
        if not lost:
            self.move("forget", slot=slot)

    # Rows that stay although their sequences have ended.

    def extend_ended(self, most: int) -> tuple[list[int], list[int]]:
        """Count one more position for each ended row. Rows of `most` positions leave; the others', and theirs."""
        gone = [row for row, length in self.ended.items() if length >= most]
        self.drop_ended(gone)
        for row in self.ended:
            self.ended[row] += 1
        return list(self.ended), gone

    def drop_ended(self, rows: Iterable[int]) -> None:
        """Note that these ended rows leave the batch."""
        for row in rows:
            del self.ended[row]
            self.move("drop", row)

    # Memory that turns out to be less than was measured.

    def shrink(self) -> None:
        """The device ran out of memory: use less of it from now on."""
        self.shrinks += 1
        self._steps_since_loss = 0
        self._shares *= 1 - LESS

    def recover(self) -> None:
        """A step had memory enough: after many of them, try as much again as before the last loss."""
        if self._shares < 1.0:
            self._steps_since_loss += 1
            if self._steps_since_loss >= RECOVERY:
                self._steps_since_loss = 0
                self._shares = min(1.0, self._shares / (1 - LESS))

    def _batch_bytes(self) -> int:
        return self.rows * self.row_bytes(self.width)
