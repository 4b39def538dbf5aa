"""Kernels beside each other: launches that do not depend on what the current stream launches next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Branch:
    """A stream that leaves the current one and comes back to it; in a CUDA graph, a branch of it.

    What it launches comes first where both would take the same place. On a CPU everything runs in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @contextmanager
    def fork(self) -> Iterator[None]:
        """What is launched within follows what the current stream has so far, and runs beside what comes until `join`.

        Memory that it uses must not be given back before `join`.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """The current stream goes on when all that was launched in `fork` is done."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
