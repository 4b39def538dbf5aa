"""Reserve: heavy steps are faster until the boost is used up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.cost import HEAVY, Burst
from holdfast.lab.simulator.reserve import Reserve


def test_heavy_steps_use_up_the_boost_and_light_steps_restore_it():
    reserve = Reserve(Burst(share=0.8, seconds=0.03))
    assert reserve.step(HEAVY, 0.020) == pytest.approx(0.016)
    assert reserve.step(HEAVY, 0.020) == pytest.approx(0.014 + 0.0025)  # 14 ms that are left, and the rest at the pace
    assert reserve.step(HEAVY, 0.020) == 0.020
    assert reserve.step(HEAVY - 1, 0.004) == 0.004
    assert reserve.step(HEAVY, 0.020, idle=0.004) == pytest.approx(0.008 + 0.010)
    reserve.step(1, 1.0)
    assert reserve.step(HEAVY, 0.100) == pytest.approx(0.03 + 0.0625)  # no more than a full reserve


@given(st.lists(st.tuples(st.sampled_from([1, HEAVY]), st.floats(0, 0.1), st.floats(0, 0.1)), max_size=20))
def test_without_a_burst_every_step_takes_its_steady_time(steps):
    reserve = Reserve(Burst())
    assert [reserve.step(*step) for step in steps] == [seconds for _, seconds, _ in steps]
