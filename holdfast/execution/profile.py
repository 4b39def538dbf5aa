"""Measures the CostModel: linear layers by token count, attention by query length and context, at powers of two."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from functools import cache as cached
from functools import partial
from itertools import chain
from statistics import median

import numpy as np
import torch

from holdfast.core.cost import CostModel
from holdfast.core.types import Sampling, Segment, StepPlan, TableWrite
from holdfast.execution.device import describe
from holdfast.execution.runner import PagedExecutor
from holdfast.kernels.protocol import Segments

SECONDS_A_POINT = 0.01
"""A point is measured again and again for so long, at least REPEATS times; its median counts."""
REPEATS = 3
WARM_UP = 2
LAYERS = 4
"""Layers whose attention is measured, for all."""
LEAST_SECONDS = 1e-6
"""Where a measured step took no longer than its attention was measured to."""
BLOCKS_FILLED = 1024
"""Blocks that are given numbers at a time: PyTorch draws none in FP8, and a copy of a whole cache has no room."""
BATCH = 256
"""Query tokens of the batch in which a segment's attention is measured: alone it would not fill the device."""


@torch.inference_mode()
def measure_cost(
    executor: PagedExecutor, *, name: str, ceiling: int | None = None, queries: Sequence[int] | None = None
) -> CostModel:
    """Time the executor's model on its device, up to `ceiling` tokens a step (default: its token budget).

    Attention is timed for segments of `queries` tokens, ascending; by default for all powers of two, and between those
    that are cut into few tiles.

    Writes over the cache: call it after `allocate` and before the first step. Contexts are measured as far as the
    cache and the model go. All but attention is what real steps take without theirs, one behind the other as when
    serving: upload, schedule, graphs and sampling count with the linear layers. Takes a few seconds.
    """
    limit = min(ceiling or executor.token_budget, executor.token_budget)
    longest = min(executor.model.spec.max_model_len, executor.memory.cache.num_blocks * executor.config.block_size)
    queries = tuple(queries or sorted({*powers(1, longest), *(3 * query // 4 for query in powers(256, longest))}))
    queries = tuple(dict.fromkeys(min(query, limit, longest) for query in queries))
    contexts = tuple(powers(min(16, longest), longest))
    if executor.device.type == "cuda":  # which is faster on zeros
        for cache in chain.from_iterable(executor.memory.layers):
            for blocks in torch.split(cache, BLOCKS_FILLED):
                blocks.copy_(torch.randn(blocks.shape, device=cache.device))
    attention = cached(partial(_attention, executor))
    cost = CostModel(
        model=name,
        device=describe(executor.device),
        linear_tokens=(1,),
        linear_seconds=(0.0,),
        attention_queries=queries,
        attention_contexts=contexts,
        attention_seconds=tuple(
            tuple(attention(query, max(query, context)) for context in contexts) for query in queries
        ),
    )
    graphs = executor.memory.graphs
    sizes = [size for size in graphs.sizes.tokens if size < limit] if graphs is not None else []
    tokens = sorted({*powers(1, limit), *sizes})
    seconds = [_besides(executor, cost, _chunks(executor, count)) for count in tokens]
    rows = tuple(powers(1, min(executor.config.max_sequences, executor.memory.cache.num_blocks, limit)))
    points = list(stairs(tokens, seconds, padded_to={*sizes, limit} if sizes else ()))
    return replace(
        cost,
        linear_tokens=tuple(count for count, _ in points),
        linear_seconds=tuple(taken for _, taken in points),
        decode_rows=rows,
        decode_seconds=tuple(_besides(executor, cost, ((0, 1),) * count) for count in rows),
    )


def stairs(tokens: Sequence[int], seconds: Sequence[float], padded_to: Container[int]) -> Iterator[tuple[int, float]]:
    """(tokens, seconds) of a line through what was measured, level up to each of the sizes that steps are padded to."""
    last = 0
    for count, taken in zip(tokens, seconds, strict=True):
        if count in padded_to and last + 1 < count:
            yield last + 1, taken
        yield count, taken
        last = count


def powers(first: int, last: int) -> Iterator[int]:
    """first, twice it, and so on, and last."""
    while first < last:
        yield first
        first *= 2
    yield last


def _chunks(executor: PagedExecutor, tokens: int) -> tuple[tuple[int, int], ...]:
    """The fewest segments of sequences that together have so many tokens."""
    longest = executor.model.spec.max_model_len
    return tuple((0, min(longest, tokens - first)) for first in range(0, tokens, longest))


def _besides(executor: PagedExecutor, cost: CostModel, spans: Sequence[tuple[int, int]]) -> float:
    """Seconds of a real step that computes these [start, stop) of a row each, less what their attention takes."""
    greedy = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
    num_blocks, block_size = executor.memory.cache.num_blocks, executor.config.block_size
    blocks = np.arange(executor.model.spec.max_model_len) % num_blocks
    plan = StepPlan(
        0,
        segments=tuple(
            Segment(str(row), row, start, stop, (0,) * (stop - start), greedy)
            for row, (start, stop) in enumerate(spans)
        ),
        table_writes=tuple(
            TableWrite(row, 0, tuple(((blocks[: -(-stop // block_size)] + row) % num_blocks).tolist()))
            for row, (_, stop) in enumerate(spans)
        ),
    )
    # The first ones are launched while the device waits for them.
    count = WARM_UP + REPEATS
    for _ in range(count):
        executor.submit(plan)
    whole = median([executor.collect().seconds for _ in range(count)][WARM_UP:])
    return max(LEAST_SECONDS, whole - sum(cost.attention(stop - start, stop) for start, stop in spans))


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
    heads = torch.randn(count * query, spec.num_heads, spec.head_dim, dtype=spec.dtype, device=device)
    kv_heads = torch.randn(count * query, spec.num_kv_heads, spec.head_dim, dtype=spec.dtype, device=device)
    slot_mapping = torch.from_numpy(slots.reshape(-1)).to(device)
    block_tables = torch.from_numpy(tables).to(device)

    schedule = executor.attention.schedule(segments)

    layers = memory.layers[:LAYERS]  # more than a cache holds, and each is like the others

    def attend() -> None:
        for keys, values in layers:
            executor.attention.write(kv_heads, kv_heads, keys, values, slot_mapping)
            executor.attention.attend(heads, keys, values, block_tables, schedule, scale=1.0)

    return _seconds(attend, device) * len(memory.layers) / len(layers) / count


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median time of `work` on the device, once it is warm; on a GPU without the launches, as in a graph."""
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        work = graph.replay

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
