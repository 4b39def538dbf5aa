"""The measured points: padded steps cost as much as their padded size, and mixed steps as much as measured ones."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from holdfast.core.cost import Burst, interpolate
from holdfast.lab.simulator.executor import Reserve
from holdfast.lm.execution import cost_profile as profile
from holdfast.lm.execution.cost_profile import burst_of, estimate_cost, measure_cost, stairs
from holdfast.lm.execution.graphs import GraphSizes
from holdfast.lm.scheduler.correction import DEVIATIONS
from holdfast.lm.types import StepPlan, StepResult


def test_a_padded_step_costs_as_much_as_the_size_it_is_padded_to() -> None:
    points = list(stairs((1, 32, 64, 128, 256), (1.0, 2.0, 3.0, 5.0, 6.0), padded_to={64, 128, 256}))
    tokens, seconds = zip(*points, strict=True)
    assert [interpolate(tokens, seconds, count) for count in (1, 32, 33, 64, 65, 100, 128, 129, 256)] == [
        1.0,
        2.0,
        *[3.0] * 2,
        *[5.0] * 3,
        *[6.0] * 2,
    ]


def test_without_padding_points_stay_as_measured() -> None:
    assert list(stairs((1, 2, 4), (1.0, 2.0, 3.0), padded_to=())) == [(1, 1.0), (2, 2.0), (4, 3.0)]


def alone(query: int, context: int) -> float:
    """Seconds of a segment's attention by itself, on a device made up for these tests."""
    return 1e-8 * query * context


def step(spans: list[tuple[int, int]]) -> float:
    """Seconds of a step there: far chunks take 1.5 times as long as alone, and few decodes longer each than many."""
    tokens = sum(stop - start for start, stop in spans)
    seconds = 0.003 + 1e-5 * tokens
    for start, stop in spans:
        far = 1.5 if start and stop - start > 1 else 1.0
        few = 1 + 7 / len(spans) if stop - start == 1 else 1.0
        seconds += far * few * alone(stop - start, stop)
    return seconds


@pytest.fixture
def made_up(monkeypatch):
    monkeypatch.setattr(profile, "_step", lambda device, spans: [step(list(spans))])
    monkeypatch.setattr(profile, "_attention", lambda device, query, context: alone(query, context))
    return SimpleNamespace(
        max_step_tokens=2048,
        device=torch.device("cpu"),
        kind="cpu",
        model=SimpleNamespace(spec=SimpleNamespace(max_model_len=8192)),
        memory=SimpleNamespace(cache=SimpleNamespace(num_blocks=4096), graphs=None),
        config=SimpleNamespace(block_size=16, most_sequences=64, pp=1),
        description="made up",
        executor=SimpleNamespace(prepare=lambda: False),
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
def test_predictions_match_whole_steps_rather_than_parts_measured_alone(made_up, spans):
    cost = measure_cost(made_up, name="m")
    least = 0.0001  # decodes count from the shortest context that is measured
    if len(spans) == 17:  # next to a chunk they add as much as to one another
        expected = step([(3584, 4096)]) + 16 * 1e-5 + 16 * alone(1, 2000) * (1 + 7 / 16)
    else:
        expected = step(spans)
    assert cost.step([(stop - start, stop) for start, stop in spans]) == pytest.approx(expected, rel=0.02, abs=least)


@pytest.mark.parametrize("longest", [1, 2, 64, 1000, 8192])
def test_an_estimate_takes_few_steps_and_is_near_enough(made_up, monkeypatch, longest):
    steps = []

    def taken(device, plans):
        steps.extend(plans)
        return [step([(segment.start, segment.stop) for segment in plan.segments]) for plan in plans]

    monkeypatch.setattr(profile, "_taken", taken)
    made_up.model.spec = SimpleNamespace(max_model_len=longest, vocab_size=1000)
    cost = estimate_cost(made_up, name="m")
    assert len(steps) < 50
    most = min(longest, 2048)
    for spans in ([(0, most)], [(longest - most, longest)], [(longest // 4, longest // 4 + 1)] * 16):
        if spans[0][1] <= longest:
            ratio = step(spans) / cost.step([(stop - start, stop) for start, stop in spans])
            assert 1 / (1 + DEVIATIONS * cost.deviation) < ratio < 1 + DEVIATIONS * cost.deviation


@pytest.mark.parametrize("longest", [1, 16, 100, 1024])
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("captured", [False, True])
def test_no_measured_step_has_more_rows_or_positions_than_the_engine(made_up, monkeypatch, longest, rows, captured):
    """With few rows, a step of the longest sequences has fewer tokens than the limit."""
    plans = []

    def taken(device, steps):
        plans.extend(steps)
        return [step([(segment.start, segment.stop) for segment in plan.segments]) for plan in steps]

    monkeypatch.undo()
    monkeypatch.setattr(profile, "_taken", taken)
    monkeypatch.setattr(profile, "_attention", lambda device, query, context: alone(query, context))
    made_up.model.spec = SimpleNamespace(max_model_len=longest, vocab_size=1000)
    made_up.memory.cache.num_blocks = 4
    made_up.config.most_sequences = rows
    made_up.memory.graphs = (SimpleNamespace(sizes=GraphSizes.of(rows, 2048)),) if captured else ()
    for measure in (measure_cost, estimate_cost):
        cost = measure(made_up, name="m")
        assert cost.linear_tokens[-1] == min(2048, rows * longest)
    assert max(plan.num_tokens for plan in plans) == min(2048, rows * longest)
    for plan in plans:
        writes = {write.row: len(write.blocks) for write in plan.table_writes}
        for segment in plan.segments:
            assert segment.row < rows and segment.stop <= longest
            assert not writes or -(-segment.stop // 16) == writes[segment.row]
        assert all(0 <= block < 4 for write in plan.table_writes for block in write.blocks)


class PowerLimited:
    """The device and executor made up above, faster after lighter work."""

    def __init__(self, about: SimpleNamespace, burst: Burst) -> None:
        self.__dict__ |= vars(about) | dict(device=torch.device("cuda"), kind="cuda", executor=self)
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

    def prepare(self) -> bool:
        return False


class Disturbed:
    """The device and executor made up above, on a CPU that is half as fast for some steps."""

    def __init__(self, disturbed: range) -> None:
        self.device, self.kind, self.executor = torch.device("cpu"), "cpu", self
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


def test_an_estimate_of_a_pipeline_has_each_stage_s_share_of_a_step(made_up):
    class Staged(Disturbed):
        def collect(self) -> StepResult:
            result = super().collect()
            first = 0.25 if self.decodes(result.seconds) else 0.75
            return replace(result, stages=(first * result.seconds, (1 - first) * result.seconds))

        def decodes(self, seconds: float) -> bool:
            return seconds != step([(0, 2048)])

    device = Staged(range(0))
    made_up.model.spec.vocab_size, made_up.config.pp = 1000, 2
    device.__dict__ |= vars(made_up) | dict(executor=device)
    assert estimate_cost(device, name="m").stage_shares == pytest.approx((0.5, 0.5))
    device.config.pp = 1
    assert estimate_cost(device, name="m").stage_shares == ()


def test_an_estimate_on_a_gpu_takes_half_a_second_of_its_time_and_knows_all_padded_sizes(made_up, monkeypatch):
    sizes, ran = GraphSizes.of(256, 2048), []

    class Gpu(PowerLimited):
        def collect(self) -> StepResult:
            plan = self._in_flight.popleft()
            spans = [(segment.start, segment.stop) for segment in plan.segments]
            padded = next(size for size in sizes.sparse_tokens if size >= plan.num_tokens)
            ran.append(0.003 + 25e-6 * padded + sum(2e-10 * (stop - start) * stop for start, stop in spans))
            return StepResult(plan.step, (), ran[-1])

    made_up.memory.graphs = (SimpleNamespace(sizes=sizes),)
    made_up.config.most_sequences = 256
    monkeypatch.setitem(profile.LOAD_SECONDS, "cuda", 0.0)
    cost = estimate_cost(Gpu(made_up, Burst()), name="m")
    assert len(ran) <= 40 and sum(ran) < 0.6
    for size in sizes.tokens:  # as they will be once each has a graph of its own
        assert cost.linear(size) == cost.linear(size - 1) == pytest.approx(0.003 + 25e-6 * size, rel=0.05)


def test_all_graphs_are_captured_before_a_full_measurement(made_up, monkeypatch):
    left = [1, 2, 3]

    def no_steps(*given):
        assert not left
        raise StopIteration

    made_up.executor.prepare = lambda: left and left.pop()
    monkeypatch.setattr(profile, "_step", no_steps)
    with pytest.raises(StopIteration):
        measure_cost(made_up, name="m")


def test_a_disturbance_of_a_few_steps_does_not_change_the_profile() -> None:
    kinds = [((0, size),) for size in (512, 256, 128, 64, 32, 16, 8, 4)]
    whole = Disturbed(range(0))
    profile._in_rounds(whole, kinds)
    executor = Disturbed(range(whole.steps // 3, whole.steps // 2))
    assert profile._in_rounds(executor, kinds) == pytest.approx({spans: step(list(spans)) for spans in kinds})


@pytest.mark.parametrize("burst", [Burst(0.86, 0.04), Burst(0.9, 0.06), Burst()])
def test_burst_and_steady_pace_are_both_measured(made_up, monkeypatch, burst):
    monkeypatch.setitem(profile.LOAD_SECONDS, "cuda", 0.0)
    cost = measure_cost(PowerLimited(made_up, burst), name="m")
    assert cost.step([(2048, 2048)]) == pytest.approx(step([(0, 2048)]), rel=0.02)
    assert (cost.burst.share, cost.burst.seconds) == pytest.approx((burst.share, burst.seconds), rel=0.03)


@pytest.mark.parametrize(
    ("ratios", "seconds"),
    [((0.8, 0.8, 0.9, 1.0, 1.1, 0.9), 0.04), ((0.8, 0.8, 0.95, 1.0), 0.036), ((0.8, 1.05, 0.9), 0.016)],
)
def test_burst_seconds_follow_from_the_time_its_steps_save(ratios: tuple[float, ...], seconds: float) -> None:
    burst = burst_of(ratios, 0.02)
    assert (burst.share, burst.seconds) == (0.8, pytest.approx(seconds))


def test_a_burst_that_saves_little_counts_as_none() -> None:
    assert burst_of((0.99, 0.99, 0.9), 0.02) == Burst()
