"""The context in which a CUDA graph is captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from holdfast.core.collector import collector_off


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Capture into `graph` the launches of this thread inside the block. Their memory comes from `pool`.

    Other threads may allocate or free memory meanwhile. Raises the exceptions of the block and of CUDA.
    """
    with collector_off(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        yield
