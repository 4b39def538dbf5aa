"""The geometry of a padded batch: how many rows and columns its memory and its decodes have. Said here alone."""

from __future__ import annotations

from typing import NamedTuple

QUANTUM = 256
"""A batch has room for a multiple of this many positions in each row."""


class BatchShape(NamedTuple):
    """The number of rows and columns that a captured decode is padded to."""

    rows: int
    columns: int

    @property
    def positions(self) -> int:
        """Positions that a decode of this shape computes attention over, and that its memory has."""
        return self.rows * self.columns

    @classmethod
    def least(cls, rows: int, columns: int, most: int, quantum: int = QUANTUM) -> BatchShape:
        """The smallest shape for a batch of these rows and columns. No row has more than `most` columns."""
        return cls(padded_rows(rows), padded_columns(columns, most, quantum))


def whole_quanta(positions: int, quantum: int = QUANTUM) -> int:
    """The number of positions that a row of a batch has room for, if the longest row has `positions`."""
    return -(-positions // quantum) * quantum


def padded_rows(rows: int) -> int:
    """Rows of a captured decode: 1, 2, 4, 8, 12, 16, then steps of at most a half of the power of two below.

    At most a third is padding.
    """
    if rows <= 4:
        return 1 << (rows - 1).bit_length()
    step = 4 if rows <= 16 else 8 if rows <= 64 else 1 << (rows - 1).bit_length() - 3
    return -(-rows // step) * step


def padded_columns(columns: int, most: int, quantum: int = QUANTUM) -> int:
    """Columns of a captured decode: 1, 2 ... 8, 10, 12, 14, 16, 20 ... times half the quantum, and at most `most`.

    Beyond a quantum, at most a third is padding; beyond four, a fifth.
    """
    unit = max(1, quantum // 2)
    units = -(-columns // unit)
    step = 1 << max((units - 1).bit_length() - 3, 0)
    return min(-(-units // step) * step * unit, most)
