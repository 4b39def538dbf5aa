"""Statements that every turn runs, compiled once and given to the database's driver.

SQLAlchemy takes some 40 µs to execute a statement that it has compiled before, and 100 µs for one that is built anew.
SQLite itself takes one or a few. As a turn runs a dozen of them while it holds the write lock, they go around it.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import BindParameter, ClauseElement, Connection, Dialect, Select, Table, bindparam
from sqlalchemy.exc import DBAPIError


def parameters(table: Table) -> dict[str, BindParameter[Any]]:
    """Return a parameter for each column of a table, with the column's name."""
    return {column.name: bindparam(column.name) for column in table.columns}


class Compiled(NamedTuple):
    """A statement in the SQL of one dialect."""

    sql: str
    places: Sequence[tuple[str, Callable[[Any], Any] | None]]
    """Name of each parameter, by position, and the function that turns its value into what the driver takes, if any."""
    named: bool
    """Whether the driver takes the parameters by name."""

    def parameters(self, values: Mapping[str, Any]) -> Any:
        """Return the values as the driver takes them."""
        if self.named:
            return {name: convert(values[name]) if convert else values[name] for name, convert in self.places}
        return [convert(values[name]) if convert else values[name] for name, convert in self.places]


class Prepared:
    """A statement whose parameters are all named. Its rows are the driver's own, so their values are not converted."""

    def __init__(self, statement: ClauseElement) -> None:
        self._statement = statement
        self._compiled: dict[str, Compiled] = {}
        self._row = _row_type(statement) if isinstance(statement, Select) else tuple
        """Makes a row of a query, with the names of its columns, from the driver's tuple."""

    def run(self, db: Connection, **values: Any) -> Any:
        """Execute the statement and return the driver's cursor. Raises DBAPIError."""
        compiled = self._for(db.dialect)
        return executed(db, "execute", compiled.sql, compiled.parameters(values))

    def run_many(self, db: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        """Execute the statement for each row of values. Raises DBAPIError."""
        compiled = self._for(db.dialect)
        given = [compiled.parameters(row) for row in rows]
        if len(given) == 1:  # The driver of PostgreSQL prepares more for several rows.
            executed(db, "execute", compiled.sql, *given)
        elif given:
            executed(db, "executemany", compiled.sql, given)

    def first(self, db: Connection, **values: Any) -> Any:
        """Execute the query and return its first row, with the columns' names; None if it has no row."""
        row = self.run(db, **values).fetchone()
        return None if row is None else self._row(row)

    def value(self, db: Connection, **values: Any) -> Any:
        """Execute the statement and return the first value of its first row; None if it has no row."""
        row = self.run(db, **values).fetchone()
        return None if row is None else row[0]

    def _for(self, dialect: Dialect) -> Compiled:
        if dialect.name not in self._compiled:
            self._compiled[dialect.name] = _compile(self._statement, dialect)
        return self._compiled[dialect.name]


def _row_type(query: Select[Any]) -> Callable[[Sequence[Any]], Any]:
    """Return what makes a named tuple of a query's columns. A column without a usable name has its position's."""
    named: Any = namedtuple  # The names are not known to the type checker.
    names = [str(column.key) for column in query.selected_columns]
    make: Callable[[Sequence[Any]], Any] = named("Row", names, rename=True)._make
    return make


def _compile(statement: ClauseElement, dialect: Dialect) -> Compiled:
    compiled: Any = statement.compile(dialect=dialect)
    impl = {name: bind.type.dialect_impl(dialect) for name, bind in compiled.binds.items()}
    names = impl if compiled.positiontup is None else compiled.positiontup
    places = [(name, impl[name].bind_processor(dialect)) for name in names]
    return Compiled(str(compiled), places, named=compiled.positiontup is None)


def run_sql(db: Connection, sql: str) -> None:
    """Execute a statement without parameters or rows. Raises DBAPIError."""
    executed(db, "execute", sql)


def executed(db: Connection, method: str, sql: str, *given: Any) -> Any:
    """Call a method of a new cursor of the driver, and return the cursor. Raises DBAPIError, as SQLAlchemy does."""
    connection: Any = db.connection.dbapi_connection
    driver: Any = db.dialect.dbapi
    cursor = connection.cursor()
    try:
        getattr(cursor, method)(sql, *given)
    except driver.Error as error:
        raise DBAPIError.instance(sql, None, error, driver.Error, hide_parameters=True, dialect=db.dialect) from error
    return cursor
