"""Ranks as threads of the test's process, which exchange their tensors in its memory or, where asked for, by gloo."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from holdfast.core.layout import Layout
from holdfast.lm.kernels.collectives.torch_group import TorchGroup

Result = TypeVar("Result")
TIMEOUT = timedelta(seconds=20)
"""How long gloo waits for other ranks."""
PATIENCE_SECONDS = 200.0
"""How long a rank waits for others in memory. One that fails ends the wait at once."""


class Rank:
    """One rank of a layout. Its connections stay open as long as it does: peers may still be connecting."""

    def __init__(self, layout: Layout, rank: int, meetings: Meetings | None) -> None:
        """`meetings` is where all ranks exchange tensors; None if gloo is to send them."""
        self.layout, self.rank, self._meetings = layout, rank, meetings
        self._open: list[Any] = []

    def processes(self, ranks: range) -> Any:
        """These ranks as a process group. All of them call this at the same time."""
        assert self._meetings is not None
        return InMemory(self._meetings.of(ranks), ranks.index(self.rank), len(ranks))

    def group(self) -> TorchGroup | None:
        """The ranks of the same stage; None if it has one."""
        if self.layout.tp == 1:
            return None
        stage = self.layout.ranks_of(self.layout.stage_of(self.rank))
        return TorchGroup(self.processes(stage))


class ByGloo(Rank):
    """A rank with process groups of its own, as if it were a process."""

    def __init__(self, layout: Layout, rank: int, store: dist.Store) -> None:
        super().__init__(layout, rank, None)
        self._store = store

    def processes(self, ranks: range) -> dist.ProcessGroup:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = TIMEOUT
        store = dist.PrefixStore(str(ranks), self._store)
        self._open.append(dist.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), options))
        return self._open[-1]


class Meetings:
    """The groups of a layout's ranks, by the ranks in them."""

    def __init__(self) -> None:
        self._groups: defaultdict[range, Meeting] = defaultdict(Meeting)
        self._lock = threading.Lock()

    def of(self, ranks: range) -> Meeting:
        with self._lock:
            return self._groups[ranks]

    def end(self) -> None:
        """A rank has failed: the others wait for it no longer."""
        with self._lock:
            for group in self._groups.values():
                group.end()


class Meeting:
    """Where the ranks of a group hand over tensors: each collective operation when its last rank has come."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.ended = False
        self.arrived: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        """What each rank has brought to each collective operation that is not complete, by the operation's number."""
        self.complete: set[int] = set()
        self.sent: defaultdict[tuple[int, int, int], deque[torch.Tensor]] = defaultdict(deque)
        """Copies of the tensors on their way, by sender, receiver and tag."""

    def end(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def wait(self, what: Callable[[], bool]) -> None:
        """Wait for what another rank does. The lock must be held. Raises OtherFailed once one has failed."""
        if not self.changed.wait_for(lambda: what() or self.ended, PATIENCE_SECONDS) or not what():
            raise OtherFailed("another rank has failed, or did not come in time")


class OtherFailed(RuntimeError):
    """A rank waits in vain for another one."""


class Work:
    """An operation that has begun, with what `dist.Work` has of it."""

    def __init__(self, meeting: Meeting, ended: Callable[[], bool]) -> None:
        self._meeting, self._ended = meeting, ended

    def wait(self) -> None:
        with self._meeting.changed:
            self._meeting.wait(self._ended)

    def is_completed(self) -> bool:
        return self._ended()


class InMemory:
    """What groups and links use of `dist.ProcessGroup`, between threads. All ranks get equal sums, added in order."""

    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        self._meeting, self._rank, self._size = meeting, rank, size
        self._operations = 0
        """Number of collective operations that this rank has begun."""

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def allreduce(self, tensor: torch.Tensor) -> Work:
        def add(tensors: Sequence[torch.Tensor]) -> None:
            total = torch.stack([*tensors]).sum(0)
            for each in tensors:
                each.copy_(total)

        return self._together(tensor, add)

    def allgather(self, into: Sequence[torch.Tensor], tensor: torch.Tensor) -> Work:
        def give(brought: Sequence[tuple[Sequence[torch.Tensor], torch.Tensor]]) -> None:
            for places, _ in brought:
                for place, (_, other) in zip(places, brought, strict=True):
                    place.copy_(other)

        return self._together((into, tensor), give)

    def alltoall_base(self, into: torch.Tensor, tensor: torch.Tensor, *even: Sequence[int]) -> Work:
        assert even == ([], [])

        def give(brought: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
            for rank, (place, _) in enumerate(brought):
                place.copy_(torch.cat([other.chunk(len(brought))[rank] for _, other in brought]))

        return self._together((into, tensor), give)

    def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int) -> Work:
        (tensor,) = tensors
        with self._meeting.changed:
            self._meeting.sent[self._rank, to, tag].append(tensor.clone())
            self._meeting.changed.notify_all()
        return Work(self._meeting, lambda: True)

    def recv(self, into: Sequence[torch.Tensor], sender: int, tag: int) -> Work:
        (place,) = into
        with self._meeting.changed:
            waiting = self._meeting.sent[sender, self._rank, tag]
            self._meeting.wait(lambda: bool(waiting))
            tensor = waiting.popleft()
        assert tensor.shape == place.shape and tensor.dtype == place.dtype
        place.copy_(tensor)
        return Work(self._meeting, lambda: True)

    def _together(self, brought: Any, act: Callable[[Any], None]) -> Work:
        """Bring something to this rank's next collective operation. The last rank that comes does the operation."""
        meeting, number, self._operations = self._meeting, self._operations, self._operations + 1
        with meeting.changed:
            there = meeting.arrived[number]
            there[self._rank] = brought
            if len(there) == self._size:
                act([there[rank] for rank in range(self._size)])
                del meeting.arrived[number]
                meeting.complete.add(number)
                meeting.changed.notify_all()
        return Work(meeting, lambda: number in meeting.complete)


def in_ranks(layout: Layout, work: Callable[[Rank], Result], *, gloo: bool = False) -> list[Result]:
    """What `work` returns in each rank of a layout, all at the same time. Raises what a rank has raised.

    With `gloo`, the ranks are connected as those of an engine are.
    """
    store, meetings = dist.HashStore() if gloo else None, Meetings()
    ranks: list[Rank] = [
        Rank(layout, rank, meetings) if store is None else ByGloo(layout, rank, store) for rank in range(layout.ranks)
    ]

    def run(rank: Rank) -> Result:
        try:
            return work(rank)
        except BaseException:
            meetings.end()
            raise

    with ThreadPoolExecutor(layout.ranks) as pool:
        running = [pool.submit(run, rank) for rank in ranks]
    failed = [error for each in running if (error := each.exception())]
    for error in sorted(failed, key=lambda error: isinstance(error, OtherFailed)):
        raise error
    return [each.result() for each in running]


def in_group(size: int, work: Callable[[TorchGroup], Result], *, gloo: bool = False) -> list[Result]:
    """What `work` returns for each device of a group, all at the same time."""

    def of(rank: Rank) -> Result:
        group = rank.group()
        assert group is not None
        return work(group)

    return in_ranks(Layout(tp=size), of, gloo=gloo)
