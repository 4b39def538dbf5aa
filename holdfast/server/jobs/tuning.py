"""Tuning jobs of one server: creates, lists and pauses them, resumes them, and serves their adapters."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct, structs

from holdfast.engine.client.connection import EngineDead
from holdfast.engine.client.tuning import (
    ALL_MODULES,
    Hyperparameters,
    short_module,
)  # fmt: skip
from holdfast.files.own_directory import OwnDirectory
from holdfast.files.regular import open_file
from holdfast.server.conversations.database import MEMORY, data_directory
from holdfast.server.conversations.store import Store
from holdfast.server.conversations.values import StoreError
from holdfast.server.jobs.attempt_table import WHOLE
from holdfast.server.jobs.batch_runner import REST_SECONDS
from holdfast.server.jobs.files import DAYS_30, Files, unavailable
from holdfast.server.jobs.locks import Owner
from holdfast.server.jobs.tables import JobTable, TooMany, WrongPurpose
from holdfast.server.jobs.tuning_runner import TuningRunner
from holdfast.server.jobs.values import JobEvent, TuningJob, event_id
from holdfast.server.protocol import ApiError, Metadata, RequestBody, invalid
from holdfast.server.service import Service

MOST_OPEN = 256
"""Maximum number of tuning jobs that have not ended, of all tenants."""
MOST_KEPT = 1000
"""Maximum number of a tenant's jobs with adapters, and of its ended jobs without any."""
KEPT_SECONDS = DAYS_30
"""Seconds for which a job without adapters is kept."""
TICK_SECONDS = 2.0
"""Seconds between two checks for jobs that other servers changed, or did not finish before they ended."""
SERVE_SECONDS = 60.0
"""Seconds between two checks for adapters of other servers' jobs. They are served if they are in the directory."""
CLEAN_SECONDS = 3600.0
MODEL_CHARACTERS = 32
"""Maximum number of characters of the base model's name in the name of a tuned model."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

log = logging.getLogger("holdfast.server")

Auto = Literal["auto"]


class Parameters(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """OpenAI's hyperparameters."""

    n_epochs: Auto | Annotated[int, Meta(ge=1, le=50)] = "auto"
    batch_size: Auto | Annotated[int, Meta(ge=1, le=4096)] = "auto"
    learning_rate_multiplier: Auto | Annotated[float, Meta(gt=0, le=1000)] = "auto"


class MoreParameters(Parameters, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Hyperparameters of `method.supervised`, including Holdfast's own."""

    lora_rank: Auto | Annotated[int, Meta(ge=1, le=128)] = "auto"
    lora_alpha: Auto | Annotated[float, Meta(gt=0, le=1e6)] = "auto"
    target_modules: Auto | Annotated[list[str], Meta(min_length=1, max_length=16)] = "auto"
    use_dora: Auto | bool = "auto"
    """Whether the adapter is a DoRA."""
    micro_batch: Auto | Annotated[int, Meta(ge=16, le=1 << 20)] = "auto"
    """Maximum number of tokens that are computed at once."""


class Supervised(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The `method.supervised` parameter."""

    hyperparameters: MoreParameters | None = None


class Method(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The `method` parameter."""

    type: str
    supervised: Supervised | None = None
    dpo: dict[str, Any] | None = None
    reinforcement: dict[str, Any] | None = None


class TuningRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/fine_tuning/jobs."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"integrations": ([],)}

    model: str
    training_file: str
    validation_file: str | None = None
    method: Method | None = None
    hyperparameters: Parameters | None = None
    """Hyperparameters in OpenAI's former place for them. `method.supervised.hyperparameters` is the current one."""
    suffix: Annotated[str, Meta(max_length=64)] | None = None
    seed: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] | None = None
    metadata: Metadata | None = None

    def asked(self) -> dict[str, Any]:
        """Return the hyperparameters that are given. Raises ApiError for unsupported ones."""
        method = self.method or Method(type="supervised")
        for other in ("dpo", "reinforcement"):
            if method.type == other or getattr(method, other) is not None:
                raise invalid(f"method {other} is not supported; supervised is", "method.type", "unsupported_method")
        if method.type != "supervised":
            raise invalid(f"method.type is {method.type[:32]!r}; it must be 'supervised'", "method.type")
        newer = None if method.supervised is None else method.supervised.hyperparameters
        if newer is not None and self.hyperparameters is not None:
            reason = "hyperparameters and method.supervised.hyperparameters exclude each other; give the latter"
            raise invalid(reason, "hyperparameters", "mutually_exclusive_parameters")
        given = newer or self.hyperparameters or MoreParameters()
        asked = {name: value for name, value in structs.asdict(given).items() if value != "auto"}
        if "target_modules" in asked:  # PEFT's names, for example q_proj.
            asked["target_modules"] = [short_module(name) for name in asked["target_modules"]]
        return asked


class Tuning:
    """The tuning jobs of one server, which runs them from `start` to `close`."""

    def __init__(
        self,
        service: Service,
        files: Files,
        owner: Owner,
        now: Callable[[], float] = time.time,
        *,
        tick: float = TICK_SECONDS,
        lines_cleared: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Raises StoreError if the directory of jobs cannot be used.

        `lines_cleared` waits until no batch line is suspected of having ended an engine. The default is for a server
        without batches.
        """
        self.files = files
        self._service, self._store, self._owner, self._now = service, files.store, owner, now
        self._client = service.client
        self._tick_seconds = tick
        self._tenant_limit = max(1, int(MOST_OPEN * service.config.share))
        self.runner = TuningRunner(service, files, self._open_directory(), now, lines_cleared or no_lines)
        self._ticking: asyncio.Task[None] | None = None
        self._adopting = asyncio.Lock()
        """Held while work of ended servers is taken over."""
        self._closed = False

    async def start(self) -> None:
        """Serve the existing adapters, and continue the jobs that an earlier server left. Raises ApiError."""
        if self._ticking is None:
            for job in await self._here():
                self.runner.announce(job)
            self._ticking = asyncio.create_task(self._tick())
            await self._adopt()

    # Requests from clients

    async def create(self, wanted: TuningRequest, tenant: str) -> TuningJob:
        """Create a job. Returns before its files are read. Raises ApiError."""
        self._check_on()
        asked = wanted.asked()
        self._service.check_model(wanted.model, tenant)
        model = self._client.info.model
        if wanted.model != model:
            what = "another name of it" if wanted.model in self._client.names else "an adapter"
            reason = f"{wanted.model[:128]} is {what}; tune the model itself, {model}"
            raise invalid(reason, "model", "unsupported_model")
        suffix = wanted.suffix or ""
        if suffix and not re.fullmatch(r"[A-Za-z0-9._-]+", suffix):
            raise invalid(f"suffix is {suffix!r}; it must have letters, digits, or . _ - alone", "suffix")
        self._check_parameters(asked)
        short = re.sub(r"[^A-Za-z0-9._-]", "-", model)[:MODEL_CHARACTERS]
        id = uuid.uuid4().hex
        job = TuningJob(
            id=f"ftjob-{id}",
            tenant=tenant,
            model=model,
            name=f"ft:{short}:{suffix}:{id[:8]}",
            created=self._now(),
            training_file=wanted.training_file,
            validation_file=wanted.validation_file,
            seed=secrets.randbelow(1 << 31) if wanted.seed is None else wanted.seed,
            metadata=wanted.metadata,
            asked=asked,
        )

        def add(store: Store) -> None:
            limits = {"limit": MOST_OPEN, "tenant_limit": self._tenant_limit, "kept": MOST_KEPT}
            JobTable(store.database).add(job, self._owner.id, **limits)

        try:
            await self._store.run(add)
        except WrongPurpose as error:
            raise invalid(str(error), error.param) from None
        except TooMany as error:
            raise ApiError(str(error), status=429, code="too_many_jobs", retry_after=60) from None
        await self.start()
        self.runner.begin(job)
        return job

    async def retrieve(self, tenant: str, id: str) -> TuningJob:
        """Return a job in its current state. Raises ApiError 404."""
        return await self._store.read(lambda store: JobTable(store.database).get(tenant, id))

    async def page(
        self, tenant: str, *, limit: int, after: str | None, metadata: Mapping[str, str]
    ) -> tuple[list[TuningJob], bool]:
        """Return a page of a tenant's jobs, the newest first, and whether there are more. Raises ApiError 404."""

        def read(store: Store) -> tuple[list[TuningJob], bool]:
            return JobTable(store.database).page(tenant, limit=limit, after=after, metadata=metadata)

        return await self._store.read(read)

    async def events(self, tenant: str, id: str, *, limit: int, after: str | None) -> tuple[list[dict[str, Any]], bool]:
        """Return a page of a job's events, the newest first, and whether there are more. Raises ApiError 404."""
        before: int | None = None
        if after is not None:
            number = after.rpartition("-")[2]
            known = number.isascii() and number.isdigit() and len(number) < 10 and event_id(id, int(number)) == after
            if not known:
                raise ApiError(f"event {after[:64]!r} was not found", status=404, param="after", code="event_not_found")
            before = int(number)

        def read(store: Store) -> tuple[list[tuple[int, JobEvent]], bool]:
            return JobTable(store.database).events(tenant, id, limit=limit, before=before)

        found, more = await self._store.read(read)
        return [event.shown(id, number) for number, event in found], more

    async def checkpoints(
        self, tenant: str, id: str, *, limit: int, after: str | None
    ) -> tuple[list[dict[str, Any]], bool]:
        """Return a page of a job's checkpoints, the newest first, and whether there are more. Raises ApiError 404."""
        shown = (await self.retrieve(tenant, id)).shown_checkpoints()
        if after is not None:
            ids = [each["id"] for each in shown]
            if after not in ids:
                reason = f"checkpoint {after[:64]!r} was not found"
                raise ApiError(reason, status=404, param="after", code="checkpoint_not_found")
            shown = shown[ids.index(after) + 1 :]
        return shown[:limit], len(shown) > limit

    async def ask(self, tenant: str, id: str, verb: str) -> TuningJob:
        """Pause, resume or cancel a job. Raises ApiError: 404, or 409 if its state does not allow it."""
        now = self._now()
        job, wanted, asks = await self._store.run(lambda store: JobTable(store.database).ask(tenant, id, verb, now))
        self.runner.want(id, wanted, asks)
        return job

    async def adapter_file(self, tenant: str, id: str, name: str) -> tuple[IO[bytes], int]:
        """Open a file of a job's newest adapter. Returns it with its size. Raises ApiError 404."""
        job = await self.retrieve(tenant, id)
        reason = f"there is no adapter file {name[:64]!r} of this job; {' and '.join(ADAPTER_FILES)} come with an epoch"
        missing = ApiError(reason, status=404, code="adapter_not_found")
        if name not in ADAPTER_FILES or not job.checkpoints:
            raise missing
        path = self.runner.checkpoint(job, job.checkpoints[-1].step) / name
        try:
            return await self.files.on_disk(lambda: (open_file(path), path.stat().st_size))
        except FileNotFoundError:  # The model was deleted.
            raise missing from None
        except OSError as error:
            raise unavailable(error) from None

    async def delete_model(self, tenant: str, name: str) -> None:
        """Delete the adapters of a job by the name of its tuned model. Raises ApiError."""
        self._service.check_model(name, tenant)
        id = self._service.tuned.get(name, ("", ""))[1]
        if not id:
            reason = "only tuned models can be deleted; POST /v1/unload_lora_adapter gives up other adapters"
            raise invalid(reason, "model", "not_tuned")
        job = await self.retrieve(tenant, id)
        if name != job.name and job.status == "succeeded":
            raise invalid(f"a checkpoint goes with its model; delete {job.name}", "model", "not_tuned")
        await self._store.run(lambda store: JobTable(store.database).withdraw(tenant, id))
        await self.runner.give_up(id)
        directory = self.runner.directory / id
        await self.files.on_disk(lambda: shutil.rmtree(directory, ignore_errors=True))

    async def close(self) -> None:
        """Store the engine's last events. The jobs continue at the next start. May be called more than once."""
        if self._closed:
            return
        self._closed = True
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        await self.runner.close()

    # All jobs

    async def _tick(self) -> None:
        """Follow changes of the jobs, serve new adapters, and delete old jobs, until cancelled."""
        next_clean = next_serve = 0.0
        while True:
            try:
                if ids := list(self.runner.running):
                    found = await self._store.read(lambda store: JobTable(store.database).wanted(ids))
                    for id, asked in found.items():
                        self.runner.want(id, *asked)
                await self._adopt()
                if time.monotonic() >= next_serve:
                    await self._serve_all()
                    next_serve = time.monotonic() + SERVE_SECONDS
                if time.monotonic() >= next_clean:
                    await self._clean()
                    next_clean = time.monotonic() + CLEAN_SECONDS
            except EngineDead:
                return
            except (ApiError, OSError) as error:
                log.warning("tuning jobs cannot be checked now: %s", error)
            await asyncio.sleep(self._tick_seconds)

    async def _here(self) -> list[TuningJob]:
        """Return the jobs for the model served here whose adapters are in the directory."""
        if not self._client.info.adapter_slots:
            return []
        found = await self._store.read(lambda store: JobTable(store.database).serving())

        def whole(job: TuningJob) -> bool:
            return all(self.runner.checkpoint(job, step).is_dir() for step in job.served.values())

        mine = [job for job in found if job.model == self._client.info.model]
        return await self.files.on_disk(lambda: [job for job in mine if whole(job)])

    async def _serve_all(self) -> None:
        """Serve the adapters of jobs that do not run here, and unload those that were deleted elsewhere."""
        ran = {*self.runner.running}  # Taken first, because a job that ends after the read is not in `found`.
        found = {job.id: job for job in await self._here()}
        for id in {id for _, id in self._service.tuned.values()} - found.keys() - self.runner.running.keys() - ran:
            await self.runner.give_up(id)
        for id, job in found.items():
            if id not in self.runner.running:
                await self.runner.serve(job)

    async def _adopt(self) -> None:
        """Continue the jobs of ended servers, if they are for the model served here.

        One call waits for another, so that a start returns when all of them run here.
        """
        async with self._adopting:
            await self._take_over()

    async def _take_over(self) -> None:
        """Continue the jobs of ended servers.

        A job whose directory does not exist here belongs to servers with another directory.
        """
        if not self._tunes:
            return
        owners = await self._store.read(lambda store: JobTable(store.database).owners())
        gone = [owner for owner in owners - {self._owner.id} if self._owner.gone(owner)]
        if not gone:
            return
        found = {}
        for job, wanted in await self._store.read(lambda store: JobTable(store.database).orphans(gone)):
            path = self.runner.directory / job.id if job.data_digest else self.files.path(job.training_file)
            if job.model == self._client.info.model and path.exists():
                found[job.id] = job, wanted
        if found:
            mine = self._owner.id
            taken = await self._store.run(lambda store: JobTable(store.database).adopt(mine, gone, [*found]))
            for id in found:  # The oldest first.
                if id in taken:
                    self.runner.begin(*found[id], taken[id].get(WHOLE))

    async def _clean(self) -> None:
        oldest = self._now() - KEPT_SECONDS
        while await self._store.run(lambda store: JobTable(store.database).drop_old(oldest)):
            await asyncio.sleep(REST_SECONDS)

    # Checks

    @property
    def _tunes(self) -> bool:
        return self._client.config.tuning

    def _check_on(self) -> None:
        if not self._tunes:
            raise ApiError("this server takes no tuning jobs; start it with --tuning", code="tuning_off")
        if self._closed:
            reason = "the server is shutting down and takes no new tuning jobs; try another one"
            raise ApiError(reason, status=503, code="shutting_down", retry_after=5)

    def _check_parameters(self, asked: Mapping[str, Any]) -> None:
        """Raises ApiError for a rank that this server could not serve, or unsupported target modules."""
        where = "method.supervised.hyperparameters"
        most = self._client.config.max_adapter_rank
        if asked.get("lora_rank", 1) > most:
            reason = f"lora_rank is {asked['lora_rank']}; adapters of at most {most} are served (--max-adapter-rank)"
            raise invalid(reason, f"{where}.lora_rank")
        try:
            Hyperparameters(epochs=1, batch_size=1, modules=tuple(asked.get("target_modules", ALL_MODULES)))
        except ValueError as error:
            raise invalid(str(error).replace("modules", "target_modules", 1), f"{where}.target_modules") from None

    def _open_directory(self) -> Path:
        """Return the directory of all jobs. It is created if this server accepts jobs. Raises StoreError."""
        config = self._service.config
        parent = self.files.directory if config.store == MEMORY else data_directory()
        directory = Path(config.tuning_state) if config.tuning_state is not None else parent / "tuning"
        try:
            if self._tunes:
                with OwnDirectory(directory):
                    pass
        except OSError as error:
            raise StoreError(f"the directory of tuning jobs {directory} cannot be used: {error.strerror}") from None
        return directory.absolute()


async def no_lines() -> None:
    """Return at once, because there are no batch lines to wait for."""
