"""`holdfast batch`: answers the lines of a file with a local model or a server. A stopped run can be continued."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from holdfast.cli.batch_mode import ENDED
from holdfast.cli.flags import CommandError, UsageError, check_url
from holdfast.cli.output import require_writable, stage_printer
from holdfast.cli.stopped import MARK, Mark, copy_whole, download, read_mark, write_whole
from holdfast.cli.talkers import PATIENT, TENANT, answer_of, connection, fetched, server_client
from holdfast.core.config import option
from holdfast.engine.client.client import EngineClient
from holdfast.files.regular import open_file
from holdfast.lm.config import EngineConfig
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.service import Responses
from holdfast.server.conversations.store import AsyncStore
from holdfast.server.jobs.batches import WINDOW, Batches
from holdfast.server.jobs.files import Files
from holdfast.server.jobs.lines import REQUESTS
from holdfast.server.jobs.values import Batch
from holdfast.server.protocol import ApiError
from holdfast.server.run import open_store
from holdfast.server.service import Service

CHECK_SECONDS = 0.2
"""Seconds between two checks of a batch that runs in this process."""
ASK_SECONDS = 1.0
"""Seconds between two checks of a batch that runs at a server."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Options of a batch. Raises ValueError for an invalid option."""

    url: str | None = option(None, "run it at the server at this URL; the lines name a model that it serves")
    api_key: str | None = option(None, "key for that server; default: HOLDFAST_API_KEY")
    out: str | None = option(
        None,
        "file for the answers; default: FILE.output.jsonl. Lines that failed go to a file that ends in .errors.jsonl",
    )

    def __post_init__(self) -> None:
        check_url(self.url)


@dataclass(frozen=True, slots=True)
class Place:
    """The files of one run of `holdfast batch`."""

    source: Path
    out: Path
    digest: str
    """SHA-256 digest of the source file. A stopped run can be continued only with the same bytes."""

    @classmethod
    def of(cls, file: str, config: BatchConfig) -> Place:
        """Return the files for FILE. Raises UsageError if FILE cannot be read, or its answers cannot be written."""
        source = Path(file)
        try:
            with open_file(source) as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            out = Path(config.out) if config.out is not None else source.with_name(f"{source.stem}.output.jsonl")
            require_writable(str(out))
            if out.exists() and out.samefile(source):
                raise UsageError(f"{out} is the file to read; choose another --out")
        except OSError as error:
            raise UsageError(f"cannot read {file}: {error.strerror}") from None
        except ValueError as error:
            raise UsageError(str(error)) from None
        return cls(source, out, digest)

    @property
    def given(self) -> str:
        """Name of the run's input, for messages."""
        return str(self.source)

    @property
    def errors(self) -> Path:
        """Path of the file for lines that failed."""
        return self.out.with_name(f"{self.out.name.removesuffix('.jsonl').removesuffix('.output')}.errors.jsonl")

    @property
    def partial(self) -> Path:
        """Path of a stopped run's state: a directory, or a file if the batch runs at a server."""
        return self.out.with_name(f"{self.out.name}.partial")

    def endpoint(self) -> str:
        """Return the `url` of the first line, which all lines must have. Raises UsageError."""
        with open_file(self.source) as file:
            first = next((line for line in file if line.strip()), b"")
        if not first:
            raise UsageError(f"{self.source} has no lines")
        try:
            url = msgspec.json.decode(first, type=dict[str, Any]).get("url")
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise UsageError(f"the first line of {self.source} is not a request in JSON: {error}") from None
        if url not in REQUESTS:
            reason = f"the first line of {self.source} names none of {', '.join(REQUESTS)} as its url"
            raise UsageError(reason)
        return str(url)


async def run(config: BatchConfig, engine: EngineConfig, file: str) -> int:
    """Answer all lines. Returns the exit code: 0 on success, 1 if lines failed, 2 if the file has invalid lines.

    Raises UsageError, CommandError, EngineStartError, StoreError.
    """
    place, notes = Place.of(file, config), Console(highlight=False, stderr=True)
    endpoint = place.endpoint()
    try:
        if config.url is not None:
            async with server_client(config.url, config.api_key, PATIENT) as http:
                shown = await run_there(http, place, endpoint, notes)
        else:
            shown = await run_here(engine.unwatched(), place, endpoint, notes)
    except (asyncio.CancelledError, KeyboardInterrupt):
        if place.partial.exists():
            at = "it goes on at the server, and " if config.url is not None else ""
            notes.print(f"stopped; {at}the same command goes on with it", style="dim")
        raise
    return report_end(shown, place, notes)


def report_end(shown: dict[str, Any], place: Place, notes: Console) -> int:
    """Print how a batch ended. Returns the exit code."""
    for fault in (shown.get("errors") or {}).get("data") or []:
        where = place.source if fault.get("line") is None else f"{place.source}:{fault['line']}"
        notes.print(f"{where}: {fault['message']}", markup=False, soft_wrap=True)
    if shown["status"] == "failed":
        return 2
    counts = shown["request_counts"]
    done, failed = counts["completed"], counts["failed"]
    notes.print(f"{done} of {counts['total']} lines answered, in {place.out}", markup=False, soft_wrap=True)
    if failed:
        notes.print(f"{failed} failed; the reasons are in {place.errors}", markup=False, soft_wrap=True)
    if shown["status"] != "completed":
        notes.print(f"the batch is {shown['status']}", markup=False)
    return 0 if shown["status"] == "completed" and not failed else 1


async def run_here(engine: EngineConfig, place: Place, endpoint: str, notes: Console) -> dict[str, Any]:
    """Answer all lines with a model in this process. Returns the ended batch."""
    read_mark(place.partial / MARK, place)  # Raises for a wrong mark before an engine starts for nothing.
    place.partial.mkdir(exist_ok=True, mode=0o700)
    try:
        async with local_batches(engine, place, notes) as batches:
            model = batches.runner.model
            if (mark := read_mark(place.partial / MARK, place)) is not None and mark.place != model:
                raise UsageError(f"{place.partial} was begun with the model {mark.place}; go on with it, or delete it")
            write_whole(place.partial / MARK, msgspec.json.encode(Mark(place.digest, model)))
            known, _ = await batches.page(TENANT, limit=1, after=None)
            batch = known[0] if known else await submit_here(batches, place, endpoint)
            with bar(notes) as update:
                while not batch.ended:
                    update(batch.shown())
                    await asyncio.sleep(CHECK_SECONDS)
                    batch = await batches.retrieve(TENANT, batch.id)
                update(batch.shown())
            for id, target in ((batch.output_file, place.out), (batch.error_file, place.errors)):
                if id is not None:
                    await asyncio.to_thread(copy_whole, batches.files.path(id), target)
    except ApiError as error:
        raise CommandError(error.message) from None
    shutil.rmtree(place.partial)
    return batch.shown()


@asynccontextmanager
async def local_batches(engine: EngineConfig, place: Place, notes: Console) -> AsyncIterator[Batches]:
    """Start an engine, with files and batches in the run's own directory."""
    config = ServerConfig(store=str(place.partial / "store.sqlite"), files=str(place.partial / "files"))
    store = AsyncStore(open_store(config))
    try:
        client = await EngineClient.start(engine, on_progress=stage_printer(notes))
        try:
            batches = Batches(Responses(Service(client, config), store), Files(store, config))
            try:
                await batches.start()
                yield batches
            finally:
                await batches.close()
        finally:
            await client.close()
    finally:
        store.close()


async def submit_here(batches: Batches, place: Place, endpoint: str) -> Batch:
    """Begin the run's batch, which has no deadline."""
    with open_file(place.source) as file:
        kept = await batches.files.copy(TENANT, "batch", place.source.name, file)
    return await batches.submit(TENANT, kept.id, endpoint, None)


async def run_there(http: httpx.AsyncClient, place: Place, endpoint: str, notes: Console) -> dict[str, Any]:
    """Let a server answer all lines. Returns the ended batch."""
    server = str(http.base_url)
    mark = read_mark(place.partial, place)
    if mark is not None and mark.place != server:
        raise UsageError(f"{place.partial} was begun at {mark.place}; go on there, or delete it")
    with connection(http):
        if mark is None:
            with open_file(place.source) as file:
                notes.print(f"sending {place.source}", style="dim", markup=False)
                form: Any = {"files": {"file": (place.source.name, file)}, "data": {"purpose": "batch"}}
                kept = answer_of(await http.post("files", **form))
            wanted = {"input_file_id": kept["id"], "endpoint": endpoint, "completion_window": WINDOW}
            made = answer_of(await http.post("batches", json=wanted))
            mark = Mark(place.digest, server, str(made["id"]))
            write_whole(place.partial, msgspec.json.encode(mark))
        notes.print(f"at the server it is {mark.id}", style="dim", markup=False)
        with bar(notes) as update:
            while (shown := await fetched(http, f"batches/{mark.id}"))["status"] not in ENDED:
                update(shown)
                await asyncio.sleep(ASK_SECONDS)
            update(shown)
        for id, target in ((shown["output_file_id"], place.out), (shown["error_file_id"], place.errors)):
            if id is not None:
                await download(http, f"files/{id}/content", target)
    place.partial.unlink()
    return shown


class Bar:
    """A progress bar for a batch: lines, generated tokens per second, and remaining time."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task
        self._began: tuple[float, int] | None = None

    def __call__(self, shown: dict[str, Any]) -> None:
        """Show the current state of the batch."""
        counts = shown.get("request_counts") or {"total": 0, "completed": 0, "failed": 0}
        tokens = (shown.get("usage") or {}).get("output_tokens") or 0
        now = time.monotonic()
        if self._began is None:
            self._began = now, tokens
        since, before = self._began
        rate = f"{(tokens - before) / (now - since):.0f} tokens/s" if tokens > before and now > since else ""
        self._progress.update(
            self._task,
            description=shown["status"].replace("_", " "),
            total=counts["total"] or None,
            completed=counts["completed"] + counts["failed"],
            rate=rate,
        )


@contextmanager
def bar(notes: Console) -> Iterator[Bar]:
    """Show a progress bar within the context."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=notes, transient=True) as progress:
        yield Bar(progress, progress.add_task("", total=None, rate=""))
