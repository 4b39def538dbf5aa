"""SleepPart: empties the device's memory before the engine sleeps, so that its conversations are found again."""

from __future__ import annotations

from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.parts.planning import Planning
from holdfast.lm.parts.sleep.options import SleepOptions
from holdfast.lm.scheduler.part import Part, PartQueues, PartStep


class SleepPart(Part):
    """Brings the device to rest: no sequence has blocks, and idle state has gone to the host tier as in a pause.

    From `close` on, the sequences run to their end, or are suspended. Then plans without segments swap idle blocks out,
    the lowest value first, until none is left that the host takes. State that the host does not take is lost, and
    computed again when it is needed.
    """

    name = "sleep"

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._queues: PartQueues
        self._closing = self._suspends = False
        self._alive = 0
        """Number of sequences that have not ended."""
        self._in_flight = 0
        """Number of plans whose result is still to come."""

    def close(self, *, suspend: bool) -> None:
        """Bring the device to rest. `suspend` the sequences that run; else let them end."""
        self._closing, self._suspends = True, suspend

    def reopen(self) -> None:
        """Let sequences run again."""
        self._closing = self._suspends = False
        self._pool.flush(False)

    def forget(self, now: float) -> None:
        """Forget the state on the device, whose memory is about to be lost. The device must be at rest."""
        self._pool.drop_idle(now)

    @property
    def at_rest(self) -> bool:
        """Whether no plan is in flight, no sequence has blocks, and no copy between the tiers is under way."""
        return self._is_quiet and not self._in_flight and not self._pool.copies.under_way

    @property
    def has_flushed(self) -> bool:
        """Whether the host has all idle state that it takes."""
        return not self._pool.can_swap_out

    @property
    def is_held_up(self) -> bool:
        """Whether the device is at rest, and the host takes no more before the tiers below have written some of it."""
        return self.at_rest and self._pool.can_swap_out and self._pool.below.backlog

    @property
    def _is_quiet(self) -> bool:
        """Whether nothing but copies is left to plan before the device is at rest."""
        if not self._closing:
            return False
        return not (self._queues.running or self._queues.swapping_in) if self._suspends else not self._alive

    @property
    def _copies(self) -> bool:
        """Whether idle state is to be copied to the host now. The tiers below may still have to read the host."""
        return self._is_quiet and self._pool.can_swap_out and not self._pool.below.backlog

    def attach(self, queues: PartQueues) -> None:
        self._queues = queues

    def added(self, entry: object) -> None:
        self._alive += 1

    def ended(self, entry: object) -> None:
        self._alive -= 1

    def begin(self, step: PartStep) -> None:
        """Suspend the running sequences once no step computes them, and copy idle state when none is left."""
        if not self._closing:
            return
        if self._suspends:
            step.postpone()
            if not step.in_flight:
                for entry in [*step.running]:
                    step.preempt(entry)
        self._pool.flush(self._copies)

    def planned(self, plan: object) -> None:
        self._in_flight += 1

    def apply(self, plan: object, result: object, now: float) -> tuple[()]:
        self._in_flight -= 1
        return ()

    @property
    def wants_step(self) -> bool:
        """Whether copies are under way: only a result says that they are complete."""
        return self._is_quiet and bool(self._pool.copies.under_way)

    @property
    def has_work(self) -> bool:
        return self.wants_step or (self._is_quiet and self._pool.can_swap_out)


def make_parts(planning: Planning) -> tuple[SleepPart, ...]:
    """The part of an engine that can sleep, over its pool of blocks."""
    if not planning.config.part(SleepOptions).enable_sleep_mode:
        return ()
    return tuple(SleepPart(pool) for pool in planning.kind.block_pools)
