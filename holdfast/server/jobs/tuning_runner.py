"""TuningRunner: sends tuning jobs to the engine, stores the result of each step, and serves the adapters."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from msgspec import structs

from holdfast.engine.client.client import AdapterError
from holdfast.engine.client.connection import EngineDead
from holdfast.engine.client.tuning import (
    EXAMPLES_FILE,
    VALIDATION_FILE,
    JobEnded,
    JobInfo,
    JobStart,
    JobStatus,
    JobStep,
    TuningError,
    TuningRun,
    write_examples,
)  # fmt: skip
from holdfast.files.regular import open_file
from holdfast.server.conversations.store import Store
from holdfast.server.jobs.attempt_table import WHOLE, AttemptTable
from holdfast.server.jobs.examples import ExampleReader
from holdfast.server.jobs.files import Files, persist
from holdfast.server.jobs.tables import JobTable
from holdfast.server.jobs.values import (
    ENGINE_ENDED,
    Attempt,
    JobCheckpoint,
    JobEvent,
    LineFault,
    StoredFile,
    TuningJob,
    Wanted,
)
from holdfast.server.protocol import ApiError
from holdfast.server.service import Service

MOST_STEP_EVENTS = 10_000
"""Number of steps up to which each step has an event. A longer job has about this number of step events."""
CLOSE_SECONDS = 5.0
"""Maximum number of seconds that `close` waits for all jobs to pause."""
COMMIT_SECONDS = 0.2
"""Seconds within which steps are collected to be stored together."""
LEARNING_RATE = 2e-4
"""Learning rate for a learning_rate_multiplier of 1."""
RANK = 16
EXAMPLES = {"training_file": EXAMPLES_FILE, "validation_file": VALIDATION_FILE}
CHECKPOINTS = "checkpoints"
EVENTS_AT_ONCE = 1000
SPACE = uuid.UUID("2c5f0a0e-3f0b-4f0c-8f7e-9d1b5f3f5d11")
"""Namespace of result file ids. An id depends only on the job, so rewriting replaces an unfinished file."""

log = logging.getLogger("holdfast.server")


class RunningJob:
    """A job that this server runs."""

    def __init__(self, job: TuningJob, wanted: Wanted, attempt: Attempt) -> None:
        self.job = job
        self.attempt = attempt
        """Counts of engines and servers that ended while they had the job, since its last step."""
        self.begun = False
        """Whether the store has recorded that the job runs, and so counts an engine's or server's end against it."""
        self.sent = False
        """Whether the engine has the job and has not paused it."""
        self.wanted: Wanted = wanted
        self.asks = 0
        """Number of the latest request for a change, which `wanted` reflects."""
        self.paused = False
        """Whether the engine has paused the job, with its state on disk."""
        self.reported: deque[JobStep | JobStatus | JobEnded] = deque()
        """Events reported by the engine that are not stored yet."""
        self.dead = ""
        """Reason why the engine has ended; empty while it lives."""
        self.since: tuple[float, int] | None = None
        """Time of the first step since the job began or resumed here, and the steps done by then; None before it."""
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None]


class TuningRunner:
    """Runs jobs at the engine, one task each, and serves the adapters that they have written."""

    def __init__(
        self,
        service: Service,
        files: Files,
        directory: Path,
        now: Callable[[], float],
        lines_cleared: Callable[[], Awaitable[None]],
    ) -> None:
        """`directory` holds a directory for each job.

        `lines_cleared` waits until no batch line is suspected of having ended an engine.
        """
        self.running: dict[str, RunningJob] = {}
        self.directory = directory
        self._service, self._client, self._files, self._store, self._now = (
            service, service.client, files, files.store, now,
        )  # fmt: skip
        self._reader = ThreadPoolExecutor(1, "holdfast-tuning")
        self._serving = asyncio.Lock()
        """Held while adapters are loaded and unloaded."""
        self._loading: tuple[str, int] | None = None
        """Job whose adapter is being loaded, and the step after which the adapter was written."""
        self._lines_cleared = lines_cleared
        self._suspects: deque[RunningJob] = deque()
        """Jobs suspected of having ended an engine. Only the first one runs, until it has finished a step."""
        self._closed = False

    def begin(self, job: TuningJob, wanted: Wanted = "run", attempt: Attempt | None = None) -> None:
        """Start running a job from its current state. Returns at once.

        `attempt` counts the engines and servers that ended while they had the job.
        """
        self._service.tuned[job.name] = job.tenant, job.id
        running = RunningJob(job, wanted, attempt or Attempt())
        self.running[job.id] = running
        running.task = asyncio.create_task(self._run(running))

    def want(self, id: str, wanted: Wanted, asks: int) -> None:
        """Set the wanted state of a job. `asks` numbers the requests for a change; an outdated one is ignored."""
        running = self.running.get(id)
        if running is not None and asks > running.asks:
            running.wanted, running.asks = wanted, asks
            running.changed.set()

    async def close(self) -> None:
        """Pause all jobs at the engine and store its last events. The jobs continue at the next start."""
        self._closed = True
        jobs = list(self.running.values())
        tasks = [running.task for running in jobs]
        for running in jobs:
            running.changed.set()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for running in jobs:
            await self._note_end(running)
        await self._note_load()
        await asyncio.to_thread(self._reader.shutdown)

    # Life of one job

    async def _run(self, running: RunningJob) -> None:
        try:
            if running.attempt.given_up:
                reason = running.attempt.reason("job")
                log.error("tuning job %s is given up: %s", running.job.id, reason)
                await self._fail(running, [("", LineFault(code=ENGINE_ENDED, message=reason))])
            elif not running.job.data_digest:
                await self._note_begin(running)
                await self._validate(running)
            if not running.job.ended:
                await self._train(running)
        except EngineDead:
            await self._note_end(running)  # The server ends; the job continues at the next start.
        except Exception:
            log.exception("tuning job %s stopped; it is tried again when the server starts", running.job.id)
            await self._note_end(running)
        finally:
            self.running.pop(running.job.id, None)
            self._leave_suspects(running)
            if running.job.ended and running.job.name not in running.job.served:
                self._service.tuned.pop(running.job.name, None)

    async def _validate(self, running: RunningJob) -> None:
        """Read the files into examples. Afterwards the job is queued or has failed."""
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
                with open_file(self._files.path(getattr(job, param))) as file:
                    digests[param] = write_examples(directory / EXAMPLES[param], reader.examples(file))
            return digests

        try:
            digests = await persist(partial(asyncio.get_running_loop().run_in_executor, self._reader, write))
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
        limit = self._service.config.max_body_bytes
        client = self._client

        def wanted() -> bool:
            if self._closed:
                raise asyncio.CancelledError
            return running.wanted != "cancel"

        return ExampleReader(client.text, client.info.max_model_len, limit, wanted)

    async def _train(self, running: RunningJob) -> None:
        """Run the rest of a job at the engine, unless it is paused or cancelled, and finish it."""
        while True:
            while running.wanted == "pause" and not self._closed:
                running.changed.clear()
                await self._note_end(running)
                if running.job.status != "paused":
                    await self._change(running, {"status": "paused"}, [self._event("The job is paused")])
                await running.changed.wait()
            if running.wanted == "cancel":
                await self._cancel(running)
                return
            if self._closed:
                return
            if not running.attempt.suspect or await self._turn_of(running):
                await self._compute(running)
                return

    async def _turn_of(self, running: RunningJob) -> bool:
        """Wait until no other suspect and no batch line is tried, so that a suspected job may run again.

        Returns False if the job's wanted state changes meanwhile.
        """
        self._suspects.append(running)
        lines = asyncio.ensure_future(self._lines_cleared())
        lines.add_done_callback(lambda _: running.changed.set())
        try:
            while not (lines.done() and self._suspects[0] is running):
                running.changed.clear()
                if running.wanted != "run" or self._closed:
                    self._leave_suspects(running)
                    return False
                await running.changed.wait()
            return True
        finally:
            lines.cancel()

    def _leave_suspects(self, running: RunningJob) -> None:
        """Remove a job from the suspects, and let the next one run."""
        if running in self._suspects:
            self._suspects.remove(running)
            if self._suspects:
                self._suspects[0].changed.set()

    async def _note_begin(self, running: RunningJob) -> None:
        """Store that a job runs. This must precede the engine's work, which may end the engine."""
        if not running.begun:
            work = [(running.job.id, WHOLE)]
            await persist(lambda: self._store.run(lambda store: AttemptTable(store.database).begin(work)))
            running.begun = True

    async def _note_end(self, running: RunningJob) -> None:
        """Store that a job no longer runs, and whether its engine ended during it."""
        if running.begun:
            work = {running.job.id: [WHOLE]}
            died, safe = (work, {}) if running.sent and self._client.dead.is_set() else ({}, work)
            running.begun = running.sent = False
            with suppress(ApiError):
                await self._store.run(lambda store: AttemptTable(store.database).end(died, safe))

    async def _note_progress(self, running: RunningJob) -> None:
        """Store that a job has progressed, which clears it of suspicion."""
        if running.attempt != Attempt():
            running.attempt = Attempt()
            id = running.job.id
            await persist(lambda: self._store.run(lambda store: AttemptTable(store.database).clear(id)))
        self._leave_suspects(running)

    async def _compute(self, running: RunningJob) -> None:
        """Run a job at the engine: start it, apply changes of its wanted state, and return at its end."""
        await self._note_begin(running)
        running.sent = not self._client.dead.is_set()
        try:
            run = await self._client.tuning.start(self._order(running.job))
        except TuningError as error:
            await self._fail(running, [("", LineFault(code="tuning_refused", message=without_paths(str(error))))])
            return
        await self._started(running, run.info)
        following = asyncio.create_task(self._follow(running, run))
        try:
            asked: Wanted = "run"
            while True:
                running.changed.clear()
                wanted: Wanted = "pause" if self._closed and running.wanted == "run" else running.wanted
                if wanted != asked:
                    asked = wanted
                    if asked == "run":
                        await self._note_begin(running)
                        running.sent = True
                    with suppress(TuningError):  # The job has just ended.
                        await {"run": run.resume, "pause": run.pause, "cancel": run.cancel}[asked]()
                ended = await self._store_events(running)
                if ended is not None:
                    await self._finish(running, ended)
                    return
                if running.dead:
                    raise EngineDead(running.dead)
                if self._closed and running.paused:
                    return
                await running.changed.wait()
                await asyncio.sleep(COMMIT_SECONDS)
        finally:
            following.cancel()

    async def _follow(self, running: RunningJob, run: TuningRun) -> None:
        """Collect the events that the engine reports for a job."""
        try:
            async for event in run.events():
                running.reported.append(event)
                running.changed.set()
        except EngineDead as error:
            running.dead = str(error) or "the engine has ended"
            running.changed.set()

    def _order(self, job: TuningJob) -> JobStart:
        """Return the request that starts a job at the engine."""
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
            dora=given.get("use_dora", False),
            micro_batch=given.get("micro_batch"),
            seed=job.seed,
            known=job.step,
        )

    async def _started(self, running: RunningJob, info: JobInfo) -> None:
        """Record the hyperparameters that the engine chose, and progress that it did not report before it ended."""
        job = running.job
        chosen = {
            "n_epochs": info.epochs, "batch_size": info.batch_size,
            "learning_rate_multiplier": round(info.learning_rate / LEARNING_RATE, 6), "lora_rank": info.rank,
            "lora_alpha": info.alpha, "target_modules": list(info.modules), "use_dora": info.dora,
            "micro_batch": info.micro_batch,
        }  # fmt: skip
        fields: dict[str, Any] = {"chosen": chosen, "steps": info.steps}
        events = []
        if info.step > job.step:  # The engine was killed after it stored steps and before it reported them.
            fields |= {"step": info.step, "trained_tokens": info.trained_tokens, "loss": info.loss}
            at = int(Path(info.checkpoint).name) if info.checkpoint else 0
            if at > max((each.step for each in job.checkpoints), default=0):
                fields["checkpoints"] = [*job.checkpoints, self._new_checkpoint(at, info.loss or 0.0, info.validation)]
            events.append(self._event(f"Steps {job.step + 1} to {info.step} were computed before the server ended"))
            tokens = job.trained_tokens
            for each in info.untold:
                tokens += each.tokens
                if self._has_event(each):
                    events.append(self._step_event(each, tokens))
            await self._note_progress(running)
        if info.step:
            events.append(self._event(f"Fine-tuning job goes on after step {info.step}/{info.steps}"))
        if job.status == "paused":
            fields["status"] = "queued"
        await self._change(running, fields, events)
        await self.serve(running.job)

    async def _store_events(self, running: RunningJob) -> JobEnded | None:
        """Store the engine's events in one transaction. Returns the event that ends the job, if it is among them."""
        job, reported = running.job, list(running.reported)
        if not reported:
            return None
        step, tokens, loss, status = job.step, job.trained_tokens, job.loss, job.status
        checkpoints, events = list(job.checkpoints), []
        ended: JobEnded | None = None
        for each in reported:
            match each:
                case JobStep() if each.step > step:
                    step, tokens, loss = each.step, tokens + each.tokens, each.loss
                    if self._has_event(each):
                        events.append(self._step_event(each, tokens))
                    if each.checkpoint:
                        checkpoints.append(self._new_checkpoint(each.step, each.loss, each.validation))
                        events.append(self._event(f"Checkpoint created at step {each.step}"))
                    if running.since is None:
                        running.since = time.monotonic(), each.step
                case JobStatus():
                    running.paused = each.status == "paused"
                    if self._closed:
                        continue  # The job continues at the next start, so its pause is not recorded.
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
        for _ in reported:
            running.reported.popleft()
        if step > job.step:
            await self._note_progress(running)
        if running.paused and not self._closed:
            await self._note_end(running)
            self._leave_suspects(running)
        if loss is not None:
            self._service.metrics.loss_of(job.id, loss)
        if "checkpoints" in fields:
            await self.serve(running.job)
        return ended

    def _has_event(self, step: JobStep) -> bool:
        """Whether a step has an event of its own."""
        every = -(-step.steps // MOST_STEP_EVENTS)
        return step.step % every == 0 or step.validation is not None or step.step == step.steps

    def _step_event(self, step: JobStep, tokens: int) -> JobEvent:
        """Return the event of a step. `tokens` is the number of tokens that the job has trained on so far."""
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

    async def _finish(self, running: RunningJob, ended: JobEnded) -> None:
        """End a job that the engine has finished."""
        match ended.outcome:
            case "cancelled":
                await self._cancel(running)
            case "failed":
                await self._fail(running, [("", LineFault(code="tuning_failed", message=without_paths(ended.reason)))])
            case "succeeded":
                made = await persist(lambda: self._write_results(running.job))
                name = running.job.name
                events = [
                    self._event(f"New fine-tuned model created: {name}"),
                    self._event("The job has successfully completed"),
                ]
                fields = {"status": "succeeded", "finished": self._now(), "result_file": made.id}
                await self.serve(structs.replace(running.job, **fields))
                await self._change(running, fields, events, [made])
                await self._tidy(running.job)

    async def _write_results(self, job: TuningJob) -> StoredFile:
        """Write a file with the results of each step, as comma-separated values."""
        id = f"file-{uuid.uuid5(SPACE, job.id).hex}"
        with self._files.new() as file:
            file.write(b"step,train_loss,valid_loss,tokens\n")
            after = 0
            while found := await self._store.read(partial(_steps, job.id, after)):
                after = found[-1][0]
                data = [event.data for _, event in found if event.data is not None]
                rows = "".join(map(_row, data))
                await self._files.on_disk(partial(file.write, rows.encode()))
            size = await self._files.on_disk(lambda: self._files.settle(file, id))
        return StoredFile(
            id=id, tenant=job.tenant, purpose="fine-tune-results", name="step_metrics.csv", bytes=size,
            created=self._now(), expires=None,
        )  # fmt: skip

    async def _fail(self, running: RunningJob, faults: Sequence[tuple[str, LineFault]]) -> None:
        """End a job because its files or its training failed."""
        param, first = faults[0]
        words = [in_words(param, fault) for param, fault in faults]
        more = f"; and {len(words) - 1} more, in the job's events" if len(words) > 1 else ""
        code = f"invalid_{param}" if param else first.code
        error = LineFault(code=code, message=f"{words[0]}{more}", line=first.line, param=param or None)
        now = self._now()
        fields = {"status": "failed", "finished": now, "error": error, "faults": [fault for _, fault in faults]}
        await self._change(running, fields, [self._event(each, "error") for each in words])
        await self._tidy(running.job)

    async def _cancel(self, running: RunningJob) -> None:
        now = self._now()
        event = self._event("The job was cancelled; the adapters that it has written stay")
        await self._change(running, {"status": "cancelled", "finished": now}, [event])
        await self._tidy(running.job)

    async def _change(
        self,
        running: RunningJob,
        fields: Mapping[str, Any],
        events: Sequence[JobEvent] = (),
        made: Sequence[StoredFile] = (),
    ) -> None:
        """Change a job's state. It is stored before anybody sees it."""
        id = running.job.id

        def store(store: Store) -> TuningJob:
            return JobTable(store.database).change(id, fields, events, made)

        running.job = await persist(lambda: self._store.run(store))

    # Adapters

    def announce(self, job: TuningJob) -> None:
        """Let requests that name an adapter of a job wait until it is served."""
        for name in job.served:
            self._service.tuned[name] = job.tenant, job.id
            if name not in self._client.adapters:
                self._service.loading.add(name)

    async def serve(self, job: TuningJob) -> None:
        """Load the adapters that a job should serve to its tenant, and unload its older ones.

        If an engine ended while it loaded an adapter, the adapter is loaded again once no batch line is suspected.
        After the second such end, it is given up.
        """
        self.announce(job)
        wanted = {name: step for name, step in job.served.items() if name not in self._client.adapters}
        if wanted:
            attempts = await persist(lambda: self._store.run(lambda store: AttemptTable(store.database).found(job.id)))
            known = {name: attempts.get(step, Attempt()) for name, step in wanted.items()}
            for name in [name for name, attempt in known.items() if attempt.given_up]:
                log.error("the adapter %s is not served: %s", name, known[name].reason("adapter"))
                del wanted[name]
                self._service.loading.discard(name)
            if any(known[name].suspect for name in wanted):
                await self._lines_cleared()
        async with self._serving:
            for name, step in wanted.items():
                try:
                    if name not in self._client.adapters:
                        await self._load(job, name, step)
                except AdapterError as error:
                    log.warning("the adapter %s is not served: %s", name, error)
                finally:
                    self._service.loading.discard(name)
            for name in [name for name, (_, id) in self._service.tuned.items() if id == job.id]:
                if name != job.name and name not in job.served:
                    await self._unload(name)

    async def _load(self, job: TuningJob, name: str, step: int) -> None:
        """Load an adapter, and record the attempt in case the engine ends. Raises AdapterError and EngineDead."""
        await persist(lambda: self._store.run(lambda store: AttemptTable(store.database).begin([(job.id, step)])))
        self._loading = job.id, step
        try:
            await self._client.load_adapter(name, str(self.checkpoint(job, step)))
        except (AdapterError, EngineDead):
            await self._note_load()
            raise
        finally:
            self._service.loading.discard(name)
        self._loading = None
        await persist(lambda: self._store.run(lambda store: AttemptTable(store.database).forget(job.id, [step])))

    async def _note_load(self) -> None:
        """Store how a failed load ended: whether its engine died."""
        if self._loading is not None:
            job, step = self._loading
            work: dict[str, list[int]] = {job: [step]}
            died, safe = (work, {}) if self._client.dead.is_set() else ({}, work)
            with suppress(ApiError):
                await self._store.run(lambda store: AttemptTable(store.database).end(died, safe))
            self._loading = None  # Reset last: if this call is cancelled, `close` stores the end.

    async def give_up(self, job: str) -> None:
        """Unload all adapters of a job."""
        async with self._serving:
            for name in [name for name, (_, id) in self._service.tuned.items() if id == job]:
                await self._unload(name)

    async def _unload(self, name: str) -> None:
        """Unload an adapter. Running requests that use it continue to their end."""
        with suppress(AdapterError):  # The adapter is not loaded.
            await self._client.unload_adapter(name)
        self._service.tuned.pop(name, None)

    def checkpoint(self, job: TuningJob, step: int) -> Path:
        """Return the directory of the adapter that a job wrote after this step."""
        return self.directory / job.id / CHECKPOINTS / str(step)

    async def _tidy(self, job: TuningJob) -> None:
        """Delete all files of an ended job but its checkpoints."""
        directory = self.directory / job.id

        def delete() -> None:
            if not job.checkpoints:
                shutil.rmtree(directory, ignore_errors=True)
            for path in directory.glob("*"):
                if path.name != CHECKPOINTS:
                    path.unlink(missing_ok=True)

        await self._files.on_disk(delete)


def without_paths(reason: str) -> str:
    """Return the engine's reason without file paths, for clients."""
    return re.sub(r"'/[^']*'", "a file", reason)


def in_words(param: str, fault: LineFault) -> str:
    """Describe a fault in a sentence that names its file and line."""
    what = param.replace("_", " ")
    where = f"{what}, line {fault.line}: " if fault.line is not None else f"{what}: " if what else ""
    return where + fault.message


def _row(data: Mapping[str, Any]) -> str:
    """Return the row of a step in the results file."""
    return f"{data['step']},{data['train_loss']},{data.get('valid_loss', '')},{data['tokens']}\n"


def _steps(id: str, after: int, store: Store) -> list[tuple[int, JobEvent]]:
    return JobTable(store.database).steps(id, after=after, limit=EVENTS_AT_ONCE)
