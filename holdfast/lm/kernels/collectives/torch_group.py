"""`Group` of CPU processes, through gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.nn import functional

from holdfast.lm.kernels.collectives.protocol import Group, SumInParts, columns_by_device, halves, rows_of_device

HALVED_ROWS = 256
"""Smallest number of rows of a sum that is split, so that one half travels while the other is computed."""


class TorchGroup(Group):
    """The CPU processes of a process group. Sums are float32."""

    def __init__(self, processes: dist.ProcessGroup) -> None:
        self._processes, self._alone = processes, False

    @property
    def size(self) -> int:
        return self._processes.size()

    @property
    def rank(self) -> int:
        return self._processes.rank()

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def add_norm(
        self,
        stream: torch.Tensor,
        partials: torch.Tensor,
        bias: torch.Tensor | None,
        norm: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        added = self._sum(partials[0] if len(partials) == 1 else partials.sum(0))
        if bias is not None:
            added += bias
        stream += added
        return functional.rms_norm(stream, norm.shape, norm, eps)

    def begin_sum(self, rows: int, width: int, dtype: torch.dtype) -> SumInParts | None:
        if rows < HALVED_ROWS:
            return None
        return GlooSum(self._processes, rows, width, dtype, alone=self._alone)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._sum(x).to(x.dtype)

    def best(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        # One exchange carries both the value, whose bits are read as a number, and its id.
        pairs = self.gather(torch.cat((values.view(torch.int32).to(torch.int64), ids))).view(self.size, 2, -1)
        everyones = pairs[:, 0].to(torch.int32).view(torch.float32)
        return pairs[:, 1].gather(0, everyones.argmax(0, keepdim=True))[
            0
        ]  # argmax takes the first of equal values, which has the lowest id

    def exchange_rows(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        blocks = columns_by_device(logits, self.size, vocab_size)
        received = torch.empty_like(blocks)
        if len(logits) and not self._alone:
            self._processes.alltoall_base(received.flatten(0, 1), blocks.flatten(0, 1), [], []).wait()
        return rows_of_device(received, len(logits), self.rank, vocab_size)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        everyones = x.new_zeros(self.size, len(x))
        if len(x) and not self._alone:
            self._processes.allgather([*everyones], x.contiguous()).wait()
        return everyones

    @contextmanager
    def alone(self) -> Iterator[None]:
        before, self._alone = self._alone, True
        try:
            yield
        finally:
            self._alone = before

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over all devices, in float32. x may be overwritten."""
        x = x.float()
        if x.numel() and not self._alone:
            self._processes.allreduce(x).wait()
        return x


class GlooSum(SumInParts):
    """A sum in two halves, which gloo's threads add up."""

    def __init__(self, processes: dist.ProcessGroup, rows: int, width: int, dtype: torch.dtype, *, alone: bool) -> None:
        self._processes, self._alone = processes, alone
        self._addends = torch.empty(rows, width, dtype=dtype)
        self._parts = halves(rows, 1)
        self._sums: list[torch.Tensor] = []
        self._works: list[dist.Work] = []

    @property
    def parts(self) -> tuple[slice, ...]:
        return self._parts

    def room(self, part: int) -> torch.Tensor:
        return self._addends[self._parts[part]]

    def send(self, part: int) -> None:
        self._sums.append(self.room(part).float())
        if not self._alone:
            self._works.append(self._processes.allreduce(self._sums[part]))

    def receive(self, part: int) -> torch.Tensor:
        if not self._alone:
            self._works[part].wait()
        return self._sums[part][None]
