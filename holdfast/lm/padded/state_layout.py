"""StateLayout: which axes of a model's state are rows and time, found by probing, and the verbs that follow from it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig

from holdfast.lm.types import RowBytes

State = Any
"""The cache object that a model makes itself, of any class: `DynamicCache`, `xLSTMCache`, a list of tensors."""

LeafKind = Literal["time", "row", "counter", "rows", "constant", "other"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor or number inside a state, classified by how its shape follows the number of rows and of tokens.

    - time: has an axis for rows and one for positions (keys, values, latents).
    - row: has an axis for rows and none for positions (convolution and recurrent states).
    - counter: equals the number of positions.
    - rows: equals the number of rows.
    - constant: follows neither.
    - other: anything else, such as a leaf that grows by another number than 1 a token. No verb is right for it.
    """

    path: tuple[str | int, ...]
    """Attributes, keys and indices from the state to it."""
    kind: LeafKind
    batch_axis: int | None = None
    time_axis: int | None = None
    window: int | None = None
    """Largest number of positions that a time leaf keeps; None: all."""
    bytes: int = 0
    """Bytes of one position for a time leaf, of one row for a row leaf, else 0."""


Path = tuple[Any, ...]
"""Attributes, keys and indices that lead from a state to one of its parts."""
_OPAQUE = (
    str, bytes, bool, float, complex, type, FunctionType, MethodType,
    torch.dtype, torch.device, torch.Generator, torch.nn.Module, PreTrainedConfig,
)  # fmt: skip
"""Types that may occur in a state and hold none of its tensors or numbers."""


def _children(holder: Any) -> Iterator[tuple[Any, Any]]:
    """The parts of a container or of a plain object, by key, index or attribute."""
    if isinstance(holder, dict):
        yield from holder.items()
    elif isinstance(holder, (list, tuple)):
        yield from enumerate(holder)
    elif not isinstance(holder, _OPAQUE) and hasattr(holder, "__dict__"):
        yield from vars(holder).items()


def _leaves(state: State) -> dict[Path, torch.Tensor | int]:
    """Tensors and numbers of a state by path. A part that two paths reach is listed under both; loops are cut."""
    found: dict[Path, torch.Tensor | int] = {}

    def visit(path: Path, part: Any, above: tuple[int, ...]) -> None:
        if isinstance(part, torch.Tensor) or (isinstance(part, int) and not isinstance(part, bool)):
            found[path] = part
        elif id(part) not in above:
            for name, child in _children(part):
                visit((*path, name), child, (*above, id(part)))

    visit((), state, ())
    return found


def _part(state: State, path: Path) -> Any:
    """The part of a state at a path."""
    for name in path:
        state = state[name] if isinstance(state, (dict, list, tuple)) else getattr(state, str(name))
    return state


def _put(state: State, path: Path, value: Any) -> State:
    """Write to a path. Returns the state, which is a new one if it is a tuple."""
    if not path:
        return value
    name, rest = path[0], path[1:]
    if isinstance(state, tuple):
        items = list(state)
        items[name] = _put(items[name], rest, value)
        return type(state)(*items) if hasattr(state, "_fields") else type(state)(items)
    if isinstance(state, (dict, list)):
        state[name] = _put(state[name], rest, value)
    else:
        setattr(state, str(name), _put(getattr(state, str(name)), rest, value))
    return state


def _twin(state: State) -> State:
    """A copy of the state's containers that shares the tensors."""
    made: dict[int, Any] = {}

    def twin(part: Any) -> Any:
        if isinstance(part, (torch.Tensor, int)) or not any(True for _ in _children(part)):
            return copy.copy(part) if isinstance(part, (dict, list)) else part
        if id(part) in made:
            return made[id(part)]
        if isinstance(part, tuple):
            items = [twin(child) for child in part]
            return type(part)(*items) if hasattr(part, "_fields") else type(part)(items)
        made[id(part)] = new = copy.copy(part)
        for name, child in list(_children(part)):
            if isinstance(new, (dict, list)):
                new[name] = twin(child)
            elif not isinstance(child, (torch.Tensor, int)):
                new.__dict__[name] = twin(child) if vars(new).get(name) is not None else None
        return new

    return twin(state)


class StateLayout:
    """The leaves of a model's state, and verbs on states of that layout.

    A row is right-aligned: `[placeholders ... | its tokens]`. A time leaf of a state of width L is min(L, window)
    positions wide; after a forward it may still have positions before those. Placeholders are finite: zeros unless a
    model wrote there.

    Verbs that return a state consume the states that they are given, unless they say otherwise: they may write to them
    or share memory with them. No verb waits for the device. Rows are indices into the batch; lengths and widths are in
    positions. Verbs raise ValueError for a layout with a leaf of kind "other".
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.leaves = tuple(leaves)
        kinds = {kind: [leaf for leaf in self.leaves if leaf.kind == kind] for kind in ("time", "row", "counter")}
        self._time, self._row, self._counters = kinds["time"], kinds["row"], kinds["counter"]
        self._other = next((leaf for leaf in self.leaves if leaf.kind == "other"), None)
        self._holders: dict[Path, list[Leaf]] = {}
        """Time leaves by the path of the object that holds them: a layer frames its keys and values together."""
        for leaf in self._time:
            self._holders.setdefault(leaf.path[:-1], []).append(leaf)

    @classmethod
    def discover(cls, run: Callable[[int, int], State]) -> StateLayout:
        """Find the axes by comparing states of few rows and tokens.

        `run(rows, tokens)` gives the state after one forward of that many tokens of that many rows. It is called with
        1 row of 5, 6 and 21 tokens and 2 rows of 5.
        """
        states = [run(rows, tokens) for rows, tokens in _RUNS]
        found = [_leaves(state) for state in states]
        paths = list(dict.fromkeys(path for leaves in found for path in leaves))
        shared = {path for leaves in found for path in _met_twice(leaves)}
        leaves = [_leaf(path, [parts.get(path) for parts in found], _window(states[0], path)) for path in paths]
        return cls([Leaf(leaf.path, "other") if _moves(leaf) and leaf.path in shared else leaf for leaf in leaves])

    @property
    def batches(self) -> bool:
        """Whether the verbs know every leaf, so that rows can be merged."""
        return self._other is None

    @property
    def croppable(self) -> bool:
        """Whether a state can be cut to its first positions: each time leaf keeps all, and no leaf is of kind row."""
        return self.batches and bool(self._time) and not self._row and all(leaf.window is None for leaf in self._time)

    def row_bytes(self) -> RowBytes:
        """Bytes of the state of one row, by its length."""
        windows = sorted({leaf.window for leaf in self._time}, key=lambda window: (window is not None, window or 0))
        return RowBytes(
            fixed=sum(leaf.bytes for leaf in self._row),
            growing=tuple(
                (sum(leaf.bytes for leaf in self._time if leaf.window == window), window) for window in windows
            ),
        )

    def width(self, state: State) -> int:
        """Number of positions of the state, by its counter or widest time leaf, without slack; 0 if it has neither."""
        for leaf in self._counters:
            if isinstance(count := _part(state, leaf.path), int):
                return count
        return max((self._columns(state, leaf) for leaf in self._time), default=0)

    @torch.inference_mode()
    def merge(self, states: Sequence[State], lengths: Sequence[int]) -> State:
        """One batch of these states of one row each, in this order. Its width is the longest length."""
        self._check()
        if not states or len(states) != len(lengths):
            raise ValueError(f"{len(states)} states have {len(lengths)} lengths; give one for each, and at least one")
        batch, width, rows = states[0], max(lengths), len(states)
        batch = self._frame(batch, lengths[0], rows=1)
        batch = self._frame(batch, width, rows=rows)
        for leaf in self._row:
            parts = [_part(state, leaf.path) for state in states]
            batch = _put(batch, leaf.path, torch.cat(parts, leaf.batch_axis or 0))
        for row, (state, length) in enumerate(zip(states, lengths, strict=True)):
            if row:
                self._write_time(batch, width, row, state, length)
        return self._count(batch, width, rows)

    @torch.inference_mode()
    def embed(self, batch: State, width: int, row: int, newcomer: State, length: int) -> State:
        """Put a state of one row and this length into the batch, at `row`: one of its rows, or the next one.

        The batch's width becomes max(width, length). If the newcomer is the shorter, no other row is touched (Baton
        §4.2, case 1); otherwise all are extended in front by placeholders (case 2).
        """
        rows = self._place(batch, row)
        wide = max(width, length)
        batch = self._frame(batch, wide, rows=max(rows, row + 1))
        self._write_time(batch, wide, row, newcomer, length)
        for leaf in self._row:
            axis, part, new = leaf.batch_axis or 0, _part(batch, leaf.path), _part(newcomer, leaf.path)
            if row < rows:
                part.select(axis, row).copy_(new.select(axis, 0), non_blocking=True)
            else:
                batch = _put(batch, leaf.path, torch.cat([part, new.to(part.device, non_blocking=True)], axis))
        return self._count(batch, wide, max(rows, row + 1))

    @torch.inference_mode()
    def blank(self, batch: State, width: int, row: int) -> State:
        """Make a row all placeholders: one of the batch's rows, or the next one. The width stays."""
        rows = self._place(batch, row)
        batch = self._frame(batch, width, rows=max(rows, row + 1))
        for leaf in self._time:
            _part(batch, leaf.path).select(leaf.batch_axis or 0, row).zero_()
        for leaf in self._row:
            axis, part = leaf.batch_axis or 0, _part(batch, leaf.path)
            if row < rows:
                part.select(axis, row).zero_()
            else:
                batch = _put(batch, leaf.path, torch.cat([part, torch.zeros_like(part.narrow(axis, 0, 1))], axis))
        return self._count(batch, width, max(rows, row + 1))

    @torch.inference_mode()
    def filter(self, batch: State, rows: Sequence[int]) -> State:
        """The batch with only these rows, in this order; the width stays.

        If rows leave and others from the end take their places, only the latter are copied.
        """
        had, kept = self._rows(batch), len(rows)
        if not rows or not all(0 <= row < had for row in rows):
            raise ValueError(f"rows are {list(rows)}; the batch has rows 0 to {had - 1}, and at least one must stay")
        moves = [(row, place) for place, row in enumerate(rows) if row != place]
        width = self.width(batch)
        if all(row >= kept for row, _ in moves):
            for leaf in (*self._time, *self._row):
                part = _part(batch, leaf.path)
                for row, place in moves:
                    part.select(leaf.batch_axis or 0, place).copy_(part.select(leaf.batch_axis or 0, row))
            batch = self._frame(batch, width, rows=kept)
            for leaf in self._row:
                batch = _put(batch, leaf.path, _part(batch, leaf.path).narrow(leaf.batch_axis or 0, 0, kept))
        else:
            for leaf in (*self._time, *self._row):
                axis, part = leaf.batch_axis or 0, _part(batch, leaf.path)
                batch = _put(batch, leaf.path, torch.cat([part.narrow(axis, row, 1) for row in rows], axis))
        return self._count(batch, None, kept)

    @torch.inference_mode()
    def extract(self, batch: State, row: int, length: int) -> State:
        """The last `length` positions of one row, as a state of its own. A copy: the batch stays valid."""
        rows = self._rows(batch)
        if not 0 <= row < rows:
            raise ValueError(f"row is {row}; the batch has rows 0 to {rows - 1}")
        state = _twin(batch)
        for leaf in (*self._time, *self._row):
            part = _part(batch, leaf.path).narrow(leaf.batch_axis or 0, row, 1)
            if leaf.time_axis is not None:
                width = part.shape[leaf.time_axis]
                kept = min(width, capped(length, leaf.window))
                part = part.narrow(leaf.time_axis, width - kept, kept)
            state = _put(state, leaf.path, part.clone(memory_format=torch.contiguous_format))
        return self._count(state, length, 1, fresh=True)

    @torch.inference_mode()
    def cut(self, state: State, width: int) -> State:
        """The state without the positions after the first `width`.

        Raises ValueError if row leaves make that wrong, or if a window has moved on, so that positions that it would
        show are gone.
        """
        self._check()
        behind = self.width(state) - width
        if behind < 0 or width < 0:
            raise ValueError(f"width is {width}; the state has {self.width(state)} positions")
        if behind == 0:
            return state
        if self._row:
            raise ValueError(f"the state has parts without positions, such as {self._row[0].path}, and cannot be cut")
        for leaf in self._time:
            left, needed = self._columns(state, leaf) - behind, capped(width, leaf.window)
            if left < needed:
                raise ValueError(f"{leaf.path} has {left} of the last {needed} positions before position {width}")
        return self._frame(state, width, behind=behind, count=True)

    @torch.inference_mode()
    def release(self, batch: State, width: int) -> State:
        """The batch with only its last `width` positions: common placeholders in front are removed (Baton §4.1.3)."""
        self._check()
        return self._frame(batch, width, count=True)

    @torch.inference_mode()
    def to(self, state: State, device: torch.device, *, pinned: bool = False) -> State:
        """A copy on a device, without waiting for it; `pinned` for locked host memory. `state` stays valid."""
        locked = pinned and torch.cuda.is_available()
        return self._copied(
            state,
            lambda part: torch.empty(part.shape, dtype=part.dtype, device=device, pin_memory=locked).copy_(
                part, non_blocking=True
            ),
        )

    @torch.inference_mode()
    def copy(self, state: State) -> State:
        """A copy that shares no memory with this state, which stays valid."""
        return self._copied(state, lambda part: part.clone(memory_format=torch.contiguous_format))

    def parts(self, state: State, kind: LeafKind) -> list[tuple[Leaf, torch.Tensor | int]]:
        """The leaves of a kind, each with its value."""
        return [(leaf, _part(state, leaf.path)) for leaf in self.leaves if leaf.kind == kind]

    def put(self, state: State, parts: Sequence[tuple[Leaf, torch.Tensor | int]]) -> State:
        """The state with new tensors or numbers at some leaves. Consumes it."""
        for leaf, part in parts:
            state = _put(state, leaf.path, part)
        return state

    def leaf_values(self, state: State) -> dict[Path, torch.Tensor | int]:
        """The tensors and numbers of a state, by path; also those that no verb knows."""
        return _leaves(state)

    def counted(self, state: State, length: int) -> State:
        """The state of one row, with the counters of this many positions. Consumes it."""
        return self._count(state, length, 1, fresh=True)

    def twin(self, state: State) -> State:
        """A copy of the state's containers that shares the tensors."""
        return _twin(state)

    def tensors(self, state: State) -> list[torch.Tensor]:
        """The tensors of its leaves, for tests and for events of other streams."""
        parts = [_part(state, leaf.path) for leaf in self.leaves if leaf.kind in ("time", "row", "counter")]
        return [part for part in parts if isinstance(part, torch.Tensor)]

    def _check(self) -> None:
        if self._other is not None:
            raise ValueError(
                f"rows of this state cannot be told apart: {self._other.path} follows neither rows nor tokens"
            )

    def _rows(self, state: State) -> int:
        """Number of rows of a state. Raises ValueError for a layout with unknown leaves."""
        self._check()
        leaf = next(iter((*self._time, *self._row)), None)
        if leaf is None:
            raise ValueError("the state has no rows")
        rows: int = _part(state, leaf.path).shape[leaf.batch_axis]
        return rows

    def _place(self, batch: State, row: int) -> int:
        """Number of rows in the batch once `row` is one of them or the next."""
        rows = self._rows(batch)
        if not 0 <= row <= rows:
            raise ValueError(f"row is {row}; the batch has rows 0 to {rows - 1}, and the next is {rows}")
        return rows

    def _columns(self, state: State, leaf: Leaf) -> int:
        columns: int = _part(state, leaf.path).shape[leaf.time_axis]
        return columns

    def _frame(
        self, state: State, width: int, *, rows: int | None = None, behind: int = 0, count: bool = False
    ) -> State:
        """Give every time leaf the width and the rows, with placeholders in front or fewer columns at either end.

        `behind` is the number of columns to remove at the end.
        """
        for path, leaves in self._holders.items():
            holder = _part(state, path)
            for leaf in leaves:
                part = _part(state, leaf.path)
                axis, time = leaf.batch_axis or 0, leaf.time_axis or 0
                wide, end = capped(width, leaf.window), part.shape[time] - behind
                begin = end - wide
                number = rows if rows is not None else part.shape[axis]
                if hasattr(holder, "reframe"):  # a layer that grows in place: all its leaves at once
                    holder.reframe(number, begin, end)
                    break
                state = _put(state, leaf.path, _framed(part, leaf, number, begin, end))
        return self._count(state, width, rows) if count else state

    def _write_time(self, batch: State, width: int, row: int, newcomer: State, length: int) -> None:
        """Write the newcomer's positions to the end of a row, and zeros before them."""
        for leaf in self._time:
            axis, time = leaf.batch_axis or 0, leaf.time_axis or 0
            time -= time > axis  # `select` removes the row axis
            place, new = _part(batch, leaf.path).select(axis, row), _part(newcomer, leaf.path).select(axis, 0)
            wide, have = capped(width, leaf.window), new.shape[time]
            kept = min(have, capped(length, leaf.window))
            place.narrow(time, wide - kept, kept).copy_(new.narrow(time, have - kept, kept), non_blocking=True)
            if wide > kept:
                place.narrow(time, 0, wide - kept).zero_()

    def _count(self, state: State, width: int | None, rows: int | None, *, fresh: bool = False) -> State:
        """Set the counters, including tensors. `fresh` replaces tensors, for a state that shares them with another."""
        for leaf in self.leaves:
            value = {"counter": width, "rows": rows}.get(leaf.kind)
            if value is None:
                continue
            part = _part(state, leaf.path)
            if not isinstance(part, torch.Tensor):
                state = _put(state, leaf.path, value)
            elif fresh:
                state = _put(state, leaf.path, torch.full_like(part, value))
            else:
                part.fill_(value)
        return state

    def _copied(self, state: State, copied: Callable[[torch.Tensor], torch.Tensor]) -> State:
        twin = _twin(state)
        for leaf in self.leaves:
            if isinstance(part := _part(state, leaf.path), torch.Tensor):
                twin = _put(twin, leaf.path, copied(part))
        return twin


_RUNS = ((1, 5), (2, 5), (1, 6), (1, 21))
"""Rows and tokens of the runs that identify the axes."""


def capped(length: int, window: int | None) -> int:
    """Number of positions that a leaf keeps of `length`."""
    return length if window is None else min(length, window)


def _framed(part: torch.Tensor, leaf: Leaf, rows: int, begin: int, end: int) -> torch.Tensor:
    """The first rows of a time leaf, and its columns from `begin` to `end`: zeros where there were none."""
    axis, time = leaf.batch_axis or 0, leaf.time_axis or 0
    front, kept = max(-begin, 0), min(rows, part.shape[axis])
    part = part.narrow(axis, 0, kept).narrow(time, begin + front, end - begin - front)
    if kept == rows and not front:
        return part
    shape = list(part.shape)
    shape[axis], shape[time] = rows, end - begin
    framed = part.new_zeros(shape)
    framed.narrow(axis, 0, kept).narrow(time, front, part.shape[time]).copy_(part)
    return framed


def _met_twice(leaves: dict[Path, torch.Tensor | int]) -> set[Path]:
    """Paths of tensors that have several paths. Writing a new tensor to one path would separate it from the others."""
    by_id: dict[int, list[Path]] = {}
    for path, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor):
            by_id.setdefault(id(leaf), []).append(path)
    return {path for paths in by_id.values() if len(paths) > 1 for path in paths}


def _moves(leaf: Leaf) -> bool:
    """Whether verbs write to a leaf."""
    return leaf.kind != "constant"


def _window(state: State, path: Path) -> int | None:
    """Most positions of keys or values that a sliding layer of Transformers keeps. Probes are too short to find it."""
    if path[-1:] not in (("keys",), ("values",)):
        return None
    window = getattr(_part(state, path[:-1]), "sliding_window", None)
    return window - 1 if isinstance(window, int) and window > 1 else None


def _leaf(path: Path, parts: Sequence[torch.Tensor | int | None], window: int | None) -> Leaf:
    """Classify a leaf by its values after each of `_RUNS`; None where it is missing."""
    if any(part is None or isinstance(part, int) != isinstance(parts[0], int) for part in parts):
        return Leaf(path, "other")
    first, two_rows, longer, longest = parts
    if not isinstance(first, torch.Tensor):
        return Leaf(path, _kind_of_numbers([int(part) for part in parts]))  # type: ignore[arg-type]
    assert isinstance(two_rows, torch.Tensor) and isinstance(longer, torch.Tensor) and isinstance(longest, torch.Tensor)
    if len({part.ndim for part in (first, two_rows, longer, longest)}) > 1:
        return Leaf(path, "other")
    rows, times = _axes_that_differ(first, two_rows), _axes_that_differ(first, longer, longest)
    if not rows:
        if times:
            return Leaf(path, "other")
        if first.numel() == 1 and not first.is_floating_point():
            return Leaf(path, _kind_of_numbers([int(part) for part in parts]))  # type: ignore[arg-type]
        same = all(torch.equal(first, part) for part in (two_rows, longer, longest))
        return Leaf(path, "constant" if same else "other")
    if len(rows) > 1 or (first.shape[rows[0]], two_rows.shape[rows[0]]) != (1, 2):
        return Leaf(path, "other")
    axis = rows[0]
    if window is not None:
        time = first.ndim - 2
        return Leaf(path, "time", axis, time, window, first.nbytes // first.shape[time])
    if not times:
        return Leaf(path, "row", axis, bytes=first.nbytes)
    time = times[0]
    sizes = [part.shape[time] for part in (first, longer, longest)]
    if len(times) > 1 or sizes[:2] != [5, 6] or not 6 <= sizes[2] <= 21:
        return Leaf(path, "other")
    return Leaf(path, "time", axis, time, None if sizes[2] == 21 else sizes[2], first.nbytes // 5)


def _axes_that_differ(first: torch.Tensor, *others: torch.Tensor) -> list[int]:
    return [axis for axis in range(first.ndim) if {other.shape[axis] for other in others} != {first.shape[axis]}]


def _kind_of_numbers(values: Sequence[int]) -> LeafKind:
    if tuple(values) == tuple(tokens for _, tokens in _RUNS):
        return "counter"
    if tuple(values) == tuple(rows for rows, _ in _RUNS):
        return "rows"
    return "constant" if len({*values}) == 1 else "other"
