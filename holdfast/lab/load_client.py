"""The load client: sends a workload to any server with OpenAI's completions API and times each stream."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx

from holdfast.lab.metrics import Record
from holdfast.lab.workloads import Conversation, PromptTokens, Workload

Ask = Callable[[tuple[int, ...], int, Record], Awaitable[None]]
"""Function that sends a prompt, times the answer of this many tokens, and writes it or the failure into the record."""


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
            await asyncio.gather(*(self._converse(number, each, wait=True) for number, each in numbered))
        else:
            await asyncio.gather(*(self._worker(numbered) for _ in range(concurrency)))
        return self.records

    async def _worker(self, conversations: Iterator[tuple[int, Conversation]]) -> None:
        for number, conversation in conversations:
            await self._converse(number, conversation, wait=False)

    async def _converse(self, number: int, conversation: Conversation, *, wait: bool) -> None:
        """Send the turns of one conversation until one fails."""
        if wait:
            await asyncio.sleep(max(0.0, self._began + conversation.arrival - time.monotonic()))
        history: tuple[int, ...] = ()
        for index, turn in enumerate(conversation.turns):
            if index:
                await asyncio.sleep(turn.think)
            prompt = history + self._tokens.prompt(number, index, turn)
            record = Record(time.monotonic(), len(prompt))
            self.records.append(record)
            await self._ask(prompt, turn.output, record)
            self._ended += 1
            self._on_progress(self._ended)
            if record.error:
                return
            history = prompt + self._tokens.answer(number, index, turn)


async def ask_server(http: httpx.AsyncClient, model: str, prompt: tuple[int, ...], output: int, record: Record) -> None:
    """Send a request to a server with OpenAI's completions API. The base URL of `http` ends with /v1/."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with http.stream("POST", "completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                record.error = f"status {response.status_code}: {(await response.aread()).decode()[:200]}"
                return
            async for line in response.aiter_lines():
                if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                    _read_chunk(json.loads(data), record)
    except (httpx.HTTPError, ValueError) as error:
        record.error = f"{type(error).__name__}: {error}"


def _read_chunk(chunk: dict[str, Any], record: Record) -> None:
    """Write one chunk of a stream into its record."""
    if "error" in chunk:
        record.error = str(chunk["error"])[:200]
        return
    if chunk.get("choices"):
        record.token_times.append(time.monotonic())
    usage = chunk.get("usage")
    if usage:
        record.output_tokens = int(usage["completion_tokens"])
        record.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
