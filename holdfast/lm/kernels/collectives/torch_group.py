"""`Group` through torch.distributed: gloo between CPU processes, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.nn import functional

from holdfast.lm.kernels.collectives.protocol import Group, own_rows


class TorchGroup(Group):
    """The devices of a process group, each in a process of its own. This is the backend of CPUs.

    Sums on a CPU are float32. On a GPU they are in the dtype of what is added, as NCCL computes them.
    """

    def __init__(self, processes: dist.ProcessGroup, device: torch.device) -> None:
        self._processes, self._device = processes, device
        self._alone = False

    @property
    def size(self) -> int:
        return self._processes.size()

    @property
    def rank(self) -> int:
        return self._processes.rank()

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

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

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._sum(x).to(x.dtype)

    def best(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        # One exchange of both: the bits of a value, as a number, beside its id.
        pairs = self.gather(torch.cat((values.view(torch.int32).to(torch.int64), ids))).view(self.size, 2, -1)
        everyones = pairs[:, 0].to(torch.int32).view(torch.float32)
        return pairs[:, 1].gather(0, everyones.argmax(0, keepdim=True))[0]  # argmax takes the first, so the lowest ids

    def exchange_rows(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        count, size = len(logits), self.size
        rows, columns = -(-count // size), -(-vocab_size // size)
        sent = logits.new_zeros(size * rows, columns)
        sent[:count, : logits.shape[1]] = logits
        received = torch.empty_like(sent)
        if count and not self._alone:
            self._processes.alltoall_base(received, sent, [], []).wait()
        whole = received.view(size, rows, columns).transpose(0, 1).reshape(rows, size * columns)
        return whole[: len(own_rows(count, size, self.rank)), :vocab_size]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        everyones = x.new_zeros(self.size, len(x))
        if len(x) and not self._alone:
            self._processes.allgather([*everyones], x.contiguous()).wait()
        return everyones

    @contextmanager
    def alone(self) -> Iterator[None]:
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over all devices; float32 on a CPU. x may be overwritten."""
        if x.device.type == "cpu":
            x = x.float()
        if x.numel() and not self._alone:
            self._processes.allreduce(x).wait()
        return x
