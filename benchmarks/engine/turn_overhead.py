"""Time that a turn takes outside the model: HTTP, store, template, tokenizer, planning, on a long stored conversation.

The real server listens on a loopback socket; a bare connection asks, so no client work is counted. The engine process
is replaced by the same steps in this process: the request is built and checked, encoded and decoded as a message, and
planned by a scheduler over a pool in which the conversation stays resident; every token is ready at once. The hop
between the two processes and the model are left out.

Three parts: until the engine gets the request; until its last token, which is the planning of all steps; until the
response is back and the turn stored. Prints wall time, and processor time of the whole process.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import uvloop

from holdfast.core.config import BUILTIN_MODEL
from holdfast.core.types import FinishReason, Identity, Request, SamplingParams
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.client.stream import Delta, Timings, Usage
from holdfast.engine.client.text import Text
from holdfast.engine.messages import EngineInfo, Submit, decode_to_engine, encode
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.scheduler.paged import PagedKind
from holdfast.lm.scheduler.policies import StallFree
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import MemoryMeasurement, StepPlan, StepResult
from holdfast.server.address import listen
from holdfast.server.config import ServerConfig
from holdfast.server.run import open_store, serve

SAID = "Tell me more about the sea, please, and about all the ships that you have seen on it."
ANSWER = "There is much to tell about it."


class Instant:
    """An engine whose model takes no time: it plans like the real one and always gives the same answer.

    `asked` is the time at which the last turn's request came, and `answered` the time at which its answer was complete.
    """

    def __init__(self, text: Text) -> None:
        memory = MemoryMeasurement("none", total=1, weights=1, activations=1, cache=1, block=1)
        self.text = text
        self.info = EngineInfo(
            model=BUILTIN_MODEL, precision="none", memory=memory,
            num_blocks=1 << 14, block_size=16, token_budget=2048, max_model_len=1 << 18, max_sequences=256,
            max_waiting=256, vocab_size=1 << 17,
            started_in=0.0,
        )  # fmt: skip
        info = self.info
        self.scheduler = Scheduler(
            StallFree(info.token_budget), PagedKind(BlockPool(info.num_blocks, info.block_size)),
            max_sequences=info.max_sequences, max_model_len=info.max_model_len, vocab_size=info.vocab_size,
            sharing=True,
        )  # fmt: skip
        self.answer = tuple(text.encode(ANSWER))
        self.dead = asyncio.Event()
        self.reason = "the benchmark is over"
        self.asked = self.answered = 0.0
        self.cached = 0

    async def stream(
        self, prompt: Sequence[int], params: SamplingParams, *, tenant: str = "", **_: Any
    ) -> AsyncGenerator[Delta, None]:
        """One delta with the whole answer, once every step for it is planned."""
        self.asked = time.perf_counter()
        now = time.monotonic()
        limited = SamplingParams(temperature=0.0, max_tokens=len(self.answer), ignore_eos=True)
        request = Request(
            f"{now}", self.info.limits.check(prompt, limited), limited, identity=Identity(tenant=tenant), arrival=now
        )
        submit = decode_to_engine(encode(Submit(request)))
        assert isinstance(submit, Submit)
        scheduler, answer = self.scheduler, iter(self.answer)
        scheduler.add(submit.request)
        while scheduler.has_work():
            plan = scheduler.schedule(now)
            assert isinstance(plan, StepPlan)
            sampled = tuple(next(answer) for _ in range(plan.num_sampled))
            for output in scheduler.update(plan, StepResult(plan.step, sampled, 0.0), now):
                self.cached = output.cached_tokens
        self.answered = time.perf_counter()
        usage = Usage(len(prompt), len(self.answer), self.cached)
        timings = Timings(now, now, now, now, len(self.answer))
        yield Delta(ANSWER, self.answer, FinishReason.LENGTH, usage, timings)

    async def close(self) -> None:
        """Nothing to end."""
        self.dead.set()


class Connection:
    """A bare HTTP/1.1 connection that is kept open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, url: str) -> "Connection":
        """Connect to a server by its URL."""
        host, _, port = url.partition("//")[2].rstrip("/").partition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def post(self, path: str, body: dict[str, Any]) -> bytes:
        """The body of the answer. Raises RuntimeError for any status but 200."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self._writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        status, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines if line)
        answer = await self._reader.readexactly(int(headers["content-length"]))
        if " 200 " not in status:
            raise RuntimeError(f"{status}: {answer!r}")
        return answer

    async def close(self) -> None:
        """Close it."""
        self._writer.close()
        await self._writer.wait_closed()


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
        connection = await Connection.to(await ready)
        await measure(connection, client, options)
        await connection.close()
        await client.close()
        await server


async def measure(connection: Connection, client: Instant, options: argparse.Namespace) -> None:
    """Grow a conversation, then time turns that say one sentence."""
    previous, length, grown = None, 0, 0
    rows: list[tuple[float, ...]] = []
    while len(rows) < options.turns:
        measured = length >= options.tokens
        grown += not measured
        said = SAID if measured else " ".join([SAID] * options.repeats)
        body = {"model": BUILTIN_MODEL, "input": said, "previous_response_id": previous}
        worked, began = time.process_time(), time.perf_counter()
        answer = await connection.post("/v1/responses", body)
        ended, worked = time.perf_counter(), time.process_time() - worked
        reply = json.loads(answer)
        previous, length = reply["id"], reply["usage"]["input_tokens"]
        if measured:
            parts = (client.asked - began, client.answered - client.asked, ended - client.answered)
            rows.append((*parts, ended - began, worked))
            assert client.cached > length - len(SAID) - 2 * client.info.block_size, "the conversation is resident"
    print(f"{grown} turns of {options.tokens:,} tokens, then {options.turns} turns of {len(SAID)} characters; in ms:")
    print(f"{'':32}{'median':>8}{'best':>8}{'p90':>8}")
    names = (
        "request to engine",
        "message and planning",
        "last token to response, stored",
        "all three",
        "processor time",
    )
    for name, times in zip(names, zip(*rows, strict=True), strict=True):
        p90 = statistics.quantiles(times, n=10)[8]
        print(f"{name:32}{1e3 * statistics.median(times):8.2f}{1e3 * min(times):8.2f}{1e3 * p90:8.2f}")


if __name__ == "__main__":
    uvloop.run(main())
