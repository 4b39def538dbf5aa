"""Kernels of gated cells for CPUs: the work before and after their matrix product, compiled by Numba.

PyTorch's operators pass over the gates ten times. Its tanh takes 2.5 ns an element, while a matrix product with 1,024
inputs takes 20 ns an element on the same core. Here a node's gates are read once, with vector instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

NOWHERE = -1
"""The item of `gather` that stands for zeros, equal to a source below 0 in a task."""
FAST = {"contract", "nsz", "arcp", "reassoc"}
"""The fast-math options that are on. NaN and infinity keep their meaning."""
HALF, LARGEST = np.float32(0.5), np.float32(7.90531110763549805)
"""`LARGEST` is the number beyond which tanh is 1 to the last bit of a float32."""
P1, P3, P5, P7, P9, P11, P13 = map(
    np.float32,
    (
        4.89352455891786e-03,
        6.37261928875436e-04,
        1.48572235717979e-05,
        5.12229709037114e-08,
        -8.60467152213735e-11,
        2.00018790482477e-13,
        -2.76076847742355e-16,
    ),
)
Q0, Q2, Q4, Q6 = map(
    np.float32, (4.89352518554385e-03, 2.26843463243900e-03, 1.18534705686654e-04, 1.19825839466702e-06)
)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile at the first call, and keep the result on disk. Division by zero gives infinity, as in NumPy."""
    made: Callable[..., Any] = numba.njit(cache=True, nogil=True, fastmath=FAST, error_model="numpy")(function)
    return made


@compiled
def tanh(x: Any) -> Any:
    """tanh of a float32, within 4e-7: the quotient of polynomials that Eigen and XLA use."""
    x = min(max(x, -LARGEST), LARGEST)
    y = x * x
    above = x * ((((((P13 * y + P11) * y + P9) * y + P7) * y + P5) * y + P3) * y + P1)
    return above / (((Q6 * y + Q4) * y + Q2) * y + Q0)


@compiled
def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)) of a float32, within 2e-7."""
    return HALF * tanh(HALF * x) + HALF


@compiled
def gather(table: Any, items: Any, first: int, target: Any, column: int) -> int:
    """Copy these items of a table [items, wide] into `target` [nodes, columns] from `column` on.

    Returns the number of items copied. If the table lacks an item, returns -1 - the position of that item.

    `first` is the smallest allowed item: 0, or NOWHERE if items below 0 stand for zeros.
    """
    wide, copied = table.shape[1], 0
    for node in range(items.shape[0]):
        item, row = items[node], target[node, column : column + wide]
        if item >= table.shape[0] or item < first:
            return -1 - node
        if item < 0:
            for at in range(wide):
                row[at] = 0
        else:
            source = table[item]
            for at in range(wide):
                row[at] = source[at]
            copied += 1
    return copied


@compiled
def gates(
    products: Any, first: Any, sources: Any, children: Any, cells: Any, places: Any, rows: Any, every_h: Any
) -> None:
    """Compute h and c of nodes from `products` [nodes, gates * hidden], the gates before sigmoid and tanh, overwritten.

    `first` has the columns at which the gates i, o, u and the children's f begin. A child's c is `cells[sources[child,
    node]]`, for each of `children`; below 0 it is zeros. h and c of a node go to `cells`, to places `places[0]` and
    `places[1]` of its row, after all nodes have read theirs; `places[2]` is a row's width. h also goes to `every_h`
    [nodes, hidden], if that has any items.
    """
    hidden = cells.shape[1]
    i_at, o_at, u_at = first[0], first[1], first[2]
    for node in range(rows.shape[0]):
        given = products[node]
        c, h, u = given[i_at : i_at + hidden], given[o_at : o_at + hidden], given[u_at : u_at + hidden]
        for at in range(hidden):
            c[at] = sigmoid(c[at]) * tanh(u[at])
        for child in range(children.shape[0]):
            source = sources[children[child], node]
            if source >= 0:
                f, old = given[first[3 + child] : first[3 + child] + hidden], cells[source]
                for at in range(hidden):
                    c[at] += sigmoid(f[at]) * old[at]
        for at in range(hidden):
            h[at] = sigmoid(h[at]) * tanh(c[at])
    for node in range(rows.shape[0]):
        given, begin = products[node], np.int64(rows[node]) * places[2]
        h, c = given[o_at : o_at + hidden], given[i_at : i_at + hidden]
        new_h, new_c = cells[begin + places[0]], cells[begin + places[1]]
        for at in range(hidden):
            new_h[at] = h[at]
            new_c[at] = c[at]
        if every_h.shape[0]:
            for at in range(hidden):
                every_h[node, at] = h[at]
