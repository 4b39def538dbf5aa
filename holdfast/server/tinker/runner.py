"""ModelRunner: lets the engine carry out the calls of one model, and stores how each request has ended."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from holdfast.engine.client.connection import EngineDead
from holdfast.engine.client.tuning import (
    CALLS,
    CallDone,
    CallFailed,
    DrivenEvent,
    DrivenRun,
    DrivenStart,
    JobEnded,
    TuningError,
    read_result,
)  # fmt: skip
from holdfast.server.conversations.store import AsyncStore
from holdfast.server.jobs.attempt_table import WHOLE, AttemptTable
from holdfast.server.jobs.files import Files, persist
from holdfast.server.jobs.tuning_runner import without_paths
from holdfast.server.jobs.values import Attempt
from holdfast.server.protocol import ApiError
from holdfast.server.tinker.checkpoints import DIRECTORY, Checkpoints
from holdfast.server.tinker.futures import Futures
from holdfast.server.tinker.order import Arrival, CallOrder
from holdfast.server.tinker.results import FORWARDS, JSON_MEDIA
from holdfast.server.tinker.sessions import AWAY_SECONDS, Sessions
from holdfast.server.tinker.tables import ModelTable
from holdfast.server.tinker.values import Category, Checkpoint, Future, Model

ALPHA = 32.0
"""LoRA's alpha of all models, as in Tinker: the learning rate does not depend on the rank."""
IDLE_SECONDS = 5.0
"""Seconds between two checks whether the session of an idle model is away."""
OPEN_TRIES = 3
"""Number of times that an engine may refuse to open a model again before the model has failed."""
RETRY_SECONDS = 1.0
REPLIES = {
    "save": "save_weights",
    "save_adapter": "save_weights_for_sampler",
    "load": "load_weights",
    "create_model": "create_model",
    "unload_model": "unload_model",
}
"""Type that the result of a request names, by the request's kind."""

log = logging.getLogger("holdfast.server")

Row = tuple[str, Mapping[str, Any], bytes | None]
"""End of a request: its id, its changed fields, and its result."""


class Samplers(Protocol):
    """Opens sampling sessions over weights that a model has saved."""

    async def open(self, tenant: str, session: str, seq: int, checkpoint: Checkpoint) -> str:
        """Open a sampling session, or find the one of this number. Returns its id."""
        ...

    def lost(self, future: Future) -> bool:
        """Whether a request to sample is pending at a server that has ended."""
        ...


class Drives(Protocol):
    """Engines that drive jobs: `TuningClient`, or that of several engines."""

    async def drive(self, job: DrivenStart) -> DrivenRun: ...


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Objects that all models of a server share."""

    engine: Drives
    dead: asyncio.Event
    """Set when the engine has ended, and the server will."""
    store: AsyncStore
    files: Files
    sessions: Sessions
    futures: Futures
    checkpoints: Checkpoints
    samplers: Samplers
    directory: Path
    """Directory with a directory for each model."""
    now: Callable[[], float]
    alone: asyncio.Lock
    """Held by the model that is tried alone, because it may have ended an engine."""
    lines_cleared: Callable[[], Awaitable[None]]
    """Waits until no batch line is suspected of having ended an engine."""


class ModelRunner:
    """One open model, from its creation or from the start of the server until it is unloaded."""

    def __init__(self, shared: Shared, model: Model, attempt: Attempt | None = None) -> None:
        """`attempt` counts the engines and servers that ended while they had calls of the model."""
        self.model = model
        self._shared = shared
        self._directory = shared.directory / model.job
        self.order = CallOrder(model, self._directory, shared.futures, shared.store, shared.files.on_disk)
        self._attempt = attempt or Attempt()
        self._waiting: dict[int, Future] = {}
        """Pending requests by the number of their call."""
        self._creation: Future | None = None
        """The request that creates the model, until the engine has opened it."""
        self._reported: deque[DrivenEvent] = deque()
        """Events of the engine that are not stored yet."""
        self._lost = ""
        """Reason why the engine has ended; empty while it lives."""
        self._refusals = 0
        """Number of times that the engine has refused or failed the model since a call was done."""
        self._unload = self._closed = False
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None]
        self._loaded = asyncio.Event()
        """Set when the order has been read from the store, or could not be read."""
        self._usable = False
        """Whether requests can be taken."""
        self._alone = False
        """Whether the model is being tried alone."""
        self._used = shared.now()
        """Time of the last request here."""

    def begin(self, on_end: Callable[[ModelRunner], None]) -> None:
        """Start. `on_end` is called when the model is no longer open here."""
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda _: on_end(self))

    async def add(self, arrival: Arrival) -> Future:
        """Take a request. Returns it, or the earlier one that it repeats. Raises ApiError."""
        await self._loaded.wait()
        if not self._usable:
            reason = f"{self.model.id} is not at this server any more; try again"
            raise ApiError(reason, status=503, code="model_moved", retry_after=1)
        future, ready = await self.order.add(arrival)
        self._take(ready)
        return future

    async def take_held(self) -> bool:
        """Take the requests that other servers have accepted for this model. Returns whether any had its turn."""
        ready = await self.order.take_held() if self._usable else []
        if ready:
            self._take(ready)
        return bool(ready)

    def unload(self) -> None:
        """End the model and delete its state. Its checkpoints stay."""
        self._unload = True
        self._changed.set()

    async def close(self, seconds: float) -> None:
        """Let the engine store the model's state, and leave the model to the next server."""
        self._closed = True
        self._changed.set()
        await asyncio.wait([self._task], timeout=seconds)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _take(self, ready: list[Future]) -> None:
        """Take requests whose calls are on the disk."""
        for future in ready:
            assert future.call is not None
            self._waiting[future.call] = future
            self._used = self._shared.now()
        self._changed.set()

    # Life of the model

    async def _run(self) -> None:
        try:
            await self._load()
            while not self._closed:
                self._changed.clear()
                if self._unload:
                    await self._finish_unload()
                    return
                if self._attempt.given_up:
                    await self._fail(self._attempt.reason("model"), "server")
                    return
                if not self._waiting and self._creation is None:
                    await self._pause()
                elif await self._drive():
                    return
        except EngineDead:
            return  # The server ends; the next one continues.
        except Exception:
            log.exception("model %s stopped; it is tried again soon", self.model.id)
        finally:
            self._usable = False
            self._loaded.set()

    async def _load(self) -> None:
        """Read the pending requests. Attempts count against a model only if it had any."""
        await self._shared.checkpoints.delete_unknown(self.model)
        self._take(await self.order.load())
        known = await persist(lambda: self._shared.futures.of_item(self.model.id))
        self._creation = next((each for each in known if each.kind == "create_model"), None)
        if not self._waiting and self._creation is None and self._attempt != Attempt():
            await self._clear_attempts()
        self._usable = True
        self._loaded.set()

    async def _pause(self) -> None:
        """Wait for a change, at most for IDLE_SECONDS."""
        with suppress(TimeoutError):
            async with asyncio.timeout(IDLE_SECONDS):
                await self._changed.wait()
        await self._check_gap()

    async def _drive(self) -> bool:
        """Open the model at the engine and follow it until it leaves or ends. Returns whether the model has ended."""
        if self._attempt.suspect:
            await self._shared.lines_cleared()
            await self._shared.alone.acquire()
            self._alone = True
        try:
            return await self._open()
        finally:
            self._let_others()

    def _let_others(self) -> None:
        """Let other models be tried alone."""
        if self._alone:
            self._alone = False
            self._shared.alone.release()

    async def _open(self) -> bool:
        await self._note_begin()
        try:
            async with self.order.lock:
                await self._shared.files.on_disk(self._drop_unknown)
                run = await self._shared.engine.drive(self._start())
        except TuningError as error:
            await self._note_end()
            return await self._refused(without_paths(str(error)))
        except EngineDead:
            await self._note_end()
            raise
        await self._opened(run)
        following = asyncio.create_task(self._follow(run))
        try:
            return await self._serve(run)
        except Exception:
            with suppress(TuningError, EngineDead):
                await run.leave()  # Otherwise the engine would refuse to open the model again.
            raise
        finally:
            following.cancel()
            await self._note_end()

    def _drop_unknown(self) -> None:
        """Make the model's directory, and delete calls that were written but not stored: no client waits for them."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (self._directory / CALLS).glob("*.bin"):
            if path.stem.isdigit() and int(path.stem) >= self.order.next_call:
                path.unlink(missing_ok=True)

    def _start(self) -> DrivenStart:
        model = self.model
        return DrivenStart(
            id=model.job, directory=str(self._directory), tenant=model.tenant, rank=model.rank, alpha=ALPHA,
            attention=model.attn, mlp=model.mlp, seed=model.seed,
            known=min(self._waiting, default=self.order.next_call),
        )  # fmt: skip

    async def _opened(self, run: DrivenRun) -> None:
        """Note that the engine has opened the model."""
        if not self.model.modules:
            await self._change({"modules": list(run.info.modules)})
        if self._creation is not None:
            await self._end([(self._creation.id, *done("create_model", {"model_id": self.model.id}))])
            self._creation = None

    async def _refused(self, reason: str) -> bool:
        """Note that the engine did not open the model. Returns whether the model has failed."""
        self._refusals += 1
        if self._creation is not None or self._refusals >= OPEN_TRIES:
            await self._fail(reason, "user")
            return True
        await asyncio.sleep(RETRY_SECONDS)
        return False

    async def _follow(self, run: DrivenRun) -> None:
        """Collect the events that the engine reports."""
        try:
            async for event in run.events():
                self._reported.append(event)
                self._changed.set()
        except EngineDead as error:
            self._lost = str(error) or "the engine has ended"
            self._changed.set()

    async def _serve(self, run: DrivenRun) -> bool:
        """Pass calls on and store their ends, until the model leaves or ends. Returns whether it has ended."""
        told, asked = -1, ""
        while True:
            self._changed.clear()
            if (ended := await self._store_events()) is not None:
                return await self._ended(ended)
            if self._lost:
                lost, self._lost = self._lost, ""
                raise EngineDead(lost)
            wanted = "cancel" if self._unload else "leave" if self._closed or await self._may_leave() else ""
            if wanted and wanted != asked:
                asked = wanted
                with suppress(TuningError):  # The job has just ended.
                    await (run.cancel() if wanted == "cancel" else run.leave())
            if not asked:
                told = await self._tell(run, told)
            if not self._reported:
                await self._pause()

    async def _tell(self, run: DrivenRun, told: int) -> int:
        """Pass on the calls after number `told`, in order. Returns the number of the last one.

        The engine could find later calls by itself once it knows one, but their requests may not be stored yet.
        """
        for number in sorted(number for number in self._waiting if number > told):
            try:
                await run.call(number)
            except TuningError as error:
                if not error.missing:  # Otherwise the job has just ended, which its events say.
                    raise
            told = number
        return told

    async def _may_leave(self) -> bool:
        """Whether the engine may free the memory of the model: no request is pending, and its client is away."""
        if self._waiting or self.order.held or self._shared.now() - self._used <= AWAY_SECONDS:
            return False
        return await self._shared.sessions.away(self.model.session)

    async def _check_gap(self) -> None:
        if not self._waiting and self.order.overdue(self._shared.now()):
            await self.order.skip_gap()

    async def _ended(self, ended: JobEnded) -> bool:
        """Act on the end of the driven job. Returns whether the model has ended."""
        if self._unload:
            await self._finish_unload()
            return True
        if ended.outcome == "left":
            return False
        return await self._refused(without_paths(ended.reason) or f"the job was {ended.outcome}")

    # Ends of requests

    async def _store_events(self) -> JobEnded | None:
        """Store the events of the engine in one transaction. Returns the one that ends the job, if it is there."""
        rows: list[Row] = []
        ready: list[Checkpoint] = []
        ended: JobEnded | None = None
        progressed = False
        while self._reported:
            match self._reported.popleft():
                case CallDone(number=number) if number in self._waiting:
                    rows.append(await self._done(self._waiting.pop(number), ready))
                    progressed = True
                case CallFailed(number=number, reason=reason) if number in self._waiting:
                    rows.append((self._waiting.pop(number).id, *failed(without_paths(reason), "user")))
                case JobEnded() as ended:
                    pass
        if rows:
            await self._end(rows, ready)
        if progressed:
            self._refusals = 0
            if self._attempt != Attempt():
                self._attempt = Attempt()
                await self._clear_attempts()
            self._let_others()
        return ended

    async def _done(self, future: Future, ready: list[Checkpoint]) -> Row:
        """Return the end of a request whose call is done. A checkpoint that it wrote is added to `ready`."""
        if future.kind in FORWARDS:
            return future.id, {"state": "done"}, None
        try:
            return future.id, *done(future.kind, await self._result(future, ready))
        except (OSError, ValueError) as error:
            log.error("the result of call %s of model %s is lost: %s", future.call, self.model.id, error)
            return future.id, *failed("the result of this request was lost", "server")
        except ApiError as error:
            return future.id, *failed(error.message, "user" if error.status < 500 else "server")

    async def _result(self, future: Future, ready: list[Checkpoint]) -> dict[str, Any]:
        """Return the result of an update, a save or a load. Raises ApiError, OSError and ValueError."""
        assert future.call is not None
        if future.kind == "optimize":
            number = future.call
            result = await self._shared.files.on_disk(lambda: read_result(self._directory, number))
            return {"metrics": dict(result.metrics)}
        if future.kind == "load":
            return {"path": future.detail["path"], "model_id": self.model.id}
        checkpoint = await self._shared.checkpoints.get(future.detail["checkpoint"])
        if checkpoint is None:
            raise ApiError("the checkpoint was deleted while it was written", status=404)
        checkpoint = await self._shared.checkpoints.written(checkpoint)
        ready.append(checkpoint)
        if checkpoint.listed:
            return {"path": checkpoint.path}
        sampler = self._shared.samplers.open(
            self.model.tenant, self.model.session, future.detail["sampler"], checkpoint
        )
        return {"sampling_session_id": await sampler}

    async def _end(
        self, rows: list[Row], ready: Sequence[Checkpoint] = (), model: tuple[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Store the ends of requests, and that of the model if its changed fields are given."""
        replaced = await persist(lambda: self._shared.futures.end(rows, ready, model))
        await self._shared.checkpoints.delete_files(replaced)

    # End of the model

    async def _fail(self, reason: str, category: Category) -> None:
        """End the model because it cannot go on. Its pending requests fail with the reason."""
        log.error("model %s has failed: %s", self.model.id, reason)
        await self._stop({"status": "failed", "reason": reason}, reason, category)

    async def _finish_unload(self) -> None:
        await self._stop({"status": "closed"}, "the model was unloaded before this request had its turn", "user")

    async def _stop(self, fields: Mapping[str, Any], reason: str, category: Category) -> None:
        """End the model and its pending requests, and delete its files except for its checkpoints."""
        async with self.order.lock:
            self._usable = False
            pending = await persist(lambda: self._shared.futures.of_item(self.model.id))
            unloads = [each for each in pending if each.kind == "unload_model"]
            rows: list[Row] = [(each.id, *failed(reason, category)) for each in pending if each not in unloads]
            rows += [(each.id, *done("unload_model", {"model_id": self.model.id})) for each in unloads]
            self._waiting.clear()
            self.order.held.clear()
            self._creation = None
            # In one transaction: no client finds a request that is pending, and a model that will never end it.
            await self._end(rows, model=(self.model.id, fields))
            self.model = replace(self.model, **fields)
        await self._shared.checkpoints.drop_unfinished(self.model.id)
        await self._shared.files.on_disk(self._tidy)

    def _tidy(self) -> None:
        """Delete all files of the model except for its checkpoints."""
        for path in self._directory.glob("*"):
            if path.is_dir() and path.name != DIRECTORY:
                shutil.rmtree(path, ignore_errors=True)
            elif not path.is_dir():
                path.unlink(missing_ok=True)
        with suppress(OSError):  # The model has checkpoints.
            (self._directory / DIRECTORY).rmdir()
        with suppress(OSError):
            self._directory.rmdir()

    # The store

    async def _change(self, fields: Mapping[str, Any]) -> None:
        id = self.model.id
        self.model = await persist(
            lambda: self._shared.store.run(lambda store: ModelTable(store.database).change(id, fields))
        )

    async def _note_begin(self) -> None:
        """Store that an engine gets the model. This must precede the engine's work, which may end the engine."""
        work = [(self.model.id, WHOLE)]
        await persist(lambda: self._shared.store.run(lambda store: AttemptTable(store.database).begin(work)))

    async def _note_end(self) -> None:
        """Store that the engine no longer has the model, and whether it ended with calls of the model."""
        work: dict[str, list[int]] = {self.model.id: [WHOLE]}
        died, safe = (work, {}) if self._waiting and self._shared.dead.is_set() else ({}, work)
        with suppress(ApiError):
            await self._shared.store.run(lambda store: AttemptTable(store.database).end(died, safe))

    async def _clear_attempts(self) -> None:
        id = self.model.id
        await persist(lambda: self._shared.store.run(lambda store: AttemptTable(store.database).clear(id)))


def done(kind: str, result: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Return the changed fields and the result of a request that has succeeded."""
    body = {**result, "type": REPLIES[kind]} if kind in REPLIES else dict(result)
    return {"state": "done", "media": JSON_MEDIA}, msgspec.json.encode(body)


def failed(reason: str, category: Category) -> tuple[dict[str, Any], None]:
    """Return the changed fields of a request that has failed."""
    return {"state": "failed", "error": reason, "category": category}, None
