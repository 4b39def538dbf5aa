"""Shared by tests of padded planning: shapes of rows, schedulers over them, and a device that keeps tokens per row."""

from collections import deque

from holdfast.lm.memory.row_pool import RowPool
from holdfast.lm.parts.penalties.planner import PenaltyPart
from holdfast.lm.scheduler.policies import StallFree
from holdfast.lm.scheduler.row_kind import RowKind
from holdfast.lm.scheduler.row_policies import RowPolicy
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import PENDING, Abilities, RowBytes, RowPlan, RowResult, RowShape, StepResult, TierCopied
from tests.scheduling import model_state, sampled_from

ABLE = Abilities(chunks=True, left_padding=True, batched_decode=True, shaping=True, croppable=True)
POSITION = RowBytes(growing=((1, None),))
"""One byte a position."""


def shape_of_rows(memory=1000, *, host=0, quantum=1, abilities=ABLE, size=POSITION, settled=0):
    return RowShape(memory=memory, bytes=size, abilities=abilities, host_memory=host, quantum=quantum, settled=settled)


def create_row_scheduler(
    policy=None,
    *,
    shape=None,
    threshold=1.0,
    max_sequences=4,
    max_model_len=128,
    headroom=0.0,
    eos=(),
    prefill_ahead=0,
    parts=(),
    **options,
):
    policy = policy or StallFree(64)
    to_completion = isinstance(policy, RowPolicy) and policy.to_completion
    pool = RowPool(shape or shape_of_rows(), threshold=threshold, to_completion=to_completion)
    return Scheduler(
        policy,
        RowKind(pool, longest=max_model_len, prefill_ahead=prefill_ahead),
        (PenaltyPart(every_step=True), *parts),
        max_sequences=max_sequences,
        max_model_len=max_model_len,
        vocab_size=1 << 20,
        headroom=headroom,
        eos_token_ids=eos,
        **options,
    )


def forwards_of(plan):
    """The forwards of a plan in short: for each "batch" or "apart", its (sequence, start, stop), and its ended rows."""
    said, at = [], 0
    for forward in plan.part(RowPlan).forwards:
        own = [(segment.sequence_id, segment.start, segment.stop) for segment in plan.segments[at : forward.stop]]
        said.append(("apart" if forward.apart else "batch", own, forward.ended))
        at = forward.stop
    return said


def moves_of(plan):
    """The moves of a plan in short: (before, kind, row, slot, length)."""
    return [tuple(move[:5]) for move in plan.part(RowPlan).moves]


class FakeRows:
    """An executor of padded rows that keeps, for each state, the tokens it was computed from, and checks each plan.

    A row of the batch is in exactly one segment of each forward of the batch, or in `ended`; each segment follows its
    own state; a state has one place; a pending token is the one that the row sampled last; no more memory is used than
    there is, unless one sequence alone takes it. A decode leaves the batch in the memory of captured decodes, if it
    fits there; rows that join take it out. `lose` draws whether a forward runs out of memory: its states are gone
    then, and what later plans say of them is passed over until they begin again.
    """

    def __init__(self, shape, *, most_rows, lose=lambda: False):
        self.shape, self.most_rows, self.lose = shape, most_rows, lose
        self.batch, self.apart, self.slots = {}, {}, {}
        """By row or slot, the tokens of its state."""
        self.gone_rows, self.gone_slots = set(), set()
        self.names, self.last, self.streams = {}, {}, {}
        self.plans = deque()
        self.computed = 0
        """Tokens computed, padding and ended rows included."""
        self.losses = 0
        self.widest = 0
        self.settled, self.settled_decodes = False, 0

    def expect(self, request):
        self.streams[request.id] = list(request.prompt)

    def submit(self, plan):
        assert plan.part(RowPlan).forwards and plan.segments
        self.plans.append(plan)

    def collect(self):
        plan = self.plans.popleft()
        assert list(plan.part(RowPlan).moves) == sorted(plan.part(RowPlan).moves, key=lambda move: move.before)
        at, given, lost = 0, [], []
        for index, forward in enumerate(plan.part(RowPlan).forwards):
            self._move(plan, index)
            segments, at = plan.segments[at : forward.stop], forward.stop
            given += self._run(segments, forward, lost)
        self._move(plan, len(plan.part(RowPlan).forwards))
        assert at == len(plan.segments)
        tokens = tuple(token for token in given if token is not None)
        counts = tuple(int(token is not None) for token in given)
        return StepResult(
            plan.step,
            tokens,
            1.0,
            counts=None if all(counts) else counts,
            copied=TierCopied(swapped_out=plan.step, swapped_in=plan.step),
            parts=(RowResult(lost=tuple(lost)),),
        )

    def _run(self, segments, forward, lost):
        """What each sampling segment of a forward gave, None where its state is gone."""
        live = []
        for segment in segments:
            if segment.start == 0:
                self.gone_rows.discard(segment.row)
            if segment.row not in self.gone_rows:
                live.append(segment)
        ended = [row for row in forward.ended if row not in self.gone_rows]
        if self.lose():
            self.losses += 1
            for row in [*(segment.row for segment in live), *ended]:
                if row in self.names or segments:
                    self.gone_rows.add(row)
                    self.batch.pop(row, None), self.apart.pop(row, None)
            for segment in live:
                self.names[segment.row] = segment.sequence_id
            lost += dict.fromkeys(self.names[row] for row in [*(segment.row for segment in live), *ended])
            return [None for segment in segments if segment.sampling is not None]
        joining = not forward.apart and any(segment.row not in self.batch for segment in live)
        states = self.apart if forward.apart else self.batch
        if forward.apart:
            assert segments and not ended
            assert len(segments) == 1 or all(segment.start == 0 for segment in segments)
            assert not any(segment.row in self.batch for segment in live)
            assert self.shape.abilities.left_padding or len({segment.length for segment in segments}) == 1
            assert self.shape.abilities.chunks or all(segment.sampling is not None for segment in segments)
        else:
            rows = [*(segment.row for segment in live), *ended]
            assert len({*rows}) == len(rows) and {*self.batch} <= {*rows} and {*ended} <= {*self.batch}
            assert not any(segment.row in self.apart for segment in live)
            assert all(segment.length == 1 for segment in live if segment.row in self.batch)
            assert len(rows) <= self.most_rows
        for segment in live:
            self._advance(segment, states)
        for row in ended:
            self.batch[row] = [*self.batch[row], PENDING]
        longest = max((segment.length for segment in live), default=1)
        self.computed += (len(live) + len(ended)) * longest
        fits = self.shape.settles(len(self.batch), max(map(len, self.batch.values()), default=0))
        self.settled = self.settled and not joining and fits
        self._check_memory()
        if not forward.apart:
            self.settled = fits and not joining
            self.settled_decodes += self.settled
        return [
            None if segment not in live else self._sample(segment)
            for segment in segments
            if segment.sampling is not None
        ]

    def _advance(self, segment, states):
        stream = self.streams[segment.sequence_id]
        assert states.get(segment.row, []) == stream[: segment.start], f"{segment} does not follow its own state"
        if segment.tokens == (PENDING,):
            assert self.last[segment.row] == (segment.sequence_id, stream[segment.start]), "it is not the row's token"
        else:
            assert list(segment.tokens) == stream[segment.start : segment.stop]
        states[segment.row] = stream[: segment.stop]
        self.names[segment.row] = segment.sequence_id

    def _sample(self, segment):
        stream = self.streams[segment.sequence_id]
        assert len(stream) == segment.stop, "each position is sampled once, the last one"
        token = sampled_from(model_state(stream)[-1])
        stream.append(token)
        self.last[segment.row] = (segment.sequence_id, token)
        return token

    def _check_memory(self):
        width = max(map(len, self.batch.values()), default=0)
        self.widest = max(self.widest, width)
        rounded = -(-width // self.shape.quantum) * self.shape.quantum
        used = 0 if self.settled else len(self.batch) * self.shape.bytes.of(rounded)
        used += sum(self.shape.bytes.of(len(state)) for state in self.apart.values())
        if len(self.batch) + len(self.apart) > 1:
            assert used <= self.shape.memory, f"{used} bytes are used of {self.shape.memory}"
        assert sum(self.shape.bytes.of(len(state)) for state in self.slots.values()) <= self.shape.host_memory

    def _move(self, plan, before):
        for move in plan.part(RowPlan).moves:
            if move.before == before:
                self._move_one(move)

    def _move_one(self, move):
        row, slot = move.row, move.slot
        if move.kind == "load" and slot in self.gone_slots:
            self.gone_rows.add(row)
        elif move.kind == "load":
            assert row not in self.batch and row not in self.apart
            self.gone_rows.discard(row)
            assert len(self.slots[slot]) == move.length
            self.apart[row] = self.slots[slot]
        elif move.kind == "forget":
            if slot in self.gone_slots:
                self.gone_slots.remove(slot)
            else:
                del self.slots[slot]
        elif row in self.gone_rows:
            if move.kind == "store":
                self.gone_slots.add(slot)
        elif move.kind == "embed":
            assert row not in self.batch and len(self.apart[row]) == move.length
            self.batch[row] = self.apart.pop(row)
            self.settled = False
        else:
            assert move.kind in ("drop", "store") and (row in self.batch) != (row in self.apart)
            state = (self.batch if row in self.batch else self.apart).pop(row)
            if move.kind == "store":
                assert slot not in self.slots and len(state) == move.length
                self.slots[slot] = state


def check_rows(scheduler):
    """Raise RuntimeError if a row, a state or a byte of a row scheduler is lost, or counted twice."""
    queues = scheduler._queues
    pool = queues.pool
    entries = list(scheduler._entries.values())
    held = [entry.row for entry in entries if entry.row >= 0]
    if sorted({*held, *pool.ended} | {*queues.free_rows}) != list(range(queues.max_sequences + queues.prefill_ahead)):
        raise RuntimeError(f"rows are lost: {held} are held, {pool.ended} ended, {queues.free_rows} free")
    if len({*held}) != len(held) or {*held, *pool.ended} & {*queues.free_rows}:
        raise RuntimeError(f"a row has two owners: {held}, {pool.ended}, {queues.free_rows}")
    if len({*queues.free_rows}) != len(queues.free_rows):
        raise RuntimeError(f"a row is free twice: {queues.free_rows}")
    if {*pool.ended} != {*pool.ended_names}:
        raise RuntimeError(f"rows {sorted(pool.ended)} have ended, and {sorted(pool.ended_names)} have names")
    states = {entry.cache for entry in entries if entry.cache in pool.members or entry.cache in pool.ahead}
    if {*pool.members, *pool.ahead} != states or pool.members.keys() & pool.ahead.keys():
        raise RuntimeError("memory is counted for a state that no sequence has, or twice")
    if {entry.id for entry in queues.prefilled} != {entry.id for entry in entries if entry.cache.ahead}:
        raise RuntimeError("a prefilled sequence is not in its queue")
    slots = {entry.cache.slot: pool.bytes(entry.cache.planned) for entry in entries if entry.cache.slot >= 0}
    if slots != pool._slots or sum(slots.values()) != pool.host_used or pool.host_used > pool.shape.host_memory:
        raise RuntimeError(f"slots {slots} are in use, and {pool._slots} are counted")
