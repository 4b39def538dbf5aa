"""Replica: the place of one engine, from its first start over restarts to its end."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field

from holdfast.engine.client.client import EngineClient
from holdfast.lm.types import SchedulerStats


class State(enum.StrEnum):
    """State of a replica."""

    STARTING = "starting"
    """The engine loads, for the first time or again."""
    READY = "ready"
    HANGING = "hanging"
    """The engine does not answer. It gets no requests, and is killed if this lasts."""
    DRAINING = "draining"
    """The replica finishes its requests and gets no new ones. Then it ends."""
    DOWN = "down"
    """The engine has ended, and is started again after a pause."""


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
    """Reason for display why the replica is not ready; empty if it is."""
    running: set[str] = field(default_factory=set)
    """Ids of requests that were sent to the replica and have not ended there."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the replica has no request."""
    stats: SchedulerStats | None = None
    """Queues and memory as of the last answer; None before the first one."""
    failures: int = 0
    """Number of starts in a row that failed or did not last."""
    restarts: int = 0
    taken: int = 0
    """Number of requests sent to the replica so far, including those that moved from other replicas."""
    ready_at: float = 0.0
    asked_at: float | None = None
    """Time of the unanswered or last health question; None before the first one."""
    task: asyncio.Task[None] | None = None
    """Task that starts, monitors and restarts the engine."""
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the replica is to be drained and then ended for good."""
    trial: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the one request here that lost its engine before and has not got a token since."""

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def name(self) -> str:
        """Name of the replica in metrics and for operators."""
        return str(self.number)

    @property
    def serves(self) -> bool:
        """Whether the replica may get requests."""
        return self.state is State.READY and self.engine is not None and not self.engine.dead.is_set()

    @property
    def answers(self) -> bool:
        """Whether the engine lives and was ready."""
        return self.engine is not None and not self.engine.dead.is_set()

    def enter(self, request_id: str) -> None:
        """Add a request that is sent to the replica."""
        self.running.add(request_id)
        self.taken += 1
        self.idle.clear()

    def leave(self, request_id: str) -> None:
        """Remove a request that has ended here."""
        self.running.discard(request_id)
        if not self.running:
            self.idle.set()
