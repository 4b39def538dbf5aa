"""Tuning jobs: taken, listed, paused, resumed after a restart; the adapters that they made are served to their tenant."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import shutil
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from msgspec import Meta, Struct, structs

from holdfast.engine.client import AdapterError
from holdfast.engine.connection import EngineDead
from holdfast.engine.tuning import (
    ALL_MODULES,
    EXAMPLES_FILE,
    VALIDATION_FILE,
    Hyperparameters,
    JobEnded,
    JobInfo,
    JobStart,
    JobStatus,
    JobStep,
    TuningError,
    TuningRun,
    write_examples,
)  # fmt: skip
from holdfast.server.conversations.database import MEMORY, data_directory
from holdfast.server.conversations.store import Store
from holdfast.server.conversations.values import StoreError
from holdfast.server.jobs.batch_runner import RETRY_SECONDS
from holdfast.server.jobs.examples import ExampleReader
from holdfast.server.jobs.files import DAYS_30, Files, unavailable
from holdfast.server.jobs.owner import Owner
from holdfast.server.jobs.tables import JobTable, TooMany, WrongPurpose
from holdfast.server.jobs.values import JobCheckpoint, JobEvent, LineFault, StoredFile, TuningJob, Wanted, event_id
from holdfast.server.protocol import ApiError, Metadata, RequestBody
from holdfast.server.service import Service, engine_dead

MOST_OPEN = 256
"""Most tuning jobs that have not ended, of all tenants."""
MOST_KEPT = 1000
"""Most jobs of one tenant whose adapters are kept."""
MOST_STEP_EVENTS = 10_000
"""Steps of a job of which each has its own event; of a longer one, so many have one."""
KEPT_SECONDS = DAYS_30
"""How long a job that left no adapter can be found."""
TICK_SECONDS = 2.0
"""Jobs that were changed at another server, or whose server has ended, are seen so soon."""
CLEAN_SECONDS = 3600.0
COMMIT_SECONDS = 0.2
"""Steps that come within this time are stored together."""
LEARNING_RATE = 2e-4
"""What learning_rate_multiplier multiplies."""
MODEL_CHARACTERS = 32
"""Of the base model's name, in that of a tuned one."""
RANK = 16
EXAMPLES = {"training_file": EXAMPLES_FILE, "validation_file": VALIDATION_FILE}
CHECKPOINTS = "checkpoints"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
EVENTS_AT_ONCE = 1000
SPACE = uuid.UUID("2c5f0a0e-3f0b-4f0c-8f7e-9d1b5f3f5d11")
"""Names the file of results by its job, so that one that is written anew takes the place of the unfinished one."""

log = logging.getLogger("holdfast.server")

Auto = Literal["auto"]


class Parameters(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """OpenAI's hyperparameters."""

    n_epochs: Auto | Annotated[int, Meta(ge=1, le=50)] = "auto"
    batch_size: Auto | Annotated[int, Meta(ge=1, le=4096)] = "auto"
    learning_rate_multiplier: Auto | Annotated[float, Meta(gt=0, le=1000)] = "auto"


class MoreParameters(Parameters, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Those of `method.supervised`, with ours."""

    lora_rank: Auto | Annotated[int, Meta(ge=1, le=128)] = "auto"
    lora_alpha: Auto | Annotated[float, Meta(gt=0, le=1e6)] = "auto"
    target_modules: Auto | Annotated[list[str], Meta(min_length=1, max_length=16)] = "auto"
    micro_batch: Auto | Annotated[int, Meta(ge=16, le=1 << 20)] = "auto"
    """Most tokens that are computed at once."""


class Supervised(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`method.supervised`."""

    hyperparameters: MoreParameters | None = None


class Method(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`method`."""

    type: str
    supervised: Supervised | None = None
    dpo: dict[str, Any] | None = None
    reinforcement: dict[str, Any] | None = None


class TuningRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """POST /v1/fine_tuning/jobs."""

    unsupported = {"integrations": ([],)}

    model: str
    training_file: str
    validation_file: str | None = None
    method: Method | None = None
    hyperparameters: Parameters | None = None
    """The older place of `method.supervised.hyperparameters`."""
    suffix: Annotated[str, Meta(max_length=64)] | None = None
    seed: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] | None = None
    metadata: Metadata | None = None

    def asked(self) -> dict[str, Any]:
        """The hyperparameters that are given. Raises ApiError for what is not supported."""
        method = self.method or Method(type="supervised")
        for other in ("dpo", "reinforcement"):
            if method.type == other or getattr(method, other) is not None:
                reason = f"method {other} is not supported; supervised is"
                raise ApiError(reason, param="method.type", code="unsupported_method")
        if method.type != "supervised":
            reason = f"method.type is {method.type[:32]!r}; it must be 'supervised'"
            raise ApiError(reason, param="method.type", code="invalid_value")
        newer = None if method.supervised is None else method.supervised.hyperparameters
        if newer is not None and self.hyperparameters is not None:
            reason = "hyperparameters and method.supervised.hyperparameters exclude each other; give the latter"
            raise ApiError(reason, param="hyperparameters", code="mutually_exclusive_parameters")
        given = newer or self.hyperparameters or MoreParameters()
        asked = {name: value for name, value in structs.asdict(given).items() if value != "auto"}
        if "target_modules" in asked:  # PEFT calls them q_proj and so on
            asked["target_modules"] = [name.removesuffix("_proj") for name in asked["target_modules"]]
        return asked


class RunningJob:
    """A job that this server runs."""

    def __init__(self, job: TuningJob, wanted: Wanted = "run") -> None:
        self.job = job
        self.wanted: Wanted = wanted
        self.told: deque[JobStep | JobStatus | JobEnded] = deque()
        """What the engine has told that is not stored yet."""
        self.dead = ""
        """Why the engine has ended, if it has."""
        self.since: tuple[float, int] | None = None
        """When its steps began to be computed here, and how many were done by then."""
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None]


class Tuning:
    """The tuning jobs of a server. One for each server, which runs them from `start` to `close`."""

    def __init__(
        self,
        service: Service,
        files: Files,
        owner: Owner,
        now: Callable[[], float] = time.time,
        *,
        tick: float = TICK_SECONDS,
    ) -> None:
        """Raises StoreError if the directory of jobs cannot be used."""
        self.files = files
        self.running: dict[str, RunningJob] = {}
        self._service, self._store, self._owner, self._now = service, files.store, owner, now
        self._client = service.client
        self._tick_seconds = tick
        share = service.config.tenant_share if len(service.config.api_key) > 1 else 1
        self._tenant_limit = max(1, int(MOST_OPEN * share))
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self.directory = self._open_directory()
        self._reader = ThreadPoolExecutor(1, "holdfast-tuning")
        self._ticking: asyncio.Task[None] | None = None
        self._serving = asyncio.Lock()
        """Held while adapters are loaded and unloaded."""
        self._closed = False

    async def start(self) -> None:
        """Serve the adapters that there are, and go on with the jobs that an earlier server left. Raises ApiError."""
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())
            await self._adopt()

    # What clients ask for

    async def create(self, wanted: TuningRequest, tenant: str) -> TuningJob:
        """Take a job. Returns before its files are read. Raises ApiError."""
        self._check_on()
        asked = wanted.asked()
        self._service.check_model(wanted.model, tenant)
        model = self._client.info.model
        if wanted.model != model:
            reason = f"{wanted.model[:128]} is an adapter; tune the model itself, {model}"
            raise ApiError(reason, param="model", code="unsupported_model")
        suffix = wanted.suffix or ""
        if suffix and not re.fullmatch(r"[A-Za-z0-9._-]+", suffix):
            reason = f"suffix is {suffix!r}; it must have letters, digits, or . _ - alone"
            raise ApiError(reason, param="suffix", code="invalid_value")
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
            raise ApiError(str(error), param=error.param, code="invalid_value") from None
        except TooMany as error:
            raise ApiError(str(error), status=429, code="too_many_jobs", retry_after=60) from None
        await self.start()
        self._begin(job)
        return job

    async def retrieve(self, tenant: str, id: str) -> TuningJob:
        """A job in its present state. Raises ApiError 404."""
        return await self._store.read(lambda store: JobTable(store.database).get(tenant, id))

    async def page(
        self, tenant: str, *, limit: int, after: str | None, metadata: Mapping[str, str]
    ) -> tuple[list[TuningJob], bool]:
        """A part of a tenant's jobs, the newest first, and whether there are more. Raises ApiError 404."""

        def read(store: Store) -> tuple[list[TuningJob], bool]:
            return JobTable(store.database).page(tenant, limit=limit, after=after, metadata=metadata)

        return await self._store.read(read)

    async def events(
        self, tenant: str, id: str, *, limit: int, after: str | None
    ) -> tuple[list[dict[str, Any]], bool]:
        """A part of a job's events, the newest first, and whether there are more. Raises ApiError 404."""
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
        """A part of a job's checkpoints, the newest first, and whether there are more. Raises ApiError 404."""
        shown = (await self.retrieve(tenant, id)).shown_checkpoints()
        if after is not None:
            ids = [each["id"] for each in shown]
            if after not in ids:
                reason = f"checkpoint {after[:64]!r} was not found"
                raise ApiError(reason, status=404, param="after", code="checkpoint_not_found")
            shown = shown[ids.index(after) + 1 :]
        return shown[:limit], len(shown) > limit

    async def ask(self, tenant: str, id: str, verb: str) -> TuningJob:
        """Pause, resume or cancel a job. Raises ApiError: 404, and 409 where its state does not allow it."""
        now = self._now()
        job = await self._store.run(lambda store: JobTable(store.database).ask(tenant, id, verb, now))
        wanted: dict[str, Wanted] = {"pause": "pause", "resume": "run"}
        self._want(id, wanted.get(verb, "cancel"))
        return job

    async def adapter_file(self, tenant: str, id: str, name: str) -> tuple[IO[bytes], int]:
        """A file of a job's newest adapter, and its size. Raises ApiError 404."""
        job = await self.retrieve(tenant, id)
        if name not in ADAPTER_FILES or not job.checkpoints:
            reason = f"the job has no adapter file {name[:64]!r} yet; there are {' and '.join(ADAPTER_FILES)}"
            raise ApiError(reason, status=404, code="adapter_not_found")
        path = self._checkpoint(job, job.checkpoints[-1].step) / name
        try:
            return await self.files.on_disk(lambda: (path.open("rb"), path.stat().st_size))
        except OSError as error:
            raise unavailable(error) from None

    async def delete_model(self, tenant: str, name: str) -> None:
        """Delete the adapters of a job by the name of its tuned model. Raises ApiError."""
        self._service.check_model(name, tenant)
        id = self._service.tuned.get(name, ("", ""))[1]
        if not id:
            reason = "only tuned models can be deleted; POST /v1/unload_lora_adapter gives up other adapters"
            raise ApiError(reason, param="model", code="not_tuned")
        job = await self.retrieve(tenant, id)
        if name != job.name and job.status == "succeeded":
            raise ApiError(f"a checkpoint goes with its model; delete {job.name}", param="model", code="not_tuned")
        await self._store.run(lambda store: JobTable(store.database).withdraw(tenant, id))
        async with self._serving:
            for each in [each for each, (_, owner) in self._service.tuned.items() if owner == id]:
                await self._unload(each)
        await self.files.on_disk(lambda: shutil.rmtree(self.directory / id, ignore_errors=True))

    async def close(self) -> None:
        """Store what was told. The jobs go on at the next start. May be called more than once."""
        if self._closed:
            return
        self._closed = True
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        tasks = [running.task for running in self.running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._reader.shutdown)
        if self._temporary is not None:
            self._temporary.cleanup()

    # The life of one job

    def _begin(self, job: TuningJob, wanted: Wanted = "run") -> None:
        """Run a job from its present state to its end. Does not wait."""
        self._service.tuned[job.name] = job.tenant, job.id
        running = RunningJob(job, wanted)
        self.running[job.id] = running
        running.task = asyncio.create_task(self._run(running))

    def _want(self, id: str, wanted: Wanted) -> None:
        running = self.running.get(id)
        if running is not None and running.wanted not in (wanted, "cancel"):
            running.wanted = wanted
            running.changed.set()

    async def _run(self, running: RunningJob) -> None:
        try:
            if not running.job.data_digest:
                await self._validate(running)
            if not running.job.ended:
                await self._train(running)
        except EngineDead:
            pass  # the server ends; the job goes on at the next start
        except Exception:
            log.exception("tuning job %s stopped; it is tried again when the server starts", running.job.id)
        finally:
            self.running.pop(running.job.id, None)

    async def _validate(self, running: RunningJob) -> None:
        """Read the files into examples. The job is then queued, or has failed."""
        job = running.job
        directory = self.directory / job.id
        readers = {
            param: self._example_reader(running)
            for param, id in (("training_file", job.training_file), ("validation_file", job.validation_file))
            if id is not None
        }

        def write() -> dict[str, str]:
            directory.mkdir(mode=0o700, exist_ok=True)
            digests = {}
            for param, reader in readers.items():
                with self.files.path(getattr(job, param)).open("rb") as file:
                    digests[param] = write_examples(directory / EXAMPLES[param], reader.examples(file))
            return digests

        try:
            digests = await self._persist(partial(asyncio.get_running_loop().run_in_executor, self._reader, write))
        except FileNotFoundError:
            await self._fail(running, [("training_file", LineFault(code="file_missing", message="the file is gone"))])
            return
        if any(reader.stopped for reader in readers.values()):
            await self._cancel(running)
            return
        faults = [(param, fault) for param, reader in readers.items() for fault in reader.faults]
        if faults:
            await self._fail(running, faults)
            return
        read = readers["training_file"]
        await self._change(
            running,
            {
                "status": "queued", "examples": read.count, "data_digest": digests["training_file"],
                "validation_digest": digests.get("validation_file", ""),
            },
            [self._event(f"Files validated, moving job to queued state: {read.count} examples, {read.tokens} tokens")],
        )  # fmt: skip

    def _example_reader(self, running: RunningJob) -> ExampleReader:
        limit = int(self._service.config.max_body_mb * 1e6)
        client = self._client

        def wanted() -> bool:
            if self._closed:
                raise asyncio.CancelledError
            return running.wanted != "cancel"

        return ExampleReader(client.text, client.info.max_model_len, limit, wanted)

    async def _fail(self, running: RunningJob, faults: Sequence[tuple[str, LineFault]]) -> None:
        """End a job whose files, or whose training, cannot go on."""
        param, first = faults[0]
        told = [in_words(param, fault) for param, fault in faults]
        more = f"; and {len(told) - 1} more, in the job's events" if len(told) > 1 else ""
        code = f"invalid_{param}" if param else first.code
        error = LineFault(code=code, message=f"{told[0]}{more}", line=first.line, param=param or None)
        now = self._now()
        fields = {"status": "failed", "finished": now, "error": error, "faults": [fault for _, fault in faults]}
        await self._change(running, fields, [self._event(each, "error") for each in told])
        await self._tidy(running.job)

    async def _cancel(self, running: RunningJob) -> None:
        now = self._now()
        event = self._event("The job was cancelled; the adapters that it has written stay")
        await self._change(running, {"status": "cancelled", "finished": now}, [event])
        await self._tidy(running.job)

    async def _train(self, running: RunningJob) -> None:
        """Have the engine compute what is left of a job, unless it is paused or cancelled, and finish it."""
        while running.wanted == "pause":
            running.changed.clear()
            if running.job.status != "paused":
                await self._change(running, {"status": "paused"}, [self._event("The job is paused")])
            await running.changed.wait()
        if running.wanted == "cancel":
            await self._cancel(running)
            return
        try:
            run = await self._client.tuning.start(self._order(running.job))
        except TuningError as error:
            await self._fail(running, [("", LineFault(code="tuning_refused", message=str(error)))])
            return
        await self._started(running, run.info)
        following = asyncio.create_task(self._follow(running, run))
        try:
            asked: Wanted = "run"
            while True:
                running.changed.clear()
                if running.wanted != asked:
                    asked = running.wanted
                    with suppress(TuningError):  # it has just ended
                        await {"run": run.resume, "pause": run.pause, "cancel": run.cancel}[asked]()
                ended = await self._store_told(running)
                if ended is not None:
                    await self._finish(running, ended)
                    return
                if running.dead:
                    raise EngineDead(running.dead)
                await running.changed.wait()
                await asyncio.sleep(COMMIT_SECONDS)
        finally:
            following.cancel()

    async def _follow(self, running: RunningJob, run: TuningRun) -> None:
        """Collect what the engine tells of a job."""
        try:
            async for event in run.events():
                running.told.append(event)
                running.changed.set()
        except EngineDead as error:
            running.dead = str(error) or "the engine has ended"
            running.changed.set()

    def _order(self, job: TuningJob) -> JobStart:
        """What the engine is asked to do."""
        given = job.asked
        return JobStart(
            id=job.id,
            directory=str(self.directory / job.id),
            name=job.name,
            tenant=job.tenant,
            data_digest=job.data_digest,
            validation_digest=job.validation_digest,
            epochs=given.get("n_epochs"),
            batch_size=given.get("batch_size"),
            learning_rate=LEARNING_RATE * given.get("learning_rate_multiplier", 1.0),
            rank=given.get("lora_rank", RANK),
            alpha=given.get("lora_alpha"),
            modules=tuple(given.get("target_modules", ())),
            micro_batch=given.get("micro_batch"),
            seed=job.seed,
        )

    async def _started(self, running: RunningJob, info: JobInfo) -> None:
        """Take over how far the engine says that a job has come, and what it has chosen."""
        job = running.job
        chosen = {
            "n_epochs": info.epochs, "batch_size": info.batch_size,
            "learning_rate_multiplier": round(info.learning_rate / LEARNING_RATE, 6), "lora_rank": info.rank,
            "lora_alpha": info.alpha, "target_modules": list(info.modules), "micro_batch": info.micro_batch,
        }  # fmt: skip
        fields: dict[str, Any] = {"chosen": chosen, "steps": info.steps}
        events = []
        if info.step > job.step:  # the engine was killed between storing steps and telling them
            fields |= {"step": info.step, "trained_tokens": info.trained_tokens, "loss": info.loss}
            if info.checkpoint and all(each.step != (at := int(Path(info.checkpoint).name)) for each in job.checkpoints):
                fields["checkpoints"] = [*job.checkpoints, self._new_checkpoint(at, info.loss or 0.0, info.validation)]
            events.append(self._event(f"Steps {job.step + 1} to {info.step} were computed before the server ended"))
        if info.step:
            events.append(self._event(f"Fine-tuning job goes on after step {info.step}/{info.steps}"))
        if job.status == "paused":
            fields["status"] = "queued"
        await self._change(running, fields, events)
        await self._serve(running.job)

    async def _store_told(self, running: RunningJob) -> JobEnded | None:
        """Store what the engine has told, in one transaction. Returns how the job has ended, if it has."""
        job, told = running.job, list(running.told)
        if not told:
            return None
        step, tokens, loss, status = job.step, job.trained_tokens, job.loss, job.status
        checkpoints, events = list(job.checkpoints), []
        ended: JobEnded | None = None
        for each in told:
            match each:
                case JobStep() if each.step > step:
                    step, tokens, loss = each.step, tokens + each.tokens, each.loss
                    if self._told_apart(each):
                        events.append(self._step_event(each, tokens))
                    if each.checkpoint:
                        checkpoints.append(self._new_checkpoint(each.step, each.loss, each.validation))
                        events.append(self._event(f"Checkpoint created at step {each.step}"))
                    if running.since is None:
                        running.since = time.monotonic(), each.step
                case JobStatus():
                    if each.status == "paused":
                        running.since = None
                        events.append(self._event(f"The job is paused after step {step}"))
                    elif each.status == "running" and job.status != "running":
                        events.append(self._event("Fine-tuning job started" if not step else "Fine-tuning job runs"))
                    status = each.status
                case JobEnded():
                    ended = each
        fields: dict[str, Any] = {"step": step, "trained_tokens": tokens, "loss": loss, "status": status}
        if len(checkpoints) > len(job.checkpoints):
            fields["checkpoints"] = checkpoints
        if running.since is not None and step > running.since[1]:
            began, before = running.since
            fields["finishes"] = self._now() + (time.monotonic() - began) / (step - before) * (job.steps - step)
        await self._change(running, fields, events)
        for _ in told:
            running.told.popleft()
        self._count(running.job, tokens - job.trained_tokens)
        if "checkpoints" in fields:
            await self._serve(running.job)
        return ended

    def _told_apart(self, step: JobStep) -> bool:
        """Whether a step has an event of its own."""
        every = -(-step.steps // MOST_STEP_EVENTS)
        return step.step % every == 0 or step.validation is not None or step.step == step.steps

    def _step_event(self, step: JobStep, tokens: int) -> JobEvent:
        """The event of a step. `tokens` are all that the job has trained on."""
        data: dict[str, Any] = {
            "step": step.step, "total_steps": step.steps, "train_loss": step.loss, "tokens": step.tokens,
            "trained_tokens": tokens,
        }  # fmt: skip
        message = f"Step {step.step}/{step.steps}: training loss={step.loss:.4f}"
        if step.validation is not None:
            data["valid_loss"] = step.validation
            message += f", validation loss={step.validation:.4f}"
        return self._event(message, data=data)

    def _event(
        self, message: str, level: Literal["info", "error"] = "info", data: Mapping[str, Any] | None = None
    ) -> JobEvent:
        return JobEvent(created=self._now(), level=level, message=message, data=data)

    def _new_checkpoint(self, step: int, loss: float, validation: float | None) -> JobCheckpoint:
        id = f"ftckpt_{uuid.uuid4().hex}"
        return JobCheckpoint(id=id, step=step, created=self._now(), loss=loss, validation=validation)

    def _count(self, job: TuningJob, tokens: int) -> None:
        metrics = self._service.metrics
        metrics.training_tokens.inc(tokens)
        if job.loss is not None:
            metrics.loss_of(job.id, job.loss)

    async def _finish(self, running: RunningJob, ended: JobEnded) -> None:
        """End a job that the engine has done with."""
        match ended.outcome:
            case "cancelled":
                await self._cancel(running)
            case "failed":
                await self._fail(running, [("", LineFault(code="tuning_failed", message=ended.reason))])
            case "succeeded":
                made = await self._persist(lambda: self._write_results(running.job))
                name = running.job.name
                events = [
                    self._event(f"New fine-tuned model created: {name}"),
                    self._event("The job has successfully completed"),
                ]
                fields = {"status": "succeeded", "finished": self._now(), "result_file": made.id}
                await self._serve(structs.replace(running.job, **fields))
                await self._change(running, fields, events, [made])
                await self._tidy(running.job)

    async def _write_results(self, job: TuningJob) -> StoredFile:
        """Write what each step gave to a file, as comma-separated values."""
        id = f"file-{uuid.uuid5(SPACE, job.id).hex}"
        with self.files.new() as file:
            file.write(b"step,train_loss,valid_loss,tokens\n")
            after = 0
            while found := await self._store.read(partial(_steps, job.id, after)):
                after = found[-1][0]
                data = [event.data for _, event in found if event.data is not None]
                rows = [
                    f"{each['step']},{each['train_loss']},{each.get('valid_loss', '')},{each['tokens']}\n" for each in data
                ]
                await self.files.on_disk(partial(file.write, "".join(rows).encode()))
            size = await self.files.on_disk(lambda: self.files.settle(file, id))
        return StoredFile(
            id=id, tenant=job.tenant, purpose="fine-tune-results", name="step_metrics.csv", bytes=size,
            created=self._now(), expires=None,
        )  # fmt: skip

    async def _change(
        self, running: RunningJob, fields: Mapping[str, Any], events: Sequence[JobEvent] = (), made: Sequence[StoredFile] = ()
    ) -> None:
        """Change a job's state, stored before anybody sees it."""
        id = running.job.id

        def store(store: Store) -> TuningJob:
            return JobTable(store.database).change(id, fields, events, made)

        running.job = await self._persist(lambda: self._store.run(store))

    async def _persist(self, work: Callable[[], Any]) -> Any:
        """The result of work on the store or the disk, tried until they can do it. Raises FileNotFoundError at once."""
        wait, longest = RETRY_SECONDS
        while True:
            try:
                return await work()
            except ApiError as error:
                if error.status != 503:
                    raise
            except FileNotFoundError:
                raise
            except OSError as error:
                log.error("a tuning job waits for the disk: %s", error.strerror or error)
            await asyncio.sleep(wait)
            wait = min(2 * wait, longest)

    # Adapters

    async def _serve(self, job: TuningJob) -> None:
        """Serve the adapters of a job that are to be served, and no others of it. They are its tenant's alone."""
        async with self._serving:
            for name, step in job.served.items():
                self._service.tuned[name] = job.tenant, job.id
                if name not in self._client.adapters:
                    try:
                        await self._client.load_adapter(name, str(self._checkpoint(job, step)))
                    except AdapterError as error:
                        log.warning("the adapter %s is not served: %s", name, error)
            mine = [name for name, (_, id) in self._service.tuned.items() if id == job.id]
            for name in mine:
                if name in self._client.adapters and name not in job.served:
                    await self._unload(name)

    async def _unload(self, name: str) -> None:
        """Serve an adapter no more. Requests that use it run to their end."""
        try:
            await self._client.unload_adapter(name)
        except AdapterError as error:
            log.warning("%s", error)
        self._service.tuned.pop(name, None)

    def _checkpoint(self, job: TuningJob, step: int) -> Path:
        return self.directory / job.id / CHECKPOINTS / str(step)

    async def _tidy(self, job: TuningJob) -> None:
        """Delete what an ended job needs no more: everything but its checkpoints."""
        directory = self.directory / job.id

        def delete() -> None:
            if not job.checkpoints:
                shutil.rmtree(directory, ignore_errors=True)
            for path in directory.glob("*"):
                if path.name != CHECKPOINTS:
                    path.unlink(missing_ok=True)

        await self.files.on_disk(delete)

    # All jobs

    async def _tick(self) -> None:
        """Look after the jobs, and delete what is old."""
        next_clean = 0.0
        while True:
            try:
                if ids := list(self.running):
                    found = await self._store.read(lambda store: JobTable(store.database).wanted(ids))
                    for id, wanted in found.items():
                        self._want(id, wanted)
                await self._adopt()
                if time.monotonic() >= next_clean:
                    await self._serve_all()
                    await self._clean()
                    next_clean = time.monotonic() + CLEAN_SECONDS
            except EngineDead:
                return
            except (ApiError, OSError) as error:
                log.warning("tuning jobs are not looked after now: %s", error)
            await asyncio.sleep(self._tick_seconds)

    async def _serve_all(self) -> None:
        """Serve what jobs have written that no longer run, or run elsewhere, as far as it is here."""
        if not self._client.info.adapter_slots:
            return
        for job in await self._store.read(lambda store: JobTable(store.database).serving()):
            here = all(self._checkpoint(job, step).is_dir() for step in job.served.values())
            if job.model == self._client.info.model and here and job.id not in self.running:
                await self._serve(job)

    async def _adopt(self) -> None:
        """Go on with the jobs of servers that have ended: those for the model that is served here.

        One whose directory is not here came to a server with another directory.
        """
        if not self._tunes:
            return
        owners = await self._store.read(lambda store: JobTable(store.database).owners())
        gone = [owner for owner in owners - {self._owner.id} if self._owner.gone(owner)]
        if not gone:
            return
        found = {}
        for job, wanted in await self._store.read(lambda store: JobTable(store.database).orphans(gone)):
            path = self.directory / job.id if job.data_digest else self.files.path(job.training_file)
            if job.model == self._client.info.model and path.exists():
                found[job.id] = job, wanted
        if found:
            mine = self._owner.id
            taken = await self._store.run(lambda store: JobTable(store.database).adopt(mine, gone, [*found]))
            for id in taken:
                self._begin(*found[id])

    async def _clean(self) -> None:
        oldest = self._now() - KEPT_SECONDS
        await self._store.run(lambda store: JobTable(store.database).drop_old(oldest))

    # Checks

    def _check_on(self) -> None:
        if not self._tunes:
            raise ApiError("this server takes no tuning jobs; start it with --tuning", code="tuning_off")
        if self._closed:
            reason = "the server is shutting down and takes no new tuning jobs; try another one"
            raise ApiError(reason, status=503, code="shutting_down", retry_after=5)

    def _check_parameters(self, asked: Mapping[str, Any]) -> None:
        """Raises ApiError for hyperparameters that this server cannot serve later, or that nobody can tune with."""
        where = "method.supervised.hyperparameters"
        most = self._client.config.max_adapter_rank
        if asked.get("lora_rank", 1) > most:
            reason = f"lora_rank is {asked['lora_rank']}; adapters of at most {most} are served (--max-adapter-rank)"
            raise ApiError(reason, param=f"{where}.lora_rank", code="invalid_value")
        given = {"modules": tuple(asked["target_modules"])} if "target_modules" in asked else {}
        try:
            Hyperparameters(epochs=1, batch_size=1, **given)
        except ValueError as error:
            reason = str(error).replace("modules", "target_modules", 1)
            raise ApiError(reason, param=f"{where}.target_modules", code="invalid_value") from None

    def _open_directory(self) -> Path:
        """Where the jobs' directories lie. Raises StoreError."""
        given = self._client.config.tuning_state
        if given is None and self._service.config.store == MEMORY:
            self._temporary = tempfile.TemporaryDirectory(prefix="holdfast-tuning-")
            given = self._temporary.name
        directory = Path(given) if given is not None else data_directory() / "tuning"
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StoreError(f"the directory of tuning jobs {directory} cannot be used: {error.strerror}") from None
        return directory.absolute()


def in_words(param: str, fault: LineFault) -> str:
    """What is wrong with a line, or with a file as a whole."""
    what = param.replace("_", " ")
    where = f"{what}, line {fault.line}: " if fault.line is not None else f"{what}: " if what else ""
    return where + fault.message


def _steps(id: str, after: int, store: Store) -> list[tuple[int, JobEvent]]:
    return JobTable(store.database).steps(id, after=after, limit=EVENTS_AT_ONCE)
