"""The paged device: measuring, refusals and allocation."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from holdfast.lm.config import EngineConfig
from holdfast.lm.execution import paged_device
from holdfast.lm.execution.batch import TOKENS_ONLY, ModelInputs
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.execution.part import Allocated, DevicePart, PartExecutor
from holdfast.lm.models.base import Model
from holdfast.lm.models.loader import load
from holdfast.lm.types import EngineShape
from tests.lm.execution.test_executor import CONFIG
from tests.paged import sizes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory: Path = tmp_path_factory.mktemp("llama")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return load(directory, device="cpu", load_format="random")


def test_the_memory_measurement_adds_up(model: Model) -> None:
    device = PagedDevice(model, EngineConfig(max_sequences=4, block_size=4, token_budget=16, cache_gb=0.001))
    measured = device.measure()
    assert measured.weights == model.spec.weight_bytes
    assert measured.block == 2 * 2 * 4 * 2 * 8 * 4  # layers, keys and values, tokens, heads, head size, bytes
    assert measured.cache == 1_000_000
    assert 0 <= measured.activations < measured.total
    assert "CPU" in measured.device


class Noting(DevicePart):
    """A part that takes some memory, adds to the engine's shape, and notes the resources of its executor."""

    nbytes = 1000

    def __init__(self, inputs: ModelInputs = TOKENS_ONLY) -> None:
        self.seen: list[str] = []
        self._inputs = inputs

    def workspace_bytes(self) -> int:
        self.seen.append("workspace_bytes")
        return 10**9

    def inputs(self, max_tokens: int, samples: int) -> ModelInputs:
        return self._inputs

    def widened(self) -> AbstractContextManager[None]:
        self.seen.append("widened")
        return nullcontext()

    def shaped(self, shape: EngineShape) -> EngineShape:
        return replace(shape, adapter_slots=5)

    def executor(self, allocated: Allocated) -> PartExecutor:
        self.seen.append(f"executor over {allocated.memory.cache.num_blocks} blocks")
        return PartExecutor()


def test_a_part_is_measured_before_there_is_a_cache_and_works_over_the_allocated_one(model: Model) -> None:
    config, part = EngineConfig(max_sequences=4, block_size=4, token_budget=16, cache_gb=0.001), Noting()
    device = PagedDevice(model, config, parts=[part])
    measured = device.measure()
    assert measured.adapters == 1000 and measured.activations >= 10**9
    shape = device.allocate(sizes(7))
    assert shape.adapter_slots == 5 and device.part(Noting) is part
    assert part.seen == ["widened", "workspace_bytes", "executor over 7 blocks"]
    assert type(device.executor.part(PartExecutor)) is PartExecutor
    device.executor.close()


def test_two_parts_with_inputs_of_the_model_are_refused(model: Model) -> None:
    class More(ModelInputs):
        sizes = MappingProxyType({"more": 4})

    config = EngineConfig(max_sequences=4, block_size=4, token_budget=16)
    device = PagedDevice(model, config, parts=[Noting(More()), Noting(More())])
    with pytest.raises(ValueError, match="2 parts have inputs of the model, and a batch has room for those of one"):
        device.allocate(sizes(4))


def test_an_fp8_block_takes_a_quarter_of_a_float32_block(model: Model) -> None:
    plain, fp8 = (
        PagedDevice(model, EngineConfig(max_sequences=4, block_size=4, token_budget=16, kv_cache_dtype=kind))
        for kind in ("auto", "fp8")
    )
    assert fp8.block_bytes * 4 == plain.block_bytes
    fp8.allocate(sizes(8, 3))
    assert fp8.memory.transfers is not None
    host = fp8.memory.transfers._host
    assert host.data.dtype == fp8.memory.cache.data.dtype == torch.float8_e4m3fn
    assert fp8.memory.cache.data[:, :, 0].nbytes == host.data[:, :, 0].nbytes == fp8.block_bytes


def test_a_cache_smaller_than_one_block_is_refused_with_the_sizes(model: Model) -> None:
    device = PagedDevice(model, EngineConfig(max_sequences=4, block_size=16, token_budget=16, cache_gb=1e-6))
    with pytest.raises(MemoryError, match="left for the KV cache and one block takes"):
        device.measure()


def test_a_cache_larger_than_free_memory_is_refused_with_the_free_size(model: Model) -> None:
    device = PagedDevice(model, EngineConfig(max_sequences=4, token_budget=16, cache_gb=1e6))
    with pytest.raises(MemoryError, match=r"cache_gb is 1000000\.0: of [\d.]+ GB on CPU .* [\d.]+ are free; lower it"):
        device.measure()


@pytest.mark.parametrize("size", [1e6, 1e-7])
def test_a_host_tier_larger_than_free_memory_is_refused_with_the_free_size(model: Model, size: float) -> None:
    device = PagedDevice(model, EngineConfig(max_sequences=4, token_budget=16, host_cache_gb=size))
    with pytest.raises(MemoryError, match=rf"host_cache_gb is {size}: of [\d.]+ GB of host memory [\d.]+ are free"):
        device.measure()


@pytest.mark.parametrize(
    ("kind", "sharing", "free", "expected"),
    [
        ("cuda", True, 64_000_000_000, 16_000_000_000),
        ("cuda", True, 900_000_000_000, 32_000_000_000),
        ("cuda", False, 64_000_000_000, 0),
        ("cpu", True, 64_000_000_000, 0),
    ],
)
def test_the_default_host_tier_is_a_quarter_of_free_memory_on_cuda(
    model: Model, monkeypatch: pytest.MonkeyPatch, kind: str, sharing: bool, free: int, expected: int
) -> None:
    device = PagedDevice(model, EngineConfig(max_sequences=4, token_budget=16, prefix_sharing=sharing))
    monkeypatch.setattr(paged_device, "memory_of", lambda place: (free, 2 * free))
    monkeypatch.setattr(device, "device", torch.device(kind))
    assert device._host_cache_bytes(device._shared_bytes) == expected


@pytest.mark.parametrize(
    ("free", "expected"),
    [(64_000_000_000, 4_000_000_000), (8_000_000_000, 4_000_000_000), (6_000_000_000, 3_000_000_000)],
)
def test_the_default_cache_on_a_cpu_is_4_gb_but_at_most_half_of_free_memory(
    model: Model, free: int, expected: int
) -> None:
    device = PagedDevice(model, EngineConfig(max_sequences=4, token_budget=16))
    assert device._cache_bytes(free, 2 * free, 1_000_000, device._shared_bytes) == expected


def test_an_executor_needs_allocated_memory(model: Model) -> None:
    with pytest.raises(RuntimeError, match="call allocate first"):
        _ = PagedDevice(model, EngineConfig()).executor


def test_without_measured_costs_attention_balances_the_rest_by_the_models_sizes(model: Model) -> None:
    shape = PagedDevice(model, EngineConfig(max_sequences=4, token_budget=16)).allocate(sizes(4))
    weights = model.spec.weight_bytes // 4
    assert shape.attention_balance == weights // (2 * 2 * 4 * 8)


def test_the_cache_bounds_the_longest_sequence(model: Model) -> None:
    device = PagedDevice(model, EngineConfig(max_sequences=4, block_size=4, token_budget=16))
    assert device.allocate(sizes(3)).max_model_len == 13
    assert device.allocate(sizes(100)).max_model_len == 64
