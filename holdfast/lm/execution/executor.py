"""The paged executor: a plan becomes tensors, runs through the model, and its samples feed the next step."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from holdfast.core.config import EngineConfig
from holdfast.lm.execution import device as devices
from holdfast.lm.execution.batch import Batch, PackedStep, StagedStep
from holdfast.lm.execution.graphs import GraphSizes, StepGraphs
from holdfast.lm.execution.transfer import CopyStream, LayerCache, Transfers, stream_for
from holdfast.lm.kernels.attention.backends import attention_for
from holdfast.lm.kernels.attention.protocol import CapturableAttention
from holdfast.lm.kernels.cache.kv_cache import KVCache, block_bytes
from holdfast.lm.kernels.linear.fp8 import FP8
from holdfast.lm.kernels.sampling.sample import sample
from holdfast.lm.models.base import CapturableModel, Model, StepInput
from holdfast.lm.types import MemoryMeasurement, Sampling, Segment, StepPlan, StepResult, TableWrite

CPU_CACHE_BYTES = 4_000_000_000
"""The cache on a CPU, unless the config says otherwise: a laptop should not lose its memory to a first try."""

HOST_CACHE_BYTES = 32_000_000_000
"""The most that the host tier takes unless the config says otherwise: pinning takes time, and others live there too."""

WAYS_TO_DRAW = ((False, False), (True, False), (True, True))
"""Whether any row of a step draws, and whether any is filtered."""

DEFAULT_BUDGET = {"cuda": 2048, "cpu": 512}
"""Tokens of a step, by the kind of device."""

Layers = tuple[LayerCache, ...]
"""By layer, its key cache and its value cache."""


class Flight(Protocol):
    """A step on its way."""

    def result(self) -> StepResult:
        """Wait for the step. Raises what it raised."""
        ...


@dataclass(frozen=True, slots=True)
class CudaFlight:
    """A step whose tokens are copied to pinned memory before `done`."""

    step: int
    tokens: torch.Tensor
    began: torch.cuda.Event
    done: torch.cuda.Event

    def result(self) -> StepResult:
        self.done.synchronize()
        return StepResult(self.step, tuple(self.tokens.tolist()), self.began.elapsed_time(self.done) / 1000)


class PagedExecutor:
    """`core.protocols.Executor` for a model over a paged cache.

    On CUDA `submit` puts the step on the current stream and returns. On a CPU one worker thread runs the steps in
    order, while the caller plans the next one.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        token_budget: int | None = None,
        make_stream: Callable[[], CopyStream] | None = None,
    ) -> None:
        """`token_budget` is the most tokens of one step; without it the config's, or else the device's default.

        `make_stream` makes the streams that blocks are copied on; by default those of the device's kind.
        """
        spec = model.spec
        self.model, self.config, self.device = model, config, spec.device
        self.token_budget = token_budget or config.fixed_token_budget or DEFAULT_BUDGET[spec.device.type]
        self.cache_dtype = FP8 if config.kv_cache_dtype == "fp8" else spec.dtype
        self.attention = attention_for(
            spec.device,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=config.block_size,
            backend=config.attention_backend,
            cache_dtype=self.cache_dtype,
        )
        self.block_bytes = block_bytes(
            layers=spec.num_layers,
            block_size=config.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=self.cache_dtype,
        )
        self._memory: _Memory | None = None
        self._make_stream = make_stream or partial(stream_for, spec.device)
        self._in_flight: deque[tuple[StagedStep | None, Flight]] = deque()
        self._nothing = torch.empty(0, dtype=torch.int64, device=spec.device)
        self._worker = ThreadPoolExecutor(1, "holdfast-step") if spec.device.type == "cpu" else None

    def compile(self) -> None:
        """Run each kind of step that graphs are made of once, several at a time, over a cache of one block.

        A first start spends most of its time on compiling kernels, which threads do beside each other. Does nothing
        where steps are not captured.
        """
        _, layers, batch = self._empty(1)
        graphs = self._graphs(batch, layers, self._graph_sizes.kinds())
        if graphs is None:
            return
        logits = torch.zeros(1, self.model.spec.vocab_size, dtype=self.model.spec.dtype, device=self.device)
        packed = batch.settle(1, 1)
        draws = [partial(_sample, logits, packed, any_random, cut) for any_random, cut in WAYS_TO_DRAW]
        works: list[Callable[[], object]] = [*graphs.rehearsals(), *draws]
        with ThreadPoolExecutor(min(len(works), os.cpu_count() or 1), "holdfast-compile") as pool:
            for running in [pool.submit(self._run_alone, work) for work in works]:
                running.result()
        torch.cuda.synchronize(self.device)
        # Each thread's cuBLAS took a workspace of its own.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    @torch.inference_mode()
    def _run_alone(self, work: Callable[[], object]) -> None:
        """Run something in a thread that has not set the device up yet."""
        with torch.cuda.device(self.device):
            work()

    def profile(self) -> MemoryMeasurement:
        """Run full steps over a small cache and see what they take. Raises MemoryError if no block would fit."""
        on_gpu = self.device.type == "cuda"
        plans = list(self._warm_up_plans())
        blocks = 1 + max(write.blocks[-1] for plan in plans for write in plan.table_writes)
        if on_gpu:
            torch.cuda.empty_cache()
        before = devices.taken_memory(self.device)
        self._allocate(blocks, 0, self._graph_sizes.largest())
        for plan in plans:
            self.submit(plan)
            self.collect()
        activations = max(0, devices.taken_memory(self.device) - before - blocks * self.block_bytes)
        self._memory = None
        if on_gpu:
            torch.cuda.empty_cache()
        free, total = devices.memory(self.device)
        cache = self._cache_bytes(free, total, activations)
        if cache > free:
            raise MemoryError(
                f"cache_gb is {self.config.cache_gb}: of {total / 1e9:.1f} GB on {devices.describe(self.device)} "
                f"{free / 1e9:.1f} are free; lower it, or leave it out"
            )
        if cache < self.block_bytes:
            raise MemoryError(
                f"{max(cache, 0) / 1e9:.2f} GB are left for the KV cache and one block takes "
                f"{self.block_bytes / 1e9:.4f} GB: of {total / 1e9:.1f} GB on {devices.describe(self.device)} "
                f"{free / 1e9:.1f} are free and a step takes {activations / 1e9:.2f}; raise memory_fraction, "
                "or lower token_budget or max_sequences"
            )
        return MemoryMeasurement(
            device=devices.describe(self.device),
            total=total,
            weights=self.model.spec.weight_bytes,
            activations=activations,
            cache=cache,
            block=self.block_bytes,
            host_cache=self._host_cache_bytes(),
        )

    def allocate(self, num_blocks: int, host_blocks: int = 0) -> None:
        """Make the KV cache of both tiers, an empty batch, and the graphs of steps.

        Raises MemoryError if the host's memory cannot be pinned.
        """
        self._allocate(num_blocks, host_blocks, self._graph_sizes)

    @property
    def _graph_sizes(self) -> GraphSizes:
        return GraphSizes.of(self.config.max_sequences, self.token_budget)

    def _allocate(self, num_blocks: int, host_blocks: int, sizes: GraphSizes) -> None:
        cache, layers, batch = self._empty(num_blocks)
        host, transfers = None, None
        if host_blocks:
            host = self._cache(host_blocks, torch.device("cpu"))
            if self.device.type == "cuda":
                host.pin()
            transfers = Transfers(cache, host, layers, self._make_stream)
            if self.device.type == "cuda":
                transfers.warm_up()
        graphs = self._graphs(batch, layers, sizes)
        if graphs is not None:
            with torch.inference_mode():
                graphs.capture()
        self._memory = _Memory(cache, layers, batch, graphs, host, transfers)

    def _empty(self, num_blocks: int) -> tuple[KVCache, Layers, Batch]:
        """A device's cache, its layers, and a batch of nothing."""
        spec, config = self.model.spec, self.config
        cache = self._cache(num_blocks, spec.device)
        batch = Batch(
            rows=config.max_sequences,
            max_blocks=-(-spec.max_model_len // config.block_size),
            max_tokens=self.token_budget,
            block_size=config.block_size,
            device=spec.device,
        )
        return cache, tuple(cache.layer(index) for index in range(spec.num_layers)), batch

    def _cache(self, num_blocks: int, device: torch.device) -> KVCache:
        spec = self.model.spec
        return KVCache.allocate(
            layers=spec.num_layers,
            num_blocks=num_blocks,
            block_size=self.config.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=self.cache_dtype,
            device=device,
        )

    def _graphs(self, batch: Batch, layers: Layers, sizes: GraphSizes) -> StepGraphs | None:
        """The graphs of steps, still to be captured, where the device and the model can be."""
        wanted = self.config.cuda_graphs and self.device.type == "cuda"
        if wanted and isinstance(self.model, CapturableModel) and isinstance(self.attention, CapturableAttention):
            return StepGraphs(self.model, self.attention, batch, layers, sizes)
        return None

    @property
    def memory(self) -> _Memory:
        """Cache and batch, once allocated."""
        if self._memory is None:
            raise RuntimeError("the executor has no cache yet: call allocate first")
        return self._memory

    def submit(self, plan: StepPlan) -> None:
        memory = self.memory
        staged = memory.batch.stage(plan) if plan.segments else None
        flight: Flight
        if self._worker is not None:
            flight = self._worker.submit(self._run_on_cpu, memory, plan, staged)
        else:
            flight = self._start_on_cuda(memory, plan, staged)
        self._in_flight.append((staged, flight))

    def collect(self) -> StepResult:
        staged, flight = self._in_flight.popleft()
        result, memory = flight.result(), self.memory
        if staged is not None:
            memory.batch.release(staged)
        if memory.transfers is not None:
            result = replace(result, **memory.transfers.completed(wait=staged is None)._asdict())
        return result

    def close(self) -> None:
        self._in_flight.clear()
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
        elif self._memory is not None and self._memory.host is not None:
            torch.cuda.synchronize(self.device)
            self._memory.host.unpin()
        self._memory = None

    def _run_on_cpu(self, memory: _Memory, plan: StepPlan, staged: StagedStep | None) -> StepResult:
        began = time.perf_counter()
        layers = memory.begin_copies(plan)
        tokens = tuple(self._forward(memory, staged, layers).tolist()) if staged is not None else ()
        return StepResult(plan.step, tokens, time.perf_counter() - began)

    def _start_on_cuda(self, memory: _Memory, plan: StepPlan, staged: StagedStep | None) -> Flight:
        try:
            began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record()
            layers = memory.begin_copies(plan)
            sampled = self._forward(memory, staged, layers) if staged is not None else self._nothing
            tokens = torch.empty(sampled.shape, dtype=sampled.dtype, pin_memory=True)
            tokens.copy_(sampled, non_blocking=True)
            done.record()
        except Exception as error:
            failed: Future[StepResult] = Future()
            failed.set_exception(error)
            return failed
        return CudaFlight(plan.step, tokens, began, done)

    @torch.inference_mode()
    def _forward(self, memory: _Memory, staged: StagedStep, layers: Sequence[LayerCache]) -> torch.Tensor:
        """Run one step on the device; the sampled tokens [R], which also become their rows' last tokens."""
        # A graph cannot wait, layer by layer, for what is swapped in.
        arriving = layers is not memory.layers
        started = memory.graphs.run(staged) if memory.graphs is not None and not arriving else None
        packed, logits = started or self._eager(memory.batch, staged, layers)
        tokens = _sample(logits, packed, staged.any_random, staged.any_filtered)
        memory.batch.last_token.index_copy_(0, packed.sample_rows, tokens)
        return tokens

    def _eager(self, batch: Batch, staged: StagedStep, layers: Sequence[LayerCache]) -> tuple[PackedStep, torch.Tensor]:
        """Enter a step and launch its kernels one by one: its inputs, and its logits [R, vocab_size]."""
        packed = batch.enter(staged)
        logits = self.model.forward(
            StepInput(
                ids=packed.ids,
                positions=packed.positions,
                sample_at=packed.sample_at if staged.num_sampled < staged.num_tokens else None,
                slot_mapping=packed.slot_mapping,
                block_tables=batch.block_tables,
                caches=layers,
                attention=self.attention,
                schedule=self.attention.schedule(staged.segments),
            )
        )
        return packed, logits

    def _cache_bytes(self, free: int, total: int, activations: int) -> int:
        """What the KV cache may take."""
        if self.config.cache_gb is not None:
            return int(self.config.cache_gb * 1e9)
        if self.device.type == "cuda":
            reserved_by_others = total - free
            return int(total * self.config.memory_fraction) - reserved_by_others - activations
        return min(CPU_CACHE_BYTES, free // 2)

    def _host_cache_bytes(self) -> int:
        """What the host tier may take. Raises MemoryError for what the host does not have, or is less than a block."""
        wanted = self.config.host_cache_gb
        free, total = devices.memory(torch.device("cpu"))
        if wanted == "auto":
            on = self.device.type == "cuda" and self.config.prefix_sharing
            return min(HOST_CACHE_BYTES, free // 4) if on else 0
        size = int(wanted * 1e9)
        if size > free or 0 < wanted * 1e9 < self.block_bytes:
            raise MemoryError(
                f"host_cache_gb is {wanted}: of {total / 1e9:.1f} GB of host memory {free / 1e9:.1f} are free, and a "
                f"block takes {self.block_bytes / 1e9:.6f}; choose a size between, 0 for no host tier, or auto"
            )
        return size

    def _warm_up_plans(self) -> Iterator[StepPlan]:
        """The widest steps: one long prefill, and as many sequences as there can be; one for each way of drawing."""
        greedy = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
        random, filtered = replace(greedy, temperature=1.0), Sampling(temperature=1.0, top_k=8, top_p=0.9, seed=0)
        most, longest = self.config.max_sequences, self.model.spec.max_model_len
        for step, (count, drawn) in enumerate(((1, greedy), (most, random), (most, filtered))):
            count = min(max(count, -(-self.token_budget // longest)), self.token_budget, self.config.max_sequences)
            length = min(self.token_budget // count, longest)
            width = -(-length // self.config.block_size)
            yield StepPlan(
                step,
                segments=tuple(Segment(str(row), row, 0, length, (0,) * length, drawn) for row in range(count)),
                table_writes=tuple(
                    TableWrite(row, 0, tuple(range(row * width, (row + 1) * width))) for row in range(count)
                ),
            )


def _sample(logits: torch.Tensor, packed: PackedStep, any_random: bool, any_filtered: bool) -> torch.Tensor:
    """A token for each row of the logits, drawn as its step says."""
    return sample(
        logits,
        packed.temperature,
        packed.top_k,
        packed.top_p,
        packed.seed,
        packed.sample_position,
        any_random=any_random,
        any_filtered=any_filtered,
    )


@dataclass(frozen=True, slots=True)
class _Memory:
    """What `allocate` made."""

    cache: KVCache
    layers: Layers
    batch: Batch
    graphs: StepGraphs | None
    host: KVCache | None
    transfers: Transfers | None

    def begin_copies(self, plan: StepPlan) -> Sequence[LayerCache]:
        """Start a plan's copies between the tiers; gives the layers' caches for its computation."""
        if self.transfers is None:
            return self.layers
        return self.transfers.begin(plan)
