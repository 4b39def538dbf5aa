"""Programmatic dependent launch and a side stream, by which kernels overlap, and the shared memory of a program."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

FIRST_CAPABILITY = (9, 0)
"""Lowest compute capability of GPUs with programmatic dependent launch (Hopper)."""


@cache
def dependent_launch_options(device: torch.device) -> dict[str, bool]:
    """Options of a kernel that calls `launch_dependents` and `wait_for_previous`. Both do nothing on older GPUs."""
    supported = device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY
    return {"DEPENDENT": supported, "launch_pdl": supported}


@triton.jit
def launch_dependents(DEPENDENT: tl.constexpr):
    """Let programs of the next kernel start on processors that this kernel leaves free.

    Until its own `wait_for_previous` returns, the next kernel may read only weights and data that the host wrote before
    the step. It must not read the output of this kernel or of an earlier one.
    """
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Wait until the previous kernel is done.

    Each kernel calls this before it writes, so all earlier ones are done too.
    """
    if DEPENDENT:
        gdc_wait()


@cache
def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory that a program may have on the device. A CPU has none."""
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


class SideStream:
    """A high-priority stream that forks from the current stream and joins it again. CUDA graphs capture both.

    When kernels of both streams compete for a processor, those of the side stream go first. On a CPU everything runs in
    order.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Launches inside run after those already on the current stream, and overlap those that follow until `join`.

        Memory that they use must not be freed before `join`.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Make the current stream wait for everything launched inside `fork`."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
