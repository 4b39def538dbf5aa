"""RowPool: the memory of padded rows, which take rows × longest, and where the state of each sequence is."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from holdfast.lm.memory.copy_ledger import CopyLedger
from holdfast.lm.memory.host_pool import HostPool
from holdfast.lm.memory.kept_rows import FoundRow as FoundState
from holdfast.lm.memory.kept_rows import KeptRows, RowKey
from holdfast.lm.memory.protocol import SequenceState
from holdfast.lm.memory.retention import RetentionRule
from holdfast.lm.memory.turns import NEW, NOTHING_SAID, Departure
from holdfast.lm.types import BlockCopy, BlockMove, RowMove, RowMoveKind, RowShape, TierCopied

Place = Literal["nowhere", "apart", "batch"]

Root = bytes
"""A digest that starts the chain of digests of one identity (`Identity.root`)."""
LESS = 0.1
"""Share of the memory that is given up each time the device runs out of it."""
RECOVERY = 256
"""Number of steps without running out of memory after which the last share given up is tried again."""


@dataclass(frozen=True, slots=True)
class FoundRow:
    """Kept state of a waiting sequence: its first `length` positions, in a slot."""

    length: int = 0
    slot: int = -1
    on_host: bool = False

    def __len__(self) -> int:
        """Number of positions that need not be computed."""
        return self.length

    @property
    def shared(self) -> Collection[int]:
        """Empty: state is not paged, so there are no blocks."""
        return ()

    @property
    def copied(self) -> Collection[int]:
        """Empty, too."""
        return ()

    def positions(self, block_size: int) -> int:
        """Number of positions that need not be computed."""
        return self.length

    @property
    def host(self) -> Sized:
        """The positions that come from the host. A `RowMove` brings them, not block copies."""
        return range(self.length if self.on_host else 0)


NOTHING_FOUND = FoundRow()


class StateBelow(NamedTuple):
    """A state in a tier below the host that serves a prompt."""

    length: int
    """Leading tokens of the prompt that need not be computed."""
    digest: bytes
    """Name of the state (`RowKey.digest`)."""


FindBelow = Callable[[bytes, Sequence[int], int], StateBelow | None]
"""Finds a state below the host that is worth fetching for a prompt. None if there is none.

Called with the root of the prompt's identity, its tokens, and how many of these the memory saves.
"""


HasBelow = Callable[[RowKey], bool]
"""Whether a tier below the host has a state that serves every prompt that one with this key would."""


def never(key: RowKey) -> bool:
    """There is no tier below the host."""
    return False


def nothing_below(root: bytes, tokens: Sequence[int], saved: int) -> StateBelow | None:
    """There is no tier below the host."""
    return None


class Store(NamedTuple):
    """A state that goes to the host."""

    slot: int
    size: int
    """Bytes on the device that are free once the state is on the host."""


class RowState:
    """The state of one sequence: how many of its positions are computed, and where.

        nowhere ──plan──▶ apart ──embed──▶ batch          nowhere ──join──▶ batch
           ▲                └────leave, free, suspend───────┘                 (its prompt is computed in the batch)
           └──occupy: its suspended state, or a copy of one that an ended sequence left, comes from a slot, apart

    The pool gives up its memory with `leave`, `free` and `suspend`. Plans run in the order in which they are made, so a
    move that is recorded now happens before everything that is planned after it.
    """

    __slots__ = (
        "_pool", "_prompt", "_root", "_start", "ahead", "capacity", "digests", "kept", "lost_alone", "name",
        "next_full", "place", "planned", "resumed", "row", "since", "slot", "source",
    )  # fmt: skip

    blocks: Sequence[int] = ()

    def __init__(self, pool: RowPool, root: bytes | None = None, name: str = "") -> None:
        """`root` starts the chain of digests (`Identity.root`). None: other requests may not use this state.

        `name` is the id of the sequence.
        """
        self.name = name
        self.digests: list[bytes] = []
        """Always empty: state is not paged."""
        self._pool = pool
        self._root = root
        self._start = NEW
        """The state that the sequence began with."""
        self._prompt: Sequence[int] = ()
        """The tokens for which state was looked for last."""
        self.planned = 0
        """Positions [0, planned) are computed, or a plan already made computes them."""
        self.capacity = 0
        """Number of positions that memory is counted for, without the padding to the longest row of the batch."""
        self.next_full = sys.maxsize
        self.place: Place = "nowhere"
        self.row = -1
        """Index by which plans name its row; -1 without a row."""
        self.ahead = False
        """Whether it was computed before the batch had a place for it."""
        self.slot = -1
        """Slot of its suspended state; -1 if it is not suspended."""
        self.source = -1
        """Slot of the ended sequence's state that this one began with; -1 if it began with none."""
        self.kept = -1
        """Slot to which its own state went when the sequence ended; -1 before that."""
        self.resumed = False
        """Whether the row lacks its last token, which the next decode must then give."""
        self.since = -1
        """Number of the plan that computes position 0."""
        self.lost_alone = 0
        """Number of times that the device lost it while no other sequence had a state."""

    def missing(self, length: int) -> tuple[tuple[int, int], ...]:
        """The range of [0, length) that no plan computes yet."""
        return ((self.planned, length),) if self.planned < length else ()

    def most_cuts(self, length: int) -> int:
        """None: no state is saved within a prompt."""
        return 0

    def plan(self, start: int, stop: int) -> None:
        """Record that a plan computes [start, stop). A state that is nowhere begins apart."""
        assert start == self.planned
        self.planned = stop
        self.capacity = max(self.capacity, stop)
        if self.place == "nowhere":
            self.place = "apart"

    def draft(self, start: int, stop: int) -> int:
        """Raises RuntimeError: no state of a row can forget a position."""
        raise RuntimeError(f"row {self.row} gets a draft at {start + 1} to {stop}; rows verify no drafts")

    def accept(self, count: int) -> None:
        """Raises RuntimeError: there is no draft."""
        raise RuntimeError(f"row {self.row} accepts {count} positions of a draft; rows verify no drafts")

    def match(self, tokens: Sequence[int]) -> FoundRow:
        """Find the suspended state of this sequence, or the state of an ended one that saves most of its tokens."""
        self._prompt = tokens
        if self.slot >= 0:
            return FoundRow(self.planned, self.slot, on_host=True)
        return self._pool.find(self._root, tokens)

    def lacking(self, tokens: Sequence[int]) -> dict[int, bytes]:
        """The state below the host that saves more of these tokens than the memory: its digest by the tokens saved."""
        if self.slot >= 0 or self._root is None:
            return {}
        found = self._pool.find_below(self._root, tokens)
        return {} if found is None else {found.length: found.digest}

    def candidates(self, tokens: Sequence[int]) -> Sequence[bytes]:
        """Empty: no other engine reads or writes the tiers below."""
        return ()

    def touch(self, tokens: Sequence[int], now: float) -> None:
        """Count the kept state of an ended sequence as used now. A suspended state stays in any case."""
        found = self._pool.find(self._root, tokens)
        if found.slot >= 0:
            self._pool.kept.touch(found.slot, now)

    def allocate(self, found: FoundRow, length: int, now: float) -> tuple[BlockCopy, ...]:
        """Count memory for a row of the batch of `length` positions and one more. Returns no block copies."""
        assert self.place == "nowhere" and self not in self._pool.members
        if self._start is NEW and self._root is not None:
            self._start = self._pool.kept.begin(self._root, self._prompt, now)
        if self.slot < 0 and found.slot >= 0:
            self.source, self.since = found.slot, -1
            self._pool.kept.touch(found.slot, now)
            if found.on_host:
                self._pool.swapped_in += found.length
        self.planned, self.capacity = found.length, length + 1
        self._pool.members[self] = None
        return ()

    def occupy(self, row: int) -> None:
        """Take row `row` of the plans, and load its state from a slot if there is one.

        The slot of a suspended state is then empty. The state of an ended sequence is copied, and stays for others.
        """
        self.row = row
        if self.planned and self.slot < 0:
            self._pool.move("load", row, self.source, self.planned)
            self.place = "apart"
        if self.slot >= 0:
            self._pool.move("load", row, self.slot, self.planned)
            self._forget_slot()
            self.place = "apart"

    def move(self, places: Mapping[int, int]) -> None:
        """Do nothing: there are no blocks that could move."""

    def wait_ahead(self) -> None:
        """Count the state outside the batch until `embed`."""
        del self._pool.members[self]
        self._pool.ahead[self] = None
        self.ahead = True

    def embed(self) -> None:
        """Let a state apart join the batch (Baton §4.2)."""
        assert self.place == "apart"
        self.claim_place()
        self._pool.move("embed", self.row, length=self.planned)
        self.place = "batch"
        self._pool._settled = False

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
        self._pool._settled = False

    def grow(self, now: float) -> None:
        """Count memory for one more position."""
        self.capacity += 1

    def claim(self, positions: int) -> None:
        """Count memory for this many positions, which the batch must have room for (`RowPool.can_decode`)."""
        self.capacity = max(self.capacity, positions)

    def cache_blocks(self, tokens: Sequence[int]) -> None:
        """Do nothing: other requests do not find the state of a running sequence."""

    def leave(self) -> None:
        """Give up the state, because nothing more of the sequence is computed. Its row stays its own until `free`."""
        if self.place != "nowhere":
            self._pool.move("drop", self.row)
        self._vanish()

    def keep(self, known: int | None = None) -> None:
        """Give up the row of a sequence that computes nothing more. Its state stays for others, if it can serve any.

        `known` is how many tokens of the sequence there will ever be; None: at least as many as it has positions. A
        state of more positions is cut, or given up.
        """
        length = self.planned if known is None else min(known, self.planned)
        whole = length == self.planned or self._pool.shape.abilities.croppable
        if self._root is None or not self._pool.keeps or self.place == "nowhere" or not length or not whole:
            self.leave()
            return
        self.planned = length
        self.kept = self._pool.keep(self)
        self._vanish()

    def settle(self, tokens: Sequence[int], now: float) -> None:
        """Let others find the state that `keep` kept, now that the tokens of the sequence are known."""
        if self.kept >= 0 and self._root is not None:
            self._pool.settle(self.kept, self._root, tokens[: self.planned], self.planned, now)
        self.kept = -1

    def leave_batch(self, known: int | None = None) -> None:
        """Compute nothing more: the row leaves the batch, or stays in it until the batch ends, if the pool says so.

        The state of a row that leaves may serve the next turn of a conversation. `known` is passed to `keep`.
        """
        if self._pool.to_completion and self.place == "batch":
            self.run_on()
        else:
            self.keep(known)

    def end(self, tokens: Sequence[int], now: float, departure: Departure = NOTHING_SAID) -> bool:
        """Give up the row and the memory, because the sequence has ended with these tokens. Others may find its state.

        Returns whether its row is free. It is not while it stays in the batch until the batch ends.
        """
        self.leave_batch(len(tokens))
        if self.kept >= 0 and self._root is not None:
            self._pool.kept.left(self._root, tokens[: self.planned], departure, self._start, now)
        self.settle(tokens, now)
        self.free(now)
        return self.row not in self._pool.ended

    def free(self, now: float) -> None:
        """Give up the state, wherever it is, and count it as not computed."""
        self.leave()
        self._forget_slot()
        self.planned = 0

    def suspend(self, tokens: Sequence[int], now: float) -> bool:
        """Give up the row. Its state goes to the host if there is room, and is computed again later if not.

        Returns whether it went to the host.
        """
        size, pool = self._pool.bytes(self.planned), self._pool
        if self.place == "nowhere":
            self._vanish()
        elif pool.make_host_room(size):
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
        self._pool.ended_names[self.row] = self.name
        self._vanish()

    def lose(self) -> None:
        """Record that the device has lost the state: nothing is computed, and nothing is to be moved.

        If it began with the state of an ended sequence, that state may be the one lost. It is given up, too.
        """
        if self.source in self._pool.kept:
            self._pool.give_up(self.source)
        self.source = -1
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
    positions that are known. Outside the batch are the states that were computed ahead of a place in it.

    Running rows grow up to the threshold, and admission leaves the headroom below it. Above the threshold one row
    leaves, below it rows come back (Baton §4.3, batch size scaling). The first sequence in rank may use all the memory.

    Captured decodes may have memory of their own (`RowShape.settled`). A batch that fits there takes none of this
    memory, once it has been decoded. A new row may take the batch out of there, so the batch counts in full while one
    is on its way in.

    Moves of states are recorded in order (`move`). The builder of plans takes them (`take_moves`) each time it begins a
    forward, so they happen before it.
    """

    def __init__(
        self,
        shape: RowShape,
        *,
        threshold: float = 0.95,
        rule: RetentionRule | None = None,
        keeps: bool = True,
        low_water: float = 0.25,
        to_completion: bool = False,
    ) -> None:
        """`threshold` is the share of the memory above which rows leave.

        While less than the share `low_water` is free, states of ended sequences are copied to the host.

        `rule` ranks the states of ended sequences; `keeps` False keeps none of them. `to_completion` leaves the rows of
        ended sequences in the batch until all its sequences have ended.
        """
        self.to_completion = to_completion
        self.shape = shape
        self.keeps = keeps and shape.abilities.serves_others
        """Whether states of ended sequences stay. False if the model gives none out, or if they serve no other prompt.
        """
        self.rule = rule or RetentionRule()
        self.kept = KeptRows(shape.bytes.of, self.rule, croppable=shape.abilities.croppable)
        """The states of ended sequences that others can find."""
        self._leaving: dict[int, int] = {}
        """Bytes by slot, of kept states that others cannot find yet: some of their tokens are unknown."""
        self.num_blocks = shape.positions
        self.block_size = 1
        self.max_copies = self.num_blocks
        self.copies = CopyLedger()
        """Always empty: there are no block copies."""
        self.host: HostPool | None = None
        """Always None: states on the host are not blocks."""
        self.lent = 0
        """No position is ever lent."""
        self.can_lend = False
        self._now = 0.0
        """The latest `now` of any call, in seconds."""
        self.swapped_in = 0
        self.swapped_out = 0
        self.dropped = 0
        self.members: dict[RowState, None] = {}
        """States of running sequences: in the batch, or on their way there."""
        self.ahead: dict[RowState, None] = {}
        """States that were computed before the batch had a place for them."""
        self.ended: dict[int, int] = {}
        """Length by row, of states that stay in the batch although their sequences have ended."""
        self.ended_names: dict[int, str] = {}
        """Id of the sequence by row, of the same states."""
        self.shrinks = 0
        """Number of times that the device ran out of memory."""
        self.host_used = 0
        """Bytes of states on the host."""
        self._settled = False
        """Whether the batch is in the memory of captured decodes after the last planned forward."""
        self._threshold = threshold
        self._low_water = low_water
        self._shares = 1.0
        self._steps_since_loss = 0
        self._moves: list[RowMove] = []
        self._slots: dict[int, int] = {}
        """Bytes of each slot's state on the host."""
        self._next_slot = 0
        self._stored: list[Store] = []
        """Stores that no plan has begun yet."""
        self._storing: deque[tuple[int, Store]] = deque()
        """Plan number of each store that is not complete."""
        self._passing: dict[int, int] = {}
        """Bytes by slot, of states on the host that pass through it, from or to a tier below."""
        self._on_host: list[int] | None = None
        """Slots whose states have come to the host since `take_on_host`; None: nobody asks."""
        self._find_below: FindBelow = nothing_below
        self._has_below: HasBelow = never

    # Sizes, in bytes.

    def bytes(self, length: int) -> int:
        """Bytes of a state of this many positions outside the batch."""
        return self.shape.bytes.of(length)

    @property
    def memory(self) -> int:
        """Bytes that may be used in all. It shrinks when the device runs out of them."""
        return int(self.shape.memory * self._shares)

    @property
    def rows(self) -> int:
        """Number of rows in the batch: those of running sequences, and those that stay until the batch ends."""
        return len(self.members) + len(self.ended)

    @property
    def width(self) -> int:
        """Positions of the longest row."""
        return max((*(state.capacity for state in self.members), *self.ended.values()), default=0)

    @property
    def outside(self) -> int:
        """Bytes of states outside the batch."""
        return sum(self.bytes(state.capacity) for state in self.ahead)

    @property
    def in_use(self) -> int:
        """Bytes in use, including rows that are about to leave for the host."""
        leaving = sum(store.size for store in self._stored) + sum(store.size for _, store in self._storing)
        return self._batch_bytes() + self.outside + leaving + sum(self._leaving.values())

    @property
    def host_free(self) -> int:
        """Bytes on the host that are still free for states."""
        return self.shape.host_memory - self.host_used - self.kept.host_bytes - sum(self._passing.values())

    @property
    def host_room(self) -> int:
        """Bytes on the host that are free, or that states of ended sequences would give up."""
        fixed = self.host_used + sum(self._passing.values()) + self.kept.held_bytes
        return self.shape.host_memory - fixed

    @property
    def _most(self) -> int:
        """Bytes that rows may grow to."""
        return int(self.memory * self._threshold)

    # Sizes in positions, for the scheduler.

    @property
    def available(self) -> int:
        """Number of positions of one row that still fit. An empty memory takes a row of any length."""
        if not (self.members or self.ended or self.ahead):
            return self.num_blocks
        return max(0, self._most - self.in_use) // self.shape.bytes.position

    @property
    def allocatable(self) -> int:
        """`available`: no idle state has to be copied first."""
        return self.available

    @property
    def can_swap_out(self) -> bool:
        """Always False: rows go to the host when others need their memory, and then at once."""
        return False

    @property
    def cached(self) -> int:
        """Positions of the states of ended sequences on the device, as far as rows do not need their memory."""
        free = max(0, self.shape.memory - self._batch_bytes() - self.outside)
        return min(self.kept.device_bytes, free) // self.shape.bytes.position

    @property
    def used(self) -> int:
        """Positions in use, of all rows as wide as the longest, rounded up; also where the batch has settled."""
        used = self.shape.batch_bytes(self.rows, self.width) + self.outside
        return min(self.num_blocks, -(-used // self.shape.bytes.position))

    def blocks_for(self, positions: int) -> int:
        """Positions that one row of this length takes, alone."""
        return positions

    def longest(self, limit: int) -> int:
        """The most positions of a row that is alone, in multiples of the quantum and at most the first from `limit`."""
        return self.shape.widest_row(limit)

    def holds(self, count: int, blocks: int, longest: int) -> bool:
        """Whether a batch of `count` rows of at most `longest` positions fits; one row always does."""
        return count <= 1 or self.shape.batch_bytes(count, longest) + self.outside <= self._most

    def admits(self, found: FoundRow, length: int, reserved: int) -> bool:
        """Whether one more row of `length` positions, and one to come, may join and leave `reserved` available."""
        return self.admits_without((), length, reserved)

    def admits_without(self, victims: Collection[SequenceState[Any]], length: int, reserved: int) -> bool:
        """`admits`, once the rows of `victims` have left. An empty batch always takes a row, however long."""
        rest = [state.capacity for state in self.members if state not in victims]
        if not rest and not self.ended and not self.ahead:
            return True
        width = max((length + 1, *rest, *self.ended.values()))
        batch = self.shape.batch_bytes(len(rest) + len(self.ended) + 1, width)
        total = batch + self.in_use - self._batch_bytes()
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
        batch = self.shape.batch_bytes(self.rows + 1, max(self.width, state.capacity))
        total = batch + self.in_use - self._batch_bytes()
        return total - self.bytes(state.capacity) <= self._most - reserved * self.shape.bytes.position

    def needed(self, found: FoundRow, length: int) -> int:
        """Positions that one more row of `length` takes, including those by which it widens the other rows."""
        wider = self.shape.batch_bytes(self.rows + 1, max(self.width, length + 1)) - self._batch_bytes()
        return wider // self.shape.bytes.position

    def freed_by(self, victim: SequenceState[Any], after: Collection[SequenceState[Any]]) -> int:
        """Number of positions that preempting `victim` makes available: its row, and padding if it was the longest."""
        rest = [state.capacity for state in self.members if state not in after]
        without = [state.capacity for state in self.members if state not in after and state is not victim]
        ended = tuple(self.ended.values())

        def size(capacities: Sequence[int]) -> int:
            return self.shape.batch_bytes(len(capacities) + len(ended), max((*capacities, *ended), default=0))

        return (size(rest) - size(without)) // self.shape.bytes.position

    def can_grow(self, state: SequenceState[Any]) -> bool:
        """Whether this row may become one position longer."""
        return self._grown_bytes(state.capacity + 1) + self.outside <= self._most

    def can_decode(self, states: Iterable[RowState]) -> bool:
        """Whether each running row and each ended row of the batch may become one position longer.

        States on their way to the host do not count: their room is free as soon as the copy is complete.
        """
        longest = max((state.planned + 1 for state in states), default=0)
        longest = max(longest, max(self.ended.values(), default=-1) + 1)
        return self._grown_bytes(longest) + self.outside <= self._most

    def note_decode(self, *, newcomers: bool = False) -> None:
        """Record that a forward of the batch is planned.

        It settles the batch if that fits and no `newcomers` are on their way.
        """
        lengths = [*(state.capacity for state in self.members if state.place == "batch"), *self.ended.values()]
        self._settled = not newcomers and self.shape.settles(len(lengths), max(lengths, default=0))

    def copy_seconds(self, blocks: int) -> None:
        """None: the rate of copies of rows is not measured."""

    def swap_out(self, step: int, num_tokens: int, now: float) -> tuple[BlockCopy, ...]:
        """Assign the stores recorded so far to plan `step`. Returns no block copies."""
        self._now = max(self._now, now)
        self._storing += [(step, store) for store in self._stored]
        self._stored.clear()
        return ()

    def finish_swap_out(self, step: int) -> None:
        """Finish the stores that plan `step` and earlier plans began."""
        while self._storing and self._storing[0][0] <= step:
            _, store = self._storing.popleft()
            if self._on_host is not None:
                self._on_host.append(store.slot)

    @property
    def storing(self) -> bool:
        """Whether states are on their way to the host."""
        return bool(self._stored or self._storing)

    def copied(self, copied: TierCopied) -> None:
        """Finish the stores that are complete. Loads need no note: what reads a state waits for it on the device."""
        self.finish_swap_out(copied.swapped_out)

    def lend(self, count: int, now: float, *, most_moves: int) -> tuple[BlockMove, ...]:
        """Lend nothing: the batch is as wide as its longest row, so no part of it can serve anything else."""
        return ()

    def reclaim(self, count: int) -> None:
        """Raises RuntimeError, as nothing is ever lent."""
        if count:
            raise RuntimeError(f"{count} blocks are to be reclaimed, and padded rows lend none")

    def shortage(self, found: FoundRow, length: int, reserved: int) -> str:
        """Whether a row has memory for one more position; a longer one may need more to start."""
        return "no blocks" if self.available - reserved < 1 else ""

    def stats(self) -> Mapping[str, int]:
        """The fields of SchedulerStats that the memory knows, where blocks are positions."""
        position = self.shape.bytes.position
        return {
            "blocks_total": self.num_blocks,
            "blocks_used": self.used,
            "blocks_cached": self.cached,
            "blocks_swapped_in": self.swapped_in,
            "blocks_swapped_out": self.swapped_out,
            "tokens_dropped": self.dropped,
            "host_blocks_total": self.shape.host_memory // position,
            "host_blocks_ready": self.shape.host_memory // position,
            "host_blocks_cached": (self.host_used + self.kept.host_bytes) // position,
            "rows_wide": self.width,
            "shrinks": self.shrinks,
        }

    # Moves of states.

    def move(self, kind: RowMoveKind, row: int = -1, slot: int = -1, length: int = 0) -> None:
        """Record the next move of a state."""
        self._moves.append(RowMove(-1, kind, row, slot, length))

    def take_moves(self, before: int) -> list[RowMove]:
        """The moves recorded since the last call, each to be done before forward `before`.

        The states of ended sequences are given up first, as far as rows need their memory.
        """
        self._trim()
        moves = [move._replace(before=before) for move in self._moves]
        self._moves.clear()
        return moves

    def store(self, state: RowState, size: int) -> int:
        """Record that a row's state of `size` bytes goes to the host. Returns its slot there."""
        slot = self._new_slot()
        self._slots[slot] = size
        self.host_used += size
        self.swapped_out += state.planned
        self._stored.append(Store(slot, size))
        self.move("store", state.row, slot, state.planned)
        return slot

    # States of ended sequences.

    def find(self, root: Root | None, tokens: Sequence[int]) -> FoundRow:
        """The state that saves most of these tokens. `root` None finds nothing.

        Where prompts cannot be computed in chunks, the tokens that a state does not save are computed one by one. A
        state then serves only if they are at most half as many as it saves.
        """
        found = None if root is None or not len(self.kept) else self.kept.find(root, tokens)
        if found is None or not self.serves(found, tokens):
            return NOTHING_FOUND
        return FoundRow(found.length, found.slot, found.on_host)

    def serves(self, found: FoundState, tokens: Sequence[int]) -> bool:
        """Whether a state is of use for a prompt that it saves tokens of."""
        return self.shape.abilities.chunks or 2 * (len(tokens) - found.length) <= found.length

    def keep(self, state: RowState) -> int:
        """Record that the state of a row stays on the device after its sequence has ended. Returns its slot."""
        slot = self._new_slot()
        self._leaving[slot] = self.bytes(state.planned)
        self.move("keep", state.row, slot, state.planned)
        return slot

    def settle(self, slot: int, root: Root, tokens: Sequence[int], length: int, now: float) -> None:
        """Let others find a state of `length` positions if all of its tokens are known; give it up if not."""
        self._now = max(self._now, now)
        del self._leaving[slot]
        useless = self.kept.add(slot, root, tokens, now) if len(tokens) == length else (slot,)
        for each in useless:
            self.move("forget", slot=each)

    def give_up(self, slot: int) -> None:
        """Give up a state that others can find. It counts as dropped unless a tier below the host has it."""
        if not self._has_below(self.kept.key(slot)):
            self.dropped += self.kept.length(slot)
        self.kept.forget(slot)
        self.move("forget", slot=slot)

    def make_host_room(self, size: int) -> bool:
        """Give up host states of ended sequences until `size` bytes are free. Returns whether they are."""
        if size > self.host_room:
            return False
        victims = iter(self.kept.victims(self._now, on_host=True) if size > self.host_free else ())
        while size > self.host_free:
            self.give_up(next(victims))
        return True

    def _trim(self) -> None:
        """Give up states of ended sequences, the least valuable first.

        States are dropped if rows need their memory now. If there is a host, states go there before rows need it.
        """
        kept = self.kept
        if self.in_use + kept.device_bytes > self.memory:
            for slot in kept.victims(self._now, on_host=False):
                self.give_up(slot)
                if self.in_use + kept.device_bytes <= self.memory:
                    break
        most = int(self.memory * (1 - self._low_water))
        resident = self._batch_bytes() + self.outside
        if not self.shape.host_memory or resident + kept.device_bytes <= most:
            return
        for slot in kept.victims(self._now, on_host=False):
            size, length = kept.size(slot), kept.length(slot)
            if not self.make_host_room(size):
                continue
            kept.offload(slot)
            self._stored.append(Store(slot, size))
            self.swapped_out += length
            self.move("offload", slot=slot, length=length)
            if resident + kept.device_bytes <= most:
                return

    def forget(self, slot: int, *, lost: bool = False) -> None:
        """Record that a slot's state is given up. `lost`: the slot never held it."""
        self.host_used -= self._slots.pop(slot)
        if not lost:
            self.move("forget", slot=slot)

    # States that a tier below the host has, or gets.

    def serve_below(self, find: FindBelow, has: HasBelow = never) -> None:
        """Let waiting sequences ask a tier below the host for states, and note which states come to the host."""
        self._find_below, self._has_below = find, has
        self._on_host = []

    def find_below(self, root: Root, tokens: Sequence[int]) -> StateBelow | None:
        """The state below the host that is worth fetching for these tokens. None if there is none."""
        return self._find_below(root, tokens, self.find(root, tokens).length)

    def take_on_host(self) -> list[int]:
        """The slots whose states have come to the host since the last call. Some may have been given up meanwhile."""
        slots = self._on_host or []
        if self._on_host is not None:
            self._on_host = []
        return slots

    @property
    def news_of_host(self) -> bool:
        """Whether `take_on_host` would return any slot."""
        return bool(self._on_host)

    def copy_to_host(self, source: int) -> int | None:
        """Record that a copy of a kept state of the device goes to the host. Returns its slot there.

        Host states of ended sequences are given up for it. Returns None if there is no room. `pass_on` frees the slot.
        """
        size = self.kept.size(source)
        if not self.make_host_room(size):
            return None
        slot = self._new_slot()
        self._passing[slot] = size
        self._stored.append(Store(slot, 0))
        self._moves.append(RowMove(-1, "copy", -1, slot, self.kept.length(source), source))
        return slot

    def pass_on(self, slot: int) -> None:
        """Give up a copy on the host, because it is written."""
        del self._passing[slot]
        self.move("forget", slot=slot)

    def begin_arrival(self, size: int) -> int | None:
        """Make room on the host for a state of `size` bytes from a tier below. Returns its slot, None without room."""
        if not self.make_host_room(size):
            return None
        slot = self._new_slot()
        self._passing[slot] = size
        return slot

    def end_arrival(self, slot: int, key: RowKey, now: float) -> bool:
        """Let others find a state that has arrived on the host. Returns False if another state serves all it would."""
        del self._passing[slot]
        self._now = max(self._now, now)
        if (other := self.kept.standing_in(key)) >= 0:
            self.kept.touch(other, now)
            self.move("forget", slot=slot)
            return False
        self.kept.put(slot, key, now, on_host=True)
        return True

    def cancel_arrival(self, slot: int) -> None:
        """Give back the room of a state that has not arrived."""
        del self._passing[slot]

    def _new_slot(self) -> int:
        slot, self._next_slot = self._next_slot, self._next_slot + 1
        return slot

    # Rows that stay although their sequences have ended.

    def extend_ended(self, most: int) -> tuple[list[int], list[int]]:
        """Count one more position for each ended row.

        Rows of `most` positions leave. Returns the rows that stay and that left.
        """
        gone = [row for row, length in self.ended.items() if length >= most]
        self.drop_ended(gone)
        for row in self.ended:
            self.ended[row] += 1
        return list(self.ended), gone

    def drop_ended(self, rows: Iterable[int]) -> None:
        """Record that these ended rows leave the batch."""
        for row in rows:
            self.move("drop", row)
            self.forget_ended(row)

    def forget_ended(self, row: int) -> None:
        """Record that an ended row is not in the batch any more."""
        del self.ended[row], self.ended_names[row]

    # Shrinking, when there is less memory than was measured.

    def shrink(self) -> None:
        """Use less memory from now on, because the device ran out of it."""
        self.shrinks += 1
        self._steps_since_loss = 0
        self._shares *= 1 - LESS

    def recover(self) -> None:
        """Count a step that had enough memory. After RECOVERY of them, undo the last `shrink`."""
        if self._shares < 1.0:
            self._steps_since_loss += 1
            if self._steps_since_loss >= RECOVERY:
                self._steps_since_loss = 0
                self._shares = min(1.0, self._shares / (1 - LESS))

    def _batch_bytes(self) -> int:
        """Bytes of the batch, including rows on their way in."""
        return self._grown_bytes(0)

    def _grown_bytes(self, longest: int) -> int:
        """Bytes of the batch once its longest row has at least `longest` positions."""
        rows, width = self.rows, max(self.width, longest)
        if self._settled and self.shape.settles(rows, width) and all(each.place == "batch" for each in self.members):
            return 0
        return self.shape.batch_bytes(rows, width)
