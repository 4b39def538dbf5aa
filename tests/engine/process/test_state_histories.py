"""Recurrent states that others read and fill on the host during random histories of hybrid models.

The histories are those of `tests/lm/scheduler/test_hybrid_histories.py`. Their device knows which tokens each state has
seen, and asserts that each segment begins with the state of exactly the tokens before it. A slot that is given to a
room is written at any time from then on. A state that is lent must be that of its tokens until the loan ends.
"""

from collections import Counter
from types import SimpleNamespace

import pytest

from holdfast.engine.process.block_moves import Moves
from holdfast.engine.process.state_moves import StateLoan, StateRoom
from holdfast.lm.memory.digests import block_digests
from holdfast.lm.memory.snapshots import NO_SLOT, StateKey
from holdfast.lm.parts.moves.planner import MovePart
from tests.hybrid import check_states
from tests.lm.memory.test_state_pool import ONE, TWO, States
from tests.lm.scheduler.test_histories import STEPS, check
from tests.lm.scheduler.test_hybrid_histories import HybridHistory
from tests.long import then_long

FILLED = "being filled"


class MovingStates(HybridHistory):
    """A history with loans of states and rooms for them, which end at any time."""

    def __init__(self, seed):
        super().__init__(seed)
        self.on = self.host_blocks > 0 and self.host_snapshots > 0
        self.moves = Moves(self.scheduler, lambda: float(self.steps), lambda: None) if self.on else None
        self.states = self.scheduler._kind.states
        self.loans, self.rooms = [], []

    def more_parts(self):
        return [*super().more_parts(), MovePart()]

    def step(self):
        if self.on:
            for begin in (self.begin_loan, self.begin_room):
                if self.random.random() < 0.3:
                    begin()
            list(self.moves.answers())
            for loan in list(self.loans):
                self.advance_loan(*loan)
            for room in list(self.rooms):
                self.advance_room(*room)
            list(self.moves.answers())
        super().step()

    def tokens_of(self, key):
        """The tokens of a snapshot, by those of all requests."""
        for request in self.requests.values():
            tokens = (*request.prompt, *self.outputs.get(request.id, ()))
            if len(tokens) >= key.length and self.key(request, tokens, key.length) == key:
                return tokens[: key.length]
        return None

    def key(self, request, tokens, length):
        root, size = request.identity.root(), self.block_size
        return StateKey.of(root, block_digests(root, tokens[: length // size * size], size), tokens, length, size)

    def begin_loan(self):
        snapshots = self.states.snapshots()
        if snapshots:
            key = self.random.choice(snapshots).key
            loan = StateLoan(self.states, key)
            self.loans.append((loan, self.tokens_of(key)))
            self.moves.begin(loan)

    def begin_room(self):
        if not self.requests:
            return
        request = self.requests[self.random.choice(list(self.requests))]
        tokens = (*request.prompt, *self.outputs.get(request.id, ()))
        if len(tokens) > self.block_size:
            length = self.random.randint(self.block_size, len(tokens) - 1)
            room = StateRoom(self.moves, self.states, [self.key(request, tokens, length)])
            self.rooms.append((room, tokens[:length]))
            self.moves.begin(room)

    def advance_loan(self, loan, tokens):
        if loan.given.done():
            slot = loan.given.result()
            if slot != NO_SLOT and tokens is not None:
                assert self.device.seen_on_host[slot] == tokens
                self.seen["lent"] += 1
        elif self.random.random() < 0.8:
            return
        if self.random.random() < 0.4:
            self.loans.remove((loan, tokens))
            self.seen["given up"] += not loan.given.done()
            self.moves.call(loan.end)

    def advance_room(self, room, tokens):
        if room.given.done():
            for slot in room.given.result():
                if slot in room._places:
                    self.device.seen_on_host[slot] = FILLED
                    if self.random.random() < 0.5:
                        self.device.seen_on_host[slot] = tokens
                        self.moves.call(lambda slot=slot: room.arrived(slot))
                        self.seen["arrived"] += 1
        elif self.random.random() < 0.8:
            return
        list(self.moves.answers())
        if self.random.random() < 0.3:
            self.rooms.remove((room, tokens))
            self.moves.call(room.end)

    def end_moves(self):
        for move, _ in (*self.loans, *self.rooms):
            self.moves.call(move.end)
        self.loans, self.rooms, self.on = [], [], False
        if self.moves:
            list(self.moves.answers())


def play(seed):
    history = MovingStates(seed)
    while history.steps < STEPS:
        while history.random.random() < 0.4 and history.scheduler.stats().waiting < 12:
            history.add()
        if history.random.random() < 0.04:
            history.abort()
        history.step()
    history.end_moves()
    history.drain()
    assert not history.states._host.reserved
    assert all(not each.holds for each in history.states.snapshots())
    return history


@pytest.mark.parametrize("seed", then_long(6, range(40)))
def test_every_request_gets_the_tokens_it_gets_alone_beside_moves_of_states(seed):
    check(play(seed))


@pytest.mark.long
def test_histories_with_moves_of_states_exercise_loans_and_arrivals():
    seen = Counter()
    for seed in range(20):
        seen += play(seed).seen
    assert seen["lent"] > 50 and seen["arrived"] > 25 and seen["given up"] > 1


def test_a_slot_is_given_out_once_no_plan_in_flight_uses_the_host():
    states = States(host=2)
    kept = states.save(ONE)
    states.pool.want_on_host(kept.key)
    assert states.plan()[0].swap_out
    room = StateRoom(SimpleNamespace(now=lambda: 5.0), states.pool, [states.key(TWO)])
    room.start()
    assert not room.ready() and not room.advance()
    states.pool.end_copies()
    assert room.ready() and room.advance()
    assert list(room.given.result(0).values()) == [states.key(TWO)]
    room.end()
    check_states(states.pool)
