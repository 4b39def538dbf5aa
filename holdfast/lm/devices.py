"""A device in words, and how much memory it has."""

from __future__ import annotations

import os
import platform
import resource
import sys
from pathlib import Path

import torch


def describe_device(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"CPU ({platform.machine()}, {threads} thread{'s' if threads > 1 else ''})"


def memory_of(device: torch.device) -> tuple[int, int]:
    """Free and total bytes. On a CPU, the bytes that can be allocated without swapping, within the cgroup.

    A cgroup's inactive file cache counts as free: reading a checkpoint fills it.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = total // 2
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and (most := limit.read_text().strip()).isdigit():
        total = min(total, int(most))
        statistics = dict(line.split() for line in (limit.parent / "memory.stat").read_text().splitlines())
        free = min(free, int(most) - int(used.read_text()) + int(statistics.get("inactive_file", 0)))
    return max(free, 0), total


def memory_of_others(device: torch.device, free: int, total: int, reserved: float, own: int = 0) -> int:
    """Bytes of a GPU that are used, by this process as well, or `reserved` for others as a share of `total`.

    `own` is what this process has taken from the GPU without PyTorch's allocator.
    """
    return max(total - free, taken_memory(device) + own + int(reserved * total))


def taken_memory(device: torch.device) -> int:
    """Bytes that PyTorch's allocator holds on a GPU now; on a CPU, the most that the process ever held."""
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
