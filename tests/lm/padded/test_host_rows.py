"""States go to host memory and back, each copy in its turn however late it runs."""

import pytest
import torch

from holdfast.lm.padded.host_rows import HostRows
from holdfast.lm.padded.state_layout import StateLayout
from tests.late_streams import ForgottenStream, LateStream
from tests.lm.padded.echo import CPU, Echo, keys_of

LAYOUT = StateLayout.discover(Echo().run)


def state_of(*tokens):
    return {"keys": torch.tensor(tokens, dtype=torch.float32)[None, :, None]}


def host_rows(capacity=1000, stream=None):
    return HostRows(LAYOUT, capacity, CPU, make_stream=stream)


def test_a_stored_state_comes_back_as_it_was_as_often_as_it_is_loaded():
    host = host_rows()
    host.store(3, state_of(1, 2, 3), 3, step=0)
    with torch.inference_mode():
        host.load(3, 3, step=1).take()["keys"].zero_()
    assert keys_of(host.load(3, 3, step=2).take()) == [[1, 2, 3]]


def test_a_load_gives_the_first_positions():
    host = host_rows()
    host.store(3, state_of(1, 2, 3), 3, step=0)
    assert keys_of(host.load(3, 2, step=1).take()) == [[1, 2]]
    assert keys_of(host.load(3, 3, step=1).take()) == [[1, 2, 3]]


@pytest.mark.parametrize(("slot", "length"), [(3, 4), (3, 0), (4, 1)])
def test_positions_that_a_slot_does_not_have_are_refused(slot, length):
    host = host_rows()
    host.store(3, state_of(1, 2, 3), 3, step=0)
    with pytest.raises(ValueError, match=f"{length} positions are wanted of slot {slot}, which has"):
        host.load(slot, length, step=1)


def test_more_states_than_fit_are_refused_until_one_is_forgotten():
    host = host_rows(capacity=6 * 4)
    host.store(1, state_of(1, 2, 3), 3, step=0)
    host.store(2, state_of(4, 5, 6), 3, step=0)
    assert host.used == 24
    with pytest.raises(MemoryError, match="slot 3 needs 4 bytes of host memory for 1 positions; 24 of 24 are used"):
        host.store(3, state_of(7), 1, step=1)
    host.forget(1)
    host.store(3, state_of(7), 1, step=1)
    assert (host.used, 1 in host, 3 in host) == (16, False, True)


def test_what_a_slot_held_before_is_lost():
    host = host_rows(capacity=3 * 4)
    host.store(1, state_of(1, 2, 3), 3, step=0)
    host.store(1, state_of(4, 5), 2, step=1)
    assert (host.length(1), host.used) == (2, 8)
    assert keys_of(host.load(1, 2, step=2).take()) == [[4, 5]]


def test_a_load_waits_for_its_store_and_the_reader_for_the_load():
    host = host_rows(stream=LateStream)
    host.store(1, state_of(1, 2, 3), 3, step=0)
    loading = host.load(1, 3, step=1)
    host.forget(1)
    assert keys_of(loading.take()) == [[1, 2, 3]]


def test_a_reader_that_did_not_wait_would_find_no_state():
    host = host_rows(stream=ForgottenStream)
    host.store(1, state_of(1, 2, 3), 3, step=0)
    with pytest.raises((AttributeError, TypeError)):
        keys_of(host.load(1, 3, step=1).take())


def test_plans_count_as_complete_in_order_and_only_up_to_the_one_asked_for():
    streams = []
    host = host_rows(stream=lambda: streams.append(LateStream(patience=1)) or streams[-1])
    host.store(1, state_of(1, 2, 3), 3, step=2)
    host.store(2, state_of(4), 1, step=2)
    host.store(3, state_of(5), 1, step=4)
    assert host.completed(1, wait=False)[:2] == (1, 1)
    assert host.completed(2, wait=False) == (1, 2, ())
    done = host.completed(3, wait=True)
    assert done[:2] == (3, 3)
    assert [(copy.step, copy.inward, copy.bytes, copy.seconds) for copy in done.times] == [(2, False, 16, 0.5)]
    host.load(1, 3, step=5)
    assert host.completed(5, wait=False)[:2] == (3, 4)
    assert host.completed(5, wait=True)[:2] == (5, 5)
    assert host.completed(5, wait=True).times == ()


def test_closing_waits_for_copies_under_way_and_gives_the_memory_back():
    streams = []
    host = host_rows(stream=lambda: streams.append(LateStream()) or streams[-1])
    host.store(1, state_of(1, 2, 3), 3, step=0)
    host.load(1, 3, step=0)
    host.close()
    assert not any(stream.queue for stream in streams)
    assert (host.used, 1 in host) == (0, False)


def test_a_state_that_arrives_from_elsewhere_is_loaded_like_any_other():
    host = host_rows()
    host.put(5, state_of(1, 2, 3), 3)
    assert 5 in host and host.used == 12
    assert keys_of(host.load(5, 2, step=1).take()) == [[1, 2]]
    host.forget(5)
    assert host.used == 0


def test_only_a_complete_copy_is_given_to_others():
    late = LateStream()
    host = host_rows(stream=lambda: late)
    host.store(3, state_of(1, 2, 3), 3, step=0)
    assert host.stored(3) == () == host.stored(4)
    assert host.completed(0, wait=True).swapped_out == 0
    (state,) = host.stored(3)
    assert keys_of(state) == [[1, 2, 3]]
