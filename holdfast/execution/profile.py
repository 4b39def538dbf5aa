"""Measures the CostModel: linear layers by token count, attention by query length and context, at powers of two."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median

import numpy as np
import torch

from holdfast.core.cost import CostModel, interpolate
from holdfast.core.types import Sampling, Segment, StepPlan, TableWrite
from holdfast.execution.device import describe
from holdfast.execution.runner import PagedExecutor
from holdfast.kernels.protocol import Attention, Segments
from holdfast.models.base import StepInput

SECONDS_A_POINT = 0.03
"""A point is measured again and again for so long, at least REPEATS times; its median counts."""
REPEATS = 3
BATCH = 256
"""Query tokens of the batch in which a segment's attention is measured: alone it would not fill the device."""


class NoAttention(Attention[None]):
    """Answers with the query: what is left of a step is its linear layers."""

    def schedule(self, segments: Segments) -> None:
        return None

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        return None

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        schedule: None,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return query


@torch.inference_mode()
def measure_cost(executor: PagedExecutor, *, name: str, ceiling: int | None = None) -> CostModel:
    """Time the executor's model on its device, up to `ceiling` tokens a step (default: its token budget).

    Writes over the cache: call it after `allocate` and before the first step. Contexts are measured as far as the
    cache and the model go. What a step does besides (upload, schedule, sampling) counts with the linear layers. Takes
    a few seconds.
    """
    limit = min(ceiling or executor.token_budget, executor.token_budget)
    tokens = tuple(powers(1, limit))
    longest = min(executor.model.spec.max_model_len, executor.memory.cache.num_blocks * executor.config.block_size)
    queries = tuple(powers(1, min(limit, longest)))
    contexts = tuple(powers(min(16, longest), longest))
    cost = CostModel(
        model=name,
        device=describe(executor.device),
        linear_tokens=tokens,
        linear_seconds=tuple(_linear(executor, count) for count in tokens),
        attention_queries=queries,
        attention_contexts=contexts,
        attention_seconds=tuple(
            tuple(_attention(executor, query, max(query, context)) for context in contexts) for query in queries
        ),
    )
    rows = tuple(powers(1, min(executor.config.max_sequences, executor.memory.cache.num_blocks, limit)))
    whole = [_whole(executor, count) - count * cost.attention(1, 1) for count in rows]
    besides = [max(0.0, seconds - cost.linear(count)) for count, seconds in zip(rows, whole, strict=True)]
    linear = (
        seconds + interpolate(rows, besides, min(count, rows[-1]))
        for count, seconds in zip(cost.linear_tokens, cost.linear_seconds, strict=True)
    )
    return replace(
        cost,
        linear_seconds=tuple(linear),
        decode_rows=rows,
        decode_seconds=tuple(max(0.0, seconds) for seconds in whole),
    )


def powers(first: int, last: int) -> Iterator[int]:
    """first, twice it, and so on, and last."""
    while first < last:
        yield first
        first *= 2
    yield last


def _linear(executor: PagedExecutor, tokens: int) -> float:
    """Seconds of a step of `tokens` tokens without its attention, with an LM head for as many rows as may sample."""
    device, memory = executor.device, executor.memory
    step = StepInput(
        ids=torch.zeros(tokens, dtype=torch.int64, device=device),
        positions=torch.zeros(tokens, dtype=torch.int64, device=device),
        sample_at=torch.arange(min(tokens, executor.config.max_sequences), device=device),
        slot_mapping=torch.arange(tokens, device=device),
        block_tables=memory.batch.block_tables,
        caches=memory.layers,
        attention=NoAttention(),
        schedule=None,
    )
    return _seconds(lambda: executor.model.forward(step), device)


def _whole(executor: PagedExecutor, rows: int) -> float:
    """Seconds of a real step that decodes `rows` sequences of one token each: with upload, schedule and sampling."""
    greedy = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
    plan = StepPlan(
        0,
        segments=tuple(Segment(str(row), row, 0, 1, (0,), greedy) for row in range(rows)),
        table_writes=tuple(TableWrite(row, 0, (row,)) for row in range(rows)),
    )

    def step() -> float:
        executor.submit(plan)
        return executor.collect().seconds

    step()
    return median(step() for _ in range(2 * REPEATS + 1))


def _attention(executor: PagedExecutor, query: int, context: int) -> float:
    """Seconds that one segment of `query` tokens ending at `context` adds to a step, over all layers."""
    spec, memory = executor.model.spec, executor.memory
    device, block_size, num_blocks = spec.device, executor.config.block_size, memory.cache.num_blocks
    count = max(1, min(BATCH // query, executor.config.max_sequences, num_blocks * block_size // context))
    width = -(-context // block_size)
    tables = (np.arange(count * width, dtype=np.int32) % num_blocks).reshape(count, width)
    positions = np.arange(context - query, context)
    slots = tables[:, positions // block_size].astype(np.int64) * block_size + positions % block_size
    segments = Segments(
        query_start=np.arange(count + 1, dtype=np.int32) * np.int32(query),
        context_stop=np.full(count, context, np.int32),
        row=np.arange(count, dtype=np.int32),
    )
    heads = torch.zeros(count * query, spec.num_heads, spec.head_dim, dtype=spec.dtype, device=device)
    kv_heads = torch.zeros(count * query, spec.num_kv_heads, spec.head_dim, dtype=spec.dtype, device=device)
    slot_mapping = torch.from_numpy(slots.reshape(-1)).to(device)
    block_tables = torch.from_numpy(tables).to(device)

    def layers() -> None:
        schedule = executor.attention.schedule(segments)
        for keys, values in memory.layers:
            executor.attention.write(kv_heads, kv_heads, keys, values, slot_mapping)
            executor.attention.attend(heads, keys, values, block_tables, schedule, scale=1.0)

    return _seconds(layers, device) / count


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median time of `work` on the device, once it is warm."""

    def run() -> float:
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    run()
    taken: list[float] = []
    while len(taken) < REPEATS or (sum(taken) < SECONDS_A_POINT and len(taken) < 100):
        taken.append(run())
    return median(taken)
