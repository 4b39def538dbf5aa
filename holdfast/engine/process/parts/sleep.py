"""Sleep: the device's memory is returned while nobody needs the engine, and taken back in time."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import ClassVar, Protocol

from holdfast.core.columns import Columns
from holdfast.core.sleep import SLEEP_OFF, SleepMode
from holdfast.core.types import NO_OUTPUT, FinishReason, Request, SequenceOutput
from holdfast.engine import messages
from holdfast.engine.process.handler import Gate, Handler, Refusal, refusal
from holdfast.engine.process.part_builder import PartBuilder, Served, Site
from holdfast.engine.ranks.paged import weights_of
from holdfast.lm.config import EngineConfig
from holdfast.lm.parts.sleep.messages import Asleep, Sleep, SleepRefused, Slept, WakeUp
from holdfast.lm.parts.sleep.planner import SleepPart
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.loop.contracts import Clock

FLUSH_SECONDS = 10.0
"""Most seconds without progress for which a device at rest waits until the tiers below the host have written enough."""

log = logging.getLogger("holdfast.engine")


class Memory(Protocol):
    """The memory of a device: `lm.execution.returnable_memory.SleepMemory`."""

    @property
    def is_awake(self) -> bool:
        """Whether all memory is there."""
        ...

    def sleep(self, level: int) -> None:
        """Return the memory. Raises MemoryError."""

    def wake(self, tags: list[str]) -> None:
        """Take memory of these tags back; all if there are none. Raises MemoryError, ValueError, OSError."""


class SleepHandler(Handler, Gate):
    """Puts the engine to sleep and wakes it up, one order after the other. A sleeping engine takes no requests."""

    receives = (Sleep, WakeUp)

    def __init__(self, scheduler: Scheduler, memory: Memory, clock: Clock, wake: Callable[[], None]) -> None:
        """`wake` is called in another thread when memory was returned or taken back."""
        self._scheduler, self._memory, self._clock, self._wake = scheduler, memory, clock, wake
        self._part = scheduler.part(SleepPart)
        self._orders: deque[Sleep | WakeUp] = deque()
        """The orders that have not been answered, oldest first. The first one is being carried out."""
        self._begun = False
        """Whether the first order was begun."""
        self._level = 0
        """Level of the sleep that has begun; 0: the engine is awake."""
        self._rests_at = inf
        """Time from which a device at rest no longer waits for the tiers below the host; infinity: it does not wait."""
        self._works: list[Work] = []
        """The change of memory that is under way, if there is one."""
        self._ready: list[messages.FromEngine] = []
        """Answers that were not sent yet."""
        self.halted = False
        """Whether no step may begin, because memory is absent or about to be."""

    def receive(self, message: Sleep | WakeUp) -> None:
        if not self.halted:
            self._change_mind(message)
        self._orders.append(message)

    def _change_mind(self, message: Sleep | WakeUp) -> None:
        """Let an order change how the engine falls asleep, as long as it has its memory."""
        if isinstance(message, WakeUp):
            given_up = [order for order in self._orders if isinstance(order, Sleep)]
            self._ready += [SleepRefused(order.number, "the engine was woken up before it slept") for order in given_up]
            self._orders = deque(order for order in self._orders if isinstance(order, WakeUp))
            if self._level:
                self._open()
        elif self._level:
            self._settle(message.mode)

    def take(self, request: Request) -> bool:
        """Refuse a request while the engine sleeps or falls asleep."""
        if self._level:
            self._ready.append(Asleep(request.id))
        return self._level > 0

    @property
    def busy(self) -> bool:
        return bool(self._orders)

    @property
    def awaited(self) -> bool:
        """Whether the device is at rest and waits for the tiers below the host."""
        return self._level > 0 and not self.halted and self._part.is_held_up

    @property
    def ready(self) -> bool:
        if self._ready:
            return True
        if self._works:
            return self._works[0].is_done
        return bool(self._orders) and (not self._begun or self._may_sleep)

    def answers(self) -> Iterable[messages.FromEngine]:
        """Carry the orders out, as far as that is possible now. Gives the answers."""
        while self._orders and self._advance(self._orders[0]):
            self._orders.popleft()
            self._begun = False
        answers, self._ready = self._ready, []
        return answers

    def stats(self) -> Mapping[str, float]:
        return {"sleep_level": self._level}

    def stop(self) -> None:
        """Wait until the memory is as an order wants it."""
        for work in self._works:
            work.join()

    def _advance(self, order: Sleep | WakeUp) -> bool:
        """Carry an order out as far as possible. Returns whether it was answered."""
        if not self._begun:
            self._begun = True
            if isinstance(order, Sleep):
                self._fall_asleep(order)
            elif self.halted:
                self._start(lambda: self._memory.wake([*order.tags]))
            else:
                self._ready.append(Slept(order.number))
                return True
        if isinstance(order, Sleep) and not self._works and self._may_sleep:
            self._part.forget(self._clock())
            self._start(lambda: self._memory.sleep(order.level))
        if not self._works or not self._works[0].is_done:
            return False
        error = self._works.pop().error
        self._ready.append(SleepRefused(order.number, error) if error else Slept(order.number))
        if self._memory.is_awake:
            self._open()
        return True

    def _fall_asleep(self, order: Sleep) -> None:
        """Begin to bring the device to rest, or return more memory of an engine that sleeps."""
        self._level = max(self._level, order.level)
        if self.halted:  # memory that was woken up, or kept on the host, goes now
            self._start(lambda: self._memory.sleep(order.level))
        else:
            log.info("holdfast: falls asleep at level %d (mode %s)", order.level, order.mode)
            self._settle(order.mode)

    def _settle(self, mode: SleepMode) -> None:
        """Bring the device to rest: end the requests that run, wait for them or suspend them."""
        self._part.close(suspend=mode == "keep")
        if mode == "abort":
            self._abort_all()

    @property
    def _may_sleep(self) -> bool:
        """Whether the device is at rest, and what the host takes of its state is there, or came too slowly."""
        if self.halted or not self._begun or not self._part.at_rest:
            return False
        if self._part.has_flushed:
            return True
        if not self._part.is_held_up:
            self._rests_at = inf
            return False
        self._rests_at = min(self._rests_at, self._clock() + FLUSH_SECONDS)
        return self._clock() >= self._rests_at

    def _start(self, change: Callable[[], None]) -> None:
        """Change the memory in a thread, so that the loop goes on to answer messages."""
        self.halted = True
        self._works.append(Work(change, self._wake))

    def _open(self) -> None:
        """The engine is awake: let requests run."""
        self._level, self._begun, self.halted, self._rests_at = 0, False, False, inf
        self._part.reopen()
        log.info("holdfast: is awake")

    def _abort_all(self) -> None:
        """End all requests. Their clients get what there is, and the reason."""
        entries = [*self._scheduler.entries.values()]
        if not entries:
            return
        self._scheduler.abort_all()
        ends = [
            NO_OUTPUT._replace(
                request_id=entry.id,
                finish_reason=FinishReason.ABORT,
                cached_tokens=entry.sequence.cached_tokens,
                scheduled_at=entry.sequence.scheduled_at or 0.0,
                preemptions=entry.sequence.preemptions,
                cached_by_tier=entry.sequence.cached_by_tier,
            )
            for entry in entries
        ]
        self._ready.append(messages.Outputs(**Columns.of(SequenceOutput, ends).by_name))


class Work:
    """A change of the device's memory in a thread of its own."""

    def __init__(self, change: Callable[[], None], wake: Callable[[], None]) -> None:
        self._change, self._wake = change, wake
        self.error = ""
        """The reason why it failed; empty: it did not."""
        self.is_done = False
        self._thread = threading.Thread(target=self._run, name="holdfast-sleep", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._change()
        except (MemoryError, ValueError, OSError) as error:
            self.error = str(error) or type(error).__name__
        except Exception as error:
            log.exception("holdfast: the device's memory could not be changed")
            self.error = str(error) or type(error).__name__
        self.is_done = True
        self._wake()


class SleepBuilder(PartBuilder):
    """Builds the handler of an engine that can sleep."""

    name = "sleep"
    refusals: ClassVar[Mapping[type, Refusal]] = dict.fromkeys((Sleep, WakeUp), refusal(SleepRefused, SLEEP_OFF))

    @staticmethod
    def wanted(config: EngineConfig) -> bool:
        return config.enable_sleep_mode

    def handlers(self, served: Served) -> Iterable[Handler]:
        order = self.site.order
        self._handler = SleepHandler(served.scheduler, SameWeights(self.site), self.site.clock, order.wake)
        return (self._handler,)

    def halted(self) -> bool:
        return self._handler.halted


class SameWeights:
    """The memory of a paged device (`Memory`), whose weights must be the same after a sleep at level 2.

    Kept state is that of one model. A checkpoint whose files have changed meanwhile is not served: restart for that.
    """

    def __init__(self, site: Site) -> None:
        """Raises LookupError for a device that cannot sleep."""
        self._device, self._memory = site.paged, site.paged.sleeping
        self._digest = ""

    @property
    def is_awake(self) -> bool:
        return self._memory.is_awake

    def sleep(self, level: int) -> None:
        self._device.in_thread()
        if level > 1 and not self._digest and "weights" not in self._memory.absent:
            self._digest = weights_of(self._device)
        self._memory.sleep(level)

    def wake(self, tags: list[str]) -> None:
        self._device.in_thread()
        again = self._memory.level_of("weights") > 1
        try:
            self._memory.wake(tags)
        except (ValueError, OSError) as error:
            log.warning("holdfast: the weights cannot be read again: %s", error)
            raise ValueError("the checkpoint cannot be read again; the engine's log has the reason") from None
        if again and "weights" not in self._memory.absent and weights_of(self._device) != self._digest:
            self._memory.sleep(2)
            raise ValueError(
                "the checkpoint's weights have changed since the engine fell asleep, and its conversations are those "
                "of the old ones; restart the engine"
            )
