"""Columns: rows of one named tuple type, stored by column."""

from __future__ import annotations

from collections import abc
from itertools import repeat
from typing import Any, Generic, TypeVar, overload

Row = TypeVar("Row", bound=tuple[Any, ...])


class Columns(abc.Sequence[Row], Generic[Row]):
    """Named tuples of one type, stored by column; each is made when it is read.

    A step has hundreds of rows. Making each costs more than planning it, and packing into arrays takes whole columns.
    """

    __slots__ = ("columns", "row_type")

    def __init__(self, row_type: type[Row], **columns: abc.Sequence[Any]) -> None:
        """A list for each field of `row_type`, by its name. All have one length. They are not copied."""
        self.row_type = row_type
        self.columns: Any = row_type(**columns)
        """The lists, as a `row_type` of lists; not to be changed."""

    @classmethod
    def of(cls, row_type: type[Row], rows: abc.Sequence[Row]) -> Columns[Row]:
        """These rows by column; returned unchanged if they are Columns."""
        if isinstance(rows, Columns):
            return rows
        fields: tuple[str, ...] = row_type._fields  # type: ignore[attr-defined]
        return cls(row_type, **{name: [getattr(row, name) for row in rows] for name in fields})

    def column(self, name: str) -> Any:
        """The list of one field."""
        return getattr(self.columns, name)

    def __len__(self) -> int:
        return len(self.columns[0])

    def __iter__(self) -> abc.Iterator[Row]:
        # tuple.__new__ is what row_type(...) comes down to, at less than half its time.
        return map(tuple.__new__, repeat(self.row_type), zip(*self.columns, strict=True))

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        return self.row_type(*[column[index] for column in self.columns])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, abc.Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(list(self))
