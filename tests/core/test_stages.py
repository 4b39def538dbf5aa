"""Stages of a start."""

import pytest

from holdfast.core.stages import Stage, Stages, in_words


def test_stages_count_from_the_beginning_and_are_shown_in_the_order_of_their_beginnings() -> None:
    times = iter((12.0, 13.0, 13.5, 15.0))
    stages = Stages(10.0, lambda: next(times))
    with stages.stage("weights"), stages.stage("kernels"):
        pass
    assert stages.done == [Stage("kernels", 3.0, 3.5), Stage("weights", 2.0, 5.0)]
    assert in_words(stages.done) == "weights 2.0 to 5.0, kernels 3.0 to 3.5 s"


def test_a_stage_that_fails_is_recorded() -> None:
    stages = Stages(0.0, lambda: 1.0)
    with pytest.raises(MemoryError), stages.stage("host memory"):
        raise MemoryError
    assert stages.done == [Stage("host memory", 1.0, 1.0)]
