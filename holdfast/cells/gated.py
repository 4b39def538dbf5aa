"""Gated: the common form of LSTM and binary TreeLSTM cells, which executors run with few kernels. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gated:
    """A cell whose outputs h and c, [hidden] each, are computed as

        gates = concatenation of parts @ w.T + b
        c = sigmoid(i) * tanh(u) + the sum of sigmoid(f) * c over its children
        h = sigmoid(o) * tanh(c)

    with the cell's weights `w` [gates * hidden, parts] and `b`. All are of one type. c must not be returned.
    """

    parts: tuple[str | tuple[str, str], ...]
    """The parts of the product's input, one or two.

    A part is an input [wide], or a pair: an int32 scalar input, and the name of a weight from which it selects a row.
    """
    gates: str
    """The order of gates in `w`: a permutation of i, o, u and, for each child in turn, f."""
    children: tuple[str, ...] = ()
    """For each child, the name of the State input that holds its c. A cell has at most two children."""
    read_out: tuple[str, str, str] | None = None
    """The name of a third output, an int32 scalar, and the names of its weights `w` [labels, hidden] and `b`.

    The output is label = argmax of h @ w.T + b.
    """

    def __post_init__(self) -> None:
        if not 1 <= len(self.parts) <= 2 or len(self.children) > 2:
            raise ValueError("a gated cell has one or two parts and at most two children")
        if sorted(self.gates) != sorted("iou" + "f" * len(self.children)):
            raise ValueError(f"gates are {self.gates!r}; they must be i, o, u and {len(self.children)} times f")
