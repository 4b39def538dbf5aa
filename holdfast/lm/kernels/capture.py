"""How a CUDA graph is captured, and how long its replay takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch

from holdfast.core.collector import collector_off

_captured: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
"""Graphs of this process that can still be replayed."""


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Capture into `graph` the launches of this thread inside the block. Their memory comes from `pool`.

    Other threads may allocate or free memory meanwhile. Raises the exceptions of the block and of CUDA.
    """
    _captured.add(graph)
    with collector_off(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        yield


def replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds that a replay takes on the device, the shorter of two. Waits for the device."""
    taken: list[float] = []
    for _ in range(2):
        began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        graph.replay()
        done.record()
        done.synchronize()
        taken.append(began.elapsed_time(done) / 1000)
    return min(taken)


def free_workspaces() -> bool:
    """Free the workspaces that cuBLAS keeps for each thread and stream, and return whether that was safe.

    Captured products write to the workspaces of their capture whenever they are replayed. So nothing is freed while
    this process has a captured graph, as it does if it built an engine before.
    """
    if _captured:
        return False
    torch._C._cuda_clearCublasWorkspaces()
    return True
