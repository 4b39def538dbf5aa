"""The batching mode of `holdfast chat`: batches run in the background, and are printed when they are complete."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx
import msgspec

from holdfast.cli.batch_input import parse_batch
from holdfast.cli.talkers import (
    TENANT,
    ChatError,
    Settings,
    answer_of,
    connection,
    fetched,
    reason_of,
    server_events,
)
from holdfast.server.jobs.batches import WINDOW, Batches, BatchRequest
from holdfast.server.protocol import ApiError

ENDPOINT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
SOURCE = {"source": "holdfast chat"}
"""Metadata of the batches that this module makes."""
AGAIN_SECONDS = 1.0
"""Seconds before the event stream is opened again after it broke."""

Event = dict[str, Any]


class BatchPlace(Protocol):
    """Where batches run: in our own engine, or at a server. Every method raises ChatError."""

    resumes: bool
    """Whether all batches belong to this user, so that batches of earlier sessions are printed, too."""
    longest: int
    """Maximum number of tokens of an answer: the context length minus one token of a prompt."""

    async def submit(self, lines: bytes) -> str:
        """Submit the lines of a batch. Returns its id before any line runs."""
        ...

    def events(self) -> AsyncGenerator[Event, None]:
        """Yield `batch.listening`, the state of each open batch, and then all events of all batches."""
        ...

    async def batch(self, id: str) -> dict[str, Any]:
        """Return a batch as the API shows it."""
        ...

    async def lines(self, file: str) -> list[dict[str, Any]]:
        """Return the decoded lines of a file."""
        ...


class LocalPlace:
    """Batches in our own engine."""

    resumes = True

    def __init__(self, batches: Batches, longest: int) -> None:
        self.batches, self.longest = batches, longest

    async def submit(self, lines: bytes) -> str:
        try:
            file = await self.batches.files.copy(TENANT, "batch", "chat.jsonl", io.BytesIO(lines))
            wanted = BatchRequest(input_file_id=file.id, endpoint=ENDPOINT, completion_window=WINDOW, metadata=SOURCE)
            return (await self.batches.create(wanted, TENANT)).id
        except ApiError as error:
            raise ChatError(error.message) from None
        except OSError as error:
            raise ChatError(f"the batch cannot be kept: {error.strerror}") from None

    async def events(self) -> AsyncGenerator[Event, None]:
        async with aclosing(self.batches.events(TENANT)) as events:
            async for data in events:
                for line in data.splitlines():
                    if line.startswith(b"data:"):
                        yield msgspec.json.decode(line[5:])

    async def batch(self, id: str) -> dict[str, Any]:
        try:
            return (await self.batches.retrieve(TENANT, id)).shown()
        except ApiError as error:
            raise ChatError(error.message) from None

    async def lines(self, file: str) -> list[dict[str, Any]]:
        try:
            _, opened = await self.batches.files.open(TENANT, file)
        except ApiError as error:
            raise ChatError(error.message) from None
        with opened:
            return await self.batches.files.on_disk(lambda: [msgspec.json.decode(line) for line in opened])


class RemotePlace:
    """Batches at a Holdfast server."""

    resumes = False

    def __init__(self, http: httpx.AsyncClient, longest: int) -> None:
        self.http, self.longest = http, longest

    async def submit(self, lines: bytes) -> str:
        with connection(self.http):
            form = {"files": {"file": ("chat.jsonl", lines)}, "data": {"purpose": "batch"}}
            file = answer_of(await self.http.post("files", **form))  # type: ignore[arg-type]
            wanted = {
                "input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": WINDOW, "metadata": SOURCE
            }  # fmt: skip
            return str(answer_of(await self.http.post("batches", json=wanted))["id"])

    async def events(self) -> AsyncGenerator[Event, None]:
        async with aclosing(server_events(self.http, "batches/events", None)) as events:
            async for event in events:
                yield event

    async def batch(self, id: str) -> dict[str, Any]:
        return await fetched(self.http, f"batches/{id}")

    async def lines(self, file: str) -> list[dict[str, Any]]:
        try:
            with connection(self.http):
                response = await self.http.get(f"files/{file}/content")
            if response.status_code != 200:
                raise ChatError(reason_of(response.status_code, response.content))
            return [msgspec.json.decode(line) for line in response.content.splitlines() if line]
        except msgspec.MsgspecError:
            raise ChatError("the server sent a file that is not OpenAI's") from None


@dataclass
class TrackedBatch:
    """A batch and what is known of its answers here."""

    prompts: Sequence[str]
    answers: dict[str, str] = field(default_factory=dict)
    """Answers so far, by custom_id, which is the number of the prompt, from 1."""
    status: str = "validating"
    note: str = ""
    """Reason why the batch failed; empty if it did not fail."""
    whole: bool = False
    """Whether the batch has ended and all its answers are here."""


class Batching:
    """The batches of a conversation. While `shown`, each is printed when it ends; otherwise it waits until `show`."""

    def __init__(self, place: BatchPlace, settings: Settings, show: Callable[[str], None]) -> None:
        """`show` prints the text of a complete batch."""
        self.place = place
        self.settings = settings
        self.shown = False
        self.batches: dict[str, TrackedBatch] = {}
        self._show = show
        self._changed = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def submit(self, line: str, begin: int, model: str, system: str | None) -> str:
        """Submit the batch in `line` from index `begin`. Returns its id at once. Raises InputError, ChatError."""
        asked = parse_batch(line, self.place.longest, begin)
        self._listen()
        first = [{"role": "system", "content": system}] if system else []
        lines = []
        for number, each in enumerate(asked, 1):
            body = {
                "model": model,
                "messages": [*first, {"role": "user", "content": each.prompt}],
                "temperature": self.settings.temperature,
                "max_tokens": each.length,
            }
            lines.append({"custom_id": str(number), "method": "POST", "url": ENDPOINT, "body": body})
        id = await self.place.submit(b"".join(msgspec.json.encode(each) + b"\n" for each in lines))
        self.batches.setdefault(id, TrackedBatch([])).prompts = [each.prompt for each in asked]
        await self._refresh(id)  # The batch may have ended before its id was known here.
        return id

    def show(self) -> None:
        """Print the batches that have ended, and from now on each batch when it ends."""
        self._listen()
        self.shown = True
        self._print()

    def hide(self) -> None:
        """Hold back the batches that end from now on."""
        self.shown = False

    @property
    def unfinished(self) -> dict[str, TrackedBatch]:
        """Batches that are not complete."""
        return {id: each for id, each in self.batches.items() if not each.whole}

    async def finished(self) -> None:
        """Wait until every batch is complete."""
        while self.unfinished:
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        """Stop following events."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    def _listen(self) -> None:
        """Start following the events of all batches in the background."""
        if self._following is None:
            self._following = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        while True:
            with suppress(ChatError, ApiError, LookupError, TypeError):
                async with aclosing(self.place.events()) as events:
                    async for event in events:
                        await self._take(event)
            await asyncio.sleep(AGAIN_SECONDS)

    async def _take(self, event: Event) -> None:
        match event:
            case {"type": "batch.listening"}:  # Earlier events were missed.
                for id in list(self.unfinished):
                    await self._refresh(id)
            case {"type": "batch.line", "batch_id": str(id), "line": dict(line)} if id in self.batches:
                self.batches[id].answers[str(line["custom_id"])] = text_of(line)
            case {"type": "batch.updated", "batch": dict(batch)}:
                own = self.place.resumes and (batch.get("metadata") or {}) == SOURCE
                if own and batch["id"] not in self.batches:
                    lines = await self.place.lines(batch["input_file_id"])
                    prompts = [line["body"]["messages"][-1]["content"] for line in lines]
                    self.batches.setdefault(batch["id"], TrackedBatch(prompts))
                if batch["id"] in self.batches:
                    await self._update(batch)

    async def _refresh(self, id: str) -> None:
        """Get a batch's state, in case the event of its end was missed."""
        with suppress(ChatError):
            await self._update(await self.place.batch(id))

    async def _update(self, batch: dict[str, Any]) -> None:
        tracked = self.batches[batch["id"]]
        if tracked.whole:
            return
        tracked.status = batch["status"]
        if batch["status"] not in ENDED:
            return
        if len(tracked.answers) < len(tracked.prompts):
            for file in (batch["output_file_id"], batch["error_file_id"]):
                for line in [] if file is None else await self.place.lines(file):
                    tracked.answers[str(line["custom_id"])] = text_of(line)
        faults = (batch.get("errors") or {}).get("data") or []
        tracked.note = "; ".join(f"prompt {fault['line']}: {fault['message']}" for fault in faults)
        tracked.whole = True
        self._changed.set()
        if self.shown:
            self._print()

    def _print(self) -> None:
        for id in [id for id, each in self.batches.items() if each.whole]:
            self._show(in_words(id, self.batches.pop(id)))


def in_words(id: str, batch: TrackedBatch) -> str:
    """Return the text of an ended batch, with its prompts and answers."""
    answered = f"{len(batch.answers)} of {len(batch.prompts)} answered"
    parts = [f"{id}  ·  {batch.status}  ·  {answered}" + (f"  ·  {batch.note}" if batch.note else "")]
    for number, prompt in enumerate(batch.prompts, 1):
        answer = batch.answers.get(str(number))
        parts.append(f"[{number}] {prompt}\n" + ("(no answer)" if answer is None else answer))
    return "\n".join(parts)


def text_of(line: dict[str, Any]) -> str:
    """Return the text of an answered line, or the reason why there is none. Raises ChatError."""
    try:
        if line["error"] is not None:
            return f"({line['error']['message']})"
        body = line["response"]["body"]
        if line["response"]["status_code"] != 200:
            return f"({body['error']['message']})"
        return str(body["choices"][0]["message"]["content"])
    except (LookupError, TypeError):
        raise ChatError("the server sent an answer that is not OpenAI's") from None
