"""Files of a header and arrays, which appear whole or not at all, and whose damage is found when they are read.

A file is little-endian: 8 bytes that name its kind; CRC-32 of all that follows; the header's size, 4 bytes each; the
header, in JSON; zeros up to a multiple of 8 bytes; and the arrays, one after the other.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.files.regular import create_file, open_file, sync_directory

if TYPE_CHECKING:
    import numpy as np  # imported where it is needed, because the API process starts without it
    import numpy.typing as npt

START = struct.Struct("<8sII")
"""Kind, CRC-32 of all bytes from CHECKED on, size of the header in bytes."""
CHECKED = 12
"""Number of bytes before those that the checksum covers."""
MOST_HEADER = 1 << 20
"""Largest size of a header in bytes."""
MAPPED = 1 << 20
"""Size in bytes from which a file is mapped into memory and not read."""
AT_A_TIME = 1 << 20
"""Number of bytes that are checked together."""
WIDTH = 8
"""The arrays begin at a multiple of this many bytes."""


def write_framed(
    path: Path, kind: bytes, header: bytes, arrays: Sequence[npt.NDArray[np.generic]], *, durable: bool
) -> None:
    """Write a file, in place of one with the same name. Its folder is made if it is missing.

    A `durable` file is on the disk when this returns, with its name and its folder.

    Raises ValueError for a header that is too long, and OSError if there is no space; an older file then stays.
    """
    if len(header) > MOST_HEADER:
        raise ValueError(f"the header has {len(header)} bytes; it may have {MOST_HEADER}")
    start = START.pack(kind, 0, len(header))[CHECKED:] + header
    parts = [memoryview(start + bytes(-(CHECKED + len(start)) % WIDTH))]
    parts += [array.view("u1").data for array in arrays]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    new = not path.parent.is_dir()
    path.parent.mkdir(mode=0o700, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with create_file(partial) as file:
            file.write(kind + struct.pack("<I", checksum))
            for part in parts:
                file.write(part)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    if durable:
        sync_directory(path.parent)
    if durable and new:
        sync_directory(path.parent.parent)


def read_framed(path: Path, kind: bytes) -> tuple[bytes, npt.NDArray[np.uint8]]:
    """The header of a file, and the bytes of its arrays. A large file is mapped into memory.

    Raises ValueError for a file of another kind and for a damaged one, and OSError if it cannot be read.
    """
    import numpy as np

    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size < START.size:
            raise ValueError(f"{path.name} is not a whole file: it has {size} bytes")
        mapped = size >= MAPPED
        data = np.memmap(file, np.uint8, mode="r") if mapped else np.frombuffer(file.read(size), np.uint8)
    if len(data) != size:
        raise ValueError(f"{path.name} changed while it was read")
    found, checksum, length = START.unpack(data[: START.size].tobytes())
    if found != kind:
        raise ValueError(f"{path.name} is a file of another kind")
    if length > min(MOST_HEADER, size - START.size):
        raise ValueError(f"{path.name} is damaged: its header has {length} bytes")
    own = 0
    for first in range(CHECKED, size, AT_A_TIME):
        own = zlib.crc32(data[first : first + AT_A_TIME].data, own)
    if own != checksum:
        raise ValueError(f"{path.name} is damaged: its checksum differs")
    end = START.size + length
    return data[START.size : end].tobytes(), data[end + -end % WIDTH :]
