"""Reports of a client to its engine about the times between tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.core.types import BATCH_CLASS, FinishReason, SamplingParams, SequenceOutput
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.pace_report import REPORT_SECONDS, PaceReport
from holdfast.engine.messages import FromEngine, Hello, Outputs, Ready, Start, TokenWaits
from holdfast.lm.config import EngineConfig
from tests.fake_engine import engine_info
from tests.in_process import settle, start


def test_reports_come_now_and_then_and_leave_nothing_out() -> None:
    sent: list[TokenWaits] = []
    report, waits = PaceReport(0.025, sent.append), [0.02, 0.03, 0.025, 0.026] * 100
    now = 10.0
    for wait in waits:
        now += wait
        report.note(wait, now)
    report.note(0.001, now + REPORT_SECONDS)
    assert sum(each.count for each in sent) == 401 and sum(each.late for each in sent) == 200
    assert len(sent) <= 2 + (now - 10.0) / REPORT_SECONDS


class Peer:
    """An engine in this process that answers nothing by itself, and keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.pid = 0
        self._messages: asyncio.Queue[FromEngine] = asyncio.Queue()

    def born(self, on_end: Callable[[str], None], process: Any) -> Peer:
        self._messages.put_nowait(Hello())
        return self

    def send(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, Start):
            self._messages.put_nowait(Ready(engine_info()))

    async def receive(self) -> FromEngine:
        return await self._messages.get()

    def give(self, request_id: str, reason: FinishReason | None = None) -> None:
        """One token for a request."""
        output = SequenceOutput(request_id, (5,), reason, 0, 0.0)
        self._messages.put_nowait(Outputs(**{name: [value] for name, value in output._asdict().items()}))

    def hide(self) -> None:
        pass

    def kill(self) -> None:
        pass

    async def close(self, *, at_once: bool = False) -> None:
        pass


class Reader:
    """Reads a stream as fast as its tokens come, unless it is `busy`."""

    def __init__(self, client: EngineClient, name: str, priority: int = 0) -> None:
        self.free = asyncio.Event()
        self.free.set()
        self.read = 0
        self._deltas = client.stream([1, 2], SamplingParams(max_tokens=100), request_id=name, priority=priority)
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with aclosing(self._deltas) as deltas:
            async for _ in deltas:
                self.read += 1
                await self.free.wait()


@pytest.fixture
async def peer() -> Peer:
    return Peer()


async def times_reported(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, *, target: float | None = 25.0, priority: int = 0
) -> tuple[int, int]:
    """Reported times between tokens, and late ones, of a stream whose times are 20, 30, 100 and 20 ms.

    Its reader is busy when the third time ends.
    """
    now = [100.0]
    client = await start(peer, EngineConfig(tbt_target=target))  # type: ignore[arg-type]
    monkeypatch.setattr("holdfast.engine.client.client.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("holdfast.engine.client.pace_report.REPORT_SECONDS", 0.0)
    reader = Reader(client, "r", priority)
    await settle()
    for seconds, busy in ((0.5, False), (0.02, False), (0.03, True), (0.1, True), (0.0, False), (0.02, False)):
        now[0] += seconds
        if seconds:
            peer.give("r")
        (reader.free.clear if busy else reader.free.set)()
        await settle()
    peer.give("r", FinishReason.LENGTH)
    await asyncio.wait_for(reader.task, 60)
    await client.close()
    assert reader.read == 6
    reports = [message for message in peer.sent if isinstance(message, TokenWaits)]
    return sum(each.count for each in reports), sum(each.late for each in reports)


async def test_only_times_in_which_the_reader_waited_are_reported(peer, monkeypatch):
    assert await times_reported(peer, monkeypatch) == (4, 1)


async def test_lines_of_batches_are_not_reported(peer, monkeypatch):
    assert await times_reported(peer, monkeypatch, priority=BATCH_CLASS) == (0, 0)


async def test_without_a_target_nothing_is_reported(peer, monkeypatch):
    assert await times_reported(peer, monkeypatch, target=None) == (0, 0)
