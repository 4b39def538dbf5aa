"""CUDA graphs of steps: one launch in place of several hundred. Each step is padded to a captured size."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from holdfast.lm.execution.batch import Batch, PackedStep, StagedStep
from holdfast.lm.execution.capture_queue import CaptureQueue, GraphSize, Missed
from holdfast.lm.kernels.attention.protocol import CapturableAttention
from holdfast.lm.kernels.capture import capture, replay_seconds
from holdfast.lm.kernels.collectives.protocol import Group
from holdfast.lm.kernels.lora.protocol import StepAdapters
from holdfast.lm.models.base import NO_STATES, CapturableModel, RecurrentStep, StateMemory, StepInput, StreamTaps

if TYPE_CHECKING:
    from holdfast.lm.kernels.memset_nodes import MemsetNodes

log = logging.getLogger("holdfast.engine")

KINDS = (1, 4, 16, 32, 64, 128)
"""Token counts up to which kernels have their own variants (`linear.skinny_gemm`, `attention.paged`)."""

TIMED_DECODES = 256
"""Number of decodes above which a captured size is timed. The library computes some sizes slower than larger ones: 448
rows of Llama-3-8B's gate and up on an H200 take 290 us, 464 take 197. Steps of fewer decodes mostly read weights."""

FEW_SEGMENTS = 64
"""Number of segments that most steps with prefill work do not exceed."""

MAX_TOKENS = 8192
"""Largest number of tokens of a captured step. A larger step computes much longer than its kernels take to launch."""


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """The sizes that are captured, ascending. A step is padded to the next size."""

    decodes: tuple[int, ...]
    """Token counts of steps that sample after each of their tokens. Up to 256 tokens, at most 7 are padding."""
    tokens: tuple[int, ...]
    """Token counts of all other steps. Matrix products of these sizes are fast, so padding costs little."""
    rows: tuple[int, ...]
    """Numbers of sampling rows in steps that do not sample after each of their tokens."""
    segments: tuple[int, ...]
    """Segment counts of these steps. A captured attention launch has a fixed number, and unused segments cost time."""

    @classmethod
    def of(cls, max_samples: int, max_tokens: int) -> GraphSizes:
        """The sizes for steps of at most this many sampled and other tokens, and at most MAX_TOKENS."""
        max_tokens = min(max_tokens, MAX_TOKENS)
        most = min(max_samples, max_tokens)

        def up_to(last: int, *spans: range) -> tuple[int, ...]:
            return (*(size for span in spans for size in span if size < last), last)

        return cls(
            decodes=up_to(
                most, range(1, 3), range(4, 8, 4), range(8, 256, 8), range(256, 512, 16), range(512, most, 32)
            ),
            # Multiples of 64 up to 1,024 that pay on an H200: 512 takes less than 448, 768 hardly more than 704
            # (docs/notes/2026-11-21-prefill-and-pace.md).
            tokens=up_to(
                max_tokens,
                range(64, 448, 64),
                range(512, 768, 128),
                range(768, 1024, 64),
                range(1024, 2048, 128),
                range(2048, 4096, 256),
                range(4096, max_tokens, 512),
            ),
            rows=up_to(most, range(1, 3), range(4, 8, 4), range(8, 64, 8), range(64, 256, 32), range(256, most, 64)),
            segments=up_to(most, range(FEW_SEGMENTS, FEW_SEGMENTS + 1)),
        )

    def kinds(self) -> GraphSizes:
        """A few sizes that together launch every kernel."""
        few = {size for size in self.decodes if size in KINDS}
        return GraphSizes(tuple(sorted({*few, self.decodes[-1]})), self.tokens[-1:], self.rows[-1:], self.segments[-1:])

    @property
    def first(self) -> GraphSizes:
        """Sizes to capture at the start, besides `first_bodies`. Others are captured in pauses.

        Decodes are padded to at most 1.5 times their number, or twice for up to 16.
        """
        decodes = {
            size for size in self.decodes if _is_power_of_two(size) or (size >= 24 and _is_power_of_two(size / 3))
        }
        # A head takes as long for many rows as for one, because reading its weights takes most of the time.
        rows = {size for size in self.rows if _is_power_of_two(size) and size.bit_length() % 2}
        return GraphSizes(
            decodes=tuple(sorted({*decodes, self.decodes[-1]})),
            tokens=self.sparse_tokens,
            rows=tuple(sorted({*rows, self.rows[-1]})),
            segments=self.segments,
        )

    @property
    def sparse_tokens(self) -> tuple[int, ...]:
        """Some of `tokens`: each is at most twice the one before, or 1.5 times it from 512 on."""
        few = {size for size in self.tokens if _is_power_of_two(size) or (size > 512 and _is_power_of_two(size / 3))}
        return tuple(sorted({*few, self.tokens[-1]}))

    @property
    def first_bodies(self) -> list[tuple[int, int]]:
        """Bodies to capture at the start, the largest first. From 512 tokens on, all with few segments; else some."""
        few = {(tokens, min(tokens, self.segments[0])) for tokens in self.tokens if tokens >= 512}
        return sorted({*self.first.bodies(), *few})[::-1]

    def largest(self) -> GraphSizes:
        """The largest size of each kind. All graphs share memory, so these sizes alone take as much as all sizes."""
        return GraphSizes(self.decodes[-1:], self.tokens[-1:], self.rows[-1:], self.segments[-1:])

    def bodies(self) -> list[tuple[int, int]]:
        """Tokens and segments of each body, the largest first. Segments never exceed tokens."""
        return sorted({(tokens, min(tokens, segments)) for tokens in self.tokens for segments in self.segments})[::-1]

    def body(self, tokens: int, segments: int, bodies: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """The first of these bodies that holds a step of this size. `bodies` ascend and include the largest body.

        A step that recomputes dropped ranges may have more segments than any body.
        """
        wanted = min(segments, self.segments[-1])
        return next(body for body in bodies if body[0] >= tokens and body[1] >= wanted)


class StepMetadata(NamedTuple):
    """The metadata from which the layers of a captured step know its segments."""

    attention: Any
    recurrent: RecurrentStep | None


@dataclass(frozen=True, slots=True)
class Captured:
    """The graph of one size, and the metadata that it reads."""

    graph: torch.cuda.CUDAGraph
    metadata: StepMetadata


class StepGraphs:
    """The forward pass of steps, captured by size.

    A step that samples after each of its tokens has decodes and drafts only. It runs as one graph, chosen by its number
    of tokens. Any other step runs as two graphs: the model's body, chosen by the number of tokens, and its head, chosen
    by the number of sampling rows.

    Attention skips padding, and its results are never read. A graph reads the batch's persistent buffer, into which the
    step was uploaded, and writes the logits; both keep their addresses. Graphs share one memory pool: only one runs at
    a time, and nothing in the pool outlives its graph's run.
    """

    def __init__(
        self,
        model: CapturableModel,
        attention: CapturableAttention[Any],
        batch: Batch,
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        sizes: GraphSizes,
        *,
        plain: StepGraphs | None = None,
        group: Group | None = None,
        incoming: torch.Tensor | None = None,
        states: StateMemory = NO_STATES,
        taps: StreamTaps | None = None,
    ) -> None:
        """Prepare graphs of `sizes`; `capture` makes them.

        `plain` has the graphs of steps of only tokens. It is given if the new graphs are for steps with further inputs.
        Both have the same sizes and share all memory, and the graphs of `plain` are captured first.

        `group` is the devices that share the model's layers, if there are several. All capture the same sizes, and none
        waits for another while it does. `incoming` is the buffer [max tokens, width] that holds the previous stage's
        stream when a step starts; None on the first stage. The step overwrites it. `states` are those of the model's
        recurrent layers. `taps` are kept in every step, because copying them takes less than graphs of its own.
        """
        self._taps = taps
        self._memsets: MemsetNodes | None = memset_nodes(model.spec.device) if plain is None else plain._memsets
        self._model, self._attention, self._batch, self._caches = model, attention, batch, caches
        self._plain, self._group, self._states = plain, group, states
        self.sizes, self._most_rows = sizes, sizes.rows[-1]
        spec = model.spec
        self._incoming = incoming
        if plain is not None:
            self._given: torch.Tensor = plain._given
        elif incoming is not None and not spec.last:
            self._given = incoming  # each layer adds to the stream in place
        else:
            size = (self._most_rows, spec.own_vocab_size) if spec.last else (sizes.tokens[-1], spec.stream_width)
            self._given = torch.empty(size, dtype=spec.dtype, device=spec.device)
        self._between: tuple[torch.Tensor, ...] = () if plain is None else plain._between
        self._pool: Any = None
        self._bodies: dict[tuple[int, int], Captured] = {}
        self._heads: dict[int, Captured] = {}
        self._decodes: dict[int, Captured] = {}
        self._decode_seconds: dict[int, float] = {}
        """Seconds of a replay without keys to read, for sizes above TIMED_DECODES."""
        # Sizes that are captured so far, in ascending order.
        self._ready_bodies: list[tuple[int, int]] = []
        self._ready_heads: list[int] = []
        self._ready_decodes: list[int] = []
        self._bodies_by_size = sizes.bodies()[::-1]
        """All bodies, in ascending order."""
        self.left = CaptureQueue()
        """The sizes that the start left out."""
        self._missed: Missed | None = None
        """The graph that the last step missed, if it was padded to a larger one."""
        self._rehearsal_of: tuple[StepMetadata, float] | None = None
        """Metadata of the size that was rehearsed and is captured next, and how many seconds the rehearsal took."""
        batch.clear()

    def capture(self) -> None:
        """Capture the graphs that a start needs, tens of milliseconds each. `capture_next` adds the others."""
        sizes, first = self.sizes, self.sizes.first
        if self._plain is None:
            self._pool = torch.cuda.graph_pool_handle()
        else:
            self._pool, self._between = self._plain._pool, self._plain._between
        # The largest comes first, because the others fit into its memory.
        head_sizes = sizes.rows if self._model.spec.last else ()
        at_start = [
            *(GraphSize("body", *body) for body in sizes.first_bodies),
            *(GraphSize("head", size) for size in reversed(head_sizes) if size in first.rows),
            *(GraphSize("decode", size) for size in reversed(first.decodes)),
        ]
        for size in at_start:
            self._rehearse_size(size)
            self._capture_size(size)()
        # Graphs of the shortest steps come first.
        self.left.add(GraphSize("decode", size) for size in sizes.decodes if size not in first.decodes)
        self.left.add(GraphSize("head", size) for size in head_sizes if size not in first.rows)
        left = set(sizes.bodies()) - set(sizes.first_bodies)
        self.left.add(GraphSize("body", *body) for body in sorted(left))

    def capture_next(self) -> bool:
        """Rehearse or capture one of the remaining sizes, while no step is in flight. Returns False if none is left.

        Capturing ends for good once a device of the group lacks memory for a rehearsal: all devices must pad a step to
        the same size.
        """
        if not self.left:
            return False
        size = self.left.next
        use: Callable[[], None] | None
        try:
            use = partial(setattr, self.left, "rehearsed", size)
            if self.left.rehearsed is None:
                self._batch.clear()  # otherwise the rehearsal would run the last step again
                self._rehearse_size(size)
            else:
                use = self._capture_size(size)
        except torch.OutOfMemoryError:
            use = None
        if self._group is not None:
            done = torch.tensor([use is not None], dtype=torch.int64, device=self._batch.device)
            use = use if self._group.gather(done).all() else None
        if use is None:
            self.left.clear()
            self._rehearsal_of = None
            return False
        use()
        return True

    def _rehearse_size(self, size: GraphSize) -> None:
        """Run a size once, without a graph, and keep its metadata. Waits for the device."""
        began = time.perf_counter()
        with nullcontext() if self._group is None else self._group.alone():
            metadata = self._rehearse(self._work(size), size.size, size.segments)
        if self._batch.device.type == "cuda":
            torch.cuda.synchronize(self._batch.device)
        self._rehearsal_of = metadata, time.perf_counter() - began

    def _capture_size(self, size: GraphSize) -> Callable[[], None]:
        """Capture the size that was rehearsed. Returns the call that puts its graph into use."""
        if self._rehearsal_of is None:
            raise RuntimeError(f"the graph of {size} has not been rehearsed")
        (metadata, rehearsal), began = self._rehearsal_of, time.perf_counter()
        self._rehearsal_of = None
        memsets = self._memsets if size.size > KINDS[-1] else None
        captured = Captured(self._captured(self._work(size), size.size, metadata, memsets), metadata)
        kept = None if self._slower(size, captured) else captured
        return partial(self._use, size, kept, rehearsal, time.perf_counter() - began)

    def _slower(self, size: GraphSize, captured: Captured) -> bool:
        """Whether steps of many decodes take longer as this size than as the next larger one."""
        # Devices of a group would have to replay at the same time, and to agree.
        if size.kind != "decode" or size.size <= TIMED_DECODES or self._group is not None:
            return False
        seconds = self._decode_seconds[size.size] = replay_seconds(captured.graph)
        larger = self._ready_decodes[bisect_left(self._ready_decodes, size.size) :][:1]
        return any(seconds > self._decode_seconds[other] for other in larger)

    def _use(self, size: GraphSize, captured: Captured | None, rehearsal: float, capture: float) -> None:
        """Put the graph of a size into use, if there is one. The seconds are those of its two halves."""
        if captured is None:
            pass
        elif size.segments is not None:
            _add((size.size, size.segments), captured, self._bodies, self._ready_bodies)
        elif size.kind == "head":
            _add(size.size, captured, self._heads, self._ready_heads)
        else:
            _add(size.size, captured, self._decodes, self._ready_decodes)
        self.left.captured(size, rehearsal, capture)

    def _work(self, size: GraphSize) -> Callable[[int, StepMetadata], None]:
        """The launches of a graph."""
        return {"decode": self._decode, "head": self._head, "body": self._body}[size.kind]

    def rehearsals(self) -> list[Callable[[], None]]:
        """One call per size that runs its kernels once, without a graph. The calls may run concurrently.

        In a group of devices, run them inside its `alone`.
        """
        sizes = self.sizes
        bodies: list[Callable[[], None]] = [partial(self._rehearsal, self._body, *body) for body in sizes.bodies()]
        return [*bodies, *(partial(self._rehearsal, self._decode, size) for size in sizes.decodes)]

    def run(self, staged: StagedStep) -> tuple[PackedStep, torch.Tensor] | None:
        """Upload a step and start its graphs. Returns its inputs and logits [R, own_vocab_size].

        A stage before the last gives its stream [T, width]. Both are valid until the next run. Returns None, with no
        effect, for a step that no graph can run.
        """
        rows, tokens = staged.num_sampled, staged.num_tokens
        if tokens > self.sizes.tokens[-1]:
            return None
        if rows == tokens:
            size = _next(self._ready_decodes, tokens)
            started = self._start(staged, self._decodes[size], size)
            if started is not None or tokens == len(staged.segments.row):
                if self.left and started is not None:
                    wanted = GraphSize("decode", _next(self.sizes.decodes, tokens))
                    self._missed = self.left.missed(wanted, GraphSize("decode", size))
                return started
        segments = len(staged.segments.row)
        body = self.sizes.body(tokens, segments, self._ready_bodies)
        head = _next(self._ready_heads, rows) if rows and self._model.spec.last else None
        started = self._start(staged, self._bodies[body], body[0], head)
        if started is not None and head is not None:
            self._heads[head].graph.replay()
        if self.left and started is not None:
            wanted = GraphSize("body", *self.sizes.body(tokens, segments, self._bodies_by_size))
            self._missed = self.left.missed(wanted, GraphSize("body", *body))
        return started

    def take_missed(self) -> Missed | None:
        """The graph that the step since the last call missed, if it was padded to a larger one."""
        missed, self._missed = self._missed, None
        return missed

    def _start(
        self, staged: StagedStep, captured: Captured, size: int, head: int | None = None
    ) -> tuple[PackedStep, torch.Tensor] | None:
        """Upload a step padded to `size` tokens, with a separate head of `head` rows if given. Start its graph."""
        metadata, segments = captured.metadata, staged.segments
        if not self._attention.refill(metadata.attention, segments):
            return None
        if not self._states.refill(metadata.recurrent, segments):
            return None
        packed = self._batch.upload(staged, size, min(size, self._most_rows), head)
        captured.graph.replay()
        return packed, self._given[: staged.num_sampled if self._model.spec.last else staged.num_tokens]

    def _captured(
        self, work: Callable[[int, StepMetadata], None], size: int, metadata: StepMetadata, memsets: MemsetNodes | None
    ) -> torch.cuda.CUDAGraph:
        """The graph of `work`, without memsets where they can be replaced. Up to 128 tokens, no product has one."""
        graph = torch.cuda.CUDAGraph(keep_graph=memsets is not None)
        with capture(graph, self._pool):
            work(size, metadata)
        if memsets is None:
            return graph
        try:
            memsets.replace(graph)
        except (RuntimeError, TypeError) as error:  # a driver or a version of its bindings that is not known
            log.warning("holdfast: memsets stay in the graphs of steps, which takes some microseconds each: %s", error)
            self._memsets = None
            return self._captured(work, size, metadata, None)
        graph.instantiate()
        return graph

    def _rehearsal(self, work: Callable[[int, StepMetadata], None], size: int, segments: int | None = None) -> None:
        """`_rehearse` without its result."""
        self._rehearse(work, size, segments)

    def _rehearse(
        self, work: Callable[[int, StepMetadata], None], size: int, segments: int | None = None
    ) -> StepMetadata:
        """Run `work` once with empty metadata, which compiles its kernels. Returns the metadata.

        `segments` is None if each segment is one token.
        """
        room = min(segments or size, self._most_rows), size if segments else None
        metadata = StepMetadata(self._attention.reserve(*room), self._states.reserve(*room))
        work(size, metadata)
        return metadata

    def _body(self, size: int, metadata: StepMetadata) -> None:
        packed = self._batch.apply(size, min(size, self._most_rows))
        rows = self._model.body(self._input(packed, packed.sample_at, metadata, self._more(size, size)))
        if not self._model.spec.last:
            self._give(rows[0])
            return
        if not self._between:  # kept outside of the pool, because the head's graph takes its own memory there
            self._between = tuple(part.new_empty(self._most_rows, *part.shape[1:]) for part in rows)
        for place, part in zip(self._between, rows, strict=True):
            place[: len(part)].copy_(part)

    def _head(self, size: int, metadata: StepMetadata) -> None:
        rows = tuple(part[:size] for part in self._between)
        self._give(self._model.head(rows, self._more(size, size)))

    def _decode(self, size: int, metadata: StepMetadata) -> None:
        packed = self._batch.apply(size, size)
        self._give(self._model.forward(self._input(packed, None, metadata, self._more(size, None))))

    def _give(self, result: torch.Tensor) -> None:
        """Keep a result outside of the pool: logits, or the stream of a stage before the last."""
        if self._given is not self._incoming:
            self._given[: len(result)].copy_(result)

    def _more(self, tokens: int, rows: int | None) -> StepAdapters | None:
        """The model's inputs besides tokens in steps of this size. `rows` is None if each token has a row."""
        return None if self._plain is None else self._batch.captured(tokens, rows)

    def _input(
        self, packed: PackedStep, sample_at: torch.Tensor | None, metadata: StepMetadata, more: StepAdapters | None
    ) -> StepInput:
        stream = None if self._incoming is None else self._incoming[: len(packed.ids)]
        return StepInput(
            packed.ids,
            packed.positions,
            sample_at,
            packed.slot_mapping,
            self._batch.block_tables,
            self._caches,
            self._attention,
            metadata.attention,
            more,
            stream,
            metadata.recurrent,
            self._taps,
        )


def memset_nodes(device: torch.device) -> MemsetNodes | None:
    """The object that replaces memsets in graphs of a device; None where memsets stay."""
    if device.type != "cuda":
        return None
    from holdfast.lm.kernels.memset_nodes import MemsetNodes  # a CPU installation has no Triton

    return MemsetNodes.of()


def _add(size: Any, captured: Captured, to: dict[Any, Captured], ready: list[Any]) -> None:
    """Put the graph of a size into use."""
    to[size] = captured
    insort(ready, size)


def _is_power_of_two(number: float) -> bool:
    return number == int(number) and int(number).bit_count() == 1


def _next(sizes: Sequence[int], count: int) -> int:
    return sizes[bisect_left(sizes, count)]
