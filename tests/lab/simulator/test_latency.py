"""A plan's time is its segments' time."""

import pytest

from holdfast.lab.simulator.latency import Latency
from holdfast.lm.types import Segment, StepPlan
from tests.lab.simulator.simulation import COST


def test_a_plan_takes_its_linear_layers_and_each_segments_attention():
    def segment(start, stop):
        return Segment("a", 0, start, stop, (0,) * (stop - start), None)

    plan = StepPlan(0, (segment(99, 100), segment(499, 500), segment(10, 110)))
    expected = COST.linear(102) + COST.attention(1, 100) + COST.attention(1, 500) + COST.attention(100, 110)
    assert Latency(COST).stages(plan) == [pytest.approx(expected)]
