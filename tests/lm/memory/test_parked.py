"""Parked: how far worths may fall until parked groups have to be looked at."""

from types import SimpleNamespace

from holdfast.lm.memory.parked import SLACK, Parked


def parked(worths):
    kind, source = SimpleNamespace(beliefs=(True, False)), SimpleNamespace(worths=worths)
    return Parked(kind, source), source


def test_worths_may_fall_to_a_share_of_those_at_the_start():
    each, source = parked([1.0, 2.0])
    source.worths = [SLACK * 1.01, 2.0]
    assert each.holds
    source.worths = [SLACK * 0.99, 2.0]
    assert not each.holds
    source.worths = [1.0, 2.0]
    assert not each.holds, "groups that were parked on the way are not known to be above the bound"


def test_the_highest_worths_since_the_start_count():
    each, source = parked([1.0])
    source.worths = [10.0]
    each.add((0.0, 1), 1.0)
    source.worths = [2.0]
    assert not each.holds
