"""Viewers: the pages that show an engine's activity, and the events that they receive."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from holdfast.core.version import __version__
from holdfast.engine.activity import ChunkRecord, StepRecord
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineDead
from holdfast.engine.messages import Activity
from holdfast.lm.memory.block_map import ConversationBlocks
from holdfast.lm.scheduler.queue_report import QueueReport
from holdfast.server.protocol import ApiError
from holdfast.server.replies import event

LEASE_SECONDS = 10.0
"""Seconds for which the engine reports its activity after each request to do so."""
MOST_VIEWERS = 16
MOST_UNSENT = 64
"""Maximum number of unsent events per viewer. A viewer beyond it is disconnected, and may reconnect."""
MOST_STEPS = 6000
"""Maximum number of step records that are kept for viewers who come later."""


class Viewers:
    """Has the engine report its activity while there are viewers, and sends the reports to all of them.

    A viewer who comes later first receives the state that the others already have. Memory is bounded: by the contents
    of a report, by MOST_STEPS, and by MOST_UNSENT for each viewer.
    """

    def __init__(self, client: EngineClient, replica: str = "", replicas: Callable[[], Sequence[str]] = tuple) -> None:
        """`replica` is the engine's name if there are several engines. `replicas` returns the names of all of them."""
        self.client = client
        self._replica, self._replicas = replica, replicas
        self._viewers: set[_Viewer] = set()
        self._lease: asyncio.Task[None] | None = None
        self._known = _Known()

    async def events(self, *, named: bool) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events of one viewer: with request ids if `named`, otherwise with short digests.

        The first event is `engine`, and all others are `activity`. The stream ends if the viewer is too slow.
        Raises ApiError 503 if there are too many viewers, or if the engine has ended.
        """
        if len(self._viewers) >= MOST_VIEWERS:
            raise ApiError(f"{MOST_VIEWERS} pages watch the engine already", status=503, code="too_many_viewers")
        viewer = _Viewer(named)
        viewer.offer(event(self.about(), "engine"))
        try:
            if not self._viewers:
                self._begin()
            elif self._known.begun:
                viewer.offer(event(written(self._known.as_activity(), named), "activity"))
            self._viewers.add(viewer)
            while (data := await viewer.unsent.get()) is not None:
                yield data
        except EngineDead as error:
            raise ApiError(str(error), status=503, code="engine_dead") from None
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                self._end()

    def about(self) -> dict[str, Any]:
        """Return the properties of the engine that a viewer needs besides its activity."""
        info, config = self.client.info, self.client.config
        return {
            "version": __version__,
            "model": info.model,
            "device": info.memory.device,
            "scheduler": config.scheduler,
            "target": config.tbt_seconds,
            "budget": info.token_budget,
            "block_size": info.block_size,
            "blocks": info.num_blocks,
            "host_blocks": info.num_host_blocks,
            "rows": info.max_sequences,
            "replica": self._replica,
            "replicas": list(self._replicas()),
        }

    def _begin(self) -> None:
        self._known = _Known()
        self.client.on_activity = self._take
        self.client.watch(LEASE_SECONDS)
        self._lease = asyncio.create_task(self._renew())

    def _end(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None
        with contextlib.suppress(EngineDead):
            self.client.watch(0)

    async def _renew(self) -> None:
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.client.dead.wait(), LEASE_SECONDS / 3)
                self.client.watch(LEASE_SECONDS)
        except EngineDead as error:
            for viewer in self._viewers:
                viewer.end(event({"message": str(error)}, "error"))

    def _take(self, activity: Activity) -> None:
        self._known.take(activity)
        data: dict[bool, bytes] = {}
        for viewer in tuple(self._viewers):
            if viewer.named not in data:
                data[viewer.named] = event(written(activity, viewer.named), "activity")
            if not viewer.offer(data[viewer.named]):
                viewer.end(event({"message": "this page was too slow to follow the engine"}, "error"))


class _Viewer:
    """One page, with the events that are not sent to it yet."""

    def __init__(self, named: bool) -> None:
        self.named = named
        self.unsent: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._ended = False

    def offer(self, data: bytes) -> bool:
        """Queue an event. Returns False if too many events are unsent."""
        if self._ended:
            return True
        if self.unsent.qsize() >= MOST_UNSENT:
            return False
        self.unsent.put_nowait(data)
        return True

    def end(self, last: bytes) -> None:
        """End the stream with the event `last`, which replaces all unsent events."""
        self._ended = True
        while not self.unsent.empty():
            self.unsent.get_nowait()
        self.unsent.put_nowait(last)
        self.unsent.put_nowait(None)


class _Known:
    """All reports since the first viewer came, merged for viewers who come later."""

    def __init__(self) -> None:
        self.begun = False
        """Whether the engine has reported anything."""
        self._at = 0.0
        self._steps: deque[StepRecord] = deque(maxlen=MOST_STEPS)
        self._blocks: dict[int, ConversationBlocks] = {}
        self._last: Activity | None = None
        self._costs: list[tuple[int, float]] | None = None

    def take(self, activity: Activity) -> None:
        """Add a report from the engine."""
        if activity.begins:
            self._steps.clear()
            self._blocks.clear()
            self._costs = activity.costs
        self.begun, self._at = True, activity.at
        self._steps.extend(activity.steps)
        for row in activity.blocks:
            if row.state == "gone":
                self._blocks.pop(row.number, None)
            else:
                self._blocks[row.number] = row
        if activity.queues is not None:
            self._last = activity

    def as_activity(self) -> Activity:
        """Return all reports merged into one."""
        last = self._last
        queues, stats = (None, None) if last is None else (last.queues, last.stats)
        return Activity(self._at, True, list(self._steps), list(self._blocks.values()), queues, stats, self._costs)


def written(activity: Activity, named: bool) -> dict[str, Any]:
    """Convert a report to JSON. Unless `named`, short digests replace the request ids."""
    steps, blocks, queues = activity.steps, activity.blocks, activity.queues
    if not named:
        steps, blocks = [unnamed(step) for step in steps], [unnamed_row(row) for row in blocks]
        queues = None if queues is None else unnamed_queues(queues)
    fields: dict[str, Any] = {"at": activity.at, "time": time.time(), "steps": steps, "blocks": blocks}
    if activity.begins:
        fields |= {"begins": True, "costs": activity.costs or []}
    if queues is not None:
        fields["queues"] = queues._asdict()
    if activity.stats is not None:
        fields["stats"] = asdict(activity.stats)
    return fields


@lru_cache(4096)
def short(name: str) -> str:
    """Return the first eight hexadecimal digits of an id's SHA-256 digest; an empty string for an empty id."""
    return hashlib.sha256(name.encode()).hexdigest()[:8] if name else ""


def unnamed(step: StepRecord) -> StepRecord:
    """Return the step with short digests instead of request ids."""
    if not (step.chunks or step.preempted):
        return step
    fields = {name: getattr(step, name) for name in step.__struct_fields__}
    chunks = [ChunkRecord(short(each.request), each.start, each.stop) for each in step.chunks]
    return StepRecord(**fields | {"chunks": chunks, "preempted": [short(name) for name in step.preempted]})


def unnamed_row(row: ConversationBlocks) -> ConversationBlocks:
    """Return the blocks with a short digest instead of the request id."""
    return row._replace(request=short(row.request))


def unnamed_queues(queues: QueueReport) -> QueueReport:
    """Return the queues with short digests instead of request ids."""
    first = tuple([each._replace(id=short(each.id)) for each in queues.first])
    return queues._replace(first=first, rows=tuple([each._replace(id=short(each.id)) for each in queues.rows]))
