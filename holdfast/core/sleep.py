"""Sleep: the levels, modes and tags of an engine that returns its device's memory for a while. The names are vLLM's."""

from __future__ import annotations

from typing import Literal, get_args

SleepMode = Literal["abort", "wait", "keep"]
MemoryTag = Literal["weights", "kv_cache"]
LEVELS = (1, 2)
"""1 keeps the weights on the host; 2 drops them, and they are read from the checkpoint again."""
MODES: tuple[SleepMode, ...] = get_args(SleepMode)
"""The treatment of requests that run: end them, wait for them, or suspend them until the engine is awake."""
TAGS: tuple[MemoryTag, ...] = get_args(MemoryTag)
"""The kinds of memory that can be woken up by themselves."""
SLEEP_OFF = "sleep mode is off: start the engine with enable_sleep_mode"
"""Reason why an engine without sleep mode refuses an order."""
