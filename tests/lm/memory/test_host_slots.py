"""HostSlots: which slots of the host are free or reserved, and when a thread may write to one."""

from array import array

from holdfast.lm.memory.host_slots import HostSlots
from holdfast.lm.memory.snapshots import NOTHING_KEPT, Snapshot, StateKey


def snapshot(host):
    return Snapshot(StateKey(4, b"d" * 32, array("I"), b""), NOTHING_KEPT, host=host)


def test_a_slot_is_free_reserved_or_kept():
    slots = HostSlots(3)
    first, second = slots.reserve(), slots.reserve()
    assert ([first, second], slots.free, slots.reserved, slots.kept) == ([0, 1], [2], {0, 1}, 0)
    slots.fill(first)
    slots.cancel(second)
    assert (slots.free, slots.reserved, slots.kept) == ([2, 1], set(), 1)


def test_a_slot_may_be_filled_once_the_plans_made_before_it_was_reserved_have_ended():
    slots = HostSlots(2)
    assert slots.is_quiet(slots.mark), "no plan was made"
    slots.begin(())
    slots.begin(())
    mark = slots.mark
    slots.begin(())
    slots.end()
    assert not slots.is_quiet(mark)
    slots.end()
    assert slots.is_quiet(mark), "the third plan came later"


def test_a_snapshot_is_whole_on_the_host_once_the_result_of_its_copy_has_come():
    slots, first, second = HostSlots(2), snapshot(0), snapshot(1)
    slots.begin([(first, 0)])
    slots.begin([(second, 1)])
    assert (slots.end(), slots.end()) == ([first], [second])


def test_a_snapshot_that_has_left_its_slot_meanwhile_is_not_whole_there():
    slots, gone = HostSlots(2), snapshot(0)
    slots.begin([(gone, 0)])
    gone.host = -1
    assert slots.end() == []


def test_a_slot_that_held_another_snapshot_in_between_is_whole_after_the_last_copy():
    slots, first, other = HostSlots(1), snapshot(0), snapshot(0)
    slots.begin([(first, 0)])
    slots.begin([(other, 0)])
    other.host = -1
    slots.begin([(first, 0)])
    assert [slots.end(), slots.end(), slots.end()] == [[], [], [first]]
