"""PagedDevice: measures the memory that a model's steps leave free, and allocates the paged cache and its executor."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from holdfast.core.config import CoreConfig
from holdfast.core.stages import Stages
from holdfast.core.version import __version__
from holdfast.lm.copy_streams import CopyStream, stream_for
from holdfast.lm.devices import describe_device, memory_of, memory_of_others, taken_memory
from holdfast.lm.execution.batch import TOKENS_ONLY, Batch, ModelInputs
from holdfast.lm.execution.executor import PagedExecutor
from holdfast.lm.execution.graphs import GraphSizes, StepGraphs
from holdfast.lm.execution.host_memory import HostMemory, HostPart, StatesPart, after_blocks, cuda_pin, shared_memory
from holdfast.lm.execution.link_times import LinkTimes, time_links
from holdfast.lm.execution.paged_memory import Layers, PagedMemory
from holdfast.lm.execution.part import Allocated, DevicePart, Kind, PartExecutor, part_of
from holdfast.lm.execution.place import Place
from holdfast.lm.execution.returnable_memory import SleepMemory
from holdfast.lm.execution.stage_link import StageEnd
from holdfast.lm.execution.state_memory import REPLAY_BYTES, host_bytes, states_of
from holdfast.lm.execution.transfer import Transfers
from holdfast.lm.grammar.sources import mask_words
from holdfast.lm.kernels.attention.backends import attention_of_layers
from holdfast.lm.kernels.attention.protocol import CapturableAttention
from holdfast.lm.kernels.cache.kv_cache import KVCache, copy_blocks
from holdfast.lm.kernels.capture import free_workspaces
from holdfast.lm.kernels.fp8 import FP8
from holdfast.lm.kernels.recurrent.backends import recurrence_for
from holdfast.lm.kernels.recurrent.protocol import CapturableRecurrence
from holdfast.lm.kernels.sampling.masks import forbid
from holdfast.lm.kernels.sampling.sampler import Sampler
from holdfast.lm.models.base import CapturableModel, HiddenModel, Model, StateMemory, StreamTaps
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.types import (
    BUDGET_TILE,
    COPIES_AHEAD_BYTES,
    COPIES_FOR_OTHERS_BYTES,
    EngineShape,
    MemoryMeasurement,
    Sampling,
    Segment,
    SharedBytes,
    StateShape,
    StepPlan,
    TableWrite,
    precision_of,
    token_budget_of,
)
from holdfast.lm.types.news import PartNews
from holdfast.loop.contracts import Device

CPU_CACHE_BYTES = 4_000_000_000
"""Largest cache on a CPU unless the config sets its size, in bytes. A first try must not fill a laptop's memory."""

HOST_CACHE_BYTES = 32_000_000_000
"""Largest host tier unless the config sets its size, in bytes. Pinning takes time, and other processes need memory."""

TRANSIT_BYTES = 1_000_000_000
"""Largest host tier of a CPU unless the config sets its size, in bytes, if blocks move between engines."""

CPU = torch.device("cpu")
SAMPLING_VARIANTS = ((False, False), (True, False), (True, True))
"""Variants of the sampling kernel: whether any row of a step draws at random, and whether any is filtered."""


class PagedDevice(Device[MemoryMeasurement, EngineShape]):
    """`loop.contracts.Device` for a model over a paged cache. It also compiles the kernels and makes the executor."""

    def __init__(
        self,
        model: Model,
        config: CoreConfig,
        *,
        parts: Collection[DevicePart] = (),
        name: str = "",
        max_step_tokens: int | None = None,
        make_stream: Callable[[], CopyStream] | None = None,
        stages: Stages | None = None,
        place: Place | None = None,
        sleeping: SleepMemory | None = None,
    ) -> None:
        """`parts` do the work of steps besides their segments, in this order.

        `name` is the name under which the model is served. `max_step_tokens` is by default the token budget.

        `make_stream` makes the streams for copies of blocks, by default streams of the device's kind. `stages` records
        how long the stages of `allocate` take. `place` is this rank's place if `model` is its part of a model that
        several ranks share. `sleeping` has the model's weights, and gets the KV cache, if both can be returned.
        """
        self._sleeping = sleeping
        spec = model.spec
        self.model, self.config, self.device, self.name = model, config, spec.device, name
        self.group = model.group if isinstance(model, Decoder) else None
        """The devices that share the model's layers, if there are several."""
        self.token_budget = token_budget_of(config, spec.device.type, one_by_one=spec.one_by_one)
        self.max_step_tokens = max_step_tokens or self.token_budget
        self.cache_dtype = FP8 if config.kv_cache_dtype == "fp8" else spec.dtype
        self.attention = attention_of_layers(
            spec.device,
            spec.kv_shapes,
            num_heads=spec.num_heads,
            latent_rank=spec.latent_rank,
            block_size=config.block_size,
            backend=config.attention_backend,
            cache_dtype=self.cache_dtype,
            invariant=bool(spec.arithmetic),
        )
        invariant = bool(spec.arithmetic)
        recurrent = spec.recurrent_layers > 0
        self._recurrence = recurrence_for(spec.device, spec.dtype, invariant=invariant) if recurrent else None
        self._places = config.draft_places(spec.device.type) if spec.recurrent_layers else 0
        self._row_bytes = config.most_sequences * spec.state_bytes + self._places * spec.kept_bytes
        """Bytes of the recurrent states of running sequences, and of the kept inputs of drafts."""
        self.block_bytes = self._cache(1, torch.device("meta")).block_bytes
        sizes = spec, self.max_step_tokens, config.max_samples
        link = None if place is None else place.link(*sizes, back=any(part.sends_back for part in parts))
        self._link, self._shared = link, None if place is None else place.host
        self._stage = None if link is None else StageEnd(link, spec, self.max_step_tokens)
        self.parts = tuple(parts)
        """Parts that do the work of steps besides their segments, in order."""
        self._taps = self._taps_of(self.parts)
        self._allocated: tuple[PagedMemory, PagedExecutor] | None = None
        self._make_stream = make_stream or partial(stream_for, spec.device)
        self._stages = stages or Stages(0.0, time.monotonic)

    @property
    def sleeping(self) -> SleepMemory:
        """The memory that the device can do without while the engine sleeps. Raises LookupError if it cannot sleep."""
        if self._sleeping is None:
            raise LookupError("the device has no memory that can be returned")
        return self._sleeping

    @property
    def kind(self) -> str:
        """ "cuda" or "cpu"."""
        return self.device.type

    @property
    def description(self) -> str:
        """The device in words."""
        return describe_device(self.device)

    @property
    def num_layers(self) -> int:
        """Layers of the model that have attention."""
        return self.model.spec.attention_layers

    @property
    def precision(self) -> str:
        """The types of weights, activations and cache, in words."""
        dtype = str(self.model.spec.dtype).removeprefix("torch.")
        precision = precision_of(dtype, self.config.quantization, self.config.kv_cache_dtype)
        arithmetic = self.model.spec.arithmetic
        return f"{precision}, deterministic ({arithmetic})" if arithmetic else precision

    @property
    def captures(self) -> bool:
        """Whether steps run as captured CUDA graphs."""
        wanted = self.config.cuda_graphs and self.kind == "cuda"
        wanted = wanted and (self._recurrence is None or isinstance(self._recurrence, CapturableRecurrence))
        return wanted and isinstance(self.model, CapturableModel) and isinstance(self.attention, CapturableAttention)

    def part(self, kind: type[Kind]) -> Kind:
        """The part of this class. Raises LookupError if the device has none."""
        return part_of(self.parts, kind)

    def learn(self, news: PartNews) -> None:
        """Let all parts learn news of the planner's side."""
        for part in self.parts:
            part.learn(news)
        if self._allocated is not None:
            self.executor.learn(news)

    @property
    def memory(self) -> PagedMemory:
        """The allocated memory. Raises RuntimeError before `allocate`."""
        return self._required[0]

    @property
    def executor(self) -> PagedExecutor:
        """The executor over the allocated memory. Raises RuntimeError before `allocate`."""
        return self._required[1]

    @property
    def _required(self) -> tuple[PagedMemory, PagedExecutor]:
        if self._allocated is None:
            raise RuntimeError("the device has no cache yet: call allocate first")
        return self._allocated

    @property
    def host(self) -> HostMemory | None:
        """The host tier, if it has to be locked. Raises RuntimeError before `allocate`."""
        return self.memory.host

    @property
    def host_parts(self) -> list[HostPart]:
        """The bytes of the host tier's blocks; empty without one. Raises RuntimeError before `allocate`."""
        kept = self.memory.host_cache
        return [] if kept is None else [HostPart.of(kept)]

    @property
    def state_parts(self) -> list[StatesPart]:
        """The bytes of recurrent states on the host; empty without any. Raises RuntimeError before `allocate`."""
        data = self.memory.states.host
        return [StatesPart(data, self.model.spec.state_bytes)] if data else []

    def time_links(self) -> LinkTimes:
        """Time the messages between the ranks that share the model. All ranks call this at once, while no step runs.

        Only rank 0 returns valid figures.
        """
        spec, model = self.model.spec, self.model
        assert isinstance(model, Decoder)
        if self._stage is not None:
            self._stage.drain()
        return time_links(
            self.group,
            self._link,
            first=spec.first,
            last=spec.last,
            stages=self.config.pp,
            width=model.decoder.hidden_size,
            max_tokens=self.max_step_tokens,
            dtype=spec.dtype,
            device=self.device,
        )

    def in_thread(self) -> None:
        """Let the calling thread use this device. A new thread uses the first device by default."""
        if self.kind == "cuda":
            torch.cuda.set_device(self.device)

    def compile(self) -> None:
        """Compile the kernels of captured steps, several at a time, then run each kind of step once.

        Compiling takes most of a first start. The steps run over a cache of one block. Does nothing if steps are not
        captured.
        """
        _, layers, batch = self._empty(1)
        states = self._states(0, 0)
        graphs = self._graphs(batch, layers, self._graph_sizes.kinds(), states)
        if not graphs:
            return
        spec, sampler = self.model.spec, Sampler(self.group, self.model.spec.vocab_size)
        logits = torch.zeros(1, spec.own_vocab_size, dtype=spec.dtype, device=self.device)
        packed = batch.apply(1, 1)
        draws: list[Callable[[], object]] = [
            partial(sampler.draw, logits, packed.columns, None, any_random=random, any_filtered=filtered)
            for random, filtered in SAMPLING_VARIANTS
        ]
        masks = torch.zeros(1, mask_words(spec.vocab_size), dtype=torch.int32, device=self.device)
        draws.append(partial(forbid, logits, masks, np.zeros(1, np.int64)))
        works: list[Callable[[], object]] = [*graphs[0].rehearsals(), *draws, *states.rehearsals()]
        for more in graphs[1:]:
            works += more.rehearsals()
        from holdfast.lm.kernels.compilation import compile_once  # a CPU installation has no Triton

        with nullcontext() if self.group is None else self.group.alone():
            compile_once(partial(self._run_all, works), *self._compiled_for)
            self._run_at_once(works)
        torch.cuda.synchronize(self.device)
        free_workspaces()  # cuBLAS allocated one for each thread
        torch.cuda.empty_cache()

    def _run_at_once(self, works: list[Callable[[], object]]) -> None:
        with ThreadPoolExecutor(min(len(works), os.cpu_count() or 1), "holdfast-compile") as pool:
            for running in [pool.submit(self._run_in_thread, work) for work in works]:
                running.result()

    @property
    def _compiled_for(self) -> tuple[object, ...]:
        """Versions and settings that the kernels of captured steps depend on."""
        return __version__, torch.cuda.get_device_capability(self.device), self.model.spec, self.config

    @torch.inference_mode()
    def _run_all(self, works: list[Callable[[], object]]) -> None:
        for work in works:
            work()

    @torch.inference_mode()
    def _run_in_thread(self, work: Callable[[], object]) -> None:
        """Run `work` in a new thread, which has not chosen its CUDA device yet."""
        with torch.cuda.device(self.device):
            work()

    def measure(self, whole: SharedBytes | None = None) -> MemoryMeasurement:
        """Run the widest steps over a small cache to measure their memory. Raises MemoryError if no block fits.

        `whole` has the sizes of a block and of a state on all ranks together. This rank's share of a configured cache
        size is its share of them. None means that this rank has the whole of both.
        """
        whole = whole or self._shared_bytes
        on_gpu = self.kind == "cuda"
        self._check_states()
        plans = list(self._widest_plans())
        blocks = 1 + max(write.blocks[-1] for plan in plans for write in plan.table_writes)
        if on_gpu:
            torch.cuda.empty_cache()
        before = taken_memory(self.device)
        self._run_once(plans, blocks)
        activations = max(0, taken_memory(self.device) - before - blocks * self.block_bytes - self._row_bytes)
        activations += sum(part.workspace_bytes() for part in self.parts) + self._replay_bytes
        if on_gpu:
            torch.cuda.empty_cache()
        sharing = max(1, self.config.gpus.count(self.device.index)) if on_gpu else 1
        free, total = (each // sharing for each in memory_of(self.device))
        cache = self._cache_bytes(free, total, activations + self._row_bytes, whole)
        host = self._host_cache_bytes(whole)
        snapshots = self._snapshots_within(cache, whole, least=1)
        host_snapshots = self._snapshots_within(host, whole, least=0)
        slot = self.model.spec.state_bytes
        if cache - snapshots * slot < self.block_bytes:
            raise MemoryError(
                f"{cache / 1e9:.2f} GB are left for the cache; a block of it takes {self.block_bytes / 1e9:.4f} GB and "
                f"a recurrent state {slot / 1e9:.4f} GB: raise cache_gb or memory_fraction, or lower max_sequences"
            )
        return MemoryMeasurement(
            device=self.description,
            total=total,
            weights=self.model.spec.weight_bytes,
            activations=activations,
            cache=cache - snapshots * slot,
            block=self.block_bytes,
            host_cache=host - host_snapshots * slot,
            adapters=sum(part.nbytes for part in self.parts),
            rows=self._row_bytes,
            snapshots=snapshots,
            host_snapshots=host_snapshots,
        )

    def _check_states(self) -> None:
        """Raise MemoryError if the recurrent states of all running sequences do not fit, with the number that would."""
        free, total = memory_of(self.device)
        each, most = self.model.spec.state_bytes, self.config.most_sequences
        fits = (free - (self._row_bytes - most * each)) // max(1, each)
        if each and fits < most:
            raise MemoryError(
                f"max_sequences is {most}, and the recurrent states of a sequence take {each / 1e9:.4f} GB: of "
                f"{total / 1e9:.1f} GB on {describe_device(self.device)} {free / 1e9:.1f} are free, which is room for "
                f"the states of {max(0, fits)} sequences; lower it, or leave it out"
            )

    @property
    def _shared_bytes(self) -> SharedBytes:
        """Bytes of a block and of a sequence's recurrent states on this rank."""
        return SharedBytes(self.block_bytes, self.model.spec.state_bytes)

    @property
    def _snapshot_share(self) -> float:
        """The share of snapshots in the cache of all ranks together, from 0 to 1."""
        return sum(part.cache_share for part in self.parts)

    def _snapshots_within(self, cache: int, whole: SharedBytes, *, least: int) -> int:
        """Number of snapshots that have their share of this rank's cache of this many bytes, and at least this many.

        It is 0 for a model without recurrent layers.
        """
        own, share = self._shared_bytes, self._snapshot_share
        if not own.state:
            return 0
        # A stage with few layers of attention for its recurrent ones has more of its memory for snapshots.
        states, blocks = share * own.state / whole.state, (1.0 - share) * own.block / whole.block
        return max(least, int(cache * (states / (states + blocks))) // own.state)

    def allocate(self, sizes: MemoryMeasurement) -> EngineShape:
        """Allocate the KV cache of both tiers, the batch and the graphs of steps. Returns the engine's shape.

        The parts' executors and the executor are made after that. On CUDA no block of the host tier can be used before
        `memory.host` reports it ready.
        """
        within = self._shared_states(sizes)
        states = self._states(sizes.snapshots, sizes.host_snapshots, within)
        states.rehearse_copies()
        lasting = None if self._sleeping is None else self._sleeping.cache_of
        memory = self._allocate(sizes.num_blocks, sizes.num_host_blocks, self._graph_sizes, states, lasting)
        allocated = Allocated(memory, self._make_stream, self._link)
        self._allocated = memory, self._executor(memory, [part.executor(allocated) for part in self.parts])
        spec = self.model.spec
        weights = spec.weight_bytes // spec.dtype.itemsize
        numbers = spec.num_heads * sum(shape.key_size for shape in spec.kv_shapes)
        numbers = numbers * spec.attention_layers // spec.num_layers
        shape = EngineShape(
            model=self.name,
            precision=self.precision,
            num_blocks=sizes.num_blocks,
            num_host_blocks=sizes.num_host_blocks,
            host_blocks_ready=0 if memory.host is not None else sizes.num_host_blocks,
            copies_ahead=max(1, COPIES_AHEAD_BYTES // self.block_bytes),
            copies_for_others=max(1, COPIES_FOR_OTHERS_BYTES[self.kind] // self.block_bytes),
            token_budget=self.token_budget,
            max_step_tokens=self.max_step_tokens,
            # A sequence's last token is never computed, so the pool holds one position less than the longest sequence
            # has.
            max_model_len=min(spec.max_model_len, sizes.num_blocks * self.config.block_size + 1),
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            tile=BUDGET_TILE[self.kind],
            gives_hidden=isinstance(self.model, HiddenModel),
            states=self._state_shape(sizes),
            # A token takes 2 operations for each weight, and 4 for each position it attends to, in every dimension of
            # every
            # head. A weight in FP8 takes half the time, so it counts as half a weight.
            attention_balance=max(1, weights // (2 * numbers)),
        )
        for part in self.parts:
            shape = part.shaped(shape)
        return shape

    def _state_shape(self, sizes: MemoryMeasurement) -> StateShape | None:
        """Sizes of recurrent states for planning; None for a model without any."""
        if self._recurrence is None:
            return None
        return StateShape(
            snapshots=sizes.snapshots,
            host_snapshots=sizes.host_snapshots,
            slot_bytes=self.model.spec.state_bytes,
            places=self._places,
        )

    @property
    def _replay_bytes(self) -> int:
        """Bytes that a replay of accepted drafts takes: its inputs, and results that nobody reads."""
        return 2 * min(REPLAY_BYTES, self._places * self.model.spec.kept_bytes)

    def _states(self, snapshots: int, host_snapshots: int, within: torch.Tensor | None = None) -> StateMemory:
        """The recurrent states of all rows and of this many snapshots, and the places of drafts.

        `within` is the memory of the snapshots on the host; None: it is new.
        """
        rows = self.config.most_sequences
        return states_of(self.model.spec, self._recurrence, rows + snapshots, host_snapshots, self._places, within)

    def _shared_states(self, sizes: MemoryMeasurement) -> torch.Tensor | None:
        """The memory of the snapshots on the host, after that of the blocks, if another process may map it; else None.

        Raises MemoryError if a GPU cannot use it.
        """
        size = host_bytes(self.model.spec, sizes.host_snapshots)
        if self._shared is None or not size:
            return None
        shared = shared_memory(self._shared, size, after_blocks(sizes.num_host_blocks, self.block_bytes))
        if self.kind == "cuda" and (error := cuda_pin(shared.data_ptr(), size, self.device)):
            raise MemoryError(
                f"{size / 1e9:.2f} GB for recurrent states on the host cannot be pinned (CUDA error {error}): raise "
                "the limit on locked memory (ulimit -l), or lower host_cache_gb"
            )
        return shared

    @property
    def _graph_sizes(self) -> GraphSizes:
        return GraphSizes.of(self.config.max_samples, self.max_step_tokens)

    def _run_once(self, plans: list[StepPlan], blocks: int) -> None:
        """Run these steps over a cache of this many blocks, which is freed when this returns."""
        memory = self._allocate(blocks, 0, self._graph_sizes.largest(), self._states(0, 0))
        executor = self._executor(memory)
        with ExitStack() as wide:
            for part in self.parts:
                wide.enter_context(part.widened())
            try:
                for plan in plans:
                    executor.submit(plan)
                    executor.collect()
            finally:
                executor.close()

    def _executor(self, memory: PagedMemory, parts: Collection[PartExecutor] = ()) -> PagedExecutor:
        more: dict[str, Any] = {"group": self.group, "stage": self._stage, "taps": self._taps}
        return PagedExecutor(self.model, self.attention, memory, parts, **more)

    def _allocate(
        self,
        num_blocks: int,
        host_blocks: int,
        sizes: GraphSizes,
        states: StateMemory,
        make: Callable[[int], torch.Tensor] | None = None,
    ) -> PagedMemory:
        cache, layers, batch = self._empty(num_blocks, make)
        host, transfers, kept = None, None, None
        if host_blocks:
            kept = self._host_cache(host_blocks)
            transfers = Transfers(cache, kept, layers, self._make_stream, self.config.swap_in_groups)
            if self.kind == "cuda":
                host = HostMemory(kept, partial(cuda_pin, device=self.device))
                self._compile_copies()
        graphs = self._graphs(batch, layers, sizes, states)
        for each in graphs:
            with self._stages.stage("graphs"), torch.inference_mode():
                each.capture()
        return PagedMemory(cache, layers, batch, graphs, host, transfers, kept, states)

    def _empty(
        self, num_blocks: int, make: Callable[[int], torch.Tensor] | None = None
    ) -> tuple[KVCache, Layers, Batch]:
        """A device's cache, its layers, and an empty batch. `make` is as for `KVCache.allocate_layers`."""
        spec, config = self.model.spec, self.config
        cache = self._cache(num_blocks, spec.device, make=make)
        batch = Batch(
            rows=config.most_sequences,
            max_blocks=-(-spec.max_model_len // config.block_size),
            max_tokens=self.max_step_tokens,
            block_size=config.block_size,
            device=spec.device,
            samples=config.max_samples,
            inputs=self._inputs(),
            guesses=max((part.guesses for part in self.parts), default=0),
        )
        return cache, tuple(cache.layer(index) for index in range(spec.num_layers)), batch

    def _inputs(self) -> ModelInputs:
        """The inputs besides tokens that the model reads in a new batch's steps."""
        found = [part.inputs(self.max_step_tokens, self.config.max_samples) for part in self.parts]
        more = [each for each in found if each.sizes]
        if len(more) > 1:
            raise ValueError(f"{len(more)} parts have inputs of the model, and a batch has room for those of one")
        return more[0] if more else TOKENS_ONLY

    def _taps_of(self, parts: Collection[DevicePart]) -> StreamTaps | None:
        """The layers whose inputs a part reads; None if no part reads any. Raises ValueError if several parts do."""
        found = [taps for part in parts if (taps := part.taps(self.max_step_tokens)) is not None]
        if len(found) > 1:
            raise ValueError(f"{len(found)} parts read the inputs of layers, and a step keeps those of one")
        return found[0] if found else None

    def _compile_copies(self) -> None:
        """Copy one block each way, which compiles the kernel."""
        device, number = self._cache(1, self.device), torch.zeros(1, dtype=torch.int64, device=self.device)
        pinned = torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=True)
        host = self._cache(1, CPU, by_block=True, within=pinned)
        copy_blocks(device, number, host, number)
        copy_blocks(host, number, device, number)
        torch.cuda.synchronize(self.device)

    def _host_cache(self, num_blocks: int) -> KVCache:
        """The blocks of the host tier, each in one piece. Another process may map their memory."""
        shared = None if self._shared is None else shared_memory(self._shared, num_blocks * self.block_bytes)
        return self._cache(num_blocks, CPU, by_block=True, within=shared)

    def _cache(
        self,
        num_blocks: int,
        device: torch.device,
        *,
        by_block: bool = False,
        within: torch.Tensor | None = None,
        make: Callable[[int], torch.Tensor] | None = None,
    ) -> KVCache:
        return KVCache.allocate_layers(
            self.model.spec.kv_shapes,
            num_blocks=num_blocks,
            block_size=self.config.block_size,
            dtype=self.cache_dtype,
            device=device,
            by_block=by_block,
            within=within,
            make=make,
        )

    def _graphs(self, batch: Batch, layers: Layers, sizes: GraphSizes, states: StateMemory) -> tuple[StepGraphs, ...]:
        """The graphs of steps by kind, not captured yet; empty if steps are not captured."""
        model, attention = self.model, self.attention
        if not self.captures or not isinstance(model, CapturableModel):
            return ()
        if not isinstance(attention, CapturableAttention):
            return ()
        incoming = None if self._stage is None else self._stage.incoming
        shared: dict[str, Any] = {"group": self.group, "incoming": incoming, "states": states, "taps": self._taps}
        graphs = StepGraphs(model, attention, batch, layers, sizes, **shared)
        if not batch.inputs.sizes:
            return (graphs,)
        return graphs, StepGraphs(model, attention, batch, layers, sizes, **shared, plain=graphs)

    def _cache_bytes(self, free: int, total: int, activations: int, whole: SharedBytes) -> int:
        """Bytes of the KV cache. Raises MemoryError for a size that is not free, or is less than a block.

        `whole` is as for `measure`.
        """
        config = self.config
        if config.cache_bytes is not None:
            cache = self._own_share(config.cache_bytes, whole)
        elif self.kind == "cuda":
            own = 0 if self._sleeping is None else self._sleeping.mapped_bytes
            used = memory_of_others(self.device, free, total, config.memory_reserved, own)
            cache = int(total * config.memory_fraction) - used - activations
        else:
            cache = self._own_share(min(CPU_CACHE_BYTES, free // 2), whole)
        place = f"of {total / 1e9:.1f} GB on {describe_device(self.device)} {free / 1e9:.1f} are free"
        if cache > free:
            raise MemoryError(f"cache_gb is {config.cache_gb}: {place}; lower it, or leave it out")
        if cache < self.block_bytes:
            raise MemoryError(
                f"{max(cache, 0) / 1e9:.2f} GB are left for the KV cache and one block takes "
                f"{self.block_bytes / 1e9:.4f} GB: {place} and a step takes {activations / 1e9:.2f}; raise "
                "memory_fraction, or lower token_budget or max_sequences"
            )
        return cache

    def _host_cache_bytes(self, whole: SharedBytes) -> int:
        """Size of the host tier in bytes. Raises MemoryError if it exceeds the host's memory or holds no block.

        `whole` is as for `measure`.
        """
        wanted, size = self.config.host_cache_gb, self.config.host_cache_bytes
        free, total = memory_of(CPU)
        if size is None:
            pinned, config = self.kind == "cuda", self.config
            if not config.prefix_sharing or not (pinned or config.moves_blocks):
                return 0
            # On a CPU both tiers are the same memory, and the host tier is only where blocks pass through.
            most = HOST_CACHE_BYTES if pinned else TRANSIT_BYTES
            return self._own_share(min(most, free // 4), whole)
        if size > free or (wanted and size < whole.block):
            raise MemoryError(
                f"host_cache_gb is {wanted}: of {total / 1e9:.1f} GB of host memory {free / 1e9:.1f} are free, and a "
                f"block takes {whole.block / 1e9:.6f}; choose a size between, 0 for no host tier, or auto"
            )
        return self._own_share(size, whole)

    def _own_share(self, size: int, whole: SharedBytes) -> int:
        """This rank's share of `size` bytes for blocks and snapshots. `whole` is as for `measure`."""
        own = self._shared_bytes
        snapshots = int(size * self._snapshot_share) if own.state else 0
        blocks = (size - snapshots) * own.block // whole.block
        return blocks + snapshots * own.state // max(1, whole.state)

    def _widest_plans(self) -> Iterator[StepPlan]:
        """The steps that take the most memory: one long prefill, then as many sequences as fit, drawn and filtered."""
        greedy = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
        random, filtered = replace(greedy, temperature=1.0), Sampling(temperature=1.0, top_k=8, top_p=0.9, seed=0)
        most, longest, tokens = self.config.most_sequences, self.model.spec.max_model_len, self.max_step_tokens
        for step, (count, drawn) in enumerate(((1, greedy), (most, random), (most, filtered))):
            count = min(max(count, -(-tokens // longest)), tokens, most)
            length = min(tokens // count, longest)
            width = -(-length // self.config.block_size)
            samples = max(1, min(length, self.config.max_samples // count))
            yield StepPlan(
                step,
                samples=(samples,) * count if samples > 1 else None,
                segments=tuple(Segment(str(row), row, 0, length, (0,) * length, drawn) for row in range(count)),
                table_writes=tuple(
                    TableWrite(row, 0, tuple(range(row * width, (row + 1) * width))) for row in range(count)
                ),
                parts=tuple(chain.from_iterable(part.widest(count) for part in self.parts)),
            )


def cache_estimate(device: torch.device, config: CoreConfig, weights: int) -> int:
    """About how many bytes the cache and the states of running sequences will have, on all devices together.

    It is for decisions before the model is loaded: `weights` is the size of its files, in bytes, and the memory of a
    step is not subtracted.
    """
    free, total = memory_of(device)
    if config.cache_bytes is not None:
        return config.cache_bytes
    if device.type != "cuda":
        return min(CPU_CACHE_BYTES, free // 2)
    used = memory_of_others(device, free, total, config.memory_reserved)
    return max(0, (int(total * config.memory_fraction) - used) * config.layout.ranks - weights)


def resolve_device(name: str, index: int | None = None) -> torch.device:
    """The device that a config's `auto`, `cpu` or `cuda` means; for several GPUs, the one at `index` or the current.

    Raises ValueError for cuda without a GPU.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("device is cuda, and PyTorch finds no GPU; choose cpu or auto")
    if name == "cuda" or (name == "auto" and available):
        return torch.device("cuda", torch.cuda.current_device() if index is None else index)
    return torch.device("cpu")
