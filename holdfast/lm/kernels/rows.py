"""Functions of PyTorch whose bits for a row must not depend on the other rows."""

from __future__ import annotations

from collections.abc import Callable

import torch


def each_row(compute: Callable[..., torch.Tensor], *columns: torch.Tensor) -> torch.Tensor:
    """compute(*columns), on a CPU for each row by itself. All tensors have the same number of rows.

    PyTorch divides the numbers of all rows among the CPU's threads, and may compute the last ones of each part by other
    instructions than those before. So a row is computed in memory of its own. A GPU computes all numbers alike.
    """
    if columns[0].device.type != "cpu" or not len(columns[0]):
        return compute(*columns)
    rows = range(len(columns[0]))
    return torch.cat([compute(*(each[row : row + 1].clone() for each in columns)) for row in rows])
