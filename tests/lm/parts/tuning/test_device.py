"""Tuning on a device: slices follow their segments, and moved blocks are read where they are."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.executor import PagedExecutor
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.models.base import Model
from holdfast.lm.parts.tuning.device import TuningDevice, TuningExecutor
from holdfast.lm.parts.tuning.values import TrainingPlan, TrainingReport, TrainingSlice
from holdfast.lm.types import BlockMove, StepPlan, TableWrite
from tests.lm.execution.test_executor import GREEDY, PROMPT, decode, generate, model, prefill
from tests.paged import allocated

__all__ = ["model"]


LONG_SECONDS = 1000.0
"""Seconds of a slice: more than any step takes on a busy machine."""


class Clock:
    """The module `time`, whose clock goes on by the seconds of each slice, too."""

    passed = 0.0

    def perf_counter(self) -> float:
        return time.perf_counter() + self.passed


class Slices:
    """Computes nothing: notes what the executor asks for."""

    def __init__(self) -> None:
        self.asked: list[tuple[TrainingSlice, int, str]] = []
        self.clock = Clock()

    def launch(self, slice_: TrainingSlice, lent: int) -> Slices:
        self.asked.append((slice_, lent, threading.current_thread().name))
        self.last = slice_
        self.clock.passed += LONG_SECONDS
        return self

    def result(self) -> TrainingReport:
        slice_ = self.last
        return TrainingReport(
            slice_.job, slice_.step, slice_.micro_batch, slice_.action, slice_.first, slice_.stop, LONG_SECONDS
        )


@pytest.fixture
def device(model: Model) -> Iterator[PagedDevice]:
    part = TuningDevice(lambda cache: Slices(), lambda: 0)
    device = allocated(model, EngineConfig(max_sequences=4, block_size=4, token_budget=16), 32, parts=[part])
    yield device
    device.executor.close()


@pytest.fixture
def executor(device: PagedDevice) -> PagedExecutor:
    return device.executor


def test_a_slice_runs_after_its_segments_and_its_time_is_not_the_steps(
    executor: PagedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(executor, GREEDY, row=1)
    slices: Slices = executor.part(TuningExecutor).training
    monkeypatch.setattr("holdfast.lm.execution.executor.time", slices.clock)
    slice_ = TrainingSlice("job", 0, 0, "run", 0, 2)
    executor.submit(replace(prefill(0, GREEDY), parts=(TrainingPlan(slice=slice_, lent=3),)))
    executor.submit(StepPlan(1, (), parts=(TrainingPlan(slice=slice_, lent=4),)))
    for index in range(1, 6):
        executor.submit(decode(index + 1, (0, len(PROMPT) + index - 1, GREEDY)))
    first, alone, *rest = (executor.collect() for _ in range(7))
    assert [first.tokens[0], *(result.tokens[0] for result in rest)] == expected
    assert alone.tokens == () and alone.part(TrainingReport) and not rest[0].part(TrainingReport)
    assert first.part(TrainingReport) and first.part(TrainingReport).seconds == LONG_SECONDS > first.seconds > 0
    assert [(lent, name.startswith("holdfast-step")) for _, lent, name in slices.asked] == [(3, True), (4, True)]


def test_moved_blocks_are_read_at_their_new_places(device: PagedDevice, executor: PagedExecutor) -> None:
    expected = generate(executor, GREEDY, row=1)
    executor.submit(prefill(1, GREEDY))
    tokens = [executor.collect().tokens[0]]
    # Table entries of a plan without segments are kept for the next batch.
    executor.submit(
        StepPlan(
            1, (), (TableWrite(1, 0, (20, 21)),), parts=(TrainingPlan(moves=(BlockMove(8, 20), BlockMove(9, 21))),)
        )
    )
    executor.collect()
    cache = device.memory.cache.data
    assert torch.equal(cache[:, :, 20:22], cache[:, :, 8:10])
    cache[:, :, 8:10] = 100.0  # somebody else's by now
    for index in range(1, 6):
        executor.submit(decode(index + 1, (1, len(PROMPT) + index - 1, GREEDY)))
        tokens.append(executor.collect().tokens[0])
    assert tokens == expected


def test_blocks_may_move_in_a_chain_within_one_plan(device: PagedDevice, executor: PagedExecutor) -> None:
    cache = device.memory.cache.data
    cache.copy_(torch.arange(cache.shape[2]).view(1, 1, -1, 1, 1, 1).expand_as(cache))
    executor.submit(StepPlan(0, (), parts=(TrainingPlan(moves=(BlockMove(5, 4), BlockMove(6, 5), BlockMove(7, 6))),)))
    executor.collect()
    assert cache[0, 0, :8, 0, 0, 0].tolist() == [0, 1, 2, 3, 5, 6, 7, 7]


def test_what_training_takes_is_counted_with_the_activations(model: Model) -> None:
    config = EngineConfig(max_sequences=4, block_size=4, token_budget=16, cache_gb=0.001)
    part = TuningDevice(lambda cache: Slices(), lambda: 10**9)
    without, with_it = (PagedDevice(model, config, parts=parts).measure() for parts in ([], [part]))
    assert with_it.activations - without.activations > 9 * 10**8
