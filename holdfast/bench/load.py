"""The load client: a workload against any server with OpenAI's completions API, each stream timed as it arrives."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from holdfast.bench.records import Record
from holdfast.bench.workloads import Conversation, Words, Workload


class LoadClient:
    """Sends a workload and records what came back. Prompts are token ids, which such servers take as they are.

    The ids of generated tokens are unknown to a client, so the next turn of a conversation carries as many tokens of
    its own in their place: of its history only the client's part can come from a prefix cache.
    """

    def __init__(
        self, http: httpx.AsyncClient, model: str, *, vocab_size: int, on_progress: Callable[[int], None]
    ) -> None:
        """`http` has the server's base URL, which ends with /v1; `on_progress` is told how many requests ended."""
        self.records: list[Record] = []
        self._http = http
        self._model = model
        self._words = Words(vocab_size)
        self._on_progress = on_progress
        self._ended = 0
        self._began = 0.0

    async def run(self, workload: Workload, concurrency: int | None = None) -> list[Record]:
        """Send it all: at its arrivals, or so many conversations at once (closed loop). Failures are in the records."""
        self._began = time.perf_counter()
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
        """All turns of one conversation; it ends with the first that fails."""
        if wait:
            await asyncio.sleep(max(0.0, self._began + conversation.arrival - time.perf_counter()))
        history: tuple[int, ...] = ()
        for index, turn in enumerate(conversation.turns):
            if index:
                await asyncio.sleep(turn.think)
            prompt = history + self._words.prompt(number, index, turn)
            record = Record(time.perf_counter(), len(prompt))
            self.records.append(record)
            await self._ask(prompt, turn.output, record)
            self._ended += 1
            self._on_progress(self._ended)
            if record.error:
                return
            history = prompt + self._words.answer(number, index, turn)

    async def _ask(self, prompt: tuple[int, ...], output: int, record: Record) -> None:
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with self._http.stream("POST", "completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    record.error = f"status {response.status_code}: {(await response.aread()).decode()[:200]}"
                    return
                async for line in response.aiter_lines():
                    if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                        self._take(json.loads(data), record)
        except (httpx.HTTPError, ValueError) as error:
            record.error = f"{type(error).__name__}: {error}"

    def _take(self, chunk: dict[str, Any], record: Record) -> None:
        if "error" in chunk:
            record.error = str(chunk["error"])[:200]
            return
        if chunk.get("choices"):
            record.token_times.append(time.perf_counter())
        usage = chunk.get("usage")
        if usage:
            record.output_tokens = int(usage["completion_tokens"])
            record.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
