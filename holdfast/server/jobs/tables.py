"""Files, batches with their answered lines, and tuning jobs in the store's database. Each method is one transaction."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from msgspec.structs import replace
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Float,
    Index,
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
from holdfast.server.jobs.attempt_table import Found, attempts, cut_off, forget
from holdfast.server.jobs.results import MESSAGE_PURPOSE
from holdfast.server.jobs.values import AnsweredLine, Batch, JobEvent, StoredFile, TuningJob, Wanted
from holdfast.server.replies import encode

PAST = {"pause": "paused", "resume": "resumed", "cancel": "cancelled"}
DELETED_AT_ONCE = 1000
"""Maximum number of rows that one transaction deletes. A longer transaction would delay the turns of conversations."""

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
"""Files. The bytes of a file are in a directory, under its id."""

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
"""Batches. `owner` is the server that runs the batch.

Only the owner writes `batch`. Any server may set `cancelling`, once.
"""

lines = Table(
    "batch_lines",
    tables,
    Column("batch", NAME, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("completed", Boolean, nullable=False),
    Column("answer", LargeBinary, nullable=False),
)
"""Answered lines of batches. The rows are deleted when the output files are written."""

tuning_jobs = Table(
    "tuning_jobs",
    tables,
    Column("id", NAME, primary_key=True),
    Column("tenant", NAME, nullable=False, index=True),
    Column("created", Float, nullable=False),
    Column("open", Boolean, nullable=False, index=True),
    Column("reading", Boolean, nullable=False),
    Column("serving", Boolean, nullable=False, index=True),
    Column("owner", NAME),
    Column("training", NAME, nullable=False),
    Column("validation", NAME),
    Column("wanted", String(16), nullable=False),
    Column("asks", Integer, nullable=False),
    Column("asked_at", Float),
    Column("job", LargeBinary, nullable=False),
)
"""Tuning jobs. `owner` is the server that runs the job.

Only the owner writes `job`. Any server may set `wanted`. `asks` counts the requests for a change, and `asked_at` is the
time of the last one. A job is `reading` while it needs its files, and `serving` while it has adapters.
"""

tuning_events = Table(
    "tuning_events",
    tables,
    Column("job", NAME, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("event", LargeBinary, nullable=False),
)
"""Events of tuning jobs, numbered from 1 in the order in which they happened."""


def _files_and_batches(db: Connection) -> None:
    for table in (files, batches, lines):
        table.create(db)


def _tuning(db: Connection) -> None:
    tuning_jobs.create(db)
    tuning_events.create(db)


by_creation = [
    Index(f"{table.name}_by_creation", table.c.tenant, table.c.created, table.c.id)
    for table in (files, batches, tuning_jobs)
]
"""Indexes in whose order lists are read, page by page."""


def create_indexes(db: Connection) -> None:
    """Create the indexes of lists that an older store lacks. They have no version, as an older server keeps them."""
    for index in by_creation:
        index.create(db, checkfirst=True)


def _attempts(db: Connection) -> None:
    attempts.create(db)


STEPS: tuple[MigrationStep, ...] = (_files_and_batches, _tuning, _attempts)
"""Migration steps after those of `conversations.database`. New steps of either go to this list's end."""

_read_batch = msgspec.json.Decoder(Batch).decode
_read_job = msgspec.json.Decoder(TuningJob).decode
_read_event = msgspec.json.Decoder(JobEvent).decode

Work = TypeVar("Work", Batch, TuningJob)


class TooMany(Exception):
    """The limit of open batches or tuning jobs is reached. The message names it."""


class WrongPurpose(Exception):
    """A file was uploaded for another purpose. The message names it."""

    def __init__(self, message: str, param: str = "input_file_id") -> None:
        """`param` is the request's parameter that names the file."""
        super().__init__(message)
        self.param = param


class FileTable:
    """Table of files. Raises NotFound for a file that does not exist, has expired, or belongs to another tenant."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, file: StoredFile) -> None:
        """Record a file whose bytes are in place."""
        with self._database.write() as db:
            _insert_file(db, file)

    def get(self, tenant: str, id: str, now: float) -> StoredFile:
        """Return one file."""
        with self._database.read() as db:
            return _file(db, tenant, id, now)

    def page(
        self, tenant: str, now: float, *, limit: int, newest_first: bool, after: str | None, purpose: str | None
    ) -> tuple[list[StoredFile], bool]:
        """Return up to `limit` files after the file `after`, and whether there are more."""
        with self._database.read() as db:
            wanted = select(files).where(files.c.tenant == tenant, files.c.purpose != MESSAGE_PURPOSE, _alive(now))
            if purpose is not None:
                wanted = wanted.where(files.c.purpose == purpose)
            known = None if after is None else _file(db, tenant, after, now, "after")
            rows = _page(db, wanted, files, limit, newest_first, None if known is None else (known.created, known.id))
            return [_as_file(row) for row in rows[:limit]], len(rows) > limit

    def delete(self, tenant: str, id: str, now: float) -> None:
        """Delete a file. Raises Conflict if an open batch or a tuning job still reads it."""
        with self._database.write() as db:
            _file(db, tenant, id, now)
            if db.execute(select(batches.c.id).where(batches.c.input == id, batches.c.open).limit(1)).first():
                raise Conflict("a batch that has not ended reads this file; cancel the batch first")
            reads = or_(tuning_jobs.c.training == id, tuning_jobs.c.validation == id) & tuning_jobs.c.reading
            if db.execute(select(tuning_jobs.c.id).where(reads).limit(1)).first():
                raise Conflict("a tuning job that validates its files reads this one; wait, or cancel the job first")
            db.execute(delete(files).where(files.c.id == id))

    def held(self, tenant: str) -> tuple[int, int]:
        """Return the number of bytes of all files, and of the tenant's files."""
        with self._database.read() as db:
            everything = select(func.coalesce(func.sum(files.c.bytes), 0))
            own = everything.where(files.c.tenant == tenant)
            return int(db.execute(everything).scalar_one()), int(db.execute(own).scalar_one())

    def drop_expired(self, now: float) -> list[str]:
        """Delete the expired files, except those that a batch or a tuning job reads. Returns their ids."""
        read = exists().where(batches.c.input == files.c.id, batches.c.open)
        own = or_(tuning_jobs.c.training == files.c.id, tuning_jobs.c.validation == files.c.id)
        tuned = exists().where(own, tuning_jobs.c.reading)
        with self._database.write() as db:
            gone = delete(files).where(files.c.expires <= now, ~read, ~tuned).returning(files.c.id)
            return list(db.execute(gone).scalars())


class _OwnedTable(Generic[Work]):
    """Work that belongs to servers: each row has an `owner`, and is `open` until it has ended."""

    table: Table
    kind: str
    """Name of the rows in errors, in the plural."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, tenant: str, id: str) -> Work:
        """Return one row's work as clients see it."""
        with self._database.read() as db:
            return self._shown(_row(db, self.table, id, tenant))

    def page(
        self,
        tenant: str,
        *,
        limit: int,
        after: str | None,
        before: str | None = None,
        prefix: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> tuple[list[Work], bool]:
        """Return up to `limit` pieces of work after `after`, the newest first, and whether there are more.

        Only work that has all of `metadata`, and whose id begins with `prefix`, is returned. With `before`, the page
        is the one that ends before it.
        """
        with self._database.read() as db:
            param, at = ("after", after) if before is None else ("before", before)
            known = None if at is None else _row(db, self.table, at, tenant, param)
            place = None if known is None else (known.created, known.id)
            own = select(self.table).where(self.table.c.tenant == tenant)
            if prefix:
                own = own.where(self.table.c.id.startswith(prefix, autoescape=True))
            if before is not None:
                rows = _page(db, own, self.table, limit, False, place)
                return [self._shown(row) for row in reversed(rows[:limit])], len(rows) > limit
            found: list[Work] = []
            while True:
                rows = _page(db, own, self.table, limit, True, place)
                for work in map(self._shown, rows):
                    if (metadata or {}).items() <= dict(work.metadata or {}).items():
                        found.append(work)
                if len(found) > limit or len(rows) <= limit:
                    return found[:limit], len(found) > limit
                place = rows[-1].created, rows[-1].id

    def owners(self) -> set[str]:
        """Return the servers whose work has not ended."""
        with self._database.read() as db:
            return set(db.execute(select(self.table.c.owner).where(self.table.c.open).distinct()).scalars())

    def adopt(self, owner: str, owners: Collection[str], ids: Collection[str]) -> dict[str, Found]:
        """Give this work to `owner`, if it still belongs to one of `owners`, whose servers have ended.

        Returns the work that changed its owner, by id, each with the attempts at it.
        """
        with self._database.write() as db:
            theirs = update(self.table).where(self.table.c.id.in_(ids), self.table.c.owner.in_(owners))
            taken = set(db.execute(theirs.values(owner=owner).returning(self.table.c.id)).scalars())
            return {id: {} for id in taken} | cut_off(db, taken)

    def _shown(self, row: Row[Any]) -> Work:
        """Return a row's work as clients see it."""
        raise NotImplementedError

    def _check_room(self, db: Connection, tenant: str, limit: int, tenant_limit: int) -> None:
        """Raises TooMany if this many pieces of work are open in total, or of the tenant."""
        count = select(func.count()).select_from(self.table).where(self.table.c.open)
        if (there := db.execute(count).scalar_one()) >= limit:
            raise TooMany(f"{there} {self.kind} have not ended, which is the limit; try again later")
        if (own := db.execute(count.where(self.table.c.tenant == tenant)).scalar_one()) >= tenant_limit:
            raise TooMany(f"this API key has {own} {self.kind} that have not ended; at most {tenant_limit} are taken")

    def _orphans(self, owners: Collection[str]) -> Sequence[Row[Any]]:
        """Return the open rows of these servers, the oldest first."""
        with self._database.read() as db:
            theirs = select(self.table).where(self.table.c.open, self.table.c.owner.in_(owners))
            return db.execute(theirs.order_by(self.table.c.created, self.table.c.id)).all()


class BatchTable(_OwnedTable[Batch]):
    """Table of batches. Raises NotFound for a batch that does not exist or belongs to another tenant."""

    table, kind = batches, "batches"

    def add(self, batch: Batch, owner: str, *, purpose: str, limit: int, tenant_limit: int) -> None:
        """Add a batch. Raises NotFound for its input file, WrongPurpose for a file for another purpose, TooMany."""
        with self._database.write() as db:
            file = _file(db, batch.tenant, batch.input_file, batch.created, "input_file_id")
            if file.purpose != purpose:
                raise WrongPurpose(f"the file's purpose is {file.purpose}; a batch reads files of purpose {purpose}")
            self._check_room(db, batch.tenant, limit, tenant_limit)
            row = {
                "id": batch.id, "tenant": batch.tenant, "created": batch.created, "open": True, "owner": owner,
                "input": batch.input_file, "cancelling": None, "batch": encode(batch),
            }  # fmt: skip
            db.execute(insert(batches).values(row))

    def delete(self, tenant: str, id: str) -> list[str]:
        """Delete a batch with its files. Returns their ids. Raises Conflict if it has not ended."""
        with self._database.write() as db:
            batch = self._shown(_row(db, batches, id, tenant))
            if not batch.ended:
                raise Conflict(f"the batch is {batch.status}; only one that has ended can be deleted")
            own = [each for each in (batch.input_file, batch.output_file, batch.error_file) if each is not None]
            db.execute(delete(batches).where(batches.c.id == id))
            db.execute(delete(files).where(files.c.id.in_(own)))
            return own

    def open_of(self, tenant: str, prefix: str) -> list[Batch]:
        """Return the tenant's batches that have not ended and whose id begins with `prefix`, the oldest first."""
        with self._database.read() as db:
            own = select(batches).where(batches.c.tenant == tenant, batches.c.open)
            own = own.where(batches.c.id.startswith(prefix, autoescape=True))
            return [self._shown(row) for row in db.execute(own.order_by(batches.c.created, batches.c.id))]

    def ask_cancel(self, tenant: str, id: str, now: float) -> Batch:
        """Ask a batch's owner to stop it. Raises Conflict if it has ended or is finalizing."""
        with self._database.write() as db:
            row = _row(db, batches, id, tenant)
            batch = self._shown(row)
            if batch.ended or batch.status == "finalizing":
                raise Conflict(f"the batch is {batch.status}; only one in progress can be cancelled")
            if row.cancelling is None:
                db.execute(update(batches).where(batches.c.id == id).values(cancelling=now))
            return self._shown(_row(db, batches, id, tenant))

    def orphans(self, owners: Collection[str]) -> list[tuple[Batch, bool]]:
        """Return the open batches of these servers, the oldest first, and whether each is to be cancelled."""
        return [(_read_batch(row.batch), row.cancelling is not None) for row in self._orphans(owners)]

    def cancelled(self, ids: Iterable[str]) -> list[str]:
        """Return the given ids whose batches a client asked to cancel."""
        with self._database.read() as db:
            asked = select(batches.c.id).where(batches.c.id.in_(list(ids)), batches.c.cancelling.is_not(None))
            return list(db.execute(asked).scalars())

    def change(self, id: str, fields: Mapping[str, Any], made: Sequence[StoredFile] = ()) -> Batch:
        """Change fields of a batch, together with the files that it made."""
        with self._database.write() as db:
            _replace_files(db, made)
            batch = _write(db, replace(_read_batch(_row(db, batches, id).batch), **fields))
            if batch.ended:
                forget(db, id)
            return batch

    def answer(self, id: str, answers: Sequence[AnsweredLine]) -> tuple[Batch, list[AnsweredLine]]:
        """Store answers, except for lines that have one already. Returns the batch, and the stored answers."""
        with self._database.write() as db:
            batch, numbers = _read_batch(_row(db, batches, id).batch), [each.number for each in answers]
            there = select(lines.c.number).where(lines.c.batch == id, lines.c.number.in_(numbers))
            answered = set(db.execute(there).scalars())
            new = list({each.number: each for each in answers if each.number not in answered}.values())
            if new:
                rows = [
                    {"batch": id, "number": each.number, "completed": each.completed, "answer": each.text}
                    for each in new
                ]
                db.execute(insert(lines), rows)
            forget(db, id, numbers)
            good = sum(each.completed for each in new)
            counts = {"completed": batch.completed + good, "failed": batch.failed + len(new) - good}
            usage = sum((each.usage for each in new), batch.usage)
            return _write(db, replace(batch, usage=usage, **counts)), new

    def answered(self, id: str) -> set[int]:
        """Return the numbers of the answered lines."""
        with self._database.read() as db:
            return set(db.execute(select(lines.c.number).where(lines.c.batch == id)).scalars())

    def answers(self, id: str, *, completed: bool, after: int, limit: int) -> list[tuple[int, bytes]]:
        """Return up to `limit` answers after line `after`, in the order of the lines."""
        with self._database.read() as db:
            wanted = select(lines.c.number, lines.c.answer).where(
                lines.c.batch == id, lines.c.completed == completed, lines.c.number > after
            )
            return [(row.number, row.answer) for row in db.execute(wanted.order_by(lines.c.number).limit(limit))]

    def forget_answers(self) -> bool:
        """Delete some answers of batches that have ended. Returns whether there may be more."""
        with self._database.write() as db:
            gone = exists().where(batches.c.id == lines.c.batch, ~batches.c.open)
            ended = db.execute(select(lines.c.batch).where(gone).limit(1)).scalar()
            if ended is None:
                return False
            numbers = select(lines.c.number).where(lines.c.batch == ended).limit(DELETED_AT_ONCE)
            db.execute(delete(lines).where(lines.c.batch == ended, lines.c.number.in_(numbers.scalar_subquery())))
            return True

    def drop_old(self, before: float) -> None:
        """Delete the ended batches that were created before this time."""
        with self._database.write() as db:
            db.execute(delete(batches).where(~batches.c.open, batches.c.created < before))

    def _shown(self, row: Row[Any]) -> Batch:
        """Return a batch as clients see it: cancelling as soon as a client asked for that."""
        batch = _read_batch(row.batch)
        if row.cancelling is None or batch.ended:
            return batch
        status = "cancelling" if batch.status in ("validating", "in_progress") else batch.status
        return replace(batch, status=status, times={**batch.times, "cancelling": row.cancelling})


class JobTable(_OwnedTable[TuningJob]):
    """Table of tuning jobs. Raises NotFound for a job that does not exist or belongs to another tenant."""

    table, kind = tuning_jobs, "tuning jobs"

    def add(self, job: TuningJob, owner: str, *, limit: int, tenant_limit: int, kept: int) -> None:
        """Add a job. Raises NotFound for its files, WrongPurpose for files for another purpose, TooMany.

        `kept` is the maximum number of a tenant's jobs with adapters, and also of its ended jobs without adapters.
        Beyond it, the oldest ended jobs without adapters are deleted.
        """
        with self._database.write() as db:
            for param, id in (("training_file", job.training_file), ("validation_file", job.validation_file)):
                if id is not None and (file := _file(db, job.tenant, id, job.created, param)).purpose != "fine-tune":
                    reason = f"the purpose of {param} is {file.purpose}; a tuning job reads files of purpose fine-tune"
                    raise WrongPurpose(reason, param)
            self._check_room(db, job.tenant, limit, tenant_limit)
            own = tuning_jobs.c.tenant == job.tenant
            count = select(func.count()).select_from(tuning_jobs).where(tuning_jobs.c.serving, own)
            if (there := db.execute(count).scalar_one()) >= kept:
                raise TooMany(f"this API key has {there} tuned models, which is the limit; DELETE /v1/models/NAME")
            row = {
                "id": job.id, "tenant": job.tenant, "created": job.created, "open": True, "reading": True,
                "serving": False, "owner": owner, "training": job.training_file, "validation": job.validation_file,
                "wanted": "run", "asks": 0, "asked_at": None, "job": encode(job),
            }  # fmt: skip
            db.execute(insert(tuning_jobs).values(row))
            ended = select(tuning_jobs.c.id).where(own, ~tuning_jobs.c.open, ~tuning_jobs.c.serving)
            newest = ended.order_by(tuning_jobs.c.created.desc(), tuning_jobs.c.id.desc())
            _delete_jobs(db, list(db.execute(newest.offset(kept).limit(DELETED_AT_ONCE)).scalars()))
            _add_events(db, job.id, [JobEvent(created=job.created, message=f"Created fine-tuning job: {job.id}")])

    def ask(self, tenant: str, id: str, verb: str, now: float) -> tuple[TuningJob, Wanted, int]:
        """Ask a job's owner to `pause`, `resume` or `cancel` it. Raises Conflict if its state does not allow it.

        Returns the job, its wanted state, and the number of requests for a change so far.
        """
        with self._database.write() as db:
            row = _row(db, tuning_jobs, id, tenant)
            job, asks = self._shown(row), row.asks + 1
            wanted: Wanted
            match verb:
                case "pause":
                    allowed, wanted, which = not job.ended and job.status != "paused", "pause", "one that waits or runs"
                case "resume":
                    allowed, wanted, which = job.status == "paused", "run", "a paused one"
                case _:
                    allowed, wanted, which = not job.ended, "cancel", "one that has not ended"
            if not allowed:
                raise Conflict(f"the job is {job.status}; only {which} can be {PAST[verb]}")
            changed = update(tuning_jobs).where(tuning_jobs.c.id == id)
            db.execute(changed.values(wanted=wanted, asks=asks, asked_at=now))
            return self._shown(_row(db, tuning_jobs, id, tenant)), wanted, asks

    def orphans(self, owners: Collection[str]) -> list[tuple[TuningJob, Wanted]]:
        """Return the open jobs of these servers, the oldest first, and the wanted state of each."""
        return [(_read_job(row.job), row.wanted) for row in self._orphans(owners)]

    def wanted(self, ids: Iterable[str]) -> dict[str, tuple[Wanted, int]]:
        """Return the wanted state of each of these jobs, and the number of requests for a change."""
        with self._database.read() as db:
            rows = db.execute(select(tuning_jobs).where(tuning_jobs.c.id.in_(list(ids))))
            return {row.id: (row.wanted, row.asks) for row in rows}

    def change(
        self, id: str, fields: Mapping[str, Any], events: Sequence[JobEvent] = (), made: Sequence[StoredFile] = ()
    ) -> TuningJob:
        """Change fields of a job, together with its events and the files that it made."""
        with self._database.write() as db:
            _replace_files(db, made)
            job = replace(_read_job(_row(db, tuning_jobs, id).job), **fields)
            values: dict[str, Any] = {"job": encode(job), "open": not job.ended}
            values["reading"] = job.status == "validating_files"
            if "checkpoints" in fields:
                values["serving"] = bool(job.checkpoints)
            db.execute(update(tuning_jobs).where(tuning_jobs.c.id == id).values(values))
            _add_events(db, id, events)
            if job.ended:
                forget(db, id)
            return job

    def events(
        self, tenant: str, id: str, *, limit: int, before: int | None
    ) -> tuple[list[tuple[int, JobEvent]], bool]:
        """Return up to `limit` numbered events before number `before`, the newest first, and whether there are more."""
        with self._database.read() as db:
            _row(db, tuning_jobs, id, tenant)
            wanted = select(tuning_events).where(tuning_events.c.job == id)
            if before is not None:
                wanted = wanted.where(tuning_events.c.number < before)
            rows = db.execute(wanted.order_by(tuning_events.c.number.desc()).limit(limit + 1)).all()
            return [(row.number, _read_event(row.event)) for row in rows[:limit]], len(rows) > limit

    def steps(self, id: str, *, after: int, limit: int) -> list[tuple[int, JobEvent]]:
        """Return up to `limit` numbered events after number `after`, in their order."""
        with self._database.read() as db:
            wanted = select(tuning_events).where(tuning_events.c.job == id, tuning_events.c.number > after)
            rows = db.execute(wanted.order_by(tuning_events.c.number).limit(limit))
            return [(row.number, _read_event(row.event)) for row in rows]

    def serving(self) -> list[TuningJob]:
        """Return the jobs that have adapters, the oldest first."""
        with self._database.read() as db:
            wanted = select(tuning_jobs).where(tuning_jobs.c.serving)
            return [self._shown(row) for row in db.execute(wanted.order_by(tuning_jobs.c.created, tuning_jobs.c.id))]

    def withdraw(self, tenant: str, id: str) -> None:
        """Mark a job as without adapters. Raises Conflict while it has not ended."""
        with self._database.write() as db:
            row = _row(db, tuning_jobs, id, tenant)
            if not (job := self._shown(row)).ended or row.open:
                raise Conflict(f"the tuning job of this model is {job.status}; cancel it first")
            db.execute(update(tuning_jobs).where(tuning_jobs.c.id == id).values(serving=False))

    def drop_old(self, before: float) -> list[str]:
        """Delete some ended jobs without adapters that were created before this time. Returns their ids."""
        with self._database.write() as db:
            old = ~tuning_jobs.c.open & ~tuning_jobs.c.serving & (tuning_jobs.c.created < before)
            gone = list(db.execute(select(tuning_jobs.c.id).where(old).limit(DELETED_AT_ONCE)).scalars())
            _delete_jobs(db, gone)
            return gone

    def _shown(self, row: Row[Any]) -> TuningJob:
        """Return a job as clients see it: in its wanted state, even before its owner acts on it."""
        job = _read_job(row.job)
        if job.ended:
            return job
        match row.wanted:
            case "pause":
                return replace(job, status="paused")
            case "cancel":
                return replace(job, status="cancelled", finished=row.asked_at)
        return replace(job, status="queued") if job.status == "paused" else job


def _page(
    db: Connection,
    wanted: Select[Any],
    table: Table,
    limit: int,
    newest_first: bool,
    after: tuple[float, str] | None,
) -> Sequence[Row[Any]]:
    """Return up to `limit` + 1 rows ordered by creation, after the row `after`, given by its time and its id."""
    created, id = table.c.created, table.c.id
    if after is not None:
        at, last = after
        further = created < at if newest_first else created > at
        further_by_id = id < last if newest_first else id > last
        # The first condition is the range of the index that is read. The second one cuts its beginning.
        wanted = wanted.where(created <= at if newest_first else created >= at)
        wanted = wanted.where(or_(further, further_by_id))
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


def _replace_files(db: Connection, made: Iterable[StoredFile]) -> None:
    """Record files, and remove the records of earlier files with their ids."""
    for file in made:
        db.execute(delete(files).where(files.c.id == file.id))
        _insert_file(db, file)


KINDS = {batches: "batch", tuning_jobs: "fine_tuning_job"}
"""Name of a table's rows in errors."""


def _row(db: Connection, table: Table, id: str, tenant: str | None = None, param: str | None = None) -> Row[Any]:
    """Return a row as its owner stored it; only one of the `tenant`, if that is given. Raises NotFound."""
    wanted = select(table).where(table.c.id == id)
    row = db.execute(wanted if tenant is None else wanted.where(table.c.tenant == tenant)).one_or_none()
    if row is None:
        raise NotFound(KINDS[table], id, param)
    return row


def _write(db: Connection, batch: Batch) -> Batch:
    db.execute(update(batches).where(batches.c.id == batch.id).values(batch=encode(batch), open=not batch.ended))
    return batch


def _delete_jobs(db: Connection, ids: Sequence[str]) -> None:
    db.execute(delete(tuning_jobs).where(tuning_jobs.c.id.in_(ids)))
    db.execute(delete(tuning_events).where(tuning_events.c.job.in_(ids)))


def _add_events(db: Connection, job: str, events: Sequence[JobEvent]) -> None:
    if events:
        last = select(func.coalesce(func.max(tuning_events.c.number), 0)).where(tuning_events.c.job == job)
        first = int(db.execute(last).scalar_one()) + 1
        rows = [{"job": job, "number": number, "event": encode(each)} for number, each in enumerate(events, first)]
        db.execute(insert(tuning_events), rows)
