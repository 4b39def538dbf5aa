"""Time that a turn takes outside the model: HTTP, store, template, tokenizer, on a long stored conversation.

The real server on a loopback socket; in place of the engine a client that answers at once. What the server's own client
takes is counted as well.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import httpx
import uvloop

from holdfast.core.config import BUILTIN_MODEL
from holdfast.core.protocols import MemoryProfile
from holdfast.core.types import FinishReason, SamplingParams
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.client import Delta, EngineInfo, Timings, Usage
from holdfast.engine.text import Text
from holdfast.server.config import ServerConfig
from holdfast.server.run import listen, open_store, serve

SAID = "Tell me more about the sea, please, and about all the ships that you have seen on it."
ANSWER = "There is much to tell about it."


class Instant:
    """An engine that answers the same at once. `began` is when it was last asked."""

    def __init__(self, text: Text) -> None:
        memory = MemoryProfile("none", total=1, weights=1, activations=1, cache=1, block=1)
        self.text = text
        self.info = EngineInfo(
            model=BUILTIN_MODEL, device="none", dtype="none", cache_dtype="none", memory=memory, num_blocks=1 << 20,
            block_size=16, token_budget=512, max_model_len=1 << 20, max_sequences=256, max_waiting=256,
            vocab_size=1 << 20, started_in=0.0,
        )  # fmt: skip
        self.answer = tuple(text.encode(ANSWER))
        self.dead = asyncio.Event()
        self.reason = "the benchmark is over"
        self.began = 0.0

    async def stream(self, prompt: Sequence[int], params: SamplingParams, **_: Any) -> AsyncGenerator[Delta, None]:
        """One delta with the whole answer."""
        self.began = now = time.perf_counter()
        usage = Usage(len(prompt), len(self.answer), 0)
        timings = Timings(now, now, now, now, len(self.answer))
        yield Delta(ANSWER, self.answer, FinishReason.LENGTH, usage, timings)

    async def close(self) -> None:
        """Nothing to end."""
        self.dead.set()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000, help="length of the conversation")
    parser.add_argument("--repeats", type=int, default=10, help="what the user says in a turn, in sentences")
    parser.add_argument("--turns", type=int, default=100, help="turns that are measured")
    parser.add_argument("--directory", type=Path, help="where the store's file is; default: a temporary directory")
    options = parser.parse_args()
    client = Instant(Text.from_directory(Checkpoint.find(BUILTIN_MODEL).directory))
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        config = ServerConfig(port=0, store=f"{directory}/store.sqlite")
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        running: Any = serve(
            client,  # type: ignore[arg-type]
            config, open_store(config), listen(config), on_ready=lambda _, url: ready.set_result(url),
        )  # fmt: skip
        server = asyncio.create_task(running)
        async with httpx.AsyncClient(base_url=await ready) as http:
            await measure(http, client, options)
        await client.close()
        await server


async def measure(http: httpx.AsyncClient, client: Instant, options: argparse.Namespace) -> None:
    """Grow a conversation, then time turns that say one sentence."""
    previous, length, grown = None, 0, 0
    before: list[float] = []
    whole: list[float] = []
    while len(whole) < options.turns:
        measured = length >= options.tokens
        grown += not measured
        said = SAID if measured else " ".join([SAID] * options.repeats)
        body = {"model": BUILTIN_MODEL, "input": said, "previous_response_id": previous}
        began = time.perf_counter()
        response = await http.post("/v1/responses", json=body)
        ended = time.perf_counter()
        reply = response.raise_for_status().json()
        previous, length = reply["id"], reply["usage"]["input_tokens"]
        if measured:
            before.append((client.began - began) * 1e3)
            whole.append((ended - began) * 1e3)
    print(f"{grown} turns of {options.tokens:,} tokens, then {options.turns} turns of {len(SAID)} characters; medians:")
    print(f"request to engine    {statistics.median(before):6.2f} ms")
    print(f"request to response  {statistics.median(whole):6.2f} ms, its turn stored")


if __name__ == "__main__":
    uvloop.run(main())
