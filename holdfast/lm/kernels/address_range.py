"""Address ranges whose memory can be returned to the device, and be there again at the same addresses later.

CUDA graphs, kernels and views hold addresses. Memory that PyTorch allocates has new addresses each time, so the ranges
here use the driver's virtual memory management: the addresses are reserved once, and memory is mapped to them and
unmapped. On a CPU a private mapping of the system does the same.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, Protocol

import torch

PAGE = 2 << 20
"""Bytes of a large page of the host, and the smallest piece that a GPU maps. Pieces are multiples of it."""

ALLOCATION_PINNED, LOCATION_DEVICE, ACCESS_READ_WRITE, GRANULARITY_MINIMUM = 1, 1, 3, 0
"""Values of CUmemAllocationType, CUmemLocationType, CUmemAccess_flags and CUmemAllocationGranularity_flags."""
OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""


class AddressRange(Protocol):
    """Reserved addresses on one device. Its memory is mapped and unmapped in pieces, multiples of `granularity`."""

    granularity: int

    def map(self, start: int, stop: int) -> None:
        """Map new memory to the bytes [start, stop). Its content is undefined. Raises MemoryError."""
        ...

    def unmap(self, start: int, stop: int) -> None:
        """Return the memory of these bytes, mapped by one call, to the device. Nothing may be using it."""
        ...

    def tensor(self) -> torch.Tensor:
        """All bytes, uint8. Only those that are mapped may be read or written. The first ones must be mapped."""
        ...


def reserve(size: int, device: torch.device) -> AddressRange:
    """Reserve at least `size` bytes of addresses on a device. Raises MemoryError."""
    return CudaRange(size, device) if device.type == "cuda" else HostRange(size)


class HostRange:
    """Addresses of the host's memory (`AddressRange`). Their memory comes with the first write."""

    granularity = PAGE

    def __init__(self, size: int) -> None:
        whole = -(-size // PAGE) * PAGE
        self._memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)

    def map(self, start: int, stop: int) -> None:
        """Do nothing: the system gives memory to the pages that are written."""

    def unmap(self, start: int, stop: int) -> None:
        self._memory.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def tensor(self) -> torch.Tensor:
        return torch.frombuffer(self._memory, dtype=torch.uint8)


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class CudaRange:
    """Addresses of a GPU's memory (`AddressRange`). They stay reserved until the process ends."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        index = torch.cuda.current_device() if device.index is None else device.index
        with torch.cuda.device(index):
            torch.cuda.current_stream().synchronize()  # the runtime makes the device's context the thread's own
        self._index = index
        self._driver = ctypes.CDLL("libcuda.so.1")
        location = _Location(LOCATION_DEVICE, index)
        self._properties = _Properties(type=ALLOCATION_PINNED, location=location)
        self._access = _Access(location, ACCESS_READ_WRITE)
        granularity, start = ctypes.c_size_t(), ctypes.c_uint64()
        self._call(
            "cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties),
            ctypes.c_int(GRANULARITY_MINIMUM),
        )  # fmt: skip
        self.granularity = max(PAGE, granularity.value)
        self._size = -(-size // self.granularity) * self.granularity
        self._call(
            "cuMemAddressReserve", ctypes.byref(start), ctypes.c_size_t(self._size), ctypes.c_size_t(0),
            ctypes.c_uint64(0), ctypes.c_uint64(0),
        )  # fmt: skip
        self._start = start.value

    def map(self, start: int, stop: int) -> None:
        address, size, handle = ctypes.c_uint64(self._start + start), ctypes.c_size_t(stop - start), ctypes.c_uint64()
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), ctypes.c_uint64(0))
        try:
            self._call("cuMemMap", address, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        finally:
            self._call("cuMemRelease", handle)  # the memory stays as long as it is mapped
        try:
            self._call("cuMemSetAccess", address, size, ctypes.byref(self._access), ctypes.c_size_t(1))
        except BaseException:
            self.unmap(start, stop)
            raise

    def unmap(self, start: int, stop: int) -> None:
        self._call("cuMemUnmap", ctypes.c_uint64(self._start + start), ctypes.c_size_t(stop - start))

    def tensor(self) -> torch.Tensor:
        whole = torch.as_tensor(_Bytes(self._start, self._size), device=torch.device("cuda", self._index))
        if whole.data_ptr() != self._start:
            raise RuntimeError("PyTorch has copied memory that it was to use in place")
        return whole

    def _call(self, name: str, *arguments: Any) -> None:
        """Call the driver. Raises MemoryError if the device has too little memory, and RuntimeError for other errors.

        The calling thread may not have used the device yet, so the device's context is made its own.
        """
        with torch.cuda.device(self._index):
            torch.cuda.current_stream().query()
            error = getattr(self._driver, name)(*arguments)
        if error == OUT_OF_MEMORY:
            raise MemoryError(f"the GPU has too little free memory ({name})")
        if error:
            raise RuntimeError(f"{name} gave CUDA error {error}")


class _Bytes:
    """Bytes on a GPU, as PyTorch reads them from other libraries."""

    def __init__(self, start: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (start, False), "strides": None, "version": 3,
        }  # fmt: skip
