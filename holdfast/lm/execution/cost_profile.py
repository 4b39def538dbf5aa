"""Measures a CostModel: linear layers by token count, attention by query length and context, at powers of two.

`measure_cost` is thorough and takes seconds; `estimate_cost` times only a few steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache as cached
from functools import partial
from itertools import accumulate, chain, islice
from statistics import fmean, median
from typing import Any, Protocol

import numpy as np
import torch

from holdfast.core.config import CoreConfig
from holdfast.core.cost import HEAVY, Burst, CostModel, interpolate
from holdfast.lm.execution.paged_memory import PagedMemory
from holdfast.lm.kernels.attention.protocol import Attention, CapturableAttention, Segments
from holdfast.lm.kernels.capture import capture
from holdfast.lm.models.base import Model
from holdfast.lm.types import DeviceExecutor, Sampling, Segment, StepPlan, StepResult, TableWrite

SECONDS_A_POINT = 0.01
"""Seconds for which each point is repeated, at least REPEATS times. The result is the median."""
REPEATS = 3
ROUNDS = {"cuda": 2, "cpu": 4}
"""Number of rounds of real steps. Sizes rise in one round and fall in the next, so a clock that drops under load, or a
CPU that is slow for a second, affects all sizes alike."""
WARM_UP = {"cuda": 1, "cpu": 0}
"""Number of first steps of each kind in a round that are not counted. A CPU needs none: in service, too, each step
differs from the one before."""
COUNTED = {"cuda": 2, "cpu": 3}
"""Number of counted steps of each kind in a round."""
LOAD_SECONDS = {"cuda": 0.3, "cpu": 0.0}
"""Seconds of computing before steps are measured. After a rest, a GPU is up to 20% faster for a while."""
BURST_TOKENS = 1024
"""Number of tokens in the steps that measure the burst."""
BURST_STEPS = 8
REST_SECONDS = 0.15
"""Seconds of decodes before the steps that measure the burst."""
REST_ROWS, REST_CONTEXT = 16, 512
BURST_TIMES = {"cuda": 3, "cpu": 0}
"""Number of times that the burst is measured; the result is the median. A CPU is assumed to have no burst."""
LEAST_BURST = 0.03
"""Smallest share of a step's time that a burst must save to count as one."""
LAYERS = 4
"""Number of layers whose attention is measured. The result is scaled to all layers."""
LEAST_SECONDS = 1e-6
"""Lower bound for the time of a step's linear layers, in seconds. It applies if a step takes no longer than its
attention alone."""
BLOCKS_FILLED = 1024
"""Number of blocks that are filled with random numbers at a time. PyTorch cannot draw FP8 numbers, and a second cache
would not fit."""
BATCH = 256
"""Number of query tokens in the batch that measures a segment's attention. One segment alone would not fill the device.
"""
SPARSE = 4096
"""Number of tokens above which padded sizes are measured only at powers of two."""
FAR = 256
"""Smallest number of tokens of chunks that are measured in real steps if they do not begin their sequence."""
POSITIONS = 1 << 16
"""Approximate limit for the positions that an estimate's decodes attend to in one step."""
ESTIMATE_COUNTED = {"cuda": 1, "cpu": 2}
"""Number of counted steps of each kind in an estimate. The result is the shortest."""
ESTIMATE_LOAD = 1 / 3
"""Seconds of computing before an estimate, as a share of LOAD_SECONDS: graphs were captured just before."""
ESTIMATE_DEVIATION = 0.18
"""Relative deviation of an estimate. It is taken to be right within 3.5 times this share until steps in service
correct it."""
SPREAD = 0.1
"""Shortest context of measured decodes, as a share of the longest one."""

Spans = tuple[tuple[int, int], ...]
"""The ranges [start, stop) of a step, one for each row."""


class TimedDevice(Protocol):
    """An allocated device: a `PagedDevice`, or several that share a model, with the first one's part of it."""

    @property
    def config(self) -> CoreConfig: ...

    @property
    def kind(self) -> str:
        """ "cuda" or "cpu"."""
        ...

    @property
    def description(self) -> str:
        """The device in words."""
        ...

    @property
    def model(self) -> Model: ...

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        ...

    @property
    def max_step_tokens(self) -> int: ...

    @property
    def attention(self) -> Attention[Any]: ...

    @property
    def memory(self) -> PagedMemory: ...

    @property
    def executor(self) -> DeviceExecutor:
        """Runs steps on all devices."""
        ...


@torch.inference_mode()
def measure_cost(device: TimedDevice, *, name: str) -> CostModel:
    """Time the model on its device. This takes seconds: 10 to 30 for an 8B model on a GPU.

    Overwrites the cache, so call it after `allocate` and before the first step. Contexts are measured up to the largest
    that the cache and the model hold. Attention is measured for segments of every power of two, and between powers
    where segments split into few tiles. All other time is that of real steps minus their attention. These are steps of
    random tokens, back to back as in service, so upload, metadata, graphs and sampling count with the linear layers.
    The burst, by which heavy steps are faster after decodes, is measured last.
    """
    limit, longest = _most_tokens(device), _longest(device)
    between = (3 * query // 4 for query in powers(256, longest))
    queries = sorted({min(query, limit) for query in (*powers(1, longest), *between)})
    cost = _attention_alone(device, name, queries)
    contexts = cost.attention_contexts
    while device.executor.prepare():  # otherwise steps would be measured as padded to larger sizes
        pass
    graphs = device.memory.graphs
    sizes = [size for size in graphs[0].sizes.tokens if size < limit] if graphs else []
    measured = sorted({*powers(1, limit), *(size for size in sizes if size <= SPARSE)})
    rows = tuple(powers(1, min(device.config.most_sequences, device.memory.cache.num_blocks, limit)))
    chunks = [_chunks(device, count) for count in measured]
    far = [((context - query, context),) for query in queries for context in contexts if _is_far(query, context)]
    every_second = dict.fromkeys((*contexts[::2], contexts[-1]))
    decodes = [[(context, _decodes_up_to(count, context)) for context in every_second] for count in rows]
    _load(device, chunks[-1])
    # The longest steps come first, so that the device is under load from the start.
    taken = _in_rounds(device, [*reversed(chunks), *far, *(spans for row in decodes for _, spans in row)])
    linear = [max(LEAST_SECONDS, taken[spans] - _attention_of(cost, spans)) for spans in chunks]
    tokens = sorted({*measured, *sizes})
    seconds = [interpolate(measured, linear, count) for count in tokens]
    points = stairs(tokens, seconds, padded_to={*sizes, limit} if sizes else ())
    linear_tokens, linear_seconds = zip(*points, strict=True)
    whole = replace(cost, linear_tokens=tuple(measured), linear_seconds=tuple(linear))
    steady = replace(
        cost,
        linear_tokens=linear_tokens,
        linear_seconds=linear_seconds,
        attention_seconds=tuple(
            tuple(_attention_added(whole, query, context, taken) for context in contexts) for query in queries
        ),
        decode_rows=rows,
        decode_seconds=tuple(taken[row[0][1]] for row in decodes),
        decode_attention=tuple(_decode_attention(row, taken, contexts) for row in decodes),
        stage_shares=_stage_shares(device, chunks[-1], decodes[-1][0][1]),
    )
    return replace(steady, burst=_burst(device, steady, min(limit, longest)))


@torch.inference_mode()
def estimate_cost(device: TimedDevice, *, name: str) -> CostModel:
    """Time a few steps, within a second on a GPU, as a rough form of `measure_cost`. The result has a `deviation`.

    Overwrites the cache, as `measure_cost` does. It assumes that attention is proportional to (query, position) pairs,
    that a decode adds time in proportion to its context, and that a larger step takes no less time than a smaller one.
    Only some of the padded sizes are timed; those between are interpolated.
    """
    limit, longest = _most_tokens(device), _longest(device)
    graphs = device.memory.graphs
    sizes = {limit, *(size for size in graphs[0].sizes.tokens if size < limit)} if graphs else set()
    timed = islice(powers(1, limit), 0, None, 2) if not graphs else graphs[0].sizes.sparse_tokens
    tokens = sorted({limit, *(size for size in timed if size < limit)})
    chunks = {count: _chunks(device, count) for count in tokens}
    query = max(1, min(FAR, limit, longest // 2))
    near, far = ((0, query),), ((longest - query, longest),)
    most_rows = min(device.config.most_sequences, device.memory.cache.num_blocks, limit)
    rows = sorted({*islice(powers(1, most_rows), 0, None, 2), most_rows})
    contexts = tuple(powers(min(16, longest), longest))
    decodes = [
        [
            (context, _decodes_up_to(count, context))
            for context in dict.fromkeys((contexts[0], min(longest, max(2 * contexts[0], POSITIONS // count))))
        ]
        for count in rows
    ]
    _load(device, chunks[limit], ESTIMATE_LOAD)
    kinds = [*reversed(chunks.values()), near, far, *(spans for row in decodes for _, spans in row)]
    uncounted, counted = WARM_UP[device.kind], ESTIMATE_COUNTED[device.kind]
    taken = {spans: min(_taken(device, _repeated(device, spans, uncounted + counted))[uncounted:]) for spans in kinds}
    a_pair = max(0.0, taken[far] - taken[near]) / max(1.0, _pairs(far) - _pairs(near))
    linear = [max(LEAST_SECONDS, taken[spans] - a_pair * _pairs(spans)) for spans in chunks.values()]
    rising, padded = list(accumulate(linear, max)), sorted({*tokens, *sizes})
    points = stairs(padded, [interpolate(tokens, rising, count) for count in padded], padded_to=sizes)
    linear_tokens, linear_seconds = zip(*points, strict=True)
    queries = tuple(powers(1, min(limit, longest)))
    return CostModel(
        model=name,
        device=device.description,
        linear_tokens=linear_tokens,
        linear_seconds=linear_seconds,
        attention_queries=queries,
        attention_contexts=contexts,
        attention_seconds=tuple(
            tuple(a_pair * _pairs(((max(0, context - query), max(query, context)),)) for context in contexts)
            for query in queries
        ),
        decode_rows=tuple(rows),
        decode_seconds=tuple(accumulate((taken[row[0][1]] for row in decodes), max)),
        decode_attention=tuple(_decode_attention(row, taken, contexts) for row in decodes),
        deviation=ESTIMATE_DEVIATION,
        stage_shares=_stage_shares(device, chunks[limit], decodes[-1][0][1]),
    )


@torch.inference_mode()
def measure_decodes(
    device: TimedDevice, rows: Sequence[int], contexts: Sequence[int]
) -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]:
    """Time steps of decodes alone, as `measure_cost` does. Returns `decode_seconds` and `decode_attention` of a model.

    Takes a few seconds on a GPU. Overwrites the cache.
    """
    while device.executor.prepare():  # otherwise steps would be measured as padded to larger sizes
        pass
    every_second = dict.fromkeys((*contexts[::2], contexts[-1]))
    decodes = [[(context, _decodes_up_to(count, context)) for context in every_second] for count in rows]
    _load(device, decodes[-1][-1][1])
    taken = _in_rounds(device, [spans for row in reversed(decodes) for _, spans in reversed(row)])
    attention = tuple(_decode_attention(row, taken, contexts) for row in decodes)
    return tuple(taken[row[0][1]] for row in decodes), attention


def _pairs(spans: Spans) -> float:
    """Number of (query, position) pairs in the attention of these ranges."""
    return sum((stop - start) * (start + stop) / 2 for start, stop in spans)


def stairs(tokens: Sequence[int], seconds: Sequence[float], padded_to: Container[int]) -> Iterator[tuple[int, float]]:
    """Points (tokens, seconds) of the cost curve: the measured ones, constant between padded sizes."""
    last = 0
    for count, taken in zip(tokens, seconds, strict=True):
        if count in padded_to and last + 1 < count:
            yield last + 1, taken
        yield count, taken
        last = count


def powers(first: int, last: int) -> Iterator[int]:
    """first, 2 * first, 4 * first, ... and last."""
    while first < last:
        yield first
        first *= 2
    yield last


def _chunks(device: TimedDevice, tokens: int) -> Spans:
    """The smallest number of segments that together have this many tokens."""
    longest = device.model.spec.max_model_len
    return tuple((0, min(longest, tokens - first)) for first in range(0, tokens, longest))


def _most_tokens(device: TimedDevice) -> int:
    """Largest number of tokens in a step: those of the longest sequences in all rows may be fewer than its limit."""
    return min(device.max_step_tokens, device.config.most_sequences * device.model.spec.max_model_len)


def _longest(device: TimedDevice) -> int:
    """Number of tokens in the longest sequence that the model and the cache hold."""
    return min(device.model.spec.max_model_len, device.memory.cache.num_blocks * device.config.block_size)


def _attention_alone(device: TimedDevice, name: str, queries: Sequence[int]) -> CostModel:
    """A cost model of attention alone: segments of these lengths (ascending), contexts at powers of two."""
    longest = _longest(device)
    queries = tuple(dict.fromkeys(min(query, longest) for query in queries))
    contexts = tuple(powers(min(16, longest), longest))
    if device.kind == "cuda":  # a GPU is faster on zeros
        for cache in chain.from_iterable(device.memory.layers):
            for blocks in torch.split(cache, BLOCKS_FILLED):
                blocks.copy_(torch.randn(blocks.shape, device=cache.device))
    attention = cached(partial(_attention, device))
    return CostModel(
        model=name,
        device=device.description,
        linear_tokens=(1,),
        linear_seconds=(0.0,),
        attention_queries=queries,
        attention_contexts=contexts,
        attention_seconds=tuple(
            tuple(attention(query, max(query, context)) for context in contexts) for query in queries
        ),
    )


def _load(device: TimedDevice, spans: Spans, share: float = 1.0) -> None:
    """Repeat a step of these ranges until the device reaches its steady speed, or for a `share` of that time."""
    began = time.perf_counter()
    while time.perf_counter() - began < share * LOAD_SECONDS[device.kind]:
        _step(device, spans)


def _attention_of(cost: CostModel, spans: Spans) -> float:
    return sum(cost.attention(stop - start, stop) for start, stop in spans)


def _is_far(query: int, context: int) -> bool:
    """Whether a chunk is measured as a real step: it begins late enough in its sequence, and is long enough."""
    return FAR <= query < context and query <= SPARSE


def _attention_added(cost: CostModel, query: int, context: int, taken: Mapping[Spans, float]) -> float:
    """Seconds that attention adds. A chunk measured as a real step: that step's time minus its linear layers."""
    if not _is_far(query, context):
        return cost.attention(query, context)
    return max(cost.attention(query, query), taken[((context - query, context),)] - cost.linear(query))


def _decodes_up_to(rows: int, context: int) -> Spans:
    """Decodes with contexts spread evenly up to `context`, because contexts also differ in service."""
    least = max(1, SPREAD * context) if rows > 1 else context
    return tuple((length - 1, length) for length in np.linspace(least, context, rows).astype(int).tolist())


def _decode_attention(
    measured: Sequence[tuple[int, Spans]], taken: Mapping[Spans, float], contexts: Sequence[int]
) -> tuple[float, ...]:
    """Seconds that one decode adds to a step at each of `contexts`, compared with the shortest context.

    `measured` has the longest context and the ranges of each measured step. The added time is taken as proportional to
    the mean context of a step, and interpolated between steps.
    """
    (first, shortest), *longer = measured
    points, added = [first], [0.0]
    for context, spans in longer:
        mean = sum(stop for _, stop in spans) / len(spans)
        share = (context - first) / max(1.0, mean - first)
        points.append(context)
        added.append(max(0.0, taken[spans] - taken[shortest]) * share / len(spans))
    return tuple(interpolate(points, added, context) for context in contexts)


def _burst(device: TimedDevice, cost: CostModel, most: int) -> Burst:
    """The burst of steps of up to `most` tokens after decodes: how much faster than `cost`, and for how long."""
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
    """The burst that explains these measured/predicted ratios of successive steps of `seconds` each.

    The first step lies wholly within the burst.
    """
    share, saved = ratios[0], 0.0
    if share > 1 - LEAST_BURST:
        return Burst()
    for ratio in ratios:
        saved += seconds * max(0.0, 1 - ratio)
        if ratio > (1 + share) / 2:  # the burst ends within this step; later ratios vary around the steady speed
            break
    return Burst(share, saved / (1 / share - 1))


def _in_rounds(device: TimedDevice, steps: Sequence[Spans]) -> dict[Spans, float]:
    """Median seconds of each kind of step."""
    taken: dict[Spans, list[float]] = {spans: [] for spans in steps}
    for number in range(ROUNDS[device.kind]):
        for spans in taken if number % 2 == 0 else reversed(taken):
            taken[spans] += _step(device, spans)
    return {spans: median(seconds) for spans, seconds in taken.items()}


def _stage_shares(device: TimedDevice, *steps: Spans) -> tuple[float, ...]:
    """The mean share of each pipeline stage in the time of these kinds of steps; empty for one stage."""
    if device.config.pp == 1:
        return ()
    shares = []
    for spans in steps:
        stages = [result.stages for result in _results(device, _repeated(device, spans, 2))][-1]
        shares.append([seconds / sum(stages) for seconds in stages])
    return tuple(map(fmean, zip(*shares, strict=True)))


def _step(device: TimedDevice, spans: Spans) -> list[float]:
    """Seconds of the counted steps that compute these ranges, one after another."""
    uncounted = WARM_UP[device.kind]
    return _taken(device, _repeated(device, spans, uncounted + COUNTED[device.kind]))[uncounted:]


def _taken(device: TimedDevice, plans: Sequence[StepPlan]) -> list[float]:
    """Seconds of each of these steps."""
    return [result.seconds for result in _results(device, plans)]


def _results(device: TimedDevice, plans: Sequence[StepPlan]) -> list[StepResult]:
    """The results of these steps. Two steps are in flight at any time."""
    results = []
    device.executor.submit(plans[0])
    for plan in plans[1:]:
        device.executor.submit(plan)
        results.append(device.executor.collect())
    return [*results, device.executor.collect()]


def _repeated(device: TimedDevice, spans: Spans, times: int) -> list[StepPlan]:
    """Plans that repeat one step `times` times. Only the first writes the block tables."""
    plan = _plan(device, spans)
    return [plan, *[replace(plan, table_writes=())] * (times - 1)]


def _plan(device: TimedDevice, spans: Spans) -> StepPlan:
    """A step that computes these ranges."""
    random, vocabulary = np.random.default_rng(0), device.model.spec.vocab_size  # different tokens, as in text
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


def _attention(device: TimedDevice, query: int, context: int) -> float:
    """Seconds that one segment of `query` tokens ending at `context` adds to a step, over all layers."""
    spec, memory = device.model.spec, device.memory
    block_size, num_blocks = device.config.block_size, memory.cache.num_blocks
    count = max(1, min(BATCH // query, device.config.most_sequences, num_blocks * block_size // context))
    width = -(-context // block_size)
    tables = (np.arange(count * width, dtype=np.int32) % num_blocks).reshape(count, width)
    positions = np.arange(context - query, context)
    slots = tables[:, positions // block_size].astype(np.int64) * block_size + positions % block_size
    segments = Segments(
        query_start=np.arange(count + 1, dtype=np.int32) * np.int32(query),
        context_stop=np.full(count, context, np.int32),
        row=np.arange(count, dtype=np.int32),
    )
    options: dict[str, Any] = dict(dtype=spec.dtype, device=spec.device)
    inputs = {
        shape: (
            torch.randn(count * query, spec.num_heads, shape.key_size, **options),
            torch.randn(count * query, shape.heads, shape.key_size, **options),
        )
        for shape in dict.fromkeys(spec.kv_shapes)
    }
    slot_mapping = torch.from_numpy(slots.reshape(-1)).to(spec.device)
    block_tables = torch.from_numpy(tables).to(spec.device)
    metadata = device.attention.make_metadata(segments)
    # More than the L2 cache holds. If layers differ, all are timed.
    layers = [*zip(spec.kv_shapes, memory.layers, strict=True)][: LAYERS if len(inputs) == 1 else None]

    def attend() -> None:
        for shape, (keys, values) in layers:
            heads, kv_heads = inputs[shape]
            device.attention.write(kv_heads, kv_heads, keys, values, slot_mapping)
            device.attention.attend(heads, keys, values, block_tables, metadata, scale=1.0)

    captured = isinstance(device.attention, CapturableAttention)
    return _seconds(attend, spec.device, captured=captured) * device.num_layers / len(layers) / count


def _seconds(work: Callable[[], object], device: torch.device, *, captured: bool) -> float:
    """Median seconds of `work` on a warm device. With `captured`, it runs as a CUDA graph, without launch overhead."""
    work()
    if device.type == "cuda" and captured:
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with capture(graph):
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
