"""The paged executor: runs step plans through the model. Sampled tokens feed the next step on the device."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from holdfast.lm.execution.batch import PackedStep, StagedStep
from holdfast.lm.execution.capture_queue import Missed
from holdfast.lm.execution.paged_memory import PagedMemory
from holdfast.lm.execution.part import (
    EVERY_TOKEN,
    DrawnWork,
    DrawRules,
    Found,
    HiddenWork,
    Kind,
    Launched,
    PartExecutor,
    PartHooks,
)
from holdfast.lm.execution.stage_link import StageEnd
from holdfast.lm.kernels.attention.protocol import Attention
from holdfast.lm.kernels.collectives.protocol import Group
from holdfast.lm.kernels.sampling.sampler import Drawn, Sampler, Wishes
from holdfast.lm.models.base import HiddenModel, LayerCaches, Model, StepInput, StreamTaps
from holdfast.lm.types import PartResult, StepPlan, StepResult, TableWrite
from holdfast.lm.types.news import PartNews
from holdfast.lm.types.penalties import PenaltyPlan

QUERY_SECONDS = 2e-5
"""Seconds between two checks of a step in flight, in a wait that may end before the step does."""


class Work(NamedTuple):
    """The segments of a step, and the parts' work on them."""

    staged: StagedStep
    hidden: Sequence[HiddenWork]
    """Functions that compute results from hidden states. Empty for a step that needs logits only."""
    rules: DrawRules
    """Rules for the tokens that the step's rows may draw."""
    drawn: Sequence[DrawnWork] = ()
    """Functions that compute results once the tokens are drawn."""

    def masks(self) -> torch.Tensor | None:
        """Masks [M, W] int32, on the device, of rows that may draw only some tokens; None if there is no such row."""
        return self.rules.masks() if self.rules.restricts else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a step's segments."""

    drawn: Drawn
    wishes: Wishes | None = None
    """Results and rules that the sampled rows ask for besides a token; None if no row asks for any."""
    found: Sequence[Found] = ()
    """Results that parts computed from hidden states."""
    inputs: torch.Tensor | None = None
    """Tokens [R] after which the drawn ones come, if some of them were guessed on the device."""

    def on_host(self) -> Outcome:
        """A copy in the host's memory, complete once the work on the current stream is done."""
        inputs = None if self.inputs is None else Drawn(self.inputs).on_host().tokens
        return Outcome(self.drawn.on_host(), self.wishes, [each.on_host() for each in self.found], inputs)

    def drafts(self, plan: StepPlan) -> Sequence[Sequence[int]] | None:
        """The drafted tokens of each sampling segment, with those that were guessed on the device; None: no drafts."""
        if self.inputs is None or plan.samples is None:
            return plan.drafts
        inputs, stops = self.inputs.tolist(), accumulate(plan.samples)
        return [inputs[stop - most + 1 : stop] for most, stop in zip(plan.samples, stops, strict=True)]

    def result(self, step: int, seconds: float) -> StepResult:
        """The step's result, once all values are on the host."""
        return StepResult(
            step,
            tuple(self.drawn.tokens.tolist()),
            seconds,
            logprobs=self.drawn.told(self.wishes),
            parts=tuple([each.result() for each in self.found]),
        )


@dataclass(slots=True, eq=False)
class CudaFlight:
    """A step in flight on a GPU. Its tokens are in pinned memory once `done` has passed."""

    plan: StepPlan
    work: Work | None
    """The step's segments and the parts' work on them; None for a plan without segments."""
    began: torch.cuda.Event
    done: torch.cuda.Event
    """Event recorded after the segments, before the work of parts that follows them."""
    computed: tuple[PackedStep, torch.Tensor] | None = None
    """The step's inputs and its logits, until its tokens are drawn."""
    outcome: Outcome | None = None
    """The step's results; None until it is drawn."""
    followed: Sequence[Found] = ()
    """Results of parts that follow from the drawn tokens. They are complete when the next step is."""
    launched: Sequence[Launched] = ()
    """Work that parts launched after the segments."""
    missed: tuple[int, Missed] | None = None
    """The kind of the step, and the graph that it missed, if it ran as a larger one than it needed."""
    follows: Sequence[PartResult] = ()
    """Results that follow from the step's tokens."""
    error: Exception | None = None

    @property
    def rules(self) -> DrawRules:
        """Rules for the tokens that the step's rows may draw."""
        return EVERY_TOKEN if self.work is None else self.work.rules

    def finish(self) -> None:
        """Wait for the device, if the step has been drawn."""
        if self.error is None:
            self.done.synchronize()

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens that the step has drawn. Waits for the device. Raises RuntimeError before it is drawn."""
        outcome = self._drawn()
        self.done.synchronize()
        return tuple(outcome.drawn.tokens.tolist())

    def result(self) -> StepResult:
        if self.error is not None:
            raise self.error
        outcome = self._drawn()
        self.done.synchronize()
        seconds = self.began.elapsed_time(self.done) / 1000
        result = outcome.result(self.plan.step, seconds)
        result = result.with_parts(*[each.result() for each in self.launched], *self.follows)
        return verified(result, outcome.drafts(self.plan))

    def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.error is None and not self.done.query():  # type: ignore[no-untyped-call]
            if time.monotonic() >= deadline:
                return False
            time.sleep(QUERY_SECONDS)
        return True

    def _drawn(self) -> Outcome:
        if self.outcome is None:
            raise RuntimeError(f"step {self.plan.step} has not been drawn")
        return self.outcome


Flight = CudaFlight | Future[StepResult]
"""A step in flight. Its `result` waits for the step, and raises what the step raised."""


class InFlight(NamedTuple):
    """A step in flight, and what its collection needs."""

    work: Work | None
    waits: bool
    """Whether the step is complete only once its copies are."""
    flight: Flight


def verified(result: StepResult, drafts: Sequence[Sequence[int]] | None) -> StepResult:
    """The result of a step with these drafts. A stage before the last draws no token, and knows nothing of them."""
    return result if drafts is None or not result.tokens else result.verified(drafts)


class PagedExecutor:
    """`loop.contracts.Executor` for a model over a paged cache.

    On CUDA `submit` puts the step on the current stream and returns. On a CPU one worker thread runs the steps in
    order, while the caller plans the next one. Sampled tokens feed the next step on the device: a plan may ask for a
    token (`PENDING`) that the step before it has not yet given to the host.

    The tokens that a row may draw can depend on the tokens before it (`DrawRules`). On CUDA such a step is launched
    only up to its logits. While the device computes these, the host gets the tokens of the step before and computes the
    masks. Then the draw is launched. The oldest step in flight has always been drawn. In a pipeline all this happens on
    the last stage, whose host has a sequence's token before the next step with that sequence arrives.

    One thread submits. It may be a different thread that collects.
    """

    def __init__(
        self,
        model: Model,
        attention: Attention[Any],
        memory: PagedMemory,
        parts: Collection[PartExecutor] = (),
        *,
        group: Group | None = None,
        stage: StageEnd | None = None,
        taps: StreamTaps | None = None,
    ) -> None:
        """`parts` do their work in this order.

        `group` is the devices that share the model's layers, if there are several. `stage` links this device to the
        other stages, if it is in a pipeline. Tokens are sampled only on the last stage; results of other stages have
        none. `taps` are the layers whose inputs a part reads in the steps in which it asks for the drawn tokens.
        """
        self._taps = taps
        self._model, self._attention, self.memory, self._stage = model, attention, memory, stage
        self._draws = stage is None or stage.last
        self._sampler = Sampler(group, model.spec.vocab_size, alone=bool(model.spec.arithmetic))
        self._device = model.spec.device
        self._hooks = PartHooks(parts, (PenaltyPlan, *memory.batch.inputs.plans))
        self._followed: Sequence[Found] = ()
        """Results that follow from the tokens of the last step that was collected."""
        self._undrawn: CudaFlight | None = None
        """The newest step in flight, if its draw waits for tokens of earlier steps."""
        self._in_flight: deque[InFlight] = deque()
        self._launching = threading.Lock()
        """Held while draws are launched on a GPU, and while their rules are used for that."""
        self._late_writes: tuple[TableWrite, ...] = ()
        """Table writes of plans without segments. The next plan with segments applies them."""
        self._nothing = Outcome(Drawn(torch.empty(0, dtype=torch.int64, device=self._device)))
        self._worker = ThreadPoolExecutor(1, "holdfast-step") if self._device.type == "cpu" else None

    def submit(self, plan: StepPlan) -> None:
        """Start the step and return without waiting for it. Raises ValueError for a plan that the batch cannot hold."""
        if self._late_writes:
            plan, self._late_writes = replace(plan, table_writes=(*self._late_writes, *plan.table_writes)), ()
        if not plan.segments:
            self._late_writes = plan.table_writes
        if self.memory.host is not None:
            self.memory.host.note_step()
        work = self._stage_segments(plan) if plan.segments else None
        flight: Flight
        with self._launching:
            if self._worker is not None:
                flight = self._worker.submit(self._run_on_cpu, plan, work)
            else:
                flight = self._start_on_cuda(plan, work)
            self._in_flight.append(InFlight(work, not plan.computes, flight))

    def part(self, kind: type[Kind]) -> Kind:
        """The part of this class. Raises LookupError if there is none."""
        return self._hooks.part(kind)

    def learn(self, news: PartNews) -> None:
        """Let all parts learn news of the planner's side."""
        for part in self._hooks.parts:
            part.learn(news)

    def wait(self, seconds: float) -> bool:
        """Wait for the oldest step in flight, at most this long. Returns whether it has ended."""
        flight = self._in_flight[0].flight
        return bool(wait_for([flight], seconds).done) if isinstance(flight, Future) else flight.wait(seconds)

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight. Raises what that step raised."""
        flight = self._in_flight[0].flight
        if isinstance(flight, CudaFlight) and flight.rules.reads:
            flight.finish()  # outside the lock, so that other threads can submit
        with self._launching:
            work, waits, flight = self._in_flight.popleft()
            if isinstance(flight, CudaFlight):
                self._read(flight)
        result, memory = flight.result(), self.memory
        if isinstance(flight, CudaFlight):
            # The device computed them before this step.
            result = result.with_parts(*[each.result() for each in self._followed])
            self._followed = flight.followed
            if flight.missed is not None:
                kind, missed = flight.missed
                memory.graphs[kind].left.lost(missed, result.seconds)
        if work is not None:
            memory.batch.release(work.staged)
        if memory.transfers is not None:
            result = replace(result, copied=memory.transfers.completed(wait=waits))
        for part in self._hooks.completed:
            result = result.with_parts(*part.completed(wait=waits))
        return result

    def prepare(self) -> bool:
        """Use a pause to rehearse or capture one more graph, if no step is in flight. Returns whether it did."""
        memory = self.memory
        if not memory.graphs or self._in_flight:
            return False
        begun = [graphs for graphs in memory.graphs if graphs.left.rehearsed]
        by_padding = sorted(memory.graphs, key=lambda graphs: graphs.left.padding, reverse=True)
        # Other threads may not lock memory while a graph is captured.
        with ExitStack() as quiet:
            if memory.host is not None:
                quiet.enter_context(memory.host.pinning)
            for part in self._hooks.idle:
                quiet.enter_context(part.idle())
            with torch.inference_mode():
                return any(graphs.capture_next() for graphs in (*begun, *by_padding))

    @property
    def due(self) -> float:
        """`DeviceExecutor.due`. 0 while the host tier is being pinned, because no graph can be captured meanwhile."""
        memory = self.memory
        if memory.host is not None and memory.host.ready < memory.host.blocks:
            return 0.0
        due = [graphs.left.due for graphs in memory.graphs]
        begun = [graphs.left.due for graphs in memory.graphs if graphs.left.rehearsed]
        return max(begun or due, default=0.0)

    def close(self) -> None:
        """Stop the worker, or wait for the device, and unlock the host tier. Steps in flight are abandoned."""
        self._in_flight.clear()
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
        elif self.memory.host is not None:
            torch.cuda.synchronize(self._device)
            self.memory.host.close()
        for part in self._hooks.close:
            part.close()

    def _stage_segments(self, plan: StepPlan) -> Work:
        """Pack a plan's segments, and collect the parts' work on them."""
        staged = self.memory.batch.stage(plan)
        hidden: list[HiddenWork] = []
        if plan.parts or staged.wishes is not None:
            for part in self._hooks.hidden:
                hidden += part.hidden(staged)
        rules = EVERY_TOKEN
        if staged.masked and self._draws:
            if not self._hooks.rules:
                raise ValueError(f"step {plan.step} has a row with a grammar, and no part of this executor has rules")
            rules = self._hooks.rules[0].rules(staged)
        drawn: list[DrawnWork] = []
        if self._draws:
            for part in self._hooks.follow:
                drawn += part.follow(staged)
        return Work(staged, hidden, rules, drawn)

    def _begin(self, plan: StepPlan) -> LayerCaches:
        """Begin a plan and return the caches to compute it on. Raises ValueError for a part that nothing reads."""
        if plan.parts:
            self._hooks.check(plan)
        for part in self._hooks.before:
            part.before(plan)
        memory = self.memory
        return memory.layers if memory.transfers is None else memory.transfers.begin(plan)

    def _after(self, plan: StepPlan) -> Sequence[Launched]:
        """Launch the parts' work that comes after a plan's segments."""
        launched: list[Launched] = []
        for part in self._hooks.after:
            launched += part.after(plan)
        return launched

    def _run_on_cpu(self, plan: StepPlan, work: Work | None) -> StepResult:
        began = time.perf_counter()
        layers = self._begin(plan)
        if self._stage is not None and work is not None:
            self._stage.enter(work.staged, self.memory.batch.last_token)
            began = time.perf_counter()  # the time that a stage waits for others is not part of the step's time
        outcome, followed = self._nothing, list[Found]()
        follows: Sequence[PartResult] = ()
        if work is not None:
            packed, given = self._forward(work, layers)
            outcome = self._draw(work, packed, given, work.masks())
            followed = self._followed_by(work, packed, outcome)
        result = outcome.result(plan.step, 0.0)
        if work is not None and work.rules.reads:
            work.rules.drawn(result)
            work.rules.read()
            follows = work.rules.results()
        seconds = time.perf_counter() - began
        launched = self._after(plan)
        parts = [each.result() for each in (*launched, *followed)]
        return verified(replace(result, seconds=seconds).with_parts(*parts, *follows), outcome.drafts(plan))

    def _start_on_cuda(self, plan: StepPlan, work: Work | None) -> Flight:
        self._draw_late()
        began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        flight = CudaFlight(plan, work, began, done)
        try:
            began.record()
            layers = self._begin(plan)
            if self._stage is not None and work is not None:
                self._stage.enter(work.staged, self.memory.batch.last_token)
                began.record()
            if work is not None:
                flight.computed = self._forward(work, layers)
                flight.missed = self._missed(work)
            if flight.rules.waits:
                self._undrawn = flight
            else:
                self._complete(flight)
        except Exception as error:
            flight.error = error
        return flight

    def _draw_late(self) -> None:
        """Launch the rest of the newest step in flight, if its draw waits."""
        flight, self._undrawn = self._undrawn, None
        if flight is not None:
            try:
                self._complete(flight)
            except Exception as error:
                flight.error = error

    def _complete(self, flight: CudaFlight) -> None:
        """Launch a step's draw, and then the work of its parts."""
        work, computed, outcome = flight.work, flight.computed, self._nothing
        if work is not None and computed is not None:
            outcome = self._draw(work, *computed, work.masks())
            if work.rules.reads:
                work.rules.drawn(flight)
        flight.computed, flight.outcome = None, outcome.on_host()
        flight.done.record()  # the host does not wait for what follows from the tokens
        if work is not None and computed is not None:
            flight.followed = [each.on_host() for each in self._followed_by(work, computed[0], outcome)]
        flight.launched = self._after(flight.plan)

    def _read(self, flight: CudaFlight) -> None:
        """Read the tokens of the oldest step in flight. Then draw the next step, if it waits for them."""
        rules = flight.rules
        if rules.reads:
            rules.read()
        if self._undrawn is not None and self._in_flight[0].flight is self._undrawn:
            self._draw_late()
        if rules.reads and flight.error is None:
            flight.follows = rules.results()

    @torch.inference_mode()
    def _forward(self, work: Work, layers: LayerCaches) -> tuple[PackedStep, torch.Tensor]:
        """Run one step on the device up to its logits [R, own_vocab_size]. Returns its inputs and the logits.

        Before the last stage of a pipeline, the stream [T, width] takes the place of the logits. Both are valid until
        the next step is run.
        """
        graphs, staged = self.memory.graphs, work.staged
        # A graph cannot wait, layer by layer, for blocks that are swapping in.
        swapping_in = layers is not self.memory.layers
        captured = graphs and not swapping_in and not work.hidden
        started = graphs[staged.kind].run(staged) if captured else None
        return started or self._eager(work, layers)

    def _missed(self, work: Work) -> tuple[int, Missed] | None:
        """The kind of the step that was just launched, and the graph that it missed; None if it missed none."""
        kind, graphs = work.staged.kind, self.memory.graphs
        missed = graphs[kind].take_missed() if graphs else None
        return None if missed is None else (kind, missed)

    @torch.inference_mode()
    def _draw(self, work: Work, packed: PackedStep, given: torch.Tensor, masks: torch.Tensor | None) -> Outcome:
        """Sample the tokens [R] of a step's rows. They also become the last tokens of their rows.

        Before the last stage of a pipeline, no tokens are drawn.
        """
        stage, staged, outcome = self._stage, work.staged, self._nothing
        if self._draws:
            found: Sequence[Found] = ()
            if work.hidden:
                given, found = self._read_hidden(work, packed, given)
            kinds = {"any_random": staged.any_random, "any_filtered": staged.any_filtered}
            last = None if staged.wishes is None else packed.ids.index_select(0, packed.sample_at)
            drawn = self._sampler.draw(given, packed.columns, staged.wishes, **kinds, last=last, masks=masks)
            inputs = packed.ids.index_select(0, packed.sample_at) if staged.has_guessed else None
            outcome, given = Outcome(drawn, staged.wishes, found, inputs), drawn.tokens
            self.memory.batch.last_token.index_copy_(0, packed.sample_rows, given)
        if stage is not None:
            stage.leave(staged, packed.sample_rows, given)
        return outcome

    @torch.inference_mode()
    def _followed_by(self, work: Work, packed: PackedStep, outcome: Outcome) -> list[Found]:
        """Launch the parts' work that follows from a step's tokens."""
        return [each(packed, outcome.drawn.tokens) for each in work.drawn]

    def _read_hidden(
        self, work: Work, packed: PackedStep, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, Sequence[Found]]:
        """Logits of sampled rows, and the parts' results, from a step's hidden states [T, hidden]."""
        rows = hidden.index_select(0, packed.sample_at)
        found = [each(hidden, rows) for each in work.hidden]
        return self._hidden_model.logits(rows), found

    def _eager(self, work: Work, layers: LayerCaches) -> tuple[PackedStep, torch.Tensor]:
        """Upload a step and launch its kernels one by one. Returns its inputs and its logits [R, own_vocab_size].

        For a step that reads hidden states, the result has these [T, hidden] in place of the logits. Before the last
        stage of a pipeline, it has the stream [T, width].
        """
        batch, attention, staged = self.memory.batch, self._attention, work.staged
        packed = batch.enter(staged)
        some = staged.num_sampled < staged.num_tokens and not work.hidden
        tables, metadata = batch.block_tables, attention.make_metadata(staged.segments)
        incoming = None if self._stage is None else self._stage.incoming
        step = StepInput(
            packed.ids,
            packed.positions,
            packed.sample_at if some else None,
            packed.slot_mapping,
            tables,
            layers,
            attention,
            metadata,
            batch.more(staged, staged.num_sampled if some else None),
            None if incoming is None else incoming[: staged.num_tokens],
            self.memory.states.step(staged.segments),
            self._taps if work.drawn else None,
        )
        return packed, self._hidden_model.hidden(step) if work.hidden else self._model.forward(step)

    @property
    def _hidden_model(self) -> HiddenModel:
        """The model, if it gives hidden states. Raises ValueError if it does not."""
        if not isinstance(self._model, HiddenModel):
            raise ValueError(f"hidden states are asked for, and {self._model.spec.architecture} gives none")
        return self._model
