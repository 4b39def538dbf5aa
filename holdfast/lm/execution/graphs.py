"""CUDA graphs of steps: one launch in place of several hundred, for the sizes that steps are padded to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from holdfast.lm.execution.batch import Batch, PackedStep, StagedStep
from holdfast.lm.kernels.attention.protocol import CapturableAttention
from holdfast.lm.models.base import CapturableModel, StepInput

KINDS = (1, 4, 16, 32, 64)
"""Up to each of these token counts, kernels have variants of their own (`linear.skinny_gemm`, `attention.paged`)."""

FEW_SEGMENTS = 64
"""Most steps with prefill work have no more segments than that."""


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """What is captured, each ascending."""

    decodes: tuple[int, ...]
    """Rows of steps of decodes alone: a step is padded to the next one, by at most 7 up to 256."""
    tokens: tuple[int, ...]
    """Tokens of all other steps: sizes for which the library has a fast product, so that padding costs little."""
    rows: tuple[int, ...]
    """Sampled rows of those."""
    segments: tuple[int, ...]
    """Segments of those: attention's launches have room for so many decodes, and empty room takes time as well."""

    @classmethod
    def of(cls, max_sequences: int, max_tokens: int) -> GraphSizes:
        """The sizes for steps of at most so many sequences and tokens."""
        most = min(max_sequences, max_tokens)

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
        """Sizes that between them launch every kernel there is."""
        few = {size for size in self.decodes if size in KINDS}
        return GraphSizes(tuple(sorted({*few, self.decodes[-1]})), self.tokens[-1:], self.rows[-1:], self.segments[-1:])

    def largest(self) -> GraphSizes:
        """The last of each: their graphs take as much memory as all, which share it."""
        return GraphSizes(self.decodes[-1:], self.tokens[-1:], self.rows[-1:], self.segments[-1:])

    def bodies(self) -> list[tuple[int, int]]:
        """Tokens and segments of each body, the largest first: no more segments than tokens."""
        return sorted({(tokens, min(tokens, segments)) for tokens in self.tokens for segments in self.segments})[::-1]

    def body(self, tokens: int, segments: int) -> tuple[int, int]:
        """The body for a step of so many. Ranges computed again may be more segments than the largest has room for."""
        size = _next(self.tokens, tokens)
        return size, min(size, _next(self.segments, min(segments, self.segments[-1])))


@dataclass(frozen=True, slots=True)
class Captured:
    """The graph of one size, and the attention metadata that it reads."""

    graph: torch.cuda.CUDAGraph
    metadata: Any


class StepGraphs:
    """The forward pass of steps, captured by size.

    A step in which each segment is one token that samples is one graph, by its rows. Any other is two: the model's body
    by its tokens, and its head by the rows that sample. Padding writes no slot, has no tile of attention, and its
    logits are never read. A graph begins with the batch's persistent buffer, where the step was
    uploaded to, and ends with `logits`; both stay where they are. Graphs share one memory pool: no two run at once, and
    nothing in the pool outlives its graph's run.
    """

    def __init__(
        self,
        model: CapturableModel,
        attention: CapturableAttention[Any],
        batch: Batch,
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        sizes: GraphSizes,
    ) -> None:
        """The graphs of `sizes`, still to be captured."""
        self._model, self._attention, self._batch, self._caches = model, attention, batch, caches
        self.sizes, self._most_rows = sizes, sizes.rows[-1]
        spec = model.spec
        self._logits = torch.empty(self._most_rows, spec.vocab_size, dtype=spec.dtype, device=spec.device)
        self._between: tuple[torch.Tensor, ...] = ()
        self._pool: Any = None
        self._bodies: dict[tuple[int, int], Captured] = {}
        self._heads: dict[int, Captured] = {}
        self._decodes: dict[int, Captured] = {}
        batch.clear()

    def capture(self) -> None:
        """Capture a graph for each size; some tens of milliseconds each."""
        self._pool, sizes = torch.cuda.graph_pool_handle(), self.sizes
        # The largest first: the others find room in what it took.
        self._bodies = {body: self._capture(self._body, *body, tokens=body[0]) for body in sizes.bodies()}
        self._heads = {size: self._capture(self._head, size) for size in reversed(sizes.rows)}
        self._decodes = {size: self._capture(self._decode, size) for size in reversed(sizes.decodes)}

    def rehearsals(self) -> list[Callable[[], None]]:
        """For each size a call that runs its kernels once, without a graph; they may run at once, in any thread."""
        sizes = self.sizes
        bodies = [partial(self._rehearse, self._body, *body, tokens=body[0]) for body in sizes.bodies()]
        return bodies + [partial(self._rehearse, self._decode, size) for size in sizes.decodes]

    def run(self, staged: StagedStep) -> tuple[PackedStep, torch.Tensor] | None:
        """Enter a step and start its graphs: its inputs, and its logits [R, vocab_size], good until the next run.

        None for a step that no graph can run; nothing has happened to it then.
        """
        rows, tokens = staged.num_sampled, staged.num_tokens
        if rows == tokens == len(staged.segments.row):
            size = _next(self.sizes.decodes, tokens)
            return self._start(staged, self._decodes[size], size)
        body = self.sizes.body(tokens, len(staged.segments.row))
        started = self._start(staged, self._bodies[body], body[0])
        if started is not None and rows:
            self._heads[_next(self.sizes.rows, rows)].graph.replay()
        return started

    def _start(self, staged: StagedStep, captured: Captured, size: int) -> tuple[PackedStep, torch.Tensor] | None:
        """Enter a step padded to `size` tokens and run its graph."""
        if not self._attention.refill(captured.metadata, staged.segments):
            return None
        packed = self._batch.upload(staged, size, min(size, self._most_rows))
        captured.graph.replay()
        return packed, self._logits[: staged.num_sampled]

    def _capture(
        self, work: Callable[[int, Any], None], size: int, segments: int | None = None, tokens: int | None = None
    ) -> Captured:
        """Run `work` once, then capture it."""
        metadata = self._rehearse(work, size, segments, tokens)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work(size, metadata)
        return Captured(graph, metadata)

    def _rehearse(
        self, work: Callable[[int, Any], None], size: int, segments: int | None = None, tokens: int | None = None
    ) -> Any:
        """Run `work` once with empty attention metadata, which compiles its kernels; return the metadata."""
        metadata = self._attention.reserve(min(segments or size, self._most_rows), tokens)
        work(size, metadata)
        return metadata

    def _body(self, size: int, metadata: Any) -> None:
        packed = self._batch.apply(size, min(size, self._most_rows))
        rows = self._model.body(self._input(packed, packed.sample_at, metadata))
        if not self._between:  # kept outside of the pool: the head's graph takes memory of its own there
            self._between = tuple(part.new_empty(self._most_rows, *part.shape[1:]) for part in rows)
        for place, part in zip(self._between, rows, strict=True):
            place[: len(part)].copy_(part)

    def _head(self, size: int, metadata: Any) -> None:
        self._logits[:size].copy_(self._model.head(tuple(part[:size] for part in self._between)))

    def _decode(self, size: int, metadata: Any) -> None:
        packed = self._batch.apply(size, size)
        self._logits[:size].copy_(self._model.forward(self._input(packed, None, metadata)))

    def _input(self, packed: PackedStep, sample_at: torch.Tensor | None, metadata: Any) -> StepInput:
        return StepInput(
            ids=packed.ids,
            positions=packed.positions,
            sample_at=sample_at,
            slot_mapping=packed.slot_mapping,
            block_tables=self._batch.block_tables,
            caches=self._caches,
            attention=self._attention,
            metadata=metadata,
        )


def _next(sizes: Sequence[int], count: int) -> int:
    return sizes[bisect_left(sizes, count)]
