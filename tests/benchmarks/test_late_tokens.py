"""The parts of a gap between two tokens, from a trace of the engine and the times at the client."""

import pytest

from benchmarks.engine.late_tokens import PARTS, Arrivals, History, table
from holdfast.engine.process.trace import Trace
from holdfast.lm.parts.tuning.values import TrainingPlan, TrainingReport, TrainingSlice
from holdfast.lm.types import Forecast, Sampling, Segment, StepPlan, StepResult

DRAWN = Sampling(0.0, 0, 1.0, 1)


class Clock:
    now = 10.0

    def __call__(self):
        return self.now


def traced(path, *steps):
    """A trace of steps: name and range of the segment, time of the end, measured seconds of step and slice."""
    clock = Clock()
    trace = Trace(path, clock)
    for number, (name, start, stop, ended, seconds, trained) in enumerate(steps):
        parts, reports = (), ()
        if trained:
            parts = (TrainingPlan(TrainingSlice("job", 0, 0, "run", 0, 1)),)
            reports = (TrainingReport(seconds=trained),)
        segment = Segment(name, 0, start, stop, (1,) * (stop - start), DRAWN)
        trace.planned(StepPlan(number, (segment,), forecast=Forecast(8, 0.25), parts=parts))
        clock.now = ended
        trace.ended(StepResult(number, (1,), seconds, parts=reports))
    trace.close()
    return History.read(path)


@pytest.fixture
def gaps(tmp_path):
    """The gaps of a chat "a" with a prompt of 4 tokens, whose third token waits for a step of another request."""
    history = traced(
        tmp_path / "t.json",
        ("a", 0, 3, 11.0, 1.0, 0.0),
        ("a", 3, 4, 12.0, 0.5, 0.0),
        ("a", 4, 5, 13.0, 0.5, 0.25),
        ("b", 0, 4, 14.0, 0.75, 0.0),
        ("a", 5, 6, 15.0, 0.5, 0.0),
    )
    return [*history.gaps(Arrivals("a", 4, [12.5, 13.75, 15.5]))]


def test_a_gap_is_the_sum_of_its_parts(gaps):
    assert [gap["gap"] for gap in gaps] == [1.25, 1.75]
    for gap in gaps:
        assert sum(gap[part] for part in PARTS) == pytest.approx(gap["gap"])


def test_the_parts_are_the_step_its_slice_steps_of_others_the_engine_and_the_client(gaps):
    first, second = ({part: round(gap[part], 6) for part in PARTS} for gap in gaps)
    assert first == {"device": 0.5, "training": 0.25, "other steps": 0.0, "engine": 0.25, "client": 0.25}
    assert second == {"device": 0.5, "training": 0.0, "other steps": 0.75, "engine": 0.75, "client": -0.25}
    assert first["device"] - 0.25 == gaps[0]["over price"]


def test_tokens_that_the_client_did_not_get_have_no_gap(tmp_path):
    history = traced(tmp_path / "t.json", ("a", 0, 4, 11.0, 0.5, 0.0), ("a", 4, 5, 12.0, 0.5, 0.0))
    assert [*history.gaps(Arrivals("a", 4, [11.5]))] == []
    assert [*history.gaps(Arrivals("b", 4, [11.5, 12.5]))] == []


def test_the_table_has_a_row_for_the_gaps_above_the_target(gaps):
    lines = table([{"run": "chats", "gaps": gaps}], 1.5).splitlines()
    assert [line.split(" | ")[1:4] for line in lines[2:]] == [
        ["all", "2", "1500.0"],
        ["above the target", "1", "1750.0"],
        ["from P99 of 1745.0 ms", "1", "1750.0"],
    ]
