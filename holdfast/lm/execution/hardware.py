"""What can be asked of a device: which one it is, its name, its memory."""

from __future__ import annotations

import os
import platform
import resource
import sys
from pathlib import Path

import torch


def resolve(name: str) -> torch.device:
    """The device that a config's `auto`, `cpu` or `cuda` means. Raises ValueError for cuda without a GPU."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("device is cuda, and PyTorch finds no GPU; choose cpu or auto")
    if name == "cuda" or (name == "auto" and available):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def describe(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"CPU ({platform.machine()}, {threads} thread{'s' if threads > 1 else ''})"


def memory(device: torch.device) -> tuple[int, int]:
    """Bytes free and in all. On a CPU free is what the system would give without swapping, within the cgroup.

    A cgroup's file cache counts as free, as far as it is not in use: a checkpoint that was just read fills it.
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


def taken_memory(device: torch.device) -> int:
    """Bytes taken: what PyTorch's allocator holds on a GPU now, the most that the process ever had on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
