"""CUDA graphs of decode steps: one launch in place of several hundred, for the batch sizes that steps are padded to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.execution.batch import Batch, StagedStep
from holdfast.kernels.protocol import CapturableAttention
from holdfast.models.base import Model, StepInput


def graph_sizes(max_sequences: int) -> list[int]:
    """Batch sizes to capture, ascending: a step is padded to the next one, by at most 7 rows up to 256."""
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, max_sequences + 32, 32)]
    sizes = [size for size in steps if size < max_sequences]
    return [*sizes, max_sequences]


@dataclass(frozen=True, slots=True)
class Captured:
    """One batch size: the graph, and the attention schedule that it reads."""

    graph: torch.cuda.CUDAGraph
    schedule: Any


class DecodeGraphs:
    """The forward pass of every step in which each segment is one token that samples, captured by batch size.

    A graph reads the batch's persistent buffer and writes `logits`; both stay where they are. Rows of padding have no
    slot, no tile of attention and no reader of their logits. Graphs share one memory pool, as no two run at once.
    """

    def __init__(
        self,
        model: Model,
        attention: CapturableAttention[Any],
        batch: Batch,
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        sizes: Sequence[int],
    ) -> None:
        """Capture a graph for each of `sizes`, ascending; some tens of milliseconds each."""
        self._attention, self._sizes = attention, list(sizes)
        spec = model.spec
        largest = self._sizes[-1]
        self._logits = torch.empty(largest, spec.vocab_size, dtype=spec.dtype, device=spec.device)
        self._every_row = torch.arange(largest, device=spec.device)  # kept: a graph holds addresses, not tensors
        pool = torch.cuda.graph_pool_handle()
        self._captured: dict[int, Captured] = {}
        for size in reversed(self._sizes):  # the largest first: the others find room in what it took
            batch.clear(size)
            packed = batch.inputs(size, size)
            step = StepInput(
                ids=packed.ids,
                positions=packed.positions,
                sample_at=self._every_row[:size],
                slot_mapping=packed.slot_mapping,
                block_tables=batch.block_tables,
                caches=caches,
                attention=attention,
                schedule=attention.reserve(size),
            )
            model.forward(step)  # compiles and warms up what the graph is made of
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._logits[:size].copy_(model.forward(step))
            self._captured[size] = Captured(graph, step.schedule)

    def size_for(self, staged: StagedStep) -> int | None:
        """The batch size that a step is padded to; None for a step that no graph can run."""
        count = staged.num_sampled
        if not count == staged.num_tokens == len(staged.segments.row) or count > self._sizes[-1]:
            return None
        return self._sizes[bisect_left(self._sizes, count)]

    def replay(self, staged: StagedStep, size: int) -> torch.Tensor:
        """Logits [R, vocab_size] of a step that was padded to `size` and entered; good until the next replay."""
        captured = self._captured[size]
        self._attention.refill(captured.schedule, staged.segments)
        captured.graph.replay()
        return self._logits[: staged.num_sampled]
