"""Training: the models of one server, from the requests of clients to the runners that pass calls to the engine."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.engine.client.connection import EngineDead
from holdfast.engine.client.tuning import Call, read_result, result_path
from holdfast.server.conversations.store import Store
from holdfast.server.jobs.attempt_table import WHOLE
from holdfast.server.jobs.files import Files
from holdfast.server.jobs.locks import Owner
from holdfast.server.protocol import ApiError, invalid
from holdfast.server.service import LARGE, Service
from holdfast.server.tinker.calls import (
    Bounds,
    ForwardRequest,
    Wanted,
    decompress,
    digest_of,
    digest_of_body,
    read_forward,
    read_update,
)  # fmt: skip
from holdfast.server.tinker.checkpoints import Checkpoints, check_name, check_ttl
from holdfast.server.tinker.futures import Futures, new_future
from holdfast.server.tinker.order import Arrival, hold, write_in
from holdfast.server.tinker.protos import MEDIA
from holdfast.server.tinker.requests import (
    CreateModel,
    LoadWeights,
    LoraConfig,
    OfCall,
    OptimStep,
    SaveForSampler,
    SaveWeights,
)  # fmt: skip
from holdfast.server.tinker.results import FORWARDS, forward_output
from holdfast.server.tinker.runner import ModelRunner, Samplers, Shared
from holdfast.server.tinker.sessions import Sessions
from holdfast.server.tinker.tables import FutureTable, ModelTable, SessionTable
from holdfast.server.tinker.values import Checkpoint, CheckpointKind, Future, Kind, Model

MOST_MODELS = 64
"""Maximum number of open models, of all tenants."""
TICK_SECONDS = 0.5
"""Seconds between two looks for what other servers have accepted for the models here, and for servers that ended."""
BUSY_SECONDS = 0.05
"""Seconds between two such looks for requests while others accept some."""
STILL_SECONDS = 10.0
"""Seconds since the last such request after which looks are rare again."""
CLEAN_SECONDS = 600.0
"""Seconds between two deletions of what is no longer kept."""
RESULT_SECONDS = 86_400.0
"""Seconds for which a result is kept after its request has ended."""
STATE_SECONDS = 86_400.0
"""Seconds after a session's last heartbeat after which its models are unloaded. Their checkpoints stay."""
KEPT_SECONDS = 30 * 86_400.0
"""Seconds for which ended models without checkpoints, and sessions without models, are kept."""
CLOSE_SECONDS = 5.0
"""Maximum number of seconds that `close` waits for the engine to store the models."""
REST_SECONDS = 0.1
"""Seconds between two transactions of a deletion."""

log = logging.getLogger("holdfast.server")


class Training:
    """The models of one server, which drives them from `start` to `close`."""

    def __init__(
        self,
        service: Service,
        files: Files,
        owner: Owner,
        sessions: Sessions,
        futures: Futures,
        checkpoints: Checkpoints,
        samplers: Samplers,
        now: Callable[[], float] = time.time,
        *,
        lines_cleared: Callable[[], Awaitable[None]],
        tick: float = TICK_SECONDS,
    ) -> None:
        """`owner` is this server. `lines_cleared` waits until no batch line may have ended an engine."""
        self.sessions, self.futures, self.checkpoints = sessions, futures, checkpoints
        self._service, self._client, self._files, self._store = service, service.client, files, files.store
        self._owner, self._now, self._tick_seconds = owner, now, tick
        self._tenant_limit = max(1, int(MOST_MODELS * service.config.share))
        self._shared = Shared(
            engine=self._client.tuning, dead=self._client.dead, store=files.store, files=files, sessions=sessions,
            futures=futures, checkpoints=checkpoints, samplers=samplers, directory=checkpoints.directory, now=now,
            alone=asyncio.Lock(), lines_cleared=lines_cleared,
        )  # fmt: skip
        self.runners: dict[str, ModelRunner] = {}
        """The models that this server drives, by id."""
        self._adding: set[str] = set()
        """Ids of models that are being stored and do not run yet."""
        self._ticking: asyncio.Task[None] | None = None
        self._adopting = asyncio.Lock()
        """Held while work of ended servers is taken over."""
        self._closed = False

    async def start(self) -> None:
        """Continue the models that an earlier server left. Raises ApiError."""
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())
            await self._adopt()

    async def close(self) -> None:
        """Store the models at the engine. They continue at the next start. May be called more than once."""
        if self._closed:
            return
        self._closed = True
        self.futures.close()
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        await asyncio.gather(*(runner.close(CLOSE_SECONDS) for runner in [*self.runners.values()]))

    # Models

    @property
    def trains(self) -> bool:
        """Whether this server trains models."""
        return self._client.config.tuning

    @property
    def base(self) -> str:
        """Name of the base model."""
        return self._client.info.model

    @property
    def tokenizer(self) -> str:
        """Name by which clients find the tokenizer: the base model's id, or its served name if it is in a directory."""
        name = self._client.config.model
        return self.base if name is None or Path(name).exists() else name

    def capability(self) -> dict[str, Any]:
        """Return Tinker's description of the base model."""
        return {
            "model_name": self.base,
            "max_context_length": self._client.info.max_model_len,
            "trainable": self.trains,
            "sampleable": True,
        }

    async def create(self, wanted: CreateModel, tenant: str) -> Future:
        """Create a model. The request ends when the engine has opened it. Raises ApiError."""
        self._check_on()
        session = await self.sessions.running(tenant, wanted.session_id)
        self._check_base(wanted.base_model, tenant)
        if wanted.lora_config is None:
            raise invalid("lora_config is missing; models are trained as LoRA adapters", "lora_config")
        self._check_lora(wanted.lora_config)
        model = self._new_model(tenant, session.id, wanted.model_seq_id, wanted.lora_config, wanted.user_metadata)
        digest = digest_of_body("create_model", wanted)
        future = new_future(tenant, model.id, 0, "create_model", digest, self._now())
        return await self._add_model(model, future)

    async def _add_model(self, model: Model, future: Future, call: Call | None = None) -> Future:
        """Store a new model and let it run. `call` is its first one."""
        if call is not None:
            await self._files.on_disk(lambda: write_in(self._directory(model), call, ()))

        def add(store: Store) -> tuple[Future, bool]:
            limits = {"limit": MOST_MODELS, "tenant_limit": self._tenant_limit}
            return ModelTable(store.database).add(model, future, self._owner.id, **limits)

        self._adding.add(model.id)
        try:
            found, new = await self.futures.refusing(add)
            if new:
                await self.start()
                self._begin(ModelRunner(self._shared, model))
        finally:
            self._adding.discard(model.id)
        return found

    def _new_model(
        self, tenant: str, session: str, number: int, lora: LoraConfig, metadata: Mapping[str, Any] | None
    ) -> Model:
        seed = secrets.randbelow(1 << 31) if lora.seed is None else lora.seed
        return Model(
            id=f"{session}:train:{number}", tenant=tenant, session=session, base=self.base, created=self._now(),
            rank=lora.rank, seed=seed, attn=lora.train_attn, mlp=lora.train_mlp, unembed=lora.train_unembed,
            metadata=metadata,
        )  # fmt: skip

    async def model(self, tenant: str, id: str) -> Model:
        """Return a model. Raises ApiError 404."""
        return await self._store.read(lambda store: ModelTable(store.database).get(tenant, id))

    async def page(self, tenant: str, *, offset: int, limit: int) -> tuple[list[tuple[Model, float]], int]:
        """Return a page of a tenant's models, the newest first, each with its last use; and the number of all."""
        return await self._store.read(lambda store: ModelTable(store.database).page(tenant, offset=offset, limit=limit))

    async def used(self, model: Model) -> float:
        """Return the time of the last request for a model."""
        return await self._store.read(lambda store: ModelTable(store.database).used(model.id))

    async def unload(self, tenant: str, id: str) -> Future:
        """End a model and delete its state. Its checkpoints stay. Raises ApiError 404."""
        model = await self.model(tenant, id)
        future = new_future(tenant, id, -1, "unload_model", digest_of("unload_model", id.encode()), self._now())
        if model.status != "open":
            raise invalid(f"{id} has ended", "model_id", "model_ended")
        found = await self._store.run(lambda store: ModelTable(store.database).unload(tenant, id, future))
        self._unload([id])
        return found

    def lost(self, future: Future) -> bool:
        """Whether a request to sample is pending at a server that has ended, so that its client must ask again."""
        return self._shared.samplers.lost(future)

    async def finish_session(self, tenant: str, id: str, reason: str) -> None:
        """Finish a session and unload its models. Raises ApiError 404."""
        self._unload(await self.sessions.finish(tenant, id, reason))

    def _unload(self, ids: list[str]) -> None:
        for id in ids:
            if (runner := self.runners.get(id)) is not None:
                runner.unload()

    # Calls

    async def forward(self, body: bytes, tenant: str, *, encoding: str = "") -> Future:
        """Take a protobuf request of kind forward or forward_backward, in a content encoding. Raises ApiError."""
        info, most = self._client.info, self._service.config.max_body_bytes
        bounds = Bounds(info.vocab_size, info.max_model_len)

        def read() -> ForwardRequest:
            return read_forward(decompress(body, encoding, most), bounds)

        # The size of a compressed body says little about the work.
        request = await self._service.off_loop(LARGE if encoding else len(body), read)
        model = await self.model(tenant, request.model)
        return await self._add(model, Arrival(seq=request.seq, digest=request.digest, wanted=request.wanted))

    async def optimize(self, wanted: OptimStep, tenant: str) -> Future:
        """Take an update. Raises ApiError."""
        model = await self.model(tenant, wanted.model_id)
        digest = digest_of_body("optimize", wanted)
        call = read_update(wanted.adam_params, wanted.optimizer_params)
        return await self._add(model, Arrival(seq=wanted.seq_id, digest=digest, wanted=call))

    async def save(self, wanted: SaveWeights, tenant: str) -> Future:
        """Save a model's state. Raises ApiError."""
        model = await self.model(tenant, wanted.model_id)
        name = f"{wanted.seq_id:06d}" if wanted.path is None else wanted.path
        return await self._save(model, wanted, "training", name, overwrite=wanted.overwrite)

    async def save_for_sampler(self, wanted: SaveForSampler, tenant: str) -> Future:
        """Save a model's adapter: under a name, or for a sampling session that begins with it. Raises ApiError."""
        model = await self.model(tenant, wanted.model_id)
        if wanted.path is not None:
            return await self._save(model, wanted, "sampler", wanted.path)
        return await self._save(
            model, wanted, "sampler", f"unnamed-{wanted.seq_id}", sampler=wanted.sampling_session_seq_id
        )

    async def _save(
        self,
        model: Model,
        wanted: SaveWeights | SaveForSampler,
        kind: CheckpointKind,
        name: str,
        *,
        overwrite: bool = False,
        sampler: int | None = None,
    ) -> Future:
        """Take a request that saves a model. With `sampler`, the checkpoint is not listed."""
        call_kind: Kind = "save" if kind == "training" else "save_adapter"
        digest = digest_of_body(call_kind, wanted)
        fault = ""
        saves: tuple[Checkpoint, ...] = ()
        detail: dict[str, Any] = {}
        call: Call | None = None
        try:
            await self._check_save(model, wanted, kind, name, overwrite)
            made = self.checkpoints.new(
                model, kind, name, ttl=wanted.ttl_seconds, listed=sampler is None, metadata=wanted.user_metadata
            )
            call = Call(number=0, kind=call_kind, directory=made.directory)
            saves, detail = (made,), {"checkpoint": made.id, "sampler": sampler}
        except ApiError as error:
            fault = error.message
        calls = Wanted(call_kind, call, fault=fault)
        return await self._add(
            model, Arrival(seq=wanted.seq_id, digest=digest, wanted=calls, detail=detail, saves=saves)
        )

    async def _check_save(
        self, model: Model, wanted: SaveWeights | SaveForSampler, kind: CheckpointKind, name: str, overwrite: bool
    ) -> None:
        """Raises ApiError for a name that cannot be used, and for a time that is too short or too long."""
        if wanted.path is None and getattr(wanted, "sampling_session_seq_id", 0) is None:
            raise invalid("give path, or sampling_session_seq_id for a sampling session", "path")
        check_name(name)
        check_ttl(wanted.ttl_seconds)
        known = await self._known(model.id, wanted.seq_id)
        if known is None and not overwrite and await self.checkpoints.taken(model.id, kind, name):
            raise invalid(f"the model has a checkpoint {name!r} already; choose another name", "path", "name_taken")

    async def refuse(self, wanted: OfCall, tenant: str, reason: str) -> Future:
        """Take a request of a kind that is not supported. It fails in its turn, and those after it go on."""
        model = await self.model(tenant, wanted.model_id)
        calls = Wanted("save", None, fault=reason)
        digest = digest_of_body("refused", wanted)
        return await self._add(model, Arrival(seq=wanted.seq_id, digest=digest, wanted=calls))

    async def load(self, wanted: LoadWeights, tenant: str) -> Future:
        """Load a checkpoint into a model, or create a model from it. Raises ApiError."""
        if wanted.model_id is not None and wanted.seq_id is not None:
            model = await self.model(tenant, wanted.model_id)
            digest = digest_of_body("load", wanted)
            calls = await self._wanted_load(model, wanted, tenant)
            arrival = Arrival(seq=wanted.seq_id, digest=digest, wanted=calls, detail={"path": wanted.path})
            return await self._add(model, arrival)
        return await self._create_from(wanted, tenant)

    async def _wanted_load(self, model: Model, wanted: LoadWeights, tenant: str) -> Wanted:
        """Return the call that loads a checkpoint into a model."""
        try:
            checkpoint, source = await self._loadable(wanted.path, tenant)
            if (source.rank, source.attn, source.mlp) != (model.rank, model.attn, model.mlp):
                raise invalid(f"{wanted.path} has rank {source.rank} and other modules than {model.id}", "path")
        except ApiError as error:
            return Wanted("load", None, fault=error.message)
        call = Call(number=0, kind="load", directory=checkpoint.directory, moments=wanted.optimizer)
        return Wanted("load", call)

    async def _create_from(self, wanted: LoadWeights, tenant: str) -> Future:
        """Create a model whose first call loads a checkpoint."""
        self._check_on()
        assert wanted.session_id is not None and wanted.model_seq_id is not None
        session = await self.sessions.running(tenant, wanted.session_id)
        if wanted.base_model is not None:
            self._check_base(wanted.base_model, tenant)
        checkpoint, source = await self._loadable(wanted.path, tenant)
        lora = LoraConfig(
            rank=source.rank, seed=source.seed, train_attn=source.attn, train_mlp=source.mlp,
            train_unembed=source.unembed,
        )  # fmt: skip
        model = self._new_model(tenant, session.id, wanted.model_seq_id, lora, wanted.user_metadata)
        digest = digest_of_body("load", wanted)
        if (known := await self._known(model.id, 0)) is not None:
            if known.digest != digest:
                raise invalid(f"model_seq_id {wanted.model_seq_id} was used for another model", "model_seq_id")
            return known
        future = new_future(
            tenant, model.id, 0, "load", digest, self._now(), call=0, detail={"path": wanted.path}
        )  # fmt: skip
        call = Call(number=0, kind="load", directory=checkpoint.directory, moments=wanted.optimizer)
        return await self._add_model(model, future, call)

    async def _loadable(self, path: str, tenant: str) -> tuple[Checkpoint, Model]:
        """Return a checkpoint of a state, and the model that saved it. Raises ApiError."""
        checkpoint = await self.checkpoints.find(tenant, path)
        if checkpoint.kind != "training":
            raise invalid(f"{path[:128]} is for sampling; load a checkpoint of save_weights (…/weights/NAME)", "path")
        source = await self.model(checkpoint.tenant, checkpoint.model)
        if source.base != self.base:
            raise invalid(f"{path[:128]} is of the base model {source.base}; this server has {self.base}", "path")
        return checkpoint, source

    async def _add(self, model: Model, arrival: Arrival) -> Future:
        """Give a request to the server that drives its model: this one, or another one through the store."""
        if model.status != "open":
            known = await self._known(model.id, arrival.seq)
            if known is None or known.digest != arrival.digest:
                reason = model.reason or "it was unloaded"
                raise invalid(f"{model.id} has ended: {reason}", "model_id", "model_ended")
            return known
        if (runner := self.runners.get(model.id)) is not None:
            return await runner.add(arrival)
        known = await self._known(model.id, arrival.seq)
        future, _ = await hold(model, self._directory(model), arrival, self.futures, self._files.on_disk, known)
        return future

    async def _known(self, item: str, seq: int) -> Future | None:
        return await self._store.read(lambda store: FutureTable(store.database).known(item, seq))

    # Results

    async def result(self, future: Future) -> tuple[bytes, str]:
        """Return the result of a finished request, and its content type. Raises ApiError 410 if it is deleted."""
        if future.kind not in FORWARDS:
            return await self.futures.body(future.tenant, future.id), future.media
        model, number = await self.model(future.tenant, future.item), future.call
        assert number is not None

        def read() -> bytes:
            return forward_output(read_result(self._directory(model), number))

        try:
            return await self._files.on_disk(read), MEDIA
        except (OSError, ValueError) as error:
            log.warning("the result of %s cannot be read: %s", future.id, error)
            raise ApiError(f"the result of {future.id} is deleted by now", status=410, code="future_expired") from None

    # Checks

    def _check_on(self) -> None:
        if not self.trains:
            raise ApiError("this server trains no models; start it with --tuning", code="tuning_off")
        if self._closed:
            reason = "the server is shutting down and takes no new models; try another one"
            raise ApiError(reason, status=503, code="shutting_down", retry_after=5)

    def _check_base(self, name: str, tenant: str) -> None:
        """Raises ApiError if a name is not one of the base model."""
        self._service.check_model(name, tenant)
        if name not in self._client.names:
            raise invalid(f"{name[:128]} is an adapter; train the model itself, {self.base}", "base_model")

    def _check_lora(self, lora: LoraConfig) -> None:
        """Raises ApiError for an adapter that could not be served."""
        most = self._client.config.max_adapter_rank
        if lora.rank > most:
            reason = f"rank is {lora.rank}; adapters of at most {most} are served (--max-adapter-rank)"
            raise invalid(reason, "lora_config.rank")
        if not (lora.train_attn or lora.train_mlp):
            raise invalid("the head alone cannot be trained; set train_attn or train_mlp", "lora_config")

    # All models

    def _directory(self, model: Model) -> Path:
        return self.checkpoints.directory / model.job

    def _begin(self, runner: ModelRunner) -> None:
        self.runners[runner.model.id] = runner
        runner.begin(lambda ended: self._ended(ended))

    def _ended(self, runner: ModelRunner) -> None:
        self.runners.pop(runner.model.id, None)

    async def _tick(self) -> None:
        """Follow what other servers ask for, continue models of ended servers, and delete, until cancelled."""
        next_clean = next_adopt = busy_until = 0.0
        while True:
            now = time.monotonic()
            try:
                if self.runners and await self._follow_others():
                    busy_until = now + STILL_SECONDS
                if now >= next_adopt:
                    await self._adopt()
                    next_adopt = now + self._tick_seconds
                if now >= next_clean:
                    await self._clean()
                    next_clean = now + CLEAN_SECONDS
            except EngineDead:
                return
            except (ApiError, OSError) as error:
                log.warning("models in training cannot be checked now: %s", error)
            pause = self._tick_seconds
            await asyncio.sleep(min(pause, BUSY_SECONDS) if now < busy_until else pause)

    async def _follow_others(self) -> bool:
        """Take what other servers have accepted for the models here. Returns whether there was anything."""
        owner = self._owner.id
        self._unload(await self._store.read(lambda store: ModelTable(store.database).unloading(owner)))
        ids, found = [*self.runners], False
        for id in await self._store.read(lambda store: FutureTable(store.database).with_held(ids)):
            if (runner := self.runners.get(id)) is not None:
                found |= await runner.take_held()
        return found

    async def _adopt(self) -> None:
        """Continue the open models of ended servers, and of this one if they stopped.

        One call waits for another, so that a start returns when all of them run here.
        """
        async with self._adopting:
            await self._take_over()

    async def _take_over(self) -> None:
        """Continue the open models of ended servers, and of this one.

        A model whose directory does not exist here belongs to servers with another directory.
        """
        if not self.trains or self._client.dead.is_set():
            return
        mine = self._owner.id
        owners = await self._store.read(lambda store: ModelTable(store.database).owners())
        gone = [owner for owner in owners if owner == mine or self._owner.gone(owner)]
        found = await self._store.read(lambda store: ModelTable(store.database).orphans(gone)) if gone else []
        found = [model for model in found if self._may_begin(model) and self._is_here(model)]
        if not found or self._closed:
            return
        ids = [model.id for model in found]
        taken = await self._store.run(lambda store: ModelTable(store.database).adopt(mine, gone, ids))
        for model in found:
            if model.id in taken and self._may_begin(model):
                self._begin(ModelRunner(self._shared, model, taken[model.id].get(WHOLE)))

    def _may_begin(self, model: Model) -> bool:
        """Whether a model neither runs here nor is about to."""
        return model.id not in self.runners and model.id not in self._adding

    def _is_here(self, model: Model) -> bool:
        """Whether a model is of the base model served here, and its directory is here or was never made."""
        return model.base == self.base and (self._directory(model).exists() or not model.modules)

    async def _clean(self) -> None:
        """Unload models of clients that are long gone, and delete what is no longer kept."""
        now = self._now()
        for id, runner in [*self.runners.items()]:
            if now - await self.sessions.seen(runner.model.session) > STATE_SECONDS:
                log.info("model %s is unloaded: its session has sent no heartbeat for a day", id)
                runner.unload()
        await self.checkpoints.drop_expired()
        while gone := await self._store.run(lambda store: FutureTable(store.database).drop_old(now - RESULT_SECONDS)):
            await self._files.on_disk(partial(self._delete_results, gone))
            await asyncio.sleep(REST_SECONDS)
        oldest = now - KEPT_SECONDS
        while await self._store.run(lambda store: ModelTable(store.database).drop_old(oldest)):
            await asyncio.sleep(REST_SECONDS)
        while await self._store.run(lambda store: SessionTable(store.database).drop_old(oldest)):
            await asyncio.sleep(REST_SECONDS)

    def _delete_results(self, gone: list[Future]) -> None:
        for future in gone:
            if future.call is not None:
                directory = self.checkpoints.directory / future.item.replace(":", "-")
                result_path(directory, future.call).unlink(missing_ok=True)
