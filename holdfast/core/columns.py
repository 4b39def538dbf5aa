"""Columns: rows of one named tuple type, stored by column."""

from __future__ import annotations

from collections import abc
from itertools import repeat
from typing import Any, Generic, TypeVar, overload

Row = TypeVar("Row", bound=tuple[Any, ...])


class Columns(abc.Sequence[Row], Generic[Row]):
    """Named tuples of one type, stored by column. Each tuple is made when it is read.

    A step has hundreds of rows. Making a tuple for each costs more than planning it, and packing into arrays takes
    whole columns.
    """

    __slots__ = ("by_name", "row_type")

    def __init__(self, row_type: type[Row], **columns: abc.Sequence[Any]) -> None:
        """`columns` has one list for each field of `row_type`, under the field's name. All lists have one length.

        The lists are not copied. Raises TypeError for a name that is not a field, or a field without a list.
        """
        fields: tuple[str, ...] = row_type._fields  # type: ignore[attr-defined]
        if tuple(columns) != fields:
            if set(columns) != set(fields):
                raise TypeError(f"{row_type.__name__} has the fields {', '.join(fields)}, not {', '.join(columns)}")
            columns = {name: columns[name] for name in fields}
        self.row_type = row_type
        self.by_name: dict[str, Any] = columns
        """The list of each field, by the field's name. Callers must not change it."""

    @classmethod
    def of(cls, row_type: type[Row], rows: abc.Sequence[Row]) -> Columns[Row]:
        """Store these rows by column. Returns them unchanged if they are Columns."""
        if isinstance(rows, Columns):
            return rows
        fields: tuple[str, ...] = row_type._fields  # type: ignore[attr-defined]
        return cls(row_type, **{name: [getattr(row, name) for row in rows] for name in fields})

    def column(self, name: str) -> Any:
        """The list of the field `name`."""
        return self.by_name[name]

    def __len__(self) -> int:
        return len(next(iter(self.by_name.values())))

    def __iter__(self) -> abc.Iterator[Row]:
        # `row_type(...)` only calls `tuple.__new__` in the end, which alone takes less than half the time.
        return map(tuple.__new__, repeat(self.row_type), zip(*self.by_name.values(), strict=True))

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        return self.row_type(*[column[index] for column in self.by_name.values()])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, abc.Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(list(self))
