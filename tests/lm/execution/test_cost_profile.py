"""The measured points: what is padded costs what it is padded to, and steps of any mix what such steps took."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
import torch

from holdfast.core.cost import Burst, interpolate
from holdfast.lab.simulator.reserve import Reserve
from holdfast.lm.execution import cost_profile as profile
from holdfast.lm.execution.cost_profile import burst_of, measure_cost, measure_recomputation, stairs
from holdfast.lm.types import StepPlan, StepResult


def test_a_padded_step_takes_what_its_size_takes() -> None:
    points = list(stairs((1, 32, 64, 128, 256), (1.0, 2.0, 3.0, 5.0, 6.0), padded_to={64, 128, 256}))
    tokens, seconds = zip(*points, strict=True)
    assert [interpolate(tokens, seconds, count) for count in (1, 32, 33, 64, 65, 100, 128, 129, 256)] == [
        1.0,
        2.0,
        *[3.0] * 2,
        *[5.0] * 3,
        *[6.0] * 2,
    ]


def test_without_padding_the_points_are_those_measured() -> None:
    assert list(stairs((1, 2, 4), (1.0, 2.0, 3.0), padded_to=())) == [(1, 1.0), (2, 2.0), (4, 3.0)]


def alone(query: int, context: int) -> float:
    """What a segment's attention takes by itself on a device made up for these tests."""
    return 1e-8 * query * context


def step(spans: list[tuple[int, int]]) -> float:
    """What a step takes there: far chunks half as much again as alone, each of few decodes more than of many."""
    tokens = sum(stop - start for start, stop in spans)
    seconds = 0.003 + 1e-5 * tokens
    for start, stop in spans:
        far = 1.5 if start and stop - start > 1 else 1.0
        few = 1 + 7 / len(spans) if stop - start == 1 else 1.0
        seconds += far * few * alone(stop - start, stop)
    return seconds


@pytest.fixture
def made_up(monkeypatch):
    monkeypatch.setattr(profile, "_step", lambda executor, spans: [step(list(spans))])
    monkeypatch.setattr(profile, "_attention", lambda executor, query, context: alone(query, context))
    return SimpleNamespace(
        token_budget=2048,
        device=torch.device("cpu"),
        model=SimpleNamespace(spec=SimpleNamespace(max_model_len=8192)),
        memory=SimpleNamespace(cache=SimpleNamespace(num_blocks=4096), graphs=None),
        config=SimpleNamespace(block_size=16, max_sequences=64),
    )


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 512)],
        [(0, 2048)],
        [(3584, 4096)],
        [(6144, 8192)],
        [(1999, 2000)] * 16,
        [(100 * row, 100 * row + 1) for row in range(1, 33)],
        [(3584, 4096)] + [(1999, 2000)] * 16,
    ],
)
def test_steps_are_predicted_as_they_are_taken_not_as_their_parts_are_alone(made_up, spans):
    cost = measure_cost(made_up, name="m")
    least = 0.0001  # decodes count from the shortest context that is measured
    if len(spans) == 17:  # beside a chunk they add what they add to one another
        expected = step([(3584, 4096)]) + 16 * 1e-5 + 16 * alone(1, 2000) * (1 + 7 / 16)
    else:
        expected = step(spans)
    assert cost.step([(stop - start, stop) for start, stop in spans]) == pytest.approx(expected, rel=0.02, abs=least)


@pytest.mark.parametrize(("chunk", "longest"), [(32, 8192), (32, 1000), (4096, 8192)])
def test_what_recomputation_costs_is_measured_by_itself_as_with_all_else(made_up, chunk, longest):
    made_up.model.spec.max_model_len = longest
    few, whole = measure_recomputation(made_up, name="m", chunk=chunk), measure_cost(made_up, name="m")
    for position in (chunk, longest // 2, longest):
        expected = alone(chunk, position) + (0.003 + 1e-5 * 2048) * chunk / 2048
        assert few.recompute(chunk, position) == pytest.approx(expected, rel=0.02)
        if chunk < 256:  # longer ones are measured in real steps there
            assert whole.recompute(chunk, position) == pytest.approx(expected, rel=0.02)


class PowerLimited:
    """An executor of the device made up above, which is faster behind lighter work."""

    def __init__(self, about: SimpleNamespace, burst: Burst) -> None:
        self.__dict__ |= vars(about) | dict(device=torch.device("cuda"))
        self.memory.layers = ()
        self.model.spec.vocab_size = 1000
        self._reserve = Reserve(burst)
        self._in_flight: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._in_flight.append(plan)

    def collect(self) -> StepResult:
        plan = self._in_flight.popleft()
        seconds = step([(segment.start, segment.stop) for segment in plan.segments])
        return StepResult(plan.step, (), self._reserve.step(plan.num_tokens, seconds))


class Disturbed:
    """An executor of the device made up above, on a CPU that others take half of for some steps."""

    def __init__(self, disturbed: range) -> None:
        self.device = torch.device("cpu")
        self.model = SimpleNamespace(spec=SimpleNamespace(max_model_len=8192, vocab_size=1000))
        self.memory = SimpleNamespace(cache=SimpleNamespace(num_blocks=4096))
        self.config = SimpleNamespace(block_size=16)
        self._disturbed = disturbed
        self._in_flight: deque[StepPlan] = deque()
        self.steps = 0

    def submit(self, plan: StepPlan) -> None:
        self._in_flight.append(plan)

    def collect(self) -> StepResult:
        plan = self._in_flight.popleft()
        self.steps += 1
        slower = 2.0 if self.steps in self._disturbed else 1.0
        return StepResult(plan.step, (), slower * step([(segment.start, segment.stop) for segment in plan.segments]))


def test_who_disturbs_some_steps_in_a_row_makes_no_kind_of_step_look_slow() -> None:
    kinds = [((0, size),) for size in (512, 256, 128, 64, 32, 16, 8, 4)]
    whole = Disturbed(range(0))
    profile._in_rounds(whole, kinds)
    executor = Disturbed(range(whole.steps // 3, whole.steps // 2))
    assert profile._in_rounds(executor, kinds) == pytest.approx({spans: step(list(spans)) for spans in kinds})


@pytest.mark.parametrize("burst", [Burst(0.86, 0.04), Burst(0.9, 0.06), Burst()])
def test_how_much_faster_a_device_is_behind_decodes_is_measured_beside_the_pace_that_holds(made_up, monkeypatch, burst):
    monkeypatch.setattr(profile, "describe", str)
    monkeypatch.setitem(profile.LOAD_SECONDS, "cuda", 0.0)
    cost = measure_cost(PowerLimited(made_up, burst), name="m")
    assert cost.step([(2048, 2048)]) == pytest.approx(step([(0, 2048)]), rel=0.02)
    assert (cost.burst.share, cost.burst.seconds) == pytest.approx((burst.share, burst.seconds), rel=0.03)


@pytest.mark.parametrize(
    ("ratios", "seconds"),
    [((0.8, 0.8, 0.9, 1.0, 1.1, 0.9), 0.04), ((0.8, 0.8, 0.95, 1.0), 0.036), ((0.8, 1.05, 0.9), 0.016)],
)
def test_a_burst_lasts_as_long_as_its_steps_save_what_they_saved_at_first(
    ratios: tuple[float, ...], seconds: float
) -> None:
    burst = burst_of(ratios, 0.02)
    assert (burst.share, burst.seconds) == (0.8, pytest.approx(seconds))


def test_a_burst_that_saves_next_to_nothing_is_none() -> None:
    assert burst_of((0.99, 0.99, 0.9), 0.02) == Burst()
