"""Energy that the visible GPUs have used: NVML's total energy counters, in joules, and a log of them over time."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

LIBRARY = "libnvidia-ml.so.1"
PERIOD = 0.01
"""Seconds between two readings of a log. NVML renews its counters about every 20 to 100 ms."""

Counter = Callable[[], float]
"""Function that returns the joules used so far, since some time in the past."""


def energy_counter(library: str = LIBRARY, visible: str | None = None) -> Counter | None:
    """The sum of the total energy counters of the GPUs that this process may use; None if they cannot be read.

    `visible` has the form of CUDA_VISIBLE_DEVICES, which it is by default: numbers or UUIDs, with commas. A slice of a
    GPU (MIG) has no counter of its own, nor has a GPU older than Volta.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return None
    names = [str(index) for index in range(count.value)] if visible is None else visible.split(",")
    handles: list[ctypes.c_void_p] = []
    for name in map(str.strip, names):
        handle = ctypes.c_void_p()
        if name.isdigit():
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
        else:
            failed = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        if failed:
            return None
        handles.append(handle)

    def joules() -> float:
        total, used = 0, ctypes.c_ulonglong()
        for handle in handles:
            if nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(used)):
                raise OSError("NVML no longer gives the energy of a GPU")
            total += used.value
        return total / 1e3  # from millijoules

    try:
        joules()
    except OSError:
        return None
    return joules if handles else None


def joules_per_token(used: float | None, output: float, total: float) -> dict[str, float]:
    """The figures of work that used this energy in joules; none if it is not known, or if there were no tokens."""
    if used is None or not output or not total:
        return {}
    return dict(joules=round(used, 1), joules_output_token=round(used / output, 4), joules_token=round(used / total, 4))


@dataclass
class EnergyLog:
    """Readings of a counter over time, for work in other processes whose times are known only afterwards."""

    at: list[float] = field(default_factory=list)
    """Time of each new reading on the monotonic clock, ascending."""
    joules: list[float] = field(default_factory=list)

    def note(self, now: float, joules: float) -> None:
        """Add a reading, unless the counter has not moved since the last one."""
        if not self.joules or joules != self.joules[-1]:
            self.at.append(now)
            self.joules.append(joules)

    def used(self, begin: float, end: float) -> float | None:
        """Joules used between two times, with the same power between two readings; None if the log has no two."""
        if len(self.at) < 2 or begin >= end:
            return None
        return self._until(end) - self._until(begin)

    def _until(self, moment: float) -> float:
        right = min(max(1, bisect_right(self.at, moment)), len(self.at) - 1)
        (before, after), (first, then) = self.at[right - 1 : right + 1], self.joules[right - 1 : right + 1]
        share = min(1.0, max(0.0, (moment - before) / (after - before)))
        return first + share * (then - first)


@contextmanager
def energy_log(counter: Counter | None) -> Iterator[EnergyLog]:
    """A log that a thread writes until the context ends; empty without a counter."""
    log, ended = EnergyLog(), threading.Event()
    if counter is None:
        yield log
        return

    def read() -> None:
        while not ended.wait(PERIOD):
            log.note(time.monotonic(), counter())

    thread = threading.Thread(target=read, name="energy", daemon=True)
    thread.start()
    try:
        yield log
    finally:
        ended.set()
        thread.join()
