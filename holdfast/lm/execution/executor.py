"""The paged executor: runs step plans through the model. Sampled tokens feed the next step on the device."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from holdfast.lm.execution.adapter_transfer import AdapterTransfers
from holdfast.lm.execution.batch import Batch, PackedStep, StagedStep
from holdfast.lm.execution.graphs import StepGraphs
from holdfast.lm.execution.host_memory import HostMemory
from holdfast.lm.execution.stage_link import StageEnd
from holdfast.lm.execution.transfer import Transfers
from holdfast.lm.grammar.matchers import Matchers
from holdfast.lm.grammar.sources import mask_words
from holdfast.lm.kernels.attention.protocol import Attention
from holdfast.lm.kernels.cache.kv_cache import KVCache, copy_blocks
from holdfast.lm.kernels.collectives.protocol import Group
from holdfast.lm.kernels.sampling.sampler import Drawn, Sampler
from holdfast.lm.kernels.upload import upload
from holdfast.lm.models.adapters import StepAdapters
from holdfast.lm.models.base import HiddenModel, LayerCache, LayerCaches, Model, StepInput
from holdfast.lm.types import PartResult, StepPlan, StepResult, TableWrite
from holdfast.lm.types.adapters import AdapterResult
from holdfast.lm.types.grammars import ConstrainedRow, Forced, GrammarResult
from holdfast.lm.types.prompts import PromptResult
from holdfast.lm.types.tuning import TrainingPlan, TrainingReport, TrainingSlice
from holdfast.lm.types.vectors import VectorResult

Layers = tuple[LayerCache, ...]
"""By layer, its key cache and its value cache."""


class LaunchedTraining(Protocol):
    """A slice of training that the device computes, or has computed."""

    def result(self) -> TrainingReport:
        """What it took and gave. Waits for the device."""
        ...


class Training(Protocol):
    """Computes slices of training: `holdfast.training.trainer.Trainer`."""

    def launch(self, slice_: TrainingSlice, lent: int) -> LaunchedTraining:
        """Compute a slice, of which all tensors lie in the cache's last `lent` blocks, after what was launched before.

        Called in the thread that runs the steps. Raises ValueError for a slice that does not follow those before it.
        """
        ...


@dataclass(frozen=True, slots=True)
class PagedMemory:
    """All that a `PagedDevice` allocates."""

    cache: KVCache
    layers: Layers
    batch: Batch
    graphs: StepGraphs | None
    host: HostMemory | None
    """The host tier, where it has to be locked."""
    transfers: Transfers | None
    adapter_graphs: StepGraphs | None = None
    """The graphs of steps with adapters."""
    adapters: AdapterTransfers | None = None
    host_cache: KVCache | None = None
    """The blocks of the host tier, each in one piece; None without one."""

    def begin_copies(self, plan: StepPlan) -> LayerCaches:
        """Move a plan's blocks, and start its copies between the tiers; the layers' caches for its computation."""
        if moves := plan.part(TrainingPlan).moves:
            on_gpu = self.cache.data.is_cuda
            numbers = torch.tensor(moves, dtype=torch.int64, pin_memory=on_gpu)
            pairs = numbers.to(self.cache.data.device, non_blocking=True).t().contiguous()
            copy_blocks(self.cache, pairs[0], self.cache, pairs[1])
        if self.adapters is not None:
            self.adapters.begin(plan)
        if self.transfers is None:
            return self.layers
        return self.transfers.begin(plan)


QUERY_SECONDS = 2e-5
"""How often a step in flight is looked at, where the wait for it must be able to end before it does."""


class MaskBuffers:
    """Where masks are written, and copied to a GPU beside the step that they are for."""

    def __init__(self, rows: int, words: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.empty(rows, words, dtype=torch.int32, pin_memory=on_gpu)
        self._device = torch.empty_like(self._host, device=device) if on_gpu else self._host
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    def host(self, rows: int) -> torch.Tensor:
        """Room for the masks of so many rows [rows, words]. The draw by the last masks must have ended."""
        return self._host[:rows]

    def upload(self, rows: int) -> torch.Tensor:
        """The masks on the device, for what is launched from now on."""
        masks = self._device[:rows]
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                masks.copy_(self._host[:rows], non_blocking=True)
            torch.cuda.current_stream(masks.device).wait_stream(self._stream)
        return masks


@dataclass(slots=True, eq=False)
class CudaFlight:
    """A step in flight on a GPU. What it has drawn is in pinned memory once `done` has passed."""

    plan: StepPlan
    staged: StagedStep | None
    began: torch.cuda.Event
    done: torch.cuda.Event
    """Before the slice of training."""
    computed: tuple[PackedStep, torch.Tensor] | None = None
    """The step's inputs and its logits, until it is drawn."""
    drawn: Drawn | None = None
    forced: tuple[Forced, ...] = ()
    """What must follow its tokens."""
    training: LaunchedTraining | None = None
    error: Exception | None = None

    @property
    def constrained(self) -> tuple[ConstrainedRow, ...]:
        """Its sampled rows that follow a grammar."""
        return () if self.staged is None else self.staged.constrained

    def finish(self) -> None:
        """Wait for the device, if it has been drawn."""
        if self.error is None:
            self.done.synchronize()

    @property
    def tokens(self) -> tuple[int, ...]:
        """What it has drawn. Waits for the device."""
        assert self.drawn is not None, f"step {self.plan.step} has not been drawn"
        self.done.synchronize()
        return tuple(self.drawn.tokens.tolist())

    def result(self) -> StepResult:
        if self.error is not None:
            raise self.error
        assert self.drawn is not None, f"step {self.plan.step} has not been drawn"
        self.done.synchronize()
        seconds = self.began.elapsed_time(self.done) / 1000
        result = _result(self.plan.step, self.drawn, self.staged, seconds)
        return result.with_parts(*_parts(self.training, self.forced))

    def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.error is None and not self.done.query():  # type: ignore[no-untyped-call]
            if time.monotonic() >= deadline:
                return False
            time.sleep(QUERY_SECONDS)
        return True


Flight = CudaFlight | Future[StepResult]
"""A step in flight. Its `result` waits for the step, and raises what the step raised."""


class PagedExecutor:
    """`loop.contracts.Executor` for a model over a paged cache.

    On CUDA `submit` puts the step on the current stream and returns. On a CPU one worker thread runs the steps in
    order, while the caller plans the next one. Sampled tokens feed the next step on the device: a plan may ask for a
    token (`PENDING`) that the step before it has not yet given to the host.

    A row with a grammar needs the tokens before the one to draw. On CUDA such a step is launched up to its logits. Its
    masks are computed when the host has the tokens of the step before it, while the device computes the logits. Then
    the draw is launched. The oldest step in flight has always been drawn. In a pipeline all this happens on the last
    stage, whose host has a sequence's token before the next step with that sequence arrives.

    One thread submits, and the same or another one collects.
    """

    def __init__(
        self,
        model: Model,
        attention: Attention[Any],
        memory: PagedMemory,
        group: Group | None = None,
        stage: StageEnd | None = None,
    ) -> None:
        """`group` is the devices that share the model's layers, if there are several.

        `stage` is where steps come from and go to, if this is a stage of a pipeline. Tokens are sampled on the last
        one; on the others results have none.
        """
        self._model, self._attention, self.memory, self._stage = model, attention, memory, stage
        self._draws = stage is None or stage.last
        self._sampler = Sampler(group, model.spec.vocab_size)
        self._device = model.spec.device
        self.training: Training | None = None
        """What computes the slices of plans. Set before the first of them."""
        self.matchers: Matchers | None = None
        """What follows grammars, on the first of the devices that draw. Set before the first of them."""
        self._mask_buffers: MaskBuffers | None = None
        self._unread: deque[CudaFlight] = deque()
        """Drawn steps with grammars whose tokens the matchers have not read."""
        self._undrawn: CudaFlight | None = None
        """The newest step in flight, if its draw waits for tokens of earlier ones."""
        self._in_flight: deque[tuple[StagedStep | None, bool, Flight, list[tuple[int, ...]] | None]] = deque()
        """With each step, whether it is complete only when its copies are, and its drafts."""
        self._launching = threading.Lock()
        """Held while draws are launched on a GPU, and while the matchers are used for that."""
        self._late_writes: tuple[TableWrite, ...] = ()
        """Those of plans without segments, for the next batch."""
        self._nothing = Drawn(torch.empty(0, dtype=torch.int64, device=self._device))
        self._worker = ThreadPoolExecutor(1, "holdfast-step") if self._device.type == "cpu" else None

    def submit(self, plan: StepPlan) -> None:
        """Start the step and return without waiting for it. Raises ValueError for a plan that the batch cannot hold."""
        if self._late_writes:
            plan, self._late_writes = replace(plan, table_writes=(*self._late_writes, *plan.table_writes)), ()
        if not plan.segments:
            self._late_writes = plan.table_writes
        staged = self.memory.batch.stage(plan) if plan.segments else None
        flight: Flight
        with self._launching:
            if self._worker is not None:
                flight = self._worker.submit(self._run_on_cpu, plan, staged)
            else:
                flight = self._start_on_cuda(plan, staged)
            self._in_flight.append((staged, staged is None and not plan.part(TrainingPlan).slice, flight, plan.drafts))

    def wait(self, seconds: float) -> bool:
        """Wait for the oldest step in flight, at most so long. Returns whether it has ended."""
        flight = self._in_flight[0][2]
        return bool(wait_for([flight], seconds).done) if isinstance(flight, Future) else flight.wait(seconds)

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight. Raises what that step raised."""
        flight = self._in_flight[0][2]
        if isinstance(flight, CudaFlight) and self.matchers is not None and flight.constrained:
            flight.finish()  # others may submit meanwhile
        with self._launching:
            staged, waits, flight, drafts = self._in_flight.popleft()
            if isinstance(flight, CudaFlight):
                self._read(flight)
        result, memory = flight.result(), self.memory
        if drafts is not None and result.tokens:  # a stage before the last draws none
            result = result.verified(drafts)
        if staged is not None:
            memory.batch.release(staged)
        if memory.transfers is not None:
            result = replace(result, copied=memory.transfers.completed(wait=waits))
        if memory.adapters is not None:
            loaded, lost = memory.adapters.completed(wait=waits)
            result = result.with_parts(AdapterResult(loaded, lost))
        return result

    def prepare(self) -> bool:
        """Use a pause to capture one more graph. Returns whether it did; never while a step is in flight."""
        memory = self.memory
        if memory.graphs is None or self._in_flight:
            return False
        # No other thread locks memory or packs adapters while a graph is captured.
        pinning = memory.host.pinning if memory.host is not None else nullcontext()
        packing = memory.adapters.store.packing if memory.adapters is not None else nullcontext()
        with pinning, packing, torch.inference_mode():
            return any(graphs.capture_next() for graphs in (memory.graphs, memory.adapter_graphs) if graphs is not None)

    def close(self) -> None:
        """Stop the worker, or wait for the device, and unlock the host tier. Steps in flight are abandoned."""
        self._in_flight.clear()
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
        elif self.memory.host is not None:
            torch.cuda.synchronize(self._device)
            self.memory.host.close()
        if self.memory.adapters is not None:
            self.memory.adapters.close()

    def _run_on_cpu(self, plan: StepPlan, staged: StagedStep | None) -> StepResult:
        began = time.perf_counter()
        layers = self.memory.begin_copies(plan)
        if self._stage is not None and staged is not None:
            self._stage.enter(staged, self.memory.batch.last_token)
            began = time.perf_counter()  # the time that a stage waits for others is not the step's
        drawn, forced = self._nothing, tuple[Forced, ...]()
        if staged is not None:
            drawn = self._draw(staged, *self._forward(staged, layers), self._masks(staged))
        result = _result(plan.step, drawn, staged, 0.0)
        if staged is not None and staged.constrained and self.matchers is not None:
            self.matchers.read(staged.constrained, result.tokens)
            forced = self.matchers.forced(staged.constrained)
        seconds = time.perf_counter() - began
        launched = self._train(plan)
        return replace(result, seconds=seconds).with_parts(*_parts(launched, forced))

    def _start_on_cuda(self, plan: StepPlan, staged: StagedStep | None) -> Flight:
        self._draw_late()
        began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        flight = CudaFlight(plan, staged, began, done)
        try:
            began.record()
            layers = self.memory.begin_copies(plan)
            if self._stage is not None and staged is not None:
                self._stage.enter(staged, self.memory.batch.last_token)
                began.record()
            if staged is not None:
                flight.computed = self._forward(staged, layers)
            if staged is not None and staged.constrained and self._unread:
                self._undrawn = flight
            else:
                self._complete(flight)
        except Exception as error:
            flight.error = error
        return flight

    def _draw_late(self) -> None:
        """Launch what is left of the newest step in flight, if its draw waits."""
        flight, self._undrawn = self._undrawn, None
        if flight is not None:
            try:
                self._complete(flight)
            except Exception as error:
                flight.error = error

    def _complete(self, flight: CudaFlight) -> None:
        """Launch a step's draw and its slice of training."""
        staged, drawn = flight.staged, self._nothing
        if staged is not None and flight.computed is not None:
            masks = self._masks(staged)
            drawn = self._draw(staged, *flight.computed, masks)
            if masks is not None and self.matchers is not None:
                self._unread.append(flight)
        flight.computed, flight.drawn = None, drawn.on_host()
        flight.done.record()
        flight.training = self._train(flight.plan)

    def _read(self, flight: CudaFlight) -> None:
        """Let the matchers read the oldest step in flight. Then draw the next one, if it waits for that."""
        while flight in self._unread:
            self._read_next()
        if self._undrawn is not None and self._in_flight[0][2] is self._undrawn:
            self._draw_late()
        if self.matchers is not None and flight.error is None:
            flight.forced = self.matchers.forced(flight.constrained)

    def _read_next(self) -> None:
        """Let the matchers read the tokens of the oldest step that they have not read. Waits for the device."""
        flight = self._unread.popleft()
        assert self.matchers is not None
        self.matchers.read(flight.constrained, flight.tokens)

    def _masks(self, staged: StagedStep) -> torch.Tensor | None:
        """The masks of a step's rows with grammars [M, W] int32, on the device; None if no such row is drawn here.

        Other devices than the first of a group have empty ones; they get the first one's.
        """
        rows = staged.constrained
        if not rows or not self._draws:
            return None
        if self.matchers is None:
            words = mask_words(self._model.spec.vocab_size)
            return torch.zeros(len(rows), words, dtype=torch.int32, device=self._device)
        while self._unread:
            self._read_next()
        if self._mask_buffers is None:
            rows_of_batch = len(self.memory.batch.last_token)
            self._mask_buffers = MaskBuffers(rows_of_batch, self.matchers.words, self._device)
        self.matchers.masks(rows, staged.answers, self._mask_buffers.host(len(rows)).numpy())
        return self._mask_buffers.upload(len(rows))

    def _train(self, plan: StepPlan) -> LaunchedTraining | None:
        """Launch a plan's slice of training, if it has one. Raises ValueError without a trainer."""
        training = plan.part(TrainingPlan)
        if not training.slice:
            return None
        if self.training is None:
            raise ValueError(f"step {plan.step} has a slice of training, and nothing trains")
        return self.training.launch(training.slice, training.lent)

    @torch.inference_mode()
    def _forward(self, staged: StagedStep, layers: LayerCaches) -> tuple[PackedStep, torch.Tensor]:
        """Run one step on the device up to its logits [R, own_vocab_size]; these, and its inputs.

        Before the last stage of a pipeline: its stream [T, width]. Both are valid until the next step is run.
        """
        memory = self.memory
        # A graph cannot wait, layer by layer, for blocks that are being swapped in.
        swapping_in = layers is not memory.layers
        graphs = memory.graphs if staged.adapted is None else memory.adapter_graphs
        captured = graphs is not None and not swapping_in and not staged.reads_hidden
        started = graphs.run(staged) if graphs is not None and captured else None
        return started or self._eager(staged, layers)

    @torch.inference_mode()
    def _draw(self, staged: StagedStep, packed: PackedStep, given: torch.Tensor, masks: torch.Tensor | None) -> Drawn:
        """Sample after the rows of a step; the tokens [R], which also become the last tokens of their rows.

        Before the last stage of a pipeline there are none.
        """
        stage, drawn, told = self._stage, self._nothing, dict[str, Any]()
        if self._draws:
            if staged.reads_hidden:
                given, told = self._read_hidden(staged, packed, given)
            kinds = {"any_random": staged.any_random, "any_filtered": staged.any_filtered}
            last = None if staged.wishes is None else packed.ids.index_select(0, packed.sample_at)
            drawn = self._sampler.draw(given, packed.columns, staged.wishes, **kinds, last=last, masks=masks)
            drawn = drawn._replace(**told)
            given = drawn.tokens
            self.memory.batch.last_token.index_copy_(0, packed.sample_rows, given)
        if stage is not None:
            stage.leave(staged, packed.sample_rows, given)
        return drawn

    def _read_hidden(
        self, staged: StagedStep, packed: PackedStep, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The logits of sampled rows, and what is asked for besides, from a step's hidden states [T, hidden]."""
        model, wishes, told = self._model, staged.wishes, dict[str, Any]()
        assert isinstance(model, HiddenModel)
        if staged.reports:
            at, targets = (upload(numbers, self._device) for numbers in staged.told())
            most = max(each.alternatives for each in staged.reports)
            told["prompts"] = self._sampler.tell_targets(hidden.index_select(0, at), model.logits, targets, most)
        rows = hidden.index_select(0, packed.sample_at)
        if wishes is not None and wishes.embeds:
            told["hidden"] = rows.index_select(0, upload(wishes.embeds, self._device)).float()
        return model.logits(rows), told

    def _eager(self, staged: StagedStep, layers: LayerCaches) -> tuple[PackedStep, torch.Tensor]:
        """Upload a step and launch its kernels one by one; its inputs, and its logits [R, own_vocab_size].

        Of a step that reads hidden states, those [T, hidden]. Before the last stage of a pipeline, its stream
        [T, width].
        """
        batch, attention = self.memory.batch, self._attention
        packed = batch.enter(staged)
        sample_at = packed.sample_at if staged.num_sampled < staged.num_tokens and not staged.reads_hidden else None
        tables, metadata = batch.block_tables, attention.make_metadata(staged.segments)
        adapters = None
        if staged.adapted is not None:
            assert self.memory.adapters is not None
            tokens, rows = batch.adapters(staged)
            adapters = StepAdapters(self.memory.adapters.slots.layers, tokens, tokens if sample_at is None else rows)
        incoming = None if self._stage is None else self._stage.incoming
        step = StepInput(
            packed.ids,
            packed.positions,
            sample_at,
            packed.slot_mapping,
            tables,
            layers,
            attention,
            metadata,
            adapters,
            None if incoming is None else incoming[: staged.num_tokens],
        )
        if not staged.reads_hidden:
            return packed, self._model.forward(step)
        if not isinstance(self._model, HiddenModel):
            raise ValueError(f"hidden states are asked for, and {self._model.spec.architecture} gives none")
        return packed, self._model.hidden(step)


def _result(step: int, drawn: Drawn, staged: StagedStep | None, seconds: float) -> StepResult:
    """What a step gave, once all of it is on the host."""
    tokens = tuple(drawn.tokens.tolist())
    if staged is None:
        return StepResult(step, tokens, seconds)
    prompts = (PromptResult(drawn.of_prompts(staged.reports)),) if staged.reports else ()
    found = drawn.vectors(staged.wishes)
    vectors = (VectorResult(found),) if found else ()
    return StepResult(
        step,
        tokens,
        seconds,
        logprobs=drawn.told(staged.wishes),
        parts=(*prompts, *vectors),
    )


def _parts(launched: LaunchedTraining | None, forced: tuple[Forced, ...]) -> Iterator[PartResult]:
    """What a step's training and its grammars gave. Waits for the slice of training."""
    if launched is not None:
        yield launched.result()
    if forced:
        yield GrammarResult(forced)
