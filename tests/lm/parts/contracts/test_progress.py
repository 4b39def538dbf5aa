"""Progress: what is expected of one step, and of many."""

from dataclasses import replace
from math import isclose

from holdfast.lm.parts.contracts.lateness import Lateness
from holdfast.lm.parts.contracts.policy import Progress
from holdfast.lm.scheduler.correction import DEVIATIONS
from tests.lm.parts.contracts.world import EXACT


def test_one_step_may_be_long_and_many_are_near_their_mean():
    progress = Progress(replace(EXACT, deviation=0.04), Lateness())
    assert isclose(progress.factor, 1 + DEVIATIONS * 0.04) and isclose(progress.usual, 1.04)


def test_a_pipeline_passes_each_stage():
    alone, two = (Progress(replace(EXACT, deviation=0.04), Lateness(), stages) for stages in (1, 2))
    assert isclose(two.usual / alone.usual, two.factor / alone.factor) and two.usual > alone.usual
