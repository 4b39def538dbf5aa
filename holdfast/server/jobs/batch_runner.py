"""BatchRunner: runs the lines of all batches alongside other requests, and stores each line's answer once.

A line that was in flight when an engine ended may be the cause. At the next start these suspects run first, one at a
time and without other lines, so that harmless ones are cleared. A line that ends engines repeatedly is given up.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import IO, Any, TypeVar

from msgspec import Raw

from holdfast.files.regular import open_file
from holdfast.server.conversations.protocol import ResponseRequest
from holdfast.server.conversations.service import Responses
from holdfast.server.conversations.store import AsyncStore, Store
from holdfast.server.conversations.writing import Writing
from holdfast.server.jobs.attempt_table import WHOLE, AttemptTable, Found
from holdfast.server.jobs.feed import Feed
from holdfast.server.jobs.files import Files, pauses, persist
from holdfast.server.jobs.lines import BadLine, Line, LineReader, check, custom_id_of, split
from holdfast.server.jobs.results import form_of
from holdfast.server.jobs.tables import BatchTable
from holdfast.server.jobs.values import (
    ENGINE_ENDED,
    AnsweredLine,
    Attempt,
    Batch,
    Ending,
    LineFault,
    Status,
    StoredFile,
    Usage,
)
from holdfast.server.messages.protocol import MessagesChat
from holdfast.server.messages.replies import MessageShape
from holdfast.server.protocol import ApiError, ChatRequest, CompletionRequest, invalid
from holdfast.server.replies import ChatShape, Reply, RequestUsage, Shape, TextShape, encode
from holdfast.server.service import REPLICA_LOST, Answer, Service, internal

T = TypeVar("T")

COMMIT_SECONDS = 0.05
"""Seconds within which answers are collected to be stored together, because each flush of the disk takes time."""
GATHER_SECONDS = 0.01
"""Seconds within which starts of lines are collected to be stored together."""
MOST_UNSTORED = 1000
"""Maximum number of unstored answers. Beyond it no line begins."""
BREATH = 0.001
"""Seconds of reading, and then seconds of pause, while an input is checked. The pauses let the event loop run."""
ANSWERS_AT_ONCE = 256
REST_SECONDS = 0.05
"""Seconds between two transactions of a cleanup."""
SPACE = uuid.UUID("7f0c2a9c-6b0e-4c58-9d5e-0b6f3a1f4a52")
"""Namespace of output file ids. An id depends only on the batch, so rewriting replaces an unfinished file."""

log = logging.getLogger("holdfast.server")


class Turns:
    """Order of the batches' lines: tenants take turns, and a tenant's batches are first come, first served."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[RunningBatch]] = {}

    def add(self, running: RunningBatch) -> None:
        """Add a batch after its tenant's others."""
        self._queues.setdefault(running.batch.tenant, deque()).append(running)

    def remove(self, running: RunningBatch) -> None:
        """Remove a batch from its tenant's queue, if it is there."""
        tenant = running.batch.tenant
        queue = self._queues.get(tenant)
        if queue is not None and running in queue:
            queue.remove(running)
            if not queue:
                del self._queues[tenant]

    def next(self) -> RunningBatch | None:
        """Return the batch whose line runs next; batches with suspects come first. Its tenant moves to the end."""
        suspects = ((tenant, each) for tenant, queue in self._queues.items() for each in queue if each.suspects)
        firsts = ((tenant, queue[0]) for tenant, queue in self._queues.items())
        found = next(suspects, None) or next(firsts, None)
        if found is None:
            return None
        tenant, running = found
        self._queues[tenant] = self._queues.pop(tenant)
        return running


class RunningBatch:
    """A batch in progress."""

    def __init__(self, batch: Batch, attempts: Found | None = None) -> None:
        self.batch = batch
        self.attempts = attempts or {}
        """Counts of engines and servers that ended during a line, by line number."""
        self.suspects: set[int] = set()
        """Lines that are suspected of having ended an engine. A line leaves the set when it is answered."""
        self.ending: Ending | None = batch.ending
        """How the batch ends; None until that is decided."""
        self.answers: list[AnsweredLine] = []
        """Answers that are not stored yet."""
        self.in_flight: dict[int, asyncio.Task[None]] = {}
        self.asked: dict[int, Answer | Writing] = {}
        """Requests of the lines in flight, by line number."""
        self.source: LineReader | None = None
        self.exhausted = False
        self.changed = asyncio.Event()
        self.storing = asyncio.Lock()
        """Held while the batch's state is changed and stored."""
        self.task: asyncio.Task[None]

    @property
    def waiting(self) -> int:
        """Number of lines that have not begun."""
        batch = self.batch
        if batch.status not in ("validating", "in_progress"):
            return 0
        return max(0, batch.total - batch.completed - batch.failed - len(self.answers) - len(self.in_flight))

    def sent(self, number: int) -> bool:
        """Whether a line in flight has reached the engine."""
        asked = self.asked.get(number)
        return asked is not None and (asked.answer.sent if isinstance(asked, Writing) else asked.sent)


class Starts:
    """Lines that are about to begin. `run` stores them."""

    def __init__(self, store: AsyncStore) -> None:
        self._store = store
        self._waiting: list[tuple[tuple[str, int], asyncio.Future[None]]] = []
        """Batch id and number of each line that is not stored yet, with the future that ends when it is."""
        self._came = asyncio.Event()

    async def note(self, batch: str, number: int) -> None:
        """Record that a line begins, and return once that is stored. Store failures are retried."""
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(((batch, number), stored))
        self._came.set()
        await stored

    async def run(self) -> None:
        """Store starts as they come, until cancelled."""
        while True:
            await self._came.wait()
            await asyncio.sleep(GATHER_SECONDS)
            self._came.clear()
            taken, self._waiting = self._waiting, []
            # A line that was cancelled meanwhile does not begin.
            if begun := [line for line, stored in taken if not stored.done()]:
                await persist(lambda: self._store.run(lambda store: AttemptTable(store.database).begin(begun)))
            for _, stored in taken:
                if not stored.done():
                    stored.set_result(None)


Charge = Callable[[Batch, Usage], None]
"""Charges the tokens of a stored answer to the key that created the batch."""


def charge_nobody(batch: Batch, usage: Usage) -> None:
    """Charge no key, as on a machine without a server."""


class BatchRunner:
    """Runs batches through the server's own service, in the lane for batch lines."""

    def __init__(
        self,
        service: Service,
        responses: Responses,
        files: Files,
        feed: Feed,
        now: Callable[[], float] = time.time,
        charge: Charge = charge_nobody,
    ) -> None:
        self.running: dict[str, RunningBatch] = {}
        self._service, self._responses, self._files, self._feed, self._now = service, responses, files, feed, now
        self._store = responses.store
        self._charge = charge
        self._lane = service.batch_lane
        self._turns = Turns()
        self._choices = 0
        """Number of choices in progress in all lines."""
        self._unstored = 0
        self._wake = asyncio.Event()
        self._answered = asyncio.Event()
        self._starts = Starts(self._store)
        self._alone: tuple[str, int] | None = None
        """Batch and line number of the suspect in flight. No other line runs at the same time."""
        self._settled = asyncio.Event()
        """Set when a line or a batch has ended."""
        self._reader = ThreadPoolExecutor(1, "holdfast-batches")
        self._loops: list[asyncio.Task[None]] = []
        self._closed = False
        metrics = service.metrics
        metrics.batch_lines.labels("waiting").set_function(lambda: sum(each.waiting for each in self._batches()))
        metrics.batch_lines.labels("running").set_function(lambda: sum(len(each.in_flight) for each in self._batches()))
        answered = metrics.batch_lines_answered
        self._counted = {True: answered.labels("completed"), False: answered.labels("failed")}

    @property
    def model(self) -> str:
        """Name of the model that answers the lines."""
        return self._service.client.info.model

    def begin(self, batch: Batch, ending: Ending | None = None, attempts: Found | None = None) -> None:
        """Start running a batch from its current state. Returns at once.

        `ending` is the final status of the batch, if that is decided already. `attempts` counts the engines and
        servers that ended during each line, or during the check of the input (`WHOLE`).
        """
        if not self._loops:
            loops = (self._dispatch, self._starts.run, self._store_answers)
            self._loops = [asyncio.create_task(each()) for each in loops]
            for task in self._loops:
                task.add_done_callback(log_failure)
        running = RunningBatch(batch, attempts)
        running.suspects = {number for number, each in running.attempts.items() if number != WHOLE and each.suspect}
        running.ending = running.ending or ending
        self.running[batch.id] = running
        running.task = asyncio.create_task(self._run(running))

    def stop(self, id: str, ending: Ending) -> None:
        """End a batch early. Running lines are aborted; existing answers stay."""
        running = self.running.get(id)
        if running is not None and running.ending is None:
            running.ending = ending
            for task in running.in_flight.values():
                task.cancel()
            running.changed.set()

    async def close(self) -> None:
        """Abort all lines and store existing answers. Batches continue from there at the next start.

        Also stores, for each line in flight, whether its engine has ended.
        """
        self._closed = True
        batches = self._batches()
        dead = self._service.client.dead.is_set()
        died = {each.batch.id: [number for number in each.in_flight if dead and each.sent(number)] for each in batches}
        safe = {each.batch.id: {WHOLE, *each.in_flight} - {*died[each.batch.id]} for each in batches}
        tasks = [*self._loops, *(each.task for each in batches)]
        tasks += [task for each in batches for task in each.in_flight.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for running in batches:
            with suppress(ApiError):
                await self._store_some(running)
        if batches:
            with suppress(ApiError):
                await self._store.run(lambda store: AttemptTable(store.database).end(died, safe))
        self._reader.shutdown()

    async def cleared(self) -> None:
        """Wait until no line is suspected of having ended an engine."""
        while any(each.suspects for each in self._batches()) and not self._closed:
            self._settled.clear()
            await self._settled.wait()

    def _batches(self) -> list[RunningBatch]:
        return list(self.running.values())

    # Life of one batch

    async def _run(self, running: RunningBatch) -> None:
        try:
            if running.batch.status == "validating":
                await self._validate(running)
            if running.batch.status == "in_progress" and running.ending is None:
                await self._answer_lines(running)
            if not running.batch.ended:
                await self._finish(running)
            while await self._store.run(lambda store: _table(store).forget_answers()):
                await asyncio.sleep(REST_SECONDS)
        except FileNotFoundError:
            log.error("the input of batch %s is gone", running.batch.id)
            gone = LineFault(code="input_file_missing", message="the bytes of the input file are gone")
            await self._change(running, "failed", faults=[gone])
        except Exception:
            log.exception("batch %s stopped; it is tried again when the server starts", running.batch.id)
        finally:
            self._turns.remove(running)
            self.running.pop(running.batch.id, None)
            self._settled.set()

    async def _validate(self, running: RunningBatch) -> None:
        """Check every line before any runs. Afterwards the batch is in progress or has failed."""
        batch = running.batch
        if (attempt := running.attempts.get(WHOLE)) is not None and attempt.given_up:
            fault = LineFault(code=ENGINE_ENDED, message=attempt.reason("batch"))
            await self._change(running, "failed", faults=[fault])
            return
        if not form_of(batch.endpoint).checked:
            await self._change(running, "in_progress")
            return
        await self._starts.note(batch.id, WHOLE)
        limit, choices = self._service.config.max_body_bytes, self._service.config.max_choices
        since = time.perf_counter()

        def allow(line: Line) -> None:
            nonlocal since
            if self._closed:
                raise asyncio.CancelledError
            self._service.check_model(line.wanted.model, batch.tenant)
            if line.choices > choices:
                raise invalid(f"the line asks for {line.choices} choices (n times prompts); at most {choices}", "n")
            if time.perf_counter() - since > BREATH:
                time.sleep(BREATH)
                since = time.perf_counter()

        def read() -> tuple[int, list[Any]]:
            with open_file(self._files.path(batch.input_file)) as file:
                return check(file, batch.endpoint, limit, allow)

        total, faults = await persist(partial(self._in_reader, read))
        if running.ending is not None:
            return
        if faults:
            await self._change(running, "failed", faults=faults)
        else:
            # An engine that ended during the check of the input makes no line suspect.
            await persist(lambda: self._store.run(lambda store: AttemptTable(store.database).forget(batch.id, [WHOLE])))
            await self._change(running, "in_progress", total=total)

    async def _answer_lines(self, running: RunningBatch) -> None:
        """Run the unanswered lines, until all are answered or the batch ends early."""
        batch = running.batch
        answered = await persist(lambda: self._store.read(lambda store: _table(store).answered(batch.id)))
        path = self._files.path(batch.input_file)
        opened: list[IO[bytes]] = []
        try:
            await persist(lambda: self._in_reader(lambda: opened.append(open_file(path))))
            (file,) = opened
            running.suspects -= answered
            running.source = LineReader(file, batch.endpoint, answered, first=running.suspects)
            self._turns.add(running)
            self._wake.set()
            while running.ending is None and not (running.exhausted and not running.in_flight and not running.answers):
                running.changed.clear()
                await running.changed.wait()
        finally:
            self._turns.remove(running)
            await asyncio.gather(*running.in_flight.values(), return_exceptions=True)
            running.source = None
            # Closed in the reader's thread, because that may still be opening a file for a cancelled call.
            self._reader.submit(lambda: [each.close() for each in opened])

    async def _finish(self, running: RunningBatch) -> None:
        """Write the output files from the stored answers, and end the batch."""
        ending: Ending = running.ending or "completed"
        running.ending = ending
        while running.answers:
            await persist(lambda: self._store_some(running))
        if running.batch.status != "finalizing":
            times = dict(running.batch.times)
            if ending == "cancelled":
                times["cancelling"] = self._now()
            await self._change(running, "finalizing", ending=ending, times=times)
        batch = running.batch
        made: dict[bool, StoredFile] = {}
        late = 0
        for completed in (True, False):
            file, count = await persist(partial(self._write_output, batch, completed))
            if file is not None:
                made[completed] = file
            if not completed and form_of(batch.endpoint).checked:
                late = count - batch.failed
        output, errors = (made[each].id if each in made else None for each in (True, False))
        await self._change(
            running, ending, list(made.values()), output_file=output, error_file=errors, failed=batch.failed + late
        )

    async def _write_output(self, batch: Batch, completed: bool) -> tuple[StoredFile | None, int]:
        """Write one of a batch's two output files. Returns it, or None if it is empty, and its number of lines."""
        kind = "output" if completed else "errors"
        id, name = f"file-{uuid.uuid5(SPACE, f'{batch.id}/{kind}').hex}", f"{batch.id}_{kind}.jsonl"
        count, after = 0, 0
        with self._files.new() as file:
            while True:
                read = partial(_answers, batch.id, completed, after)
                answers = await self._store.read(read)
                if not answers:
                    break
                after = answers[-1][0]
                count += len(answers)
                texts = b"".join(text + b"\n" for _, text in answers)
                await self._in_reader(partial(file.write, texts))
            if not completed and batch.ending in form_of(batch.endpoint).told:
                answered = await self._store.read(lambda store: _table(store).answered(batch.id))
                count += await self._in_reader(lambda: self._write_unanswered(batch, answered, file))
            if not count:
                return None, 0
            size = await self._in_reader(lambda: self._files.settle(file, id))
        now = self._now()
        return StoredFile(
            id=id, tenant=batch.tenant, purpose=form_of(batch.endpoint).purpose, name=name, bytes=size, created=now,
            expires=now + batch.output_seconds,
        ), count  # fmt: skip

    def _write_unanswered(self, batch: Batch, answered: set[int], output: IO[bytes]) -> int:
        """Write the result of each line that the end of the batch left unanswered. Returns the number of results."""
        form, count = form_of(batch.endpoint), 0
        if batch.total:
            with open_file(self._files.path(batch.input_file)) as file:
                for number, text in split(file):
                    if number not in answered:
                        count += 1
                        result = form.unanswered(result_id(batch.id, number), custom_id_of(text), batch.ending)
                        output.write(encode(result) + b"\n")
        return count

    async def _change(
        self, running: RunningBatch, status: Status, made: list[StoredFile] | None = None, **fields: Any
    ) -> None:
        """Give a batch its next status. It is stored before anybody sees it."""
        async with running.storing:
            times = {**running.batch.times, **fields.pop("times", {}), status: self._now()}
            fields |= {"status": status, "times": times}

            def store(store: Store) -> Batch:
                return _table(store).change(running.batch.id, fields, made or ())

            running.batch = await persist(lambda: self._store.run(store))
        self.publish(running.batch, updated(running.batch))

    def publish(self, batch: Batch, event: dict[str, Any]) -> None:
        """Send an event of a batch to the listeners of its tenant, if batches of its form are announced."""
        if form_of(batch.endpoint).announced:
            self._feed.publish(batch.tenant, event)

    async def _in_reader(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._reader, work, *arguments)

    # All lines

    async def _dispatch(self) -> None:
        """Begin lines, one after the other, while there is room for them."""
        while True:
            self._wake.clear()
            running = self._turns.next()
            line = None if running is None else await self._next_line(running)
            if running is None:
                await self._wake.wait()
                continue
            if line is None:
                running.exhausted = True
                self._turns.remove(running)
                running.changed.set()
                continue
            if isinstance(line, BadLine):
                self._take_fault(running, line)
                continue
            if (attempt := running.attempts.get(line.number)) is not None and attempt.given_up:
                self._give_up(running, line, attempt)
                continue
            while not self._room(running, line) and running.ending is None:
                self._wake.clear()
                await self._wake.wait()
            if running.ending is None:
                self._choices += line.choices
                if line.number in running.suspects:
                    self._alone = running.batch.id, line.number
                task = asyncio.create_task(self._answer(running, line))
                running.in_flight[line.number] = task
                task.add_done_callback(partial(self._ended, running, line))

    def _room(self, running: RunningBatch, line: Line) -> bool:
        if self._alone is not None or (line.number in running.suspects and self._choices):
            return False
        return self._choices + line.choices <= self._lane.admission.limit and self._unstored < MOST_UNSTORED

    async def _next_line(self, running: RunningBatch) -> Line | BadLine | None:
        """Return a batch's next line; None after the last one, and when the batch ends early."""
        source = running.source
        if source is None or running.ending is not None:
            return None
        if not source.ahead:
            await persist(partial(self._in_reader, source.read))
        return source.ahead.popleft() if source.ahead else None

    async def _answer(self, running: RunningBatch, line: Line) -> None:
        """Answer one line, with retries, and queue the answer for storing."""
        await self._starts.note(running.batch.id, line.number)
        answer, usage = await self._ask(running, line)
        self._take(running, line.number, line.custom_id, answer, usage)

    def _ended(self, running: RunningBatch, line: Line, task: asyncio.Task[None]) -> None:
        """Remove an ended line from `in_flight`. A line that was cancelled early never began."""
        del running.in_flight[line.number]
        running.asked.pop(line.number, None)
        self._choices -= line.choices
        if self._alone == (running.batch.id, line.number):
            self._alone = None
        self._clear(running, line.number)
        self._wake.set()
        running.changed.set()
        log_failure(task)

    def _clear(self, running: RunningBatch, number: int) -> None:
        """Clear a line of suspicion, because it has ended."""
        running.suspects.discard(number)
        self._settled.set()

    def _take_fault(self, running: RunningBatch, line: BadLine) -> None:
        """Answer a line that this server refuses, because it was checked by a server with other limits."""
        fault = line.fault
        error = ApiError(fault.message, param=fault.param, code=fault.code)
        self._take(running, fault.line or 0, line.custom_id, error)
        self._clear(running, fault.line or 0)

    def _give_up(self, running: RunningBatch, line: Line, attempt: Attempt) -> None:
        """Answer a line with an error, because several engines ended while it was in flight."""
        reason = attempt.reason("line")
        log.error("line %d of batch %s is given up: %s", line.number, running.batch.id, reason)
        error = ApiError(reason, status=500, code=ENGINE_ENDED)
        self._take(running, line.number, line.custom_id, error)
        self._clear(running, line.number)

    def _take(
        self, running: RunningBatch, number: int, custom_id: str, answer: Reply | ApiError, usage: Usage | None = None
    ) -> None:
        """Queue an answer for storing, or the error in its place."""
        id, form, failed = running.batch.id, form_of(running.batch.endpoint), isinstance(answer, ApiError)
        given = result_id(id, number), custom_id, f"{id}/{number}"
        result = form.refused(*given, answer) if isinstance(answer, ApiError) else form.answered(*given, answer)
        running.answers.append(
            AnsweredLine(batch=id, number=number, completed=not failed, text=encode(result), usage=usage or Usage())
        )
        self._unstored += 1
        self._answered.set()

    async def _ask(self, running: RunningBatch, line: Line) -> tuple[Reply | ApiError, Usage]:
        """Return the body and token counts of a line's answer, or its error. Retries while the server is full."""
        waits = pauses()
        while True:
            try:
                body, usage = await self._generate(running, line)
                counts = Usage(
                    prompt=usage.prompt_tokens, cached=usage.cached_tokens, completion=usage.completion_tokens
                )
                return body, counts
            except ApiError as error:
                if error.status not in (429, 503) or error.code == REPLICA_LOST:
                    return error, Usage()
            except Exception as error:
                return internal(error), Usage()
            if self._service.client.dead.is_set():  # `close` records the lines in flight.
                await asyncio.Event().wait()
            await asyncio.sleep(next(waits))

    async def _generate(self, running: RunningBatch, line: Line) -> tuple[Reply, RequestUsage]:
        batch, wanted = running.batch, line.wanted
        name, tenant = f"{batch.id}/{line.number}", batch.tenant
        if isinstance(wanted, ResponseRequest):
            writing = running.asked[line.number] = self._responses.write(wanted, tenant, self._lane, name, batch.id)
            return await writing.whole(), writing.answer.usage
        assert isinstance(wanted, ChatRequest | CompletionRequest)
        answer = running.asked[line.number] = self._service.answer(wanted, tenant, self._lane, name, batch.id)
        kind: type[Shape] = ChatShape if isinstance(wanted, ChatRequest) else TextShape
        if isinstance(wanted, MessagesChat):
            kind = MessageShape
        return await answer.whole(answer.shape(kind, wanted.request_id or "")), answer.usage

    async def _store_answers(self) -> None:
        """Store answers as they come, several at a time."""
        waits = pauses()
        while True:
            await self._answered.wait()
            await asyncio.sleep(COMMIT_SECONDS)
            self._answered.clear()
            try:
                for running in self._batches():
                    await self._store_some(running)
                waits = pauses()
            except ApiError:
                self._answered.set()
                await asyncio.sleep(next(waits))

    async def _store_some(self, running: RunningBatch) -> None:
        """Store the queued answers of a batch in one transaction. Raises ApiError and keeps them queued."""
        async with running.storing:
            answers = list(running.answers)
            if not answers:
                return
            id = running.batch.id
            batch, new = await self._store.run(lambda store: _table(store).answer(id, answers))
            del running.answers[: len(answers)]
            self._unstored -= len(answers)
            running.batch = batch
        for each in new:
            self._counted[each.completed].inc()
            self._charge(batch, each.usage)
            self.publish(batch, answered_line(each))
        self.publish(batch, updated(batch))
        self._wake.set()
        running.changed.set()


def log_failure(task: asyncio.Task[None]) -> None:
    """Log the unexpected error that ended a task, if there is one."""
    if not task.cancelled() and task.exception() is not None:
        log.error("running batches failed", exc_info=task.exception())


def result_id(batch: str, number: int) -> str:
    """Return the id of a line of an output file."""
    return f"batch_req_{batch.removeprefix('batch_')}_{number}"


def updated(batch: Batch) -> dict[str, Any]:
    """Return the event that reports a batch's new state."""
    return {"type": "batch.updated", "batch": batch.shown()}


def answered_line(answer: AnsweredLine) -> dict[str, Any]:
    """Return the event that reports an answered line."""
    return {"type": "batch.line", "batch_id": answer.batch, "number": answer.number, "line": Raw(answer.text)}


def _table(store: Store) -> BatchTable:
    return BatchTable(store.database)


def _answers(id: str, completed: bool, after: int, store: Store) -> list[tuple[int, bytes]]:
    return _table(store).answers(id, completed=completed, after=after, limit=ANSWERS_AT_ONCE)
