"""`holdfast tune`: tunes a LoRA adapter with a local model or at a server. A stopped run can be continued."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import shutil
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from holdfast.cli.flags import CommandError, UsageError, check_url
from holdfast.cli.output import require_writable, stage_printer
from holdfast.cli.stopped import MARK, Mark, copy_whole, download, read_mark, write_whole
from holdfast.cli.talkers import PATIENT, TENANT, ChatError, answer_of, connection, fetched, server_client
from holdfast.core.config import option
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.tuning import ALL_MODULES, Hyperparameters
from holdfast.files.regular import open_file
from holdfast.lm.config import EngineConfig
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.store import AsyncStore
from holdfast.server.jobs.files import Files
from holdfast.server.jobs.locks import Owner
from holdfast.server.jobs.tuning import ADAPTER_FILES, Tuning, TuningRequest
from holdfast.server.jobs.values import JOB_ENDED, TuningJob
from holdfast.server.protocol import ApiError, parse
from holdfast.server.run import open_store
from holdfast.server.service import Service

CHECK_SECONDS = 0.2
"""Seconds between two checks of a job that runs in this process."""
ASK_SECONDS = 1.0
"""Seconds between two checks of a job that runs at a server."""
RATE_SECONDS = 10.0
"""Seconds over which the rate of tokens is averaged."""
JOBS = "fine_tuning/jobs"
ENGINE_WITHOUT = (
    "seed",
    "tuning",
    "dora",
    "adapter",
    "max_adapters",
    "deferral_bound",
    "tuning_progress",
    "tuning_share",
)
"""Engine options that `holdfast tune` does not have, because it does not need them or sets them in another way."""


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Options of a tuning run. Raises ValueError for an invalid option."""

    url: str | None = option(None, "tune at the server at this URL, which was started with --tuning")
    api_key: str | None = option(None, "key for that server; default: HOLDFAST_API_KEY")
    out: str | None = option(None, "directory for the adapter, in PEFT's format; default: DATA.adapter")
    validation: str | None = option(None, "file of examples that are not learned, to validate with")
    epochs: int | Literal["auto"] = option("auto", "times that every example is learned")
    batch_size: int | Literal["auto"] = option("auto", "examples of one optimizer step")
    learning_rate_multiplier: float = option(1.0, "learning rate in multiples of 0.0002")
    rank: int = option(16, "rank of the adapter, 1 to 128")
    alpha: float | None = option(None, "LoRA's alpha; default: twice the rank")
    target_module: tuple[str, ...] = option(
        (),
        "matrix to adapt: q, k, v, o, gate, up or down, qkv or gate_up in one, or in_proj or out_proj of a recurrence; "
        "repeat it for several",
    )
    dora: bool = option(False, "tune a DoRA, which learns the length of each changed row as well")
    seed: int = option(0, "seed of the adapter's beginning and of the order of examples")

    def __post_init__(self) -> None:
        check_url(self.url)
        for name, low, high in (
            ("epochs", 1, 50),
            ("learning_rate_multiplier", 1e-9, 1000),
            ("seed", 0, (1 << 31) - 1),
        ):
            value = getattr(self, name)
            if value != "auto" and not low <= value <= high:
                raise ValueError(f"{name} is {value}; it must lie between {low} and {high}")
        Hyperparameters(
            epochs=1 if self.epochs == "auto" else self.epochs,
            batch_size=1 if self.batch_size == "auto" else self.batch_size,
            rank=self.rank,
            alpha=1.0 if self.alpha is None else self.alpha,
            modules=self.target_module or ALL_MODULES,
        )

    def request(self, model: str, training: str, validation: str | None) -> dict[str, Any]:
        """Return the body of POST /v1/fine_tuning/jobs for uploaded files."""
        given: dict[str, Any] = {
            "n_epochs": self.epochs, "batch_size": self.batch_size, "lora_rank": self.rank,
            "learning_rate_multiplier": self.learning_rate_multiplier,
        }  # fmt: skip
        if self.alpha is not None:
            given["lora_alpha"] = self.alpha
        if self.target_module:
            given["target_modules"] = list(self.target_module)
        if self.dora:
            given["use_dora"] = True
        method = {"type": "supervised", "supervised": {"hyperparameters": given}}
        files = {"training_file": training, "validation_file": validation}
        return {"model": model, **files, "method": method, "seed": self.seed}


@dataclass(frozen=True, slots=True)
class Place:
    """The files of one run of `holdfast tune`."""

    source: Path
    validation: Path | None
    out: Path
    digest: str
    """Digest of the data and the options. A stopped run can be continued only with the same ones."""

    @classmethod
    def of(cls, data: str, config: TuneConfig) -> Place:
        """Return the files for DATA. Raises UsageError if the data cannot be read, or the adapter cannot be written."""
        source, validation = Path(data), None if config.validation is None else Path(config.validation)
        digest = hashlib.sha256(msgspec.json.encode(config.request("", "", None)))
        for path in (source, validation):
            try:
                if path is not None:
                    with open_file(path) as opened:
                        digest.update(hashlib.file_digest(opened, "sha256").digest())
            except OSError as error:
                raise UsageError(f"cannot read {path}: {error.strerror}") from None
        out = Path(config.out) if config.out is not None else source.with_name(f"{source.stem}.adapter")
        if out.exists():
            raise UsageError(f"{out} exists; choose another --out")
        try:
            require_writable(str(out))
        except ValueError as error:
            raise UsageError(str(error)) from None
        return cls(source, validation, out, digest.hexdigest())

    @property
    def given(self) -> str:
        """Name of the run's input, for messages."""
        return f"{self.source}, or an option,"

    @property
    def partial(self) -> Path:
        """Path of a stopped run's state: a directory, or a file if the job runs at a server."""
        return self.out.with_name(f"{self.out.name}.partial")


async def run(config: TuneConfig, engine: EngineConfig, data: str, model: str | None) -> int:
    """Tune an adapter. Returns the exit code: 0 for success, 1 if tuning failed, 2 for invalid data or options.

    `engine` is for a local model, and has tuning on. `model` is the name of a model at the server, or None. Raises
    UsageError, CommandError, EngineStartError, StoreError.
    """
    place, notes = Place.of(data, config), Console(highlight=False, stderr=True)
    try:
        if config.url is not None:
            async with server_client(config.url, config.api_key, PATIENT) as http:
                shown = await run_there(http, config, place, model, notes)
        else:
            shown = await run_here(engine, config, place, notes)
    except (asyncio.CancelledError, KeyboardInterrupt):
        if place.partial.exists():
            notes.print("paused; the same command goes on with it", style="dim")
        raise
    return report_end(shown, place, notes)


def report_end(shown: dict[str, Any], place: Place, notes: Console) -> int:
    """Print how a job ended. Returns the exit code."""
    error = shown.get("error")
    if shown["status"] == "failed" and error:
        param = error.get("param")
        source = place.validation if param == "validation_file" else place.source
        faults = error.get("data") or [error]
        for fault in faults:
            where = f"{source}:{fault['line']}: " if fault.get("line") else f"{source}: " if param else ""
            notes.print(f"{where}{fault['message']}", markup=False, soft_wrap=True)
        return 1 if error["code"] == "tuning_failed" else 2
    if shown["status"] != "succeeded":
        notes.print(f"the job is {shown['status']}", markup=False)
        return 1
    progress = shown["progress"]
    loss = "" if progress["train_loss"] is None else f", loss {progress['train_loss']:.4f}"
    notes.print(f"{progress['step']} steps, {progress['trained_tokens']} tokens{loss}; the adapter is in {place.out}",
                markup=False, soft_wrap=True)  # fmt: skip
    return 0


async def run_here(engine: EngineConfig, config: TuneConfig, place: Place, notes: Console) -> dict[str, Any]:
    """Tune with a model in this process. Returns the ended job."""
    read_mark(place.partial / MARK, place)  # Raises for a wrong mark before an engine starts for nothing.
    engine = dataclasses.replace(engine, max_adapter_rank=max(engine.max_adapter_rank, config.rank))
    is_new = not place.partial.exists()
    try:
        place.partial.mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(f"out is {place.out}; {place.partial} cannot be made: {error.strerror}") from None
    try:
        async with local_tuning(engine, place, notes) as (tuning, model):
            if (mark := read_mark(place.partial / MARK, place)) is not None and mark.place != model:
                raise UsageError(f"{place.partial} was begun with the model {mark.place}; go on with it, or delete it")
            write_whole(place.partial / MARK, msgspec.json.encode(Mark(place.digest, model)))
            known, _ = await tuning.page(TENANT, limit=1, after=None, metadata={})
            try:
                job = known[0] if known else await submit_here(tuning, config, place, model)
            except ApiError as error:
                shutil.rmtree(place.partial)
                raise UsageError(error.message) if error.status == 400 else error from None
            with bar(notes) as update:
                while not job.ended:
                    update(job.shown())
                    await asyncio.sleep(CHECK_SECONDS)
                    job = await tuning.retrieve(TENANT, job.id)
                update(job.shown())
            if job.status == "succeeded":
                adapter = tuning.runner.checkpoint(job, job.checkpoints[-1].step)
                with whole_directory(place.out) as target:
                    for name in ADAPTER_FILES:
                        await asyncio.to_thread(copy_whole, adapter / name, target / name)
    except ApiError as error:
        raise CommandError(error.message) from None
    finally:
        if is_new and not (place.partial / MARK).exists():  # The run has not begun: there is nothing to go on with.
            shutil.rmtree(place.partial, ignore_errors=True)
    shutil.rmtree(place.partial)
    return job.shown()


@asynccontextmanager
async def local_tuning(engine: EngineConfig, place: Place, notes: Console) -> AsyncIterator[tuple[Tuning, str]]:
    """Start an engine, with files and jobs in the run's own directory. Yields its jobs, and the name of its model."""
    config = ServerConfig(
        store=str(place.partial / "store.sqlite"),
        files=str(place.partial / "files"),
        tuning_state=str(place.partial / "tuning"),
    )
    store = AsyncStore(open_store(config))
    try:
        client = await EngineClient.start(engine, on_progress=stage_printer(notes))
        try:
            files = Files(store, config)
            owner = Owner(files.directory)
            tuning = Tuning(Service(client, config), files, owner)
            try:
                await tuning.start()
                yield tuning, client.info.model
            finally:
                await tuning.close()
                owner.close()
                files.close()
        finally:
            await client.close()
    finally:
        store.close()


async def submit_here(tuning: Tuning, config: TuneConfig, place: Place, model: str) -> TuningJob:
    """Begin the run's job."""
    kept: list[str | None] = []
    for path in (place.source, place.validation):
        if path is None:
            kept.append(None)
        else:
            with open_file(path) as file:
                kept.append((await tuning.files.copy(TENANT, "fine-tune", path.name, file)).id)
    wanted = msgspec.json.encode(config.request(model, str(kept[0]), kept[1]))
    return await tuning.create(parse(wanted, TuningRequest), TENANT)


async def run_there(
    http: httpx.AsyncClient, config: TuneConfig, place: Place, model: str | None, notes: Console
) -> dict[str, Any]:
    """Let a server tune. Ctrl-C pauses the job there. Returns the ended job."""
    server = str(http.base_url)
    mark = read_mark(place.partial, place)
    if mark is not None and mark.place != server:
        raise UsageError(f"{place.partial} was begun at {mark.place}; go on there, or delete it")
    with connection(http):
        if mark is None:
            mark = await submit_there(http, config, place, model, notes)
        elif (await fetched(http, f"{JOBS}/{mark.id}"))["status"] == "paused":
            answer_of(await http.post(f"{JOBS}/{mark.id}/resume"))
        notes.print(f"at the server it is {mark.id}", style="dim", markup=False)
        try:
            with bar(notes) as update:
                while (shown := await fetched(http, f"{JOBS}/{mark.id}"))["status"] not in JOB_ENDED:
                    update(shown)
                    await asyncio.sleep(ASK_SECONDS)
                update(shown)
        except asyncio.CancelledError:
            with suppress(httpx.HTTPError):
                await http.post(f"{JOBS}/{mark.id}/pause")
            raise
        if shown["status"] == "succeeded":
            with whole_directory(place.out) as target:
                for name in ADAPTER_FILES:
                    await download(http, f"{JOBS}/{mark.id}/adapter/{name}", target / name)
            notes.print(f"the server serves it as {shown['fine_tuned_model']}", style="dim", markup=False)
    place.partial.unlink()
    return shown


async def submit_there(
    http: httpx.AsyncClient, config: TuneConfig, place: Place, model: str | None, notes: Console
) -> Mark:
    """Send the data, and begin the job. Raises UsageError if the server refuses it."""
    if model is None:
        model = str((await fetched(http, "models"))["data"][0]["id"])
    sent: list[str | None] = []
    for path in (place.source, place.validation):
        if path is None:
            sent.append(None)
            continue
        with open_file(path) as file:
            notes.print(f"sending {path}", style="dim", markup=False)
            form: Any = {"files": {"file": (path.name, file)}, "data": {"purpose": "fine-tune"}}
            sent.append(str(answer_of(await http.post("files", **form))["id"]))
    response = await http.post(JOBS, json=config.request(model, str(sent[0]), sent[1]))
    try:
        made = answer_of(response)
    except ChatError as error:
        raise UsageError(str(error)) if response.status_code in (400, 404) else error from None
    mark = Mark(place.digest, str(http.base_url), str(made["id"]))
    write_whole(place.partial, msgspec.json.encode(mark))
    return mark


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """Yield a new directory that is renamed to `target` when it is complete."""
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        yield temporary
        temporary.chmod(0o755)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class Bar:
    """A progress bar for a job: steps, loss, tokens per second, and remaining time."""

    def __init__(self, progress: Progress, task: TaskID, clock: Callable[[], float] = time.monotonic) -> None:
        self._progress, self._task, self._clock = progress, task, clock
        self._seen: deque[tuple[float, int]] = deque()

    def __call__(self, shown: dict[str, Any]) -> None:
        """Show the current state of the job."""
        state = shown.get("progress") or {}
        tokens, loss = state.get("trained_tokens") or 0, state.get("train_loss")
        now = self._clock()
        if not self._seen or self._seen[-1][1] != tokens:
            self._seen.append((now, tokens))
        while len(self._seen) > 2 and self._seen[1][0] < now - RATE_SECONDS:
            self._seen.popleft()
        since, before = self._seen[0]
        rate = f"{(tokens - before) / (now - since):.0f} tokens/s" if tokens > before and now > since else ""
        self._progress.update(
            self._task,
            description=shown["status"].replace("_", " "),
            total=state.get("total_steps") or None,
            completed=state.get("step") or 0,
            loss="" if loss is None else f"loss {loss:.4f}",
            rate=rate,
        )


class Lines:
    """Progress where no terminal shows a bar: a line at each tenth of the job's steps, but the last."""

    def __init__(self, notes: Console) -> None:
        self._notes = notes
        self._tenths = 0
        """Number of tenths of the steps when the last line was printed."""

    def __call__(self, shown: dict[str, Any]) -> None:
        """Print a line if another tenth of the steps is done."""
        state = shown.get("progress") or {}
        step, total = state.get("step") or 0, state.get("total_steps") or 0
        tenths = 10 * step // total if total else 0
        if self._tenths < tenths < 10:
            self._tenths = tenths
            loss = "" if (found := state.get("train_loss")) is None else f", loss {found:.4f}"
            tokens = state.get("trained_tokens") or 0
            self._notes.print(f"step {step} of {total}, {tokens} tokens{loss}", markup=False)


@contextmanager
def bar(notes: Console) -> Iterator[Bar | Lines]:
    """Show a progress bar within the context, or lines if no terminal would show it."""
    if not notes.is_terminal:
        yield Lines(notes)
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[rate]}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=notes, transient=True) as progress:
        yield Bar(progress, progress.add_task("", total=None, loss="", rate=""))
