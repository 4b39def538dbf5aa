"""LowestFirst: which snapshot is given, and when all are ranked anew."""

from holdfast.lm.memory.lowest_first import SHARE, LowestFirst
from holdfast.lm.memory.snapshots import NOTHING_KEPT, Snapshot


class Ranked:
    """Snapshots whose slot is their rank, and how often they were ranked."""

    def __init__(self, count, slots):
        self.snapshots = [Snapshot(NOTHING_KEPT.key, NOTHING_KEPT, slot=number) for number in range(count)]
        self.ranked = 0
        self.lowest = LowestFirst(lambda each: each.slot >= 0, self.rank, slots)

    def rank(self, snapshot, now):
        self.ranked += 1
        return True, float(snapshot.slot), snapshot.used

    def first(self):
        return [each.slot for each in self.lowest.first(lambda: self.snapshots, 0.0)]

    def take(self):
        """Take the first one out."""
        (snapshot,) = self.lowest.first(lambda: self.snapshots, 0.0)
        slot, snapshot.slot = snapshot.slot, -1
        return slot


def test_snapshots_come_in_the_order_of_their_ranks():
    ranked = Ranked(5, 5)
    assert [ranked.take() for _ in range(5)] == [0, 1, 2, 3, 4]
    assert ranked.first() == []


def test_the_first_stays_first_until_it_is_taken():
    ranked = Ranked(3, 3)
    assert ranked.first() == ranked.first() == [0]


def test_snapshots_that_the_next_plan_needs_are_left_out():
    ranked = Ranked(3, 3)
    ranked.snapshots[0].pins = 1
    assert ranked.first() == [1]


def test_a_snapshot_that_was_used_after_it_was_chosen_is_left_out():
    ranked = Ranked(4 * SHARE, 4 * SHARE)
    assert ranked.take() == 0
    ranked.snapshots[1].used = 1.0, 1
    assert ranked.first() == [2]


def test_all_are_ranked_once_for_a_share_of_them():
    ranked = Ranked(4 * SHARE, 4 * SHARE)
    assert [ranked.take() for _ in range(4)] == [0, 1, 2, 3]
    assert ranked.ranked == 4 * SHARE
    assert ranked.take() == 4 and ranked.ranked == 8 * SHARE - 4
