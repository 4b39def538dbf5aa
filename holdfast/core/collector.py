"""A context in which Python's garbage collector does not run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep the garbage collector from running inside the block.

    A CUDA graph cannot be destroyed while another is captured: the capture fails. The collector may run at any
    allocation, so it may free an old graph during a capture. `gc.collect()` still collects.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
