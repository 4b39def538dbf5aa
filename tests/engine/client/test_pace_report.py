"""Reports of a client to its engine about the times between tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.core.types import BATCH_CLASS, FinishReason, SamplingParams, SequenceOutput
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.pace_report import REPORT_SECONDS, PaceReport
from holdfast.engine.messages import FromEngine, Hello, Outputs, Ready, Start, TokenWaits
from holdfast.lm.config import EngineConfig
from holdfast.lm.scheduler.correction import MAX_LEARNED_MARGIN, Correction
from holdfast.lm.scheduler.policies import FIRST_WAY
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


def waits_seen(steps: Iterable[float], ways: Iterable[float], target: float = 0.025) -> tuple[int, int]:
    """Reported times, and late ones, of a stream: the engine's time of each step, and the way of each token."""
    sent: list[TokenWaits] = []
    report, now, before = PaceReport(target, sent.append), 0.0, 0.0
    for step, way in zip(steps, ways, strict=True):
        now += step
        if before:
            report.note(step + way - before, now + way, way=way, way_before=before)
        before = way
    report.note(0.0, now + 10 * REPORT_SECONDS)
    return sum(each.count for each in sent) - 1, sum(each.late for each in sent)


def test_a_way_that_varies_less_than_a_step_can_be_cut_makes_tokens_late() -> None:
    assert waits_seen([0.0245] * 101, [0.002, *[0.004, 0.002] * 50]) == (100, 50)
    assert waits_seen([0.0245] * 101, [0.014, *[0.016, 0.014] * 50]) == (100, 50), "many streams, each at its place"


def test_a_process_that_stands_still_for_a_moment_makes_no_token_late() -> None:
    assert waits_seen([0.0245] * 101, [0.002, *[0.012, 0.002] * 50]) == (50, 0)


def test_a_process_that_sends_more_slowly_than_the_engine_says_nothing_once_it_is_behind() -> None:
    ways = [0.002 + 0.003 * step for step in range(101)]
    count, late = waits_seen([0.024] * 101, ways)
    assert count == late == 7, "until it is a step behind"


def test_steps_that_are_late_by_themselves_count_however_steady_the_way_is() -> None:
    assert waits_seen([0.040] * 101, [0.002] * 101) == (100, 100)
    assert waits_seen([0.040] * 101, [0.002, *[0.012, 0.002] * 50]) == (100, 100)


def test_tokens_of_an_engine_that_does_not_say_when_it_sent_them_all_count() -> None:
    sent: list[TokenWaits] = []
    report = PaceReport(0.025, sent.append)
    report.note(0.5, 1.0)
    assert sent == [TokenWaits(1, 1)]


@pytest.mark.parametrize(("slow", "most"), [(True, FIRST_WAY + 0.02), (False, None)])
def test_a_slow_process_leaves_the_margin_where_it_was_and_a_late_engine_does_not(slow: bool, most: float) -> None:
    target, correction, now, before, way = 0.025, Correction(0.0), 0.0, 0.0, 0.002
    correction.widen(FIRST_WAY)
    reports: list[TokenWaits] = []
    report = PaceReport(target, reports.append)
    for _ in range(4000):
        step = 0.024 if slow else 0.026  # the process takes 3 ms longer than a step, or the engine is late
        before, way = way, way + 0.003 if slow else way
        now += step
        report.note(step + way - before, now + way, way=way, way_before=before)
        for each in reports:
            correction.note_late(each.late, each.count)
        reports.clear()
    assert correction.learned_margin <= most if slow else correction.learned_margin == MAX_LEARNED_MARGIN


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

    def give(self, request_id: str, reason: FinishReason | None = None, sent_at: float = 0.0) -> None:
        """One token for a request."""
        output = SequenceOutput(request_id, (5,), reason, 0, 0.0)
        columns: dict[str, Any] = {name: [value] for name, value in output._asdict().items()}
        self._messages.put_nowait(Outputs(**columns, sent_at=sent_at))

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


STALLED = (100.0, 100.001), (100.02, 100.021), (100.04, 100.07), (100.08, 100.081)
BEHIND = (100.0, 100.04), (100.03, 100.07), (100.06, 100.1)
LATE_STEP = (100.0, 100.01), (100.02, 100.03), (100.05, 100.06), (100.07, 100.08)


@pytest.mark.parametrize("ahead", [0.0, 50.0])
@pytest.mark.parametrize(
    ("times", "reported"), [(STALLED, [(1, 0)] * 3), (BEHIND, [(1, 0)]), (LATE_STEP, [(1, 0), (1, 1), (1, 0), (1, 0)])]
)
async def test_tokens_that_this_process_took_up_late_are_not_reported(peer, monkeypatch, ahead, times, reported):
    """`times` are those at which the engine sends a token, and at which this process takes it up.

    The process stands still for 30 ms; or it takes up each token 40 ms late; or 10 ms, and one step takes 30 ms. The
    last token of each case comes at once.
    """
    now = [100.0]
    client = await start(peer, EngineConfig(tbt_target=25.0))
    client.ahead = ahead
    monkeypatch.setattr("holdfast.engine.client.client.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("holdfast.engine.client.pace_report.REPORT_SECONDS", 0.0)
    reader = Reader(client, "r")
    await settle()
    for sent_at, taken_at in times:
        now[0] = taken_at
        peer.give("r", sent_at=sent_at + ahead)
        await settle()
    peer.give("r", FinishReason.LENGTH, sent_at=now[0] + ahead)
    await asyncio.wait_for(reader.task, 60)
    await client.close()
    reports = [message for message in peer.sent if isinstance(message, TokenWaits)]
    assert [(each.count, each.late) for each in reports] == reported


async def test_lines_of_batches_are_not_reported(peer, monkeypatch):
    assert await times_reported(peer, monkeypatch, priority=BATCH_CLASS) == (0, 0)


async def test_without_a_target_nothing_is_reported(peer, monkeypatch):
    assert await times_reported(peer, monkeypatch, target=None) == (0, 0)
