"""Messages about sleep."""

from __future__ import annotations

from holdfast.core.sleep import MemoryTag, SleepMode
from holdfast.lm.parts.message import Message


class Sleep(Message, tag="sleep"):
    """To the engine: return the device's memory. The answer is Slept once that is done, or SleepRefused."""

    number: int
    level: int
    mode: SleepMode


class WakeUp(Message, tag="wake-up"):
    """To the engine: take memory of these kinds back, or all. The answer is Slept once it is there, or SleepRefused."""

    number: int
    tags: list[MemoryTag]


class Slept(Message, tag="slept"):
    """From the engine: the answer to Sleep and WakeUp, which are done."""

    number: int


class SleepRefused(Message, tag="sleep-refused"):
    """From the engine: it does not fall asleep, or not wake up, with the reason."""

    number: int
    reason: str


class Asleep(Message, tag="asleep"):
    """From the engine: it takes no request now, because it sleeps."""

    request_id: str


ToEngine = Sleep | WakeUp
FromEngine = Slept | SleepRefused | Asleep
