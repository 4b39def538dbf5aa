"""Embeddings on the executor are the hidden states that the next tokens are drawn from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.executor import PagedExecutor
from holdfast.lm.models.base import HiddenModel, Model
from holdfast.lm.parts.vectors.device import VectorDevice
from holdfast.lm.parts.vectors.values import VectorResult
from holdfast.lm.types import StepPlan
from tests.lm.execution.test_executor import GREEDY, model, prefill
from tests.paged import allocated

__all__ = ["model"]


@pytest.fixture
def executor(model: Model) -> Iterator[PagedExecutor]:
    config = EngineConfig(max_sequences=4, block_size=4, token_budget=16)
    executor = allocated(model, config, 32, parts=[VectorDevice()]).executor
    yield executor
    executor.close()


def test_a_row_that_asks_gets_the_state_that_its_token_is_drawn_from(model: Model, executor: PagedExecutor) -> None:
    assert isinstance(model, HiddenModel)
    plain, asks = prefill(0, GREEDY), prefill(1, replace(GREEDY, embed=True))
    executor.submit(StepPlan(0, (*plain.segments, *asks.segments), (*plain.table_writes, *asks.table_writes)))
    result = executor.collect()
    nothing, vector = result.part(VectorResult).vectors
    hidden = torch.from_numpy(np.frombuffer(vector, np.float32).copy())
    assert nothing == b"" and len(hidden) == 32
    with torch.inference_mode():
        assert int(model.logits(hidden[None]).argmax()) == result.tokens[1] == result.tokens[0]


def test_a_step_that_asks_for_none_has_no_result(executor: PagedExecutor) -> None:
    executor.submit(prefill(0, GREEDY))
    assert executor.collect().parts == ()
