"""Replica: one engine's slot, which stays through the engine's starts and restarts."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field

from holdfast.engine.client.client import EngineClient
from holdfast.lm.types import SchedulerStats


class State(enum.StrEnum):
    """State of a replica."""

    STARTING = "starting"
    """The engine is loading, for the first time or after an end."""
    READY = "ready"
    HANGING = "hanging"
    """The engine does not answer. It gets no requests, and is killed if this continues."""
    DRAINING = "draining"
    """The replica gets no new requests. When its current ones have finished, it ends."""
    DOWN = "down"
    """The engine has ended. It is started again after a pause."""


@dataclass(slots=True, eq=False)
class Replica:
    """One of several engines that serve the same model. Only `Fleet` and `Replicas` change it."""

    number: int
    place: str
    """Location for display, for example a device or a node."""
    engine: EngineClient | None = None
    """Engine of the replica; None while no engine is ready."""
    state: State = State.STARTING
    reason: str = ""
    """Reason why the replica is not ready, for display; empty if it is ready."""
    running: set[str] = field(default_factory=set)
    """Ids of the requests that were sent to the replica and have not ended there."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the replica has no requests."""
    stats: SchedulerStats | None = None
    """State of the queues and memory at the last answer; None before the first answer."""
    failures: int = 0
    """Number of consecutive starts that failed or did not last."""
    restarts: int = 0
    taken: int = 0
    """Number of requests sent to the replica so far, including requests that continue here."""
    ready_at: float = 0.0
    silent: float | None = None
    """Seconds for which the latest request for stats has had no answer; None before the first one.

    Time in which this server stood still does not count.
    """
    task: asyncio.Task[None] | None = None
    """Task that starts, monitors and restarts the engine."""
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the replica is to be drained and removed."""
    trial: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the one request on trial: its last engine ended, and it has not received a token since."""

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def name(self) -> str:
        """Name of the replica in metrics and for operators."""
        return str(self.number)

    @property
    def serves(self) -> bool:
        """Whether the replica may receive requests."""
        return self.state is State.READY and self.engine is not None and not self.engine.dead.is_set()

    @property
    def answers(self) -> bool:
        """Whether the engine is alive. It has been ready at least once."""
        return self.engine is not None and not self.engine.dead.is_set()

    @property
    def full(self) -> bool:
        """Whether the replica can take no request now: it has no engine, or its engine's queue is full."""
        return self.engine is None or self.engine.full

    def enter(self, request_id: str) -> None:
        """Count a request that is being sent to the replica."""
        self.running.add(request_id)
        self.taken += 1
        self.idle.clear()

    def leave(self, request_id: str) -> None:
        """Remove a request that has ended at this replica."""
        self.running.discard(request_id)
        if not self.running:
            self.idle.set()
