"""Memory in large pages for weights on a CPU. Reading it fast is then not held up by finding small pages."""

from __future__ import annotations

import ctypes
import math
import sys

import torch

PAGE = 2 << 20
"""Bytes of a large page on x86 and on ARM with pages of 4 KiB, and the smallest tensor that gets one."""
MADV_HUGEPAGE = 14
"""Linux's number of the advice to use large pages (asm-generic/mman-common.h)."""


def empty_in_large_pages(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor on the CPU that is not filled, and begins at a large page if it is as large as one.

    Systems that have no large pages, or refuse them, give usual ones. The end of a tensor that fills no large page
    stays in small ones, so this takes no more memory.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < PAGE or sys.platform != "linux":
        return torch.empty(shape, dtype=dtype)
    whole = torch.empty(size + PAGE, dtype=torch.uint8)
    skipped = -whole.data_ptr() % PAGE
    own = whole[skipped : skipped + size]
    ctypes.CDLL(None).madvise(ctypes.c_void_p(own.data_ptr()), ctypes.c_size_t(size // PAGE * PAGE), MADV_HUGEPAGE)
    return own.view(dtype).view(shape)
