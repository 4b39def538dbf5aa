"""PaddedExecutor: runs step plans through an unmodified model, forward by forward."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch

from holdfast.core.types import TokenLogprobs
from holdfast.lm.kernels.sampling.sampler import Drawn, Sampler, Wishes
from holdfast.lm.kernels.upload import upload
from holdfast.lm.padded.decode_graphs import DecodeGraphs
from holdfast.lm.padded.driver import Driver, Inputs
from holdfast.lm.padded.host_rows import HostRows, LoadingState
from holdfast.lm.padded.row_parts import DrawnRows, RowRules, RowWork
from holdfast.lm.padded.running_rows import RunningRows
from holdfast.lm.padded.shaping import left_padded
from holdfast.lm.padded.state_layout import State
from holdfast.lm.types import (
    PENDING,
    SAMPLING_COLUMNS,
    Abilities,
    Forward,
    History,
    RowMove,
    RowPlan,
    RowResult,
    Sampling,
    Segment,
    StepPlan,
    StepResult,
)
from holdfast.lm.types.penalties import PenaltyPlan

OUT_OF_CPU_MEMORY = "DefaultCPUAllocator"
"""Part of PyTorch's message when the host has no memory for a tensor. That error has no type of its own."""

MOST_SOURCES = 1 << 16
"""Number of sequences whose prompt lengths are remembered for an encoder-decoder."""


@dataclass(slots=True)
class _Apart:
    """A state outside the batch: of a prompt, or of a row that came back from a slot."""

    length: int
    state: State | None
    """None while it is `loading`. For a model that gives no state out, the tokens [1, length]."""
    loading: LoadingState | None = None
    written: Any = None
    """The CUDA event after the work that wrote the state and the row's last token, if there are two streams."""
    stream: Any = None
    """The stream of that work; None: the batch's stream."""


@dataclass(slots=True)
class _Outcome:
    """The results of the forwards of one plan so far."""

    drawn: list[tuple[Drawn, Wishes | None]] = field(default_factory=list)
    """Drawn tokens in plan order. They are on the host once the step is complete."""
    counts: list[int] = field(default_factory=list)
    """Number of tokens that each sampling segment draws."""
    lost: list[str] = field(default_factory=list)
    ends: list[Any] = field(default_factory=list)
    """CUDA events after which all tokens are on the host."""

    def result(self, step: int, seconds: float) -> StepResult:
        """The result, once the tokens are on the host."""
        tokens = tuple(token for drawn, _ in self.drawn for token in drawn.tokens.tolist())
        logprobs: tuple[TokenLogprobs | None, ...] = ()
        if any(wishes is not None for _, wishes in self.drawn):
            logprobs = tuple(
                each for drawn, wishes in self.drawn for each in (drawn.told(wishes) or (None,) * len(drawn.tokens))
            )
        return StepResult(
            step,
            tokens,
            seconds,
            counts=tuple(self.counts),
            logprobs=logprobs,
            parts=(RowResult(tuple(self.lost)),) if self.lost else (),
        )


@dataclass(frozen=True, slots=True)
class _CudaFlight:
    """A step in flight on a GPU. Its tokens are in pinned memory once all `outcome.ends` have passed."""

    step: int
    outcome: _Outcome
    began: torch.cuda.Event

    def result(self) -> StepResult:
        seconds = 0.0
        for end in self.outcome.ends:
            end.synchronize()
            seconds = max(seconds, self.began.elapsed_time(end) / 1000)
        return self.outcome.result(self.step, seconds)


class PaddedExecutor:
    """`loop.contracts.Executor` for a model of Transformers, unmodified, on padded rows.

    The moves and forwards of a plan (`RowPlan.moves`, `RowPlan.forwards`) run in the plan's order; forwards apart
    may run on a second stream next to those of the batch. On CUDA `submit` returns once the work is launched. On a CPU
    one worker thread runs the steps in order. Sampled tokens feed the next forward on the device (`PENDING`).

    If the model lacks an ability, a forward is run in parts, at worst one row at a time, with the same tokens.

    Where memory runs out in a forward, the states of that forward are dropped. `RowResult.lost` names its sequences
    and `counts` says that they gave no token. Segments of a lost sequence in later plans compute nothing, until one
    starts at 0.
    """

    def __init__(
        self,
        driver: Driver,
        abilities: Abilities,
        rows: RunningRows,
        host: HostRows | None,
        *,
        second_stream: bool = True,
        graphs: DecodeGraphs | None = None,
        rules: Sequence[RowRules] = (),
        work: Sequence[RowWork] = (),
    ) -> None:
        """`second_stream` False runs all forwards on one stream, also on a GPU.

        `rules` restrict the draws of rows with grammars: those of one part at most. `work` is that of other parts.

        `graphs` runs the decodes that fit into its memory. Without it each decode is launched kernel by kernel.
        """
        self.driver, self.abilities, self.rows, self.host = driver, abilities, rows, host
        self.graphs = graphs
        self._rules, self._work = rules, work
        self._histories: dict[int, tuple[int, ...]] = {}
        """Known tokens, by row, of the current plan's rows whose draws depend on them."""
        self._layout, self._device = rows.layout, rows.device
        self._together = abilities.batched_decode and abilities.keeps_state and rows.layout.batches
        """Whether rows share a state. If not, each has its own in `_apart`, and the rows of the batch are in `_joined`.
        """
        self._joined: set[int] = set()
        self._apart: dict[int, _Apart] = {}
        self._slots: dict[int, tuple[State, int]] = {}
        """States kept on the device, with their lengths, by slot."""
        self._names: dict[int, str] = {}
        """Id of the sequence that computed the state of each row."""
        self._lost: dict[int, bool] = {}
        """Rows whose state is gone for lack of memory; whether `RowResult.lost` has said so."""
        self._sources: dict[str, int] | None = {} if driver.model.is_encoder_decoder else None
        """For an encoder-decoder, the number of prompt tokens by sequence id; None for other models. A sequence's first
        segment from 0 has exactly its prompt. No two sequences may have one id, also later.
        """
        self._lost_slots: dict[int, bool] = {}
        """Slots whose state was lost for lack of memory, and whether `StepResult.lost` has reported it."""
        self._in_flight: deque[Future[StepResult] | _CudaFlight] = deque()
        on_cpu = self._device.type == "cpu"
        self._worker = ThreadPoolExecutor(1, "holdfast-step") if on_cpu else None
        self._second: Any = torch.cuda.Stream(self._device) if second_stream and not on_cpu else None  # type: ignore[no-untyped-call]

    def submit(self, plan: StepPlan) -> None:
        """Start the step and return without waiting for it. Raises ValueError for a plan that it cannot run.

        A plan with segments has `forwards`. The last forward's `stop` is the number of segments.
        """
        self._check(plan)
        if self._worker is not None:
            self._in_flight.append(self._worker.submit(self._run_on_cpu, plan))
            return
        try:
            flight: Future[StepResult] | _CudaFlight = self._start_on_cuda(plan)
        except Exception as error:
            flight = Future()
            flight.set_exception(error)
        self._in_flight.append(flight)

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight. Raises what that step raised, except for lack of memory."""
        flight = self._in_flight.popleft()
        result = flight.result()
        if isinstance(flight, _CudaFlight):
            result = self._with_copies(result, wait=not flight.outcome.counts)
        return result

    def prepare(self) -> bool:
        """Use a pause to capture one more graph. Returns whether it did; never while a step is in flight."""
        return self.graphs is not None and not self._in_flight and self.graphs.prepare()

    @property
    def due(self) -> float:
        """0: a shape that is decoded for the second time is captured at once, so none waits for a pause."""
        return 0.0

    def close(self) -> None:
        """Stop the worker, or wait for the device, and give back the host memory. Steps in flight are abandoned."""
        self._in_flight.clear()
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
        else:
            torch.cuda.synchronize(self._device)
        self.clear()
        for work in self._work:
            work.close()
        self.graphs = None

    def clear(self) -> None:
        """Give up every state, on the device and on the host, as before the first plan. No step may be in flight."""
        if self.host is not None:
            self.host.close()
        self.rows.clear()
        for each in (self._apart, self._joined, self._slots, self._names, self._lost, self._lost_slots):
            each.clear()
        if self._sources is not None:
            self._sources.clear()

    def _check(self, plan: StepPlan) -> None:
        """Raise ValueError for forwards that do not cover the segments, or for rows out of range."""
        rows_plan = plan.part(RowPlan)
        stops = [0, *(each.stop for each in rows_plan.forwards)]
        if stops[-1] != len(plan.segments) or any(stop < start for start, stop in pairwise(stops)):
            raise ValueError(f"step {plan.step} has {len(plan.segments)} segments and its forwards stop at {stops[1:]}")
        most = len(self.rows.last_token)
        rows = [*plan.columns.column("row"), *(each.row for each in rows_plan.moves if each.row != -1)]
        if wrong := [row for row in rows if not 0 <= row < most]:
            raise ValueError(f"step {plan.step} names the rows {wrong}; there are {most}")
        ends = [len(rows_plan.forwards), *(each.before for each in reversed(rows_plan.moves)), 0]
        if any(before < after for before, after in pairwise(ends)):
            raise ValueError(f"step {plan.step} has moves out of the order of its {len(rows_plan.forwards)} forwards")

    def _run_on_cpu(self, plan: StepPlan) -> StepResult:
        began, outcome = time.perf_counter(), _Outcome()
        self._run(plan, outcome)
        result = outcome.result(plan.step, time.perf_counter() - began)
        return self._with_copies(result, wait=not outcome.counts)

    def _start_on_cuda(self, plan: StepPlan) -> _CudaFlight:
        outcome = _Outcome()
        began = self._event()
        self._run(plan, outcome)
        outcome.ends.append(self._event())
        return _CudaFlight(plan.step, outcome, began)

    def _with_copies(self, result: StepResult, *, wait: bool) -> StepResult:
        """The result with the completed copies to and from the host, and other work of parts."""
        for work in self._work:
            result = result.with_parts(*work.completed(wait=wait))
        if self.host is None:
            return result
        return replace(result, copied=self.host.completed(result.step, wait=wait))

    @torch.inference_mode()
    def _run(self, plan: StepPlan, outcome: _Outcome) -> None:
        """Do a plan's moves and forwards, in order."""
        rows_plan = plan.part(RowPlan)
        segments, moves, start = list(plan.segments), deque(rows_plan.moves), 0
        self._histories = {each.row: each.tokens for each in plan.part(PenaltyPlan).histories}
        for rules in self._rules:
            rules.begin(plan)
        for work in self._work:
            work.before(plan)
        began = self._event() if self._second is not None else None
        for index, forward in enumerate(rows_plan.forwards):
            self._move_all(plan.step, index, moves)
            own, start = segments[start : forward.stop], forward.stop
            present = [segment for segment in own if self._is_present(segment, outcome)]
            affected = [segment.row for segment in present]
            if not forward.apart:
                affected += [row for row in self.rows.rows if row not in affected]
            if (present or not forward.apart) and not self._fits(
                partial(self._forward, forward, present, began, outcome)
            ):
                self._lose(affected, outcome)
                present = []
            computed = {(segment.row, segment.start) for segment in present}
            outcome.counts += [int((each.row, each.start) in computed) for each in own if each.sampling is not None]
        self._move_all(plan.step, len(rows_plan.forwards), moves)

    # Moves

    def _move_all(self, step: int, before: int, moves: deque[RowMove]) -> None:
        """Do the moves that come before forward `before`. Consecutive drops are done as one."""
        now = []
        while moves and moves[0].before == before:
            now.append(moves.popleft())
        for dropping, group in groupby(now, lambda move: move.kind == "drop"):
            if dropping:
                self._drop([move.row for move in group])
            else:
                for move in group:
                    self._move(step, move)

    def _move(self, step: int, move: RowMove) -> None:
        """Do a move. If memory runs out, the states that it touches are lost."""
        row, slot = move.row, move.slot
        match move.kind:
            case "embed" if row not in self._lost:
                touched = [*self.rows.rows, row]
                if not self._fits(lambda: self._embed(move)):
                    self._lose(touched)
            case "keep" | "store":
                self._lost_slots.pop(slot, None)
                if row not in self._lost and not self._fits(lambda: self._keep(step, move)):
                    if not self._fits(lambda: self._drop([row])):  # the batch is unchanged; without the row it is right
                        self._lose(self.rows.rows)
                    self._lose([row])
                if row in self._lost:
                    self._lost_slots[slot] = self._lost.pop(row)
                self._names.pop(row, None)
            case "offload" if slot not in self._lost_slots:
                state, length = self._slot(slot)
                if self.abilities.keeps_state:  # a model without a state has only tokens, which stay where they are
                    del self._slots[slot]
                    self._to_host(slot, state, length, step)
            case "copy" if move.source not in self._lost_slots:
                self._to_host(slot, self._slot(move.source)[0], move.length, step)
            case "load":
                self._lost.pop(row, None)
                if row in self._apart or self.rows.place(row) is not None:
                    raise ValueError(f"{move}: the row has a state already")
                if slot in self._lost_slots:
                    self._lost[row] = self._lost_slots[slot]
                elif not self._fits(lambda: self._load(step, move)):
                    self._lose([row])
            case "forget":
                self._lost_slots.pop(slot, None)
                self._slots.pop(slot, None)
                if self.host is not None:
                    self.host.forget(slot)
            case _:  # a row or slot whose state is lost
                pass

    def _embed(self, move: RowMove) -> None:
        apart = self._state_apart(move.row, move.length)
        if self._together:
            del self._apart[move.row]
            self.rows.embed(move.row, self._enter(apart), apart.length)
        else:
            self._joined.add(move.row)

    def _drop(self, rows: Sequence[int]) -> None:
        """Give up the states of rows, in the batch or apart."""
        together = [row for row in rows if self.rows.place(row) is not None]
        if together:
            self.rows.drop(*together)
        for row in rows:
            self._joined.discard(row)
            self._names.pop(row, None)
            apart = self._apart.pop(row, None)
            if apart is not None:
                self._enter(apart)  # the next user of the row or memory must come after the work that still uses it
            elif self._lost.pop(row, None) is None and row not in together:
                raise ValueError(f"row {row} is dropped and has no state")

    def _keep(self, step: int, move: RowMove) -> None:
        """Take a row's state, in the batch or outside it, and put it into a slot."""
        state, length = self._leave(move)
        if move.length < length:
            state = self._cut(state, move.length)
        if move.kind == "store" and self.abilities.keeps_state:
            self._to_host(move.slot, state, move.length, step)
        else:
            self._slots[move.slot] = (state, move.length)

    def _leave(self, move: RowMove) -> tuple[State, int]:
        """Take the state of a row, which is then empty. Returns the state and its length."""
        row, place = move.row, self.rows.place(move.row)
        if place is None and row not in self._apart:
            raise ValueError(f"{move}: the row has no state")
        length = self._apart[row].length if place is None else self.rows.lengths[place]
        if not 0 < move.length <= length:
            raise ValueError(f"{move}: the state has {length} positions")
        if place is None:
            self._joined.discard(row)
            return self._enter(self._apart.pop(row)), length
        state = self.rows.extract(row)
        self.rows.drop(row)
        return state, length

    def _cut(self, state: State, length: int) -> State:
        """The first `length` positions of a state of one row."""
        return self._layout.cut(state, length) if self.abilities.keeps_state else state[:, :length]

    def _slot(self, slot: int) -> tuple[State, int]:
        """A state that is kept on the device, and its length."""
        if slot not in self._slots:
            raise ValueError(f"slot {slot} has no state on the device")
        return self._slots[slot]

    def _to_host(self, slot: int, state: State, length: int, step: int) -> None:
        if self.host is None:
            raise ValueError(f"slot {slot} is to be stored on the host, which has no memory for states")
        self.host.store(slot, state, length, step)

    def _load(self, step: int, move: RowMove) -> None:
        """Copy a slot's state to a row, from the device or from the host."""
        if self.host is not None and move.slot in self.host:
            self._apart[move.row] = _Apart(move.length, None, self.host.load(move.slot, move.length, step))
            return
        state, length = self._slot(move.slot)
        if not 0 < move.length <= length:
            raise ValueError(f"{move}: the state has {length} positions")
        state = self._layout.copy(state) if self.abilities.keeps_state else state
        if move.length < length:
            state = self._cut(state, move.length)
        written = self._event() if self._second is not None else None
        self._apart[move.row] = _Apart(move.length, state, written=written)

    # Forwards

    def _is_present(self, segment: Segment, outcome: _Outcome) -> bool:
        """Whether the state that a segment continues is there. If it is lost, the result reports it once."""
        row = segment.row
        if row in self._lost:
            if segment.start:
                if not self._lost[row]:
                    outcome.lost.append(segment.sequence_id)
                    self._lost[row] = True
                return False
            del self._lost[row]
        place = self.rows.place(row)
        length = self._apart[row].length if row in self._apart else 0 if place is None else self.rows.lengths[place]
        if segment.start != length:
            raise ValueError(f"{segment.sequence_id} computes from {segment.start}, and row {row} has {length}")
        self._names[row] = segment.sequence_id
        if self._sources is not None and not segment.start:
            self._sources.setdefault(segment.sequence_id, segment.length)
            if len(self._sources) > MOST_SOURCES:
                del self._sources[next(iter(self._sources))]
        return True

    def _source(self, segment: Segment) -> int:
        """Number of prompt tokens in an encoder-decoder's segment that computes a prompt and tokens after it, else 0.

        The encoder reads the prompt alone, so such a segment takes two forwards.
        """
        if self._sources is None or segment.start:
            return 0
        source = self._sources[segment.sequence_id]
        return source if source < segment.length else 0

    def _forward(self, forward: Forward, segments: Sequence[Segment], began: Any, outcome: _Outcome) -> None:
        """Run a forward over those of its segments whose state is there, and record the tokens."""
        if forward.apart:
            with self._on_second_stream(began, outcome):
                outcome.drawn.append(self._compute_apart(segments))
                self._mark_written(segments)
        else:
            ended = [row for row in forward.ended if row not in self._lost]
            outcome.drawn.append(self._compute_batch(segments, ended))
            self._mark_written(segments)

    def _compute_batch(self, segments: Sequence[Segment], ended: Sequence[int]) -> tuple[Drawn, Wishes | None]:
        """Run a forward of the batch. Returns the tokens of its sampling segments."""
        if not self._together:
            alone = [self._compute_alone(segment) for segment in segments]
            self._joined.update(segment.row for segment in segments)
            return self._draw(torch.cat(alone) if alone else None, segments)
        rows = self.rows
        joining = [each for each in segments if rows.place(each.row) is None]
        running = [each for each in segments if rows.place(each.row) is not None]
        if wrong := [each.row for each in joining if each.row in self._apart or each.start]:
            raise ValueError(f"rows {wrong} have states apart, and a forward of the batch computes them")
        if {*(each.row for each in running), *ended} != {*rows.rows} or any(each.length != 1 for each in running):
            computed = [each.row for each in segments]
            raise ValueError(f"a forward of the batch of rows {rows.rows} computes {computed} and ended {list(ended)}")
        known = [each for each in running if each.tokens[0] != PENDING]
        if known:
            rows.set_last([each.row for each in known], [each.tokens[0] for each in known])
        if joining and not self._joins(joining, bool(rows.rows)):
            return self._join_in_parts(segments, running, joining)
        newcomers = [(each.row, each.tokens) for each in joining]
        if not newcomers and not rows.rows:
            return self._draw(None, ())
        if newcomers:
            inputs = rows.shaped_inputs(newcomers)
            state, rows.state = rows.state, None
            logits, state = self._call([*rows.rows, *(row for row, _ in newcomers)], inputs, state)
            rows.advance(state, newcomers)
        else:
            logits = self._decode()
        return self._draw(logits, segments, [rows.place(each.row) for each in segments])

    def _decode(self) -> torch.Tensor:
        """Decode every row of the batch once. Returns the logits [B, vocab_size]."""
        rows = self.rows
        plain = not any(work.changes(rows.rows) for work in self._work)  # a graph has no adapter
        if plain and self.graphs is not None and (logits := self.graphs.decode(rows)) is not None:
            return logits
        inputs = rows.decode_inputs()
        state, rows.state = rows.state, None
        logits, state = self._call(rows.rows, inputs, state)
        rows.advance(state)
        return logits

    def _call(self, rows: Sequence[int], inputs: Inputs, state: State | None) -> tuple[torch.Tensor, State | None]:
        """Run the model on these rows, in their order in the inputs, with the work of parts around it."""
        with ExitStack() as around:
            for work in self._work:
                around.enter_context(work.forward(rows))
            return self.driver.forward(inputs, state)

    def _joins(self, joining: Sequence[Segment], decoding: bool) -> bool:
        """Whether one forward can compute these prompts, together with decodes if `decoding`."""
        if (decoding and not self.abilities.shaping) or any(map(self._source, joining)):
            return False
        return self.abilities.left_padding or len({each.length for each in joining}) == 1

    def _join_in_parts(
        self, segments: Sequence[Segment], running: Sequence[Segment], joining: Sequence[Segment]
    ) -> tuple[Drawn, Wishes | None]:
        """Decode the running rows, compute the prompts outside the batch, and embed them.

        Replaces shaping if a model lacks it.
        """
        by_row: dict[int, torch.Tensor] = {}
        if self.rows.rows:
            logits = self._decode()
            by_row = {row: logits[place] for place, row in enumerate(self.rows.rows)}
        for group in self._groups(joining):
            for segment, logits in zip(group, self._compute_group(group), strict=True):
                by_row[segment.row] = logits
        for segment in joining:
            apart = self._apart.pop(segment.row)
            self.rows.embed(segment.row, apart.state, apart.length)
        return self._draw(torch.stack([by_row[each.row] for each in segments]), segments)

    def _compute_apart(self, segments: Sequence[Segment]) -> tuple[Drawn, Wishes | None]:
        """Run a forward outside the batch: a chunk of one prompt, or whole prompts. Returns its sampled tokens."""
        if wrong := [
            each.row for each in segments if self.rows.place(each.row) is not None or each.row in self._joined
        ]:
            raise ValueError(f"rows {wrong} are in the batch, and a forward apart computes them")
        if not self._together or len(segments) == 1:
            return self._draw(torch.cat([self._compute_alone(each) for each in segments]), segments)
        if later := [each.sequence_id for each in segments if each.start]:
            raise ValueError(f"{later} continue their prompts in a group of {len(segments)}")
        by_row: dict[int, torch.Tensor] = {}
        for group in self._groups(segments):
            by_row |= {each.row: row for each, row in zip(group, self._compute_group(group), strict=True)}
        return self._draw(torch.stack([by_row[each.row] for each in segments]), segments)

    def _groups(self, segments: Sequence[Segment]) -> list[list[Segment]]:
        """Groups of prompts that one forward can compute: all of them, or those of equal length."""
        parted = [[segment] for segment in segments if self._source(segment)]
        whole = [segment for segment in segments if not self._source(segment)]
        if self.abilities.left_padding:
            return [*([whole] if whole else []), *parted]
        by_length: dict[int, list[Segment]] = defaultdict(list)
        for segment in whole:
            by_length[segment.length].append(segment)
        return [*by_length.values(), *parted]

    def _compute_group(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Compute whole prompts in one forward, each to a state outside the batch. Returns logits [n, vocab_size]."""
        if self._source(segments[0]):
            return self._compute_alone(segments[0])
        inputs = left_padded([each.tokens for each in segments], self._device)
        logits, state = self._call([each.row for each in segments], inputs, None)
        alone = len(segments) == 1
        for index, segment in enumerate(segments):
            own = state if alone else self._layout.extract(state, index, segment.length)
            self._apart[segment.row] = _Apart(segment.length, own)
        return logits

    def _compute_alone(self, segment: Segment) -> torch.Tensor:
        """Compute one row alone, from its state outside the batch. Returns the logits [1, vocab_size]."""
        ids, row = self._ids(segment), [segment.row]
        before = self._apart.pop(segment.row, None)
        state = None if before is None else self._enter(before)
        if not self.abilities.keeps_state:
            whole = ids if state is None else torch.cat((state, ids), 1)
            logits, _ = self._call(row, self.driver.inputs(whole), None)
            state = whole
        elif source := self._source(segment):
            _, state = self._call(row, self.driver.inputs(ids[:, :source]), None)
            logits, state = self._call(row, self.driver.inputs(ids[:, source:], source), state)
        elif segment.start and segment.length > 1 and not self.abilities.chunks:
            for at in range(segment.length):  # a second forward of many tokens would forget the first
                inputs = self.driver.inputs(ids[:, at : at + 1], segment.start + at)
                logits, state = self._call(row, inputs, state)
        else:
            logits, state = self._call(row, self.driver.inputs(ids, segment.start), state)
        self._apart[segment.row] = _Apart(segment.stop, state)
        return logits

    def _ids(self, segment: Segment) -> torch.Tensor:
        """The tokens of a segment [1, q] on the device.

        A first token that is PENDING is the one that its row sampled last.
        """
        if segment.tokens[0] != PENDING:
            return upload(segment.tokens, self._device)[None]
        last = self.rows.last_token[segment.row : segment.row + 1]
        if segment.length == 1:
            return last.clone()[None]
        return torch.cat((last, upload(segment.tokens[1:], self._device)))[None]

    # Tokens

    def _draw(
        self, logits: torch.Tensor | None, segments: Sequence[Segment], at: Sequence[int | None] | None = None
    ) -> tuple[Drawn, Wishes | None]:
        """Sample after the segments that ask for it. The tokens also become the last ones of their rows.

        logits [n, vocab_size] has a row for each segment, or the rows `at`. The tokens are on the host once the work on
        the current stream is done.
        """
        sampled = [index for index, segment in enumerate(segments) if segment.sampling is not None]
        if logits is None or not sampled:
            return Drawn(torch.empty(0, dtype=torch.int64)), None
        places = sampled if at is None else [at[index] for index in sampled]
        drawn = [segments[index] for index in sampled]
        numbers = upload([*(each.row for each in drawn), *places], self._device).view(2, -1)
        if places != list(range(len(logits))):
            logits = logits.index_select(0, numbers[1])
        asked = [each.sampling for each in drawn if each.sampling is not None]
        histories = [History(at, self._histories[each.row]) for at, each in enumerate(drawn) if asked[at].counts]
        wishes = Wishes.of(asked, range(len(drawn)), [each.stop for each in drawn], histories)
        last = None
        if histories:
            last = upload([each.tokens[-1] for each in drawn], self._device)
            last = torch.where(last == PENDING, self.rows.last_token.index_select(0, numbers[0]), last)
        masked = wishes is not None and wishes.masked
        restrictions = [rules.of(drawn) for rules in self._rules] if masked else []
        masks = next((each.masks() for each in restrictions), None)
        # A new sampler each time: nothing on the device outlives this draw, which may be on either stream.
        given = Sampler().draw(logits, wishes=wishes, **self._settings(drawn, asked), last=last, masks=masks)
        self.rows.last_token.index_copy_(0, numbers[0], given.tokens)
        found = given.on_host()
        for restriction in restrictions:
            restriction.drawn(DrawnRows(found.tokens, self._event() if self._device.type == "cuda" else None))
        return found, wishes

    def _settings(self, segments: Sequence[Segment], asked: Sequence[Sampling]) -> dict[str, Any]:
        """Keywords of `Sampler.draw` that say how to draw a token after each of these segments."""
        any_random = any(each.temperature > 0 for each in asked)
        if not any_random:
            unread = torch.empty(0)
            columns = dict.fromkeys((*SAMPLING_COLUMNS, "position"), unread)
            return {"columns": columns, "any_random": False, "any_filtered": False}
        floats = upload(np.array([(each.temperature, each.top_p) for each in asked], np.float32).T.copy(), self._device)
        whole = [(each.top_k, each.seed, segment.stop) for each, segment in zip(asked, segments, strict=True)]
        ints = upload(np.array(whole, np.int64).T.copy(), self._device)
        return {
            "columns": {
                "temperature": floats[0],
                "top_p": floats[1],
                "top_k": ints[0],
                "seed": ints[1],
                "position": ints[2],
            },
            "any_random": True,
            "any_filtered": any(each.temperature > 0 and (each.top_k > 0 or each.top_p < 1) for each in asked),
        }

    # Memory that runs out

    def _fits(self, work: Callable[[], None]) -> bool:
        """Do some work. Returns False if the device or the host had no memory for it."""
        try:
            work()
            return True
        except torch.OutOfMemoryError:
            pass
        except RuntimeError as error:
            if OUT_OF_CPU_MEMORY not in str(error):
                raise
        if self._device.type == "cuda":  # outside of the handler: the error holds tensors of the frames it passed
            torch.cuda.empty_cache()
        return False

    def _lose(self, rows: Sequence[int], outcome: _Outcome | None = None) -> None:
        """Give up the states of these rows, and of the whole batch if one of them is in it.

        With an `outcome` their sequences are reported there; otherwise once a segment of theirs is planned.
        """
        if any(self.rows.place(row) is not None for row in rows):
            rows = [*rows, *(row for row in self.rows.rows if row not in rows)]
            self.rows.clear()
        for row in rows:
            self._apart.pop(row, None)
            self._joined.discard(row)
            name = self._names.pop(row, None)
            self._lost[row] = outcome is not None and name is not None
            if outcome is not None and name is not None:
                outcome.lost.append(name)

    # Streams

    def _event(self) -> Any:
        """An event after the work begun so far on the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    @contextmanager
    def _on_second_stream(self, began: Any, outcome: _Outcome) -> Iterator[None]:
        """Run the block on the second stream, if there is one, after the work that earlier plans began."""
        if self._second is None:
            yield
            return
        self._second.wait_event(began)
        with torch.cuda.stream(self._second):
            try:
                yield
            finally:
                outcome.ends.append(self._event())

    def _mark_written(self, segments: Sequence[Segment]) -> None:
        """Record that the current stream just wrote these rows' states outside the batch, and their last tokens."""
        apart = [self._apart[each.row] for each in segments if each.row in self._apart]
        if self._second is not None and apart:
            written, stream = self._event(), torch.cuda.current_stream()
            for each in apart:
                each.written, each.stream = written, stream

    def _enter(self, apart: _Apart) -> State:
        """The state, for work on the current stream, which then waits for the work that wrote it."""
        if apart.loading is not None:
            return apart.loading.take()
        if self._second is not None and apart.written is not None:
            current = torch.cuda.current_stream()
            if apart.stream != current:
                current.wait_event(apart.written)
                tensors: Any = self._layout.tensors(apart.state) if self.abilities.keeps_state else [apart.state]
                for tensor in tensors:
                    tensor.record_stream(current)
        return apart.state

    def _state_apart(self, row: int, length: int) -> _Apart:
        """The state of a row outside the batch. Raises ValueError if there is none of this length."""
        apart = self._apart.get(row)
        if apart is None or apart.length != length:
            raise ValueError(f"row {row} is embedded with {length} positions and has {apart.length if apart else 0}")
        return apart
