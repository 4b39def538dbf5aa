"""The load client: sends a workload to any server with OpenAI's completions API and times each stream."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx

from holdfast.core.contract import TERMS, Contract
from holdfast.lab.http_stream import arrived_of
from holdfast.lab.metrics import Record
from holdfast.lab.workloads import Conversation, History, PromptTokens, Turn, Workload


class Said(NamedTuple):
    """The words of a client about pauses, with a request."""

    kind: str = ""
    """Kind of the pause after the answer; empty: unknown."""
    expected_pause: float | None = None
    """Seconds that the pause after the answer is expected to last; None: unknown."""
    superseded: tuple[str, ...] = ()
    """Ids of earlier answers that this one replaces."""


NOTHING_SAID = Said()

Ask = Callable[[tuple[int, ...], int, Record, Said], Awaitable[str]]
"""Function that sends a prompt, asks for the record's contract, and times the answer of this many tokens.

It writes the answer, its failure or its refusal into the record. Returns the answer's id; empty if there is none."""
NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
MOST_SUPERSEDED = 16
"""Number of answers that a request may replace."""
REFUSED = "contract_refused"
"""Code of the error with which a server refuses a contract."""


class LoadClient:
    """Sends a workload and records the answers. Prompts are token ids.

    A client does not know the ids of generated tokens, so the next turn of a conversation carries other tokens in their
    place. A prefix cache can therefore find only the previous prompt, not the previous answer.
    """

    def __init__(self, ask: Ask, tokens: PromptTokens, on_progress: Callable[[int], None]) -> None:
        """`tokens` makes the prompts. `on_progress` receives the number of requests that have ended."""
        self.records: list[Record] = []
        self._ask = ask
        self._tokens = tokens
        self._on_progress = on_progress
        self._ended = 0
        self._began = 0.0

    async def run(self, workload: Workload, concurrency: int | None = None) -> list[Record]:
        """Send at the arrival times, or keep `concurrency` conversations open. Failures are in the records."""
        gc.collect()
        gc.freeze()  # a full collection would delay all streams
        self._began = time.monotonic()
        numbered = iter(enumerate(workload))
        if concurrency is None:
            await asyncio.gather(*(self._converse(str(number), each, wait=True) for number, each in numbered))
        else:
            await asyncio.gather(*(self._worker(numbered) for _ in range(concurrency)))
        return self.records

    async def _worker(self, conversations: Iterator[tuple[int, Conversation]]) -> None:
        for number, conversation in conversations:
            await self._converse(str(number), conversation, wait=False)

    async def _converse(self, name: str, conversation: Conversation, *, wait: bool) -> None:
        """Run one conversation, and wait for all of its forks."""
        if wait:
            await asyncio.sleep(max(0.0, self._began + conversation.arrival - time.monotonic()))
        left = list[asyncio.Task[None]]()
        await self._turns(name, conversation.turns, History(), left)
        while left:  # a fork may leave others
            await left.pop()

    async def _turns(self, name: str, turns: Sequence[Turn], history: History, left: list[asyncio.Task[None]]) -> None:
        """Send turns until one fails or is refused. Forks that no turn waits for are added to `left`."""
        answers = list[str]()  # ids of those that are part of the history
        for index, turn in enumerate(turns):
            if index:
                await asyncio.sleep(turn.think)
            prompt = history.ask(turn, self._tokens.prompt(name, index, turn))
            record = Record(time.monotonic(), len(prompt), contract=turn.contract)
            self.records.append(record)
            replaced = [answers.pop() for _ in range(turn.replaces)]
            said = Said(turn.pause, turn.expected_pause, tuple(filter(None, replaced)))
            answers.append(await self._ask(prompt, turn.output, record, said))
            self._ended += 1
            self._on_progress(self._ended)
            if record.error or record.refused:
                return
            history.answer(self._tokens.answer(name, index, turn))
            joined = list[asyncio.Task[None]]()
            for number, fork in enumerate(turn.forks):
                begun = self._fork(f"{name}.{index}.{number}", fork, history.tokens if fork.inherits else (), left)
                (joined if fork.joins else left).append(asyncio.create_task(begun))
            await asyncio.gather(*joined)

    async def _fork(
        self, name: str, fork: Conversation, history: tuple[int, ...], left: list[asyncio.Task[None]]
    ) -> None:
        """Run a fork that begins with this history."""
        await asyncio.sleep(fork.arrival)
        await self._turns(name, fork.turns, History(history), left)


async def ask_server(
    http: httpx.AsyncClient,
    model: str,
    prompt: tuple[int, ...],
    output: int,
    record: Record,
    said: Said = NOTHING_SAID,
    *,
    tells: bool = True,
    tells_pauses: bool = True,
    more: Mapping[str, Any] = NO_FIELDS,
) -> str:
    """Send a request to a server with OpenAI's completions API. The base URL of `http` ends with /v1/.

    With `tells`, the request asks for the record's contract, and with `tells_pauses` it says what `said` does. `more`
    has fields of the body that replace the usual ones. Returns the answer's id; empty if it failed.
    """
    id = ""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **(contract_fields(record.contract) if tells else {}),
        **(pause_fields(said) if tells_pauses else {}),
        **more,
    }
    try:
        async with http.stream("POST", "completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                _read_failure(response.status_code, await response.aread(), record)
                return id
            arrived = arrived_of(response)
            async for line in response.aiter_lines():
                if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                    id = _read_chunk(json.loads(data), record, arrived()) or id
    except (httpx.HTTPError, ValueError) as error:
        record.error = f"{type(error).__name__}: {error}"
    return id


def pause_fields(said: Said) -> dict[str, Any]:
    """The fields of a body that say what is known of pauses; empty if nothing is."""
    expected = {} if said.expected_pause is None else {"expected_pause_ms": said.expected_pause * 1e3}
    return expected | ({"superseded": [*said.superseded[:MOST_SUPERSEDED]]} if said.superseded else {})


def contract_fields(contract: Contract) -> dict[str, float]:
    """The fields of a body that ask for a contract, in milliseconds; empty without one."""
    asked = {f"{term}_ms": getattr(contract, term) for term in TERMS}
    return {name: seconds * 1e3 for name, seconds in asked.items() if seconds is not None}


def _read_failure(status: int, body: bytes, record: Record) -> None:
    """Write an answer that is not OK into its record: the refusal of a contract, or a failure."""
    text = body.decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        code, message = error["code"], str(error["message"])
    except (ValueError, LookupError, TypeError):
        code, message = None, ""
    if status == httpx.codes.TOO_MANY_REQUESTS and code == REFUSED:
        record.refused = message[:200] or REFUSED
    else:
        record.error = f"status {status}: {text[:200]}"


def _read_chunk(chunk: dict[str, Any], record: Record, arrived: float) -> str:
    """Write one chunk of a stream, which came at this time, into its record.

    Returns the answer's id; empty if the chunk does not say it.
    """
    if "error" in chunk:
        record.error = str(chunk["error"])[:200]
        return ""
    if chunk.get("choices"):
        record.token_times.append(arrived)
    usage = chunk.get("usage")
    if usage:
        record.output_tokens = int(usage["completion_tokens"])
        record.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    return str(chunk.get("id") or "")
