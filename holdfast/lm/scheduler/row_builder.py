"""RowBuilder: a plan of padded rows under construction. RowBatch: which sequences share the batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, cast

from holdfast.lm.memory.row_pool import RowPool, RowState
from holdfast.lm.scheduler.admission import NO_LIMIT
from holdfast.lm.scheduler.builder import LAST_SAMPLED, StepBuilder, anyone
from holdfast.lm.scheduler.entries import AWAITED, NO_ROW, Entry
from holdfast.lm.scheduler.part import Decode
from holdfast.lm.scheduler.queues import Queues
from holdfast.lm.scheduler.row_groups import group
from holdfast.lm.types import Forward, PartPlan, RowMove, RowPlan

WINDOW = 4
"""Prompts are grouped among the first waiting ones: this many times the size of the largest group."""
SHORT_TAIL = 32
"""A fixed budget is exceeded by up to 1/32 for the end of a prompt, which would take a forward of its own."""


class RowBatch:
    """Which sequences of padded rows share the batch: the rules of rows for the scheduler's queues.

    A sequence waits, is prefilled ahead of a place in the batch, or runs. The queues and the memory say which; this
    class keeps nothing of its own.
    """

    def __init__(self, queues: Queues, pool: RowPool) -> None:
        self.queues = queues
        self.pool = pool

    @property
    def places(self) -> int:
        """Number of rows that may still join the batch."""
        return self.queues.max_sequences - self.pool.rows

    def start_ahead(self, entry: Entry, now: float) -> None:
        """Move a waiting entry to those that are prefilled."""
        self.queues.start(entry, state_of(entry).match(entry.sequence.tokens), now)
        self.queues.prefill(entry)
        state_of(entry).wait_ahead()

    def join(self, entry: Entry) -> None:
        """Give a prefilled entry a place in the batch."""
        self.queues.place(entry)
        state_of(entry).claim_place()

    def lose(self, entry: Entry) -> None:
        """Let an entry whose state the device has lost wait, with nothing computed and no token in flight."""
        state_of(entry).lose()
        if entry.row != NO_ROW:
            self.queues.lose(entry)
        entry.sequence.rollback(len(entry.sequence.tokens))
        entry.next_step = 0

    def drop_ended(self, rows: Iterable[int]) -> None:
        """Remove these rows of ended sequences from the batch."""
        gone = list(rows)
        self.pool.drop_ended(gone)
        self.free_left(gone)

    def lose_ended(self, ids: Collection[str]) -> None:
        """Forget those ended rows of these sequences whose states the device has lost."""
        gone = [row for row, name in self.pool.ended_names.items() if name in ids]
        for row in gone:
            self.pool.forget_ended(row)
        self.free_left(gone)

    def free_left(self, rows: Iterable[int]) -> None:
        """Free the rows of ended sequences, unless a sequence that sampled its last token still waits for it there."""
        held = {entry.row for entry in self.queues.running}
        self.queues.free_rows.extend(row for row in rows if row not in held)


class RowBuilder(StepBuilder):
    """The verbs of `StepBuilder` over padded rows, and those of Baton.

    A step consists of forwards. A forward of the batch decodes all rows, whatever the budget, because none can be left
    out. Prompts are computed apart, in chunks of one prompt each or in groups of whole ones; or in the batch (`shape`).
    A complete prompt joins the batch before the next decode.
    """

    def __init__(self, batch: RowBatch, number: int, now: float, longest: int) -> None:
        """`longest` is the most positions of a row."""
        super().__init__(batch.queues, number, now)
        self.batch = batch
        """The rules of the batch; read only."""
        self._pool = batch.pool
        self._longest = longest
        self._forwards: list[Forward] = []
        self._moves: list[RowMove] = []
        self._whole: list[tuple[Entry, int]] = []
        """Planned whole prompts whose forwards are not planned yet, with their lengths."""
        self._prompts = 0
        """Number of prompts, or parts of prompts, that the step computes."""
        if not self.running:
            batch.drop_ended(self._pool.ended)

    def displace(self) -> None:
        """Preempt running sequences for waiting ones of a higher class, if the order displaces at all."""
        batch, queues, pool = self.batch, self._queues, self._pool
        for entry in queues.contenders or ():
            length = entry.sequence.length
            if entry.sequence.in_flight or not queues.running or entry.rank > queues.running.last().rank:
                return
            places, victims = batch.places, list[Entry]()
            found: set[RowState] = set()
            for other in reversed(queues.running):
                if (places > 0 and pool.admits_without(found, length, queues.headroom)) or other.rank < entry.rank:
                    break
                if other.sequence.request.priority > entry.sequence.request.priority and self._may_leave(other):
                    victims.append(other)
                    found.add(state_of(other))
                    places += 1
            if places <= 0 or not pool.admits_without(found, length, queues.headroom):
                return
            for victim in victims:
                self._preempt(victim)
            if victims:
                return  # at most one entry a step: the room for the others is known once this one has started

    def decode(self, *, newcomers: bool = False) -> None:
        """Decode every row of the batch, and every prompt that an earlier step completed.

        Rows are preempted if the batch would exceed its memory. With `newcomers`, also decode the sequences whose
        prompts this step has computed so far (FineInfer, Algorithm 1).
        """
        self._plan_forwards()
        self._run_batch(self._decoding(newcomers), [])

    def shape(self, allow: Callable[[Entry], bool] = anyone, *, most: int = NO_LIMIT) -> None:
        """Decode every row, and compute whole prompts of waiting sequences in the same forward (Baton §4.1).

        At most `most` sequences start, in rank order, as budget, rows, memory and `allow` permit. While nothing runs,
        this is a left-padded prefill. The first prompt of an empty batch may exceed the budget.
        """
        batch, queues, newcomers = self.batch, self._queues, list[Entry]()
        decoding = self._decoding()
        self._make_room(decoding)
        self.budget -= len(decoding)
        while batch.places > 0 and queues.free_rows and len(newcomers) < most:
            entry = queues.waiting.first()
            if entry is None or not allow(entry):
                break
            if queues.is_held_back(entry, self.now):
                continue
            room = self.budget if decoding or newcomers else NO_LIMIT
            if not self._start(entry, most=room, at_once=True):
                break
            if state_of(entry).planned:
                self.compute(entry)
                decoding += [entry] * entry.decoding
            else:
                newcomers.append(entry)
                self.budget -= entry.sequence.length
        self.budget += len(decoding)
        self._run_batch(decoding, newcomers)

    def admit(
        self, allow: Callable[[Entry], bool] = anyone, *, whole: bool = False, beyond_budget: bool = False
    ) -> None:
        """Start waiting sequences as `StepBuilder.admit` does; their prompts are computed apart.

        Where the model cannot compute a prompt in chunks, prompts are whole, and the first of a step may exceed the
        budget.
        """
        batch, queues, chunks = self.batch, self._queues, self._pool.shape.abilities.chunks
        while (self.budget > 0 or beyond_budget) and batch.places > 0 and queues.free_rows:
            entry = queues.waiting.first()
            if entry is None or not allow(entry):
                return
            if queues.is_held_back(entry, self.now):
                continue
            most = self.budget if whole or (not chunks and self._prompts) else NO_LIMIT
            if not self._start(entry, most=most, at_once=True):
                return
            self.compute(entry)

    def takes(self, entries: Sequence[Entry]) -> bool:
        """Whether rows and budget allow these waiting sequences to start together, and all their tokens are known."""
        rows = min(self.batch.places, len(self._queues.free_rows))
        lengths = sum(entry.sequence.length for entry in entries)
        return len(entries) <= rows and lengths <= self.budget and not any(each.sequence.in_flight for each in entries)

    def admit_together(self, entries: Sequence[Entry]) -> None:
        """Start these waiting sequences in this step; their prompts are computed apart.

        The caller has seen that the step `takes` them, and that memory holds them. Where it does not, the first that
        finds no room waits, and so do those after it. One that a part holds back starts later.
        """
        for entry in entries:
            if self._queues.is_held_back(entry, self.now):
                continue
            if not self._start(entry, most=self.budget, at_once=True):
                return
            self.compute(entry)

    def prefill_ahead(self) -> None:
        """Compute one group of prompts of similar length, whose sequences then wait for a place in the batch.

        The group is the one of the first in rank. A sequence starts only if it fits in the memory outside of the
        headroom.
        """
        batch, queues, pool = self.batch, self._queues, self._pool
        most = min(queues.prefill_ahead - len(queues.prefilled), queues.max_sequences)
        waiting = [entry for entry, _ in zip(queues.waiting, range(WINDOW * queues.max_sequences), strict=False)]
        if most <= 0 or not waiting or waiting[0].sequence.in_flight:
            return
        ready = [entry for entry in waiting if not entry.sequence.in_flight]
        lengths = [entry.sequence.length for entry in ready]
        groups = group(lengths, most=most, unequal=pool.shape.abilities.left_padding)
        own = next(each for each in groups if 0 in each)
        for index in sorted(own):
            entry = ready[index]
            if self._prompts and lengths[index] > self.budget:
                break
            if not queues.free_rows or not pool.admits_ahead(lengths[index], queues.headroom):
                break
            if queues.is_held_back(entry, self.now):
                continue
            batch.start_ahead(entry, self.now)
            self.compute(entry, whole=True)

    def embed(self, key: Callable[[Entry], Any] | None = None, *, most: int | None = None) -> None:
        """Let prefilled sequences join the batch, in rank order or ordered by `key`, as places and memory permit.

        A sequence of a higher class preempts the last in rank of a lower class if the order displaces (Baton §4.3).
        While nothing runs, the prefilled sequences that rank last give up their states until the first fits.
        """
        batch, queues, pool = self.batch, self._queues, self._pool
        for entry in sorted(queues.prefilled, key=key or (lambda entry: entry.rank))[:most]:
            if entry.row == NO_ROW or entry.next_step > self.number:
                continue
            state = state_of(entry)
            while batch.places <= 0 or not pool.admits_place(state, queues.headroom if queues.running else 0):
                victim = self._displaced_by(entry) if queues.running else self._last_prefilled(entry)
                if victim is None:
                    return
                self._preempt(victim)
            batch.join(entry)

    def extend(self, decode: Decode, tokens: Sequence[int]) -> tuple[int, ...]:
        """Append nothing: no state of a row can forget the position of a token that is refused."""
        return ()

    def _close(self) -> None:
        self._plan_forwards()
        if not self._ids and not self.in_flight:  # suspended sequences that came back lack only their last token
            if not self.running:
                self.embed()
            self.decode()

    def _state_plans(self) -> Sequence[PartPlan]:
        self._moves += self._pool.take_moves(len(self._forwards))
        if self.sampling and len({*self._ids}) < len(self._ids):
            self._samples[0] = 1  # a row may be lost between its two segments, and then gives no token
        return (RowPlan(tuple(self._forwards), tuple(self._moves)),)

    def _decoding(self, newcomers: bool = False) -> list[Entry]:
        """The sequences that lack only their last token. Sequences that have sampled their last one leave the batch."""
        number, chosen = self.number + newcomers, list[Entry]()
        for entry in self.running:
            if not entry.decoding or entry.next_step > number:
                continue
            state = state_of(entry)
            if state.planned + 1 < entry.limit:
                chosen.append(entry)
                continue
            state.leave_batch()
            entry.next_step = AWAITED
        return chosen

    def _run_batch(self, decoding: list[Entry], newcomers: list[Entry]) -> None:
        """Plan one forward of the batch: a token of each of `decoding`, the prompts of `newcomers`, and ended rows."""
        self._make_room(decoding)
        decoding, newcomers = ([entry for entry in each if entry.row != NO_ROW] for each in (decoding, newcomers))
        if not decoding and not newcomers:
            return
        for entry in decoding:
            state, sequence = state_of(entry), entry.sequence
            if state.place == "apart":
                state.embed()
            start = state.planned
            known = (sequence.tokens[start],) if state.resumed else LAST_SAMPLED
            state.resumed = False
            self._add(entry, start, start + 1, known)
        for entry in newcomers:
            state = state_of(entry)
            state.join()
            state.since = self.number
            self._prompts += 1
            self._add(entry, 0, entry.sequence.length, tuple(entry.sequence.tokens))
            state.cache_blocks(entry.sequence.tokens)
        ended, gone = self._pool.extend_ended(self._longest)
        self.batch.free_left(gone)
        self._forward(apart=False, ended=tuple(ended))
        self._pool.note_decode(newcomers=bool(newcomers))

    def _make_room(self, decoding: list[Entry]) -> None:
        """Remove rows until each of these sequences can grow by one position. Sequences without a row stop running.

        Rows of ended sequences go first, then prefilled ones, then the longest of the last class. The first in rank
        stays, and may use all the memory.
        """
        batch, pool = self.batch, self._pool
        while not pool.can_decode(state_of(entry) for entry in decoding if entry.row != NO_ROW):
            if pool.ended:
                batch.drop_ended([max(pool.ended, key=pool.ended.__getitem__)])
                continue
            victim = self._last_prefilled() or self._longest_behind()
            if victim is None:
                break
            self._preempt(victim)
        for entry in decoding:
            if entry.row != NO_ROW:
                state_of(entry).claim(state_of(entry).planned + 1)

    def _longest_behind(self) -> Entry | None:
        """The longest sequence of the last class, except the first in rank."""
        behind = [entry for entry in self.running if self._may_leave(entry)]
        if behind and behind[0] is self.running.first():
            del behind[0]
        return max(
            behind,
            key=lambda entry: (entry.sequence.request.priority, state_of(entry).capacity, entry.rank),
            default=None,
        )

    def _last_prefilled(self, but: Entry | None = None) -> Entry | None:
        """The last in rank of the prefilled sequences that may leave."""
        return next(
            (each for each in reversed(self._queues.prefilled) if each is not but and self._may_leave(each)), None
        )

    def _displaced_by(self, entry: Entry) -> Entry | None:
        """The running sequence that a prefilled one may preempt: of a lower class, and the last in rank after it."""
        if self._queues.contenders is None:
            return None
        for other in reversed(self.running):
            if other.rank < entry.rank:
                return None
            if other.sequence.request.priority > entry.sequence.request.priority and self._may_leave(other):
                return other
        return None

    def _may_leave(self, entry: Entry) -> bool:
        return entry.next_step <= self.number

    def _preempt(self, victim: Entry) -> None:
        self._queues.preempt(victim, self.now)
        self._preempted.append(victim.id)

    def compute(self, entry: Entry, *, whole: bool = False) -> None:
        """Plan the positions that a sequence lacks, apart from the batch, as far as the budget lasts.

        A short end of a prompt may exceed the budget. A suspended sequence that lacks only its last token is decoded in
        the batch instead. A whole prompt waits for others, to share a forward with those of similar length. `whole`
        ignores budget and pace.
        """
        sequence, state = entry.sequence, state_of(entry)
        start, length = state.planned, sequence.length
        if not start or state.since < 0:
            state.since = self.number
        if start and length - start == 1:
            entry.decoding = state.resumed = True
            return
        entry.next_step = self.number + 1
        whole = whole or not self._pool.shape.abilities.chunks
        stop = length if whole else min(length, start + self.budget)
        if self.pace is not None:
            most = start + self.pace(start, stop)
            if most < stop and not whole:
                stop, self.budget = most, most - start
        elif length - stop <= (self.num_tokens + stop - start) // SHORT_TAIL:
            stop = length
        if stop <= start:
            return
        self._prompts += 1
        if not start and stop == length:
            self._whole.append((entry, length))
            self._note(entry, start, stop)
        else:
            self._add(entry, start, stop, tuple(sequence.tokens[start:stop]))
            self._forward(apart=True)
        state.cache_blocks(sequence.tokens)

    def _plan_forwards(self) -> None:
        """Plan the forwards of the whole prompts noted so far, in groups."""
        if not self._whole:
            return
        lengths = [length for _, length in self._whole]
        unequal = self._pool.shape.abilities.left_padding
        for indices in group(lengths, most=self._queues.max_sequences, unequal=unequal):
            for index in sorted(indices):
                entry, length = self._whole[index]
                self._append(entry, 0, length, tuple(entry.sequence.tokens[:length]), samples=True)
            self._forward(apart=True)
        self._whole.clear()

    def _add(self, entry: Entry, start: int, stop: int, tokens: tuple[int, ...]) -> None:
        """Plan a segment of the forward under construction."""
        samples = stop == entry.sequence.length
        self._note(entry, start, stop)
        self._append(entry, start, stop, tokens, samples=samples)

    def _note(self, entry: Entry, start: int, stop: int) -> None:
        """Count a segment as planned."""
        state, sequence = state_of(entry), entry.sequence
        state.plan(start, stop)
        self.num_tokens += stop - start
        self.budget -= stop - start
        entry.next_step = self.number + 1
        if stop == sequence.length:
            sequence.length += 1
            entry.decoding = True

    def _append(self, entry: Entry, start: int, stop: int, tokens: tuple[int, ...], *, samples: bool) -> None:
        self._ids.append(entry.id)
        self.planned.append(entry)
        self._rows.append(entry.row)
        self._starts.append(start)
        self._stops.append(stop)
        self._tokens.append(tokens)
        self.draws.append(entry.sampling if samples else None)
        if samples:
            self.sampling.append(entry)

    def _forward(self, *, apart: bool, ended: tuple[int, ...] = ()) -> None:
        """Close a forward over the segments since the last one. Moves noted so far happen before it."""
        self._moves += self._pool.take_moves(len(self._forwards))
        self._forwards.append(Forward(len(self._ids), apart, ended))


def state_of(entry: Entry) -> RowState:
    """The state of an entry's sequence."""
    return cast(RowState, entry.cache)
