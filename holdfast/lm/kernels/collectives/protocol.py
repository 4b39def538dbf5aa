"""The interface of collectives: sums and exchanges between the devices that share each layer of a model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class SumInParts(Protocol):
    """A sum over devices in which one part travels while the devices compute the next part.

    Each device sends all parts in order, and then receives all of them in order, before it begins another such sum.
    """

    @property
    def parts(self) -> Sequence[slice]:
        """The rows of each part."""
        ...

    def room(self, part: int) -> torch.Tensor:
        """An empty tensor [rows, width] for this device's addends of a part."""
        ...

    def send(self, part: int) -> None:
        """Send the addends in a part's room to the other devices, without waiting."""
        ...

    def receive(self, part: int) -> torch.Tensor:
        """Addends [P, rows, width] of a part, whose sum over P, in this order, is the sum over all devices.

        Every device gets the same bits. The caller reads them before it begins another sum.
        """
        ...


class Group(Protocol):
    """The devices that share each layer. Each has its own heads, and its own part of the MLP and the vocabulary.

    All devices of a group make the same calls in the same order, with equal shapes unless a method says otherwise.
    Every device gets the same bits from `add_norm`, `all_reduce`, `best` and `gather`. If a tensor has no rows, a call
    need not wait for anybody. CUDA graphs may capture sums and `best`. Results are new tensors, to which no later call
    writes.
    """

    @property
    def size(self) -> int:
        """Number of devices in the group."""
        ...

    @property
    def rank(self) -> int:
        """This device's index in the group, from 0."""
        ...

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An empty contiguous tensor for this device's addends of the next `add_norm` or `all_reduce`."""
        ...

    def add_norm(
        self,
        stream: torch.Tensor,
        partials: torch.Tensor,
        bias: torch.Tensor | None,
        norm: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """Add to stream [T, hidden] in place; return its RMS norm, with eps, times norm [hidden]: [T, hidden].

        The addend is the sum of partials [P, T, hidden] over P and over all devices, plus bias [hidden] once. Sums are
        float32, in a fixed order. A device's own sum may be rounded to the stream's dtype; the whole sum is rounded to
        it before it is normed. P may differ between devices. Partials are float32 or the stream's dtype, from `room` or
        any other tensor. Stream, bias and norm are equal on all devices.
        """
        ...

    def begin_sum(self, rows: int, width: int, dtype: torch.dtype) -> SumInParts | None:
        """Begin a sum of addends [rows, width]; None if `add_norm` is as fast.

        Each step begins an even number of such sums, unless another kind of sum separates the last one of a step from
        the first one of the next. Other calls may come between those of the sum.
        """
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x [T, hidden] over all devices, in its dtype. x may be from `room`."""
        ...

    def best(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """For each row, the id [R] int64 of the largest of values [R] float32 over all devices, lowest id among equals.

        `ids` [R] int64 belong to the values. The ids of one device are all lower than those of the next.
        """
        ...

    def exchange_rows(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Turn this device's columns of all rows, logits [R, V_own], into all columns of its own rows, [R_own, V].

        V is `vocab_size`. Device i has the columns from i * ceil(V / size) on, so the last device may have fewer. A
        device's own rows are those of `own_rows`.
        """
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [n] int64 or float32 of every device, by rank: [size, n]. Also called while weights are loaded."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Inside this context, in every thread, calls wait for no other device, and their results have no meaning.

        Kernels can thus be compiled and rehearsed in any order. A graph that is captured inside must not be replayed.
        The context must not be nested.
        """
        ...


def in_rows(vector: torch.Tensor) -> torch.Tensor:
    """A vector as rows [T, width] of the largest width up to 4,096 that divides it, as sums over devices take it."""
    width = next(width for width in range(min(len(vector), 4096), 0, -1) if len(vector) % width == 0)
    return vector.view(-1, width)


def halves(rows: int, multiple: int) -> tuple[slice, slice]:
    """Split `rows` rows into two parts, the first of which has a multiple of `multiple` rows."""
    first = -(-rows // (2 * multiple)) * multiple
    return slice(0, first), slice(first, rows)


def own_rows(count: int, size: int, rank: int) -> range:
    """The rows, out of `count`, that device `rank` of a group gets whole: contiguous, at most ceil(count / size)."""
    share = -(-count // size)
    return range(min(rank * share, count), min((rank + 1) * share, count))


def columns_by_device(logits: torch.Tensor, size: int, vocab_size: int) -> torch.Tensor:
    """Logits [R, V_own] of one device, arranged by receiving device: [size, rows, columns], padded to equal sizes."""
    rows, columns = -(-len(logits) // size), -(-vocab_size // size)
    blocks = logits.new_zeros(size * rows, columns)
    blocks[: len(logits), : logits.shape[1]] = logits
    return blocks.view(size, rows, columns)


def rows_of_device(blocks: torch.Tensor, count: int, rank: int, vocab_size: int) -> torch.Tensor:
    """The whole rows [R_own, V], out of `count`, that a device assembles from received blocks [size, rows, columns]."""
    size, rows, columns = blocks.shape
    whole = blocks.transpose(0, 1).reshape(rows, size * columns)
    return whole[: len(own_rows(count, size, rank)), :vocab_size]
