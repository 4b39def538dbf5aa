"""A draft head on a device: after each step that asks for it, it guesses the tokens that come next."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from holdfast.lm.execution.batch import PackedStep, StagedStep
from holdfast.lm.execution.part import Allocated, DevicePart, DrawnWork, Found, PartExecutor
from holdfast.lm.kernels.upload import upload
from holdfast.lm.models.base import StreamTaps
from holdfast.lm.models.draft_head import DraftHead
from holdfast.lm.models.head_layer import HeadLayer
from holdfast.lm.parts.speculation.passes import HeadPasses, Last
from holdfast.lm.parts.speculation.values import HeadPlan, HeadResult
from holdfast.lm.parts.speculation.windows import Kept, Shift, Span, Windows
from holdfast.lm.types import StepPlan

SLOTS = 512
"""Most positions of a sequence whose keys and values a head keeps: the last ones. If all are used, half are dropped."""

Indices = npt.NDArray[np.int64]


class Places(NamedTuple):
    """Indices of one step, each [E] for its E kept positions, [S] for its S sampling segments, or as is said."""

    token: Indices
    """[E] the position's token in the batch; 0 if its hidden state waited since an earlier step."""
    following: Indices
    """[E] the token after it in the batch; any if it was drawn, or waits."""
    position: Indices  # [E]
    row: Indices  # [E]
    slot: Indices  # [E]
    waited: Indices
    """[W] indices among the kept positions of those whose hidden state waited."""
    drawn: Indices
    """[R] for each drawn token, the index of the kept position that it follows."""
    first: Indices
    """[S] for each sampling segment, the index of the first kept position after which a token was drawn."""
    guessed: Indices
    """[S * D] indices in the batch of the drafted tokens of each segment, padded."""
    draws: Indices
    """[S * D] indices among the drawn tokens of those that show whether a drafted one is right, padded."""
    counts: Indices  # [S] number of drafted tokens
    wait_token: Indices
    """[N] tokens of the batch whose hidden states wait, because the next token is not known yet."""
    wait_row: Indices  # [N]


class HeadMemory(NamedTuple):
    """A head's memory on the device besides its weights."""

    taps: StreamTaps
    keys: torch.Tensor  # [rows, SLOTS, Hkv, D]
    values: torch.Tensor  # [rows, SLOTS, Hkv, D]
    waiting: torch.Tensor  # [rows, layers, hidden]
    """For each row, the hidden state of its last position, if the token after it was not known."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.taps.into.nbytes + self.keys.nbytes + self.values.nbytes + self.waiting.nbytes


@dataclass(frozen=True, slots=True)
class FoundDrafts:
    """The guesses of a step, and the time that they took."""

    drafts: torch.Tensor  # [S, drafts] int64
    seconds: float = 0.0
    events: tuple[Any, Any] | None = None
    """Events on a GPU before and after the head's work."""

    def on_host(self) -> Found:
        drafts = self.drafts
        if drafts.device.type == "cuda":
            drafts = torch.empty(drafts.shape, dtype=drafts.dtype, pin_memory=True).copy_(drafts, non_blocking=True)
        return FoundDrafts(drafts, self.seconds, self.events)

    def result(self) -> HeadResult:
        seconds, apart = self.seconds, self.events is not None
        if self.events is not None:
            seconds = self.events[0].elapsed_time(self.events[1]) / 1000
        found = tuple([tuple(each) for each in self.drafts.tolist()])
        return HeadResult(found, self.drafts.shape[1], seconds, apart)


class HeadExecutor(PartExecutor):
    """Runs a draft head after the draws of steps.

    The keys and values of a position depend on its hidden state and on the token after it, and on nothing else. So all
    positions of a step get theirs at once, and only the last accepted one of each sequence goes through the layer.
    From there, each guess is one more pass. Its keys are in the slots after that, until the next step writes the true
    ones there.
    """

    plans = (HeadPlan,)

    def __init__(self, head: HeadLayer, memory: HeadMemory, drawn: torch.Tensor, *, captured: bool = False) -> None:
        """`memory` belongs to this executor alone from now on. `captured`: passes run as CUDA graphs.

        `drawn` is `Batch.drawn` [rows, 1 + most guesses]. It gets the guesses of each row.
        """
        self._drawn, most = drawn, drawn.shape[1] - 1
        self._head, self._taps, self._device = head, memory.taps, memory.keys.device
        self._caches, self._waiting = (memory.keys, memory.values), memory.waiting
        self._windows, self._most = Windows(memory.keys.shape[1]), most
        self._passes = HeadPasses(head, self._caches, most, captured=captured)
        with torch.inference_mode():
            self._passes.prepare()
        rows, slots = memory.keys.shape[:2]
        for segments, positions in rehearsed(rows, slots, len(self._taps.into), self._device.type):
            self._rehearse(segments, positions)

    @torch.inference_mode()
    def _rehearse(self, segments: int, positions: int) -> None:
        """Run once for this number of sampling segments, each with this number of positions and two guesses.

        The first products of a size, and the first use of a kernel, take tens of milliseconds on a GPU. No step should
        wait for them.
        """
        kept = segments * positions
        at, row = np.arange(kept), np.repeat(np.arange(segments), positions)
        slot, last = at % positions, positions * np.arange(1, segments + 1) - 1
        drafted = min(positions, self._windows.slots - 1) - 1
        nothing = np.empty(0, np.int64)
        places = Places(
            token=at,
            following=at,
            position=slot,
            row=row,
            slot=slot,
            waited=nothing,
            drawn=last,
            first=last - drafted,
            guessed=np.repeat(last, drafted),
            draws=np.repeat(np.arange(segments), drafted),
            counts=np.full(segments, drafted),
            wait_token=last,
            wait_row=np.arange(segments),
        )
        ids = torch.zeros(kept, dtype=torch.int64, device=self._device)
        FoundDrafts(self._run(ids, ids[:segments], places, (), min(2, self._most))).on_host()

    def follow(self, staged: StagedStep) -> Sequence[DrawnWork]:
        plan = staged.plan.part(HeadPlan)
        if not plan.keeps:
            return ()

        def work(packed: PackedStep, drawn: torch.Tensor) -> FoundDrafts:
            # Only now, while the device computes the step. Before that it would wait.
            kept, shifts = self._windows.enter(spans_of(staged.plan), plan.drafts)
            places = places_of(staged, kept)
            began = time.perf_counter()
            events = None
            if self._device.type == "cuda":
                events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                events[0].record()
            drafts = self._run(packed.ids, drawn, places, shifts, plan.drafts)
            if events is not None:
                events[1].record()
                return FoundDrafts(drafts, 0.0, (events[0], events[1]))
            return FoundDrafts(drafts, time.perf_counter() - began)

        return (work,)

    def _run(
        self, ids: torch.Tensor, drawn: torch.Tensor, places: Places, shifts: Sequence[Shift], drafts: int
    ) -> torch.Tensor:
        """Keep the positions of a step, and guess the next tokens [S, drafts] of its sampling segments.

        `ids` [T] are the tokens of the batch, and `drawn` [R] those that were drawn after its sampling positions.
        """
        for row, source, count in shifts:
            for kept in self._caches:
                kept[row, :count] = kept[row, source : source + count].clone()
        at = self._uploaded(places)
        head, taps, waiting = self._head, self._taps.into, self._waiting
        read = taps.index_select(0, at.token)
        if len(places.waited):
            read[at.waited] = waiting.index_select(0, at.row[at.waited])
        following = ids.index_select(0, at.following)
        following[at.drawn] = drawn
        hidden = head.combine(read)
        head.keep(hidden, following, at.position, at.row * self._windows.slots + at.slot, self._caches)
        if len(places.wait_row):
            waiting[at.wait_row] = taps.index_select(0, at.wait_token)
        if not drafts or not len(places.first):
            return drawn.new_empty(len(places.first), 0)
        last = at.first + self._accepted(ids, drawn, at)
        each = Last(*(each.index_select(0, last) for each in (hidden, following, at.position, at.row, at.slot)))
        guesses = self._guess(each, drafts)
        self._drawn[:, 1 : 1 + drafts].index_copy_(0, each.row, guesses)
        return guesses

    def _guess(self, last: Last, drafts: int) -> torch.Tensor:
        """The guesses [S, drafts] after these positions."""
        return self._passes.guess(last, drafts)

    @staticmethod
    def _accepted(ids: torch.Tensor, drawn: torch.Tensor, at: Any) -> torch.Tensor:
        """Number of right drafted tokens of each sampling segment, [S]."""
        segments = len(at.counts)
        if not len(at.guessed):
            return torch.zeros_like(at.first)
        right = (ids[at.guessed] == drawn[at.draws]).view(segments, -1)
        right &= torch.arange(right.shape[1], device=ids.device) < at.counts[:, None]
        return right.cumprod(1).sum(1)

    def _uploaded(self, places: Places) -> Any:
        """The indices on the device, in one copy."""
        together = upload(np.concatenate(places), self._device)
        return Places(*torch.split(together, [len(each) for each in places]))  # type: ignore[arg-type]


def rehearsed(rows: int, slots: int, tokens: int, kind: str) -> list[tuple[int, int]]:
    """Sampling segments, and positions of each, of the steps that a head runs once before it serves.

    On a GPU these are decodes with and without drafts, up to all `rows`, and prompts of up to all `tokens` of a step,
    or the `slots` of a row. On a CPU, a first step takes no longer than any other.
    """
    if kind != "cuda":
        return [(1, 1)]
    counts = [1 << power for power in range(rows.bit_length())]
    decodes = [(count, positions) for count in counts for positions in (1, 4) if count * positions <= tokens]
    return [*decodes, *((1, 1 << power) for power in range(3, min(slots - 2, tokens).bit_length()))]


def spans_of(plan: StepPlan) -> list[Span]:
    """The segments of a plan, as far as a head reads them."""
    most = iter(plan.samples or ())
    columns = plan.columns
    names = ("sequence_id", "row", "start", "stop", "sampling")
    spans: list[Span] = []
    for name, row, start, stop, sampling in zip(*[columns.column(each) for each in names], strict=True):
        samples = 0 if sampling is None else next(most, 1)
        spans.append(Span(name, row, start, stop, samples))
    return spans


def places_of(staged: StagedStep, kept: Sequence[Kept]) -> Places:
    """The indices of a step whose positions are `kept`."""
    starts = dict(zip(map(_key, spans_of(staged.plan)), staged.segments.query_start.tolist(), strict=False))
    tokens, rows, slots, positions = list[Indices](), list[Indices](), list[Indices](), list[Indices]()
    waited, drawn, first, counts = list[int](), list[int](), list[int](), list[int]()
    waits: dict[int, int] = {}
    at = 0
    for span, begin, slot in kept:
        start = starts[_key(span)]
        stop = span.stop if span.samples else span.stop - 1
        length = max(0, stop - begin)
        numbers = np.arange(begin, begin + length)
        if length and begin < span.start:
            waited.append(at)
        tokens.append(start + numbers - span.start)
        positions.append(numbers)
        slots.append(slot + np.arange(length))
        rows.append(np.full(length, span.row))
        if span.samples:
            first.append(at + length - span.samples)
            drawn.extend(range(at + length - span.samples, at + length))
            counts.append(span.samples - 1)
        else:
            waits[span.row] = start + span.stop - span.start - 1
        at += length
    token, position, slot_of, row_of = (_joined(each) for each in (tokens, positions, slots, rows))
    most, total = max(counts, default=0), len(drawn)
    ahead = np.arange(most)
    begins = np.cumsum([0, *(count + 1 for count in counts)])[:-1].astype(np.int64)
    firsts = np.array(first, np.int64)
    in_batch = token[firsts] if len(firsts) else firsts
    return Places(
        token=np.maximum(token, 0),
        following=np.clip(token + 1, 0, staged.num_tokens - 1),
        position=position,
        row=row_of,
        slot=slot_of,
        waited=np.array(waited, np.int64),
        drawn=np.array(drawn, np.int64),
        first=firsts,
        guessed=np.minimum(in_batch[:, None] + 1 + ahead, staged.num_tokens - 1).ravel(),
        draws=np.minimum(begins[:, None] + ahead, max(0, total - 1)).ravel(),
        counts=np.array(counts, np.int64),
        wait_token=np.array(list(waits.values()), np.int64),
        wait_row=np.array(list(waits), np.int64),
    )


def _key(span: Span) -> tuple[int, int]:
    """The row and the first position of a segment, which no other segment of a step has."""
    return span.row, span.start


def _joined(parts: Sequence[Indices]) -> Indices:
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)


class HeadDevice(DevicePart):
    """A draft head of a model on a device."""

    def __init__(self, head: DraftHead, rows: int, model_bytes: int, most: int = 15) -> None:
        """`rows` is the number of rows of the executor, `model_bytes` the size of the model's weights.

        `most` is the largest number of guesses for a sequence.
        """
        self.head, self.layer, self._rows, self._most = head, HeadLayer(head), rows, most
        self.pass_share = head.pass_bytes / max(1, model_bytes)
        """Share of a step's weights that one pass reads: an estimate of its time before any is measured."""
        self._memory: HeadMemory | None = None

    @property
    def guesses(self) -> int:
        return self._most

    @property
    def nbytes(self) -> int:
        return self.head.nbytes + (0 if self._memory is None else self._memory.nbytes)

    def workspace_bytes(self) -> int:
        """A step's work reads a copy of the taps, and makes about eight rows of hidden states of each.

        A pass makes logits and a few rows as wide as the MLP. Graphs keep memory of their own for that.
        """
        spec, taps = self.head.spec, self.memory.taps.into
        each = 2 * (spec.draft_vocab_size + 4 * spec.inner + 16 * spec.hidden)
        return taps.nbytes + taps.element_size() * (8 * spec.hidden * len(taps) + each * self._rows)

    def taps(self, max_tokens: int) -> StreamTaps:
        spec, like = self.head.spec, self.head.tensors["fc.weight"]  # before the cache takes the rest of the memory
        shape = len(spec.layers), spec.target_hidden
        keys, values = (like.new_zeros(self._rows, SLOTS, spec.kv_heads, spec.dim) for _ in range(2))
        taps = StreamTaps(spec.layers, like.new_zeros(max_tokens, *shape))
        self._memory = HeadMemory(taps, keys, values, like.new_zeros(self._rows, *shape))
        return self._memory.taps

    @property
    def memory(self) -> HeadMemory:
        """The head's memory on the device. Raises RuntimeError before `taps`."""
        if self._memory is None:
            raise RuntimeError("the head has no memory yet: call taps first")
        return self._memory

    def executor(self, allocated: Allocated) -> HeadExecutor:
        memory = allocated.memory
        return HeadExecutor(self.layer, self.memory, memory.batch.drawn, captured=bool(memory.graphs))
