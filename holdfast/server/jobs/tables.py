"""Files, batches and answered lines in the store's database. Each method is one transaction."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Float,
    Integer,
    LargeBinary,
    Row,
    Select,
    String,
    Table,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    update,
)

from holdfast.server.conversations.database import NAME, Database, MigrationStep, tables
from holdfast.server.conversations.values import Conflict, NotFound
from holdfast.server.jobs.values import AnsweredLine, Batch, StoredFile
from holdfast.server.replies import encode

DELETED_AT_ONCE = 1000
"""Most rows that one transaction deletes, so that no turn of a conversation waits for a long one."""

files = Table(
    "files",
    tables,
    Column("id", NAME, primary_key=True),
    Column("tenant", NAME, nullable=False, index=True),
    Column("purpose", String(32), nullable=False),
    Column("name", String(255), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("created", Float, nullable=False),
    Column("expires", Float),
)
"""The bytes of a file lie in a directory, under its id."""

batches = Table(
    "batches",
    tables,
    Column("id", NAME, primary_key=True),
    Column("tenant", NAME, nullable=False, index=True),
    Column("created", Float, nullable=False),
    Column("open", Boolean, nullable=False, index=True),
    Column("owner", NAME),
    Column("input", NAME, nullable=False),
    Column("cancelling", Float),
    Column("batch", LargeBinary, nullable=False),
)
"""`owner` is the server that runs the batch. Only it writes `batch`; any server may set `cancelling`, once."""

lines = Table(
    "batch_lines",
    tables,
    Column("batch", NAME, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("completed", Boolean, nullable=False),
    Column("answer", LargeBinary, nullable=False),
)
"""A line is answered once it has a row here. The rows go when the output files are written."""


def _files_and_batches(db: Connection) -> None:
    for table in (files, batches, lines):
        table.create(db)


STEPS: tuple[MigrationStep, ...] = (_files_and_batches,)
"""The store's migration steps behind those of `conversations.database`. A later step of either goes to this end."""

_read_batch = msgspec.json.Decoder(Batch).decode


class TooMany(Exception):
    """There are as many open batches as may be; the message says how many."""


class WrongPurpose(Exception):
    """A file was not uploaded for what it is used for; the message says so."""


class FileTable:
    """The files that exist. Raises NotFound for one that does not, has expired, or belongs to another tenant."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, file: StoredFile) -> None:
        """Record a file whose bytes are in place."""
        with self._database.write() as db:
            _insert_file(db, file)

    def get(self, tenant: str, id: str, now: float) -> StoredFile:
        """One file."""
        with self._database.read() as db:
            return _file(db, tenant, id, now)

    def page(
        self, tenant: str, now: float, *, limit: int, newest_first: bool, after: str | None, purpose: str | None
    ) -> tuple[list[StoredFile], bool]:
        """Up to `limit` files behind the file `after`, and whether there are more."""
        with self._database.read() as db:
            wanted = select(files).where(files.c.tenant == tenant, _alive(now))
            if purpose is not None:
                wanted = wanted.where(files.c.purpose == purpose)
            known = None if after is None else _file(db, tenant, after, now, "after")
            rows = _page(db, wanted, files, limit, newest_first, None if known is None else (known.created, known.id))
            return [_as_file(row) for row in rows[:limit]], len(rows) > limit

    def delete(self, tenant: str, id: str, now: float) -> None:
        """Delete a file. Raises Conflict if an open batch reads it."""
        with self._database.write() as db:
            _file(db, tenant, id, now)
            if db.execute(select(batches.c.id).where(batches.c.input == id, batches.c.open).limit(1)).first():
                raise Conflict("a batch that has not ended reads this file; cancel the batch first")
            db.execute(delete(files).where(files.c.id == id))

    def held(self, tenant: str) -> tuple[int, int]:
        """Bytes of all files, and of one tenant's."""
        with self._database.read() as db:
            everything = select(func.coalesce(func.sum(files.c.bytes), 0))
            own = everything.where(files.c.tenant == tenant)
            return int(db.execute(everything).scalar_one()), int(db.execute(own).scalar_one())

    def drop_expired(self, now: float) -> list[str]:
        """Delete the files whose time is over, unless an open batch reads them. Returns their ids."""
        read = exists().where(batches.c.input == files.c.id, batches.c.open)
        with self._database.write() as db:
            gone = delete(files).where(files.c.expires <= now, ~read).returning(files.c.id)
            return list(db.execute(gone).scalars())


class BatchTable:
    """The batches. Raises NotFound for one that does not exist or belongs to another tenant."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, batch: Batch, owner: str, *, purpose: str, limit: int, tenant_limit: int) -> None:
        """Begin a batch. Raises NotFound for its input file, WrongPurpose for another kind of file, TooMany."""
        with self._database.write() as db:
            file = _file(db, batch.tenant, batch.input_file, batch.created, "input_file_id")
            if file.purpose != purpose:
                raise WrongPurpose(f"the file's purpose is {file.purpose}; a batch reads files of purpose {purpose}")
            count = select(func.count()).select_from(batches).where(batches.c.open)
            if (there := db.execute(count).scalar_one()) >= limit:
                raise TooMany(f"{there} batches have not ended, which is the limit; try again later")
            if (own := db.execute(count.where(batches.c.tenant == batch.tenant)).scalar_one()) >= tenant_limit:
                raise TooMany(f"this API key has {own} batches that have not ended; at most {tenant_limit} are taken")
            row = {
                "id": batch.id, "tenant": batch.tenant, "created": batch.created, "open": True, "owner": owner,
                "input": batch.input_file, "cancelling": None, "batch": encode(batch),
            }  # fmt: skip
            db.execute(insert(batches).values(row))

    def get(self, tenant: str, id: str) -> Batch:
        """One batch."""
        with self._database.read() as db:
            return _as_batch(_batch(db, tenant, id))

    def page(self, tenant: str, *, limit: int, after: str | None) -> tuple[list[Batch], bool]:
        """Up to `limit` batches, the newest first, behind the batch `after`, and whether there are more."""
        with self._database.read() as db:
            known = None if after is None else _batch(db, tenant, after, "after")
            place = None if known is None else (known.created, known.id)
            rows = _page(db, select(batches).where(batches.c.tenant == tenant), batches, limit, True, place)
            return [_as_batch(row) for row in rows[:limit]], len(rows) > limit

    def open_of(self, tenant: str) -> list[Batch]:
        """The tenant's batches that have not ended, the oldest first."""
        with self._database.read() as db:
            own = select(batches).where(batches.c.tenant == tenant, batches.c.open)
            return [_as_batch(row) for row in db.execute(own.order_by(batches.c.created, batches.c.id))]

    def ask_cancel(self, tenant: str, id: str, now: float) -> Batch:
        """Ask a batch's owner to stop it. Raises Conflict if it has ended, or is about to."""
        with self._database.write() as db:
            row = _batch(db, tenant, id)
            batch = _as_batch(row)
            if batch.ended or batch.status == "finalizing":
                raise Conflict(f"the batch is {batch.status}; only one in progress can be cancelled")
            if row.cancelling is None:
                db.execute(update(batches).where(batches.c.id == id).values(cancelling=now))
            return _as_batch(_batch(db, tenant, id))

    def owners(self) -> set[str]:
        """The servers whose batches have not ended."""
        with self._database.read() as db:
            return set(db.execute(select(batches.c.owner).where(batches.c.open).distinct()).scalars())

    def orphans(self, owners: Collection[str]) -> list[tuple[Batch, bool]]:
        """The open batches of these servers, the oldest first, and whether somebody asked to cancel each."""
        with self._database.read() as db:
            theirs = select(batches).where(batches.c.open, batches.c.owner.in_(owners))
            rows = db.execute(theirs.order_by(batches.c.created, batches.c.id))
            return [(_read_batch(row.batch), row.cancelling is not None) for row in rows]

    def adopt(self, owner: str, owners: Collection[str], ids: Collection[str]) -> set[str]:
        """Give these batches to `owner`, if they still belong to one of `owners`. Returns those that it got."""
        with self._database.write() as db:
            theirs = update(batches).where(batches.c.id.in_(ids), batches.c.owner.in_(owners))
            return set(db.execute(theirs.values(owner=owner).returning(batches.c.id)).scalars())

    def cancelled(self, ids: Iterable[str]) -> list[str]:
        """Those of these batches that somebody asked to cancel."""
        with self._database.read() as db:
            asked = select(batches.c.id).where(batches.c.id.in_(list(ids)), batches.c.cancelling.is_not(None))
            return list(db.execute(asked).scalars())

    def change(self, id: str, fields: Mapping[str, Any], made: Sequence[StoredFile] = ()) -> Batch:
        """Change fields of a batch, together with the files that it made."""
        with self._database.write() as db:
            for file in made:
                db.execute(delete(files).where(files.c.id == file.id))
                _insert_file(db, file)
            return _write(db, replace(_stored(db, id), **fields))

    def answer(self, id: str, answers: Sequence[AnsweredLine]) -> tuple[Batch, list[AnsweredLine]]:
        """Store answers, but none to a line that has one already. Returns the batch, and what was stored."""
        with self._database.write() as db:
            batch, numbers = _stored(db, id), [each.number for each in answers]
            there = select(lines.c.number).where(lines.c.batch == id, lines.c.number.in_(numbers))
            answered = set(db.execute(there).scalars())
            new = list({each.number: each for each in answers if each.number not in answered}.values())
            if new:
                rows = [
                    {"batch": id, "number": each.number, "completed": each.completed, "answer": each.text}
                    for each in new
                ]
                db.execute(insert(lines), rows)
            good = sum(each.completed for each in new)
            counts = {"completed": batch.completed + good, "failed": batch.failed + len(new) - good}
            usage = sum((each.usage for each in new), batch.usage)
            return _write(db, replace(batch, usage=usage, **counts)), new

    def answered(self, id: str) -> set[int]:
        """The numbers of the lines that have an answer."""
        with self._database.read() as db:
            return set(db.execute(select(lines.c.number).where(lines.c.batch == id)).scalars())

    def answers(self, id: str, *, completed: bool, after: int, limit: int) -> list[tuple[int, bytes]]:
        """Up to `limit` answers behind line `after`, in the order of the lines."""
        with self._database.read() as db:
            wanted = select(lines.c.number, lines.c.answer).where(
                lines.c.batch == id, lines.c.completed == completed, lines.c.number > after
            )
            return [(row.number, row.answer) for row in db.execute(wanted.order_by(lines.c.number).limit(limit))]

    def forget_answers(self) -> bool:
        """Delete some of the answers of batches that have ended. Returns whether there may be more."""
        with self._database.write() as db:
            gone = exists().where(batches.c.id == lines.c.batch, ~batches.c.open)
            ended = db.execute(select(lines.c.batch).where(gone).limit(1)).scalar()
            if ended is None:
                return False
            numbers = select(lines.c.number).where(lines.c.batch == ended).limit(DELETED_AT_ONCE)
            db.execute(delete(lines).where(lines.c.batch == ended, lines.c.number.in_(numbers.scalar_subquery())))
            return True

    def drop_old(self, before: float) -> None:
        """Delete the batches that have ended and were created before this time."""
        with self._database.write() as db:
            db.execute(delete(batches).where(~batches.c.open, batches.c.created < before))


def _page(
    db: Connection,
    wanted: Select[Any],
    table: Table,
    limit: int,
    newest_first: bool,
    after: tuple[float, str] | None,
) -> Sequence[Row[Any]]:
    """Up to `limit` + 1 rows by their creation, behind that of `after`: its time and its id."""
    created, id = table.c.created, table.c.id
    if after is not None:
        at, last = after
        further = created < at if newest_first else created > at
        beside = id < last if newest_first else id > last
        wanted = wanted.where(or_(further, (created == at) & beside))
    order = (created.desc(), id.desc()) if newest_first else (created, id)
    return db.execute(wanted.order_by(*order).limit(limit + 1)).all()


def _alive(now: float) -> ColumnElement[bool]:
    return or_(files.c.expires.is_(None), files.c.expires > now)


def _file(db: Connection, tenant: str, id: str, now: float, param: str | None = None) -> StoredFile:
    row = db.execute(select(files).where(files.c.id == id, files.c.tenant == tenant, _alive(now))).one_or_none()
    if row is None:
        raise NotFound("file", id, param)
    return _as_file(row)


def _as_file(row: Row[Any]) -> StoredFile:
    return StoredFile(
        id=row.id, tenant=row.tenant, purpose=row.purpose, name=row.name, bytes=row.bytes, created=row.created,
        expires=row.expires,
    )  # fmt: skip


def _insert_file(db: Connection, file: StoredFile) -> None:
    db.execute(insert(files).values({name: getattr(file, name) for name in file.__struct_fields__}))


def _batch(db: Connection, tenant: str, id: str, param: str | None = None) -> Row[Any]:
    row = db.execute(select(batches).where(batches.c.id == id, batches.c.tenant == tenant)).one_or_none()
    if row is None:
        raise NotFound("batch", id, param)
    return row


def _stored(db: Connection, id: str) -> Batch:
    """A batch's state as its owner stored it. The counts come from here, so they always fit the answers."""
    found = db.execute(select(batches.c.batch).where(batches.c.id == id)).scalar()
    if found is None:
        raise NotFound("batch", id)
    return _read_batch(found)


def _write(db: Connection, batch: Batch) -> Batch:
    db.execute(update(batches).where(batches.c.id == batch.id).values(batch=encode(batch), open=not batch.ended))
    return batch


def _as_batch(row: Row[Any]) -> Batch:
    """A batch as it is shown: cancelling as soon as that was asked."""
    batch = _read_batch(row.batch)
    if row.cancelling is None or batch.ended:
        return batch
    status = "cancelling" if batch.status in ("validating", "in_progress") else batch.status
    return replace(batch, status=status, times={**batch.times, "cancelling": row.cancelling})
