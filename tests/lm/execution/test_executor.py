"""The executor by itself: order, errors, sampling, memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.core.types import Grammar
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.capture_queue import MARGIN, CaptureQueue, GraphSize
from holdfast.lm.execution.cost_profile import measure_cost
from holdfast.lm.execution.executor import PagedExecutor
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.models.base import Model
from holdfast.lm.models.loader import load
from holdfast.lm.parts.tuning.values import TrainingPlan, TrainingSlice
from holdfast.lm.types import PENDING, Sampling, Segment, StepPlan, TableWrite
from tests.paged import allocated

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
}
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory: Path = tmp_path_factory.mktemp("llama")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return load(directory, device="cpu", load_format="random")


@pytest.fixture
def device(model: Model) -> Iterator[PagedDevice]:
    device = allocated(model, EngineConfig(max_sequences=4, block_size=4, token_budget=16), 32)
    yield device
    device.executor.close()


@pytest.fixture
def executor(device: PagedDevice) -> PagedExecutor:
    return device.executor


class Uncaptured:
    """Graphs of one kind of steps, whose captures are noted."""

    def __init__(self, name: str, done: list[str]) -> None:
        self.left, self._name, self._done = CaptureQueue(), name, done
        self.left.captured(GraphSize("decode", 8), 0.010, 0.020)
        self.left.add([GraphSize("decode", 4)])

    def pad(self, steps: int, seconds: float) -> None:
        for _ in range(steps):
            missed = self.left.missed(GraphSize("decode", 4), GraphSize("decode", 8))
            assert missed is not None
            self.left.lost(missed, seconds)

    def capture_next(self) -> bool:
        if not self.left:
            return False
        self._done.append(self._name)
        if self.left.rehearsed:
            self.left.captured(self.left.next, 0.010, 0.020)
        else:
            self.left.rehearsed = self.left.next
        return True


def test_the_kind_of_steps_with_most_padding_is_captured_first_and_to_the_end(executor: PagedExecutor) -> None:
    done: list[str] = []
    plain, adapted = Uncaptured("plain", done), Uncaptured("adapted", done)
    executor.memory = replace(executor.memory, graphs=(plain, adapted))  # type: ignore[arg-type]
    assert executor.due == 0
    plain.pad(1, 0.001)
    adapted.pad(2, 1.0)
    assert executor.due == MARGIN * 0.010
    assert executor.prepare() and done == ["adapted"]
    plain.pad(9, 1.0)
    assert executor.due == MARGIN * 0.020, "what is rehearsed is captured next"
    assert executor.prepare() and done == ["adapted"] * 2 and executor.due == MARGIN * 0.010
    assert executor.prepare() and executor.prepare() and not executor.prepare()
    assert done == ["adapted", "adapted", "plain", "plain"] and executor.due == 0


def test_no_capture_is_due_while_the_host_tier_is_being_pinned(executor: PagedExecutor) -> None:
    graphs, host = Uncaptured("plain", []), SimpleNamespace(ready=3, blocks=4, note_step=lambda: None)
    executor.memory = replace(executor.memory, graphs=(graphs,), host=host)  # type: ignore[arg-type]
    graphs.pad(9, 1.0)
    assert executor.due == 0
    host.ready = 4
    assert executor.due > 0


def prefill(row: int, sampling: Sampling, step: int = 0) -> StepPlan:
    return StepPlan(
        step,
        (Segment(str(row), row, 0, len(PROMPT), PROMPT, sampling),),
        (TableWrite(row, 0, tuple(range(row * 8, row * 8 + 8))),),
    )


def decode(step: int, *rows: tuple[int, int, Sampling]) -> StepPlan:
    return StepPlan(step, tuple(Segment(str(row), row, at, at + 1, (PENDING,), sampling) for row, at, sampling in rows))


def generate(executor: PagedExecutor, sampling: Sampling, row: int = 0, count: int = 6) -> list[int]:
    """A prompt and `count` tokens, all steps in flight at once."""
    executor.submit(prefill(row, sampling))
    for index in range(count - 1):
        executor.submit(decode(index + 1, (row, len(PROMPT) + index, sampling)))
    return [executor.collect().tokens[0] for _ in range(count)]


def test_sampled_tokens_feed_the_next_step_on_the_device(executor: PagedExecutor) -> None:
    ahead = generate(executor, GREEDY)
    executor.submit(prefill(1, GREEDY))
    waited = [executor.collect().tokens[0]]
    for index in range(5):
        position = len(PROMPT) + index
        executor.submit(StepPlan(0, (Segment("1", 1, position, position + 1, (waited[-1],), GREEDY),)))
        waited.append(executor.collect().tokens[0])
    assert ahead == waited


def test_steps_that_follow_each_other_share_one_buffer(executor: PagedExecutor) -> None:
    executor.submit(prefill(0, GREEDY))
    executor.collect()
    for number in range(3):
        executor.submit(decode(number + 1, (0, len(PROMPT) + number, GREEDY)))
        executor.collect()
    assert len(executor.memory.batch._free) == 1


def test_results_come_in_plan_order_with_the_time_they_took(executor: PagedExecutor) -> None:
    executor.submit(prefill(0, GREEDY, step=7))
    executor.submit(prefill(1, GREEDY, step=8))
    first, second = executor.collect(), executor.collect()
    assert (first.step, second.step) == (7, 8)
    assert first.seconds > 0
    assert first.tokens == second.tokens


def test_a_step_without_a_sample_gives_no_token(executor: PagedExecutor) -> None:
    plan = prefill(0, GREEDY)
    executor.submit(replace(plan, segments=(plan.segments[0]._replace(sampling=None),)))
    assert executor.collect().tokens == ()


def test_a_draw_depends_on_seed_and_position_alone(executor: PagedExecutor) -> None:
    warm = Sampling(temperature=1.5, top_k=0, top_p=1.0, seed=11)
    alone = generate(executor, warm)
    for row, sampling in enumerate((replace(warm, seed=12), GREEDY, warm)):
        executor.submit(prefill(row, sampling))
    drawn = [executor.collect().tokens[0] for _ in range(3)][2:]
    for index in range(5):
        at = len(PROMPT) + index
        executor.submit(decode(index, (1, at, GREEDY), (2, at, warm), (0, at, replace(warm, seed=12))))
        drawn.append(executor.collect().tokens[1])
    assert drawn == alone
    assert generate(executor, replace(warm, seed=12)) != alone


def test_a_failing_step_raises_where_it_is_collected(executor: PagedExecutor) -> None:
    plan = prefill(0, GREEDY)
    executor.submit(replace(plan, segments=(plan.segments[0]._replace(tokens=(1_000_000,) * len(PROMPT)),)))
    with pytest.raises(IndexError):
        executor.collect()


def test_a_plan_with_a_part_that_nothing_reads_is_refused(executor: PagedExecutor) -> None:
    executor.submit(StepPlan(0, (), parts=(TrainingPlan(slice=TrainingSlice("job", 0, 0, "restore")),)))
    with pytest.raises(ValueError, match="step 0 has a TrainingPlan, and this executor has no part that reads it"):
        executor.collect()


def test_a_row_with_a_grammar_is_refused_where_no_part_has_rules(executor: PagedExecutor) -> None:
    with pytest.raises(ValueError, match="step 0 has a row with a grammar, and no part of this executor has rules"):
        executor.submit(prefill(0, replace(GREEDY, grammar=Grammar("regex", "a"))))
    assert len(generate(executor, GREEDY, row=1)) == 6


def test_the_cost_model_covers_budget_and_contexts(device: PagedDevice) -> None:
    cost = measure_cost(device, name="tiny")
    assert cost.linear_tokens == (1, 2, 4, 8, 16)
    assert cost.attention_queries == (1, 2, 4, 8, 16)
    assert cost.attention_contexts == (16, 32, 64)
    times: list[Any] = [*cost.linear_seconds, *(value for row in cost.attention_seconds for value in row)]
    assert all(value > 0 for value in times)
    assert "CPU" in cost.device


@pytest.fixture
def measured(device: PagedDevice, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The steps by which a cost model is measured."""
    plans: list[StepPlan] = []
    submit = device.executor.submit

    def watched(plan: StepPlan) -> None:
        plans.append(plan)
        submit(plan)

    monkeypatch.setattr(device.executor, "submit", watched)
    measure_cost(device, name="tiny")
    return plans


def test_measured_steps_hold_different_tokens(measured: list[StepPlan]) -> None:
    assert all(len(set(segment.tokens)) > len(segment.tokens) / 2 for plan in measured for segment in plan.segments)


def test_sizes_are_measured_in_rounds_up_and_down(measured: list[StepPlan]) -> None:
    chunks = [plan.num_tokens for plan in measured if len(plan.segments) == 1 and plan.num_tokens > 1]
    order = [size for size, _ in groupby(chunks)]
    assert order == [16, 8, 4, 2, 4, 8, 16, 8, 4, 2, 4, 8, 16]


def test_measuring_leaves_results_as_they_are(device: PagedDevice) -> None:
    executor = device.executor
    before = generate(executor, GREEDY)
    measure_cost(device, name="tiny")
    assert torch.is_inference_mode_enabled() is False
    assert generate(executor, GREEDY) == before
