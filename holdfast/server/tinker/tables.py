"""Sessions, models, futures and checkpoints in the store's database. Each method is one transaction."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import asdict, replace
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Float,
    Index,
    Integer,
    LargeBinary,
    Row,
    String,
    Table,
    UniqueConstraint,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)

from holdfast.server.conversations.database import NAME, Database, tables
from holdfast.server.conversations.values import NotFound
from holdfast.server.jobs.attempt_table import Found, cut_off, forget
from holdfast.server.replies import encode
from holdfast.server.tinker.values import Checkpoint, CheckpointKind, Future, Model, Session

sessions = Table(
    "training_sessions",
    tables,
    Column("id", NAME, primary_key=True),
    Column("tenant", NAME, nullable=False, index=True),
    Column("created", Float, nullable=False),
    Column("seen", Float, nullable=False, index=True),
    Column("finished", String(64), nullable=False),
    Column("session", LargeBinary, nullable=False),
)
"""Sessions of clients. Any server may set `seen` and `finished`."""

models = Table(
    "training_models",
    tables,
    Column("id", NAME, primary_key=True),
    Column("tenant", NAME, nullable=False, index=True),
    Column("session", NAME, nullable=False, index=True),
    Column("created", Float, nullable=False),
    Column("used", Float, nullable=False),
    Column("open", Boolean, nullable=False, index=True),
    Column("unload", Boolean, nullable=False),
    Column("owner", NAME),
    Column("model", LargeBinary, nullable=False),
)
"""Models. `owner` is the server that drives the model.

Only the owner writes `model`. Any server may set `used`, the time of the last request, and `unload`.
"""

futures = Table(
    "training_futures",
    tables,
    Column("id", NAME, primary_key=True),
    Column("tenant", NAME, nullable=False),
    Column("item", NAME, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("call", Integer),
    Column("state", String(16), nullable=False),
    Column("created", Float, nullable=False),
    Column("ended", Float, index=True),
    Column("future", LargeBinary, nullable=False),
    Column("body", LargeBinary),
    UniqueConstraint("item", "seq"),
    Index("training_futures_pending", "tenant", "state"),
)
"""Requests with their results. `body` is the result, if it is not in a file."""

unfinished = Index("training_futures_unfinished", futures.c.item, futures.c.state)
"""Index for the pending requests of a model, which may have many ended ones."""

checkpoints = Table(
    "training_checkpoints",
    tables,
    Column("id", NAME, primary_key=True),
    Column("tenant", NAME, nullable=False, index=True),
    Column("model", NAME, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("name", String(255), nullable=False),
    Column("created", Float, nullable=False),
    Column("expires", Float, index=True),
    Column("ready", Boolean, nullable=False),
    Column("listed", Boolean, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("checkpoint", LargeBinary, nullable=False),
    Index("training_checkpoints_by_model", "model", "kind", "name"),
)
"""Checkpoints. Until a new one of the same name is ready, there may be two of a name."""

_read_session = msgspec.json.Decoder(Session).decode
_read_model = msgspec.json.Decoder(Model).decode
_read_future = msgspec.json.Decoder(Future).decode
_read_checkpoint = msgspec.json.Decoder(Checkpoint).decode
AT_ONCE = 500
"""Maximum number of rows that one transaction deletes, and of values in one query."""


def create_tables(db: Connection) -> None:
    """Create the tables that an older store lacks. They have no version, because an older server ignores them."""
    for table in (sessions, models, futures, checkpoints):
        table.create(db, checkfirst=True)
    unfinished.create(db, checkfirst=True)


class Reused(Exception):
    """A client sent another request under a number that it had used. The message says which."""


class ModelEnded(Exception):
    """A request is for a model that has failed or was unloaded."""


class LimitReached(Exception):
    """A limit of the number of open models or pending requests is reached. The message names it."""


class SessionTable:
    """Table of sessions. Raises NotFound for a session that does not exist or belongs to another tenant."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, session: Session) -> None:
        """Add a session."""
        row = {name: getattr(session, name) for name in ("id", "tenant", "created", "seen", "finished")}
        with self._database.write() as db:
            db.execute(insert(sessions).values(**row, session=encode(session)))

    def get(self, tenant: str, id: str) -> Session:
        """Return a session."""
        with self._database.read() as db:
            return _session(_owned(db, sessions, tenant, id, "session"))

    def page(self, tenant: str, *, offset: int, limit: int) -> list[Session]:
        """Return a page of a tenant's sessions, the newest first."""
        with self._database.read() as db:
            own = select(sessions).where(sessions.c.tenant == tenant)
            newest = own.order_by(sessions.c.created.desc(), sessions.c.id)
            return [_session(row) for row in db.execute(newest.offset(offset).limit(limit))]

    def beat(self, tenant: str, id: str, now: float) -> Session:
        """Note a heartbeat. Returns the session."""
        with self._database.write(lasting=False) as db:
            row = _owned(db, sessions, tenant, id, "session")
            db.execute(update(sessions).where(sessions.c.id == id).values(seen=now))
            return replace(_session(row), seen=now)

    def finish(self, tenant: str, id: str, reason: str) -> list[str]:
        """Finish a session, unless it is finished, and ask for the end of its models. Returns their ids."""
        with self._database.write() as db:
            row = _owned(db, sessions, tenant, id, "session")
            if not row.finished:
                db.execute(update(sessions).where(sessions.c.id == id).values(finished=reason))
            own = (models.c.session == id) & models.c.open
            return list(db.execute(update(models).where(own).values(unload=True).returning(models.c.id)).scalars())

    def seen(self, ids: Iterable[str]) -> dict[str, float]:
        """Return the time of the last heartbeat of each of these sessions."""
        with self._database.read() as db:
            rows = db.execute(select(sessions.c.id, sessions.c.seen).where(sessions.c.id.in_(list(ids))))
            return {row.id: row.seen for row in rows}

    def drop_old(self, before: float) -> list[str]:
        """Delete some sessions without a heartbeat since `before` that have no models. Returns their ids."""
        with self._database.write() as db:
            busy = select(models.c.session).where(models.c.session == sessions.c.id).exists()
            old = select(sessions.c.id).where(sessions.c.seen < before, ~busy).limit(AT_ONCE)
            gone = list(db.execute(old).scalars())
            db.execute(delete(sessions).where(sessions.c.id.in_(gone)))
            return gone


class ModelTable:
    """Table of models. Raises NotFound for a model that does not exist or belongs to another tenant."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, model: Model, future: Future, owner: str, *, limit: int, tenant_limit: int) -> tuple[Future, bool]:
        """Add a model with the request that creates it. Returns the request, and whether it is new.

        Raises LimitReached, and Reused if another request has created the model.
        """
        with self._database.write() as db:
            if (known := _known(db, future)) is not None:
                return known, False
            count = select(func.count()).select_from(models).where(models.c.open)
            if (there := db.execute(count).scalar_one()) >= limit:
                raise LimitReached(f"{there} models are being trained, which is the limit; try again later")
            if (own := db.execute(count.where(models.c.tenant == model.tenant)).scalar_one()) >= tenant_limit:
                raise LimitReached(f"this API key trains {own} models; at most {tenant_limit} are taken at a time")
            row = {name: getattr(model, name) for name in ("id", "tenant", "session", "created")}
            state = {"used": model.created, "open": True, "unload": False, "owner": owner}
            db.execute(insert(models).values(**row, **state, model=encode(model)))
            _insert_future(db, future)
            return future, True

    def get(self, tenant: str, id: str) -> Model:
        """Return a model."""
        with self._database.read() as db:
            return _read_model(_owned(db, models, tenant, id, "model").model)

    def used(self, id: str) -> float:
        """Return the time of the last request for a model. Raises NotFound."""
        with self._database.read() as db:
            return float(_owned(db, models, None, id, "model").used)

    def page(self, tenant: str, *, offset: int, limit: int) -> tuple[list[tuple[Model, float]], int]:
        """Return a page of a tenant's models, the newest first, each with its last use; and the number of all."""
        with self._database.read() as db:
            own = models.c.tenant == tenant
            total = db.execute(select(func.count()).select_from(models).where(own)).scalar_one()
            newest = select(models).where(own).order_by(models.c.created.desc(), models.c.id)
            rows = db.execute(newest.offset(offset).limit(limit))
            return [(_read_model(row.model), row.used) for row in rows], total

    def of_session(self, id: str) -> list[str]:
        """Return the ids of a session's models, the oldest first."""
        with self._database.read() as db:
            wanted = select(models.c.id).where(models.c.session == id)
            return list(db.execute(wanted.order_by(models.c.created, models.c.id)).scalars())

    def change(self, id: str, fields: Mapping[str, Any]) -> Model:
        """Change fields of a model."""
        with self._database.write() as db:
            return _change_model(db, id, fields)

    def unload(self, tenant: str, id: str, future: Future) -> Future:
        """Ask for the end of a model. Returns the request, or the earlier one with its number."""
        with self._database.write() as db:
            _owned(db, models, tenant, id, "model")
            if (known := _known(db, future)) is not None:
                return known
            db.execute(update(models).where(models.c.id == id).values(unload=True))
            _insert_future(db, future)
            return future

    def unloading(self, owner: str) -> list[str]:
        """Return the ids of this server's open models that are to be unloaded."""
        with self._database.read() as db:
            wanted = select(models.c.id).where(models.c.open, models.c.owner == owner, models.c.unload)
            return list(db.execute(wanted).scalars())

    def owners(self) -> set[str]:
        """Return the servers whose models are open."""
        with self._database.read() as db:
            return set(db.execute(select(models.c.owner).where(models.c.open).distinct()).scalars())

    def orphans(self, owners: Collection[str]) -> list[Model]:
        """Return the open models of these servers, the oldest first."""
        with self._database.read() as db:
            theirs = select(models).where(models.c.open, models.c.owner.in_(owners))
            return [_read_model(row.model) for row in db.execute(theirs.order_by(models.c.created, models.c.id))]

    def adopt(self, owner: str, owners: Collection[str], ids: Collection[str]) -> dict[str, Found]:
        """Give these models to `owner`, if they still belong to `owners`. Returns them with the attempts at each."""
        with self._database.write() as db:
            theirs = update(models).where(models.c.id.in_(ids), models.c.owner.in_(owners))
            taken = set(db.execute(theirs.values(owner=owner).returning(models.c.id)).scalars())
            return {id: {} for id in taken} | cut_off(db, taken)

    def drop_old(self, before: float) -> list[Model]:
        """Delete some ended models without checkpoints that were last used before this time. Returns them."""
        with self._database.write() as db:
            kept = select(checkpoints.c.id).where(checkpoints.c.model == models.c.id).exists()
            old = select(models).where(~models.c.open, models.c.used < before, ~kept).limit(AT_ONCE)
            gone = [_read_model(row.model) for row in db.execute(old)]
            ids = [model.id for model in gone]
            db.execute(delete(models).where(models.c.id.in_(ids)))
            db.execute(delete(futures).where(futures.c.item.in_(ids)))
            return gone


class FutureTable:
    """Table of requests and their results. Raises NotFound for one that does not exist or is another tenant's."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(
        self, future: Future, *, limit: int, tenant_limit: int, saves: Sequence[Checkpoint] = ()
    ) -> tuple[Future, bool]:
        """Add a request, with the checkpoints that it writes. Returns it, or the earlier one with its number.

        The second value is whether it is new. Raises Reused, ModelEnded, and LimitReached if its item has `limit`
        pending requests, or its tenant `tenant_limit`.
        """
        with self._database.write() as db:
            if (known := _known(db, future)) is not None:
                return known, False
            if _is_open(db, future.item) is False:
                raise ModelEnded(f"{future.item} has ended and takes no more requests")
            pending = select(func.count()).select_from(futures).where(futures.c.state == "pending")
            own = futures.c.tenant == future.tenant
            if db.execute(pending.where(own, futures.c.item == future.item)).scalar_one() >= limit:
                raise LimitReached(f"{limit} requests for {future.item} are waiting, which is the limit; try again")
            if db.execute(pending.where(own)).scalar_one() >= tenant_limit:
                raise LimitReached(f"{tenant_limit} requests of this API key are waiting, the limit; try again")
            _insert_future(db, future)
            db.execute(update(models).where(models.c.id == future.item).values(used=future.created))
            for checkpoint in saves:
                _put_checkpoint(db, checkpoint)
            return future, True

    def get(self, tenant: str, id: str) -> Future:
        """Return a request."""
        with self._database.read() as db:
            row = _owned(db, futures, tenant, id, "future")
            state = row.state
            if state == "pending" and _is_open(db, row.item) is False:
                state = "expired"  # The server was killed between the end of the model and that of its requests.
            return replace(_read_future(row.future), state=state)

    def body(self, tenant: str, id: str) -> bytes:
        """Return the result of a finished request, as `finish` stored it."""
        with self._database.read() as db:
            return bytes(_owned(db, futures, tenant, id, "future").body or b"")

    def known(self, item: str, seq: int) -> Future | None:
        """Return the request with a number; None if there is none."""
        with self._database.read() as db:
            row = db.execute(select(futures).where(futures.c.item == item, futures.c.seq == seq)).one_or_none()
            return None if row is None else _read_future(row.future)

    def of_item(self, item: str, *, pending: bool) -> list[Future]:
        """Return the requests of an item in the order of their numbers; with `pending`, only unfinished ones."""
        with self._database.read() as db:
            wanted = select(futures).where(futures.c.item == item)
            if pending:
                wanted = wanted.where(futures.c.state == "pending")
            return [_read_future(row.future) for row in db.execute(wanted.order_by(futures.c.seq))]

    def with_held(self, items: Collection[str]) -> set[str]:
        """Return those models that have pending requests without the number of a call."""
        with self._database.read() as db:
            held = (futures.c.state == "pending") & futures.c.call.is_(None) & (futures.c.seq > 0)
            return set(db.execute(select(futures.c.item).where(futures.c.item.in_(items), held).distinct()).scalars())

    def last(self, item: str) -> tuple[int, int, int]:
        """Return three highest numbers of a model's requests, each -1 if there is none.

        They are the number of a request that is in the order or has ended, of a call, and of a call that has ended.
        """
        with self._database.read() as db:
            own = futures.c.item == item
            settled = own & or_(futures.c.call.is_not(None), futures.c.state != "pending")
            calls = own & futures.c.call.is_not(None)

            def highest(column: Column[Any], where: Any) -> int:
                found = db.execute(select(func.max(column)).where(where)).scalar()
                return -1 if found is None else int(found)

            ended = calls & (futures.c.state != "pending")
            return highest(futures.c.seq, settled), highest(futures.c.call, calls), highest(futures.c.call, ended)

    def number(self, id: str, call: int) -> Future:
        """Give a request the number of its call."""
        with self._database.write() as db:
            return _change_future(db, id, {"call": call})

    def finish(
        self,
        ended: Iterable[tuple[str, Mapping[str, Any], bytes | None]],
        ready: Iterable[Checkpoint] = (),
        model: tuple[str, Mapping[str, Any]] | None = None,
    ) -> tuple[list[Future], list[Checkpoint]]:
        """End requests with their changed fields and results, and add the checkpoints that they wrote.

        `model` is the id of a model that ends with them, and its changed fields. A request that has ended stays as it
        is. Returns the requests, and the checkpoints that were replaced.
        """
        with self._database.write() as db:
            if model is not None:
                _change_model(db, *model)
            replaced = [old for checkpoint in ready for old in _replace_checkpoint(db, checkpoint)]
            return [_change_future(db, id, fields, body) for id, fields, body in ended], replaced

    def drop_old(self, before: float) -> list[Future]:
        """Delete the results of some requests that ended before this time. Returns the requests."""
        with self._database.write() as db:
            old = select(futures).where(futures.c.ended < before).order_by(futures.c.ended).limit(AT_ONCE)
            gone = [_read_future(row.future) for row in db.execute(old)]
            kept = select(models.c.id).where(models.c.open)
            ids = [future.id for future in gone]
            expired = futures.c.id.in_(ids)
            db.execute(delete(futures).where(expired, futures.c.item.not_in(kept)))
            # The rows of an open model stay: they say which numbers are taken.
            db.execute(update(futures).where(expired).values(ended=None, body=None, state="expired"))
            return gone


class CheckpointTable:
    """Table of checkpoints. Raises NotFound for one that does not exist or is another tenant's."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def find(self, tenant: str, model: str, kind: CheckpointKind, name: str, now: float) -> Checkpoint:
        """Return a finished checkpoint of the tenant, or a public one of anybody's."""
        with self._database.read() as db:
            for row in db.execute(_named(model, kind, name).where(checkpoints.c.ready)):
                found = _read_checkpoint(row.checkpoint)
                if (found.tenant == tenant or found.public) and (found.expires is None or found.expires > now):
                    return found
        raise NotFound("checkpoint", name)

    def taken(self, model: str, kind: CheckpointKind, name: str) -> bool:
        """Whether a model has a checkpoint of this name, finished or being written."""
        with self._database.read() as db:
            return db.execute(_named(model, kind, name).limit(1)).first() is not None

    def get(self, id: str) -> Checkpoint | None:
        """Return the checkpoint with an id, finished or not; None if there is none."""
        with self._database.read() as db:
            row = db.execute(select(checkpoints).where(checkpoints.c.id == id)).one_or_none()
            return None if row is None else _read_checkpoint(row.checkpoint)

    def known(self, ids: Collection[str]) -> set[str]:
        """Return those of some ids that are checkpoints, finished or not."""
        with self._database.read() as db:
            return {*db.execute(select(checkpoints.c.id).where(checkpoints.c.id.in_(ids))).scalars()}

    def page(
        self, tenant: str, now: float, *, model: str | None, offset: int, limit: int
    ) -> tuple[list[Checkpoint], int]:
        """Return a page of a tenant's finished checkpoints, the newest first, and the number of all."""
        with self._database.read() as db:
            alive = or_(checkpoints.c.expires.is_(None), checkpoints.c.expires > now)
            own = (checkpoints.c.tenant == tenant) & checkpoints.c.ready & checkpoints.c.listed & alive
            if model is not None:
                own &= checkpoints.c.model == model
            total = db.execute(select(func.count()).select_from(checkpoints).where(own)).scalar_one()
            newest = select(checkpoints).where(own).order_by(checkpoints.c.created.desc(), checkpoints.c.id)
            rows = db.execute(newest.offset(offset).limit(limit))
            return [_read_checkpoint(row.checkpoint) for row in rows], total

    def change(self, id: str, fields: Mapping[str, Any]) -> None:
        """Change fields of a checkpoint."""
        with self._database.write() as db:
            row = db.execute(select(checkpoints).where(checkpoints.c.id == id)).one_or_none()
            if row is not None:
                _put_checkpoint(db, replace(_read_checkpoint(row.checkpoint), **fields))

    def delete(self, ids: Collection[str]) -> None:
        """Delete checkpoints by their ids."""
        with self._database.write() as db:
            db.execute(delete(checkpoints).where(checkpoints.c.id.in_(list(ids))))

    def unfinished(self, model: str) -> list[Checkpoint]:
        """Return a model's checkpoints that are not finished."""
        with self._database.read() as db:
            rows = db.execute(select(checkpoints).where(checkpoints.c.model == model, ~checkpoints.c.ready))
            return [_read_checkpoint(row.checkpoint) for row in rows]

    def expired(self, now: float) -> list[Checkpoint]:
        """Return some checkpoints whose time has ended."""
        with self._database.read() as db:
            rows = db.execute(select(checkpoints).where(checkpoints.c.expires <= now).limit(AT_ONCE))
            return [_read_checkpoint(row.checkpoint) for row in rows]


def _owned(db: Connection, table: Table, tenant: str | None, id: str, kind: str) -> Row[Any]:
    """Return a row; only one of the `tenant`, if that is given. Raises NotFound."""
    wanted = select(table).where(table.c.id == id)
    row = db.execute(wanted if tenant is None else wanted.where(table.c.tenant == tenant)).one_or_none()
    if row is None:
        raise NotFound(kind, id)
    return row


def _is_open(db: Connection, item: str) -> bool | None:
    """Whether a model is open; None if the item is no model."""
    found: bool | None = db.execute(select(models.c.open).where(models.c.id == item)).scalar()
    return found


def _session(row: Row[Any]) -> Session:
    return replace(_read_session(row.session), seen=row.seen, finished=row.finished)


def _known(db: Connection, future: Future) -> Future | None:
    """Return the earlier request with the same number; None if there is none. Raises Reused if it was another one."""
    row = db.execute(select(futures).where(futures.c.item == future.item, futures.c.seq == future.seq)).one_or_none()
    if row is None:
        return None
    known = _read_future(row.future)
    if (known.kind, known.digest, known.tenant) != (future.kind, future.digest, future.tenant):
        raise Reused(f"seq_id {future.seq} of {future.item} was another request before; number each request once")
    return known


def _change_model(db: Connection, id: str, fields: Mapping[str, Any]) -> Model:
    """Change fields of a model. One that is no longer open has no attempts left."""
    model = replace(_read_model(_owned(db, models, None, id, "model").model), **fields)
    is_open = model.status == "open"
    db.execute(update(models).where(models.c.id == id).values(model=encode(model), open=is_open))
    if not is_open:
        forget(db, id)
    return model


def _future_row(future: Future) -> dict[str, Any]:
    names = ("id", "tenant", "item", "seq", "call", "state", "created", "ended")
    return {name: getattr(future, name) for name in names} | {"future": encode(future)}


def _insert_future(db: Connection, future: Future) -> None:
    db.execute(insert(futures).values(**_future_row(future)))


def _change_future(db: Connection, id: str, fields: Mapping[str, Any], body: bytes | None = None) -> Future:
    """Change fields of a pending request. One that has ended stays as it is."""
    row = _owned(db, futures, None, id, "future")
    future = _read_future(row.future)
    if row.state != "pending":
        return future
    future = replace(future, **fields)
    values = _future_row(future) | ({} if body is None else {"body": body})
    db.execute(update(futures).where(futures.c.id == id).values(values))
    return future


def _named(model: str, kind: CheckpointKind, name: str) -> Any:
    wanted = select(checkpoints).where(checkpoints.c.model == model, checkpoints.c.kind == kind)
    return wanted.where(checkpoints.c.name == name)


def _put_checkpoint(db: Connection, checkpoint: Checkpoint) -> None:
    names = ("id", "tenant", "model", "kind", "name", "created", "expires", "ready", "listed", "bytes")
    row = {name: value for name, value in asdict(checkpoint).items() if name in names}
    db.execute(delete(checkpoints).where(checkpoints.c.id == checkpoint.id))
    db.execute(insert(checkpoints).values(**row, checkpoint=encode(checkpoint)))


def _replace_checkpoint(db: Connection, checkpoint: Checkpoint) -> list[Checkpoint]:
    """Store a finished checkpoint, and delete the earlier ones of its name. Returns those."""
    others = _named(checkpoint.model, checkpoint.kind, checkpoint.name).where(checkpoints.c.id != checkpoint.id)
    older = [_read_checkpoint(row.checkpoint) for row in db.execute(others.where(checkpoints.c.ready))]
    db.execute(delete(checkpoints).where(checkpoints.c.id.in_([each.id for each in older])))
    _put_checkpoint(db, checkpoint)
    return older
