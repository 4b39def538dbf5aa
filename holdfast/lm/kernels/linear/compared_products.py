"""Products of PyTorch's library on a GPU, where they have been seen to have the bits of another product."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

ROWS = 64
"""Rows of x are a multiple of this many, as in most captured steps. Few sizes have to be compared then."""
ALIGNED = 16
"""Bytes at a multiple of which x and a weight begin. The library's choice of a kernel depends on it."""


class Sizes(NamedTuple):
    """The sizes by which the library chooses a kernel."""

    rows: int
    outputs: int
    inputs: int
    dtype: torch.dtype


class ComparedProducts:
    """The library's products x @ weight.T, if its kernel for their sizes adds up each sum in the order of `own`.

    The library takes a kernel by the sizes alone, and a kernel's order does not depend on the numbers. So one product
    of random numbers decides for all of these sizes: another order changes last digits of many of its sums.
    """

    def __init__(self, own: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        """`own` computes x [T, K] times weight [N, K] transposed."""
        self._own = own
        self._equal: dict[Sizes, bool] = {}

    def of(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """x [T, K] times weight [N, K] transposed, with the bits of `own`; None if the library does not give them.

        Sizes are compared at the first call outside a captured graph. A capture is rehearsed, so it finds them known.
        """
        sizes = Sizes(len(x), weight.shape[0], weight.shape[1], x.dtype)
        whole = x.is_contiguous() and weight.is_contiguous() and x.dtype == weight.dtype
        if not whole or not len(x) or len(x) % ROWS or (x.data_ptr() | weight.data_ptr()) % ALIGNED:
            return None
        equal = self._equal.get(sizes)
        if equal is None:
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            equal = self._compare(sizes, weight)
        return multiplied(x, weight) if equal else None

    def _compare(self, sizes: Sizes, weight: torch.Tensor) -> bool:
        """Whether a product of random numbers has the bits of `own`. A weight of zeros decides nothing."""
        draw = torch.Generator(weight.device).manual_seed(0)
        x = torch.randn(sizes.rows, sizes.inputs, generator=draw, dtype=sizes.dtype, device=weight.device)
        wanted = self._own(x, weight)
        if not wanted.any():
            return False
        return self._equal.setdefault(sizes, torch.equal(multiplied(x, weight), wanted))


def multiplied(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, by the library."""
    return torch.mm(x, weight.t())
