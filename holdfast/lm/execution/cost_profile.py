"""Measures the CostModel: linear layers by token count, attention by query length and context, at powers of two."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache as cached
from functools import partial
from itertools import chain
from statistics import median

import numpy as np
import torch

from holdfast.core.cost import HEAVY, Burst, CostModel, interpolate
from holdfast.lm.execution.hardware import describe
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.kernels.attention.protocol import CapturableAttention, Segments
from holdfast.lm.types import Sampling, Segment, StepPlan, TableWrite

SECONDS_A_POINT = 0.01
"""A point is measured again and again for so long, at least REPEATS times; its median counts."""
REPEATS = 3
ROUNDS = {"cuda": 2, "cpu": 4}
"""Real steps are measured in so many rounds, there and back: a clock that falls under load, or a CPU that is slow for a
second, is so for all of them."""
WARM_UP = {"cuda": 1, "cpu": 0}
"""Steps of a kind that do not count in a round. On a CPU all do, as in service no step is like the one before it."""
COUNTED = {"cuda": 2, "cpu": 3}
LOAD_SECONDS = {"cuda": 0.3, "cpu": 0.0}
"""How long a device computes before its steps are measured: one at rest has power in hand, and is up to a fifth faster.
"""
BURST_TOKENS = 1024
"""Tokens of the steps by which it is measured how long it stays so much faster."""
BURST_STEPS = 8
REST_SECONDS = 0.15
"""How long decodes run before them."""
REST_ROWS, REST_CONTEXT = 16, 512
BURST_TIMES = {"cuda": 3, "cpu": 0}
"""How often this is measured; the median counts. A CPU is not taken to have power in hand."""
LEAST_BURST = 0.03
"""A burst that saves less of a step's time is none."""
LAYERS = 4
"""Layers whose attention is measured, for all."""
LEAST_SECONDS = 1e-6
"""Where a measured step took no longer than its attention was measured to."""
BLOCKS_FILLED = 1024
"""Blocks that are given numbers at a time: PyTorch draws none in FP8, and a copy of a whole cache has no room."""
BATCH = 256
"""Query tokens of the batch in which a segment's attention is measured: alone it would not fill the device."""
SPARSE = 4096
"""Sizes of padded steps above so many tokens are measured at powers of two alone."""
FAR = 256
"""Chunks of so many tokens are measured in real steps where they do not begin their sequence."""
SPREAD = 0.1
"""Decodes are measured with contexts from so much of the longest of them up to it."""

Spans = tuple[tuple[int, int], ...]
"""The [start, stop) that a step computes of a row each."""


@torch.inference_mode()
def measure_cost(device: PagedDevice, *, name: str, ceiling: int | None = None) -> CostModel:
    """Time the executor's model on its device, up to `ceiling` tokens a step (default: its token budget).

    Writes over the cache: call it after `allocate` and before the first step. Contexts are measured as far as the
    cache and the model go, attention for segments of all powers of two, and between those that are cut into few tiles.
    All but attention is what real steps take without theirs, one behind the other as when serving, of random tokens and
    under load: upload, schedule, graphs and sampling count with the linear layers. How much less long steps take where
    they come behind decodes is measured last. Takes some seconds; on a GPU, with an 8B model, some ten to thirty.
    """
    limit = min(ceiling or device.max_step_tokens, device.max_step_tokens)
    longest = _longest(device)
    between = (3 * query // 4 for query in powers(256, longest))
    queries = sorted({min(query, limit) for query in (*powers(1, longest), *between)})
    cost = _attention_alone(device, name, queries)
    contexts = cost.attention_contexts
    graphs = device.memory.graphs
    sizes = [size for size in graphs.sizes.tokens if size < limit] if graphs is not None else []
    measured = sorted({*powers(1, limit), *(size for size in sizes if size <= SPARSE)})
    rows = tuple(powers(1, min(device.config.max_sequences, device.memory.cache.num_blocks, limit)))
    chunks = [_chunks(device, count) for count in measured]
    far = [((context - query, context),) for query in queries for context in contexts if _goes_on(query, context)]
    decodes = [[(context, _unlike(count, context)) for context in _every_second(contexts)] for count in rows]
    _load(device, chunks[-1])
    # The longest first, under load from the start.
    taken = _in_rounds(device, [*reversed(chunks), *far, *(spans for row in decodes for _, spans in row)])
    besides = [max(LEAST_SECONDS, taken[spans] - _attention_of(cost, spans)) for spans in chunks]
    tokens = sorted({*measured, *sizes})
    seconds = [interpolate(measured, besides, count) for count in tokens]
    points = list(stairs(tokens, seconds, padded_to={*sizes, limit} if sizes else ()))
    whole = replace(cost, linear_tokens=tuple(measured), linear_seconds=tuple(besides))
    steady = replace(
        cost,
        linear_tokens=tuple(count for count, _ in points),
        linear_seconds=tuple(seconds for _, seconds in points),
        attention_seconds=tuple(
            tuple(_added(whole, query, context, taken) for context in contexts) for query in queries
        ),
        decode_rows=rows,
        decode_seconds=tuple(taken[row[0][1]] for row in decodes),
        decode_attention=tuple(_each_adds(row, taken, contexts) for row in decodes),
    )
    return replace(steady, burst=_burst(device, steady, min(limit, longest)))


@torch.inference_mode()
def measure_recomputation(device: PagedDevice, *, name: str, chunk: int) -> CostModel:
    """Time what `CostModel.recompute` of chunks of so many tokens goes by, and no more: a full step, and attention.

    Writes over the cache, as `measure_cost` does, and takes a small part of its time.
    """
    full = _chunks(device, device.max_step_tokens)
    cost = _attention_alone(device, name, sorted({min(chunk, device.max_step_tokens), *(stop for _, stop in full)}))
    _load(device, full)
    taken = _in_rounds(device, [full])[full]
    besides = max(LEAST_SECONDS, taken - _attention_of(cost, full))
    return replace(cost, linear_tokens=(device.max_step_tokens,), linear_seconds=(besides,))


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


def _chunks(device: PagedDevice, tokens: int) -> Spans:
    """The fewest segments of sequences that together have so many tokens."""
    longest = device.model.spec.max_model_len
    return tuple((0, min(longest, tokens - first)) for first in range(0, tokens, longest))


def _longest(device: PagedDevice) -> int:
    """Tokens of the longest sequence that the model and the cache hold."""
    return min(device.model.spec.max_model_len, device.memory.cache.num_blocks * device.config.block_size)


def _attention_alone(device: PagedDevice, name: str, queries: Sequence[int]) -> CostModel:
    """The attention of segments of so many tokens (ascending), at powers of two of context; of all else nothing yet."""
    longest = _longest(device)
    queries = tuple(dict.fromkeys(min(query, longest) for query in queries))
    contexts = tuple(powers(min(16, longest), longest))
    if device.kind == "cuda":  # which is faster on zeros
        for cache in chain.from_iterable(device.memory.layers):
            for blocks in torch.split(cache, BLOCKS_FILLED):
                blocks.copy_(torch.randn(blocks.shape, device=cache.device))
    attention = cached(partial(_attention, device))
    return CostModel(
        model=name,
        device=describe(device.device),
        linear_tokens=(1,),
        linear_seconds=(0.0,),
        attention_queries=queries,
        attention_contexts=contexts,
        attention_seconds=tuple(
            tuple(attention(query, max(query, context)) for context in contexts) for query in queries
        ),
    )


def _load(device: PagedDevice, spans: Spans) -> None:
    """Compute these again and again, until the device has no power in hand."""
    began = time.perf_counter()
    while time.perf_counter() - began < LOAD_SECONDS[device.kind]:
        _step(device, spans)


def _attention_of(cost: CostModel, spans: Spans) -> float:
    return sum(cost.attention(stop - start, stop) for start, stop in spans)


def _goes_on(query: int, context: int) -> bool:
    """Whether such chunks, which do not begin their sequence, are measured as real steps."""
    return FAR <= query < context and query <= SPARSE


def _added(cost: CostModel, query: int, context: int, taken: Mapping[Spans, float]) -> float:
    """Seconds that attention adds: of a long chunk far in its sequence, what a real step takes more than without it."""
    if not _goes_on(query, context):
        return cost.attention(query, context)
    return max(cost.attention(query, query), taken[((context - query, context),)] - cost.linear(query))


def _every_second(contexts: Sequence[int]) -> tuple[int, ...]:
    """The first, every second one, and the last."""
    return tuple(dict.fromkeys((*contexts[::2], contexts[-1])))


def _unlike(rows: int, context: int) -> Spans:
    """So many decodes with contexts up to this one, which differ as when serving."""
    least = max(1, SPREAD * context) if rows > 1 else context
    return tuple((length - 1, length) for length in np.linspace(least, context, rows).astype(int).tolist())


def _each_adds(
    measured: Sequence[tuple[int, Spans]], taken: Mapping[Spans, float], contexts: Sequence[int]
) -> tuple[float, ...]:
    """What each decode adds at `contexts` over the shortest, by steps of them that were measured up to some contexts.

    What they add is in proportion to their contexts; of a context that was not measured it lies between.
    """
    (first, shortest), *longer = measured
    points, added = [first], [0.0]
    for context, spans in longer:
        mean = sum(stop for _, stop in spans) / len(spans)
        share = (context - first) / max(1.0, mean - first)
        points.append(context)
        added.append(max(0.0, taken[spans] - taken[shortest]) * share / len(spans))
    return tuple(interpolate(points, added, context) for context in contexts)


def _burst(device: PagedDevice, cost: CostModel, most: int) -> Burst:
    """How much less heavy steps of up to `most` tokens take behind decodes than `cost` says, and for how long."""
    tokens, times = min(BURST_TOKENS, most), BURST_TIMES[device.kind]
    if tokens < HEAVY or not times:
        return Burst()
    context = min(REST_CONTEXT, most)
    decodes = ((context - 1, context),) * min(REST_ROWS, cost.decode_rows[-1])
    rest = int(REST_SECONDS / cost.step([(1, context)] * len(decodes))) + 1
    expected = cost.step([(tokens, tokens)])
    plans = [*_repeated(device, decodes, rest), *_repeated(device, ((0, tokens),), BURST_STEPS)]
    runs = [_taken(device, plans)[rest:] for _ in range(times)]
    return burst_of([median(step) / expected for step in zip(*runs, strict=True)], expected)


def burst_of(ratios: Sequence[float], seconds: float) -> Burst:
    """The burst with which steps of `seconds` took these shares of it, in order, the first of them wholly within it."""
    share, saved = ratios[0], 0.0
    if share > 1 - LEAST_BURST:
        return Burst()
    for ratio in ratios:
        saved += seconds * max(0.0, 1 - ratio)
        if ratio > (1 + share) / 2:  # the burst ends in this step; what follows swings about the pace that holds
            break
    return Burst(share, saved / (1 / share - 1))


def _in_rounds(device: PagedDevice, steps: Sequence[Spans]) -> dict[Spans, float]:
    """Median seconds of real steps, of each of these."""
    taken: dict[Spans, list[float]] = {spans: [] for spans in steps}
    for number in range(ROUNDS[device.kind]):
        for spans in taken if number % 2 == 0 else reversed(taken):
            taken[spans] += _step(device, spans)
    return {spans: median(seconds) for spans, seconds in taken.items()}


def _step(device: PagedDevice, spans: Spans) -> list[float]:
    """Seconds of real steps that compute these, one behind the other."""
    uncounted = WARM_UP[device.kind]
    return _taken(device, _repeated(device, spans, uncounted + COUNTED[device.kind]))[uncounted:]


def _taken(device: PagedDevice, plans: Sequence[StepPlan]) -> list[float]:
    """Seconds of each of these real steps, the next submitted beside each."""
    taken = []
    device.executor.submit(plans[0])
    for plan in plans[1:]:
        device.executor.submit(plan)
        taken.append(device.executor.collect().seconds)
    return [*taken, device.executor.collect().seconds]


def _repeated(device: PagedDevice, spans: Spans, times: int) -> list[StepPlan]:
    """A step that computes these, so many times: what the first writes to the block tables stays there."""
    plan = _plan(device, spans)
    return [plan, *[replace(plan, table_writes=())] * (times - 1)]


def _plan(device: PagedDevice, spans: Spans) -> StepPlan:
    """A step that computes these."""
    random, vocabulary = np.random.default_rng(0), device.model.spec.vocab_size  # tokens unlike one another, as texts
    greedy = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
    num_blocks, block_size = device.memory.cache.num_blocks, device.config.block_size
    blocks = np.arange(device.model.spec.max_model_len) % num_blocks
    width = max(-(-stop // block_size) for _, stop in spans)
    return StepPlan(
        0,
        segments=tuple(
            Segment(str(row), row, start, stop, tuple(map(int, random.integers(vocabulary, size=stop - start))), greedy)
            for row, (start, stop) in enumerate(spans)
        ),
        table_writes=tuple(
            TableWrite(row, 0, tuple(((blocks[: -(-stop // block_size)] + row * width) % num_blocks).tolist()))
            for row, (_, stop) in enumerate(spans)
        ),
    )


def _attention(device: PagedDevice, query: int, context: int) -> float:
    """Seconds that one segment of `query` tokens ending at `context` adds to a step, over all layers."""
    spec, memory = device.model.spec, device.memory
    block_size, num_blocks = device.config.block_size, memory.cache.num_blocks
    count = max(1, min(BATCH // query, device.config.max_sequences, num_blocks * block_size // context))
    width = -(-context // block_size)
    tables = (np.arange(count * width, dtype=np.int32) % num_blocks).reshape(count, width)
    positions = np.arange(context - query, context)
    slots = tables[:, positions // block_size].astype(np.int64) * block_size + positions % block_size
    segments = Segments(
        query_start=np.arange(count + 1, dtype=np.int32) * np.int32(query),
        context_stop=np.full(count, context, np.int32),
        row=np.arange(count, dtype=np.int32),
    )
    heads = torch.randn(count * query, spec.num_heads, spec.head_dim, dtype=spec.dtype, device=spec.device)
    kv_heads = torch.randn(count * query, spec.num_kv_heads, spec.head_dim, dtype=spec.dtype, device=spec.device)
    slot_mapping = torch.from_numpy(slots.reshape(-1)).to(spec.device)
    block_tables = torch.from_numpy(tables).to(spec.device)

    schedule = device.attention.schedule(segments)

    layers = memory.layers[:LAYERS]  # more than a cache holds, and each is like the others

    def attend() -> None:
        for keys, values in layers:
            device.attention.write(kv_heads, kv_heads, keys, values, slot_mapping)
            device.attention.attend(heads, keys, values, block_tables, schedule, scale=1.0)

    captured = isinstance(device.attention, CapturableAttention)
    return _seconds(attend, spec.device, captured=captured) * len(memory.layers) / len(layers) / count


def _seconds(work: Callable[[], object], device: torch.device, *, captured: bool) -> float:
    """Median time of `work` on the device, once it is warm; on a GPU, without the launches where it is captured."""
    work()
    if device.type == "cuda" and captured:
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
