"""The executor by itself: order, errors, sampling, memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.config import EngineConfig
from holdfast.lm.execution import executor as runner
from holdfast.lm.execution.cost_profile import measure_cost
from holdfast.lm.execution.executor import PagedExecutor
from holdfast.lm.models.base import Model
from holdfast.lm.models.loader import load
from holdfast.lm.types import PENDING, Sampling, Segment, StepPlan, TableWrite

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
def executor(model: Model) -> Iterator[PagedExecutor]:
    executor = PagedExecutor(model, EngineConfig(max_sequences=4, block_size=4, token_budget=16))
    executor.allocate(32)
    yield executor
    executor.close()


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


def test_the_memory_profile_adds_up(model: Model) -> None:
    executor = PagedExecutor(model, EngineConfig(max_sequences=4, block_size=4, token_budget=16, cache_gb=0.001))
    profile = executor.profile()
    executor.close()
    assert profile.weights == model.spec.weight_bytes
    assert profile.block == 2 * 2 * 4 * 2 * 8 * 4  # layers, keys and values, tokens, heads, head size, bytes
    assert profile.cache == 1_000_000
    assert 0 <= profile.activations < profile.total
    assert "CPU" in profile.device


def test_in_fp8_a_block_takes_a_quarter_of_what_it_takes_in_float32(model: Model) -> None:
    plain, fp8 = (
        PagedExecutor(model, EngineConfig(max_sequences=4, block_size=4, token_budget=16, kv_cache_dtype=kind))
        for kind in ("auto", "fp8")
    )
    assert fp8.block_bytes * 4 == plain.block_bytes
    fp8.allocate(8, host_blocks=3)
    host = fp8.memory.host
    assert host is not None and host.data.dtype == fp8.memory.cache.data.dtype == torch.float8_e4m3fn
    assert fp8.memory.cache.data[:, :, 0].nbytes == host.data[:, :, 0].nbytes == fp8.block_bytes
    for executor in (plain, fp8):
        executor.close()


def test_a_cache_that_holds_no_block_is_refused_with_the_sizes(model: Model) -> None:
    executor = PagedExecutor(model, EngineConfig(max_sequences=4, block_size=16, token_budget=16, cache_gb=1e-6))
    with pytest.raises(MemoryError, match="left for the KV cache and one block takes"):
        executor.profile()
    executor.close()


def test_a_cache_larger_than_what_is_free_is_refused_with_what_is(model: Model) -> None:
    executor = PagedExecutor(model, EngineConfig(max_sequences=4, token_budget=16, cache_gb=1e6))
    with pytest.raises(MemoryError, match=r"cache_gb is 1000000\.0: of [\d.]+ GB on CPU .* [\d.]+ are free; lower it"):
        executor.profile()
    executor.close()


@pytest.mark.parametrize("size", [1e6, 1e-7])
def test_a_host_tier_that_the_host_has_no_room_for_is_refused_with_what_is_free(model: Model, size: float) -> None:
    executor = PagedExecutor(model, EngineConfig(max_sequences=4, token_budget=16, host_cache_gb=size))
    with pytest.raises(MemoryError, match=rf"host_cache_gb is {size}: of [\d.]+ GB of host memory [\d.]+ are free"):
        executor.profile()
    executor.close()


@pytest.mark.parametrize(
    ("kind", "sharing", "free", "expected"),
    [
        ("cuda", True, 64_000_000_000, 16_000_000_000),
        ("cuda", True, 900_000_000_000, 32_000_000_000),
        ("cuda", False, 64_000_000_000, 0),
        ("cpu", True, 64_000_000_000, 0),
    ],
)
def test_by_default_the_host_tier_is_a_quarter_of_what_is_free_on_cuda(
    model: Model, monkeypatch: pytest.MonkeyPatch, kind: str, sharing: bool, free: int, expected: int
) -> None:
    executor = PagedExecutor(model, EngineConfig(max_sequences=4, token_budget=16, prefix_sharing=sharing))
    monkeypatch.setattr(runner.devices, "memory", lambda device: (free, 2 * free))
    monkeypatch.setattr(executor, "device", torch.device(kind))
    assert executor._host_cache_bytes() == expected


def test_submit_asks_for_allocate(model: Model) -> None:
    executor = PagedExecutor(model, EngineConfig())
    with pytest.raises(RuntimeError, match="call allocate first"):
        executor.submit(prefill(0, GREEDY))
    executor.close()


def test_the_cost_model_covers_budget_and_contexts(executor: PagedExecutor) -> None:
    cost = measure_cost(executor, name="tiny")
    assert cost.linear_tokens == (1, 2, 4, 8, 16)
    assert cost.attention_queries == (1, 2, 4, 8, 16)
    assert cost.attention_contexts == (16, 32, 64)
    times: list[Any] = [*cost.linear_seconds, *(value for row in cost.attention_seconds for value in row)]
    assert all(value > 0 for value in times)
    assert "CPU" in cost.device


@pytest.fixture
def measured(executor: PagedExecutor, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The steps that measuring a cost model takes."""
    plans: list[StepPlan] = []
    submit = executor.submit

    def watched(plan: StepPlan) -> None:
        plans.append(plan)
        submit(plan)

    monkeypatch.setattr(executor, "submit", watched)
    measure_cost(executor, name="tiny")
    return plans


def test_measured_steps_hold_different_tokens(measured: list[StepPlan]) -> None:
    assert all(len(set(segment.tokens)) > len(segment.tokens) / 2 for plan in measured for segment in plan.segments)


def test_sizes_are_measured_in_rounds_there_and_back(measured: list[StepPlan]) -> None:
    chunks = [plan.num_tokens for plan in measured if len(plan.segments) == 1 and plan.num_tokens > 1]
    order = [size for size, _ in groupby(chunks)]
    assert order == [16, 8, 4, 2, 4, 8, 16, 8, 4, 2, 4, 8, 16]


def test_measuring_leaves_results_as_they_are(executor: PagedExecutor) -> None:
    before = generate(executor, GREEDY)
    measure_cost(executor, name="tiny")
    assert torch.is_inference_mode_enabled() is False
    assert generate(executor, GREEDY) == before
