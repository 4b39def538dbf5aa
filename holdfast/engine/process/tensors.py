"""NumPy arrays as the tensors of messages, and back. Strings are arrays of objects."""

from __future__ import annotations

import struct

import numpy as np

from holdfast.engine.messages import Tensor

STRING = "string"
"""The dtype of texts: each element is its number of bytes in UTF-8, as a 32-bit integer, and these bytes."""


def pack(array: np.ndarray) -> Tensor:
    """An array as a tensor."""
    if array.dtype.kind in "OUS":
        texts = [text if isinstance(text, bytes) else str(text).encode() for text in array.ravel().tolist()]
        return Tensor(STRING, array.shape, b"".join(struct.pack("<I", len(text)) + text for text in texts))
    return Tensor(array.dtype.name, array.shape, array.tobytes())


def unpack(tensor: Tensor) -> np.ndarray:
    """A tensor as an array of its own. Raises ValueError if its bytes do not fit its shape."""
    if tensor.dtype == STRING:
        texts = np.array([*texts_of(tensor.data), None], dtype=object)[:-1]  # None: NumPy would look into a lone list
        return texts.reshape(tensor.shape)
    return np.frombuffer(tensor.data, dtype=tensor.dtype).reshape(tensor.shape).copy()


def texts_of(data: bytes) -> list[str]:
    """The texts of a tensor of strings. Raises ValueError for bytes that end within one, or are not UTF-8."""
    found, at = [], 0
    while at < len(data):
        if at + 4 > len(data):
            raise ValueError("the bytes end within the length of a string")
        (size,) = struct.unpack_from("<I", data, at)
        if at + 4 + size > len(data):
            raise ValueError(f"a string of {size} bytes begins at byte {at}, and there are {len(data)} bytes")
        found.append(data[at + 4 : at + 4 + size].decode())
        at += 4 + size
    return found
