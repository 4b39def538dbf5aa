"""Memory of one GPU that other processes of its host can write, through CUDA's driver. PyTorch does not offer it."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch._C._distributed_c10d import Store

LAZY_PEER_ACCESS = 1
WAIT_UNTIL_AT_LEAST = 0
HANDLE_BYTES = 64
GRANULE = 2 << 20
"""Bytes of a piece in which the driver shares memory. A smaller allocation would share its neighbours too."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which identifies an allocation to other processes."""

    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class PeerMemory:
    """Equally large memory on the device of every rank. Each rank can write all of it, over NVLink or PCIe.

    The memory starts as zeros. It stays until the process ends, because another process may still write to it.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, num_bytes: int) -> None:
        """All ranks call this with the same number of bytes. The stores share their keys, and nobody else may use them.

        Raises RuntimeError if one device cannot write to another.
        """
        self.rank, self.size, self.device, self.num_bytes = rank, size, device, num_bytes
        self._store = store
        torch.cuda.synchronize(device)  # makes the device's context
        address = ctypes.c_uint64()
        with torch.cuda.device(device):
            _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(-(-num_bytes // GRANULE) * GRANULE))
        self.address = address.value or 0
        """The address at which this device's own memory starts."""
        self.own = torch.as_tensor(_Bytes(self.address, num_bytes), device=device)
        """This device's own memory, [bytes] uint8."""
        self.own.zero_()

    def open(self) -> list[int]:
        """Let the other ranks write, and return the address at which this rank writes to the memory of each rank.

        Everything that this rank has written to its own memory is complete first.
        """
        torch.cuda.synchronize(self.device)
        with torch.cuda.device(self.device):
            handle = _Handle()
            _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self.address))
            self._store.set(f"memory of {self.rank}", bytes(handle).hex())
            return [self.address if rank == self.rank else self._opened(rank) for rank in range(self.size)]

    def _opened(self, rank: int) -> int:
        handle = _Handle.from_buffer_copy(bytes.fromhex(self._store.get(f"memory of {rank}").decode()))
        address = ctypes.c_uint64()
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(LAZY_PEER_ACCESS))
        return address.value or 0


def copy(to: int, source: int, num_bytes: int, stream: torch.cuda.Stream) -> None:
    """Copy between addresses of any devices, in the order of a stream."""
    if num_bytes:
        _call("cuMemcpyDtoDAsync_v2", _u64(to), _u64(source), ctypes.c_size_t(num_bytes), _stream(stream))


def signal(address: int, number: int, stream: torch.cuda.Stream) -> None:
    """Write a 32-bit number to a device, after everything that the stream has written anywhere."""
    _call("cuStreamWriteValue32_v2", _stream(stream), _u64(address), ctypes.c_uint32(number), ctypes.c_uint(0))


def wait(address: int, number: int, stream: torch.cuda.Stream) -> None:
    """Make the stream wait until the 32-bit number at an address is `number` or one of the 2**31 that follow."""
    _call(
        "cuStreamWaitValue32_v2",
        _stream(stream),
        _u64(address),
        ctypes.c_uint32(number),
        ctypes.c_uint(WAIT_UNTIL_AT_LEAST),
    )


class _Bytes:
    """Memory in the form that `torch.as_tensor` accepts, without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the driver. Raises RuntimeError with the driver's reason."""
    status = getattr(_driver(), name)(*arguments)
    if status:
        reason = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(reason))
        raise RuntimeError(f"{name}: {(reason.value or b'unknown').decode()} (CUDA error {status})")


def _u64(address: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(address)


def _stream(stream: torch.cuda.Stream) -> ctypes.c_void_p:
    return ctypes.c_void_p(stream.cuda_stream)
