"""Triton kernels of tasks. They find a task's indices and values by a cursor on the device.

The words (int32) of a round's tasks lie one task after the other in a ring on the device. `cursor` holds the index at
which the current task begins. A task's words are: the index of the next task; the number of its nodes; the start of
its returned outputs in the host's ring, in units of 16 bytes; one unused word; then `rows` [size]; then `sources`
[size] for each State input; then the values. The last kernel of a task advances the cursor. So a CUDA graph needs no
argument.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

HEADER = 4
"""Number of words before a task's rows."""
RETURNED_UNIT = 16
"""The alignment of returned outputs in bytes."""
MOST_OUTPUTS = 8
"""Largest number of outputs that one scatter kernel writes."""
UNITS = {1: tl.int8, 2: tl.int16, 4: tl.int32}
"""The integer types in which items are copied, by their number of bytes."""

_HEADER = tl.constexpr(HEADER)
_NODES = tl.constexpr(1)
_RETURNED = tl.constexpr(2)
_RETURNED_UNIT = tl.constexpr(RETURNED_UNIT)
_GATHER_FIELDS = tl.constexpr(5)
_SCATTER_FIELDS = tl.constexpr(5)
_MOVE_FIELDS = tl.constexpr(3)
_BLOCK = 1024

Part = tuple[torch.Tensor, int, torch.Tensor, int, int]
"""A part of a concatenation: see `concatenate`."""
BY_INDEX, BY_WORD, VALUE = 0, 1, 2
_BY_WORD, _VALUE = tl.constexpr(BY_WORD), tl.constexpr(VALUE)


@dataclass(frozen=True, slots=True)
class Signals:
    """The memory that the kernels of a worker share.

    On a CPU, under Triton's interpreter, all of it is plain memory.
    """

    ring: torch.Tensor
    """The words of tasks, int32, on the device."""
    cursor: torch.Tensor
    """The word at which the current task begins, int32 [1], on the device."""
    tickets: torch.Tensor
    """Two counts, int32 [2], on the device.

    The first counts the programs of a task's last kernel that are done, and is 0 between tasks. The second counts the
    tasks that are done.
    """
    done: torch.Tensor
    """The number of tasks that have completed, int64 [1], in pinned host memory (BatchMaker, section 2.5)."""
    returned: torch.Tensor
    """The ring of returned outputs, uint8, in pinned host memory."""


def unit_of(item_bytes: int) -> int:
    """The largest unit in which items of this many bytes can be copied."""
    return next(unit for unit in (4, 2, 1) if item_bytes % unit == 0)


def gather_entry(source: torch.Tensor, target: torch.Tensor, item_bytes: int, offset: int, is_value: bool) -> list[int]:
    """A line of the table of `gather`.

    For a State input, the source is its arena, and `offset` is the word of the task at which its indices begin. For a
    value, the source is the ring, and `offset` is the word of the task at which the value begins. The target is the
    buffer.
    """
    return [source.data_ptr(), target.data_ptr(), item_bytes // unit_of(item_bytes), offset, int(is_value)]


@triton.jit(do_not_specialize=["size"])
def _gather(table, ring, cursor, size, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    entry = table + tl.program_id(1) * _GATHER_FIELDS
    source = tl.load(entry)
    target = tl.load(entry + 1)
    units = tl.load(entry + 2).to(tl.int32)
    offset = tl.load(entry + 3)
    is_value = tl.load(entry + 4)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size * units
    begin = tl.load(cursor).to(tl.int64) + offset
    if is_value != 0:
        values = (source + begin * 4).to(tl.pointer_type(UNIT))
        items = tl.load(values + i, mask=inside, other=0)
    else:
        index = tl.load(ring + begin + i // units, mask=inside, other=-1).to(tl.int64)
        arena = source.to(tl.pointer_type(UNIT))
        items = tl.load(arena + index * units + i % units, mask=inside & (index >= 0), other=0)
    tl.store(target.to(tl.pointer_type(UNIT)) + i, items, mask=inside)


def gather(signals: Signals, tables: dict[int, torch.Tensor], widest: int, size: int) -> None:
    """Copy the State inputs and values of the current task into their buffers; indices below 0 give zeros.

    `tables` has int64 lines of `gather_entry` by unit. `widest` is the largest item in units.
    """
    for unit, table in tables.items():
        grid = (triton.cdiv(size * widest, _BLOCK), len(table))
        _gather[grid](table, signals.ring, signals.cursor, size, UNIT=UNITS[unit], BLOCK=_BLOCK)


def scatter_entry(arena: torch.Tensor, item_bytes: int, width: int, place: int, returned_at: int | None) -> list[int]:
    """A line of the table of `scatter`. `returned_at` is the byte within the task's returned outputs."""
    unit = unit_of(item_bytes)
    at = -1 if returned_at is None else returned_at // unit
    return [arena.data_ptr(), item_bytes // unit, width, place, at]


@triton.jit
def _finish(ring, cursor, tickets, done, programs):
    """Let the last program of a task's last kernel move the cursor to the next task, and add 1 to the host's counter.

    Each program releases its writes with its ticket, and the last one acquires it. So everything that the task wrote is
    visible to a host that sees the counter (BatchMaker, section 2.5). The sum is kept on the device, whose atomic add
    releases to the host: an atomic add on the host's own memory faults if the bus has no atomics.
    """
    tl.debug_barrier()
    ticket = tl.atomic_add(tickets, 1, sem="acq_rel", scope="gpu")
    if ticket == programs - 1:
        tl.store(tickets, 0)
        tl.store(cursor, tl.load(ring + tl.load(cursor)))
        tl.store(done, tl.atomic_add(tickets + 1, 1, sem="acq_rel", scope="sys") + 1)


@triton.jit(do_not_specialize=["size"])
def _scatter(
    a0, a1, a2, a3, a4, a5, a6, a7, table, ring, cursor, tickets, done, returned, size,
    UNIT: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(1)
    source = a0
    source = tl.where(number == 1, a1, source)
    source = tl.where(number == 2, a2, source)
    source = tl.where(number == 3, a3, source)
    source = tl.where(number == 4, a4, source)
    source = tl.where(number == 5, a5, source)
    source = tl.where(number == 6, a6, source)
    source = tl.where(number == 7, a7, source)
    entry = table + number * _SCATTER_FIELDS
    arena = tl.load(entry).to(tl.pointer_type(UNIT))
    units = tl.load(entry + 1).to(tl.int32)
    width = tl.load(entry + 2)
    place = tl.load(entry + 3)
    returned_at = tl.load(entry + 4)
    task = ring + tl.load(cursor)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size * units
    row = i // units
    items = tl.load(source.to(tl.pointer_type(UNIT)) + i, mask=inside, other=0)
    target = tl.load(task + _HEADER + row, mask=inside, other=0).to(tl.int64) * width + place
    tl.store(arena + target * units + i % units, items, mask=inside)
    if returned_at >= 0:
        begin = tl.load(task + _RETURNED).to(tl.int64) * (_RETURNED_UNIT // BYTES) + returned_at
        host = returned.to(tl.pointer_type(UNIT))
        tl.store(host + begin + i, items, mask=inside & (row < tl.load(task + _NODES)))
    if LAST:
        _finish(ring, cursor, tickets, done, tl.num_programs(0) * tl.num_programs(1))


def scatter(
    signals: Signals,
    outputs: Sequence[torch.Tensor],
    table: torch.Tensor,
    unit: int,
    widest: int,
    size: int,
    *,
    last: bool,
) -> None:
    """Write outputs of the current task to its rows, and returned outputs of its nodes to the host's ring.

    `table` has a line of `scatter_entry` for each output, all of one unit; `widest` is the largest item in units.
    `last` ends the task.
    """
    for first in range(0, len(outputs), MOST_OUTPUTS):
        some = outputs[first : first + MOST_OUTPUTS]
        addresses = [output.data_ptr() for output in some]
        addresses += addresses[:1] * (MOST_OUTPUTS - len(some))
        grid = (triton.cdiv(size * widest, _BLOCK), len(some))
        _scatter[grid](
            *addresses, table[first:], signals.ring, signals.cursor, signals.tickets, signals.done,
            signals.returned.data_ptr(), size, UNIT=UNITS[unit], BYTES=unit, BLOCK=_BLOCK,
            LAST=last and first + MOST_OUTPUTS >= len(outputs),
        )  # fmt: skip


@triton.jit(do_not_specialize=["begin"])
def _move(table, ring, begin, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    entry = table + tl.program_id(2) * _MOVE_FIELDS
    source = tl.load(entry).to(tl.pointer_type(UNIT))
    target = tl.load(entry + 1).to(tl.pointer_type(UNIT))
    units = tl.load(entry + 2)
    row = tl.load(ring + begin + tl.program_id(0)).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < units
    tl.store(target + row * units + i, tl.load(source + row * units + i, mask=inside, other=0), mask=inside)


def move_rows(signals: Signals, tables: dict[int, torch.Tensor], widest: int, begin: int, rows: int) -> None:
    """Copy whole rows of another worker's arenas to the same rows here.

    The row numbers begin at the ring's word `begin`. `tables` has lines by unit: the addresses there and here, and a
    row's units. The other device's memory must be mapped.
    """
    for unit, table in tables.items():
        grid = (rows, triton.cdiv(widest, _BLOCK), len(table))
        _move[grid](table, signals.ring, begin, UNIT=UNITS[unit], BLOCK=_BLOCK)


@triton.jit
def _part(
    ring, task, offset, row, source, words, limit, wide, columns, KIND: tl.constexpr, PER_WORD: tl.constexpr
):  # fmt: skip
    if KIND == _VALUE:
        begin = (task + offset).to(tl.int64) * PER_WORD + row.to(tl.int64) * wide
        return tl.load(source + begin + columns, mask=columns < wide, other=0.0)
    index = tl.load(ring + task + offset + row).to(tl.int64)
    if KIND == _BY_WORD:
        index = tl.where(index >= 0, tl.load(words + tl.maximum(index, 0)), 0).to(tl.int64)
    end = tl.where(index < 0, 0, tl.where(index < limit, wide, 0))
    return tl.load(source + index * wide + columns, mask=columns < end, other=0.0)


@triton.jit(do_not_specialize=["offset0", "limit0", "offset1", "limit1"])
def _concatenate(
    ring, cursor, target, source0, words0, offset0, limit0, wide0, source1, words1, offset1, limit1, wide1,
    KIND0: tl.constexpr, KIND1: tl.constexpr, PER_WORD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    task = tl.load(cursor)
    row = tl.program_id(0)
    blocks0 = tl.cdiv(wide0, BLOCK)
    target += row.to(tl.int64) * (wide0 + wide1)
    if tl.program_id(1) < blocks0:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        part = _part(ring, task, offset0, row, source0, words0, limit0, wide0, columns, KIND0, PER_WORD)
        tl.store(target + columns, part, mask=columns < wide0)
    else:
        columns = (tl.program_id(1) - blocks0) * BLOCK + tl.arange(0, BLOCK)
        part = _part(ring, task, offset1, row, source1, words1, limit1, wide1, columns, KIND1, PER_WORD)
        tl.store(target + wide0 + columns, part, mask=columns < wide1)


@dataclass(frozen=True, slots=True)
class Source:
    """The source of one part of a concatenation: its items, and how the current task selects them."""

    kind: int
    """The kind of selection.

    BY_INDEX: the task has an index into `items` for each node. BY_WORD: the task has an index into `words`, which holds
    the index; an index below 0 selects item 0. VALUE: the task holds the items themselves, and `items` is the ring.
    """
    items: torch.Tensor
    """The items [items, wide], contiguous; the ring for VALUE."""
    wide: int
    offset: int
    """The word of the task at which the indices or the values begin."""
    words: torch.Tensor | None = None
    """An arena of int32 scalars, for BY_WORD."""


def concatenate(signals: Signals, parts: Sequence[Source], target: torch.Tensor, size: int) -> None:
    """Concatenate one or two parts of each node into `target` [size, width of both]. Missing items are zeros."""
    arguments: list[torch.Tensor | int] = []
    for part in parts:
        items = signals.ring.view(target.dtype) if part.kind == VALUE else part.items
        words = signals.ring if part.words is None else part.words
        limit = 0 if part.kind == VALUE else items.numel() // part.wide
        arguments += [items, words, part.offset, limit, part.wide]
    if len(parts) == 1:
        arguments += [*arguments[:4], 0]
    widest = max(part.wide for part in parts)
    block = min(_BLOCK, triton.next_power_of_2(widest))
    grid = (size, sum(triton.cdiv(part.wide, block) for part in parts))
    _concatenate[grid](
        signals.ring, signals.cursor, target, *arguments, KIND0=parts[0].kind, KIND1=parts[-1].kind,
        PER_WORD=4 // target.element_size(), BLOCK=block,
    )  # fmt: skip


@triton.jit
def _gate(gates, bias, hidden, columns, inside, NUMBER: tl.constexpr):
    at = NUMBER * hidden + columns
    return tl.load(gates + at, mask=inside, other=0.0).to(tl.float32) + tl.load(bias + at, mask=inside, other=0.0).to(
        tl.float32
    )


@triton.jit
def _child(ring, task, offset, row, arena, hidden, columns):
    index = tl.load(ring + task + offset + row).to(tl.int64)
    end = tl.where(index < 0, 0, hidden)
    return tl.load(arena + index * hidden + columns, mask=columns < end, other=0.0).to(tl.float32)


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit(do_not_specialize=["width", "h_place", "c_place", "offset0", "offset1"])
def _gates(
    ring, cursor, tickets, done, gates, bias, arena, width, h_place, c_place, offset0, offset1, dense, hidden,
    COUNT: tl.constexpr, I: tl.constexpr, O: tl.constexpr, U: tl.constexpr, F0: tl.constexpr, F1: tl.constexpr,
    CHILDREN: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    task = tl.load(cursor)
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    gates += row.to(tl.int64) * COUNT * hidden
    i = _gate(gates, bias, hidden, columns, inside, I)
    o = _gate(gates, bias, hidden, columns, inside, O)
    u = _gate(gates, bias, hidden, columns, inside, U)
    c = tl.sigmoid(i) * _tanh(u)
    if CHILDREN > 0:
        f = _gate(gates, bias, hidden, columns, inside, F0)
        c += tl.sigmoid(f) * _child(ring, task, offset0, row, arena, hidden, columns)
    if CHILDREN > 1:
        f = _gate(gates, bias, hidden, columns, inside, F1)
        c += tl.sigmoid(f) * _child(ring, task, offset1, row, arena, hidden, columns)
    h = tl.sigmoid(o) * _tanh(c)
    target = tl.load(ring + task + _HEADER + row).to(tl.int64) * width
    tl.store(arena + (target + h_place) * hidden + columns, h, mask=inside)
    tl.store(arena + (target + c_place) * hidden + columns, c, mask=inside)
    if DENSE:
        tl.store(dense + row.to(tl.int64) * hidden + columns, h, mask=inside)
    if LAST:
        _finish(ring, cursor, tickets, done, tl.num_programs(0) * tl.num_programs(1))


def gates(
    signals: Signals,
    order: str,
    products: torch.Tensor,
    bias: torch.Tensor,
    arena: torch.Tensor,
    width: int,
    places: tuple[int, int],
    children: Sequence[int],
    dense: torch.Tensor | None,
    *,
    last: bool,
) -> None:
    """Compute h and c of each node of the current task, from its gates without their bias [size, len(order) * hidden].

    Reads the children's c from the arena, by the indices that begin at the task's words `children`. Writes h and c to
    the task's rows at `places`, and h to `dense` [size, hidden] if it is given. `last` ends the task. Working in place
    is safe: no node of a task reads a row that another one writes, and each thread reads the c that it replaces before
    it writes.
    """
    size, hidden = products.shape[0], products.shape[1] // len(order)
    offsets = [*children, 0, 0][:2]
    forget = [place for place, gate in enumerate(order) if gate == "f"] + [0, 0]
    block = min(_BLOCK, triton.next_power_of_2(hidden))
    _gates[(size, triton.cdiv(hidden, block))](
        signals.ring, signals.cursor, signals.tickets, signals.done, products, bias, arena, width, *places, *offsets,
        products if dense is None else dense, hidden, COUNT=len(order), I=order.index("i"), O=order.index("o"),
        U=order.index("u"), F0=forget[0], F1=forget[1], CHILDREN=len(children), DENSE=dense is not None, BLOCK=block,
        LAST=last,
    )  # fmt: skip


@triton.jit(do_not_specialize=["width", "place", "returned_at"])
def _read_out(
    ring, cursor, tickets, done, scores, labels, arena, width, place, returned, returned_at,
    BLOCK: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    scores += row.to(tl.int64) * labels
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    label = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, labels, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        score = tl.load(scores + columns, mask=columns < labels, other=-float("inf")).to(tl.float32)
        label = tl.where(score > best, columns, label)
        best = tl.maximum(score, best)
    found = tl.min(tl.where(best == tl.max(best, 0), label, labels - 1), 0)
    task = ring + tl.load(cursor)
    tl.store(arena + tl.load(task + _HEADER + row).to(tl.int64) * width + place, found)
    if row < tl.where(returned_at >= 0, tl.load(task + _NODES), 0):
        begin = tl.load(task + _RETURNED).to(tl.int64) * (_RETURNED_UNIT // 4) + returned_at // 4
        tl.store(returned.to(tl.pointer_type(tl.int32)) + begin + row, found)
    if LAST:
        _finish(ring, cursor, tickets, done, tl.num_programs(0))


def read_out(
    signals: Signals,
    scores: torch.Tensor,
    arena: torch.Tensor,
    width: int,
    place: int,
    returned_at: int | None,
    *,
    last: bool,
) -> None:
    """Write the index of each node's highest score [size, labels], the first of equals, to an arena of int32 scalars.

    The nodes are those of the current task.

    With `returned_at`, the byte within the task's returned outputs, it is also written to the host's ring. `last` ends
    the task.
    """
    size, labels = scores.shape
    block = min(2 * _BLOCK, triton.next_power_of_2(labels))
    _read_out[(size,)](
        signals.ring, signals.cursor, signals.tickets, signals.done, scores, labels, arena, width, place,
        signals.returned.data_ptr(), -1 if returned_at is None else returned_at, BLOCK=block, LAST=last,
    )  # fmt: skip
