"""Notes of pauses on their way to the part, and the alarm that wakes an idle engine."""

from __future__ import annotations

import threading
import time
from math import inf

import pytest

from holdfast.core.pause import Pause
from holdfast.engine import messages
from holdfast.engine.process.handler import RefusalHandler
from holdfast.engine.process.parts.pauses import Alarm, PauseBuilder, PauseHandler
from holdfast.lm.parts.pauses.messages import NotePause, WarmState


class Rings:
    """Counts the calls of an alarm, and lets a test wait for one."""

    def __init__(self) -> None:
        self.count = 0
        self._rang = threading.Event()

    def __call__(self) -> None:
        self.count += 1
        self._rang.set()

    def wait(self) -> None:
        assert self._rang.wait(60)
        self._rang.clear()


@pytest.mark.parametrize("message", [NotePause("a", "tool:x", 1.5, 60.0, True), WarmState([b"1", b"2"])])
def test_messages_of_pauses_cross_between_the_processes_unchanged(message):
    assert messages.decode_to_engine(messages.encode(message)) == message


def test_a_note_gives_the_time_to_keep_state_as_seconds_from_now():
    note = NotePause.of("a", Pause("person", 2.0, 160.0), 100.0)
    assert note == NotePause("a", "person", 2.0, 60.0) and note.pause(500.0) == Pause("person", 2.0, 560.0)
    assert NotePause.of("a", Pause(), 100.0).pause(500.0) == Pause()


def test_the_alarm_rings_once_at_its_time():
    rings = Rings()
    alarm, began = Alarm(rings, time.monotonic), time.monotonic()
    alarm.set(began + 0.05)
    rings.wait()
    assert time.monotonic() >= began + 0.05
    time.sleep(0.05)
    alarm.close()
    assert rings.count == 1


def test_the_latest_time_counts_and_a_closed_alarm_never_rings():
    rings, now = Rings(), [0.0]
    alarm = Alarm(rings, lambda: now[0])
    alarm.set(60.0)
    alarm.set(0.02)
    now[0] = 1.0
    rings.wait()
    alarm.set(1.02)
    alarm.set(inf)
    now[0] = 2.0
    time.sleep(0.1)
    alarm.set(2.02)
    alarm.close()
    now[0] = 3.0
    time.sleep(0.1)
    assert rings.count == 1


class FakePart:
    """Records what a handler passes on."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.next_look = inf

    def note(self, request_id: str, pause: Pause, now: float) -> None:
        self.calls.append((request_id, pause, now))

    def warm(self, chain: list[bytes], now: float) -> None:
        self.calls.append((chain, now))

    def look(self, now: float) -> None:
        self.calls.append((now,))


def test_a_note_gives_the_part_times_on_the_engines_own_clock():
    part, now = FakePart(), [500.0]
    handler = PauseHandler(part, lambda: now[0], Rings())
    handler.receive(NotePause("a", "tool:x", 1.5, 60.0, False))
    handler.receive(NotePause("b", "branch", superseded=True))
    handler.receive(WarmState([b"1"]))
    handler.stop()
    assert part.calls == [
        ("a", Pause("tool:x", 1.5, 560.0), 500.0),
        ("b", Pause("branch", superseded=True), 500.0),
        ([b"1"], 500.0),
    ]


def test_the_handler_lets_the_part_look_and_wakes_the_engine_for_its_next_look():
    part, rings = FakePart(), Rings()
    handler = PauseHandler(part, time.monotonic, rings)
    part.next_look = time.monotonic() + 0.02
    assert handler.answers() == () and len(part.calls) == 1
    rings.wait()
    handler.stop()


def test_an_engine_without_blocks_ignores_notes():
    handler = RefusalHandler(PauseBuilder.refusals)
    handler.receive(NotePause("a"))
    handler.receive(WarmState([]))
    assert list(handler.answers()) == []
