"""Copies of blocks between the device's cache and pinned host memory, by the GPU's copy engine.

A block is one run of some 32 KB for each layer's keys and values, equally far apart in either cache: a rectangle, which
the engine copies in one call. So a copy takes no processor from the model. A kernel that reads the host's memory itself
is as fast alone, but beside a prefill its programs wait for a place among those of the matrix products.
"""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

UNIFIED = 4
"""CU_MEMORYTYPE_UNIFIED: the address itself says whether it lies on the host or on a device."""

Numbers = npt.NDArray[np.int64]


class Rectangle(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver's interface: `height` rows of `width` bytes, each side with its own pitch."""

    _fields_ = (
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_kind", ctypes.c_int),
        ("source_host", ctypes.c_void_p),
        ("source", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("target_x", ctypes.c_size_t),
        ("target_y", ctypes.c_size_t),
        ("target_kind", ctypes.c_int),
        ("target_host", ctypes.c_void_p),
        ("target", ctypes.c_uint64),
        ("target_array", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


def adjacent(source_blocks: Numbers, target_blocks: Numbers) -> list[tuple[int, int, int]]:
    """The pairs (source, target) as (source, target, count): runs of blocks that follow one another on both sides."""
    breaks = np.flatnonzero((np.diff(source_blocks) != 1) | (np.diff(target_blocks) != 1)) + 1
    firsts = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((firsts, [len(source_blocks)])))
    return list(zip(source_blocks[firsts].tolist(), target_blocks[firsts].tolist(), counts.tolist(), strict=True))


def copy_runs(source: torch.Tensor, source_blocks: Numbers, target: torch.Tensor, target_blocks: Numbers) -> None:
    """Copy blocks of one cache's data [layers, 2, num_blocks, ...] to another's, on the current stream.

    One lies on the device, the other in pinned host memory. Both are as contiguous as a slice of a cache's layers; the
    pairs of blocks (int64 [n] each, at least one) do not overlap. Raises RuntimeError where the driver refuses.
    """
    run = source[0, 0, 0].numel() * source.element_size()
    rectangle = Rectangle(
        source_kind=UNIFIED,
        source_pitch=source.stride(1) * source.element_size(),
        target_kind=UNIFIED,
        target_pitch=target.stride(1) * target.element_size(),
        height=source.shape[0] * source.shape[1],
    )
    start, call, from_, to = driver(), ctypes.byref(rectangle), source.data_ptr(), target.data_ptr()
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    for source_block, target_block, count in adjacent(source_blocks, target_blocks):
        rectangle.source = from_ + source_block * run
        rectangle.target = to + target_block * run
        rectangle.width = count * run
        status = start(call, stream)
        if status:
            raise RuntimeError(f"copying {count} blocks from {source_block} to {target_block}: CUDA error {status}")


@cache
def driver() -> ctypes._NamedFuncPointer:
    """The driver's asynchronous copy of a rectangle."""
    return ctypes.CDLL("libcuda.so.1").cuMemcpy2DAsync_v2
