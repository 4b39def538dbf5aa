"""The library of integer products (products.c), the operations around them (layers.c), and whole steps (step.c).

An install compiles it if it finds a C compiler.
"""

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
STEP_SIZE = 200
"""Bytes of `struct step` of integer.h. A library in which they differ is of other sources."""
OUT_OF_MEMORY = 2
LINE = 64
"""Bytes of a line of the CPU's caches."""


class _Norm(ctypes.Structure):
    """struct norm of integer.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("stream", "out", "added", "weight")),
        *(("width", ctypes.c_int64), ("eps", ctypes.c_float)),
    )


class _Gate(ctypes.Structure):
    """struct gate of integer.h."""

    _fields_ = (("both", ctypes.c_void_p), ("out", ctypes.c_void_p), ("width", ctypes.c_int64))


class _Rotation(ctypes.Structure):
    """struct rotation of integer.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "cosine", "sine", "slots", "query", "key_cache", "value_cache")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim")),
    )


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded library. Its operations read and write contiguous tensors on a CPU."""

    functions: Any
    """The library's own functions."""
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
        if x.dtype not in TYPES or not x.is_cpu:
            raise ValueError(
                f"activations are {x.dtype} on {x.device.type}; integer products take float32 or bfloat16 on a CPU"
            )
        out = x.new_empty(rows, outputs)
        if not rows:
            return out
        x, half = x.contiguous(), x.dtype == torch.bfloat16
        status = self.functions.holdfast_multiply(
            *(data.data_ptr(), factors.data_ptr(), outputs, inputs, bits, x.data_ptr(), rows, half, out.data_ptr()),
            *self._how(),
        )
        if status == OUT_OF_MEMORY:
            raise MemoryError(f"no memory for {rows} rounded activations of {inputs} inputs")
        if status:
            raise ValueError(f"a weight [{outputs}, {inputs}] of {bits} bits cannot be multiplied as integers")
        return out

    def norm(self, stream: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Add `added` to the stream [T, width] in place; return the sum's RMS norm times weight [width]. All bfloat16.

        Raises ValueError for tensors that the library does not take.
        """
        rows, width = stream.shape
        _check("a norm", stream, weight, *(() if added is None else (added,)))
        if weight.shape != (width,) or (added is not None and added.shape != stream.shape):
            raise ValueError(f"a norm of {[*stream.shape]} has a weight {[*weight.shape]}, or adds another shape")
        out = torch.empty_like(stream)
        pointer = None if added is None else added.data_ptr()
        norm = _Norm(stream.data_ptr(), out.data_ptr(), pointer, weight.data_ptr(), width, eps)
        _done("a norm", self.functions.holdfast_norm(ctypes.byref(norm), rows, *self._how()), width)
        return out

    def gate(self, both: torch.Tensor) -> torch.Tensor:
        """SiLU(gate) * up, [T, N], of both [T, 2 N] in bfloat16. Raises ValueError for other tensors."""
        rows, width = len(both), both.shape[1] // 2
        _check("a gate", both)
        if both.shape[1] % 2:
            raise ValueError(f"a gate of {both.shape[1]} numbers has no halves")
        out = both.new_empty(rows, width)
        gate = _Gate(both.data_ptr(), out.data_ptr(), width)
        _done("a gate", self.functions.holdfast_gate(ctypes.byref(gate), rows, *self._how()), width)
        return out

    def rotate(
        self,
        qkv: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        caches: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        heads: int,
    ) -> torch.Tensor:
        """Rotate queries and keys of qkv [T, (H + 2 Hkv) D], write keys and values to the caches, return the queries.

        `rotation` has cosine and sine [T, 1, D], the sine negative in the first half. Everything is bfloat16, but the
        slots [T], which are int64. Raises ValueError for other tensors, and for a slot that the caches lack.
        """
        (*_, kv_heads, dim), rows = caches[0].shape, len(qkv)
        _check("a rotation", qkv, *rotation, *caches)
        if caches[0].shape != caches[1].shape or qkv.shape[1] != (heads + 2 * kv_heads) * dim:
            raise ValueError(
                f"{[*qkv.shape]} is not {heads} heads and twice {kv_heads} of {dim} numbers, as the caches"
            )
        if any(each.shape != (rows, 1, dim) for each in rotation):
            raise ValueError(
                f"cosine and sine of {rows} rows of {dim} numbers are {[[*each.shape] for each in rotation]}"
            )
        if slots.dtype != torch.int64 or not slots.is_contiguous() or len(slots) != rows:
            raise ValueError(f"slots are {slots.dtype} {[*slots.shape]}; a rotation of {rows} rows takes int64")
        query = qkv.new_empty(rows, heads, dim)
        tensors = (qkv, *rotation, slots, query, *caches)
        operation = _Rotation(*(each.data_ptr() for each in tensors), heads, kv_heads, dim)
        places = caches[0].numel() // (kv_heads * dim)
        status = self.functions.holdfast_rotate(ctypes.byref(operation), rows, places, *self._how())
        if status:
            raise ValueError(f"a slot is not below {places}, or a head of {dim} numbers has no halves")
        return query

    def step_bytes(self, decoder: ctypes.Structure, step: ctypes.Structure) -> int:
        """Bytes of memory that `step` needs for activations."""
        size: int = self.functions.holdfast_step_bytes(
            ctypes.byref(decoder), ctypes.byref(step), torch.get_num_threads()
        )
        return size + LINE

    def step(self, decoder: ctypes.Structure, step: ctypes.Structure, scratch: torch.Tensor) -> int:
        """Compute a step (`struct step` of integer.h) of a decoder. Returns the library's status, 0 if it succeeded.

        `scratch` has `step_bytes` of uint8.
        """
        return self._in_scratch(self.functions.holdfast_step, decoder, step, scratch)

    def head(self, decoder: ctypes.Structure, step: ctypes.Structure, scratch: torch.Tensor) -> int:
        """Compute the logits of a step's `normed` rows alone. See `step`."""
        return self._in_scratch(self.functions.holdfast_head, decoder, step, scratch)

    def _in_scratch(
        self, function: Any, decoder: ctypes.Structure, step: ctypes.Structure, scratch: torch.Tensor
    ) -> int:
        step.scratch = -(-scratch.data_ptr() // LINE) * LINE
        status: int = function(ctypes.byref(decoder), ctypes.byref(step), *self._how())
        return status

    def _how(self) -> tuple[Any, ...]:
        """The last arguments of every function: PyTorch's threads, and the instructions to use."""
        return self.parallel, torch.get_num_threads(), self.level


def _check(what: str, *tensors: torch.Tensor) -> None:
    for each in tensors:
        if each.dtype != torch.bfloat16 or not each.is_contiguous() or not each.is_cpu:
            raise ValueError(f"{what} takes contiguous bfloat16 on a CPU, and a tensor is {each.dtype} {each.stride()}")


def _done(what: str, status: int, width: int) -> None:
    if status:
        raise ValueError(f"{what} of rows with {width} numbers is not possible")


@cache
def library() -> Library | None:
    """The library with the best instructions of this CPU; None if it was not compiled, or PyTorch has no OpenMP."""
    return open_library(FILE)


def library_for(device: torch.device, dtype: torch.dtype) -> Library | None:
    """The library, if weights of a model in `dtype` on this device are multiplied as integers.

    They are with bfloat16 alone: a model in float32 is there to be exact, and its activations are not rounded.
    """
    return library() if _is_asked(device, dtype) else None


def step_library(device: torch.device) -> Library | None:
    """The library, if it computes whole steps faster on this device than PyTorch: on a CPU with AVX2 or AVX-512."""
    found = library() if device.type == "cpu" else None
    return found if found is not None and found.level else None


def is_missing(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights would be multiplied as integers, but for the library."""
    return _is_asked(device, dtype) and library() is None


def _is_asked(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype == torch.bfloat16


def open_library(file: Path) -> Library | None:
    """The library in a file; None if it cannot be used.

    It may be one of another system, or of an older version of its sources; or PyTorch may have no GNU OpenMP.
    """
    pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    how = (pointer, number, number)
    try:
        found = ctypes.CDLL(str(file))
        parallel = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
        found.holdfast_multiply.argtypes = (
            *(pointer, pointer, size, size, number, pointer, size, number, pointer),
            *how,
        )
        found.holdfast_norm.argtypes = found.holdfast_gate.argtypes = (pointer, size, *how)
        found.holdfast_rotate.argtypes = (pointer, size, size, *how)
        found.holdfast_step_bytes.argtypes, found.holdfast_step_bytes.restype = (pointer, pointer, number), size
        found.holdfast_step_size.argtypes, found.holdfast_step_size.restype = (), size
        found.holdfast_step.argtypes = found.holdfast_head.argtypes = (pointer, pointer, *how)
        if found.holdfast_step_size() != STEP_SIZE:
            return None
    except (OSError, AttributeError):
        return None
    return Library(found, ctypes.cast(parallel, pointer), found.holdfast_level())
