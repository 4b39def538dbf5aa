"""`Group` of GPUs of one host that write into each other's memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from holdfast.lm.kernels.collectives.peer_memory import PeerMemory
from holdfast.lm.kernels.collectives.reduce_kernels import (
    BEST_PROGRAMS,
    REGIONS,
    Mailboxes,
    best_rows,
    reduce_rows,
)
from holdfast.lm.kernels.collectives.torch_group import TorchGroup

ROOM_BYTES = 64 << 20
"""Memory for sums on each device. Longer ones take several launches."""


@dataclass(frozen=True, slots=True)
class Crossings:
    """From how many bytes of a sum, in the dtype of the stream, another way is faster."""

    narrow: int
    """What travels is rounded to the stream's dtype. Smaller sums travel as float32."""
    two_shot: int
    """Each device adds up its share of the rows."""


CROSSINGS = {2: Crossings(512 << 10, 1 << 62), 4: Crossings(256 << 10, 1 << 20), 8: Crossings(128 << 10, 512 << 10)}
"""By number of devices, on H200s with NVLink (benchmarks/many_probe.py)."""


class SymmetricGroup(TorchGroup):
    """GPUs of one host, each in a process of its own. Sums and the best tokens go through mailboxes.

    Rows of logits go through the process group.
    """

    def __init__(self, processes: dist.ProcessGroup, store: Store, device: torch.device) -> None:
        """`store` is this group's alone. All processes of the group make theirs at the same time.

        Raises RuntimeError where one device cannot write to another.
        """
        super().__init__(processes, device)
        memory = PeerMemory(store, self.rank, self.size, device, Mailboxes.num_bytes(self.size, ROOM_BYTES))
        empty = torch.zeros(2 * REGIONS + BEST_PROGRAMS, dtype=torch.int32, device=device)
        no_addresses = torch.zeros(self.size, dtype=torch.int64, device=device)
        self.mailboxes = Mailboxes(memory.own, no_addresses, empty, empty.new_zeros(1), self.rank, self.size)
        self.mailboxes.empty()
        no_addresses.copy_(torch.tensor(memory.open()))
        sizes = [size for size in CROSSINGS if size <= self.size]
        self._crossings = CROSSINGS[max(sizes, default=min(CROSSINGS))]

    def add_norm(
        self,
        stream: torch.Tensor,
        partials: torch.Tensor,
        bias: torch.Tensor | None,
        norm: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        num_bytes = stream.numel() * stream.element_size()
        wire = stream.dtype if num_bytes >= self._crossings.narrow else torch.float32
        two_shot = num_bytes >= self._crossings.two_shot
        return reduce_rows(self.mailboxes, partials, bias, stream, norm, eps, wire=wire, two_shot=two_shot)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        two_shot = x.numel() * x.element_size() >= self._crossings.two_shot
        return reduce_rows(self.mailboxes, x[None], None, None, None, 0.0, wire=x.dtype, two_shot=two_shot)

    def best(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return best_rows(self.mailboxes, values, ids)

    @contextmanager
    def alone(self) -> Iterator[None]:
        self._set_alone(1)
        try:
            with super().alone():
                yield
        finally:
            self._set_alone(0)

    def _set_alone(self, number: int) -> None:
        """Tell the kernels that follow, on all streams."""
        torch.cuda.synchronize(self._device)
        self.mailboxes.is_alone.fill_(number)
        torch.cuda.synchronize(self._device)
