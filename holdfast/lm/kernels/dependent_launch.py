"""Kernels in a chain: each starts while the one before it ends (programmatic dependent launch, from Hopper on)."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FIRST_CAPABILITY = (9, 0)


@cache
def chaining(device: torch.device) -> dict[str, bool]:
    """The launch options that make a kernel part of a chain, where the device can."""
    chained = device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY
    return {"CHAINED": chained, "launch_pdl": chained}


@triton.jit
def release(CHAINED: tl.constexpr):
    """Let the next kernel's programs take what room this one's leave.

    They must not read what this kernel, or one before it in the chain, writes until `follow` has returned. Until
    then they may read what the host has put in place before the step, and weights.
    """
    if CHAINED:
        gdc_launch_dependents()


@triton.jit
def follow(CHAINED: tl.constexpr):
    """Wait until the kernel before is done, and so all before it, as each calls this. Nothing is written earlier."""
    if CHAINED:
        gdc_wait()
