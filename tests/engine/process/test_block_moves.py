"""Loans and rooms during random histories: others read and fill the host tier while requests run on both tiers.

The histories are those of `tests/lm/scheduler/test_histories.py`. Their device checks that each segment reads its own
context, and with it the blocks that come from elsewhere. A room's blocks are written at any time from when they are
given out. Each block of a loan must match its digest at any time until the loan ends.
"""

from collections import Counter
from concurrent.futures import CancelledError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine.process.block_moves import Loan, Moves, Room
from holdfast.engine.process.parts.moves import ChunkFinder
from holdfast.lm.memory.digests import block_digests
from holdfast.lm.parts.moves.messages import ChunksFound
from holdfast.lm.parts.moves.planner import MovePart
from tests.invariants import check_scheduler
from tests.lm.scheduler.test_histories import STEPS, History, check
from tests.long import then_long
from tests.scheduling import NOBODY, FakeDevice, answer, create_requests, create_scheduler, model_state


class MovingHistory(History):
    """A history with moves in both directions, which end at any time."""

    def __init__(self, seed, **options):
        super().__init__(seed, **options)
        self.moves = Moves(self.scheduler, lambda: float(self.steps), lambda: None) if self.host_blocks else None
        self.loans = []
        self.rooms = []

    def more_parts(self):
        return [MovePart()]

    def check_books(self):
        check_scheduler(self.scheduler, [block for room, _ in self.rooms for block in room._places])

    def state_of_some(self):
        """Digest and contents of each block of a request, in order."""
        request, size = self.requests[self.random.choice(list(self.requests))], self.block_size
        tokens = (*request.prompt, *self.outputs.get(request.id, ()))
        states, digests = model_state(tokens), block_digests(request.identity.root(), tokens, size)
        return {digest: states[at * size : (at + 1) * size] for at, digest in enumerate(digests)}

    def step(self):
        if self.host_blocks and self.requests:
            for begin in (self.begin_loan, self.begin_room):
                if self.random.random() < 0.2:
                    begin()
        self.answer()
        for loan in list(self.loans):
            self.advance_loan(*loan)
        for room in list(self.rooms):
            self.advance_room(*room)
        self.answer()
        super().step()

    def answer(self):
        if self.host_blocks:
            list(self.moves.answers())

    def begin_loan(self):
        state = self.state_of_some()
        if state:
            loan = Loan(self.moves, list(state))
            self.loans.append((loan, state))
            self.moves.begin(loan)

    def begin_room(self):
        state = self.state_of_some()
        pairs = [pair for pair in enumerate(state) if self.random.random() < 0.8]
        if pairs:
            room = Room(self.moves, pairs)
            self.rooms.append((room, state))
            self.moves.begin(room)

    def advance_loan(self, loan, state):
        given = loan.given.done()
        if given:
            for block, contents in zip(loan.given.result(), state.values(), strict=True):
                assert block is None or self.device.host[block] == contents
                self.seen["lent"] += block is not None
        elif self.random.random() < 0.9:
            return
        if self.random.random() < 0.4:
            self.loans.remove((loan, state))
            self.seen["given up"] += not given
            self.moves.call(loan.end)

    def advance_room(self, room, state):
        if room.given.done():
            for block, (_, digest) in room.given.result().items():
                if block in room._places and self.random.random() < 0.3:
                    self.device.host[block] = state[digest]
                    self.moves.call(lambda block=block: self.seen.update(arrived=room.arrived([block])))
                    self.answer()
        elif self.random.random() < 0.9:
            return
        if self.random.random() < 0.3:
            self.rooms.remove((room, state))
            self.moves.call(room.end)
            self.answer()

    def end_moves(self):
        for move, _ in (*self.loans, *self.rooms):
            self.moves.call(move.end)
        self.loans, self.rooms = [], []
        self.answer()


def play(seed, **options):
    history = MovingHistory(seed, **options)
    while history.steps < STEPS:
        while history.random.random() < 0.4 and history.scheduler.stats().waiting < 12:
            history.add()
        if history.random.random() < 0.04:
            history.abort()
        history.step()
    history.end_moves()
    history.host_blocks, tier = 0, history.host_blocks  # no further moves
    history.drain()
    assert not history.moves or history.moves._filling == 0
    assert not tier or history.scheduler.pool.host.held == 0
    return history


@pytest.mark.parametrize("seed", then_long(8, range(60)))
def test_every_request_gets_the_tokens_it_gets_alone_beside_moves(seed):
    check(play(seed, stages=1 + seed % 2))


@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 32), stages=st.integers(1, 3))
def test_every_request_gets_the_tokens_it_gets_alone_beside_any_moves(seed, stages):
    check(play(seed, stages=stages))


@pytest.mark.long
def test_histories_with_moves_exercise_loans_arrivals_and_both_tiers():
    seen = Counter()
    for seed in range(20):
        seen += play(seed).seen
    assert seen["lent"] > 250 and seen["arrived"] > 50 and seen["given up"] > 2
    assert seen["swapped in"] > 50 and seen["swapped out"] > 250


def idle_engine(host_blocks=16, tokens=20):
    """Moves over a scheduler that has computed a prompt, and the prompt's digests."""
    scheduler, device = create_scheduler(host_blocks=host_blocks, parts=[MovePart()]), FakeDevice(64, 4, host_blocks)
    (request,) = create_requests(tokens, max_tokens=1)
    device.expect(request)
    scheduler.add(request)
    moves = Moves(scheduler, lambda: 100.0, lambda: None)
    run(moves, scheduler, device)
    return moves, scheduler, device, block_digests(NOBODY.root(), request.prompt, 4)


def run(moves, scheduler, device):
    """Advance the moves, and do steps, until there is nothing to do. Returns the messages to the client."""
    told = list(moves.answers())
    while scheduler.has_work() or moves.ready:
        plan = scheduler.schedule(100.0)
        if plan is not None:
            device.submit(plan)
            scheduler.update(plan, device.collect(), 100.0)
        told += moves.answers()
    return told


def test_an_idle_engine_copies_to_the_host_what_another_wants_to_read():
    moves, scheduler, device, chain = idle_engine()
    assert ChunkFinder(scheduler.pool).find(7, chain) == ChunksFound(7, 20, 0, 0)
    loan = Loan(moves, [*chain, b"x" * 32])
    moves.begin(loan)
    run(moves, scheduler, device)
    *blocks, other = loan.given.result(0)
    assert other is None and [device.host[block] for block in blocks] == [
        device._contents(block) for block in scheduler.pool.find_all(chain)
    ]
    assert ChunkFinder(scheduler.pool).find(7, chain) == ChunksFound(7, 20, 0, 0), "counted once, by its first tier"
    scheduler.pool.free(scheduler.pool.allocate(64, 200.0), 200.0)
    assert ChunkFinder(scheduler.pool).find(7, chain) == ChunksFound(7, 0, 20, 0)
    assert scheduler.pool.host.held == 5
    moves.call(loan.end)
    run(moves, scheduler, device)
    assert scheduler.pool.host.held == 0


def test_an_idle_engine_goes_on_until_copies_for_another_are_known_to_be_complete():
    moves, scheduler, device, chain = idle_engine()
    loan = Loan(moves, chain)
    moves.begin(loan)
    list(moves.answers())
    plan = scheduler.schedule(100.0)
    assert plan.copies.swap_out
    device.submit(plan)
    device.collect()
    scheduler.update(plan, answer(plan, swapped_out=plan.step - 1), 100.0)
    list(moves.answers())
    assert not loan.given.done() and scheduler.has_work(), "the result came before the copies ended"
    run(moves, scheduler, device)
    assert None not in loan.given.result(0)
    moves.call(loan.end)
    run(moves, scheduler, device)
    assert scheduler.pool.host.held == 0


def test_blocks_that_a_plan_in_flight_may_read_are_given_out_after_its_result():
    moves, scheduler, device, _ = idle_engine(host_blocks=2)
    (request,) = create_requests((5,) * 8, max_tokens=3)
    device.expect(request)
    scheduler.add(request)
    plan = scheduler.schedule(100.0)
    room = Room(moves, [(0, b"a" * 32)])
    moves.begin(room)
    list(moves.answers())
    assert not room.given.done()
    scheduler.update(plan, answer(plan, swapped_in=plan.step - 1), 100.0)
    list(moves.answers())
    assert not room.given.done(), "the copies of that plan go on"
    plan = scheduler.schedule(100.0)
    scheduler.update(plan, answer(plan), 100.0)
    list(moves.answers())
    assert list(room.given.result(0).values()) == [(0, b"a" * 32)]


def test_a_move_takes_no_more_than_its_share_of_the_host_tier():
    moves, scheduler, device, _ = idle_engine(host_blocks=8)
    rooms = [Room(moves, [(at, bytes([at, number]) * 16) for at in range(3)]) for number in range(2)]
    for room in rooms:
        moves.begin(room)
    run(moves, scheduler, device)
    assert [len(room.given.result(0)) for room in rooms] == [3, 1]
    for room in rooms:
        moves.call(room.end)
    run(moves, scheduler, device)
    assert moves.room() == 4


def test_what_is_given_up_before_it_is_given_out_is_free_again():
    moves, scheduler, device, chain = idle_engine()
    room, loan = Room(moves, [(0, b"a" * 32)]), Loan(moves, chain)
    for job in (room, loan):
        moves.begin(job)
        moves.call(job.end)
    run(moves, scheduler, device)
    for job in (room, loan):
        with pytest.raises(CancelledError):
            job.given.result(0)
    check_scheduler(scheduler)


def test_moves_need_a_host_tier():
    with pytest.raises(ValueError, match="no host tier"):
        Moves(create_scheduler(), lambda: 100.0, lambda: None)
