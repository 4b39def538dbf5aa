"""Replica: one place for an engine, from its first start over restarts to its end."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field

from holdfast.engine.client.client import EngineClient
from holdfast.lm.types import SchedulerStats


class State(enum.StrEnum):
    """What a replica does."""

    STARTING = "starting"
    """Its engine loads, for the first time or again."""
    READY = "ready"
    HANGING = "hanging"
    """Its engine does not answer. It gets no requests, and is killed if this lasts."""
    DRAINING = "draining"
    """It finishes its requests and gets no new ones; then it ends."""
    DOWN = "down"
    """Its engine has ended, and is started again after a pause."""


@dataclass(slots=True, eq=False)
class Replica:
    """One of several engines that serve the same model. `Replicas` alone changes it."""

    number: int
    place: str
    """Where it runs, for people."""
    engine: EngineClient | None = None
    """None while there is none that was ready."""
    state: State = State.STARTING
    reason: str = ""
    """Why it is not ready, for people."""
    running: set[str] = field(default_factory=set)
    """The requests that were sent to it and have not ended there."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it has no request."""
    stats: SchedulerStats | None = None
    """Its queues and memory when it answered last."""
    failures: int = 0
    """Starts in a row that failed, or that did not last."""
    restarts: int = 0
    taken: int = 0
    """Requests that were sent to it so far, those from other replicas among them."""
    ready_at: float = 0.0
    asked_at: float | None = None
    """Since when it has not answered a question about its health."""
    task: asyncio.Task[None] | None = None
    """Its life: starts, waits, restarts."""
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is to be drained, and then ended for good."""
    trial: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the one request here that was at an engine when that ended, and has got no token since."""

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def name(self) -> str:
        """Its name in metrics, and in what operators see."""
        return str(self.number)

    @property
    def serves(self) -> bool:
        """Whether it may get requests."""
        return self.state is State.READY and self.engine is not None and not self.engine.dead.is_set()

    @property
    def answers(self) -> bool:
        """Whether its engine lives and was ready."""
        return self.engine is not None and not self.engine.dead.is_set()

    def enter(self, request_id: str) -> None:
        """A request is sent to it."""
        self.running.add(request_id)
        self.taken += 1
        self.idle.clear()

    def leave(self, request_id: str) -> None:
        """A request has ended here."""
        self.running.discard(request_id)
        if not self.running:
            self.idle.set()
