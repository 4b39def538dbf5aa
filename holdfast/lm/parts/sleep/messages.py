"""Messages about sleep."""

from __future__ import annotations

from typing import Literal, get_args

from holdfast.lm.parts.message import Message

SleepMode = Literal["abort", "wait", "keep"]
Tag = Literal["weights", "kv_cache"]
LEVELS = (1, 2)
"""1 keeps the weights on the host; 2 drops them, and they are read from the checkpoint again."""
MODES: tuple[SleepMode, ...] = get_args(SleepMode)
"""The treatment of requests that run: end them, wait for them, or suspend them until the engine is awake."""
TAGS: tuple[Tag, ...] = get_args(Tag)
"""The kinds of memory that can be woken up by themselves."""


class Sleep(Message, tag="sleep"):
    """To the engine: return the device's memory. The answer is Slept once that is done, or SleepRefused."""

    number: int
    level: int
    mode: SleepMode


class WakeUp(Message, tag="wake-up"):
    """To the engine: take memory of these kinds back, or all. The answer is Slept once it is there, or SleepRefused."""

    number: int
    tags: list[Tag]


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
