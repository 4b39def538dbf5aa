"""RowPool: rows × longest by hand, which rows fit, where states go, and the effects of a lost step."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.lm.memory.row_pool import RECOVERY, FoundRow, RowPool, RowState, StateBelow, nothing_below
from holdfast.lm.types import RowBytes, RowMove
from tests.padded_rows import ABLE, shape_of_rows


def pool_of(memory=1000, threshold=1.0, **options):
    return RowPool(shape_of_rows(memory, **options), threshold=threshold)


def running(pool, row, length, place="batch"):
    """A state of `length` computed positions, in the batch or outside it."""
    state = RowState(pool)
    state.allocate(FoundRow(), length, 0.0)
    state.occupy(row)
    if place == "batch":
        state.join()
    state.plan(0, length)
    return state


def test_every_row_takes_as_much_as_the_longest():
    pool = pool_of()
    running(pool, 0, 10)
    assert pool.used == 11, "its positions, and the one to come"
    running(pool, 1, 99)
    assert pool.used == 200
    running(pool, 2, 3, place="apart")
    assert pool.used == 300, "what is on its way to the batch counts as a row of it"


def test_width_is_rounded_up_to_the_quantum_of_the_buffers():
    pool = pool_of(quantum=64)
    running(pool, 0, 60)
    running(pool, 1, 63)
    assert pool.used == 2 * 64
    running(pool, 2, 64)
    assert pool.used == 3 * 128


def test_windows_and_recurrent_states_are_counted_by_their_own_sizes():
    pool = pool_of(10_000, size=RowBytes(fixed=100, growing=((8, None), (4, 10))))
    running(pool, 0, 29)
    running(pool, 1, 5)
    assert pool.used == -(-2 * (100 + 8 * 30 + 4 * 10) // 12)


def test_a_row_may_join_if_all_rows_fit_at_the_width_it_brings():
    pool = pool_of(1000)
    for row in range(3):
        running(pool, row, 99)
    assert pool.admits(FoundRow(), 249, 0) and not pool.admits(FoundRow(), 250, 0)
    assert pool.admits(FoundRow(), 224, 100) and not pool.admits(FoundRow(), 225, 100)
    assert pool.needed(FoundRow(), 249) == 4 * 250 - 300


def test_an_empty_batch_takes_a_row_that_exceeds_the_threshold():
    pool = pool_of(100, threshold=0.5)
    assert pool.admits(FoundRow(), 90, 0)
    assert pool.available == 100
    running(pool, 0, 90)
    assert not pool.admits(FoundRow(), 1, 0) and pool.available == 0


def test_rows_may_not_grow_past_the_threshold():
    pool = pool_of(100, threshold=0.9)
    first, second = running(pool, 0, 44), running(pool, 1, 44)
    assert pool.can_decode([first, second])
    first.claim(45), second.claim(45)
    for state in (first, second):
        state.plan(44, 45)
    assert not pool.can_decode([first, second]), "two rows of 46 are more than 90"


def test_preempting_the_longest_frees_the_padding_of_the_others():
    pool = pool_of()
    longest, middle, short = running(pool, 0, 99), running(pool, 1, 49), running(pool, 2, 9)
    assert pool.freed_by(short, []) == 100
    assert pool.freed_by(longest, []) == 300 - 100
    assert pool.freed_by(middle, [longest]) == 100 - 10


def test_a_batch_of_longest_lengths_is_held_if_all_rows_fit_at_the_longest():
    pool = pool_of(100)
    assert pool.holds(2, 60, 50) and not pool.holds(2, 60, 51)
    assert pool.holds(1, 101, 101), "one sequence alone is let in: `add` refuses what can never fit"


def test_a_suspended_state_goes_to_the_host_and_comes_back():
    pool = pool_of(host=20)
    state = running(pool, 3, 12)
    assert state.suspend((), 0.0)
    assert (pool.used, pool.host_used) == (0, 12)
    found = state.match([1] * 13)
    assert len(found) == 12
    state.allocate(found, 13, 0.0)
    state.occupy(5)
    assert (state.place, state.planned, pool.host_used) == ("apart", 12, 0)
    state.embed()
    assert pool.take_moves(2) == [
        RowMove(2, "store", 3, 0, 12),
        RowMove(2, "load", 5, 0, 12),
        RowMove(2, "forget", slot=0),
        RowMove(2, "embed", 5, length=12),
    ]
    assert pool.take_moves(0) == []


def test_a_suspended_state_is_computed_again_where_the_host_has_no_room():
    pool = pool_of(host=11)
    state = running(pool, 0, 12)
    assert not state.suspend((), 0.0)
    assert (state.planned, len(state.match([1] * 13)), pool.dropped) == (0, 0, 12)
    assert pool.take_moves(0) == [RowMove(0, "drop", 0)]


def test_a_state_on_its_way_to_the_host_counts_against_admission_until_the_copy_is_complete():
    pool = pool_of(100, host=100)
    running(pool, 0, 9)
    victim = running(pool, 1, 9)
    victim.suspend((), 0.0)
    assert pool.available == 100 - 10 - 9
    pool.swap_out(4, 1, 0.0)
    pool.finish_swap_out(3)
    assert pool.available == 81
    pool.finish_swap_out(4)
    assert pool.available == 90


def test_states_computed_ahead_are_counted_by_their_own_length():
    pool = pool_of()
    running(pool, 0, 99)
    ahead = running(pool, 1, 9, place="apart")
    ahead.wait_ahead()
    assert (pool.rows, pool.used) == (1, 110)
    ahead.embed()
    assert (pool.rows, pool.used) == (2, 200)


def test_an_ended_row_that_stays_is_counted_and_grows_up_to_the_longest_length():
    pool = pool_of()
    running(pool, 0, 9)
    ended = running(pool, 1, 19)
    ended.run_on()
    assert (pool.rows, pool.used) == (2, 38)
    assert pool.extend_ended(21) == ([1], []) and pool.ended == {1: 20}
    assert pool.extend_ended(21) == ([1], [])
    assert pool.extend_ended(21) == ([], [1]) and not pool.ended
    assert pool.take_moves(0) == [RowMove(0, "drop", 1)]


def test_memory_shrinks_when_a_step_is_lost_and_grows_again():
    pool = pool_of(1000)
    pool.shrink()
    pool.shrink()
    assert (pool.memory, pool.shrinks) == (810, 2)
    for _ in range(RECOVERY):
        assert pool.memory == 810
        pool.recover()
    assert pool.memory == 900
    for _ in range(2 * RECOVERY):
        pool.recover()
    assert pool.memory == 1000


def test_a_row_verifies_no_drafts():
    with pytest.raises(RuntimeError, match="verify no drafts"):
        running(pool_of(), 0, 5).draft(3, 6)
    with pytest.raises(RuntimeError, match="verify no drafts"):
        running(pool_of(), 0, 5).accept(1)


ROOT = b"r" * 32


def kept_state(pool, row, tokens, known=None):
    """End a sequence of these tokens, and keep its state. Returns the state."""
    state = RowState(pool, ROOT)
    state.allocate(FoundRow(), len(tokens), 0.0)
    state.occupy(row)
    state.plan(0, len(tokens))
    state.keep(known)
    return state


def test_the_state_of_an_ended_sequence_is_found_once_its_tokens_are_known():
    pool, tokens = pool_of(), list(range(40))
    state = kept_state(pool, 0, tokens)
    assert not pool.find(ROOT, [*tokens, 7]).length, "its tokens are not known yet"
    assert pool.in_use == pool.bytes(40)
    state.settle(tokens, 1.0)
    assert pool.find(ROOT, [*tokens, 7]) == FoundRow(40, 0, on_host=False)
    assert (pool.in_use, pool.cached) == (0, 40)
    assert pool.take_moves(0) == [RowMove(0, "keep", 0, 0, 40)]


def test_a_state_whose_tokens_never_become_known_is_given_up():
    pool, tokens = pool_of(), list(range(40))
    kept_state(pool, 0, tokens).settle(tokens[:39], 1.0)
    assert not pool.find(ROOT, [*tokens, 7]).length
    assert [move.kind for move in pool.take_moves(0)] == ["keep", "forget"] and pool.in_use == 0


@pytest.mark.parametrize("croppable", [True, False])
def test_a_state_that_went_beyond_the_known_tokens_is_cut_or_given_up(croppable):
    pool, tokens = pool_of(abilities=replace(ABLE, croppable=croppable)), list(range(40))
    kept_state(pool, 0, tokens, known=36).settle(tokens[:36], 1.0)
    assert pool.find(ROOT, [*tokens, 7]).length == (36 if croppable else 0)
    assert pool.take_moves(0) == [RowMove(0, "keep", 0, 0, 36) if croppable else RowMove(0, "drop", 0)]


def test_states_go_to_the_host_before_rows_need_their_memory():
    pool, first, second = pool_of(100, host=50), list(range(30)), list(range(100, 130))
    kept_state(pool, 0, first).settle(first, 1.0)
    kept_state(pool, 0, second).settle(second, 2.0)
    pool.take_moves(0)
    running(pool, 0, 20)
    assert pool.take_moves(0) == [RowMove(0, "offload", -1, 0, 30)], "less than a quarter is free"
    assert pool.find(ROOT, [*first, 7]) == FoundRow(30, 0, on_host=True)
    assert (pool.in_use, pool.host_free) == (21 + 30, 20), "the copy is not complete"
    pool.swap_out(5, 0, 3.0)
    pool.finish_swap_out(5)
    assert pool.in_use == 21
    running(pool, 1, 29)
    assert pool.take_moves(0) == [RowMove(0, "forget", -1, 0), RowMove(0, "offload", -1, 1, 30)]
    assert not pool.find(ROOT, [*first, 7]).length and pool.find(ROOT, [*second, 7]).on_host


def test_states_are_given_up_where_rows_need_their_memory_now():
    pool, first, second = pool_of(100), list(range(30)), list(range(100, 130))
    kept_state(pool, 0, first).settle(first, 1.0)
    kept_state(pool, 0, second).settle(second, 2.0)
    pool.take_moves(0)
    running(pool, 0, 34)
    assert pool.take_moves(0) == []
    running(pool, 1, 10)
    assert pool.take_moves(0) == [RowMove(0, "forget", -1, 0)] and pool.dropped == 30
    running(pool, 2, 5)
    assert pool.take_moves(0) == [RowMove(0, "forget", -1, 1)] and pool.cached == 0


def test_a_copy_passes_through_the_host_and_the_device_keeps_its_state():
    pool, tokens = pool_of(host=50), list(range(40))
    pool.serve_below(nothing_below)
    kept_state(pool, 0, tokens).settle(tokens, 1.0)
    assert pool.copy_to_host(0) == 1 and pool.storing
    assert pool.take_moves(0)[-1] == RowMove(0, "copy", -1, 1, 40, 0)
    assert (pool.host_free, pool.in_use) == (10, 0), "nothing leaves the device"
    pool.swap_out(3, 0, 2.0)
    assert not pool.news_of_host
    pool.finish_swap_out(3)
    assert pool.news_of_host and pool.take_on_host() == [1] and not pool.take_on_host() and not pool.storing
    assert pool.copy_to_host(0) is None, "the host has no room for a second one"
    pool.pass_on(1)
    assert pool.host_free == 50 and pool.take_moves(0) == [RowMove(0, "forget", -1, 1)]
    assert pool.find(ROOT, [*tokens, 7]) == FoundRow(40, 0, on_host=False)


def test_a_state_that_arrives_is_found_on_the_host():
    pool, tokens = pool_of(host=50), list(range(40))
    kept_state(pool, 0, tokens).settle(tokens, 1.0)
    key = pool.kept.key(0)
    pool.give_up(0)
    slot = pool.begin_arrival(40)
    assert pool.begin_arrival(40) is None and pool.host_free == 10
    assert pool.end_arrival(slot, key, 2.0)
    assert pool.find(ROOT, [*tokens, 7]) == FoundRow(40, slot, on_host=True) and pool.host_free == 10
    pool.kept.hold(slot)
    assert pool.begin_arrival(40) is None, "a held state is not given up"
    pool.kept.release(slot)
    other = pool.begin_arrival(40)
    assert other is not None and not pool.find(ROOT, [*tokens, 7]).length
    pool.cancel_arrival(other)
    assert pool.host_free == 50


def test_a_state_that_arrives_after_an_equal_one_is_given_up():
    pool, tokens = pool_of(host=100), list(range(40))
    kept_state(pool, 0, tokens).settle(tokens, 1.0)
    pool.take_moves(0)
    slot = pool.begin_arrival(40)
    assert not pool.end_arrival(slot, pool.kept.key(0), 2.0)
    assert pool.take_moves(0) == [RowMove(0, "forget", -1, slot)] and pool.host_free == 100


def test_a_sequence_asks_below_for_what_the_memory_does_not_save():
    pool, tokens, asked = pool_of(host=50), list(range(40)), []
    found = StateBelow(39, b"digest")
    pool.serve_below(lambda root, prompt, saved: (asked.append((root, saved)), found)[1])
    state = RowState(pool, ROOT)
    assert state.lacking(tokens) == {39: b"digest"}
    kept_state(pool, 0, tokens[:20]).settle(tokens[:20], 1.0)
    state.lacking(tokens)
    assert asked == [(ROOT, 0), (ROOT, 20)]
    assert RowState(pool).lacking(tokens) == {}, "a sequence that shares nothing finds nothing"
    state.slot = 5
    assert state.lacking(tokens) == {}, "a suspended sequence has its own state"


def test_a_state_that_a_lost_sequence_began_with_is_given_up():
    pool, tokens = pool_of(), list(range(40))
    kept_state(pool, 0, tokens).settle(tokens, 1.0)
    state = RowState(pool, ROOT)
    state.allocate(state.match([*tokens, 7, 8]), 42, 2.0)
    state.occupy(1)
    assert (state.planned, state.place) == (40, "apart")
    state.lose()
    assert not state.match([*tokens, 7, 8]).length
    assert [move.kind for move in pool.take_moves(0)] == ["keep", "load", "forget"]


def test_without_chunks_a_state_serves_only_where_little_is_left_to_compute():
    pool, tokens = pool_of(abilities=replace(ABLE, chunks=False)), list(range(40))
    kept_state(pool, 0, tokens).settle(tokens, 1.0)
    assert pool.find(ROOT, [*tokens, *range(20)]).length == 40
    assert not pool.find(ROOT, [*tokens, *range(21)]).length


def decode(pool, states):
    """Plan a forward of the batch that has these rows afterwards."""
    assert pool.can_decode(states)
    for state in states:
        state.claim(state.planned + 1)
    for state in states:
        if state.place == "apart":
            state.embed()
        state.plan(state.planned, state.planned + 1)
    moves = pool.take_moves(0)
    pool.note_decode()
    return moves


def test_a_batch_in_the_memory_of_captured_decodes_takes_none_of_the_other_memory():
    pool = pool_of(1000, settled=4 * 64, quantum=16)
    states = [running(pool, row, 20, place="apart") for row in range(3)]
    assert pool.in_use == 3 * 32, "on their way in they count in full"
    decode(pool, states)
    assert (pool.in_use, pool.used, pool.available) == (0, 3 * 32, 1000)
    late = running(pool, 3, 10, place="apart")
    assert pool.in_use == 4 * 32, "it may take the others out when it joins"
    decode(pool, [*states, late])
    assert pool.in_use == 0
    late.leave()
    assert pool.in_use == 0


def test_a_batch_that_outgrows_the_memory_of_captured_decodes_counts_in_full_until_it_fits_again():
    pool = pool_of(300, settled=2 * 32, quantum=16)
    states = [running(pool, row, 20, place="apart") for row in range(2)]
    decode(pool, states)
    for _ in range(11):
        decode(pool, states)
        assert pool.in_use == 0
    assert states[0].planned == 32
    decode(pool, states)
    assert pool.in_use == 2 * 48
    states[0].leave()
    assert pool.in_use == 48, "it settles when it is decoded"
    decode(pool, states[1:])
    assert pool.in_use == 0


def test_rows_grow_in_the_memory_of_captured_decodes_where_the_other_is_full():
    for settled, fits in ((0, False), (4 * 128, True)):
        pool = pool_of(100, settled=settled, quantum=1)
        states = [running(pool, row, 30, place="apart") for row in range(3)]
        decode(pool, states)
        decode(pool, states)
        decode(pool, states)
        assert pool.can_decode(states) == pool.can_grow(states[0]) == fits
        assert not pool.admits(FoundRow(), 30, 0), "to join they would have to be outside for a while"


def test_recurrent_rows_settle_however_many_there_are():
    pool = pool_of(1000, settled=1, size=RowBytes(fixed=100))
    decode(pool, [running(pool, row, 20, place="apart") for row in range(7)])
    assert pool.in_use == 0


class Device:
    """The memory of states on a device, counted from the moves and forwards that it is given."""

    def __init__(self, shape):
        self.shape, self.settled = shape, False
        self.batch, self.apart, self.slots = {}, {}, {}

    def follow(self, moves):
        for kind, row, slot, length in ((each.kind, each.row, each.slot, each.length) for each in moves):
            place = self.batch if row in self.batch else self.apart
            if kind == "embed":
                self.batch[row] = self.apart.pop(row)
                self.settled = False
            elif kind in ("drop", "keep"):
                del place[row]
                self.slots.update({slot: length} if kind == "keep" else {})
            else:
                assert kind == "forget"
                del self.slots[slot]

    def check(self):
        size, quantum = self.shape.bytes.of, self.shape.quantum
        width = -(-max(self.batch.values(), default=0) // quantum) * quantum
        fits = self.shape.settles(len(self.batch), max(self.batch.values(), default=0))
        used = 0 if self.settled and fits else len(self.batch) * size(width)
        used += sum(map(size, (*self.apart.values(), *self.slots.values())))
        assert used <= self.shape.memory or (len(self.batch) + len(self.apart) == 1 and not self.slots)
        self.settled = self.settled and fits

    def decode(self):
        self.batch = {row: length + 1 for row, length in self.batch.items()}
        self.check()
        self.settled = self.shape.settles(len(self.batch), max(self.batch.values(), default=0))


@given(
    settled=st.sampled_from((0, 32, 200, 2000)),
    quantum=st.sampled_from((1, 8)),
    size=st.sampled_from((RowBytes(growing=((1, None),)), RowBytes(fixed=9, growing=((1, None), (1, 6))))),
    work=st.lists(st.tuples(st.sampled_from(("start", "decode", "decode", "end", "abort")), st.integers(1, 60))),
)
def test_states_never_take_more_bytes_than_there_are(settled, quantum, size, work):
    pool = pool_of(300, settled=settled, quantum=quantum, size=size)
    device, states = Device(pool.shape), {}
    for step, (what, number) in enumerate(work, start=1):
        if what == "start" and pool.admits(FoundRow(), number, 0):
            row = next(row for row in range(99) if row not in states)
            states[row] = state = RowState(pool, ROOT)
            state.allocate(FoundRow(), number, float(step))
            state.occupy(row)
            state.plan(0, number)
            device.follow(pool.take_moves(0))
            device.apart[row] = number
            device.check()
        elif what == "decode" and states:
            while len(states) > 1 and not pool.can_decode(states.values()):
                states.pop(max(states, key=lambda row: states[row].planned)).leave()
            if pool.can_decode(states.values()):
                device.follow(decode(pool, states.values()))
                device.decode()
        elif what in ("end", "abort") and states:
            state = states.pop(sorted(states)[number % len(states)])
            if what == "end":
                tokens = [step, *range(state.planned - 1)]
                state.keep()
                state.settle(tokens, float(step))
            state.leave()
        pool.swap_out(step, 0, float(step))
        assert pool.in_use <= pool.shape.memory or len(pool.members) == 1
