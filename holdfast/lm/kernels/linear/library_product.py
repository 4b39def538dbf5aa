"""Products by PyTorch's library on a GPU, for numbers of rows at which it adds up sums as this project's kernels do.

The library chooses a kernel by the sizes of a product, so its order of sums may change with the number of rows.
`equal_sums` finds out at the start for which numbers of rows its bits are equal, and only those are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

ROWS = (
    *range(72, 256, 8),
    *range(256, 512, 16),
    *range(512, 1024, 32),
    *range(1024, 2048, 128),
    *range(2048, 4096, 256),
    *range(4096, 8192 + 1, 512),
)
"""Numbers of rows for which the library may compute a product: those of captured steps (`GraphSizes`)."""
MULTIPLE = 64
"""Inputs, outputs, and inputs of a part of a sum are multiples of this many."""
ALIGNED = 64
"""Bytes at a multiple of which tensors begin. The library may choose another kernel for less."""
LEAST_CUT_ROWS = 512
"""Fewest rows that are computed in two pieces. Fewer take about as long as it takes to read the weight."""
MOST_REPEATED = 0.15
"""Largest share of rows that may be computed twice, as pieces overlap. This project's tiles take 1.2 times as long."""
MOST_SUM_BYTES = 40 << 20
"""Most bytes of sums to which the library adds one part after the other: those that an L2 cache of 50 MiB keeps."""
LEAST_PART = 2048
"""Fewest inputs of a part that the library computes. Adding a shorter one takes too large a share of its time."""


class LibraryKind(NamedTuple):
    """A kind of product, for which the library chooses a kernel by the number of rows, and how its sums are cut."""

    outputs: int
    inputs: int
    part: int
    """Number of inputs of a part of a sum; the last part may have fewer."""
    dtype: torch.dtype
    """Type of the inputs and the weight."""
    wide: bool
    """Whether sums are written in float32; else in `dtype`. Sums of several parts are."""
    apart: bool
    """Whether each part of a sum is written; else their sum."""
    added: bool = False
    """Whether sums are added to numbers of type `dtype`, and rounded once. Such sums have one part."""

    @property
    def parts(self) -> int:
        """Number of parts of a sum."""
        return -(-self.inputs // self.part)

    @property
    def fits(self) -> bool:
        """Whether the library may compute such products at all."""
        even = not (self.outputs % MULTIPLE or self.inputs % MULTIPLE or self.part % MULTIPLE)
        return even and self.outputs > 0 and (self.parts == 1 or (self.wide and self.part >= LEAST_PART))


EqualRows = Mapping[LibraryKind, tuple[int, ...]]
"""For each kind of product, the numbers of rows, ascending, at which the library was seen to give equal bits."""


def library_pieces(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    part: int,
    apart: bool,
    equal: EqualRows,
    added: bool = False,
) -> list[slice]:
    """The ranges of rows of x [T, K] times weight [N, K] that the library computes one after the other; else none.

    See `multiply` for the other arguments. With `added`, no row is in two ranges.
    """
    outputs, inputs = weight.shape
    kind = LibraryKind(outputs, inputs, part, x.dtype, out.dtype == torch.float32, apart, added)
    rows = equal.get(kind)
    if rows is None or weight.dtype != x.dtype or not (x.is_contiguous() and weight.is_contiguous()):
        return []
    if (x.data_ptr() | weight.data_ptr() | out.data_ptr()) % ALIGNED:
        return []
    pieces = pieces_of(len(x), rows)
    repeated = sum(each.stop - each.start for each in pieces) > len(x)
    return [] if added and repeated else pieces


def pieces_of(count: int, sizes: Sequence[int]) -> list[slice]:
    """Ranges of `count` rows whose lengths are among these ascending sizes; empty if there are none that pay.

    The last range may repeat rows of the one before: they get the same bits again.
    """
    if count in sizes:
        return [slice(0, count)]
    found: list[slice] = []
    begin = 0
    while count >= LEAST_CUT_ROWS and begin < count:
        left = count - begin
        whole = max((size for size in sizes if size <= left), default=0)
        last = min((size for size in sizes if left <= size <= count), default=0)
        if last and (not whole or last - left <= MOST_REPEATED * count):
            found.append(slice(count - last, count))
            break
        if not whole:
            return []
        found.append(slice(begin, begin + whole))
        begin += whole
    repeated = sum(each.stop - each.start for each in found) - count
    most = 2 + count // max(sizes, default=count)
    return found if repeated <= MOST_REPEATED * count and len(found) <= most else []


def multiply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, part: int, *, added: bool = False) -> None:
    """Write x [T, K] times weight [N, K] transposed to out, by the library, with sums cut into parts of `part` inputs.

    out [parts, T, N] float32 gets each part, out [T, N] the sum of all, one part after the other. It has the type of x,
    or float32, which it must have if there are several parts. With `added`, out [T, N], of the type of x, gets the sum
    of what it holds and one part, rounded once.
    """
    turned = weight.t()
    if added:
        torch.addmm(out, x, turned, out=out)
        return
    for number, begin in enumerate(range(0, x.shape[1], part)):
        own = x[:, begin : begin + part], turned[begin : begin + part]
        to = out[number] if out.dim() == 3 else out
        if out.dtype == x.dtype:
            torch.mm(*own, out=to)
        elif number == 0 or out.dim() == 3:
            torch.mm(*own, out_dtype=out.dtype, out=to)
        else:
            torch.addmm(to, *own, out_dtype=out.dtype, out=to)
