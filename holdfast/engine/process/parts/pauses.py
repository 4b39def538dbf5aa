"""Pauses of conversations: notes from clients, and the alarm that lets state come back while the engine is idle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import ClassVar

from holdfast.engine import messages
from holdfast.engine.process.handler import Handler, Refusal, no_answer
from holdfast.engine.process.part_builder import PartBuilder, Served
from holdfast.lm.parts.pauses.messages import NotePause, WarmState
from holdfast.lm.parts.pauses.planner import PausePart
from holdfast.loop.contracts import Clock


class Alarm:
    """Calls a function at a time, in a thread of its own. Only the latest time that was set counts."""

    def __init__(self, ring: Callable[[], None], clock: Clock) -> None:
        self._ring, self._clock = ring, clock
        self._at = inf
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="holdfast-pauses", daemon=True)
        self._thread.start()

    def set(self, at: float) -> None:
        """Ring at this time, in seconds on the clock, instead of an earlier wish; infinity: do not ring."""
        if at != self._at:
            with self._changed:
                self._at = at
                self._changed.notify()

    def close(self) -> None:
        """End the thread. The alarm does not ring after this."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                left = self._at - self._clock()
                if left > 0.0:
                    self._changed.wait(None if left == inf else min(left, threading.TIMEOUT_MAX))
                else:
                    self._at = inf
                    self._ring()


class PauseHandler(Handler):
    """Passes on what clients say of pauses, and wakes the engine when state may come back."""

    receives = (NotePause, WarmState)

    def __init__(self, part: PausePart, clock: Clock, wake: Callable[[], None]) -> None:
        self._part, self._clock = part, clock
        self._alarm = Alarm(wake, clock)

    def receive(self, message: NotePause | WarmState) -> None:
        now = self._clock()
        if isinstance(message, WarmState):
            self._part.warm(message.chain, now)
        else:
            self._part.note(message.request_id, message.pause(now), now)

    def answers(self) -> Iterable[messages.FromEngine]:
        """Let the part see which state may come back by now. There are no answers."""
        self._part.look(self._clock())
        self._alarm.set(self._part.next_look)
        return ()

    def stop(self) -> None:
        self._alarm.close()


class PauseBuilder(PartBuilder):
    """Builds the handler of notes about pauses, if the cache has blocks."""

    name = "pauses"
    is_optional = True
    refusals: ClassVar[Mapping[type, Refusal]] = {NotePause: no_answer, WarmState: no_answer}

    def handlers(self, served: Served) -> Iterable[Handler]:
        parts = [part for part in served.scheduler.parts if isinstance(part, PausePart)]
        return [PauseHandler(part, self.site.clock, self.site.order.wake) for part in parts]
