"""Ranks as threads of the test's process. Each has process groups of its own, as if it were a process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from holdfast.core.layout import Layout
from holdfast.lm.kernels.collectives.torch_group import TorchGroup

Result = TypeVar("Result")
TIMEOUT = timedelta(seconds=20)


class Rank:
    """One rank of a layout. Its connections stay open as long as it does: peers may still be connecting."""

    def __init__(self, layout: Layout, rank: int, store: dist.Store) -> None:
        self.layout, self.rank, self._store = layout, rank, store
        self._open: list[dist.ProcessGroup] = []

    def processes(self, ranks: range) -> dist.ProcessGroup:
        """These ranks as a process group. All of them call this at the same time."""
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = TIMEOUT
        store = dist.PrefixStore(str(ranks), self._store)
        self._open.append(dist.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), options))
        return self._open[-1]

    def group(self) -> TorchGroup | None:
        """The ranks of the same stage; None if it has one."""
        if self.layout.tp == 1:
            return None
        stage = self.layout.ranks_of(self.layout.stage_of(self.rank))
        return TorchGroup(self.processes(stage))


def in_ranks(layout: Layout, work: Callable[[Rank], Result]) -> list[Result]:
    """What `work` returns in each rank of a layout, all at the same time. Raises what the first rank raised."""
    store = dist.HashStore()
    ranks = [Rank(layout, rank, store) for rank in range(layout.ranks)]
    with ThreadPoolExecutor(layout.ranks) as pool:
        return [*pool.map(work, ranks)]


def in_group(size: int, work: Callable[[TorchGroup], Result]) -> list[Result]:
    """What `work` returns for each device of a group, all at the same time."""

    def of(rank: Rank) -> Result:
        group = rank.group()
        assert group is not None
        return work(group)

    return in_ranks(Layout(tp=size), of)
