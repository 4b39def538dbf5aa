"""A job's examples in one memory-mapped file: token ids, and the weight of each token in the loss.

The file is little-endian: 8 bytes "HFEXAMP1"; the numbers of examples and of tokens, 8 bytes each; the first token of
each example and the end of the last one, 8 bytes each; token ids, 4 bytes each; weights, float32.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.files.regular import create_file, open_file

if TYPE_CHECKING:
    import numpy as np  # imported where it is needed, because the API process only writes examples
    import numpy.typing as npt

EXAMPLES_FILE = "examples.bin"
VALIDATION_FILE = "validation.bin"
"""Names of a job's files, in its directory."""
MAGIC = b"HFEXAMP1"
HEADER = struct.Struct("<8sQQ")
"""Magic, number of examples, number of tokens."""
HASHED_AT_A_TIME = 1 << 20
"""Bytes that are read and hashed together."""


def write_examples(path: str | Path, examples: Iterable[tuple[Sequence[int], Sequence[float]]]) -> str:
    """Write examples, each with its token ids and equally many weights. Returns the file's SHA-256 in hexadecimal.

    A token's weight applies to predicting it from the tokens before it, so an example's first weight has no effect. The
    file appears whole or not at all. Raises ValueError naming an example that cannot be trained on, by its number from
    0.
    """
    path = Path(path)
    partial, weights_path = path.with_name(f".{path.name}.ids"), path.with_name(f".{path.name}.weights")
    offsets = array("Q", [0])
    try:
        with create_file(partial) as ids_file, create_file(weights_path) as weights_file:
            for number, (ids, weights) in enumerate(examples):
                _check(number, ids, weights)
                _little(array("I", ids)).tofile(ids_file)
                _little(array("f", weights)).tofile(weights_file)
                offsets.append(offsets[-1] + len(ids))
        whole = path.with_name(f".{path.name}.partial")
        with create_file(whole) as file:
            file.write(HEADER.pack(MAGIC, len(offsets) - 1, offsets[-1]))
            _little(offsets).tofile(file)
            for part in (partial, weights_path):
                with open_file(part) as source:
                    shutil.copyfileobj(source, file, HASHED_AT_A_TIME)
            file.flush()
            os.fsync(file.fileno())
        whole.replace(path)
    finally:
        partial.unlink(missing_ok=True)
        weights_path.unlink(missing_ok=True)
    return digest_of(path)


def digest_of(path: str | Path) -> str:
    """A file's SHA-256 in hexadecimal."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Examples:
    """The examples of a file from `write_examples`. Raises ValueError if the file is of another kind or incomplete."""

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            header = file.read(HEADER.size)
            magic, count, tokens = HEADER.unpack(header) if len(header) == HEADER.size else (b"", 0, 0)
            if magic != MAGIC or size != HEADER.size + 8 * (count + 1) + 8 * tokens:
                raise ValueError(f"{path.name} is not a whole file of examples: {size} bytes")
            import numpy as np

            data = np.memmap(file, np.uint8, mode="r")
        ids_at = HEADER.size + 8 * (count + 1)
        self.offsets: npt.NDArray[np.uint64] = data[HEADER.size : ids_at].view("<u8")
        self._ids = data[ids_at : ids_at + 4 * tokens].view("<u4")
        self._weights = data[ids_at + 4 * tokens :].view("<f4")
        lengths = np.diff(self.offsets.astype(np.int64))
        if int(self.offsets[0]) != 0 or int(self.offsets[-1]) != tokens or (lengths < 2).any():
            raise ValueError(f"{path.name} is damaged: its examples do not lie one after the other")
        self.lengths: npt.NDArray[np.int64] = lengths
        """Number of tokens of each example."""

    def __len__(self) -> int:
        return len(self.lengths)

    def example(self, number: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
        """Token ids and weights, as views of the file."""
        part = slice(int(self.offsets[number]), int(self.offsets[number + 1]))
        return self._ids[part], self._weights[part]

    def weight(self, numbers: Iterable[int]) -> float:
        """The sum of all weights of some examples. A step's loss is divided by it."""
        return math.fsum(float(self.example(number)[1][1:].sum(dtype="float64")) for number in numbers)

    def packed(
        self, numbers: Sequence[int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Concatenate examples: token ids [T], the next token of each [T], and that next token's weight [T].

        The last token of an example has no next one, so its weight is 0.
        """
        import numpy as np

        parts = [self.example(number) for number in numbers]
        ids = np.concatenate([ids for ids, _ in parts]).astype(np.int64)
        targets = np.concatenate([np.append(ids[1:], np.uint32(0)) for ids, _ in parts]).astype(np.int64)
        weights = np.concatenate([np.append(weights[1:], np.float32(0.0)) for _, weights in parts])
        return ids, targets, weights.astype(np.float32)


def _check(number: int, ids: Sequence[int], weights: Sequence[float]) -> None:
    if len(ids) != len(weights):
        raise ValueError(f"example {number} has {len(ids)} tokens and {len(weights)} weights")
    if len(ids) < 2:
        raise ValueError(f"example {number} has {len(ids)} tokens; it must have at least 2")
    if not all(0.0 <= weight <= 1e6 for weight in weights):
        raise ValueError(f"example {number} has a weight that is not from 0 to 1e6")
    if not any(weights[1:]):
        raise ValueError(f"example {number} has no token with a weight: there is nothing to learn from it")


def _little(numbers: array[int] | array[float]) -> array[int] | array[float]:
    """The elements in little-endian order."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
