"""Place: the place of one rank among the ranks that share a model, and its links to the others."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.distributed_c10d import PrefixStore

from holdfast.core.layout import Layout
from holdfast.lm.execution.peer_link import PeerLink
from holdfast.lm.execution.stage_link import GlooLink, StageLink
from holdfast.lm.kernels.collectives.peer_memory import PeerMemory
from holdfast.lm.kernels.collectives.protocol import Group
from holdfast.lm.kernels.collectives.torch_group import TorchGroup
from holdfast.lm.models.base import ModelSpec

TIMEOUT = timedelta(hours=1)
"""Longest time that a message between processes may take. A process that hangs is ended long before."""
LOOPBACK = "127.0.0.1"


class Place:
    """The place of one rank. All ranks make theirs at the same time, and wait for each other while they do."""

    def __init__(self, layout: Layout, rank: int, device: torch.device, meeting: str, host: int | None = None) -> None:
        """`meeting` is a directory for these ranks only, where each leaves the address at which it can be reached.

        `host` is the file descriptor of the memory for the rank's part of the host tier, if another rank maps it too.
        """
        self.layout, self.rank, self.device, self.host = layout, rank, device, host
        self._store = FileStore(str(Path(meeting) / "ranks"), layout.ranks)
        self._store.set_timeout(TIMEOUT)
        self._everyone: dist.ProcessGroup | None = None
        if layout.pp > 1 and device.type == "cpu":
            self._everyone = self._gloo("everyone", range(layout.ranks))
        self.group: Group | None = None
        """The devices that share each layer; None if there is only one."""
        if layout.tp > 1:
            self.group = self._group_of(f"stage {layout.stage_of(rank)}", layout.ranks_of(layout.stage_of(rank)))

    def link(self, spec: ModelSpec, max_tokens: int, max_rows: int, *, back: bool = False) -> StageLink | None:
        """The link for streams and tokens between the stages; None if there is only one stage.

        `spec` describes this rank's part. A step has at most `max_tokens` tokens and `max_rows` sampled rows. With
        `back`, tensors go to the stage before, too.
        """
        if self.layout.pp == 1:
            return None
        if self._everyone is not None:
            return GlooLink(self._everyone, self.layout, self.rank)
        num_bytes = PeerLink.num_bytes(spec, max_tokens, max_rows, back=back)
        memory = PeerMemory(PrefixStore("link", self._store), self.rank, self.layout.ranks, self.device, num_bytes)
        return PeerLink(memory, self.layout, spec, max_tokens, max_rows, back=back)

    def _group_of(self, name: str, ranks: range) -> Group:
        """These ranks as a group of devices that share each layer."""
        if self.device.type == "cpu":
            return TorchGroup(self._gloo(name, ranks))
        from holdfast.lm.kernels.collectives.symmetric import SymmetricGroup  # a CPU installation has no Triton

        return SymmetricGroup(PrefixStore(name, self._store), ranks.index(self.rank), len(ranks), self.device)

    def _gloo(self, name: str, ranks: range) -> dist.ProcessGroup:
        """These ranks of this host as one process group. Other users cannot reach its sockets."""
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout = TIMEOUT
        processes: dist.ProcessGroup = gloo(PrefixStore(name, self._store), ranks.index(self.rank), len(ranks), options)
        return processes
