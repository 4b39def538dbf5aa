"""The library of integer products (products.c), which an install compiles if it finds a C compiler."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

FILE = Path(__file__).with_name("products.so")
LEVELS = ("plain C", "AVX2", "AVX-512 VNNI")
"""Instructions that the library has code for, by its numbers for them."""
TYPES = (torch.float32, torch.bfloat16)
"""Types of activations and of results."""
OUT_OF_MEMORY = 2


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded library."""

    multiply: Any
    """holdfast_multiply of products.c."""
    parallel: ctypes.c_void_p
    """GOMP_parallel of the OpenMP library that PyTorch uses."""
    level: int
    """Index in LEVELS of the instructions to use."""

    def product(
        self, data: torch.Tensor, factors: torch.Tensor, bits: int, x: torch.Tensor, outputs: int
    ) -> torch.Tensor:
        """x [T, K] times a weight transposed, [T, N] in the dtype of x. `data` and `factors` are an IntegerWeight's.

        Raises ValueError for sizes or a dtype that the library does not take.
        """
        rows, inputs = x.shape
        if x.dtype not in TYPES or x.device.type != "cpu":
            raise ValueError(
                f"activations are {x.dtype} on {x.device.type}; integer products take float32 or bfloat16 on a CPU"
            )
        out = x.new_empty(rows, outputs)
        if not rows:
            return out
        x, half = x.contiguous(), x.dtype == torch.bfloat16
        told = self.multiply(
            *(data.data_ptr(), factors.data_ptr(), outputs, inputs, bits, x.data_ptr(), rows, half, out.data_ptr()),
            *(self.parallel, torch.get_num_threads(), self.level),
        )
        if told == OUT_OF_MEMORY:
            raise MemoryError(f"no memory for {rows} rounded activations of {inputs} inputs")
        if told:
            raise ValueError(f"a weight [{outputs}, {inputs}] of {bits} bits cannot be multiplied as integers")
        return out


@cache
def library() -> Library | None:
    """The library with the best instructions of this CPU; None if it was not compiled, or PyTorch has no OpenMP."""
    return open_library(FILE) if FILE.is_file() else None


def library_for(device: torch.device, dtype: torch.dtype) -> Library | None:
    """The library, if weights of a model in `dtype` on this device are multiplied as integers.

    They are with bfloat16 alone: a model in float32 is there to be exact, and its activations are not rounded.
    """
    return library() if _is_asked(device, dtype) else None


def is_missing(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights would be multiplied as integers, but for the library."""
    return _is_asked(device, dtype) and library() is None


def _is_asked(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype == torch.bfloat16


def open_library(file: Path) -> Library | None:
    """The library in a file; None if it cannot be loaded, as one of another system, or PyTorch has no GNU OpenMP."""
    try:
        found = ctypes.CDLL(str(file))
        parallel = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    found.holdfast_multiply.argtypes = (
        *(pointer, pointer, size, size, number, pointer, size, number, pointer),
        *(pointer, number, number),
    )
    return Library(found.holdfast_multiply, ctypes.cast(parallel, pointer), found.holdfast_level())
