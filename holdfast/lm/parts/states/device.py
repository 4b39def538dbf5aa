"""StateExecutor: moves and copies of recurrent states, and of KV blocks that go with them, before the segments run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from holdfast.lm.execution.paged_memory import PagedMemory
from holdfast.lm.execution.part import Allocated, DevicePart, PartExecutor
from holdfast.lm.kernels.cache.kv_cache import copy_blocks
from holdfast.lm.kernels.upload import upload
from holdfast.lm.models.base import Model
from holdfast.lm.parts.states.options import StateOptions
from holdfast.lm.types import PartResult, StepPlan
from holdfast.lm.types.states import StatePlan, StateResult


class StateExecutor(PartExecutor):
    """Does the work of each plan's `StatePlan` on the current stream, so that it is done when its segments run."""

    plans = (StatePlan,)

    def __init__(self, memory: PagedMemory) -> None:
        self._memory = memory
        self._uses_host: deque[bool] = deque()
        """For each plan whose step was not collected, whether it uses slots on the host; the oldest first."""

    def completed(self, *, wait: bool) -> Sequence[PartResult]:
        """Report the plan's copies: they end before its step does."""
        return (StateResult(),) if self._uses_host.popleft() else ()

    def before(self, plan: StepPlan) -> None:
        copies = plan.part(StatePlan)
        self._uses_host.append(copies.uses_host)
        if not copies.computes:
            return
        states = self._memory.states
        states.replay(copies.replays)
        states.copy(copies.saves)
        states.swap_in(copies.swap_in)
        states.copy(copies.starts)
        self._copy_tails(plan, copies)
        states.swap_out(copies.swap_out)

    def _copy_tails(self, plan: StepPlan, copies: StatePlan) -> None:
        """Copy KV blocks, once those that the plan waits for have come from the host."""
        if not copies.tails:
            return
        cache, transfers = self._memory.cache, self._memory.transfers
        if transfers is not None:
            transfers.follow(min(plan.copies.awaits, plan.step - 1))
        sources, targets = zip(*copies.tails, strict=True)
        copy_blocks(cache, upload(sources, cache.device), cache, upload(targets, cache.device))


def state_parts(config: StateOptions, model: Model) -> Sequence[DevicePart]:
    """The part that copies the recurrent states of a rank's share of the model; none for a model without states."""
    if not model.spec.recurrent_layers:
        return ()
    # Without sharing, no sequence starts from a snapshot.
    return (StateDevice(config.snapshot_share if config.prefix_sharing else 0.0),)


class StateDevice(DevicePart):
    """Snapshots of recurrent states take a share of the cache's memory."""

    def __init__(self, cache_share: float) -> None:
        """`cache_share` is this share, from 0 to 1."""
        self._cache_share = cache_share

    @property
    def cache_share(self) -> float:
        return self._cache_share

    def executor(self, allocated: Allocated) -> StateExecutor:
        return StateExecutor(allocated.memory)
